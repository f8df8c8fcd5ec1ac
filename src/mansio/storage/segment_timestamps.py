"""Timestamps file of one log: the largest timestamp of every closed segment.

With this file, searches by timestamp and retention need not load the index of each segment after a restart.

Invariants: the file contains only information that the indexes contain, too; where an entry is missing, one index is
loaded. It never describes a segment that still grows: a truncation removes the file, and so does a recovery that finds
an entry of the active segment.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from mansio.storage.checksummed_file import encode_checksummed, read_checksummed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.ports import Disk
    from mansio.storage.segment import Segment

TIMESTAMPS_MAGIC = b"MANSIOTM"
TIMESTAMPS_VERSION = 1
TIMESTAMPS_NAME = "times"
_ENTRY = struct.Struct(">qIq")


class SegmentTimestamp(NamedTuple):
    """Final size and largest timestamp of the segment at `base_offset`."""

    base_offset: int
    size_bytes: int
    max_timestamp_ms: int


def closed_segment_timestamps(segments: Sequence[Segment], end_offset: int) -> tuple[SegmentTimestamp, ...]:
    """Return the largest timestamps, where known, of the closed segments that end at or below `end_offset`.

    `segments` are all segments of the log; the last one is active.
    """
    timestamps = []
    for segment in segments[:-1]:
        if segment.end_offset > end_offset:
            break
        known = segment.index.max_timestamp_ms if segment.index is not None else segment.max_timestamp_ms
        if known is not None:
            timestamps.append(SegmentTimestamp(segment.base_offset, segment.size, known))
    return tuple(timestamps)


def encode_segment_timestamps(timestamps: Iterable[SegmentTimestamp]) -> bytes:
    """Return the bytes of the timestamps file (docs/internals/file-format.md)."""
    return encode_checksummed(
        TIMESTAMPS_MAGIC, TIMESTAMPS_VERSION, b"".join(_ENTRY.pack(*entry) for entry in timestamps)
    )


def load_segment_timestamps(disk: Disk, path: str) -> list[SegmentTimestamp] | None:
    """Read the timestamps file at `path`; None if it is missing or damaged."""
    payload = read_checksummed(disk, path, TIMESTAMPS_MAGIC, TIMESTAMPS_VERSION)
    if payload is None or len(payload) % _ENTRY.size:
        return None
    return [SegmentTimestamp._make(entry) for entry in _ENTRY.iter_unpack(payload)]


def apply_segment_timestamps(disk: Disk, directory: str, segments: Sequence[Segment]) -> bool:
    """Set `max_timestamp_ms` of the closed segments from the timestamps file. Returns False if it removed the file.

    The file is removed if a crash left entries for the active segment or for later ones: these entries would be wrong
    once such a segment is closed.
    """
    path = f"{directory}/{TIMESTAMPS_NAME}"
    loaded = load_segment_timestamps(disk, path)
    if loaded is None:
        return True
    known = {entry.base_offset: entry for entry in loaded}
    for segment in segments[:-1]:
        entry = known.get(segment.base_offset)
        if entry is not None and entry.size_bytes == segment.size:
            segment.max_timestamp_ms = entry.max_timestamp_ms
    if not any(entry.base_offset >= segments[-1].base_offset for entry in loaded):
        return True
    disk.remove(path)
    disk.sync_directory(directory)
    return False
