"""What a machine needs to be watched and to train, looked at once: what is wrong, and how to put it right.

Works without Ray and reads through the agent's own sources, so what it finds is what the agent will find.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate.health.fabric import bridges, fabric_manager, peer_memory
from tidegate.health.readings import CEILINGS, Reading, Round, Signal, Status
from tidegate.health.sources.host import HostSource
from tidegate.health.sources.infiniband import InfinibandSource
from tidegate.health.sources.kmsg import KmsgSource
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec

HERE = NodeId("this machine")
GPM_WINDOW_S = 0.2
"""Between the two samples that activity takes; NVML refuses less than 0.1 s."""
PROBE_BYTES = 64 * 2**20
SLOW_DISK_BYTES_PER_S = 200e6
"""Below this a checkpoint of a large model takes longer than the steps between two of them."""
LEAST_OPEN_FILES = 65_536
LEAST_SHM_RATIO = 0.3
"""Of the memory: Ray's object store lies there and takes as much by default."""
MOST_CLOCK_OFFSET_S = 0.05


class Found(StrEnum):
    GOOD = "good"
    NOTE = "note"
    """Not as it could be, or not there, and both may be meant so."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    found: Found
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this process; -1 is unlimited."""

    memlock_bytes: int
    open_files: int

    @staticmethod
    def here() -> Limits:
        return Limits(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def examine(
    spec: HealthSpec, limits: Limits, disk_speed: Callable[[Path], float], root: Path = Path("/")
) -> Iterator[Check]:
    """All checks, one after the other. `disk_speed`: bytes a second that can be written durably to a folder; `root`:
    where the machine's proc/ and sys/ lie."""
    seen = list(gpus(spec))
    yield from seen
    ports, checks = infiniband(spec)
    yield from checks
    if any(check.found is Found.GOOD for check in seen):
        yield from fabric(root, needs_rdma=ports > 0)
    yield kernel_log(spec)
    yield from limits_of(limits, needs_rdma=ports > 0)
    yield from host(spec)
    yield disk(spec, disk_speed)


def gpus(spec: HealthSpec) -> Iterator[Check]:
    source = NvmlSource(spec.nvml_library, node=HERE, middle_every_s=0.0)
    try:
        seen = source.read()
        if seen.error is not None or not seen.gpus:
            yield _no_driver(seen)
            return
        time.sleep(GPM_WINDOW_S)
        again = source.read()
    finally:
        source.close()
    dead = [r for r in _of(seen, Signal.GPU_ANSWERS) if r.value is None]
    if dead:
        text = f"{len(dead)} of {len(seen.gpus)} GPUs do not answer: {', '.join(sorted({str(r.cause) for r in dead}))}"
        yield Check(name="NVML", found=Found.WRONG, text=text, fix="nvidia-smi -q shows which; reset it or reboot")
    else:
        yield Check(name="NVML", found=Found.GOOD, text=f"the driver answers for {len(seen.gpus)} GPUs")
    yield _gpm(_of(again, Signal.GPU_TENSOR_ACTIVE))
    yield from _settings(seen)


def _no_driver(seen: Round) -> Check:
    cause = next((r.cause for r in _of(seen, Signal.NVML_ANSWERS) if r.cause), None)
    fixes: Mapping[str | None, tuple[Found, str]] = {
        "LIBRARY_NOT_FOUND": (
            Found.NOTE,
            "right on a machine without GPUs; else install the driver, or name its library as health.nvml_library",
        ),
        "DRIVER_NOT_LOADED": (Found.WRONG, "load the kernel module: `modprobe nvidia`, and see dmesg for why it isn't"),
        "LIB_RM_VERSION_MISMATCH": (Found.WRONG, "the driver was replaced under way: reboot, or reload its module"),
        None: (Found.NOTE, "the driver lists no GPU; `lspci -d 10de:` shows what is in the machine"),
    }
    found, fix = fixes.get(cause, (Found.WRONG, "run `nvidia-smi` for the driver's own words"))
    return Check(name="NVML", found=found, text=seen.error or "no GPU is listed", fix=fix)


def _gpm(readings: list[Reading]) -> Check:
    name = "tensor activity"
    statuses = {reading.status for reading in readings}
    if Status.NO_PERMISSION in statuses:
        fix = "run the agent as root or with CAP_SYS_ADMIN, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0"
        return Check(name=name, found=Found.WRONG, text="the driver keeps GPM from this user", fix=fix)
    if Status.OK in statuses:
        return Check(name=name, found=Found.GOOD, text="GPM answers")
    fix = "run a dcgm-exporter (health.sources.dcgm_url) with DCGM_FI_PROF_PIPE_TENSOR_ACTIVE in its list"
    causes = ", ".join(sorted({str(reading.cause) for reading in readings}))
    return Check(name=name, found=Found.NOTE, text=f"no GPM here ({causes}): older than Hopper, or MIG", fix=fix)


def _settings(seen: Round) -> Iterator[Check]:
    wanted = (
        (Signal.GPU_ECC_ENABLED, "ECC", 1.0, "is off", "nvidia-smi -e 1, then reboot"),
        (Signal.GPU_PERSISTENCE, "persistence", 1.0, "is off: the driver unloads between jobs", "nvidia-smi -pm 1"),
        (Signal.GPU_MIG, "MIG", 0.0, "is on: no gang uses these GPUs", "nvidia-smi -mig 0"),
        (Signal.GPU_RECOVERY_ACTION, "recovery", 0.0, "is asked for by the driver", "nvidia-smi -q says which: do it"),
        (Signal.GPU_ROW_PENDING, "row remapping", 0.0, "waits for a reset", "nvidia-smi -r, or reboot"),
        (Signal.GPU_ROW_FAILURE, "row remapping", 0.0, "has failed", "replace the GPU"),
        (Signal.GPU_NVLINKS_DOWN, "NVLink", 0.0, "has links down", "nvidia-smi nvlink -s; then reboot or replace"),
    )
    for signal, name, right, wrong, fix in wanted:
        off = [r for r in _of(seen, signal) if r.value is not None and r.value != right]
        if off:
            where = ", ".join(sorted(r.subject for r in off))
            yield Check(name=name, found=Found.WRONG, text=f"{name} {wrong} on {where}", fix=fix)


def infiniband(spec: HealthSpec) -> tuple[int, list[Check]]:
    """How many InfiniBand ports there are, and what is to be said of them."""
    name = "InfiniBand"
    seen = InfinibandSource(Path(spec.sources.ib_root), node=HERE).read()
    if seen.error is not None:
        return 0, [Check(name=name, found=Found.WRONG, text=seen.error, fix="mount the host's /sys into the container")]
    ports = {r.subject: r for r in _of(seen, Signal.IB_PORT_STATE)}
    if not ports:
        text = f"no port under {spec.sources.ib_root}"
        fix = "right on a machine without InfiniBand; else load mlx5_ib, or name the tree as health.sources.ib_root"
        return 0, [Check(name=name, found=Found.NOTE, text=text, fix=fix)]
    checks = []
    down = sorted(port for port, reading in ports.items() if reading.value != 4)
    fix = "ibstat; cable, switch port and subnet manager"
    if down:
        checks.append(Check(name=name, found=Found.WRONG, text=f"not active: {', '.join(down)}", fix=fix))
    else:
        checks.append(Check(name=name, found=Found.GOOD, text=f"{len(ports)} ports are active"))
    stuck = sorted({r.subject for r in seen.readings if r.value is not None and r.value == CEILINGS.get(r.signal)})
    if stuck:
        text = f"counters stand at their ceiling, more errors can't be seen: {', '.join(stuck)}"
        checks.append(Check(name="counters", found=Found.NOTE, text=text, fix="clear them: perfquery -R"))
    refused = sorted({r.subject for r in seen.readings if r.status is Status.NO_PERMISSION})
    if refused:
        text = f"counters may not be read: {', '.join(refused)}"
        checks.append(Check(name="counters", found=Found.WRONG, text=text, fix="run the agent as root"))
    return len(ports), checks


def fabric(root: Path, *, needs_rdma: bool) -> Iterator[Check]:
    """The ways between GPUs, and from them to the network. Only asked where there are GPUs. `root`: where proc/ and
    sys/ lie."""
    if needs_rdma:
        good, text = peer_memory(root)
        fix = "" if good else "modprobe nvidia-peermem, or install the open kernel modules: else every byte goes by CPU"
        yield Check(name="GPUDirect RDMA", found=Found.GOOD if good else Found.WRONG, text=text, fix=fix)
    short, text = bridges(root)
    fix = "" if short else "turn ACS off on these bridges: in the BIOS, or `setpci -s BRIDGE ECAP_ACS+6.w=0000` at boot"
    found = {True: Found.GOOD, False: Found.WRONG, None: Found.NOTE}[short]
    yield Check(name="PCIe peers", found=found, text=text, fix=fix if short is False else "")
    manager = fabric_manager(root)
    if manager is not None:
        runs, text = manager
        fix = "systemctl enable --now nvidia-fabricmanager, of the driver's own version" if runs is False else ""
        found = {True: Found.GOOD, False: Found.WRONG, None: Found.NOTE}[runs]
        yield Check(name="fabric manager", found=found, text=text, fix=fix)


def kernel_log(spec: HealthSpec) -> Check:
    name, path = "kernel log", spec.sources.kmsg
    if path is None:
        text, fix = "not followed", "name it as health.sources.kmsg: it tells XIDs of GPUs that no longer answer"
        return Check(name=name, found=Found.NOTE, text=text, fix=fix)
    source = KmsgSource(Path(path).expanduser(), node=HERE)
    (answers,) = _of(source.read(), Signal.KMSG_ANSWERS)
    source.close()
    if answers.value is not None:
        return Check(name=name, found=Found.GOOD, text=f"{path} can be followed")
    fix = "run the agent as root or with CAP_SYSLOG, or set kernel.dmesg_restrict=0; in a container, mount /dev/kmsg"
    return Check(name=name, found=Found.WRONG, text=f"{path}: {answers.cause}", fix=fix)


def limits_of(limits: Limits, *, needs_rdma: bool) -> Iterator[Check]:
    if limits.memlock_bytes == resource.RLIM_INFINITY:
        yield Check(name="locked memory", found=Found.GOOD, text="unlimited")
    else:
        text = f"{limits.memlock_bytes} bytes at most" + ("; RDMA needs all it wants" if needs_rdma else "")
        fix = "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)"
        yield Check(name="locked memory", found=Found.WRONG if needs_rdma else Found.NOTE, text=text, fix=fix)
    enough = limits.open_files == resource.RLIM_INFINITY or limits.open_files >= LEAST_OPEN_FILES
    fix = "" if enough else f"ulimit -n {LEAST_OPEN_FILES} (limits.conf: nofile; systemd: LimitNOFILE)"
    text = f"{limits.open_files} at most" if limits.open_files != resource.RLIM_INFINITY else "unlimited"
    yield Check(name="open files", found=Found.GOOD if enough else Found.NOTE, text=text, fix=fix)


def host(spec: HealthSpec) -> Iterator[Check]:
    disks = [path for text in spec.sources.disks if (path := Path(text).expanduser()).exists()]
    seen = HostSource(node=HERE, disks=disks).read()
    value = {r.signal: r.value for r in seen.readings if r.subject == HERE}
    size, free = value.get(Signal.HOST_SHM_SIZE), value.get(Signal.HOST_MEMORY_AVAILABLE)
    ratio = value.get(Signal.HOST_MEMORY_AVAILABLE_RATIO)
    fix = "mount it larger: mount -o remount,size=50% /dev/shm; docker: --shm-size"
    if size is None or free is None or not ratio:
        yield Check(name="/dev/shm", found=Found.WRONG, text="can't be read", fix="mount a tmpfs at /dev/shm")
    else:
        enough = size >= LEAST_SHM_RATIO * free / ratio
        text = f"{size / 2**30:.1f} GiB, {100 * size * ratio / free:.0f} % of the memory"
        found = Found.GOOD if enough else Found.WRONG
        yield Check(name="/dev/shm", found=found, text=text, fix="" if enough else fix)
    for reading in _of(seen, Signal.HOST_DISK_WRITABLE):
        if reading.value == 0:
            text = f"{reading.subject.removeprefix('disk:')} is mounted read-only"
            yield Check(name="disk", found=Found.WRONG, text=text, fix="dmesg says why; check it and mount it anew")
    yield _clock(next(iter(_of(seen, Signal.HOST_CLOCK_OFFSET)), None))


def _clock(reading: Reading | None) -> Check:
    fix = "run chrony or another time service; nodes are compared by their clocks"
    if reading is None or reading.value is None:
        cause = reading.cause if reading is not None else "not asked"
        return Check(name="clock", found=Found.NOTE, text=f"no offset is known: {cause}", fix=fix)
    good = abs(reading.value) < MOST_CLOCK_OFFSET_S
    text = f"off by {1000 * reading.value:.1f} ms"
    return Check(name="clock", found=Found.GOOD if good else Found.WRONG, text=text, fix="" if good else fix)


def disk(spec: HealthSpec, disk_speed: Callable[[Path], float]) -> Check:
    folder = spec.state_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        speed = disk_speed(folder)
    except OSError as error:
        fix = "make it writable, or name another as health.state_dir"
        return Check(name="disk speed", found=Found.WRONG, text=f"{folder}: {error.strerror}", fix=fix)
    good = speed >= SLOW_DISK_BYTES_PER_S
    text = f"{speed / 1e6:.0f} MB/s are written durably to {folder}"
    fix = (
        "" if good else "checkpoints go to a local NVMe disk (their fast tier), not to a network or overlay file system"
    )
    return Check(name="disk speed", found=Found.GOOD if good else Found.NOTE, text=text, fix=fix)


def durable_write_speed(folder: Path, size_bytes: int = PROBE_BYTES) -> float:
    """Bytes a second, file closed and on the disk.

    Raises:
        OSError: the folder can't be written, or is full.
    """
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began_s = time.perf_counter()
        for _ in range(size_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size_bytes / (time.perf_counter() - began_s)


def _of(seen: Round, signal: Signal) -> list[Reading]:
    return [reading for reading in seen.readings if reading.signal is signal]
