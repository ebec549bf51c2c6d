"""Images as bytes and as arrays; what is wrong with one that can't be used."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tidegate.data.buckets import Size

MODES = ("L", "LA", "RGB", "RGBA")
"""By the number of channels: grey, grey and alpha, RGB, RGBA."""

# Pillow's decoders raise these for damaged files, a bomb being a huge size that the header claims.
DAMAGED = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def opened(raw: bytes | memoryview) -> Image.Image:
    """An image, decoded to its end and turned as its camera says. Raises one of `DAMAGED`."""
    with Image.open(io.BytesIO(raw)) as image:
        image.load()
        return image if not image.getexif() else ImageOps.exif_transpose(image)


def size_of(image: Image.Image) -> Size:
    return Size(image.width, image.height)


def fitted(raw: bytes, image: Image.Image, size: Size) -> bytes:
    """The image's middle at `size`, encoded. Lossy stays lossy: JPEG at quality 95, everything else PNG. An image that
    has the size keeps its bytes."""
    as_stored = Image.open(io.BytesIO(raw))
    if size_of(as_stored) == size_of(image) == size and as_stored.format in ("JPEG", "PNG", "WEBP"):
        return raw
    if image.mode not in MODES:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    cut = ImageOps.fit(image, (size.width, size.height), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    if as_stored.format == "JPEG":
        cut.convert("L" if cut.mode == "L" else "RGB").save(out, "JPEG", quality=95)
    else:
        cut.save(out, "PNG")
    return out.getvalue()


def decoded(raw: bytes | memoryview, channels: int, into: NDArray[np.uint8]) -> None:
    """Decode into (H, W) for one channel, else (H, W, C), uint8.

    Raises:
        OSError, SyntaxError, ValueError: the image is damaged, or not of that size.
    """
    with Image.open(io.BytesIO(raw)) as image:
        mode = MODES[channels - 1]
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    if pixels.shape != into.shape:
        raise ValueError(f"the image is {pixels.shape[1]}x{pixels.shape[0]}, must be {into.shape[1]}x{into.shape[0]}")
    into[...] = pixels


def why_damaged(error: Exception) -> str:
    """A sentence without the machine's own paths."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    # Pillow names the buffer it read from, which says nothing.
    return "cannot identify image file" if "BytesIO" in str(error) else str(error) or type(error).__name__
