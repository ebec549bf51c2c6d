"""One exam for all adapters, against the stand-in over HTTP: each face answers as the real service does."""

from __future__ import annotations

import asyncio
import email.utils
import io
import time
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from stand_in import StandIn

from tidegate.ids import RequestId
from tidegate.ports import free_port
from tidegate.serve.providers import KINDS, connect
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError
from tidegate.serve.providers.wire import Wire
from tidegate.serve.work import ImageJob, Made, Size
from tidegate.spec.providers import ProviderSpec
from tidegate.testing.standin_replicate import VERSION
from waiting import until, wait_until

NOW = 1_000_000.0
QUEUES = ("fal", "replicate")

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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each, for all tests that don't name their own."""
    kind: str = request.param
    return kind


def spec(stand_in: StandIn, kind: str, **more: Any) -> ProviderSpec:
    return stand_in.spec(**stand_in.face(kind), **more)


def make(one: ProviderSpec, job: ImageJob = JOB, timeout_s: float = 5.0) -> Made:
    async def once() -> Made:
        provider = connect(one)
        try:
            return await provider.make(job, timeout_s=timeout_s, now_s=NOW)
        finally:
            await provider.aclose()

    return asyncio.run(once())


def refused(one: ProviderSpec, **more: Any) -> ProviderRefusedError:
    with pytest.raises(ProviderRefusedError) as caught:
        make(one, **more)
    return caught.value


def ambiguous(one: ProviderSpec, **more: Any) -> ProviderAmbiguousError:
    with pytest.raises(ProviderAmbiguousError) as caught:
        make(one, **more)
    return caught.value


def test_pictures_of_the_asked_size_number_and_seed(kind: str, stand_in: StandIn) -> None:
    """C169: each face knows its own model's name only, so an answer proves the mapping. C176."""
    made = make(spec(stand_in, kind), replace(JOB, images=3))
    assert [Image.open(io.BytesIO(png)).size for png in made.pngs] == [(32, 16)] * 3
    assert len(set(made.pngs)) == 3
    assert (made.seed, make(spec(stand_in, kind)).pngs) == (3, made.pngs[:1])
    assert make(spec(stand_in, kind), replace(JOB, seed_asked=False)).seed is None


