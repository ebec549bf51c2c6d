"""The engine on a real export: the same seed the same picture, cancel between steps, swap only what is whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tidegate.errors import ModelRefusedError
from tidegate.serve.engine import Engine
from tidegate.spec.load import load_model
from tidegate.train.config import ImageSpec, RunConfig
from tidegate.train.export import write_export
from tidegate.train.export_manifest import export_id
from tidegate.train.model import seeded
from tidegate.train.recipe import Recipe
from tidegate.train.sample import Cancelled

CONFIG = load_model(Path(__file__).parents[2] / "jobs" / "configs" / "digits.yaml", RunConfig)


def export(folder: Path, seed: int, image: ImageSpec = CONFIG.image) -> Path:
    recipe = Recipe.of(CONFIG).model_copy(update={"image": image})
    write_export(folder, CONFIG.model, seeded(CONFIG.model, seed).state_dict(), recipe, run="test", step=seed)
    return folder


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("exports") / "first", 1)


def test_a_seed_means_one_picture_alone_or_in_a_batch(first: Path) -> None:
    engine = Engine(first)
    batch, took_s = engine.generate(["a two"] * 3, [7, 8, 9], steps=4)
    alone, _ = engine.generate(["a two"], [9], steps=4)
    assert alone[0] == batch[2]
    assert len(set(batch)) == 3
    assert took_s > 0
    image = Image.open(io.BytesIO(alone[0]))
    assert (image.format, image.size, image.mode) == ("PNG", (8, 8), "L")


def test_guidance_and_a_negative_prompt_change_the_picture(first: Path) -> None:
    engine = Engine(first)
    own, none, guided, away = (
        engine.generate(["a two"], [7], steps=4, **how)[0][0]
        for how in (
            dict[str, Any](),
            {"guidance": CONFIG.sample.guidance},
            {"guidance": 3.0},
            {"guidance": 3.0, "negative": "a seven"},
        )
    )
    assert own == none
    assert len({own, guided, away}) == 3


def test_it_stops_between_two_steps(first: Path) -> None:
    asked = iter([False, False, True])
    with pytest.raises(Cancelled) as cancelled:
        Engine(first).generate(["a two"], [1], steps=50, cancelled=lambda: next(asked))
    assert cancelled.value.steps_done == 2


def test_a_swap_changes_the_picture(first: Path, tmp_path: Path) -> None:
    engine = Engine(first)
    before, _ = engine.generate(["a two"], [7])
    second = export(tmp_path / "second", 2)
    engine.swap(second)
    assert engine.export == export_id(second)
    assert engine.generate(["a two"], [7])[0] != before
    engine.swap(first)
    assert engine.generate(["a two"], [7])[0] == before


def test_staged_weights_make_pictures_before_anybody_gets_one(first: Path, tmp_path: Path) -> None:
    engine = Engine(first)
    before, _ = engine.generate(["a two"], [7])
    staged = engine.stage(export(tmp_path / "second", 2))
    tried, _ = engine.submit(["a two"], [7], ready=staged).result(30)
    assert engine.generate(["a two"], [7])[0] == before != tried
    engine.serve(staged)
    assert engine.generate(["a two"], [7])[0] == tried


def test_a_request_at_work_ends_with_the_weights_it_began_with(first: Path, tmp_path: Path) -> None:
    engine = Engine(first)
    expected, _ = engine.generate(["a two"], [7], steps=5)
    second = export(tmp_path / "second", 2)

    def swap_midway() -> bool:
        if engine.export != export_id(second):
            engine.swap(second)
        return False

    assert engine.generate(["a two"], [7], steps=5, cancelled=swap_midway)[0] == expected
    assert engine.generate(["a two"], [7], steps=5)[0] != expected


def test_a_torn_export_is_refused_and_the_old_one_serves(first: Path, tmp_path: Path) -> None:
    """C193."""
    engine = Engine(first)
    before, _ = engine.generate(["a two"], [7])
    torn = export(tmp_path / "torn", 2)
    (weights,) = (torn / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelRefusedError):
        engine.swap(torn)
    assert engine.generate(["a two"], [7])[0] == before
    with pytest.raises(ModelRefusedError):
        Engine(torn)


def test_another_kind_of_picture_is_refused(first: Path, tmp_path: Path) -> None:
    """Clients were told the size; new weights may not change it under their hands."""
    larger = export(tmp_path / "larger", 2, CONFIG.image.model_copy(update={"width": 16, "height": 16}))
    with pytest.raises(ModelRefusedError, match="another app"):
        Engine(first).swap(larger)
