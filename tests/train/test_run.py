"""Whole runs of a tiny network: stopped, killed, resumed, with other numbers of ranks."""

from __future__ import annotations

import math
import os
import shutil
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from ranks import group, lines, losses, train
from torch import Tensor

from captioned import captioned_images, tiny_run
from small_disk import fill_up, small_disk
from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.folders import folder_of
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.restore import Checkpoint, Restored, full_model_weights, newest_good, restore, verified
from tidegate.checkpoint.tiers import Candidate, Disk
from tidegate.data.dataset import Dataset
from tidegate.data.order import order
from tidegate.data.prepare import prepare
from tidegate.errors import CheckpointError
from tidegate.train.config import RunConfig
from tidegate.train.export import load_export
from tidegate.train.export_manifest import export_id
from tidegate.train.learning import Ready
from tidegate.train.loop import Run, run
from tidegate.train.parallel import joined
from tidegate.train.progress import NullProgress, Phase
from tidegate.train.records import Records

CONFIG = tiny_run()


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    assert group(2, train, CONFIG, data, run_dir, 0, {}) == [0, 0]
    return run_dir


def test_an_unbroken_run_learns_and_records(unbroken: Path) -> None:
    seen = lines(unbroken, "metrics.jsonl")
    assert [line["step"] for line in seen] == list(range(1, 13))
    speed = {"step_s", "input_s", "images_per_s", "tflops", "mfu"}
    assert set(seen[0]) == {"at_s", "step", "loss", "world_size", "generation", "grad_norm", "rate", *speed}
    assert seen[-1]["loss"] < seen[0]["loss"]
    commits = lines(unbroken, "checkpoints.jsonl")
    assert [line["step"] for line in commits] == [3, 6, 9, 12]
    assert set(commits[0]) == {"at_s", "step", "generation", "stall_s", "commit_s", "bytes", "world_size"}
    kept = sorted(path.name for path in (unbroken / "checkpoints").iterdir())
    assert kept == ["step-00000009.g0", "step-00000012.g0"]
    load_export(unbroken / "export")


def test_killed_and_resumed_is_bit_identical(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """C087: a rank dies after the commit of step 6, and that checkpoint turns out rotten: generation 1 goes on from
    step 3 with the same losses and ends with the same weights, bit for bit. C088: so AdamW's own count of updates, by
    which it corrects its young averages, goes on too."""
    codes = group(2, train, CONFIG, data, tmp_path, 0, {0: {"dies_at_commit": 6}})
    assert codes[0] == 9
    assert codes[1] != 0
    newest = newest_good(tmp_path / "checkpoints").checkpoint
    assert newest is not None
    assert newest.manifest.step == 6
    shard = newest.folder / newest.manifest.files[1].name
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)

    assert group(2, train, CONFIG, data, tmp_path, 1, {}) == [0, 0]
    events = {line["kind"]: line for line in lines(tmp_path, "events.jsonl")}
    assert events["checkpoint_skipped"]["checkpoint"] == "step-00000006.g0"
    assert events["restored"]["step"] == 3
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl") if line["generation"] == 1] == list(range(4, 13))
    assert losses(tmp_path) == losses(unbroken)
    assert export_id(tmp_path / "export") == export_id(unbroken / "export")


def test_a_dead_rank_costs_no_more_than_the_steps_since_the_last_copy_in_memory(
    unbroken: Path, data: Path, tmp_path: Path
) -> None:
    """C087: a copy every second step, a checkpoint on disk every sixth; rank 1 is gone after step 9. Generation 1
    goes on from step 8, out of memory, with two ranks; generation 2 with three, from step 10; the end is the same."""
    config = tiny_run(checkpoint={"every_steps": 6, "ram_every_steps": 2, "keep": 2})
    node = folder_of("tiny", tmp_path, os.environ)
    assert group(2, train, config, data, tmp_path, 0, {1: {"dies_at_step": 9}})[1] == 9
    assert node.is_dir()
    assert group(2, train, config, data, tmp_path, 1, {0: {"dies_at_step": 11}})[0] == 9
    assert group(3, train, config, data, tmp_path, 2, {}) == [0, 0, 0]
    restored = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "restored"]
    assert [(line["step"], line["tier"]) for line in restored] == [(8, "memory"), (10, "memory")]
    made = [line["step"] for line in lines(tmp_path, "metrics.jsonl") if line["generation"] == 1]
    assert made[:2] == [9, 10]
    whole = {step: loss for step, loss in losses(unbroken).items() if step <= 10}
    assert {step: loss for step, loss in losses(tmp_path).items() if step <= 10} == whole
    assert losses(tmp_path) == pytest.approx(losses(unbroken), rel=1e-4)
    assert not node.exists(), "a run that has ended leaves nothing in memory"


