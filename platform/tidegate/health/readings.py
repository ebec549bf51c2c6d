"""What sources say: one `Reading` for each thing they looked at. A value that isn't there is never a healthy value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tidegate.ids import GpuId, NodeId


class Signal(StrEnum):
    """What was looked at. Signals with a unit carry it in their name; flags are 0.0 or 1.0.

    Signals in `COUNTERS` only rise until something resets them, and stick at their `CEILINGS` if they have one. Those
    in `EVENTS` are things that happened, one reading each. All others are levels, true at the moment of the reading.
    """

    # Sources: 1.0 when the source could be asked at all. The subject is the node.
    NVML_ANSWERS = "nvml_answers"
    NVML_EVENTS_ANSWERS = "nvml_events_answers"
    IB_ANSWERS = "ib_answers"
    KMSG_ANSWERS = "kmsg_answers"
    DCGM_ANSWERS = "dcgm_answers"
    HOST_ANSWERS = "host_answers"

    # GPUs. The subject is the GPU's UUID.
    GPU_COUNT = "gpu_count"
    """GPUs that NVML lists, of the node (its subject is the node)."""
    GPU_ANSWERS = "gpu_answers"
    """1.0 when the GPU can be opened and asked; otherwise the status and cause say what it said instead."""
    GPU_READ = "gpu_read_seconds"
    """How long one look at the GPU took; a failing GPU makes the driver slow, and this one says which it is (C152)."""
    GPU_TEMPERATURE = "gpu_temperature_celsius"
    GPU_MEMORY_TEMPERATURE = "gpu_memory_temperature_celsius"
    """HBM; absent on cards without that sensor (they say 0)."""
    GPU_MARGIN = "gpu_thermal_margin_celsius"
    """Degrees left to the slowdown limit, signed."""
    GPU_SLOWDOWN_OFFSET = "gpu_slowdown_offset_celsius"
    """The margin at which the hardware slows down, signed (H100: -2). Ada and newer."""
    GPU_SLOWDOWN_LIMIT = "gpu_slowdown_limit_celsius"
    """The core temperature at which the hardware slows down. Ampere and older."""
    GPU_MEMORY_LIMIT = "gpu_memory_limit_celsius"
    """The HBM temperature not to be passed. Ampere and older."""
    GPU_TENSOR_ACTIVE = "gpu_tensor_active_ratio"
    """Share of the time since the last reading in which tensor cores worked, 0 to 1."""
    GPU_SM_ACTIVE = "gpu_sm_active_ratio"
    GPU_DRAM_ACTIVE = "gpu_dram_active_ratio"
    GPU_UTILIZATION = "gpu_utilization_ratio"
    """Share of the time in which some kernel ran; a rank that is stuck in a collective shows 1."""
    GPU_MEMORY_USED = "gpu_memory_used_bytes"
    GPU_PROCESSES = "gpu_processes"
    """Compute processes that the driver lists on the GPU."""
    GPU_MIG = "gpu_mig"
    """Flag: the GPU is in MIG mode."""
    GPU_SM_CLOCK = "gpu_clock_sm_hertz"
    GPU_SM_CLOCK_MAX = "gpu_clock_sm_max_hertz"
    GPU_MEMORY_CLOCK = "gpu_clock_memory_hertz"
    GPU_CLOCK_REASONS = "gpu_clock_reasons"
    """A `ClockReason` mask, as a whole number."""
    GPU_THROTTLED_POWER_CAP = "gpu_throttled_power_cap_seconds"
    """Counter, seconds, as all of the five."""
    GPU_THROTTLED_SYNC_BOOST = "gpu_throttled_sync_boost_seconds"
    GPU_THROTTLED_SW_THERMAL = "gpu_throttled_sw_thermal_seconds"
    GPU_THROTTLED_HW_THERMAL = "gpu_throttled_hw_thermal_seconds"
    GPU_THROTTLED_POWER_BRAKE = "gpu_throttled_power_brake_seconds"
    GPU_POWER = "gpu_power_watts"
    GPU_POWER_LIMIT = "gpu_power_limit_watts"
    GPU_ENERGY = "gpu_energy_joules"
    """Counter, since the driver was loaded."""
    GPU_PERSISTENCE = "gpu_persistence_enabled"
    """Flag: the driver stays loaded when nobody uses it."""
    GPU_ECC_ENABLED = "gpu_ecc_enabled"
    """Flag."""
    GPU_ECC_CORRECTED = "gpu_ecc_corrected_volatile"
    """Counter, since the driver was loaded."""
    GPU_ECC_UNCORRECTED = "gpu_ecc_uncorrected_volatile"
    """Counter, since the driver was loaded."""
    GPU_ECC_CORRECTED_EVER = "gpu_ecc_corrected_aggregate"
    """Counter over the card's life."""
    GPU_ECC_UNCORRECTED_EVER = "gpu_ecc_uncorrected_aggregate"
    """Counter over the card's life."""
    GPU_SRAM_THRESHOLD = "gpu_sram_threshold_exceeded"
    """Flag: NVIDIA's own mark for SRAM errors is passed. Hopper and newer, root."""
    GPU_ROWS_CORRECTABLE = "gpu_rows_remapped_correctable"
    """Counter over the card's life: rows remapped for correctable errors."""
    GPU_ROWS_UNCORRECTABLE = "gpu_rows_remapped_uncorrectable"
    """Counter over the card's life; 8 are many, 512 are all."""
    GPU_ROW_PENDING = "gpu_row_remap_pending"
    """Flag: a row is remapped at the next reset."""
    GPU_ROW_FAILURE = "gpu_row_remap_failure"
    """Flag: a remapping has failed."""
    GPU_BANKS_EXHAUSTED = "gpu_banks_without_spare_rows"
    """Banks with no spare row left."""
    GPU_PCIE_REPLAYS = "gpu_pcie_replays"
    """Counter."""
    GPU_PCIE_NONFATAL = "gpu_pcie_nonfatal_errors"
    """Counter."""
    GPU_PCIE_FATAL = "gpu_pcie_fatal_errors"
    """Counter."""
    GPU_PCIE_GENERATION = "gpu_pcie_generation"
    """Of the link now; it drops when idle, so only true under load."""
    GPU_PCIE_GENERATION_MAX = "gpu_pcie_generation_max"
    GPU_PCIE_WIDTH = "gpu_pcie_width"
    """Lanes of the link now."""
    GPU_PCIE_WIDTH_MAX = "gpu_pcie_width_max"
    GPU_PCIE_SENT = "gpu_pcie_sent_bytes_per_second"
    GPU_PCIE_RECEIVED = "gpu_pcie_received_bytes_per_second"
    GPU_NVLINKS = "gpu_nvlinks"
    """NVLinks that the GPU has; 0 on a card without NVLink."""
    GPU_NVLINKS_DOWN = "gpu_nvlinks_down"
    """Of those, how many are not active; `detail` names them."""
    GPU_NVLINK_REPLAYS = "gpu_nvlink_replays"
    """Counter, summed over the links, as all NVLink counters here. Up to Hopper."""
    GPU_NVLINK_RECOVERIES = "gpu_nvlink_recoveries"
    """Counter. Up to Hopper; on Blackwell the successful ones."""
    GPU_NVLINK_CRC = "gpu_nvlink_crc_errors"
    """Counter. Up to Hopper."""
    GPU_NVLINK_RECOVERIES_FAILED = "gpu_nvlink_recoveries_failed"
    """Counter. Blackwell."""
    GPU_NVLINK_RECEIVE_ERRORS = "gpu_nvlink_receive_errors"
    """Counter. Blackwell."""
    GPU_NVLINK_EFFECTIVE_ERRORS = "gpu_nvlink_effective_errors"
    """Counter. Blackwell."""
    GPU_NVLINK_BER = "gpu_nvlink_effective_bit_error_ratio"
    """The worst link's. Blackwell."""
    GPU_NVLINK_SENT = "gpu_nvlink_sent_bytes_per_second"
    GPU_NVLINK_RECEIVED = "gpu_nvlink_received_bytes_per_second"
    GPU_NVLINK_RATE = "gpu_nvlink_bytes_per_second"
    """Both directions, where only the sum is known (DCGM types it as a counter; it is a rate, and goes down)."""
    GPU_RECOVERY_ACTION = "gpu_recovery_action"
    """NVIDIA's own verdict: 0 none, 1 reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 recover IMEX, 6 bus
    reset, 7 system reboot. Driver 570 and newer."""
    GPU_FABRIC_STATE = "gpu_fabric_state"
    """1 not started, 2 in progress, 3 done. Hopper and newer with NVSwitch."""
    GPU_FABRIC_SUMMARY = "gpu_fabric_health_summary"
    """1 healthy, 2 unhealthy, 3 limited."""
    GPU_FABRIC_MASK = "gpu_fabric_health_mask"
    """Pairs of bits, as a whole number: 0-1 degraded bandwidth, 2-3 route recovery, 4-5 route unhealthy, 6-7 access
    timeout, 8-11 wrong configuration; in each pair 1 is "true", 2 is "false"."""
    GPU_XID = "gpu_xid"
    """Event. The value is the XID's number; `detail` is the kernel's text where the kernel log told it. "Fallen off the
    bus" without an XID comes as 79. The same XID from the event set and from the kernel log comes once."""

    RANK_STEP_COMPUTE = "rank_step_compute_seconds"
    """What the rank on a GPU (the subject) computes in a step before its collective; not the step's whole time, which
    is the same for all ranks because all wait for the slowest."""

    # InfiniBand and RoCE. The subject is the port, "mlx5_0/1" (device, port).
    IB_PORT_PRESENT = "ib_port_present"
    """1.0; a port that was there and is gone has the status lost."""
    IB_PORT_ETHERNET = "ib_port_ethernet"
    """Flag: the link layer is Ethernet (RoCE, bonds): InfiniBand's own counters mean little there."""
    IB_PORT_STATE = "ib_port_state"
    """1 down, 2 init, 3 armed, 4 active; 2 and 3 on InfiniBand: no subnet manager has come by yet."""
    IB_PORT_PHYS_STATE = "ib_port_phys_state"
    """1 sleep, 2 polling, 3 disabled, 4 training, 5 link up, 6 error recovery, 7 phy test."""
    IB_PORT_RATE = "ib_port_rate_bits"
    """Bits per second that the link has negotiated; a port that isn't up shows a rate too, of no meaning."""
    IB_CARRIER_CHANGES = "ib_carrier_changes"
    """Counter, of the port's network interface."""
    IB_RECEIVED = "ib_received_bytes"
    """Counter (the file's 4-byte words are multiplied out)."""
    IB_SENT = "ib_sent_bytes"
    """Counter."""
    IB_SYMBOL_ERRORS = "ib_symbol_errors"
    """Counter of 16 bits; this and all that follow are counters."""
    IB_LINK_RECOVERIES = "ib_link_error_recoveries"
    IB_LINK_DOWNED = "ib_link_downed"
    IB_RECEIVE_ERRORS = "ib_receive_errors"
    IB_REMOTE_PHYSICAL_ERRORS = "ib_receive_remote_physical_errors"
    IB_SWITCH_RELAY_ERRORS = "ib_receive_switch_relay_errors"
    IB_SEND_DISCARDS = "ib_send_discards"
    IB_SEND_CONSTRAINT_ERRORS = "ib_send_constraint_errors"
    IB_RECEIVE_CONSTRAINT_ERRORS = "ib_receive_constraint_errors"
    IB_LINK_INTEGRITY = "ib_local_link_integrity_errors"
    IB_BUFFER_OVERRUNS = "ib_excessive_buffer_overruns"
    IB_VL15_DROPPED = "ib_vl15_dropped"
    IB_SEND_WAIT = "ib_send_wait_ticks"
    """Congestion, not a fault."""
    IB_OUT_OF_SEQUENCE = "ib_out_of_sequence"
    IB_PACKET_SEQUENCE_ERRORS = "ib_packet_sequence_errors"
    IB_ACK_TIMEOUTS = "ib_local_ack_timeouts"
    IB_RNR_RETRIES_EXCEEDED = "ib_rnr_nak_retries_exceeded"
    IB_SLOW_RESTARTS = "ib_roce_slow_restarts"
    IB_CNP_SENT = "ib_cnp_sent"
    IB_CNP_HANDLED = "ib_cnp_handled"
    IB_OUT_OF_BUFFER = "ib_out_of_buffer"

    # The kernel log's lines about network cards. The subject is the card, "pci:0000:18:00.0". All are events.
    NIC_HOT = "nic_high_temperature"
    NIC_UNDERPOWERED = "nic_insufficient_power"
    NIC_UNHEALTHY = "nic_health_compromised"
    """The card's firmware no longer beats."""
    NIC_COMMAND_LEAK = "nic_command_timeout"

    # The node itself. The subject is the node; for disks it is the path, "disk:/var/lib/tidegate".
    HOST_DISK_FREE = "host_disk_free_bytes"
    HOST_DISK_FREE_RATIO = "host_disk_free_ratio"
    HOST_DISK_WRITABLE = "host_disk_writable"
    """Flag: 0.0 once the kernel has remounted it read-only."""
    HOST_MEMORY_AVAILABLE = "host_memory_available_bytes"
    HOST_MEMORY_AVAILABLE_RATIO = "host_memory_available_ratio"
    HOST_OOM_KILLS = "host_oom_kills"
    """Counter, since boot."""
    HOST_SHM_FREE = "host_shm_free_bytes"
    """Of /dev/shm."""
    HOST_SHM_SIZE = "host_shm_size_bytes"
    HOST_CLOCK_OFFSET = "host_clock_offset_seconds"
    """What the kernel's clock discipline believes to be off, signed; no value while nothing disciplines the clock."""

    @property
    def of_gpu(self) -> bool:
        """Whether its subject is a GPU's UUID."""
        return self.startswith(("gpu_", "rank_")) and self is not Signal.GPU_COUNT


