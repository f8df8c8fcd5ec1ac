"""The client's hand-written codec of AcknowledgeRecords compared with the codec compiled from its schema."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.acknowledge_records import AcknowledgeBatch, decode_response, encode_request
from mansio.wire.codec import messages
from mansio.wire.codec.messages import RESPONSE
from mansio.wire.headers import read_request_header, response_header
from support.tiers import examples
from unit.wire.kio_oracle import random_message

KEY = ApiKey.ACKNOWLEDGE_RECORDS
ZERO = bytes(16)

few = settings(max_examples=examples(20, 60), deadline=None)
offsets = st.integers(0, 2**63 - 1)
batches = st.builds(
    AcknowledgeBatch,
    offsets,
    offsets,
    st.integers(0, 4),
    st.integers(-1, 2**63 - 1),
    st.text(max_size=200),
    st.integers(-1, 2**31 - 1),
)
topics = st.lists(
    st.tuples(
        st.binary(min_size=16, max_size=16).filter(any),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.lists(batches, max_size=3)), max_size=3),
    ),
    max_size=3,
)


@given(correlation_id=st.integers(0, 2**31 - 1), member=st.text(max_size=200), sent=topics)
@few
def test_a_request_contains_what_the_schema_reads(correlation_id: int, member: str, sent: list[Any]) -> None:
    framed = encode_request(correlation_id, "us", "g", member, sent)
    assert int.from_bytes(framed[:4], "big") == len(framed) - 4
    header = read_request_header(framed[4:])
    assert (header.api_key, header.correlation_id, header.client_id) == (KEY, correlation_id, "us")
    found = messages.decode_request(KEY, 0, framed[4 + header.body_position :])
    assert (found.group_id, found.member_id) == ("g", member)
    assert sent == [
        (
            bytes(topic.topic_id),
            [
                (
                    part.partition_index,
                    [
                        AcknowledgeBatch(
                            one.first_offset,
                            one.last_offset,
                            int.from_bytes(one.types),
                            one.delay_ms,
                            one.reason,
                            one.delivery_count,
                        )
                        for one in part.batches
                    ],
                )
                for part in topic.partitions
            ],
        )
        for topic in found.topics
    ]


@given(seed=st.integers(0, 2**32))
@few
def test_an_answer_is_read_as_the_schema_reads_it(seed: int) -> None:
    fields = random_message(Random(seed), messages._schema(KEY, 0, RESPONSE))
    out = bytearray()
    messages._writer(KEY, 0, RESPONSE)(out, fields)
    answer = decode_response(response_header(KEY, 0, 7) + bytes(out))
    assert answer[:4] == (
        fields["throttle_time_ms"],
        fields["error_code"],
        fields["error_message"],
        fields["acquisition_lock_timeout_ms"],
    )
    assert [tuple(result) for result in answer.results] == [
        (topic["topic_id"] or ZERO, part["partition_index"], part["error_code"], part["error_message"])
        for topic in fields["topics"]
        for part in topic["partitions"]
    ]
    for cut in range(len(out)):
        with suppress(WireError):
            decode_response(response_header(KEY, 0, 7) + bytes(out[:cut]))


@given(
    topic_id=st.binary(min_size=16, max_size=16).filter(any),
    numbers=st.tuples(*[st.integers(0, 2**31 - 1)] * 3),
)
@few
def test_the_usual_answer_is_read_as_the_schema_reads_it_and_so_is_all_that_looks_like_it(
    topic_id: bytes, numbers: tuple[int, int, int]
) -> None:
    throttle_ms, lock_ms, index = numbers
    fields = {
        "throttle_time_ms": throttle_ms,
        "acquisition_lock_timeout_ms": lock_ms,
        "topics": [{"topic_id": topic_id, "partitions": [{"partition_index": index}]}],
    }
    out = bytearray()
    messages._writer(KEY, 0, RESPONSE)(out, fields)
    start = response_header(KEY, 0, 7)
    answer = decode_response(start + bytes(out))
    assert answer == (throttle_ms, 0, None, lock_ms, [(topic_id, index, 0, None)])
    for place in range(len(out)):
        other = bytes(out[:place]) + bytes((out[place] ^ 1,)) + bytes(out[place + 1 :])
        with suppress(WireError):
            other_answer = decode_response(start + other)
            found = messages.decode_response(KEY, 0, other)
            assert other_answer[:4] == (
                found.throttle_time_ms,
                found.error_code,
                found.error_message,
                found.acquisition_lock_timeout_ms,
            )
            assert [each[1:3] for each in other_answer.results] == [
                (part.partition_index, part.error_code) for topic in found.topics for part in topic.partitions
            ]
