"""How what was taken out comes back: its verdict has ended, and then a burn-in must pass. Pure.

Till then it is held under a verdict of its own, `burn_in`, which lies in the history like all others: it outlives the
agent, and a person may lift it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.health.history import BURN_IN, History, Key, Trace
from tidegate.ids import GpuId, NodeId

RETRY_S = 600.0
"""From a burn-in that failed to the next."""
ENDS = "a burn-in passes, or a person sets it healthy"


def held_for_burn_in(before: History, after: History, now_s: float, at_work: Collection[GpuId]) -> History:
    """`after`, in which whatever stood against a GPU or a node in `before` and has ended holds it for its burn-in.

    `at_work`: GPUs with a rank. Those were never taken out (a fleet brake held, or no checkpoint came), and the
    products would only slow their gang; a node with any of them likewise.
    """
    traces = dict(after.traces)
    still = {_whom(trace.standing) for trace in after.traces.values() if trace.standing and _evicts(trace)}
    for key, trace in before.traces.items():
        verdict, now = trace.standing, after.traces.get(key)
        if verdict is None or not _evicts(trace) or (now is not None and now.standing is not None):
            continue
        whom = _whom(verdict)
        if key.rule != BURN_IN and whom not in still and not (verdict.gpu in at_work if verdict.gpu else at_work):
            due = replace(verdict, at_s=now_s, rule=BURN_IN, when=When.NOW, ends=ENDS)
            due = replace(due, evidence=f"{verdict.rule} has ended, a burn-in is due; it was: {verdict.evidence}")
            held = Trace(rule=BURN_IN, subject=whom, node=verdict.node, last_at_s=now_s, standing=due)
            traces[held.key] = held
    return after if len(traces) == len(after.traces) else replace(after, traces=traces)


def inherited(
    before: History, gpus: Collection[GpuId], node: NodeId, now_s: float, *, booted: bool, examine: bool
) -> History:
    """What an agent takes over of its predecessor's history, on a Ray node that has another id now: what stands against
    these GPUs. A boot since then lifts what is latched, and where `examine` holds them for a burn-in."""
    mine = before.of(gpus, node)
    if not booted:
        return mine
    after = mine.after_reboot()
    return held_for_burn_in(mine, after, now_s, at_work=()) if examine else after


def awaiting(history: History) -> list[Verdict]:
    """Who waits for a burn-in, the longest first."""
    held = [trace.standing for key, trace in history.traces.items() if key.rule == BURN_IN and trace.standing]
    return sorted(held, key=lambda verdict: (verdict.at_s, _whom(verdict)))


def after_burn_in(history: History, verdict: Verdict, failed: str) -> History:
    """`failed`: what did not pass; empty if all did, and then it has come back."""
    key = Key(BURN_IN, _whom(verdict))
    trace = history.traces.get(key)
    if trace is None:  # a person was quicker
        return history
    others = {other: kept for other, kept in history.traces.items() if other != key}
    if not failed:
        return replace(history, traces=others)
    again = replace(verdict, evidence=f"its burn-in failed: {failed}")
    return replace(history, traces={**others, key: replace(trace, standing=again)})


def _evicts(trace: Trace) -> bool:
    return trace.standing is not None and trace.standing.action is not Action.WARN


def _whom(verdict: Verdict) -> str:
    return verdict.gpu or verdict.node
