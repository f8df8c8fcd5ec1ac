"""Exactly-once commit of batches to the archive table.

Steps of one batch: (1) The tasks write Parquet files, to which the table does not refer yet. (2) One commit adds the
files to the table and, *in the same transaction*, sets the table's properties: offsets, query id and batch id.
(3) Spark's checkpoint records the batch as complete. After a crash before step 2 the files are orphans, which are
removed later, and Spark repeats the batch. After a crash between steps 2 and 3 Spark repeats the batch too, but the
commit finds its offsets in the properties and adds nothing.

Invariants:
* A batch is added only to the table state against which it was checked. Every commit creates a snapshot, also for a
  batch without records, and requires that the branch still points to the previous snapshot. After a concurrent commit
  the properties are read and checked again.
* pyiceberg's own retry is disabled by a table property, because it would repeat the append without this check. A table
  without this property is rejected.

Private names of pyiceberg (`_updates`, `_apply`) are used in this package only, and tested with version 0.12.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.table.update import RemoveSnapshotsUpdate

from mansio.iceberg.archive.decoded_schema import NO_DECODED_COLUMNS, evolve_table
from mansio.iceberg.archive.table_format import (
    BATCH_PROPERTY,
    HISTORY_PROPERTY,
    LOST_RANGES_PROPERTY,
    QUERY_PROPERTY,
    Commit,
    CommitOutcome,
    HistoryEntry,
    LostRange,
    add_offset_history_entry,
    commit_properties,
    format_history,
    format_lost_ranges,
    format_offsets,
    parse_history,
    read_commit,
    read_lost_ranges,
)
from mansio.iceberg.commit import CachedMetadataTransaction
from mansio.iceberg.errors import ArchiveGap, CommitConflict, ConcurrentArchive, InvalidDataFiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

    from mansio.iceberg.archive.table_format import BatchPlan, WrittenDataFile

SNAPSHOTS_MAX = 30
SNAPSHOTS_RETAINED = 10
COMMIT_RETRIES_MAX = 5
ADDED_RECORDS_KEY = "added-records"
"""A key of a snapshot's summary (Iceberg specification)."""
COMMIT_RETRY_BACKOFF_S = 0.1


class CommitDecision(Enum):
    """Result of comparing a batch with the table's properties."""

    ACCEPT = "accept"
    ALREADY_COMMITTED = "already-committed"
    GAP = "gap"
    """The batch starts above the table's offsets."""
    CONFLICT = "conflict"
    """Another query has committed offsets of the batch."""


def decide_commit(last: Commit | None, plan: BatchPlan) -> CommitDecision:
    """Decide whether a batch may be added to a table whose last commit is `last`.

    The decision compares offsets. Query id and batch id only distinguish a repeated batch of the same query from a
    batch of another writer. A partition that the table does not have yet may start at any offset.
    """
    if last is None:
        return CommitDecision.ACCEPT
    known = {partition: last.offsets[partition] for partition in plan.end if partition in last.offsets}
    if any(plan.start[partition] > offset for partition, offset in known.items()):
        return CommitDecision.GAP
    if all(plan.start[partition] == offset for partition, offset in known.items()):
        return (
            CommitDecision.ACCEPT
            if any(plan.end[p] > plan.start[p] for p in plan.end)
            else CommitDecision.ALREADY_COMMITTED
        )
    is_archived = all(
        partition in last.offsets
        and plan.end[partition] <= last.offsets[partition]
        and plan.start[partition] >= last.first_offsets.get(partition, 0)
        for partition in plan.end
        if plan.end[partition] > plan.start[partition]
    )
    if is_archived and plan.query == last.query and plan.batch <= last.batch:
        return CommitDecision.ALREADY_COMMITTED
    return CommitDecision.CONFLICT


