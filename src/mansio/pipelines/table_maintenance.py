"""Maintenance of a result table: compaction of small files, expiry of snapshots, removal of orphan files.

Maintenance runs periodically, concurrently with the pipelines that write to the table, its readers, and other
maintenance. The files of one partition are merged in this process or in tasks of Spark, and a commit replaces the old
files by the new ones. Snapshots and unreferenced files are handled as those of an archive (`orphan_cleanup`).

Invariants:
* The table has the same rows before and after each commit, and the same properties, with the batches of all queries.
* Files are replaced only if all of a group are live when the commit is made. If a pipeline has replaced one of them,
  the group is left out.
* A table with row-level deletes of other engines is refused, because rewriting a file would restore deleted rows.
* A merged file has rows of one backfilled range only, and a name that shows the range.
* An interrupted run leaves files that the table does not refer to, and that a later run deletes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from mansio.errors import ConfigError
from mansio.iceberg.commit import refuse_row_level_deletes
from mansio.iceberg.fanout_writer import TARGET_FILE_BYTES
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from mansio.iceberg.result_table.backfill_ranges import RANGES_PROPERTY, parse_ranges
from mansio.iceberg.result_table.rewrite_tasks import (
    REPORT_SCHEMA,
    RewriteItem,
    parse_written_files,
    rewrite_files,
    rewrite_items,
)
from mansio.iceberg.result_table.table import CREATED_PROPERTY
from mansio.iceberg.rewrite import (
    LiveDataFile,
    RewriteReport,
    RewrittenGroup,
    merge_candidates,
    merge_manifests,
    planned_report,
    replace_groups,
    total_bytes,
)
from mansio.pipelines.maintain import GRACE_S, SNAPSHOTS_RETAINED, MaintenanceReport, tag_snapshot
from mansio.pipelines.run import PipelineFailed, failure_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from mansio.iceberg.data_files import PartitionValue, WrittenFile
    from mansio.iceberg.result_table.table import ResultTable

    Rewriter = Callable[[Sequence[RewriteItem]], list[tuple[WrittenFile, ...]]]

MERGED_PREFIX: Final = "merged"
TASKS_MAX: Final = 256
"""Maximum number of groups of files that one Spark job merges."""


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Live files to be merged. `owner`: prefix of the files of their backfilled range; empty for other rows."""

    files: tuple[LiveDataFile, ...]
    owner: str


def maintain_table(
    table: ResultTable,
    *,
    target_bytes: int = TARGET_FILE_BYTES,
    snapshots_kept: int = SNAPSHOTS_RETAINED,
    grace_s: float = GRACE_S,
    tag: str | None = None,
    spark: SparkSession | None = None,
    is_dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda _merged, _all: None,
) -> MaintenanceReport:
    """Merge small files and manifests, expire all but the newest `snapshots_kept` snapshots, and delete orphan files.

    `spark`: the session whose tasks merge the files; None: this process. `tag`, `grace_s`: as in `maintain.maintain`.
    `is_dry_run`: change nothing; the report has what would be done now. `progress`: called after each commit with the
    number of files that were merged, and of those to be merged.

    Raises:
        ConfigError: The table was not created by Mansio, or has row-level deletes.
        InvalidRequest: The tag exists.
        InvalidDataFiles: A file is damaged; nothing more was committed.
        PipelineFailed: Spark's job failed.
        CommitConflict: In every attempt another commit changed the table first.
        CatalogLocked, CatalogUnavailable, OSError: The catalog or the files cannot be used.
    """
    began = time.monotonic()
    table.refresh()
    if CREATED_PROPERTY not in table.iceberg.properties:
        raise ConfigError(
            f"table {table.name} was not created by `mansio pipeline run`, and other programs may write to it in their"
            " own ways: maintain it with its own engine"
        )
    if tag is not None and not is_dry_run:
        tag_snapshot(table, tag)
    groups = plan_rewrite(table, target_bytes)
    before = table.manifest_count()
    if is_dry_run:
        rewritten = planned_report([group.files for group in groups], before)
    else:
        rewritten = _rewrite(table, groups, target_bytes, spark, progress)
        merge_manifests(table)
    swept = remove_orphan_files(table, snapshots_kept=snapshots_kept, grace_s=grace_s, is_dry_run=is_dry_run)
    files = list(table.files().data_files())
    return MaintenanceReport(
        replace(rewritten, manifests_before=before, manifests_after=table.manifest_count()),
        swept,
        files=len(files),
        bytes=sum(file.file_size_in_bytes for file in files),
        rows=sum(file.record_count for file in files),
        seconds=time.monotonic() - began,
    )


