"""Between two beats, an agent hears at once that there is something new for it to do."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

TAKEN_IN_S = 5.0


class Bell:
    """A thread that waits at the coordinator; `ear` is readable once it has rung.

    It is no source of truth: what is to be done stands in the reply to the next beat, which is then sent at once, and
    without a bell in a heartbeat.
    """

    def __init__(self, wait_for_news: Callable[[], bool], rest_s: float) -> None:
        """`wait_for_news`: blocks; whether there are any. It may raise. `rest_s`: before it is asked again then."""
        self._wait_for_news, self._rest_s = wait_for_news, rest_s
        self.ear, self._hand = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        """Of the pipe's ends: closed ones may be somebody else's by now."""
        self._taken_in, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="bell", daemon=True).start()

    def taken_in(self) -> None:
        """A beat has been answered: silent again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.ear, 4096)
        self._taken_in.set()

    def close(self) -> None:
        with self._lock:
            self._over.set()
            os.close(self.ear)
            os.close(self._hand)
        self._taken_in.set()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                news = self._wait_for_news()
            except Exception as error:
                # It is away, or of an older kind; beats say what that means.
                log.debug("no bell: %s", error)
                self._over.wait(self._rest_s)
                continue
            if news:
                self._ring()

    def _ring(self) -> None:
        self._taken_in.clear()
        with self._lock:
            if self._over.is_set():
                return
            with contextlib.suppress(BlockingIOError):
                os.write(self._hand, b"!")
        self._taken_in.wait(TAKEN_IN_S)
