"""Readings for any rule of the table: a step that is just bad for it, or just good, with all that it needs beside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tidegate.arbiter.messages import Verdict
from tidegate.health.conditions import Above, Against, Below, Bits, OneOf, Replays, Rises, Says, Xid
from tidegate.health.history import History
from tidegate.health.judge import Finding, judge
from tidegate.health.peers import Among
from tidegate.health.readings import CEILINGS, Reading, Signal, Status
from tidegate.health.rule import Rule
from tidegate.health.rules import gap_s, rules_of
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec

NODE = NodeId("a1" * 28)
GPU, PORT, CARD = "GPU-0", "mlx5_0/1", "pci:0000:18:00.0"
GANG = {f"GPU-{index}": "run" for index in range(8)}
SPEC = HealthSpec(gpus_per_node=8, ib_port_gbits=400, ib_ports=(PORT,))
RULES = {rule.name: rule for rule in rules_of(SPEC)}
XID_TEXTS = {
    "xid_nvlink5_fatal": "NETIR_LINK_EVT Fatal XC0 i0 Link 08",
    "xid_nvlink5_nonfatal": "RLW_CTRL Nonfatal XC0 i0 Link 00",
    "xid_recovery_now": "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)",
    "xid_recovery_drain": "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
}


def reading(at_s: float, signal: Signal, value: float | None, subject: str | None = None, **more: object) -> Reading:
    whose = subject or subject_of(signal)
    status = Status.OK if value is not None else Status.STALE
    return Reading(at_s=at_s, node=NODE, subject=whose, signal=signal, value=value, **{"status": status, **more})  # type: ignore[arg-type]


def subject_of(signal: Signal) -> str:
    if signal.of_gpu:
        return GPU
    if signal.startswith("nic_"):
        return CARD
    return PORT if signal.startswith("ib_") and signal is not Signal.IB_ANSWERS else NODE


def every_s(rule: Rule) -> float:
    """The longest time between two looks at this signal that are still in a row, at most a minute."""
    if gap_s(SPEC, rule.signal) > 60:
        return 60.0
    return 10.0 if isinstance(rule.bad, Rises) else 1.0


class Steps:
    """Readings of one rule, one step each call; counters remember where they are."""

    def __init__(self, rule: Rule, every_s: float | None = None) -> None:
        self.rule = rule
        self.every_s = every_s if every_s is not None else globals()["every_s"](rule)
        self.released = False
        """Good is then good enough to lift a verdict, not only not bad."""
        self.total = 0.0
        self._rose_at_s: float | None = None
        self._witness = Steps(RULES[min(rule.witness)], self.every_s) if rule.witness else None

    def step(self, at_s: float, bad: bool, *, guarded: bool = True) -> list[Reading]:
        """`guarded`: what the rule's guards ask for is read too."""
        if not guarded:
            return self._own(at_s, bad)
        rule = self.rule
        beside = [reading(at_s, guard.signal, self._inside(guard.at_least, guard.at_most)) for guard in rule.while_]
        if isinstance(rule.bad, Among):
            for other in list(GANG)[1:]:
                beside += [
                    reading(at_s, guard.signal, self._inside(guard.at_least, guard.at_most), other)
                    for guard in rule.while_
                ]
        if rule.signal is Signal.GPU_NVLINKS_DOWN:
            beside += [reading(at_s, Signal.GPU_NVLINKS, 18.0, "GPU-1"), reading(at_s, rule.signal, 0.0, "GPU-1")]
        if self._witness is not None:
            beside += self._witness.step(at_s, bad)
        return [*beside, *self._own(at_s, bad)]

    @staticmethod
    def _inside(at_least: float, at_most: float) -> float:
        return at_least if at_least > -math.inf else at_most

    def _own(self, at_s: float, bad: bool) -> list[Reading]:
        rule, signal, condition = self.rule, self.rule.signal, self.rule.bad
        match condition:
            case Above():
                nudge = 1.0 if condition.limit >= 1 or condition.limit == 0 else condition.limit / 100
                fine = condition.calm[1] if self.released else condition.limit
                return [reading(at_s, signal, condition.limit + nudge if bad else fine)]
            case Below():
                fine = condition.calm[0] if self.released else condition.limit
                return [reading(at_s, signal, condition.limit - 1 if bad else fine)]
            case Against():
                mark = condition.otherwise if condition.otherwise is not None else 4.0
                worse = {"<": mark - 1, "<=": mark, ">=": mark}[condition.worse]
                fine = {"<": mark, "<=": mark + 1, ">=": mark - 1}[condition.worse]
                return [reading(at_s, condition.other, mark), reading(at_s, signal, worse if bad else fine)]
            case OneOf():
                if bad:
                    return [reading(at_s, signal, min(condition.bad))]
                return [reading(at_s, signal, min(condition.good))] if condition.good else []
            case Bits():
                return [reading(at_s, signal, float(condition.mask if bad else 0x4 & ~condition.mask))]
            case Says():
                if not bad:
                    return [reading(at_s, signal, 1.0)]
                cause = min(condition.causes, default=None)
                status = min(condition.statuses, default=Status.TIMEOUT)
                return [reading(at_s, signal, None, status=status, cause=cause)]
            case Rises():
                limit = condition.limit
                links = []
                if isinstance(condition, Replays):
                    limit *= 31
                    links = [
                        reading(at_s, Signal.GPU_PCIE_GENERATION_MAX, 5.0),
                        reading(at_s, Signal.GPU_PCIE_WIDTH_MAX, 16.0),
                    ]
                ceiling = CEILINGS.get(signal, 1e15)
                every_s = max(condition.within_s, rule.apart_s)
                if bad and (self._rose_at_s is None or at_s - self._rose_at_s >= every_s):
                    # The first reading is where counting starts.
                    self.total += 0 if self._rose_at_s is None else limit + 1
                    self._rose_at_s = at_s if self._rose_at_s is not None else -math.inf
                elif self.total >= ceiling:
                    self.total = 0.0  # somebody cleared it
                return [*links, reading(at_s, signal, min(self.total, ceiling))]
            case Among():
                middle = self.middle
                far = condition.limit * middle * (0.99 if condition.limit < 1 else 1.01)
                if signal is Signal.GPU_NVLINKS:
                    far = 17.0
                peers = [reading(at_s, signal, middle, other) for other in list(GANG)[1:]]
                return [*peers, reading(at_s, signal, far if bad else middle)]
            case Xid():
                if not bad and condition.lifted_by:
                    return [reading(at_s, signal, float(min(condition.lifted_by)))]
                if not bad:
                    return [reading(at_s, Signal.GPU_ANSWERS, 1.0)]
                code = min(condition.codes, default=999)
                return [reading(at_s, signal, float(code), detail=XID_TEXTS.get(rule.name))]

    @property
    def middle(self) -> float:
        """What its peers read."""
        assert isinstance(self.rule.bad, Among)
        if self.rule.signal is Signal.GPU_NVLINKS:
            return 18.0
        return 2 * max(self.rule.bad.least_median, 0.1 if self.rule.signal.endswith("ratio") else 1.0)

    def needed(self) -> int:
        """The fewest bad steps in a row that make a verdict; a counter's first is its baseline."""
        apart = max(1, math.ceil(max(self.rule.apart_s, 0) / self.every_s))
        steps = max((self.rule.samples - 1) * apart + 1, math.ceil(self.rule.for_s / self.every_s) + 1)
        steps += 1 if isinstance(self.rule.bad, Rises) else 0
        return max(steps, self._witness.needed() + 1) if self._witness is not None else steps


