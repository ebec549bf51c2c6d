"""The engine on whole diffusers pipelines: Krea 2's stepped, another kind's as a whole, from disk and from S3."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    Krea2Transformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

import tiny_pipeline
from object_stores import BUCKET
from tidegate.errors import ModelRefusedError
from tidegate.serve.engine import Engine
from tidegate.serve.fetching import fetched
from tidegate.serve.options import EngineOptions
from tidegate.serve.painters.stepwise import StepPainter
from tidegate.serve.work import Partial, Size, UnfitError
from tidegate.testing.faulty_proxy import FaultyProxy
from tidegate.train.sample import Cancelled

WIDE, SQUARE = Size(32, 16), Size(16, 16)
OPTIONS = EngineOptions(sizes=(SQUARE, WIDE), batch_max=4, text_length=16)


@pytest.fixture(scope="module")
def krea(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=12,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=48,
            timestep_embed_dim=32,
            text_hidden_dim=tiny_pipeline.WIDTH,
            num_text_layers=tiny_pipeline.LAYERS,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 4, 4),
        )
    return tiny_pipeline.write_pipeline(tmp_path_factory.mktemp("krea") / "krea", network)


@pytest.fixture(scope="module")
def engine(krea: Path) -> Any:
    engine = Engine(krea, OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion's shape: a UNet, latents of four axes, guidance in the usual scale."""
    folder = tmp_path_factory.mktemp("other") / "sd"
    tokenizer = tiny_pipeline._tokenizer()
    tokenizer.model_max_length = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        pipeline = StableDiffusionPipeline(
            vae=AutoencoderKL(
                block_out_channels=(8, 8),
                norm_num_groups=4,
                latent_channels=4,
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
            ),
            text_encoder=CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=256,
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    max_position_embeddings=16,
                )
            ),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(
                sample_size=8,
                block_out_channels=(8, 8),
                norm_num_groups=4,
                layers_per_block=1,
                cross_attention_dim=16,
                attention_head_dim=2,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            ),
            scheduler=EulerDiscreteScheduler(steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png))).astype(int)


