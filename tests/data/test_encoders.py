"""Latents and text states: as the pipeline's own code makes them, through shards and loader to the network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import Krea2Pipeline
from test_preparation import colourful, content, settings

from captioned import tiny_run
from tidegate.data.dataset import Dataset
from tidegate.data.encoders import Encoders
from tidegate.data.loader import Loader
from tidegate.data.parts import from_bytes, to_bytes
from tidegate.data.preparation import Preparation
from tidegate.errors import DataError
from tidegate.train.config import RunConfig
from tidegate.train.inputs import Inputs, dataset_of
from tidegate.train.loop import run
from tidegate.train.progress import NullProgress
from tidegate.train.stages import stages
from tiny_pipeline import CHANNELS, FACTOR, LAYERS, WIDTH, write_pipeline

LENGTH = 12


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def shards(pipeline: Path) -> Path:
    out = pipeline.parent / "encoded-shards"
    prepared(colourful(pipeline.parent / "encoded-photos", 24), out, pipeline)
    return out


def prepared(photos: Path, out: Path, pipeline: Path, *, keep_images: bool = False) -> None:
    asked = settings(
        photos,
        out,
        resolution=32,
        pipeline=str(pipeline),
        latents=True,
        text_length=LENGTH,
        encode_batch=3,
        keep_images=keep_images,
    )
    preparation = Preparation(asked)
    encoders = Encoders(str(pipeline), latents=True, text_length=LENGTH, batch=3, device="cpu")
    pending = preparation.begin()
    preparation.keep_encoders(*encoders.about())
    for number, split in pending.items():
        for name, part in preparation.read(number, split):
            preparation.keep(name, to_bytes(encoders.encode(from_bytes(part), keep_images=keep_images)))
    for plan in preparation.plan():
        preparation.write_shard(plan)
    preparation.finish()


def encoded_run(**changes: object) -> RunConfig:
    model = tiny_run().model.model_dump() | {
        "in_channels": CHANNELS * 4,
        "text_hidden_dim": WIDTH,
        "num_text_layers": LAYERS,
    }
    image = {"width": 32, "height": 32, "channels": CHANNELS, "patch": 2, "latent_factor": FACTOR, "buckets": True}
    text = {"length": LENGTH, "width": WIDTH, "layers": LAYERS, "encoder": "prepared"}
    return tiny_run(**{"model": model, "image": image, "text": text, **changes})


@torch.inference_mode()
def test_what_the_network_gets_is_what_the_pipeline_would_compute(shards: Path, pipeline: Path) -> None:
    """Latents normalised per channel, tokens of the bucket's shape, states of each caption's real tokens; a dropped
    caption has the states of the empty one."""
    config = encoded_run(objective={"captions_dropped": 0.5})
    [stage] = stages(config)
    data = dataset_of(config, stage, shards)
    with_images = pipeline.parent / "encoded-with-images"
    prepared(pipeline.parent / "encoded-photos", with_images, pipeline, keep_images=True)
    pictures = Dataset(with_images, width=32, height=32, channels=3, buckets=True)
    theirs = Krea2Pipeline.from_pretrained(pipeline, transformer=None)
    inputs, dropped, sizes = Inputs(config, stage, data, torch.device("cpu")), 0, set()
    with Loader(data, seed=0, global_batch=5, rank=0, world_size=1, start_step=0, end_step=8) as loader:
        for batch in loader:
            given = inputs.of(batch)
            sizes.add(batch.size)
            pixels = torch.from_numpy(pictures.rows(np.array(batch.ids)).pixels).permute(0, 3, 1, 2) / 127.5 - 1
            latents = theirs.vae.encode(pixels[:, :, None]).latent_dist.mode()
            mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (data.latents.mean, data.latents.std))
            rows, columns = batch.size.height // FACTOR, batch.size.width // FACTOR
            tokens = theirs._pack_latents(((latents - mean) / std)[:, :, 0], len(pixels), CHANNELS, rows, columns)
            assert torch.allclose(given.image, tokens, atol=2e-2, rtol=2e-3)
            place_ids = theirs.prepare_position_ids(LENGTH, rows // 2, columns // 2, torch.device("cpu"))
            assert torch.equal(given.places, place_ids)
            for caption, states, mask in zip(batch.captions, given.states, given.mask, strict=True):
                long, empty = (theirs.encode_prompt(text, max_sequence_length=LENGTH) for text in (caption, ""))
                is_dropped = int(mask.sum()) == int(empty[1].sum())
                dropped += is_dropped
                wanted, real = empty if is_dropped else long
                assert torch.allclose(states[mask], wanted[real], atol=1e-2, rtol=2e-3)
                assert not states[~mask].any()
    assert len(sizes) == 3
    assert 8 < dropped < 32


def test_the_same_again_and_no_pictures(shards: Path, pipeline: Path, tmp_path: Path) -> None:
    prepared(pipeline.parent / "encoded-photos", tmp_path / "again", pipeline)
    assert content(tmp_path / "again") == content(shards)
    with pytest.raises(DataError, match="holds no pictures, only latents\nhint: "):
        Dataset(shards, width=32, height=32, channels=3, buckets=True)
    schema = pq.read_schema(shards / "train-00000-of-00006.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["latent"] == {"feature": {"dtype": "float16", "_type": "Value"}, "_type": "Sequence"}


def test_a_run_over_latents_and_text_states_learns(shards: Path, tmp_path: Path) -> None:
    run(encoded_run(steps=6), shards, tmp_path / "run", NullProgress())
    assert (tmp_path / "run" / "export" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image": {"width": 32, "height": 32, "channels": 4, "patch": 2, "latent_factor": 8}}, "images must be 32x32"),
        (
            {"image": {"width": 32, "height": 32, "channels": 4, "patch": 2, "latent_factor": 8, "buckets": True}},
            r"sizes must be multiples of 16, has .*\nhint: prepare with --multiple 16",
        ),
        (
            {"image": {"width": 32, "height": 32, "channels": 4, "patch": 2, "latent_factor": 2, "buckets": True}},
            r"image\.latent_factor is 2, the data set has 4\nhint: set image.latent_factor: 4",
        ),
        (
            {"text": {"length": 13, "width": WIDTH, "layers": LAYERS, "encoder": "prepared"}},
            r"text\.length is 13, the data set has 12\nhint: set text.length: 12",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_training(
    shards: Path, changes: dict[str, object], says: str
) -> None:
    config = encoded_run(**changes)
    with pytest.raises(DataError, match=says):
        dataset_of(config, stages(config)[0], shards)


def test_what_was_not_prepared_is_named(tmp_path: Path) -> None:
    photos = colourful(tmp_path / "photos", 3)
    preparation = Preparation(settings(photos, tmp_path / "out", resolution=32))
    for number, split in preparation.begin().items():
        for name, part in preparation.read(number, split):
            preparation.keep(name, part)
    for plan in preparation.plan():
        preparation.write_shard(plan)
    preparation.finish()
    with pytest.raises(DataError, match="has no latents\nhint: prepare with --pipeline"):
        dataset_of(encoded_run(), stages(encoded_run())[0], tmp_path / "out")
    with pytest.raises(DataError, match="need their encoders\nhint: --pipeline FOLDER"):
        Preparation(settings(photos, tmp_path / "other", resolution=32, latents=True))