EVENTS = frozenset(
    {Signal.GPU_XID, Signal.NIC_HOT, Signal.NIC_UNDERPOWERED, Signal.NIC_UNHEALTHY, Signal.NIC_COMMAND_LEAK}
)

CEILINGS: Mapping[Signal, int] = MappingProxyType(
    {
        Signal.IB_SYMBOL_ERRORS: 2**16 - 1,
        Signal.IB_LINK_RECOVERIES: 2**8 - 1,
        Signal.IB_LINK_DOWNED: 2**8 - 1,
        Signal.IB_RECEIVE_ERRORS: 2**16 - 1,
        Signal.IB_REMOTE_PHYSICAL_ERRORS: 2**16 - 1,
        Signal.IB_SWITCH_RELAY_ERRORS: 2**16 - 1,
        Signal.IB_SEND_DISCARDS: 2**16 - 1,
        Signal.IB_SEND_CONSTRAINT_ERRORS: 2**8 - 1,
        Signal.IB_RECEIVE_CONSTRAINT_ERRORS: 2**8 - 1,
        Signal.IB_LINK_INTEGRITY: 2**4 - 1,
        Signal.IB_BUFFER_OVERRUNS: 2**4 - 1,
        Signal.IB_VL15_DROPPED: 2**16 - 1,
        Signal.IB_SEND_WAIT: 2**32 - 1,
    }
)
"""Where a counter sticks (InfiniBand's PortCounters registers, IBTA vol. 1, 16.1.3.5): a reading at its ceiling is OK
and says nothing more; what happens from there on can't be seen."""

