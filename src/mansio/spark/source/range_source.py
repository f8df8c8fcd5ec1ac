"""Where records are instead of the records: the source of a query whose sink fetches them itself.

Spark plans such a query as any other, notes in its checkpoint what a batch is about, and hands a row for each stretch
of a partition to the sink's task. Records that only go from a topic into files then never become rows of the JVM, which
would take them out of Arrow and put them into Arrow again.

Always true: a batch has one row for each task of `plan_ranges`, and the same batch has the same rows when Spark runs it
again; a stretch goes through Spark and comes out equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, InputPartition

from mansio.spark.options import SourceOptions
from mansio.spark.source.read_plan import TaskRange
from mansio.spark.source.stream_reader import StreamReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

SCHEMA: Final = "topic string, partition int, start bigint, end bigint, topic_id binary"


class RangeSource(DataSource):
    """`readStream` of stretches, with the options of `format("mansio")`; the session must `dataSource.register` it."""

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "mansio_ranges"

    def schema(self) -> str:
        """The fields of `TaskRange`."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> RangeReader:  # noqa: ARG002  # as Spark calls it
        """Raises `ConfigError` for a wrong option."""
        return RangeReader(SourceOptions.parse(self.options, streaming=True), ())


class RangeReader(StreamReader):
    """Plans as the reader of records does, and reads none."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The one row of a task."""
        if isinstance(partition, TaskRange):
            yield as_row(partition)


def as_row(one: TaskRange) -> pa.RecordBatch:
    """A stretch as Spark gets it."""
    import pyarrow as pa  # not where it is planned

    return pa.RecordBatch.from_arrays(
        [
            pa.array([one.topic], pa.string()),
            pa.array([one.partition], pa.int32()),
            pa.array([one.start], pa.int64()),
            pa.array([one.end], pa.int64()),
            pa.array([one.topic_id], pa.binary()),
        ],
        ["topic", "partition", "start", "end", "topic_id"],
    )


def from_rows(rows: pa.RecordBatch) -> list[TaskRange]:
    """The stretches that Spark hands on."""
    return [TaskRange(**row) for row in rows.to_pylist()]
