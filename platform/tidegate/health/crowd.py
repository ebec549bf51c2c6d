"""The readings of one look that are compared with each other, by gang or by node. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidegate.health.evidence import Peers
from tidegate.health.peers import Among, peers_of
from tidegate.health.readings import Reading, Signal
from tidegate.health.rule import Rule
from tidegate.health.values import value_of
from tidegate.ids import ClaimId, GpuId


class Crowd:
    """Who is there is told one by one; then each may be compared with the others. Medians are worked out once."""

    def __init__(
        self,
        gangs: Mapping[GpuId, ClaimId],
        other: Callable[[Signal, str], float | None],
        whole: Mapping[tuple[ClaimId, Signal], Peers],
    ) -> None:
        """`other`: the newest fresh value of another signal of a subject; `whole`: what is known of whole gangs, with
        their GPUs that are not among these readings."""
        self._gangs, self._other, self._whole = gangs, other, whole
        self._readings: dict[Signal, list[Reading]] = {}
        self._peers: dict[tuple[str, str], Peers | None] = {}
        self._calm: dict[tuple[Signal, str], tuple[float, float]] = {}

    def add(self, reading: Reading) -> None:
        self._readings.setdefault(reading.signal, []).append(reading)

    def peers_of(self, rule: Rule, reading: Reading) -> Peers | None:
        """Of all that are at work in the reading's gang or node; None when they are too few, or it is in none."""
        group = self._group(rule, reading)
        if group is None:
            return None
        if rule.gang and (whole := self._whole.get((ClaimId(group), rule.signal))) is not None:
            return whole
        key = (rule.name, group)
        if key not in self._peers:
            members: dict[str, list[float]] = {}
            for other in self._readings.get(rule.signal, ()):
                value, its = value_of(other), self._group(rule, other)
                if value is not None and its is not None and self._is_at_work(rule, other.subject):
                    members.setdefault(its, []).append(value)
            for its, values in members.items():
                self._peers[rule.name, its] = peers_of(values)
            self._peers.setdefault(key, None)
        return self._peers[key]

    def is_calm(self, reading: Reading, rules: Sequence[Rule]) -> bool:
        """Whether the value is near enough to its peers' for all of these rules."""
        group = self._group(rules[0], reading)
        value = value_of(reading)
        if value is None or group is None:
            return False
        calm = self._calm.get((reading.signal, group))
        if calm is None:
            low, high = float("-inf"), float("inf")
            for rule in rules:
                peers = self.peers_of(rule, reading)
                if isinstance(rule.bad, Among) and peers is not None:
                    edge = rule.bad.limit * peers.median
                    low, high = (max(low, edge), high) if rule.bad.limit < 1 else (low, min(high, edge))
            calm = self._calm[reading.signal, group] = (low, high)
        return calm[0] <= value <= calm[1]

    def _group(self, rule: Rule, reading: Reading) -> str | None:
        return self._gangs.get(GpuId(reading.subject)) if rule.gang else reading.node

    def _is_at_work(self, rule: Rule, subject: str) -> bool:
        for guard in rule.while_:
            value = self._other(guard.signal, subject)
            if value is None or not guard.at_least <= value <= guard.at_most:
                return False
        return True
