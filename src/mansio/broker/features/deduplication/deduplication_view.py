"""Deduplication window of one partition as a view of its log (`LogView`), on leaders and followers.

The view applies the control batches with ids (`mansio.broker.features.deduplication.dedup_control_records`).

Invariants:
* Ids are added when the batch with their records is in the log: see IDS. No snapshot is taken between the two batches.
* Without a snapshot, the view is rebuilt from the segments that were written in the longest possible window.
* Retention keeps each control batch with ids that have not expired.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from mansio.broker.features.deduplication.dedup_control_records import (
    AcceptedIds,
    CopiedIds,
    decode_dedup_control,
)
from mansio.broker.features.deduplication.window import AcceptedId, Copies, DeduplicationWindow
from mansio.broker.log_view.view import DecodedBatch, LogView
from mansio.config.topic_config import DEDUP_MS_MAX
from mansio.errors import CorruptLog
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.features.deduplication.window import FrozenWindow
    from mansio.ports import Clock, Disk
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

WRITE_TIME_TOLERANCE_MS: Final = 2 * 24 * 60 * 60 * 1000
"""How much older than its last write a segment file may seem to be: file systems write times of files lazily."""

COPIED_ID_BYTES: Final = 48
"""Upper bound of the size of a copied id in the log, with its share of a control batch of ten ids or more."""

_MAGIC: Final = b"MDEDUP\0\n"
_VERSION: Final = 1
_END_OFFSET: Final = struct.Struct(">q")


class DeduplicationView(LogView[AcceptedIds | CopiedIds]):
    """The deduplication window of a partition."""

    __slots__ = ("_clock", "_disk", "_expected", "_log", "_window_ms", "window")

    kind = "deduplication"
    suffix = ".dedup"

    def __init__(self, disk: Disk, clock: Clock, log: Log, *, window_ms: Callable[[], int]) -> None:
        """`window_ms` returns the setting mansio.dedup.ms of the topic."""
        self._disk = disk
        self._clock = clock
        self._log = log
        self._window_ms = window_ms
        self._expected: tuple[int, AcceptedIds] | None = None
        """Offset of the batch that has the records with these ids, if it follows."""
        self.window = DeduplicationWindow()

    # Application of the log

    def decode(self, batch: bytes) -> DecodedBatch:
        content = decode_dedup_control(batch)
        return DecodedBatch(content, 0 if content is None else len(content.keys))

    def apply(self, header: BatchHeader, base_offset: int, content: AcceptedIds | CopiedIds | None) -> None:
        expected, self._expected = self._expected, None
        window = self.window
        if isinstance(content, AcceptedIds):
            self._expected = (base_offset + 1, content)
        elif content is not None:
            rows = zip(content.keys, content.offsets, content.accepted_ms, strict=True)
            copies = Copies(content.first_copy, content.until_ms)
            window.restore([AcceptedId(*row) for row in rows], base_offset, copies)
        elif expected is not None:
            offset, ids = expected
            if offset != base_offset or ids.crc != header.crc:
                return
            offsets = [base_offset + position for position in ids.positions]
            window.accept(ids.keys, offsets, ids.accepted_ms, base_offset - 1)
            window.expire(window.latest_ms - self._window_ms())

    def skip_to(self, offset: int) -> None:
        del offset
        self._expected = None

    def truncate(self, end_offset: int, start_offset: int) -> bool:
        del end_offset, start_offset
        self._expected = None
        self.window = DeduplicationWindow()
        return False

    @property
    def keeps_log(self) -> bool:
        return self._window_ms() > 0

    def lowest_location(self) -> int | None:
        return self.window.lowest_location(self._clock.wall_ms() - self._window_ms())

    @property
    def kept_bytes(self) -> int:
        """Size that copies of all ids have. If it counted for retention.bytes, copies that are larger would expire at
        once, and be copied again at each check."""
        return COPIED_ID_BYTES * (self.window.count + 2)

    # Snapshots

    @property
    def is_whole(self) -> bool:
        return self._expected is None

    def begin(self) -> tuple[int, bool]:
        return self._first_offset(), False

    def _first_offset(self) -> int:
        """Return the offset from which the log can have ids that have not expired: segments that were not written for
        longer than the longest window have none. Raises `OSError`."""
        log = self._log
        oldest_ms = self._clock.wall_ms() - DEDUP_MS_MAX - WRITE_TIME_TOLERANCE_MS
        first = log.active_segment().base_offset
        for base_offset in reversed(log.segment_base_offsets()[:-1]):
            modified_ms = self._disk.modified_ms(f"{log.directory}/{base_offset:020d}.log")
            if 0 < modified_ms < oldest_ms:  # 0: the file system does not know it
                break
            first = base_offset
        return max(first, log.start_offset)

    def freeze(self, end_offset: int) -> FrozenWindow:
        del end_offset
        return self.window.freeze()

    def encode_snapshot(self, end_offset: int, state: FrozenWindow) -> bytes:
        return encode_checksummed(_MAGIC, _VERSION, state.to_bytes(_END_OFFSET.pack(end_offset)))

    def decode_snapshot(self, data: bytes) -> tuple[int, DeduplicationWindow]:
        payload = decode_checksummed(_MAGIC, _VERSION, data)
        if payload is None:
            raise CorruptLog("snapshot of a deduplication window: damaged")
        (end_offset,) = _END_OFFSET.unpack_from(payload)
        return end_offset, DeduplicationWindow.from_bytes(memoryview(payload)[_END_OFFSET.size :])

    def restore(self, state: DeduplicationWindow) -> None:
        self.window = state
