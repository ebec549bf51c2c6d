"""How long an attempt may take, and whether that is enough."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import StandIn
from test_flow import House, Pools, Street

from tidegate.arbiter.messages import Spillway
from tidegate.serve.api import ApiError
from tidegate.serve.backends import Backends
from tidegate.serve.ledger_reading import read_audited, read_totals
from tidegate.serve.timeouts import FEW, attempt_s, too_tight
from tidegate.spec.policy import ServingSpec
from tidegate.spec.providers import ProviderSpec
from waiting import until


@given(st.floats(0.1, 600), st.floats(1, 600), st.floats(0, 1))
def test_no_attempt_outlives_the_request(timeout_s: float, left_s: float, gone: float) -> None:
    """C163: six providers with 180 s each share one deadline, however many attempts it takes."""
    now_s, deadline_s = 1000.0, 1000.0 + left_s
    for _ in range(6):
        now_s += gone * attempt_s(timeout_s, deadline_s, now_s)
        assert now_s <= deadline_s + 1e-6
    assert attempt_s(timeout_s, deadline_s, 1000.0) <= timeout_s


def test_a_timeout_below_what_answers_take_is_said_and_how_to_mend_it() -> None:
    """C164: 5 s for images that take 11 to 12 s; seen before they all fail, while the quick half still comes."""
    assert too_tight(5.0, [4.8] * (FEW - 1)) is None
    assert "raise timeout_s" in str(too_tight(5.0, [1.0] * 40 + [4.9] * 5))
    assert too_tight(12.0, [1.0] * 40 + [4.9] * 5) is None
    spec = ProviderSpec(name="p", base_url="http://p", timeout_s=5.0)
    backends = Backends([spec], dict)
    for _ in range(FEW):
        backends.provider_answered("p", 0.0, 4.9)  # type: ignore[arg-type]
    (seen,) = backends.providers_seen(1.0)
    assert "raise timeout_s" in seen.why


def test_our_own_timeout_is_told_apart_from_a_client_that_leaves(tmp_path: Path, stand_in: StandIn) -> None:
    """C163: the first ends as failed, with its reason and an answer; the second as cancelled."""
    street = Street(tmp_path)

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        stand_in.control(fault="hang", times=2)
        with pytest.raises(ApiError) as late:
            await house.ask("late")
        assert late.value.status == 504
        before = stand_in.stats()["requests"]
        gone = asyncio.get_running_loop().create_task(house.ask("gone"))
        await until(lambda: stand_in.stats()["requests"] > before, 5, "the request to arrive")
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)

    spec = stand_in.spec(timeout_s=0.3, cooldown_s=0.001)
    house = street.run(story, Pools(replicas=0), spec, spec=ServingSpec(patience_s=0.1, request_deadline_s=0.6))
    house.ledger.close()
    totals = read_totals(tmp_path)
    assert (totals["failed"], totals["cancelled"]) == (1, 1)
    assert {row.request_id: row.outcome for row in read_audited(tmp_path)} == {"late": "failed", "gone": "cancelled"}


def test_a_provider_that_keeps_failing_is_not_asked_again_and_again(tmp_path: Path, stand_in: StandIn) -> None:
    """C157: 25 requests, each of which would meet a 500: only the first one does, the others know at once."""
    street = Street(tmp_path)
    before = stand_in.stats()["requests"]
    stand_in.control(fault="status", status=500, times=25)

    async def story(house: House) -> None:
        house.order(Spillway.OPEN)
        for number in range(25):
            with pytest.raises(ApiError):
                await house.ask(str(number))

    spec = ServingSpec(patience_s=0.01, request_deadline_s=0.02)
    street.run(story, Pools(replicas=0), stand_in.spec(cooldown_s=60.0), spec=spec)
    assert stand_in.stats()["requests"] == before + 1
