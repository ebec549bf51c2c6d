"""The training loop that runs in each rank, under torchrun or under a gang's agent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.checkpoint.disk import Outcome, Saver
from tidegate.checkpoint.keeping import Keeping
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.restore import Restored, restore
from tidegate.checkpoint.tiers import Candidate, Disk
from tidegate.checkpoint.turns import due
from tidegate.data.dataset import Dataset
from tidegate.data.loader import Batch, Loader
from tidegate.errors import CheckpointError, DataError, DivergedError
from tidegate.train import level
from tidegate.train.ahead import one_ahead
from tidegate.train.computing import Computing
from tidegate.train.config import RunConfig
from tidegate.train.config_file import write_config
from tidegate.train.drills import Drills
from tidegate.train.export import write_export
from tidegate.train.grids import sample_grid
from tidegate.train.guard import Do, Guarded, Ruling, judge
from tidegate.train.inputs import dataset_of
from tidegate.train.learner import Learner
from tidegate.train.learning import Lesson, Ready, Verdict, agreed
from tidegate.train.optim import learning_rate
from tidegate.train.parallel import World, joined, whole_weights
from tidegate.train.pieces import how_many, pieces
from tidegate.train.pinning import warn_and_pin
from tidegate.train.progress import Phase, Progress
from tidegate.train.recipe import Recipe
from tidegate.train.records import Records
from tidegate.train.shipping import Shipping, check_store, store_tier
from tidegate.train.stages import Stage, stage_at, stages
from tidegate.train.telemetry import Meter, Timed, memory_bytes

_FIRST_STEPS = 2
"""Of a process: after them whoever watches knows one step's time."""
_FIRST_STEPS_OF_A_STAGE = 11
"""After them the median of the newest 21 is the new stage's (`gang.hang.PACE_STEPS`)."""


def run(config: RunConfig, data_dir: str | Path, run_dir: Path, progress: Progress, *, generation: int = 0) -> None:
    """Train through all stages from the newest good checkpoint in `run_dir`, then write `run_dir/export`.

    Rank and world size come from torchrun's environment variables. A run that is told to stop saves, and returns
    without an export; called again it goes on from there. From a checkpoint of the last step it goes straight to the
    export.

    Raises:
        DataError: no data, or not what the config says.
        ConfigError: so many ranks, or this machine, can't do what the config says.
        CheckpointError: the last save failed (the weights are exported all the same), or a checkpoint is of another
            network.
        DivergedError: the loss has gone wrong more often than the guard allows.
    """
    progress = Timed(progress)
    progress.phase(Phase.STARTING)
    torch.set_num_threads(config.threads_per_rank)
    datasets = [dataset_of(config, stage, data_dir) for stage in stages(config)]
    progress.phase(Phase.RENDEZVOUS)
    with joined(config.timeout_s, config.parallel) as world:
        for stage in stages(config):
            if stage.global_batch < world.data_size:
                few = f"global_batch {stage.global_batch} of stage {stage.name} is less than {world.data_size} ranks"
                raise DataError(f"{few}\nhint: raise it")
        with Records(
            run_dir,
            writes=world.rank == 0,
            world_size=world.size,
            generation=generation,
            log_every_steps=config.log_every_steps,
            tensorboard=config.tensorboard,
        ) as records:
            if world.rank == 0:
                write_config(run_dir, config)
            Run(config, datasets, run_dir, progress, world, generation, records).go()
    progress.phase(Phase.DONE)


