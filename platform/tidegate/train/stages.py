"""A run's stages: what holds from which step to which. Pure.

A run without `stages` is one stage. Steps count on over all of them; a stage's data order begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.train.config import Float8, ImageSpec, Precision, Recompute, RunConfig, Shift, StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    number: int
    """From 0."""
    name: str
    begins: int
    """Steps done before it."""
    ends: int
    """Steps done after it."""
    image: ImageSpec
    global_batch: int
    micro_batch: int | None
    shift: Shift
    precision: Precision
    float8: Float8
    activation_checkpointing: Recompute
    data: str
    """Folder in the run's data directory, empty for that directory itself."""

    def data_seed(self, seed: int) -> int:
        """Of the order of its samples: two stages over one data set see it in different orders."""
        return seed + self.number


def stages(config: RunConfig) -> tuple[Stage, ...]:
    specs: Sequence[StageSpec] = config.stages or (StageSpec(name=config.name, steps=config.steps),)
    found: list[Stage] = []
    for number, spec in enumerate(specs):
        begins = found[-1].ends if found else 0
        image = config.image.model_dump()
        image |= {side: value for side in ("width", "height") if (value := getattr(spec, side)) is not None}
        found.append(
            Stage(
                number=number,
                name=spec.name,
                begins=begins,
                ends=begins + spec.steps,
                image=ImageSpec.model_validate(image),
                global_batch=spec.global_batch or config.global_batch,
                micro_batch=spec.micro_batch or config.micro_batch,
                shift=spec.shift or config.objective.shift,
                precision=spec.precision or config.precision,
                float8=spec.float8 or config.float8,
                activation_checkpointing=spec.activation_checkpointing or config.activation_checkpointing,
                data=spec.data or "",
            )
        )
    return tuple(found)


def stage_at(plan: Sequence[Stage], step: int) -> Stage:
    """Whose turn it is when `step` steps are done; the last one's when all are."""
    return next((stage for stage in plan if step < stage.ends), plan[-1])
