"""Records of `__share_group_state` in Kafka's formats: codec.

Each share partition has records of two kinds: a snapshot (kind 0) is the whole state, an update (kind 1) is a change. A
key starts with the kind (16 bits), whose higher byte is the number of the share partition, 0 for the only one and
therefore as in Kafka. It has no tagged fields. A value starts with the version, always 0, and has tagged
fields. A snapshot without value deletes the state. Data for which Kafka has no field (holder, end of a backoff,
dead-letter reservation, lease bound) is in tagged fields, which Kafka's readers skip.

An update is applied only after the snapshot with the same snapshot epoch. A snapshot of more than `CHANGES_PER_RECORD`
ranges is written as a snapshot record and update records, all in one batch of the log, so that the write is atomic.

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
    BACKLOG_QUEUES,
    NUMBER_MAX,
    DeadLetterReservation,
    DeadRange,
    Isolation,
    Producer,
    RedrivenRanges,
    ShareKey,
    StateBatch,
    Update,
)
from mansio.wire.headers import unsigned_varint as varint
from mansio.wire.internal_records.flexible_codec import (
    NO_TAGGED_FIELDS,
    Reader,
    encode_array,
    encode_bytes,
    encode_string,
    encode_tagged_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

SHARE_STATE_TOPIC: Final = "__share_group_state"

SNAPSHOT: Final = 0
UPDATE: Final = 1
"""Kinds of records: the whole state of a share partition, and a change of it."""

CHANGES_PER_RECORD: Final = 2000
"""Maximum number of ranges in a record of a snapshot."""

UNCHANGED: Final = -1
"""Value of the start offset, lease bound or done count of an update that does not change it."""

_NUMBER_SHIFT: Final = 8
_VERSION: Final = b"\x00\x00"
_DONE_TAG: Final = 0
_HOLDER_TAG: Final = 1000
_UNCOUNTED_TAG: Final = 1001
_DUE_TAG: Final = 1002
_RESERVATION_TAG: Final = 1003
_LEASE_TAG: Final = 1004
_RANGE_TAG: Final = 1005
LEASE_BOUND_TAG: Final = 1010
PRODUCER_TAG: Final = 1011
REDRIVES_TAG: Final = 1012
CHUNK_TAG: Final = 1013
DEAD_TAG: Final = 1014
DEAD_ADDED_TAG: Final = 1015
ISOLATIONS_TAG: Final = 1016

_KEY_END: Final = Struct(">16si")
_UPDATE_START: Final = Struct(">iiq")  # snapshot epoch, leader epoch, start offset
_SNAPSHOT_START: Final = Struct(">iiiq")  # snapshot epoch, state epoch, leader epoch, start offset
_TIMES: Final = Struct(">qq")  # times of creation and of the last write, wall clock, ms
_BATCH: Final = Struct(">qqbh")  # first, last, state, deliveries
_RESERVATION: Final = Struct(
    ">16siqhibq"
)  # topic, partition, producer id, its epoch, sequence, cause, first time
_PRODUCER: Final = Struct(">qh")
_SEQUENCE: Final = Struct(">16sii")
_ISOLATION: Final = Struct(">bqq")
_RANGE: Final = Struct(">qq")
_DEAD: Final = Struct(">qqhh")
_SHORT: Final = Struct(">h")
_LONG: Final = Struct(">q")
_INT: Final = Struct(">i")
_CHUNK: Final = Struct(">ii")
_PLAIN_TAIL: Final = Struct(">3si3sq")
_PLAIN_TAIL_START: Final = bytes((2, _DONE_TAG, 4))  # two tagged fields, one of four bytes,
_LEASE_BOUND_START: Final = varint(LEASE_BOUND_TAG) + b"\x08"  # and one of eight
_HOLDERS_CACHED_MAX: Final = 1024
_KEYS_CACHED_MAX: Final = 4096


class RecordKey(NamedTuple):
    """Decoded key of a record: its kind (`SNAPSHOT` or `UPDATE`) and its share partition."""

    kind: int
    key: ShareKey


class StateRecord(NamedTuple):
    """Decoded value of a record.

    `update`: the whole state, or a change; its `token` and `durable` are not stored. `state_epoch` and the times (wall
    clock, ms) are set in a snapshot, -1 in an update. `chunk`: index of this record within the records of one snapshot,
    and their number.
    """

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
            _SHORT.pack(kind | key.number << _NUMBER_SHIFT),
            _SHORT.pack(len(group)),
            group,
            _KEY_END.pack(key.topic_id, key.partition),
        )
    )


@lru_cache(_KEYS_CACHED_MAX)
def decode_key(raw: bytes) -> RecordKey | None:
    """Decode the key of a record; returns None for an unknown kind."""
    reader = Reader(raw, SHARE_STATE_TOPIC)
    number, kind = divmod(reader.read_integer(2), 1 << _NUMBER_SHIFT)
    if kind not in (SNAPSHOT, UPDATE) or not 0 <= number <= NUMBER_MAX:
        return None
    group = reader.read_int16_string()
    topic_id, partition = reader.unpack(_KEY_END)
    reader.check_end()
    return RecordKey(kind, ShareKey(group, topic_id, partition, number))


# ---------------------------------------------------------------------- values


def encode_update(
    snapshot_epoch: int, leader_epoch: int, update: Update, chunk: tuple[int, int] = (0, 1)
) -> bytes:
    """Encode the value of an update record (kind 1); `update.is_snapshot` is ignored."""
    return b"".join(
        (
            _VERSION,
            _UPDATE_START.pack(snapshot_epoch, leader_epoch, update.start_offset),
            encode_changes(update.changes),
            _encode_plain_tail(update)
            if chunk == (0, 1) and _is_plain(update)
            else _encode_tail(update, chunk),
        )
    )


def _is_plain(update: Update) -> bool:
    """Whether the done count and the lease bound are the only tagged fields, which is the most frequent case."""
    return (
        update.producer is None
        and update.redrives is None
        and update.dead_ranges is None
        and not update.added_dead_ranges
        and update.isolations is None
        and update.done_count != UNCHANGED
        and update.lease_bound != UNCHANGED
    )


def _encode_plain_tail(update: Update) -> bytes:
    """Encode the tagged fields of a plain update, faster than `_encode_tail`."""
    return _PLAIN_TAIL.pack(_PLAIN_TAIL_START, update.done_count, _LEASE_BOUND_START, update.lease_bound)


def _encode_tail(update: Update, chunk: tuple[int, int]) -> bytes:
    fields = encode_update_tags(update)
    if chunk != (0, 1):
        fields[CHUNK_TAG] = _CHUNK.pack(*chunk)
    return encode_tagged_fields(fields)


def encode_snapshot(stored: StateRecord) -> Iterator[tuple[int, bytes]]:
    """Encode a whole state; yields kind and value of each record, all of which belong into one batch. `stored.chunk` is
    ignored."""
    changes, update = stored.update.changes, stored.update
    count = max(-(-len(changes) // CHANGES_PER_RECORD), 1)
    fields = encode_update_tags(update)
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
                encode_tagged_fields(fields),
            )
        ),
    )
    for number in range(1, count):
        first = number * CHANGES_PER_RECORD
        more = Update(0, False, UNCHANGED, UNCHANGED, UNCHANGED, changes[first : first + CHANGES_PER_RECORD])
        yield UPDATE, encode_update(stored.snapshot_epoch, stored.leader_epoch, more, (number, count))


def decode_value(kind: int, raw: bytes) -> StateRecord:
    """Decode the value of a record of this kind."""
    reader = Reader(raw, SHARE_STATE_TOPIC)
    version = reader.read_integer(2)
    if version != 0:
        reader.raise_corrupt_log(f"unknown value version {version}")
    state_epoch = created_ms = written_ms = -1
    if kind == SNAPSHOT:
        snapshot_epoch, state_epoch, leader_epoch, start_offset = reader.unpack(_SNAPSHOT_START)
        created_ms, written_ms = reader.unpack(_TIMES)
    else:
        snapshot_epoch, leader_epoch, start_offset = reader.unpack(_UPDATE_START)
    changes = read_changes(reader)
    fields = reader.read_tagged_fields()
    reader.check_end()
    chunk = reader.unpack_field(_CHUNK, fields[CHUNK_TAG]) if CHUNK_TAG in fields else (0, 1)
    return StateRecord(
        snapshot_epoch,
        leader_epoch,
        decode_update(reader, start_offset, changes, fields, snapshot=kind == SNAPSHOT),
        state_epoch,
        created_ms,
        written_ms,
        (chunk[0], chunk[1]),
    )


# ---------------------------------------------------------------------- encodings also used between brokers


def encode_changes(changes: Iterable[StateBatch]) -> bytes:
    """Encode state batches as an array."""
    pieces = [_encode_batch(change) for change in changes]
    return b"".join((varint(len(pieces) + 1), *pieces))


def read_changes(reader: Reader) -> tuple[StateBatch, ...]:
    """Decode an array of state batches. Raises `CorruptLog`."""
    return reader.read_array(lambda: _read_batch(reader))


def encode_update_tags(update: Update) -> dict[int, bytes]:
    """Encode the tagged fields of an update's value, by tag."""
    fields: dict[int, bytes] = {}
    if update.done_count != UNCHANGED:
        fields[_DONE_TAG] = _INT.pack(update.done_count)
    if update.lease_bound != UNCHANGED:
        fields[LEASE_BOUND_TAG] = _LONG.pack(update.lease_bound)
    if update.producer is not None:
        fields[PRODUCER_TAG] = _encode_producer(update.producer)
    if update.redrives is not None:
        fields[REDRIVES_TAG] = encode_array(_encode_redrive(each) for each in update.redrives)
    if update.dead_ranges is not None:
        fields[DEAD_TAG] = encode_array(_DEAD.pack(*each) for each in update.dead_ranges)
    if update.added_dead_ranges:
        fields[DEAD_ADDED_TAG] = encode_array(_DEAD.pack(*each) for each in update.added_dead_ranges)
    if update.isolations is not None:
        fields[ISOLATIONS_TAG] = encode_array(_encode_isolation(each) for each in update.isolations)
    return fields


