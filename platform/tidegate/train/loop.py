"""The training loop that runs in each rank, under torchrun or under a gang's agent."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.checkpoint.disk import Outcome, Saver
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.restore import MODEL, Checkpoint, Found, load, newest_good_for_all
from tidegate.checkpoint.shards import Part
from tidegate.data.dataset import Dataset
from tidegate.data.loader import Batch, Loader
from tidegate.data.text import ByteText
from tidegate.errors import CheckpointError, DataError, DivergedError
from tidegate.train.config import RunConfig
from tidegate.train.export import write_export
from tidegate.train.guard import Do, Guarded, Ruling, judge
from tidegate.train.model import positions, seeded, to_tokens, velocity
from tidegate.train.objective import draw, loss_sum, mix
from tidegate.train.optim import adamw, learning_rate
from tidegate.train.parallel import World, joined, split, whole_weights
from tidegate.train.progress import Phase, Progress
from tidegate.train.recipe import Recipe
from tidegate.train.records import Records


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
        self.saved_step = -1
        """Step of the newest save that was started or restored."""

    def go(self) -> None:
        self.progress.phase(Phase.RESTORING)
        found = newest_good_for_all(self.run_dir / "checkpoints", self.world.saving)
        self._restore(found)
        saver = Saver(
            self.run_dir / "checkpoints",
            self._parts(),
            group=self.world.saving,
            generation=self.generation,
            keep=self.config.checkpoint.keep,
            rotten=frozenset(skipped.name for skipped in found.skipped),
        )
        try:
            stopped = self._train(saver)
            failure = self._last_save(saver)
        finally:
            saver.close()
        if not stopped:
            self._export()
        if failure is not None:
            raise CheckpointError(f"the last save, of step {self.step}, failed: {failure}")

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
                if ruling.do is Do.GIVE_UP:
                    raise DivergedError(self.step, ruling.reason)
                if ruling.do is Do.ROLL_BACK:
                    self._roll_back(saver, ruling.reason)
                if verdict.stop:
                    return self.step < self.config.steps
                if self.step % self.config.checkpoint.every_steps == 0 and self.saved_step != self.step:
                    self._save(saver)
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
        return [int(sample) for sample in self.data.ids(self.config.seed, step, self.config.global_batch)]

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
        facts[2] = float(self.progress.stop_requested())
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

    def _restore(self, found: Found) -> None:
        for skipped in found.skipped:
            self.records.event("checkpoint_skipped", checkpoint=skipped.name, reason=skipped.why)
        if found.checkpoint is None:
            return
        manifest = found.checkpoint.manifest
        self._load(found.checkpoint)
        self.step = self.saved_step = manifest.step
        self.guarded = Guarded(rollbacks=manifest.rollbacks)
        self.records.event("restored", checkpoint=found.checkpoint.folder.name, step=manifest.step)
        now = {"seed": self.config.seed, "global_batch": self.config.global_batch, "dataset": self.data.fingerprint}
        for name, value in now.items():
            if getattr(manifest, name) != value:
                reason = f"{name} was {getattr(manifest, name)}, is {value}: samples may repeat or be left out"
                self.records.event("resumed_differently", reason=reason)

    def _load(self, checkpoint: Checkpoint) -> None:
        load(checkpoint, self._parts())
        self.updates = checkpoint.manifest.updates
        for shard in self.shards:
            self.optimizer.state[shard.local]["step"].fill_(self.updates)

    def _roll_back(self, saver: Saver, reason: str) -> None:
        """The newest checkpoint's weights go on from here, so the samples since then are behind them. Saved at once: a
        crash must not meet the same samples again, nor get its budget back."""
        self.progress.phase(Phase.RESTORING)
        self._settle(saver.finish())  # one in flight may be the newest
        found = newest_good_for_all(self.run_dir / "checkpoints", self.world.saving)
        if found.checkpoint is None:
            raise DivergedError(self.step, f"{reason}, and there is no checkpoint to go back to")
        self._load(found.checkpoint)
        name, samples = found.checkpoint.folder.name, self._samples(self.step - 1)
        self.records.event("rolled_back", step=self.step, checkpoint=name, reason=reason, samples=samples)
        self._save(saver)

    def _save(self, saver: Saver) -> None:
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
        self._settle(saver.start(about))
        self.saved_step = self.step
        self.progress.phase(Phase.STEPPING)

    def _settle(self, outcome: Outcome | None) -> None:
        """Tell how a save ended. A failed one costs nothing but itself: the last good checkpoint still stands."""
        if outcome is None or self.world.rank != 0:
            return
        if outcome.error is None:
            self.records.commit(outcome)
            self.progress.committed(outcome.step)
        else:
            self.records.event("save_failed", step=outcome.step, reason=outcome.error)

    def _last_save(self, saver: Saver) -> str | None:
        """Save where the last step isn't saved yet, and wait; why it failed, the same on every rank."""
        if self.saved_step != self.step:
            self._save(saver)
        self.progress.phase(Phase.SAVING)
        outcome = saver.finish()
        self._settle(outcome)
        failure = [outcome.error if outcome is not None else None]
        dist.broadcast_object_list(failure, src=0, group=self.world.saving)
        return failure[0]

    def _export(self) -> None:
        self.progress.phase(Phase.EXPORTING)
        weights = whole_weights(self.network)
        if self.world.rank == 0:
            recipe = Recipe.of(self.config)
            folder = self.run_dir / "export"
            write_export(folder, self.config.model, weights, recipe, run=self.config.name, step=self.step)
            self.records.event("exported", step=self.step, folder=str(folder))
        dist.barrier()
