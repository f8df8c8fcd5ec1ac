"""The broker's fast path for Produce compared with the general codec."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import WireError
from mansio.wire.apis import produce
from mansio.wire.headers import read_request_header
from support.tiers import examples

VERSIONS = range(3, 14)
texts = st.text(max_size=20)


def frame_of(
    version: int,
    correlation_id: int,
    client_id: str | None,
    acks: int,
    topic: str,
    index: int,
    batch: bytes,
    transactional_id: str | None = None,
) -> memoryview:
    topics = [(topic if version < 13 else None, b"\x07" * 16, [(index, memoryview(batch))])]
    buffers = produce.encode_request(version, correlation_id, client_id, acks, 1000, topics, transactional_id)
    return memoryview(b"".join(bytes(buffer) for buffer in buffers))[4:]


def learned(frame: memoryview) -> produce.ProduceTemplate | None:
    header = read_request_header(frame)
    request = produce.decode_request(header.api_version, frame, header.body_position)
    return produce.build_template(header, frame, request)


@settings(max_examples=examples(20, 200), deadline=None)
@given(
    version=st.sampled_from(VERSIONS),
    client_id=st.none() | texts,
    transactional_id=st.none() | texts,
    topic=texts.filter(bool),
    sizes=st.tuples(st.integers(1, 300), st.sampled_from([1, 126, 127, 128, 16382, 16383, 16384, 70000])),
    index=st.integers(0, 1 << 30),
    correlation_id=st.integers(0, (1 << 31) - 1),
)
def test_matching_request_is_decoded_as_by_the_general_codec(
    version: int,
    client_id: str | None,
    transactional_id: str | None,
    topic: str,
    sizes: tuple[int, int],
    index: int,
    correlation_id: int,
) -> None:
    first, second = (b"x" * sizes[0], b"y" * sizes[1])
    pattern = learned(frame_of(version, 1, client_id, -1, topic, 3, first, transactional_id))
    assert pattern is not None
    assert pattern.is_transactional == (transactional_id is not None)
    frame = frame_of(version, correlation_id, client_id, -1, topic, index, second, transactional_id)
    header = read_request_header(frame)
    request = produce.decode_request(version, frame, header.body_position)
    assert produce.match_template(pattern, frame) == request.topics[0][2][0]
    result = produce.PartitionResult(index, 0, 123456789, -1, 17)
    expected = produce.encode_response(version, correlation_id, [(*request.topics[0][:2], [result])])
    assert produce.encode_template_response(pattern, correlation_id, index, 123456789, -1, 17) == expected


@settings(max_examples=examples(40, 600), deadline=None)
@given(
    version=st.sampled_from(VERSIONS),
    position=st.integers(0, 400),
    change=st.integers(1, 255),
    cut=st.integers(0, 40),
    more=st.binary(max_size=5),
    transactional_id=st.sampled_from([None, "orders-1"]),
)
def test_changed_frame_is_decoded_as_by_the_general_codec(
    version: int, position: int, change: int, cut: int, more: bytes, transactional_id: str | None
) -> None:
    original = bytes(frame_of(version, 5, "me", 1, "topic", 2, b"z" * 150, transactional_id))
    pattern = learned(memoryview(original))
    assert pattern is not None
    mutated = bytearray(original[: len(original) - cut] + more)
    if position < len(mutated):
        mutated[position] ^= change
    frame = memoryview(bytes(mutated))
    found = produce.match_template(pattern, frame)
    if found is None:
        return
    header = read_request_header(frame)
    request = produce.decode_request(header.api_version, frame, header.body_position)
    assert request.transactional_id == transactional_id
    assert request.acks == pattern.acks
    assert request.timeout_ms == pattern.timeout_ms
    assert request.topics == [(pattern.topic, pattern.topic_id, [found])]


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_with_several_batches_have_no_template(version: int) -> None:
    batch = memoryview(b"x" * 70)
    name = "t" if version < 13 else None
    for topics in (
        [(name, b"\x01" * 16, [(0, batch), (1, batch)])],
        [(name, b"\x01" * 16, [(0, batch)]), (name, b"\x02" * 16, [(0, batch)])],
        [(name, b"\x01" * 16, [(0, None)])],
    ):
        buffers = produce.encode_request(version, 1, None, 1, 1000, topics)
        frame = memoryview(b"".join(bytes(buffer) for buffer in buffers))[4:]
        try:
            assert learned(frame) is None
        except WireError:
            pytest.fail("these requests are sound")