def decode_update(
    reader: Reader,
    start_offset: int,
    changes: tuple[StateBatch, ...],
    fields: dict[int, bytes],
    *,
    snapshot: bool,
    token: int = 0,
    durable: bool = False,
) -> Update:
    """Build an update from decoded ranges and tagged fields. Raises `CorruptLog`; `reader` names the record in the
    message."""
    done, lease_bound = fields.get(_DONE_TAG), fields.get(LEASE_BOUND_TAG)
    producer, redrives, dead = fields.get(PRODUCER_TAG), fields.get(REDRIVES_TAG), fields.get(DEAD_TAG)
    added_dead_ranges, isolations = fields.get(DEAD_ADDED_TAG), fields.get(ISOLATIONS_TAG)
    return Update(
        token,
        durable,
        start_offset,
        UNCHANGED if lease_bound is None else reader.unpack_field(_LONG, lease_bound)[0],
        UNCHANGED if done is None else reader.unpack_field(_INT, done)[0],
        changes,
        snapshot,
        None if dead is None else _read_all(reader, dead, _read_dead),
        None if redrives is None else _read_all(reader, redrives, _read_redrive),
        None if producer is None else _read_producer(reader.nested_reader(producer)),
        () if added_dead_ranges is None else _read_all(reader, added_dead_ranges, _read_dead),
        None if isolations is None else _read_all(reader, isolations, _read_isolation),
    )


