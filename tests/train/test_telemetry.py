"""What a run tells of itself: pace, phases, memory, TensorBoard, samples, and a loss that stays higher."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import group, lines, losses, train
from tensorboardX.proto.event_pb2 import Event
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from captioned import tiny_run
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.marks import Mark
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.train.board import Board
from tidegate.train.config import GuardSpec, ImageSpec, RunConfig, TextSpec
from tidegate.train.flops import forward_flops, pace, peak_tflops_of, training_flops
from tidegate.train.grids import tiled
from tidegate.train.level import Level, Shift, watch
from tidegate.train.loop import run
from tidegate.train.model import build, positions, velocity
from tidegate.train.pinning import pin
from tidegate.train.progress import NullProgress

CONFIG = tiny_run()
SPEC = GuardSpec()


# FLOPs


@pytest.mark.parametrize("layerwise", [0, 2])
def test_the_formula_counts_what_torch_counts(layerwise: int) -> None:
    """Forward to the last operation. Backward, torch counts no product for the gradient of an input that needs none:
    three forward passes are a little more, and more so the smaller the network."""
    layers = 3 if layerwise else 1
    changes = {"num_layerwise_text_blocks": layerwise, "num_text_layers": layers, "text_hidden_dim": 8, "num_layers": 6}
    model = CONFIG.model.model_copy(update=changes)
    image, text = ImageSpec(width=16, height=12, channels=1, patch=2), TextSpec(length=6, width=8)
    network = build(model)
    given = torch.randn(2, image.tokens, 4), torch.randn(2, 6, layers, 8), torch.ones(2, 6, dtype=torch.bool)
    # The kernel that torch takes on a CPU is not in its own counter's table.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        guess = velocity(network, *given, torch.rand(2), positions(6, image))
        assert counter.get_total_flops() == 2 * forward_flops(model, image, text)
        guess.sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * training_flops(model, image, text), rel=0.02)


def test_krea_2_at_1024() -> None:
    """krea2.md 1.13: about 127 TFLOP a forward pass with 4096 image tokens and 512 of text."""
    from tidegate.spec.load import load_model

    config = load_model(Path(__file__).parents[2] / "jobs" / "configs" / "krea2.yaml", RunConfig)
    assert forward_flops(config.model, config.image, config.text) / 1e12 == pytest.approx(127, rel=0.03)


def test_mfu_is_the_share_of_the_peak() -> None:
    found = pace(image_flops=2e12, images=16, seconds=0.5, devices=8, peak_tflops=80.0)
    assert (found.images_per_s, found.tflops, found.mfu) == (32.0, 8.0, 0.1)
    assert pace(image_flops=2e12, images=16, seconds=0.5, devices=8, peak_tflops=None).mfu is None
    assert peak_tflops_of("NVIDIA H100 PCIe") == 756
    assert peak_tflops_of("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops_of("NVIDIA L40S") == 362
    assert peak_tflops_of("something new") is None


# Records


def test_every_step_has_its_pace_and_now_and_then_memory_and_phases(data: Path, tmp_path: Path) -> None:
    config = tiny_run(log_every_steps=5, peak_tflops=0.001)
    run(config, data, tmp_path, NullProgress())
    found = lines(tmp_path, "metrics.jsonl")
    assert len(found) == 12
    for line in found:
        seconds = line["step_s"] + line["input_s"]
        assert line["images_per_s"] == pytest.approx(7 / seconds, rel=0.01)
        flops = training_flops(config.model, config.image, config.text)
        assert line["tflops"] == pytest.approx(7 * flops / seconds / 1e12, rel=0.01)
        assert line["mfu"] == pytest.approx(line["tflops"] / 0.001, rel=0.01)
    assert [line["rate"] for line in found[:3]] == [0.005, 0.01, 0.01]
    told = [line for line in found if "memory_bytes" in line]
    assert [line["step"] for line in told] == [5, 10]
    assert told[1]["memory_bytes"] > 50e6
    first, second = (line["phases_s"] for line in told)
    assert set(second) == {"starting", "rendezvous", "restoring", "warming", "stepping", "saving"}
    assert second["stepping"] >= first["stepping"] > 0


def events(folder: Path) -> Iterable[Event]:
    """What TensorBoard's files say: records of length, its checksum, the event and its checksum."""
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        at = 0
        while at < len(raw):
            (length,) = struct.unpack_from("<Q", raw, at)
            yield Event.FromString(raw[at + 12 : at + 12 + length])
            at += 16 + length


def test_tensorboard_files_have_the_same_numbers(data: Path, tmp_path: Path) -> None:
    how = {"steps": 2, "every_steps": 6, "prompts": ("white", "black", "grey"), "guidance": 1.0}
    run(tiny_run(log_every_steps=4, sample=how), data, tmp_path, NullProgress())
    found = [(event.step, value) for event in events(tmp_path / "tensorboard") for value in event.summary.value]
    scalars = {(step, value.tag): value.simple_value for step, value in found if not value.HasField("image")}
    assert {step for step, _ in scalars} == {4, 8, 12}
    for line in lines(tmp_path, "metrics.jsonl"):
        if line["step"] in (4, 8, 12):
            for name in ("loss", "grad_norm", "images_per_s", "tflops", "step_s"):
                assert scalars[line["step"], f"train/{name}"] == pytest.approx(line[name])
    images = {step: value.image for step, value in found if value.HasField("image")}
    assert {step: (image.width, image.height) for step, image in images.items()} == {6: (8, 8), 12: (8, 8)}