COUNTERS = frozenset(
    {
        Signal.GPU_THROTTLED_POWER_CAP,
        Signal.GPU_THROTTLED_SYNC_BOOST,
        Signal.GPU_THROTTLED_SW_THERMAL,
        Signal.GPU_THROTTLED_HW_THERMAL,
        Signal.GPU_THROTTLED_POWER_BRAKE,
        Signal.GPU_ENERGY,
        Signal.GPU_ECC_CORRECTED,
        Signal.GPU_ECC_UNCORRECTED,
        Signal.GPU_ECC_CORRECTED_EVER,
        Signal.GPU_ECC_UNCORRECTED_EVER,
        Signal.GPU_ROWS_CORRECTABLE,
        Signal.GPU_ROWS_UNCORRECTABLE,
        Signal.GPU_PCIE_REPLAYS,
        Signal.GPU_PCIE_NONFATAL,
        Signal.GPU_PCIE_FATAL,
        Signal.GPU_NVLINK_REPLAYS,
        Signal.GPU_NVLINK_RECOVERIES,
        Signal.GPU_NVLINK_CRC,
        Signal.GPU_NVLINK_RECOVERIES_FAILED,
        Signal.GPU_NVLINK_RECEIVE_ERRORS,
        Signal.GPU_NVLINK_EFFECTIVE_ERRORS,
        Signal.IB_CARRIER_CHANGES,
        Signal.IB_RECEIVED,
        Signal.IB_SENT,
        Signal.IB_OUT_OF_SEQUENCE,
        Signal.IB_PACKET_SEQUENCE_ERRORS,
        Signal.IB_ACK_TIMEOUTS,
        Signal.IB_RNR_RETRIES_EXCEEDED,
        Signal.IB_SLOW_RESTARTS,
        Signal.IB_CNP_SENT,
        Signal.IB_CNP_HANDLED,
        Signal.IB_OUT_OF_BUFFER,
        Signal.HOST_OOM_KILLS,
        *CEILINGS,
    }
)


