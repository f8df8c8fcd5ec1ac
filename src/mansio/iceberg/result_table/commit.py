"""Exactly-once commit of micro-batches to a result table: appended files, or replaced and new files.

Steps of one batch: (1) The tasks write Parquet files, to which the table does not refer yet. (2) One commit changes the
files of the table and, *in the same transaction*, stores the batch's id under the query's id in the table's properties.
(3) Spark's checkpoint records the batch as complete. After a crash before step 2 the files are orphans, and Spark
repeats the batch. After a crash between steps 2 and 3 Spark repeats the batch too, but the commit finds its id in the
properties and changes nothing. Properties are used because maintenance expires snapshots, and with them their
summaries.

Invariants:
* A batch is committed only to the table state against which it was checked: every commit creates a snapshot and
  requires that the branch still points to the previous one. After a concurrent commit the properties are read and
  checked again.
* Files are replaced only if all of them are still live and no other file of their groups was added; otherwise nothing
  is committed and the batch has to be merged again (`FilesChanged`).
* Several queries may write to one table. Each has an entry of its own.
* A query never continues from a checkpoint that is older than the table: its next batches have ids that the table
  knows, but other records, which would be lost.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table.update import RemoveSnapshotsUpdate
from pyiceberg.typedef import Record

from mansio.iceberg.archive.table_format import BATCH_PROPERTY, QUERY_PROPERTY
from mansio.iceberg.commit import CachedMetadataTransaction
from mansio.iceberg.errors import CommitConflict, InvalidDataFiles, StaleCheckpoint
from mansio.iceberg.snapshot_files import ReplaceDataFiles, SnapshotFiles, SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

    from mansio.iceberg.result_table.data_file_writer import WrittenFile

QUERIES_PROPERTY: Final = "mansio.queries"
"""Table property with the last committed batch of each query, as JSON: `{query id: [batch id, milliseconds, digest of
its offsets]}`."""
QUERIES_MAX: Final = 100
"""Number of queries above which entries older than `QUERY_RETENTION_MS` are removed."""
QUERY_RETENTION_MS: Final = 30 * 86_400_000
SNAPSHOTS_KEPT_PROPERTY: Final = "history.expire.min-snapshots-to-keep"
"""Iceberg's table property. Snapshots are expired only in tables that have it; tables that Mansio creates do."""
SNAPSHOTS_KEPT: Final = 10
SNAPSHOTS_FACTOR: Final = 3
"""Snapshots are expired when there are this many times more than are kept, so that few commits do it."""
COMMIT_RETRIES_MAX: Final = 5
COMMIT_RETRY_BACKOFF_S: Final = 0.1


