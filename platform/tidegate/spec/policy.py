"""What the operator decides: `policy.yaml` as frozen models.

Every duration ends in `_s`, every temperature in `_celsius`, every amount of money in `_usd`; a key without its unit is
refused with the nearest right one. `tidegate.spec.load.load_policy` reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.spec.base import Celsius, Port, Seconds, SecondsOrZero
from tidegate.spec.base import Model as Model  # other rooms' settings are made of it too
from tidegate.spec.jobs import JobsSpec
from tidegate.spec.providers import CanarySpec, ProviderSpec
from tidegate.spec.redis import RedisSpec as RedisSpec
from tidegate.spec.tenants import TenantSpec
from tidegate.spec.weights import RolloutSpec


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


class SizingSpec(Model):
    """Replicas by load instead of on every free GPU. It never takes what a claim holds, nor more than there is."""

    replicas_min: Annotated[int, Field(ge=0)] = 0
    """At least so many stay, however idle."""
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.7
    """How busy each replica is meant to be; the rest is for what comes next."""
    down_after_s: Seconds = 60.0
    """The load must have asked for fewer for so long."""
    to_zero_after_s: Seconds = 600.0
    """The last replica goes when nothing was asked for so long: who comes next waits for a cold start."""

    @model_validator(mode="after")
    def _zero_comes_last(self) -> SizingSpec:
        if self.to_zero_after_s < self.down_after_s:
            raise ValueError("to_zero_after_s must not be shorter than down_after_s")
        return self


class ServingSpec(Model):
    app: str = "images"
    """The Serve application whose pools the arbiter sets."""
    protect: bool = True
    """A claim takes serving's GPUs only after a canary has come back from a provider."""
    floor_replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas that no claim takes."""
    patience_s: Seconds = 10.0
    """How long a request may wait for a local replica before it is spilled."""
    hedge_after_s: Seconds | None = None
    """A request that may be made twice (`tenants[].hedge`) is asked for at a second place, too, when the first has had
    it for so long. None: none ever is."""
    request_deadline_s: Seconds = 60.0
    """From accepting a request to its answer; shared by all attempts."""
    drain_deadline_s: Seconds = 10.0
    """How long in-flight requests may take to finish when their replica must leave."""
    sizing: SizingSpec | None = None
    """None: every GPU that is free serves, so no request waits for a cold start."""
    return_step_replicas: Annotated[int, Field(ge=1)] = 2
    """Replicas that come home at once when training ends."""
    return_dwell_s: SecondsOrZero = 2.0
    """Rest between two such steps, counted from the last replica being ready."""
    rollout: RolloutSpec = RolloutSpec()
    reclaim_after_s: Seconds = 5.0
    """When requests have overflowed for so long, claims of classes below `serving` leave. They get GPUs that replicas
    hold only as far as these were idle over the last minute, and one busy replica more than that always stays."""


class ClaimsSpec(Model):
    classes: tuple[str, ...] = ("pretrain", "serving", "scavenger")
    """Claim classes, the strongest first. `serving` is the pools' own place in this order."""
    deadline_s: Seconds = 300.0
    """A claim that is not granted this long after its turn came is undone."""
    proving_retry_s: Seconds = 2.0
    """Rest between two rounds of canaries while no way out answers."""
    min_run_s: SecondsOrZero = 300.0
    """A claim above `serving` is not preempted before it has run for so long. Those below leave whenever asked."""
    preempt_notice_s: Seconds = 30.0
    """What a preempted gang has to save and leave; then its GPUs are taken."""
    dwell_s: SecondsOrZero = 10.0
    """GPUs that came home stay for so long, unless the claim that wants them has waited for so long already: however
    often claims come and go, a node changes hands at most once in this time."""
    unknown_memory_max_bytes: Annotated[int, Field(ge=0)] = 2 * 2**30
    """A GPU that has more of its memory taken while no process is listed on it is not handed to a gang."""

    @model_validator(mode="after")
    def _serving_has_a_place(self) -> ClaimsSpec:
        if "serving" not in self.classes:
            raise ValueError("must name `serving`, so that the others stand above or below it")
        return self