MIDDLE_S = 5.0
HOST_S = 10.0
DCGM_S = 15.0
SLOW_S = 60.0

PERIODS_S: Mapping[Signal, float] = MappingProxyType(
    {
        **dict.fromkeys(
            (signal for signal in COUNTERS if signal is not Signal.HOST_OOM_KILLS),
            MIDDLE_S,
        ),
        **dict.fromkeys(
            (
                Signal.GPU_TENSOR_ACTIVE,
                Signal.GPU_SM_ACTIVE,
                Signal.GPU_DRAM_ACTIVE,
                Signal.GPU_PCIE_SENT,
                Signal.GPU_PCIE_RECEIVED,
                Signal.GPU_NVLINK_SENT,
                Signal.GPU_NVLINK_RECEIVED,
                Signal.GPU_MEMORY_USED,
                Signal.GPU_PROCESSES,
                Signal.GPU_UTILIZATION,
                Signal.GPU_SM_CLOCK,
                Signal.GPU_POWER,
                Signal.GPU_READ,
                Signal.GPU_PCIE_GENERATION,
                Signal.GPU_PCIE_WIDTH,
                Signal.GPU_NVLINKS,
                Signal.GPU_NVLINKS_DOWN,
                Signal.GPU_NVLINK_BER,
                Signal.IB_PORT_PRESENT,
                Signal.IB_PORT_ETHERNET,
                Signal.IB_PORT_PHYS_STATE,
                Signal.IB_PORT_RATE,
            ),
            MIDDLE_S,
        ),
        **dict.fromkeys((signal for signal in Signal if signal.startswith("host_")), HOST_S),
        Signal.DCGM_ANSWERS: DCGM_S,
        Signal.GPU_NVLINK_RATE: DCGM_S,
        **dict.fromkeys(
            (
                Signal.GPU_PERSISTENCE,
                Signal.GPU_ECC_ENABLED,
                Signal.GPU_ECC_CORRECTED,
                Signal.GPU_ECC_UNCORRECTED,
                Signal.GPU_ECC_CORRECTED_EVER,
                Signal.GPU_ECC_UNCORRECTED_EVER,
                Signal.GPU_SRAM_THRESHOLD,
                Signal.GPU_ROWS_CORRECTABLE,
                Signal.GPU_ROWS_UNCORRECTABLE,
                Signal.GPU_ROW_PENDING,
                Signal.GPU_ROW_FAILURE,
                Signal.GPU_BANKS_EXHAUSTED,
                Signal.GPU_FABRIC_STATE,
                Signal.GPU_FABRIC_SUMMARY,
                Signal.GPU_FABRIC_MASK,
                Signal.GPU_PCIE_GENERATION_MAX,
                Signal.GPU_PCIE_WIDTH_MAX,
                Signal.GPU_SM_CLOCK_MAX,
                Signal.GPU_MEMORY_CLOCK,
                Signal.GPU_ENERGY,
                Signal.IB_REMOTE_PHYSICAL_ERRORS,
                Signal.IB_SWITCH_RELAY_ERRORS,
                Signal.IB_SEND_CONSTRAINT_ERRORS,
                Signal.IB_RECEIVE_CONSTRAINT_ERRORS,
                Signal.IB_VL15_DROPPED,
                Signal.IB_SEND_WAIT,
                Signal.IB_CNP_SENT,
                Signal.IB_CNP_HANDLED,
                Signal.IB_OUT_OF_BUFFER,
                Signal.GPU_POWER_LIMIT,
                Signal.GPU_MIG,
                Signal.GPU_SLOWDOWN_LIMIT,
                Signal.GPU_SLOWDOWN_OFFSET,
                Signal.GPU_MEMORY_LIMIT,
            ),
            SLOW_S,
        ),
    }
)
"""How often a signal is looked at where that is not at each of the agent's looks: so far apart are readings that follow
each other."""


