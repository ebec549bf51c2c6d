"""What the health rules find, and what they get wrong, in a made-up month of 512 nodes of 8 GPUs (`fleet_month.py`).

Each fault is played with the seconds around it through the judge: 150 before, 420 after, with readings that are missing
and the agent started anew in the middle. Found = a verdict that takes the right GPU or its node out within 420 s, so
those of the next checkpoint count when they are given, not when they are carried out. Noise is played as often as the
options say and weighed with how often it comes; the quiet time between is played only as one of its kinds.

The faults show themselves as we believe they do, so recall says whether rules and signals fit together, not what a real
fleet would give. Silent data corruption shows nothing and is counted as missed. Takes about four minutes on
one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contract import figure, publish
from benchmarks.fleet_month import AFTER_S, FAULTS, GANG, LEAD_S, NOISE, Kind, Machine

from tidegate.arbiter.messages import Action
from tidegate.health.history import History
from tidegate.health.judge import judge
from tidegate.spec.policy import HealthSpec

NODES, DAYS = 512, 30
NODE_DAYS = NODES * DAYS


@dataclass(frozen=True, slots=True)
class Played:
    kind: Kind
    rules: tuple[str, ...]
    """That took something out, the first first."""
    after_s: float | None
    """From the fault to the first."""


def play(kind: Kind, seed: int) -> Played:
    """One episode; anything that is taken out before the fault counts as found at no time, and its rule is named."""
    dice, spec = random.Random(seed), HealthSpec(gpus_per_node=8, ib_port_gbits=400)
    machine, history = Machine(dice), History()
    start_s = 1_000_000.0 + dice.randrange(60)
    restart = dice.randrange(-LEAD_S, AFTER_S)
    rules: list[str] = []
    after_s: float | None = None
    for second in range(-LEAD_S, AFTER_S):
        kind.episode(machine, second)
        at_s = start_s + second
        judgement = judge(machine.readings(second + LEAD_S, at_s), history, spec, at_s, GANG)
        history = judgement.history
        if second == restart:
            history = History.from_json(history.to_json())
        out = [v for v in judgement.verdicts if v.action is not Action.WARN and v.rule not in rules]
        right = any(v.action is Action.EVICT_NODE or v.gpu == machine.odd() for v in out)
        if right and not rules and second >= 0:
            after_s = float(second)
        rules += dict.fromkeys(v.rule for v in out)
    return Played(kind, tuple(rules), after_s)


def month(seed: int) -> list[Played]:
    """The month's faults: as many of each kind as a draw at its rate gives, and one at least."""
    dice, out = random.Random(seed), []
    for kind in FAULTS:
        expected = kind.per_gpu_day * NODE_DAYS * 8 + kind.per_node_day * NODE_DAYS
        out += [play(kind, dice.randrange(2**32)) for _ in range(max(1, _drawn(expected, dice)))]
    return out


def false_rate(episodes: int, seed: int) -> tuple[float, Counter[str]]:
    """False evictions per 1,000 node-days, and how many per rule."""
    dice, total = random.Random(seed), 0.0
    rules: Counter[str] = Counter()
    for kind in NOISE:
        evicting = [played for _ in range(episodes) if (played := play(kind, dice.randrange(2**32))).rules]
        total += kind.per_node_day * len(evicting) / episodes * 1_000
        rules.update(f"{played.rules[0]} ({kind.name})" for played in evicting)
    return total, rules


def _drawn(expected: float, dice: random.Random) -> int:
    """Poisson, by the times between (`random` has none, and numbers are small)."""
    count, passed = 0, dice.expovariate(1.0)
    while passed < expected:
        count, passed = count + 1, passed + dice.expovariate(1.0)
    return count


def _by_kind(played: Sequence[Played]) -> str:
    found, of = Counter(p.kind.name for p in played if p.after_s is not None), Counter(p.kind.name for p in played)
    return ", ".join(f"{name} {found[name]}/{count}" for name, count in of.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="months, each with another seed (default 5)")
    parser.add_argument("--episodes", type=int, default=3, help="of each kind of noise in a round (default 3)")
    arguments = parser.parse_args()
    recalls, delays, rates, firsts = [], [], [], Counter[str]()
    wrong: Counter[str] = Counter()
    by_kind: list[Played] = []
    for round_ in range(arguments.rounds):
        faults = month(seed=100 + round_)
        by_kind += faults
        found = [played for played in faults if played.after_s is not None]
        recalls.append(len(found) / len(faults))
        delays.append(statistics.median(played.after_s or 0.0 for played in found))
        firsts.update(played.rules[0] for played in found)
        rate, rules = false_rate(arguments.episodes, seed=200 + round_)
        rates.append(rate)
        wrong += rules
        print(f"round {round_ + 1}: {len(found)} of {len(faults)} faults", file=sys.stderr)
    found_first = ", ".join(f"{rule} {count}" for rule, count in firsts.most_common())
    publish(
        "replay",
        {
            "recall": figure(recalls, goal=">= 0.95", note=_by_kind(by_kind)),
            "fault_to_verdict_s": figure(delays, goal="<= 5", note=f"which rule was first: {found_first}"),
            "false_evictions_per_1000_node_days": figure(
                rates,
                goal="<= 0.5",
                note=", ".join(f"{rule} {count}" for rule, count in wrong.items())
                or f"none, of {arguments.rounds * arguments.episodes} episodes of each of {len(NOISE)} kinds of noise",
            ),
        },
        rounds=arguments.rounds,
        packages=("pydantic",),
    )


if __name__ == "__main__":
    main()
