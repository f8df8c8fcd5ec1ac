"""Result tables for tests without a JVM: opened, written by what the tasks do, and read from their live files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import types as spark_types

from mansio.iceberg.result_table.data_file_writer import DataFileWriter, to_schema
from mansio.iceberg.result_table.table import ResultTable, TableTarget, open_result_table
from mansio.iceberg.result_table.upsert_plan import group_fields, keyed_files, plan_merge
from mansio.iceberg.result_table.upsert_tasks import (
    DELETE_COLUMN,
    GROUP_COLUMN,
    POSITION_COLUMN,
    ROW_COLUMN,
    MergeReport,
    StageOptions,
    group_names,
    merge_group,
    parse_stage_report,
    stage_rows,
)
from mansio.spark.sink.result_schema import to_iceberg_schema
from mansio.spark.sink.upsert_sink import paths_by_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.iceberg.data_files import WrittenFile
    from mansio.iceberg.result_table.commit import QueryBatch

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
    return open_result_table(TableTarget(name, str(warehouse), **options), to_iceberg_schema(columns), {})


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


# -- upserts --------


def upsert(
    table: ResultTable,
    batch: QueryBatch,
    frame: pa.Table,
    *,
    batch_rows: int = 3,
    small_bytes: int = 0,
    between: Callable[[], object] = lambda: None,
    dead_letters: ResultTable | None = None,
) -> MergeReport:
    """What the two jobs of an upsert and its commit do with the rows of a micro-batch. `between`: called after the
    second job, before the commit."""
    key, fields = table.key, group_fields(table.partition_by, table.key)
    position = pa.array(range(frame.num_rows), pa.int64())
    others = [frame[name].combine_chunks() for name in frame.column_names if name not in key]
    is_tombstone = [all(not column[n].is_valid for column in others) for n in range(frame.num_rows)]
    groups = group_names(
        [one for _, one in fields], [frame[one.column].combine_chunks() for _, one in fields]
    )
    text = [json.dumps(row, default=str) for row in frame.to_pylist()]
    rows = frame.append_column(GROUP_COLUMN, groups).append_column(POSITION_COLUMN, position)
    rows = rows.append_column(DELETE_COLUMN, pa.array(is_tombstone, pa.bool_()))
    rows = rows.append_column(ROW_COLUMN, pa.array(text, pa.string()))
    rows = rows.sort_by([(name, "ascending") for name in (GROUP_COLUMN, *key, POSITION_COLUMN)])
    options = StageOptions(
        table.layout(), key, f"{batch.query}-{batch.batch}", dead_letters.layout() if dead_letters else None
    )
    (report,) = stage_rows(options, iter(rows.to_batches(max_chunksize=batch_rows)))
    staged = parse_stage_report(report["report"][0].as_py())
    table.refresh()
    files = keyed_files(table.iceberg, table.files(), fields, key[0])
    names = {one.group for one in staged.groups}
    before = paths_by_group(files, names)
    items = plan_merge(staged.groups, files, small_bytes=small_bytes)
    merged = [merge_group(table.layout(), key, "merged", item) for item in items]
    between()
    if dead_letters is not None and staged.dead_letters:
        dead_letters.commit(batch, staged.dead_letters)
    replaced = [path for one in merged for path in one.replaced]
    added = [file for one in merged for file in one.files]

    def is_current() -> bool:
        now = keyed_files(table.iceberg, table.files(), fields, key[0])
        return before == paths_by_group(now, names)

    table.commit(batch, added, replaced, is_current)
    return MergeReport(tuple(replaced), tuple(added))
