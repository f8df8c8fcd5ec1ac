"""Small log and its archive table for tests: distinct rows, data files, and the rows that a table contains."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from mansio.iceberg.archive.parquet_writer import PartitionFileWriter
from mansio.iceberg.archive.table_format import BatchPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import WrittenRange

HOUR_US = 3_600_000_000


def source_rows(partition: int, offsets: Iterable[int]) -> pa.RecordBatch:
    """Records as the source gives them: the value names partition and offset, one hour lies between two of them."""
    offsets = list(offsets)
    count = len(offsets)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"k{offset % 3}".encode() for offset in offsets], pa.binary()),
            "value": pa.array([f"{partition}:{offset}".encode() for offset in offsets], pa.binary()),
            "partition": pa.array([partition] * count, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array([offset * HOUR_US for offset in offsets], pa.timestamp("us", tz="UTC")),
            "timestampType": pa.array([0] * count, pa.int32()),
        }
    )


def write_parts(
    table: ArchiveTable, plan: BatchPlan, holes: frozenset[tuple[int, int]] = frozenset()
) -> list[WrittenRange]:
    """What the tasks of a batch do: one writer per partition, every offset of the plan that is no hole."""
    parts: list[WrittenRange] = []
    for partition in plan.end:
        offsets = [
            o for o in range(plan.start[partition], plan.end[partition]) if (partition, o) not in holes
        ]
        writer = PartitionFileWriter(table.data_location, f"{plan.query}-{plan.batch}")
        if offsets:
            writer.write(source_rows(partition, offsets))
        parts += writer.close()
    return parts


def plan(batch: int, start: dict[int, int], end: dict[int, int], query: str = "q1") -> BatchPlan:
    return BatchPlan(query, batch, start, end)


def add(table: ArchiveTable, wanted: BatchPlan) -> bool:
    """Write and commit a batch; whether it was added."""
    return table.commit(wanted, write_parts(table, wanted)).added


def held(table: ArchiveTable) -> list[tuple[int, int, bytes]]:
    """Every (partition, offset, value) of the current snapshot, sorted, read from the data files themselves."""
    rows: list[tuple[int, int, bytes]] = []
    for file in table.live_files():
        found = pq.read_table(file.path.removeprefix("file://"), partitioning=None)
        rows += zip(*(found[name].to_pylist() for name in ("__partition", "__offset", "value")), strict=True)
    return sorted(rows)


def expected(
    offsets: dict[int, int], holes: frozenset[tuple[int, int]] = frozenset()
) -> list[tuple[int, int, bytes]]:
    """What an archive that began at zero must hold."""
    return [
        (partition, offset, f"{partition}:{offset}".encode())
        for partition in sorted(offsets)
        for offset in range(offsets[partition])
        if (partition, offset) not in holes
    ]


def checksum(rows: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()
