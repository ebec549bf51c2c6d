"""What the serving benchmarks make of their rounds' figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.contenders.knock import Knocked
from benchmarks.load.asks import Kind

from benchmarks import flip_latency, gateway


def knocked(p50_ms: float, rate: float) -> list[Knocked]:
    """Three rounds, the second on a machine that is twice as slow."""
    return [
        Knocked(p50_s=slow * p50_ms / 1e3, p99_s=slow * 3 * p50_ms / 1e3, requests_per_s=rate / slow)
        for slow in (1, 2, 1)
    ]


def found(**more: list[Knocked]) -> gateway.Found:
    return {
        "direct": knocked(0.2, 10_000),
        "ours": knocked(1.2, 900),
        "haproxy": knocked(1.0, 1000),
        "ingress": knocked(0.5, 3000),
        "plain": knocked(9.2, 100),
        "litellm_default": knocked(5.2, 50),
        "litellm_workers": knocked(6.2, 100),
        **more,
    }


def test_the_gateway_is_compared_by_what_it_adds_to_the_engine() -> None:
    metrics = gateway.metrics_of(found())
    ratios = {name: metric.ratio for name, metric in metrics.items()}
    assert ratios["over_haproxy"] == pytest.approx(1.0 / 0.8)
    assert ratios["under_plain"] == pytest.approx(9.0)
    assert ratios["rps_over_haproxy"] == pytest.approx(0.9)
    assert metrics["hop_s"].ours == pytest.approx(0.0005)


def test_each_figure_of_litellm_is_that_of_its_best_setting() -> None:
    metrics = gateway.metrics_of(found())
    assert metrics["under_litellm"].ratio == pytest.approx(5.0)  # one worker's latency
    assert metrics["rps_over_litellm"].ratio == pytest.approx(9.0)  # two workers' rate
    quicker = gateway.metrics_of(found(litellm_workers=knocked(2.2, 200)))
    assert quicker["under_litellm"].ratio == pytest.approx(2.0)
    assert not quicker["under_litellm"].holds
    assert not quicker["rps_over_litellm"].holds


def heard(sent_at_s: float, took_s: float, **more: Any) -> dict[str, Any]:
    row = {"number": 1, "kind": Kind.SOUND, "status": 200, "code": None, "problem": None}
    return {**row, "sent_at_s": sent_at_s, "took_s": took_s, **more}


def test_a_flips_requests_are_those_sent_between_the_claim_and_home() -> None:
    played = [flip_latency.Round(steady_at_s=0.0, claimed_at_s=100.0, home_at_s=200.0)]
    rows = [heard(at_s, 0.2 if at_s < 100 else 0.3) for at_s in range(200)] + [heard(200.0, 60.0)]
    metrics = flip_latency.metrics_of(played, rows)
    assert metrics["p99_over_steady"].ratio == pytest.approx(1.5)
    assert metrics["failed_requests"].holds


def test_a_long_tail_or_one_failure_in_a_flip_is_seen() -> None:
    played = [flip_latency.Round(steady_at_s=0.0, claimed_at_s=100.0, home_at_s=200.0)]
    tail = [heard(at_s, 0.2 if at_s < 195 else 2.0) for at_s in range(200)]
    assert not flip_latency.metrics_of(played, tail)["p99_over_steady"].holds
    failed = [heard(at_s, 0.2) for at_s in range(200)] + [heard(150.0, 0.1, status=502, code="backends_failed")]
    assert flip_latency.metrics_of(played, failed)["failed_requests"].ours == 1
