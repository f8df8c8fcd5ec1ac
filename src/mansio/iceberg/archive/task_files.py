"""Writing of the data files of batch jobs in Spark's tasks. This is a separate module, so that tasks import little.

Invariants:
* A task writes one file, or none if it has no rows, and returns its path after the file is flushed to the disk.
* At most one row group is in memory.
* A task that fails deletes its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from mansio.iceberg.data_files import WrittenFile, report_files
from mansio.iceberg.fanout_writer import FanoutWriter

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_files(
    location: str, prefix: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task as one Parquet file `PREFIX-<id>.parquet` with this schema under this address; yield
    its description (`REPORT_SCHEMA`), if there are rows.
    """
    written: list[WrittenFile] = []

    def add_written(_partition: None, path: str, rows: int, size: int) -> None:
        written.append(WrittenFile(path, rows, size))

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
    if written:
        yield report_files(written)
