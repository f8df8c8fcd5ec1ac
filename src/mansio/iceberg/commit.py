"""Commit of files and properties to a table in one transaction, for every kind of table.

Steps of a commit, in one transaction: columns are changed, snapshots are expired, properties are set, files are removed
and added. What may be committed, and which properties describe it, is decided by the kind of table: `archive.commit`
compares offsets, `result_table.commit` batch ids.

Invariants:
* A change is committed only to the table state against which it was checked. Every commit of `commit_files` creates a
  snapshot, also without files, and requires that the branch still points to the previous snapshot and that columns and
  partition spec are those of this state. After a concurrent commit, and after one of its own with an unknown outcome,
  `commit_with_retries` reads the table and checks again.
* pyiceberg's own retry would repeat the change without this check: `CachedMetadataTransaction` prevents it.
* Attempts and waits are bounded: `COMMIT_RETRIES_MAX` and `COMMIT_RETRY_BACKOFF_S_MAX`.
* Files with row-level deletes of other engines are not replaced, because the new ones would have the deleted rows.

Private names of pyiceberg (`_updates`, `_apply`) are used in this package only, and tested with version 0.12.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Transaction
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import (
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    RemoveSnapshotsUpdate,
    update_table_metadata,
)
from pyiceberg.typedef import Record

from mansio.backoff import grown_delay
from mansio.errors import ConfigError
from mansio.iceberg.errors import CommitConflict, InvalidDataFiles, TableChanged
from mansio.iceberg.snapshot_files import ReplaceDataFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableUpdate
    from pyiceberg.table.update.snapshot import _MergeAppendFiles

    from mansio.iceberg.data_files import WrittenFile
    from mansio.iceberg.snapshot_files import SnapshotFiles

COMMIT_RETRIES_MAX: Final = 15
"""Waits of at most 51 s in total. Other programs that commit all the time are first in several attempts in a row."""
COMMIT_RETRY_BACKOFF_S: Final = 0.1
"""Maximum of the random wait before the second attempt; it doubles with each attempt."""
COMMIT_RETRY_BACKOFF_S_MAX: Final = 5.0

Result = TypeVar("Result")


class CachedMetadataTransaction(Transaction):
    """A pyiceberg transaction that is committed in one attempt, and that computes the changed metadata only once after
    each change.

    pyiceberg's own transaction computes them at every access, about twenty times per commit, and copies all snapshots
    each time. After a conflict it repeats the snapshots that are registered with it, without the check of this package.
    """

    _cached_metadata: tuple[tuple[TableUpdate, ...], TableMetadata, TableMetadata] | None = None

    def _register_snapshot_producer(self, producer: object) -> None:
        """Do nothing: a transaction without registered snapshots is not repeated."""

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata after this transaction."""
        updates, base = self._updates, self._table.metadata
        if (
            self._cached_metadata is None
            or self._cached_metadata[0] is not updates
            or self._cached_metadata[1] is not base
        ):
            self._cached_metadata = (updates, base, update_table_metadata(base, updates))
        return self._cached_metadata[2]


def commit_with_retries(
    table: Table,
    attempt: Callable[[int], Result],
    conflict: str,
    *,
    retries: int = COMMIT_RETRIES_MAX,
    backoff_s: float | None = None,
) -> Result:
    """Return the result of `attempt`. It is called with 1, and again with the next number, after a refresh of the
    table, as often as a concurrent commit was first or the outcome of its own commit is unknown.

    `conflict`: text of the error. `backoff_s`: None for `COMMIT_RETRY_BACKOFF_S`.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
        TableChanged: Another program dropped the table, or created another one in its place.
    """
    backoff_s = COMMIT_RETRY_BACKOFF_S if backoff_s is None else backoff_s
    for number in range(1, retries + 2):
        try:
            return attempt(number)
        except (CommitFailedException, CommitStateUnknownException):
            if number <= retries:
                time.sleep(random.uniform(0, grown_delay(number, backoff_s, COMMIT_RETRY_BACKOFF_S_MAX)))
                refresh_table(table)
    raise CommitConflict(conflict)


def refresh_table(table: Table) -> None:
    """Reload the metadata of a table.

    Raises:
        TableChanged: Another program dropped the table, or created another one in its place.
        pyiceberg's errors of the catalog: See `catalog.catalog_errors`.
    """
    known = table.metadata.table_uuid
    name = ".".join(table.name())
    try:
        table.refresh()
    except NoSuchTableError as error:
        raise TableChanged(f"another program dropped table {name}: start again without it") from error
    except ValueError as error:  # pyiceberg's for another UUID
        if table.catalog.load_table(table.name()).metadata.table_uuid == known:
            raise
        raise TableChanged(
            f"another program dropped table {name} and created it again: start again, with a new checkpoint if the"
            " rows of earlier batches are to be in it"
        ) from error


