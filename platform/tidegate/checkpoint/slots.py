"""One copy of a rank's parts, in the layout of its file; where it stands, `folders.py` says."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tidegate.checkpoint.files import write_renamed
from tidegate.checkpoint.folders import seal_of
from tidegate.checkpoint.layout import Layout, Part, file_name, laid_out
from tidegate.checkpoint.manifest import Manifest, ShardSeen
from tidegate.checkpoint.sums import block_sums, sum_of


class Slot:
    """One copy of a rank's parts, in the layout of its file."""

    def __init__(self, parts: Sequence[Part], rank: int, path: Path | None = None) -> None:
        """At `path` in shared memory, whatever stands there; without one in memory that ends with the process.

        Raises:
            OSError: there is no room for it, or a rank of an older generation isn't dead yet.
        """
        self.path = path
        self.layout = laid_out(parts)
        self._rank = rank
        self._source = [part.local for part in parts]
        self.handle = self._opened(self.layout)
        populate = mmap.MAP_SHARED | mmap.MAP_POPULATE  # its pages exist before the first save
        self._memory = memoryview(mmap.mmap(self.handle, self.layout.padded_bytes, flags=populate))
        on_gpu = next((tensor.device for tensor in self._source if tensor.is_cuda), None)
        self._stream: Any = torch.cuda.Stream(on_gpu) if on_gpu is not None else None  # type: ignore[no-untyped-call]
        self._settled: Any = None
        if self._stream is not None:
            _pin(self._memory)
        self._body = self._memory[len(self.layout.template) : self.layout.size]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._copy = [_view(whole, self.layout, part) for part in parts]

    def _opened(self, layout: Layout) -> int:
        if self.path is None:
            handle = os.memfd_create("tidegate-save")
        else:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise OSError(errno.EBUSY, f"{self.path}: another rank lives from it") from None
            seal_of(self.path).unlink(missing_ok=True)
        os.ftruncate(handle, layout.padded_bytes)
        # Without it a full file system would end us by a signal at the first touch.
        os.posix_fallocate(handle, 0, layout.padded_bytes)
        return handle

    def mark(self) -> None:
        """`fill` is to copy what the parts hold now; on a GPU: once the kernels that are queued have run. In the thread
        that queues them."""
        if self._stream is not None:
            self._settled = torch.cuda.current_stream(self._stream.device).record_event()

    def fill(self) -> None:
        """Copy the parts, in whichever thread, as they were marked. When it returns they may change."""
        if self.path is not None:
            seal_of(self.path).unlink(missing_ok=True)
        if self._stream is None:
            if self._source:
                torch._foreach_copy_(self._copy, self._source)
            return
        # Beside the stream that computes, which must not wait for it.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._settled)
            torch._foreach_copy_(self._copy, self._source, non_blocking=True)
        self._stream.synchronize()

    def seal(self, about: Manifest) -> ShardSeen:
        """Hash the copy, complete its header, and say what it is: of the checkpoint `about`.

        Raises:
            OSError: shared memory's own.
        """
        layout = self.layout
        header = layout.header(block_sums(self._body, layout.block_bytes))
        self._memory[: len(header)] = header
        shard = ShardSeen(
            name=file_name(self._rank), bytes=layout.size, header_bytes=len(header), xxh3_128=sum_of(header)
        )
        if self.path is not None:
            manifest = about.model_copy(update={"files": (shard,), "at_s": time.time()})
            write_renamed(seal_of(self.path), manifest.model_dump_json().encode())
        return shard

    def close(self) -> None:
        os.close(self.handle)


def _pin(memory: memoryview) -> None:
    """Have CUDA copy into it directly: other memory is filled through a buffer of the driver's, far slower. A refusal
    costs speed alone."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostRegister(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory), 0)


def _view(whole: torch.Tensor, layout: Layout, part: Part) -> torch.Tensor:
    begin = len(layout.template) + layout.begins[part.name]
    return whole[begin : begin + part.local.nbytes].view(part.local.dtype).view(part.local.shape)
