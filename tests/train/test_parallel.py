"""Every way to split a network gives the run of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import group, lines, losses, train
from torch.distributed.fsdp import FSDPModule

from captioned import tiny_run
from tidegate.checkpoint.restore import full_model_weights, newest_good
from tidegate.train.config import RunConfig
from tidegate.train.export import load_export
from tidegate.train.loop import run
from tidegate.train.model import build, seeded
from tidegate.train.network import grown
from tidegate.train.parallel import joined, shards_of, whole_weights
from tidegate.train.progress import NullProgress
from tidegate.train.stages import stages

LAYERWISE = {**tiny_run().model.model_dump(), "num_layerwise_text_blocks": 1}
WIDE = {**LAYERWISE, "attention_head_dim": 8, "intermediate_size": 36}  # 36 over 4 is no multiple of 8: uneven shards


def tiny(**changes: object) -> RunConfig:
    return tiny_run(steps=6, model=WIDE, checkpoint={"every_steps": 3, "keep": 9}, **changes)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone")
    run(tiny(), data, run_dir, NullProgress())
    return run_dir


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"replicate": 2}),
        (2, {"tensor": 2}),
        (4, {"replicate": 2, "shard": 2, "per_block": True}),
        (4, {"shard": 2, "tensor": 2, "per_block": True}),
        (4, {"replicate": 2, "shard": 1, "tensor": 2}),
    ],
    ids=["replicas", "tensor", "hsdp", "fsdp-tensor", "replicas-tensor"],
)
def test_losses_are_those_of_one_rank(
    ranks: int, parallel: dict[str, object], alone: Path, data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms, checkpoints and export; a run of one rank goes on from the checkpoint in the middle."""
    assert group(ranks, train, tiny(parallel=parallel), data, tmp_path, 0, {}) == [0] * ranks
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(tmp_path, "grad_norm") == pytest.approx(losses(alone, "grad_norm"), rel=1e-3)
    ours, theirs = (load_export(folder / "export")[0].state_dict() for folder in (tmp_path, alone))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)
    checkpoint = newest_good(tmp_path / "checkpoints").checkpoint
    assert checkpoint is not None
    assert all(torch.equal(ours[name], tensor) for name, tensor in full_model_weights(checkpoint).items())

    # The checkpoint of step 3 alone, continued by one rank.
    (tmp_path / "checkpoints" / "step-00000006.g0" / "manifest.json").unlink()
    run(tiny(), data, tmp_path, NullProgress(), generation=1)
    assert [line["step"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "restored"] == [3]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-4)


def whole(rank: int, config: RunConfig) -> None:
    """All ranks together hold the fresh weights of `seeded`, each number saved by one of them alone."""
    plan = stages(config)[0]
    with joined(30, config.parallel) as world:
        network = grown(config, plan, world)
        fresh = seeded(config.model, config.seed).state_dict()
        gathered = whole_weights(network, keep=True)
        assert gathered.keys() == fresh.keys()
        assert all(torch.equal(gathered[name], tensor) for name, tensor in fresh.items())
        wrapped = [module for module in network.modules() if isinstance(module, FSDPModule)]
        assert len(wrapped) == (1 + config.model.num_layers if config.parallel.per_block else 1)
        saved = torch.zeros(1)
        for shard in shards_of(network, world):
            box = tuple(
                slice(start, start + length) for start, length in zip(shard.offsets, shard.local.shape, strict=True)
            )
            assert torch.equal(fresh[shard.name][box], shard.local), shard.name
            saved += shard.local.numel() * shard.saves
        torch.distributed.all_reduce(saved)
        assert int(saved) == sum(tensor.numel() for tensor in fresh.values())


@pytest.mark.parametrize("parallel", [{"replicate": 2, "tensor": 2}, {"shard": 2, "tensor": 2, "per_block": True}])
def test_a_split_network_is_the_whole_one(parallel: dict[str, object]) -> None:
    assert group(4, whole, tiny(parallel=parallel)) == [0] * 4


def test_weights_drawn_a_part_at_a_time_are_those_of_diffusers() -> None:
    config = tiny_run(model=LAYERWISE)
    torch.manual_seed(5)
    theirs = build(config.model).state_dict()
    seen: list[str] = []
    ours = seeded(config.model, 5, lambda part: seen.append(type(part).__name__)).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert seen.count("Krea2TransformerBlock") == config.model.num_layers
