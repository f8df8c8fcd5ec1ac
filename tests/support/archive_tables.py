"""Archive tables for tests, without a broker and without Spark: batches as the archive commits them, in small files."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_format import TABLE_SCHEMA, BatchPlan, WrittenRange
from mansio.iceberg.data_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from mansio.client.types import Message

FIRST_US = 1_700_000_000_000_000
STEP_US = 1_000_000


def row(partition: int, offset: int, **changes: Any) -> dict[str, Any]:
    """A record of an archive that shows where it is from: a key for most, a header for some, a second apart."""
    made = {
        "key": None if offset % 5 == 4 else b"key-%d" % (offset % 7),
        "value": None if offset % 11 == 10 else b"value %d of %d" % (offset, partition),
        "headers": [{"key": "trace", "value": b"%d" % offset}, {"key": "trace", "value": None}]
        if offset % 3 == 0
        else None,
        "__partition": partition,
        "__offset": offset,
        "__timestamp": FIRST_US + offset * STEP_US,
        "__timestamp_type": 0,
        "__lane": None,
    }
    return {**made, **changes}


@dataclass
class Archive:
    """A table that grows batch by batch."""

    warehouse: Path
    topic: str = "flights"
    topic_id: str = ""
    query: str = "query"
    batch: int = -1
    offsets: dict[int, int] = field(default_factory=dict)

    def open(self) -> ArchiveTable:
        """A handle of its own, as another process would have."""
        return open_table(None, str(self.warehouse), self.topic, create=True, topic_id=self.topic_id)

    def add(self, table: ArchiveTable, rows_of: Mapping[int, int | Sequence[dict[str, Any]]]) -> None:
        """Archive one batch: for each partition so many more records, or these."""
        rows = {
            partition: [row(partition, self.offsets.get(partition, 0) + index) for index in range(given)]
            if isinstance(given, int)
            else list(given)
            for partition, given in rows_of.items()
        }
        parts = [self.write(table, some) for some in rows.values() if some]
        start = {partition: self.offsets.get(partition, 0) for partition in rows}
        end = {
            partition: some[-1]["__offset"] + 1 if some else start[partition]
            for partition, some in rows.items()
        }
        self.batch += 1
        outcome = table.commit(BatchPlan(self.query, self.batch, start, end), parts)
        assert outcome.added
        self.offsets.update(end)

    def write(self, table: ArchiveTable, rows: Sequence[dict[str, Any]]) -> WrittenRange:
        """One data file of one partition."""
        directory = table.data_location.removeprefix("file://")
        os.makedirs(directory, exist_ok=True)
        path = f"{directory}/{self.query}-{self.batch}-{uuid.uuid4().hex}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows), TABLE_SCHEMA), path, compression="zstd")
        first, last = rows[0], rows[-1]
        partition = first["__partition"]
        file = WrittenFile(f"file://{path}", len(rows), os.path.getsize(path), (partition,))
        return WrittenRange(file, partition, first["__offset"], last["__offset"])


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """All rows of a scan."""
    return [found for batch in batches for found in batch.to_pylist()]


def archived(message: Message) -> dict[str, Any]:
    """A record as it was read from a topic, as its archive has it."""
    return {
        "key": message.key,
        "value": message.value,
        "headers": [{"key": name, "value": value} for name, value in message.headers] or None,
        "__partition": message.partition,
        "__offset": message.offset,
        "__timestamp": message.timestamp_ms * 1000,
        "__timestamp_type": 0,
        "__lane": None,
    }
