"""Weights as a folder, and images from it."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import Krea2Transformer2DModel
from ranks import group
from safetensors.torch import load_file, save_file

from captioned import captioned_images, tiny_run
from tidegate.checkpoint.files import FileSeen, sha256_of
from tidegate.data.prepare import prepare
from tidegate.errors import ModelRefusedError
from tidegate.train.export import load_export, write_export
from tidegate.train.export_manifest import MANIFEST, ExportManifest, export_id
from tidegate.train.loop import run
from tidegate.train.model import seeded
from tidegate.train.progress import NullProgress
from tidegate.train.recipe import Recipe
from tidegate.train.sample import Cancelled, sample

CONFIG = tiny_run()
RECIPE = Recipe.of(CONFIG)
JOB = Path(__file__).parents[2] / "jobs" / "export_pipeline.py"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def exported(folder: Path, seed: int = 0) -> Path:
    weights = seeded(CONFIG.model, seed).state_dict()
    write_export(folder, CONFIG.model, weights, RECIPE, run="tiny", step=7)
    return folder


def vouch(folder: Path) -> None:
    """Write a manifest that agrees with the files as they are now: a writer that was wrong, not a disk that was."""
    manifest = ExportManifest.model_validate_json((folder / MANIFEST).read_bytes())
    files = tuple(
        FileSeen(name=file.name, bytes=(folder / file.name).stat().st_size, sha256=sha256_of(folder / file.name))
        for file in manifest.files
    )
    (folder / MANIFEST).write_text(manifest.model_copy(update={"files": files}).model_dump_json())


def test_a_round_trip(tmp_path: Path) -> None:
    folder = exported(tmp_path / "a")
    network, recipe = load_export(folder)
    assert recipe == RECIPE
    assert not network.training
    for name, tensor in seeded(CONFIG.model, 0).state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_diffusers_loads_it(tmp_path: Path) -> None:
    theirs = Krea2Transformer2DModel.from_pretrained(exported(tmp_path / "a") / "transformer")
    ours, _ = load_export(tmp_path / "a")
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in theirs.state_dict().items())


def test_the_id_is_the_content_s(tmp_path: Path) -> None:
    same = export_id(exported(tmp_path / "a")), export_id(exported(tmp_path / "b"))
    assert same[0] == same[1] != export_id(exported(tmp_path / "c", seed=1))


def test_an_export_is_replaced_whole(tmp_path: Path) -> None:
    before = export_id(exported(tmp_path / "a"))
    assert export_id(exported(tmp_path / "a", seed=1)) != before
    load_export(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_weights_are_not_exported(tmp_path: Path) -> None:
    weights = seeded(CONFIG.model, 0).state_dict()
    del weights["img_in.bias"]
    with pytest.raises(RuntimeError, match=r"img_in\.bias"):
        write_export(tmp_path / "a", CONFIG.model, weights, RECIPE, run="tiny", step=7)
    assert list(tmp_path.iterdir()) == []


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    vouch(folder)


def _flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def _wrong_heads(folder: Path) -> None:
    config = json.loads((folder / "transformer/config.json").read_text())
    (folder / "transformer/config.json").write_text(json.dumps({**config, "num_key_value_heads": 3}))
    vouch(folder)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_flip, "content differs from the manifest's hash"),
        (lambda folder: (folder / WEIGHTS).unlink(), "No such file or directory"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"abc"), "3 bytes, must be"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json: No such file or directory"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json: "),
        (lambda folder: _edit(folder, lambda weights: weights.pop("img_in.bias")), "1 missing, first img_in.bias"),
        (
            lambda folder: _edit(folder, lambda weights: weights.update(other=torch.zeros(1))),
            "1 that the network does not have, first other",
        ),
        (
            lambda folder: _edit(folder, lambda weights: weights.update({"img_in.bias": torch.zeros(3)})),
            "img_in.bias: shape (3,), must be (32,)",
        ),
        (
            lambda folder: _edit(folder, lambda weights: weights["img_in.bias"].fill_(torch.nan)),
            "img_in.bias: has values that are not finite",
        ),
        (_wrong_heads, "num_attention_heads must be a multiple of num_key_value_heads"),
    ],
)
def test_what_is_not_whole_is_refused_and_says_why(tmp_path: Path, harm: Callable[[Path], None], says: str) -> None:
    """C193: every tensor is checked before any is used."""
    folder = exported(tmp_path / "a")
    harm(folder)
    with pytest.raises(ModelRefusedError) as error:
        load_export(folder)
    assert str(folder) in str(error.value)
    assert says in str(error.value)


# Sampling


def test_an_image_is_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    network, recipe = load_export(exported(tmp_path / "a"))
    together = sample(network, recipe, ["white", "black", "grey"], [5, 6, 7])
    assert together.shape == (3, 4, 4)
    assert together.dtype == np.uint8
    alone = sample(network, recipe, ["black"], [6])
    # Matrix products of another size may round otherwise in the last bit.
    assert np.abs(alone[0].astype(int) - together[1]).max() <= 1
    assert not np.array_equal(together[0], together[1])


def test_colour_images_have_channels_last() -> None:
    config = tiny_run(
        image={"width": 4, "height": 6, "channels": 3, "patch": 2},
        model={**CONFIG.model.model_dump(), "in_channels": 12},
    )
    images = sample(seeded(config.model, 0), Recipe.of(config), ["a"], [1], steps=1)
    assert images.shape == (1, 6, 4, 3)


def test_sampling_is_cancelled_between_steps() -> None:
    network, done = seeded(CONFIG.model, 0), []
    with pytest.raises(Cancelled, match="cancelled after 2 of 4 steps"):
        sample(
            network,
            RECIPE,
            ["a"],
            [1],
            on_step=lambda step, steps: done.append((step, steps)),
            cancelled=lambda: len(done) == 2,
        )
    assert done == [(1, 4), (2, 4)]


def test_a_seed_for_each_prompt() -> None:
    with pytest.raises(ValueError, match="one seed for each prompt"):
        sample(seeded(CONFIG.model, 0), RECIPE, ["a"], [1, 2])


# The job


def job(rank: int, arguments: list[str], output: Path) -> None:
    """`jobs/export_pipeline.py`, in a process that has imported torch already."""
    sys.argv = ["export_pipeline.py", *arguments]
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runpy.run_path(str(JOB), run_name="__main__")


def test_the_job_exports_a_run_or_fresh_weights(tmp_path: Path) -> None:
    prepare(captioned_images(tmp_path / "images", 9), tmp_path / "data", seed=0, rows_per_shard=10)
    run(tiny_run(steps=5), tmp_path / "data", tmp_path / "run", NullProgress())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_run(steps=5).model_dump(mode="json")))
    arguments, said = ["--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out")], tmp_path / "said"

    assert group(1, job, [*arguments, "--checkpoint", str(tmp_path / "run")], said) == [0]
    assert "tiny at step 5, export " in said.read_text()
    assert export_id(tmp_path / "out") == export_id(tmp_path / "run" / "export")

    assert group(1, job, [*arguments, "--fresh"], said) == [0]
    assert "tiny at step 0, export " in said.read_text()
    assert export_id(tmp_path / "out") != export_id(tmp_path / "run" / "export")

    assert group(1, job, [*arguments, "--checkpoint", str(tmp_path / "images")], said) == [1]
    assert "hint: --fresh" in said.read_text()


def imports_ray(rank: int) -> None:
    sys.exit("ray" in sys.modules)


def test_these_rooms_do_not_import_ray() -> None:
    """The forkserver that the ranks come from has loaded all three rooms and nothing else."""
    assert group(1, imports_ray) == [0]
