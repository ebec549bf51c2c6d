"""The real nvidia-ml-py against the fake library: what comes out for what NVML says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from tidegate.health.readings import MIDDLE_S, SLOW_S, Reading, Round, Signal, Status
from tidegate.health.sources.nvml import NvmlSource
from tidegate.health.sources.nvml_gpm import Activity
from tidegate.health.sources.nvml_session import connect, disconnect
from tidegate.ids import NodeId
from tidegate.testing import fake_nvml
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.fake_nvml import GpuState, NvmlState, gpus_of, uuid_of
from waiting import wait_until


def of(seen: Round, signal: Signal, subject: str) -> Reading:
    (reading,) = [reading for reading in seen.readings if (reading.signal, reading.subject) == (signal, subject)]
    return reading


def gpu(index: int) -> str:
    return uuid_of("node-a", index)


def test_every_gpu_is_read_by_its_uuid(source: NvmlSource, state: NvmlState, node: NodeId, clock: FakeClock) -> None:
    state.set(2, "temp", 74)
    state.set(2, "margin", -3)
    seen = source.read()
    assert [(listed.index, listed.uuid) for listed in seen.gpus] == [(index, gpu(index)) for index in range(4)]
    assert seen.error is None
    temperature = of(seen, Signal.GPU_TEMPERATURE, gpu(2))
    assert temperature == Reading(
        at_s=clock.now_s(),
        node=node,
        subject=gpu(2),
        signal=Signal.GPU_TEMPERATURE,
        value=74.0,
        status=Status.OK,
    )
    assert of(seen, Signal.GPU_MARGIN, gpu(2)).value == -3.0
    assert of(seen, Signal.GPU_TEMPERATURE, gpu(0)).value == 61.0
    assert of(seen, Signal.GPU_ANSWERS, gpu(0)).value == 1.0
    assert of(seen, Signal.NVML_ANSWERS, node).value == 1.0


def test_an_edit_of_the_state_is_seen_at_the_next_look(source: NvmlSource, state: NvmlState) -> None:
    for celsius in range(60, 90):
        state.set(0, "temp", celsius)
        assert of(source.read(), Signal.GPU_TEMPERATURE, gpu(0)).value == celsius


def test_an_edit_within_one_tick_of_the_file_systems_clock_is_seen(source: NvmlSource, state: NvmlState) -> None:
    before = state.path.stat()
    source.read()
    state.set(0, "temp", 79)
    os.utime(state.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert state.path.stat().st_size == before.st_size
    assert of(source.read(), Signal.GPU_TEMPERATURE, gpu(0)).value == 79


def read_after(source: NvmlSource, clock: FakeClock, rest_s: float = MIDDLE_S) -> Round:
    clock.advance(rest_s)
    return source.read()


def test_tensor_activity_is_a_ratio_over_two_looks(source: NvmlSource, state: NvmlState, clock: FakeClock) -> None:
    state.set(1, "gpm.5", 7.5)
    assert of(source.read(), Signal.GPU_TENSOR_ACTIVE, gpu(1)).status is Status.STALE

    def activity() -> float | None:
        return of(read_after(source, clock), Signal.GPU_TENSOR_ACTIVE, gpu(1)).value

    wait_until(lambda: activity() == 0.075, 5, "a second GPM sample")


@pytest.mark.parametrize("nonsense", ["nan", "101.0", "-1.0"])
def test_tensor_activity_that_can_not_be_is_none(
    source: NvmlSource, state: NvmlState, clock: FakeClock, nonsense: str
) -> None:
    state.set(1, "gpm.5", nonsense)
    seen: list[float | None] = []

    def others_have_one() -> bool:
        look = read_after(source, clock)
        seen.append(of(look, Signal.GPU_TENSOR_ACTIVE, gpu(1)).value)
        return of(look, Signal.GPU_TENSOR_ACTIVE, gpu(0)).value == 0.415

    wait_until(others_have_one, 5, "a second GPM sample of GPU 0")
    assert set(seen) == {None}


def test_c089_an_unreadable_temperature_leaves_the_gpu_listed(source: NvmlSource, state: NvmlState) -> None:
    state.unset(3, "temp")
    seen = source.read()
    assert [listed.uuid for listed in seen.gpus] == [gpu(index) for index in range(4)]
    reading = of(seen, Signal.GPU_TEMPERATURE, gpu(3))
    assert (reading.value, reading.status, reading.cause) == (None, Status.UNSUPPORTED, "NOT_SUPPORTED")
    assert of(seen, Signal.GPU_ANSWERS, gpu(3)).status is Status.OK
    assert of(seen, Signal.GPU_MARGIN, gpu(3)).value == 26.0


def test_what_a_gpu_does_not_have_is_asked_once_and_again_after_an_hour(
    source: NvmlSource, state: NvmlState, clock: FakeClock, library: Path
) -> None:
    state.unset(0, "margin")
    state.set(0, "gpm", 0)
    counted = ("nvmlDeviceGetMarginTemperature", "nvmlGpmSampleGet")

    def calls_in_three_looks(index: int) -> list[int]:
        before = [fake_nvml.calls(library, function, index) for function in counted]
        for _ in range(3):
            read_after(source, clock)
        return [fake_nvml.calls(library, f, index) - b for f, b in zip(counted, before, strict=True)]

    assert calls_in_three_looks(0) == [1, 1]
    assert calls_in_three_looks(1)[0] == 3
    assert Signal.GPU_MARGIN not in {r.signal for r in source.read().readings if r.subject == gpu(0)}
    assert of(read_after(source, clock, SLOW_S), Signal.GPU_TENSOR_ACTIVE, gpu(0)).status is Status.UNSUPPORTED
    state.set(0, "margin", 26)
    assert of(read_after(source, clock, 3600.0), Signal.GPU_MARGIN, gpu(0)).value == 26


def test_a_gpu_with_no_values_at_all_still_answers(source: NvmlSource, state: NvmlState) -> None:
    for key in ("temp", "margin", "gpm"):
        state.unset(0, key)
    for _ in range(2):
        assert of(source.read(), Signal.GPU_ANSWERS, gpu(0)).status is Status.OK


@pytest.mark.parametrize("code", [13, 25, 26])
def test_an_older_driver_is_asked_the_older_way(source: NvmlSource, state: NvmlState, code: int) -> None:
    state.set_all("temp_v", f"!{code}")
    assert of(source.read(), Signal.GPU_TEMPERATURE, gpu(0)).value == 61.0


@pytest.mark.parametrize(
    ("code", "status", "cause"),
    [
        (3, Status.UNSUPPORTED, "NOT_SUPPORTED"),
        (4, Status.NO_PERMISSION, "NO_PERMISSION"),
        (10, Status.TIMEOUT, "TIMEOUT"),
        (11, Status.LOST, "IRQ_ISSUE"),
        (15, Status.LOST, "GPU_IS_LOST"),
        (16, Status.LOST, "RESET_REQUIRED"),
        (21, Status.STALE, "NO_DATA"),
        (27, Status.STALE, "NOT_READY"),
        (28, Status.LOST, "GPU_NOT_FOUND"),
        (999, Status.STALE, "UNKNOWN"),
        (777, Status.STALE, "CODE_777"),
    ],
)
def test_each_code_of_one_call(source: NvmlSource, state: NvmlState, code: int, status: Status, cause: str) -> None:
    state.set(1, "temp", f"!{code}")
    seen = source.read()
    reading = of(seen, Signal.GPU_TEMPERATURE, gpu(1))
    assert (reading.value, reading.status, reading.cause) == (None, status, cause)
    # Only what speaks of the whole GPU does; a single value may be missing for a hundred reasons.
    answers = of(seen, Signal.GPU_ANSWERS, gpu(1))
    assert answers.cause == (cause if status is Status.LOST else None)
    assert of(seen, Signal.GPU_TEMPERATURE, gpu(2)).value == 61.0


@pytest.mark.parametrize("code", [10, 15, 16, 999])
def test_c094_a_dead_gpu_fails_alone_and_keeps_its_name(source: NvmlSource, state: NvmlState, code: int) -> None:
    source.read()
    state.set(2, "error", code)
    state.set(2, "handle_error", code)
    for _ in range(3):
        seen = source.read()
        assert [listed.uuid for listed in seen.gpus] == [gpu(index) for index in range(4)]
        assert of(seen, Signal.GPU_ANSWERS, gpu(2)).cause == {10: "TIMEOUT", 15: "GPU_IS_LOST"}.get(
            code, "RESET_REQUIRED" if code == 16 else "UNKNOWN"
        )
        for index in (0, 1, 3):
            assert of(seen, Signal.GPU_TEMPERATURE, gpu(index)).value == 61.0


def test_c094_a_gpu_that_was_dead_from_the_start_is_listed_without_a_name(
    source: NvmlSource, state: NvmlState, node: NodeId
) -> None:
    state.set(1, "handle_error", 15)
    seen = source.read()
    assert [listed.index for listed in seen.gpus] == [0, 1, 2, 3]
    nameless = seen.gpus[1].uuid
    assert nameless == f"unidentified-{node[:12]}-1"
    assert of(seen, Signal.GPU_ANSWERS, nameless).cause == "GPU_IS_LOST"


def test_a_lost_gpu_is_not_asked_further(source: NvmlSource, state: NvmlState, library: Path) -> None:
    source.read()
    state.set(0, "error", 15)
    before = fake_nvml.calls(library, "nvmlDeviceGetMarginTemperature", 0)
    source.read()
    assert fake_nvml.calls(library, "nvmlDeviceGetMarginTemperature", 0) == before


def test_unknown_opens_a_new_session_once(source: NvmlSource, state: NvmlState, library: Path) -> None:
    source.read()
    state.set(0, "error", 999)
    before = fake_nvml.calls(library, "nvmlDeviceGetUUID", 1)
    for _ in range(5):
        assert of(source.read(), Signal.GPU_ANSWERS, gpu(0)).cause == "UNKNOWN"
    assert fake_nvml.calls(library, "nvmlDeviceGetUUID", 1) - before == 1, "one new session, not one a look"
    state.set(0, "error", 0)
    assert of(source.read(), Signal.GPU_ANSWERS, gpu(0)).status is Status.OK


def test_a_gpu_that_is_no_longer_listed_is_missed(source: NvmlSource, state: NvmlState) -> None:
    source.read()
    state.set_system("count", 3)
    assert of(source.read(), Signal.GPU_ANSWERS, gpu(3)).cause == "GPU_NOT_FOUND"


def test_c100_a_driver_that_comes_late_is_found_without_help(
    source: NvmlSource, state: NvmlState, node: NodeId, clock: FakeClock
) -> None:
    state.set_system("init_error", 9)
    seen = source.read()
    assert (seen.gpus, seen.error) == ((), "NVML: DRIVER_NOT_LOADED: Driver Not Loaded")
    assert of(seen, Signal.NVML_ANSWERS, node).cause == "DRIVER_NOT_LOADED"
    asked_at_s = []
    for second in range(1, 130):
        clock.advance(1)
        if source.read().readings:
            asked_at_s.append(second)
    assert asked_at_s == [1, 3, 7, 15, 31, 61, 91, 121]
    state.set_system("init_error", 0)
    clock.advance(30)
    assert len(source.read().gpus) == 4


def test_a_driver_that_goes_leaves_the_list_and_comes_back(
    source: NvmlSource, state: NvmlState, node: NodeId, clock: FakeClock
) -> None:
    source.read()
    state.set_system("error", 18)
    seen = source.read()
    assert of(seen, Signal.NVML_ANSWERS, node).cause == "LIB_RM_VERSION_MISMATCH"
    assert len(seen.gpus) == 4, "not known is not the same as not there"
    assert [reading.signal for reading in seen.readings] == [Signal.NVML_ANSWERS]
    state.set_system("error", 0)
    clock.advance(1)
    assert of(source.read(), Signal.GPU_TEMPERATURE, gpu(0)).value == 61.0


def test_c104_an_index_is_a_place_and_not_a_name(
    source: NvmlSource, state: NvmlState, clock: FakeClock, node: NodeId
) -> None:
    source.read()
    hot = GpuState(uuid=uuid_of("node-a", 0), temp=80)
    NvmlState(state.path, [*gpus_of("node-a", 4)[1:], hot])
    source.close()
    seen = source.read()
    assert of(seen, Signal.GPU_TEMPERATURE, gpu(0)).value == 80.0
    assert seen.gpus[3].uuid == gpu(0)
    assert all(of(seen, Signal.GPU_TEMPERATURE, gpu(index)).value == 61.0 for index in (1, 2, 3))


def test_no_library_is_no_driver(node: NodeId, tmp_path: Path) -> None:
    seen = NvmlSource(str(tmp_path / "libnvidia-ml.so.1"), node=node).read()
    assert of(seen, Signal.NVML_ANSWERS, node).cause == "LIBRARY_NOT_FOUND"
    assert seen.error is not None
    assert str(tmp_path) in seen.error


def test_another_library_in_the_same_process_is_not_read_by_mistake(
    source: NvmlSource, node: NodeId, tmp_path: Path
) -> None:
    source.read()
    other = fake_nvml.build(tmp_path)
    seen = NvmlSource(str(other), node=node).read()
    assert of(seen, Signal.NVML_ANSWERS, node).cause == "OTHER_LIBRARY"


@pytest.mark.parametrize("how", ["setting", "LD_LIBRARY_PATH"])
def test_both_ways_to_choose_the_library_work_in_a_fresh_process(library: Path, state: NvmlState, how: str) -> None:
    code = (
        "from tidegate.health.sources.nvml import NvmlSource\n"
        f"print(len(NvmlSource({str(library) if how == 'setting' else None!r}, node='n').read().gpus))"
    )
    environment = {fake_nvml.STATE_VARIABLE: str(state.path)}
    if how == "LD_LIBRARY_PATH":
        environment[how] = str(library.parent)
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout == "4\n"


def test_memory_and_the_processes_that_own_to_it(source: NvmlSource, state: NvmlState) -> None:
    """C033: memory that is taken while no process is listed."""
    state.set(0, "mem_used", 2338 * 2**20)
    state.set(0, "processes", 0)
    state.set(1, "processes", 3)
    seen = source.read()
    assert of(seen, Signal.GPU_MEMORY_USED, gpu(0)).value == 2338 * 2**20
    assert of(seen, Signal.GPU_PROCESSES, gpu(0)).value == 0
    assert of(seen, Signal.GPU_PROCESSES, gpu(1)).value == 3
    assert of(seen, Signal.GPU_PROCESSES, gpu(2)).status is Status.UNSUPPORTED


def test_a_sample_that_comes_late_is_no_gpu_without_gpm(library: Path, state: NvmlState) -> None:
    """On a busy machine the driver takes a sample long after it was asked for; the window begins then. Else the next
    one comes too soon for the driver, and after three of those a GPU would be taken for one that has no GPM."""
    connect(str(library))
    try:
        activity = Activity()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        causes: set[object] = set()
        for _ in range(4):
            activity.free()
            state.set(0, "delay_ms", 95)
            causes.update(activity.read(handle))
            state.set(0, "delay_ms", 0)
            began_s = time.monotonic()
            while not isinstance(answer := activity.read(handle)[0], float) and time.monotonic() - began_s < 5:
                causes.add(answer)
            assert answer == 0.415
        assert causes == {"NO_DATA"}
    finally:
        disconnect()
