"""Sink of `foreachBatch` that upserts the rows of a micro-batch into a result table by key, exactly once.

Copy-on-write in two jobs (`upsert_tasks`): the first stages the last row of each key of the batch, the second rewrites
the files that hold these keys. The driver plans the second job from the bounds of the files and commits replaced and
new files with the batch's id in one transaction. Rows never reach the driver.

A row whose columns other than the key are all null is a tombstone: it deletes the row with its key. A row whose key is
null ends the query, is skipped, or becomes a row of a dead-letter table.

Invariants:
* The plan of the batch is executed exactly once per call: after a concurrent commit only the second job is repeated.
* The table has at most one row per key, if it had before.
* Dead letters are committed before the batch, under the same id, so each is in its table exactly once.
"""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, functions
from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf

from mansio.iceberg.errors import CommitConflict, NullKey
from mansio.iceberg.result_table.commit import FilesChanged, QueryBatch
from mansio.iceberg.result_table.partition_spec import BUCKET
from mansio.iceberg.result_table.upsert_plan import group_fields, keyed_files, plan_merge
from mansio.iceberg.result_table.upsert_tasks import (
    DELETE_COLUMN,
    GROUP_COLUMN,
    POSITION_COLUMN,
    ROW_COLUMN,
    STAGE_SCHEMA,
    StageOptions,
    group_names,
    merge_groups,
    parse_merge_report,
    parse_stage_report,
    stage_rows,
)
from mansio.iceberg.rewrite import delete_files
from mansio.logs import fields
from mansio.spark.sink.append_sink import execute_without_output, file_prefix, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.result_table.commit import TableShape
    from mansio.iceberg.result_table.partition_spec import PartitionField
    from mansio.iceberg.result_table.table import ResultTable
    from mansio.iceberg.result_table.upsert_plan import KeyedFile
    from mansio.iceberg.result_table.upsert_tasks import MergeItem, MergeReport, StagedGroup, StageReport

logger = logging.getLogger(__name__)

MERGE_ATTEMPTS_MAX: Final = 5
MERGE_TASKS_MAX: Final = 256
NULL_KEY_SUSPEND: Final = "suspend"
NULL_KEY_SKIP: Final = "skip"
NULL_KEY_DEAD_LETTER: Final = "dead-letter"


