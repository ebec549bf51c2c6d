"""A run's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import PolicyError
from tidegate.spec.load import load_model, parse_model
from tidegate.train.config import RunConfig
from tidegate.train.model import seeded

DIGITS = Path(__file__).parents[2] / "jobs" / "configs" / "digits.yaml"


def test_the_digits_run() -> None:
    config = load_model(DIGITS, RunConfig)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.checkpoint.every_steps == 20
    network = seeded(config.model, config.seed)
    assert 0.75e6 < sum(parameter.numel() for parameter in network.parameters()) < 0.9e6
    assert config.image.tokens == 16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("in_channels: 4", "in_channels: 8"), "model.in_channels must be image.channels × image.patch² = 4"),
        (("text_hidden_dim: 32", "text_hidden_dim: 64"), "model.text_hidden_dim must be text.width = 32"),
        (("num_text_layers: 1", "num_text_layers: 2"), "model.num_text_layers must be 1"),
        (("width: 8", "width: 9"), "image: width and height must be multiples of patch 2"),
        (
            ("axes_dims_rope: [8,", "axes_dims_rope: [9,"),
            "axes_dims_rope sums to 33; must sum to attention_head_dim",
        ),
        (("every_steps: 20", "every: 20"), "checkpoint.every: no such key; did you mean `every_steps`?"),
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
