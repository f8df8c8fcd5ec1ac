"""Compiled codecs: golden bytes, the same fields in all versions, errors for malformed bytes and for invalid values."""

from __future__ import annotations

import tracemalloc
import uuid
from typing import Any

import pytest

from mansio.errors import WireError
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages, schema_compiler
from mansio.wire.codec.messages import (
    Struct,
    decode_request,
    decode_response,
    decode_response_frame,
    encode_request,
    encode_response,
)
from mansio.wire.headers import read_request_header, unsigned_varint

METADATA_V12 = bytes.fromhex(
    "0000005300000007"  # frame length, correlation id
    "00"  # header tags
    "00000000"  # throttle time
    "02 00000001 02 68 0000 2384 00 00"  # one broker: id 1, "h", port 9092, no rack
    "02 63 00000001"  # cluster id "c", controller 1
    "02 0000 02 74 0101010101010101 0101010101010101 00"  # one topic "t" with its id
    "02 0000 00000000 00000001 00000005 02 00000001 02 00000001 01 00"  # one partition
    "80000000 00 00"  # authorized operations, tags
)
METADATA = {
    "brokers": [{"node_id": 1, "host": "h", "port": 9092}],
    "cluster_id": "c",
    "controller_id": 1,
    "topics": [
        {
            "name": "t",
            "topic_id": b"\x01" * 16,
            "partitions": [
                {
                    "partition_index": 0,
                    "leader_id": 1,
                    "leader_epoch": 5,
                    "replica_nodes": [1],
                    "isr_nodes": [1],
                }
            ],
        }
    ],
}


def body_of(frame: bytes) -> bytes:
    return frame[4 + read_request_header(frame[4:]).body_position :]


def test_golden_metadata_response() -> None:
    assert encode_response(ApiKey.METADATA, 12, 7, METADATA).hex() == METADATA_V12.hex()


def test_golden_api_versions_request_of_a_java_client() -> None:
    frame = bytes.fromhex("00120003000000010004746573740012") + b"apache-kafka-java\x063.6.1\x00"
    frame = frame[:14] + b"\x00" + frame[15:]
    header = read_request_header(frame)
    request = decode_request(header.api_key, header.api_version, frame[header.body_position :])
    assert (request.client_software_name, request.client_software_version) == ("apache-kafka-java", "3.6.1")


def test_shape_is_the_same_in_every_version() -> None:
    old = decode_request(12, 0, body_of(encode_request(12, 0, 1, None, {"group_id": "g", "member_id": "m"})))
    new = decode_request(12, 4, body_of(encode_request(12, 4, 1, None, {"group_id": "g", "member_id": "m"})))
    assert old == new
    assert repr(old) == "Struct(group_id='g', generation_id=0, member_id='m', group_instance_id=None)"


def test_fields_only_older_versions_have() -> None:
    v1 = body_of(
        encode_request(
            ApiKey.OFFSET_FETCH,
            1,
            1,
            None,
            {"group_id": "g", "topics": [{"name": "t", "partition_indexes": [3]}]},
        )
    )
    request = decode_request(ApiKey.OFFSET_FETCH, 1, v1)
    assert (request.group_id, request.topics[0].name, request.groups) == ("g", "t", [])
    v9 = body_of(encode_request(ApiKey.OFFSET_FETCH, 9, 1, None, {"groups": [{"group_id": "g"}]}))
    request = decode_request(ApiKey.OFFSET_FETCH, 9, v9)
    assert (request.group_id, request.groups[0].group_id, request.groups[0].topics) == ("", "g", None)
    commit = {"group_id": "g", "retention_time_ms": 5, "generation_id_or_member_epoch": 2}
    assert decode_request(8, 2, body_of(encode_request(8, 2, 1, None, commit))).retention_time_ms == 5
    assert decode_request(8, 9, body_of(encode_request(8, 9, 1, None, commit))).retention_time_ms == -1


