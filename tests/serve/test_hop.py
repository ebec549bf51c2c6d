"""A gateway's lines to replicas: real sockets, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tidegate.ids import PoolName, RequestId
from tidegate.serve.backends import PoolSeen
from tidegate.serve.hop.client import Lines
from tidegate.serve.hop.frames import FRAME_MAX_BYTES, Frame, FrameError, Frames, Kind, from_made, to_made
from tidegate.serve.hop.server import HopServer
from tidegate.serve.replica_registry import ReplicaAddress
from tidegate.serve.work import (
    EngineFailedError,
    ImageJob,
    Made,
    Partial,
    PoolBusyError,
    PoolLostError,
    Size,
    UnfitError,
)
from waiting import others_first, until

POOL = PoolName("pool-a")
SLOTS = 2
JOB = ImageJob(
    request=RequestId("r"),
    model="m",
    prompt='a "three", fünf',
    images=2,
    size=Size(8, 8),
    seed=7,
    seed_asked=True,
    steps=None,
    local_only=False,
)


@dataclass
class Worker:
    """Makes a picture when it is let; what the prompt says goes wrong."""

    let: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: list[ImageJob] = field(default_factory=list)
    cancelled: int = 0
    png: bytes = b"one"

    async def make(self, job: ImageJob) -> Made:
        self.jobs.append(job)
        if job.prompt == "unfit":
            raise UnfitError("size", "too large")
        if job.prompt == "fails":
            raise RuntimeError("out of paint")
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Made(pngs=(self.png, b"", b"three"), seed=job.seed, compute_s=0.5)

    async def make_shown(self, job: ImageJob) -> AsyncGenerator[Partial | Made, None]:
        for index in range(3):
            yield Partial(image=1, index=index, png=b"part", steps_done=index, steps=3)
        yield await self.make(job)


@dataclass
class Replica:
    worker: Worker
    server: HopServer
    address: ReplicaAddress


async def replica(name: str = "a") -> Replica:
    worker = Worker()
    server = HopServer(worker, SLOTS)
    address = ReplicaAddress.of(name, "127.0.0.1", SLOTS, await server.open("127.0.0.1"))
    assert address is not None
    return Replica(worker, server, address)


@asynccontextmanager
async def gateway(*replicas: Replica) -> AsyncIterator[Lines]:
    lines = Lines()
    lines.follow(POOL, [one.address for one in replicas])
    await until(lambda: lines.seen()[POOL].replicas == len(replicas), 10, "the lines to be up")
    try:
        yield lines
    finally:
        lines.close()


def in_loop(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story()

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):  # Serve's replicas run on the second
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(bounded())


def begun(lines: Lines, job: ImageJob = JOB) -> asyncio.Task[Made]:
    return asyncio.create_task(lines.pick(POOL).make(job))


async def shown(parts: list[Partial], part: Partial) -> None:
    parts.append(part)


def test_a_job_goes_there_and_pictures_come_back() -> None:
    async def story() -> None:
        one = await replica()
        one.worker.let.set()
        async with gateway(one) as lines:
            assert await begun(lines) == Made(pngs=(b"one", b"", b"three"), seed=7, compute_s=0.5)
            assert one.worker.jobs == [JOB]
            assert lines.seen()[POOL] == PoolSeen(replicas=1, ongoing=0, slots_each=SLOTS)

    in_loop(story)


def test_unfinished_pictures_come_in_order_before_the_answer() -> None:
    async def story() -> None:
        one = await replica()
        one.worker.let.set()
        parts: list[Partial] = []
        async with gateway(one) as lines:
            made = await lines.pick(POOL).make_shown(JOB, lambda part: shown(parts, part))
            assert made.pngs == (b"one", b"", b"three")
        assert [(part.image, part.index, part.png, part.steps_done, part.steps) for part in parts] == [
            (1, index, b"part", index, 3) for index in range(3)
        ]

    in_loop(story)


def test_what_goes_wrong_at_the_replica_has_its_own_error() -> None:
    async def story() -> None:
        async with gateway(await replica()) as lines:
            with pytest.raises(UnfitError) as unfit:
                await begun(lines, replace(JOB, prompt="unfit"))
            assert (unfit.value.param, unfit.value.why) == ("size", "too large")
            with pytest.raises(EngineFailedError, match="out of paint"):
                await begun(lines, replace(JOB, prompt="fails"))
            assert lines.seen()[POOL].ongoing == 0

    in_loop(story)


def test_a_full_pool_refuses_at_once_and_so_does_an_empty_or_unknown_one() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines:
            calls = [begun(lines) for _ in range(SLOTS)]
            await others_first()
            with pytest.raises(PoolBusyError):
                lines.pick(POOL)
            one.worker.let.set()
            await asyncio.gather(*calls)
            assert lines.pick(POOL).has_room
            with pytest.raises(PoolBusyError):
                lines.pick(PoolName("pool-b"))
            lines.follow(POOL, ())
            with pytest.raises(PoolBusyError):
                lines.pick(POOL)

    in_loop(story)


def test_a_slot_that_another_gateway_took_first_is_refused_by_the_replica() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as ours, gateway(one) as theirs:
            line = ours.pick(POOL)  # both look at the same time
            calls = [begun(theirs) for _ in range(SLOTS)]
            await until(lambda: len(one.worker.jobs) == SLOTS, 10, "the other gateway's calls to be there")
            with pytest.raises(PoolBusyError):
                await line.make(JOB)
            one.worker.let.set()
            await asyncio.gather(*calls)

    in_loop(story)


def test_each_gateway_knows_of_the_others_requests() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as ours, gateway(one) as theirs:
            calls = [begun(theirs) for _ in range(SLOTS)]
            await until(lambda: ours.seen()[POOL].ongoing == SLOTS, 10, "their requests to be known here")
            assert theirs.seen()[POOL].ongoing == SLOTS
            with pytest.raises(PoolBusyError):
                ours.pick(POOL)
            one.worker.let.set()
            await asyncio.gather(*calls)
            await until(lambda: ours.seen()[POOL].ongoing == 0, 10, "their end to be known here")

    in_loop(story)


def test_the_less_busy_replica_of_two_is_picked() -> None:
    async def story() -> None:
        async with gateway(await replica("a"), await replica("b")) as lines:
            first, second = lines.pick(POOL), None
            call = asyncio.create_task(first.make(JOB))
            await others_first()
            second = lines.pick(POOL)
            assert second is not first
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    in_loop(story)


@pytest.mark.parametrize("how", ["make", "make_shown"])
def test_a_cancelled_call_stops_and_frees_its_slot(how: str) -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines:
            line = lines.pick(POOL)
            parts: list[Partial] = []
            call = asyncio.create_task(
                line.make(JOB) if how == "make" else line.make_shown(JOB, lambda part: shown(parts, part))
            )
            await until(lambda: bool(one.worker.jobs), 10, "the call to be there")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: lines.seen()[POOL].ongoing == 0, 10, "the slot to be free")
            assert one.worker.cancelled == 1
            one.worker.let.set()
            assert await begun(lines)

    in_loop(story)


def test_a_show_that_fails_cancels_the_call() -> None:
    async def story() -> None:
        one = await replica()

        async def fails(part: Partial) -> None:
            raise ConnectionError("the client left")

        async with gateway(one) as lines:
            with pytest.raises(ConnectionError):
                await lines.pick(POOL).make_shown(JOB, fails)
            await until(lambda: lines.seen()[POOL].ongoing == 0, 10, "the slot to be free")

    in_loop(story)


def test_a_gateway_that_dies_takes_its_calls_along() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines, gateway(one) as others:
            line = lines.pick(POOL)
            call = begun(lines)
            await until(lambda: bool(one.worker.jobs), 10, "the call to be there")
            line._transport.abort()
            with pytest.raises(PoolLostError):
                await call
            await until(lambda: one.worker.cancelled == 1, 10, "the call to be stopped")
            await until(lambda: others.seen()[POOL].ongoing == 0, 10, "its slot to be free")

    in_loop(story)


def test_a_lost_line_loses_its_calls_and_comes_back() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines:
            call, cancelled = begun(lines), begun(lines)
            await until(lambda: len(one.worker.jobs) == 2, 10, "the calls to be there")
            cancelled.cancel()
            for line in list(one.server._lines):
                line._transport.abort()
            with pytest.raises(PoolLostError, match="replica a"):
                await call
            assert lines.seen()[POOL] == PoolSeen(replicas=0, ongoing=0, slots_each=0)
            await until(lambda: lines.seen()[POOL].replicas == 1, 10, "the line to be up again")
            one.worker.let.set()
            assert await begun(lines)

    in_loop(story)


def test_a_draining_replica_finishes_what_it_has_and_takes_nothing_new() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines:
            line, call = lines.pick(POOL), begun(lines)
            await until(lambda: bool(one.worker.jobs), 10, "the call to be there")
            draining = asyncio.create_task(one.server.drain())
            await others_first()
            with pytest.raises(PoolBusyError):  # in the moment before the word has come
                await line.make(JOB)
            assert lines.seen()[POOL].replicas == 0
            one.worker.let.set()
            assert (await call).seed == 7
            await draining

    in_loop(story)


def test_a_draining_replica_has_sent_all_when_it_says_that_it_is_done() -> None:
    """More than sockets hold: Serve kills the process right after."""

    async def story() -> None:
        one = await replica()
        one.worker.png = bytes(50 * 2**20)
        async with gateway(one) as lines:
            call = begun(lines)
            await until(lambda: bool(one.worker.jobs), 10, "the call to be there")
            one.worker.let.set()
            await one.server.drain()
            assert not one.server._lines
            assert (await call).pngs[0] == one.worker.png

    in_loop(story)


def test_a_replica_that_is_no_longer_listed_finishes_what_it_has() -> None:
    async def story() -> None:
        one = await replica()
        async with gateway(one) as lines:
            call = begun(lines)
            await until(lambda: bool(one.worker.jobs), 10, "the call to be there")
            lines.follow(POOL, ())
            assert lines.seen()[POOL].replicas == 0
            one.worker.let.set()
            assert (await call).seed == 7
            await until(lambda: not one.server._lines, 10, "the line to be hung up")

    in_loop(story)


def test_a_replica_that_is_listed_before_it_listens_is_reached_later() -> None:
    async def story() -> None:
        one = await replica()
        lines = Lines()
        lines.follow(POOL, [replace(one.address, port=1)])
        await others_first()
        assert lines.seen()[POOL].replicas == 0
        lines.follow(POOL, [replace(one.address, name="b")])
        await until(lambda: lines.seen()[POOL].replicas == 1, 10, "the line to be up")
        lines.close()

    in_loop(story)


def test_a_process_that_has_the_port_of_another_replica_is_not_taken_for_it() -> None:
    async def story() -> None:
        one = await replica()
        lines = Lines()
        lines.follow(POOL, [replace(one.address, token="of another")])
        reach = lines._pools[POOL]["a"]
        await until(lambda: reach.line is not None and reach.line.gone.is_set(), 10, "the replica to hang up")
        assert not one.server._lines
        assert lines.seen()[POOL].replicas == 0
        lines.close()

    in_loop(story)


@given(st.lists(st.binary(max_size=60), max_size=8), st.data())
def test_frames_are_put_together_however_they_were_cut(payloads: list[bytes], data: st.DataObject) -> None:
    sent = [Frame(Kind.MADE, number, number, payload) for number, payload in enumerate(payloads)]
    stream = b"".join(frame.encoded() for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    frames = Frames()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [frame for piece in pieces for frame in frames.of(piece)] == sent


@given(st.lists(st.binary(max_size=40), max_size=4), st.one_of(st.none(), st.integers(0, 2**63)), st.floats(0, 1e6))
def test_pictures_survive_the_way(pngs: list[bytes], seed: int | None, compute_s: float) -> None:
    made = Made(pngs=tuple(pngs), seed=seed, compute_s=compute_s)
    assert to_made(from_made(made)) == made


def test_what_no_gateway_or_replica_says_is_refused() -> None:
    with pytest.raises(FrameError, match="at most"):
        list(Frames().of(b"\xff" * 11))
    with pytest.raises(FrameError, match="unknown kind 99"):
        list(Frames().of(Frame(Kind.MADE).encoded().replace(b"\x06", b"\x63", 1)))
    for broken in (b"", b"\0\0\0\x02{]", from_made(Made(pngs=(b"abc",), seed=1))[:-1]):
        with pytest.raises(FrameError):
            to_made(broken)
    assert FRAME_MAX_BYTES < 2**32
