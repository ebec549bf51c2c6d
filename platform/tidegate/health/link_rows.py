"""The rows of the specification's table 4.1 on what lies between GPUs: NVLink, InfiniBand, RoCE."""

from __future__ import annotations

from types import MappingProxyType

from tidegate.arbiter.messages import When
from tidegate.health.conditions import Above, Below, Bits, OneOf, Rises, Says
from tidegate.health.evidence import Guard
from tidegate.health.peers import Among
from tidegate.health.readings import CEILINGS, Signal, Status
from tidegate.health.rows import OUR_OWN, node, warn
from tidegate.health.rule import EDGE, Rule
from tidegate.ids import Tier
from tidegate.spec.policy import HealthSpec

S = Signal
_C = When.NEXT_CHECKPOINT
_INFINIBAND = (Guard(signal=S.IB_PORT_ETHERNET, at_most=0),)


def nvlink() -> tuple[Rule, ...]:
    later = {"when": _C, "tier": Tier.SERVE}
    twice = {"samples": 2, "within_s": 180.0, "apart_s": 60.0, **later}
    a_minute = Rises(limit=0, within_s=60)
    bandwidth = Bits(mask=0b01, without=0b10, shown="degraded bandwidth")
    return (
        node("nvlink_down", "25", S.GPU_NVLINKS_DOWN, Above(limit=0, unit="links down"), "NVIDIA Health Validation",
              samples=2, tier=Tier.SERVE, port=True),
        node("nvlinks_missing", "25", S.GPU_NVLINKS, Among(limit=0.99, least_median=1), "gpud 1085: peers have links",
              samples=2, tier=Tier.SERVE),
        warn("nvlink_replays_warn", "26", S.GPU_NVLINK_REPLAYS, a_minute, "imbue"),
        node("nvlink_replays", "26", S.GPU_NVLINK_REPLAYS, a_minute, "DCGM: 1 a minute", **twice),
        warn("nvlink_recoveries_warn", "26", S.GPU_NVLINK_RECOVERIES, a_minute, "imbue"),
        node("nvlink_recoveries", "26", S.GPU_NVLINK_RECOVERIES, a_minute, "DCGM: 1 a minute", **twice),
        node("nvlink_recovery_failed", "26", S.GPU_NVLINK_RECOVERIES_FAILED, a_minute, "field 214", tier=Tier.SERVE),
        warn("nvlink_crc_warn", "27", S.GPU_NVLINK_CRC, a_minute, "DCGM"),
        node("nvlink_crc", "27", S.GPU_NVLINK_CRC, Rises(limit=5_999, within_s=60), "DCGM: 100 a second", **later),
        warn("nvlink_effective_errors", "27", S.GPU_NVLINK_EFFECTIVE_ERRORS, a_minute, "DCGM"),
        node("nvlink_ber", "27", S.GPU_NVLINK_BER, Above(limit=1e-12), "DCGM", **later),
        node("fabric_unhealthy", "28", S.GPU_FABRIC_SUMMARY, OneOf(bad=frozenset({2.0}), good=frozenset({1.0})),
              "nvml.h", tier=Tier.SERVE),
        warn("fabric_limited", "28", S.GPU_FABRIC_SUMMARY, OneOf(bad=frozenset({3.0}), good=frozenset({1.0})),
              "nvml.h"),
        warn("fabric_bandwidth", "28", S.GPU_FABRIC_MASK, bandwidth, "nvml.h"),
        node("fabric_stuck", "28", S.GPU_FABRIC_STATE, OneOf(bad=frozenset({2.0}), good=frozenset({3.0})), "nvml.h",
              for_s=120.0, tier=Tier.SERVE),
    )  # fmt: skip


