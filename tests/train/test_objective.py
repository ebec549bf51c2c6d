"""Rectified flow, and the learning rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from tidegate.train.config import ImageSpec, ObjectiveSpec, OptimizerSpec
from tidegate.train.model import positions, to_pixels, to_tokens
from tidegate.train.objective import draw, loss_sum, mix, shift_of, times_of, without_caption
from tidegate.train.optim import decays, learning_rate
from tidegate.train.sample import grid

SPEC = ObjectiveSpec()


def test_a_sample_sees_the_same_numbers_at_any_world_size() -> None:
    noise, times = draw(3, 17, range(10), (4, 4), SPEC)
    for part in (range(4), range(4, 7), range(7, 10)):
        ours, at = draw(3, 17, part, (4, 4), SPEC)
        assert torch.equal(ours, noise[part.start : part.stop])
        assert torch.equal(at, times[part.start : part.stop])


def test_seed_step_and_position_each_matter() -> None:
    base, _ = draw(3, 17, range(2), (4, 4), SPEC)
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(base, draw(4, 17, range(2), (4, 4), SPEC)[0])
    assert not torch.equal(base, draw(3, 18, range(2), (4, 4), SPEC)[0])


def test_the_draws_are_normal() -> None:
    noise, times = draw(0, 0, range(2000), (16,), SPEC)
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    assert abs(float(torch.logit(times).std()) - 1) < 0.05
    assert abs(float(torch.corrcoef(torch.stack([noise[:, 0], torch.logit(times)]))[0, 1])) < 0.08


def test_the_shift_of_krea_2() -> None:
    """Turbo's 8-step grid: mu is 1.15, so s = e^1.15."""
    turbo = grid(8, 3.158)
    assert turbo == pytest.approx([1, 0.957, 0.905, 0.840, 0.760, 0.655, 0.513, 0.311, 0], abs=1e-3)
    assert grid(4, 1.0) == [1, 0.75, 0.5, 0.25, 0]
    middle = times_of(torch.zeros(1), ObjectiveSpec(shift=3.0))
    assert float(middle) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("side", "shift"), [(256, 1.65), (512, 1.79), (768, 2.05), (1024, 2.47), (1280, 3.16)], ids=str
)
def test_the_shift_grows_with_the_resolution(side: int, shift: float) -> None:
    """krea2.md 2.6, and diffusers' own function."""
    tokens = (side // 16) ** 2
    assert shift_of("resolution", tokens) == pytest.approx(shift, abs=0.006)
    mu = calculate_shift(tokens, 256, 6400, 0.5, 1.15)
    assert shift_of("resolution", tokens) == pytest.approx(math.exp(mu))
    assert shift_of(2.5, tokens) == 2.5
    spec = ObjectiveSpec(shift="resolution")
    assert float(times_of(torch.zeros(1), spec, shift_of("resolution", tokens))) == pytest.approx(
        shift / (1 + shift), abs=1e-3
    )


def test_captions_are_dropped_by_step_and_place_alone() -> None:
    """So at any world size the same samples are without; and about as many as asked for."""
    found = [without_caption(3, step, range(64), 0.1) for step in range(50)]
    assert found[7] == without_caption(3, 7, range(40), 0.1) + without_caption(3, 7, range(40, 64), 0.1)
    assert found[7] != found[8]
    assert found[7] != without_caption(4, 7, range(64), 0.1)
    assert sum(map(sum, found)) / 3200 == pytest.approx(0.1, abs=0.02)
    assert not any(without_caption(3, 7, range(64), 0.0))


def test_dropping_captions_leaves_noise_and_times_alone() -> None:
    """Each has its own stream."""
    noise, _ = draw(3, 17, range(1), (4, 4), SPEC)
    first = np.random.Generator(np.random.Philox(key=3, counter=[0, 1, 0, 17])).standard_normal(dtype=np.float32)
    assert not np.isclose(noise.numpy(), first).any()


def test_the_line_from_image_to_noise_and_its_velocity() -> None:
    image, noise = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    mixed = mix(image, noise, torch.tensor([0.0, 0.25]))
    assert torch.equal(mixed[0], image[0])
    assert torch.equal(mixed[1], torch.full((3, 4), 0.25))
    assert float(loss_sum(noise - image, image, noise)) == 0
    # Per sample a mean, over samples a sum: uneven shares add up.
    assert float(loss_sum(image, image, noise)) == 2


def test_tokens_are_channel_major_and_come_back() -> None:
    image = ImageSpec(width=6, height=4, channels=3, patch=2)
    pixels = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(2, 3, 4, 6)
    tokens = to_tokens(pixels, 2)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(tokens[0, 1, :4], pixels[0, 0, :2, 2:4].flatten())
    assert torch.equal(to_pixels(tokens, image), pixels)
    places = positions(5, image)
    assert places[:5].abs().sum() == 0
    assert places[5:].tolist() == [[0, row, column] for row in range(2) for column in range(3)]


def test_warm_up_stable_decay() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, decay_steps=4)
    rates = [learning_rate(step, 12, spec) for step in range(12)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(0, 12, OptimizerSpec(lr=0.5)) == learning_rate(11, 12, OptimizerSpec(lr=0.5)) == 0.5


def test_what_weight_decay_leaves_alone() -> None:
    assert decays("transformer_blocks.0.attn.to_q.weight")
    assert decays("transformer_blocks.0.norm1.weight")
    assert not decays("img_in.bias")
    assert not decays("final_layer.scale_shift_table")
