"""New weights reach one replica first, and the others only after it has made its pictures with them. Pure.

    canary -> out      the canary serves them: it found them whole and its pictures good
    canary -> back     it refused them, or `LOST_MAX` replicas were lost over them
    out    -> back     a person took them back

Whatever is not out, the replicas are told to serve what served before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.arbiter.messages import ReplicaReport, Stage, Weights

SILENT_AFTER_S = 30.0
"""A canary that has not reported for so long is lost. Replicas report each second, also while they load."""

LOST_MAX = 2
"""Canaries that may be lost before the weights are taken for the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One version's. It is not kept over a restart of the arbiter: then another trial begins."""

    version: int
    replica: str
    lost: tuple[str, ...] = ()


def next_weights(old: Weights | None, uri: str) -> Weights:
    """What is published after `old`: the last good ones are kept to come back to."""
    if old is None:
        return Weights(version=1, uri=uri, stage=Stage.CANARY)
    good = (old.version, old.uri) if old.stage is Stage.OUT else (old.before_version, old.before_uri)
    return Weights(version=old.version + 1, uri=uri, stage=Stage.CANARY, before_version=good[0], before_uri=good[1])


def before(weights: Weights) -> Weights:
    return Weights(version=weights.before_version, uri=weights.before_uri)


def tried(
    weights: Weights, trial: Trial | None, report: ReplicaReport, replicas: Mapping[str, ReplicaReport], now_s: float
) -> Trial:
    """Who tries weights that are a canary, now that `report` came in."""
    if trial is None or trial.version != weights.version:
        return Trial(version=weights.version, replica=report.replica)
    last = replicas.get(trial.replica)
    if last is not None and now_s - last.at_s <= SILENT_AFTER_S:
        return trial
    return Trial(version=weights.version, replica=report.replica, lost=(*trial.lost, trial.replica))


def settled(weights: Weights, trial: Trial, report: ReplicaReport) -> tuple[Stage, str] | None:
    """Where weights that are a canary go by a report, and why; None: nowhere yet."""
    if len(trial.lost) >= LOST_MAX:
        return Stage.BACK, f"replicas {', '.join(trial.lost)} were lost over them"
    if report.replica != trial.replica:
        return None
    if report.refused_version == weights.version:
        return Stage.BACK, f"replica {report.replica} refused them: {report.refused}"
    if report.serving_version == weights.version:
        return Stage.OUT, f"replica {report.replica} serves them and made its pictures"
    return None


def told(weights: Weights | None, trial: Trial | None, replica: str) -> Weights | None:
    """What a replica is to serve; None where nothing was ever published."""
    if weights is None or weights.stage is Stage.OUT:
        return weights
    if weights.stage is Stage.CANARY and trial is not None and trial.replica == replica:
        return weights
    return before(weights)
