"""Producer state of one partition (Kafka `ProducerStateManager`), which detects batches that are sent twice.

A `ProducerTable` stores, per producer id, the epoch and the last five batches (a Java producer has at most five
requests in flight: KIP-98), and decides before an append whether a batch is the next one, a duplicate, or out of order.

Invariants:
* The table is a view of the log. Replaying the headers of all batches through `record` rebuilds the table; a snapshot
  (`to_bytes`) only saves time.
* `check` changes nothing. Only `record`, called after the append, does.
* An unknown producer may start at any sequence (KIP-360, as Kafka since 2.5): retention may have removed its batches.
  Consequence: a producer expires after `expiration_ms` without a batch, or when it is the oldest of more than
  `producers_max` without an open transaction; a duplicate of an earlier batch is then not detected.
* A producer with an open transaction neither expires nor is evicted: its marker must still end the transaction.
* Producers are ordered by their last batch, so that expiry and eviction only read those that they remove, and those
  with open transactions. Eviction may move the latter behind others; the marker moves them to the end.
* A marker of a transaction with a higher epoch fences all earlier batches of the producer; its next batch then has
  sequence 0 (KIP-890).
"""

from __future__ import annotations

import struct
import zlib
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    CorruptLog,
    InvalidProducerEpoch,
    InvalidRecord,
    OutOfOrderSequence,
    TransactionCoordinatorFenced,
)
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mansio.wire.batch.record_batch import BatchHeader

NO_COORDINATOR: Final = -1
"""Coordinator epoch of a producer without transaction markers, as in Kafka."""

BATCHES_RETAINED: Final = 5
"""Number of batches kept per producer."""
DEFAULT_EXPIRATION_MS: Final = 24 * 60 * 60 * 1000
DEFAULT_PRODUCERS_MAX: Final = 20_000

_MAGIC: Final = b"MPRD"
_VERSION: Final = 2
_VERSION_WITHOUT_MARKERS: Final = 1
_HEAD = struct.Struct(">4sHqI")  # magic, version, end offset, number of producers
_PRODUCER_V1 = struct.Struct(">qhqB")  # id, epoch, last seen ms, number of batches
_PRODUCER = struct.Struct(">qhqBi?")  # and coordinator epoch, whether the next sequence is 0
_BATCH = struct.Struct(">iiqiq")  # first and last sequence, base offset, last offset delta, timestamp ms
_CHECKSUM = struct.Struct(">I")


class Duplicate(NamedTuple):
    """Offsets and timestamp of a batch that is in the log already. The broker responds with them and does not append
    the batch again."""

    base_offset: int
    last_offset: int
    timestamp_ms: int


class BatchMetadata(NamedTuple):
    """One of the last batches of a producer, as Kafka's `BatchMetadata`."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset_delta: int
    timestamp_ms: int


class Producer:
    """State of one producer id. `batches`: its last batches in the current `epoch`, at most five, oldest first.
    `coordinator_epoch`: of its last transaction marker, `NO_COORDINATOR` if it has none. `starts_again`: a marker has
    begun the epoch, so its first sequence is 0."""

    __slots__ = ("batches", "coordinator_epoch", "epoch", "last_seen_ms", "starts_again")

    def __init__(self, epoch: int, last_seen_ms: int) -> None:
        self.epoch = epoch
        self.last_seen_ms = last_seen_ms
        self.batches: list[BatchMetadata] = []
        self.coordinator_epoch = NO_COORDINATOR
        self.starts_again = False


def last_sequence(base_sequence: int, last_offset_delta: int) -> int:
    """Return the sequence of a batch's last record. The sequence 2**31 - 1 is followed by 0."""
    return (base_sequence + last_offset_delta) & SEQUENCE_MAX