def commit_files(
    table: Table,
    plan: BatchPlan,
    parts: Sequence[WrittenDataFile],
    lost: Sequence[LostRange] = (),
    *,
    decoded: pa.Schema = NO_DECODED_COLUMNS,
    retries: int = COMMIT_RETRIES_MAX,
    snapshots_max: int = SNAPSHOTS_MAX,
    now_ms: int | None = None,
) -> CommitOutcome:
    """Add the files and offsets of a batch to the table unless the table already has the batch. `lost`: ranges of the
    batch that the table lists as lost. `decoded`: decoded columns of the files, which are added to the table.

    Raises:
        InvalidDataFiles: The files do not match the plan; nothing was committed.
        ArchiveGap: The table ends below the plan's start.
        ConcurrentArchive: Another query has committed to the table.
        CommitConflict: In every attempt another commit changed the table first.
    """
    check_data_files(plan, parts)
    is_fresh = False
    for attempt in range(1, retries + 2):
        last = read_commit(table.properties)
        decision = decide_commit(last, plan)
        if decision is not CommitDecision.ACCEPT and not is_fresh:
            table.refresh()
            last = read_commit(table.properties)
            decision = decide_commit(last, plan)
        if decision is not CommitDecision.ACCEPT:
            return _outcome_without_commit(decision, last, plan, attempt)
        commit = next_commit(last, plan)
        listed = (
            {LOST_RANGES_PROPERTY: format_lost_ranges((*read_lost_ranges(table.properties), *lost))}
            if lost
            else {}
        )
        at_ms = now_ms or time.time_ns() // 1_000_000
        try:
            snapshot_id = _commit_append(table, commit, parts, snapshots_max, at_ms, listed, decoded)
        except (CommitFailedException, CommitStateUnknownException):
            time.sleep(random.uniform(0, COMMIT_RETRY_BACKOFF_S * attempt))
            table.refresh()
            is_fresh = True
            continue
        return CommitOutcome(added=True, commit=commit, snapshot_id=snapshot_id, attempts=attempt)
    raise CommitConflict(
        f"other commits were first in {retries + 1} attempts to add batch {plan.batch} to {_name(table)}: "
        "is another archive or a maintenance job writing without a pause?"
    )


