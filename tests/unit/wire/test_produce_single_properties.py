"""The client's fast path for Produce compared with the general codec."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import WireError
from mansio.wire.apis import produce
from mansio.wire.apis.produce import SINGLE_PARTITION_VERSION_MIN, SinglePartitionProduceCodec
from support.tiers import examples

VERSIONS = range(SINGLE_PARTITION_VERSION_MIN, 14)
TOPIC_ID = b"\x07" * 16
texts = st.text(max_size=20)


@settings(max_examples=examples(20, 200), deadline=None)
@given(
    version=st.sampled_from(VERSIONS),
    client_id=st.none() | texts,
    topic=texts.filter(bool),
    acks=st.sampled_from([-1, 0, 1]),
    size=st.sampled_from([0, 1, 125, 126, 127, 128, 16381, 16382, 16383, 70000]),
    index=st.integers(0, 1 << 30),
    correlation_id=st.integers(0, (1 << 31) - 1),
)
def test_request_equals_that_of_the_general_codec(
    version: int, client_id: str | None, topic: str, acks: int, size: int, index: int, correlation_id: int
) -> None:
    single = SinglePartitionProduceCodec(version, client_id, acks, 1000, topic, TOPIC_ID)
    batch = b"x" * size
    topics = [(topic, TOPIC_ID, [(index, batch)])]
    expected = produce.encode_request(version, correlation_id, client_id, acks, 1000, topics)
    assert single.encode(correlation_id, index, batch) == b"".join(map(bytes, expected))


def answer(version: int, topic: str, result: produce.PartitionResult, throttle_ms: int = 0) -> bytes:
    topics = [(topic if version < 13 else None, TOPIC_ID if version >= 13 else None, [result])]
    return produce.encode_response(version, 5, topics, throttle_ms)[4:]


@settings(max_examples=examples(20, 200), deadline=None)
@given(
    version=st.sampled_from(VERSIONS),
    topic=texts.filter(bool),
    index=st.integers(0, 1 << 30),
    base_offset=st.integers(0, (1 << 63) - 1),
    append_ms=st.integers(-1, 1 << 50),
    throttle_ms=st.integers(0, 1 << 30),
)
def test_success_response_is_decoded_by_the_fast_path(
    version: int, topic: str, index: int, base_offset: int, append_ms: int, throttle_ms: int
) -> None:
    single = SinglePartitionProduceCodec(version, "me", -1, 1000, topic, TOPIC_ID)
    frame = answer(version, topic, produce.PartitionResult(index, 0, base_offset, append_ms, 3), throttle_ms)
    assert single.decode_success(index, frame) == produce.PartitionResult(index, 0, base_offset, append_ms)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "result",
    [
        produce.PartitionResult(2, 6),
        produce.PartitionResult(3, 0, 9, -1, 0),
        produce.PartitionResult(2, 87, record_errors=((0, "bad"),)),
        produce.PartitionResult(2, 0, 9, -1, 0, "a word"),
    ],
)
def test_other_responses_are_left_to_the_general_codec(version: int, result: produce.PartitionResult) -> None:
    single = SinglePartitionProduceCodec(version, "me", -1, 1000, "topic", TOPIC_ID)
    assert single.decode_success(2, answer(version, "topic", result)) is None
    assert single.decode_success(2, answer(version, "other" * 5, produce.PartitionResult(2))) is None or (
        version >= 13  # the answer does not name it
    )


@settings(max_examples=examples(40, 600), deadline=None)
@given(
    version=st.sampled_from(VERSIONS),
    position=st.integers(4, 90),
    change=st.integers(1, 255),
    cut=st.integers(0, 20),
    more=st.binary(max_size=5),
)
def test_changed_response_is_decoded_as_by_the_general_codec(
    version: int, position: int, change: int, cut: int, more: bytes
) -> None:
    single = SinglePartitionProduceCodec(version, "me", -1, 1000, "topic", TOPIC_ID)
    original = answer(version, "topic", produce.PartitionResult(2, 0, 77, -1, 5))
    mutated = bytearray(original[: len(original) - cut] + more)
    if position < len(mutated):
        mutated[position] ^= change
    found = single.decode_success(2, bytes(mutated))
    if found is None:
        return
    try:
        ((name, topic_id, (result,)),) = produce.decode_response(version, bytes(mutated)).topics
    except WireError:
        raise AssertionError("the long way refuses it") from None
    assert (name or topic_id) == ("topic" if version < 13 else TOPIC_ID)
    assert (result.index, result.error_code) == (2, 0)
    assert found[1:4] == (0, result.base_offset, result.log_append_time_ms)