def test_three_ranks_stop_together_and_other_numbers_go_on(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """C041: only rank 2 of 3 is told to stop; all save step 4 and leave. C071: two ranks go on and are stopped, then
    three finish. Every step's loss is the unbroken run's but for rounding, so every step had the same samples."""
    assert group(3, train, CONFIG, data, tmp_path, 0, {2: {"stops_at": 4}}) == [0, 0, 0]
    assert max(losses(tmp_path)) == 4
    assert not (tmp_path / "export").exists()
    assert group(2, train, CONFIG, data, tmp_path, 1, {0: {"stops_at": 8}}) == [0, 0]
    assert group(3, train, CONFIG, data, tmp_path, 2, {}) == [0, 0, 0]
    done = [(line["world_size"], line["step"]) for line in lines(tmp_path, "metrics.jsonl")]
    sizes = [3] * 4 + [2] * 4 + [3] * 4
    assert done == list(zip(sizes, range(1, 13), strict=True))
    assert losses(tmp_path) == pytest.approx(losses(unbroken), rel=1e-4)
    # AdamW does not see a gradient's scale; the norm does.
    assert losses(tmp_path, "grad_norm") == pytest.approx(losses(unbroken, "grad_norm"), rel=1e-3)
    ours, theirs = (load_export(folder / "export")[0].state_dict() for folder in (tmp_path, unbroken))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)


def test_from_the_last_step_straight_to_the_export(unbroken: Path, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    shutil.rmtree(run_dir / "export")
    assert group(2, train, CONFIG, data, run_dir, 1, {}) == [0, 0]
    assert len(lines(run_dir, "metrics.jsonl")) == 12
    assert export_id(run_dir / "export") == export_id(unbroken / "export")


class Poisoned(Run):
    """Rank 1's loss is multiplied in some steps."""

    by: ClassVar[dict[int, float]]

    def _loss(self, piece: Ready) -> Tensor:
        return super()._loss(piece) * (self.by.get(piece.batch.step + 1, 1.0) if self.world.rank == 1 else 1.0)


def poisoned(
    rank: int, data: Path, run_dir: Path, by: dict[int, float], config: RunConfig = CONFIG, generation: int = 0
) -> None:
    Poisoned.by = by
    with joined(30) as world:
        records = Records(run_dir, writes=rank == 0, world_size=2, generation=generation, log_every_steps=100)
        images = Dataset(data, width=4, height=4, channels=1)
        with records:
            Poisoned(config, [images], run_dir, NullProgress(), world, generation, records).go()


GUARDED = tiny_run(guard={"spike_window_steps": 3, "rollbacks_max": 1}, checkpoint={"every_steps": 3, "keep": 9})


def test_a_loss_spike_goes_back_to_the_checkpoint_and_on_behind_the_samples(data: Path, tmp_path: Path) -> None:
    """C084: the weights of step 6 go on at step 9; what was lost and which samples did it is told; the next spike, also
    after a restart, finds the budget spent."""
    assert group(2, poisoned, data, tmp_path, {8: 1e3}, GUARDED) == [0, 0]
    events = lines(tmp_path, "events.jsonl")
    [rolled] = [line for line in events if line["kind"] == "rolled_back"]
    assert (rolled["step"], rolled["checkpoint"]) == (8, "step-00000006.g0")
    assert rolled["samples"] == order(CONFIG.seed, 7, CONFIG.global_batch, 25).tolist()
    assert list(losses(tmp_path)) == list(range(1, 13)), "each step was made once"
    folders = {step: tmp_path / "checkpoints" / f"step-{step:08d}.g0" for step in (6, 8, 9, 12)}
    saved = {step: verified(folder) for step, folder in folders.items()}
    counted = {step: (manifest.updates, manifest.rollbacks) for step, manifest in saved.items()}
    assert counted == {6: (6, 0), 8: (6, 1), 9: (7, 1), 12: (10, 1)}
    before, after = (full_model_weights(Checkpoint(folders[step], saved[step])) for step in (6, 8))
    assert all(torch.equal(after[name], before[name]) for name in before)

    for step in (9, 12):
        shutil.rmtree(folders[step])
    assert 0 not in group(2, poisoned, data, tmp_path, {12: 1e3}, GUARDED, 1)
    assert max(losses(tmp_path)) == 12
    assert [line["step"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "restored"] == [8]


def test_losses_that_stay_not_finite_end_a_run_that_has_no_checkpoint(data: Path, tmp_path: Path) -> None:
    config = tiny_run(guard={"not_finite_max": 1})
    assert 0 not in group(2, poisoned, data, tmp_path, {1: math.nan, 2: math.nan}, config)
    assert [line["kind"] for line in lines(tmp_path, "events.jsonl")] == ["step_skipped", "step_skipped"]


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """C082: the event names the rank, no weight changes in that step, and the run goes on."""
    assert group(2, poisoned, data, tmp_path, {5: math.nan}) == [0, 0]
    [skipped] = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "step_skipped"]
    assert (skipped["step"], skipped["bad_ranks"]) == (5, [1])
    assert skipped["samples"] == order(CONFIG.seed, 4, CONFIG.global_batch, 25).tolist()
    found = losses(tmp_path)
    assert found[5] is None
    assert {step: found[step] for step in range(1, 5)} == {step: losses(unbroken)[step] for step in range(1, 5)}
    assert found[6] != losses(unbroken)[6]
    assert all(found[step] is not None for step in range(6, 13))
    newest = newest_good(tmp_path / "checkpoints").checkpoint
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.updates) == (12, 11)