def skip_to_log_start(
    table: Table, log_starts: Mapping[int, int], *, retries: int = COMMIT_RETRIES_MAX
) -> tuple[LostRange, ...]:
    """Advance the table's offsets to the log start offsets; the ranges below that are not archived are listed as lost.
    Returns these ranges.

    A partition that the table does not have was added after the first commit, so its lost range begins at offset 0.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
    """
    for attempt in range(1, retries + 2):
        table.refresh()
        last = read_commit(table.properties)
        if last is None:
            return ()
        lost = tuple(
            LostRange(partition, last.offsets.get(partition, 0), first)
            for partition, first in sorted(log_starts.items())
            if last.offsets.get(partition, 0) < first
        )
        if not lost:
            return ()
        commit = replace(
            last,
            offsets=last.offsets | {one.partition: one.end for one in lost},
            first_offsets={one.partition: one.start for one in lost} | last.first_offsets,
        )
        listed = {LOST_RANGES_PROPERTY: format_lost_ranges((*read_lost_ranges(table.properties), *lost))}
        try:
            _commit_append(table, commit, (), SNAPSHOTS_MAX, time.time_ns() // 1_000_000, listed)
        except (CommitFailedException, CommitStateUnknownException):
            time.sleep(random.uniform(0, COMMIT_RETRY_BACKOFF_S * attempt))
            continue
        return lost
    raise CommitConflict(
        f"other commits were first in {retries + 1} attempts to record lost offsets in {_name(table)}"
    )


def next_commit(last: Commit | None, plan: BatchPlan) -> Commit:
    """The table's commit after an accepted batch."""
    known = {} if last is None else last.offsets
    first = {} if last is None else last.first_offsets
    return Commit(plan.query, plan.batch, known | plan.end, plan.start | first)


def check_data_files(plan: BatchPlan, parts: Sequence[WrittenDataFile]) -> None:
    """Check that every file lies within the plan and none overlaps another.

    Raises:
        InvalidDataFiles: A file does not, or the plan is inconsistent.
    """
    if plan.start.keys() != plan.end.keys():
        raise InvalidDataFiles(f"batch {plan.batch} starts and ends in different partitions")
    backwards = [partition for partition in plan.end if plan.end[partition] < plan.start[partition]]
    if backwards:
        raise InvalidDataFiles(f"batch {plan.batch} ends below its start in partition {backwards[0]}")
    next_offsets = dict(plan.start)
    for part in sorted(parts, key=lambda part: (part.partition, part.first_offset)):
        if part.partition not in plan.end:
            raise InvalidDataFiles(
                f"{part.path} holds partition {part.partition}, which batch {plan.batch} is not about"
            )
        if part.first_offset < next_offsets[part.partition] or part.last_offset >= plan.end[part.partition]:
            raise InvalidDataFiles(
                f"{part.path} holds offsets {part.first_offset} to {part.last_offset} of partition {part.partition}; "
                f"wanted were {next_offsets[part.partition]} to {plan.end[part.partition] - 1}"
            )
        if not 0 < part.rows <= part.last_offset - part.first_offset + 1:
            raise InvalidDataFiles(
                f"{part.path} holds {part.rows} rows, more than its offsets allow, or none"
            )
        next_offsets[part.partition] = part.last_offset + 1


def _outcome_without_commit(
    decision: CommitDecision, last: Commit | None, plan: BatchPlan, attempt: int
) -> CommitOutcome:
    """The outcome of a batch that is not added: returned if the table already has the batch, otherwise raised."""
    assert last is not None
    if decision is CommitDecision.ALREADY_COMMITTED:
        return CommitOutcome(added=False, commit=last, attempts=attempt)
    offsets_shown = (
        f"the table ends at {format_offsets(last.offsets)}, "
        f"batch {plan.batch} starts at {format_offsets(plan.start)}"
    )
    if decision is CommitDecision.GAP:
        raise ArchiveGap(
            f"{offsets_shown}: the records between would be missing permanently. Start again without the checkpoint; "
            "the archive resumes at the table's offsets"
        )
    raise ConcurrentArchive(
        f"{offsets_shown}: query {last.query or 'unknown'} has moved it on. Only one archive may write to a table: "
        "stop the other, or start this one again without its checkpoint"
    )


def _commit_append(
    table: Table,
    commit: Commit,
    parts: Sequence[WrittenDataFile],
    snapshots_max: int,
    now_ms: int,
    extra_properties: Mapping[str, str] | None = None,
    decoded: pa.Schema = NO_DECODED_COLUMNS,
) -> int:
    """Expire old snapshots, evolve the schema, add the files and set the properties, in one transaction. Returns the
    new snapshot's id.
    """
    properties = {**commit_properties(commit), **(extra_properties or {})}
    history = parse_history(table.properties.get(HISTORY_PROPERTY, "[]"))
    last, newest = read_commit(table.properties), table.current_snapshot()
    before = None if last is None or newest is None else HistoryEntry(newest.timestamp_ms, last.offsets)
    new_history = add_offset_history_entry(history, now_ms, commit.offsets, before)
    with CachedMetadataTransaction(table) as transaction:
        evolve_table(transaction, table, decoded)
        data_files = [to_data_file(table, part, transaction.table_metadata) for part in parts]
        expired = expirable_snapshots(table.metadata, snapshots_max)
        if expired:
            transaction._apply((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": expired}),))
        transaction.set_properties(
            properties
            if new_history == history
            else {**properties, HISTORY_PROPERTY: format_history(new_history)}
        )
        with transaction.update_snapshot(snapshot_properties=properties).merge_append() as append:
            for data_file in data_files:
                append.append_data_file(data_file)
            snapshot_id: int = append.snapshot_id
    return snapshot_id


def added_records(metadata: TableMetadata, query: str) -> dict[int, int]:
    """Number of records that each batch of a query has added, by batch id, from the retained snapshots."""
    added: dict[int, int] = defaultdict(int)
    for snapshot in metadata.snapshots:
        summary = snapshot.summary
        if summary is not None and summary[QUERY_PROPERTY] == query:
            # A sum: `skip_to_log_start` creates another snapshot with the last batch's number.
            added[int(summary[BATCH_PROPERTY] or 0)] += int(summary[ADDED_RECORDS_KEY] or 0)
    return dict(added)


def to_data_file(table: Table, part: WrittenDataFile, metadata: TableMetadata | None = None) -> DataFile:
    """The manifest entry of a file. Rows and size of the file are compared with those that the task reported.
    `metadata`: those of a transaction that changes the table's columns.

    Raises:
        InvalidDataFiles: They differ, so the file is not the one that the task wrote.
    """
    data_file = parquet_file_to_data_file(table.io, metadata or table.metadata, part.path)
    if data_file.record_count != part.rows or data_file.file_size_in_bytes != part.bytes:
        raise InvalidDataFiles(
            f"{part.path} has {data_file.record_count} rows and {data_file.file_size_in_bytes} bytes; "
            f"its task wrote {part.rows} rows and {part.bytes} bytes"
        )
    return data_file


def expirable_snapshots(metadata: TableMetadata, snapshots_max: int = SNAPSHOTS_MAX) -> list[int]:
    """Ids of the snapshots to expire: none below `snapshots_max` snapshots, else all except the newest
    `SNAPSHOTS_RETAINED` and those with a tag or branch.
    """
    if len(metadata.snapshots) < snapshots_max:
        return []
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    kept = min(SNAPSHOTS_RETAINED, snapshots_max - 1)
    old = metadata.snapshots[: len(metadata.snapshots) - kept]
    return [snapshot.snapshot_id for snapshot in old if snapshot.snapshot_id not in named]


def _name(table: Table) -> str:
    return ".".join(table.name())