class PurseSpec(Model):
    per_hour_usd: Annotated[float, Field(ge=0)] | None = None
    """What overflow may cost in one clock hour (UTC); none = no limit, 0 = nothing is ever bought."""
    per_day_usd: Annotated[float, Field(ge=0)] | None = None
    """What it may cost in one calendar day (UTC)."""
    over_budget: Literal["wait", "shed"] = "wait"
    """When that is spent. `wait`: claims that need serving's GPUs wait for the next hour or day; other overflow is
    still paid. `shed`: claims go on, and gateways refuse overflow (429 with Retry-After) rather than buy it."""


class SourcesSpec(Model):
    """Where a node's agent looks. The paths are arguments so that a container's mounts and a test's copies will do;
    `~` and `$NAMES` in them are the node's own."""

    ib_root: str = "/sys/class/infiniband"
    kmsg: str | None = "/dev/kmsg"
    """The kernel log, or a file that it is written to; none = not followed."""
    dcgm_url: str | None = "http://127.0.0.1:9400/metrics"
    """A dcgm-exporter that runs already is asked for what NVML has not got; where none answers nothing is missed."""
    disks: tuple[str, ...] = ("/", "~/.tidegate")
    """One path on each file system that matters: checkpoints, logs, the object store's spill."""


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


class FleetBrakeSpec(Model):
    """One rule that takes out many nodes in a short time has found a broken cooling unit, a bad driver or its own bug,
    not many broken nodes: it is stopped, and a person decides."""

    node_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of the live GPU nodes: so many, and always one, one rule may take out within `window_s`."""
    nodes_per_domain: Annotated[int, Field(ge=1)] = 3
    """And so many of one network domain (node label `tidegate/domain`)."""
    window_s: Annotated[float, Field(gt=0, le=3600)] = 600.0
    hard_faults: tuple[str, ...] = ("gpu_lost", "nvlink_down", "gpu_count")
    """Rules that are never braked: what they find cannot compute, whatever the cause."""


class RuleOverride(Model):
    """What the operator changes in one rule; what isn't named keeps the value of docs/health-rules.md."""

    enabled: bool = True
    """False: the rule is not there."""
    limit: float | None = None
    """The number above or below which a reading is bad, in the rule's own unit."""
    release: float | None = None
    """The number at which a reading is good again; between the two nothing changes."""
    samples: Annotated[int, Field(ge=1, le=100_000)] | None = None
    within_s: Seconds | None = None
    for_s: SecondsOrZero | None = None
    release_after_s: SecondsOrZero | None = None
    action: Literal["warn", "evict_gpu", "evict_node"] | None = None
    when: Literal["now", "next_checkpoint"] | None = None


class RepeatOffenderSpec(Model):
    """What has been taken out so often stays out until a person clears it (Meta's "lemon nodes")."""

    evictions: Annotated[int, Field(ge=2)] = 3
    within_s: Seconds = 7 * 86_400.0


class BurnInSpec(Model):
    before_return: bool = True
    """What was taken out and whose verdict has ended is multiplied, copied and summed on before it trains again."""
    before_gang: bool = False
    """The same for each node of a gang before the run's first start there, all at once and measured against each other:
    about a minute of the gang's GPUs, for a GPU that computes slowly or wrong and is found before it costs steps."""
    deadline_s: Seconds = 120.0
    """Of each part of it; then it has failed."""


