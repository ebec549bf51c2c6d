"""When a provider that failed may be asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.serve.cooldown import RETRY_AFTER_MAX_S, Cooldown, answered, failed

NOW = 1000.0


def test_the_first_failure_rests_it() -> None:
    """C157: enforced on each request, from the first failure on."""
    trouble = failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=None, reason="status 500")
    assert trouble.resting(NOW + 4.9)
    assert not trouble.resting(NOW + 5)
    assert trouble.slots(8) == 1


def test_its_own_retry_after_counts_more() -> None:
    assert failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=46.72, reason="").until_s == NOW + 46.72
    assert failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=0.5, reason="").until_s == NOW + 0.5
    assert failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=1e9, reason="").until_s == NOW + RETRY_AFTER_MAX_S


def test_a_success_ends_the_trouble() -> None:
    trouble = failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=None, reason="")
    assert answered(trouble, NOW + 6) == Cooldown()
    assert answered(trouble, NOW + 6).slots(8) == 8


def test_a_late_success_does_not_end_a_rest() -> None:
    """It was sent before the failure; the provider may still be overloaded."""
    trouble = failed(Cooldown(), NOW, cooldown_s=5, retry_after_s=None, reason="")
    assert answered(trouble, NOW + 1) == trouble


@given(st.lists(st.tuples(st.floats(0, 10), st.none() | st.floats(-10, 1000)), max_size=20))
def test_a_failure_never_shortens_a_rest(failures: list[tuple[float, float | None]]) -> None:
    trouble, now_s = Cooldown(), NOW
    for after_s, retry_after_s in failures:
        now_s += after_s
        later = failed(trouble, now_s, cooldown_s=5, retry_after_s=retry_after_s, reason="")
        assert later.until_s >= trouble.until_s
        assert later.failures == trouble.failures + 1
        trouble = later
