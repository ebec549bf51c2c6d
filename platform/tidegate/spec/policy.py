"""What the operator decides: `policy.yaml` as frozen models.

Every duration ends in `_s`, every temperature in `_celsius`, every amount of money in `_usd`; a key without its unit is
refused with the nearest right one. `tidegate.spec.load.load_policy` reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
SecondsOrZero = Annotated[float, Field(ge=0, le=30 * 86_400)]
Celsius = Annotated[float, Field(ge=0, le=130)]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ArbiterSpec(Model):
    tick_s: Seconds = 0.2
    """How often the arbiter looks at the cluster."""
    state_dir: str = "~/.tidegate"
    """Where the journal lies, on the head node."""
    gateway_silent_after_s: Seconds = 3.0
    """A gateway that has not reported for this long is not waited for."""

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser()


class ServingSpec(Model):
    app: str = "images"
    """The Serve application whose pools the arbiter sets."""
    protect: bool = True
    """A claim takes serving's GPUs only after a canary has come back from a provider."""
    floor_replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas that no claim takes."""
    patience_s: Seconds = 10.0
    """How long a request may wait for a local replica before it is spilled."""
    request_deadline_s: Seconds = 60.0
    """From accepting a request to its answer; shared by all attempts."""
    drain_deadline_s: Seconds = 10.0
    """How long in-flight requests may take to finish when their replica must leave."""
    return_step_replicas: Annotated[int, Field(ge=1)] = 2
    """Replicas that come home at once when training ends."""
    return_dwell_s: SecondsOrZero = 2.0
    """Rest between two such steps, counted from the last replica being ready."""


class ClaimsSpec(Model):
    classes: tuple[str, ...] = ("pretrain", "serving", "scavenger")
    """Claim classes, the strongest first. `serving` is the pools' own place in this order."""
    deadline_s: Seconds = 300.0
    """A claim that is not granted this long after its turn came is undone."""
    proving_retry_s: Seconds = 2.0
    """Rest between two rounds of canaries while no way out answers."""

    @model_validator(mode="after")
    def _serving_has_a_place(self) -> ClaimsSpec:
        if "serving" not in self.classes:
            raise ValueError("must name `serving`, so that the others stand above or below it")
        return self


class ProviderSpec(Model):
    name: str
    kind: Literal["openai"] = "openai"
    """The wire protocol: which file in `serve/providers/` speaks to it."""
    base_url: str
    """Up to and with `/v1`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; keys never stand in this file."""
    models: dict[str, str] = Field(default_factory=dict)
    """Our model's name -> theirs. A model that isn't named here is not sent to this provider."""
    sizes: tuple[str, ...] | None = None
    """Sizes that it can make, `WxH`; none = all."""
    slots: Annotated[int, Field(ge=1)] = 8
    """Requests that it takes at a time."""
    price_per_image_usd: Annotated[float, Field(ge=0)] = 0.0
    timeout_s: Seconds = 30.0
    cooldown_s: Seconds = 5.0
    """How long it is left alone after a failure, unless it says so itself by `Retry-After`."""


class TemperatureRule(Model):
    limit_celsius: Celsius = 78.0
    """Above this the GPU leaves its gang at once (Krea 2 talk: remove the GPU, do not debug)."""
    warn_celsius: Celsius = 75.0
    release_celsius: Celsius = 70.0
    """At or below this, for `release_after_s`, the verdict is lifted."""
    release_after_s: SecondsOrZero = 600.0
    samples: Annotated[int, Field(ge=1)] = 1
    """Plausible readings in a row above the limit that it takes."""
    implausible_above_celsius: Annotated[float, Field(ge=100, le=300)] = 130.0
    """Above this (or at or below 0) a value is no reading."""

    @model_validator(mode="after")
    def _in_order(self) -> TemperatureRule:
        if not self.release_celsius <= self.warn_celsius <= self.limit_celsius:
            raise ValueError("must have release_celsius <= warn_celsius <= limit_celsius")
        return self


class HealthSpec(Model):
    period_s: Seconds = 1.0
    nvml_library: str | None = None
    """Path of libnvidia-ml.so.1; none = the loader finds it. For drivers in a container image:
    /run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"""
    reading_deadline_s: Seconds = 10.0
    """A reading that takes longer is a finding of its own (NVML calls can hang for ever)."""
    agent_silent_after_s: Seconds = 15.0
    state_dir: str = "~/.tidegate/health"
    """Where each node's agent keeps its standing verdicts over its own restarts; on the node."""
    temperature: TemperatureRule = TemperatureRule()

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser()


class GangSpec(Model):
    heartbeat_s: Seconds = 0.2
    """How often a node agent looks at its ranks and reports."""
    hang_floor_s: Seconds = 5.0
    """A rank without progress for max(this, hang_steps × median step) is hung."""
    hang_steps: Annotated[float, Field(ge=2)] = 5.0
    start_deadline_s: Seconds = 120.0
    """From a generation's plan to its first step: imports, rendezvous, restore and compile are in it."""
    no_progress_generations: Annotated[int, Field(ge=2)] = 3
    """Generations in a row without a new checkpoint after which the run stops and says so."""


class Policy(Model):
    """The whole of `policy.yaml`. Every part has defaults, so an empty file is a valid policy without providers."""

    arbiter: ArbiterSpec = ArbiterSpec()
    serving: ServingSpec = ServingSpec()
    claims: ClaimsSpec = ClaimsSpec()
    gang: GangSpec = GangSpec()
    health: HealthSpec = HealthSpec()
    providers: tuple[ProviderSpec, ...] = ()

    @model_validator(mode="after")
    def _provider_names_differ(self) -> Policy:
        names = [provider.name for provider in self.providers]
        if len(set(names)) != len(names):
            raise ValueError("providers must have different names")
        return self
