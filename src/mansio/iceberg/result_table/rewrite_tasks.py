"""Work of a task that merges small files of one partition of a result table into few (Iceberg's rewrite_data_files).

This is a separate module, so that Spark's tasks import little. The driver plans and commits (`maintenance`).

Invariants:
* The new files have exactly the rows of the old ones, or the task fails and deletes them.
* Columns of files are identified by their field ids, so files that were written before a column was renamed, added or
  widened are rewritten with the table's current columns.
* Memory is bounded by `SORT_BYTES_MAX`, some Arrow batches, and the buffers of the writer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from mansio.iceberg.data_files import WrittenFile, parse_written_file
from mansio.iceberg.errors import InvalidDataFiles
from mansio.iceberg.result_table.data_file_writer import DataFileWriter
from mansio.iceberg.result_table.upsert_tasks import READ_ROWS, read_data_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.iceberg.result_table.data_file_writer import FileLayout
    from mansio.iceberg.result_table.partition_spec import SortField

SORT_BYTES_MAX: Final = 256 << 20
"""Size in memory up to which the rows of merged files are sorted. Larger groups keep the order of their files, and are
not marked as sorted."""
REPORT_SCHEMA: Final = "report string"


@dataclass(frozen=True, slots=True)
class RewriteItem:
    """Work of one task: files of one partition, and their number of rows. `prefix`: of the names of the new files."""

    prefix: str
    paths: tuple[str, ...]
    rows: int


def parse_written_files(text: str) -> tuple[WrittenFile, ...]:
    """Parse the report of `rewrite_items`: the new files of one item."""
    return tuple(map(parse_written_file, json.loads(text)))


def rewrite_items(
    layout: FileLayout,
    sort_by: Sequence[SortField],
    items: Sequence[RewriteItem],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Merge the files of one task's items. `batches`: a column with the places of its items in `items`. Yields one row
    of `REPORT_SCHEMA` per item. For `mapInArrow`.
    """
    for batch in batches:
        for place in batch.column(0).to_pylist():
            report = json.dumps([one.to_json() for one in rewrite_files(layout, sort_by, items[place])])
            yield pa.RecordBatch.from_pydict({"report": pa.array([report], pa.string())})


def rewrite_files(
    layout: FileLayout, sort_by: Sequence[SortField], item: RewriteItem
) -> tuple[WrittenFile, ...]:
    """Write the rows of the files to new ones.

    Raises:
        InvalidDataFiles: The files do not have as many rows as the table's metadata say.
        OSError: A file cannot be read or written.
    """
    writer = DataFileWriter(layout, item.prefix)
    try:
        rows = (batch for path in item.paths for batch in read_data_file(path, layout.schema))
        ordered, is_sorted = _in_order(layout.schema, rows, sort_by)
        for batch in ordered:
            writer.write(batch)
        files = writer.close()
        found = sum(file.rows for file in files)
        if found != item.rows:
            raise InvalidDataFiles(
                f"{found} rows were read where the table lists {item.rows}, in {item.paths[0]} and"
                f" {len(item.paths) - 1} other files"
            )
        return tuple(replace(file, is_sorted=is_sorted) for file in files)
    except BaseException:
        writer.abort()
        raise


def _in_order(
    schema: pa.Schema, batches: Iterator[pa.RecordBatch], sort_by: Sequence[SortField]
) -> tuple[Iterator[pa.RecordBatch], bool]:
    """Return the rows in the sort order, if there is one and they fit into `SORT_BYTES_MAX`, otherwise unchanged; and
    whether they are sorted.
    """
    if not sort_by:
        return batches, False
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size > SORT_BYTES_MAX:
            return chain(held, batches), False
    rows = pa.Table.from_batches(held, schema)
    return iter(rows.take(sort_indices(rows, sort_by)).to_batches(max_chunksize=READ_ROWS)), True


def sort_indices(rows: pa.Table, sort_by: Sequence[SortField]) -> pa.Array:
    """Return the places of the rows in the sort order, with Spark's order of nulls: first if ascending, last if
    descending.
    """
    columns = {}
    keys = []
    for index, one in enumerate(sort_by):
        column = rows[one.column]
        direction = "descending" if one.descending else "ascending"
        columns[f"valid{index}"] = column.is_valid().cast(pa.int8())
        columns[f"value{index}"] = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
        keys += [(f"valid{index}", direction), (f"value{index}", direction)]
    return pc.sort_indices(pa.table(columns), sort_keys=keys)
