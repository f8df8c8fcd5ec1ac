"""Compaction of small data files and of manifests (Iceberg's rewrite_data_files), concurrent with the archive.

A streaming archive creates a file per partition and batch, and the cost of reads and commits grows with the number of
files. `choose_groups` selects the files to merge; they are replaced by the merged files in one commit. Rows are copied
in row groups, so memory does not depend on the sizes of files.

Invariants:
* The table has the same rows in the same order before and after each commit.
* The archive's properties do not change.
* If two programs replace the same files, one commits and the other discards its work.
* Replaced files stay until the orphan cleanup deletes them, so that running readers are not disturbed.
"""

from __future__ import annotations

import posixpath
import uuid
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import parquet_file_to_data_file

from mansio.iceberg.archive.decoded_schema import archive_schema
from mansio.iceberg.archive.table_scan import BEFORE_FIRST_RECORD, check_order, read_file, record_count
from mansio.iceberg.errors import ArchiveError
from mansio.iceberg.orphan_cleanup import MAINTENANCE_SUMMARY, retry_on_conflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyiceberg.manifest import DataFile

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import LiveFile
    from mansio.iceberg.archive.table_scan import RecordPosition
    from mansio.iceberg.catalog import CatalogTable

TARGET_FILE_BYTES: Final = 256 << 20
ROW_GROUP_BYTES: Final = 32 << 20
"""Size of a row group in memory. It is small, so that a reader of a short time range reads little of a large file."""
ROW_GROUP_ROWS_MAX: Final = 1 << 20
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 3
UNMERGED_MANIFESTS_MAX: Final = 2
"""Number of manifests up to which they are not merged, because merging has no benefit."""
MERGE_COUNT_PROPERTY: Final = "commit.manifest.min-count-to-merge"


class SizedFile(Protocol):
    """A data file with its size."""

    @property
    def bytes(self) -> int: ...


SizedFileT = TypeVar("SizedFileT", bound=SizedFile)


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """Result of a rewrite. `bytes_before` and `bytes_after` are the sizes of the replaced and of the new files."""

    files_replaced: int = 0
    files_written: int = 0
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    files_conflicting: int = 0
    """Number of chosen files that were not replaced, because another program had replaced one of their group."""
    manifests_before: int = 0
    manifests_after: int = 0


@dataclass(frozen=True, slots=True)
class _MergedFile:
    """A new file and the files it replaces."""

    sources: tuple[LiveFile, ...]
    path: str


def choose_groups(files: Iterable[LiveFile], target_bytes: int) -> list[list[LiveFile]]:
    """Groups of neighbouring files of one partition, each to be merged into one file of at most `target_bytes`.

    A file is merged only with files that together have at least its size, unless the result is larger than half of the
    target. So a record is rewritten about log2(target / size of its first file) times, however often this runs.
    """
    ordered = sorted(files, key=lambda file: (file.partition, file.first_offset))
    return [
        group
        for _, of_partition in groupby(ordered, key=lambda file: file.partition)
        for group in merge_candidates(of_partition, target_bytes)
    ]


def merge_candidates(files: Iterable[SizedFileT], target_bytes: int) -> Iterator[list[SizedFileT]]:
    """Groups of neighbours among the files of one partition, by the rules of `choose_groups`. `files`: oldest first."""
    for group in _neighbouring_files(files, target_bytes):
        full = 2 * _size(group) > target_bytes
        while len(group) > 1 and not full and group[0].bytes > _size(group[1:]):
            group = group[1:]
        if len(group) > 1:
            yield group


def _neighbouring_files(files: Iterable[SizedFileT], target_bytes: int) -> Iterator[list[SizedFileT]]:
    """Runs of neighbouring files with a total of at most `target_bytes`. Files above half of it are omitted."""
    run: list[SizedFileT] = []
    for file in files:
        is_large = 2 * file.bytes > target_bytes
        if run and (is_large or _size(run) + file.bytes > target_bytes):
            yield run
            run = []
        if not is_large:
            run.append(file)
    if run:
        yield run


def _size(files: Sequence[SizedFile]) -> int:
    return sum(file.bytes for file in files)


def rewrite_data_files(table: ArchiveTable, target_bytes: int = TARGET_FILE_BYTES) -> RewriteReport:
    """Merge small data files, with a commit whenever `target_bytes` have been merged, then merge the manifests.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
        ArchiveError: A file is damaged, or the number of its rows differs from the table's metadata.
        OSError: The warehouse cannot be read or written.
    """
    table.refresh()
    before = table.manifest_count()
    report = RewriteReport(manifests_before=before)
    pending: list[_MergedFile] = []
    for group in choose_groups(table.live_files(), target_bytes):
        pending.append(_merge(table, group))
        if sum(_size(merged.sources) for merged in pending) >= target_bytes:
            report, pending = _replace_files(table, pending, report), []
    if pending:
        report = _replace_files(table, pending, report)
    merge_manifests(table)
    return replace(report, manifests_after=table.manifest_count())


