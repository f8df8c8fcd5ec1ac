"""The broker's hand-written codec of AcknowledgeRecords compared with the codec compiled from its schema."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.acknowledge_records import AcknowledgedPartition, decode_request, encode_response
from mansio.wire.codec import messages
from mansio.wire.codec.messages import REQUEST
from support.tiers import examples
from unit.wire.kio_oracle import random_message

KEY = ApiKey.ACKNOWLEDGE_RECORDS
ZERO = bytes(16)

few = settings(max_examples=examples(20, 60), deadline=None)


def request_of(seed: int) -> tuple[dict[str, Any], bytes]:
    fields = random_message(Random(seed), messages._schema(KEY, 0, REQUEST))
    out = bytearray()
    messages._writer(KEY, 0, REQUEST)(out, fields)
    return fields, bytes(out)


def plain(data: bytes) -> tuple[Any, ...] | None:
    """What the schema's reader finds; None for what it refuses."""
    try:
        request = messages._decode(KEY, 0, REQUEST, data)
    except WireError:
        return None
    return (
        request.group_id,
        request.member_id,
        [
            (
                topic.topic_id or ZERO,
                part.partition_index,
                [
                    (
                        one.first_offset,
                        one.last_offset,
                        one.types,
                        one.delay_ms,
                        one.reason,
                        one.delivery_count,
                    )
                    for one in part.batches
                ],
            )
            for topic in request.topics
            for part in topic.partitions
        ],
    )


def read(data: bytes) -> tuple[Any, ...] | None:
    try:
        return tuple(decode_request(memoryview(b"\xaa" * 5 + data), 5))
    except WireError:
        return None


@given(seed=st.integers(0, 2**32))
@few
def test_a_request_is_read_as_the_schema_reads_it(seed: int) -> None:
    _, data = request_of(seed)
    assert plain(data) is not None
    assert read(data) == plain(data)


@given(
    seed=st.integers(0, 2**32),
    at=st.integers(0, 2**16),
    byte=st.integers(0, 255),
    cut=st.integers(0, 40),
    more=st.binary(max_size=2),
)
@few
def test_what_is_no_request_is_refused_as_the_schema_refuses_it(
    seed: int, at: int, byte: int, cut: int, more: bytes
) -> None:
    _, data = request_of(seed)
    broken = bytearray(data)
    broken[at % len(broken)] = byte
    broken = broken[: len(broken) - cut] + more
    assert read(bytes(broken)) == plain(bytes(broken))


@given(
    correlation_id=st.integers(0, 2**31 - 1),
    lock_ms=st.integers(0, 2**31 - 1),
    topics=st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.lists(
            st.builds(
                AcknowledgedPartition,
                st.integers(0, 2**31 - 1),
                st.sampled_from([0, 6, 121]),
                st.none() | st.text(max_size=200),
            ),
            max_size=3,
        ),
        max_size=3,
    ),
)
@few
def test_an_answer_is_written_as_the_schema_writes_it(
    correlation_id: int, lock_ms: int, topics: dict[bytes, list[AcknowledgedPartition]]
) -> None:
    fields = {
        "acquisition_lock_timeout_ms": lock_ms,
        "topics": [
            {
                "topic_id": topic_id,
                "partitions": [
                    {"partition_index": index, "error_code": code, "error_message": message}
                    for index, code, message in partitions
                ],
            }
            for topic_id, partitions in topics.items()
        ],
    }
    expected = messages.encode_response(KEY, 0, correlation_id, fields)
    assert encode_response(correlation_id, topics, lock_ms=lock_ms) == expected
