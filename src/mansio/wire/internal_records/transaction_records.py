"""Codec of the records of `__transaction_state`, in Kafka's formats.

The key is the transactional id (key version 0); a record without a value deletes the transactional id. Key version
20113 is Mansio's own (`batch_decision_records`): Kafka's tools skip keys of unknown versions.

Invariants:
* Decoding an encoded key or value returns an equal one. Version 1 of the value is written; versions 0 and 1 are read.
* Decoding malformed bytes raises `CorruptLog` and nothing else, because they come from the broker's own log.

Mansio adds tagged fields to the value, which Kafka's tools skip: the epoch before its last bump, so that a repeated
request is recognized after a change of the coordinator, too; the time since which a transaction is held; the timeout
that the client has asked for, if the transaction is held: its timeout is then `HELD_TIMEOUT_MS`, as Kafka stores one
of a two-phase commit (KIP-939). Kafka's next producer epoch, and a client's timeout without the time since which the
transaction is held, come from earlier versions, in which a later producer could take a transaction over: the longer
timeout of the two applies to it.

Source: TransactionLogKey/Value.json of Apache Kafka; version 1 is the flexible one (KIP-890).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from mansio.wire.internal_records.flexible_codec import (
    NO_TAGGED_FIELDS,
    Reader,
    encode_array,
    encode_integer,
    encode_string,
    encode_tagged_fields,
)

TRANSACTION_STATE_TOPIC: Final = "__transaction_state"

KEY_VERSION: Final = 0
VALUE_VERSION: Final = 1
_FLEXIBLE: Final = 1

PREVIOUS_PRODUCER_ID_TAG: Final = 0
NEXT_PRODUCER_ID_TAG: Final = 1
CLIENT_VERSION_TAG: Final = 2
NEXT_PRODUCER_EPOCH_TAG: Final = 3
LAST_PRODUCER_EPOCH_TAG: Final = 20_100
HELD_MS_TAG: Final = 20_101
CLIENT_TIMEOUT_TAG: Final = 20_102
"""Mansio's own tagged fields: these and `LAST_PRODUCER_EPOCH_TAG`."""

HELD_TIMEOUT_MS: Final = (1 << 31) - 1
NO_TIME: Final = -1

NO_ID: Final = -1
NO_EPOCH: Final = -1

_FIXED: Final = struct.Struct(">qhib")  # producer id, epoch, timeout, status
_TIMES: Final = struct.Struct(">qq")  # last update, start


class TransactionValue(NamedTuple):
    """Value of a transactional id.

    `status`: number of the state, as in Kafka; `partitions`: topic -> partition indexes, None if the transaction has
    ended or has not begun; `updated_ms`, `started_ms`: times of the wall clock, `started_ms` -1 without a transaction;
    `client_version`: transaction version of the client (KIP-890); `held_ms`: time since which the transaction is held,
    -1 if it is not; `next_producer_epoch`: 0 with a next producer id; higher, or in an open transaction, in records of
    earlier versions only.
    """

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    status: int
    partitions: tuple[tuple[str, tuple[int, ...]], ...] | None
    updated_ms: int
    started_ms: int
    previous_producer_id: int = NO_ID
    next_producer_id: int = NO_ID
    client_version: int = 0
    next_producer_epoch: int = NO_EPOCH
    last_producer_epoch: int = NO_EPOCH
    held_ms: int = NO_TIME


def encode_key(transactional_id: str) -> bytes:
    data = transactional_id.encode()
    return encode_integer(KEY_VERSION, 2) + encode_integer(len(data), 2) + data


def decode_key(data: bytes) -> str | None:
    """Decode a key; None for an unknown key version, whose record callers skip, as in Kafka."""
    reader = Reader(data, TRANSACTION_STATE_TOPIC)
    if reader.read_integer(2) != KEY_VERSION:
        return None
    transactional_id = reader.read_int16_string()
    reader.check_end()
    return transactional_id


