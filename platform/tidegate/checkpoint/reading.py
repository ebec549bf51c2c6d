"""A rank reads what it needs of a checkpoint, from shards that any number of ranks wrote: in parallel, every byte once,
and each block checked against its hash on the way.
"""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tidegate.checkpoint.layout import Header, Part, Saved, parse_header
from tidegate.checkpoint.manifest import ShardSeen
from tidegate.checkpoint.sums import PAGE
from tidegate.checkpoint.tiers import Source
from tidegate.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class _Want:
    """A stretch of a shard's body, and the memory that it goes to."""

    begin: int
    end: int
    target: Tensor
    """Flat bytes."""


@dataclass(slots=True)
class _Late:
    """Rows that don't lie in the target as they lie in the shard: read aside, then copied."""

    rows: Tensor
    theirs: tuple[slice, ...]
    ours: Tensor


@dataclass(slots=True)
class _Reading:
    header: Header
    wants: list[_Want] = field(default_factory=list)
    late: list[_Late] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece of a body that a thread reads: whole blocks."""

    header: Header
    begin: int
    end: int
    wants: Sequence[_Want]
    """That have some of it."""


def read_parts(source: Source, files: Sequence[ShardSeen], parts: Sequence[Part]) -> int:
    """Fill `parts` in place; how many bytes were read for it.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or isn't covered by the shards, and nothing was
            changed; or a shard isn't what was saved, and the parts hold some of it.
    """
    wanted = {part.name: part for part in parts}
    missing = {part.name: part.local.numel() for part in parts}
    readings = [_Reading(header) for header in read_headers(source, files)]
    for reading in readings:
        for name in reading.header.tensors.keys() & wanted.keys():
            missing[name] -= _plan(reading, reading.header.tensors[name], wanted[name])
    short = sorted(name for name, numbers in missing.items() if numbers)
    if short:
        raise CheckpointError(f"{len(short)} of {len(parts)} tensors not covered, first {short[0]}")
    count = sum(file.header_bytes for file in files)
    count += _read(source, [(reading.header, reading.wants) for reading in readings])
    for reading in readings:
        for late in reading.late:
            late.ours.copy_(late.rows[late.theirs])
    return count


def check_all(source: Source, files: Sequence[ShardSeen]) -> None:
    """Read everything and check it.

    Raises:
        CheckpointError: with the first thing that is wrong.
    """
    whole = [(header, [_Want(0, header.body_bytes, torch.empty(0))]) for header in read_headers(source, files)]
    _read(source, whole, copy=False)


def whole_shapes(headers: Iterable[Header]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of a checkpoint, put together from its shards' headers."""
    whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for header in headers:
        for name, saved in header.tensors.items():
            ends = tuple(map(sum, zip(saved.offsets, saved.shape, strict=True)))
            known = whole[name][0] if name in whole else ends
            whole[name] = tuple(map(max, ends, known)), saved.dtype
    return whole


