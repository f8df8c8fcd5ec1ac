"""Codec of end markers: the control batches that end a transaction in a partition, in Kafka's format (KIP-98).

The key of the control record is its version and type (0: abort, 1: commit), 16 bits each; the value is its version, 16
bits, and the coordinator epoch, 32 bits. The header of the batch has the producer id and epoch and no sequence.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage
from mansio.wire.batch.control_records import control_key, read_control_record
from mansio.wire.batch.record_batch import build_batch, read_header

if TYPE_CHECKING:
    from mansio.ports import Buffer

ABORT: Final = 0
COMMIT: Final = 1

_VALUE_VERSION: Final = 0
_VALUE: Final = struct.Struct(">hi")


class EndMarker(NamedTuple):
    """End of a producer's transaction in one partition. `coordinator_epoch`: leader epoch of the transaction
    coordinator that decided the result."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int


def encode_end_marker(marker: EndMarker, timestamp_ms: int) -> bytes:
    """Encode a marker as a control batch with the base offset 0."""
    key = control_key(COMMIT if marker.is_commit else ABORT)
    value = _VALUE.pack(_VALUE_VERSION, marker.coordinator_epoch)
    return build_batch(
        [(timestamp_ms, key, value, ())],
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        transactional=True,
        control=True,
    )


def decode_end_marker(batch: Buffer) -> EndMarker | None:
    """Decode a control batch; None if it is no end marker. The CRC is not checked. Raises `CorruptMessage`."""
    header = read_header(batch)
    if not header.is_control or header.record_count == 0:  # compaction removes the record and keeps the batch
        return None
    record = read_control_record(batch)
    if record is None or record.type not in (ABORT, COMMIT):
        return None
    if len(record.value) < _VALUE.size:
        raise CorruptMessage("the value of an end marker is too short")
    _, coordinator_epoch = _VALUE.unpack_from(record.value)
    return EndMarker(header.producer_id, header.producer_epoch, record.type == COMMIT, coordinator_epoch)
