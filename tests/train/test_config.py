"""A run's file."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel

from tidegate.errors import PolicyError
from tidegate.spec.load import load_model, parse_model
from tidegate.train.config import RunConfig
from tidegate.train.mesh import mesh_shape
from tidegate.train.model import arguments, build, seeded
from tidegate.train.stages import stages

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
DIGITS = CONFIGS / "digits.yaml"


def test_the_digits_run() -> None:
    config = load_model(DIGITS, RunConfig)
    assert config.checkpoint.every_steps == 20
    network = seeded(config.model, config.seed)
    assert 0.75e6 < sum(parameter.numel() for parameter in network.parameters()) < 0.9e6
    assert config.image.tokens == 16


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),
    [("digits", 0.8, [16]), ("small", 43, [256]), ("base", 220, [256, 1024]), ("krea2", 12_820, [256, 1024, 4096])],
)
def test_the_sizes_of_the_configs(name: str, millions: float, tokens: list[int]) -> None:
    """krea2.md 2.3; the full one is the 12.82 B of Krea 2's own checkpoint."""
    config = load_model(CONFIGS / f"{name}.yaml", RunConfig)
    with torch.device("meta"):
        network = build(config.model)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
    assert [stage.image.tokens for stage in stages(config)] == tokens
    assert mesh_shape(128, config.parallel).data == 128


def test_krea_2_by_its_defaults() -> None:
    """Every argument that diffusers gives a default is the same in ours."""
    config = load_model(CONFIGS / "krea2.yaml", RunConfig)
    defaults = inspect.signature(Krea2Transformer2DModel.__init__).parameters
    assert {name: defaults[name].default for name in arguments(config.model)} == arguments(config.model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("in_channels: 4", "in_channels: 8"), "model.in_channels must be image.channels × image.patch² = 4"),
        (("text_hidden_dim: 32", "text_hidden_dim: 64"), "model.text_hidden_dim must be text.width = 32"),
        (("num_text_layers: 1", "num_text_layers: 2"), "model.num_text_layers must be text.layers = 1"),
        (("width: 8", "width: 9"), "image: width and height must be multiples of patch 2"),
        (
            ("axes_dims_rope: [8,", "axes_dims_rope: [9,"),
            "axes_dims_rope sums to 33; must sum to attention_head_dim",
        ),
        (("every_steps: 20", "every: 20"), "checkpoint.every: no such key; did you mean `every_steps`?"),
        (
            ("seed: 0\n", "seed: 0\nparallel: {tensor: 4}\n"),
            "parallel.tensor 4 must divide model.num_key_value_heads, 2",
        ),
        (
            ("seed: 0\n", "seed: 0\nparallel: {replicate: rest}\n"),
            "parallel: only one of replicate and shard can be `rest`",
        ),
        (
            ("seed: 0\n", "seed: 0\nstages: [{name: a, steps: 9}]\n"),
            "steps must be the sum of the stages' steps, 9, got 400",
        ),
        (
            ("seed: 0\n", "seed: 0\nstages: [{name: a, steps: 400, width: 7}]\n"),
            "stage a: width and height must be multiples of 2",
        ),
        (("sample: {", "sample: {every_steps: 5, "), "sample: prompts must name at least one"),
        (("seed: 0\n", 'seed: "0"\n'), "seed: "),
    ],
)
def test_nonsense_is_refused_by_its_path(change: tuple[str, str], says: str) -> None:
    text = DIGITS.read_text()
    assert change[0] in text
    with pytest.raises(PolicyError) as error:
        parse_model(text.replace(*change), RunConfig, name="digits.yaml")
    assert says in str(error.value)
    assert str(error.value).startswith("digits.yaml:")


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ("store: s3://bucket", "checkpoint.store: s3://bucket: must be s3://bucket/prefix, the prefix one run's own"),
        ("store: /mnt/x", "checkpoint.store: /mnt/x: must be s3://bucket/prefix"),
        ("store_keep: 3", "checkpoint: store_keep does nothing without store"),
        (
            "store: s3://bkt/x, store_every_steps: 30",
            "checkpoint: store_every_steps must be a multiple of every_steps, 20",
        ),
        ("store: s3://bkt/x, store_endpoint: minio:9000", "checkpoint.store_endpoint: "),
    ],
)
def test_a_store_that_makes_no_sense(checkpoint: str, says: str) -> None:
    text = DIGITS.read_text()
    assert "every_steps: 20, keep: 3" in text
    with pytest.raises(PolicyError) as error:
        parse_model(text.replace("keep: 3", f"keep: 3, {checkpoint}"), RunConfig, name="digits.yaml")
    assert says in str(error.value)