class FilesChanged(CommitConflict):
    """Another commit has changed files that this batch replaces: the batch has to be merged again."""


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """Identity of a micro-batch: Spark's query id, which a checkpoint preserves, its batch id, and a digest of the
    offsets that the checkpoint has planned for it.
    """

    query: str
    batch: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Result of a commit. `added` is false if the table had the batch already."""

    added: bool
    attempts: int


def last_batches(properties: Mapping[str, str]) -> dict[str, tuple[int, int, str]]:
    """The last committed batch of each query: query id to (batch id, time in milliseconds, digest of its offsets)."""
    found = json.loads(properties.get(QUERIES_PROPERTY, "{}"))
    return {query: (int(batch), int(at_ms), str(digest)) for query, (batch, at_ms, digest) in found.items()}


def is_committed(properties: Mapping[str, str], batch: QueryBatch) -> bool:
    """Whether the table has the batch. Batches without rows are not committed, so ids may have gaps. Spark repeats only
    the last batch, with the same offsets.

    Raises:
        StaleCheckpoint: The table has a later batch of the query, or this one with other offsets.
    """
    last = last_batches(properties).get(batch.query)
    if last is None or batch.batch > last[0]:
        return False
    if (batch.batch, batch.digest) != (last[0], last[2]):
        raise StaleCheckpoint(
            f"the table has batch {last[0]} of this pipeline, and its checkpoint plans batch {batch.batch} with other"
            " records: the checkpoint is an old copy, or another run uses it at the same time. Restore the newest one,"
            " or give a new --checkpoint, which processes all records again"
        )
    return True


def with_batch(properties: Mapping[str, str], batch: QueryBatch, now_ms: int) -> dict[str, str]:
    """The properties that store a batch; `is_committed` reads them."""
    queries = last_batches(properties) | {batch.query: (batch.batch, now_ms, batch.digest)}
    if len(queries) > QUERIES_MAX:
        queries = {
            query: entry
            for query, entry in queries.items()
            if entry[1] > now_ms - QUERY_RETENTION_MS or query == batch.query
        }
    return {QUERIES_PROPERTY: json.dumps(queries, separators=(",", ":"))}


def commit_batch(
    table: Table,
    batch: QueryBatch,
    added: Sequence[WrittenFile],
    replaced: Sequence[str] = (),
    is_current: Callable[[], bool] = lambda: True,
    *,
    is_sorted: bool = False,
    reader: SnapshotReader | None = None,
    retries: int = COMMIT_RETRIES_MAX,
    now_ms: int | None = None,
) -> BatchCommit:
    """Add the files of a batch, and remove the files with the paths `replaced`, unless the table has the batch already.
    `is_current`: whether the files of the table still are those from which the new ones were made; called before each
    attempt. `is_sorted`: whether the files have the table's sort order. `reader`: the one with which the files to be
    replaced were chosen, so that their manifests are not read again.

    Raises:
        FilesChanged: They are not; nothing was committed.
        CommitConflict: In every attempt another commit changed the table first.
        StaleCheckpoint: The table has a later batch of the query.
        InvalidDataFiles: A file is not as its task reported; nothing was committed.
    """
    reader = reader or SnapshotReader()
    for attempt in range(1, retries + 2):
        if is_committed(table.properties, batch):
            return BatchCommit(added=False, attempts=attempt)
        if not is_current():
            raise FilesChanged(
                f"files of {'.'.join(table.name())} that batch {batch.batch} replaces have changed"
            )
        try:
            entries = [to_data_file(table, one, is_sorted=is_sorted) for one in added]
            files = reader.read(table) if replaced else SnapshotFiles()
            _commit(table, batch, entries, files, frozenset(replaced), now_ms or time.time_ns() // 1_000_000)
        except (CommitFailedException, CommitStateUnknownException):
            time.sleep(random.uniform(0, COMMIT_RETRY_BACKOFF_S * attempt))
            table.refresh()
            continue
        return BatchCommit(added=True, attempts=attempt)
    raise CommitConflict(
        f"other commits were first in {retries + 1} attempts to add batch {batch.batch} to {'.'.join(table.name())}: "
        "does another program write to it without a pause?"
    )


def _commit(
    table: Table,
    batch: QueryBatch,
    added: Sequence[DataFile],
    files: SnapshotFiles,
    replaced: frozenset[str],
    now_ms: int,
) -> None:
    summary = {QUERY_PROPERTY: batch.query, BATCH_PROPERTY: str(batch.batch)}
    old = [file for file in files.data_files() if file.file_path in replaced]
    if len(old) < len(replaced):
        raise FilesChanged(
            f"files of {'.'.join(table.name())} that batch {batch.batch} replaces are not in it"
        )
    with CachedMetadataTransaction(table) as transaction:
        expired = expirable_snapshots(table.metadata)
        if expired:
            transaction._apply((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": expired}),))
        transaction.set_properties(with_batch(table.properties, batch, now_ms))
        if old:
            with ReplaceDataFiles(transaction, files, summary) as change:
                for file in old:
                    change.delete_data_file(file)
                for file in added:
                    change.append_data_file(file)
        else:
            with transaction.update_snapshot(snapshot_properties=summary).merge_append() as append:
                for file in added:
                    append.append_data_file(file)


def expirable_snapshots(metadata: TableMetadata) -> list[int]:
    """Ids of the snapshots to expire: the oldest ones, except those with a tag or branch, if the table has the property
    of snapshots to keep and `SNAPSHOTS_FACTOR` times more of them.
    """
    kept = int(metadata.properties.get(SNAPSHOTS_KEPT_PROPERTY, 0))
    if kept < 1 or len(metadata.snapshots) < SNAPSHOTS_FACTOR * kept:
        return []
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    oldest_first = sorted(metadata.snapshots, key=lambda one: one.sequence_number or 0)
    return [one.snapshot_id for one in oldest_first[:-kept] if one.snapshot_id not in named]


def to_data_file(table: Table, file: WrittenFile, *, is_sorted: bool = False) -> DataFile:
    """The manifest entry of a file. The partition is the one that the task reported, because it does not follow from
    the file's statistics for all transforms. Rows and size are compared with those that the task reported.

    Raises:
        InvalidDataFiles: They differ, so the file is not the one that the task wrote.
    """
    metadata = table.metadata
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
        sort_order_id=metadata.default_sort_order_id if is_sorted else None,
        spec_id=metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )
