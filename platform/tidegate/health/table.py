"""The rules of the specification's table 4.1, row by row. Their numbers are the defaults of `health.rules`."""

from __future__ import annotations

import math
from types import MappingProxyType

from tidegate.arbiter.messages import Action, When
from tidegate.health.conditions import (
    Above,
    Against,
    Among,
    Below,
    Bits,
    Condition,
    Guard,
    OneOf,
    Replays,
    Rises,
    Says,
)
from tidegate.health.readings import CEILINGS, ClockReason, Signal, Status
from tidegate.health.rule import PROBATION_S, Rule
from tidegate.ids import Tier
from tidegate.spec.policy import HealthSpec

DEADLINE_MISSED = "DEADLINE_MISSED"
"""The cause that the agent gives when a source has not come back in time; everything else is the source's own word."""

S = Signal
_C = When.NEXT_CHECKPOINT
_J = "our own"
_RESET = "reset the GPU (all of its NVLink group idle) or reboot"
_RMA = "replace the GPU"
_FLAG = OneOf(bad=frozenset({1.0}), good=frozenset({0.0}))
_BUSY = (Guard(signal=S.GPU_PROCESSES, at_least=1), Guard(signal=S.GPU_UTILIZATION, at_least=0.5))
_LOADED = (Guard(signal=S.GPU_SM_ACTIVE, at_least=0.5),)
_INFINIBAND = (Guard(signal=S.IB_PORT_ETHERNET, at_most=0),)
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


def _warn(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.WARN, basis, {"release_after_s": 60.0, "tier": Tier.GANG, **more})


def _gpu(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.EVICT_GPU, basis, {"tier": Tier.SERVE, **more})


def _node(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.EVICT_NODE, basis, {"tier": Tier.NONE, **more})


def _rule(
    name: str, row: str, signal: Signal, bad: Condition, action: Action, basis: str, more: dict[str, object]
) -> Rule:
    given = {"release_after_s": PROBATION_S, **more}
    return Rule(name=name, row=row, signal=signal, bad=bad, action=action, basis=basis, **given)  # type: ignore[arg-type]


