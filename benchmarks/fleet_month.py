"""A made-up month of a fleet: faults and noise as what a node's sensors say around them, second by second.

How often each kind of fault comes is Llama 3's count (arXiv 2407.21783, table 5: 54 days on 16,384 GPUs; slow machines:
MegaScale's 0.5 %). How a kind shows itself and how often which noise comes is our own judgement: nobody publishes that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tidegate.health.readings import COUNTERS, ClockReason, Reading, Signal, Status
from tidegate.ids import NodeId

S = Signal
NODE = NodeId("f1" * 28)
GPUS = tuple(f"GPU-{index}" for index in range(8))
PORTS = tuple(f"mlx5_{index}/1" for index in range(8))
GANG = {gpu: "run" for gpu in GPUS}
GPU_DAYS_OF_LLAMA_3 = 54 * 16_384
LEAD_S, AFTER_S = 150, 420
"""Seconds of an episode before and after its fault; each rule that acts at once or in minutes has its time."""

_SECOND: Mapping[Signal, float] = {
    S.GPU_ANSWERS: 1, S.GPU_TEMPERATURE: 63, S.GPU_MARGIN: 24, S.GPU_CLOCK_REASONS: 4, S.GPU_POWER: 640,
    S.GPU_SM_CLOCK: 1.75e9, S.GPU_RECOVERY_ACTION: 0,
}  # fmt: skip
_FIVE: Mapping[Signal, float] = {
    S.GPU_TENSOR_ACTIVE: 0.62, S.GPU_SM_ACTIVE: 0.9, S.GPU_UTILIZATION: 1, S.GPU_PROCESSES: 1, S.GPU_NVLINKS: 18,
    S.GPU_NVLINKS_DOWN: 0, S.GPU_NVLINK_REPLAYS: 2, S.GPU_NVLINK_CRC: 40, S.GPU_PCIE_REPLAYS: 150,
}  # fmt: skip
_SLOW: Mapping[Signal, float] = {
    S.GPU_ECC_UNCORRECTED: 0, S.GPU_ECC_CORRECTED: 9, S.GPU_ROW_PENDING: 0, S.GPU_ROW_FAILURE: 0,
    S.GPU_SRAM_THRESHOLD: 0, S.GPU_FABRIC_SUMMARY: 1, S.GPU_SLOWDOWN_OFFSET: -2,
}  # fmt: skip
_PORT: Mapping[Signal, float] = {
    S.IB_PORT_PRESENT: 1, S.IB_PORT_ETHERNET: 0, S.IB_PORT_STATE: 4, S.IB_SYMBOL_ERRORS: 5, S.IB_LINK_RECOVERIES: 1,
    S.IB_LINK_DOWNED: 3, S.IB_BUFFER_OVERRUNS: 15,
}  # fmt: skip
_NOISE: Mapping[Signal, float] = {
    S.GPU_TEMPERATURE: 1.5, S.GPU_MARGIN: 1.5, S.GPU_POWER: 25, S.GPU_SM_CLOCK: 2e7, S.GPU_TENSOR_ACTIVE: 0.04,
}  # fmt: skip
_LOST_SHARE = 0.01
"""So many single readings are missing at any time."""


@dataclass(slots=True)
class Machine:
    """One node's sensors. Episodes set what differs from a healthy busy node."""

    dice: random.Random
    levels: dict[tuple[Signal, str], float] = field(default_factory=dict)
    """What a signal of a subject is instead of its usual value."""
    gone: dict[str, str] = field(default_factory=dict)
    """GPUs that do not answer, and what they say."""
    events: list[tuple[Signal, str, float, str | None]] = field(default_factory=list)
    silent: bool = False
    """Nothing is read at all."""

    def odd(self) -> str:
        return GPUS[3]

    def rise(self, signal: Signal, subject: str, by: float) -> None:
        usual = {**_SECOND, **_FIVE, **_SLOW, **_PORT}.get(signal, 0.0)
        self.levels[signal, subject] = self.levels.get((signal, subject), usual) + by

    def xid(self, code: int, text: str | None = None) -> None:
        self.events.append((S.GPU_XID, self.odd(), float(code), text))

    def readings(self, second: int, at_s: float) -> Iterator[Reading]:
        told, self.events = self.events, []
        for signal, subject, value, text in told:
            yield _reading(at_s, subject, signal, value, text)
        if self.silent:
            return
        due = [_SECOND, *([_FIVE] if second % 5 == 0 else []), *([_SLOW] if second % 60 == 0 else [])]
        for gpu in GPUS:
            yield from self._gpu(gpu, at_s, due)
        for port in PORTS:
            for signal, value in _PORT.items():
                if signal is S.IB_PORT_STATE or second % 5 == 0:
                    yield _reading(at_s, port, signal, self.levels.get((signal, port), value))

    def _gpu(self, gpu: str, at_s: float, due: list[Mapping[Signal, float]]) -> Iterator[Reading]:
        said = self.gone.get(gpu)
        extra = {signal: value for (signal, of), value in self.levels.items() if of == gpu}
        for signals in due:
            for signal, usual in signals.items():
                if said is not None:
                    yield _missing(at_s, gpu, signal, said)
                elif self.dice.random() < _LOST_SHARE:
                    yield _missing(at_s, gpu, signal, "NO_DATA")
                else:
                    value = extra.get(signal, usual)
                    spread = _NOISE.get(signal, 0.0)
                    value += self.dice.uniform(-spread, spread) if spread and signal not in COUNTERS else 0.0
                    yield _reading(at_s, gpu, signal, value)