def theirs(folder: Path, prompt: str, seed: int, size: Size, **more: Any) -> np.ndarray:
    """What diffusers itself makes of the folder."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    made = pipeline(prompt, width=size.width, height=size.height, generator=generator, output_type="np", **more)
    return (np.asarray(made.images[0]) * 255).round().astype(int)


@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_a_krea_pipeline_makes_what_diffusers_makes_to_the_bit(krea: Path, engine: Engine, guidance: float) -> None:
    """Alone bit for bit; beside others of another step, size or guidance to one level of 255."""
    asked = {"num_inference_steps": 5, "guidance_scale": guidance, "max_sequence_length": 16}
    expected = theirs(krea, "a number", 7, WIDE, **asked)
    (alone,), _ = engine.generate(["a number"], [7], size=WIDE, steps=5, guidance=guidance)
    assert np.array_equal(pixels(alone), expected)
    others = [
        engine.submit(["a color"] * 3, [1, 2, 3], size=size, steps=steps, guidance=scale)
        for size, steps, scale in ((WIDE, 9, guidance), (SQUARE, 3, guidance), (WIDE, 4, 2.0))
    ]
    (beside,), _ = engine.submit(["a number"], [7], size=WIDE, steps=5, guidance=guidance).result(30)
    assert all(len(other.result(30)[0]) == 3 for other in others)
    assert np.abs(pixels(beside) - expected).max() <= 1


def test_pictures_of_several_requests_share_their_steps(krea: Path) -> None:
    """Where batches pay a later request doesn't wait for an earlier one's end, and one that leaves leaves no trace."""
    engine = Engine(krea, OPTIONS)
    engine.warm.buckets[SQUARE].clear()  # type: ignore[attr-defined]
    engine.warm.buckets[SQUARE].update({1: 1.0, 2: 1.1, 4: 1.2})  # type: ignore[attr-defined]
    gone: list[bool] = []
    long = engine.submit(["a number"], [1], size=SQUARE, steps=100_000, cancelled=lambda: bool(gone))
    short, _ = engine.submit(["a color"] * 5, [2, 3, 4, 5, 6], size=SQUARE, steps=3).result(30)
    assert not long.done()
    gone.append(True)
    with pytest.raises(Cancelled) as cancelled:
        long.result(30)
    assert cancelled.value.steps_done >= 3
    (alone,), _ = engine.generate(["a color"], [6], size=SQUARE, steps=3)
    assert np.abs(pixels(alone) - pixels(short[4])).max() <= 1
    engine.close()


def test_unfinished_pictures_come_in_order_and_look_ever_more_like_the_end(engine: Engine) -> None:
    seen: list[Partial] = []
    pngs, _ = engine.submit(
        ["a number"] * 2, [1, 2], size=SQUARE, steps=8, guidance=0.0, partials=3, show=seen.append
    ).result(30)
    assert sorted((part.image, part.index, part.steps_done) for part in seen) == [
        (image, index, done) for image in (0, 1) for index, done in ((0, 2), (1, 4), (2, 6))
    ]
    for image in (0, 1):
        off = [np.abs(pixels(part.png) - pixels(pngs[image])).mean() for part in seen if part.image == image]
        assert off[0] >= off[-1]


def test_texts_are_encoded_once(krea: Path) -> None:
    engine = Engine(krea, OPTIONS)
    painter = engine._ready.loaded.painter
    assert isinstance(painter, StepPainter)
    before = painter.embeddings.misses
    for seed in range(3):
        engine.generate(["a number"], [seed], size=SQUARE, steps=1, guidance=2.0, negative="a color")
    assert painter.embeddings.misses == before + 2
    assert 0 < painter.embeddings.bytes <= OPTIONS.embeddings_bytes
    engine.close()


def test_the_cache_of_texts_is_bounded(krea: Path) -> None:
    """By bytes: what was used least lately goes, and a text that is larger than all of it is not kept."""
    from tidegate.serve.embeddings import Embeddings

    cache = Embeddings(limit_bytes=1000)
    encoded: list[str] = []

    def get(name: str, floats: int) -> None:
        def encode() -> tuple[torch.Tensor, ...]:
            encoded.append(name)
            return (torch.zeros(floats),)

        cache.get(name, encode)

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name, 100)
    assert encoded == ["a", "b", "c", "b"]
    assert cache.bytes == 800
    get("huge", 10_000)
    get("b", 100)
    assert encoded == ["a", "b", "c", "b", "huge"]


def test_another_pipeline_is_painted_as_a_whole(other: Path) -> None:
    engine = Engine(other, EngineOptions(sizes=(SQUARE,), batch_max=2))
    seen: list[Partial] = []
    order = engine.submit(
        ["a number"] * 3, [7, 8, 9], steps=4, guidance=5.0, negative="a color", partials=2, show=seen.append
    )
    pngs, took_s = order.result(60)
    assert took_s > 0
    expected = theirs(
        other, "a number", 9, SQUARE, num_inference_steps=4, guidance_scale=5.0, negative_prompt="a color"
    )
    assert np.abs(pixels(pngs[2]) - expected).max() <= 1
    assert [(part.image, part.steps_done) for part in seen] == sorted(
        [(part.image, part.steps_done) for part in seen],
        key=lambda at: (at[0] // max(engine.warm.buckets[SQUARE]), at[1]),
    )
    assert {(part.image, part.index) for part in seen} == {(image, index) for image in range(3) for index in (0, 1)}
    asked = iter([False, False, True])
    with pytest.raises(Cancelled) as cancelled:
        engine.generate(["a number"], [1], steps=9, cancelled=lambda: next(asked))
    assert cancelled.value.steps_done == 2
    engine.close()


def test_a_size_that_does_not_fit_is_refused_by_name(krea: Path) -> None:
    """The others are served. What it would take was reckoned from smaller ones: it was never tried."""
    from tidegate.serve.warmup import held_bytes

    huge = Size(16_384, 16_384)
    limit = held_bytes(torch.device("cpu")) + 2**30
    engine = Engine(krea, EngineOptions(sizes=(SQUARE, Size(128, 128), huge), text_length=16, memory_bytes=limit))
    assert len(engine.generate(["a number"], [1], size=SQUARE, steps=1)[0]) == 1
    with pytest.raises(UnfitError, match="16384x16384 would take") as unfit:
        engine.generate(["a number"], [1], size=huge)
    assert unfit.value.param == "size"
    with pytest.raises(UnfitError, match="is not among"):
        engine.generate(["a number"], [1], size=Size(48, 48))
    engine.close()
    with pytest.raises(ModelRefusedError, match="no size of it fits"):
        Engine(krea, EngineOptions(sizes=(huge,), text_length=16, memory_bytes=2**20))


def test_odd_sizes_are_refused_at_the_start(krea: Path) -> None:
    """C173: 800x1200 on a model that needs multiples of another number crashed a server at the first request."""
    with pytest.raises(ModelRefusedError, match="30x16: both sides must be multiples of 8"):
        Engine(krea, EngineOptions(sizes=(Size(30, 16),)))


@pytest.mark.parametrize("damage", ["torn", "missing", "shape", "no folder"])
def test_a_damaged_pipeline_is_refused(krea: Path, tmp_path: Path, damage: str) -> None:
    """diffusers would fill in random weights for a missing tensor, and say so in a log that nobody reads."""
    folder = tmp_path / "damaged"
    shutil.copytree(krea, folder)
    (weights,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    name = "transformer_blocks.0.attn.to_q.weight"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "missing":
        del tensors[name]
        save_file(tensors, weights)
    elif damage == "shape":
        save_file({**tensors, name: torch.zeros(2, 2)}, weights)
    else:
        shutil.rmtree(folder / "vae")
    with pytest.raises(ModelRefusedError, match={"no folder": "vae"}.get(damage, "transformer")):
        Engine(folder, OPTIONS)


def test_a_compiled_network_makes_the_same_pictures(krea: Path) -> None:
    """One graph for each shape that warm-up runs, and none while clients wait. Its arithmetic is fused: pictures differ
    by a rounding at most. The backend for speed, which compiles C++ for half a minute, is left out."""
    from torch._dynamo.utils import counters

    counters.clear()
    options = replace(OPTIONS, sizes=(SQUARE,), batch_max=1, compile="aot_eager")
    engine, plain = Engine(krea, options), Engine(krea, replace(options, compile="none"))
    graphs = counters["stats"]["unique_graphs"]
    asked: dict[str, Any] = {"size": SQUARE, "steps": 3}
    compiled = pixels(engine.generate(["a number"], [1], **asked)[0][0])
    assert np.abs(compiled - pixels(plain.generate(["a number"], [1], **asked)[0][0])).max() <= 1
    assert graphs >= 1
    assert counters["stats"]["unique_graphs"] == graphs
    engine.close()
    plain.close()


def test_a_pipeline_is_loaded_from_s3(
    krea: Path, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched once, whole, into a cache that another replica of the node finds; another export has another folder."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    store = boto3.client("s3")
    files = [path for path in krea.rglob("*") if path.is_file()]
    for path in files:
        store.upload_file(str(path), BUCKET, f"models/krea/{path.relative_to(krea)}")
    uri, cache = f"s3://{BUCKET}/models/krea", tmp_path / "cache"
    folder = fetched(uri, cache)
    engine, here = Engine(folder, OPTIONS), Engine(krea, OPTIONS)
    asked: dict[str, Any] = {"size": SQUARE, "steps": 2}
    assert engine.generate(["a number"], [1], **asked)[0] == here.generate(["a number"], [1], **asked)[0]
    engine.close()
    here.close()
    gets = len(proxy.seen)
    assert fetched(uri, cache) == folder
    assert len(proxy.seen) <= gets + 1  # the listing
    store.put_object(Bucket=BUCKET, Key="models/krea/model_index.json", Body=json.dumps({}).encode())
    assert fetched(uri, cache) != folder
    with pytest.raises(ModelRefusedError, match="there is nothing"):
        fetched(f"s3://{BUCKET}/models/none", cache)
    assert not list(cache.glob(".*/"))