def planned_rewrite(table: ArchiveTable, target_bytes: int = TARGET_FILE_BYTES) -> RewriteReport:
    """What `rewrite_data_files` would do now. Changes nothing. `bytes_after` and `manifests_after` are unknown: 0."""
    table.refresh()
    groups = choose_groups(table.live_files(), target_bytes)
    old = [file for group in groups for file in group]
    return RewriteReport(
        files_replaced=len(old),
        files_written=len(groups),
        rows=record_count(old),
        bytes_before=_size(old),
        manifests_before=table.manifest_count(),
    )


def _merge(table: ArchiveTable, group: Sequence[LiveFile]) -> _MergedFile:
    """Write the rows of these files to a new one in the directory of the first."""
    first = group[0]
    name = f"merged-{first.partition}-{first.first_offset}-{uuid.uuid4().hex}.parquet"
    path = posixpath.join(posixpath.dirname(first.path), name)
    rows = 0
    schema = archive_schema(table.decoded_columns())
    with (
        table.iceberg.io.new_output(path).create() as stream,
        pq.ParquetWriter(
            stream, schema, compression=COMPRESSION, compression_level=COMPRESSION_LEVEL
        ) as writer,
    ):
        for chunk in _row_groups(_rows_of(table, group, schema)):
            writer.write_table(chunk, row_group_size=ROW_GROUP_ROWS_MAX)
            rows += chunk.num_rows
    if rows != record_count(group):
        raise ArchiveError(
            f"{rows} records were read where the table lists {record_count(group)}, from {first.path} on"
        )
    return _MergedFile(tuple(group), path)


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
            yield pa.Table.from_batches(waiting)
            waiting, size, rows = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _replace_files(
    table: ArchiveTable, pending: Sequence[_MergedFile], report: RewriteReport
) -> RewriteReport:
    """Replace the old files by the merged ones in one commit, except groups of which a file was replaced already."""
    kept: list[_MergedFile] = []

    def attempt() -> int:
        live = {file.file_path: file for file in _data_files(table)}
        chosen = [merged for merged in pending if all(one.path in live for one in merged.sources)]
        # A merged file is live if a commit whose response was lost has been applied.
        kept[:] = [merged for merged in pending if merged in chosen or merged.path in live]
        if chosen:
            _commit(table, chosen, live)
        return len(chosen)

    retry_on_conflict(table, attempt)
    old = [file for merged in kept for file in merged.sources]
    conflicting = sum(len(merged.sources) for merged in pending) - len(old)
    return replace(
        report,
        files_replaced=report.files_replaced + len(old),
        files_written=report.files_written + len(kept),
        rows=report.rows + record_count(old),
        bytes_before=report.bytes_before + _size(old),
        bytes_after=report.bytes_after + sum(len(table.iceberg.io.new_input(merged.path)) for merged in kept),
        files_conflicting=report.files_conflicting + conflicting,
    )


def _data_files(table: ArchiveTable) -> list[DataFile]:
    """The data files of the current manifests, as a commit needs them."""
    return [task.file for task in table.iceberg.scan().plan_files()]


def _commit(table: ArchiveTable, replaced: Sequence[_MergedFile], live: dict[str, DataFile]) -> None:
    with (
        table.transaction() as transaction,
        transaction.update_snapshot(snapshot_properties=MAINTENANCE_SUMMARY).overwrite() as change,
    ):
        for merged in replaced:
            for source in merged.sources:
                change.delete_data_file(live[source.path])
            change.append_data_file(
                parquet_file_to_data_file(table.iceberg.io, table.iceberg.metadata, merged.path)
            )


def merge_manifests(table: CatalogTable) -> None:
    """Merge the manifests if there are more than `UNMERGED_MANIFESTS_MAX`. Rows and data files do not change.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
    """

    def attempt() -> int:
        if table.manifest_count() <= UNMERGED_MANIFESTS_MAX:
            return 0
        configured = table.iceberg.properties.get(MERGE_COUNT_PROPERTY)
        with table.transaction() as transaction:
            transaction.set_properties({MERGE_COUNT_PROPERTY: "2"})
            # An empty append, which merges the existing manifests.
            transaction.update_snapshot(snapshot_properties=MAINTENANCE_SUMMARY).merge_append().commit()
            if configured is None:
                transaction.remove_properties(MERGE_COUNT_PROPERTY)
            else:
                transaction.set_properties({MERGE_COUNT_PROPERTY: configured})
        return 1

    retry_on_conflict(table, attempt)
