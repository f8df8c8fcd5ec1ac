"""The Arrow codec decodes the same records and raises for the same batches as `read_record_tuples`, and encodes the
same bytes as `build_batch`."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import CorruptMessage, InvalidRecord, MansioError
from mansio.spark.arrow.decode import OFFSET_MAX, decode_batches
from mansio.spark.arrow.encode import EncodedBatch, ProducerSequences, encode_batches, partitions_for_keys
from mansio.spark.arrow.readable import ReadableRows, UnreadableRows
from mansio.spark.arrow.schema import DEFAULT_COLUMNS, HEADERS_TYPE, RECORD_SCHEMA, record_schema
from mansio.wire.batch import compression
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    BatchHeader,
    build_batch,
    check_batch,
    encode_batch,
    iterate_batches,
    read_header,
    varint,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import read_record_tuples
from mansio.wire.murmur2 import partition_for_key
from support.batch_contents import compressed_batch, encoded_record, raw_batch
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

DECOMPRESSED_BYTES_MAX = 1 << 20
ALL = RECORD_SCHEMA.names


class Row(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


contents = (
    st.none()
    | st.binary(max_size=70)
    | st.sampled_from([bytes(12), bytes(13), bytes(64), bytes(8191), bytes(8192)])
)
headers = st.lists(st.tuples(st.text(max_size=5), contents), max_size=3).map(tuple)
stamps = st.integers(0, 1 << 40) | st.integers(1_700_000_000_000, 1_700_000_000_100)
records = st.lists(st.tuples(stamps, contents, contents, headers), min_size=1, max_size=12)
codecs = st.sampled_from([Codec.NONE, Codec.NONE, Codec.GZIP, Codec.ZSTD])


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Batches as they follow each other in a log: offsets left out between them, each with its own codec and clock."""
    out, offset = [], draw(st.integers(0, 1 << 40))
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(records)
        batch = build_batch(rows, codec=draw(codecs), base_offset=offset)
        if draw(st.booleans()):
            batch = with_log_append_time(batch, read_header(batch), 1_700_000_000_000) + batch[HEADER_BYTES:]
        out.append(batch)
        offset += len(rows) + draw(st.integers(0, 3))
    return b"".join(out)


def rows_of(log: bytes) -> list[Row]:
    """What the general reader returns."""
    rows: list[Row] = []
    for position, header in iterate_batches(log):
        batch = log[position : position + header.size]
        rows += read_record_tuples(batch, Row, "t", 3, output_bytes_max=DECOMPRESSED_BYTES_MAX)
    return rows


def decode(
    log: Any,
    topic: str,
    partition: int,
    start: int = 0,
    end: int = OFFSET_MAX,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    **more: Any,
) -> pa.RecordBatch:
    """All the parts as one."""
    parts = decode_batches(log, topic, partition, start, end, columns, **more)
    table = pa.Table.from_batches(list(parts), schema=record_schema(columns)).combine_chunks()
    return table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_pylist([], table.schema)


def as_rows(columns: Any) -> list[Row]:
    columns.validate(full=True)
    names = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
    plain = columns.set_column(
        columns.schema.get_field_index("timestamp"), "timestamp", columns.column("timestamp").cast(pa.int64())
    )
    return [
        Row(
            row[0],
            row[1],
            row[2],
            row[3] // 1000,
            row[4],
            row[5],
            tuple((each["key"], each["value"]) for each in row[6] or ()),
        )
        for row in zip(*(plain.column(name).to_pylist() for name in names), strict=True)
    ]


@settings(max_examples=examples(10, 80), deadline=None)
@given(log=logs(), tail=st.sampled_from([b"", bytes(5), bytes(40)]), data=st.data())
def test_columns_are_the_records_of_the_range(log: bytes, tail: bytes, data: st.DataObject) -> None:
    expected = rows_of(log)
    start = data.draw(st.integers(expected[0].offset - 1, expected[-1].offset + 1))
    end = data.draw(st.integers(start, expected[-1].offset + 2))
    columns = decode(memoryview(log + tail), "t", 3, start, end, ALL)
    assert columns.schema.equals(RECORD_SCHEMA)
    assert as_rows(columns) == [row for row in expected if start <= row.offset < end]
    for row, is_null in zip(as_rows(columns), columns.column("headers").is_null().to_pylist(), strict=True):
        assert is_null == (row.headers == ())


