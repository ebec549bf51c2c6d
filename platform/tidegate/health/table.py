"""The rules of the specification's table 4.1, row by row. Their numbers are the defaults of `health.rules`."""

from __future__ import annotations

import math
from types import MappingProxyType

from tidegate.arbiter.messages import When
from tidegate.health.conditions import Above, Against, Below, Bits, OneOf, Replays, Rises, Says
from tidegate.health.evidence import Guard
from tidegate.health.link_rows import infiniband, nvlink, saturated
from tidegate.health.peers import Among
from tidegate.health.readings import DEADLINE_MISSED, ClockReason, Signal
from tidegate.health.rows import OUR_OWN, gpu, node, warn
from tidegate.health.rule import Rule
from tidegate.ids import Tier
from tidegate.spec.policy import HealthSpec

S = Signal
_C = When.NEXT_CHECKPOINT
_RESET = "reset the GPU (all of its NVLink group idle) or reboot"
_RMA = "replace the GPU"
_FLAG = OneOf(bad=frozenset({1.0}), good=frozenset({0.0}))
_BUSY = (Guard(signal=S.GPU_PROCESSES, at_least=1), Guard(signal=S.GPU_UTILIZATION, at_least=0.5))
_LOADED = (Guard(signal=S.GPU_SM_ACTIVE, at_least=0.5),)
_RECOVERY = MappingProxyType(
    {
        1.0: "GPU reset",
        2.0: "node reboot",
        3.0: "drain peer-to-peer",
        4.0: "drain and reset",
        5.0: "recover IMEX",
        6.0: "bus reset",
        7.0: "system reboot",
    }
)


def table(spec: HealthSpec) -> tuple[Rule, ...]:
    """The rows whose subject is a GPU, a port or a node; what the gang itself sees (12, 42, 44-46) is not here."""
    return (
        *_heat(spec), *_clocks(spec), *_peers(), *_gpu_answers(spec), *_memory(), *_pcie(), *nvlink(),
        *infiniband(spec), *saturated(),
    )  # fmt: skip


def _heat(spec: HealthSpec) -> tuple[Rule, ...]:
    heat = spec.temperature

    def celsius(limit: float) -> Above:
        return Above(
            limit=limit,
            release=heat.release_celsius,
            plausible_up_to=heat.implausible_above_celsius,
            unit="°C",
        )

    cooled = f"at or below {heat.release_celsius:g} °C"
    return (
        # A hot GPU still computes right: it may serve, where one slow request is no stalled gang.
        gpu("temperature", "1", S.GPU_TEMPERATURE, celsius(heat.limit_celsius), "Krea 2 talk: above 78 °C, at once",
             samples=heat.samples, release_after_s=heat.release_after_s, good=cooled),
        warn("temperature_warn", "1w", S.GPU_TEMPERATURE, celsius(heat.warn_celsius), OUR_OWN, for_s=60.0,
              good=cooled),
        warn("margin_warn", "2", S.GPU_MARGIN, Below(limit=5, release=10, unit="°C"), "NVSentinel ADR-042",
              for_s=10.0, while_=(Guard(signal=S.GPU_TEMPERATURE, at_least=60),)),
        gpu("margin", "2", S.GPU_MARGIN, Against(other=S.GPU_SLOWDOWN_OFFSET, worse="<=", calm=(10.0, math.inf)),
             "field 194", samples=2, while_=(Guard(signal=S.GPU_TEMPERATURE, at_least=60),)),
        warn("memory_temperature_warn", "3", S.GPU_MEMORY_TEMPERATURE, Above(limit=90, release=85, unit="°C"), OUR_OWN,
              for_s=60.0),
        gpu("memory_temperature", "3", S.GPU_MEMORY_TEMPERATURE,
             Against(other=S.GPU_MEMORY_LIMIT, worse=">=", otherwise=95, calm=(-math.inf, 85.0)),
             "MEM_MAX of A100", for_s=10.0),
    )  # fmt: skip


