"""Erasure of all rows with given keys from a table: affected files are rewritten without them, older snapshots expire,
and the files that contain the keys are deleted.

Only the column `key` of all files is read to find the affected ones; there are no bounds of keys in the manifests. Rows
are copied in row groups, so memory does not depend on the sizes of files.

Invariants:
* Other rows, their order, and the archive's offsets do not change.
* An interrupted run leaves a consistent table; the next run completes it.
* A file that an archive or a reader may still use is deleted only after the grace time of `remove_orphan_files`.
"""

from __future__ import annotations

import posixpath
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.table.refs import MAIN_BRANCH

from mansio.errors import InvalidRequest
from mansio.iceberg.errors import CommitConflict
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from mansio.iceberg.rewrite import LiveDataFile, RewrittenGroup, replace_groups, write_file
from mansio.iceberg.snapshot_files import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyiceberg.manifest import DataFile

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.data_files import WrittenFile

    RowFilter = Callable[[pa.Table], pa.ChunkedArray]
    """Returns for each row whether it is selected."""

KEY_COLUMN: Final = "key"
PASSES_MAX: Final = 5
"""Maximum number of passes over the table, if other programs replace files during a pass."""


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """Result of an erasure in one table. `rows`: erased rows. `files`: rewritten files. `files_deleted`: files deleted
    now; `files_waiting`: unreferenced files whose grace time has not expired, which may contain the keys.
    """

    table: str
    rows: int = 0
    files: int = 0
    snapshots_expired: int = 0
    files_deleted: int = 0
    files_waiting: int = 0


def with_key(keys: Sequence[bytes]) -> RowFilter:
    """Return a filter that selects the rows with one of these keys."""

    def select(rows: pa.Table) -> pa.ChunkedArray:
        column = rows.column(KEY_COLUMN)
        return pc.is_in(column, value_set=pa.array(keys, column.type))

    return select


def erase_rows(
    table: ArchiveTable,
    is_erased: RowFilter,
    columns: Sequence[str] = (KEY_COLUMN,),
    *,
    grace_s: float,
    drop_tags: bool = False,
    progress: Callable[[int, int], None] = lambda _searched, _all: None,
) -> ErasureReport:
    """Erase the rows that `is_erased` selects. It is called with rows that have these `columns`.

    `grace_s`: time for which a replaced file is retained for running readers, in seconds; with 0 it is deleted now, for
    which no archive job and no reader may run. `drop_tags`: remove tags, which would retain old snapshots. `progress`
    is called with the number of files that were searched, and of all files.

    Raises:
        InvalidRequest: The table has tags, and `drop_tags` is false; nothing was changed.
        CommitConflict: In every attempt another commit changed the table first.
        ArchiveError, OSError: The catalog or the files cannot be used.
    """
    table.refresh()
    check_tags(table, drop_tags=drop_tags)
    _remove_tags(table)
    report = ErasureReport(table.name)
    for _ in range(PASSES_MAX):
        rewritten = list(_rewrite_affected(table, is_erased, columns, progress))
        if not rewritten:
            break
        done = replace_groups(table, rewritten, has_same_rows=False)
        report = replace(
            report,
            rows=report.rows + sum(_erased_rows(group) for group in done),
            files=report.files + len(done),
        )
    else:
        raise CommitConflict(
            f"other programs replaced files of {table.name} in {PASSES_MAX} passes: is a maintenance job running"
            " without a pause? Run the command again"
        )
    cleaned = remove_orphan_files(table, snapshots_kept=1, grace_s=grace_s)
    return replace(
        report,
        snapshots_expired=cleaned.snapshots_expired,
        files_deleted=cleaned.files_deleted,
        files_waiting=cleaned.files_waiting,
    )


def check_tags(table: ArchiveTable, *, drop_tags: bool) -> None:
    """Raise `InvalidRequest` if the table has tags or branches other than the main one, unless they may be dropped."""
    names = _tags(table)
    if names and not drop_tags:
        raise InvalidRequest(
            f"{table.name} has the tags {', '.join(names)}, whose snapshots would keep the erased rows: remove them"
            " with --drop-tags"
        )


def count_rows(table: ArchiveTable, is_selected: RowFilter, columns: Sequence[str]) -> int:
    """Return the number of rows of the current snapshot that `is_selected` selects; it is called with these columns."""
    table.refresh()
    count = 0
    for file in _data_files(table):
        with table.iceberg.io.new_input(file.file_path).open() as stream:
            count += _count_in(pq.ParquetFile(stream), is_selected, columns)
    return count


def _tags(table: ArchiveTable) -> list[str]:
    return sorted(name for name in table.iceberg.metadata.refs if name != MAIN_BRANCH)


def _remove_tags(table: ArchiveTable) -> None:
    def attempt() -> int:
        names = _tags(table)
        if names:
            change = table.iceberg.manage_snapshots()
            for name in names:
                change = change.remove_tag(name)
            change.commit()
        return len(names)

    table.retry_on_conflict(attempt)


def _erased_rows(group: RewrittenGroup) -> int:
    return sum(file.rows for file in group.sources) - sum(file.rows for file in group.files)


def _data_files(table: ArchiveTable) -> list[DataFile]:
    """Return the live files, by path."""
    return sorted(SnapshotReader().read(table.iceberg).data_files(), key=lambda file: file.file_path)


def _rewrite_affected(
    table: ArchiveTable,
    is_erased: RowFilter,
    columns: Sequence[str],
    progress: Callable[[int, int], None],
) -> Iterator[RewrittenGroup]:
    """Rewrite every file of the table that has selected rows."""
    files = _data_files(table)
    for searched, file in enumerate(files, 1):
        with table.iceberg.io.new_input(file.file_path).open() as stream:
            source = pq.ParquetFile(stream)
            rows = _count_in(source, is_erased, columns)
            if rows:
                found = LiveDataFile(file.file_path, source.metadata.num_rows, file.file_size_in_bytes)
                kept = [] if rows == found.rows else [_copy(table, file, source, is_erased)]
                yield RewrittenGroup((found,), tuple(kept))
        progress(searched, len(files))


def _count_in(source: pq.ParquetFile, is_selected: RowFilter, columns: Sequence[str]) -> int:
    """Return the number of selected rows of a file."""
    groups = (source.read_row_group(group, columns=list(columns)) for group in range(source.num_row_groups))
    return sum(int(pc.sum(is_selected(rows), min_count=0).as_py()) for rows in groups)


def _copy(table: ArchiveTable, file: DataFile, source: pq.ParquetFile, is_erased: RowFilter) -> WrittenFile:
    """Write the rows of a file that are not selected to a new file beside it."""
    path = posixpath.join(posixpath.dirname(file.file_path), f"kept-{uuid.uuid4().hex}.parquet")

    def kept() -> Iterator[pa.Table]:
        for group in range(source.num_row_groups):
            rows = source.read_row_group(group)
            yield rows.filter(pc.invert(pc.fill_null(is_erased(rows), fill_value=False)))

    partition = tuple(file.partition[index] for index in range(len(table.iceberg.spec().fields)))
    return write_file(table, path, source.schema_arrow, kept(), partition)
