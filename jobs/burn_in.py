"""Examine nodes before they train, or before they come back.

    ray job submit -- python jobs/burn_in.py                              # all nodes that stand idle
    ray job submit -- python jobs/burn_in.py --nodes node-c --return      # and what follows from it

Looks at what is there, multiplies on all GPUs at once, copies, sums in each node and over pairs of nodes; whoever fails
in a pair is tried once more with a node that passed. Each node gets a signed-off record under
<arbiter.state_dir>/burn-in, and a line in `tidegate why NODE`. With --return a node that passes is pardoned, and one
that fails is quarantined. See docs/health.md.
"""

import argparse
import asyncio
import getpass
import os
import sys
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.arbiter.client import ArbiterClient
from tidegate.arbiter.messages import Check, JournalEntry
from tidegate.errors import TidegateError
from tidegate.health.burn_in import CPU, Burned, burn_node, group_checks, judged, pair_part, write_record
from tidegate.health.marks import (
    Measure,
    Measured,
    Pair,
    against_marks,
    first_pairs,
    marks_of,
    second_pairs,
    suspects_of,
)
from tidegate.ids import NodeId, Tier
from tidegate.ports import free_port
from tidegate.telemetry.goodput import Owner

IDLE = {Owner.FREE, Owner.QUARANTINED, Owner.SERVING_IDLE}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", nargs="*", default=[], help="names or ids (default: all that stand idle)")
parser.add_argument(
    "--return", dest="act", action="store_true", help="pardon nodes that pass, quarantine those that fail"
)
parser.add_argument("--deep", action="store_true", help="also `dcgmi diag -r 2`, where it is installed")
parser.add_argument("--deadline-s", type=float, default=120.0, help="of each part (default: %(default)s)")
parser.add_argument("--signed-by", default="", help="stands in the record (default: the Ray job or the user)")
arguments = parser.parse_args()

# --- who is examined --------------------------------------------------------------------------------------------

ray.init(address="auto", namespace="tidegate", log_to_driver=False)
arbiter = ArbiterClient(timeout_s=30.0)
try:
    policy, status = asyncio.run(arbiter.policy()), asyncio.run(arbiter.status())
except TidegateError as error:
    sys.exit(f"error: {error}")
wanted = [
    node
    for node in status["nodes"]
    if not arguments.nodes or any(name in (node["name"], node["node"]) for name in arguments.nodes)
]
busy = [node["name"] for node in wanted if any(gpu["owner"] not in IDLE for gpu in node["gpus"])]
if arguments.nodes and (busy or len(wanted) != len(arguments.nodes)):
    known = ", ".join(node["name"] for node in status["nodes"])
    sys.exit(f"error: {', '.join(busy) + ' is at work' if busy else f'no such node; there are {known}'}")
nodes = {NodeId(node["node"]): node for node in wanted if node["name"] not in busy}
if not nodes:
    sys.exit("error: no node stands idle\nhint: name one that a quarantine keeps from work")

# --- each node by itself ----------------------------------------------------------------------------------------


