"""The work of a burn-in, on whatever devices there are: products, copies, sums over processes. Each part runs in a
process of its own, so that one that hangs or dies is a failed check and nothing else.

    python -m tidegate.health.burning '{"part": "gpu", ...}'     prints one line of JSON
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate.health.marks import Marks, Measure, marks_of
from tidegate.processes import end_with_parent

SEED = 20_260_101
WARM_UP = 2


def run_parts(
    parts: Sequence[Mapping[str, Any]], environments: Sequence[Mapping[str, str]], deadline_s: float
) -> list[dict[str, Any]]:
    """All at once, each in its own process; what each has printed, or `{"failed": why}`."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tidegate.health.burning", json.dumps(part)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part, environment in zip(parts, environments, strict=True)
    ]
    ends_s = time.monotonic() + deadline_s
    return [_answer(process, ends_s, deadline_s) for process in processes]


def _answer(process: subprocess.Popen[str], ends_s: float, deadline_s: float) -> dict[str, Any]:
    try:
        out, error = process.communicate(timeout=max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"no end within {deadline_s:g} s"}
    if process.returncode != 0:
        last = error.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"failed": last[0]}
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def on_gpu(marks: Marks | None) -> dict[str, Any]:
    """Products and copies on this process's first device, of whichever model it is."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    marks = marks or marks_of(model)
    torch.manual_seed(SEED)
    a, b = (torch.randn(marks.gemm_side, marks.gemm_side).to(device, torch.bfloat16) for _ in range(2))
    sums = hashlib.sha256()
    product = a
    for _ in range(3):  # a chain: a wrong bit spreads
        product = (product @ b) / marks.gemm_side**0.5
    sums.update(product.float().cpu().numpy().tobytes())
    flops = 2.0 * marks.gemm_side**3
    per_s = _rate(lambda: torch.matmul(a, b), _wait(device), marks.gemm_s)
    there = torch.empty(marks.copy_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here = torch.empty(marks.copy_bytes, dtype=torch.uint8, device=device)
    found = {
        Measure.GEMM: flops * per_s / 1e12,
        Measure.TO_DEVICE: marks.copy_bytes * _rate(lambda: here.copy_(there), _wait(device), 0.2) / 1e9,
        Measure.TO_HOST: marks.copy_bytes * _rate(lambda: there.copy_(here), _wait(device), 0.2) / 1e9,
    }
    if torch.cuda.device_count() > 1:
        peer = torch.empty(marks.copy_bytes, dtype=torch.uint8, device="cuda:1")
        found[Measure.PEER] = marks.copy_bytes * _rate(lambda: peer.copy_(here), _wait(device), 0.2) / 1e9
    return {"measured": {str(name): value for name, value in found.items()}, "sum": sums.hexdigest(), "model": model}


def in_group(rank: int, size: int, address: str, port: int, marks: Marks, timeout_s: float) -> dict[str, Any]:
    """Sum over `size` processes; busbw in GB/s, and whether the sum was right."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    cuda = torch.cuda.is_available()
    store = TCPStore(address, port, size, rank == 0, timedelta(seconds=timeout_s))
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        data = torch.full((marks.reduce_bytes // 4,), 1.0, device=device)
        dist.all_reduce(data)
        right = bool((data == float(size)).all().item())
        count, wait = 5, _wait(device)
        wait()
        began_s = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(data)
        wait()
        seconds = time.perf_counter() - began_s
        dist.barrier()
    finally:
        dist.destroy_process_group()
    algbw = count * marks.reduce_bytes / seconds
    return {"busbw_gbytes_per_s": algbw * 2 * (size - 1) / size / 1e9, "right": right}


def _wait(device: Any) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _rate(work: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    """How often a second it can be done."""
    for _ in range(WARM_UP):
        work()
    wait()
    began_s, count = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds or count < 2:
        work()
        count += 1
        if count % 16 == 0:
            wait()
    wait()
    return count / (time.perf_counter() - began_s)


def main(told: str) -> None:
    from pydantic import TypeAdapter

    end_with_parent()
    part = json.loads(told)
    marks = TypeAdapter(Marks | None).validate_python(part["marks"])
    if part["part"] == "gpu":
        answer = on_gpu(marks)
    else:
        assert marks is not None
        answer = in_group(part["rank"], part["size"], part["address"], part["port"], marks, part["timeout_s"])
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