def _clocks(spec: HealthSpec) -> tuple[Rule, ...]:
    def looks(seconds: float) -> int:
        """More than so many seconds of bad looks."""
        return math.floor(seconds / spec.period_s) + 1

    reasons, minute = S.GPU_CLOCK_REASONS, {"within_s": 60.0}
    sw, brake = Bits(mask=ClockReason.SW_THERMAL), Bits(mask=ClockReason.POWER_BRAKE)
    alone = Bits(mask=ClockReason.HW_SLOWDOWN, without=ClockReason.HW_THERMAL | ClockReason.POWER_BRAKE)
    return (
        gpu("hw_thermal", "4", reasons, Bits(mask=ClockReason.HW_THERMAL), "Azure: one of 16 cut a run 5×", samples=2),
        gpu("hw_thermal_time", "4", S.GPU_THROTTLED_HW_THERMAL, Rises(limit=1, within_s=60), "field 270"),
        warn("sw_thermal_warn", "5", reasons, sw, OUR_OWN, samples=looks(6), **minute),
        gpu("sw_thermal", "5", reasons, sw, OUR_OWN, samples=looks(30), within_s=120.0, when=_C),
        warn("sw_thermal_time_warn", "5", S.GPU_THROTTLED_SW_THERMAL, Rises(limit=6, within_s=60), "field 269"),
        gpu("sw_thermal_time", "5", S.GPU_THROTTLED_SW_THERMAL, Rises(limit=30, within_s=120), "field 269", when=_C),
        warn("power_brake_warn", "6", reasons, brake, "gpud"),
        node("power_brake", "6", reasons, brake, OUR_OWN, samples=looks(10), when=_C, tier=Tier.SERVE,
              fix="check the rack's power", **minute),
        node("power_brake_time", "6", S.GPU_THROTTLED_POWER_BRAKE, Rises(limit=10, within_s=60), "field 271",
              when=_C, tier=Tier.SERVE, fix="check the rack's power"),
        gpu("hw_slowdown", "7", reasons, alone, "gpud 0.6/min over 10 min", samples=looks(0.6 * 600) - 1,
             within_s=600.0, when=_C),
    )  # fmt: skip


def _peers() -> tuple[Rule, ...]:
    clock = {"for_s": 60.0, "while_": _BUSY, "gang": True}
    tensor = {"for_s": 30.0, "while_": _BUSY[:1], "gang": True}
    step = {"for_s": 30.0, "gang": True}
    slow = frozenset({"sm_clock_warn", "power_low", "step_time_warn", "hw_thermal", "sw_thermal_warn"})
    return (
        warn("sm_clock_warn", "9", S.GPU_SM_CLOCK, Among(limit=0.85, least_median=1e8), OUR_OWN, **clock),
        gpu("sm_clock", "9", S.GPU_SM_CLOCK, Among(limit=0.7, least_median=1e8), OUR_OWN, when=_C, **clock),
        warn("power_low", "10", S.GPU_POWER, Among(limit=0.5, least_median=150), OUR_OWN, **clock),
        warn("tensor_warn", "11", S.GPU_TENSOR_ACTIVE, Among(limit=0.6, least_median=0.1), "the talk", **tensor),
        # DCGM has been seen to say 0 for a GPU that works (DCGM 303): never on its word alone.
        gpu("tensor", "11", S.GPU_TENSOR_ACTIVE, Among(limit=0.3, least_median=0.1), "ByteRobust 10 s × 5 rounds",
             when=_C, witness=slow, **tensor),
        warn("step_time_warn", "21", S.RANK_STEP_COMPUTE, Among(limit=1.1, least_median=1e-6), "4.4", **step),
        # Data can be uneven too (arXiv 2505.05713): the GPU's own evidence must agree.
        gpu("step_time", "21", S.RANK_STEP_COMPUTE, Among(limit=1.25, least_median=1e-6), "4.4; DLRover 2×",
             when=_C, witness=slow - {"step_time_warn"} | {"tensor_warn"}, for_s=60.0, gang=True),
    )  # fmt: skip