def test_defaults_match_kafka_and_are_not_shared() -> None:
    one = decode_request(ApiKey.JOIN_GROUP, 0, body_of(encode_request(ApiKey.JOIN_GROUP, 0, 1, None, {})))
    two = decode_request(ApiKey.JOIN_GROUP, 0, body_of(encode_request(ApiKey.JOIN_GROUP, 0, 1, None, {})))
    assert (one.rebalance_timeout_ms, one.group_instance_id, one.reason) == (-1, None, None)
    one.protocols.append("x")
    assert two.protocols == []
    old = decode_request(ApiKey.OFFSET_FETCH, 1, body_of(encode_request(ApiKey.OFFSET_FETCH, 1, 1, None, {})))
    old.groups.append("x")
    again = decode_request(
        ApiKey.OFFSET_FETCH, 1, body_of(encode_request(ApiKey.OFFSET_FETCH, 1, 1, None, {}))
    )
    assert again.groups == []


def test_response_frame_round_trip_in_every_version() -> None:
    for version in range(14):
        correlation_id, response = decode_response_frame(
            ApiKey.METADATA, version, encode_response(ApiKey.METADATA, version, 7, METADATA)[4:]
        )
        assert correlation_id == 7
        assert response.brokers[0].port == 9092
        assert response.topics[0].partitions[0].isr_nodes == [1]


def test_uuids_are_16_bytes_or_none() -> None:
    for given, read in ((uuid.UUID(int=5), uuid.UUID(int=5).bytes), (None, None), (bytes(16), None)):
        frame = encode_response(ApiKey.METADATA, 12, 7, {"topics": [{"name": "t", "topic_id": given}]})
        assert decode_response_frame(ApiKey.METADATA, 12, frame[4:])[1].topics[0].topic_id == read


def test_unknown_tagged_fields_are_skipped() -> None:
    body = body_of(encode_request(12, 4, 1, None, {"group_id": "g", "member_id": "m"}))
    assert decode_request(12, 4, body[:-1] + b"\x02\x63\x03abc\x7f\x00").group_id == "g"


def test_known_tagged_field_must_fill_its_length() -> None:
    body = encode_response(18, 3, 1, {"finalized_features_epoch": 5})[8:]
    assert decode_response(18, 3, body).finalized_features_epoch == 5
    with pytest.raises(WireError):
        decode_response(18, 3, body[:-9] + b"\x09" + body[-8:] + b"\x00")


def test_trailing_bytes_are_ignored_in_requests_and_refused_in_responses() -> None:
    """librdkafka writes the null array of "all topics" as four bytes where one belongs; Kafka lets it pass."""
    request = decode_request(ApiKey.METADATA, 13, bytes.fromhex("00000000010000"))  # librdkafka 2.16
    assert request.topics is None
    with pytest.raises(WireError, match="after the end"):
        decode_response(12, 4, bytes(7) + b"\x00")


def test_error_codes_newer_than_kio_are_read() -> None:
    assert decode_response(12, 4, b"\x00\x00\x00\x00\x27\x0f\x00").error_code == 9999


WRONG_NAMES: list[tuple[int, dict[str, Any]]] = [
    (12, {"throttle_time": 1}),
    (3, {"topics": [{"nmae": "t"}]}),
    (3, {"topics": [{"partitions": [{"leader": 1}]}]}),
]


@pytest.mark.parametrize(("api_key", "fields"), WRONG_NAMES)
def test_unknown_field_name_is_a_type_error(api_key: int, fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="has no field"):
        encode_response(api_key, 1, 1, fields)


WRONG_VALUES: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"error_code": 70_000}, ValueError),
    ({"error_code": "x"}, ValueError),
    ({"leader": None}, TypeError),
    ({"member_id": 5}, TypeError),
    ({"members": None}, TypeError),
    ({"members": [{"metadata": None}]}, TypeError),
    ({"member_id": "\ud800"}, ValueError),
    ({"member_id": "x" * 40_000}, ValueError),
]


