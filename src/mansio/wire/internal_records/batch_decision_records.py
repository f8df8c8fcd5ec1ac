"""Codec of the records of `__transaction_state` with the decisions about the batches of a query.

The key has the version 20113 and the query id, and the value has that version, too: Kafka's brokers and tools skip keys
and values of versions that they do not know. There is one record for each query, with its last decided batch and the
transactions that it aborts. The latter are a tagged field, which brokers before it skip; a value without it has none.

Invariants: as of `transaction_records`.
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
from mansio.wire.internal_records.transaction_records import TRANSACTION_STATE_TOPIC

DECISION_KEY_VERSION: Final = 20_113
DECISION_VALUE_VERSION: Final = 20_113

ABORTING_TAG: Final = 0

_BATCH: Final = struct.Struct(">qq")  # batch id, last update
_PRODUCER: Final = struct.Struct(">qh")  # producer id, epoch


NamedTransaction = tuple[str, int, int]


class DecisionValue(NamedTuple):
    """Value of a query. `transactions`: (transactional id, producer id, producer epoch) of the transactions that are
    still to be committed; `updated_ms`: time of the wall clock; `aborting`: as `transactions`, of those that are
    still to be aborted."""

    batch_id: int
    updated_ms: int
    transactions: tuple[NamedTransaction, ...]
    aborting: tuple[NamedTransaction, ...] = ()


def encode_decision_key(query_id: str) -> bytes:
    data = query_id.encode()
    return encode_integer(DECISION_KEY_VERSION, 2) + encode_integer(len(data), 2) + data


def decode_decision_key(data: bytes) -> str | None:
    """Decode a key; None for another key version."""
    reader = Reader(data, TRANSACTION_STATE_TOPIC)
    if reader.read_integer(2) != DECISION_KEY_VERSION:
        return None
    query_id = reader.read_int16_string()
    reader.check_end()
    return query_id


def encode_decision_value(value: DecisionValue) -> bytes:
    tagged = {ABORTING_TAG: _encode_transactions(value.aborting)} if value.aborting else {}
    return (
        encode_integer(DECISION_VALUE_VERSION, 2)
        + _BATCH.pack(value.batch_id, value.updated_ms)
        + _encode_transactions(value.transactions)
        + encode_tagged_fields(tagged)
    )


def _encode_transactions(transactions: tuple[NamedTransaction, ...]) -> bytes:
    return encode_array(
        encode_string(transactional_id) + _PRODUCER.pack(producer_id, producer_epoch) + NO_TAGGED_FIELDS
        for transactional_id, producer_id, producer_epoch in transactions
    )


def decode_decision_value(data: bytes) -> DecisionValue:
    """Decode a value. Raises `CorruptLog`, also for an unknown version: a decision must not be skipped."""
    reader = Reader(data, TRANSACTION_STATE_TOPIC)
    version = reader.read_integer(2)
    if version != DECISION_VALUE_VERSION:
        reader.raise_corrupt_log(f"unknown version {version} of a decision")
    batch_id, updated_ms = reader.unpack(_BATCH)
    transactions = _read_transactions(reader)
    tagged = reader.read_tagged_fields()
    reader.check_end()
    aborting: tuple[NamedTransaction, ...] = ()
    if ABORTING_TAG in tagged:
        nested = reader.nested_reader(tagged[ABORTING_TAG])
        aborting = _read_transactions(nested)
        nested.check_end()
    return DecisionValue(batch_id, updated_ms, transactions, aborting)


def _read_transactions(reader: Reader) -> tuple[NamedTransaction, ...]:
    def transaction() -> NamedTransaction:
        transactional_id = reader.read_string()
        producer_id, producer_epoch = reader.unpack(_PRODUCER)
        reader.read_tagged_fields()
        return transactional_id, producer_id, producer_epoch

    return reader.read_array(transaction)
