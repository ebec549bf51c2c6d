"""How ranks stand, and how many can. Pure."""

from __future__ import annotations

import pytest

from captioned import tiny_run
from tidegate.errors import ConfigError
from tidegate.train.config import ParallelSpec
from tidegate.train.mesh import MeshShape, accepted, mesh_shape, together


@pytest.mark.parametrize(
    ("world", "spec", "shape"),
    [
        (1, ParallelSpec(), MeshShape(1, 1, 1)),
        (7, ParallelSpec(), MeshShape(1, 7, 1)),
        (8, ParallelSpec(tensor=2), MeshShape(1, 4, 2)),
        (448, ParallelSpec(replicate="rest", shard=8), MeshShape(56, 8, 1)),
        (472, ParallelSpec(replicate="rest", shard=8), MeshShape(59, 8, 1)),
        (512, ParallelSpec(replicate=32), MeshShape(32, 16, 1)),
        (8, ParallelSpec(replicate=2, shard=2, tensor=2), MeshShape(2, 2, 2)),
    ],
)
def test_the_mesh_of_a_world(world: int, spec: ParallelSpec, shape: MeshShape) -> None:
    assert mesh_shape(world, spec) == shape
    assert shape.data * shape.tensor == world


@pytest.mark.parametrize(
    ("world", "spec", "near"),
    [
        (7, ParallelSpec(tensor=2), "6 or 8"),
        (500, ParallelSpec(replicate="rest", shard=8), "496 or 504"),
        (4, ParallelSpec(replicate="rest", shard=8), "8"),
        (6, ParallelSpec(replicate=2, shard=2), "4"),
    ],
)
def test_what_does_not_fit_says_what_would(world: int, spec: ParallelSpec, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"^parallel: {world} ranks are not replicate .*\nhint: take {near} ranks"):
        mesh_shape(world, spec)


def test_the_sizes_that_a_run_accepts() -> None:
    hsdp = tiny_run(global_batch=7, parallel={"replicate": "rest", "shard": 2, "tensor": 2})
    assert accepted(hsdp, 40) == (4, 8, 12), "6 parts of 7 samples at most"
    assert accepted(tiny_run(), 100) == tuple(range(1, 8))


def test_who_stands_on_one_node() -> None:
    assert together(ParallelSpec()) == (1,)
    assert together(ParallelSpec(tensor=4)) == (4,)
    assert together(ParallelSpec(replicate="rest", shard=8)) == (8, 1)
