"""A whole Krea 2 pipeline, random and tiny: exported by the job, loaded by diffusers, painted by our engine."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
)
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLModel

from captioned import tiny_run
from tidegate.errors import ConfigError, ModelRefusedError
from tidegate.serve.engine import Engine
from tidegate.train.config import RunConfig
from tidegate.train.export import load_export, write_export
from tidegate.train.export_manifest import MANIFEST, ExportManifest, export_id
from tidegate.train.model import seeded
from tidegate.train.recipe import Recipe
from tidegate.train.sample import Cancelled, grid

JOB = Path(__file__).parents[2] / "jobs" / "export_pipeline.py"
LAYERS = (0, 1, 2)
LENGTH = 16


def config(**changes: object) -> RunConfig:
    """Latents of 4 channels, 2 pixels a side; three states a token, of a text encoder 16 wide."""
    model = tiny_run().model.model_dump() | {
        "in_channels": 16,
        "text_hidden_dim": 16,
        "num_text_layers": 3,
        "num_layerwise_text_blocks": 1,
    }
    values: dict[str, object] = {
        "name": "latents",
        "image": {"width": 32, "height": 16, "channels": 4, "patch": 2, "latent_factor": 2},
        "text": {"length": LENGTH, "width": 16, "encoder": "prepared", "layers": 3},
        "model": model,
        "sample": {"steps": 3, "shift": "resolution", "guidance": 2.0},
    }
    return tiny_run(**{**values, **changes})


def words() -> PreTrainedTokenizerFast:
    """A word a token, so that the template has the 34 and 5 tokens which the pipeline counts on."""
    template = Krea2Pipeline.__init__.__code__.co_consts
    text = " ".join(part for part in template if isinstance(part, str)) + " a red fox in the snow blue"
    split = Split(Regex(r"<\|\w+\|>|\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    known = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[UNK]"]
    known += sorted({word for word, _ in split.pre_tokenize_str(text)} - set(known))
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in known[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", unk_token="[UNK]")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline as somebody else saved it, with another network in it."""
    folder = tmp_path_factory.mktemp("parts") / "krea2"
    torch.manual_seed(0)
    tokenizer = words()
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    encoder = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}))
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[0.9] * 4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    network = seeded(config().model, 99)
    Krea2Pipeline(scheduler, vae, encoder, tokenizer, network, text_encoder_select_layers=LAYERS).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def exported(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "run.yaml").write_text(yaml.safe_dump(config().model_dump(mode="json")))
    arguments = ["--config", str(folder / "run.yaml"), "--fresh", "--parts", str(parts), "--out", str(folder / "out")]
    before, sys.argv = sys.argv, ["export_pipeline.py", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(JOB), run_name="__main__")
    finally:
        sys.argv = before
    assert "latents at step 0, export " in said.getvalue()
    return folder / "out"


def test_diffusers_loads_the_whole_folder(exported: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(exported)
    assert type(pipeline) is Krea2Pipeline
    fresh = seeded(config().model, config().seed).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in pipeline.transformer.state_dict().items())
    assert pipeline.text_encoder_select_layers == LAYERS
    assert (pipeline.patch_size, pipeline.vae_scale_factor, pipeline.config.is_distilled) == (2, 2, False)
    states, mask = pipeline.get_text_hidden_states(["a red fox"], max_sequence_length=LENGTH)
    assert states.shape == (1, LENGTH, 3, 16)
    assert mask[0].tolist() == [True] * 3 + [False] * (LENGTH - 8) + [True] * 5, "three words, and the suffix of five"


@pytest.mark.parametrize("shift", ["resolution", 2.5], ids=str)
def test_the_shift_travels_in_the_scheduler(shift: str | float, parts: Path, tmp_path: Path) -> None:
    """diffusers steps through our own sampler's grid."""
    run = config(sample={"steps": 5, "shift": shift})
    weights = seeded(run.model, 0).state_dict()
    write_export(tmp_path / "out", run.model, weights, Recipe.of(run), run="a", step=1, parts=parts)
    _, recipe = load_export(tmp_path / "out")
    assert recipe.shift == shift
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    pipeline("a fox", width=32, height=16, num_inference_steps=5, max_sequence_length=LENGTH, output_type="latent")
    times = [*(pipeline.scheduler.timesteps / 1000).tolist(), 0.0]
    from tidegate.train.objective import shift_of

    assert times == pytest.approx(grid(5, shift_of(recipe.shift, run.image.tokens)), abs=1e-5)