def encode_value(value: TransactionValue, version: int = VALUE_VERSION) -> bytes:
    """Encode a value. Version 0 has no fields from `previous_producer_id` on."""
    is_held = version >= _FLEXIBLE and value.held_ms != NO_TIME
    timeout_ms = HELD_TIMEOUT_MS if is_held else value.timeout_ms
    head = encode_integer(version, 2) + _FIXED.pack(
        value.producer_id, value.producer_epoch, timeout_ms, value.status
    )
    times = _TIMES.pack(value.updated_ms, value.started_ms)
    if version < _FLEXIBLE:
        return head + _encode_partitions(value.partitions) + times
    partitions = NO_TAGGED_FIELDS  # the length 0 is null
    if value.partitions is not None:
        partitions = encode_array(
            encode_string(topic)
            + encode_array(encode_integer(index, 4) for index in indexes)
            + NO_TAGGED_FIELDS
            for topic, indexes in value.partitions
        )
    tagged = {
        tag: encode_integer(number, width)
        for tag, number, default, width in (
            (PREVIOUS_PRODUCER_ID_TAG, value.previous_producer_id, NO_ID, 8),
            (NEXT_PRODUCER_ID_TAG, value.next_producer_id, NO_ID, 8),
            (CLIENT_VERSION_TAG, value.client_version, 0, 2),
            (NEXT_PRODUCER_EPOCH_TAG, value.next_producer_epoch, NO_EPOCH, 2),
            (LAST_PRODUCER_EPOCH_TAG, value.last_producer_epoch, NO_EPOCH, 2),
            (HELD_MS_TAG, value.held_ms, NO_TIME, 8),
        )
        if number != default
    }
    if timeout_ms != value.timeout_ms:
        tagged[CLIENT_TIMEOUT_TAG] = encode_integer(value.timeout_ms, 4)
    return head + partitions + times + encode_tagged_fields(tagged)


def _encode_partitions(partitions: tuple[tuple[str, tuple[int, ...]], ...] | None) -> bytes:
    if partitions is None:
        return encode_integer(-1, 4)
    pieces = [encode_integer(len(partitions), 4)]
    for topic, indexes in partitions:
        name = topic.encode()
        pieces += (encode_integer(len(name), 2), name, encode_integer(len(indexes), 4))
        pieces += (encode_integer(index, 4) for index in indexes)
    return b"".join(pieces)


def decode_value(data: bytes) -> TransactionValue:
    """Decode a value. Raises `CorruptLog`, also for an unknown version: the record must not be skipped, because it may
    be the decision of a transaction."""
    reader = Reader(data, TRANSACTION_STATE_TOPIC)
    version = reader.read_integer(2)
    if not 0 <= version <= VALUE_VERSION:
        reader.raise_corrupt_log(f"unknown value version {version}")
    reader.is_flexible = version >= _FLEXIBLE
    producer_id, epoch, timeout_ms, status = reader.unpack(_FIXED)
    partitions = _read_partitions(reader)
    updated_ms, started_ms = reader.unpack(_TIMES)
    tagged = reader.read_tagged_fields()
    reader.check_end()

    def number(tag: int, default: int, width: int) -> int:
        if tag not in tagged:
            return default
        nested = reader.nested_reader(tagged[tag])
        found = nested.read_integer(width)
        nested.check_end()
        return found

    client_timeout_ms = number(CLIENT_TIMEOUT_TAG, timeout_ms, 4)
    held_ms = number(HELD_MS_TAG, NO_TIME, 8)
    return TransactionValue(
        producer_id,
        epoch,
        timeout_ms if held_ms == NO_TIME else client_timeout_ms,
        status,
        partitions,
        updated_ms,
        started_ms,
        number(PREVIOUS_PRODUCER_ID_TAG, NO_ID, 8),
        number(NEXT_PRODUCER_ID_TAG, NO_ID, 8),
        number(CLIENT_VERSION_TAG, 0, 2),
        number(NEXT_PRODUCER_EPOCH_TAG, NO_EPOCH, 2),
        number(LAST_PRODUCER_EPOCH_TAG, NO_EPOCH, 2),
        held_ms,
    )


def _read_partitions(reader: Reader) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    def topic() -> tuple[str, tuple[int, ...]]:
        found = reader.read_string(), reader.read_int32_array()
        reader.read_tagged_fields()
        return found

    return reader.read_nullable_array(topic)
