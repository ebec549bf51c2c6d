"""A drill is judged like the fault it plays, and says that it is one."""

from __future__ import annotations

import pytest
from tests.health.series import GPU, NODE, PORT, SPEC, Played

from tidegate.health.drills import Drill, readings_of

SUBJECTS = {Drill.IB_FLAP: PORT, Drill.NVML_HANG: NODE}


@pytest.mark.parametrize(
    ("drill", "rule", "action", "when"),
    [
        (Drill.HOT_GPU, "temperature", "evict_gpu", "now"),
        (Drill.XID, "xid_off_the_bus", "evict_node", "now"),
        (Drill.IB_FLAP, "ib_flap_seen_fast", "evict_node", "next_checkpoint"),
        (Drill.NVML_HANG, "nvml_silent", "evict_node", "now"),
    ],
)
def test_what_follows_from_a_drill(drill: Drill, rule: str, action: str, when: str) -> None:
    played = Played().look(readings_of(drill, NODE, SUBJECTS.get(drill, GPU), 79.0, 1000.0), 1000.0)
    [verdict] = [verdict for verdict in played.verdicts if verdict.rule in played.evicting]
    assert (verdict.rule, verdict.action, verdict.when) == (rule, action, when)
    assert "a drill" in verdict.evidence
    assert SPEC.ib_ports == (PORT,)
