"""The largest timestamp of every closed segment, in one small file.

It spares a look-up by time, and retention, from loading the index of each segment after a restart. Always true: it
holds nothing that the indexes do not (a missing entry costs the loading of one index), and it never speaks of a segment
that is still written to: a truncation removes it, and so does an opening that finds it doing so.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from mansio.log.sealed import read_sealed, seal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.log.segment import Segment
    from mansio.ports import Disk

TIMES_MAGIC = b"MANSIOTM"
TIMES_VERSION = 1
TIMES_NAME = "times"
_ENTRY = struct.Struct(">qIq")


class SegmentTime(NamedTuple):
    """The segment at `base_offset`, with its final size, and the largest timestamp in it."""

    base_offset: int
    size_bytes: int
    max_timestamp_ms: int


def times_of(segments: Sequence[Segment], end_offset: int) -> tuple[SegmentTime, ...]:
    """What is known of the closed ones among all segments of a log that end at or below `end_offset`."""
    times = []
    for segment in segments[:-1]:
        if segment.end_offset > end_offset:
            break
        known = segment.index.max_timestamp_ms if segment.index is not None else segment.max_timestamp_ms
        if known is not None:
            times.append(SegmentTime(segment.base_offset, segment.size, known))
    return tuple(times)


def encode_times(times: Iterable[SegmentTime]) -> bytes:
    """The bytes of the file (docs/FILE_FORMAT.md)."""
    return seal(TIMES_MAGIC, TIMES_VERSION, b"".join(_ENTRY.pack(*entry) for entry in times))


def load_times(disk: Disk, path: str) -> list[SegmentTime] | None:
    """Read the file; None when it is missing or damaged."""
    payload = read_sealed(disk, path, TIMES_MAGIC, TIMES_VERSION)
    if payload is None or len(payload) % _ENTRY.size:
        return None
    return [SegmentTime._make(entry) for entry in _ENTRY.iter_unpack(payload)]


def apply_times(disk: Disk, directory: str, segments: Sequence[Segment]) -> bool:
    """Tell the closed ones among `segments` their largest timestamps. False when the file had to be removed.

    That is when a crash has left a file that speaks of the segment which is going to be written now, or of later ones:
    it would be wrong about them once they are closed again.
    """
    path = f"{directory}/{TIMES_NAME}"
    loaded = load_times(disk, path)
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
