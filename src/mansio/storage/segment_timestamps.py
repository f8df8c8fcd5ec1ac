"""The largest timestamp of every closed segment, in one small file.

It spares a look-up by time, and retention, from loading the index of each segment after a restart. Always true: it
holds nothing that the indexes do not (a missing entry costs the loading of one index), and it never speaks of a segment
that is still written to: a truncation removes it, and so does an opening that finds it doing so.
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
    """The segment at `base_offset`, with its final size, and the largest timestamp in it."""

    base_offset: int
    size_bytes: int
    max_timestamp_ms: int


def timestamps_of(segments: Sequence[Segment], end_offset: int) -> tuple[SegmentTimestamp, ...]:
    """What is known of the closed ones among all segments of a log that end at or below `end_offset`."""
    times = []
    for segment in segments[:-1]:
        if segment.end_offset > end_offset:
            break
        known = segment.index.max_timestamp_ms if segment.index is not None else segment.max_timestamp_ms
        if known is not None:
            times.append(SegmentTimestamp(segment.base_offset, segment.size, known))
    return tuple(times)


def encode_segment_timestamps(times: Iterable[SegmentTimestamp]) -> bytes:
    """The bytes of the file (docs/FILE_FORMAT.md)."""
    return encode_checksummed(
        TIMESTAMPS_MAGIC, TIMESTAMPS_VERSION, b"".join(_ENTRY.pack(*entry) for entry in times)
    )


def load_segment_timestamps(disk: Disk, path: str) -> list[SegmentTimestamp] | None:
    """Read the file; None when it is missing or damaged."""
    payload = read_checksummed(disk, path, TIMESTAMPS_MAGIC, TIMESTAMPS_VERSION)
    if payload is None or len(payload) % _ENTRY.size:
        return None
    return [SegmentTimestamp._make(entry) for entry in _ENTRY.iter_unpack(payload)]


def apply_segment_timestamps(disk: Disk, directory: str, segments: Sequence[Segment]) -> bool:
    """Tell the closed ones among `segments` their largest timestamps. False when the file had to be removed.

    That is when a crash has left a file that speaks of the segment which is going to be written now, or of later ones:
    it would be wrong about them once they are closed again.
    """
    path = f"{directory}/{TIMESTAMPS_NAME}"
    loaded = load_segment_timestamps(disk, path)
    if loaded is None:
        return True
    known = {time.base_offset: time for time in loaded}
    for segment in segments[:-1]:
        time = known.get(segment.base_offset)
        if time is not None and time.size_bytes == segment.size:
            segment.max_timestamp_ms = time.max_timestamp_ms
    if not any(time.base_offset >= segments[-1].base_offset for time in loaded):
        return True
    disk.remove(path)
    disk.sync_directory(directory)
    return False