class SlowToCopy(Run):
    """No copy is begun before an update waits for it, or two seconds have passed."""

    def _save(self, saver: Saver, *, to_disk: bool = True) -> None:
        self.gate = threading.Event()
        saver._copier.submit(self.gate.wait, 2)
        super()._save(saver, to_disk=to_disk)

    def _wait_copied(self, saver: Saver) -> None:
        if saver.copying:
            self.gate.set()
        super()._wait_copied(saver)


def slow_to_copy(rank: int, data: Path, run_dir: Path) -> None:
    with joined(30) as world:
        records = Records(run_dir, writes=rank == 0, world_size=2, generation=0, log_every_steps=100)
        with records:
            SlowToCopy(
                CONFIG, [Dataset(data, width=4, height=4, channels=1)], run_dir, NullProgress(), world, 0, records
            ).go()


def test_an_update_waits_for_the_copy_of_what_it_changes(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """C061: the checkpoint of step 9 is made while step 10 computes, and holds nothing of it."""
    assert group(2, slow_to_copy, data, tmp_path) == [0, 0]
    for step in (9, 12):
        name = f"step-{step:08d}.g0"
        ours, theirs = (run_dir / "checkpoints" / name for run_dir in (tmp_path, unbroken))
        one, other = (full_model_weights(Checkpoint(folder, verified(folder))) for folder in (ours, theirs))
        assert all(torch.equal(one[weight], other[weight]) for weight in other)


class Blind(Disk):
    """Lists no checkpoint, though it can read them: a network file system that is behind."""

    def candidates(self) -> tuple[Candidate, ...]:
        return ()


def disagreeing(rank: int, good: Path, empty: Path, blocked: Path) -> None:
    """Rank 1 sees no checkpoint, then cannot read them either, and has no place to save to."""
    with joined(30) as world:
        restored = restore([Blind(good) if rank else Disk(good)], [], world.saving)
        assert restored.manifest is not None
        assert restored.manifest.step == 12
        nothing = restore([Disk(empty if rank else good)], [], world.saving)
        assert nothing.manifest is None
        assert [skipped.name for skipped in nothing.skipped] == ["step-00000012.g0", "step-00000009.g0"]
        assert "No such file" in nothing.skipped[0].why
        part = Part("model.a", torch.ones(2), (4,), (2 * rank,))
        saver = Saver(blocked if rank else empty, [part], group=world.saving, generation=5, keep=1)
        saver.start(restored.manifest.model_copy(update={"step": 20, "files": ()}))
        outcome = saver.finish()
        saver.close()
        assert outcome is not None
        assert outcome.error is not None
        assert outcome.error.startswith("rank 1: ")


def test_rank_0_decides_and_one_failed_shard_is_no_checkpoint(unbroken: Path, tmp_path: Path) -> None:
    """C056: ranks that see different files restore the same checkpoint. C055: a shard that one rank could not write is
    told by all with that rank's name, and nothing is committed."""
    blocked = tmp_path / "a file"
    blocked.write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert group(2, disagreeing, unbroken / "checkpoints", empty, blocked) == [0, 0]
    assert newest_good(empty).checkpoint is None
    assert not list(empty.rglob("manifest.json"))


# A world of one, in this process


class Forgetful(Run):
    """Takes a checkpoint's counters, and loses its weights on the way."""

    def _resume(self, restored: Restored) -> None:
        super()._resume(restored)
        for shard in self.learner.shards:
            shard.local.mul_(3.0)


class Seen(NullProgress):
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.commits: list[int] = []

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)

    def committed(self, step: int) -> None:
        self.commits.append(step)


