"""How many ranks a run can use, and how they stand: replicate × shard × tensor. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.train.config import ParallelSpec, RunConfig
from tidegate.train.stages import stages


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks count through the last axis first: tensor peers stand side by side, and so share a node."""

    replicate: int
    """Groups that each hold the whole network and average their gradients."""
    shard: int
    """Ranks over which each such group's weights, gradients and moments are split."""
    tensor: int
    """Ranks that compute each block of one batch together."""

    @property
    def data(self) -> int:
        """How many parts the global batch is cut into."""
        return self.replicate * self.shard


def mesh_shape(world: int, spec: ParallelSpec) -> MeshShape:
    """
    Raises:
        ConfigError: `world` ranks can't stand like this; says with how many they could.
    """
    rest = _rest(world, spec)
    if rest is None:
        raise ConfigError(
            f"parallel: {world} ranks are not {_written(spec)}\n"
            f"hint: take {_near(world, spec)} ranks, or let replicate or shard be `rest`"
        )
    replicate = rest if spec.replicate == "rest" else spec.replicate
    shard = rest if spec.shard == "rest" else spec.shard
    return MeshShape(replicate, shard, spec.tensor)


def accepted(config: RunConfig, most: int) -> tuple[int, ...]:
    """The world sizes up to `most` that a run can use, smallest first."""
    batch = min(stage.global_batch for stage in stages(config))
    sizes = (world for world in range(1, most + 1) if _rest(world, config.parallel) is not None)
    return tuple(world for world in sizes if mesh_shape(world, config.parallel).data <= batch)


def together(spec: ParallelSpec) -> tuple[int, ...]:
    """Ranks that should stand on one node, most first: a whole shard group where replicas of it exist, so that a node
    that is lost takes one replica with it; at least tensor peers, who speak in every block."""
    if spec.replicate == 1 or spec.shard == "rest":
        return (spec.tensor,)
    return (spec.shard * spec.tensor, spec.tensor)


def _rest(world: int, spec: ParallelSpec) -> int | None:
    """What `rest` stands for (1 where nothing is), None where `world` doesn't fit."""
    fixed = spec.tensor
    for axis in (spec.replicate, spec.shard):
        fixed *= 1 if axis == "rest" else axis
    if world < fixed or world % fixed:
        return None
    rest = world // fixed
    return rest if "rest" in (spec.replicate, spec.shard) or rest == 1 else None


def _near(world: int, spec: ParallelSpec) -> str:
    fitting = [size for size in range(1, 2 * world + spec.tensor * 1024) if _rest(size, spec) is not None]
    below = [size for size in fitting if size < world][-1:]
    above = [size for size in fitting if size > world][:1]
    return " or ".join(map(str, below + above))


def _written(spec: ParallelSpec) -> str:
    return f"replicate {spec.replicate} × shard {spec.shard} × tensor {spec.tensor}"