class Played:
    """The judge after a series of looks."""

    def __init__(self, spec: HealthSpec = SPEC, *, restart_each_time: bool = False) -> None:
        self.spec, self.history = spec, History()
        self.verdicts: tuple[Verdict, ...] = ()
        self.findings: list[Finding] = []
        self._restart_each_time = restart_each_time

    def look(self, readings: Iterable[Reading], now_s: float | None = None) -> Played:
        seen = list(readings)
        at_s = now_s if now_s is not None else max((reading.at_s for reading in seen), default=0.0)
        judgement = judge(seen, self.history, self.spec, at_s, GANG)
        self.history, self.verdicts = judgement.history, judgement.verdicts
        self.findings += judgement.findings
        if self._restart_each_time:
            self.history = History.from_json(self.history.to_json())
        return self

    def steps(self, steps: Steps, bad: Iterable[bool], start_s: float = 1000.0) -> Played:
        for number, is_bad in enumerate(bad):
            self.look(steps.step(start_s + number * steps.every_s, is_bad), start_s + number * steps.every_s)
        return self

    @property
    def rules(self) -> list[str]:
        return [verdict.rule for verdict in self.verdicts]

    @property
    def evicting(self) -> list[str]:
        return [verdict.rule for verdict in self.verdicts if verdict.action != "warn"]


def ok(signals: Iterable[tuple[Signal, float]], at_s: float) -> Iterator[Reading]:
    for signal, value in signals:
        yield reading(at_s, signal, value)
