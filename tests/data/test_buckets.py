"""Sizes, and which image goes to which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.data.buckets import Limits, Size, block_rows, bucket, cut, nearest, sizes
from tidegate.errors import DataError

sides = st.integers(1, 5000)


@given(st.sampled_from([64, 256, 512, 1024]), st.sampled_from([8, 16, 64]), st.sampled_from([1.0, 1.5, 2.0, 4.0]))
def test_sizes_cost_about_the_same_and_keep_the_limits(resolution: int, multiple: int, aspect_max: float) -> None:
    found = sizes(resolution, multiple=multiple, aspect_max=aspect_max)
    assert Size(resolution, resolution) in found
    for size in found:
        assert size.width % multiple == size.height % multiple == 0
        assert max(size.aspect, 1 / size.aspect) <= aspect_max
        area = size.width * size.height
        assert resolution**2 - size.width * multiple < area <= resolution**2, "one more row would be too many"


def test_the_square_alone() -> None:
    assert sizes(256, multiple=16, aspect_max=1) == (Size(256, 256),)


@pytest.mark.parametrize(("resolution", "multiple", "aspect_max"), [(8, 16, 2.0), (64, 0, 2.0), (64, 16, 0.5)])
def test_no_size_names_the_fix(resolution: int, multiple: int, aspect_max: float) -> None:
    with pytest.raises(DataError, match="no size fits\nhint: "):
        sizes(resolution, multiple=multiple, aspect_max=aspect_max)


@given(sides, sides)
def test_an_image_goes_where_least_is_cut_off(width: int, height: int) -> None:
    among = sizes(256, multiple=16, aspect_max=2)
    image = Size(width, height)

    def kept(size: Size) -> float:
        return min(size.aspect / image.aspect, image.aspect / size.aspect)

    assert kept(nearest(image, among)) == pytest.approx(max(map(kept, among)))
    assert nearest(Size(height, width), among).aspect == pytest.approx(1 / nearest(image, among).aspect, rel=0.2)


@pytest.mark.parametrize(
    ("image", "caption", "why"),
    [
        (Size(512, 512), " \n", "empty caption"),
        (Size(99, 512), "a", "too small: 99x512, the shorter side must be at least 100"),
        (Size(100, 301), "a", "too long: 100x301, one side may be 3 times the other"),
        (Size(100, 300), "a", ""),
    ],
)
def test_what_is_not_used(image: Size, caption: str, why: str) -> None:
    limits = Limits(sizes=(Size(64, 64), Size(48, 80)), side_min=100, aspect_max=3)
    assert bucket(image, caption, limits) == (None if why else Size(48, 80), why)


def test_without_buckets_each_size_is_one() -> None:
    assert bucket(Size(5, 7), "a", Limits()) == (Size(5, 7), "")


@given(st.integers(1, 1000), st.integers(1, 100))
def test_shards_hold_each_row_once(rows: int, rows_per_shard: int) -> None:
    parts = cut(rows, rows_per_shard)
    assert [row for part in parts for row in part] == list(range(rows))
    assert {len(part) for part in parts[:-1]} <= {rows_per_shard}


def test_a_block_has_about_sixteen_mebibytes() -> None:
    assert [block_rows(size) for size in (1, 100, 100_000, 3e6, 1e9)] == [1 << 20, 1 << 17, 128, 16, 16]