@settings(max_examples=examples(10, 60), deadline=None)
@given(log=logs(), names=st.lists(st.sampled_from(ALL), min_size=1, unique=True))
def test_chosen_columns_are_those_of_all(log: bytes, names: list[str]) -> None:
    chosen = decode(log, "t", 3, columns=names)
    assert chosen.schema.equals(record_schema(names))
    assert chosen.equals(decode(log, "t", 3, columns=ALL).select(names))


def test_small_answer_of_much_comes_in_bounded_parts() -> None:
    log = b"".join(
        build_batch([(1, None, bytes(25_000), ())] * 2, codec=Codec.ZSTD, base_offset=2 * number)
        for number in range(5)
    )
    parts = list(decode_batches(log, "t", 3, 1, 9, ALL, decompressed_bytes_max=60_000))
    assert [part.num_rows for part in parts] == [3, 4, 1]
    assert [row for part in parts for row in as_rows(part)] == rows_of(log)[1:9]


def test_batches_of_one_shape_and_another_layout_are_each_read_as_they_are() -> None:
    """What is guessed from the first batch is wrong for the others."""
    values = [bytes([65 + size]) * size for size in (3, 40, 70, 5)]
    log, offset = b"", 0
    for order in permutations(values):
        log += build_batch([(1, None, value, ()) for value in order], base_offset=offset)
        offset += len(order)
    assert as_rows(decode(log, "t", 3, columns=ALL)) == rows_of(log)


def test_many_and_long_records_equal_the_reference() -> None:
    """Deltas and lengths of one, two and three bytes; runs of one length, and where they end."""
    many = build_batch(
        [(5 + number % 3, None, b"x" * (100 if number % 1000 else 7), ()) for number in range(20_000)]
    )
    long = build_batch(
        [(1 << 40, bytes(size), bytes(size), ()) for size in (63, 64, 8191, 8192, 70_000, 3 << 20)],
        base_offset=20_000,
    )
    columns = decode(many + long, "t", 3, columns=ALL)
    assert as_rows(columns) == [
        row
        for position, header in iterate_batches(many + long)
        for row in read_record_tuples(
            (many + long)[position : position + header.size], Row, "t", 3, output_bytes_max=1 << 30
        )
    ]


@pytest.mark.parametrize("has_headers", [False, True])
@pytest.mark.parametrize("key_bytes", [0, 8])
@pytest.mark.parametrize("content", [b"x", b"\0", b"\0x", b"\0\x80\x02\0\0"])
def test_unequal_records_are_found_whatever_is_in_them(
    content: bytes, key_bytes: int, has_headers: bool
) -> None:
    """Content that looks like the bytes around a record; runs that begin and end."""
    log = b""
    for batch in range(2):
        rows = [
            (
                1_700_000_000_000 + number // 9,
                number.to_bytes(key_bytes, "big") if key_bytes else None,
                (content * 150)[: 5 + number * 7919 % (60 if batch else 180)],
                [("h", None)] if has_headers and number % 50 == 0 else [],
            )
            for number in range(700)
        ]
        log += build_batch(rows, base_offset=batch * 1000)
    assert as_rows(decode(log, "t", 3, columns=ALL)) == rows_of(log)


def resealed(header: BatchHeader, body: bytes) -> bytes:
    """A batch whose checksum is right, whatever is in it."""
    return encode_batch(header, body)


def result(read: Any, log: bytes) -> Any:
    """Rows, or that they were refused."""
    try:
        return read(log)
    except (CorruptMessage, InvalidRecord):
        return "refused"


def read_columns(log: bytes) -> list[Row]:
    return as_rows(decode(log, "t", 3, columns=ALL))