def test_the_key_is_shown_as_the_service_wants_it(
    kind: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.control(key="secret")
    assert refused(spec(stand_in, kind)).status == 401
    monkeypatch.setenv("STAND_IN_KEY", "secret")
    assert len(make(spec(stand_in, kind, api_key_env="STAND_IN_KEY")).pngs) == 1


def test_a_foreign_host_gets_no_key_and_no_visit_in_the_clear(
    kind: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's answer names URLs; it must not read our key elsewhere by them, nor what lies inside our network."""
    if kind in QUEUES:
        stand_in.control(files_at=stand_in.url.replace("127.0.0.1", "localhost") + "/")
        assert "only https and its own host" in ambiguous(spec(stand_in, kind)).why
    monkeypatch.setenv("STAND_IN_KEY", "secret")
    wire = Wire(spec(stand_in, kind, api_key_env="STAND_IN_KEY"))
    assert wire.key_for("images/generations") == {"authorization": "Bearer secret"}
    assert wire.key_for(f"{stand_in.url}/anything") == {"authorization": "Bearer secret"}
    assert wire.key_for("https://files.example.com/a.png") == {}
    assert wire.key_for(stand_in.url.replace("127.0.0.1", "localhost")) == {}


def test_a_model_that_it_lacks_concerns_this_request_only(kind: str, stand_in: StandIn) -> None:
    """C158, C179."""
    face = stand_in.face(kind)
    assert refused(stand_in.spec(**face | {"models": {}})).this_request_only
    unknown = refused(stand_in.spec(**face | {"models": {JOB.model: "none/such"}}))
    assert (unknown.status, unknown.this_request_only) == (404, True)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_429_falls_over_at_once_with_its_retry_after(kind: str, form: str, stand_in: StandIn) -> None:
    """C161: one request, no sleep of a library's; both forms of the header."""
    before = stand_in.stats()["requests"]
    wait = "46.72" if form == "seconds" else email.utils.formatdate(NOW + 90, usegmt=True)
    stand_in.control(fault="status", status=429, retry_after=wait)
    error = refused(spec(stand_in, kind), timeout_s=2.0)
    assert (error.status, error.retry_after_s) == (429, 46.72 if form == "seconds" else 90.0)
    assert not error.this_request_only
    assert stand_in.stats()["requests"] == before + 1


def test_what_it_has_no_room_for_is_refused_with_a_rest(kind: str, stand_in: StandIn) -> None:
    stand_in.control(slots=0, queue_max=0)
    error = refused(spec(stand_in, kind))
    assert (error.status, error.retry_after_s) == (429, 1.0)


@pytest.mark.parametrize("status", [500, 503, 401])
def test_a_clear_error_made_nothing(kind: str, status: int, stand_in: StandIn) -> None:
    stand_in.control(fault="status", status=status)
    error = refused(spec(stand_in, kind))
    assert (error.status, error.this_request_only) == (status, False)


def test_work_that_failed_made_nothing(kind: str, stand_in: StandIn) -> None:
    stand_in.control(fault="fail")
    assert not refused(spec(stand_in, kind)).this_request_only


def test_an_empty_success_is_a_failure(kind: str, stand_in: StandIn) -> None:
    """C158."""
    stand_in.control(fault="empty")
    assert "no pictures" in refused(spec(stand_in, kind)).why


def test_nobody_listening_is_a_refusal(kind: str, stand_in: StandIn) -> None:
    nobody = stand_in.face(kind) | {"base_url": f"http://127.0.0.1:{free_port()}/v1"}
    assert "not reached" in refused(stand_in.spec(**nobody)).why


@pytest.mark.parametrize("fault", ["drop", "reset", "wrong_size", "hang", "drip"])
def test_what_may_have_been_charged_is_told_apart(kind: str, fault: str, stand_in: StandIn) -> None:
    """C160: and the adapter never sends it again. A hang and a slow drip end at the absolute deadline, with the
    cancel's own time in it."""
    before = stand_in.stats()["requests"]
    stand_in.control(fault=fault)
    began_s = time.monotonic()
    ambiguous(spec(stand_in, kind), timeout_s=0.8)
    assert time.monotonic() - began_s < 1.3
    assert stand_in.stats()["requests"] == before + 1


def test_a_gateway_in_the_middle_that_gave_up_is_ambiguous(kind: str, stand_in: StandIn) -> None:
    stand_in.control(fault="status", status=504)
    assert "504" in ambiguous(spec(stand_in, kind)).why


def test_a_client_that_leaves_is_no_answer_and_no_second_request(kind: str, stand_in: StandIn) -> None:
    """Queue faces are told to stop, and only those have a word for it."""
    # Long enough that a cancel meets it under way, however late; the others work to the end for nobody.
    stand_in.control(latency_s=30.0 if kind in QUEUES else 0.5)
    before = stand_in.stats()

    async def leave() -> None:
        provider = connect(spec(stand_in, kind))
        asking = asyncio.get_running_loop().create_task(provider.make(JOB, timeout_s=5.0, now_s=NOW))
        await until(lambda: stand_in.stats()["requests"] > before["requests"], 5, "the request to arrive")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await provider.aclose()

    asyncio.run(leave())
    after = stand_in.stats()
    assert after["requests"] == before["requests"] + 1
    if kind in QUEUES:
        assert after["cancelled"] == before["cancelled"] + 1
    wait_until(lambda: stand_in.stats()["ongoing"] == 0, 5, "the work to stop, or to end for nobody")


@pytest.mark.parametrize("kind", QUEUES)
def test_what_never_began_is_known_dead_after_its_cancel(kind: str, stand_in: StandIn) -> None:
    """The only time-out after which another provider may be paid: the cancel proved that nothing was made. Where there
    is no queue, a request that isn't refused has begun."""
    stand_in.control(slots=0)
    images = stand_in.stats()["images"]
    error = refused(spec(stand_in, kind), timeout_s=0.5)
    assert "never began" in error.why
    stand_in.control(slots=8)
    assert stand_in.stats()["waiting"] == 0
    assert stand_in.stats()["images"] == images


@pytest.mark.parametrize("kind", ["replicate"])
def test_a_version_of_a_model(kind: str, stand_in: StandIn) -> None:
    """Replicate runs a version by its digits; the others know no such thing."""
    assert len(make(spec(stand_in, kind).model_copy(update={"models": {JOB.model: VERSION}})).pngs) == 1
