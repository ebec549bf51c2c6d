"""A shard's bytes: Parquet without compression, since images are compressed already, a row group for each block."""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.data.buckets import Size
from tidegate.data.layout import ShardSeen


def parquet(table: Any, block_rows: int) -> pa.Buffer:
    """The same table gives the same bytes."""
    out = pa.BufferOutputStream()
    # One chunk: the pages must not depend on how the table came together.
    pq.write_table(
        table.combine_chunks(),
        out,
        row_group_size=block_rows,
        compression="none",
        use_dictionary=["text", "text_short"],
    )
    return out.getvalue()


def seen(name: str, data: pa.Buffer, rows: int, size: Size) -> ShardSeen:
    return ShardSeen(
        name=name,
        rows=rows,
        bytes=data.size,
        sha256=hashlib.sha256(data).hexdigest(),
        width=size.width,
        height=size.height,
    )
