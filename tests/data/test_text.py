"""Captions as states."""

from __future__ import annotations

import torch

from tidegate.data.text import ByteText


def test_shapes_and_mask() -> None:
    states, mask = ByteText(6, 8, 0).encode(["ab", "abcdefgh", ""])
    assert states.shape == (3, 6, 1, 8)
    assert states.dtype == torch.float32
    assert mask.sum(1).tolist() == [2, 6, 1]


def test_same_numbers_in_every_process_and_alone_or_together() -> None:
    together, _ = ByteText(6, 8, 3).encode(["one", "two"])
    alone, _ = ByteText(6, 8, 3).encode(["two"])
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(alone, ByteText(6, 8, 4).encode(["two"])[0])


def test_the_order_of_letters_matters() -> None:
    """By the sinusoid positions alone: without them "a" would be the same state in both places."""
    states, _ = ByteText(4, 8, 0).encode(["ab", "ba"])
    assert not torch.allclose(states[0, 0], states[1, 1])


def test_the_cache_of_captions_does_not_grow_for_ever() -> None:
    text = ByteText(8, 8, 0)
    for number in range(5000):
        text.encode([str(number)])
    assert len(text._known) <= 4096
