"""Rewriting of data files, for every kind of table: which files to merge, and the commit that replaces files by new
ones (Iceberg's rewrite_data_files), concurrent with the pipelines that write to the table.

The kind of table chooses the files that belong together and writes the new ones. A file is merged only with files that
together have at least its size, unless the result is larger than half of the target. So a row is rewritten about
log2(target / size of its first file) times, however often this runs.

Invariants:
* Files are replaced only if all of a group are live when the commit is made. If another program has replaced one of
  them, the group is left out, and its new files are deleted.
* The properties of the table do not change.
* Replaced files stay until the orphan cleanup deletes them, so that running readers are not disturbed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitStateUnknownException

from mansio.iceberg.commit import commit_files
from mansio.iceberg.data_files import WrittenFile
from mansio.iceberg.snapshot_files import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from mansio.iceberg.catalog import CatalogTable
    from mansio.iceberg.data_files import PartitionValue

COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 3
UNMERGED_MANIFESTS_MAX: Final = 2
"""Number of manifests up to which they are not merged, because merging has no benefit."""
MERGE_COUNT_PROPERTY: Final = "commit.manifest.min-count-to-merge"
MAINTENANCE_SUMMARY: Final = {"mansio.operation": "maintain"}
"""Properties in the summary of every snapshot that maintenance creates."""


class SizedFile(Protocol):
    """A live data file with its size."""

    @property
    def path(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LiveDataFile:
    """A live file of a table."""

    path: str
    rows: int
    bytes: int


SizedFileT = TypeVar("SizedFileT", bound=SizedFile)


@dataclass(frozen=True, slots=True)
class RewrittenGroup:
    """Live files and the new files that replace them."""

    sources: tuple[SizedFile, ...]
    files: tuple[WrittenFile, ...]


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

    def with_groups(
        self, groups: Sequence[RewrittenGroup], replaced: Sequence[RewrittenGroup]
    ) -> RewriteReport:
        """Return the report with these groups added, of which those in `replaced` were committed."""
        old = [file for group in replaced for file in group.sources]
        written = [file for group in replaced for file in group.files]
        return replace(
            self,
            files_replaced=self.files_replaced + len(old),
            files_written=self.files_written + len(written),
            rows=self.rows + sum(file.rows for file in old),
            bytes_before=self.bytes_before + total_bytes(old),
            bytes_after=self.bytes_after + sum(file.bytes for file in written),
            files_conflicting=self.files_conflicting + sum(len(group.sources) for group in groups) - len(old),
        )


def planned_report(groups: Sequence[Sequence[SizedFile]], manifests: int) -> RewriteReport:
    """Return what merging these groups would replace. `bytes_after` and `manifests_after` are unknown: 0."""
    old = [file for group in groups for file in group]
    return RewriteReport(
        files_replaced=len(old),
        files_written=len(groups),
        rows=sum(file.rows for file in old),
        bytes_before=total_bytes(old),
        manifests_before=manifests,
    )


def merge_candidates(files: Iterable[SizedFileT], target_bytes: int) -> Iterator[list[SizedFileT]]:
    """Yield groups of neighbours among the files of one partition, each to be merged into files of up to
    `target_bytes`. `files`: oldest first.
    """
    for group in _neighbouring_files(files, target_bytes):
        full = 2 * total_bytes(group) > target_bytes
        while len(group) > 1 and not full and group[0].bytes > total_bytes(group[1:]):
            group = group[1:]
        if len(group) > 1:
            yield group


def _neighbouring_files(files: Iterable[SizedFileT], target_bytes: int) -> Iterator[list[SizedFileT]]:
    """Yield runs of neighbouring files with a total of at most `target_bytes`. Files above half of it are omitted."""
    run: list[SizedFileT] = []
    for file in files:
        is_large = 2 * file.bytes > target_bytes
        if run and (is_large or total_bytes(run) + file.bytes > target_bytes):
            yield run
            run = []
        if not is_large:
            run.append(file)
    if run:
        yield run


def total_bytes(files: Sequence[SizedFile]) -> int:
    """Return the total size of these files."""
    return sum(file.bytes for file in files)


def write_file(
    table: CatalogTable,
    path: str,
    schema: pa.Schema,
    row_groups: Iterable[pa.Table],
    partition: tuple[PartitionValue, ...],
) -> WrittenFile:
    """Write a file of the table, one row group per item, and return its description. Raises OSError."""
    rows = 0
    with (
        table.iceberg.io.new_output(path).create() as stream,
        pq.ParquetWriter(
            stream, schema, compression=COMPRESSION, compression_level=COMPRESSION_LEVEL
        ) as writer,
    ):
        for chunk in row_groups:
            if chunk.num_rows:
                writer.write_table(chunk, row_group_size=chunk.num_rows)
                rows += chunk.num_rows
    return WrittenFile(path, rows, len(table.iceberg.io.new_input(path)), partition)


def replace_groups(
    table: CatalogTable,
    groups: Sequence[RewrittenGroup],
    reader: SnapshotReader | None = None,
    *,
    has_same_rows: bool,
) -> list[RewrittenGroup]:
    """Replace the old files of each group by its new files, in one commit, except groups of which a file was replaced
    already. Return the groups that were replaced. The new files of the others are deleted, unless the outcome of a
    commit was unknown.

    `reader`: the reader of the table, if it has one. `has_same_rows`: no row is removed; the snapshot then has the
    operation `replace`, which incremental readers of other engines skip.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
        InvalidDataFiles: A new file is not as it was described; nothing was committed.
        ConfigError: The table has row-level deletes of another engine.
    """
    reader = reader or SnapshotReader()
    replaced: list[RewrittenGroup] = []
    attempted: list[RewrittenGroup] = []
    has_unknown_outcome = False

    def attempt() -> int:
        nonlocal has_unknown_outcome
        live = reader.read(table.iceberg)
        files = {file.file_path: file for file in live.data_files()}
        # A new file is live if a commit whose response was lost has been applied, and then all of that commit is.
        if any(file.path in files for group in attempted for file in group.files):
            replaced[:] = attempted
            return 0
        attempted[:] = [group for group in groups if all(source.path in files for source in group.sources)]
        if attempted:
            try:
                commit_files(
                    table.iceberg,
                    [file for group in attempted for file in group.files],
                    [files[source.path] for group in attempted for source in group.sources],
                    live=live,
                    properties={},
                    summary=MAINTENANCE_SUMMARY,
                    has_same_rows=has_same_rows,
                )
            except CommitStateUnknownException:
                has_unknown_outcome = True
                raise
        replaced[:] = attempted
        return len(attempted)

    table.retry_on_conflict(attempt)
    if not has_unknown_outcome:  # else a snapshot may refer to files that another program has replaced since
        kept = {file.path for group in replaced for file in group.files}
        delete_files(table, [file.path for group in groups for file in group.files if file.path not in kept])
    return replaced


def delete_files(table: CatalogTable, paths: Iterable[str]) -> None:
    """Delete files that the table does not refer to. Files that remain are orphans."""
    for path in paths:
        with suppress(OSError):
            table.iceberg.io.delete(path)


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

    table.retry_on_conflict(attempt)
