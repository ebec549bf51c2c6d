"""What people see of a real arbiter over a fleet in memory: claims, nodes, watch, report, status."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType
from story import NODES, WITH_PROVIDER, Story, ask, gpu

from tidegate.arbiter.messages import GangPhase, ProviderSeen
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.status import status_of
from tidegate.cli.status import status_view
from tidegate.cli.tables import claim_table, claims_to_show, node_rows, node_table, report_tables, virtual_table
from tidegate.cli.watch import show
from tidegate.errors import NoArbiterError
from tidegate.ids import ProviderName, Tier
from tidegate.spec.policy import PurseSpec
from tidegate.telemetry.fleet import virtual_nodes
from tidegate.telemetry.goodput import Owner
from tidegate.telemetry.report import account, percentages, save_interval


def provider(name: str, state: str, latency_s: float | None, spent_usd: float) -> ProviderSeen:
    return ProviderSeen(
        name=ProviderName(name),
        state=state,
        ongoing=1,
        slots=8,
        price_per_image_usd=0.01,
        latency_s=latency_s,
        spent_usd=spent_usd,
    )


@pytest.fixture
def story() -> Story:
    """A run with one GPU out, one that waits, and money spent."""
    story = Story(policy=WITH_PROVIDER.model_copy(update={"purse": PurseSpec(per_hour_usd=1.0)}))
    story.gateway_says = {
        "providers": (provider("out", "open", 0.5, 1.0), provider("far", "suspect", None, 0.0)),
        "spent_usd_total": 0.25,
        "local_images_per_s": 1.0,
        "local_busy_replicas": 2.0,
    }
    story.tick(10)
    claim = story.file(ask("first"))
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.tick(3)
    story.hot |= {gpu(NODES[0], 0), gpu(NODES[1], 0)}
    story.tick(3)
    story.file(ask("second"))
    story.tick(3)
    return story


def status(story: Story) -> dict[str, Any]:
    found = status_of(story.loop.book, story.loop.view(), story.policy, "because", story.clock.now_s())
    json.dumps(found)  # plain values only: scripts read it
    return found


def text(*parts: RenderableType, width: int = 300) -> str:
    out = StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return out.getvalue()


def row(said: str, *words: str) -> str:
    found = [line for line in said.splitlines() if all(word in line for word in words)]
    assert len(found) == 1, said
    return found[0]


def test_claims(story: Story) -> None:
    said = text(claim_table(status(story), ended=False))
    assert "5 of 3-6" in row(said, "first", "running")
    assert "$36.00 an hour" in row(said, "first", "running")
    waits = row(said, "second", "queued")
    assert "0 of 3-6" in waits
    assert "fit GPUs can be had now" in waits or "behind" in waits
    story.phases[next(iter(story.phases))] = GangPhase.FINISHED
    story.until(next(iter(story.phases)), ClaimState.DONE)
    assert [claim["claim"] for claim in claims_to_show(status(story), ended=False)] == ["second"]
    assert [claim["claim"] for claim in claims_to_show(status(story), ended=True)] == ["first", "second"]


def test_real_and_virtual_nodes(story: Story) -> None:
    story.loop.quarantine(NODES[2], Tier.NONE, "cable swap")
    story.tick()
    found = status(story)
    said = text(node_table(found), virtual_table(found))
    hot = row(said, gpu(NODES[0], 0)[:12], "temperature")
    for word in ("first", "61", "serve", "79 °C", "since", "ends: 70 °C or less for 600 s"):
        assert word in hot
    assert "held back by the fleet brake" in row(said, gpu(NODES[1], 0)[:12])
    assert row(said, gpu(NODES[1], 1)[:12]).split()[-1] == "gang", "nothing is against it"
    assert "whole node, operator: cable swap" in row(said, gpu(NODES[2], 0)[:12])
    assert row(said, "out", "open").split() == ["out", "open", "1", "of", "8", "0.0100", "0.50", "s", "$1.00"]
    assert row(said, "far", "suspect").split()[-2:] == ["?", "$0.00"]
    (first, *_), *_ = [node["gpus"] for node in node_rows(found)]
    assert (first["tenant"], first["tier"], first["against"][0]["rule"]) == ("first", "serve", "temperature")


def test_tenants_without_a_run() -> None:
    story = Story()
    story.tick(10)
    assert {gpu["tenant"] for node in node_rows(status(story)) for gpu in node["gpus"]} == {"serving"}
    story.fleet.pools.clear()
    story.tick()
    assert {gpu["tenant"] for node in node_rows(status(story)) for gpu in node["gpus"]} == {"-"}


def test_providers_over_several_gateways() -> None:
    def gateway(*seen: ProviderSeen) -> dict[str, Any]:
        keys = ("name", "state", "ongoing", "slots", "price_per_image_usd", "latency_s", "spent_usd", "why")
        return {"providers": [{key: getattr(one, key) for key in keys} for one in seen]}

    found = {
        "gateways": [
            gateway(provider("p", "open", 1.0, 0.5), provider("q", "closed", None, 0.0)),
            gateway(provider("p", "suspect", 3.0, 0.25)),
            gateway(provider("p", "open", None, 0.25)),
        ]
    }
    p, q = virtual_nodes(found)
    assert (p["slots"], p["ongoing"], p["latency_s"], p["spent_usd"], p["state"]) == (24, 3, 2.0, 1.0, "suspect")
    assert (q["state"], q["latency_s"]) == ("closed", None)


def test_status_shows_money_quarantines_and_the_brake(story: Story) -> None:
    said = text(status_view(status(story)))
    assert "spent on overflow: $0.25 of $1.00 this hour, $0.25 this day" in said
    assert "FLEET BRAKE on rule temperature" in said
    assert row(said, gpu(NODES[0], 0), "temperature")
    story.gateway_says["spent_usd_total"] = 1.5
    story.tick()
    assert "is spent, until" in text(status_view(status(story)))
    assert "claims on serving's GPUs wait" in text(status_view(status(story)))


def test_watch_draws_until_ctrl_c_and_goes_on_without_an_arbiter(story: Story) -> None:
    looks: list[str] = []

    def look() -> dict[str, Any]:
        looks.append("")
        if len(looks) == 2:
            raise NoArbiterError("it restarts")
        story.tick()
        return status(story)

    def pause() -> None:
        if len(looks) == 3:
            raise KeyboardInterrupt

    out = StringIO()
    show(look, Console(file=out, width=200, force_terminal=True), pause=pause, once=False)
    assert len(looks) == 3
    assert "it restarts; still asking" in out.getvalue()
    assert out.getvalue().count("GPUs") >= 3, "the last picture stays while the arbiter is away"


def test_watch_once_is_for_scripts(story: Story) -> None:
    out = StringIO()

    def never() -> None:
        raise AssertionError("it paused")

    show(lambda: status(story), Console(file=out, width=200), pause=never, once=True)
    assert "first" in out.getvalue()

    def nobody() -> dict[str, Any]:
        raise NoArbiterError("gone")

    with pytest.raises(NoArbiterError):
        show(nobody, Console(file=out), pause=never, once=True)


def test_shares_of_awkward_thirds_add_to_a_hundred() -> None:
    shares = percentages({Owner.PRODUCTIVE: 1.0, Owner.FREE: 1.0, Owner.SERVING: 1.0})
    assert sorted(shares.values()) == [33.3, 33.3, 33.4]
    assert percentages({Owner.FREE: 0.0}) == {Owner.FREE: 0.0}


def test_the_report_as_people_read_it() -> None:
    seconds = {Owner.PRODUCTIVE: 7200.0, Owner.UNKNOWN: 3600.0, Owner.FREE: 0.0}
    requests = {"sent": 12, "local": 3, "spilled": 9, "price_usd": 4.5}
    found = {"cluster": True, "since_s": 0.0, "until_s": 3600.0, **account(seconds, requests)}
    said = text(*report_tables({**found, "runs": {"digits": account({Owner.PRODUCTIVE: 3600.0}, {})}}))
    assert row(said, "productive").split() == ["productive", "2.000", "66.7"]
    assert row(said, "unknown").split() == ["unknown", "1.000", "33.3"]
    assert "free" not in said
    assert "12 sent, 3 local, 9 spilled, 0 refused, 0 failed" in said
    assert "spill cost $4.50; training won 2.000 GPU-hours; $ a GPU-hour won: 2.25" in said
    assert row(said, "digits").split() == ["digits", "1.000", "1.000", "$0.00", "0.00"]
    nothing = account({}, {"price_usd": 1.0})
    assert nothing["spill"]["usd_per_gpu_hour_won"] is None


def test_how_often_to_save_by_what_it_costs_and_how_often_things_go_wrong() -> None:
    """Ten saves a minute apart, each a stall of 0.3 s, and two faults: one every 270 s."""
    commits = [1000.0 + 60 * number for number in range(10)]
    every = save_interval([0.3] * 10, commits, 2)
    assert every == {"save_s": 0.3, "between_faults_s": 270.0, "now_s": 60.0, "best_s": pytest.approx(12.5, abs=0.1)}
    assert save_interval([0.3] * 10, commits, 0) is None
    assert save_interval([0.3], commits[:1], 2) is None
    found = {"cluster": False, "run": "r", "since_s": 0.0, "until_s": 1.0, **account({Owner.PRODUCTIVE: 1.0}, {})}
    said = text(*report_tables({**found, "save_interval": every}))
    assert "saves to disk every 60.0 s; 12.5 s would lose least (stall 300.0 ms, a fault every 270 s)" in said
