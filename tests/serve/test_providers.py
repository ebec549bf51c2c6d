"""The OpenAI adapter against a real provider process, over HTTP."""

from __future__ import annotations

import asyncio
import email.utils
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from stand_in import StandIn

from tidegate.ids import RequestId
from tidegate.ports import free_port
from tidegate.serve.providers import connect
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderError, ProviderRefusedError
from tidegate.serve.providers.wire import retry_after_s
from tidegate.serve.work import ImageJob, Made, Size
from tidegate.spec.providers import ProviderSpec

NOW = 1_000_000.0

JOB = ImageJob(
    request=RequestId("r"),
    model="tidegate-digits",
    prompt="a two",
    images=1,
    size=Size(32, 16),
    seed=3,
    seed_asked=True,
    steps=None,
    local_only=False,
)


def make(spec: ProviderSpec, job: ImageJob = JOB, timeout_s: float = 5.0) -> Made:
    async def once() -> Made:
        provider = connect(spec)
        try:
            return await provider.make(job, timeout_s=timeout_s, now_s=NOW)
        finally:
            await provider.aclose()

    return asyncio.run(once())


def refusal(spec: ProviderSpec, **more: Any) -> ProviderRefusedError:
    with pytest.raises(ProviderRefusedError) as refused:
        make(spec, **more)
    return refused.value


def test_pictures_of_the_asked_size_and_number(stand_in: StandIn) -> None:
    """C169: the stand-in knows its own model's name only, so an answer proves the mapping."""
    made = make(stand_in.spec(), replace(JOB, images=3))
    assert [Image.open(io.BytesIO(png)).size for png in made.pngs] == [(32, 16)] * 3
    assert len(set(made.pngs)) == 3  # C176
    assert made.seed == 3
    assert make(stand_in.spec(), replace(JOB, seed=5)).pngs == made.pngs[2:]


def test_a_seed_that_nobody_asked_for_is_not_sent(stand_in: StandIn) -> None:
    made = make(stand_in.spec(), replace(JOB, seed_asked=False))
    assert made.seed is None


def test_a_model_that_it_lacks_concerns_this_request_only(stand_in: StandIn) -> None:
    assert refusal(stand_in.spec(models={})).this_request_only
    unknown = refusal(stand_in.spec(models={"tidegate-digits": "nonesuch"}))
    assert (unknown.status, unknown.this_request_only) == (404, True)


def test_response_format_is_left_out_where_it_is_refused(stand_in: StandIn) -> None:
    """C170."""
    stand_in.control(refuse_response_format=True)
    assert len(make(stand_in.spec()).pngs) == 1


def test_a_429_falls_over_at_once_with_its_retry_after(stand_in: StandIn) -> None:
    """C161: one request, no sleep of a library's."""
    before = stand_in.stats()["requests"]
    stand_in.control(fault="status", status=429, retry_after="46.72")
    refused = refusal(stand_in.spec(), timeout_s=2.0)
    assert (refused.status, refused.retry_after_s) == (429, 46.72)
    assert not refused.this_request_only
    assert stand_in.stats()["requests"] == before + 1


def test_above_its_slots_it_refuses(stand_in: StandIn) -> None:
    """The stand-in itself: 429 with Retry-After above its slots."""
    stand_in.control(slots=1, latency_s=0.3)
    provider = connect(stand_in.spec())

    async def two() -> list[Made | BaseException]:
        calls = (provider.make(replace(JOB, request=RequestId(name)), timeout_s=5, now_s=NOW) for name in "ab")
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await provider.aclose()

    made, refused = sorted(asyncio.run(two()), key=lambda result: isinstance(result, ProviderError))
    assert isinstance(made, Made)
    assert isinstance(refused, ProviderRefusedError)
    assert (refused.status, refused.retry_after_s) == (429, 1.0)


def test_an_empty_success_is_a_failure(stand_in: StandIn) -> None:
    """C158."""
    stand_in.control(fault="empty")
    assert "no pictures" in refusal(stand_in.spec()).why


AMBIGUOUS: dict[str, Callable[[StandIn], None]] = {
    "C160 the connection drops before the reply": lambda stand_in: stand_in.control(fault="drop"),
    "C160 it hangs": lambda stand_in: stand_in.control(fault="hang"),
    "a picture of another size": lambda stand_in: stand_in.control(fault="wrong_size"),
    "a gateway in the middle gave up": lambda stand_in: stand_in.control(fault="status", status=504),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_may_have_been_charged_is_told_apart(case: str, stand_in: StandIn) -> None:
    before = stand_in.stats()["requests"]
    AMBIGUOUS[case](stand_in)
    with pytest.raises(ProviderAmbiguousError):
        make(stand_in.spec(), timeout_s=0.5)
    assert stand_in.stats()["requests"] == before + 1  # and never sent again by the adapter


@pytest.mark.parametrize("status", [500, 503, 401])
def test_a_clear_error_made_nothing(status: int, stand_in: StandIn) -> None:
    stand_in.control(fault="status", status=status)
    refused = refusal(stand_in.spec())
    assert (refused.status, refused.this_request_only) == (status, False)


def test_nobody_listening_is_a_refusal() -> None:
    spec = ProviderSpec(name="p", base_url=f"http://127.0.0.1:{free_port()}/v1", models={"tidegate-digits": "x"})
    assert "not reached" in refusal(spec).why


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("46.72", 46.72),
        (email.utils.formatdate(NOW + 90, usegmt=True), 90.0),
        (email.utils.formatdate(NOW - 90, usegmt=True), 0.0),
        ("-5", 0.0),
        ("soon", None),
        ("nan", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_in_both_forms(header: str | None, seconds: float | None) -> None:
    """C161."""
    assert retry_after_s(header, NOW) == seconds
