"""What `h200.py` measures, each in a process of its own; its figures are the last line, as JSON.

python -m benchmarks.contenders.one_gpu --part loop --folder DIR --size full
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from benchmarks.contenders.saves import Loop, about, only_rank

from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.folders import SlotFolder
from tidegate.checkpoint.ring import shared_ring
from tidegate.data.text import ByteText
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.train.config import RunConfig
from tidegate.train.loop import run
from tidegate.train.model import build, positions, velocity
from tidegate.train.objective import loss_sum, mix, times_of
from tidegate.train.progress import NullProgress

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS, STEPS = 15, 25
SAVES = 5
READS = 50
LENGTH = 64
"""Bytes of a caption that the network sees."""

FULL: Mapping[str, Any] = {
    "side": 64,
    "batch": 256,
    "compile": "inductor",
    "model": {},
    "stack": {"width": 4096, "layers": 11, "batch": 32_768},
}
"""Krea 2's shape at 220 M parameters over 256 image tokens; the stack's step takes some 0.2 s."""
TINY: Mapping[str, Any] = {
    "side": 8,
    "batch": 8,
    "compile": "none",
    "model": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "text_intermediate_size": 64,
    },
    "stack": {"width": 64, "layers": 2, "batch": 8},
}
PATCH = 4
SIZES = {"full": FULL, "tiny": TINY}


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def settled() -> float:
    """Now, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def config_of(size: Mapping[str, Any]) -> RunConfig:
    """`jobs/configs/base.yaml` over plain pictures and captions, which need no encoders."""
    values = yaml.safe_load((ROOT / "jobs/configs/base.yaml").read_text(encoding="utf-8"))
    del values["stages"]
    values["image"] = {"width": size["side"], "height": size["side"], "channels": 3, "patch": PATCH}
    values["text"] = {"length": LENGTH, "width": 512}
    values["model"] |= {"in_channels": 3 * PATCH**2, "num_text_layers": 1, **size["model"]}
    values["optimizer"] |= {"warmup_steps": 5, "decay_steps": 5}
    values |= {
        "steps": WARM_UP_STEPS + STEPS,
        "global_batch": size["batch"],
        "compile": size["compile"],
        "objective": {},
        "checkpoint": {"every_steps": 1_000_000},
        "tensorboard": False,
    }
    return RunConfig.model_validate_json(json.dumps(values))


def loop(folder: Path, size: Mapping[str, Any]) -> dict[str, float]:
    """The product's own, over a data set in `folder/data`; the median step, the wait for its batch included."""
    run(config_of(size), folder / "data", folder / "run", NullProgress())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = rows[WARM_UP_STEPS:]
    found = {name: statistics.median(row[name] for row in timed) for name in ("step_s", "input_s", "tflops")}
    return found | {"mfu": statistics.median(row["mfu"] or 0.0 for row in timed)}


def written(folder: Path, size: Mapping[str, Any]) -> dict[str, float]:
    """As one writes it for one GPU: the whole network compiled, autocast, fused AdamW, a batch that never leaves the
    GPU, and nothing that makes the CPU wait."""
    config, where = config_of(size), device()
    network = build(config.model).to(where)
    compiled = torch.compile(network) if config.compile == "inductor" else network
    spec = config.optimizer
    optimizer = torch.optim.AdamW(network.parameters(), lr=spec.lr, betas=spec.betas, fused=True)
    image = torch.randn(config.global_batch, config.image.tokens, config.model.in_channels, device=where)
    text = ByteText(config.text.length, config.text.width, config.text.seed)
    states, mask = (part.to(where) for part in text.encode(["a photograph"] * config.global_batch))
    places = positions(config.text.length, config.image).to(where)

    def step() -> None:
        noise = torch.randn_like(image)
        times = times_of(torch.randn(len(image), device=where), config.objective)
        with torch.autocast(where.type, torch.bfloat16):
            guess = velocity(compiled, mix(image, noise, times), states, mask, times, places)
        loss = loss_sum(guess.float(), image, noise) / len(image)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    began_s = settled()
    for _ in range(STEPS):
        step()
    return {"step_s": (settled() - began_s) / STEPS}


def stall(folder: Path, size: Mapping[str, Any]) -> dict[str, float]:
    """What a save of 2.06 GiB on the GPU makes training wait, against one copy into pinned memory."""
    torch.backends.cuda.matmul.allow_tf32 = True
    with only_rank(folder), device():
        loop = Loop(**size["stack"])
        source = list(loop.state().values())
        pinned = [torch.empty(one.shape, pin_memory=torch.cuda.is_available(), device="cpu") for one in source]

        def copy() -> None:
            torch._foreach_copy_(pinned, source, non_blocking=True)

        memory = SlotFolder(Path("/dev/shm/tidegate-bench") / str(os.getpid()))
        parts = loop.parts()
        ring = shared_ring(memory, parts, rank=0, local_rank=0, newest=None)
        saver = Saver(folder, parts, group=dist.new_group(backend="gloo"), generation=0, keep=1, ring=ring)
        waited = [0.0]

        def before_update() -> None:
            settled()
            began_s = time.perf_counter()
            saver.wait_copied()
            waited[0] = time.perf_counter() - began_s

        try:
            copies, idle, stalls, saving = [], [], [], []
            for number in range(SAVES + 1):  # the first warms up
                copies.append(_timed(copy))
                idle.append(_timed(lambda: loop.step()))
                began_s = settled()
                saver.start(about(number))
                started_s = time.perf_counter() - began_s
                saving.append(_timed(lambda: loop.step(before_update)) - waited[0])
                stalls.append(started_s + waited[0])
                outcome = saver.finish()
                if outcome is None or outcome.error is not None:
                    raise RuntimeError(f"the save failed: {outcome}")
        finally:
            saver.close()
            memory.let_go()
            memory.remove()
    figures = {"copy_s": copies, "idle_step_s": idle, "stall_s": stalls, "saving_step_s": saving}
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def nvml(folder: Path, size: Mapping[str, Any]) -> dict[str, float]:
    """One reading of every signal of every GPU, as the health agent takes it."""
    source = NvmlSource(os.environ.get("TIDEGATE_NVML_LIBRARY"), node=NodeId("bench"))
    try:
        first = source.read()
        if first.error is not None:
            raise RuntimeError(first.error)
        took = []
        for _ in range(READS):
            began_s = time.perf_counter()
            found = source.read()
            took.append(time.perf_counter() - began_s)
            time.sleep(0.1)  # samples of tensor activity that are closer mean nothing
        print("; ".join(f"{one.signal} {one.value if one.cause is None else one.cause}" for one in found.readings))
    finally:
        source.close()
    return {"read_s": statistics.median(took) / len(found.gpus), "longest_s": max(took)}


def _timed(what: Callable[[], object]) -> float:
    began_s = settled()
    what()
    return settled() - began_s


PARTS: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, float]]] = {
    "loop": loop,
    "written": written,
    "stall": stall,
    "nvml": nvml,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    arguments = parser.parse_args()
    print(json.dumps(PARTS[arguments.part](arguments.folder, SIZES[arguments.size])), flush=True)


if __name__ == "__main__":
    main()
