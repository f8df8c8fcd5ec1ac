"""Writing of the files of the compact job in Spark's tasks. This is a separate module, so that tasks import little.

Invariants:
* A task writes one file, or none if it has no rows, and returns its path after the file is flushed to the disk.
* At most one row group is in memory.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from mansio.spark.iceberg.parquet_writer import file_system, fsync_file
from mansio.spark.iceberg.table_format import TABLE_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW_GROUP_BYTES: Final = 16 << 20
COMPRESSION: Final = "zstd"


def write_files(location: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task as one Parquet file under this address; yields its path and number of rows, if there
    are rows.
    """
    name = f"compact-{uuid.uuid4().hex}.parquet"
    system, directory = file_system(location)
    writer, rows = None, 0
    buffered: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                place = f"{directory}/{name}"
                writer = pq.ParquetWriter(place, TABLE_SCHEMA, filesystem=system, compression=COMPRESSION)
            buffered.append(batch)
            if sum(one.nbytes for one in buffered) >= ROW_GROUP_BYTES:
                _write_group(writer, buffered)
            rows += batch.num_rows
        if writer is not None and buffered:
            _write_group(writer, buffered)
    finally:
        if writer is not None:
            writer.close()
    if rows:
        if isinstance(system, fs.LocalFileSystem):
            fsync_file(f"{directory}/{name}")
        yield pa.RecordBatch.from_pydict(
            {"path": [f"{location}/{name}"], "rows": pa.array([rows], pa.int64())}
        )


def _write_group(writer: pq.ParquetWriter, buffered: list[pa.RecordBatch]) -> None:
    group = pa.Table.from_batches(buffered)
    columns = [group.column(field.name).cast(field.type) for field in TABLE_SCHEMA]
    writer.write_table(pa.Table.from_arrays(columns, schema=TABLE_SCHEMA), row_group_size=group.num_rows)
    buffered.clear()
