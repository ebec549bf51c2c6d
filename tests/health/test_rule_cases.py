"""Cases from the field that are about rules: what was seen elsewhere, played through the judge."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from tests.health.series import GANG, GPU, NODE, PORT, SPEC, Played, reading

from tidegate.errors import PolicyError
from tidegate.health.history import History
from tidegate.health.judge import judge
from tidegate.health.memory import FileMemory
from tidegate.health.readings import DEADLINE_MISSED, Signal, Status
from tidegate.health.rules import rules_of
from tidegate.spec.load import parse_model
from tidegate.spec.policy import HealthSpec, Policy, RepeatOffenderSpec

S = Signal
DAY_S = 86_400.0


def xids(*events: tuple[float, int] | tuple[float, int, str], played: Played | None = None) -> Played:
    played = played or Played()
    for at_s, code, *text in events:
        played.look([reading(at_s, S.GPU_XID, float(code), detail=text[0] if text else None)])
    return played


def values(signal: Signal, series: Iterable[float | None], start_s: float = 1000.0, every_s: float = 5.0) -> Played:
    played = Played()
    for number, value in enumerate(series):
        played.look([reading(start_s + number * every_s, signal, value)])
    return played


def test_c091_the_recovery_action_alone_takes_the_node_out() -> None:
    [verdict] = values(S.GPU_RECOVERY_ACTION, [0, 1]).verdicts
    assert (verdict.rule, verdict.action, verdict.when) == ("recovery_now", "evict_node", "now")
    assert "GPU reset" in verdict.evidence


def test_c092_one_error_in_a_cell_evicts_nothing() -> None:
    assert values(S.GPU_POWER, [27, None, 27]).verdicts == ()


def test_c098_a_margin_is_judged_as_a_margin() -> None:
    """29 °C with 58 to go; and a margin at 0 of a cool GPU is a card that does not tell the truth."""
    played = Played()
    for second in range(60):
        at_s = 1000.0 + second
        played.look([reading(at_s, S.GPU_TEMPERATURE, 29.0), reading(at_s, S.GPU_MARGIN, 58.0),
                     reading(at_s, S.GPU_SLOWDOWN_OFFSET, -2.0)])  # fmt: skip
        played.look([reading(at_s, S.GPU_MARGIN, -3.0, "GPU-1"), reading(at_s, S.GPU_TEMPERATURE, 29.0, "GPU-1"),
                     reading(at_s, S.GPU_SLOWDOWN_OFFSET, -2.0, "GPU-1")])  # fmt: skip
    assert played.verdicts == ()


def test_c111_a_gauge_that_keeps_its_xid_is_one_event() -> None:
    """Sources tell an event once; the same event told twice within seconds is still one."""
    assert "xid_page_fault_repeated" not in xids((1000, 31), (1000, 31), (1003, 31)).rules
    assert "xid_page_fault_repeated" in xids((1000, 31), (1100, 31)).rules


def test_c113_45_after_62_is_an_echo_and_62_counts() -> None:
    assert xids((1000, 62), (1002, 45)).rules == ["xid_microcontroller"]
    assert xids((1000, 45)).rules == ["xid_cleanup"]


def test_c116_five_milliseconds_of_throttling_are_not_five_seconds() -> None:
    assert values(S.GPU_THROTTLED_HW_THERMAL, [10.0, 10.005]).verdicts == ()
    assert values(S.GPU_THROTTLED_HW_THERMAL, [10.0, 15.0]).rules == ["hw_thermal_time"]


def busy(at_s: float) -> list[object]:
    return [reading(at_s, S.GPU_PROCESSES, 1.0, gpu) for gpu in GANG]


def test_c122_momentary_samples_of_a_gpu_at_work_are_no_straggler() -> None:
    played = Played()
    for number, mine in enumerate([0.0, 0.71, 0.0, 0.68] * 10):
        at_s = 1000.0 + 5 * number
        others = [reading(at_s, S.GPU_TENSOR_ACTIVE, 0.7, gpu) for gpu in list(GANG)[1:]]
        played.look([*busy(at_s), *others, reading(at_s, S.GPU_TENSOR_ACTIVE, mine)])  # type: ignore[list-item]
    assert played.verdicts == ()


def straggling(watts: float, clock_hz: float = 1.98e9, tensor: float = 0.0, gangs: bool = True) -> Played:
    played = Played()
    for number in range(20):
        at_s = 1000.0 + 5 * number
        seen = busy(at_s)
        for gpu in GANG:
            odd = gpu == GPU
            seen += [
                reading(at_s, S.GPU_UTILIZATION, 1.0, gpu),
                reading(at_s, S.GPU_TENSOR_ACTIVE, tensor if odd else 0.7, gpu),
                reading(at_s, S.GPU_POWER, watts if odd else 640.0, gpu),
                reading(at_s, S.GPU_SM_CLOCK, clock_hz if odd else 1.98e9, gpu),
            ]
        verdict = judge(seen, played.history, SPEC, at_s, GANG if gangs else None)  # type: ignore[arg-type]
        played.history, played.verdicts = verdict.history, verdict.verdicts
    return played


def test_tensor_activity_alone_never_evicts() -> None:
    """DCGM 303: it says 0 for a GPU that works, with power and clock as they should be."""
    assert straggling(640.0).rules == ["tensor_warn"]


def test_with_a_second_witness_it_does_at_the_next_checkpoint() -> None:
    played = straggling(200.0)
    [verdict] = [verdict for verdict in played.verdicts if verdict.rule == "tensor"]
    assert (verdict.action, verdict.when, verdict.gpu) == ("evict_gpu", "next_checkpoint", GPU)
    assert {"tensor_warn", "power_low"} < set(played.rules)


def test_gpus_that_are_in_no_gang_are_not_compared() -> None:
    """A busy replica beside an idle one is no straggler."""
    assert straggling(200.0, 1e9, gangs=False).verdicts == ()


def test_c048_a_third_of_the_peers_work_is_flagged_without_a_table() -> None:
    """C048: one GPU of eight did a third of its peers' work while the vendor's diagnostics passed."""
    assert "sm_clock" in straggling(250.0, 0.35 * 1.98e9, 0.7 * 0.349).evicting


def test_c130_a_total_is_no_fault_and_a_jump_is() -> None:
    assert values(S.IB_LINK_DOWNED, [3, 3, 3]).verdicts == ()
    assert "ib_flap_fast" in values(S.IB_LINK_DOWNED, [3, 3, 14]).evicting


@pytest.mark.parametrize(("state", "phys"), [(1.0, 2.0), (1.0, 3.0)])
def test_c131_polling_and_disabled_are_both_not_up_and_rate_10_is_no_slow_link(state: float, phys: float) -> None:
    played = Played()
    for second in range(10):
        at_s = 1000.0 + second
        played.look([reading(at_s, S.IB_PORT_PRESENT, 1.0), reading(at_s, S.IB_PORT_STATE, state),
                     reading(at_s, S.IB_PORT_PHYS_STATE, phys), reading(at_s, S.IB_PORT_RATE, 10e9)])  # fmt: skip
    assert played.evicting == ["ib_down"]


def ports(minutes_down: float, times: int, named: tuple[str, ...] = ()) -> Played:
    """One port goes down and comes back."""
    played = Played(HealthSpec(ib_ports=named))
    at_s = 1000.0
    for _ in range(times):
        for state, seconds in ((4.0, 60.0), (1.0, minutes_down * 60)):
            for _ in range(int(seconds)):
                at_s += 1.0
                played.look([reading(at_s, S.IB_PORT_STATE, state)])
    return played.look([reading(at_s + 1, S.IB_PORT_STATE, 4.0)])


def test_c133_ports_that_were_never_up_are_nobodys_loss_and_three_flaps_are() -> None:
    """Twelve ports, four of them never used: quiet."""
    quiet = Played(HealthSpec())
    for second in range(60):
        at_s = 1000.0 + second
        quiet.look(reading(at_s, S.IB_PORT_STATE, 4.0 if port < 8 else 1.0, f"mlx5_{port}/1") for port in range(12))
    assert quiet.verdicts == ()
    assert "ib_flap_seen" in ports(0.05, 3).evicting
    assert "ib_flap_seen" in ports(2, 3).evicting
    assert ports(0.05, 1).evicting == []


def test_c136_an_ethernet_bond_is_judged_only_if_it_is_named() -> None:
    def bond(spec: HealthSpec) -> Played:
        played = Played(spec)
        for second in range(20):
            at_s = 1000.0 + second
            state = 4.0 if second < 5 else 1.0
            played.look([reading(at_s, S.IB_PORT_ETHERNET, 1.0), reading(at_s, S.IB_PORT_STATE, state)])
        return played

    assert bond(HealthSpec()).verdicts == ()
    assert bond(HealthSpec(ib_ports=(PORT,))).evicting == ["ib_down"]


def test_c137_a_gpu_without_links_among_gpus_with_links_is_bad_and_c139_none_at_all_is_fine() -> None:
    def links(mine: float, theirs: float) -> Played:
        played = Played()
        for number in range(4):
            at_s = 1000.0 + 5 * number
            played.look(reading(at_s, S.GPU_NVLINKS, mine if gpu == GPU else theirs, gpu) for gpu in GANG)
        return played

    assert links(0, 18).evicting == ["nvlinks_missing"]
    assert links(0, 0).verdicts == ()
    assert links(18, 18).verdicts == ()


def test_cards_without_a_bridge_show_their_links_as_down_and_are_fine() -> None:
    def down(each: list[float]) -> Played:
        played = Played()
        for number in range(4):
            at_s = 1000.0 + 5 * number
            for gpu, links in zip(GANG, each, strict=True):
                played.look([reading(at_s, S.GPU_NVLINKS, 18.0, gpu), reading(at_s, S.GPU_NVLINKS_DOWN, links, gpu)])
        return played

    assert down([18.0] * 8).verdicts == ()
    assert down([0.0] * 7 + [1.0]).evicting == ["nvlink_down"]


def test_c140_counters_that_nobody_can_read_are_unknown() -> None:
    played = Played()
    for second in range(30):
        for signal in (S.GPU_NVLINK_REPLAYS, S.GPU_NVLINK_RECOVERIES, S.GPU_NVLINKS_DOWN):
            played.look([reading(1000.0 + second, signal, None, status=Status.UNSUPPORTED)])
    assert (played.verdicts, dict(played.history.counts)) == ((), {})


def replays(series: Iterable[float], generation: float) -> Played:
    played = Played()
    for number, value in enumerate(series):
        at_s = 1000.0 + 10 * number
        played.look([reading(at_s, S.GPU_PCIE_GENERATION_MAX, generation), reading(at_s, S.GPU_PCIE_WIDTH_MAX, 16.0),
                     reading(at_s, S.GPU_PCIE_REPLAYS, value)])  # fmt: skip
    return played


def test_c142_replays_are_scaled_by_the_link_and_counted_from_the_start() -> None:
    assert replays([150.0] * 100, 5).verdicts == ()
    assert replays((150 + 150 * number / 360 for number in range(360)), 5).verdicts == ()
    twenty_a_minute = [150 + 20 * number / 6 for number in range(60)]
    assert replays(twenty_a_minute, 5).verdicts == ()
    assert replays(twenty_a_minute, 4).rules == ["pcie_replays_warn"]


def test_c143_a_narrow_slow_link_counts_under_load_and_an_idle_clock_does_not() -> None:
    def link(active: float) -> Played:
        played = Played()
        for number in range(30):
            at_s = 1000.0 + 10 * number
            levels = {S.GPU_SM_ACTIVE: active, S.GPU_PCIE_GENERATION_MAX: 5, S.GPU_PCIE_WIDTH_MAX: 16}
            levels |= {S.GPU_PCIE_GENERATION: 3, S.GPU_PCIE_WIDTH: 8, S.GPU_CLOCK_REASONS: 1}
            played.look([reading(at_s, signal, float(value)) for signal, value in levels.items()])
        return played

    assert set(link(0.9).evicting) == {"pcie_generation", "pcie_width"}
    assert link(0.0).verdicts == ()


def test_c144_off_the_bus_told_twice_is_one_eviction() -> None:
    text = "GPU has fallen off the bus."
    played = xids((1000, 79, text), (1004, 79, text), (1200, 79, text))
    assert played.rules == ["xid_off_the_bus"]
    assert len(played.history.evicted_at_s[GPU]) == 1


def test_c146_xid_13_is_the_program_unless_it_is_one_place_on_the_chip() -> None:
    here, there = "Graphics SM Warp Exception on (GPC 0, TPC 1, SM 0)", "Graphics Exception on (GPC 3, TPC 2, SM 1)"
    other = "Graphics Exception on (GPC 5, TPC 0, SM 1)"
    assert xids((1000, 13, here)).rules == ["xid_engine"]
    assert xids((1000, 13, here), (2000, 13, there), (3000, 13, other)).evicting == []
    assert xids((1000, 13, here), (2000, 13, there), (3000, 13, here)).evicting == ["xid_engine_repeated"]


@pytest.mark.parametrize("code", [94, 69])
def test_c147_what_was_marked_bad_comes_back_by_itself(code: int) -> None:
    played = xids((1000, code), (2000, code))
    assert len(played.evicting) == 1
    for number in range(200):
        played.look([reading(2010.0 + 10 * number, S.GPU_ANSWERS, 1.0)])
    assert played.verdicts == ()


def test_c147_not_while_nobody_can_read_it() -> None:
    played = xids((1000, 94), (2000, 94))
    for number in range(400):
        played.look([reading(2010.0 + 10 * number, S.GPU_ANSWERS, None)])
    assert played.evicting == ["xid_contained_repeated"]


def test_c149_no_entry_for_a_gpu_is_no_fault_of_it() -> None:
    played = Played()
    for second in range(300):
        played.look(reading(1000.0 + second, S.GPU_TEMPERATURE, 60.0, gpu) for gpu in list(GANG)[:3])
    assert played.verdicts == ()


def offend(played: Played, start_s: float) -> Played:
    played.look([reading(start_s, S.GPU_TEMPERATURE, 85.0)])
    for number in range(500):
        played.look([reading(start_s + 10.0 * (number + 1), S.GPU_TEMPERATURE, 50.0)])
    return played


def test_c150_what_is_taken_out_again_and_again_stays_out_also_over_a_reboot(tmp_path: object) -> None:
    played = Played()
    for number in range(3):
        offend(played, 1000.0 + number * DAY_S * 2)
        if number < 2:
            assert played.verdicts == (), number
        memory = FileMemory(tmp_path / "health.json", f"boot-{number}")  # type: ignore[operator]
        memory.save(played.history)
        played.history = FileMemory(tmp_path / "health.json", f"boot-{number + 1}").load()  # type: ignore[operator]
    played.look([reading(3 * DAY_S * 2, S.GPU_TEMPERATURE, 50.0)])
    [verdict] = played.verdicts
    assert (verdict.rule, verdict.tier) == ("repeat_offender", "none")
    assert "3 times within 7 days, now by temperature" in verdict.evidence
    assert played.history.without(GPU) == played.history.without(NODE)
    assert played.history.without(GPU).traces == {}


def test_each_eviction_within_a_day_doubles_the_rest() -> None:
    played = Played(HealthSpec(repeat_offender=RepeatOffenderSpec(evictions=9)))
    for earlier in range(3):
        start_s = 1000.0 + 10_000.0 * earlier
        played.look([reading(start_s, S.GPU_TEMPERATURE, 85.0)])
        stood_s = 0.0
        for number in range(999):
            stood_s = 10.0 * number
            if not played.look([reading(start_s + 1 + stood_s, S.GPU_TEMPERATURE, 50.0)]).rules:
                break
        assert stood_s == 600 * 2**earlier


def test_c152_a_slow_reading_is_a_finding_of_its_own() -> None:
    missed = {"value": None, "status": Status.TIMEOUT, "cause": DEADLINE_MISSED}
    played = Played()
    for at_s in (1000.0, 1015.0, 1030.0):
        played.look([reading(at_s, S.NVML_ANSWERS, **missed)])  # type: ignore[arg-type]
    assert played.rules == ["nvml_silent_warn", "nvml_silent"]


def test_c153_162_withdraws_163_and_nothing_else() -> None:
    assert xids((1000, 163)).rules == ["xid_power_smoothing"]
    played = xids((1000, 163), (1001, 79), (1060, 162), (1700, 162))
    assert played.rules == ["xid_off_the_bus"]


def test_c184_a_nan_hides_no_reset() -> None:
    played = values(S.GPU_ECC_UNCORRECTED, [20289, math.nan, 0, 0], every_s=60.0)
    assert played.verdicts == ()
    played.look([reading(1240.0, S.GPU_ECC_UNCORRECTED, 6.0)])
    assert played.evicting == ["ecc_uncorrected"]


def test_c190_a_clock_that_jumps_makes_no_row() -> None:
    spec = HealthSpec(rules=parse_model("rules: {temperature: {samples: 3}}", HealthSpec).rules)
    played = Played(spec)
    for at_s in (1000.0, 1001.0, 1061.0, 1001.0):
        played.look([reading(at_s, S.GPU_TEMPERATURE, 79.0)])
    assert "temperature" not in played.rules


def test_an_uncorrected_error_is_excused_by_the_xid_that_says_it_was_contained() -> None:
    played = values(S.GPU_ECC_UNCORRECTED, [0, 0], every_s=60.0)
    xids((1090, 94), played=played)
    assert played.look([reading(1120.0, S.GPU_ECC_UNCORRECTED, 1.0)]).evicting == []


@pytest.mark.parametrize(
    ("code", "text", "rule"),
    [
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08", "xid_nvlink5_fatal"),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 00", "xid_nvlink5_nonfatal"),
        (145, None, "xid_nvlink5"),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)", "xid_recovery_now"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "xid_recovery_drain"),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", None),
        (43, "pid=1", None),
        (777, "never seen", "xid_unknown"),
    ],
)
def test_what_an_xid_and_its_text_mean(code: int, text: str | None, rule: str | None) -> None:
    played = Played().look([reading(1000.0, S.GPU_XID, float(code), detail=text)])
    assert played.rules == ([rule] if rule else [])


# What the operator may change


def policy(text: str) -> HealthSpec:
    return parse_model(f"health:\n  rules:\n    {text}\n", Policy).health


def test_a_rule_can_be_changed_softened_or_switched_off() -> None:
    rules = {rule.name: rule for rule in rules_of(policy("nvlink_crc: {limit: 99, action: warn, when: now}"))}
    assert (str(rules["nvlink_crc"].bad), rules["nvlink_crc"].action) == ("rises by > 99 in 60 s", "warn")
    assert "tensor" not in {rule.name for rule in rules_of(policy("tensor: {enabled: false}"))}
    assert Played(policy("hw_thermal: {samples: 1}")).look([reading(0, S.GPU_CLOCK_REASONS, 64.0)]).evicting


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nvlink_crk: {limit: 99}", "health.rules.nvlink_crk: no such rule; did you mean `nvlink_crc`?"),
        (
            "gpu_lost: {limit: 99}",
            "health.rules.gpu_lost.limit: this rule has none; it is bad when it says GPU_IS_LOST",
        ),
        ("temperature: {limit: 99}", "set it in health.temperature"),
    ],
)
def test_a_mistake_in_a_rule_is_named_by_its_path(text: str, problem: str) -> None:
    with pytest.raises(PolicyError, match=r"policy\.yaml: health\.rules") as error:
        rules_of(policy(text))
    assert problem in str(error.value)
    with pytest.raises(PolicyError, match=r"policy\.yaml:3: health\.rules\.tensor\.sample: no such key"):
        policy("tensor: {sample: 4}")


def test_a_history_says_when_it_is_worth_saving() -> None:
    first = judge([reading(0, S.GPU_XID, 31.0)], History(), SPEC, 0.0)
    assert first.worth_saving
    assert not judge([reading(1, S.GPU_TEMPERATURE, 60.0)], first.history, SPEC, 1.0).worth_saving