def table(spec: HealthSpec) -> tuple[Rule, ...]:
    """The rows whose subject is a GPU, a port or a node; what the gang itself sees (12, 42, 44-46) is not here."""
    return (
        *_heat(spec), *_clocks(spec), *_peers(), *_gpu_answers(spec), *_memory(), *_pcie(), *_nvlink(),
        *_infiniband(spec), *_saturated(),
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
        _gpu("temperature", "1", S.GPU_TEMPERATURE, celsius(heat.limit_celsius), "Krea 2 talk: above 78 °C, at once",
             samples=heat.samples, release_after_s=heat.release_after_s, good=cooled),
        _warn("temperature_warn", "1w", S.GPU_TEMPERATURE, celsius(heat.warn_celsius), _J, for_s=60.0,
              good=cooled),
        _warn("margin_warn", "2", S.GPU_MARGIN, Below(limit=5, release=10, unit="°C"), "NVSentinel ADR-042",
              for_s=10.0, while_=(Guard(signal=S.GPU_TEMPERATURE, at_least=60),)),
        _gpu("margin", "2", S.GPU_MARGIN, Against(other=S.GPU_SLOWDOWN_OFFSET, worse="<=", calm=(10.0, math.inf)),
             "field 194", samples=2, while_=(Guard(signal=S.GPU_TEMPERATURE, at_least=60),)),
        _warn("memory_temperature_warn", "3", S.GPU_MEMORY_TEMPERATURE, Above(limit=90, release=85, unit="°C"), _J,
              for_s=60.0),
        _gpu("memory_temperature", "3", S.GPU_MEMORY_TEMPERATURE,
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
        _gpu("hw_thermal", "4", reasons, Bits(mask=ClockReason.HW_THERMAL), "Azure: one of 16 cut a run 5×", samples=2),
        _gpu("hw_thermal_time", "4", S.GPU_THROTTLED_HW_THERMAL, Rises(limit=1, within_s=60), "field 270"),
        _warn("sw_thermal_warn", "5", reasons, sw, _J, samples=looks(6), **minute),
        _gpu("sw_thermal", "5", reasons, sw, _J, samples=looks(30), within_s=120.0, when=_C),
        _warn("sw_thermal_time_warn", "5", S.GPU_THROTTLED_SW_THERMAL, Rises(limit=6, within_s=60), "field 269"),
        _gpu("sw_thermal_time", "5", S.GPU_THROTTLED_SW_THERMAL, Rises(limit=30, within_s=120), "field 269", when=_C),
        _warn("power_brake_warn", "6", reasons, brake, "gpud"),
        _node("power_brake", "6", reasons, brake, _J, samples=looks(10), when=_C, tier=Tier.SERVE,
              fix="check the rack's power", **minute),
        _node("power_brake_time", "6", S.GPU_THROTTLED_POWER_BRAKE, Rises(limit=10, within_s=60), "field 271",
              when=_C, tier=Tier.SERVE, fix="check the rack's power"),
        _gpu("hw_slowdown", "7", reasons, alone, "gpud 0.6/min over 10 min", samples=looks(0.6 * 600) - 1,
             within_s=600.0, when=_C),
    )  # fmt: skip


def _peers() -> tuple[Rule, ...]:
    clock = {"for_s": 60.0, "while_": _BUSY, "gang": True}
    tensor = {"for_s": 30.0, "while_": _BUSY[:1], "gang": True}
    step = {"for_s": 30.0, "gang": True}
    slow = frozenset({"sm_clock_warn", "power_low", "step_time_warn", "hw_thermal", "sw_thermal_warn"})
    return (
        _warn("sm_clock_warn", "9", S.GPU_SM_CLOCK, Among(limit=0.85, least_median=1e8), _J, **clock),
        _gpu("sm_clock", "9", S.GPU_SM_CLOCK, Among(limit=0.7, least_median=1e8), _J, when=_C, **clock),
        _warn("power_low", "10", S.GPU_POWER, Among(limit=0.5, least_median=150), _J, **clock),
        _warn("tensor_warn", "11", S.GPU_TENSOR_ACTIVE, Among(limit=0.6, least_median=0.1), "the talk", **tensor),
        # DCGM has been seen to say 0 for a GPU that works (DCGM 303): never on its word alone.
        _gpu("tensor", "11", S.GPU_TENSOR_ACTIVE, Among(limit=0.3, least_median=0.1), "ByteRobust 10 s × 5 rounds",
             when=_C, witness=slow, **tensor),
        _warn("step_time_warn", "21", S.RANK_STEP_COMPUTE, Among(limit=1.1, least_median=1e-6), "4.4", **step),
        # Data can be uneven too (arXiv 2505.05713): the GPU's own evidence must agree.
        _gpu("step_time", "21", S.RANK_STEP_COMPUTE, Among(limit=1.25, least_median=1e-6), "4.4; DLRover 2×",
             when=_C, witness=slow - {"step_time_warn"} | {"tensor_warn"}, for_s=60.0, gang=True),
    )  # fmt: skip


def _gpu_answers(spec: HealthSpec) -> tuple[Rule, ...]:
    silent = Says(causes=frozenset({DEADLINE_MISSED}))
    absent = Says(causes=frozenset({"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "OTHER_LIBRARY"}))
    declared = spec.gpus_per_node is not None
    count = Below(limit=spec.gpus_per_node or 0, unit="GPUs")
    rules = (
        # Read again once: a reset of one GPU needs its whole NVLink group, so the node goes.
        _node("gpu_lost", "13", S.GPU_ANSWERS, Says(causes=frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})),
              "XID 79 is RESTART_BM", samples=2, release_after_s=None),
        # UNKNOWN: in a container the device's cgroup may be gone; the source opens it again once before the second.
        _node("gpu_unreachable", "13", S.GPU_ANSWERS, Says(causes=frozenset({"GPU_NOT_FOUND", "IRQ_ISSUE", "UNKNOWN"})),
              "nvml.h", samples=2),
        _warn("gpu_timeout_warn", "13", S.GPU_ANSWERS, Says(causes=frozenset({"TIMEOUT"})), "nvml.h"),
        _node("gpu_timeout", "13", S.GPU_ANSWERS, Says(causes=frozenset({"TIMEOUT"})), "nvml.h", samples=3),
        _node("recovery_now", "14", S.GPU_RECOVERY_ACTION, _recovery(1, 2, 6, 7), "field 230", fix=_RESET),
        _node("recovery_drain", "14", S.GPU_RECOVERY_ACTION, _recovery(3, 4), "field 230", when=_C, fix=_RESET),
        _warn("recovery_fabric", "14", S.GPU_RECOVERY_ACTION, _recovery(5), "field 230"),
        _node("gpu_count", "29", S.GPU_COUNT, count, "gpud, Azure, gcm", samples=2),
        _warn("nvml_silent_warn", "30", S.NVML_ANSWERS, silent, "DCGM 313"),
        _node("nvml_silent", "30", S.NVML_ANSWERS, silent, "DCGM 313; NVSentinel 1576, 1748", samples=3, within_s=60.0),
        _node("driver_replaced", "31", S.NVML_ANSWERS, Says(causes=frozenset({"LIB_RM_VERSION_MISMATCH"})), "nvml.h",
              samples=2, release_after_s=0.0, fix="reboot, or reload the kernel module and restart the agent"),
        # A warning only: at boot the driver is not there yet, and a node without GPUs never has one.
        _warn("nvml_absent", "31", S.NVML_ANSWERS, absent, "nvml.h", release_after_s=0.0),
        _node("driver_gone", "31", S.NVML_ANSWERS, absent, "nvml.h, on a node declared to hold GPUs", for_s=120.0,
              samples=2, release_after_s=0.0),
    )  # fmt: skip
    return tuple(rule for rule in rules if declared or rule.name not in ("gpu_count", "driver_gone"))


def _recovery(*bad: int) -> OneOf:
    return OneOf(bad=frozenset(map(float, bad)), good=frozenset({0.0}), what=_RECOVERY)


def _memory() -> tuple[Rule, ...]:
    more = frozenset({"xid_contained", "xid_contained_repeated"})
    return (
        _gpu("ecc_uncorrected", "16", S.GPU_ECC_UNCORRECTED, Rises(limit=0, within_s=120), "gcm; NVIDIA on XID 94",
             tier=Tier.NONE, release_after_s=None, excused_by=more, fix=_RESET),
        _warn("ecc_corrected", "17", S.GPU_ECC_CORRECTED, Rises(limit=600, within_s=60), "DCGM: 10 a second"),
        _gpu("row_remap_pending", "18", S.GPU_ROW_PENDING, _FLAG, "Azure; XID 63", when=_C, release_after_s=0.0,
             fix=_RESET),
        _node("row_remap_failure", "19", S.GPU_ROW_FAILURE, _FLAG, "Azure, DCGM", release_after_s=None, fix=_RMA),
        _node("rows_used_up", "19", S.GPU_ROWS_UNCORRECTABLE, Above(limit=511, unit="rows"), "DCGM: 512", when=_C,
              release_after_s=None, fix=_RMA),
        _node("sram_threshold", "20", S.GPU_SRAM_THRESHOLD, _FLAG, "NVIDIA's RMA policy", when=_C,
              release_after_s=None, fix=_RMA),
    )  # fmt: skip


def _pcie() -> tuple[Rule, ...]:
    under_load = {"for_s": 60.0, "while_": _LOADED, "when": _C, "tier": Tier.SERVE}
    return (
        _warn("pcie_replays_warn", "22", S.GPU_PCIE_REPLAYS, Replays(limit=1), "DcgmHealthWatch.cpp",
              samples=3, within_s=300.0, apart_s=60.0),
        _gpu("pcie_replays", "22", S.GPU_PCIE_REPLAYS, Replays(limit=10), "10 × DCGM", when=_C,
             samples=3, within_s=300.0, apart_s=60.0),
        _node("pcie_fatal", "23", S.GPU_PCIE_FATAL, Rises(limit=0, within_s=60), "field 180", release_after_s=None),
        _node("pcie_generation", "24", S.GPU_PCIE_GENERATION, Against(other=S.GPU_PCIE_GENERATION_MAX, worse="<"),
              "imbue; NVSentinel 890", **under_load),
        _node("pcie_width", "24", S.GPU_PCIE_WIDTH, Against(other=S.GPU_PCIE_WIDTH_MAX, worse="<"),
              "imbue; NVSentinel 890", **under_load),
    )  # fmt: skip


def _nvlink() -> tuple[Rule, ...]:
    later = {"when": _C, "tier": Tier.SERVE}
    twice = {"samples": 2, "within_s": 180.0, "apart_s": 60.0, **later}
    a_minute = Rises(limit=0, within_s=60)
    bandwidth = Bits(mask=0b01, without=0b10, shown="degraded bandwidth")
    return (
        _node("nvlink_down", "25", S.GPU_NVLINKS_DOWN, Above(limit=0, unit="links down"), "NVIDIA Health Validation",
              samples=2, tier=Tier.SERVE, port=True),
        _node("nvlinks_missing", "25", S.GPU_NVLINKS, Among(limit=0.99, least_median=1), "gpud 1085: peers have links",
              samples=2, tier=Tier.SERVE),
        _warn("nvlink_replays_warn", "26", S.GPU_NVLINK_REPLAYS, a_minute, "imbue"),
        _node("nvlink_replays", "26", S.GPU_NVLINK_REPLAYS, a_minute, "DCGM: 1 a minute", **twice),
        _warn("nvlink_recoveries_warn", "26", S.GPU_NVLINK_RECOVERIES, a_minute, "imbue"),
        _node("nvlink_recoveries", "26", S.GPU_NVLINK_RECOVERIES, a_minute, "DCGM: 1 a minute", **twice),
        _node("nvlink_recovery_failed", "26", S.GPU_NVLINK_RECOVERIES_FAILED, a_minute, "field 214", tier=Tier.SERVE),
        _warn("nvlink_crc_warn", "27", S.GPU_NVLINK_CRC, a_minute, "DCGM"),
        _node("nvlink_crc", "27", S.GPU_NVLINK_CRC, Rises(limit=5_999, within_s=60), "DCGM: 100 a second", **later),
        _warn("nvlink_effective_errors", "27", S.GPU_NVLINK_EFFECTIVE_ERRORS, a_minute, "DCGM"),
        _node("nvlink_ber", "27", S.GPU_NVLINK_BER, Above(limit=1e-12), "DCGM", **later),
        _node("fabric_unhealthy", "28", S.GPU_FABRIC_SUMMARY, OneOf(bad=frozenset({2.0}), good=frozenset({1.0})),
              "nvml.h", tier=Tier.SERVE),
        _warn("fabric_limited", "28", S.GPU_FABRIC_SUMMARY, OneOf(bad=frozenset({3.0}), good=frozenset({1.0})),
              "nvml.h"),
        _warn("fabric_bandwidth", "28", S.GPU_FABRIC_MASK, bandwidth, "nvml.h"),
        _node("fabric_stuck", "28", S.GPU_FABRIC_STATE, OneOf(bad=frozenset({2.0}), good=frozenset({3.0})), "nvml.h",
              for_s=120.0, tier=Tier.SERVE),
    )  # fmt: skip


def _infiniband(spec: HealthSpec) -> tuple[Rule, ...]:
    port = {"port": True, "tier": Tier.SERVE}
    warn = {"port": True}
    up = (Guard(signal=S.IB_PORT_STATE, at_least=4, at_most=4),)
    state = {1.0: "down", 2.0: "init", 3.0: "armed", 4.0: "active"}
    down = OneOf(bad=frozenset({1.0}), good=frozenset({4.0}), what=MappingProxyType(state))
    waiting = OneOf(bad=frozenset({2.0, 3.0}), good=frozenset({4.0}), what=MappingProxyType(state))
    away = OneOf(bad=frozenset({1.0, 2.0, 3.0}), good=frozenset({4.0}), what=MappingProxyType(state))
    rate_bits = (spec.ib_port_gbits or 0) * 1e9
    errors = {"port": True, "while_": _INFINIBAND}
    dead_peer = "NVSentinel, softened: a dead peer raises these on the healthy side"

    def a_minute(limit: float) -> Rises:
        return Rises(limit=limit, within_s=60)

    rules = (
        _node("ib_down", "32", S.IB_PORT_STATE, down, "NVSentinel at once; NVIDIA 30 s", for_s=5.0, **port),
        _warn("ib_waiting_warn", "32", S.IB_PORT_STATE, waiting, "NVSentinel", **warn),
        _node("ib_waiting", "32", S.IB_PORT_STATE, waiting, "NVIDIA Health Validation", for_s=30.0, **port),
        _warn("ib_flap_warn", "33", S.IB_LINK_DOWNED, a_minute(0), "ByteRobust", **warn),
        _node("ib_flap_fast", "33", S.IB_LINK_DOWNED, Rises(limit=1, within_s=300), "ByteRobust: 2 in 5 min", when=_C,
              **port),
        _node("ib_flap", "33", S.IB_LINK_DOWNED, Rises(limit=2, within_s=43_200), "gpud: 3 in 12 h", when=_C, **port),
        # The counter sticks at 255; what the port itself shows does not.
        _node("ib_flap_seen_fast", "33", S.IB_PORT_STATE, away, "ByteRobust: 2 in 5 min", when=_C, samples=2,
              within_s=300.0, apart_s=EDGE, **port),
        _node("ib_flap_seen", "33", S.IB_PORT_STATE, away, "gpud: 3 in 12 h", when=_C, samples=3, within_s=43_200.0,
              apart_s=EDGE, **port),
        _node("ib_carrier_flap", "33", S.IB_CARRIER_CHANGES, Rises(limit=5, within_s=43_200), "gpud: 3 in 12 h",
              when=_C, **port),
        _node("ib_rate", "34", S.IB_PORT_RATE, Below(limit=rate_bits, unit="bit/s"), "Azure, gcm", samples=2, when=_C,
              while_=up, **port),
        _node("ib_missing", "35", S.IB_PORT_PRESENT, Says(statuses=frozenset({Status.LOST})), "NVSentinel", samples=2,
              **port),
        _warn("ib_symbol_errors", "36", S.IB_SYMBOL_ERRORS, Rises(limit=120, within_s=3600), "NVSentinel", **errors),
        _node("ib_link_bad", "36", S.IB_SYMBOL_ERRORS, Rises(limit=120, within_s=3600), "NVSentinel, both kinds",
              when=_C, tier=Tier.SERVE, witness=frozenset({"ib_link_recovering"}), **errors),
        _warn("ib_link_recovering", "36", S.IB_LINK_RECOVERIES, a_minute(0), "NVSentinel", **errors),
        _node("ib_link_recoveries", "37", S.IB_LINK_RECOVERIES, a_minute(5), _J, samples=2, within_s=180.0,
              apart_s=60.0, when=_C, tier=Tier.SERVE, **errors),
        *_hours("ib_link_integrity", S.IB_LINK_INTEGRITY),
        *_hours("ib_buffer_overruns", S.IB_BUFFER_OVERRUNS),
        _warn("ib_receive_errors", "39", S.IB_RECEIVE_ERRORS, a_minute(600), "NVSentinel: 10 a second", **errors),
        _warn("ib_send_discards", "39", S.IB_SEND_DISCARDS, a_minute(6_000), "NVSentinel: 100 a second", **errors),
        _warn("ib_rnr_retries", "40", S.IB_RNR_RETRIES_EXCEEDED, a_minute(60), dead_peer, **warn),
        _warn("ib_ack_timeouts", "40", S.IB_ACK_TIMEOUTS, a_minute(60), dead_peer, **warn),
        _warn("ib_packet_sequence", "40", S.IB_PACKET_SEQUENCE_ERRORS, a_minute(60), dead_peer, **warn),
        _warn("ib_slow_restarts", "41", S.IB_SLOW_RESTARTS, a_minute(600), "NVSentinel: 10 a second", **warn),
        *(
            _node(name, "43", signal, OneOf(bad=frozenset({1.0})), "NVSentinel", release_after_s=None, tier=Tier.SERVE,
                  fix="look at the card in the kernel log, reset or replace it, then set the node healthy")
            for name, signal in (
                ("nic_hot", S.NIC_HOT),
                ("nic_underpowered", S.NIC_UNDERPOWERED),
                ("nic_unhealthy", S.NIC_UNHEALTHY),
                ("nic_command_leak", S.NIC_COMMAND_LEAK),
            )
        ),
    )  # fmt: skip
    return tuple(rule for rule in rules if spec.ib_port_gbits is not None or rule.name != "ib_rate")


EDGE = -1.0
"""As `apart_s`: each row of bad readings counts once, however long it is."""


def _hours(name: str, signal: Signal) -> tuple[Rule, ...]:
    """Registers of 4 bits: softer than NVSentinel, all nine ports of a healthy H100 host were seen at the ceiling."""
    rises = Rises(limit=0, within_s=60)
    return (
        _warn(f"{name}_warn", "38", signal, rises, "NVSentinel, softened", port=True, while_=_INFINIBAND),
        _node(name, "38", signal, rises, "NVSentinel, softened", samples=2, within_s=10_800.0, apart_s=3_600.0,
              when=_C, tier=Tier.SERVE, port=True, while_=_INFINIBAND),
    )  # fmt: skip


def _saturated() -> tuple[Rule, ...]:
    """A counter at its ceiling is blind. That is worth a word, and no more."""
    return tuple(
        _warn(f"saturated_{signal}", "38", signal, Above(limit=ceiling - 1), "IBTA vol. 1, 16.1.3.5", port=True,
              release_after_s=0.0, fix="`perfquery -R` clears it")
        for signal, ceiling in CEILINGS.items()
        if signal is not S.IB_SEND_WAIT
    )  # fmt: skip
