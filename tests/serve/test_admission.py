"""What a body may hold: everything is refused before any work, by the field's name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.ids import RequestId
from tidegate.serve.admission import SEED_LIMIT, Admitted, Limits, Refused, Reply, admit
from tidegate.serve.api import ApiError, ImagesBody, parse_body
from tidegate.serve.pictures import images_answer
from tidegate.serve.work import ImageJob, Made, Size

LIMITS = Limits(model="m", sizes=(Size(8, 8), Size(16, 8)), waiting_max=5, quality_steps={"low": 4})


def admitted(waiting: int = 0, limits: Limits = LIMITS, **body: Any) -> Admitted | Refused:
    raw = json.dumps({"prompt": "a two"} | body).encode()
    return admit(parse_body(raw, ImagesBody), limits, request=RequestId("r"), waiting=waiting, drawn_seed=77)


def decide(waiting: int = 0, limits: Limits = LIMITS, **body: Any) -> ImageJob | Refused:
    decided = admitted(waiting, limits, **body)
    return decided if isinstance(decided, Refused) else decided.job


def test_defaults_are_filled_in() -> None:
    """C178: no model in the body means the served one."""
    job = decide()
    assert isinstance(job, ImageJob)
    assert (job.model, job.images, job.size, job.seed, job.seed_asked) == ("m", 1, Size(8, 8), 77, False)
    assert not job.local_only


def test_what_the_client_asks_for_is_kept() -> None:
    job = decide(n=3, size="16x8", seed=5, num_inference_steps=9, local_only=True, model="m")
    assert isinstance(job, ImageJob)
    assert (job.images, job.size, job.seed, job.seed_asked, job.steps) == (3, Size(16, 8), 5, True, 9)
    assert job.local_only


def test_openais_own_fields_are_accepted_where_they_are_true() -> None:
    body = {"quality": "auto", "background": "opaque", "user": "u", "safety_identifier": "s", "moderation": "low"}
    nulls = {"n": None, "size": None, "stream": None, "response_format": None, "style": None, "negative_prompt": ""}
    assert isinstance(decide(**body, **nulls), ImageJob)
    assert isinstance(decide(response_format="b64_json", output_format="png", size="auto", stream=False), ImageJob)


def test_quality_stands_for_steps_and_sides_for_a_size() -> None:
    job = decide(quality="low", width=16, height=8, size="16x8")
    assert isinstance(job, ImageJob)
    assert (job.steps, job.size) == (4, Size(16, 8))


def test_guidance_and_what_it_leads_away_from() -> None:
    limits = replace(LIMITS, guidance=0.0)
    guided = decide(limits=limits, guidance_scale=4, negative_prompt="hands")
    assert isinstance(guided, ImageJob)
    assert (guided.guidance, guided.negative_prompt) == (4, "hands")
    for body, param in (
        ({"negative_prompt": "hands"}, "negative_prompt"),  # the model's own guidance is 0: it would have no effect
        ({"negative_prompt": "x" * 4001, "guidance_scale": 1}, "negative_prompt"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": 31}, "guidance_scale"),
    ):
        refused = decide(limits=limits, **body)
        assert isinstance(refused, Refused)
        assert (refused.status, refused.param) == (400, param)


def test_how_pictures_are_handed_over() -> None:
    """C170: `url`, `b64_json` or none."""
    jpeg = admitted(output_format="jpeg", output_compression=40, response_format="url")
    stream = admitted(stream=True, partial_images=0)
    assert isinstance(jpeg, Admitted)
    assert isinstance(stream, Admitted)
    assert jpeg.reply == Reply(format="jpeg", compression=40, as_url=True)
    assert stream.reply == Reply(stream=True)


REFUSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "C179 unknown model": ({"model": "a model that does not exist"}, 404, "model"),
    "C172 huge size": ({"size": "100000x10000"}, 400, "size"),
    "C172 a size of a million digits": ({"size": "9" * 100_000 + "x1"}, 400, "size"),
    "C173 odd size": ({"size": "9x8"}, 400, "size"),
    "size zero": ({"size": "0x8"}, 400, "size"),
    "size in words": ({"size": "large"}, 400, "size"),
    "n zero": ({"n": 0}, 400, "n"),
    "n eleven": ({"n": 11}, 400, "n"),
    "empty prompt": ({"prompt": " "}, 400, "prompt"),
    "long prompt": ({"prompt": "x" * 4001}, 400, "prompt"),
    "negative seed": ({"seed": -1}, 400, "seed"),
    "huge seed": ({"seed": SEED_LIMIT}, 400, "seed"),
    "steps zero": ({"num_inference_steps": 0}, 400, "num_inference_steps"),
    "many steps": ({"num_inference_steps": 10_000}, 400, "num_inference_steps"),
    "a response format of nobody's": ({"response_format": "xml"}, 400, "response_format"),
    "url in a stream": ({"response_format": "url", "stream": True}, 400, "response_format"),
    "gif": ({"output_format": "gif"}, 400, "output_format"),
    "compressed png": ({"output_compression": 50}, 400, "output_compression"),
    "compression above 100": ({"output_compression": 101, "output_format": "webp"}, 400, "output_compression"),
    "quality that isn't made": ({"quality": "high"}, 400, "quality"),
    "quality and steps": ({"quality": "low", "num_inference_steps": 3}, 400, "quality"),
    "style": ({"style": "vivid"}, 400, "style"),
    "transparent": ({"background": "transparent"}, 400, "background"),
    "moderation": ({"moderation": "strict"}, 400, "moderation"),
    "negative prompt": ({"negative_prompt": "hands"}, 400, "negative_prompt"),
    "guidance": ({"guidance_scale": 4}, 400, "guidance_scale"),
    "svg": ({"svg": {"model": "x"}}, 400, "svg"),
    "frames": ({"frame_count": 3}, 400, "frame_count"),
    "a width alone": ({"width": 8}, 400, "width"),
    "a height alone": ({"height": 8}, 400, "height"),
    "sides against size": ({"width": 8, "height": 8, "size": "16x8"}, 400, "size"),
    "C173 odd sides": ({"width": 9, "height": 8}, 400, "width"),
    "a width of 4000 digits": ({"width": 10**4000, "height": 8}, 400, "width"),
    "partial images": ({"partial_images": 2}, 400, "partial_images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    body, status, param = REFUSED[case]
    refused = decide(**body)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.param) == (status, param)
    assert param is None or param in refused.message


def test_a_full_line_says_when_to_come_back() -> None:
    refused = decide(waiting=5)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.retry_after_s) == (429, 1.0)


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"[1]", None, "invalid_json"),
        (b"[" * 100_000, None, "invalid_json"),
        (b"{}", "prompt", "missing_required_parameter"),
        (b'{"prompt": "x", "promt": "y"}', "promt", "unknown_parameter"),
        (b'{"prompt": "x", "n": "3"}', "n", "invalid_type"),
        (b'{"prompt": "x", "n": true}', "n", "invalid_type"),
        (b'{"prompt": null}', "prompt", "invalid_type"),
        (b'{"prompt": "x", "guidance_scale": NaN}', None, "invalid_json"),
        (b'{"prompt": "half a pair: \\ud83d"}', None, "invalid_json"),
        (b'{"prompt": "half a pair: \xed\xa0\xbd"}', None, "invalid_json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", None, "invalid_json"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(raw: bytes, param: str | None, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(raw, ImagesBody)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    error = refused.value.body()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def status_of(raw: bytes) -> int:
    """200 where it is admitted."""
    try:
        decided = admit(parse_body(raw, ImagesBody), LIMITS, request=RequestId("r"), waiting=0, drawn_seed=1)
    except ApiError as error:
        return error.status
    return decided.status if isinstance(decided, Refused) else 200


values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([1]) | st.just({"a": 1})
fields = st.sampled_from(sorted(ImagesBody.model_fields)) | st.text(max_size=3)


@settings(max_examples=50)
@given(st.binary(max_size=50) | st.dictionaries(fields, values, max_size=4).map(lambda body: json.dumps(body).encode()))
def test_no_body_breaks_the_reader(raw: bytes) -> None:
    assert status_of(raw) in (200, 400, 404)


@given(
    n=st.integers(-3, 20),
    seed=st.none() | st.integers(-5, 2**60),
    size=st.sampled_from(["8x8", "16x8", "8x16", "auto"]),
)
def test_what_is_admitted_is_in_bounds(n: int, seed: int | None, size: str) -> None:
    job = decide(n=n, seed=seed, size=size)
    if isinstance(job, ImageJob):
        assert 1 <= job.images <= LIMITS.images_max
        assert job.size in LIMITS.sizes
        assert 0 <= job.seed + job.images - 1 < SEED_LIMIT


def test_the_answer_names_size_format_and_seed() -> None:
    """C175, C176: filled in, and one item for each picture."""
    made = Made(pngs=(b"a", b"b"), seed=7)
    body = images_answer(made, made.pngs, Size(8, 8), Reply(), 12.9)
    assert (body["created"], body["size"], body["output_format"], body["seed"]) == (12, "8x8", "png", 7)
    assert [item["b64_json"] for item in body["data"]] == ["YQ==", "Yg=="]
    assert "seed" not in images_answer(Made(pngs=(b"a",), seed=None), (b"a",), Size(8, 8), Reply(), 0)
    as_url = images_answer(made, made.pngs, Size(8, 8), Reply(format="webp", as_url=True), 0)
    assert as_url["data"][0] == {"url": "data:image/webp;base64,YQ=="}


def test_retry_headers() -> None:
    assert ApiError(503, "x", retry_after_s=3.2).headers() == {"retry-after": "4"}
    assert ApiError(503, "x", retry_after_s=0.0).headers() == {"retry-after": "1"}
    assert ApiError(504, "x", retry=False).headers() == {"x-should-retry": "false"}