def _reading(at_s: float, subject: str, signal: Signal, value: float, text: str | None = None) -> Reading:
    return Reading(
        at_s=at_s, node=NODE, subject=subject, signal=signal, value=float(value), status=Status.OK, detail=text
    )


def _missing(at_s: float, subject: str, signal: Signal, cause: str) -> Reading:
    status = Status.STALE if cause == "NO_DATA" else Status.LOST
    return Reading(at_s=at_s, node=NODE, subject=subject, signal=signal, value=None, status=status, cause=cause)


Episode = Callable[[Machine, int], None]
"""Called each second, counted from the fault's first; before it, seconds are below zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    episode: Episode
    per_gpu_day: float = 0.0
    per_node_day: float = 0.0


def _at(second: int, what: Callable[[Machine], None]) -> Episode:
    def episode(machine: Machine, now: int) -> None:
        if now == second:
            what(machine)

    return episode


def _lost(machine: Machine, now: int) -> None:
    if now == 0:
        machine.xid(79, "GPU has fallen off the bus.")
    if now == 1:
        machine.gone[machine.odd()] = "GPU_IS_LOST"


def _lost_quietly(machine: Machine, now: int) -> None:
    if now == 0:
        machine.gone[machine.odd()] = "GPU_IS_LOST"


def _hung(machine: Machine, now: int) -> None:
    if now == 0:
        machine.xid(119, "Timeout after 6s of waiting for RPC response from GPU4 GSP!")
        machine.gone[machine.odd()] = "TIMEOUT"


def _double_bit(machine: Machine, now: int) -> None:
    if now == 0:
        machine.xid(48)
        machine.xid(63)
        machine.rise(S.GPU_ECC_UNCORRECTED, machine.odd(), 1)
        machine.levels[S.GPU_ROW_PENDING, machine.odd()] = 1


def _ecc_quietly(machine: Machine, now: int) -> None:
    if now == 0:
        machine.rise(S.GPU_ECC_UNCORRECTED, machine.odd(), 2)


def _contained(machine: Machine, now: int) -> None:
    if now in (0, 200):
        machine.xid(94)


def _port_down(machine: Machine, now: int) -> None:
    if now == 0:
        machine.levels[S.IB_PORT_STATE, PORTS[2]] = 1
        machine.rise(S.IB_LINK_DOWNED, PORTS[2], 1)


def _port_flaps(machine: Machine, now: int) -> None:
    if now >= 0 and now % 90 == 0:
        machine.levels[S.IB_PORT_STATE, PORTS[2]] = 1
        machine.rise(S.IB_LINK_DOWNED, PORTS[2], 1)
    if now >= 0 and now % 90 == 3:
        machine.levels[S.IB_PORT_STATE, PORTS[2]] = 4


def _port_errors(machine: Machine, now: int) -> None:
    if now >= 0 and now % 10 == 0:
        machine.rise(S.IB_SYMBOL_ERRORS, PORTS[2], 40)
        machine.rise(S.IB_LINK_RECOVERIES, PORTS[2], 2)


def _heats(machine: Machine, now: int) -> None:
    if now >= 0:
        machine.levels[S.GPU_TEMPERATURE, machine.odd()] = min(63 + now / 5, 90)
        machine.levels[S.GPU_MARGIN, machine.odd()] = max(24 - now / 5, -3)
        if now > 120:
            machine.levels[S.GPU_CLOCK_REASONS, machine.odd()] = float(ClockReason.HW_THERMAL)


def _slow(machine: Machine, now: int) -> None:
    if now == 0:
        machine.levels[S.GPU_SM_CLOCK, machine.odd()] = 1.1e9
        machine.levels[S.GPU_POWER, machine.odd()] = 300
        machine.levels[S.GPU_TENSOR_ACTIVE, machine.odd()] = 0.45


def _brake(machine: Machine, now: int) -> None:
    if now == 0:
        for gpu in GPUS:
            machine.levels[S.GPU_CLOCK_REASONS, gpu] = float(ClockReason.POWER_BRAKE | ClockReason.HW_SLOWDOWN)


def _nothing_to_see(machine: Machine, now: int) -> None: ...


def _of_llama_3(name: str, count: float, *episodes: Episode) -> list[Kind]:
    rate = count / GPU_DAYS_OF_LLAMA_3 / len(episodes)
    return [
        Kind(name=f"{name}: {episode.__name__.strip('_').replace('_', ' ')}", episode=episode, per_gpu_day=rate)
        for episode in episodes
    ]


FAULTS: tuple[Kind, ...] = (
    *_of_llama_3("faulty GPU", 148, _lost, _lost_quietly, _hung),
    *_of_llama_3("HBM3", 72, _double_bit, _ecc_quietly, _contained),
    *_of_llama_3("network cable", 35, _port_down, _port_flaps, _port_errors),
    Kind(name="GPU SRAM", episode=_at(0, lambda m: m.levels.__setitem__((S.GPU_SRAM_THRESHOLD, m.odd()), 1.0)),
         per_gpu_day=19 / GPU_DAYS_OF_LLAMA_3),
    *_of_llama_3("GPU system processor", 17, _hung),
    Kind(name="NIC", episode=_at(0, lambda m: m.events.append((S.NIC_UNHEALTHY, "pci:0000:18:00.0", 1.0, None))),
         per_gpu_day=7 / GPU_DAYS_OF_LLAMA_3),
    *_of_llama_3("thermal interface", 6, _heats),
    *_of_llama_3("power supply", 3, _brake),
    *_of_llama_3("silent data corruption", 6, _nothing_to_see),
    Kind(name="slow machine", episode=_slow, per_node_day=0.005 / 30),
)  # fmt: skip


# Noise: what no healthy node may be taken out for


def _blanks(machine: Machine, now: int) -> None:
    usual = machine.levels
    if now >= 0 and now % 30 == 0:
        usual[S.GPU_TEMPERATURE, machine.odd()] = machine.dice.choice([0.0, 255.0, 4_294_967_295.0])
        usual[S.GPU_TENSOR_ACTIVE, machine.odd()] = 140_737_488_355_328.0
    elif now >= 0:
        usual.pop((S.GPU_TEMPERATURE, machine.odd()), None)
        usual.pop((S.GPU_TENSOR_ACTIVE, machine.odd()), None)


def _driver_reloads(machine: Machine, now: int) -> None:
    machine.silent = 0 <= now < 40
    if now == 40:
        for signal in (S.GPU_NVLINK_CRC, S.GPU_NVLINK_REPLAYS, S.GPU_PCIE_REPLAYS, S.GPU_ECC_CORRECTED):
            for gpu in GPUS:
                machine.levels[signal, gpu] = 0


def _gap(machine: Machine, now: int) -> None:
    machine.silent = 0 <= now < 200


def _one_link_error(machine: Machine, now: int) -> None:
    if now == 0:
        machine.rise(S.GPU_NVLINK_CRC, machine.odd(), 1)
        machine.rise(S.GPU_NVLINK_REPLAYS, machine.odd(), 1)


def _program_crashes(machine: Machine, now: int) -> None:
    if now == 0:
        machine.xid(31, "MMU Fault")
        machine.xid(43)
        machine.xid(45)


def _warm(machine: Machine, now: int) -> None:
    for gpu in GPUS:
        machine.levels[S.GPU_TEMPERATURE, gpu] = 74.0 if now >= 0 else 63.0


def _thermal_blip(machine: Machine, now: int) -> None:
    machine.levels[S.GPU_CLOCK_REASONS, machine.odd()] = float(ClockReason.HW_THERMAL) if now == 0 else 4.0


def _uneven_data(machine: Machine, now: int) -> None:
    machine.levels[S.GPU_TENSOR_ACTIVE, machine.odd()] = 0.3 if now >= 0 and now // 20 % 2 == 0 else 0.62


def _zero_of_dcgm(machine: Machine, now: int) -> None:
    machine.levels[S.GPU_TENSOR_ACTIVE, machine.odd()] = 0.0 if now >= 0 else 0.62


def _timeout_once(machine: Machine, now: int) -> None:
    machine.gone = {machine.odd(): "TIMEOUT"} if now in (0, 1) else {}


def _retrain(machine: Machine, now: int) -> None:
    if now == 0:
        machine.rise(S.IB_LINK_DOWNED, PORTS[2], 1)
    machine.levels[S.IB_PORT_STATE, PORTS[2]] = 2 if 0 <= now < 4 else 4


def _saturates(machine: Machine, now: int) -> None:
    """Registers that have been full for months, as on a real H100 host: nothing happens."""
    full = {S.IB_SYMBOL_ERRORS: 65_535, S.IB_LINK_RECOVERIES: 255, S.IB_LINK_DOWNED: 255}
    for port in PORTS:
        machine.levels.update({(signal, port): float(ceiling) for signal, ceiling in full.items()})


def _cleared(machine: Machine, now: int) -> None:
    """Somebody clears them with `perfquery -R`."""
    for port in PORTS:
        for signal in (S.IB_SYMBOL_ERRORS, S.IB_LINK_RECOVERIES, S.IB_LINK_DOWNED):
            machine.levels[signal, port] = 200.0 if now < 0 else 0.0


def _margin_lies(machine: Machine, now: int) -> None:
    """H100s have been seen to say 0 and less while cool (gpud)."""
    machine.levels[S.GPU_TEMPERATURE, machine.odd()] = 41.0
    machine.levels[S.GPU_MARGIN, machine.odd()] = -3.0 if now >= 0 else 24.0


def _another_program_crashes(machine: Machine, now: int) -> None:
    """Xid 13 twice, of a program that is wrong and not of a chip: at two places (C146)."""
    if now in (0, 200):
        machine.xid(
            13, f"Graphics SM Warp Exception on (GPC {now // 100}, TPC {now // 200}, SM 1): Out Of Range Address"
        )


def _idle_rank(machine: Machine, now: int) -> None:
    """It waits for data: no work, and the clock and power of one that does none."""
    idle = now >= 0 and now // 15 % 4 == 0
    for signal, value in ((S.GPU_TENSOR_ACTIVE, 0.0), (S.GPU_SM_ACTIVE, 0.0), (S.GPU_POWER, 130.0)):
        if idle:
            machine.levels[signal, machine.odd()] = value
        else:
            machine.levels.pop((signal, machine.odd()), None)


NOISE: tuple[Kind, ...] = (
    Kind(name="quiet", episode=_nothing_to_see, per_node_day=1.0),
    Kind(name="blanks", episode=_blanks, per_node_day=0.05),
    Kind(name="driver reload", episode=_driver_reloads, per_node_day=0.02),
    Kind(name="gap", episode=_gap, per_node_day=0.05),
    Kind(name="one NVLink error", episode=_one_link_error, per_node_day=0.1),
    Kind(name="program crash", episode=_program_crashes, per_node_day=0.05),
    Kind(name="warm spell", episode=_warm, per_node_day=0.05),
    Kind(name="one thermal sample", episode=_thermal_blip, per_node_day=0.02),
    Kind(name="uneven data", episode=_uneven_data, per_node_day=0.1),
    Kind(name="DCGM says 0", episode=_zero_of_dcgm, per_node_day=0.01),
    Kind(name="two timeouts", episode=_timeout_once, per_node_day=0.02),
    Kind(name="one link retrain", episode=_retrain, per_node_day=0.02),
    Kind(name="full registers", episode=_saturates, per_node_day=0.1),
    Kind(name="registers cleared", episode=_cleared, per_node_day=0.01),
    Kind(name="margin of a cool GPU", episode=_margin_lies, per_node_day=0.01),
    Kind(name="program crash at two places", episode=_another_program_crashes, per_node_day=0.02),
    Kind(name="a rank that waits for data", episode=_idle_rank, per_node_day=0.1),
)
