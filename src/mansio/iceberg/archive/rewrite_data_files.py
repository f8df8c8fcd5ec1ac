"""Compaction of the small data files and of the manifests of an archive, concurrent with the archive job.

A streaming archive creates a file per partition and batch, and the cost of reads and commits grows with the number of
files. `choose_groups` selects the files to merge. Rows are copied in row groups, so memory does not depend on the sizes
of files.

Invariants:
* The table has the same rows in the same order before and after each commit.
* Those of the module `mansio.iceberg.rewrite`.
"""

from __future__ import annotations

import posixpath
import uuid
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mansio.iceberg.archive.decoded_schema import archive_schema
from mansio.iceberg.archive.table_scan import BEFORE_FIRST_RECORD, check_order, read_file, record_count
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.fanout_writer import TARGET_FILE_BYTES
from mansio.iceberg.rewrite import (
    RewriteReport,
    RewrittenGroup,
    merge_candidates,
    merge_manifests,
    planned_report,
    replace_groups,
    total_bytes,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import LiveFile
    from mansio.iceberg.archive.table_scan import RecordPosition

ROW_GROUP_BYTES: Final = 32 << 20
"""Size of a row group in memory. It is small, so that a reader of a short time range reads little of a large file."""
ROW_GROUP_ROWS_MAX: Final = 1 << 20


def choose_groups(files: Iterable[LiveFile], target_bytes: int) -> list[list[LiveFile]]:
    """Return groups of neighbouring files of one partition, each to be merged into one file of up to `target_bytes`."""
    ordered = sorted(files, key=lambda file: (file.partition, file.first_offset))
    return [
        group
        for _, of_partition in groupby(ordered, key=lambda file: file.partition)
        for group in merge_candidates(of_partition, target_bytes)
    ]


def rewrite_data_files(table: ArchiveTable, target_bytes: int = TARGET_FILE_BYTES) -> RewriteReport:
    """Merge small data files, with a commit whenever `target_bytes` have been merged, then merge the manifests.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
        ArchiveError: A file is damaged, or the number of its rows differs from the table's metadata.
        ConfigError: The table has row-level deletes of another engine.
        OSError: The warehouse cannot be read or written.
    """
    table.refresh()
    report = RewriteReport(manifests_before=table.manifest_count())
    pending: list[RewrittenGroup] = []
    for group in choose_groups(table.live_files(), target_bytes):
        pending.append(_merge(table, group))
        if sum(total_bytes(merged.sources) for merged in pending) >= target_bytes:
            report, pending = _replace_groups(table, pending, report), []
    if pending:
        report = _replace_groups(table, pending, report)
    merge_manifests(table)
    return replace(report, manifests_after=table.manifest_count())


def planned_rewrite(table: ArchiveTable, target_bytes: int = TARGET_FILE_BYTES) -> RewriteReport:
    """Return what `rewrite_data_files` would do now. Changes nothing."""
    table.refresh()
    return planned_report(choose_groups(table.live_files(), target_bytes), table.manifest_count())


def _merge(table: ArchiveTable, group: Sequence[LiveFile]) -> RewrittenGroup:
    """Write the rows of these files to a new one in the directory of the first."""
    first = group[0]
    name = f"merged-{first.partition}-{first.first_offset}-{uuid.uuid4().hex}.parquet"
    path = posixpath.join(posixpath.dirname(first.path), name)
    schema = archive_schema(table.decoded_columns())
    file = write_file(table, path, schema, _row_groups(_rows_of(table, group, schema)), (first.partition,))
    if file.rows != record_count(group):
        raise ArchiveError(
            f"{file.rows} records were read where the table lists {record_count(group)}, from {first.path} on"
        )
    return RewrittenGroup(tuple(group), (file,))


def _rows_of(table: ArchiveTable, group: Sequence[LiveFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    last: RecordPosition = BEFORE_FIRST_RECORD
    for file in group:
        for batch in read_file(table.iceberg.io, file, schema=schema):
            last = check_order(batch, last, file.path)
            yield batch


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Concatenate batches to row groups."""
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        waiting.append(batch)
        size, rows = size + batch.nbytes, rows + batch.num_rows
        if size >= ROW_GROUP_BYTES or rows >= ROW_GROUP_ROWS_MAX:
            yield from _split(pa.Table.from_batches(waiting))
            waiting, size, rows = [], 0, 0
    if waiting:
        yield from _split(pa.Table.from_batches(waiting))


def _split(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield parts of at most `ROW_GROUP_ROWS_MAX` rows."""
    for start in range(0, rows.num_rows, ROW_GROUP_ROWS_MAX):
        yield rows.slice(start, ROW_GROUP_ROWS_MAX)


def _replace_groups(
    table: ArchiveTable, pending: Sequence[RewrittenGroup], report: RewriteReport
) -> RewriteReport:
    """Replace the old files by the merged ones in one commit. Return the report with the result."""
    return report.with_groups(pending, replace_groups(table, pending, has_same_rows=False))
