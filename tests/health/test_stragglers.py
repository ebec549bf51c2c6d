"""One slow GPU among its peers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.health.stragglers import stragglers
from tidegate.ids import GpuId

C048_GFLOPS = (6698, 19148, 19239, 19256, 19191, 19096, 19273, 19187)


def of(*amounts: float) -> dict[GpuId, float]:
    return {GpuId(str(index)): float(amount) for index, amount in enumerate(amounts)}


def test_c048_a_third_of_the_peers_work_is_flagged_without_a_table() -> None:
    """C048: values as reported, on GPUs whose diagnostics passed."""
    [slow] = stragglers(of(*C048_GFLOPS))
    assert slow.gpu == "0"
    assert slow.work == 6698
    assert slow.ratio == pytest.approx(0.349, abs=0.001)
    assert stragglers(of(*C048_GFLOPS[1:])) == ()


def test_the_slowest_comes_first_and_the_limit_itself_is_not_below_it() -> None:
    found = stragglers(of(100, 100, 100, 100, 69, 20, 70))
    assert [slow.gpu for slow in found] == ["5", "4"]


@pytest.mark.parametrize("few", [(), (1.0,), (1.0, 100.0)])
def test_too_few_to_say_which_is_odd(few: tuple[float, ...]) -> None:
    assert stragglers(of(*few)) == ()


def test_all_idle_is_nobodys_fault() -> None:
    assert stragglers(of(0, 0, 0, 0, 5)) == ()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        stragglers(of(1, 2, 3), below_ratio=1.5)
    with pytest.raises(ValueError, match="it is for 1"):
        stragglers(of(1, -2, 3))


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=20), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter_and_never_half_or_more_are_flagged(amounts: list[float], unit: float) -> None:
    found = stragglers(of(*amounts))
    assert len(found) <= len(amounts) // 2
    median = sorted(amounts)[len(amounts) // 2]
    if median > 1e-3:
        assert all(slow.work < 0.7 * median + 1e-9 for slow in found)
        scaled = stragglers(of(*(amount * unit for amount in amounts)))
        clear = {slow.gpu for slow in found if abs(slow.ratio - 0.7) > 1e-6}
        assert clear <= {slow.gpu for slow in scaled}
