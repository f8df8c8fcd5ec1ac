"""The batch side of the source: `spark.read.format("mansio")`.

Spark plans with one process and reads with others: `partitions` runs where the query is planned, `read` in every task,
on a copy of the reader that was pickled in between. So a reader holds its options and nothing that is open.

`PushdownReader` also takes a query's filters. The source does not offer it: Spark 4.3 keeps the reader with the filters
of one query for the next query of the same DataFrame, which would miss rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from . import filters
from .door import door
from .offsets import offsets_at, resolve
from .ranges import OffsetRange, Range, plan_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from mansio.wire.topic_partition import TopicPartition

    from .options import SourceOptions


class BatchReader(DataSourceReader):
    """Reads topics between two offsets of each partition."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """One for each task. Raises `ConfigError` and `DataLoss`; see `offsets.resolve`."""
        wanted = self._wanted(resolve(door(self._options.bootstrap), self._options))
        return list(
            plan_ranges(
                wanted,
                partitions_min=self._options.partitions_min,
                records_max=self._options.records_per_partition_max,
            )
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, as Arrow batches."""
        if not isinstance(partition, Range):  # Spark's own, when there is nothing to read
            return iter(())
        from .range_reader import read_range

        return read_range(self._options, self._columns, partition)

    def _wanted(self, offsets: dict[TopicPartition, OffsetRange]) -> dict[TopicPartition, OffsetRange]:
        return offsets


class PushdownReader(BatchReader):
    """The same, and leaves out what the query's filters on topic, partition, offset and timestamp do not want."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Keeps the filters for `partitions`. All are given back: Spark checks every row again."""
        self._filters = list(filters)
        return filters

    def _wanted(self, offsets: dict[TopicPartition, OffsetRange]) -> dict[TopicPartition, OffsetRange]:
        kept = filters.prune(offsets, self._filters)
        span = filters.time_span_ms(self._filters)
        if span.low is not None and span.low > 0:
            for partition, first in self._first_at(kept, span.low).items():
                start = kept[partition].end if first < 0 else max(kept[partition].start, first)
                kept[partition] = kept[partition]._replace(start=start)
        if span.high is not None and span.high >= 0 and self._options.timestamps_are_ordered:
            for partition, first in self._first_at(kept, span.high + 1).items():
                if first >= 0:
                    kept[partition] = kept[partition]._replace(end=min(kept[partition].end, first))
        return kept

    def _first_at(self, partitions: Iterable[TopicPartition], moment_ms: int) -> dict[TopicPartition, int]:
        """The first record of each partition that is at least that young; -1 where there is none."""
        moments = dict.fromkeys(partitions, moment_ms)
        return offsets_at(door(self._options.bootstrap), moments, self._options.isolation_level)
