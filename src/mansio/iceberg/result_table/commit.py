"""Exactly-once commit of micro-batches to a result table: appended files, or replaced and new files.

Steps of one batch: (1) The tasks write Parquet files, to which the table does not refer yet. (2) One commit changes the
files of the table and, *in the same transaction*, stores the batch's id under the query's id in the table's properties.
(3) Spark's checkpoint records the batch as complete. After a crash before step 2 the files are orphans, and Spark
repeats the batch. After a crash between steps 2 and 3 Spark repeats the batch too, but the commit finds its id in the
properties and changes nothing. Properties are used because maintenance expires snapshots, and with them their
summaries.

Invariants:
* Those of the module `mansio.iceberg.commit`.
* Files are replaced only if all of them are still live and no other file of their groups was added; otherwise nothing
  is committed and the batch has to be merged again (`FilesChanged`).
* Several queries, and other programs, may write to one table. Each query has an entry of its own. A batch is committed
  on top of what others have committed meanwhile, unless they have changed files that it replaces, or columns or the
  partition spec so that its files do not fit any more (`TableChanged`).
* A query never continues from a checkpoint that is older than the table: its next batches have ids that the table
  knows, but other records, which would be lost.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.iceberg.commit import (
    COMMIT_RETRIES_MAX,
    commit_files,
    commit_with_retries,
    expirable_snapshots,
)
from mansio.iceberg.errors import CommitConflict, StaleCheckpoint, TableChanged
from mansio.iceberg.result_table.table_schema import difference
from mansio.iceberg.snapshot_files import SnapshotFiles, SnapshotReader
from mansio.iceberg.table_properties import BATCH_PROPERTY, QUERY_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

    from mansio.iceberg.data_files import WrittenFile

QUERIES_PROPERTY: Final = "mansio.queries"
"""Table property with the last committed batch of each query, as JSON: `{query id: [batch id, milliseconds, digest of
its offsets]}`. Version 0.1.0 stored `[batch id, milliseconds]`."""
QUERIES_MAX: Final = 100
"""Number of queries above which entries older than `QUERY_RETENTION_MS` are removed."""
QUERY_RETENTION_MS: Final = 30 * 86_400_000
SNAPSHOTS_KEPT_PROPERTY: Final = "history.expire.min-snapshots-to-keep"
"""Iceberg's table property. Snapshots are expired only in tables that have it; tables that Mansio creates do."""
SNAPSHOTS_KEPT: Final = 10
SNAPSHOTS_FACTOR: Final = 3
"""Snapshots are expired when there are this many times more than are kept, so that few commits do it."""


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
class TableShape:
    """What of a table decides whether files fit it: columns and partition spec. A batch keeps the shape for which its
    files were written.
    """

    schema: Schema
    spec: PartitionSpec

    @classmethod
    def of(cls, table: Table) -> TableShape:
        """Return the shape of a table as of its last refresh."""
        return cls(table.schema(), table.spec())

    def check(self, table: Table) -> None:
        """Check that files that were written for this shape still fit the table.

        Raises:
            TableChanged: They do not.
        """
        change: str | None = None
        if not self.spec.compatible_with(table.spec()):
            change = "its partition spec was changed"
        elif self.schema.schema_id != table.schema().schema_id:
            change = difference(self.schema, table.schema())
        if change is not None:
            raise TableChanged(
                f"another program changed table {'.'.join(table.name())} while a batch for it was written: {change};"
                " nothing of the batch was committed. Start the pipeline again: it processes the batch again"
            )


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Result of a commit. `added` is false if the table had the batch already."""

    added: bool
    attempts: int


def last_batches(properties: Mapping[str, str]) -> dict[str, tuple[int, int, str]]:
    """Return the last committed batch of each query: query id to (batch id, time in milliseconds, digest of its
    offsets). Version 0.1.0 stored no digest: it is empty.
    """
    found = json.loads(properties.get(QUERIES_PROPERTY, "{}"))
    return {
        query: (int(batch), int(at_ms), str(digest[0]) if digest else "")
        for query, (batch, at_ms, *digest) in found.items()
    }


def is_committed(properties: Mapping[str, str], batch: QueryBatch) -> bool:
    """Whether the table has the batch. Batches without rows are not committed, so ids may have gaps. Spark repeats only
    the last batch, with the same offsets.

    Raises:
        StaleCheckpoint: The table has a later batch of the query, or this one with other offsets.
    """
    last = last_batches(properties).get(batch.query)
    if last is None or batch.batch > last[0]:
        return False
    if batch.batch != last[0] or last[2] not in ("", batch.digest):
        raise StaleCheckpoint(
            f"the table has batch {last[0]} of this pipeline, and its checkpoint plans batch {batch.batch} with other"
            " records: the checkpoint is an old copy, or another run uses it at the same time. Restore the newest one,"
            " or give a new --checkpoint, which processes all records again"
        )
    return True


def with_batch(properties: Mapping[str, str], batch: QueryBatch, now_ms: int) -> dict[str, str]:
    """Return the properties that store a batch; `is_committed` reads them."""
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
    shape: TableShape | None = None,
    reader: SnapshotReader | None = None,
    retries: int = COMMIT_RETRIES_MAX,
    now_ms: int | None = None,
) -> BatchCommit:
    """Add the files of a batch, and remove the files with the paths `replaced`, unless the table has the batch already.
    `is_current`: whether the files of the table still are those from which the new ones were made; called before each
    attempt. `shape`: the one for which the files were written; None: the table's. `reader`: the one with which the
    files to be replaced were chosen, so that their manifests are not read again.

    Raises:
        FilesChanged: They are not; nothing was committed.
        TableChanged: The files do not fit the table any more; nothing was committed.
        CommitConflict: In every attempt another commit changed the table first.
        StaleCheckpoint: The table has a later batch of the query.
        InvalidDataFiles: A file is not as its task reported; nothing was committed.
    """
    reader = reader or SnapshotReader()
    shape = shape or TableShape.of(table)

    def attempt(number: int) -> BatchCommit:
        if is_committed(table.properties, batch):
            return BatchCommit(added=False, attempts=number)
        shape.check(table)
        if not is_current():
            raise FilesChanged(
                f"files of {'.'.join(table.name())} that batch {batch.batch} replaces have changed"
            )
        files = reader.read(table) if replaced else SnapshotFiles()
        paths = frozenset(replaced)
        old = [file for file in files.data_files() if file.file_path in paths]
        if len(old) < len(paths):
            raise FilesChanged(
                f"files of {'.'.join(table.name())} that batch {batch.batch} replaces are not in it"
            )
        commit_files(
            table,
            added,
            old,
            live=files,
            properties=with_batch(table.properties, batch, now_ms or time.time_ns() // 1_000_000),
            summary={QUERY_PROPERTY: batch.query, BATCH_PROPERTY: str(batch.batch)},
            expired=_expired(table.metadata),
        )
        return BatchCommit(added=True, attempts=number)

    conflict = (
        f"other commits were first in {retries + 1} attempts to add batch {batch.batch} to {'.'.join(table.name())}: "
        "does another program write to it without a pause?"
    )
    return commit_with_retries(table, attempt, conflict, retries=retries)


def _expired(metadata: TableMetadata) -> list[int]:
    """Return the snapshots to expire, if the table has the property of snapshots to keep and `SNAPSHOTS_FACTOR` times
    more of them.
    """
    kept = int(metadata.properties.get(SNAPSHOTS_KEPT_PROPERTY, 0))
    return [] if kept < 1 else expirable_snapshots(metadata, kept=kept, count_min=SNAPSHOTS_FACTOR * kept)