@settings(max_examples=examples(20, 250), deadline=None)
@given(
    given=records,
    position=st.integers(0, 300),
    change=st.just(0) | st.integers(1, 255),
    cut=st.just(0) | st.integers(0, 12),
    more=st.just(b"") | st.binary(max_size=4),
    count_change=st.just(0) | st.integers(-2, 2),
    span_change=st.just(0) | st.integers(-2, 1),
    sound=st.sampled_from([(0, 1), (1, 0), (1, 1)]),
)
def test_damage_is_refused_where_rows_are_refused(
    given: list[Any],
    position: int,
    change: int,
    cut: int,
    more: bytes,
    count_change: int,
    span_change: int,
    sound: tuple[int, int],
) -> None:
    batch = build_batch(given, base_offset=100)
    header = read_header(batch)
    body = bytearray(batch[HEADER_BYTES : len(batch) - cut] + more)
    if position < len(body):
        body[position] ^= change
    changed = header._replace(
        record_count=header.record_count + count_change,
        last_offset_delta=header.last_offset_delta + span_change,
    )
    before = build_batch(given) * sound[0]
    after = build_batch(given, base_offset=200) * sound[1]
    log = before + resealed(changed, bytes(body)) + after
    assert result(read_columns, log) == result(rows_of, log) or changed.last_offset_delta < 0


@pytest.mark.full
def test_every_cut_byte_and_every_changed_byte_is_a_typed_error_or_other_records() -> None:
    headers = [("name", b"value"), ("", b"x"), ("", None)]
    rows = [(5 + number, b"k" * number, b"v" * (25 * number), headers[: number % 4]) for number in range(4)]
    batch = build_batch([(7, None, None, ()), *rows])
    header, body = read_header(batch), batch[HEADER_BYTES:]
    for cut in range(len(body)):
        for columns in (ALL, ["key", "value"]):
            with pytest.raises((CorruptMessage, InvalidRecord)):
                decode(resealed(header, body[:cut]), "t", 3, columns=columns)
    for place in range(len(body)):
        for change in (0x01, 0x02, 0x80):
            damaged = resealed(header, body[:place] + bytes([body[place] ^ change]) + body[place + 1 :])
            assert result(read_columns, damaged) == result(rows_of, damaged), (place, change)
            result(lambda log: decode(log, "t", 3, columns=["key", "value"]), damaged)  # headers are not read


@pytest.mark.parametrize("named", ["key", "value"])
@pytest.mark.parametrize("beyond", [1, 5, 30, 1 << 20, 1 << 40, (1 << 63) - 21])
def test_length_that_leads_out_of_its_record_is_refused_though_headers_are_not_read(
    named: str, beyond: int
) -> None:
    """Arrow would read there."""
    content = b"x" * 20
    lengths = [varint(len(content) + (beyond if named == each else 0)) for each in ("key", "value")]
    record = b"\0\0\0" + lengths[0] + content + lengths[1] + content + b"\0"
    header = read_header(build_batch([(1, None, b"v", ())]))
    damaged = resealed(header, varint(len(record)) + record)
    sound = build_batch([(1, None, b"v", ())], base_offset=1)
    for log in (damaged, damaged + sound):
        with pytest.raises(InvalidRecord):
            decode(log, "t", 3, columns=["key", "value"])


def test_header_without_a_name_is_refused() -> None:
    record = b"\0\0\0" + varint(-1) + varint(1) + b"v" + varint(1) + varint(-1) + varint(-1)
    damaged = resealed(read_header(build_batch([(1, None, b"v", ())])), varint(len(record)) + record)
    with pytest.raises(InvalidRecord, match="without a name"):
        decode(damaged, "t", 3, columns=ALL)


def test_answer_cut_at_any_byte_gives_its_whole_batches() -> None:
    first = build_batch([(1, b"k", b"v", [("n", None)])] * 3)
    second = build_batch([(1, None, b"longer than twelve bytes", ())] * 2, base_offset=3)
    for size in range(len(first) + len(second) + 1):
        found = decode((first + second)[:size], "t", 3, columns=ALL).num_rows
        assert found == (0 if size < len(first) else 3 if size < len(first) + len(second) else 5)


def test_changed_byte_of_an_answer_is_reported_with_its_place() -> None:
    batch = bytearray(build_batch([(1, None, b"value", ())], base_offset=41))
    batch[-2] ^= 1
    with pytest.raises(CorruptMessage, match="t-3 at offset 41"):
        decode(bytes(batch), "t", 3)


