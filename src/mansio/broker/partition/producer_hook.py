"""Producers of one partition as a partition hook: no batch is stored twice, and transactions are open, committed or
aborted (Kafka `ProducerStateManager`), also after a restart, on followers and after a change of leader.

Owns the partition's `ProducerTable`, its `PartitionTransactions` and their common snapshots (`ViewSnapshots`). Both are
derived from the batch headers and the transaction markers of the log; with a snapshot only those after it are read.
Unlike other views they are complete before the partition is opened (docs/adr/0027-views-of-a-log.md).

A producer's transaction in the partition is verified with its coordinator before its first batch is appended
(KIP-890). A marker that is appended meanwhile ends the `Verification`: the batch could belong to the transaction that
the marker has ended, and would then stay open forever.

Invariants:
* Batches that are not transactional make the same calls as without transactions.
* If batches are damaged that this hook has to read, the transactions that were open there stay open, because they may
  have ended in these batches: see `PartitionTransactions`. No snapshot is written then, so that the next start reads
  the batches again, which may be repaired; `on_repaired` does so at once.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Final

from mansio.broker.log_view import snapshots as view_snapshots
from mansio.broker.log_view.view import SnapshotSource
from mansio.broker.partition.partition_hook import AppendResult
from mansio.errors import CorruptLog, InvalidProducerEpoch, InvalidTxnState, RequestError, StorageError
from mansio.logs import fields
from mansio.state.partition_transactions import PartitionTransactions
from mansio.state.producers import ProducerTable, is_first_version
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.end_marker import decode_end_marker
from mansio.wire.batch.record_batch import (
    CONTROL_FLAG,
    TRANSACTIONAL_FLAG,
    check_stored_batch,
    iterate_batches,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from mansio.broker.partition.partition_hook import Contents
    from mansio.ports import Background, Clock, Disk
    from mansio.state.partition_transactions import AbortedTransaction
    from mansio.storage.log import Log
    from mansio.wire.batch.end_marker import EndMarker
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_MS = 10 * 60 * 1000
CLOCK_JUMP_MS_MIN = 1000
"""Difference between the wall clock and the monotonic clock from which on the wall clock was set."""

_MAGIC: Final = b"MPRTX\0\0\n"
_VERSION: Final = 1
_TABLE_LENGTH: Final = struct.Struct(">I")


def encode_producer_state(
    table: ProducerTable, transactions: PartitionTransactions, end_offset: int
) -> bytes:
    """Encode a snapshot: the table only if there are no transactions, so that it takes no more space than before."""
    producers = table.to_bytes(end_offset)
    if transactions.is_empty:
        return producers
    payload = _TABLE_LENGTH.pack(len(producers)) + producers + transactions.to_bytes()
    return encode_checksummed(_MAGIC, _VERSION, payload)


def decode_producer_state(
    data: bytes, *, expiration_ms: int
) -> tuple[ProducerTable, PartitionTransactions, int]:
    """Decode a snapshot. Returns producers, transactions, and the offset below which they contain the log. Raises
    `CorruptLog`."""
    transactions = PartitionTransactions()
    if data.startswith(_MAGIC):
        payload = decode_checksummed(_MAGIC, _VERSION, data)
        if payload is None:
            raise CorruptLog("snapshot of producers and transactions: damaged")
        (length,) = _TABLE_LENGTH.unpack_from(payload)
        position = _TABLE_LENGTH.size + length
        data, transactions = (
            payload[_TABLE_LENGTH.size : position],
            PartitionTransactions.from_bytes(payload[position:]),
        )
    table, end_offset = ProducerTable.from_bytes(data, expiration_ms=expiration_ms)
    return table, transactions, end_offset


class Verification:
    """The verification of a producer's transaction with its coordinator, before the first batch is appended.
    `end_epoch`: the lowest producer epoch of a marker that ends this transaction. `is_valid`: no marker of this or a
    later epoch was appended since it began."""

    __slots__ = ("end_epoch", "is_valid")

    def __init__(self, end_epoch: int) -> None:
        self.end_epoch = end_epoch
        self.is_valid = True


class ProducerHook(SnapshotSource):
    """`PartitionHook` for idempotent and transactional producers."""

    __slots__ = (
        "_clock",
        "_committed_end",
        "_directory",
        "_expiration_ms",
        "_expiry_checked",
        "_expiry_due_ms",
        "_log",
        "_snapshots",
        "_verifications",
        "damaged_offset",
        "has_shorter_batches",
        "table",
        "transactions",
    )

    kind = "producers"
    suffix = ".producers"

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
        self._clock = clock
        self._directory = directory
        self._log = log
        self._snapshots = view_snapshots.ViewSnapshots(disk, background, log, ProducerHook)
        self._expiry_checked = (clock.wall_ms(), clock.monotonic())
        self._expiry_due_ms = self._expiry_checked[0] + EXPIRY_INTERVAL_MS
        self._expiration_ms = expiration_ms
        self.has_shorter_batches = False
        """Whether batches may have been stored without repeats: see `ProducerTable.check`."""
        self._committed_end = 0
        self._verifications: dict[int, list[Verification]] = {}
        self.table = ProducerTable(expiration_ms=expiration_ms)
        self.transactions = PartitionTransactions()
        """Open and aborted transactions; callers do not change them."""
        self.damaged_offset: int | None = None
        """The first offset of damaged batches in which an open transaction may have ended; None if there are none."""
        self._load()

    # Hook methods

    def before_append(self, header: BatchHeader) -> AppendResult | None:
        if header.producer_id < 0:
            return None
        if header.base_sequence < 0:  # of the broker itself: a marker, or a batch of a coordinator
            self.table.check_epoch(header.producer_id, header.producer_epoch)
            return None
        if header.producer_id in self.transactions.open and not header.attributes & TRANSACTIONAL_FLAG:
            raise InvalidTxnState(
                f"producer {header.producer_id} has an open transaction and sent a batch without one"
            )
        known = self.table.check(header, may_be_shorter=self.has_shorter_batches)
        if known is None:
            return None
        return AppendResult(known.base_offset, known.last_offset + 1, known.timestamp_ms, True)

    def on_append(self, header: BatchHeader, base_offset: int, contents: Contents | None = None) -> None:
        if header.producer_id >= 0:
            now_ms = self._clock.wall_ms()
            if not header.attributes & TRANSACTIONAL_FLAG:
                self.table.record(header, base_offset, now_ms)
            elif header.attributes & CONTROL_FLAG:
                marker = None if contents is None else contents.get(self)
                if marker is None:
                    marker = self._read_marker(base_offset, next(self._log.batches(base_offset), None))
                self._apply_marker(header, base_offset, marker, now_ms)
            else:
                self.table.record(header, base_offset, now_ms)
                self._begin(header, base_offset)
            if now_ms >= self._expiry_due_ms:
                self._expire(now_ms)
        snapshots = self._snapshots
        snapshots.unsaved_bytes += header.batch_length
        if snapshots.unsaved_bytes >= view_snapshots.SNAPSHOT_INTERVAL_BYTES and snapshots.is_due:
            if self.transactions.has_lost_ends:
                snapshots.unsaved_bytes = 0
            else:
                snapshots.prepare(self, base_offset + header.last_offset_delta + 1)

    def _expire(self, now_ms: int) -> None:
        """Remove the producers without a batch for long. A wall clock that was set forward since the last call makes
        none of them older: a duplicate of a batch must be detected all the same."""
        now_s = self._clock.monotonic()
        checked_ms, checked_s = self._expiry_checked
        jumped_ms = int(now_ms - checked_ms - (now_s - checked_s) * 1000)
        if jumped_ms > CLOCK_JUMP_MS_MIN:
            self.table.shift(jumped_ms, now_ms)
        self._expiry_checked = (now_ms, now_s)
        self._expiry_due_ms = now_ms + EXPIRY_INTERVAL_MS
        self.table.expire(now_ms)

    def on_committed(self, high_watermark: int) -> None:
        self._committed_end = high_watermark
        if self.transactions.has_uncommitted_markers:
            self.transactions.on_committed(high_watermark)
        if self._snapshots.waiting is not None:
            self._snapshots.on_committed(self, high_watermark)

    def on_trim(self, start_offset: int) -> None:
        """Forget the aborted transactions below the start; producers expire by time, not when their batches are
        deleted."""
        if self.transactions.aborted_count or self.transactions.has_lost_ends:
            self.transactions.trim(start_offset)

    def on_truncate(self, end_offset: int) -> None:
        """Remove snapshots above `end_offset`, and load the table again from the latest remaining one and the log."""
        self._snapshots.truncate(end_offset)
        self._committed_end = min(self._committed_end, end_offset)
        self._load_again()

    def on_repaired(self) -> None:
        """Load the table again after damaged batches were replaced, if these may contain the end of an open
        transaction. Blocks as `on_truncate`."""
        if not self.transactions.has_lost_ends:
            return
        snapshots = self._snapshots
        before = self.table, self.transactions, self.damaged_offset, snapshots.saved_end_offset
        try:
            self._load_again()
        except (OSError, StorageError) as error:
            self.table, self.transactions, self.damaged_offset, snapshots.saved_end_offset = before
            known = fields(directory=self._directory, reason=error)
            logger.warning("transactions_not_loaded_after_repair", extra=known)

    def readable_end(self, isolation_level: int) -> int | None:
        """Return the last stable offset for readers of committed records, if a transaction is undecided."""
        if not isolation_level or (first := self.transactions.first_undecided_offset) is None:
            return None
        return max(first, self._log.start_offset)

    def retention_floor(self) -> int | None:
        """Return the last stable offset: no reader of committed records has had a chance to read what follows it."""
        return self.transactions.first_undecided_offset

    def save(self) -> None:
        """Write a snapshot, if the log is flushed and has changed. Raises `OSError`."""
        if not self.transactions.has_lost_ends:
            self._snapshots.save_last(self, self._log.end_offset)

    def close(self, *, save: bool) -> None:
        if save:
            self.save()

    # Transactions

    def aborted_between(self, from_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions with records in [from_offset, end_offset)."""
        return self.transactions.aborted(from_offset, end_offset)

    def is_open(self, header: BatchHeader) -> bool:
        """Return whether the producer has an open transaction in the epoch of this batch."""
        if header.producer_id not in self.transactions.open:
            return False
        producer = self.table.get(header.producer_id)
        return producer is not None and producer.epoch == header.producer_epoch

    def begin_verification(self, header: BatchHeader, *, bumps_epoch: bool) -> Verification:
        """Begin the verification of the transaction of a batch; the caller must call `end_verification`.

        `bumps_epoch`: transaction version 2 (KIP-890), in which the marker of a transaction has the epoch that the
        producer uses next. The marker of the previous transaction, which may be appended while the coordinator delays
        its answer until then, has the epoch of this batch, and leaves the verification valid."""
        producer_id = header.producer_id
        verification = Verification(header.producer_epoch + bumps_epoch)
        self._verifications.setdefault(producer_id, []).append(verification)
        return verification

    def end_verification(self, producer_id: int, verification: Verification) -> None:
        """End a verification, whatever its result."""
        running = self._verifications.get(producer_id)
        if running is not None and verification in running:
            running.remove(verification)
            if not running:
                del self._verifications[producer_id]

    def check_marker(self, marker: EndMarker) -> None:
        """Check a marker that is about to be appended. Raises `InvalidProducerEpoch`, `TransactionCoordinatorFenced`.

        A repeated marker may arrive when the producer's next transaction is open, which has the marker's epoch in
        transaction version 2 (KIP-1228): it is refused, because it would end that transaction."""
        producer_id, epoch = marker.producer_id, marker.producer_epoch
        self.table.check_marker(producer_id, epoch, marker.coordinator_epoch)
        if marker.bumps_epoch and producer_id in self.transactions.open:
            producer = self.table.get(producer_id)
            if producer is not None and producer.epoch == epoch:
                raise InvalidProducerEpoch(
                    f"producer {producer_id} has a transaction of epoch {epoch}, which the marker of an earlier one"
                    " cannot end"
                )

    def read_markers(self, batches: memoryview) -> dict[int, Contents]:
        """Return the contents of the markers in stored batches, by their base offsets. Raises `CorruptMessage`."""
        return {
            header.base_offset: {self: decode_end_marker(batches[position : position + header.size])}
            for position, header in iterate_batches(batches)
            if header.is_control and header.is_transactional
        }

    def expect_shorter_batches(self) -> None:
        """Batches may be stored without repeats from now on: see `ProducerTable.check`."""
        self.has_shorter_batches = True

    def remove_aborted(self, marker_offsets: Collection[int]) -> None:
        """Forget the aborted transactions with these markers: compaction has removed all their records, and may remove
        the markers. A reader would otherwise take later records of the producer for aborted ones."""
        if marker_offsets:
            self.transactions.remove_aborted(marker_offsets)

    def _begin(self, header: BatchHeader, base_offset: int) -> None:
        if header.record_count:
            self.transactions.begin(header.producer_id, base_offset)

    def _apply_marker(self, header: BatchHeader, offset: int, marker: EndMarker | None, now_ms: int) -> None:
        for verification in self._verifications.get(header.producer_id, ()):
            if header.producer_epoch >= verification.end_epoch:
                verification.is_valid = False
        if marker is None:  # compaction has removed its record
            self.table.record(header, offset, now_ms)
            return
        self.table.record_marker(header, marker.coordinator_epoch, now_ms)
        self.transactions.end(header.producer_id, offset, is_commit=marker.is_commit)

    def _read_marker(self, offset: int, batch: bytes | None) -> EndMarker | None:
        """Decode a marker; None if compaction has removed its record. Raises `CorruptLog` if the batch is damaged: its
        flags, producer and decision may be wrong."""
        if batch is None:
            return None
        try:
            check_stored_batch(memoryview(batch))
            return decode_end_marker(batch)
        except RequestError as error:
            raise CorruptLog(f"{self._directory} at offset {offset}: {error}") from error

    def _replay(self, from_offset: int) -> None:
        """Apply the batches of the log from an offset on."""
        now_ms = self._clock.wall_ms()
        for header, control in self._log.headers_with_control_batches(from_offset, self._on_damage):
            if header.producer_id < 0:
                continue
            offset = header.base_offset
            if not header.is_transactional:
                self.table.record(header, offset, now_ms)
            elif header.is_control:
                try:
                    marker = self._read_marker(offset, control)
                except CorruptLog as error:
                    known = fields(directory=self._directory, offset=offset, reason=error)
                    logger.error("transaction_marker_damaged", extra=known)
                    self._on_damage(offset)
                else:
                    self._apply_marker(header, offset, marker, now_ms)
            else:
                self.table.record(header, offset, now_ms)
                self._begin(header, offset)

    def _on_damage(self, offset: int) -> None:
        """Leave the open transactions undecided, because they may have ended in damaged batches at an offset."""
        open_count = self.transactions.lose_ends(offset)
        if open_count:
            if self.damaged_offset is None:
                self.damaged_offset = offset
            known = fields(directory=self._directory, offset=offset, open_transactions=open_count)
            logger.error("transaction_ends_lost", extra=known)

    def _forget_without_marker(self) -> None:
        """Forget the aborted transactions of a snapshot whose markers compaction has removed since."""
        if not self.transactions.aborted_count:
            return
        sparse_end_offset = self._log.compaction.state.sparse_end_offset
        gone = set()
        for one in self.transactions.aborted():
            if one.last_offset >= sparse_end_offset:
                break
            header = next(self._log.batch_headers(one.last_offset), None)
            if header is None or header.base_offset != one.last_offset or not header.record_count:
                gone.add(one.last_offset)
        self.remove_aborted(gone)

    # Snapshots

    def _continue_ages(self) -> None:
        """Let the producers of a snapshot be as old as they were when the last one of them was seen. The time after
        that is not counted: what the wall clock says about it may be wrong."""
        now_ms, newest_ms = self._clock.wall_ms(), self.table.newest_ms()
        if newest_ms is not None and newest_ms < now_ms:
            self.table.shift(now_ms - newest_ms, now_ms)

    def freeze(self, end_offset: int) -> bytes:
        return encode_producer_state(self.table, self.transactions, end_offset)

    def encode_snapshot(self, end_offset: int, state: bytes) -> bytes:
        del end_offset
        return state

    def decode_snapshot(self, data: bytes) -> tuple[int, tuple[ProducerTable, PartitionTransactions]]:
        table, transactions, end_offset = decode_producer_state(data, expiration_ms=self._expiration_ms)
        return end_offset, (table, transactions)

    def restore(self, state: tuple[ProducerTable, PartitionTransactions]) -> None:
        self.table, self.transactions = state
        self._continue_ages()
        self.transactions.trim(self._log.start_offset)

    def needs_newer_format(self, data: bytes) -> bool:
        return not is_first_version(data)

    def _load_again(self) -> None:
        self._snapshots.unsaved_bytes = 0
        self.table = ProducerTable(expiration_ms=self._expiration_ms)
        self.transactions = PartitionTransactions()
        self._load()

    def _load(self) -> None:
        self.damaged_offset = None
        snapshots = self._snapshots
        end_offset = snapshots.load(self)
        from_offset = self._log.start_offset if end_offset is None else end_offset
        snapshots.saved_end_offset = from_offset  # an idle partition writes no snapshots
        self.table.retained = self.transactions.open.keys()
        self._forget_without_marker()
        self._replay(from_offset)
        self.transactions.on_committed(self._committed_end)
