"""Records of `__share_group_state` in Kafka's formats: codec.

Two kinds of records per share partition: a snapshot (kind 0) is its whole state, an update (kind 1) changes it. A key
starts with its kind, 16 bits, and is not flexible; a value starts with its version, always 0, and is. A snapshot
without value deletes the state. Data for which Kafka has no field (holder, end of a delay, dead-letter
reservation, lease bound) is in tagged fields, which Kafka's readers skip.

An update is effective only after the snapshot with the same epoch. A snapshot of more than `CHANGES_PER_RECORD`
ranges is a snapshot record of the first ones and updates with the others, all in one batch of the log, so that it
is atomic.

Invariants: `decode_*` returns what `encode_*` encoded; unknown tagged fields are skipped; malformed bytes raise
`CorruptLog` and nothing else. Brokers send each other ranges and tagged fields in the same encoding.

Source: ShareSnapshotKey/Value.json and ShareUpdateKey/Value.json of Apache Kafka 4.3 (KIP-932, KIP-1226).
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.state.share_partition.types import (
    ARCHIVED,
    DeadLetterReservation,
    DeadRange,
    Producer,
    Redrive,
    ShareKey,
    StateBatch,
    Update,
)
from mansio.wire.headers import unsigned_varint as varint
from mansio.wire.internal_records.flexible_codec import NO_TAGS, Reader, array, tags, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

TOPIC: Final = "__share_group_state"

SNAPSHOT: Final = 0
UPDATE: Final = 1

CHANGES_PER_RECORD: Final = 2000

UNCHANGED: Final = -1
"""Value of a start, lease bound or count that an update leaves unchanged."""

_VERSION: Final = b"\x00\x00"
_DONE_TAG: Final = 0
_HOLDER_TAG: Final = 1000
_FORGIVEN_TAG: Final = 1001
_DUE_TAG: Final = 1002
_TICKET_TAG: Final = 1003
LEASE_BOUND_TAG: Final = 1010
PRODUCER_TAG: Final = 1011
REDRIVES_TAG: Final = 1012
CHUNK_TAG: Final = 1013
DEAD_TAG: Final = 1014
DEAD_ADDED_TAG: Final = 1015

_KEY_END: Final = Struct(">16si")
_UPDATE_START: Final = Struct(">iiq")  # snapshot epoch, leader epoch, start offset
_SNAPSHOT_START: Final = Struct(">iiiq")  # snapshot epoch, state epoch, leader epoch, start offset
_TIMES: Final = Struct(">qq")  # created, written
_BATCH: Final = Struct(">qqbh")  # first, last, state, deliveries
_TICKET: Final = Struct(">16siqhibq")  # topic, partition, producer id, its epoch, sequence, cause, first time
_PRODUCER: Final = Struct(">qh")
_SEQUENCE: Final = Struct(">16sii")
_RANGE: Final = Struct(">qq")
_DEAD: Final = Struct(">qqhh")
_SHORT: Final = Struct(">h")
_LONG: Final = Struct(">q")
_INT: Final = Struct(">i")
_CHUNK: Final = Struct(">ii")
_NUMBERS: Final = Struct(">3si3sq")
_NUMBERS_START: Final = bytes((2, _DONE_TAG, 4))  # two tagged fields, one of four bytes,
_LEASE_BOUND_START: Final = varint(LEASE_BOUND_TAG) + b"\x08"  # and one of eight
_HOLDERS_KNOWN: Final = 1024
_KEYS_KNOWN: Final = 4096


class RecordKey(NamedTuple):
    """Share partition and kind of a record."""

    kind: int
    key: ShareKey


class StateRecord(NamedTuple):
    """Value of a record. `token` and `durable` of its `update` are not stored. `state_epoch` and the times (wall clock,
    ms) are set in a snapshot, -1 in an update. `chunk`: index of the record, and number of records, of one snapshot."""

    snapshot_epoch: int
    leader_epoch: int
    update: Update
    state_epoch: int = -1
    created_ms: int = -1
    written_ms: int = -1
    chunk: tuple[int, int] = (0, 1)


# ---------------------------------------------------------------------- keys


def encode_key(kind: int, key: ShareKey) -> bytes:
    group = key.group.encode()
    return b"".join(
        (
            _SHORT.pack(kind),
            _SHORT.pack(len(group)),
            group,
            _KEY_END.pack(key.topic_id, key.partition),
        )
    )


@lru_cache(_KEYS_KNOWN)
def decode_key(raw: bytes) -> RecordKey | None:
    """The key of a record; None for an unknown kind."""
    reader = Reader(raw, TOPIC)
    kind = reader.integer(2)
    if kind not in (SNAPSHOT, UPDATE):
        return None
    group = reader.short_text()
    topic_id, partition = _KEY_END.unpack(reader.take(_KEY_END.size))
    reader.end()
    return RecordKey(kind, ShareKey(group, topic_id, partition))


# ---------------------------------------------------------------------- values


def encode_update(
    snapshot_epoch: int, leader_epoch: int, update: Update, chunk: tuple[int, int] = (0, 1)
) -> bytes:
    """Value of kind 1; `update.snapshot` is ignored."""
    return b"".join(
        (
            _VERSION,
            _UPDATE_START.pack(snapshot_epoch, leader_epoch, update.start_offset),
            encode_changes(update.changes),
            _numbers(update) if chunk == (0, 1) and _is_plain(update) else _tail(update, chunk),
        )
    )


def _is_plain(update: Update) -> bool:
    """Whether only the two numbers are in tagged fields, the common case."""
    return (
        update.producer is None
        and update.redrives is None
        and update.dead is None
        and not update.dead_added
        and update.done_count != UNCHANGED
        and update.lease_bound != UNCHANGED
    )


def _numbers(update: Update) -> bytes:
    """`_tail` of a plain update."""
    return _NUMBERS.pack(_NUMBERS_START, update.done_count, _LEASE_BOUND_START, update.lease_bound)


def _tail(update: Update, chunk: tuple[int, int]) -> bytes:
    fields = update_tags(update)
    if chunk != (0, 1):
        fields[CHUNK_TAG] = _CHUNK.pack(*chunk)
    return tags(fields)


def encode_snapshot(stored: StateRecord) -> Iterator[tuple[int, bytes]]:
    """A whole state as kind and value of each record of one batch; `stored.chunk` is ignored."""
    changes, update = stored.update.changes, stored.update
    count = max(-(-len(changes) // CHANGES_PER_RECORD), 1)
    fields = update_tags(update)
    if count > 1:
        fields[CHUNK_TAG] = _CHUNK.pack(0, count)
    start = (stored.snapshot_epoch, stored.state_epoch, stored.leader_epoch, update.start_offset)
    yield (
        SNAPSHOT,
        b"".join(
            (
                _VERSION,
                _SNAPSHOT_START.pack(*start),
                _TIMES.pack(stored.created_ms, stored.written_ms),
                encode_changes(changes[:CHANGES_PER_RECORD]),
                tags(fields),
            )
        ),
    )
    for number in range(1, count):
        first = number * CHANGES_PER_RECORD
        more = Update(0, False, UNCHANGED, UNCHANGED, UNCHANGED, changes[first : first + CHANGES_PER_RECORD])
        yield UPDATE, encode_update(stored.snapshot_epoch, stored.leader_epoch, more, (number, count))


def decode_value(kind: int, raw: bytes) -> StateRecord:
    """The value of a record of this kind."""
    reader = Reader(raw, TOPIC)
    version = reader.integer(2)
    if version != 0:
        reader.fail(f"unknown value version {version}")
    state_epoch = created_ms = written_ms = -1
    if kind == SNAPSHOT:
        snapshot_epoch, state_epoch, leader_epoch, start_offset = _SNAPSHOT_START.unpack(
            reader.take(_SNAPSHOT_START.size)
        )
        created_ms, written_ms = _TIMES.unpack(reader.take(_TIMES.size))
    else:
        snapshot_epoch, leader_epoch, start_offset = _UPDATE_START.unpack(reader.take(_UPDATE_START.size))
    changes = read_changes(reader)
    fields = reader.tags()
    reader.end()
    chunk = _CHUNK.unpack(_exactly(reader, fields[CHUNK_TAG], _CHUNK)) if CHUNK_TAG in fields else (0, 1)
    return StateRecord(
        snapshot_epoch,
        leader_epoch,
        update_of(reader, start_offset, changes, fields, snapshot=kind == SNAPSHOT),
        state_epoch,
        created_ms,
        written_ms,
        (chunk[0], chunk[1]),
    )


# ---------------------------------------------------------------------- what brokers send each other, too


def encode_changes(changes: Iterable[StateBatch]) -> bytes:
    """The array of state batches."""
    return array(_batch(change) for change in changes)


def read_changes(reader: Reader) -> tuple[StateBatch, ...]:
    return reader.array(lambda: _read_batch(reader))


def update_tags(update: Update) -> dict[int, bytes]:
    """Tagged fields of the value of an update."""
    fields: dict[int, bytes] = {}
    if update.done_count != UNCHANGED:
        fields[_DONE_TAG] = _INT.pack(update.done_count)
    if update.lease_bound != UNCHANGED:
        fields[LEASE_BOUND_TAG] = _LONG.pack(update.lease_bound)
    if update.producer is not None:
        fields[PRODUCER_TAG] = _encode_producer(update.producer)
    if update.redrives is not None:
        fields[REDRIVES_TAG] = array(_encode_redrive(each) for each in update.redrives)
    if update.dead is not None:
        fields[DEAD_TAG] = array(_DEAD.pack(*each) for each in update.dead)
    if update.dead_added:
        fields[DEAD_ADDED_TAG] = array(_DEAD.pack(*each) for each in update.dead_added)
    return fields


def update_of(
    reader: Reader,
    start_offset: int,
    changes: tuple[StateBatch, ...],
    fields: dict[int, bytes],
    *,
    snapshot: bool,
    token: int = 0,
    durable: bool = False,
) -> Update:
    """The update of tagged fields; `reader` names the record in errors."""
    done, lease_bound = fields.get(_DONE_TAG), fields.get(LEASE_BOUND_TAG)
    producer, redrives, dead = fields.get(PRODUCER_TAG), fields.get(REDRIVES_TAG), fields.get(DEAD_TAG)
    dead_added = fields.get(DEAD_ADDED_TAG)
    return Update(
        token,
        durable,
        start_offset,
        UNCHANGED if lease_bound is None else _LONG.unpack(_exactly(reader, lease_bound, _LONG))[0],
        UNCHANGED if done is None else _INT.unpack(_exactly(reader, done, _INT))[0],
        changes,
        snapshot,
        None if dead is None else _read_all(reader, dead, _read_dead),
        None if redrives is None else _read_all(reader, redrives, _read_redrive),
        None if producer is None else _read_producer(reader.inside(producer)),
        () if dead_added is None else _read_all(reader, dead_added, _read_dead),
    )


def _batch(change: StateBatch) -> bytes:
    first, last, state, deliveries, uncounted_deliveries, holder, due_ms, reservation = change
    start = _BATCH.pack(first, last, state, deliveries)
    if not uncounted_deliveries and due_ms == -1 and reservation is None:
        return start + _holder_tags(holder)
    fields: dict[int, bytes] = {}
    if holder:
        fields[_HOLDER_TAG] = text(holder)
    if change.uncounted_deliveries:
        fields[_FORGIVEN_TAG] = _SHORT.pack(change.uncounted_deliveries)
    if change.due_ms != -1:
        fields[_DUE_TAG] = _LONG.pack(change.due_ms)
    if change.reservation is not None:
        fields[_TICKET_TAG] = _encode_ticket(change.reservation)
    return start + (tags(fields) if fields else NO_TAGS)


@lru_cache(_HOLDERS_KNOWN)
def _holder_tags(holder: str) -> bytes:
    """Tagged fields of a range with a holder only."""
    return tags({_HOLDER_TAG: text(holder)}) if holder else NO_TAGS


def _read_batch(reader: Reader) -> StateBatch:
    first, last, state, deliveries = _BATCH.unpack(reader.take(_BATCH.size))
    fields = reader.tags()
    if not 0 <= first <= last or not 0 <= state <= ARCHIVED or deliveries < 0:
        reader.fail("a range that cannot be")
    if not fields:
        return StateBatch(first, last, state, deliveries)
    holder, uncounted_deliveries = fields.get(_HOLDER_TAG), fields.get(_FORGIVEN_TAG)
    due, reservation = fields.get(_DUE_TAG), fields.get(_TICKET_TAG)
    return StateBatch(
        first,
        last,
        state,
        deliveries,
        0
        if uncounted_deliveries is None
        else _SHORT.unpack(_exactly(reader, uncounted_deliveries, _SHORT))[0],
        "" if holder is None else _read_text(reader.inside(holder)),
        -1 if due is None else _LONG.unpack(_exactly(reader, due, _LONG))[0],
        None if reservation is None else _read_ticket(reader.inside(reservation)),
    )


def _encode_ticket(reservation: DeadLetterReservation) -> bytes:
    start = _TICKET.pack(
        reservation.topic_id,
        reservation.partition,
        reservation.producer_id,
        reservation.epoch,
        reservation.sequence,
        reservation.cause,
        reservation.first_ms,
    )
    return b"".join((start, text(reservation.reason), text(reservation.consumer), NO_TAGS))


def _read_ticket(reader: Reader) -> DeadLetterReservation:
    topic_id, partition, producer_id, epoch, sequence, cause, first_ms = _TICKET.unpack(
        reader.take(_TICKET.size)
    )
    reason, consumer = reader.text(), reader.text()
    reader.tags()
    reader.end()
    return DeadLetterReservation(
        topic_id, partition, producer_id, epoch, sequence, cause, reason, consumer, first_ms
    )


def _encode_producer(producer: Producer) -> bytes:
    sequences = array(_SEQUENCE.pack(*each) for each in producer.sequences)
    return _PRODUCER.pack(producer.producer_id, producer.epoch) + sequences + NO_TAGS


def _read_producer(reader: Reader) -> Producer:
    producer_id, epoch = _PRODUCER.unpack(reader.take(_PRODUCER.size))
    sequences = reader.array(lambda: _SEQUENCE.unpack(reader.take(_SEQUENCE.size)))
    reader.tags()
    reader.end()
    return Producer(producer_id, epoch, sequences)


def _encode_redrive(redrive: Redrive) -> bytes:
    return text(redrive.redrive_id) + array(_RANGE.pack(*each) for each in redrive.ranges)


def _read_redrive(reader: Reader) -> Redrive:
    return Redrive(reader.text(), reader.array(lambda: _RANGE.unpack(reader.take(_RANGE.size))))


def _read_dead(reader: Reader) -> DeadRange:
    return DeadRange(*_DEAD.unpack(reader.take(_DEAD.size)))


def _read_text(reader: Reader) -> str:
    value = reader.text()
    reader.end()
    return value


def _read_all(reader: Reader, raw: bytes, item: Callable[[Reader], T]) -> tuple[T, ...]:
    """An array that fills a field."""
    inside = reader.inside(raw)
    items = inside.array(lambda: item(inside))
    inside.end()
    return items


def _exactly(reader: Reader, raw: bytes, shape: Struct) -> bytes:
    if len(raw) != shape.size:
        reader.fail("a tagged field of a wrong length")
    return raw