def test_opened_bytes_are_bounded() -> None:
    batch = compressed_batch(encoded_record(0, bytes(compression.DECOMPRESSED_BYTES_MAX)), 1, Codec.ZSTD)
    with pytest.raises(InvalidRecord, match="more than 134217728 bytes"):
        decode(batch, "t", 3, decompressed_bytes_max=1000)


def test_a_batch_of_many_small_records_is_returned_in_parts() -> None:
    records = [encoded_record(number, b"%d" % number) for number in range(5_000)]
    batch = compressed_batch(b"".join(records), 5_000, Codec.ZSTD)
    parts = list(decode_batches(batch, "t", 3, 10, 4_990, ALL, decompressed_bytes_max=64_000))
    assert [part.num_rows for part in parts] == [990, 1_000, 1_000, 1_000, 990]
    offsets = [offset for part in parts for offset in part.column("offset").to_pylist()]
    assert offsets == list(range(10, 4_990))


def test_bytes_before_the_first_record_are_refused() -> None:
    records = b"".join(encoded_record(number, bytes([number]) * 30) for number in range(3))
    for count in (3, 4):
        with pytest.raises(InvalidRecord):
            decode(raw_batch(b"\x28\xb5\x2f\xfd\x20\x6c\x61\x03\x00" + records, count), "t", 3)


@pytest.mark.parametrize("result_bytes", [64_000, 1 << 20])
def test_unreadable_batches_are_reported_between_the_rows_of_the_others(result_bytes: int) -> None:
    records = [encoded_record(number, b"v") for number in range(3_000)]
    log = b"".join(
        (
            build_batch([(1, None, b"a", ())]),
            raw_batch(b"garbage", 2, codec=1, base_offset=1),
            build_batch([(1, None, b"b", ())], base_offset=3),
            compressed_batch(b"".join(records)[:-3], 3_000, Codec.LZ4, base_offset=4),
            build_batch([(1, None, b"c", ())], base_offset=3_004),
        )
    )
    readable = ReadableRows("t", 3, 5_000, ("offset",), decompressed_bytes=result_bytes)
    found: list[Any] = []
    for piece in readable.read(memoryview(log), (), 0):
        if isinstance(piece, UnreadableRows):
            found.append((piece.first, piece.last))
        else:
            found += piece.column(0).to_pylist()
    whole = result_bytes > 64_000
    start = 4 if whole else 2_004  # of the batch that is decoded in parts, the last one cannot be read
    assert found == [0, (1, 2), 3, *range(4, start), (start, 3_003), 3_004]


def test_timestamp_that_no_table_can_hold_is_refused() -> None:
    batch = build_batch([(1 << 62, None, b"v", ())])
    with pytest.raises(InvalidRecord, match="timestamp"):
        decode(batch, "t", 3)
    assert decode(batch, "t", 3, columns=["value"]).num_rows == 1


def test_batches_that_compaction_emptied_are_passed_over() -> None:
    kept = build_batch([(1, None, b"a", ())], base_offset=9)
    header = read_header(build_batch([(1, None, b"a", ())]))
    empty = resealed(header._replace(base_offset=2, last_offset_delta=5, record_count=0), b"")
    assert decode(empty + kept, "t", 3).column("offset").to_pylist() == [9]
    filled = resealed(header._replace(record_count=0), b"\0")
    with pytest.raises(InvalidRecord):
        decode(filled, "t", 3)