class HealthSpec(Model):
    period_s: Seconds = 1.0
    nvml_library: str | None = None
    """Path of libnvidia-ml.so.1; none = the loader finds it. For drivers in a container image:
    /run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"""
    sources: SourcesSpec = SourcesSpec()
    reading_deadline_s: Seconds = 10.0
    """A reading that takes longer is a finding of its own (NVML calls can hang for ever)."""
    agent_silent_after_s: Seconds = 15.0
    state_dir: str = "~/.tidegate/health"
    """Where each node's agent keeps its standing verdicts over its own restarts; on the node."""
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """What each node with GPUs is declared to hold; none = what it lists is taken for all that it has."""
    ib_ports: tuple[str, ...] = ()
    """The ports that gangs need, `mlx5_0/1`. None named: those of InfiniBand that were once seen active; Ethernet ports
    (RoCE, bonds) are judged only if they are named."""
    ib_port_gbits: Annotated[float, Field(gt=0)] | None = None
    """Declared rate of each of them in Gbit/s, e.g. 400; none = not judged."""
    temperature: TemperatureRule = TemperatureRule()
    rules: Mapping[str, RuleOverride] = Field(default_factory=dict)
    """Changes to single rules by name; docs/health-rules.md lists them all."""
    repeat_offender: RepeatOffenderSpec = RepeatOffenderSpec()
    burn_in: BurnInSpec = BurnInSpec()
    fleet_brake: FleetBrakeSpec = FleetBrakeSpec()

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser()

    def __hash__(self) -> int:
        """Of a few fields only, because each look asks for it; those that differ elsewhere are told apart by `==`."""
        return hash((self.period_s, self.reading_deadline_s, self.temperature.limit_celsius, tuple(self.rules)))


class GangSpec(Model):
    heartbeat_s: Seconds = 0.2
    """How often a node agent looks at its ranks and reports."""
    hang_floor_s: Seconds = 5.0
    """A rank without progress for max(this, hang_steps × median step) is hung."""
    hang_steps: Annotated[float, Field(ge=2)] = 5.0
    start_deadline_s: Seconds = 180.0
    """From a generation's plan to its first step: imports, rendezvous, restore and compile are in it. Must be longer
    than the run's own `timeout_s`: a collective that gives up says which one it was, a killed rank doesn't."""
    save_deadline_s: Seconds = 600.0
    """How long a rank may stand still while it saves."""
    sample_deadline_s: Seconds = 600.0
    """How long a rank may stand still while it makes a grid of samples."""
    export_deadline_s: Seconds = 600.0
    """How long a rank may stand still while it exports the weights."""
    join_deadline_s: Seconds = 60.0
    """From the start of Ray Train's workers to the last one's first word; then they are started anew."""
    short_deadline_s: Seconds = 300.0
    """How long a gang with fewer GPUs than its least waits for others before the run fails."""
    save_margin_s: SecondsOrZero = 2.0
    """Before the deadline of a save whoever has not committed is killed, so that the nodes are free in time."""
    coordinator_silent_after_s: Seconds = 120.0
    """Ranks train on without their coordinator for so long."""
    no_progress_generations: Annotated[int, Field(ge=2)] = 3
    """Generations in a row without a new checkpoint after which the run stops and says so."""
    off_head: bool = True
    """Keep coordinators and Train controllers off the head node where there is another one."""

    @model_validator(mode="after")
    def _clocks_in_order(self) -> GangSpec:
        """A limit that watches something slow must be longer than those of its parts (C045)."""
        for shorter, longer in (
            ("heartbeat_s", "hang_floor_s"),
            ("hang_floor_s", "start_deadline_s"),
            ("hang_floor_s", "save_deadline_s"),
            ("hang_floor_s", "sample_deadline_s"),
            ("hang_floor_s", "export_deadline_s"),
            ("hang_floor_s", "join_deadline_s"),
            ("join_deadline_s", "coordinator_silent_after_s"),
        ):
            if not getattr(self, shorter) < getattr(self, longer):
                raise ValueError(f"{longer} must be longer than {shorter}")
        return self


RAY_WORKER_PORTS = range(10_002, 20_000)
"""Ray's workers listen here; `ray start` refuses a port of its own among them."""


