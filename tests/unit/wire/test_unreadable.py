"""Errors of a batch: a wrong checksum is damage, and an intact batch that cannot be decoded is not."""

from __future__ import annotations

import struct

import pytest

from mansio.errors import DAMAGED_BATCH, UNREADABLE_CONTENT, UNREADABLE_OR_DAMAGED, MansioError
from mansio.wire.batch.record_batch import build_batch, check_stored_batch
from mansio.wire.batch.record_reader import read_records
from support.batch_contents import encoded_record, raw_batch

RECORD = encoded_record(0, b"value")


def error_of(batch: bytes) -> MansioError:
    """The error with which a broker's reader finds that it cannot read a batch."""
    try:
        check_stored_batch(batch)
        read_records(batch)
    except MansioError as error:
        return error
    pytest.fail("the batch can be read")


def changed(position: int, value: bytes) -> bytes:
    batch = bytearray(build_batch([(1, None, b"value", ())]))
    batch[position : position + len(value)] = value
    return bytes(batch)


@pytest.mark.parametrize(
    "batch",
    [changed(-1, b"\x01"), changed(8, struct.pack(">i", 1 << 20)), changed(16, b"\x01"), RECORD[:5]],
    ids=["content changed", "length changed", "format changed", "too short"],
)
def test_error_of_a_changed_batch_is_damage_and_no_content(batch: bytes) -> None:
    error = error_of(batch)
    assert isinstance(error, DAMAGED_BATCH)
    assert not isinstance(error, UNREADABLE_CONTENT)
    assert isinstance(error, UNREADABLE_OR_DAMAGED)


@pytest.mark.parametrize(
    "batch",
    [
        *(raw_batch(b"no such frame", 1, codec=codec) for codec in (1, 2, 3, 4, 5)),
        raw_batch(RECORD[:-1], 1),
        raw_batch(RECORD, 2),
    ],
)
def test_error_of_an_intact_batch_is_its_content(batch: bytes) -> None:
    error = error_of(batch)
    assert isinstance(error, UNREADABLE_CONTENT)
    assert isinstance(error, UNREADABLE_OR_DAMAGED)