def test_aborted_transactions_are_invisible_for_read_committed_only() -> None:
    ours: dict[str, Any] = {"producer_id": 9, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
    marker = {**ours, "base_sequence": -1, "control": True}
    log = (
        build_batch([(1, None, b"aborted", ())], base_offset=0, **ours)
        + build_batch([(1, b"\0\0\0\0", bytes(6), ())], base_offset=1, **marker)
        + build_batch([(1, None, b"kept", ())], base_offset=2, **ours)
        + build_batch([(1, b"\0\0\0\1", bytes(6), ())], base_offset=3, **marker)
        + build_batch([(1, None, b"plain", ())], base_offset=4)
    )
    assert decode(log, "t", 0, aborted=[(9, 0)]).column("offset").to_pylist() == [2, 4]
    assert decode(log, "t", 0, aborted=[(9, 0)], read_committed=False).column("offset").to_pylist() == [
        0,
        2,
        4,
    ]


def table_of(rows: list[Any], **more: Any) -> Any:
    columns = {
        "key": pa.array([row[1] for row in rows], pa.binary()),
        "value": pa.array([row[2] for row in rows], pa.binary()),
        "timestamp": pa.array([row[0] * 1000 for row in rows], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        "headers": pa.array(
            [[{"key": k, "value": v} for k, v in row[3]] or None for row in rows], HEADERS_TYPE
        ),
    } | more
    return pa.RecordBatch.from_pydict(columns)


@settings(max_examples=examples(10, 80), deadline=None)
@given(rows=records, codec=codecs)
def test_batches_of_columns_have_the_bytes_of_batches_of_records(rows: list[Any], codec: Codec) -> None:
    (made,) = encode_batches(table_of(rows), partition_count=1, bytes_max=1 << 20, codec=codec)
    assert made == EncodedBatch(0, build_batch(rows, codec=codec), len(rows))
    check_batch(made.data)


@settings(max_examples=examples(10, 60), deadline=None)
@given(rows=records, bytes_max=st.integers(0, 400), producer=st.booleans())
def test_rows_of_a_partition_keep_their_order_in_batches_of_bounded_size(
    rows: list[Any], bytes_max: int, producer: bool
) -> None:
    who = ProducerSequences(7, 2, {0: 2**31 - 1}) if producer else None
    made = list(
        encode_batches(
            table_of(rows), partition_count=3, bytes_max=bytes_max, producer=who, keyless_partition=1
        )
    )
    assert all(each.rows == 1 or len(each.data) <= bytes_max for each in made)
    sequences = {0: 2**31 - 1}
    for partition in range(3):
        found: list[Any] = []
        for each in made:
            if each.partition == partition:
                header = check_batch(each.data)
                if producer:
                    assert (header.producer_id, header.producer_epoch) == (7, 2)
                    assert header.base_sequence == sequences.get(partition, 0)
                    sequences[partition] = (sequences.get(partition, 0) + each.rows) % 2**31
                found += [(row.timestamp_ms, row.key, row.value, row.headers) for row in rows_of(each.data)]
        assert found == [
            row for row in rows if (1 if row[1] is None else partition_for_key(row[1], 3)) == partition
        ]


@settings(max_examples=examples(10, 60), deadline=None)
@given(
    keys=st.lists(st.binary(max_size=70) | st.sampled_from([bytes(5000)]), max_size=20),
    count=st.integers(1, 50),
)
def test_keys_go_where_every_client_puts_them(keys: list[bytes], count: int) -> None:
    column = pa.array([b"before", *keys], pa.binary()).slice(1)
    assert partitions_for_keys(column, count).tolist() == [partition_for_key(key, count) for key in keys]


def test_named_partition_beats_the_key_and_must_be_there() -> None:
    rows = [(1, b"k", b"v", ())] * 3
    table = table_of(rows, partition=pa.array([2, None, 2], pa.int32()))
    made = {each.partition: each.rows for each in encode_batches(table, partition_count=3, bytes_max=1 << 20)}
    assert made == ({2: 3} if partition_for_key(b"k", 3) == 2 else {2: 2, partition_for_key(b"k", 3): 1})
    with pytest.raises(MansioError, match="partition 2 of a topic that has 2"):
        list(encode_batches(table, partition_count=2, bytes_max=1 << 20))


def test_text_columns_and_missing_ones_become_records_too() -> None:
    table = pa.RecordBatch.from_pydict({"value": pa.array(["a", None, "c"])})
    (made,) = encode_batches(table, partition_count=1, bytes_max=1 << 20, now_ms=77)
    assert [(row.timestamp_ms, row.key, row.value) for row in rows_of(made.data)] == [
        (77, None, b"a"),
        (77, None, None),
        (77, None, b"c"),
    ]
    with pytest.raises(MansioError, match="has to be binary or string"):
        list(encode_batches(pa.RecordBatch.from_pydict({"value": [1]}), partition_count=1, bytes_max=100))