def commit_files(
    table: Table,
    added: Sequence[WrittenFile],
    removed: Sequence[DataFile] = (),
    *,
    live: SnapshotFiles | None = None,
    properties: Mapping[str, str],
    summary: Mapping[str, str],
    expired: Sequence[int] = (),
    change_columns: Callable[[Transaction], None] = lambda _transaction: None,
    has_same_rows: bool = False,
) -> int:
    """Add and remove files and set properties of the table and of the snapshot's summary, in one attempt. Return the id
    of the new snapshot.

    `live`: the live files of the current snapshot, which contain `removed`. `expired`: ids of snapshots to remove.
    `change_columns`: changes the table's columns as part of the transaction. `has_same_rows`: the added files have the
    rows of the removed ones.

    Raises:
        InvalidDataFiles: A file is not as its task reported; nothing was committed.
        ConfigError: The table has row-level deletes, and files are to be removed.
        pyiceberg's CommitFailedException, CommitStateUnknownException: See `commit_with_retries`.
    """
    if removed:
        assert live is not None
        refuse_row_level_deletes(table, live)
    with CachedMetadataTransaction(table) as transaction:
        transaction._apply(
            (),
            (
                AssertCurrentSchemaId.model_validate({"current-schema-id": table.metadata.current_schema_id}),
                AssertDefaultSpecId.model_validate({"default-spec-id": table.metadata.default_spec_id}),
            ),
        )
        change_columns(transaction)
        entries = [to_data_file(table, file, transaction.table_metadata) for file in added]
        if expired:
            transaction._apply((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": list(expired)}),))
        if properties:
            transaction.set_properties(dict(properties))
        change: _MergeAppendFiles
        if live is not None and removed:
            change = ReplaceDataFiles(transaction, live, summary, has_same_rows=has_same_rows)
        else:
            change = transaction.update_snapshot(snapshot_properties=dict(summary)).merge_append()
        with change:
            for old in removed:
                change.delete_data_file(old)
            for new in entries:
                change.append_data_file(new)
            snapshot_id: int = change.snapshot_id
    return snapshot_id


def refuse_row_level_deletes(table: Table, files: SnapshotFiles) -> None:
    """Check that the table has no row-level deletes of its live files.

    Raises:
        ConfigError: It has; a rewritten file would have the deleted rows again.
    """
    if files.deletes and any(task.delete_files for task in table.scan().plan_files()):
        raise ConfigError(
            f"table {'.'.join(table.name())} has rows that another engine deleted without rewriting their files"
            " (merge-on-read): rewrite its data files first, for instance with Spark's rewrite_data_files"
        )


def expirable_snapshots(
    metadata: TableMetadata, *, kept: int, count_min: int, is_current_kept: bool = True
) -> list[int]:
    """Return the ids of the snapshots to expire: none below `count_min` snapshots, otherwise all but the newest `kept`
    and those with a tag or branch. `is_current_kept`: whether the main branch's snapshot is among the latter.
    """
    if len(metadata.snapshots) < count_min:
        return []
    named = {
        reference.snapshot_id
        for name, reference in metadata.refs.items()
        if is_current_kept or name != MAIN_BRANCH
    }
    oldest_first = sorted(metadata.snapshots, key=lambda one: one.sequence_number or 0)
    old = oldest_first[: len(oldest_first) - kept]
    return [snapshot.snapshot_id for snapshot in old if snapshot.snapshot_id not in named]


def to_data_file(table: Table, file: WrittenFile, metadata: TableMetadata | None = None) -> DataFile:
    """Return the manifest entry of a file. The partition is the one that the task reported, because it does not follow
    from the file's statistics for all transforms. Rows and size are compared with those that the task reported.
    `metadata`: those of a transaction that changes the table's columns.

    Raises:
        InvalidDataFiles: They differ, so the file is not the one that the task wrote.
    """
    metadata = metadata or table.metadata
    source = table.io.new_input(file.path)
    with source.open() as stream:
        footer = pq.read_metadata(stream)
    if footer.num_rows != file.rows or len(source) != file.bytes:
        raise InvalidDataFiles(
            f"{file.path} has {footer.num_rows} rows and {len(source)} bytes; its task wrote {file.rows} rows and"
            f" {file.bytes} bytes"
        )
    if len(file.partition) != len(metadata.spec().fields):
        raise InvalidDataFiles(
            f"the partition spec of {'.'.join(table.name())} was changed: start the pipeline again"
        )
    schema = metadata.schema()
    statistics = data_file_statistics_from_parquet_metadata(
        parquet_metadata=footer,
        stats_columns=compute_statistics_plan(schema, metadata.properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat.PARQUET,
        partition=Record(*file.partition),
        file_size_in_bytes=file.bytes,
        sort_order_id=metadata.default_sort_order_id if file.is_sorted else None,
        spec_id=metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )
