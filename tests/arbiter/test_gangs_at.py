"""What the arbiter answers a health agent: whose ranks compute on the node's GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from story import Story, ask

from tidegate.arbiter.loop import FORGET_S
from tidegate.arbiter.messages import GangPhase, GangReport, GpuSeen, HealthReport, ReplicaReport
from tidegate.arbiter.seats import SILENT_S
from tidegate.ids import ClaimId, Generation, GpuId, NodeId


@pytest.fixture
def story() -> Story:
    return Story()


NODE = HealthReport(
    node=NodeId("n"), at_s=0.0, gpus=tuple(GpuSeen(uuid=GpuId(f"GPU-{index}"), index=index) for index in range(3))
)


def claims(story: Story) -> dict[str, str]:
    return {gpu: seat.claim for gpu, seat in story.loop.seats_at(NODE).items()}


def gang(story: Story, claim: str, *gpus: str, phase: GangPhase = GangPhase.RUNNING) -> None:
    story.loop.report_gang(
        GangReport(
            claim=ClaimId(claim),
            at_s=story.clock.now_s(),
            phase=phase,
            gang_generation=Generation(1),
            step=5,
            world_size=len(gpus),
            gpus=tuple(map(GpuId, gpus)),
        )
    )


def test_gpus_of_a_gang_that_runs_are_named_with_it(story: Story) -> None:
    gang(story, "a", "GPU-0", "GPU-1", "GPU-9")
    assert claims(story) == {"GPU-0": "a", "GPU-1": "a"}
    gang(story, "a", "GPU-1")
    gang(story, "b", "GPU-0")
    assert claims(story) == {"GPU-0": "b", "GPU-1": "a"}


def test_not_while_it_restarts_nor_after_it_fell_silent(story: Story) -> None:
    gang(story, "a", "GPU-0", phase=GangPhase.RESTARTING)
    assert claims(story) == {}
    gang(story, "a", "GPU-0")
    story.clock.advance(SILENT_S + 1)
    assert claims(story) == {}


def test_what_is_gone_for_long_is_forgotten(story: Story) -> None:
    """Nodes and replicas never come back under the same name, and an arbiter lives for months."""
    gang(story, "over", "GPU-0")
    story.loop.report_health(replace(NODE, node=NodeId("gone")))
    story.loop.report_replica("images", ReplicaReport(replica="r", at_s=story.clock.now_s(), serving_version=0))
    _pass(story, FORGET_S - 1)
    assert "over" in story.loop.gangs
    assert set(story.loop.replicas) == {"r"}
    assert "gone" in story.loop.health
    _pass(story, 2)
    assert story.loop.gangs == {}
    assert story.loop.replicas == {}
    assert story.loop.health == story.loop.heard_s == {}


def _pass(story: Story, seconds: float) -> None:
    """In steps that leave the arbiter sure that it was awake."""
    while seconds > 0:
        story.clock.advance(min(2.0, seconds))
        story.loop.tick()
        seconds -= 2.0


def test_an_open_claims_gang_is_not_forgotten_however_silent(story: Story) -> None:
    claim = story.file(ask())
    story.train(claim)
    story.phases.clear()
    story.clock.advance(FORGET_S + 1)
    story.tick()
    assert claim in story.loop.gangs
