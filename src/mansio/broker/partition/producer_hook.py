"""Idempotence of producers as a partition hook: no batch of a producer is stored twice, also not after a restart.

Owns the partition's `ProducerTable` and its snapshots. The table is derived from the batch headers of the log; with a
snapshot only the headers after it are read at a start.

Invariants:
* A snapshot contains the state at an offset up to which the log was committed when the snapshot was written, so that a
  crash cannot leave a snapshot with batches that the log has lost. If the log was truncated, snapshots above its end
  are removed before new records are appended.
* Snapshots are written on another thread and not flushed: their checksum detects an incomplete one, and the previous
  snapshot is kept until the next one is written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.broker.partition.partition_hook import AppendResult
from mansio.broker.partition.snapshot_files import SNAPSHOT_INTERVAL_BYTES, SnapshotFiles
from mansio.errors import CorruptLog
from mansio.logs import fields
from mansio.state.producers import ProducerTable

if TYPE_CHECKING:
    from mansio.ports import Background, Clock, Disk
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_MS = 10 * 60 * 1000
_SUFFIX = ".producers"


class ProducerHook:
    """`PartitionHook` for idempotent producers."""

    __slots__ = (
        "_background",
        "_clock",
        "_directory",
        "_disk",
        "_expiration_ms",
        "_expiry_due_ms",
        "_log",
        "_saved_end_offset",
        "_snapshots",
        "_unsaved_bytes",
        "_waiting_snapshot",
        "has_shorter_batches",
        "table",
    )

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        background: Background,
        directory: str,
        log: Log,
        *,
        expiration_ms: int,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._background = background
        self._directory = directory
        self._log = log
        self._snapshots = SnapshotFiles(disk, directory, _SUFFIX)
        self._unsaved_bytes = 0
        self._waiting_snapshot: tuple[int, bytes] | None = None
        self._expiry_due_ms = clock.wall_ms() + EXPIRY_INTERVAL_MS
        self._expiration_ms = expiration_ms
        self.has_shorter_batches = False
        """Whether batches may have been stored without repeats: see `ProducerTable.check`."""
        self.table = ProducerTable(expiration_ms=expiration_ms)
        self._load()

    # Hook methods

    def before_append(self, header: BatchHeader) -> AppendResult | None:
        if header.producer_id < 0:
            return None
        if header.base_sequence < 0:  # of the broker itself: a marker, or a batch of a coordinator
            self.table.check_epoch(header.producer_id, header.producer_epoch)
            return None
        known = self.table.check(header, may_be_shorter=self.has_shorter_batches)
        if known is None:
            return None
        return AppendResult(known.base_offset, known.last_offset + 1, known.timestamp_ms, True)

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        if header.producer_id >= 0:
            now_ms = self._clock.wall_ms()
            self.table.record(header, base_offset, now_ms)
            if now_ms >= self._expiry_due_ms:
                self._expiry_due_ms = now_ms + EXPIRY_INTERVAL_MS
                self.table.expire(now_ms)
        self._unsaved_bytes += header.batch_length
        if self._unsaved_bytes >= SNAPSHOT_INTERVAL_BYTES and self._waiting_snapshot is None:
            self._unsaved_bytes = 0
            end_offset = base_offset + header.last_offset_delta + 1
            self._waiting_snapshot = (end_offset, self.table.to_bytes(end_offset))

    def on_committed(self, high_watermark: int) -> None:
        if self._waiting_snapshot is not None and self._waiting_snapshot[0] <= high_watermark:
            end_offset, data = self._waiting_snapshot
            self._waiting_snapshot = None
            self._background.submit(lambda: self._snapshots.save(end_offset, data), self._log_save_error)

    def on_trim(self, start_offset: int) -> None:
        """Do nothing: producers expire by time, not when their batches are deleted."""

    def on_truncate(self, end_offset: int) -> None:
        """Remove snapshots above `end_offset`, and load the table again from the latest remaining one and the log."""
        self._waiting_snapshot = None
        self._unsaved_bytes = 0
        self._snapshots.remove_beyond(end_offset)
        self.table = ProducerTable(expiration_ms=self._expiration_ms)
        self._load()

    def readable_end(self, isolation_level: int) -> int | None:  # noqa: ARG002 - the hook's signature
        return None

    def retention_floor(self) -> int | None:
        return None

    def close(self) -> None:
        end_offset = self._log.end_offset
        if end_offset == self._saved_end_offset:  # an idle partition writes no snapshots
            return
        if end_offset == self._log.durable_end_offset and self._log.failure is None:
            self._snapshots.save(end_offset, self.table.to_bytes(end_offset))

    def _log_save_error(self, result: None, error: BaseException | None) -> None:  # noqa: ARG002 - the port's signature
        if error is not None:  # the previous snapshot remains valid
            logger.warning(
                "producer_snapshot_write_failed", extra=fields(directory=self._directory, reason=error)
            )

    # Snapshots

    def _load(self) -> None:
        self._snapshots.remove_beyond(self._log.end_offset)
        from_offset = self._log.start_offset
        for path in self._snapshots.paths():
            try:
                table, end_offset = ProducerTable.from_bytes(
                    self._disk.read_file(path), expiration_ms=self._expiration_ms
                )
            except (CorruptLog, OSError) as error:
                logger.warning(
                    "producer_snapshot_read_failed",
                    extra=fields(path=path, reason=error),
                )
                continue
            if self._log.start_offset <= end_offset <= self._log.end_offset:
                self.table, from_offset = table, end_offset
                break
        self._saved_end_offset = from_offset
        self.table.replay(self._log.batch_headers(from_offset), self._clock.wall_ms())
