"""The field table: what a provider is asked in its own words, and what it therefore can honour."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.ids import RequestId
from tidegate.serve.providers.fields import NAMES, body_of, honours, wants
from tidegate.serve.work import ImageJob, Size
from tidegate.spec.providers import ProviderSpec

JOB = ImageJob(
    request=RequestId("r"),
    model="m",
    prompt="a two",
    images=2,
    size=Size(64, 32),
    seed=3,
    seed_asked=True,
    steps=4,
    local_only=False,
)


def spec(kind: str = "openai", **more: object) -> ProviderSpec:
    return ProviderSpec.model_validate({"name": "p", "base_url": "http://p", "kind": kind, **more})


BODIES = {
    "openai": {"prompt": "a two", "n": 2, "size": "64x32", "seed": 3, "num_inference_steps": 4},
    "fal": {
        "prompt": "a two",
        "num_images": 2,
        "image_size": {"width": 64, "height": 32},
        "output_format": "png",
        "seed": 3,
        "num_inference_steps": 4,
    },
    "replicate": {
        "prompt": "a two",
        "num_outputs": 2,
        "width": 64,
        "height": 32,
        "output_format": "png",
        "seed": 3,
        "num_inference_steps": 4,
    },
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_job_in_the_words_of_each_kind(kind: str) -> None:
    assert body_of(JOB, spec(kind)) == BODIES[kind]
    assert "seed" not in body_of(replace(JOB, seed_asked=False), spec(kind))


def test_the_operators_names_win_and_an_empty_one_takes_a_field_away() -> None:
    one = spec("replicate", fields={"steps": "steps", "width": "", "format": ""})
    assert body_of(JOB, one) == {"prompt": "a two", "num_outputs": 2, "height": 32, "seed": 3, "steps": 4}
    assert "size" not in honours(one)
    assert "size" in honours(one.model_copy(update={"sizes": ("64x32",)}))


def test_guidance_and_a_negative_prompt_leave_only_where_the_operator_names_them() -> None:
    """Scales of guidance differ from one provider to the next."""
    job = replace(JOB, guidance=3.5, negative_prompt="a three")
    named = spec(fields={"guidance": "guidance_scale", "negative_prompt": "negative_prompt"})
    assert {"guidance", "negative_prompt"} <= wants(job)
    assert not {"guidance", "negative_prompt"} & honours(spec())
    assert wants(job) <= honours(named)
    body = body_of(job, named)
    assert (body["guidance_scale"], body["negative_prompt"]) == (3.5, "a three")
    usual = spec("fal", guidance="cfg", fields={"guidance": "guidance_scale"})
    assert body_of(job, usual)["guidance_scale"] == 4.5, "1 is no guidance there, 0 is none here"
    assert "guidance_scale" not in body_of(JOB, usual)
    assert "negative_prompt" not in honours(usual)


def test_only_kinds_that_count_seeds_up_make_several_by_seed() -> None:
    """C176: image i is made with `seed + i`; fal and Replicate know one seed for all."""
    assert wants(JOB) == {"size", "images", "seed", "seeds", "steps"}
    assert wants(JOB) <= honours(spec("openai"))
    assert wants(JOB) - honours(spec("fal")) == {"seeds"}
    assert wants(replace(JOB, images=1)) <= honours(spec("replicate"))


@given(
    st.sampled_from(sorted(NAMES)),
    st.dictionaries(
        st.sampled_from(["images", "size", "width", "height", "seed", "steps"]), st.sampled_from(["", "x_"])
    ),
    st.booleans(),
    st.none() | st.integers(1, 9),
    st.integers(1, 4),
)
def test_what_is_honoured_is_asked_for(
    kind: str, fields: dict[str, str], seeded: bool, steps: int | None, images: int
) -> None:
    """No field that a client named gets lost on the way to a provider that says it honours it."""
    named = {field: name and f"{name}{field}" for field, name in fields.items()}
    one = spec(kind, fields=named)
    job = replace(JOB, seed_asked=seeded, steps=steps, images=images)
    if not wants(job) <= honours(one):
        return
    sent = body_of(job, one).values()
    assert not seeded or 3 in sent
    assert steps is None or steps in sent
    assert images == 1 or images in sent
    sizes = ("64x32", {"width": 64, "height": 32})
    assert any(size in sent for size in sizes) or {64, 32} <= {value for value in sent if isinstance(value, int)}