class ProducerTable:
    """Producer state of one partition, by producer id."""

    __slots__ = ("_producers", "evicted_count", "expiration_ms", "producers_max", "retained")

    def __init__(
        self, *, expiration_ms: int = DEFAULT_EXPIRATION_MS, producers_max: int = DEFAULT_PRODUCERS_MAX
    ) -> None:
        self.retained: Collection[int] = ()
        """Ids of the producers that neither expire nor are evicted, because they have open transactions."""
        self.expiration_ms = expiration_ms
        self.producers_max = producers_max
        self.evicted_count = 0  # producers evicted because there were too many
        self._producers: dict[int, Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def get(self, producer_id: int) -> Producer | None:
        """Return the state of a producer, None if it is unknown; callers must not change it."""
        return self._producers.get(producer_id)

    def items(self) -> Iterable[tuple[int, Producer]]:
        """Return all producers by id, least recently active first; callers must not change them."""
        return self._producers.items()

    def retained_batch_offsets(self) -> frozenset[int]:
        """Return the base offsets of all retained batches. The table can be rebuilt only from a log that contains these
        batches."""
        return frozenset(
            batch.base_offset for producer in self._producers.values() for batch in producer.batches
        )

    def check(self, header: BatchHeader, *, may_be_shorter: bool = False) -> Duplicate | None:
        """Check whether a client's batch may be appended. Returns None if it may, `Duplicate` if the log has the batch
        already. `may_be_shorter`: or if it has only its last records, because of a deduplication window: the batch in
        the log then begins with a later sequence.

        Raises `InvalidRecord` (an id without epoch or sequence), `InvalidProducerEpoch` (fenced by a newer instance of
        the producer) and `OutOfOrderSequence` (a gap, or a duplicate too old to be detected).
        """
        if header.producer_id < 0:
            return None
        if header.producer_epoch < 0 or header.base_sequence < 0:
            message = f"producer {header.producer_id} sent a batch without an epoch or sequence"
            raise InvalidRecord(message)
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return None
        if header.producer_epoch != producer.epoch:
            _check_new_epoch(header, producer)
            return None
        if not producer.batches:
            if producer.starts_again and header.base_sequence != 0:
                raise _wrong_first_sequence(header)
            return None
        last = last_sequence(header.base_sequence, header.last_offset_delta)
        for batch in producer.batches:
            if batch.last_sequence == last and (
                batch.base_sequence == header.base_sequence
                or (may_be_shorter and _is_part(batch.base_sequence, header))
            ):
                return Duplicate(
                    batch.base_offset, batch.base_offset + batch.last_offset_delta, batch.timestamp_ms
                )
        expected = (producer.batches[-1].last_sequence + 1) & SEQUENCE_MAX
        if header.base_sequence != expected:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} epoch {producer.epoch} sent sequence {header.base_sequence},"
                f" expected {expected}"
            )
        return None

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Check a batch or marker without a sequence. Raises `InvalidProducerEpoch` if the producer has a newer
        epoch."""
        producer = self._producers.get(producer_id)
        if producer is not None and epoch < producer.epoch:
            raise _old_epoch(producer_id, producer.epoch, epoch)

    def check_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        """Check the marker of a transaction. Raises `InvalidProducerEpoch`, and `TransactionCoordinatorFenced` if a
        later coordinator has written a marker for the producer."""
        self.check_epoch(producer_id, epoch)
        producer = self._producers.get(producer_id)
        if producer is not None and coordinator_epoch < producer.coordinator_epoch:
            raise TransactionCoordinatorFenced(
                f"coordinator epoch {coordinator_epoch} is older than {producer.coordinator_epoch}, which has written"
                f" a marker for producer {producer_id}"
            )

    def record_marker(self, header: BatchHeader, coordinator_epoch: int, now_ms: int) -> None:
        """Record the marker of a transaction, which may fence the earlier batches of its producer."""
        producer = self._producers.get(header.producer_id)
        is_bumped = producer is not None and producer.epoch < header.producer_epoch
        self.record(header, header.base_offset, now_ms)
        producer = self._producers.get(header.producer_id)
        if producer is not None:
            producer.coordinator_epoch = max(producer.coordinator_epoch, coordinator_epoch)
            producer.starts_again = producer.starts_again or is_bumped

    def record(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Record a batch that was appended at `base_offset`, or that a replay has read there.

        The batch is not checked, because the log is authoritative. `now_ms` is the broker's time at which the
        producer's expiry starts again; a client's clock must not control how long its state is kept.
        """
        if header.producer_id < 0:
            return
        producer = self._producers.pop(header.producer_id, None)
        if producer is None:
            producer = Producer(header.producer_epoch, now_ms)
        self._producers[header.producer_id] = producer  # now the most recent
        producer.last_seen_ms = now_ms
        if producer.epoch != header.producer_epoch:
            producer.epoch = header.producer_epoch
            producer.batches.clear()
            producer.starts_again = False
        if header.base_sequence < 0:
            self._evict()
            return  # a transaction marker and a batch of a coordinator have an epoch, but no sequence
        batches = producer.batches
        if len(batches) == BATCHES_RETAINED:
            del batches[0]
        batches.append(
            BatchMetadata(
                header.base_sequence,
                last_sequence(header.base_sequence, header.last_offset_delta),
                base_offset,
                header.last_offset_delta,
                header.max_timestamp_ms,
            )
        )
        self._evict()

    def _evict(self) -> None:
        producers, retained = self._producers, self.retained
        if len(producers) <= self.producers_max or len(producers) <= self.producers_max + len(retained):
            return
        for one in list(
            takewhile(retained.__contains__, producers)
        ):  # the next evictions do not read them again
            producers[one] = producers.pop(one)
        del producers[next(iter(producers))]
        self.evicted_count += 1

    def replay(self, headers: Iterable[BatchHeader], now_ms: int) -> None:
        """Record the batches of a log, given by their stored headers."""
        for header in headers:
            self.record(header, header.base_offset, now_ms)

    def expire(self, now_ms: int) -> int:
        """Remove producers without a batch for `expiration_ms`; returns their number. The caller calls this every few
        minutes."""
        expired: list[int] = []
        for producer_id, producer in self._producers.items():
            if now_ms - producer.last_seen_ms < self.expiration_ms:
                break
            if producer_id not in self.retained:
                expired.append(producer_id)
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    def newest_ms(self) -> int | None:
        """Return when the most recent producer was last seen; None without producers."""
        return max((producer.last_seen_ms for producer in self._producers.values()), default=None)

    def shift(self, by_ms: int, now_ms: int) -> None:
        """Move the times at which producers were last seen, to `now_ms` at most, because the clock was set: their age
        must not change with it."""
        for producer in self._producers.values():
            producer.last_seen_ms = min(producer.last_seen_ms + by_ms, now_ms)

    def to_bytes(self, end_offset: int) -> bytes:
        """Encode a snapshot of the table. `end_offset`: the table contains all batches below this offset. Without the
        markers of transactions it has version 1, which the first release reads (`is_first_version`)."""
        with_markers = any(
            each.starts_again or each.coordinator_epoch != NO_COORDINATOR for each in self._producers.values()
        )
        version = _VERSION if with_markers else _VERSION_WITHOUT_MARKERS
        pieces = [_HEAD.pack(_MAGIC, version, end_offset, len(self._producers))]
        for producer_id, producer in self._producers.items():
            known = (producer_id, producer.epoch, producer.last_seen_ms, len(producer.batches))
            if with_markers:
                pieces.append(_PRODUCER.pack(*known, producer.coordinator_epoch, producer.starts_again))
            else:
                pieces.append(_PRODUCER_V1.pack(*known))
            pieces += [_BATCH.pack(*batch) for batch in producer.batches]
        body = b"".join(pieces)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        *,
        expiration_ms: int = DEFAULT_EXPIRATION_MS,
        producers_max: int = DEFAULT_PRODUCERS_MAX,
    ) -> tuple[ProducerTable, int]:
        """Decode a snapshot. Returns the table, and the offset from which the log's headers have to be replayed into
        it.

        Raises `CorruptLog` if the bytes are not a whole snapshot; the caller then replays from the log start offset.
        """
        if len(data) < _HEAD.size + _CHECKSUM.size:
            raise CorruptLog("producer snapshot: too short")
        body = data[: -_CHECKSUM.size]
        if zlib.crc32(body) != _CHECKSUM.unpack_from(data, len(body))[0]:
            raise CorruptLog("producer snapshot: wrong checksum")
        magic, version, end_offset, count = _HEAD.unpack_from(body)
        if magic != _MAGIC or version not in (_VERSION_WITHOUT_MARKERS, _VERSION):
            raise CorruptLog(f"producer snapshot: unknown format {magic!r} version {version}")
        table = cls(expiration_ms=expiration_ms, producers_max=producers_max)
        position = _HEAD.size
        for _ in range(count):
            if version == _VERSION_WITHOUT_MARKERS:
                producer_id, epoch, last_seen_ms, batches = _PRODUCER_V1.unpack_from(body, position)
                position += _PRODUCER_V1.size
                producer = Producer(epoch, last_seen_ms)
            else:
                fields = _PRODUCER.unpack_from(body, position)
                position += _PRODUCER.size
                producer_id, epoch, last_seen_ms, batches = fields[:4]
                producer = Producer(epoch, last_seen_ms)
                producer.coordinator_epoch, producer.starts_again = fields[4:]
            for _ in range(batches):
                producer.batches.append(BatchMetadata(*_BATCH.unpack_from(body, position)))
                position += _BATCH.size
            table._producers[producer_id] = producer
        return table, end_offset


