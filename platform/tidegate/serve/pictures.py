"""Pictures on their way out: re-encoded where another format was asked for, and put into the answer's body.

Engines and providers give PNG; what a client gets is decided here, so every place that makes pictures gives the same.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image

from tidegate.serve.admission import Reply
from tidegate.serve.work import Made, Size


def encoded(pngs: Sequence[bytes], reply: Reply) -> tuple[bytes, ...]:
    """PNGs in the asked format. Blocks for milliseconds a megapixel, so not for the event loop."""
    if reply.format == "png":
        return tuple(pngs)
    return tuple(_encoded(png, reply) for png in pngs)


def _encoded(png: bytes, reply: Reply) -> bytes:
    out = io.BytesIO()
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        # OpenAI's 0 to 100 is Pillow's `quality`; JPEG knows no transparency.
        flat = image.convert("L" if image.mode == "L" else "RGB") if reply.format == "jpeg" else image
        flat.save(out, reply.format.upper(), quality=reply.compression)
    return out.getvalue()


def images_answer(made: Made, pictures: Sequence[bytes], size: Size, reply: Reply, created_s: float) -> dict[str, Any]:
    """The answer's body. `size` and `output_format` are always filled in (C175); `pictures` are `encoded`."""
    field, start = ("url", f"data:image/{reply.format};base64,") if reply.as_url else ("b64_json", "")
    body: dict[str, Any] = {
        "created": int(created_s),
        "data": [{field: start + base64.b64encode(picture).decode("ascii")} for picture in pictures],
        "size": str(size),
        "output_format": reply.format,
        "background": "opaque",
    }
    if made.seed is not None:
        body["seed"] = made.seed
    return body


def images_events(made: Made, pictures: Sequence[bytes], size: Size, reply: Reply, created_s: float) -> bytes:
    """The answer as server-sent events: one `image_generation.completed` a picture."""
    events: list[bytes] = []
    for index, picture in enumerate(pictures):
        event: dict[str, Any] = {
            "type": "image_generation.completed",
            "b64_json": base64.b64encode(picture).decode("ascii"),
            "created_at": int(created_s),
            "size": str(size),
            "output_format": reply.format,
            "background": "opaque",
            "quality": "auto",
        }
        if made.seed is not None:
            event["seed"] = made.seed + index
        events.append(b"event: image_generation.completed\ndata: " + json.dumps(event).encode() + b"\n\n")
    return b"".join(events)
