"""Result tables for tests without a JVM: opened, written by what the tasks do, and read from their live files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as spark_types

from mansio.spark.result_table.data_file_writer import DataFileWriter, to_schema
from mansio.spark.result_table.table import ResultTable, TableTarget, open_result_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.spark.result_table.commit import QueryBatch
    from mansio.spark.result_table.data_file_writer import WrittenFile

COLUMNS = spark_types.StructType(
    [
        spark_types.StructField("id", spark_types.LongType()),
        spark_types.StructField("name", spark_types.StringType()),
        spark_types.StructField("ts", spark_types.TimestampType()),
    ]
)


def open_result(
    warehouse: object, columns: spark_types.StructType = COLUMNS, name: str = "ns.t", **options: Any
) -> ResultTable:
    return open_result_table(TableTarget(name, str(warehouse), **options), columns, {})


def rows(ids: Iterable[int], name: str = "x") -> pa.RecordBatch:
    numbers = list(ids)
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(numbers, pa.int64()),
            "name": pa.array([f"{name}{number}" for number in numbers]),
            "ts": pa.array([number * 3_600_000_000 for number in numbers], pa.timestamp("us", tz="UTC")),
        }
    )


def write(table: ResultTable, *batches: pa.RecordBatch, name: str = "q-0") -> list[WrittenFile]:
    """What one task does."""
    writer = DataFileWriter(table.layout(), name)
    for batch in batches:
        writer.write(batch)
    return writer.close()


def append(table: ResultTable, batch: QueryBatch, *batches: pa.RecordBatch) -> bool:
    """Write and commit a batch; whether it was added."""
    return table.commit(batch, write(table, *batches)).added


def live_rows(table: ResultTable, columns: Sequence[str] = ("id", "name")) -> list[tuple[Any, ...]]:
    """The rows of the current snapshot, sorted, read from the data files themselves."""
    table.refresh()
    found: list[tuple[Any, ...]] = []
    schema = table.layout().schema
    for task in table.iceberg.scan().plan_files():
        file = pq.read_table(task.file.file_path.removeprefix("file://"), partitioning=None)
        for batch in file.to_batches():
            aligned = to_schema(batch, schema)
            found += zip(*(aligned.column(name).to_pylist() for name in columns), strict=True)
    return sorted(found, key=repr)