def test_none_where_none_is_wanted(data: Path, tmp_path: Path) -> None:
    run(tiny_run(tensorboard=False), data, tmp_path, NullProgress())
    assert not (tmp_path / "tensorboard").exists()


def test_a_board_that_cannot_write_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    board = Board(tmp_path / "file")
    for step in range(3):
        board.scalars(step, {"loss": 1.0})
    board.close()
    assert "no more TensorBoard files" in caplog.text


# Samples


def test_a_grid_changes_nothing_and_is_the_same_at_any_world_size(data: Path, tmp_path: Path) -> None:
    """Three prompts on two ranks: one draws two of them."""
    how = {"steps": 2, "every_steps": 4, "prompts": ("white", "black", "grey"), "seed": 5}
    for name, changes in (("without", {}), ("with", {"sample": how})):
        config = tiny_run(**changes)
        assert group(2, train, config, data, tmp_path / name, 0, {}) == [0, 0]
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert not (tmp_path / "without" / "samples").exists()
    run(tiny_run(sample=how), data, tmp_path / "alone", NullProgress())
    files = [f"step-{step:08d}.png" for step in (4, 8, 12)]
    for folder in ("with", "alone"):
        assert sorted(path.name for path in (tmp_path / folder / "samples").iterdir()) == files
    ours, theirs = (np.asarray(Image.open(tmp_path / folder / "samples" / files[0])) for folder in ("with", "alone"))
    assert ours.shape == (8, 8)
    assert np.abs(ours.astype(int) - theirs).max() <= 2


def test_a_grid_is_tiled_in_reading_order() -> None:
    images = np.stack([np.full((2, 3), level, np.uint8) for level in (1, 2, 3)])
    assert tiled(images)[::2, ::3].tolist() == [[1, 2], [3, 255]]
    assert tiled(np.zeros((5, 4, 4, 3), np.uint8)).shape == (8, 12, 3)


# A loss that stays higher


def shifts(found: Iterable[float], spec: GuardSpec = SPEC) -> list[tuple[int, Shift]]:
    level, told = Level(), []
    for step, loss in enumerate(found, 1):
        level, shift = watch(level, spec, step, loss)
        if shift is not None:
            told.append((step, shift))
    return told


def noisy(seed: int, *parts: tuple[float, int]) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(level, 0.02) for level, steps in parts for _ in range(steps)]


def test_a_bump_that_does_not_recover_is_told_once_with_the_step_before_it() -> None:
    """C085: 1.96, up to 2.02, settles at 1.975."""
    [(step, shift)] = shifts(noisy(0, (1.96, 450), (2.02, 60), (1.975, 500)))
    assert step == 600
    assert shift.before_step == 400
    assert shift.reason.startswith("the loss stays higher: 1.98")
    assert "was 1.961 up to step 400" in shift.reason


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_bump_that_recovers_are_no_shift(seed: int) -> None:
    assert shifts(noisy(seed, (1.96, 3000))) == []
    assert shifts(noisy(seed, (1.96, 410), (2.02, 80), (1.96, 510))) == []
    assert shifts(noisy(seed, (1.96, 300), (1.90, 300))) == []
    assert shifts(noisy(seed, (1.96, 300), (3.0, 300)), GuardSpec(level_window_steps=None)) == []


def folder(checkpoints: Path, step: int, *, committed: bool = True) -> None:
    path = checkpoints / f"step-{step:08d}.g0"
    path.mkdir(parents=True)
    if committed:
        (path / MANIFEST).write_text("{}")


def test_the_newest_checkpoint_from_before_is_pinned(tmp_path: Path) -> None:
    """C085."""
    for step, committed in ((100, True), (300, True), (400, False), (500, True)):
        folder(tmp_path, step, committed=committed)
    assert pin(tmp_path, 400, "why") == "step-00000300.g0"
    assert (tmp_path / "step-00000300.g0" / Mark.PINNED).read_text() == "why\n"
    assert pin(tmp_path, 99, "why") is None
    assert pin(tmp_path / "none", 99, "why") is None


def test_a_pinned_checkpoint_outlives_the_newer_ones(data: Path, tmp_path: Path) -> None:
    """C085: in a run whose loss rises for good, through all later saves."""
    seen = [Seen(step, 0, good=True, kept=step == 2) for step in range(1, 6)]
    assert doomed(seen, keep=2) == (seen[0], seen[2])
    guard = {"level_window_steps": 2, "level_sigmas": 1e-9, "spike_factor": None}
    config = tiny_run(steps=40, guard=guard, checkpoint={"every_steps": 1, "keep": 7})
    run(config, data, tmp_path, NullProgress())
    pinned = {line["checkpoint"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "pinned"}
    assert pinned, "two windows of any rise at all are told here"
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == pinned | {f"step-{step:08d}.g0" for step in range(34, 41)}
