"""Exactly-once commit of batches to the archive table.

Steps of one batch: (1) The tasks write Parquet files, to which the table does not refer yet. (2) One commit adds the
files to the table and, *in the same transaction*, sets the table's properties: offsets, query id and batch id.
(3) Spark's checkpoint records the batch as complete. After a crash before step 2 the files are orphans, which are
removed later, and Spark repeats the batch. After a crash between steps 2 and 3 Spark repeats the batch too, but the
commit finds its offsets in the properties and adds nothing.

Invariants:
* Those of the module `mansio.iceberg.commit`. A table without the property that disables pyiceberg's own retry is
  rejected.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from mansio.iceberg.archive.decoded_schema import NO_DECODED_COLUMNS, evolve_table
from mansio.iceberg.archive.table_format import (
    HISTORY_PROPERTY,
    LOST_RANGES_PROPERTY,
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
from mansio.iceberg.commit import (
    COMMIT_RETRIES_MAX,
    commit_files,
    commit_with_retries,
    expirable_snapshots,
)
from mansio.iceberg.errors import ArchiveGap, ConcurrentArchive, InvalidDataFiles
from mansio.iceberg.table_properties import BATCH_PROPERTY, QUERY_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

    from mansio.iceberg.archive.table_format import BatchPlan, WrittenRange
    from mansio.iceberg.data_files import WrittenFile

SNAPSHOTS_MAX = 30
SNAPSHOTS_RETAINED = 10
ADDED_RECORDS_KEY = "added-records"
"""A key of a snapshot's summary (Iceberg specification)."""


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


def commit_batch(
    table: Table,
    plan: BatchPlan,
    parts: Sequence[WrittenRange],
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

    def attempt(number: int) -> CommitOutcome:
        last = read_commit(table.properties)
        decision = decide_commit(last, plan)
        if decision is not CommitDecision.ACCEPT and number == 1:
            table.refresh()
            last = read_commit(table.properties)
            decision = decide_commit(last, plan)
        if decision is not CommitDecision.ACCEPT:
            return _outcome_without_commit(decision, last, plan, number)
        commit = next_commit(last, plan)
        files = [part.file for part in parts]
        at_ms = now_ms or time.time_ns() // 1_000_000
        snapshot_id = _commit(table, commit, files, lost, at_ms, decoded, snapshots_max)
        return CommitOutcome(added=True, commit=commit, snapshot_id=snapshot_id, attempts=number)

    conflict = (
        f"other commits were first in {retries + 1} attempts to add batch {plan.batch} to {_name(table)}: "
        "is another archive or a maintenance job writing without a pause?"
    )
    return commit_with_retries(table, attempt, conflict, retries=retries)


def skip_to_log_start(
    table: Table, log_starts: Mapping[int, int], *, retries: int = COMMIT_RETRIES_MAX
) -> tuple[LostRange, ...]:
    """Advance the table's offsets to the log start offsets; the ranges below that are not archived are listed as lost.
    Returns these ranges.

    A partition that the table does not have was added after the first commit, so its lost range begins at offset 0.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
    """

    def attempt(_number: int) -> tuple[LostRange, ...]:
        last = read_commit(table.properties)
        if last is None:
            return ()
        lost = tuple(
            LostRange(partition, last.offsets.get(partition, 0), first)
            for partition, first in sorted(log_starts.items())
            if last.offsets.get(partition, 0) < first
        )
        if lost:
            commit = replace(
                last,
                offsets=last.offsets | {one.partition: one.end for one in lost},
                first_offsets={one.partition: one.start for one in lost} | last.first_offsets,
            )
            _commit(table, commit, (), lost, time.time_ns() // 1_000_000)
        return lost

    table.refresh()
    conflict = f"other commits were first in {retries + 1} attempts to record lost offsets in {_name(table)}"
    return commit_with_retries(table, attempt, conflict, retries=retries)


def next_commit(last: Commit | None, plan: BatchPlan) -> Commit:
    """Return the table's commit after an accepted batch."""
    known = {} if last is None else last.offsets
    first = {} if last is None else last.first_offsets
    return Commit(plan.query, plan.batch, known | plan.end, plan.start | first)


def check_data_files(plan: BatchPlan, parts: Sequence[WrittenRange]) -> None:
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
                f"{part.file.path} holds partition {part.partition}, which batch {plan.batch} is not about"
            )
        if part.first_offset < next_offsets[part.partition] or part.last_offset >= plan.end[part.partition]:
            raise InvalidDataFiles(
                f"{part.file.path} holds offsets {part.first_offset} to {part.last_offset} of partition"
                f" {part.partition}; "
                f"wanted were {next_offsets[part.partition]} to {plan.end[part.partition] - 1}"
            )
        if not 0 < part.file.rows <= part.last_offset - part.first_offset + 1:
            raise InvalidDataFiles(
                f"{part.file.path} holds {part.file.rows} rows, more than its offsets allow, or none"
            )
        next_offsets[part.partition] = part.last_offset + 1


def _outcome_without_commit(
    decision: CommitDecision, last: Commit | None, plan: BatchPlan, attempt: int
) -> CommitOutcome:
    """Return the outcome of a batch that is not added, if the table already has the batch; otherwise raise the
    reason.
    """
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


def _commit(
    table: Table,
    commit: Commit,
    files: Sequence[WrittenFile],
    lost: Sequence[LostRange],
    now_ms: int,
    decoded: pa.Schema = NO_DECODED_COLUMNS,
    snapshots_max: int = SNAPSHOTS_MAX,
) -> int:
    """Commit the state of the archive with the files that lead to it, in one attempt. Return the new snapshot's id."""
    properties = commit_properties(commit)
    if lost:
        listed = format_lost_ranges((*read_lost_ranges(table.properties), *lost))
        properties[LOST_RANGES_PROPERTY] = listed
    history = parse_history(table.properties.get(HISTORY_PROPERTY, "[]"))
    last, newest = read_commit(table.properties), table.current_snapshot()
    before = None if last is None or newest is None else HistoryEntry(newest.timestamp_ms, last.offsets)
    new_history = add_offset_history_entry(history, now_ms, commit.offsets, before)
    stored = (
        properties
        if new_history == history
        else {**properties, HISTORY_PROPERTY: format_history(new_history)}
    )
    return commit_files(
        table,
        files,
        properties=stored,
        summary=properties,
        expired=expired_snapshots(table.metadata, snapshots_max),
        change_columns=lambda transaction: evolve_table(transaction, table, decoded),
    )


def expired_snapshots(metadata: TableMetadata, snapshots_max: int = SNAPSHOTS_MAX) -> list[int]:
    """Return the ids of the snapshots that a commit to an archive expires."""
    return expirable_snapshots(
        metadata, kept=min(SNAPSHOTS_RETAINED, snapshots_max - 1), count_min=snapshots_max
    )


def added_records(metadata: TableMetadata, query: str) -> dict[int, int]:
    """Return the number of records that each batch of a query has added, by batch id, from the retained snapshots."""
    added: dict[int, int] = defaultdict(int)
    for snapshot in metadata.snapshots:
        summary = snapshot.summary
        if summary is not None and summary[QUERY_PROPERTY] == query:
            # A sum: `skip_to_log_start` creates another snapshot with the last batch's number.
            added[int(summary[BATCH_PROPERTY] or 0)] += int(summary[ADDED_RECORDS_KEY] or 0)
    return dict(added)


def _name(table: Table) -> str:
    return ".".join(table.name())
