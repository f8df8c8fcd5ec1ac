"""Resolution of the option `--from-snapshot`: a snapshot's id, the name of a tag, or a time.

Snapshots expire soon, so a time is resolved to offsets instead: an archive only gains records, so at a given time it
held all records below the offsets that were committed then. These offsets are stored in every retained snapshot and,
with lower resolution, in the offset history of the table's properties.

Invariants:
* A version contains no record that was archived after its time `at_ms`. For expired snapshots this is the last full
  hour before the requested time and, for past days, the last midnight (UTC).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyiceberg.table.refs import SnapshotRefType

from mansio.iceberg.archive.table_format import OFFSETS_PROPERTY, history_entry_at, parse_offsets
from mansio.iceberg.errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_scan import Selection

SNAPSHOTS_SHOWN_MAX = 3


class SnapshotNotFound(ArchiveError):
    """The table has neither the requested snapshot nor the offsets of the requested time."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A version of an archive table: a retained snapshot (`snapshot_id`), or all records below the offsets `ends`. If
    both are None, it is the current state.
    """

    at_ms: int
    """Time of the version (milliseconds since the epoch); not later than the requested time."""
    snapshot_id: int | None = None
    ends: dict[int, int] | None = None

    @property
    def is_latest(self) -> bool:
        """Whether the version is the current state, which changes with every commit."""
        return self.snapshot_id is None and self.ends is None

    def limit_selection(self, selection: Selection) -> Selection:
        """Return the selection without records that were archived after this version."""
        return selection if self.ends is None else replace(selection, ends=self.ends)


def find_version(table: ArchiveTable, text: str, parse_time: Callable[[str], int]) -> TableVersion:
    """Find the version that `text` names: the id of a retained snapshot, a tag, or a time, which `parse_time` converts
    to milliseconds since the epoch.

    Raises:
        SnapshotNotFound: The table has no such snapshot or time; the message lists the existing ones.
        ValueError: The text is neither an id nor a tag, and `parse_time` rejects it.
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
    """Return the version of the table at the time `at_ms`, according to its last refreshed metadata.

    Raises:
        SnapshotNotFound: The table has no offsets of that time or an earlier one.
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
            f"the offsets of {table.name} at that time are not recorded; recorded are {_known_times_text(table)}"
        )
    return max(before, key=lambda version: version.at_ms)


def is_archive_of(table: ArchiveTable, topic_id: bytes) -> bool:
    """Whether the topic with this id is the archived one, and not a recreated one. True if one of the ids is unknown
    (all zero, or missing in the table).
    """
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
        return "none: no batch has been archived yet"
    return f"times from {datetime.fromtimestamp(min(times) / 1000, UTC).isoformat(timespec='seconds')} on"
