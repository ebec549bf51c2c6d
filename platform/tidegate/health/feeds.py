"""Each source in a thread of its own, under a deadline: one that hangs or dies is a finding, and the others go on."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from tidegate.clock import Clock
from tidegate.health.readings import DEADLINE_MISSED, Reading, Round, Signal, Source, Status
from tidegate.ids import NodeId

logger = logging.getLogger(__name__)

DIED = "SOURCE_DIED"
"""The cause when a source failed by a fault of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A source, and how it is asked."""

    name: str
    source: Source
    answers: Signal
    """What is said of it as a whole; the subject is the node."""
    period_s: float
    deadline_s: float
    waited_for: bool = False
    """Asked at each of the agent's looks, which is not over before this one's; of the others it takes what is there."""
    lasting: bool = False
    """Each call waits for something to happen; that it is on its way says nothing against it."""
    lag_s: float = 5.0
    """An event that another source has told within so long is the same one."""


class FeedRunner:
    """Asks one source, one call at a time. A call that hangs keeps its thread, and no second is started."""

    def __init__(self, feed: Feed, *, node: NodeId, clock: Clock) -> None:
        self.feed = feed
        self._node, self._clock = node, clock
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._answer: Future[Round] | None = None
        self._asked_s = -math.inf
        self._misses = 0
        self.error: str | None = None
        """Why it has nothing to say, as of now."""
        self.failed: str | None = None
        """The same, if the source is late or has died: which is a finding on the source, not on what it looks at."""

    @property
    def answer(self) -> Future[Round] | None:
        """The call that is on its way."""
        return self._answer

    def start(self) -> bool:
        """Ask if it is due and not being asked; whether it was."""
        now_s = time.monotonic()
        # The slack is so that a feed of the agent's own period is due at each of its looks.
        rests = not self.feed.waited_for and now_s - self._asked_s < 0.9 * self.feed.period_s
        if self._answer is not None or rests:
            return False
        if self._thread is None:
            # Not an executor: those are joined when the process ends, and a call into a dead driver never comes back.
            self._thread = threading.Thread(target=self._serve, name=f"health-{self.feed.name}", daemon=True)
            self._thread.start()
        answer: Future[Round] = Future()
        self._answer, self._asked_s, self._misses = answer, now_s, 0

        def ask() -> None:
            try:
                seen = self.feed.source.read()
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(seen)

        self._questions.put(ask)
        return True

    def take(self) -> Round | None:
        """What it said, if it has answered; what there is to say of it if it is late or dead; else None."""
        if self._answer is None:
            return None
        if self._answer.done():
            answer, self._answer = self._answer, None
            error = answer.exception()
            if error is not None:
                return self._dead(error)
            seen = answer.result()
            self.error, self.failed = seen.error, None
            return seen
        return self._late()

    def close(self) -> None:
        """Let the thread end, once it comes back."""
        self._questions.put(None)
        self._thread = None

    def _serve(self) -> None:
        while (ask := self._questions.get()) is not None:
            ask()

    def _late(self) -> Round | None:
        waited_s = time.monotonic() - self._asked_s
        misses = math.floor(waited_s / self.feed.deadline_s)
        if misses == self._misses:
            return None
        self._misses = misses
        self.failed = f"{self.feed.name} has missed its deadline of {self.feed.deadline_s:g} s"
        self.error = f"{self.feed.name}: no answer for {waited_s:.0f} s"
        return Round(readings=(self._silent(Status.TIMEOUT, DEADLINE_MISSED),), error=self.error)

    def _dead(self, error: BaseException) -> Round:
        text = f"{self.feed.name}: {type(error).__name__}: {error}"
        if text != self.error:
            logger.error("health: source %s", text, exc_info=error)
        self.error = self.failed = text
        return Round(readings=(self._silent(Status.STALE, DIED, text),), error=text)

    def _silent(self, status: Status, cause: str, detail: str | None = None) -> Reading:
        return Reading(
            at_s=self._clock.now_s(),
            node=self._node,
            subject=self._node,
            signal=self.feed.answers,
            value=None,
            status=status,
            cause=cause,
            detail=detail,
        )


async def all_answered(answers: Iterable[Future[Round]], timeout_s: float) -> None:
    """Return when all are done, or the time is over. The loop is woken once, and not by each of them: at one look a
    second, waking up is most of what an agent costs."""
    left = [answer for answer in answers if not answer.done()]
    if not left:
        return
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def finish() -> None:
        if not over.done():
            over.set_result(None)

    def one_done(_: Future[Round]) -> None:
        left.pop()
        if not left:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:
                return  # the agent has ended while the source was away

    for answer in tuple(left):
        answer.add_done_callback(one_done)
    await asyncio.wait((over,), timeout=timeout_s)