@pytest.mark.parametrize(("fields", "kind"), WRONG_VALUES)
def test_error_of_a_wrong_value_names_the_field(fields: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        encode_response(ApiKey.JOIN_GROUP, 3, 1, fields)


def test_unknown_version_is_a_value_error() -> None:
    for api_key, version in ((12, 99), (999, 0)):
        with pytest.raises((ValueError, KeyError)):
            decode_request(api_key, version, b"")


BAD_BODIES = {
    "empty": (12, 4, b""),
    "a null where none may be": (12, 4, b"\x00\x00\x00\x00\x00\x01\x00\x00"),
    "text that is not UTF-8": (12, 4, b"\x02\xff\x00\x00\x00\x00\x01\x00\x00"),
    "a text longer than the message": (12, 4, b"\x7fabc"),
    "a negative length": (12, 0, b"\xff\xfe\x00\x00\x00\x00\x00\x01m"),
    "two thousand million topics": (3, 1, b"\x7f\xff\xff\xff" + b"\x00" * 50),
    "four thousand million topics": (3, 9, b"\xff\xff\xff\xff\x0f" + b"\x00" * 50),
    "a negative count": (3, 1, b"\xff\xff\xff\xfe"),
    "a uuid cut off": (3, 12, b"\x02" + b"\x01" * 9),
    "a tagged field longer than the message": (12, 4, b"\x01\x00\x00\x00\x00\x01\x00\x01\x00\x7f"),
}


@pytest.mark.parametrize(("api_key", "version", "body"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bytes_that_are_not_the_message_are_a_wire_error(api_key: int, version: int, body: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(api_key, version, body)


@pytest.mark.parametrize("name", ["two thousand million topics", "four thousand million topics"])
def test_wrong_count_is_refused_before_the_first_item(name: str) -> None:
    with pytest.raises(WireError, match="bytes left"):
        decode_request(*BAD_BODIES[name])


def test_wrong_counts_allocate_no_memory() -> None:
    for api_key, version, body in BAD_BODIES.values():
        with pytest.raises(WireError):
            decode_request(api_key, version, body)
    tracemalloc.start()
    try:
        for api_key, version, body in BAD_BODIES.values():
            with pytest.raises(WireError):
                decode_request(api_key, version, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_message_with_too_many_structs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of a Metadata answer takes a few bytes on the wire and a hundred times that in memory."""
    monkeypatch.setattr(messages, "STRUCTS_MAX", 1000)
    topics = [{"name": "", "partitions": []}] * 1001
    for count in (1000, 1001):
        frame = messages.encode_response(3, 9, 0, {"topics": topics[:count]})[9:]
        if count == 1000:
            assert len(messages.decode_response(3, 9, frame).topics) == 1000
        else:
            with pytest.raises(WireError, match="structs"):
                messages.decode_response(3, 9, frame)
    assert schema_compiler.STRUCTS_MAX * 600 < 512 << 20


TINY_ITEMS = {
    "structures": (3, 9, lambda count: b"\x01\x00" * count + b"\x01\x00\x00\x00"),
    "texts": (15, 5, lambda count: b"\x01" * count + b"\x00\x00"),
    "numbers": (74, 1, lambda count: b"\x02" * count + b"\x00"),
}


@pytest.mark.parametrize("kind", TINY_ITEMS)
def test_request_with_too_many_items_is_refused(kind: str) -> None:
    """Each is answered with hundreds of bytes in memory, on the loop that everybody shares."""
    api_key, version, body = TINY_ITEMS[kind]
    most = SUPPORTED_APIS[ApiKey(api_key)].request_items_max
    decode_request(api_key, version, unsigned_varint(most + 1) + body(most))
    with pytest.raises(WireError, match="more items than"):
        decode_request(api_key, version, unsigned_varint(most + 2) + body(most + 1))


def test_huge_body_is_refused_before_decoding() -> None:
    with pytest.raises(WireError, match="at most"):
        decode_request(3, 9, memoryview(bytearray(messages.BODY_BYTES_MAX + 1)))


def test_preloading_leaves_nothing_to_import() -> None:
    steps = sum(1 for _ in messages.preload_schemas())
    assert steps == 2 * sum(
        api.max_version - api.min_version + 1
        for api in SUPPORTED_APIS.values()
        if api.handler and not api.is_decoded_by_handler
    )


def test_struct_compares_by_value() -> None:
    assert Struct({"a": 1}) == Struct({"a": 1})
    assert Struct({"a": 1}) != Struct({"a": 2})
    assert Struct({"a": 1}) != {"a": 1}
    with pytest.raises(AttributeError):
        _ = Struct({"a": 1}).b
