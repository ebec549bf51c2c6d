"""A training run's config file as frozen models. `tidegate.spec.load.load_model(path, RunConfig)` reads it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tidegate.checkpoint.address import parse_address
from tidegate.spec.policy import Model

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


class ModelSpec(Model):
    """The arguments of diffusers' `Krea2Transformer2DModel`, under its own names."""

    in_channels: Positive
    """Numbers in one image token: channels × patch²."""
    num_layers: Positive
    attention_head_dim: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    intermediate_size: Positive
    timestep_embed_dim: Positive
    text_hidden_dim: Positive
    num_text_layers: Positive
    text_num_attention_heads: Positive
    text_num_key_value_heads: Positive
    text_intermediate_size: Positive
    num_layerwise_text_blocks: NotNegative
    num_refiner_text_blocks: NotNegative
    axes_dims_rope: tuple[Positive, Positive, Positive]
    """How a head's dimensions are split over time, row and column."""
    rope_theta: Annotated[float, Field(gt=0)] = 1000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSpec:
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope sums to {sum(self.axes_dims_rope)}; must sum to attention_head_dim, "
                f"{self.attention_head_dim}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class ImageSpec(Model):
    width: Positive
    height: Positive
    channels: Annotated[int, Field(ge=1, le=4)]
    """1 grey, 3 RGB."""
    patch: Positive
    """Side of the square of pixels that makes one token."""

    @property
    def tokens(self) -> int:
        return (self.width // self.patch) * (self.height // self.patch)

    @model_validator(mode="after")
    def _patches_fit(self) -> ImageSpec:
        if self.width % self.patch or self.height % self.patch:
            raise ValueError(
                f"width and height must be multiples of patch {self.patch}, got {self.width}x{self.height}"
            )
        return self


class TextSpec(Model):
    """See `tidegate.data.text.ByteText`."""

    length: Positive
    width: Positive
    seed: int


class OptimizerSpec(Model):
    """AdamW under a warmup–stable–decay schedule."""

    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: NotNegative = 0
    """The learning rate rises linearly to `lr` over these first steps."""
    decay_steps: NotNegative = 0
    """It falls linearly towards 0 over these last steps."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longest gradient that is applied as it is."""


class ObjectiveSpec(Model):
    """Rectified flow with logit-normal timesteps, shifted by resolution."""

    timestep_mean: float = 0.0
    timestep_std: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(gt=0)] = 1.0
    """s in t' = s·t / (1 + (s-1)·t): above 1 puts more weight on noise."""


class CheckpointSpec(Model):
    every_steps: Positive
    """How often a checkpoint goes to disk."""
    ram_every_steps: Positive | None = None
    """How often one is kept in shared memory, which outlives a rank; null: never. Takes twice the state's size."""
    when_late: Literal["wait", "skip"] = "wait"
    """What a save to disk does that is due while the one before is still being written."""
    keep: Positive = 3
    """How many stay on disk; the newest good one always does."""
    store: str | None = None
    """`s3://bucket/prefix`, the prefix this run's own: committed checkpoints are sent there in the background."""
    store_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Of a store that isn't Amazon's."""
    store_every_steps: Positive | None = None
    """Steps whose checkpoints are sent; null: all that are committed. One that is committed while another is on its
    way replaces those that wait."""
    store_keep: Positive | None = None
    """How many stay in the store; the newest good one always does. null: all."""
    store_attempts: Positive = 6
    """How often a request to the store is tried, with growing waits (up to 20 s) in between."""
    drill_every_s: Annotated[float, Field(gt=0)] | None = None
    """How often the newest checkpoint is brought to life in a process of its own (`tidegate.train.drill`); null: never.
    It takes one CPU when nobody wants it, and memory for the network."""
    store_failures_max: NotNegative = 3
    """So many checkpoints in a row may fail to reach the store; one more and the run saves, and stops."""

    @field_validator("store")
    @classmethod
    def _is_an_address(cls, store: str | None) -> str | None:
        if store is not None:
            parse_address(store)
        return store

    @model_validator(mode="after")
    def _store_fits(self) -> CheckpointSpec:
        fields = type(self).model_fields
        given = [name for name in fields if name.startswith("store_") and getattr(self, name) != fields[name].default]
        if self.store is None and given:
            raise ValueError(f"{given[0]} does nothing without store")
        if (self.store_every_steps or self.every_steps) % self.every_steps:
            raise ValueError(f"store_every_steps must be a multiple of every_steps, {self.every_steps}")
        return self


class GuardSpec(Model):
    """When a step is not trusted; see `tidegate.train.guard`."""

    not_finite_max: NotNegative = 3
    """So many steps in a row are skipped because a loss or gradient is not finite; one more rolls the run back."""
    spike_factor: Annotated[float, Field(gt=1)] | None = 3.0
    """A loss of over this many times its running mean rolls the run back; null: no loss does."""
    spike_window_steps: Positive = 50
    """The running mean is over so many steps; before there are as many, no loss is a spike."""
    rollbacks_max: NotNegative = 3
    """After so many the run ends instead."""


class SampleSpec(Model):
    steps: Positive = 20
    """Euler steps of the sampler that travels with the weights."""
    shift: Annotated[float, Field(gt=0)] = 1.0


class RunConfig(Model):
    """All that a run needs to know. Same config, same data: same losses, bit for bit, at one world size."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: NotNegative
    steps: Positive
    global_batch: Positive
    """Samples per step over all ranks; how many ranks share them does not change which ones they are."""
    model: ModelSpec
    image: ImageSpec
    text: TextSpec
    optimizer: OptimizerSpec
    checkpoint: CheckpointSpec
    objective: ObjectiveSpec = ObjectiveSpec()
    guard: GuardSpec = GuardSpec()
    sample: SampleSpec = SampleSpec()
    threads_per_rank: Positive = 1
    """Threads of CPU arithmetic in each rank."""
    log_every_steps: Positive = 20
    """How often rank 0 logs a line; `metrics.jsonl` has every step."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """After this long a collective without its peers gives up."""

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        token = self.image.channels * self.image.patch**2
        if self.model.in_channels != token:
            raise ValueError(f"model.in_channels must be image.channels × image.patch² = {token}")
        if self.model.text_hidden_dim != self.text.width:
            raise ValueError(f"model.text_hidden_dim must be text.width = {self.text.width}")
        if self.model.num_text_layers != 1:
            raise ValueError("model.num_text_layers must be 1: the byte encoder has one layer of states")
        if self.optimizer.warmup_steps + self.optimizer.decay_steps > self.steps:
            raise ValueError("optimizer.warmup_steps + optimizer.decay_steps must not exceed steps")
        return self
