"""Every rule of the table, by the same stories: just under, just over, flapping, gap, reset, saturation, restart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.health.series import GPU, PORT, RULES, SPEC, Played, Steps, reading

from tidegate.arbiter.messages import Action
from tidegate.health.conditions import Rises
from tidegate.health.peers import Among
from tidegate.health.readings import CEILINGS, COUNTERS, EVENTS, Reading, Signal, Status
from tidegate.health.rule import EDGE
from tidegate.health.rules import gap_s
from tidegate.health.values import SENTINELS

EACH = pytest.mark.parametrize("name", list(RULES))
LEVELS = [name for name, rule in RULES.items() if rule.apart_s != EDGE]
PEERS = [name for name, rule in RULES.items() if isinstance(rule.bad, Among)]
COUNTED = [name for name, rule in RULES.items() if isinstance(rule.bad, Rises)]


def steps_of(name: str) -> Steps:
    return Steps(RULES[name])


@EACH
def test_just_under_is_never_held_against_it(name: str) -> None:
    steps = steps_of(name)
    assert name not in Played().steps(steps, [False] * (steps.needed() + 5)).rules


@pytest.mark.parametrize("name", LEVELS)
def test_just_over_is_found_at_the_last_step_that_it_takes_and_not_before(name: str) -> None:
    steps = steps_of(name)
    needed = steps.needed()
    early = Played().steps(steps, [True] * (needed - 1)) if needed > 1 else Played()
    if not RULES[name].witness:
        assert name not in early.rules
    played = Played().steps(steps_of(name), [True] * needed)
    [verdict] = [verdict for verdict in played.verdicts if verdict.rule == name]
    rule = RULES[name]
    assert (verdict.action, verdict.when, verdict.tier) == (rule.action, rule.when, rule.tier)
    assert verdict.evidence
    assert verdict.ends


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.apart_s == EDGE])
def test_a_link_that_goes_and_comes_counts_once_each_time(name: str) -> None:
    rule, steps = RULES[name], steps_of(name)
    once = [True] * 4 + [False]
    assert name not in Played().steps(steps, [False, *once * (rule.samples - 1)]).rules
    assert name in Played().steps(steps_of(name), [False, *once * rule.samples]).rules


ROWS = [name for name in LEVELS if RULES[name].within_s is None and RULES[name].signal not in COUNTERS | EVENTS]


@pytest.mark.parametrize("name", [name for name in ROWS if steps_of(name).needed() > 1])
def test_flapping_is_no_row(name: str) -> None:
    assert name not in Played().steps(steps_of(name), [True, False] * 100).rules


@pytest.mark.parametrize(
    "name", [name for name in LEVELS if RULES[name].within_s is not None and steps_of(name).rule.samples > 1]
)
def test_flapping_more_slowly_than_the_window_does_not_add_up(name: str) -> None:
    rule, steps = RULES[name], steps_of(name)
    assert rule.within_s is not None
    played = Played()
    for number in range(rule.samples + 2):
        at_s = 1000.0 + number * (rule.within_s + 1)
        played.look(steps.step(at_s, True), at_s)
    assert name not in played.rules


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.while_])
def test_a_guard_that_nobody_has_read_does_not_hold(name: str) -> None:
    steps = steps_of(name)
    played = Played()
    for number in range(steps.needed() + 5):
        at_s = 1000.0 + number * steps.every_s
        played.look(steps.step(at_s, True, guarded=False), at_s)
    assert name not in played.rules


@pytest.mark.parametrize("name", PEERS)
def test_among_peers_that_do_nothing_nobody_is_odd(name: str) -> None:
    rule, steps = RULES[name], steps_of(name)
    assert isinstance(rule.bad, Among)
    played = Played()
    for number in range(steps.needed() + 5):
        at_s = 1000.0 + number * steps.every_s
        idle = 0.9 * rule.bad.least_median
        # Its own guards and its peers' hold: it is only that all of them idle.
        looks = [
            r._replace(value=idle * (r.value or 0.0) / steps.middle) if r.signal is rule.signal else r
            for r in steps.step(at_s, True)
        ]
        played.look(looks, at_s)
    assert name not in played.rules


@pytest.mark.parametrize("name", [name for name in PEERS if RULES[name].gang])
def test_among_peers_that_differ_widely_nobody_is_odd(name: str) -> None:
    """Far by the ratio, but not by the MAD (specification 4.4)."""
    rule, steps = RULES[name], steps_of(name)
    assert isinstance(rule.bad, Among)
    played = Played()
    for number in range(steps.needed() + 5):
        at_s = 1000.0 + number * steps.every_s
        looks = []
        for r in steps.step(at_s, True):
            if r.signal is rule.signal and r.subject == GPU:
                r = r._replace(value=(r.value or 0.0) * (0.8 if rule.bad.limit < 1 else 1.05))
            elif r.signal is rule.signal:
                spread = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)[int(r.subject.removeprefix("GPU-")) - 1]
                r = r._replace(value=(r.value or 0.0) * (1 + spread * abs(1 - rule.bad.limit)))
            looks.append(r)
        played.look(looks, at_s)
    assert name not in played.rules


@EACH
def test_silence_and_a_gap_are_no_evidence(name: str) -> None:
    """C149: what is not told lifts nothing and raises nothing."""
    rule, steps = RULES[name], steps_of(name)
    played = Played().steps(steps, [True] * steps.needed())
    before = set(played.rules)
    missing = Reading(at_s=1e6, node="a1" * 28, subject=GPU, signal=rule.signal, value=None, status=Status.STALE)  # type: ignore[arg-type]
    played.look([missing])
    assert before <= set(played.rules)
    if steps.needed() > 1 and rule.within_s is None and rule.apart_s == 0 and not rule.witness:
        wide = Steps(rule, gap_s(SPEC, rule.signal) + 1)
        assert name not in Played().steps(wide, [True] * 5).rules, "further apart than a row can be"


@EACH
def test_a_restart_between_any_two_looks_changes_nothing(name: str) -> None:
    needed = steps_of(name).needed()
    series = [True] * (needed - 1) + [False] + [True] * needed
    through = Played().steps(steps_of(name), series)
    restarted = Played(restart_each_time=True).steps(steps_of(name), series)
    assert (restarted.verdicts, restarted.history) == (through.verdicts, through.history)


@EACH
def test_it_ends_as_it_says(name: str) -> None:
    """What is latched stays for a day of good readings; the rest goes after its time (C147)."""
    rule, steps = RULES[name], steps_of(name)
    raised = [True] * 4 + [False]
    played = Played().steps(steps, raised * rule.samples if rule.apart_s == EDGE else [True] * (steps.needed() + 1))
    assert name in played.rules
    start_s = 1000.0 + 6 * (steps.needed() + 5 * rule.samples) * steps.every_s
    good = Steps(rule, min(steps.every_s * 3, 60.0))
    good.released, good.total = True, steps.total
    lasts_s = 3600.0 * 13 if isinstance(rule.bad, Rises) else (rule.release_after_s or 600.0) * 2 + 300.0
    gap = gap_s(SPEC, rule.signal)
    good.every_s = max(1.0, min(gap - 1, lasts_s / 400))
    played.steps(good, [False] * math.ceil(lasts_s / good.every_s), start_s)
    if rule.release_after_s is None:
        assert name in played.rules
        assert not played.history.without(GPU).without("a1" * 28).traces
    else:
        assert name not in played.rules


@pytest.mark.parametrize("name", COUNTED)
def test_old_totals_resets_and_ceilings(name: str) -> None:
    """C130, C142: counting starts at the first value; one that fell was reset; one at its ceiling says nothing."""
    rule = RULES[name]
    condition = rule.bad
    assert isinstance(condition, Rises)
    start = [reading(1000.0 + step, rule.signal, 50_000.0) for step in range(200)]
    played = Played()
    for value in start:
        played.look([value])
    assert name not in played.rules, "an old total"
    for step in range(200):
        played.look([reading(1200.0 + step, rule.signal, 0.0)])
    assert name not in played.rules, "a reset to zero is no rise"
    ceiling = CEILINGS.get(rule.signal)
    if ceiling is not None:
        full = Played()
        for step in range(200):
            full.look(
                [reading(2000.0 + step, Signal.IB_PORT_ETHERNET, 0.0), reading(2000.0 + step, rule.signal, ceiling)]
            )
        assert full.rules == [f"saturated_{rule.signal}"]


@pytest.mark.parametrize("name", [name for name in COUNTED if RULES[name].signal in CEILINGS])
def test_what_stands_is_not_lifted_by_a_counter_that_stands_at_its_ceiling(name: str) -> None:
    """It would stand there as well if the fault went on."""
    rule, steps = RULES[name], steps_of(name)
    played = Played().steps(steps, [True] * steps.needed())
    assert name in played.rules
    start_s = 1000.0 + steps.needed() * steps.every_s
    for number in range(int((rule.release_after_s or 600.0) * 2 // 10) + 20):
        at_s = start_s + 10 * number
        beside = steps.step(at_s, False)
        full = reading(at_s, rule.signal, float(CEILINGS[rule.signal]))
        played.look([full if r.signal is rule.signal else r for r in beside], at_s)
    assert name in played.rules


def test_a_reset_counts_what_has_come_since() -> None:
    played = Played()
    for step, value in enumerate((500.0, 500.0, 3.0)):
        played.look([reading(1000.0 + step, Signal.GPU_PCIE_FATAL, value)])
    [verdict] = played.verdicts
    assert (verdict.rule, "rose by 3" in verdict.evidence) == ("pcie_fatal", True)


# Properties

no_value = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1000.0, 1e300, 9.3e18, *sorted(SENTINELS)]).map(
        lambda value: {"value": float(value), "status": Status.OK}
    ),
    st.sampled_from([status for status in Status if status not in (Status.OK, Status.LOST)]).map(
        lambda status: {"value": None, "status": status, "cause": "NO_DATA"}
    ),
    # What a source says it could not read is not read, whatever it left in the value.
    st.sampled_from([0.0, 1.0, 90.0, 1e6]).map(lambda value: {"value": value, "status": Status.STALE}),
)
looks = st.lists(st.tuples(st.sampled_from(list(Signal)), no_value), min_size=1, max_size=30)


@given(looks)
@settings(max_examples=150)
def test_no_missing_or_sentinel_value_reads_as_healthy_or_evicts(seen: list[tuple[Signal, dict[str, object]]]) -> None:
    played = Played()
    for number, (signal, without) in enumerate(seen * 4):
        if signal is Signal.IB_SEND_WAIT:
            continue
        played.look([reading(1000.0 + number, signal, **without)])  # type: ignore[arg-type]
    assert played.verdicts == ()
    assert all(signal is not Signal.GPU_XID for signal, _ in played.history.levels)


STANDING = [
    name for name in LEVELS if RULES[name].action is not Action.WARN and RULES[name].release_after_s is not None
]


@given(st.sampled_from(STANDING), st.lists(no_value, min_size=5, max_size=20))
@settings(max_examples=40, deadline=None)
def test_what_stands_is_lifted_by_no_missing_value(name: str, without: list[dict[str, object]]) -> None:
    rule, steps = RULES[name], steps_of(name)
    played = Played().steps(steps, [True] * steps.needed())
    start_s = 1000.0 + steps.needed() * steps.every_s
    listens = [rule.signal, Signal.GPU_ANSWERS]
    for number in range(650):
        more = without[number % len(without)]
        played.look([reading(start_s + number, signal, **more) for signal in listens])  # type: ignore[arg-type]
    assert name in played.rules


def test_counters_of_the_table_are_known_as_counters() -> None:
    assert {RULES[name].signal for name in COUNTED} <= COUNTERS
    assert PORT in SPEC.ib_ports
