"""The `openai` client, unchanged, sync, async and streaming, against a gateway over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from light import MODEL, Light, running
from PIL import Image
from stand_in import StandIn

from tidegate.serve.api import BODY_LIMIT_BYTES, ImagesBody
from waiting import wait_until


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Light]:
    with running(Light(tmp_path_factory.mktemp("light"))) as gateway:
        yield gateway


@pytest.fixture
def client(light: Light) -> Iterator[openai.OpenAI]:
    with light.client() as one:
        yield one


def generate(client: openai.OpenAI, **more: Any) -> Any:
    return client.images.generate(**{"model": MODEL, "prompt": "a seven", **more})


def picture(encoded: str | None) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(encoded or "")))
    image.load()
    return image


def test_pictures_come_one_seed_each_and_again(client: openai.OpenAI) -> None:
    """C175, C176: three different pictures, the third is what `seed + 2` gives alone; size and format are said."""
    answer = generate(client, n=3, size="32x16", extra_body={"seed": 7})
    pictures = [item.b64_json for item in answer.data]
    assert len(set(pictures)) == 3
    assert (answer.size, answer.output_format, answer.background) == ("32x16", "png", "opaque")
    assert picture(pictures[0]).size == (32, 16)
    assert generate(client, size="32x16", extra_body={"seed": 9}).data[0].b64_json == pictures[2]


@pytest.mark.parametrize("wanted", ["png", "jpeg", "webp"])
def test_formats(client: openai.OpenAI, wanted: str) -> None:
    answer = generate(client, output_format=wanted)
    assert answer.output_format == wanted
    assert (picture(answer.data[0].b64_json).format or "").lower() == wanted


def test_compression_is_felt(client: openai.OpenAI) -> None:
    best, worst = (
        generate(client, output_format="jpeg", output_compression=level, extra_body={"seed": 1}).data[0].b64_json
        for level in (100, 0)
    )
    assert len(worst) < len(best)


def test_a_url_can_be_opened(client: openai.OpenAI) -> None:
    """C170: clients that always send `response_format` work, whichever they send."""
    (item,) = generate(client, response_format="url").data
    assert item.b64_json is None
    with urllib.request.urlopen(item.url) as opened:
        assert opened.read().startswith(b"\x89PNG")
    assert generate(client, response_format="b64_json").data[0].url is None


def test_a_stream_ends_with_each_whole_picture(client: openai.OpenAI) -> None:
    whole = [item.b64_json for item in generate(client, n=2, extra_body={"seed": 3}).data]
    with generate(client, n=2, stream=True, partial_images=0, extra_body={"seed": 3}) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.completed"] * 2
    assert [event.b64_json for event in events] == whole
    assert (events[0].size, events[0].output_format) == ("16x16", "png")


def test_a_stream_shows_unfinished_pictures_on_the_way(light: Light, client: openai.OpenAI) -> None:
    (whole,) = generate(client, output_format="webp", extra_body={"seed": 3}).data
    with generate(client, n=2, stream=True, partial_images=2, output_format="webp", extra_body={"seed": 3}) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        request_id = stream.response.headers["x-tidegate-request-id"]
        events = list(stream)
    on_the_way, ends = events[:4], events[4:]
    assert {event.type for event in on_the_way} == {"image_generation.partial_image"}
    assert [(event.seed, event.partial_image_index) for event in on_the_way] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert [event.type for event in ends] == ["image_generation.completed"] * 2
    assert picture(on_the_way[0].b64_json).size == (8, 8)
    assert {picture(event.b64_json).format for event in events} == {"WEBP"}
    assert ends[0].b64_json == whole.b64_json
    assert ends[0].tidegate["backend"] == "local/pool-light"
    wait_until(lambda: ended(light, request_id) == "answered", 10, "the ledger's row")


def ended(light: Light, request_id: str) -> str | None:
    row = light.rows().get(request_id)
    return None if row is None else row.outcome


def test_what_was_shown_is_not_shown_again_and_a_failure_is_an_event(light: Light, client: openai.OpenAI) -> None:
    """C166: three replicas are lost with it; each began anew, and the client saw the beginning once."""
    with generate(client, prompt="torn", stream=True, partial_images=3) as stream:
        request_id = stream.response.headers["x-tidegate-request-id"]
        assert next(stream).partial_image_index == 0
        with pytest.raises(openai.APIError) as failed:
            next(stream)
    assert (failed.value.code, failed.value.param) == ("backends_failed", None)
    wait_until(lambda: ended(light, request_id) == "failed", 10, "the ledger's row")
    assert light.rows()[request_id].attempts == 3


def test_a_client_that_leaves_a_stream_ends_the_work(light: Light, client: openai.OpenAI) -> None:
    with generate(client, prompt="endless", stream=True, partial_images=3) as stream:
        request_id = stream.response.headers["x-tidegate-request-id"]
        assert next(stream).type == "image_generation.partial_image"
    wait_until(lambda: ended(light, request_id) == "cancelled", 10, "the work to be cancelled")


def test_the_async_client(light: Light) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{light.url}/v1", api_key="none", max_retries=0) as client:
            asked = (client.images.generate(model=MODEL, prompt=f"number {index}") for index in range(8))
            answers = await asyncio.gather(*asked)
            assert len({(answer.data or [])[0].b64_json for answer in answers}) == 8
            stream = await client.images.generate(model=MODEL, prompt="x", stream=True)
            assert [event.type async for event in stream] == ["image_generation.completed"]
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(openai.NotFoundError):
                await client.images.generate(model="other", prompt="x")

    asyncio.run(ask())


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tidegate")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("a/b")
    assert unknown.value.code == "model_not_found"


def test_headers_say_where_and_how_long(light: Light, client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(model=MODEL, prompt="x", extra_body={"seed": 5})
    assert raw.headers["x-tidegate-backend"] == "local/pool-light"
    assert raw.headers["x-tidegate-seed"] == "5"
    assert float(raw.headers["x-tidegate-computed-s"]) == 0.02
    assert 0 <= float(raw.headers["x-tidegate-queued-s"]) < 5
    request_id = raw.headers["x-tidegate-request-id"]
    wait_until(lambda: request_id in light.rows() and light.rows()[request_id].outcome, 10, "the ledger's row")
    assert light.rows()[request_id].outcome == "answered"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"size": "100000x10000"}, "size", "invalid_value"),
        ({"size": "800x1200"}, "size", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"extra_body": {"seed": -1}}, "seed", "invalid_value"),
        ({"extra_body": {"guidance_scale": 7.5}}, "guidance_scale", "unsupported_parameter"),
        ({"extra_body": {"negative_prompt": "hands"}}, "negative_prompt", "unsupported_parameter"),
        ({"extra_body": {"promt": "x"}}, "promt", "unknown_parameter"),
        ({"style": "vivid"}, "style", "unsupported_parameter"),
        ({"background": "transparent"}, "background", "invalid_value"),
        ({"stream": True, "partial_images": 4}, "partial_images", "invalid_value"),
        ({"partial_images": 2}, "partial_images", "invalid_value"),
        ({"stream": True, "n": 11}, "n", "invalid_value"),
    ],
)
def test_a_bad_request_names_the_field(client: openai.OpenAI, more: dict[str, Any], param: str, code: str) -> None:
    """C172, C173: refused before anything is made, also where a stream was asked for."""
    with pytest.raises(openai.BadRequestError) as refused:
        generate(client, **more)
    assert (refused.value.param, refused.value.code, refused.value.type) == (param, code, "invalid_request_error")
    assert param in refused.value.message


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    """C179: no other model is used in silence."""
    with pytest.raises(openai.NotFoundError) as unknown:
        generate(client, model="a model that does not exist")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_no_model_means_the_served_one(client: openai.OpenAI) -> None:
    """C178."""
    assert client.images.generate(prompt="a two").data


def test_too_big_a_body_is_not_read(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        generate(client, prompt="x" * BODY_LIMIT_BYTES)
    assert refused.value.status_code == 413


def test_other_addresses_and_methods(light: Light) -> None:
    for method, path, status in (("GET", "/v1/imagez", 404), ("GET", "/v1/images/generations", 405)):
        lost = httpx.request(method, f"{light.url}{path}")
        assert (lost.status_code, lost.json()["error"]["type"]) == (status, "invalid_request_error")
    assert httpx.get(f"{light.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{light.url}/ready").json() == {"status": "ready"}


def test_ready_only_while_somebody_could_answer(tmp_path: Path) -> None:
    policy = {"serving": {"patience_s": 0.1, "request_deadline_s": 0.3}}
    with running(Light(tmp_path, policy=policy, arguments=("--replicas", "0"))) as gateway:
        away = httpx.get(f"{gateway.url}/ready")
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        with gateway.client() as client, pytest.raises(openai.InternalServerError) as refused:
            generate(client)
        assert (refused.value.status_code, refused.value.code) == (503, "no_capacity")
        assert refused.value.response.headers["retry-after"] == "1"


def test_a_stream_that_fails_has_a_status_of_its_own(tmp_path: Path, stand_in: StandIn) -> None:
    """C166, C167: not a byte is out before the pictures are there, so nothing comes twice and no failure is a 200."""
    policy = {
        "serving": {"patience_s": 0.1, "request_deadline_s": 3.0},
        "providers": [stand_in.spec(cooldown_s=0.1).model_dump(exclude_none=True)],
    }
    with running(Light(tmp_path, policy=policy, arguments=("--replicas", "0"))) as gateway, gateway.client() as client:
        stand_in.control(fault="drop", times=1)
        with pytest.raises(openai.InternalServerError) as lost:
            generate(client, stream=True)
        assert (lost.value.status_code, lost.value.code) == (504, "answer_lost")
        stand_in.control(fault="status", status=500, times=1)  # the first attempt fails, the second one's answer is all
        with generate(client, stream=True) as stream:
            assert len(list(stream)) == 1


def test_a_full_line_is_a_429_and_not_a_503(tmp_path: Path) -> None:
    """C021, C023, C024: shed load says so by its own status, the line has its limit, and every request ends."""
    arguments = ("--replicas", "1", "--latency-s", "0.3", "--waiting-max", "2")

    async def ask(gateway: Light) -> list[int]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
            asked = (client.post("/v1/images/generations", json={"prompt": "x"}) for _ in range(8))
            answers = await asyncio.gather(*asked)
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        return sorted(answer.status_code for answer in answers)

    with running(Light(tmp_path, arguments=arguments)) as gateway:
        assert asyncio.run(ask(gateway)) == [200] * 4 + [429] * 4  # one at work, one at the replica, two in the line
        wait_until(lambda: all(row.outcome for row in gateway.rows().values()), 10, "every request to have ended")
        assert sorted(str(row.outcome) for row in gateway.rows().values()) == ["answered"] * 4 + ["refused"] * 4


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([1])
bodies = st.dictionaries(st.sampled_from(sorted(ImagesBody.model_fields)) | st.text(max_size=3), values, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies, raw=st.none() | st.binary(max_size=20))
def test_no_body_is_our_fault(client: openai.OpenAI, body: dict[str, Any], raw: bytes | None) -> None:
    """Whatever is sent: an answer, or a refusal in OpenAI's shape; never a 5xx."""
    http: Any = client._client
    sent = {"content": raw} if raw is not None else {"content": _json(body)}
    answer = http.post(f"{client.base_url}images/generations", **sent)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "x", **body}).encode("utf-8", "surrogatepass")
