"""A text encoder that needs no weights to be fetched: frozen random embeddings of a caption's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ByteText:
    """Captions as byte embeddings plus sinusoid positions, in the shape of tapped encoder layers (one layer).

    The same `(length, width, seed)` gives the same states in every process, so they travel with weights as three
    numbers. Captions that were seen before come from a cache.
    """

    def __init__(self, length: int, width: int, seed: int) -> None:
        """`length`: bytes kept of a caption. `width`: size of a state, even. `seed`: of the embedding table."""
        if width % 2:
            raise ValueError(f"text width must be even (half sines, half cosines), got {width}")
        self.length, self.width, self.seed = length, width, seed
        table = torch.randn(256, width, generator=torch.Generator().manual_seed(seed))
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)[None]
        self._table = table
        self._position = torch.cat([angle.sin(), angle.cos()], dim=-1)
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """States (B, length, 1, width) float32 and the mask of real bytes (B, length) bool; longer captions are cut."""
        pairs = [self._one(caption) for caption in captions]
        return torch.stack([states for states, _ in pairs]), torch.stack([mask for _, mask in pairs])

    def _one(self, caption: str) -> tuple[Tensor, Tensor]:
        known = self._known.get(caption)
        if known is not None:
            return known
        # An empty caption keeps one byte: attention over a row without any key is undefined.
        raw = caption.encode()[: self.length] or b"\0"
        ids = torch.zeros(self.length, dtype=torch.long)
        ids[: len(raw)] = torch.tensor(list(raw))
        pair = (self._table[ids] + self._position)[:, None, :], torch.arange(self.length) < len(raw)
        if len(self._known) >= _CACHED_CAPTIONS:
            self._known.clear()
        self._known[caption] = pair
        return pair


_CACHED_CAPTIONS = 4096