def _encode_batch(change: StateBatch) -> bytes:
    first, last, state, deliveries, uncounted_deliveries, holder, due_ms, lease_ms, is_range, reservation = (
        change
    )
    start = _BATCH.pack(first, last, state, deliveries)
    if not uncounted_deliveries and due_ms == lease_ms == -1 and reservation is None and not is_range:
        return start + _holder_tags(holder)
    fields: dict[int, bytes] = {}
    if holder:
        fields[_HOLDER_TAG] = encode_string(holder)
    if change.uncounted_deliveries:
        fields[_UNCOUNTED_TAG] = _SHORT.pack(change.uncounted_deliveries)
    if change.due_ms != -1:
        fields[_DUE_TAG] = _LONG.pack(change.due_ms)
    if lease_ms != -1:
        fields[_LEASE_TAG] = _LONG.pack(lease_ms)
    if change.reservation is not None:
        fields[_RESERVATION_TAG] = _encode_reservation(change.reservation)
    if is_range:
        fields[_RANGE_TAG] = b""
    return start + (encode_tagged_fields(fields) if fields else NO_TAGGED_FIELDS)


@lru_cache(_HOLDERS_CACHED_MAX)
def _holder_tags(holder: str) -> bytes:
    """Encode the tagged fields of a range that has no tagged field but the holder."""
    return encode_tagged_fields({_HOLDER_TAG: encode_string(holder)}) if holder else NO_TAGGED_FIELDS


