"""Writing of the data files of batch jobs in Spark's tasks. This is a separate module, so that tasks import little.

Invariants:
* A task writes one file, or none if it has no rows, and returns its path after the file is flushed to the disk.
* At most one row group is in memory.
* A task that fails deletes its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mansio.iceberg.fanout_writer import FanoutWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITTEN_FILE_COLUMNS: Final = "path string, rows bigint"


def write_files(
    location: str, prefix: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task as one Parquet file `PREFIX-<id>.parquet` with this schema under this address; yields
    its path and number of rows (`WRITTEN_FILE_COLUMNS`), if there are rows.
    """
    written: list[tuple[str, int]] = []

    def add_written(_partition: None, path: str, rows: int, _size: int) -> None:
        written.append((path, rows))

    writer: FanoutWriter[None] = FanoutWriter(location, schema, add_written, file_bytes=None)
    try:
        for batch in batches:
            if batch.num_rows:
                columns = [batch.column(field.name).cast(field.type) for field in schema]
                writer.write(None, pa.RecordBatch.from_arrays(columns, schema=schema), prefix)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    for path, rows in written:
        yield pa.RecordBatch.from_pydict({"path": [path], "rows": pa.array([rows], pa.int64())})
