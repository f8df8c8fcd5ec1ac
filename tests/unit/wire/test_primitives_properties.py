"""Hand-written Produce and Fetch codecs compared with kio in every supported version, in both directions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.apis.fetch import FetchedPartition, FetchPartition
from mansio.wire.apis.produce import PartitionResult
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.headers import read_request_header, response_header
from unit.wire.kio_oracle import kio_bytes, random_message

PRODUCE = range(SUPPORTED_APIS[ApiKey.PRODUCE].min_version, SUPPORTED_APIS[ApiKey.PRODUCE].max_version + 1)
FETCH = range(SUPPORTED_APIS[ApiKey.FETCH].min_version, SUPPORTED_APIS[ApiKey.FETCH].max_version + 1)
ZERO = bytes(16)

seeds = given(seed=st.integers(0, 2**32), tags=st.booleans())
few = settings(max_examples=30, deadline=None)


def message(
    api_key: int, version: int, direction: str, seed: int, tags: bool
) -> tuple[dict[str, Any], bytes]:
    entity = messages._schema(api_key, version, direction)
    plain = random_message(Random(seed), entity, tags=tags)
    return plain, kio_bytes(entity, plain)


def name_and_id(topic: dict[str, Any], name: str = "name") -> tuple[str | None, bytes | None]:
    if "topic_id" in topic:
        return None, topic["topic_id"] or ZERO
    return topic[name], None


def joined(pieces: list[Any]) -> bytes:
    data = b"".join(pieces)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    return data


def body_of_request(data: bytes, api_key: int, version: int) -> bytes:
    header = read_request_header(data[4:])
    assert (header.api_key, header.api_version, header.correlation_id, header.client_id) == (
        api_key,
        version,
        77,
        "me",
    )
    return data[4 + header.body_position :]


@pytest.mark.parametrize("version", PRODUCE)
@seeds
@few
def test_produce_request(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.PRODUCE, version, REQUEST, seed, tags)
    frame = memoryview(bytearray(b"\xaa" * 9 + data))
    topics = [
        (*name_and_id(topic), [(part["index"], part["records"]) for part in topic["partition_data"]])
        for topic in plain["topic_data"]
    ]
    request = produce.decode_request(version, frame, 9)
    assert request == (plain["transactional_id"], plain["acks"], plain["timeout_ms"], topics)

    pieces = produce.encode_request(
        version, 77, "me", plain["acks"], plain["timeout_ms"], topics, plain["transactional_id"]
    )
    assert body_of_request(joined(pieces), ApiKey.PRODUCE, version) == data
    for _, _, partitions in topics:
        for _, records in partitions:
            assert records is None or any(piece is records for piece in pieces), "batches are not copied"


@pytest.mark.parametrize("version", PRODUCE)
@seeds
@few
def test_produce_response(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.PRODUCE, version, RESPONSE, seed, tags)
    topics = [
        (
            *name_and_id(topic),
            [
                PartitionResult(
                    part["index"],
                    part["error_code"],
                    part["base_offset"],
                    part["log_append_time_ms"],
                    part.get("log_start_offset", -1),
                    part.get("error_message"),
                    tuple(
                        (error["batch_index"], error["batch_index_error_message"])
                        for error in part.get("record_errors", ())
                    ),
                )
                for part in topic["partition_responses"]
            ],
        )
        for topic in plain["responses"]
    ]
    header = response_header(ApiKey.PRODUCE, version, 5)
    assert produce.decode_response(version, header + data) == (topics, plain["throttle_time_ms"])
    if not tags:
        encoded = produce.encode_response(version, 5, topics, plain["throttle_time_ms"])
        assert encoded == (len(header) + len(data)).to_bytes(4, "big") + header + data


def fetch_request_topics(plain: dict[str, Any]) -> list[Any]:
    return [
        (
            *name_and_id(topic, "topic"),
            [
                FetchPartition(
                    part["partition"],
                    part.get("current_leader_epoch", -1),
                    part["fetch_offset"],
                    part.get("last_fetched_epoch", -1),
                    part.get("log_start_offset", -1),
                    part["partition_max_bytes"],
                )
                for part in topic["partitions"]
            ],
        )
        for topic in plain["topics"]
    ]


@pytest.mark.parametrize("version", FETCH)
@seeds
@few
def test_fetch_request(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.FETCH, version, REQUEST, seed, tags)
    topics = fetch_request_topics(plain)
    forgotten = [
        (*name_and_id(topic, "topic"), topic["partitions"])
        for topic in plain.get("forgotten_topics_data", ())
    ]
    replica_id = plain.get("replica_id", plain.get("replica_state", {}).get("replica_id", -1))
    replica_epoch = plain.get("replica_state", {}).get("replica_epoch", -1)
    frame = memoryview(bytearray(b"\xaa" * 9 + data))
    request = fetch.decode_request(version, frame, 9)
    assert tuple(request) == (
        replica_id,
        plain["max_wait_ms"],
        plain["min_bytes"],
        plain["max_bytes"],
        plain["isolation_level"],
        plain.get("session_id", 0),
        plain.get("session_epoch", -1),
        topics,
        forgotten,
        plain.get("rack_id", ""),
        replica_epoch,
        False,
    )
    encoded = fetch.encode_request(
        version,
        77,
        "me",
        topics,
        max_wait_ms=request.max_wait_ms,
        min_bytes=request.min_bytes,
        max_bytes=request.max_bytes,
        isolation_level=request.isolation_level,
        session_id=request.session_id,
        session_epoch=request.session_epoch,
        forgotten_topics=forgotten,
        rack_id=request.rack_id,
        replica_id=replica_id,
        replica_epoch=replica_epoch,
    )
    body = body_of_request(joined([encoded]), ApiKey.FETCH, version)
    assert fetch.decode_request(version, memoryview(body), 0) == request
    if not tags:
        assert body == data


@pytest.mark.parametrize("version", [15, 16, 17])
def test_read_for_repair_is_a_fetch_with_one_more_tagged_field(version: int) -> None:
    asked = [fetch.FetchPartition(3, 7, 40, -1, -1, 1000)]
    frame = fetch.encode_request(
        version,
        77,
        "me",
        [(None, bytes(range(16)), asked)],
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1000,
        replica_id=2,
        replica_epoch=9,
        is_repair_read=True,
    )
    body = memoryview(body_of_request(joined([frame]), ApiKey.FETCH, version))
    request = fetch.decode_request(version, body, 0)
    assert (request.replica_id, request.replica_epoch, request.is_repair_read) == (2, 9, True)
    assert request.topics == [(None, bytes(range(16)), asked)]
    assert fetch.decode_replica_request(body, 0) is None


def diverging_of(part: dict[str, Any]) -> tuple[int, int] | None:
    """The diverging epoch of a partition; None where it is not sent, which is what its default stands for."""
    reported = part.get("diverging_epoch", {})
    diverging = (reported.get("epoch", -1), reported.get("end_offset", -1))
    return None if diverging == (-1, -1) else diverging


@pytest.mark.parametrize("version", FETCH)
@seeds
@few
def test_fetch_response(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.FETCH, version, RESPONSE, seed, tags)
    topics = [
        (
            *name_and_id(topic, "topic"),
            [
                FetchedPartition(
                    part["partition_index"],
                    part["error_code"],
                    part["high_watermark"],
                    part["last_stable_offset"],
                    part.get("log_start_offset", -1),
                    None
                    if part["aborted_transactions"] is None
                    else [
                        (item["producer_id"], item["first_offset"]) for item in part["aborted_transactions"]
                    ],
                    part.get("preferred_read_replica", -1),
                    len(part["records"] or b""),
                    part["records"] or b"",
                    diverging_of(part),
                )
                for part in topic["partitions"]
            ],
        )
        for topic in plain["responses"]
    ]
    header = response_header(ApiKey.FETCH, version, 5)
    response = fetch.decode_response(version, header + data)
    assert tuple(response) == (
        topics,
        plain["throttle_time_ms"],
        plain.get("error_code", 0),
        plain.get("session_id", 0),
    )
    pieces = fetch.encode_response(
        version, 5, topics, response.throttle_ms, response.error_code, response.session_id
    )
    assert all(type(piece) is bytes for piece in pieces[::2])
    encoded = joined(pieces)
    assert fetch.decode_response(version, encoded[4:]) == response
    if not tags and all(
        part["records"] is not None for topic in plain["responses"] for part in topic["partitions"]
    ):
        assert encoded == (len(header) + len(data)).to_bytes(4, "big") + header + data
