"""Hand-written codecs of ShareFetch and ShareAcknowledge compared with kio in every supported version, in both
directions."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mansio.errors import WireError
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition, AckResult, Endpoint
from mansio.wire.apis.share_fetch import SharePartitionData
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST, RESPONSE
from mansio.wire.headers import read_request_header, response_header
from mansio.wire.primitives import DECODE_ERRORS
from support.tiers import examples
from unit.wire.kio_oracle import kio_bytes, random_message

FETCH = range(
    SUPPORTED_APIS[ApiKey.SHARE_FETCH].min_version, SUPPORTED_APIS[ApiKey.SHARE_FETCH].max_version + 1
)
ACKNOWLEDGE = range(
    SUPPORTED_APIS[ApiKey.SHARE_ACKNOWLEDGE].min_version,
    SUPPORTED_APIS[ApiKey.SHARE_ACKNOWLEDGE].max_version + 1,
)
ZERO = bytes(16)

seeds = given(seed=st.integers(0, 2**32), tags=st.booleans())
few = settings(max_examples=examples(20, 60), deadline=None)


def message(
    api_key: int, version: int, direction: str, seed: int, tags: bool
) -> tuple[dict[str, Any], bytes]:
    entity = messages._schema(api_key, version, direction)
    plain = random_message(Random(seed), entity, tags=tags)
    return plain, kio_bytes(entity, plain)


def ack_topics(plain: dict[str, Any]) -> list[Any]:
    return [
        (
            topic["topic_id"] or ZERO,
            [
                AckPartition(
                    part["partition_index"],
                    [
                        AckBatch(
                            batch["first_offset"],
                            batch["last_offset"],
                            bytes(each & 0xFF for each in batch["acknowledge_types"]),
                        )
                        for batch in part["acknowledgement_batches"]
                    ],
                )
                for part in topic["partitions"]
            ],
        )
        for topic in plain["topics"]
    ]


def endpoints(plain: dict[str, Any]) -> list[Endpoint]:
    return [
        Endpoint(each["node_id"], each["host"], each["port"], each["rack"])
        for each in plain["node_endpoints"]
    ]


def body_of_request(data: bytes, api_key: int, version: int) -> bytes:
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    header = read_request_header(data[4:])
    assert header[:4] == (api_key, version, 77, "me")
    return data[4 + header.body_position :]


@pytest.mark.parametrize("version", FETCH)
@seeds
@few
def test_share_fetch_request(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.SHARE_FETCH, version, REQUEST, seed, tags)
    request = share_fetch.decode_request(version, memoryview(bytearray(b"\xaa" * 9 + data)), 9)
    forgotten = [(each["topic_id"] or ZERO, each["partitions"]) for each in plain["forgotten_topics_data"]]
    wants = {name: plain[name] for name in ("min_bytes", "max_bytes", "max_records", "batch_size")}
    wants["max_wait_ms"] = plain["max_wait_ms"]
    newer = {
        "acquire_mode": plain.get("share_acquire_mode", 0),
        "is_renew_ack": plain.get("is_renew_ack", False),
    }
    for name, value in (wants | newer).items():
        assert getattr(request, name) == value, name
    assert (request.group_id, request.member_id) == (plain["group_id"], plain["member_id"])
    assert request.session_epoch == plain["share_session_epoch"]
    assert request.topics == ack_topics(plain)
    assert request.forgotten_topics == forgotten
    if not tags:
        group_id: Any = request.group_id  # the schema allows null
        member_id: Any = request.member_id
        encoded = share_fetch.encode_request(
            version,
            77,
            "me",
            group_id,
            member_id,
            request.session_epoch,
            request.topics,
            forgotten_topics=forgotten,
            **wants,
            **newer,
        )
        assert body_of_request(encoded, ApiKey.SHARE_FETCH, version) == data


@pytest.mark.parametrize("lease_ms", [-1, 0, 43_200_000])
@pytest.mark.parametrize("keeps_leases", [False, True])
@pytest.mark.parametrize("version", FETCH)
def test_own_fields_of_a_share_fetch_request(version: int, lease_ms: int, keeps_leases: bool) -> None:
    wants: dict[str, Any] = {
        "max_wait_ms": 0,
        "min_bytes": 0,
        "max_bytes": 0,
        "max_records": 0,
        "batch_size": 0,
    }
    encoded = share_fetch.encode_request(
        version, 77, "me", "g", "m", 0, [], **wants, lease_ms=lease_ms, keeps_leases=keeps_leases
    )
    body = body_of_request(encoded, ApiKey.SHARE_FETCH, version)
    request = share_fetch.decode_request(version, memoryview(body), 0)
    assert (request.lease_ms, request.keeps_leases) == (lease_ms, keeps_leases)
    for end in range(len(body)):
        with pytest.raises(WireError):
            share_fetch.decode_request(version, memoryview(body[:end]), 0)


def general_result(frame: bytes) -> Any:
    """The request in `frame` as decoded by the code for any request; None if it is invalid."""
    try:
        request, position = share_fetch._decode_request(2, memoryview(frame), 0)
    except (*DECODE_ERRORS, WireError):
        return None
    return request if position == len(frame) else None


NAMES = st.text(st.characters(max_codepoint=300), max_size=4) | st.sampled_from(
    ["x" * 126, "x" * 127, "x" * 200]
)


@settings(max_examples=examples(100, 1000), deadline=None)
@given(
    names=st.tuples(NAMES, NAMES),
    wants=st.lists(st.integers(-1, 2**31 - 1), min_size=6, max_size=6),
    mode=st.integers(0, 2),
    renews=st.booleans(),
    topics=st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.lists(st.binary(min_size=1, max_size=2), max_size=3)), max_size=2
        ),
        max_size=2,
    ),
    forgets=st.booleans(),
    own=st.tuples(st.sampled_from([-1, 0, 60_000]), st.booleans()),
    change=st.none() | st.tuples(st.integers(0, 2**16), st.integers(0, 255)),
    cut=st.none() | st.integers(0, 2**16),
)
@example(
    names=("", ""),
    wants=[0] * 6,
    mode=0,
    renews=False,
    topics=[[]],  # shorter than a topic with a partition
    forgets=False,
    own=(-1, False),
    change=None,
    cut=None,
)
def test_a_usual_share_fetch_request_is_decoded_as_any_other(
    names: tuple[str, str],
    wants: list[int],
    mode: int,
    renews: bool,
    topics: list[list[tuple[int, list[bytes]]]],
    forgets: bool,
    own: tuple[int, bool],
    change: tuple[int, int] | None,
    cut: int | None,
) -> None:
    epoch, max_wait_ms, min_bytes, max_bytes, max_records, batch_size = wants
    encoded = share_fetch.encode_request(
        2,
        77,
        "me",
        *names,
        epoch,
        [
            (
                bytes([number]) * 16,
                [
                    AckPartition(
                        index, [AckBatch(first, first + 1, types) for first, types in enumerate(batches)]
                    )
                    for index, batches in parts
                ],
            )
            for number, parts in enumerate(topics)
        ],
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        max_records=max_records,
        batch_size=batch_size,
        acquire_mode=mode,
        is_renew_ack=renews,
        forgotten_topics=[(bytes(16), [1])] if forgets else [],
        lease_ms=own[0],
        keeps_leases=own[1],
    )
    body = bytearray(body_of_request(encoded, ApiKey.SHARE_FETCH, 2))
    if change is not None:
        body[change[0] % len(body)] = change[1]
    frame = bytes(body if cut is None else body[: cut % len(body)])
    expected = general_result(frame)
    if expected is None:
        with pytest.raises(WireError):
            share_fetch.decode_request(2, memoryview(frame), 0)
    else:
        assert share_fetch.decode_request(2, memoryview(frame), 0) == expected


@pytest.mark.parametrize("version", FETCH)
@pytest.mark.parametrize("size", [1, 126, 127, 128, 16_383, 16_384, 3_000_000])
def test_a_usual_share_fetch_response_has_the_bytes_of_any_other(version: int, size: int) -> None:
    acquired, records = (2**40, 2**40 + 9, 3), b"r" * size
    data = SharePartitionData(7, records_bytes=size, records=(records,), acquired=[acquired])
    expected = share_fetch.encode_response(version, 99, [(b"t" * 16, [data])], lock_ms=30_000)
    found = share_fetch.encode_usual_response(99, b"t" * 16, 7, 30_000, records, size, acquired)
    assert b"".join(found) == b"".join(expected)


@pytest.mark.parametrize("version", FETCH)
@seeds
@few
def test_share_fetch_response(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.SHARE_FETCH, version, RESPONSE, seed, tags)
    header = response_header(ApiKey.SHARE_FETCH, version, 5)
    answer = share_fetch.decode_response(version, header + data)
    topics = []
    for topic in plain["responses"]:
        parts = []
        for part in topic["partitions"]:
            raw = bytes(part["records"] or b"")
            half = len(raw) // 2
            parts.append(
                SharePartitionData(
                    part["partition_index"],
                    part["error_code"],
                    part["error_message"],
                    part["acknowledge_error_code"],
                    part["acknowledge_error_message"],
                    part["current_leader"]["leader_id"],
                    part["current_leader"]["leader_epoch"],
                    len(raw),
                    [raw[:half], raw[half:]] if raw else (),
                    [
                        (each["first_offset"], each["last_offset"], each["delivery_count"])
                        for each in part["acquired_records"]
                    ],
                )
            )
        topics.append((topic["topic_id"] or ZERO, parts))
    decoded = [
        (topic_id, [part._replace(records=b"".join(map(bytes, part.records))) for part in parts])
        for topic_id, parts in answer.topics
    ]
    assert decoded == [
        (topic_id, [part._replace(records=b"".join(part.records)) for part in parts])
        for topic_id, parts in topics
    ]
    assert (answer.throttle_ms, answer.error_code) == (plain["throttle_time_ms"], plain["error_code"])
    assert (answer.error_message, answer.lock_ms) == (
        plain["error_message"],
        plain["acquisition_lock_timeout_ms"],
    )
    assert answer.endpoints == endpoints(plain)
    if not tags:
        pieces = share_fetch.encode_response(
            version,
            5,
            topics,
            lock_ms=answer.lock_ms,
            throttle_ms=answer.throttle_ms,
            error_code=answer.error_code,
            error_message=answer.error_message,
            endpoints=answer.endpoints,
        )
        assert b"".join(pieces) == (len(header) + len(data)).to_bytes(4, "big") + header + data
        for _, parts in topics:
            for part in parts:
                for records in part.records:
                    assert any(piece is records for piece in pieces), "batches are not copied"


@pytest.mark.parametrize("version", ACKNOWLEDGE)
@seeds
@few
def test_share_acknowledge_request(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.SHARE_ACKNOWLEDGE, version, REQUEST, seed, tags)
    request = share_acknowledge.decode_request(version, memoryview(bytearray(b"\xaa" * 9 + data)), 9)
    assert tuple(request) == (
        plain["group_id"],
        plain["member_id"],
        plain["share_session_epoch"],
        plain.get("is_renew_ack", False),
        ack_topics(plain),
    )
    if not tags:
        group_id: Any = request.group_id  # the schema allows null
        member_id: Any = request.member_id
        encoded = share_acknowledge.encode_request(
            version,
            77,
            "me",
            group_id,
            member_id,
            request.session_epoch,
            request.topics,
            is_renew_ack=request.is_renew_ack,
        )
        assert body_of_request(encoded, ApiKey.SHARE_ACKNOWLEDGE, version) == data


@pytest.mark.parametrize("version", ACKNOWLEDGE)
@seeds
@few
def test_share_acknowledge_response(version: int, seed: int, tags: bool) -> None:
    plain, data = message(ApiKey.SHARE_ACKNOWLEDGE, version, RESPONSE, seed, tags)
    header = response_header(ApiKey.SHARE_ACKNOWLEDGE, version, 5)
    answer = share_acknowledge.decode_response(version, header + data)
    topics = [
        (
            topic["topic_id"] or ZERO,
            [
                AckResult(
                    part["partition_index"],
                    part["error_code"],
                    part["error_message"],
                    part["current_leader"]["leader_id"],
                    part["current_leader"]["leader_epoch"],
                )
                for part in topic["partitions"]
            ],
        )
        for topic in plain["responses"]
    ]
    assert tuple(answer) == (
        plain["throttle_time_ms"],
        plain["error_code"],
        plain["error_message"],
        plain.get("acquisition_lock_timeout_ms", 0),
        topics,
        endpoints(plain),
    )
    if not tags:
        encoded = share_acknowledge.encode_response(version, 5, answer)
        assert encoded == (len(header) + len(data)).to_bytes(4, "big") + header + data


@pytest.mark.parametrize("version", FETCH)
@pytest.mark.parametrize("codec", [share_fetch, share_acknowledge])
@pytest.mark.parametrize("direction", [REQUEST, RESPONSE])
def test_what_ends_anywhere_is_a_wire_error(codec: Any, direction: str, version: int) -> None:
    """Cut after every byte, one byte changed at every place, and one too many: a typed error, or another message."""
    key = ApiKey.SHARE_FETCH if codec is share_fetch else ApiKey.SHARE_ACKNOWLEDGE
    for seed in range(12):
        _, data = message(key, version, direction, seed, bool(seed % 2))
        if len(data) > 3000:
            continue

        def decode(raw: bytes) -> None:
            if direction == REQUEST:
                codec.decode_request(version, memoryview(raw), 0)
            else:
                codec.decode_response(version, response_header(key, version, 1) + raw)

        decode(data)
        with pytest.raises(WireError):
            decode(data + b"\x00")
        for end in range(len(data)):
            with pytest.raises(WireError):
                decode(data[:end])
        random = Random(seed)
        for at in range(len(data)):
            with suppress(WireError):
                decode(data[:at] + bytes((random.randrange(256),)) + data[at + 1 :])
