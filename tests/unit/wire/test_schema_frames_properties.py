"""The frames of a batch against a simple implementation over decoded records: the same records are framed, not framed
or without a value, whatever their lengths, headers and codec are."""

from __future__ import annotations

import cProfile
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRecord, MansioError, MessageTooLarge
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX, InspectedBatch
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch
from mansio.wire.batch.schema_frames import (
    FRAMES_MAX,
    KEY_SCHEMA_ID_NAME,
    VALUE_SCHEMA_ID_NAME,
    FramedPart,
    SchemaFrames,
    read_schema_frames,
    schema_of,
)
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    Headers = tuple[tuple[str, bytes | None], ...]
    Given = tuple[bytes | None, bytes | None, Headers]

ID_7 = b"\0\0\0\0\7"
GUID = b"\1" + bytes(range(16))


def read(records: Sequence[Given], part: FramedPart, codec: Codec = Codec.NONE) -> SchemaFrames | None:
    batch = build_batch([(index, *record) for index, record in enumerate(records)], codec=codec)
    names = (KEY_SCHEMA_ID_NAME, VALUE_SCHEMA_ID_NAME)
    return read_schema_frames(InspectedBatch(batch, names), part, "t-0")


def frame_of(record: Given, part: FramedPart) -> bytes | None:
    """The frame of one record, as the module defines it: None for null, b"" if it is not framed."""
    key, value, headers = record
    content = key if part is FramedPart.KEY else value
    if content is None:
        return None
    found = [text or b"" for name, text in headers if name == f"__{part}_schema_id"]
    text = found[-1] if found else content
    size = {0: 5, 1: 17}.get(text[0] if text else -1, 1 << 30)
    return text[:size] if len(text) >= size else b""


def frames_by_record(found: SchemaFrames | None, count: int) -> list[bytes | None]:
    frames: list[bytes | None] = [None] * count
    for number, frame in enumerate(found.frames if found else ()):
        for index in found.indexes(number) if found else ():
            frames[index] = frame
    return frames


def id_frame(number: int) -> bytes:
    return b"\0" + number.to_bytes(4)


framed = st.one_of(
    st.builds(lambda number, rest: id_frame(number) + rest, st.integers(0, 3), st.binary(max_size=200)),
    st.builds(
        lambda number, rest: b"\1" + bytes([number]) * 16 + rest, st.integers(0, 2), st.binary(max_size=4)
    ),
)
contents = st.one_of(
    st.none(),
    framed,
    framed,
    st.binary(max_size=20),
    st.sampled_from([b"", b"\0", b"\0\0\0\0", GUID[:16], b"\2" + bytes(20)]),
)
names = st.sampled_from(["__key_schema_id", "__value_schema_id", "__value_schema_i", "other"])
headers_of_records = st.one_of(
    st.just(()), st.lists(st.tuples(names, contents), max_size=3).map(lambda found: tuple(found))
)
batches = st.lists(st.tuples(contents, contents, headers_of_records), min_size=1, max_size=40)
framed_batches = st.lists(
    st.tuples(framed, st.one_of(st.none(), framed), st.just(())), min_size=1, max_size=40
)


@settings(max_examples=examples(20, 100))
@given(
    st.one_of(batches, framed_batches),
    st.sampled_from(list(FramedPart)),
    st.sampled_from([Codec.NONE, Codec.LZ4]),
)
@example([(None, ID_7, ()), (None, ID_7[:4], ()), (None, ID_7, ())], FramedPart.VALUE, Codec.NONE)
@example([(None, None, ()), (None, ID_7 * 60, ()), (None, None, ())], FramedPart.VALUE, Codec.NONE)
@example([(None, b"\0", (("__value_schema_id", GUID),)), (None, ID_7, ())], FramedPart.VALUE, Codec.NONE)
def test_the_frames_of_a_batch_are_those_of_its_records(
    records: list[Given], part: FramedPart, codec: Codec
) -> None:
    expected = [frame_of(record, part) for record in records]
    unframed = [index for index, frame in enumerate(expected) if frame == b""]
    if unframed:
        with pytest.raises(InvalidRecord) as rejected:
            read(records, part, codec)
        assert [index for index, _ in rejected.value.record_errors] == unframed
        return
    found = read(records, part, codec)
    assert frames_by_record(found, len(records)) == expected
    assert (found is None) == (expected.count(None) == len(expected))


@settings(max_examples=examples(20, 100))
@given(
    framed_batches, st.integers(HEADER_BYTES, 1 << 12), st.integers(0, 255), st.sampled_from(list(FramedPart))
)
def test_damaged_records_raise_only_errors_of_records(
    records: list[Given], position: int, byte: int, part: FramedPart
) -> None:
    batch = bytearray(build_batch([(index, *record) for index, record in enumerate(records)]))
    batch[HEADER_BYTES + position % (len(batch) - HEADER_BYTES)] = byte
    with suppress(MansioError):
        read_schema_frames(InspectedBatch(bytes(batch)), part, "t-0")


def test_a_run_of_one_schema_is_one_entry() -> None:
    values = [ID_7 + bytes(index % 90) for index in range(1_000)]
    found = read([(None, value, ()) for value in values], FramedPart.VALUE)
    assert found is not None
    assert (found.frames, len(found.firsts)) == ((ID_7,), 1)


@pytest.mark.parametrize("header", [(), (("__value_schema_id", ID_7),)])
@pytest.mark.parametrize("lengths", [(3, 3), (3, 40, 100)])
def test_records_with_the_schema_of_the_one_before_take_no_call(
    lengths: Sequence[int], header: Headers
) -> None:
    """No call of a Python function, apart from the searches for runs of records of one layout."""
    calls = []
    for count in (64, 1_000):
        values = [ID_7 + bytes(lengths[index % len(lengths)]) for index in range(count)]
        batch = build_batch([(0, b"key", value, header) for value in values])
        inspected = InspectedBatch(batch)
        profile = cProfile.Profile(builtins=False)
        profile.runcall(read_schema_frames, inspected, FramedPart.VALUE, "t-0")
        calls.append(sum(row.callcount for row in profile.getstats()))
    assert calls[1] - calls[0] < (1_000 - 64) / 2, calls


def test_the_ids_of_frames_are_numbers_and_guids() -> None:
    assert schema_of(b"\0\xff\0\0\1") == 0xFF00_0001
    assert schema_of(GUID) == UUID(bytes=GUID[1:])


def test_a_batch_has_a_bounded_number_of_schemas() -> None:
    records: list[Given] = [(None, id_frame(number), ()) for number in range(FRAMES_MAX)]
    assert read(records, FramedPart.VALUE) is not None
    with pytest.raises(MessageTooLarge, match=f"more than {FRAMES_MAX} schemas"):
        read([*records, (None, id_frame(FRAMES_MAX), ())], FramedPart.VALUE)


def test_the_reported_records_are_bounded() -> None:
    with pytest.raises(InvalidRecord) as rejected:
        read([(None, b"plain", ())] * (REPORTED_RECORDS_MAX + 5), FramedPart.VALUE)
    assert len(rejected.value.record_errors) == REPORTED_RECORDS_MAX