def test_saves_that_fail_cost_nothing_but_themselves(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """C058, C060: no save can work, training goes to its end and exports, and then says that the last save failed."""
    (tmp_path / "checkpoints").write_text("in the way")
    seen = Seen()
    with pytest.raises(CheckpointError, match=r"the last save, of step 12, failed: rank 0: "):
        run(CONFIG, data, tmp_path, seen)
    assert [line["step"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "save_failed"] == [3, 6, 9, 12]
    assert seen.commits == []
    assert losses(tmp_path) == pytest.approx(losses(unbroken), rel=1e-4)
    load_export(tmp_path / "export")


class FillsTheDisk(NullProgress):
    def __init__(self, disk: Path) -> None:
        self._disk = disk

    def committed(self, step: int) -> None:
        if step == 9:
            fill_up(self._disk)


def test_the_last_save_finds_the_disk_full_and_makes_room(data: Path, tmp_path: Path) -> None:
    """C065: nothing of the result is dropped; what had to go for it are older checkpoints."""
    with small_disk(tmp_path / "small", kib=2048) as disk:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(disk)
        run(CONFIG, data, tmp_path / "run", FillsTheDisk(disk))
        [failed] = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "save_failed"]
        assert failed["step"] == 12
        assert "No space left on device" in failed["reason"]
        kept = sorted(path.name for path in disk.glob("step-*"))
        assert kept == ["step-00000009.g0", "step-00000012.g0"]
        newest = newest_good(disk).checkpoint
        assert newest is not None
        assert newest.manifest.step == 12
    load_export(tmp_path / "run" / "export")


def test_what_the_watcher_is_told(data: Path, tmp_path: Path) -> None:
    seen = Seen()
    run(CONFIG, data, tmp_path, seen)
    assert seen.commits == [3, 6, 9, 12]
    changes = [phase for phase, before in zip(seen.phases, [None, *seen.phases], strict=False) if phase != before]
    stepping = [Phase.STEPPING, Phase.SAVING] * 4
    assert changes[:4] == [Phase.STARTING, Phase.RENDEZVOUS, Phase.RESTORING, Phase.WARMING]
    assert changes[4:12] == stepping
    assert changes[-2:] == [Phase.EXPORTING, Phase.DONE]


def test_a_loss_that_jumps_after_a_resume_is_told(data: Path, tmp_path: Path) -> None:
    """C087: the checkpoint knows what the loss was; one whose weights are lost behind a right hash is noticed."""
    config = tiny_run(steps=40, optimizer={"lr": 0.01, "warmup_steps": 2})
    run(config, data, tmp_path / "before", NullProgress())
    manifest = verified(tmp_path / "before" / "checkpoints" / "step-00000039.g0")
    told = losses(tmp_path / "before")
    assert manifest.usual_loss == pytest.approx(sum(told[step] for step in range(1, 40)) / 39, rel=1e-5)

    more = config.model_copy(update={"steps": 60})
    for name in ("well", "ill"):
        shutil.copytree(tmp_path / "before" / "checkpoints", tmp_path / name / "checkpoints")
    run(more, data, tmp_path / "well", NullProgress(), generation=1)
    assert "jumped_after_resume" not in {line["kind"] for line in lines(tmp_path / "well", "events.jsonl")}
    with (
        joined(30) as world,
        Records(tmp_path / "ill", writes=True, world_size=1, generation=1, log_every_steps=9) as records,
    ):
        Forgetful(
            more, [Dataset(data, width=4, height=4, channels=1)], tmp_path / "ill", NullProgress(), world, 1, records
        ).go()
    [event] = [line for line in lines(tmp_path / "ill", "events.jsonl") if line["kind"] == "jumped_after_resume"]
    assert event["reason"].startswith("the first 10 losses after resuming are ")


def test_other_data_than_before_is_said(data: Path, tmp_path: Path) -> None:
    run(tiny_run(steps=5), data, tmp_path / "run", NullProgress())
    prepare(captioned_images(tmp_path / "images", 9), tmp_path / "other", seed=0, rows_per_shard=10)
    run(tiny_run(steps=6), tmp_path / "other", tmp_path / "run", NullProgress(), generation=1)
    [event] = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "resumed_differently"]
    assert event["reason"].startswith("dataset was ")
