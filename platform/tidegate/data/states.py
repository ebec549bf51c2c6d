"""What an autoencoder and a text encoder make of samples, as columns of a shard. float16 holds every bfloat16 of its
range exactly, and both encoders' outputs lie inside.

    latent        channels · height/factor · width/factor numbers, as the autoencoder gives them (not normalised)
    text_states   tokens · layers · width numbers: of real tokens alone, padding is added when a batch is made
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.spec.policy import Model

LATENT, TEXT_STATES = "latent", "text_states"
_NUMBERS = pa.list_(pa.float16())
_FEATURE = {"feature": {"dtype": "float16", "_type": "Value"}, "_type": "Sequence"}

Halves = NDArray[np.float16]


class LatentsSeen(Model):
    """Of which autoencoder the latents are."""

    channels: int
    factor: int
    """Pixels along the side of one latent place."""
    mean: tuple[float, ...]
    """Per channel; the network sees (latent - mean) / std."""
    std: tuple[float, ...]


class TextSeen(Model):
    """Of which text encoder the states are."""

    layers: int
    width: int
    length: int
    """Tokens that a caption has at most."""


class StatesSeen(Model):
    latents: LatentsSeen | None = None
    text: TextSeen | None = None


def list_column(rows: Sequence[Halves]) -> Any:
    """Each row's numbers, one after the other."""
    offsets = np.cumsum([0, *(row.size for row in rows)]).astype(np.int32)
    flat = np.concatenate([row.ravel() for row in rows]) if rows else np.empty(0, np.float16)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.float16()))


def with_column(table: Any, name: str, rows: Sequence[Halves]) -> Any:
    return table.append_column(pa.field(name, _NUMBERS), list_column(rows))


def numbers(column: Any) -> tuple[Halves, NDArray[np.int64]]:
    """All numbers of a list column, and where each row's begin and end, without a copy."""
    column = column.combine_chunks()
    values = column.values.to_numpy(zero_copy_only=True)
    return values, column.offsets.to_numpy().astype(np.int64)


def shard_metadata(columns: Sequence[str], plain: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What `datasets` writes into a file: with it the columns of states are read as what they are."""
    about = json.loads(plain[b"huggingface"])
    about["info"]["features"] |= {name: _FEATURE for name in (LATENT, TEXT_STATES) if name in columns}
    return {**plain, b"huggingface": json.dumps(about).encode()}
