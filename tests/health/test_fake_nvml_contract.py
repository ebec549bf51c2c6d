"""The fake sits the exam of the bindings that call it: every symbol is there, every struct has the same size."""

from __future__ import annotations

import ctypes
import inspect
import re
from pathlib import Path
from types import ModuleType

import pynvml
import pytest
import ray._private.thirdparty.pynvml.pynvml as rays_pynvml

from tidegate.health.sources import nvml, nvml_events, nvml_gpm, nvml_links, nvml_session, nvml_values
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of

RAY_ASKS = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
)
"""What Ray needs to find GPUs and to show them (`_private/accelerators/nvidia_gpu.py`, `reporter/gpu_providers.py`)."""


def symbols(bindings: ModuleType, function: str) -> set[str]:
    """The C functions behind one function of nvidia-ml-py."""
    source = inspect.getsource(inspect.unwrap(getattr(bindings, function)))
    found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    for called in set(re.findall(r"\b(nvml[A-Z]\w+)\(", source)) - {function}:
        found |= symbols(bindings, called)
    return found


def test_the_fake_has_every_function_that_our_source_calls(library: Path) -> None:
    asked = {
        function
        for module in (nvml, nvml_events, nvml_gpm, nvml_links, nvml_session, nvml_values)
        for function in re.findall(r"pynvml\.(nvml[A-Z]\w+)", inspect.getsource(module))
        if inspect.isfunction(getattr(pynvml, function))
    }
    assert {"nvmlInit", "nvmlDeviceGetTemperatureV", "nvmlGpmMetricsGet", "nvmlEventSetWait_v2"} <= asked
    fake = ctypes.CDLL(str(library))
    wanted = set().union(*(symbols(pynvml, function) for function in asked)) | {"nvmlDeviceGetFieldValues"}
    assert [symbol for symbol in sorted(wanted) if not hasattr(fake, symbol)] == []


def test_the_fake_has_every_function_that_ray_calls(library: Path) -> None:
    fake = ctypes.CDLL(str(library))
    wanted = set().union(*(symbols(rays_pynvml, function) for function in RAY_ASKS))
    assert [symbol for symbol in sorted(wanted) if not hasattr(fake, symbol)] == []


@pytest.mark.parametrize(
    "struct",
    [
        "c_nvmlTemperature_v1_t",
        "c_nvmlMarginTemperature_v1_t",
        "c_nvmlUtilization_t",
        "c_nvmlMemory_t",
        "c_nvmlMemory_v2_t",
        "c_nvmlProcessInfo_v2_t",
        "c_nvmlFieldValue_t",
        "c_nvmlRowRemapperHistogramValues",
        "c_nvmlEccSramErrorStatus_v1_t",
        "c_nvmlGpuFabricInfo_v3_t",
        "nvmlPciInfo_t",
        "c_nvmlEventData_t",
        "c_nvmlGpmMetric_t",
        "c_nvmlGpmMetricsGet_t",
    ],
)
def test_structs_have_the_size_that_the_bindings_pass(library: Path, struct: str) -> None:
    assert fake_nvml.size_of(library, struct) == ctypes.sizeof(getattr(pynvml, struct))


def test_field_values_carry_their_own_code_and_sign(source: NvmlSource, state: NvmlState) -> None:
    state.set(1, "field.230.0", 2)
    state.set(1, "field.194.0", -2)
    state.set(1, "field.82.0", "!3")
    source.read()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    action, slowdown, hbm = pynvml.nvmlDeviceGetFieldValues(handle, [230, 194, 82])
    assert (action.nvmlReturn, action.value.ullVal) == (0, 2)
    assert (slowdown.valueType, slowdown.value.siVal) == (pynvml.NVML_VALUE_TYPE_SIGNED_INT, -2)
    assert hbm.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_our_reading_of_a_field_values_bytes_is_the_bindings_own(source: NvmlSource, state: NvmlState) -> None:
    texts = {230: "2", 194: "-2", 82: "!3", 94: "1.5", 74: str(2**53), 91: "!999"}
    for field_id, text in texts.items():
        state.set(1, f"field.{field_id}.0", text)
    source.read()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    members = {0: "dVal", 3: "ullVal", 5: "siVal"}
    theirs = [
        getattr(value.value, members[value.valueType])
        if value.nvmlReturn == 0
        else nvml_values.code_name(value.nvmlReturn)
        for value in pynvml.nvmlDeviceGetFieldValues(handle, list(texts))
    ]
    assert nvml_values.FieldBatch([(field_id, 0) for field_id in texts]).read(handle) == theirs
    assert ctypes.sizeof(pynvml.c_nvmlFieldValue_t) == nvml_values._FIELD_VALUE.size
    assert ctypes.sizeof(pynvml.c_nvmlGpmMetric_t) == nvml_gpm._METRIC.size


def test_ray_finds_the_gpus(library: Path, state: NvmlState, source: NvmlSource) -> None:
    source.read()  # maps the fake, as LD_LIBRARY_PATH would
    rays_pynvml.nvmlInit()
    handle = rays_pynvml.nvmlDeviceGetHandleByIndex(3)
    assert rays_pynvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
    assert rays_pynvml.nvmlDeviceGetUUID(handle) == fake_nvml.uuid_of("node-a", 3)
    assert rays_pynvml.nvmlDeviceGetMemoryInfo(handle).total == 85_520_809_984
    assert rays_pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 98
    assert rays_pynvml.nvmlDeviceGetPowerUsage(handle) == 640_000
    assert rays_pynvml.nvmlDeviceGetTemperature(handle, 0) == 61
    rays_pynvml.nvmlShutdown()


def test_uuids_are_the_same_each_time_and_differ_between_nodes() -> None:
    assert gpus_of("node-a", 2) == gpus_of("node-a", 2)
    assert len({gpu.uuid for node in ("node-a", "node-b") for gpu in gpus_of(node, 8)}) == 16
    assert re.fullmatch(r"GPU(-[0-9a-f]{4,12}){5}", fake_nvml.uuid_of("node-a", 0))


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fake_nvml.NoCompilerError, match="hint: install"):
        fake_nvml.build(tmp_path / "lib")


def test_the_source_reads_the_node_that_it_was_told(source: NvmlSource, node: NodeId) -> None:
    assert {reading.node for reading in source.read().readings} == {node}