class ClockReason(IntFlag):
    """Why the clocks are not at their highest (`nvml.h`, nvmlClocksEventReason…)."""

    IDLE = 0x1
    APPLICATION_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL = 0x20
    HW_THERMAL = 0x40
    POWER_BRAKE = 0x80
    DISPLAY = 0x100
    BOARD_LIMIT = 0x200
    RELIABILITY = 0x400


class Status(StrEnum):
    OK = "ok"
    UNSUPPORTED = "unsupported"
    """This GPU or driver has no such value: never an alarm, not asked again."""
    NO_PERMISSION = "no_permission"
    LOST = "lost"
    """The subject itself is gone or wants a reset."""
    TIMEOUT = "timeout"
    STALE = "stale"
    """No fresh value this time."""


DEADLINE_MISSED = "DEADLINE_MISSED"
"""The cause that the agent gives when a source has not come back in time; every other is the source's own word."""


class Reading(NamedTuple):
    """A tuple, since a node makes some hundred of them a second."""

    at_s: float
    """When the value was taken; of an event, when it happened."""
    node: NodeId
    subject: str
    """What the signal is of: see `Signal`."""
    signal: Signal
    value: float | None
    """In the signal's unit; None unless the status is ok."""
    status: Status
    cause: str | None = None
    """Why there is no value, in the source's own word (e.g. GPU_IS_LOST): what rules match."""
    detail: str | None = None
    """What a person may want to read next to the value: the kernel's line, the links that are down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    uuid: GpuId
    index: int
    """Its place in NVML's list: good for showing, never for identity (C104)."""
    pci: str | None = None
    """Its PCI address as the kernel log writes it, "0000:5d:00": how a line there finds its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All that one source said at one look."""

    gpus: tuple[ListedGpu, ...] = ()
    """In NVML's order, with those that are listed but do not answer; of other sources empty."""
    readings: tuple[Reading, ...]
    error: str | None = None
    """Why the source as a whole has nothing to say."""


class Source(Protocol):
    """One kind of sensor. `read` may block, even for ever: it is called in a thread of its own, one call at a time."""

    def read(self) -> Round: ...