def is_first_version(snapshot: bytes) -> bool:
    """Return whether a snapshot has version 1."""
    return snapshot.startswith(_MAGIC + struct.pack(">H", _VERSION_WITHOUT_MARKERS))


def _is_part(base_sequence: int, header: BatchHeader) -> bool:
    """Return whether a batch contains a record with this sequence."""
    return (base_sequence - header.base_sequence) & SEQUENCE_MAX <= header.last_offset_delta


def _check_new_epoch(header: BatchHeader, producer: Producer) -> None:
    """Check a batch whose epoch is not the producer's current one. Raises `InvalidProducerEpoch` for an older epoch,
    and `OutOfOrderSequence` if a newer epoch does not start at sequence 0."""
    if header.producer_epoch < producer.epoch:
        raise _old_epoch(header.producer_id, producer.epoch, header.producer_epoch)
    if header.base_sequence != 0:
        raise _wrong_first_sequence(header)


def _old_epoch(producer_id: int, known: int, epoch: int) -> InvalidProducerEpoch:
    return InvalidProducerEpoch(f"producer {producer_id} has epoch {known}, the batch has {epoch}")


def _wrong_first_sequence(header: BatchHeader) -> OutOfOrderSequence:
    return OutOfOrderSequence(
        f"producer {header.producer_id} begins epoch {header.producer_epoch} with sequence"
        f" {header.base_sequence}, expected 0"
    )
