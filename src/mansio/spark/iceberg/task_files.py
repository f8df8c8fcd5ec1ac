"""Writing of the data files of batch jobs in Spark's tasks. This is a separate module, so that tasks import little.

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

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW_GROUP_BYTES: Final = 16 << 20
COMPRESSION: Final = "zstd"
WRITTEN_FILE_COLUMNS: Final = "path string, rows bigint"


def write_files(
    location: str, prefix: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task as one Parquet file `PREFIX-<id>.parquet` with this schema under this address; yields
    its path and number of rows (`WRITTEN_FILE_COLUMNS`), if there are rows.
    """
    name = f"{prefix}-{uuid.uuid4().hex}.parquet"
    system, directory = file_system(location)
    writer, rows = None, 0
    buffered: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                place = f"{directory}/{name}"
                writer = pq.ParquetWriter(place, schema, filesystem=system, compression=COMPRESSION)
            buffered.append(batch)
            if sum(one.nbytes for one in buffered) >= ROW_GROUP_BYTES:
                _write_group(writer, schema, buffered)
            rows += batch.num_rows
        if writer is not None and buffered:
            _write_group(writer, schema, buffered)
    finally:
        if writer is not None:
            writer.close()
    if rows:
        if isinstance(system, fs.LocalFileSystem):
            fsync_file(f"{directory}/{name}")
        yield pa.RecordBatch.from_pydict(
            {"path": [f"{location}/{name}"], "rows": pa.array([rows], pa.int64())}
        )


def _write_group(writer: pq.ParquetWriter, schema: pa.Schema, buffered: list[pa.RecordBatch]) -> None:
    group = pa.Table.from_batches(buffered)
    columns = [group.column(field.name).cast(field.type) for field in schema]
    writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=group.num_rows)
    buffered.clear()
