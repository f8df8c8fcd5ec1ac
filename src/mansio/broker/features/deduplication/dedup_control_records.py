"""Control batches by which a partition's log stores ids of records (docs/internals/file-format.md). The value of the
first record is one of:

    IDS        the ids of the records in the next batch of the log, and when the leader accepted them. Valid only if
               that batch follows directly and has the CRC named here, so that ids and records are stored together or
               not at all.
    REPEATED   nothing: takes the place of a batch of which all records are repeats. It has the producer's id, epoch and
               last sequence, so that the next batch of an idempotent producer is in order.
    COPIED     copies of ids from the start of the log, which may then be deleted.

An id is stored as its key (`key_of`).
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
from mansio.wire.batch.dedup_header import KEY_BYTES
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader

VALUE_VERSION: Final = 1

_IDS_HEAD: Final = struct.Struct(">BIqI")  # version, number of ids, time of acceptance, CRC of the next batch
_COPIED_HEAD: Final = struct.Struct(">BIqq")  # version, number of ids, first copy, latest time
_REPEATED: Final = struct.Struct(">B")


class DedupControlType(IntEnum):
    """Types of control records."""

    IDS = 20011
    REPEATED = 20012
    COPIED = 20013


class AcceptedIds(NamedTuple):
    """Content of a control batch IDS. `positions`: of the records among the offsets of the next batch, which has this
    `crc`. `accepted_ms`: ms since the Unix epoch."""

    keys: Sequence[bytes]
    positions: Sequence[int]
    accepted_ms: int
    crc: int


class CopiedIds(NamedTuple):
    """Content of a control batch COPIED: for each id its key, the offset of its first record, and the time of its
    acceptance.

    In the last of the batches that are written together, control batches from offset `first_copy` on have all ids that
    were accepted at or before `until_ms`; in the others, both are -1."""

    keys: Sequence[bytes]
    offsets: Sequence[int]
    accepted_ms: Sequence[int]
    first_copy: int = -1
    until_ms: int = -1


def encode_ids(ids: AcceptedIds) -> bytes:
    """Encode the control batch that precedes the batch with these records."""
    count = len(ids.keys)
    head = _IDS_HEAD.pack(VALUE_VERSION, count, ids.accepted_ms, ids.crc)
    value = b"".join((head, *ids.keys, struct.pack(f">{count}I", *ids.positions)))
    return encode_control_batch(DedupControlType.IDS, value)


def encode_repeated(header: BatchHeader) -> bytes:
    """Encode the control batch for a batch with this header of which all records are repeats."""
    key = control_key(DedupControlType.REPEATED)
    return build_batch(
        [(NO_TIMESTAMP_MS, key, _REPEATED.pack(VALUE_VERSION), ())],
        control=True,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=(header.base_sequence + header.last_offset_delta) & SEQUENCE_MAX,
    )


def encode_copied_ids(ids: CopiedIds) -> bytes:
    """Encode the control batch with copies of ids."""
    count = len(ids.keys)
    numbers = struct.pack(f">{2 * count}q", *ids.offsets, *ids.accepted_ms)
    value = b"".join(
        (_COPIED_HEAD.pack(VALUE_VERSION, count, ids.first_copy, ids.until_ms), *ids.keys, numbers)
    )
    return encode_control_batch(DedupControlType.COPIED, value)


def decode_dedup_control(batch: Buffer) -> AcceptedIds | CopiedIds | None:
    """Decode a control batch; None for REPEATED and for one of another kind. The CRC is not checked.

    Raises `CorruptMessage` if a batch of that kind is invalid."""
    record = read_control_record(batch)
    if record is None or record.type not in (DedupControlType.IDS, DedupControlType.COPIED):
        return None
    value = record.value
    try:
        if value[0] != VALUE_VERSION:
            raise CorruptMessage(f"version {value[0]} of a control record of type {record.type} is unknown")
        if record.type == DedupControlType.IDS:
            _, count, accepted_ms, crc = _IDS_HEAD.unpack_from(value)
            keys, position = _read_keys(value, _IDS_HEAD.size, count)
            positions = struct.unpack_from(f">{count}I", value, position)
            return AcceptedIds(keys, positions, accepted_ms, crc)
        _, count, first_copy, until_ms = _COPIED_HEAD.unpack_from(value)
        keys, position = _read_keys(value, _COPIED_HEAD.size, count)
        numbers = struct.unpack_from(f">{2 * count}q", value, position)
        return CopiedIds(keys, numbers[:count], numbers[count:], first_copy, until_ms)
    except (struct.error, IndexError) as error:
        raise CorruptMessage("a control record with ids is too short") from error


def _read_keys(value: memoryview, position: int, count: int) -> tuple[list[bytes], int]:
    end = position + KEY_BYTES * count
    if end > len(value):
        raise CorruptMessage(f"{count} ids in a control record of {len(value)} bytes")
    data = bytes(value[position:end])
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)], end
