"""The parity gate: what a canary's picture says of a provider, and the provider closed by it."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from stand_in import StandIn
from test_flow import JOB, Pools

from tidegate.arbiter.messages import Spillway
from tidegate.ids import GatewayId, ProviderName
from tidegate.serve.backends import Backends
from tidegate.serve.canaries import Canaries
from tidegate.serve.cooldown import Cooldown
from tidegate.serve.flow import Flow
from tidegate.serve.ledger import Ledger
from tidegate.serve.providers import connect
from tidegate.serve.providers.parity import Look, difference, distance, due, judged
from tidegate.serve.work import Size
from tidegate.spec.policy import ServingSpec
from tidegate.spec.providers import CanarySpec
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.standin_studio import draw

SPEC = CanarySpec(every_s=60.0)
P = ProviderName("stand-in")


def png(image: Image.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def picture(seed: int = 1, size: int = 128) -> Image.Image:
    return Image.open(io.BytesIO(draw("a cube", seed, size, size))).convert("RGB")


def test_the_same_picture_made_elsewhere_is_near_and_another_is_far() -> None:
    one = picture()
    assert distance(one, one) == 0
    noisy = one.effect_spread(2).filter(ImageFilter.GaussianBlur(1))
    assert distance(one, noisy) < 0.15
    assert min(distance(one, picture(seed)) for seed in range(2, 12)) > 0.25
    assert distance(Image.new("RGB", (64, 64), "black"), Image.new("RGB", (64, 64), "white")) == 1.0


def test_format_and_size_come_first() -> None:
    one = picture()
    assert "format JPEG" in str(difference(png(one, "JPEG"), png(one), SPEC))
    assert "size 64x64" in str(difference(png(one.resize((64, 64))), png(one), SPEC))
    assert difference(png(one), png(one), SPEC) is None
    assert "distance" in str(difference(png(picture(2)), png(one), SPEC))


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_it_closes_and_opens_only_after_so_many_in_a_row(canaries: list[bool], strikes: int) -> None:
    spec = CanarySpec(strikes=strikes)
    look, closed = Look(), False
    for number, bad in enumerate(canaries, 1):
        look = judged(look, "far" if bad else None, spec)
        tail = canaries[max(0, number - strikes) : number]
        if len(tail) == strikes and all(one == bad for one in tail):
            closed = bad
        assert (look.closed is not None) == closed


def test_a_canary_is_due_after_its_time_and_once_after_a_rest() -> None:
    """The half-open probe of a provider that failed is a canary, not a client's request."""
    well, hurt = Cooldown(), Cooldown(failures=1, until_s=130.0)
    assert not due(CanarySpec(), well, 0.0, 1e9)
    assert not due(SPEC, well, 100.0, 159.0)
    assert due(SPEC, well, 100.0, 160.0)
    assert not due(SPEC, hurt, 100.0, 129.0)
    assert due(SPEC, hurt, 100.0, 130.0)
    assert not due(SPEC, hurt, 130.0, 131.0)


class House:
    def __init__(self, folder: Path, stand_in: StandIn, **spec: Any) -> None:
        one = stand_in.spec(**spec)
        self.clock = FakeClock(1000.0)
        self.backends = Backends([one], Pools(replicas=0).seen)
        self.ledger = Ledger(folder / "ledger", GatewayId("g"))
        self.provider = connect(one)
        flow = Flow(ServingSpec(), self.backends, Pools(replicas=0), {P: self.provider}, self.ledger, self.clock)
        job = replace(JOB, size=Size(64, 64))
        self.canaries = Canaries(SPEC, [P], flow, self.backends, job, folder / "parity", self.clock)

    async def look(self) -> str | None:
        """A canary's time passes; why the provider is closed after it."""
        self.clock.advance(SPEC.every_s or 0.0)
        await self.canaries.look()
        (view,) = self.backends.view(0.0).providers
        return view.closed

    async def close(self) -> None:
        await self.provider.aclose()
        self.ledger.close()


@pytest.mark.parametrize("kind", ["openai", "fal"])
def test_a_provider_that_drifts_closes_itself_and_opens_again(kind: str, tmp_path: Path, stand_in: StandIn) -> None:
    async def story() -> None:
        house = House(tmp_path, stand_in, **stand_in.face(kind))
        assert await house.look() is None
        assert len(list((tmp_path / "parity").rglob("*.png"))) == 1
        stand_in.control(fault="wrong_look", times=2)
        assert await house.look() is None
        assert "drifted: distance" in str(await house.look())
        (seen,) = house.backends.providers_seen(1.0)
        assert (seen.state, "drifted" in seen.why) == ("suspect", True)
        assert not house.backends.way_exists(0.0)
        assert "drifted" in str(await house.look())
        assert await house.look() is None
        assert house.backends.providers_seen(1.0)[0].state == Spillway.CLOSED.value
        await house.close()

    asyncio.run(story())


def test_a_wrong_size_is_a_drift_and_silence_is_none(tmp_path: Path, stand_in: StandIn) -> None:
    async def story() -> None:
        house = House(tmp_path, stand_in, cooldown_s=0.001, fields={"seed": ""})
        stand_in.control(fault="status", status=500, times=2)
        assert [await house.look(), await house.look()] == [None, None]
        stand_in.control(fault="wrong_size", times=2)
        await house.look()
        assert "72x72 instead of 64x64" in str(await house.look())
        assert not (tmp_path / "parity").exists()  # without a seed there is nothing to compare with
        await house.close()

    asyncio.run(story())