def on(node: NodeId, work: object, *told: object, **named: object) -> ray.ObjectRef:
    """Run it on that node, beside whatever else Ray counts there."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(work).options(num_cpus=0, scheduling_strategy=there, max_retries=0).remote(*told, **named)


began_s = time.time()
asked = {
    node: on(
        node, burn_node, policy.health, node, len(seen["gpus"]), deadline_s=arguments.deadline_s, deep=arguments.deep
    )
    for node, seen in nodes.items()
}
burned: dict[NodeId, Burned] = {node: ray.get(answer) for node, answer in asked.items()}
checks = judged(list(burned.values()))

# --- pairs ------------------------------------------------------------------------------------------------------


def sum_of_pairs(pairs: list[Pair]) -> dict[Pair, float | None]:
    """GB/s of each pair, one pair after the other; None where it did not come to a right end."""
    found: dict[Pair, float | None] = {}
    for one, other in pairs:
        counts = [1 if burned[node].model == CPU else len(burned[node].gpus) for node in (one, other)]
        at = (nodes[one]["address"], ray.get(on(one, free_port)))
        answers = [
            on(
                node,
                pair_part,
                burned[node].gpus[:count],
                burned[node].model != CPU,
                first,
                sum(counts),
                at,
                marks_of(burned[one].model),
                arguments.deadline_s,
            )
            for node, count, first in ((one, counts[0], 0), (other, counts[1], counts[0]))
        ]
        told = [answer for answers_of_node in ray.get(answers) for answer in answers_of_node]
        right = all(check.passed for check in group_checks("pair", "", told))
        found[one, other] = min(answer["busbw_gbytes_per_s"] for answer in told) if right else None
    return found


def passing(speeds: dict[Pair, float | None], beside: list[float]) -> dict[Pair, bool]:
    """Against the floor, and the median of all pairs."""
    known = {pair: speed for pair, speed in speeds.items() if speed is not None}
    marks = marks_of(burned[next(iter(speeds))[0]].model) if speeds else marks_of("")
    rows = [
        Measured(measure=Measure.PAIR, subject=f"{number}", value=speed) for number, speed in enumerate(known.values())
    ]
    rows += [Measured(measure=Measure.PAIR, subject="before", value=speed) for speed in beside]
    judgement = {check.subject: check.passed for check in against_marks(rows, marks)}
    good = {pair: judgement[f"{number}"] for number, pair in enumerate(known)}
    return {pair: good.get(pair, False) for pair in speeds}


fit = [node for node in nodes if all(check.passed for check in checks[node])]
first = sum_of_pairs(first_pairs(fit))
results = passing(first, [])
suspects = suspects_of(results)
second = sum_of_pairs(second_pairs(suspects, [node for node in fit if node not in suspects]))
results |= passing(second, [speed for speed in first.values() if speed is not None])
for node in fit if len(fit) > 1 else []:
    tried = {pair: speed for pair, speed in (first | second).items() if node in pair}
    said = "; ".join(
        f"with {nodes[pair[0] if pair[1] == node else pair[1]]['name']}: "
        + (f"{speed:.3g} GB/s" if speed is not None else "no right sum")
        for pair, speed in tried.items()
    )
    passed = any(results[pair] for pair in tried)
    checks[node].append(Check(name=Measure.PAIR, subject=nodes[node]["name"], passed=passed, text=said))

# --- records, and what follows ----------------------------------------------------------------------------------

signed_by = arguments.signed_by or os.environ.get("RAY_JOB_SUBMISSION_ID", "") or getpass.getuser()
folder = policy.arbiter.state_path / "burn-in"
worst = 0
for node, seen in nodes.items():
    failed = [check for check in checks[node] if not check.passed]
    path = write_record(folder, seen["name"], burned[node], checks[node], signed_by=signed_by, at_s=time.time())
    said = "; ".join(f"{check.name} of {check.subject}: {check.text}" for check in failed)
    reason = (
        f"burn-in {'failed: ' + said if failed else f'passed, {len(checks[node])} checks'}; signed off by {signed_by}"
    )
    subjects = (node, *burned[node].gpus)
    entry = JournalEntry(at_s=time.time(), kind="burn_in", subjects=subjects, reason=reason, data={"record": str(path)})
    asyncio.run(arbiter.note(entry))
    if arguments.act and failed:
        asyncio.run(arbiter.quarantine(node, Tier.NONE, reason))
    elif arguments.act:
        asyncio.run(arbiter.pardon(node, reason))
    print(f"{seen['name']}: {reason}\n  {path}", flush=True)
    worst = max(worst, int(bool(failed)))
print(f"{len(nodes)} nodes in {time.time() - began_s:.0f} s", flush=True)
sys.exit(worst)