def infiniband(spec: HealthSpec) -> tuple[Rule, ...]:
    port = {"port": True, "tier": Tier.SERVE}
    told = {"port": True}
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
        node("ib_down", "32", S.IB_PORT_STATE, down, "NVSentinel at once; NVIDIA 30 s", for_s=5.0, **port),
        warn("ib_waiting_warn", "32", S.IB_PORT_STATE, waiting, "NVSentinel", **told),
        node("ib_waiting", "32", S.IB_PORT_STATE, waiting, "NVIDIA Health Validation", for_s=30.0, **port),
        warn("ib_flap_warn", "33", S.IB_LINK_DOWNED, a_minute(0), "ByteRobust", **told),
        node("ib_flap_fast", "33", S.IB_LINK_DOWNED, Rises(limit=1, within_s=300), "ByteRobust: 2 in 5 min", when=_C,
              **port),
        node("ib_flap", "33", S.IB_LINK_DOWNED, Rises(limit=2, within_s=43_200), "gpud: 3 in 12 h", when=_C, **port),
        # The counter sticks at 255; what the port itself shows does not.
        node("ib_flap_seen_fast", "33", S.IB_PORT_STATE, away, "ByteRobust: 2 in 5 min", when=_C, samples=2,
              within_s=300.0, apart_s=EDGE, **port),
        node("ib_flap_seen", "33", S.IB_PORT_STATE, away, "gpud: 3 in 12 h", when=_C, samples=3, within_s=43_200.0,
              apart_s=EDGE, **port),
        node("ib_carrier_flap", "33", S.IB_CARRIER_CHANGES, Rises(limit=5, within_s=43_200), "gpud: 3 in 12 h",
              when=_C, **port),
        node("ib_rate", "34", S.IB_PORT_RATE, Below(limit=rate_bits, unit="bit/s"), "Azure, gcm", samples=2, when=_C,
              while_=up, **port),
        node("ib_missing", "35", S.IB_PORT_PRESENT, Says(statuses=frozenset({Status.LOST})), "NVSentinel", samples=2,
              **port),
        warn("ib_symbol_errors", "36", S.IB_SYMBOL_ERRORS, Rises(limit=120, within_s=3600), "NVSentinel", **errors),
        node("ib_link_bad", "36", S.IB_SYMBOL_ERRORS, Rises(limit=120, within_s=3600), "NVSentinel, both kinds",
              when=_C, tier=Tier.SERVE, witness=frozenset({"ib_link_recovering"}), **errors),
        warn("ib_link_recovering", "36", S.IB_LINK_RECOVERIES, a_minute(0), "NVSentinel", **errors),
        node("ib_link_recoveries", "37", S.IB_LINK_RECOVERIES, a_minute(5), OUR_OWN, samples=2, within_s=180.0,
              apart_s=60.0, when=_C, tier=Tier.SERVE, **errors),
        *_hours("ib_link_integrity", S.IB_LINK_INTEGRITY),
        *_hours("ib_buffer_overruns", S.IB_BUFFER_OVERRUNS),
        warn("ib_receive_errors", "39", S.IB_RECEIVE_ERRORS, a_minute(600), "NVSentinel: 10 a second", **errors),
        warn("ib_send_discards", "39", S.IB_SEND_DISCARDS, a_minute(6_000), "NVSentinel: 100 a second", **errors),
        warn("ib_rnr_retries", "40", S.IB_RNR_RETRIES_EXCEEDED, a_minute(60), dead_peer, **told),
        warn("ib_ack_timeouts", "40", S.IB_ACK_TIMEOUTS, a_minute(60), dead_peer, **told),
        warn("ib_packet_sequence", "40", S.IB_PACKET_SEQUENCE_ERRORS, a_minute(60), dead_peer, **told),
        warn("ib_slow_restarts", "41", S.IB_SLOW_RESTARTS, a_minute(600), "NVSentinel: 10 a second", **told),
        *(
            node(name, "43", signal, OneOf(bad=frozenset({1.0})), "NVSentinel", release_after_s=None, tier=Tier.SERVE,
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


def _hours(name: str, signal: Signal) -> tuple[Rule, ...]:
    """Registers of 4 bits: softer than NVSentinel, all nine ports of a healthy H100 host were seen at the ceiling."""
    rises = Rises(limit=0, within_s=60)
    return (
        warn(f"{name}_warn", "38", signal, rises, "NVSentinel, softened", port=True, while_=_INFINIBAND),
        node(name, "38", signal, rises, "NVSentinel, softened", samples=2, within_s=10_800.0, apart_s=3_600.0,
              when=_C, tier=Tier.SERVE, port=True, while_=_INFINIBAND),
    )  # fmt: skip


def saturated() -> tuple[Rule, ...]:
    """A counter at its ceiling is blind. That is worth a word, and no more."""
    return tuple(
        warn(f"saturated_{signal}", "38", signal, Above(limit=ceiling - 1), "IBTA vol. 1, 16.1.3.5", port=True,
              release_after_s=0.0, fix="`perfquery -R` clears it")
        for signal, ceiling in CEILINGS.items()
        if signal is not S.IB_SEND_WAIT
    )  # fmt: skip
