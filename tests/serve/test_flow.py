"""A request's walk without Ray: pools that the test fills, a real provider process, real time."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from stand_in import StandIn

from tidegate.arbiter.messages import Orders, OverBudget, Spillway
from tidegate.clock import SystemClock
from tidegate.ids import GatewayId, Generation, PoolName, ProviderName, RequestId
from tidegate.ports import free_port
from tidegate.serve.api import ApiError
from tidegate.serve.audit import Audit, audit
from tidegate.serve.backends import Backends, PoolSeen
from tidegate.serve.flow import LOST_MAX, Answer, Flow
from tidegate.serve.ledger import Ledger, Outcome
from tidegate.serve.ledger_reading import read_audited, read_totals
from tidegate.serve.providers import connect
from tidegate.serve.routing import RouteRequest, ToLocal
from tidegate.serve.work import EngineFailedError, ImageJob, Made, PoolBusyError, PoolLostError, Size, UnfitError
from tidegate.spec.policy import ServingSpec
from tidegate.spec.providers import ProviderSpec
from waiting import others_first, until

A = PoolName("a")
JOB = ImageJob(
    request=RequestId("r"),
    model="tidegate-digits",
    prompt="a two",
    images=1,
    size=Size(8, 8),
    seed=3,
    seed_asked=True,
    steps=None,
    local_only=False,
)
SPEC = ServingSpec(patience_s=0.3, request_deadline_s=1.5)


@dataclass
class Pools:
    """One pool with `replicas` of two slots; each call does the next of `script`, then works for so many `turns` of the
    loop, or for ever."""

    replicas: int = 1
    turns: int = 3
    stuck: bool = False
    compute_s: float = 0.01
    script: list[Exception] = field(default_factory=list)
    ongoing: int = 0
    ongoing_max: int = 0
    calls: int = 0
    made: list[RequestId] = field(default_factory=list)

    def seen(self) -> dict[PoolName, PoolSeen]:
        return {A: PoolSeen(self.replicas, self.ongoing, 2)}

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        self.calls += 1
        if self.script:
            error = self.script.pop(0)
            await others_first()  # they can come before it fails
            raise error
        if not self.replicas:
            raise PoolBusyError(pool)
        self.ongoing += 1
        self.ongoing_max = max(self.ongoing, self.ongoing_max)
        try:
            async with asyncio.timeout(timeout_s):
                if self.stuck:
                    await asyncio.Event().wait()
                for _ in range(self.turns):
                    await others_first()
        finally:
            self.ongoing -= 1
        self.made.append(job.request)
        return Made(pngs=(b"png",), seed=job.seed, compute_s=self.compute_s)


@dataclass
class House:
    flow: Flow
    backends: Backends
    pools: Pools
    ledger: Ledger
    folder: Path
    generation: int = 0

    def order(self, spillway: Spillway, **allowances: int) -> None:
        self.generation += 1
        allowed = {PoolName(name): count for name, count in allowances.items()}
        self.backends.follow(Orders(generation=Generation(self.generation), spillway=spillway, allowances=allowed))
        self.flow.dispatcher.look()

    async def ask(self, name: str = "r", **more: Any) -> Answer:
        """As the gateway does: accepted, answered, ended once."""
        job = replace(JOB, request=RequestId(name), **more)
        clock = SystemClock()
        self.ledger.accept(job.request, clock.now_s())
        try:
            answer = await self.flow.answer(job, clock.now_s())
        except ApiError:
            self.ledger.end(job.request, clock.now_s(), Outcome.FAILED)
            raise
        except asyncio.CancelledError:
            self.ledger.end(job.request, clock.now_s(), Outcome.CANCELLED)
            raise
        self.ledger.end(job.request, clock.now_s(), Outcome.ANSWERED, backend=answer.backend, images=job.images)
        return answer

    def totals(self) -> dict[str, float]:
        self.ledger.close()
        return read_totals(self.folder)

    def idle(self) -> bool:
        view = self.backends.view(0.0)
        return self.flow.dispatcher.waiting == 0 and not any(p.ongoing for p in (*view.pools, *view.providers))


@dataclass
class Street:
    """Builds houses in the test's folder."""

    folder: Path

    def run(
        self,
        story: Callable[[House], Coroutine[Any, Any, None]],
        pools: Pools,
        *providers: ProviderSpec,
        spec: ServingSpec = SPEC,
    ) -> House:
        async def live() -> House:
            async with self.house(pools, providers, spec) as house:
                await story(house)
                assert house.idle()
                return house

        return asyncio.run(live())

    @asynccontextmanager
    async def house(self, pools: Pools, providers: tuple[ProviderSpec, ...], spec: ServingSpec) -> Any:
        backends = Backends(providers, pools.seen)
        ledger = Ledger(self.folder, GatewayId("g"))
        adapters = {ProviderName(one.name): connect(one) for one in providers}
        flow = Flow(spec, backends, pools, adapters, ledger, SystemClock())
        try:
            yield House(flow, backends, pools, ledger, self.folder)
        finally:
            for adapter in adapters.values():
                await adapter.aclose()
            ledger.close()


