"""Sinks of `foreachBatch` that append the rows of a micro-batch to a result table, exactly once.

The tasks write Parquet files and return their descriptions; the driver commits the files with the batch's id. Rows
never reach the driver.

Invariants:
* A sink can be pickled before its first batch: with Spark Connect the server calls it, in a process of its own.
* The plan of a batch is executed exactly once per call, also for a batch that the table has already: stateful operators
  store their state while it runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import functions

from mansio.iceberg.data_files import REPORT_SCHEMA, parse_written_file
from mansio.iceberg.result_table.data_file_writer import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.result_table.commit import QueryBatch
    from mansio.iceberg.result_table.table import ResultTable


class AppendSink:
    """Appends each micro-batch to a table. `identify`: returns the identity of a batch by its session and id."""

    def __init__(self, table: ResultTable, identify: Callable[[SparkSession, int], QueryBatch]) -> None:
        self._table = table
        self._identify = identify

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one batch. Called by Spark on the driver."""
        batch = self._identify(frame.sparkSession, batch_id)
        self._table.refresh()
        if self._table.is_committed(batch):
            execute_without_output(frame)
            return
        order = [
            functions.desc(quoted(one.column)) if one.descending else functions.asc(quoted(one.column))
            for one in self._table.sort_by
        ]
        rows = frame.sortWithinPartitions(*order) if order else frame
        shape = self._table.shape()
        write = partial(write_rows, self._table.layout(), file_prefix(batch))
        reports = rows.mapInArrow(write, REPORT_SCHEMA).collect()
        files = [replace(parse_written_file(report["file"]), is_sorted=bool(order)) for report in reports]
        if files:
            self._table.commit(batch, files, shape=shape)


def file_prefix(batch: QueryBatch) -> str:
    """Return the prefix of the names of a batch's files."""
    return f"{batch.query}-{batch.batch}"


def quoted(column: str) -> str:
    """Return the name of a column as Spark's expressions have it; a dot in a name is not an access to a field."""
    return f"`{column.replace('`', '``')}`"


def execute_without_output(frame: DataFrame) -> None:
    """Execute the plan of a batch, so that stateful operators store their state, and discard its rows."""
    frame.write.format("noop").mode("overwrite").save()