class UpsertSink:
    """Upserts each micro-batch into a table. `identify`: returns the identity of a batch by its session and id.
    `dead_letters`: the table for rows without a key, if they are stored. `order_by`: columns that decide which row of
    a key is the last; rows with equal values, and all rows without it, count in the order of the DataFrame.
    """

    def __init__(
        self,
        table: ResultTable,
        identify: Callable[[SparkSession, int], QueryBatch],
        *,
        order_by: Sequence[str] = (),
        on_null_key: str = NULL_KEY_SUSPEND,
        dead_letters: ResultTable | None = None,
    ) -> None:
        """Raise `ConfigError` if the table is not partitioned by its key."""
        self._table = table
        self._identify = identify
        self._order_by = tuple(order_by)
        self._on_null_key = on_null_key
        self._dead_letters = dead_letters
        self._fields = group_fields(table.partition_by, table.key)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one batch. Called by Spark on the driver."""
        batch = self._identify(frame.sparkSession, batch_id)
        self._table.refresh()
        if self._table.is_committed(batch):
            execute_without_output(frame)
            return
        shape = self._table.shape()
        reports = self._stage(frame, batch)
        staged = [one for report in reports for one in report.groups]
        try:
            self._commit_null_keys(reports, batch)
            if staged:
                self._merge_and_commit(frame, batch, staged, shape)
        finally:
            delete_files(self._table, [one.path for one in staged])

    def _stage(self, frame: DataFrame, batch: QueryBatch) -> list[StageReport]:
        """Execute the plan and stage the last row of each key: the first job."""
        key, columns = self._table.key, [quoted(name) for name in frame.columns]
        partition_fields = [one for _, one in self._fields]
        is_null = reduce(Column.__or__, [functions.col(quoted(name)).isNull() for name in key])
        others = [functions.col(quoted(name)).isNull() for name in frame.columns if name not in key]
        row = functions.when(is_null, functions.to_json(functions.struct(*columns)))
        rows = frame.select(
            *columns,
            (reduce(Column.__and__, others) if others else functions.lit(False)).alias(DELETE_COLUMN),
            (row if self._dead_letters is not None else functions.lit(None)).cast("string").alias(ROW_COLUMN),
            functions.monotonically_increasing_id().alias(POSITION_COLUMN),
            _group_column(partition_fields).alias(GROUP_COLUMN),
        )
        configured = int(frame.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        rows = rows.repartition(stage_tasks(partition_fields, configured), GROUP_COLUMN).sortWithinPartitions(
            GROUP_COLUMN, *map(quoted, (*key, *self._order_by)), POSITION_COLUMN
        )
        options = StageOptions(
            self._table.layout(),
            key,
            file_prefix(batch),
            None if self._dead_letters is None else self._dead_letters.layout(),
        )
        found = rows.mapInArrow(partial(stage_rows, options), STAGE_SCHEMA).collect()
        return [parse_stage_report(one["report"]) for one in found]

    def _commit_null_keys(self, reports: Sequence[StageReport], batch: QueryBatch) -> None:
        """Handle the rows without a key. Raises `NullKey` if they end the query."""
        count = sum(report.null_keys for report in reports)
        if not count:
            return
        if self._on_null_key == NULL_KEY_SUSPEND:
            raise NullKey(
                f"batch {batch.batch} contains {count} {'row' if count == 1 else 'rows'} without a key"
                f" ({', '.join(self._table.key)} is null): correct the function, or continue without"
                " them (--on-null-key skip, or dead-letter)"
            )
        logger.warning(
            "rows_without_key", extra=fields(table=str(self._table.name), batch=batch.batch, rows=count)
        )
        if self._dead_letters is not None:
            self._dead_letters.refresh()
            files = [one for report in reports for one in report.dead_letters]
            self._dead_letters.commit(batch, files)

    def _merge_and_commit(
        self, frame: DataFrame, batch: QueryBatch, staged: Sequence[StagedGroup], shape: TableShape
    ) -> None:
        """Execute the second job and commit. After a concurrent commit that changed files of some of the batch's
        groups, these groups are merged again, with the table's present columns. `shape`: the one for which the rows
        were staged.
        """
        groups = {one.group for one in staged}
        merged: dict[str, MergeReport] = {}
        before: dict[str, frozenset[str]] = {}
        for _ in range(MERGE_ATTEMPTS_MAX):
            shape.check(self._table.iceberg)
            files = self._keyed_files()
            now = paths_by_group(files, groups)
            stale = [one for one in staged if one.group not in merged or now[one.group] != before[one.group]]
            delete_files(
                self._table,
                [file.path for one in stale if one.group in merged for file in merged[one.group].files],
            )
            reports = self._merge(frame, batch, plan_merge(stale, files)) if stale else []
            merged.update(zip((one.group for one in stale), reports, strict=True))
            before = now
            added = [file for report in merged.values() for file in report.files]
            replaced = [path for report in merged.values() for path in report.replaced]
            try:
                self._table.commit(batch, added, replaced, partial(self._has_files, before), shape)
            except FilesChanged:
                self._table.refresh()
                continue
            return
        raise CommitConflict(
            f"other commits changed files of {self._table.name} in {MERGE_ATTEMPTS_MAX} attempts to merge batch"
            f" {batch.batch}: does another program write to it without a pause?"
        )

    def _merge(self, frame: DataFrame, batch: QueryBatch, items: Sequence[MergeItem]) -> list[MergeReport]:
        # Not `createDataFrame`, which would make the query's clone of the session the active one of this process.
        work = frame.sparkSession.range(0, len(items), 1, min(len(items), MERGE_TASKS_MAX))
        merge = partial(merge_groups, self._table.layout(), self._table.key, file_prefix(batch), tuple(items))
        return [parse_merge_report(one["report"]) for one in work.mapInArrow(merge, STAGE_SCHEMA).collect()]

    def _keyed_files(self) -> list[KeyedFile]:
        return keyed_files(self._table.iceberg, self._table.files(), self._fields, self._table.key[0])

    def _has_files(self, paths: dict[str, frozenset[str]]) -> bool:
        """Whether these groups have exactly these live files, as of the last refresh."""
        return paths_by_group(self._keyed_files(), paths.keys()) == paths


def paths_by_group(files: Iterable[KeyedFile], groups: Collection[str]) -> dict[str, frozenset[str]]:
    """Paths of the files of each of these groups."""
    found: dict[str, set[str]] = {group: set() for group in groups}
    for file in files:
        if file.group in found:
            found[file.group].add(file.path)
    return {group: frozenset(paths) for group, paths in found.items()}


def stage_tasks(partition_fields: Sequence[PartitionField], configured: int) -> int:
    """Return the number of tasks of the first job: `configured`, or fewer if there are fewer groups. There are twice as
    many tasks as groups, because Spark assigns groups to tasks by a hash.
    """
    if not all(one.transform == BUCKET for one in partition_fields):
        return configured  # the number of groups is unknown
    return min(configured, 2 * math.prod(one.parameter for one in partition_fields))


def _group_column(partition_fields: Sequence[PartitionField]) -> Column:
    """Return the name of each row's group, computed in Python: Spark has no expression for the buckets of Iceberg."""
    names = tuple(partition_fields)

    def group_of_rows(*columns: pa.Array) -> pa.Array:
        return group_names(names, columns)

    with warnings.catch_warnings():
        # Spark prefers type hints, which it cannot evaluate for names that are imported for type checking only.
        warnings.simplefilter("ignore", UserWarning)
        group: Callable[..., Column] = arrow_udf(group_of_rows, "string", ArrowUDFType.SCALAR)
    return group(*(functions.col(quoted(one.column)) for one in partition_fields))
