"""The rules over synthetic series: just under, just over, flapping, gaps, release, restart in the middle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.health.history import History
from tidegate.health.judge import Finding, gap_s, judge
from tidegate.health.readings import DEADLINE_MISSED, Reading, Signal, Status
from tidegate.health.rules import rules_of
from tidegate.ids import GpuId, NodeId, Tier
from tidegate.spec.policy import HealthSpec, TemperatureRule

NODE = NodeId("a1" * 28)
GPU = GpuId("GPU-hot")
SPEC = HealthSpec()
GAP_S = gap_s(SPEC)


def celsius(at_s: float, value: float, gpu: str = GPU) -> Reading:
    return Reading(at_s=at_s, node=NODE, subject=gpu, signal=Signal.GPU_TEMPERATURE, value=value, status=Status.OK)


def missing(at_s: float, status: Status, signal: Signal = Signal.GPU_TEMPERATURE, cause: str | None = None) -> Reading:
    subject = NODE if signal is Signal.NVML_ANSWERS else GPU
    return Reading(at_s=at_s, node=NODE, subject=subject, signal=signal, value=None, status=status, cause=cause)


def answers(at_s: float, cause: str | None = None, gpu: str = GPU, signal: Signal = Signal.GPU_ANSWERS) -> Reading:
    value = 1.0 if cause is None else None
    status = Status.OK if cause is None else Status.LOST
    return Reading(at_s=at_s, node=NODE, subject=gpu, signal=signal, value=value, status=status, cause=cause)


class Played:
    """The judge after a series of readings, one look each."""

    def __init__(self, spec: HealthSpec = SPEC, *, restart_each_time: bool = False) -> None:
        self.spec = spec
        self.history = History()
        self.verdicts: tuple[Verdict, ...] = ()
        self.findings: list[Finding] = []
        self._restart_each_time = restart_each_time

    def play(self, readings: Iterable[Reading]) -> Played:
        for reading in readings:
            judgement = judge([reading], self.history, self.spec, reading.at_s)
            self.history, self.verdicts = judgement.history, judgement.verdicts
            self.findings += judgement.findings
            if self._restart_each_time:
                self.history = History.from_json(self.history.to_json())
        return self

    @property
    def rules(self) -> list[str]:
        return [verdict.rule for verdict in self.verdicts]


def each_second(start_s: float, values: Iterable[float]) -> list[Reading]:
    return [celsius(start_s + second, value) for second, value in enumerate(values)]


def test_at_the_limit_is_not_above_it() -> None:
    assert Played().play([celsius(0, 78.0)]).rules == []


def test_one_degree_above_the_limit_evicts_the_gpu_now_and_says_why() -> None:
    (verdict,) = Played().play([celsius(5, 79)]).verdicts
    assert verdict.rule == "temperature"
    assert verdict.action is Action.EVICT_GPU
    assert verdict.when is When.NOW
    assert verdict.tier is Tier.SERVE
    assert (verdict.at_s, verdict.node, verdict.gpu) == (5, NODE, GPU)
    assert "79 °C, limit 78 °C" in verdict.evidence
    assert "70 °C for 600 s" in verdict.ends


def test_samples_must_be_in_a_row() -> None:
    spec = HealthSpec(temperature=TemperatureRule(samples=3))
    assert Played(spec).play(each_second(0, [79, 79, 77, 79, 79])).rules == []
    assert Played(spec).play(each_second(0, [79, 79, 79])).rules == ["temperature"]


def test_an_implausible_value_neither_breaks_nor_joins_the_row() -> None:
    spec = HealthSpec(temperature=TemperatureRule(samples=3))
    assert Played(spec).play(each_second(0, [79, 255, 79, 0, -1])).rules == []
    assert Played(spec).play(each_second(0, [79, 255, 79, 0, 79])).rules == ["temperature"]


def test_readings_with_a_hole_between_them_are_not_in_a_row() -> None:
    spec = HealthSpec(temperature=TemperatureRule(samples=2))
    assert Played(spec).play([celsius(0, 79), celsius(GAP_S, 79)]).rules == ["temperature"]
    assert Played(spec).play([celsius(0, 79), celsius(GAP_S + 1, 79)]).rules == []


def test_the_same_reading_twice_counts_once() -> None:
    spec = HealthSpec(temperature=TemperatureRule(samples=2))
    assert Played(spec).play([celsius(0, 79), celsius(0, 79)]).rules == []


def test_warm_for_a_minute_warns() -> None:
    assert Played().play(each_second(0, [76] * 60)).rules == []
    (verdict,) = Played().play(each_second(0, [76] * 61)).verdicts
    assert (verdict.rule, verdict.action, verdict.tier) == ("temperature_warn", Action.WARN, Tier.GANG)
    assert Played().play(each_second(0, [76] * 40 + [75] + [76] * 40)).rules == []


def test_a_cool_gpu_comes_back_after_the_release_time_and_not_before() -> None:
    played = Played().play([celsius(0, 79), *each_second(1, [70] * 600)])
    assert played.rules == ["temperature"]
    assert played.play([celsius(601, 70)]).rules == []
    assert played.findings[-1].text.startswith("lifted")
    assert played.history.traces == {}, "nothing is remembered of a healthy GPU"


@pytest.mark.parametrize("between", [71.0, 78.0, 79.0])
def test_flapping_around_the_release_temperature_never_lifts(between: float) -> None:
    played = Played().play([celsius(0, 79), *each_second(1, [70, 70, between] * 1000)])
    assert [verdict.at_s for verdict in played.verdicts if verdict.rule == "temperature"] == [0], "never lifted between"


def test_silence_is_no_cooling() -> None:
    """C149 the other way round: ten minutes without readings do not make a hot GPU cool."""
    played = Played().play([celsius(0, 79), celsius(1, 60), celsius(3000, 60)])
    assert played.rules == ["temperature"]
    assert played.play(celsius(3000 + 10 * step, 60) for step in range(1, 61)).rules == []


def test_c149_a_gpu_without_any_reading_gets_no_verdict() -> None:
    readings = [celsius(second, 60, gpu) for second in range(700) for gpu in ("GPU-0", "GPU-1", "GPU-2")]
    assert Played().play(readings).rules == []


def test_a_clock_set_back_does_not_blind_the_rule() -> None:
    played = Played().play([celsius(5000, 79), celsius(1000, 60)])
    assert played.play(celsius(1000 + 10 * step, 60) for step in range(1, 61)).rules == []
    assert played.play([celsius(1700, 79)]).rules == ["temperature"]


def test_a_value_from_long_ago_says_nothing_of_now() -> None:
    judgement = judge([celsius(0, 90)], History(), SPEC, now_s=GAP_S + 1)
    assert judgement.verdicts == ()


@pytest.mark.parametrize("cause", ["GPU_IS_LOST", "RESET_REQUIRED"])
def test_a_lost_gpu_takes_its_node_out_until_a_person_says_otherwise(cause: str) -> None:
    played = Played().play([answers(0, cause)])
    assert played.rules == [], "it is read again once"
    (verdict,) = played.play([answers(1, cause)]).verdicts
    assert (verdict.action, verdict.when, verdict.tier) == (Action.EVICT_NODE, When.NOW, Tier.NONE)
    assert (verdict.gpu, cause in verdict.evidence) == (GPU, True)
    played.play(answers(2.0 + second) for second in range(0, 86_400, 10))
    assert played.rules == ["gpu_lost"], "latched"
    played.history = played.history.without(GPU)
    assert played.play([answers(90_000)]).rules == []


def test_c094_one_lost_gpu_says_nothing_of_the_others() -> None:
    readings = [
        answers(second, "GPU_IS_LOST" if gpu == 2 else None, f"GPU-{gpu}") for second in (0, 1) for gpu in range(8)
    ]
    (verdict,) = Played().play(readings).verdicts
    assert verdict.gpu == "GPU-2"


@pytest.mark.parametrize(
    ("cause", "looks", "rules"),
    [
        ("UNKNOWN", 1, []),
        ("UNKNOWN", 2, ["gpu_unreachable"]),
        ("IRQ_ISSUE", 2, ["gpu_unreachable"]),
        ("GPU_NOT_FOUND", 2, ["gpu_unreachable"]),
        ("TIMEOUT", 1, ["gpu_timeout_warn"]),
        ("TIMEOUT", 2, ["gpu_timeout_warn"]),
        ("TIMEOUT", 3, ["gpu_timeout_warn", "gpu_timeout"]),
        ("NO_PERMISSION", 100, []),
        ("NO_DATA", 100, []),
        ("NOT_SUPPORTED", 100, []),
    ],
)
def test_what_nvmls_codes_mean_for_a_gpu(cause: str, looks: int, rules: list[str]) -> None:
    assert Played().play(answers(second, cause) for second in range(looks)).rules == rules


@pytest.mark.parametrize("cause", ["NO_PERMISSION", "NO_DATA", "TIMEOUT", None])
def test_a_fault_is_lifted_by_answers_and_not_by_another_kind_of_silence(cause: str | None) -> None:
    played = Played().play(answers(second, "UNKNOWN") for second in (0, 1))
    played.play(answers(second, cause) for second in range(2, 603))
    assert ("gpu_unreachable" in played.rules) is (cause is not None)


@pytest.mark.parametrize(
    ("cause", "looks", "action"),
    [
        ("DRIVER_NOT_LOADED", 3, Action.WARN),
        ("LIBRARY_NOT_FOUND", 3, Action.WARN),
        ("LIB_RM_VERSION_MISMATCH", 2, Action.EVICT_NODE),
    ],
)
def test_what_nvmls_codes_mean_for_a_node(cause: str, looks: int, action: Action) -> None:
    signal = Signal.NVML_ANSWERS
    played = Played().play(answers(second, cause, NODE, signal) for second in range(looks))
    (verdict,) = played.verdicts
    assert (verdict.action, verdict.gpu) == (action, None)
    assert played.play([answers(looks, None, NODE, signal)]).rules == []


def deadline(at_s: float) -> Reading:
    return missing(at_s, Status.TIMEOUT, Signal.NVML_ANSWERS, DEADLINE_MISSED)


def test_a_missed_deadline_warns_and_three_in_a_minute_take_the_node_out() -> None:
    played = Played().play([deadline(10)])
    assert [(verdict.rule, verdict.action) for verdict in played.verdicts] == [("nvml_silent_warn", Action.WARN)]
    # Looks that come back in time between two misses do not make the minute start anew.
    played.play([answers(25, None, NODE, Signal.NVML_ANSWERS), deadline(40)])
    assert played.rules == ["nvml_silent_warn"]
    played.play([deadline(69)])
    assert played.rules == ["nvml_silent_warn", "nvml_silent"]


def test_three_missed_deadlines_in_more_than_a_minute_only_warn() -> None:
    assert Played().play([deadline(10), deadline(40), deadline(71)]).rules == ["nvml_silent_warn"]


def test_no_rule_is_named_twice_and_each_says_how_it_ends() -> None:
    rules = rules_of(SPEC)
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.ends for rule in rules)


def test_a_verdict_of_a_rule_that_is_no_more_goes_with_it() -> None:
    played = Played().play([celsius(0, 79)])
    (standing,) = [trace for trace in played.history.traces.values() if trace.standing is not None]
    assert judge([], History({standing.key: standing}), SPEC, 1.0).verdicts == played.verdicts
    gone = replace(standing, rule="removed")
    assert judge([], History({gone.key: gone}), SPEC, 1.0).verdicts == ()


def test_implausible_and_refused_values_are_findings_and_unsupported_is_none() -> None:
    played = Played().play(
        [celsius(0, 255), missing(1, Status.NO_PERMISSION, cause="NO_PERMISSION"), missing(2, Status.UNSUPPORTED)]
    )
    assert [finding.text for finding in played.findings] == [
        "gpu_temperature_celsius of 255 can't be true; counts as no reading",
        "no gpu_temperature_celsius: no_permission (NO_PERMISSION)",
    ]


# Properties

real_values = st.floats(min_value=20, max_value=110)
no_values = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 130.5, 255.0, 65_535.0, 4_294_967_295.0])
no_evidence = st.one_of(
    st.builds(celsius, at_s=st.just(0.0), value=no_values),
    st.builds(
        missing, at_s=st.just(0.0), status=st.sampled_from([status for status in Status if status is not Status.OK])
    ),
)
seconds = st.floats(min_value=0.1, max_value=900)


@st.composite
def series(draw: st.DrawFn) -> list[tuple[Reading, bool]]:
    """Readings in time order, each marked whether it is evidence."""
    at_s, out = 1000.0, []
    for rest_s, is_evidence in draw(st.lists(st.tuples(seconds, st.booleans()), max_size=60)):
        at_s += rest_s
        reading = celsius(at_s, draw(real_values)) if is_evidence else draw(no_evidence)
        out.append((reading._replace(at_s=at_s), is_evidence))
    return out


@given(series())
def test_nothing_but_a_plausible_value_changes_a_verdict(readings: list[tuple[Reading, bool]]) -> None:
    """No missing, sentinel or implausible value ever evicts or lifts, whatever came before."""
    played = Played()
    for reading, is_evidence in readings:
        before = played.verdicts
        played.play([reading])
        if not is_evidence:
            assert played.verdicts == before


@given(series())
def test_what_is_no_evidence_might_as_well_not_have_been_there(readings: list[tuple[Reading, bool]]) -> None:
    all_of_them = Played().play(reading for reading, _ in readings)
    evidence_only = Played().play(reading for reading, is_evidence in readings if is_evidence)
    assert all_of_them.history == evidence_only.history


@given(series())
def test_a_restart_between_any_two_looks_changes_nothing(readings: list[tuple[Reading, bool]]) -> None:
    through = Played().play(reading for reading, _ in readings)
    restarted = Played(restart_each_time=True).play(reading for reading, _ in readings)
    assert (restarted.verdicts, restarted.history) == (through.verdicts, through.history)


@given(series())
def test_a_verdict_is_there_after_every_reading_above_the_limit_and_rests_on_one(
    readings: list[tuple[Reading, bool]],
) -> None:
    played = Played()
    hot: set[float] = set()
    for reading, is_evidence in readings:
        played.play([reading])
        if is_evidence and reading.value is not None and reading.value > 78:
            hot.add(reading.at_s)
            assert "temperature" in played.rules
        assert all(verdict.at_s in hot for verdict in played.verdicts if verdict.rule == "temperature")
