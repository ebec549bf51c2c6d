"""What replicas made in the last minute."""

from __future__ import annotations

import pytest

from tidegate.serve.demand import Demand


def test_the_last_minute_counts() -> None:
    demand = Demand(began_at_s=0.0)
    for second in range(600):
        demand.made(float(second), images=2, compute_s=0.5)
        demand.made(second + 0.5, images=1, compute_s=0.25)
    rate = demand.rate(600.0)
    assert rate.images_per_s == pytest.approx(3.0, rel=0.02)
    assert rate.busy_replicas == pytest.approx(0.75, rel=0.02)
    assert demand.rate(630.0).images_per_s == pytest.approx(1.5, rel=0.04)
    assert demand.rate(700.0).images_per_s == 0.0


def test_a_young_one_divides_by_its_age() -> None:
    demand = Demand(began_at_s=100.0)
    assert demand.rate(100.0).images_per_s == 0.0
    demand.made(104.0, images=10, compute_s=5.0)
    assert demand.rate(105.0).images_per_s == pytest.approx(2.0)
    assert demand.rate(100.5).images_per_s == 10.0, "never by less than a second"