def read_headers(source: Source, files: Sequence[ShardSeen]) -> list[Header]:
    """
    Raises:
        CheckpointError: one isn't what was saved.
    """
    longest = max((file.header_bytes for file in files), default=PAGE)
    scratch = memoryview(mmap.mmap(-1, -(-longest // PAGE) * PAGE))
    return [parse_header(file, source.view(file.name, 0, file.header_bytes, scratch)) for file in files]


def _plan(reading: _Reading, saved: Saved, part: Part) -> int:
    """Add what the saved piece and the part share; how many numbers that is."""
    if len(saved.shape) != len(part.shape):
        raise CheckpointError(f"{part.name}: has {len(saved.shape)} dimensions, the network's has {len(part.shape)}")
    theirs, ours = [], []
    for begin, length, whole, mine, mine_length in zip(
        saved.offsets, saved.shape, part.shape, part.offsets, part.local.shape, strict=True
    ):
        if begin + length > whole:
            raise CheckpointError(f"{part.name}: reaches to {begin + length}, the network's has {whole}")
        first, last = max(begin, mine), min(begin + length, mine + mine_length)
        if last <= first:
            return 0
        theirs.append(slice(first - begin, last - begin))
        ours.append(slice(first - mine, last - mine))
    row = math.prod(saved.shape[1:]) * saved.dtype.itemsize
    rows = theirs[0] if theirs else slice(0, 1)
    begin, end = saved.begin + rows.start * row, saved.begin + rows.stop * row
    target = part.local[tuple(ours)]
    plain = target.is_contiguous() and target.device.type == "cpu" and target.dtype == saved.dtype
    if plain and target.nbytes == end - begin:
        reading.wants.append(_Want(begin, end, _flat(target)))
    else:
        aside = torch.empty((rows.stop - rows.start, *saved.shape[1:])[: len(saved.shape)], dtype=saved.dtype)
        reading.wants.append(_Want(begin, end, _flat(aside)))
        reading.late.append(_Late(aside, (slice(None), *theirs[1:])[: len(theirs)], target))
    return target.numel()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _read(source: Source, wanted: Sequence[tuple[Header, list[_Want]]], *, copy: bool = True) -> int:
    """Read all that is wanted, by as many threads as the source likes; how many bytes."""
    jobs = [job for header, wants in wanted for job in _jobs(header, wants, source.chunk_bytes)]
    # Threads help themselves: a future for each job would be so many objects that Python looks for garbage meanwhile.
    queue = iter(jobs)
    failed = threading.Event()

    def work(_: int) -> None:
        scratch = memoryview(mmap.mmap(-1, source.chunk_bytes))
        try:
            while not failed.is_set() and (job := next(queue, None)) is not None:
                _do(source, job, scratch, copy=copy)
        except BaseException:
            failed.set()
            raise

    if len(jobs) <= 1 or source.streams == 1:
        work(0)
    else:
        with ThreadPoolExecutor(source.streams, thread_name_prefix="read") as threads:
            for _ in threads.map(work, range(source.streams)):
                pass
    return sum(job.end - job.begin for job in jobs)


def _do(source: Source, job: _Job, scratch: memoryview, *, copy: bool) -> None:
    """Read and check a piece, and copy it to where it is wanted."""
    header, begin, end = job.header, job.begin, job.end
    goal = _goal(begin, end, job.wants) if copy and source.fills_any else None
    place = scratch if goal is None else goal
    data = source.view(header.file.name, header.file.header_bytes + begin, end - begin, place)
    for at in range(begin, end, header.cached_bytes):
        cached = data[at - begin : at - begin + header.cached_bytes]
        header.check(at, cached)
        if copy and goal is None:
            _spread(cached, at, job.wants)


def _goal(begin: int, end: int, wants: Sequence[_Want]) -> memoryview | None:
    """Where bytes of a body go, if they all go to one place: then they need not be copied."""
    if len(wants) != 1 or wants[0].begin > begin or wants[0].end < end:
        return None
    [want] = wants
    bytes_there: Any = want.target[begin - want.begin : end - want.begin].numpy()
    return memoryview(bytes_there)


def _spread(data: memoryview, begin: int, wants: Iterable[_Want]) -> None:
    """Copy checked bytes of a body, the first of which is at `begin`, to where they are wanted."""
    end = begin + len(data)
    for want in wants:
        first, last = max(begin, want.begin), min(end, want.end)
        if first < last:
            piece = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=first - begin)
            want.target[first - want.begin : last - want.begin].copy_(piece)


def _jobs(header: Header, wants: Iterable[_Want], chunk_bytes: int) -> Iterator[_Job]:
    """What to read of a body, each block once."""
    block = header.block_bytes
    ordered = sorted((want for want in wants if want.end > want.begin), key=lambda want: want.begin)
    ends = [want.end for want in ordered]
    stretches = list[list[int]]()
    for want in ordered:
        begin, end = want.begin // block * block, min(-(-want.end // block) * block, header.body_bytes)
        if stretches and begin <= stretches[-1][1]:
            stretches[-1][1] = end
        else:
            stretches.append([begin, end])
    for first, last in stretches:
        for begin in range(first, last, chunk_bytes):
            end = min(begin + chunk_bytes, last)
            after = bisect.bisect_right(ends, begin)
            among = itertools.takewhile(lambda want: want.begin < end, itertools.islice(ordered, after, None))  # noqa: B023
            yield _Job(header, begin, end, tuple(among))
