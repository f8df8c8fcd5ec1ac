"""Control batches by which a partition's log stores delayed records (docs/internals/file-format.md).

Kafka's clients skip control batches whose type they do not know, and replication, recovery and truncation treat them
like any other batch. The value of the first record of a batch is one of:

    ACCEPTED   the batch of a producer with delayed records, and when each of its records is due. The control batch has
               the producer's id, epoch and sequence and one record per record of the producer, so that it takes the
               same offsets. The id of a pending record is its offset in this batch.
    DELIVERED  ids that the next batch of the log delivers. Valid only if that batch follows directly and has the CRC
               named here, so a crash between the two leaves the records pending.
    CANCELLED  ids that are not delivered.
    MOVED      ids and their new due times.
    COPIED     copies of pending records from the start of the log, which may then be deleted; their ids stay the same.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage
from mansio.wire.batch.control_records import (
    NO_TIMESTAMP_MS,
    control_key,
    encode_control_batch,
    read_control_record,
)
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader, NewRecord

VALUE_VERSION: Final = 1

_VALUE_HEAD: Final = struct.Struct(">BI")  # version, number of ids or due times
_CRC: Final = struct.Struct(">I")


class DelayControlType(IntEnum):
    """Types of control records. Kafka's own begin at 0."""

    ACCEPTED = 20001
    DELIVERED = 20002
    CANCELLED = 20003
    MOVED = 20004
    COPIED = 20005


class DelayControlRecord(NamedTuple):
    """Content of a control batch.

    `ids`: of pending records; `due_ms`: due times in ms since the Unix epoch, for ACCEPTED, MOVED and COPIED one per
    id, `NOT_DELAYED_MS` for a record of an accepted batch that is not delayed; `crc`: of the batch with the delivered
    records; `batch`: with the pending records, for ACCEPTED and COPIED.
    """

    type: DelayControlType
    ids: Sequence[int]
    due_ms: Sequence[int] = ()
    crc: int = 0
    batch: memoryview = memoryview(b"")


def encode_accepted(batch: Buffer, header: BatchHeader, due_ms: Sequence[int]) -> bytes:
    """Encode the control batch for a producer's batch whose records are due at `due_ms`."""
    value = b"".join((_VALUE_HEAD.pack(VALUE_VERSION, len(due_ms)), _pack_numbers(due_ms), batch))
    key = control_key(DelayControlType.ACCEPTED)
    records: list[NewRecord] = [(NO_TIMESTAMP_MS, key, value, ())]
    records += [(NO_TIMESTAMP_MS, key, b"", ())] * (len(due_ms) - 1)
    return build_batch(
        records,
        control=True,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )


def encode_delivered(ids: Sequence[int], crc: int) -> bytes:
    """Encode the control batch that precedes the batch with this CRC, which contains the records `ids`."""
    return encode_control_batch(
        DelayControlType.DELIVERED,
        _VALUE_HEAD.pack(VALUE_VERSION, len(ids)) + _pack_numbers(ids) + _CRC.pack(crc),
    )


def encode_cancelled(ids: Sequence[int]) -> bytes:
    """Encode the control batch that cancels the pending records `ids`."""
    return encode_control_batch(
        DelayControlType.CANCELLED, _VALUE_HEAD.pack(VALUE_VERSION, len(ids)) + _pack_numbers(ids)
    )


def encode_moved(ids: Sequence[int], due_ms: Sequence[int]) -> bytes:
    """Encode the control batch that changes the due times of the pending records `ids`."""
    head = _VALUE_HEAD.pack(VALUE_VERSION, len(ids))
    return encode_control_batch(DelayControlType.MOVED, head + _pack_numbers(ids) + _pack_numbers(due_ms))


def encode_copied(ids: Sequence[int], due_ms: Sequence[int], batch: bytes) -> bytes:
    """Encode the control batch with copies of pending records; `batch` contains them in the order of `ids`."""
    head = _VALUE_HEAD.pack(VALUE_VERSION, len(ids))
    return encode_control_batch(
        DelayControlType.COPIED, head + _pack_numbers(ids) + _pack_numbers(due_ms) + batch
    )


def decode_delay_control(batch: Buffer) -> DelayControlRecord | None:
    """Decode a control batch; None if it is of another kind. The CRC is not checked.

    Raises `CorruptMessage` if a batch of that kind is invalid."""
    header = read_header(batch)
    found = read_control_record(batch)
    if found is None or found.type not in _TYPES:
        return None
    kind, value = DelayControlType(found.type), found.value
    try:
        value_version, count = _VALUE_HEAD.unpack_from(value)
        if value_version != VALUE_VERSION:
            raise CorruptMessage(f"version {value_version} of a control record of type {kind} is unknown")
        position = _VALUE_HEAD.size
        if kind is DelayControlType.ACCEPTED:
            due_ms, position = _unpack_numbers(value, position, count)
            if count != header.record_count:
                raise CorruptMessage(f"{count} due times in a control batch of {header.record_count} records")
            ids: Sequence[int] = range(header.base_offset, header.base_offset + count)
            return DelayControlRecord(kind, ids, due_ms, 0, _embedded(value, position))
        ids, position = _unpack_numbers(value, position, count)
        if kind is DelayControlType.DELIVERED:
            return DelayControlRecord(kind, ids, crc=_CRC.unpack_from(value, position)[0])
        if kind is DelayControlType.CANCELLED:
            return DelayControlRecord(kind, ids)
        due_ms, position = _unpack_numbers(value, position, count)
        if kind is DelayControlType.MOVED:
            return DelayControlRecord(kind, ids, due_ms)
        return DelayControlRecord(kind, ids, due_ms, 0, _embedded(value, position))
    except struct.error as error:
        raise CorruptMessage("a control record of delayed records is too short") from error


_TYPES: Final = frozenset(DelayControlType)


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f">{len(numbers)}q", *numbers)


def _unpack_numbers(value: memoryview, position: int, count: int) -> tuple[tuple[int, ...], int]:
    end = position + 8 * count
    if end > len(value):
        raise CorruptMessage(f"{count} numbers in a control record of {len(value)} bytes")
    return struct.unpack_from(f">{count}q", value, position), end


def _embedded(value: memoryview, position: int) -> memoryview:
    batch = value[position:]
    if len(batch) < HEADER_BYTES or read_header(batch).size != len(batch):
        raise CorruptMessage("a control record contains an incomplete batch")
    return batch
