"""What a canary finds wrong with new weights' pictures."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tidegate.serve.rehearsal import problem
from tidegate.spec.weights import RolloutSpec

SPEC = RolloutSpec(prompts=("one", "two"), distance_max=0.3)


def picture(*colours: str, size: tuple[int, int] = (32, 32)) -> bytes:
    """Stripes."""
    image = Image.new("RGB", size)
    width = size[0] // len(colours)
    for number, colour in enumerate(colours):
        image.paste(colour, (number * width, 0, (number + 1) * width, size[1]))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


GOOD = [picture("red", "blue"), picture("white", "black", "red", "blue")]


@pytest.mark.parametrize(
    ("new", "old", "said"),
    [
        (GOOD, GOOD, None),
        (GOOD, [], None),
        ([GOOD[0], picture("black")], [], "'two' has one colour"),
        ([GOOD[0], picture("red", "blue", size=(64, 32))], GOOD, "makes 64x32, what serves makes 32x32"),
        ([picture("blue", "red"), picture("black", "white", "blue", "red")], GOOD, "from those of what serves"),
    ],
)
def test_what_is_wrong_with_pictures(new: list[bytes], old: list[bytes], said: str | None) -> None:
    found = problem(new, old, SPEC)
    assert (found is None) if said is None else (said in (found or ""))


def test_other_pictures_are_welcome_where_no_distance_is_set() -> None:
    far = [picture("blue", "red"), picture("black", "white", "blue", "red")]
    assert problem(far, GOOD, RolloutSpec(prompts=("one", "two"))) is None
