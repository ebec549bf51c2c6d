"""The fake `libnvidia-ml.so.1`: build it, and say what its GPUs read.

The production code path runs unchanged, through the real nvidia-ml-py: give the library as `health.nvml_library` (or
its folder as `LD_LIBRARY_PATH`, then Ray itself finds the GPUs too) and the state file as the environment variable
`FAKE_NVML_STATE`. The keys stand at the top of `fake_nvml.c`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.ids import GpuId

STATE_VARIABLE = "FAKE_NVML_STATE"
LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("fake_nvml.c")


class NoCompilerError(TidegateError):
    """The fake library is C and nothing here compiles it."""

    def __str__(self) -> str:
        return "no C compiler (`cc`) to build the fake NVML with\nhint: install one, e.g. `apt-get install gcc`"


def build(folder: Path) -> Path:
    """Compile the fake into `folder` and return the library's path; a build that is newer than its source is kept.

    Raises:
        NoCompilerError: no `cc` on the PATH.
    """
    library = folder / LIBRARY
    if library.exists() and library.stat().st_mtime >= _SOURCE.stat().st_mtime:
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError()
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a process that has the old one mapped keeps it, and nobody loads half a library.
    half = folder / f".{LIBRARY}.{os.getpid()}"
    options = ["-std=c11", "-O2", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *options, "-o", str(half), str(_SOURCE)], check=True)
    half.replace(library)
    return library


def uuid_of(node: str, index: int) -> GpuId:
    """The UUID of one fake GPU: the same each time for the same node name and index."""
    return GpuId(f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node}.gpu.tidegate')}")


H100_LINKS = 18
H100 = {
    "clock.1": "1980",
    "clock.2": "2619",
    "clock_max.1": "1980",
    "reasons": "0x0",
    "power_limit_mw": "700000",
    "energy_mj": "81234567890",
    "persistence_mode": "1",
    "ecc_mode": "1",
    "ecc.0.0": "0",
    "ecc.0.1": "0",
    "ecc.1.0": "0",
    "ecc.1.1": "0",
    "rows": "0,0,0,0",
    "banks": "2560,0,0,0,0",
    "sram_threshold": "0",
    "pcie_gen": "5",
    "pcie_gen_max": "5",
    "pcie_width": "16",
    "pcie_width_max": "16",
    "fabric": "3,1,0",
    "mig": "0",
    "events": "0x8",
    "gpm.2": "97.0",
    "gpm.10": "38.5",
    "gpm.20": "1200.0",
    "gpm.21": "900.0",
    "gpm.60": "98000.0",
    "gpm.61": "97500.0",
    "field.82.0": "66",
    "field.194.0": "-2",
    "field.230.0": "0",
    "field.94.0": "0",
    "field.179.0": "0",
    "field.180.0": "0",
    "field.74.0": "0",
    "field.76.0": "0",
    "field.269.0": "0",
    "field.270.0": "0",
    "field.271.0": "0",
}
"""What a healthy H100 at work reads besides the rest of its `GpuState`; each GPU may have its own line instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What one GPU reads at first. The defaults are an H100's at work."""

    uuid: GpuId
    name: str = "NVIDIA H100 80GB HBM3"
    temp: int = 61
    """Core temperature, °C."""
    margin: int = 26
    """Degrees left to the slowdown limit."""
    util: int = 98
    """Percent."""
    power_mw: int = 640_000
    mem_total: int = 85_520_809_984
    """Bytes."""
    mem_used: int = 61_203_283_968
    """Bytes."""
    tensor_percent: float | None = 41.5
    """GPM metric 5; None = a GPU without GPM, as before Hopper."""
    links: int = H100_LINKS
    """NVLinks, all active and without errors; 0 = a card without NVLink."""


def gpus_of(node: str, count: int) -> tuple[GpuState, ...]:
    """`count` healthy H100s of the node called `node`."""
    return tuple(GpuState(uuid=uuid_of(node, index)) for index in range(count))


class NvmlState:
    """The state file. Each edit replaces the file, so a reader sees all of it or nothing of it.

    Several processes may hold one of these for the same file, one after the other: an edit starts from what lies there.
    """

    def __init__(self, path: Path, gpus: Iterable[GpuState] | None = None, *, driver: str = "570.86.15") -> None:
        """Write a new file for `gpus`, or edit the one that is there if none are given."""
        self.path = path
        if gpus is not None:
            self._write(_lines_of(tuple(gpus), driver))

    def set(self, gpu_index: int, key: str, value: object) -> None:
        """E.g. `set(3, "temp", 79)`, `set(3, "error", 15)`, `set(3, "margin", "!3")`."""
        self._edit(f"gpu.{gpu_index}.{key}", value)

    def set_all(self, key: str, value: object) -> None:
        """For all GPUs that have no value of their own."""
        self._edit(f"gpu.*.{key}", value)

    def set_system(self, key: str, value: object) -> None:
        """E.g. `set_system("init_error", 9)`."""
        self._edit(f"sys.{key}", value)

    def unset(self, gpu_index: int, key: str) -> None:
        """That GPU has no such value any more: it reads as not supported."""
        self._edit(f"gpu.{gpu_index}.{key}", None)

    def _edit(self, key: str, value: object | None) -> None:
        values = dict(line.split("=", 1) for line in self.path.read_text(encoding="utf-8").splitlines() if "=" in line)
        if value is None:
            values.pop(key, None)
        else:
            values[key] = str(value)
        self._write(values)

    def _write(self, values: dict[str, str]) -> None:
        half = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        half.write_text("".join(f"{key}={value}\n" for key, value in values.items()), encoding="utf-8")
        half.replace(self.path)


def calls(library: Path, function: str, gpu_index: int) -> int:
    """How often this process has called `function` on one GPU of the fake."""
    fake = ctypes.CDLL(str(library))
    fake.fake_nvml_calls.restype = ctypes.c_ulong
    return int(fake.fake_nvml_calls(function.encode(), ctypes.c_uint(gpu_index)))


def size_of(library: Path, struct: str) -> int:
    """Bytes of a struct as the fake was compiled, by nvidia-ml-py's name; 0 if the fake has no such struct."""
    fake = ctypes.CDLL(str(library))
    fake.fake_nvml_sizeof.restype = ctypes.c_ulong
    return int(fake.fake_nvml_sizeof(struct.encode()))


def _lines_of(gpus: tuple[GpuState, ...], driver: str) -> dict[str, str]:
    values = {"sys.driver": driver, "sys.count": str(len(gpus))}
    values |= {f"gpu.*.{key}": value for key, value in H100.items()}
    for link in range(max((gpu.links for gpu in gpus), default=0)):
        values |= {f"gpu.*.field.165.{link}": "1"}
        values |= {f"gpu.*.field.{counter}.{link}": "0" for counter in (161, 162, 163)}
    for index, gpu in enumerate(gpus):
        values[f"gpu.{index}.pci"] = f"00000000:{0x18 + index:02X}:00.0"
        values[f"gpu.{index}.field.91.0"] = str(gpu.links)
        for key in ("uuid", "name", "temp", "margin", "util", "power_mw", "mem_total", "mem_used"):
            values[f"gpu.{index}.{key}"] = str(getattr(gpu, key))
        if gpu.tensor_percent is not None:
            values[f"gpu.{index}.gpm"] = "1"
            values[f"gpu.{index}.gpm.5"] = str(gpu.tensor_percent)
    return values
