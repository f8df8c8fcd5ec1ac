"""Resolution of `--from-snapshot`: a snapshot's id, the name of a tag, or a time.

Snapshots are few and expire soon, so a time is resolved to offsets: the table only gains records, and at a time it held
everything below its offsets then. These are known for every retained snapshot and, with lower resolution, from the
offset history in the table's properties.

Invariants:
* A version contains no record that was archived after it, and has its time. Where the snapshots have expired, that is
  the last full hour before the requested time, and for past days the last midnight (UTC).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyiceberg.table.refs import SnapshotRefType

from mansio.spark.iceberg.errors import ArchiveError
from mansio.spark.iceberg.table_format import OFFSETS_PROPERTY, history_entry_at, parse_offsets

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.spark.iceberg.catalog import ArchiveTable
    from mansio.spark.iceberg.table_scan import Selection

SNAPSHOTS_SHOWN_MAX = 3


class SnapshotNotFound(ArchiveError):
    """The table has no such snapshot, and no offsets of that time."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A version of the table: the files of a retained snapshot, or everything below `ends`; neither: the current
    state.
    """

    at_ms: int
    """Time of this state (milliseconds since the epoch); not later than the requested time."""
    snapshot_id: int | None = None
    ends: dict[int, int] | None = None

    @property
    def is_latest(self) -> bool:
        """Whether it is the current state, which changes with every commit."""
        return self.snapshot_id is None and self.ends is None

    def of(self, selection: Selection) -> Selection:
        """The selection without records that were archived after this version."""
        return selection if self.ends is None else replace(selection, ends=self.ends)


def find_version(table: ArchiveTable, text: str, parse_time: Callable[[str], int]) -> TableVersion:
    """The version that `text` names: the id of a retained snapshot, a tag, or a time that `parse_time` converts to
    milliseconds.

    Raises:
        SnapshotNotFound: There is none; the message lists the existing ones.
        ValueError: It is not a time either; raised by `parse_time`.
    """
    metadata = table.iceberg.metadata
    reference = metadata.refs.get(text)
    if reference is not None and reference.snapshot_ref_type is not SnapshotRefType.TAG:
        reference = None  # a branch moves with every batch, so it names no fixed version
    wanted = reference.snapshot_id if reference is not None else int(text) if _is_number(text) else None
    snapshot = None if wanted is None else metadata.snapshot_by_id(wanted)
    if snapshot is not None:
        return TableVersion(snapshot.timestamp_ms, snapshot_id=snapshot.snapshot_id)
    try:
        return version_at(table, parse_time(text))
    except ValueError:
        if _is_number(text):
            raise SnapshotNotFound(
                f"{table.name} keeps no snapshot {text}; kept are {_retained_snapshots_text(table)}"
            ) from None
        raise


def version_at(table: ArchiveTable, at_ms: int) -> TableVersion:
    """The content of the table at a time, as of its last refresh.

    Raises:
        SnapshotNotFound: The time is before the known history.
    """
    metadata = table.iceberg.metadata
    newest = table.iceberg.current_snapshot()
    if newest is not None and newest.timestamp_ms <= at_ms:
        return TableVersion(newest.timestamp_ms)
    known = []
    for snapshot in metadata.snapshots:
        recorded_offsets = (
            None if snapshot.summary is None else snapshot.summary.additional_properties.get(OFFSETS_PROPERTY)
        )
        if recorded_offsets is not None:
            known.append(TableVersion(snapshot.timestamp_ms, ends=parse_offsets(recorded_offsets)))
    entry = history_entry_at(table.offset_history(), at_ms)
    if entry is not None:
        known.append(TableVersion(entry.at_ms, ends=entry.offsets))
    before = [version for version in known if version.at_ms <= at_ms]
    if not before:
        raise SnapshotNotFound(
            f"{table.name} does not know what it held so early; it knows of {_known_times_text(table)}"
        )
    return max(before, key=lambda version: version.at_ms)


def is_archive_of(table: ArchiveTable, topic_id: bytes) -> bool:
    """Whether a topic with this id (all zero: unknown) is the archived one, and not a later one of the same name."""
    known = table.topic_id.replace("-", "").lower()
    return not known or not any(topic_id) or known == topic_id.hex()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _retained_snapshots_text(table: ArchiveTable) -> str:
    newest_first = list(reversed(table.iceberg.metadata.snapshots))
    shown = ", ".join(str(one.snapshot_id) for one in newest_first[:SNAPSHOTS_SHOWN_MAX])
    return (shown or "none") + (" and older ones" if len(newest_first) > SNAPSHOTS_SHOWN_MAX else "")


def _known_times_text(table: ArchiveTable) -> str:
    from datetime import UTC, datetime

    times = [entry.at_ms for entry in table.offset_history()[:1]]
    times += [one.timestamp_ms for one in table.iceberg.metadata.snapshots]
    if not times:
        return "nothing: no batch has been archived yet"
    return f"times from {datetime.fromtimestamp(min(times) / 1000, UTC).isoformat(timespec='seconds')} on"