def test_the_engine_paints_what_diffusers_paints(exported: Path) -> None:
    engine = Engine(exported)
    pngs, _ = engine.generate(["a red fox", "snow"], [7, 8])
    ours = np.stack([np.asarray(Image.open(io.BytesIO(png))) for png in pngs])
    assert ours.shape == (2, 16, 32, 3)
    pipeline = DiffusionPipeline.from_pretrained(exported)
    pipeline.set_progress_bar_config(disable=True)

    def theirs(prompts: list[str], seeds: list[int], guidance: float, negative: str | None) -> np.ndarray:
        made = pipeline(
            prompts,
            negative_prompt=negative,
            width=32,
            height=16,
            num_inference_steps=3,
            guidance_scale=guidance,
            max_sequence_length=LENGTH,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
        )
        return np.asarray(made.images) * 255

    assert np.abs(ours - theirs(["a red fox", "snow"], [7, 8], 2.0, None)).max() <= 1
    led, _ = engine.generate(["snow"], [8], guidance=300.0, negative="a red fox")  # untrained weights hardly listen
    led_pixels = np.asarray(Image.open(io.BytesIO(led[0])))
    assert np.abs(led_pixels - theirs(["snow"], [8], 300.0, "a red fox")[0]).max() <= 1
    assert np.abs(led_pixels.astype(int) - ours[1]).max() > 5
    alone, _ = engine.generate(["snow"], [8])
    assert np.abs(np.asarray(Image.open(io.BytesIO(alone[0]))).astype(int) - ours[1]).max() <= 1
    assert engine.generate(["snow"], [8], steps=1)[0] != alone


def test_it_stops_between_two_steps(exported: Path) -> None:
    engine = Engine(exported)
    asked = iter([False, False, True])
    with pytest.raises(Cancelled, match="cancelled after 2 of 9 steps"):
        engine.generate(["snow"], [1], steps=9, cancelled=lambda: next(asked))
    with pytest.raises(Cancelled, match="cancelled after 0"):
        engine.generate(["snow"], [1], cancelled=lambda: True)


def test_every_part_is_in_the_manifest(exported: Path, tmp_path: Path) -> None:
    """C193: a flipped bit in the text encoder is found before anything is loaded."""
    listed = {file.name for file in ExportManifest.model_validate_json((exported / MANIFEST).read_bytes()).files}
    assert {"model_index.json", "scheduler/scheduler_config.json", "recipe.json"} < listed
    assert {name.split("/")[0] for name in listed if "/" in name} == {
        "scheduler", "text_encoder", "tokenizer", "transformer", "vae",
    }  # fmt: skip
    shutil.copytree(exported, tmp_path / "torn")
    [weights] = (tmp_path / "torn" / "text_encoder").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelRefusedError, match="text_encoder/"):
        Engine(tmp_path / "torn")


def test_latents_without_the_other_parts_are_not_served(tmp_path: Path) -> None:
    run = config()
    write_export(tmp_path / "out", run.model, seeded(run.model, 0).state_dict(), Recipe.of(run), run="a", step=1)
    with pytest.raises(ModelRefusedError, match="--parts"):
        Engine(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": {"length": 16, "width": 16, "encoder": "prepared", "layers": 2}, "layers": 2}, "select_layers"),
        (
            {"image": {"width": 32, "height": 16, "channels": 4, "patch": 2, "latent_factor": 4}},
            "latent_factor: 2 there, 4",
        ),
    ],
    ids=["layers", "factor"],
)
def test_parts_of_another_network_are_refused(
    changes: dict[str, object], says: str, parts: Path, tmp_path: Path
) -> None:
    changes = dict(changes)
    layers = changes.pop("layers", 3)
    run = config(model=config().model.model_dump() | {"num_text_layers": layers}, **changes)
    with pytest.raises(ConfigError, match=says):
        write_export(
            tmp_path / "a", run.model, seeded(run.model, 0).state_dict(), Recipe.of(run), run="a", step=1, parts=parts
        )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_pipeline_is_refused(parts: Path, tmp_path: Path) -> None:
    run = config()
    weights = seeded(run.model, 0).state_dict()
    shutil.copytree(parts, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "vae")
    for folder, says in ((tmp_path / "parts", "has no vae"), (tmp_path, "model_index.json")):
        with pytest.raises(ConfigError, match=rf"{says}(.|\n)*hint: take the folder of a whole Krea2Pipeline"):
            write_export(tmp_path / "a", run.model, weights, Recipe.of(run), run="a", step=1, parts=folder)


def test_the_index_names_what_the_parts_are(exported: Path, parts: Path) -> None:
    ours, theirs = (json.loads((folder / "model_index.json").read_text()) for folder in (exported, parts))
    assert {**ours, "_diffusers_version": None} == {**theirs, "_diffusers_version": None}
    assert export_id(exported)
