"""Markers that end a transaction in a partition: control batches in Kafka's format (KIP-98).

A marker is a control batch with the transactional bit, the id and epoch of the producer, no sequence, and one record:
its key contains the version and the type (abort 0, commit 1), its value a version and the epoch of the transaction
coordinator. Mansio's own control batches do not have the transactional bit.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage
from mansio.wire.batch.control_records import control_key, read_control_record
from mansio.wire.batch.record_batch import build_batch, read_header

if TYPE_CHECKING:
    from mansio.ports import Buffer

ABORT_TYPE: Final = 0
COMMIT_TYPE: Final = 1

_VALUE: Final = struct.Struct(">hi")  # version, coordinator epoch
_VALUE_VERSION: Final = 0


class EndMarker(NamedTuple):
    """End of a producer's transaction in a partition. `producer_epoch`: batches of earlier epochs are fenced by it.
    `coordinator_epoch`: leader epoch of the transaction coordinator that decided the transaction. `bumps_epoch`: the
    batches of the transaction have an earlier epoch (transaction version 2); it is not stored."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int
    bumps_epoch: bool = False


def encode_end_marker(marker: EndMarker, timestamp_ms: int) -> bytes:
    """Encode a marker as a control batch with base offset 0. `timestamp_ms`: of its record."""
    key = control_key(COMMIT_TYPE if marker.is_commit else ABORT_TYPE)
    value = _VALUE.pack(_VALUE_VERSION, marker.coordinator_epoch)
    return build_batch(
        [(timestamp_ms, key, value, ())],
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        transactional=True,
        control=True,
    )


def decode_end_marker(batch: Buffer) -> EndMarker | None:
    """Decode a marker; None for another batch, also for another control batch, and for a marker whose record compaction
    has removed. The CRC is not checked. Raises `CorruptMessage`."""
    header = read_header(batch)
    if not (header.is_control and header.is_transactional and header.record_count):
        return None
    record = read_control_record(batch)
    if record is None or record.type not in (ABORT_TYPE, COMMIT_TYPE):
        return None
    if len(record.value) < _VALUE.size:
        raise CorruptMessage("the marker of a transaction is too short")
    _, coordinator_epoch = _VALUE.unpack_from(record.value)
    return EndMarker(header.producer_id, header.producer_epoch, record.type == COMMIT_TYPE, coordinator_epoch)
