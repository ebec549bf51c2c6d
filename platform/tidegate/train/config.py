"""A training run's config file as frozen models. `tidegate.spec.load.load_model(path, RunConfig)` reads it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

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
    """Pixels."""
    height: Positive
    """Pixels."""
    channels: Positive
    """Of what the network sees. Pixels: 1 grey, 3 RGB. Latents: the autoencoder's, 16 for Krea 2's."""
    patch: Positive
    """Side of the square of pixels, or of latent places, that makes one token."""
    latent_factor: Positive = 1
    """Pixels along the side of one latent place (8 for Krea 2's autoencoder); 1: the network sees pixels."""
    buckets: bool = False
    """The data set has images of other shapes too, each batch of one; `width` and `height` are then the samples'."""

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def rows(self) -> int:
        return self.height // self.side

    @property
    def columns(self) -> int:
        return self.width // self.side

    @property
    def side(self) -> int:
        """Pixels along the side of one token."""
        return self.patch * self.latent_factor

    @model_validator(mode="after")
    def _patches_fit(self) -> ImageSpec:
        if self.width % self.side or self.height % self.side:
            of = f"patch {self.patch}" + (f" × latent_factor {self.latent_factor}" if self.latent_factor > 1 else "")
            raise ValueError(f"width and height must be multiples of {of}, got {self.width}x{self.height}")
        if self.latent_factor == 1 and self.channels > 4:
            raise ValueError(f"channels must be at most 4 where the network sees pixels, got {self.channels}")
        return self


class TextSpec(Model):
    length: Positive
    """Tokens of a caption that the network sees; shorter ones are padded."""
    width: Positive
    """Of a state."""
    encoder: Literal["bytes", "prepared"] = "bytes"
    """`bytes`: `tidegate.data.text.ByteText`, which needs no weights. `prepared`: the data set has the states of a text
    encoder's layers."""
    layers: Positive = 1
    """States for each token: layers of the text encoder that are tapped."""
    seed: int = 0
    """Of the byte encoder's table."""

    @model_validator(mode="after")
    def _one_layer_of_bytes(self) -> TextSpec:
        if self.encoder == "bytes" and self.layers != 1:
            raise ValueError("layers must be 1: the byte encoder has one layer of states")
        return self


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


Shift: TypeAlias = Annotated[float, Field(gt=0)] | Literal["resolution"]
Precision: TypeAlias = Literal["float32", "bfloat16"]
Float8: TypeAlias = Literal["none", "tensorwise", "rowwise"]
Compile: TypeAlias = Literal["none", "inductor", "aot_eager"]
"""torch.compile's backend: `inductor` for speed, `aot_eager` to see that it can be compiled."""
Recompute: TypeAlias = Literal["none", "selective", "full"]


class ObjectiveSpec(Model):
    """Rectified flow with logit-normal timesteps, shifted by resolution."""

    timestep_mean: float = 0.0
    timestep_std: Annotated[float, Field(gt=0)] = 1.0
    shift: Shift = 1.0
    """s in t' = s·t / (1 + (s-1)·t): above 1 puts more weight on noise. `resolution`: Krea 2's, which grows with the
    number of image tokens (`tidegate.train.objective.shift_of`)."""
    captions_dropped: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples that are learnt without their caption, so that a sampler may use guidance."""


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
    level_window_steps: Annotated[int, Field(ge=2)] | None = 100
    """Losses are watched for a lasting rise in windows of so many steps (`tidegate.train.level`); null: they are not.
    A rise warns, and pins the newest checkpoint from before it, where one of the last three windows is still kept."""
    level_sigmas: Annotated[float, Field(gt=0)] = 4.0
    """So many standard errors make a rise."""


class SampleSpec(Model):
    """How images are made of the weights: what travels with an export, and the grids that a run makes of itself."""

    steps: Positive = 20
    """Euler steps."""
    shift: Shift = 1.0
    guidance: Annotated[float, Field(ge=0)] = 0.0
    """g in v = cond + g · (cond - uncond), as Krea 2 counts it; 0: none."""
    every_steps: Positive | None = None
    """How often a grid of samples is made of `prompts`; null: never."""
    prompts: tuple[str, ...] = ()
    seed: NotNegative = 0
    """Of the first image of a grid; each next one has the next."""

    @model_validator(mode="after")
    def _something_to_show(self) -> SampleSpec:
        if self.every_steps is not None and not self.prompts:
            raise ValueError("prompts must name at least one where every_steps is given")
        return self


class ParallelSpec(Model):
    """How ranks stand: replicate × shard × tensor of them (`tidegate.train.mesh`). `rest`: as many as there are."""

    replicate: Positive | Literal["rest"] = 1
    """Groups that each hold the whole network (HSDP)."""
    shard: Positive | Literal["rest"] = "rest"
    """Ranks over which one copy of weights, gradients and moments is split (FSDP)."""
    tensor: Positive = 1
    """Ranks that compute every block of the same batch together."""
    per_block: bool = False
    """Gather the weights of one block at a time, not of the whole network: for networks that fit no rank as a whole."""

    @model_validator(mode="after")
    def _one_rest(self) -> ParallelSpec:
        if self.replicate == self.shard == "rest":
            raise ValueError("only one of replicate and shard can be `rest`")
        return self


class StageSpec(Model):
    """A part of the run. What is not given is the run's own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    steps: Positive
    width: Positive | None = None
    """Of the images, in pixels."""
    height: Positive | None = None
    global_batch: Positive | None = None
    micro_batch: Positive | None = None
    shift: Shift | None = None
    precision: Precision | None = None
    float8: Float8 | None = None
    activation_checkpointing: Recompute | None = None
    data: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = None
    """Its data set: a folder in the run's data directory; null: that directory itself."""


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
    parallel: ParallelSpec = ParallelSpec()
    stages: tuple[StageSpec, ...] = ()
    """One after the other, weights and step count carried over; none: the whole run is one stage."""
    micro_batch: Positive | None = None
    """Samples that a rank computes at a time, gradients being summed over them; null: its whole share."""
    precision: Precision = "float32"
    """Of weights and activations while they are computed with; the weights that are updated, their moments and all sums
    over ranks are float32."""
    float8: Float8 = "none"
    """8-bit matrix products in the blocks (`tidegate.train.float8`): one scale for a tensor, or one for each row."""
    activation_checkpointing: Recompute = "none"
    """What of a block is computed again in the backward pass instead of kept: nothing, what is cheap, or all."""
    compile: Compile = "none"
    """`torch.compile` of each block with this backend: `inductor` for speed, `aot_eager` to see that it can be."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What one device could do, for MFU; null: by the device's name, where it is known (`tidegate.train.flops`)."""
    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard` in the run directory."""
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
        if self.model.num_text_layers != self.text.layers:
            raise ValueError(f"model.num_text_layers must be text.layers = {self.text.layers}")
        if self.optimizer.warmup_steps + self.optimizer.decay_steps > self.steps:
            raise ValueError("optimizer.warmup_steps + optimizer.decay_steps must not exceed steps")
        if self.stages and self.steps != (total := sum(stage.steps for stage in self.stages)):
            raise ValueError(f"steps must be the sum of the stages' steps, {total}, got {self.steps}")
        for stage in self.stages:
            if (stage.width or 0) % self.image.side or (stage.height or 0) % self.image.side:
                raise ValueError(f"stage {stage.name}: width and height must be multiples of {self.image.side}")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages need different names, got {', '.join(names)}")
        self._tensor_fits()
        if self.sample.every_steps is not None and (self.image.latent_factor > 1 or self.text.encoder != "bytes"):
            raise ValueError("sample.every_steps must be null: a rank has no autoencoder and no text encoder")
        return self

    def _tensor_fits(self) -> None:
        tensor, model = self.parallel.tensor, self.model
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "text_num_attention_heads",
            "text_num_key_value_heads",
            "text_intermediate_size",
        ):
            if getattr(model, name) % tensor:
                raise ValueError(f"parallel.tensor {tensor} must divide model.{name}, {getattr(model, name)}")
        uses_float8 = self.float8 != "none" or any(stage.float8 not in (None, "none") for stage in self.stages)
        if tensor > 1 and uses_float8:
            raise ValueError("float8 must be none where parallel.tensor is above 1: its products are of whole weights")