@pytest.fixture
def street(tmp_path: Path) -> Street:
    return Street(tmp_path)


def test_local_first(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        assert (await house.ask()).backend == "local/a"

    totals = street.run(story, Pools(), stand_in.spec()).totals()
    assert (totals["local"], totals["compute_s"], totals["price_usd"]) == (1, 0.01, 0.0)


def test_at_zero_the_closed_spillway_costs_patience_and_the_open_one_nothing(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        assert (await house.ask("closed")).backend == "provider/stand-in"
        assert clock() - began >= SPEC.patience_s
        house.order(Spillway.OPEN)
        began = clock()
        assert (await house.ask("open")).backend == "provider/stand-in"
        assert clock() - began < SPEC.patience_s

    house = street.run(story, Pools(replicas=0), stand_in.spec())
    assert house.pools.calls == 0
    assert house.totals()["price_usd"] == pytest.approx(0.02)


def test_no_more_than_the_allowance(street: Street) -> None:
    async def story(house: House) -> None:
        house.order(Spillway.CLOSED, a=1)
        await asyncio.gather(*(house.ask(str(number)) for number in range(8)))
        assert house.pools.ongoing_max == 2
        house.order(Spillway.CLOSED)
        await asyncio.gather(*(house.ask(f"more {number}") for number in range(8)))
        assert house.pools.ongoing_max == 6

    street.run(story, Pools(replicas=3))


def test_over_budget_what_would_be_bought_is_refused_and_told_when_to_come_back(
    street: Street, stand_in: StandIn
) -> None:
    async def story(house: House) -> None:
        until_s = SystemClock().now_s() + 90
        house.order(Spillway.OPEN)
        assert (await house.ask("paid")).backend == "provider/stand-in"
        house.backends.follow(
            replace(
                house.backends.orders,
                generation=Generation(house.backends.orders.generation + 1),
                over_budget=OverBudget(reason="the hour's spill budget of $0.01 is spent", until_s=until_s),
            )
        )
        with pytest.raises(ApiError) as refused:
            await house.ask("unpaid")
        assert (refused.value.status, refused.value.code) == (429, "over_budget")
        assert "spill budget" in refused.value.message
        assert 85 < int(refused.value.headers()["retry-after"]) <= 90
        house.pools.replicas = 1
        assert (await house.ask("at home")).backend == "local/a"

    before = stand_in.stats()["answered"]
    totals = street.run(story, Pools(replicas=0), stand_in.spec()).totals()
    assert stand_in.stats()["answered"] == before + 1
    assert totals["price_usd"] == pytest.approx(0.01)


def test_what_was_spent_and_made_is_told(street: Street, stand_in: StandIn) -> None:
    """Canaries cost money too."""

    async def story(house: House) -> None:
        await house.ask("here")
        house.pools.replicas = 0
        house.order(Spillway.OPEN)
        await house.ask("there")
        await house.flow.canary("claim-1", JOB)
        await house.flow.canary("claim-1", JOB)
        assert house.flow.spent_usd() == pytest.approx(0.03)
        assert house.flow.spent_usd(ProviderName("stand-in")) == pytest.approx(0.03)
        assert house.flow.spent_usd(ProviderName("other")) == 0.0
        made = house.flow.demand.rate(SystemClock().now_s())
        assert made.images_per_s == pytest.approx(1.0)
        assert made.busy_replicas == pytest.approx(0.01)

    totals = street.run(story, Pools(), stand_in.spec()).totals()
    assert (totals["price_usd"], totals["canaries"], totals["sent"]) == (pytest.approx(0.03), 2, 2)


def test_first_come_first_served(street: Street) -> None:
    async def story(house: House) -> None:
        await asyncio.gather(*(house.ask(str(number)) for number in range(6)))
        assert house.pools.made == [str(number) for number in range(6)]

    street.run(story, Pools())


@pytest.mark.parametrize("error", [PoolBusyError("a"), PoolLostError("ActorDiedError")])
def test_a_lost_or_busy_replica_is_tried_again(error: Exception, street: Street) -> None:
    async def story(house: House) -> None:
        assert (await house.ask()).backend == "local/a"

    house = street.run(story, Pools(script=[error]))
    assert house.pools.calls == 2
    assert house.totals()["attempts"] == (2 if isinstance(error, PoolLostError) else 1)


def test_a_failing_engine_is_left_for_a_provider(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        assert (await house.ask()).backend == "provider/stand-in"

    assert street.run(story, Pools(script=[EngineFailedError("CUDA error")]), stand_in.spec()).pools.calls == 1


def test_a_request_that_kills_replicas_is_kept_from_them(street: Street) -> None:
    async def story(house: House) -> None:
        with pytest.raises(ApiError) as failed:
            await house.ask()
        assert (failed.value.status, failed.value.code) == (502, "backends_failed")

    pools = Pools(script=[PoolLostError("died") for _ in range(10)])
    assert street.run(story, pools).pools.calls == LOST_MAX


def test_the_next_provider_when_one_refuses(street: Street, stand_in: StandIn) -> None:
    """C161: at once, though the first one asks for 46.72 s."""
    stand_in.control(fault="status", status=429, retry_after="46.72")
    cheap = stand_in.spec(name="cheap", price_per_image_usd=0.001)

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        assert (await house.ask("one")).backend == "provider/stand-in"
        assert (await house.ask("two")).backend == "provider/stand-in"  # the cheap one rests: not asked again

    house = street.run(story, Pools(replicas=0), cheap, stand_in.spec())
    totals = house.totals()
    assert (totals["attempts"], totals["price_usd"]) == (3, pytest.approx(0.02))  # what refuses charges nothing


def test_all_providers_resting_is_waited_for(street: Street, stand_in: StandIn) -> None:
    """C155: back within the request's deadline."""
    stand_in.control(fault="status", status=429, retry_after="0.4")

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        assert (await house.ask()).backend == "provider/stand-in"

    assert street.run(story, Pools(replicas=0), stand_in.spec()).totals()["attempts"] == 2


def test_a_lost_answer_is_not_bought_again(street: Street, stand_in: StandIn) -> None:
    """C160: with a second provider at hand, and nothing at home, it fails rather than pays twice."""
    before = stand_in.stats()["answered"]
    stand_in.control(fault="drop")

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        with pytest.raises(ApiError) as failed:
            await house.ask()
        assert (failed.value.status, failed.value.retry) == (504, False)

    house = street.run(story, Pools(replicas=0), stand_in.spec(), stand_in.spec(name="second"))
    assert stand_in.stats()["answered"] == before + 1
    assert house.totals()["price_usd"] == pytest.approx(0.01)  # it may have been charged


def test_a_lost_answer_is_made_at_home_when_there_is_room(street: Street, stand_in: StandIn) -> None:
    """C160: making it here costs nobody twice."""
    stand_in.control(fault="drop")

    async def story(house: House) -> None:
        house.order(Spillway.OPEN, a=0)
        asking = asyncio.create_task(house.ask())
        await until(lambda: house.backends.view(0.0).providers[0].resting_until_s, 10, "the provider rests")
        house.order(Spillway.OPEN)
        assert (await asking).backend == "local/a"

    street.run(story, Pools(), stand_in.spec())


def test_the_deadline_is_one_for_all_attempts(street: Street) -> None:
    gone = ProviderSpec(
        name="gone", base_url=f"http://127.0.0.1:{free_port()}/v1", models={JOB.model: "x"}, cooldown_s=0.2
    )

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ApiError) as failed:
            await house.ask()
        assert 1.4 < asyncio.get_running_loop().time() - began < 3.0
        assert failed.value.status == 502
        assert "not reached" in failed.value.message

    assert street.run(story, Pools(replicas=0), gone).totals()["attempts"] > 1


def test_a_client_that_leaves_gives_its_place_back(street: Street) -> None:
    async def story(house: House) -> None:
        asks = [asyncio.create_task(house.ask(name)) for name in ("at work", "at work too", "in the line")]
        await until(lambda: house.pools.ongoing >= 2, 10, "two are at work")
        assert house.flow.dispatcher.waiting == 1
        asks[2].cancel()
        await asyncio.gather(asks[2], return_exceptions=True)
        assert house.flow.dispatcher.waiting == 0
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)

    totals = street.run(story, Pools(stuck=True)).totals()
    assert (totals["cancelled"], totals["open"], totals["attempts"]) == (3, 0, 2)


def test_canary_says_of_each_provider_whether_it_answers(street: Street, stand_in: StandIn) -> None:
    gone = ProviderSpec(name="gone", base_url=f"http://127.0.0.1:{free_port()}/v1", models={JOB.model: "x"})
    other = stand_in.spec(name="other", models={"another model": "stand-in-image"})
    broken = stand_in.spec(name="broken", base_url="http://[not an address/v1")

    async def story(house: House) -> None:
        results = {result.provider: result for result in await house.flow.canary("claim-1", JOB)}
        assert {name: result.ok for name, result in results.items()} == {
            "stand-in": True,
            "gone": False,
            "other": False,
            "broken": False,
        }
        assert "not reached" in results[ProviderName("gone")].detail
        states = {seen.name: seen.state for seen in house.backends.providers_seen(SystemClock().now_s())}
        assert (states[ProviderName("gone")], states[ProviderName("stand-in")]) == ("suspect", "closed")

    street.run(story, Pools(), stand_in.spec(), gone, other, broken)


def test_late_orders_are_ignored(street: Street) -> None:
    async def story(house: House) -> None:
        house.order(Spillway.CLOSED)
        house.order(Spillway.OPEN)
        late = Orders(generation=Generation(1), spillway=Spillway.CLOSED, allowances={})
        assert not house.backends.follow(late)
        assert house.backends.orders.spillway is Spillway.OPEN

    street.run(story, Pools())


def test_a_client_that_leaves_in_the_moment_of_its_placing_holds_no_slot(street: Street) -> None:
    async def story(house: House) -> None:
        line = house.flow.dispatcher
        now_s = SystemClock().now_s()
        route = RouteRequest(
            model="m", size=JOB.size, accepted_at_s=now_s, patience_until_s=now_s + 9, deadline_s=now_s + 9
        )
        first, second = await line.place(route), await line.place(route)
        assert isinstance(first, ToLocal)
        assert isinstance(second, ToLocal)
        leaving = asyncio.create_task(line.place(route))
        await until(lambda: line.waiting, 10, "it waits")
        line.done(first)  # places the one that waits ...
        assert line.waiting == 0
        leaving.cancel()  # ... and its client is gone before it could know
        await asyncio.gather(leaving, return_exceptions=True)
        line.done(second)

    street.run(story, Pools())


def test_a_request_that_comes_back_keeps_its_place_in_the_line(street: Street) -> None:
    async def story(house: House) -> None:
        house.pools.script.append(PoolLostError("died"))
        await asyncio.gather(*(house.ask(str(number)) for number in range(6)))
        assert house.pools.made.index(RequestId("0")) < 3

    street.run(story, Pools(turns=15))


def test_the_stronger_class_is_placed_first(street: Street) -> None:
    """Two of a lower class wait already; one of a higher class that comes later goes before them."""
    pools = Pools(replicas=0)

    async def story(house: House) -> None:
        asked = []
        for name, priority in (("batch-1", 1), ("batch-2", 1), ("interactive", 0)):
            asked.append(asyncio.create_task(house.ask(name, priority=priority)))
            await until(lambda: house.flow.dispatcher.waiting == len(asked), 5, f"{name} to wait")
        pools.replicas = 1
        house.flow.dispatcher.look()
        await asyncio.gather(*asked)
        assert pools.made[0] == "interactive"

    street.run(story, pools, spec=ServingSpec(patience_s=5, request_deadline_s=5))


def test_a_purchase_is_noted_before_it_is_made_and_unmade_when_refused(street: Street, stand_in: StandIn) -> None:
    noted: list[tuple[bool, int]] = []
    stand_in.control(fault="status", status=500, times=1)

    async def buying(yes: bool) -> None:
        noted.append((yes, stand_in.stats()["requests"]))

    async def story(house: House) -> None:
        now_s = SystemClock().now_s()
        house.ledger.accept(JOB.request, now_s)
        await house.flow.answer(JOB, now_s, deadline_s=now_s + 10, buying=buying)
        house.ledger.end(JOB.request, now_s, Outcome.ANSWERED)

    street.run(story, Pools(replicas=0), stand_in.spec(cooldown_s=0.1))
    first = noted[0][1]
    assert noted == [(True, first), (False, first + 1), (True, first + 1)]


@pytest.mark.parametrize("more", [{"guidance": 3.0}, {"negative_prompt": "hands"}])
def test_what_no_provider_has_a_word_for_never_leaves(street: Street, stand_in: StandIn, more: dict[str, Any]) -> None:
    before = stand_in.stats()["requests"]

    async def story(house: House) -> None:
        with pytest.raises(ApiError) as refused:
            await house.ask(**more)
        assert refused.value.status == 503

    street.run(story, Pools(replicas=0), stand_in.spec(), spec=ServingSpec(patience_s=0.1, request_deadline_s=0.2))
    assert stand_in.stats()["requests"] == before


def test_what_a_leaving_replica_cannot_finish_is_spilled_or_told_to_return(street: Street, stand_in: StandIn) -> None:
    """C004, C009: a replica that is stopped with work in hand is no 500 for anybody; one whose work never ends is cut
    off by its drain's deadline, which looks the same from here."""

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        house.pools.script = [PoolLostError("told to stop"), PoolLostError("told to stop")]
        spilled, kept = (
            asyncio.create_task(house.ask("spilled")),
            asyncio.create_task(house.ask("kept", local_only=True)),
        )
        await until(lambda: house.pools.calls == 2, 10, "both are at the replica")
        house.pools.replicas = 0
        assert (await spilled).backend == "provider/stand-in"
        with pytest.raises(ApiError) as refused:
            await kept
        assert (refused.value.status, refused.value.code) == (503, "replicas_left")
        assert "told to stop" in refused.value.message
        assert refused.value.headers()["retry-after"]

    totals = street.run(story, Pools(), stand_in.spec()).totals()
    assert (totals["spilled"], totals["failed"], totals["attempts"]) == (1, 1, 3)


HEDGED = SPEC.model_copy(update={"hedge_after_s": 0.1, "request_deadline_s": 5.0})


def attempts(house: House) -> list[tuple[str, str, int, float]]:
    house.ledger.close()
    with closing(sqlite3.connect(house.folder / "g.sqlite")) as db:
        query = "SELECT backend, outcome, hedge, price_usd FROM attempts ORDER BY attempt"
        return [(row[0], row[1], row[2], row[3]) for row in db.execute(query)]


def proven(house: House) -> Audit:
    house.ledger.close()
    return audit(read_audited(house.folder), SystemClock().now_s(), 60.0)


def test_a_slow_first_place_is_raced_by_a_second_and_the_loser_is_cancelled(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        house.order(Spillway.CLOSED)
        assert (await house.ask(hedge=True)).backend == "provider/stand-in"
        assert house.pools.ongoing == 0, "the replica was told to stop"

    house = street.run(story, Pools(stuck=True), stand_in.spec(), spec=HEDGED)
    assert attempts(house) == [
        ("provider/stand-in", "answered", 1, 0.01),
        ("local/a", "cancelled", 0, 0.0),
    ] or attempts(house) == [("local/a", "cancelled", 0, 0.0), ("provider/stand-in", "answered", 1, 0.01)]
    assert (proven(house).proven, proven(house).hedged) == (True, 1)


def test_a_second_provider_may_be_paid_too_and_the_audit_says_so(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        async with silent_server() as url:
            slow = ProviderSpec(name="slow", base_url=url, models={JOB.model: "x"}, price_per_image_usd=0.004)
            async with street.house(house.pools, (slow, stand_in.spec()), HEDGED) as two:
                two.order(Spillway.OPEN)
                assert (await two.ask("both", hedge=True)).backend == "provider/stand-in"
                assert two.idle()

    house = street.run(story, Pools(replicas=0))
    assert sorted(attempts(house)) == [
        ("provider/slow", "cancelled", 0, 0.004),
        ("provider/stand-in", "answered", 1, 0.01),
    ]
    found = proven(house)
    assert (found.proven, found.hedged, found.paid_twice) == (True, 1, 0)
    with closing(sqlite3.connect(house.folder / "g.sqlite")) as db, db:
        db.execute("UPDATE attempts SET hedge = 0")
    assert proven(house).paid_twice == 1, "without leave the same rows are a finding"


def test_without_leave_nothing_is_asked_for_twice(street: Street, stand_in: StandIn) -> None:
    async def story(house: House) -> None:
        with pytest.raises(ApiError):
            await house.ask(hedge=False)
        with pytest.raises(ApiError):
            await house.ask("here", hedge=True, local_only=True)

    spec = HEDGED.model_copy(update={"request_deadline_s": 0.6})
    house = street.run(story, Pools(stuck=True), stand_in.spec(), spec=spec)
    assert {backend for backend, *_ in attempts(house)} == {"local/a"}


def test_a_hedged_client_that_leaves_frees_both_places(street: Street) -> None:
    async def story(house: House) -> None:
        ask = asyncio.create_task(house.ask(hedge=True))
        await until(lambda: house.pools.ongoing == 1, 10, "it is at work")
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)

    totals = street.run(story, Pools(stuck=True), spec=HEDGED).totals()
    assert (totals["cancelled"], totals["open"]) == (1, 0)


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """It takes every connection and never answers."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def test_what_fits_no_replica_is_the_clients_mistake_unless_a_provider_makes_it(
    street: Street, stand_in: StandIn
) -> None:
    """C172: the field is named, and the replica is asked once."""
    unfit = UnfitError("size", "1 x 16x16 would take 2.00 GiB of memory, there are 1.00 GiB")

    async def refused(house: House) -> None:
        with pytest.raises(ApiError) as error:
            await house.ask()
        assert (error.value.status, error.value.param, error.value.code) == (400, "size", "does_not_fit")
        assert "2.00 GiB" in error.value.message

    async def spilled(house: House) -> None:
        assert (await house.ask("s")).backend == "provider/stand-in"

    assert street.run(refused, Pools(script=[unfit])).pools.calls == 1
    assert street.run(spilled, Pools(script=[unfit]), stand_in.spec()).pools.calls == 1
