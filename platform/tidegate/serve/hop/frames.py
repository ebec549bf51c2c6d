"""What a gateway and a replica say to each other. Pure: bytes in, frames out.

A frame is a header of 11 bytes (length of the payload, kind, call, others; network order) and a payload. A call is
named by the gateway's own number. `others` is the replica's: how many requests of other gateways it holds, so that with
its own ones each gateway knows the queue without asking.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidegate.serve.work import ImageJob, Made, Partial

FRAME_MAX_BYTES = 256 * 2**20
"""Of a payload: as much as Serve's own replicas are set to take. Ten pictures of 2048x2048 are a fifth of it."""

_HEADER = struct.Struct("!IBIH")
_OTHERS_MAX = 2**16 - 1
_JOB = TypeAdapter(ImageJob)


@unique
class Kind(IntEnum):
    HELLO = 1
    """The gateway proves that Serve told it of this replica, by its token; the replica answers that the line is up."""
    CALL = 2
    CALL_SHOWN = 3
    """As `CALL`; unfinished pictures are wanted too."""
    CANCEL = 4
    """Nobody waits for the call any more. It holds its slot until `ENDED`."""
    PART = 5
    MADE = 6
    UNFIT = 7
    FAILED = 8
    BUSY = 9
    """No slot was free, or the replica drains: the call was not begun."""
    ENDED = 10
    """A cancelled call has left the engine."""
    OTHERS = 11
    """Nothing but a new count in the header."""
    CLOSING = 12
    """The replica finishes what it has and takes nothing new."""


ENDS = frozenset({Kind.MADE, Kind.UNFIT, Kind.FAILED, Kind.BUSY, Kind.ENDED})
"""One of them for each call, as its last."""


class FrameError(Exception):
    """Not what a gateway or replica of this version says; the line is of no use any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    call: int = 0
    others: int = 0
    payload: bytes = b""

    def encoded(self) -> bytes:
        others = min(self.others, _OTHERS_MAX)
        return _HEADER.pack(len(self.payload), self.kind, self.call, others) + self.payload


class Frames:
    """Puts frames together from what comes off a socket."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def of(self, data: bytes) -> Iterator[Frame]:
        """
        Raises:
            FrameError: an unknown kind, or longer than `FRAME_MAX_BYTES`.
        """
        self._rest += data
        while len(self._rest) >= _HEADER.size:
            length, kind, call, others = _HEADER.unpack_from(self._rest)
            if length > FRAME_MAX_BYTES:
                raise FrameError(f"a frame of {length} bytes; at most {FRAME_MAX_BYTES} are taken")
            end = _HEADER.size + length
            if len(self._rest) < end:
                return
            payload = bytes(memoryview(self._rest)[_HEADER.size : end])
            del self._rest[:end]
            try:
                named = Kind(kind)
            except ValueError:
                raise FrameError(f"unknown kind {kind}") from None
            yield Frame(named, call, others, payload)


# --- payloads ---------------------------------------------------------------------------------------------------


def from_job(job: ImageJob) -> bytes:
    return _JOB.dump_json(job)


def to_job(payload: bytes) -> ImageJob:
    """
    Raises:
        FrameError: it is none.
    """
    try:
        return _JOB.validate_json(payload)
    except ValidationError as error:
        raise FrameError(f"no image job: {error}") from None


def from_made(made: Made) -> bytes:
    return _with_bytes([made.seed, made.compute_s, [len(png) for png in made.pngs]], *made.pngs)


def to_made(payload: bytes) -> Made:
    """
    Raises:
        FrameError: it is none.
    """
    (seed, compute_s, lengths), rest = _split(payload)
    pngs, at = [], 0
    for length in lengths:
        pngs.append(rest[at : at + length])
        at += length
    if at != len(rest):
        raise FrameError(f"pictures of {at} bytes were named, {len(rest)} came")
    return Made(pngs=tuple(pngs), seed=seed, compute_s=compute_s)


def from_partial(part: Partial) -> bytes:
    return _with_bytes([part.image, part.index, part.steps_done, part.steps], part.png)


def to_partial(payload: bytes) -> Partial:
    """
    Raises:
        FrameError: it is none.
    """
    (image, index, steps_done, steps), png = _split(payload)
    return Partial(image=image, index=index, png=png, steps_done=steps_done, steps=steps)


def from_words(*words: str) -> bytes:
    return json.dumps(words).encode()


def to_words(payload: bytes) -> list[str]:
    words: list[str] = json.loads(payload)
    return words


_LENGTH = struct.Struct("!I")


def _with_bytes(head: list[object], *bodies: bytes) -> bytes:
    said = json.dumps(head).encode()
    return b"".join((_LENGTH.pack(len(said)), said, *bodies))


def _split(payload: bytes) -> tuple[list[Any], bytes]:
    try:
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        head: list[Any] = json.loads(payload[_LENGTH.size : start])
    except (struct.error, ValueError) as error:
        raise FrameError(f"a broken answer: {error}") from None
    return head, payload[start:]
