"""The training loop that runs in each rank, under torchrun or under a gang's agent."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.checkpoint.disk import Outcome, Saver
from tidegate.checkpoint.keeping import Keeping
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.restore import MODEL, Restored, restore
from tidegate.checkpoint.tiers import Disk
from tidegate.checkpoint.turns import due
from tidegate.data.loader import Batch, Dataset, Loader
from tidegate.data.order import order
from tidegate.data.text import ByteText
from tidegate.errors import CheckpointError, DataError, DivergedError
from tidegate.train.config import RunConfig
from tidegate.train.config_file import write_config
from tidegate.train.drills import Drills
from tidegate.train.export import write_export
from tidegate.train.guard import Do, Guarded, Ruling, judge
from tidegate.train.model import positions, seeded, to_tokens, velocity
from tidegate.train.objective import draw, loss_sum, mix
from tidegate.train.optim import adamw, learning_rate
from tidegate.train.parallel import World, joined, split, whole_weights
from tidegate.train.progress import Phase, Progress
from tidegate.train.recipe import Recipe
from tidegate.train.records import Records
from tidegate.train.shipping import Shipping, check_store, store_tier


def run(config: RunConfig, data_dir: Path, run_dir: Path, progress: Progress, *, generation: int = 0) -> None:
    """Train to `config.steps` from the newest good checkpoint in `run_dir`, then write `run_dir/export`.

    Rank and world size come from torchrun's environment variables. A run that is told to stop saves, and returns
    without an export; called again it goes on from there. From a checkpoint of the last step it goes straight to the
    export.

    Raises:
        DataError: no data, or not what the config says.
        CheckpointError: the last save failed (the weights are exported all the same), or a checkpoint is of another
            network.
        DivergedError: the loss has gone wrong more often than the guard allows.
    """
    progress.phase(Phase.STARTING)
    torch.set_num_threads(config.threads_per_rank)
    image = config.image
    data = Dataset(data_dir, width=image.width, height=image.height, channels=image.channels)
    progress.phase(Phase.RENDEZVOUS)
    with joined(config.timeout_s) as world:
        if config.global_batch < world.size:
            raise DataError(f"global_batch {config.global_batch} is less than {world.size} ranks\nhint: raise it")
        with Records(
            run_dir,
            writes=world.rank == 0,
            world_size=world.size,
            generation=generation,
            log_every_steps=config.log_every_steps,
        ) as records:
            if world.rank == 0:
                write_config(run_dir, config)
            Run(config, data, run_dir, progress, world, generation, records).go()
    progress.phase(Phase.DONE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know after a step's gradients: one all-reduce."""

    loss: float
    grad_norm: float
    stop: bool
    bad_ranks: tuple[int, ...]
    """Those whose own loss was not finite."""

    @property
    def finite(self) -> bool:
        return not self.bad_ranks and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Run:
    """One rank's part of one generation."""

    def __init__(
        self,
        config: RunConfig,
        data: Dataset,
        run_dir: Path,
        progress: Progress,
        world: World,
        generation: int,
        records: Records,
    ) -> None:
        self.config, self.data, self.progress, self.world, self.records = config, data, progress, world, records
        self.run_dir, self.generation = run_dir, generation
        self.network = seeded(config.model, config.seed)
        self.shards = split(self.network, world)
        self.parameters = list(self.network.parameters())
        """Of the whole network: also those of which this rank owns nothing."""
        self.optimizer = adamw(self.shards, config.optimizer)
        self.text = ByteText(config.text.length, config.text.width, config.text.seed)
        self.places = positions(config.text.length, config.image).to(world.device)
        self.step = self.updates = 0
        """Steps done, and those of them that changed the weights."""
        self.guarded = Guarded()
        self.shipping = Shipping(
            config.checkpoint, config.name, run_dir, records, rank=world.rank, generation=generation
        )
        self.drills = Drills(config.checkpoint.drill_every_s if world.rank == 0 else None, run_dir, records)
        self.saved_step = -1
        """Step of the newest save that was started or restored."""

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
        restored = restore(keeping.tiers(), self._parts(), self.world.saving)
        self._resume(restored)
        if restored.manifest is None:
            check_store(spec, self.config.name, self.world.saving)
        saver, problem = keeping.saver(
            self._parts(),
            restored,
            group=self.world.saving,
            generation=self.generation,
            keep=spec.keep,
            when_late=spec.when_late,
        )
        if problem is not None:
            self.records.event("no_memory_tier", reason=problem)
        with self.shipping, self.drills:
            try:
                stopped = self._train(saver)
                failure = self._last_save(saver)
            finally:
                saver.close()
            if failure is None:
                keeping.forget()
            if not stopped:
                self._export()
            unsent = self.shipping.last(self.progress, self.world.saving, wait=not stopped)
        if failure is not None:
            raise CheckpointError(f"the last save, of step {self.step}, failed: {failure}")
        if unsent is not None:
            raise CheckpointError(unsent)

    # Steps

    def _train(self, saver: Saver) -> bool:
        """Train to the last step, or to the one at which a rank is told to stop; whether it was that."""
        self.progress.phase(Phase.STEPPING)
        with Loader(
            self.data,
            seed=self.config.seed,
            global_batch=self.config.global_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            start_step=self.step,
            end_step=self.config.steps,
        ) as batches:
            for batch in batches:
                began = time.perf_counter()
                verdict, ruling = self._one(batch)
                self.step += 1
                self.records.step(self.step, verdict.loss, verdict.grad_norm, time.perf_counter() - began)
                self.progress.stepped(self.step, verdict.loss)
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
        return False

    def _one(self, batch: Batch) -> tuple[Verdict, Ruling]:
        rate = learning_rate(self.step, self.config.steps, self.config.optimizer)
        loss = self._loss(batch)
        # FSDP averages gradients over ranks; scaled like this their average is the global batch's mean gradient,
        # whatever each rank's share.
        torch.autograd.backward(loss * (self.world.size / self.config.global_batch))
        gradients = [shard.gradient for shard in self.shards]
        verdict = self._agreed(loss.detach(), gradients)
        self.guarded, ruling = judge(self.guarded, self.config.guard, verdict.loss, finite=verdict.finite)
        if ruling.do is Do.GO:
            self._update(gradients, rate, verdict.grad_norm)
        if not verdict.finite:
            samples = self._samples(self.step)
            self.records.skipped_step(self.step + 1, verdict.loss, verdict.grad_norm, verdict.bad_ranks, samples)
        for parameter in self.parameters:
            parameter.grad = None
        return verdict, ruling

    def _samples(self, step: int) -> list[int]:
        """Ids of the global batch of `step`, counted from 0."""
        ids = order(self.config.seed, step, self.config.global_batch, len(self.data))
        return [int(sample) for sample in ids]

    def _loss(self, batch: Batch) -> Tensor:
        """Sum of the losses of this rank's samples."""
        device = self.world.device
        image = to_tokens(batch.pixels, self.config.image.patch)
        noise, times = draw(self.config.seed, batch.step, batch.positions, image.shape[1:], self.config.objective)
        states, mask = self.text.encode(batch.captions)
        image, noise, times, states, mask = (part.to(device) for part in (image, noise, times, states, mask))
        guess = velocity(self.network, mix(image, noise, times), states, mask, times, self.places)
        return loss_sum(guess, image, noise)

    def _agreed(self, loss: Tensor, gradients: list[Tensor]) -> Verdict:
        """Sum [loss, squared gradient norm, stop, one flag a rank] over ranks, the step's only message of ours."""
        facts = torch.zeros(3 + self.world.size, dtype=torch.float32, device=self.world.device)
        facts[0] = loss
        if gradients:
            facts[1] = torch.stack(torch._foreach_norm(gradients)).square().sum()
        facts[2] = float(self.progress.stop_requested() or self.shipping.gave_up is not None)
        facts[3 + self.world.rank] = float(not torch.isfinite(loss))
        dist.all_reduce(facts)
        total, squares, stop, *bad = facts.tolist()
        return Verdict(
            loss=total / self.config.global_batch,
            grad_norm=math.sqrt(squares) if squares >= 0 else math.nan,
            stop=stop > 0,
            bad_ranks=tuple(rank for rank, flag in enumerate(bad) if flag),
        )

    def _update(self, gradients: list[Tensor], rate: float, grad_norm: float) -> None:
        clip = self.config.optimizer.clip_norm
        if gradients and grad_norm > clip:
            torch._foreach_mul_(gradients, clip / grad_norm)
        for shard, gradient in zip(self.shards, gradients, strict=True):
            shard.local.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1

    # Checkpoints

    def _parts(self) -> list[Part]:
        parts = []
        for shard in self.shards:
            moments = self.optimizer.state[shard.local]
            tensors = {MODEL: shard.local, "exp_avg.": moments["exp_avg"], "exp_avg_sq.": moments["exp_avg_sq"]}
            parts += [Part(kind + shard.name, tensor, shard.shape, shard.offsets) for kind, tensor in tensors.items()]
        return parts

    def _resume(self, restored: Restored) -> None:
        for skipped in restored.skipped:
            self.records.event("checkpoint_skipped", checkpoint=skipped.name, tier=skipped.tier, reason=skipped.why)
        if restored.touched:
            self._begin_again()
        manifest = restored.manifest
        if manifest is None:
            return
        self._count(manifest)
        self.step = self.saved_step = manifest.step
        self.guarded = Guarded(rollbacks=manifest.rollbacks)
        took = {"seconds": round(restored.seconds, 6), "bytes": restored.bytes}
        self.records.event("restored", checkpoint=restored.name, step=manifest.step, tier=restored.tier, **took)
        now = {"seed": self.config.seed, "global_batch": self.config.global_batch, "dataset": self.data.fingerprint}
        for name, value in now.items():
            if getattr(manifest, name) != value:
                reason = f"{name} was {getattr(manifest, name)}, is {value}: samples may repeat or be left out"
                self.records.event("resumed_differently", reason=reason)

    def _begin_again(self) -> None:
        """A checkpoint that turned out rotten has left its traces, and there is no other."""
        fresh = split(seeded(self.config.model, self.config.seed), self.world)
        for shard, first in zip(self.shards, fresh, strict=True):
            shard.local.copy_(first.local)
            for name in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[shard.local][name].zero_()

    def _count(self, manifest: Manifest) -> None:
        self.updates = manifest.updates
        for shard in self.shards:
            self.optimizer.state[shard.local]["step"].fill_(self.updates)

    def _roll_back(self, saver: Saver, reason: str) -> None:
        """The newest checkpoint's weights go on from here, so the samples since then are behind them. Saved at once: a
        crash must not meet the same samples again, nor get its budget back."""
        self.progress.phase(Phase.RESTORING)
        self._settle(saver.finish())  # one in flight may be the newest
        # Not from memory: copies there are so frequent that they may be from within the spike.
        restored = restore([Disk(self.run_dir / "checkpoints")], self._parts(), self.world.saving)
        if restored.manifest is None:
            raise DivergedError(self.step, f"{reason}, and there is no checkpoint to go back to")
        self._count(restored.manifest)
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
            updates=self.updates,
            rollbacks=self.guarded.rollbacks,
            seed=self.config.seed,
            global_batch=self.config.global_batch,
            dataset=self.data.fingerprint,
            world_size=self.world.size,
        )
        outcome = saver.start(about, to_disk=to_disk)
        self._settle(outcome)
        if to_disk and not (outcome is not None and outcome.skipped):
            self.saved_step = self.step
        self.progress.phase(Phase.STEPPING)

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
        weights = whole_weights(self.network)
        if self.world.rank == 0:
            recipe = Recipe.of(self.config)
            folder = self.run_dir / "export"
            write_export(folder, self.config.model, weights, recipe, run=self.config.name, step=self.step)
            self.records.event("exported", step=self.step, folder=str(folder))
        dist.barrier()
