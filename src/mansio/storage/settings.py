"""Settings of one log. They are immutable; `Log.update_settings` replaces them.

The defaults of segment.bytes, segment.ms and index.interval.bytes are Kafka's.
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_BYTES_MAX = (1 << 31) - 1  # positions in an index are 32 bits wide
RELATIVE_OFFSET_MAX = (1 << 31) - 1  # and so are offsets, relative to the base offset of the segment


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of one log's segments and indexes.

    `segment_bytes`: maximum size of a segment; a larger batch gets a segment of its own.
    `segment_ms`: a segment is closed at the first append that happens this long after its first record was appended. If
    the log was opened since, that record's timestamp counts as the time of its append.
    `index_interval_bytes`: bytes of log between two index entries; doubled when a segment has too many entries.
    `index_snapshot_bytes`: the index of the active segment is saved each time the segment has grown by this amount,
    which bounds the scan after a crash.
    """

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    index_interval_bytes: int = 4096
    index_snapshot_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise ValueError(f"segment_bytes must be in 1..{SEGMENT_BYTES_MAX}, not {self.segment_bytes}")
        if self.segment_ms <= 0 or self.index_interval_bytes <= 0 or self.index_snapshot_bytes <= 0:
            raise ValueError("segment_ms, index_interval_bytes and index_snapshot_bytes must be above 0")
