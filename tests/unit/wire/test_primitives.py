"""Produce and Fetch beyond the comparison with kio: golden frames, malicious counts, limits."""

from __future__ import annotations

import tracemalloc

import pytest

from mansio.errors import WireError
from mansio.wire import primitives
from mansio.wire.apis import fetch, produce
from mansio.wire.apis.fetch import FetchedPartition, FetchPartition
from mansio.wire.apis.produce import PartitionResult
from mansio.wire.headers import read_request_header

TOPIC = ("t", None)
PRODUCE_V9 = bytes.fromhex("00 ffff 000003e8 02 02 74 02 00000005 04 616263 00 00 00")
PRODUCE_V3 = bytes.fromhex("ffff ffff 000003e8 00000001 0001 74 00000001 00000005 00000003 616263")
FETCH_V12 = bytes.fromhex(
    "ffffffff 000001f4 00000001 00100000 00 00000000 ffffffff"
    "02 02 74 02 00000003 ffffffff 0000000000000009 ffffffff ffffffffffffffff 00100000 00 00"
    "01 01 00"
)


def test_golden_produce_requests() -> None:
    for version, data in ((9, PRODUCE_V9), (3, PRODUCE_V3)):
        request = produce.decode_request(version, memoryview(data), 0)
        expected: object = (None, -1, 1000, [("t", None, [(5, b"abc")])])
        assert request == expected


def test_golden_produce_response() -> None:
    results = [PartitionResult(5, 0, 77, -1, 0)]
    assert produce.encode_response(9, 3, [(*TOPIC, results)]).hex() == (
        "00000030"
        "00000003"
        "00"
        "02"
        "0274"
        "02"
        "00000005"
        "0000"
        "000000000000004d"
        "ffffffffffffffff"
        "0000000000000000"
        "01"
        "00"
        "00"
        "00"
        "00000000"
        "00"
    )


def test_golden_fetch_request() -> None:
    request = fetch.decode_request(12, memoryview(FETCH_V12), 0)
    assert request.topics == [("t", None, [FetchPartition(3, -1, 9, -1, -1, 1 << 20)])]
    assert (request.replica_id, request.max_wait_ms, request.session_epoch, request.rack_id) == (
        -1,
        500,
        -1,
        "",
    )


def test_fetch_response_contains_the_callers_record_objects() -> None:
    slices = [object(), object()]
    topics = [
        (
            *TOPIC,
            [
                FetchedPartition(0, records_bytes=100, records=slices[0]),
                FetchedPartition(1),
                FetchedPartition(2, records_bytes=7, records=slices[1]),
            ],
        )
    ]
    for version in range(4, 18):
        pieces = fetch.encode_response(version, 1, topics)
        assert pieces[1] is slices[0]
        assert pieces[3] is slices[1]
        assert len(pieces) == (5 if version >= 12 else 4)
        length = sum(map(len, pieces[::2])) + 107
        assert int.from_bytes(pieces[0][:4], "big") == length - 4


def test_fetch_response_without_data_is_one_buffer() -> None:
    for version in range(4, 18):
        (piece,) = fetch.encode_response(version, 1, [(*TOPIC, [FetchedPartition(0)])])
        assert int.from_bytes(piece[:4], "big") == len(piece) - 4


HOSTILE = {
    "two thousand million topics": (9, "00 ffff 000003e8 ffffffff07"),
    "null topics": (9, "00 ffff 000003e8 00 00"),
    "two thousand million partitions": (9, "00 ffff 000003e8 02 0274 ffffffff07 00000000 01 00"),
    "records longer than the frame": (9, "00 ffff 000003e8 02 0274 02 00000005 0a 61 00 00 00"),
    "records without an end": (9, "00 ffff 000003e8 02 0274 02 00000005 04 616263"),
    "a topic without a name": (9, "00 ffff 000003e8 02 00 01 00 00"),
    "a topic id cut off": (13, "00 ffff 000003e8 02 0102"),
    "bytes after the end": (9, PRODUCE_V9.hex() + "00"),
    "older: bytes after the end": (3, PRODUCE_V3.hex() + "00"),
    "older: negative count": (3, "ffff ffff 000003e8 fffffffe"),
    "older: huge count": (3, "ffff ffff 000003e8 7fffffff"),
    "older: negative records": (3, "ffff ffff 000003e8 00000001 000174 00000001 00000005 fffffffe"),
    "older: records longer than the frame": (
        3,
        "ffff ffff 000003e8 00000001 000174 00000001 00000005 00000009 61",
    ),
    "older: a name longer than the frame": (3, "ffff ffff 000003e8 00000001 7fff 74"),
    "older: a name that is not UTF-8": (3, "ffff ffff 000003e8 00000001 0001ff 00000000"),
    "empty": (9, ""),
}


@pytest.mark.parametrize(("version", "data"), HOSTILE.values(), ids=HOSTILE.keys())
def test_malicious_produce_request_is_a_wire_error_and_allocates_no_memory(version: int, data: str) -> None:
    frame = memoryview(bytes.fromhex(data))
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            produce.decode_request(version, frame, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000


@pytest.mark.parametrize("version", [3, 9])
def test_number_of_partitions_in_one_request_is_bounded(version: int) -> None:
    def request(count: int) -> memoryview:
        empty: list[tuple[int, None]] = [(0, None)] * count
        data = b"".join(produce.encode_request(version, 1, None, -1, 1000, [(*TOPIC, empty)]))
        return memoryview(data)[4:]

    body = read_request_header(request(0)).body_position
    most = primitives.ENTRIES_MAX - 1  # the topic is one
    assert len(produce.decode_request(version, request(most), body).topics[0][2]) == most
    with pytest.raises(WireError, match="a count of"):
        produce.decode_request(version, request(most + 1), body)


def test_bytes_after_a_fetch_message_are_a_wire_error() -> None:
    with pytest.raises(WireError, match="after the end"):
        fetch.decode_request(12, memoryview(FETCH_V12 + b"\x00"), 0)
    for version in (4, 12):
        data = b"".join(fetch.encode_response(version, 1, [(*TOPIC, [FetchedPartition(0)])]))[4:]
        assert fetch.decode_response(version, data).topics[0][0] == "t"
        with pytest.raises(WireError, match="after the end"):
            fetch.decode_response(version, data + b"\x00")


def test_every_truncation_of_a_message_is_a_wire_error() -> None:
    for version, data in ((9, PRODUCE_V9), (3, PRODUCE_V3)):
        for end in range(len(data)):
            with pytest.raises(WireError):
                produce.decode_request(version, memoryview(data)[:end], 0)
    for end in range(len(FETCH_V12)):
        with pytest.raises(WireError):
            fetch.decode_request(12, memoryview(FETCH_V12)[:end], 0)