def _read_batch(reader: Reader) -> StateBatch:
    first, last, state, deliveries = reader.unpack(_BATCH)
    fields = reader.read_tagged_fields()
    if not 0 <= first <= last or not 0 <= state <= ARCHIVED or deliveries < 0:
        reader.raise_corrupt_log("invalid range of offsets, state or delivery count")
    if not fields:
        return StateBatch(first, last, state, deliveries)
    holder, uncounted_deliveries = fields.get(_HOLDER_TAG), fields.get(_UNCOUNTED_TAG)
    due, reservation = fields.get(_DUE_TAG), fields.get(_RESERVATION_TAG)
    lease = fields.get(_LEASE_TAG)
    return StateBatch(
        first,
        last,
        state,
        deliveries,
        0 if uncounted_deliveries is None else reader.unpack_field(_SHORT, uncounted_deliveries)[0],
        "" if holder is None else _read_text(reader.nested_reader(holder)),
        -1 if due is None else reader.unpack_field(_LONG, due)[0],
        -1 if lease is None else reader.unpack_field(_LONG, lease)[0],
        _RANGE_TAG in fields,
        None if reservation is None else _read_reservation(reader.nested_reader(reservation)),
    )


def _encode_reservation(reservation: DeadLetterReservation) -> bytes:
    """Return the producer id, epoch and sequence reserved for the copy to the dead-letter topic, as bytes."""
    start = _RESERVATION.pack(
        reservation.topic_id,
        reservation.partition,
        reservation.producer_id,
        reservation.epoch,
        reservation.sequence,
        reservation.cause,
        reservation.archiving_since_ms,
    )
    return b"".join(
        (start, encode_string(reservation.reason), encode_string(reservation.consumer), NO_TAGGED_FIELDS)
    )


def _read_reservation(reader: Reader) -> DeadLetterReservation:
    topic_id, partition, producer_id, epoch, sequence, cause, archiving_since_ms = reader.unpack(_RESERVATION)
    reason, consumer = reader.read_string(), reader.read_string()
    reader.read_tagged_fields()
    reader.check_end()
    return DeadLetterReservation(
        topic_id, partition, producer_id, epoch, sequence, cause, reason, consumer, archiving_since_ms
    )


def _encode_producer(producer: Producer) -> bytes:
    sequences = encode_array(_SEQUENCE.pack(*each) for each in producer.sequences)
    return _PRODUCER.pack(producer.producer_id, producer.epoch) + sequences + NO_TAGGED_FIELDS


def _read_producer(reader: Reader) -> Producer:
    producer_id, epoch = reader.unpack(_PRODUCER)
    sequences = reader.read_array(lambda: reader.unpack(_SEQUENCE))
    reader.read_tagged_fields()
    reader.check_end()
    return Producer(producer_id, epoch, sequences)


def _encode_redrive(redrive: RedrivenRanges) -> bytes:
    return encode_string(redrive.redrive_id) + encode_array(_RANGE.pack(*each) for each in redrive.ranges)


def _read_redrive(reader: Reader) -> RedrivenRanges:
    return RedrivenRanges(reader.read_string(), reader.read_array(lambda: reader.unpack(_RANGE)))


def _read_dead(reader: Reader) -> DeadRange:
    return DeadRange(*reader.unpack(_DEAD))


def _encode_isolation(isolation: Isolation) -> bytes:
    number, first, end, header, key = isolation
    return _ISOLATION.pack(number, first, end) + encode_string(header) + encode_bytes(key)


def _read_isolation(reader: Reader) -> Isolation:
    number, first, end = reader.unpack(_ISOLATION)
    isolation = Isolation(number, first, end, reader.read_string(), reader.read_bytes())
    if number not in BACKLOG_QUEUES or not 0 <= first <= end:
        reader.raise_corrupt_log("invalid backlog queue or range of offsets")
    return isolation


def _read_text(reader: Reader) -> str:
    value = reader.read_string()
    reader.check_end()
    return value


def _read_all(reader: Reader, raw: bytes, item: Callable[[Reader], T]) -> tuple[T, ...]:
    """Decode an array that takes a whole tagged field."""
    inside = reader.nested_reader(raw)
    items = inside.read_array(lambda: item(inside))
    inside.check_end()
    return items
