"""What the arbiter answers a health agent: whose ranks compute on the node's GPUs."""

from __future__ import annotations

import pytest
from story import Story

from tidegate.arbiter.loop import GANG_SILENT_S
from tidegate.arbiter.messages import GangPhase, GangReport, GpuSeen, HealthReport
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
    story.clock.advance(GANG_SILENT_S + 1)
    assert claims(story) == {}