class ClusterSpec(Model):
    """How `tidegate up --head` and `--join` start Ray. On a cluster that was started otherwise it has no effect."""

    gcs_port: Port = 6379
    """The head's; other nodes join by it."""
    dashboard_host: str = "127.0.0.1"
    """The address that the dashboard (job submission, Serve deployment) listens on; 0.0.0.0 = all."""
    dashboard_port: Port = 8265
    dashboard_agent_port: Port = 52365
    """Each node's; where it is taken, job submission fails without a word from Ray."""
    metrics_port: Port | None = None
    """Each node's, for Prometheus; none = Ray picks one and lists it in its session's service discovery file."""
    health_check_period_s: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    """How often the head asks each node whether it lives."""
    health_check_timeout_s: Annotated[float, Field(ge=0.1, le=60)] = 2.0
    """An answer that takes longer is a failure."""
    health_check_failures: Annotated[int, Field(ge=1, le=20)] = 3
    """So many in a row and the node is dead. A killed node is noticed after about period × failures, a frozen one after
    (period + timeout) × failures: 9 s by default, where Ray's own settings take 63 s (measured)."""
    head_away_s: Seconds = 120.0
    """Nodes wait so long for a head that is away (see `redis`), then they end."""
    redis: RedisSpec | None = None
    haproxy: bool = False
    """Serve's ingress is HAProxy instead of Ray's Python proxy; on every node, so it is set when Ray is started."""
    haproxy_stats_port: Port = 8404
    haproxy_metrics_port: Port = 9101
    temp_dir: str | None = None
    """Ray's session folder, 40 characters at most (unix sockets lie below it); none = /tmp/ray."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels of every node that joins by `--join`; `--label` adds a node's own."""

    @model_validator(mode="after")
    def _ports_can_be_bound(self) -> ClusterSpec:
        names = ["gcs_port", "dashboard_port", "dashboard_agent_port", "metrics_port"]
        names += ["haproxy_stats_port", "haproxy_metrics_port"] if self.haproxy else []
        taken: dict[int, str] = {}
        for name in names:
            port = getattr(self, name)
            if port is None:
                continue
            if port in RAY_WORKER_PORTS:
                raise ValueError(f"{name} {port} lies among the ports of Ray's workers; choose one outside 10002-19999")
            if port in taken:
                raise ValueError(f"{name} and {taken[port]} are both {port}; give each its own")
            taken[port] = name
        return self

    @model_validator(mode="after")
    def _temp_dir_is_short(self) -> ClusterSpec:
        if self.temp_dir is not None and not (self.temp_dir.startswith("/") and len(self.temp_dir) <= 40):
            raise ValueError(f"temp_dir must be absolute and have 40 characters at most, got {self.temp_dir!r}")
        return self


class Policy(Model):
    """The whole of `policy.yaml`. Every part has defaults, so an empty file is a valid policy without providers."""

    arbiter: ArbiterSpec = ArbiterSpec()
    serving: ServingSpec = ServingSpec()
    claims: ClaimsSpec = ClaimsSpec()
    gang: GangSpec = GangSpec()
    health: HealthSpec = HealthSpec()
    purse: PurseSpec = PurseSpec()
    canary: CanarySpec = CanarySpec()
    cluster: ClusterSpec = ClusterSpec()
    providers: tuple[ProviderSpec, ...] = ()
    jobs: JobsSpec = JobsSpec()
    gateway_redis: RedisSpec | None = None
    """Where gateways keep jobs and tenants' counts, so that those of many machines share them; none = jobs in a file of
    one machine, and each gateway counts for itself. Needs `pip install 'tidegate[redis]'`."""
    tenants: tuple[TenantSpec, ...] = ()
    """Who may ask for pictures; none = everybody, without a key."""

    @model_validator(mode="after")
    def _jobs_lie_in_one_place(self) -> Policy:
        if self.gateway_redis is not None and self.jobs.store_file is not None:
            raise ValueError("jobs.store_file and gateway_redis both say where jobs lie; leave out either")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Policy:
        for kind, names in (
            ("providers", [provider.name for provider in self.providers]),
            ("tenants", [tenant.name for tenant in self.tenants]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{kind} must have different names")
        return self
