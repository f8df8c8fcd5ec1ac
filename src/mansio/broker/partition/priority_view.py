"""Priorities of the records of one partition as a view of its log (`PartitionHook`), on leaders and followers.

The leader reads the headers of a producer's batch once, when it checks them; the priorities are applied when the batch
is appended. Batches of others are read from the log, on followers in slices. Snapshots shorten the next start.

    log start ---- index ---- index.end ---- read by the next slices ---- log end

Invariants:
* The index contains the log below `index.end` and nothing else; it is the same object as long as the view exists.
* On the leader of a partition the index reaches the end of the log, unless a part of it is being read after a start.
* Records that were stored before the topic got the setting have normal priority. A replica without a snapshot does not
  know since when the topic has the setting, and goes by the headers of all records.
* A snapshot contains the index up to an offset below which the log was committed when the snapshot was written.
* The records of a damaged batch have normal priority, also after a repair, until the index is built again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.snapshot_files import SNAPSHOT_INTERVAL_BYTES, SnapshotFiles
from mansio.errors import UNREADABLE_OR_DAMAGED, CorruptLog, MansioError
from mansio.logs import fields
from mansio.state.priorities.priority_index import PriorityIndex, PriorityRange
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.priority_header import read_priorities
from mansio.wire.batch.record_batch import check_stored_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Disk, Scheduler
    from mansio.storage.log import Log
    from mansio.wire.batch.priority_header import PriorityRun
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

SLICE_BATCHES: Final = 100
SLICE_BYTES: Final = 256 << 10
"""Number of batches, and of their bytes, after which a slice of the event loop ends: about 1 ms."""

RETRY_MS: Final = 10_000
"""Time after which a part of the log that could not be read is read again."""

SNAPSHOT_SUFFIX: Final = ".priority"
_MAGIC: Final = b"MPRIOR\0\n"
_VERSION: Final = 1


class PriorityView:
    """`PartitionHook` with the priorities of a partition. All methods run on the broker's event loop."""

    __slots__ = (
        "_background",
        "_closed",
        "_directory",
        "_is_leader",
        "_is_reading",
        "_log",
        "_saved_end_offset",
        "_scheduler",
        "_snapshots",
        "_staged",
        "_start_offset",
        "_unsaved_bytes",
        "_waiting_snapshot",
        "index",
        "on_damage",
        "on_progress",
    )

    def __init__(
        self,
        disk: Disk,
        background: Background,
        scheduler: Scheduler,
        log: Log,
        *,
        is_leader: Callable[[], bool],
        is_new: bool,
    ) -> None:
        """`is_leader` returns whether this broker leads the partition. `is_new`: the topic gets the setting now, so all
        records in the log have normal priority. Raises `OSError`."""
        self._background = background
        self._scheduler = scheduler
        self._log = log
        self._is_leader = is_leader
        self._directory = log.directory
        self._snapshots = SnapshotFiles(disk, log, SNAPSHOT_SUFFIX)
        self._closed = False
        self._is_reading = False
        self._unsaved_bytes = 0
        self._saved_end_offset = -1
        self._waiting_snapshot: PriorityIndex | None = None
        self._staged: tuple[int, Sequence[PriorityRun]] | None = None
        """CRC of a producer's batch that is about to be appended, and its priorities."""
        self._start_offset = log.start_offset
        """The start of the log before its last change: the index is kept from here on, because share partitions count
        the records that were deleted."""
        self.on_damage: Callable[[int, MansioError], None] = _ignore_damage
        """Called with the offset of a batch that cannot be read."""
        self.on_progress: Callable[[], None] = _ignore_progress
        """Called when the index has reached the end of the log after a part of it was read."""
        self.index = self._load(disk)
        if is_new and self._saved_end_offset < 0:
            self.index.append(log.end_offset)
            self._save(self.index, durable=True)
        self._is_reading = not self.is_complete
        if self._is_reading:
            scheduler.call_soon(self._read_slice)

    @property
    def is_complete(self) -> bool:
        """Whether the index reaches the end of the log."""
        return self.index.end >= self._log.end_offset

    def stage(self, crc: int, runs: Sequence[PriorityRun]) -> None:
        """Announce the priorities of a producer's batch that is about to be appended, by its CRC."""
        self._staged = (crc, runs)

    # Hook methods

    def before_append(self, header: BatchHeader) -> AppendResult | None:  # noqa: ARG002 - the hook's signature
        return None

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        staged, self._staged = self._staged, None
        if self._is_reading or base_offset < self.index.end:
            return
        if base_offset == self.index.end and header.is_control:
            self._apply((), header, base_offset)
        elif base_offset == self.index.end and staged is not None and staged[0] == header.crc:
            self._apply(staged[1], header, base_offset)
        elif self._is_leader() and base_offset == self.index.end:
            self._read_batches(1)  # changed by the broker, for example by deduplication
        if not self.is_complete:
            self._is_reading = True
            self._scheduler.call_soon(self._read_slice)
        if self._unsaved_bytes >= SNAPSHOT_INTERVAL_BYTES and self._waiting_snapshot is None:
            self._unsaved_bytes = 0
            self._waiting_snapshot = self.index.freeze()

    def on_committed(self, high_watermark: int) -> None:
        frozen = self._waiting_snapshot
        if frozen is not None and frozen.end <= high_watermark:
            self._waiting_snapshot = None
            self._background.submit(lambda: self._save(frozen), self._log_save_error)

    def on_trim(self, start_offset: int) -> None:
        self.index.drop_below(self._start_offset)
        self._start_offset = start_offset

    def on_truncate(self, end_offset: int) -> None:
        self._snapshots.remove_beyond(end_offset)
        self._waiting_snapshot = self._staged = None
        self.index.truncate(end_offset)
        self.index.drop_below(self._log.start_offset)
        self._start_offset = self._log.start_offset

    def readable_end(self, isolation_level: int) -> int | None:  # noqa: ARG002 - the hook's signature
        return None

    def retention_floor(self) -> int | None:
        return None

    def close(self) -> None:
        self._closed = True
        log, end_offset = self._log, self.index.end
        is_durable = end_offset == log.end_offset == log.durable_end_offset and log.failure is None
        if is_durable and end_offset != self._saved_end_offset:
            self._save(self.index)

    # Application of the log

    def _apply(self, runs: Sequence[PriorityRun], header: BatchHeader, base_offset: int) -> None:
        self.index.append(
            base_offset + header.last_offset_delta + 1,
            [
                PriorityRange(base_offset + first, base_offset + last, priority)
                for first, last, priority in runs
            ],
        )
        self._unsaved_bytes += header.batch_length

    def _read_slice(self) -> None:
        if self._closed or not self._is_reading:
            return
        if not self._read_batches(SLICE_BATCHES):
            self._scheduler.call_later(RETRY_MS, self._read_slice)
        elif not self.is_complete:
            self._scheduler.call_soon(self._read_slice)
        else:
            self._is_reading = False
            self.on_progress()

    def _read_batches(self, batches: int) -> bool:
        """Read at most so many batches from the end of the index on. Returns whether the log could be read."""
        log, index = self._log, self.index
        size = 0
        try:
            found = log.batches(index.end)
            for _ in range(batches):
                batch = next(found, None)
                if batch is None or size > SLICE_BYTES:
                    break
                header = check_stored_batch(batch)
                runs = () if header.is_control else read_priorities(batch, self._directory, strict=False)
                self._apply(runs, header, header.base_offset)
                size += len(batch)
        except (CorruptLog, *UNREADABLE_OR_DAMAGED) as error:
            self._log_read_error(error)
            self.on_damage(index.end, error)
            following = next(
                log.batch_headers(index.end), None
            )  # the damaged batch, or an intact one after it
            if following is None:
                index.append(log.end_offset)
            else:
                is_after = following.base_offset > index.end
                index.append(following.base_offset if is_after else following.last_offset + 1)
        except (MansioError, OSError) as error:
            self._log_read_error(error)
            if isinstance(error, MansioError):
                self.on_damage(index.end, error)
            return False
        return True

    def _log_read_error(self, error: MansioError | OSError) -> None:
        logger.error(
            "priorities_not_read",
            extra=fields(directory=self._directory, offset=self.index.end, reason=error),
        )

    # Snapshots

    def _load(self, disk: Disk) -> PriorityIndex:
        log = self._log
        self._snapshots.remove_beyond(log.end_offset)
        for path in self._snapshots.paths():
            try:
                payload = decode_checksummed(_MAGIC, _VERSION, disk.read_file(path))
                if payload is None:
                    raise CorruptLog(f"{path} is damaged")
                index = PriorityIndex.from_bytes(payload)
            except (CorruptLog, OSError) as error:
                logger.warning("priority_snapshot_read_failed", extra=fields(path=path, reason=error))
                continue
            self._saved_end_offset = index.end
            index.drop_below(log.start_offset)
            return index
        return PriorityIndex(log.start_offset)

    def _save(self, index: PriorityIndex, *, durable: bool = False) -> None:
        data = encode_checksummed(_MAGIC, _VERSION, index.to_bytes())
        self._snapshots.save(index.end, data, durable=durable)
        self._saved_end_offset = index.end

    def _log_save_error(self, result: None, error: BaseException | None) -> None:  # noqa: ARG002 - the port's signature
        if error is not None:  # the previous snapshot remains valid
            logger.warning(
                "priority_snapshot_write_failed", extra=fields(directory=self._directory, reason=error)
            )


def _ignore_damage(offset: int, error: MansioError) -> None:
    """Default of `PriorityView.on_damage`."""


def _ignore_progress() -> None:
    """Default of `PriorityView.on_progress`."""
