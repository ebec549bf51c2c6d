"""Pictures on their way out: re-encoded where another format was asked for, and put into the answer's body.

Engines and providers give PNG; what a client gets is decided here, so every place that makes pictures gives the same.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from tidegate.serve.admission import Reply
from tidegate.serve.work import ImageJob, Made, Partial, Size

if TYPE_CHECKING:
    from tidegate.serve.flow import Answer


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


def partial_event(part: Partial, job: ImageJob, reply: Reply, created_s: float) -> bytes:
    """An unfinished picture as a server-sent event. `seed` says which of the request's pictures it is. Blocks like
    `encoded`."""
    (picture,) = encoded((part.png,), reply)
    more = {"partial_image_index": part.index, "seed": job.seed + part.image}
    return _event("image_generation.partial_image", picture, job.size, reply, created_s, more)


def images_events(answer: Answer, pictures: Sequence[bytes], size: Size, reply: Reply, created_s: float) -> bytes:
    """The answer as server-sent events: one `image_generation.completed` a picture."""
    made = answer.made
    # What an answer's headers say; a stream's headers may be out before it is known.
    how = {
        "backend": answer.backend,
        "queued_s": round(answer.queued_s, 3),
        "computed_s": round(answer.computed_s, 3),
    }
    return b"".join(
        _event(
            "image_generation.completed",
            picture,
            size,
            reply,
            created_s,
            {"tidegate": how} | ({} if made.seed is None else {"seed": made.seed + index}),
        )
        for index, picture in enumerate(pictures)
    )


def error_event(body: Mapping[str, Any]) -> bytes:
    """OpenAI's error object as the end of a stream whose status is out already."""
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"


def _event(kind: str, picture: bytes, size: Size, reply: Reply, created_s: float, more: Mapping[str, Any]) -> bytes:
    event: dict[str, Any] = {
        "type": kind,
        "b64_json": base64.b64encode(picture).decode("ascii"),
        "created_at": int(created_s),
        "size": str(size),
        "output_format": reply.format,
        "background": "opaque",
        "quality": "auto",
        **more,
    }
    return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()
