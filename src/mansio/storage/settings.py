"""Settings of one log, a frozen value that `Log.update_settings` replaces.

Defaults are Kafka's where Kafka has the setting (segment.bytes, segment.ms, index.interval.bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_BYTES_MAX = (1 << 31) - 1  # positions in an index are 32 bits wide


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Size, age and indexing of one log's segments.

    `segment_bytes`: a segment is closed before it would grow beyond this (one larger batch still gets its own).
    `segment_ms`: a segment is closed at the first append this long after its first record; if the log was opened since,
    by that record's timestamp.
    `index_interval_bytes`: bytes of log between two index entries (doubled when a segment has too many of them).
    `index_snapshot_bytes`: how much the active segment may grow before its index is saved, which bounds the scan after
    a crash.
    `decompressed_batch_bytes_max`: maximum decompressed size of a batch that a search by timestamp decodes.
    """

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    index_interval_bytes: int = 4096
    index_snapshot_bytes: int = 64 << 20
    decompressed_batch_bytes_max: int = 128 << 20

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise ValueError(f"segment_bytes must be in 1..{SEGMENT_BYTES_MAX}, not {self.segment_bytes}")
        if self.segment_ms <= 0 or self.index_interval_bytes <= 0 or self.index_snapshot_bytes <= 0:
            raise ValueError("segment_ms, index_interval_bytes and index_snapshot_bytes must be above 0")