class Run:
    """One rank's part of one generation."""

    def __init__(
        self,
        config: RunConfig,
        datasets: Sequence[Dataset],
        run_dir: Path,
        progress: Progress,
        world: World,
        generation: int,
        records: Records,
    ) -> None:
        """`datasets`: one for each stage."""
        self.config, self.datasets, self.world, self.records = config, datasets, world, records
        self.progress = progress if isinstance(progress, Timed) else Timed(progress)
        self.run_dir, self.generation = run_dir, generation
        self.stages = stages(config)
        self.step = 0
        """Steps done."""
        self.guarded, self.level = Guarded(), level.Level()
        self.shipping = Shipping(
            config.checkpoint, config.name, run_dir, records, rank=world.rank, generation=generation
        )
        self.drills = Drills(config.checkpoint.drill_every_s if world.rank == 0 else None, run_dir, records)
        self.usual_loss: float | None = None
        """Before this process; None where that is not known, or has been compared."""
        self.saved_step = -1
        """Step of the newest save that was started or restored."""
        self.warm_at, self.pace_is_new = 0, True
        """The step from which on steps take what they take; whether none has been made yet."""
        self.learner = Learner(config, self.stages[0], world)
        self.timed: torch.nn.Module | None = None
        """The network whose blocks are timed: a stage may bring another."""
        self._enter(self.stages[0])

    def _enter(self, stage: Stage) -> None:
        """What holds in `stage`."""
        self.learner.enter(stage)
        self.stage, self.data = stage, self.datasets[stage.number]
        self.lesson = Lesson(self.config, stage, self.data, self.world.device)
        self.meter = Meter(self.config, stage, self.world)
        if self.learner.network is not self.timed:
            self.timed, self.computing = self.learner.network, Computing(self.learner.network, self.world.device)

    def go(self) -> None:
        self.progress.phase(Phase.RESTORING)
        spec = self.config.checkpoint
        keeping = Keeping(
            self.config.name,
            self.run_dir,
            os.environ,
            in_memory=spec.ram_every_steps is not None,
            farther=store_tier(spec, self.config.name),
        )
        restored = restore(keeping.tiers(), self.learner.parts(all_copies=True), self.world.saving)
        self._resume(restored)
        check_store(spec, self.config.name, restored, self.world.saving)
        with self.shipping, self.drills:
            stopped, failure = self._go_through_stages(keeping, restored)
            if failure is None:
                keeping.forget()
            if not stopped:
                self._export()
            unsent = self.shipping.last(self.progress, self.world.saving, wait=not stopped)
        if failure is not None:
            raise CheckpointError(f"the last save, of step {self.step}, failed: {failure}")
        if unsent is not None:
            raise CheckpointError(unsent)

    def _go_through_stages(self, keeping: Keeping, restored: Restored) -> tuple[bool, str | None]:
        """Whether the run was stopped, and why the last save failed."""
        newest = restored.candidate
        while True:
            self._enter(stage_at(self.stages, self.step))
            stopped, failure = self._go_through_stage(keeping, newest, restored.rotten("disk"))
            if stopped or self.step >= self.config.steps:
                return stopped, failure
            self.records.event("stage", step=self.step, name=stage_at(self.stages, self.step).name)
            # Another stage has other losses: what is usual in it is learnt anew.
            self.guarded, self.level = Guarded(rollbacks=self.guarded.rollbacks), level.Level()
            newest = Candidate(self.step, self.generation)

    def _go_through_stage(
        self, keeping: Keeping, newest: Candidate | None, rotten: frozenset[str]
    ) -> tuple[bool, str | None]:
        """Whether the run was stopped in it, and why the stage's last save failed."""
        spec = self.config.checkpoint
        saver, problem = keeping.saver(
            self.learner.parts(),
            group=self.world.saving,
            generation=self.generation,
            keep=spec.keep,
            newest=newest,
            rotten=rotten,
            when_late=spec.when_late,
        )
        if problem is not None:
            self.records.event("no_memory_tier", reason=problem)
        try:
            stopped = self._train(saver)
            failure = self._last_save(saver)
        finally:
            saver.close()
        return stopped, failure

    # Steps

    def _train(self, saver: Saver) -> bool:
        """Train to the stage's last step, or to the one at which a rank is told to stop; whether it was that."""
        stage = self.stage
        self.warm_at = self.step + (_FIRST_STEPS if self.pace_is_new else _FIRST_STEPS_OF_A_STAGE)
        self.pace_is_new = False
        self._step_on()
        loader = Loader(
            self.data,
            seed=stage.data_seed(self.config.seed),
            global_batch=stage.global_batch,
            rank=self.world.data_rank,
            world_size=self.world.data_size,
            start_step=self.step - stage.begins,
            end_step=stage.ends - stage.begins,
        )
        with loader, one_ahead(loader, self._share) as shares:
            waits_since_s = time.perf_counter()
            for share in shares:
                began_s = time.perf_counter()
                verdict, ruling = self._one(share, saver)
                self.step += 1
                self._tell(verdict, step_s=time.perf_counter() - began_s, input_s=began_s - waits_since_s)
                if self.step == self.warm_at:
                    self._step_on()
                self._settle(saver.poll())
                self.shipping.poll()
                self.drills.poll()
                if ruling.do is Do.GIVE_UP:
                    raise DivergedError(self.step, ruling.reason)
                if ruling.do is Do.ROLL_BACK:
                    self._roll_back(saver, ruling.reason)
                if verdict.stop:
                    return self.step < self.config.steps
                if self.saved_step != self.step:
                    self._save_what_is_due(saver)
                if self.config.sample.every_steps and self.step % self.config.sample.every_steps == 0:
                    self._sample()
                waits_since_s = time.perf_counter()
        return False

    def _share(self, batch: Batch) -> list[tuple[Ready, bool]]:
        """A batch as it is computed, piece by piece, and whether each counts."""
        count = how_many(self.stage.global_batch, self.world.data_size, self.stage.micro_batch)
        return [(self.lesson.ready(piece), counts) for piece, counts in pieces(batch, count)]

    def _one(self, share: Sequence[tuple[Ready, bool]], saver: Saver) -> tuple[Verdict, Ruling]:
        # FSDP averages gradients over ranks; scaled like this their average is the global batch's mean gradient,
        # whatever each rank's share.
        scale = self.world.data_size / self.stage.global_batch
        total: Tensor | None = None
        for number, (piece, counts) in enumerate(share, 1):
            if self.world.shape.replicate > 1:
                self.learner.network.set_requires_all_reduce(number == len(share))  # replicas meet once a step
            loss = self._loss(piece)
            if not counts:
                loss = loss * 0
            torch.autograd.backward(loss * scale)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        gradients = self.learner.gradients()
        batch_size, stop = self.stage.global_batch, self.progress.stop_requested() or self.shipping.gave_up is not None
        verdict = agreed(self.world, self.learner.shards, gradients, total, global_batch=batch_size, stop=stop)
        self.guarded, ruling = judge(self.guarded, self.config.guard, verdict.loss, finite=verdict.finite)
        if ruling.do is Do.GO:
            self._wait_copied(saver)
            self.learner.update(gradients, verdict.grad_norm, self._rate(self.step))
        if not verdict.finite:
            samples = self._samples(self.step)
            self.records.skipped_step(self.step + 1, verdict.loss, verdict.grad_norm, verdict.bad_ranks, samples)
        self.learner.forget_gradients()
        return verdict, ruling

    def _tell(self, verdict: Verdict, *, step_s: float, input_s: float) -> None:
        pace = self.meter.pace(step_s + input_s)
        self.records.step(
            self.step,
            verdict.loss,
            verdict.grad_norm,
            rate=self._rate(self.step - 1),
            step_s=step_s,
            input_s=input_s,
            pace=pace,
            more=lambda: {"memory_bytes": memory_bytes(self.world.device), "phases_s": self.progress.seconds()},
        )
        self.progress.stepped(self.step, verdict.loss)
        self.progress.speed(pace.images_per_s, pace.mfu)
        compute_s = self.computing.stepped()
        if compute_s is not None:
            self.progress.computed(compute_s)
        if verdict.finite:
            self._compare_with_before()
            self.level, shift = level.watch(self.level, self.config.guard, self.step, verdict.loss)
            if shift is not None and self.world.rank == 0:
                warn_and_pin(self.run_dir / "checkpoints", self.step, shift, self.records)

    def _compare_with_before(self) -> None:
        """C087: after a resume the loss must be what it was."""
        first = self.guarded.recent
        enough = min(level.AFTER_RESUME_STEPS, self.config.guard.spike_window_steps)
        if self.usual_loss is not None and len(first) >= enough:
            reason = level.jumped(self.usual_loss, first)
            self.usual_loss = None
            if reason is not None:
                self.records.event("jumped_after_resume", step=self.step, reason=reason)

    def _sample(self) -> None:
        self.progress.phase(Phase.SAMPLING)
        how = self.config.sample
        recipe = Recipe.of(self.config).model_copy(update={"image": self.stage.image})
        picture = sample_grid(self.learner.network, recipe, how.prompts, how.seed, self.world)
        if picture is not None:
            self.records.picture(self.step, picture)
        self._step_on()

    def _step_on(self) -> None:
        self.progress.phase(Phase.WARMING if self.step < self.warm_at else Phase.STEPPING)

    def _samples(self, step: int) -> list[int]:
        """Ids of the global batch of `step`, counted from 0."""
        stage, seed = self.stage, self.stage.data_seed(self.config.seed)
        return [int(sample) for sample in self.data.ids(seed, step - stage.begins, stage.global_batch)]

    def _loss(self, piece: Ready) -> Tensor:
        """Sum of the losses of these samples."""
        return self.lesson.loss(self.learner.network, piece)

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.config.steps, self.config.optimizer)

    # Checkpoints

    def _resume(self, restored: Restored) -> None:
        for skipped in restored.skipped:
            self.records.event("checkpoint_skipped", checkpoint=skipped.name, tier=skipped.tier, reason=skipped.why)
        if restored.touched:  # a rotten checkpoint has left its traces, and there is no other
            self.learner.begin_anew(self.stages[0])
        manifest = restored.manifest
        if manifest is None:
            return
        self.learner.count(manifest.updates)
        self.step = self.saved_step = manifest.step
        self.guarded = Guarded(rollbacks=manifest.rollbacks)
        before = stage_at(self.stages, max(0, self.step - 1))  # the one that made it
        if stage_at(self.stages, self.step) is before:
            self.usual_loss = manifest.usual_loss
        took = {"seconds": round(restored.seconds, 6), "bytes": restored.bytes}
        self.records.event("restored", checkpoint=restored.name, step=manifest.step, tier=restored.tier, **took)
        dataset = self.datasets[before.number].fingerprint
        now = {"seed": self.config.seed, "global_batch": before.global_batch, "dataset": dataset}
        for name, value in now.items():
            if getattr(manifest, name) != value:
                reason = f"{name} was {getattr(manifest, name)}, is {value}: samples may repeat or be left out"
                self.records.event("resumed_differently", reason=reason)

    def _roll_back(self, saver: Saver, reason: str) -> None:
        """The newest checkpoint's weights go on from here, so the samples since then are behind them. Saved at once: a
        crash must not meet the same samples again, nor get its budget back."""
        self.progress.phase(Phase.RESTORING)
        saver.wait_copied()
        self._settle(saver.finish())  # one in flight may be the newest
        # Not from memory: copies there are so frequent that they may be from within the spike.
        disk = Disk(self.run_dir / "checkpoints")
        restored = restore([disk], self.learner.parts(all_copies=True), self.world.saving)
        if restored.manifest is None:
            raise DivergedError(self.step, f"{reason}, and there is no checkpoint to go back to")
        self.learner.count(restored.manifest.updates)
        samples = self._samples(self.step - 1)
        self.records.event("rolled_back", step=self.step, checkpoint=restored.name, reason=reason, samples=samples)
        self._save(saver)

    def _save_what_is_due(self, saver: Saver) -> None:
        spec = self.config.checkpoint
        now = due(self.step, every_steps=spec.every_steps, ram_every_steps=spec.ram_every_steps)
        if now:
            self._save(saver, to_disk=now.disk)

    def _save(self, saver: Saver, *, to_disk: bool = True) -> None:
        self.progress.phase(Phase.SAVING)
        about = Manifest(
            run=self.config.name,
            generation=self.generation,
            step=self.step,
            updates=self.learner.updates,
            rollbacks=self.guarded.rollbacks,
            usual_loss=self.guarded.usual_loss,
            seed=self.config.seed,
            global_batch=self.stage.global_batch,
            dataset=self.data.fingerprint,
            world_size=self.world.size,
        )
        outcome = saver.start(about, to_disk=to_disk)
        self._settle(outcome)
        if to_disk and not (outcome is not None and outcome.skipped):
            self.saved_step = self.step
        self._step_on()

    def _wait_copied(self, saver: Saver) -> None:
        """The weights are about to change."""
        if saver.copying:
            self.progress.phase(Phase.SAVING)
            saver.wait_copied()
            self._step_on()

    def _settle(self, outcome: Outcome | None) -> None:
        """Tell how a save ended. A failed one costs nothing but itself: the last good checkpoint still stands."""
        if outcome is None or self.world.rank != 0:
            return
        if outcome.error is None:
            self.records.commit(outcome)
            self.progress.committed(outcome.step)
            self.shipping.committed(outcome.step)
            self.drills.committed()
        else:
            kind = "save_skipped" if outcome.skipped else "save_failed"
            self.records.event(kind, step=outcome.step, reason=outcome.error)

    def _last_save(self, saver: Saver) -> str | None:
        """Save where the last step isn't saved yet, and wait; why it failed, the same on every rank."""
        outcome = None
        for _ in range(2):
            if self.saved_step != self.step:
                self._settle(saver.finish())
                self._save(saver)
            self.progress.phase(Phase.SAVING)
            mine = [saver.finish()]
            self._settle(mine[0])
            dist.broadcast_object_list(mine, src=0, group=self.world.saving)
            outcome = mine[0]
            if outcome is None or not outcome.full:
                break
            self.saved_step = -1  # older ones have gone to make room: once more
        return outcome.error if outcome is not None else None

    def _export(self) -> None:
        self.progress.phase(Phase.EXPORTING)
        weights = whole_weights(self.learner.network, keep=self.world.rank == 0)
        if self.world.rank == 0:
            recipe = Recipe.of(self.config)
            folder = self.run_dir / "export"
            write_export(folder, self.config.model, weights, recipe, run=self.config.name, step=self.step)
            self.records.event("exported", step=self.step, folder=str(folder))
        dist.barrier()
