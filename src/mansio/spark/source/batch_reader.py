"""The batch side of the source: `spark.read.format("mansio")`.

Spark plans with one process and reads with others: `partitions` runs where the query is planned, `read` in every task,
on a copy of the reader that was pickled in between. So a reader holds its options and nothing that is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from mansio.spark.source.offsets import resolve
from mansio.spark.source.read_plan import TaskRange, plan_ranges
from mansio.spark.sync_client import sync_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from mansio.spark.options import SourceOptions


class BatchReader(DataSourceReader):
    """Reads topics between two offsets of each partition."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """One for each task. Raises `ConfigError` and `DataLoss`; see `offsets.resolve`."""
        wanted = resolve(sync_client(self._options.bootstrap_servers), self._options)
        return list(
            plan_ranges(
                wanted,
                partitions_min=self._options.partitions_min,
                records_max=self._options.records_per_partition_max,
            )
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, as Arrow batches."""
        if not isinstance(partition, TaskRange):  # Spark's own, when there is nothing to read
            return iter(())
        from mansio.spark.source.task_reader import read_range

        return read_range(self._options, self._columns, partition)