def _gpu_answers(spec: HealthSpec) -> tuple[Rule, ...]:
    silent = Says(causes=frozenset({DEADLINE_MISSED}))
    absent = Says(causes=frozenset({"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "OTHER_LIBRARY"}))
    declared = spec.gpus_per_node is not None
    count = Below(limit=spec.gpus_per_node or 0, unit="GPUs")
    rules = (
        # Read again once: a reset of one GPU needs its whole NVLink group, so the node goes.
        node("gpu_lost", "13", S.GPU_ANSWERS, Says(causes=frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})),
              "XID 79 is RESTART_BM", samples=2, release_after_s=None),
        # UNKNOWN: in a container the device's cgroup may be gone; the source opens it again once before the second.
        node("gpu_unreachable", "13", S.GPU_ANSWERS, Says(causes=frozenset({"GPU_NOT_FOUND", "IRQ_ISSUE", "UNKNOWN"})),
              "nvml.h", samples=2),
        warn("gpu_timeout_warn", "13", S.GPU_ANSWERS, Says(causes=frozenset({"TIMEOUT"})), "nvml.h"),
        node("gpu_timeout", "13", S.GPU_ANSWERS, Says(causes=frozenset({"TIMEOUT"})), "nvml.h", samples=3),
        node("recovery_now", "14", S.GPU_RECOVERY_ACTION, _recovery(1, 2, 6, 7), "field 230", fix=_RESET),
        node("recovery_drain", "14", S.GPU_RECOVERY_ACTION, _recovery(3, 4), "field 230", when=_C, fix=_RESET),
        warn("recovery_fabric", "14", S.GPU_RECOVERY_ACTION, _recovery(5), "field 230"),
        node("gpu_count", "29", S.GPU_COUNT, count, "gpud, Azure, gcm", samples=2),
        warn("nvml_silent_warn", "30", S.NVML_ANSWERS, silent, "DCGM 313"),
        node("nvml_silent", "30", S.NVML_ANSWERS, silent, "DCGM 313; NVSentinel 1576, 1748", samples=3, within_s=60.0),
        node("driver_replaced", "31", S.NVML_ANSWERS, Says(causes=frozenset({"LIB_RM_VERSION_MISMATCH"})), "nvml.h",
              samples=2, release_after_s=0.0, fix="reboot, or reload the kernel module and restart the agent"),
        # A warning only: at boot the driver is not there yet, and a node without GPUs never has one.
        warn("nvml_absent", "31", S.NVML_ANSWERS, absent, "nvml.h", release_after_s=0.0),
        node("driver_gone", "31", S.NVML_ANSWERS, absent, "nvml.h, on a node declared to hold GPUs", for_s=120.0,
              samples=2, release_after_s=0.0),
    )  # fmt: skip
    return tuple(rule for rule in rules if declared or rule.name not in ("gpu_count", "driver_gone"))


def _recovery(*bad: int) -> OneOf:
    return OneOf(bad=frozenset(map(float, bad)), good=frozenset({0.0}), what=_RECOVERY)


def _memory() -> tuple[Rule, ...]:
    more = frozenset({"xid_contained", "xid_contained_repeated"})
    return (
        gpu("ecc_uncorrected", "16", S.GPU_ECC_UNCORRECTED, Rises(limit=0, within_s=120), "gcm; NVIDIA on XID 94",
             tier=Tier.NONE, release_after_s=None, excused_by=more, fix=_RESET),
        warn("ecc_corrected", "17", S.GPU_ECC_CORRECTED, Rises(limit=600, within_s=60), "DCGM: 10 a second"),
        gpu("row_remap_pending", "18", S.GPU_ROW_PENDING, _FLAG, "Azure; XID 63", when=_C, release_after_s=0.0,
             fix=_RESET),
        node("row_remap_failure", "19", S.GPU_ROW_FAILURE, _FLAG, "Azure, DCGM", release_after_s=None, fix=_RMA),
        node("rows_used_up", "19", S.GPU_ROWS_UNCORRECTABLE, Above(limit=511, unit="rows"), "DCGM: 512", when=_C,
              release_after_s=None, fix=_RMA),
        node("sram_threshold", "20", S.GPU_SRAM_THRESHOLD, _FLAG, "NVIDIA's RMA policy", when=_C,
              release_after_s=None, fix=_RMA),
    )  # fmt: skip


def _pcie() -> tuple[Rule, ...]:
    under_load = {"for_s": 60.0, "while_": _LOADED, "when": _C, "tier": Tier.SERVE}
    return (
        warn("pcie_replays_warn", "22", S.GPU_PCIE_REPLAYS, Replays(limit=1), "DcgmHealthWatch.cpp",
              samples=3, within_s=300.0, apart_s=60.0),
        gpu("pcie_replays", "22", S.GPU_PCIE_REPLAYS, Replays(limit=10), "10 × DCGM", when=_C,
             samples=3, within_s=300.0, apart_s=60.0),
        node("pcie_fatal", "23", S.GPU_PCIE_FATAL, Rises(limit=0, within_s=60), "field 180", release_after_s=None),
        node("pcie_generation", "24", S.GPU_PCIE_GENERATION, Against(other=S.GPU_PCIE_GENERATION_MAX, worse="<"),
              "imbue; NVSentinel 890", **under_load),
        node("pcie_width", "24", S.GPU_PCIE_WIDTH, Against(other=S.GPU_PCIE_WIDTH_MAX, worse="<"),
              "imbue; NVSentinel 890", **under_load),
    )  # fmt: skip