def plan_rewrite(table: ResultTable, target_bytes: int) -> list[FileGroup]:
    """Return groups of small files of one partition and backfilled range, oldest first, each to be merged into files of
    up to `target_bytes`, as of the last refresh. Files of an earlier partition spec are left alone.

    Raises:
        ConfigError: The table has row-level deletes.
    """
    refuse_row_level_deletes(table.iceberg, table.files())
    ranges = parse_ranges(table.iceberg.properties.get(RANGES_PROPERTY))
    spec = table.iceberg.metadata.default_spec_id
    places: dict[tuple[PartitionValue, ...], list[LiveDataFile]] = {}
    oldest_first = sorted(table.files().entries(), key=lambda entry: entry.sequence_number or 0)
    for file in (entry.data_file for entry in oldest_first):
        if file.spec_id == spec:
            owner = next((one.file_prefix for one in ranges if one.owns_file(file.file_path)), "")
            values = (file.partition[index] for index in range(len(table.partition_by)))
            found = LiveDataFile(file.file_path, file.record_count, file.file_size_in_bytes)
            places.setdefault((owner, *values), []).append(found)
    return [
        FileGroup(tuple(group), str(owner))
        for (owner, *_), files in places.items()
        for group in merge_candidates(files, target_bytes)
    ]


def _rewrite(
    table: ResultTable,
    groups: Sequence[FileGroup],
    target_bytes: int,
    spark: SparkSession | None,
    progress: Callable[[int, int], None],
) -> RewriteReport:
    """Merge the groups, with a commit whenever `target_bytes` have been merged, or after each job of Spark."""
    rewrite = partial(_rewrite_here, table) if spark is None else partial(_rewrite_in_tasks, spark, table)
    report = RewriteReport()
    merged, count = 0, sum(len(group.files) for group in groups)
    for part in _parts(groups, target_bytes if spark is None else target_bytes * TASKS_MAX):
        items = [
            RewriteItem(
                group.owner or MERGED_PREFIX,
                tuple(file.path for file in group.files),
                sum(file.rows for file in group.files),
            )
            for group in part
        ]
        pairs = zip(part, rewrite(items), strict=True)
        rewritten = [RewrittenGroup(group.files, files) for group, files in pairs]
        report = report.with_groups(rewritten, _replace_groups(table, rewritten))
        merged += sum(len(group.files) for group in part)
        progress(merged, count)
    return report


def _parts(groups: Sequence[FileGroup], part_bytes: int) -> Iterator[list[FileGroup]]:
    """Yield the groups in parts of about `part_bytes`, and at most `TASKS_MAX` groups."""
    part: list[FileGroup] = []
    size = 0
    for group in groups:
        part.append(group)
        size += total_bytes(group.files)
        if size >= part_bytes or len(part) == TASKS_MAX:
            yield part
            part, size = [], 0
    if part:
        yield part


def _rewrite_here(table: ResultTable, items: Sequence[RewriteItem]) -> list[tuple[WrittenFile, ...]]:
    return [rewrite_files(table.layout(), table.sort_by, item) for item in items]


def _rewrite_in_tasks(
    spark: SparkSession, table: ResultTable, items: Sequence[RewriteItem]
) -> list[tuple[WrittenFile, ...]]:
    work = spark.range(0, len(items), 1, len(items))
    task = partial(rewrite_items, table.layout(), table.sort_by, tuple(items))
    try:
        reports = work.mapInArrow(task, REPORT_SCHEMA).collect()
    except PySparkException as error:
        raise PipelineFailed(failure_reason(str(error))) from error
    return [parse_written_files(one["report"]) for one in reports]


def _replace_groups(table: ResultTable, groups: Sequence[RewrittenGroup]) -> list[RewrittenGroup]:
    """Replace the files of the groups in one commit. Return the groups that were replaced."""
    return replace_groups(table, groups, table.reader, has_same_rows=True)
