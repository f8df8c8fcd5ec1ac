"""The fast codec of replica fetches compared with the general one: the same bytes, values and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mansio.errors import MansioError
from mansio.wire.apis import fetch
from mansio.wire.apis.fetch import FetchedPartition, FetchPartition
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    BatchHeader,
    build_batch,
    check_stored_batch,
    encode_batch,
    iterate_batches,
    read_header,
    read_stored_batches,
)
from mansio.wire.headers import read_request_header
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = fetch.REPLICA_FETCH_VERSION
CLIENT_ID = "mansio-follower"
CLIENT_ID_BYTES = CLIENT_ID.encode()

often = settings(max_examples=examples(20, 100), deadline=None)
seldom = settings(max_examples=8, deadline=None, phases=[Phase.generate])  # each example is many cases
numbers, offsets = st.integers(-1, 2**31 - 1), st.integers(-1, 2**63 - 1)
topic_ids = st.binary(min_size=16, max_size=16)
wanted = st.builds(FetchPartition, numbers, numbers, offsets, numbers, offsets, numbers)
asked = st.dictionaries(topic_ids, st.lists(wanted, max_size=4), max_size=4)


@st.composite
def fetched(draw: st.DrawFn) -> FetchedPartition:
    records = draw(st.binary(max_size=300)) * draw(st.sampled_from((1, 1, 60)))
    return FetchedPartition(
        draw(numbers),
        draw(st.integers(-1, 120)),
        draw(offsets),
        draw(offsets),
        draw(offsets),
        draw(st.none() | st.just([(1, 2)])) if draw(st.integers(0, 9)) == 0 else None,
        draw(numbers),
        len(records),
        records or None,
        draw(st.tuples(numbers, offsets)) if draw(st.integers(0, 9)) == 0 else None,
    )


answered = st.lists(st.tuples(st.none(), topic_ids, st.lists(fetched(), max_size=4)), max_size=4)


def request(
    topics: dict[bytes, list[FetchPartition]], replica: tuple[int, int], session: tuple[int, int] = (0, -1)
) -> bytes:
    return fetch.encode_replica_request(
        CLIENT_ID_BYTES,
        topics,
        max_wait_ms=500,
        max_bytes=1 << 20,
        replica_id=replica[0],
        replica_epoch=replica[1],
        session_id=session[0],
        session_epoch=session[1],
    )


def outcome(call: Any, *arguments: Any) -> Any:
    """What it gave, or which error it raised."""
    try:
        return call(*arguments)
    except MansioError as error:
        return type(error)


def damages(data: bytes) -> Iterator[bytes]:
    """With each byte another one, and with each of the last bytes missing."""
    for place, byte in enumerate(data):
        for other in {0, 1, 0x7F, 0x80, 0xFF, byte ^ 1} - {byte}:
            yield data[:place] + bytes([other]) + data[place + 1 :]
    for size in range(max(0, len(data) - 20), len(data)):
        yield data[:size]


@often
@given(
    topics=asked,
    replica=st.tuples(st.integers(0, 9), st.integers(0, 2**60)),
    session=st.tuples(numbers, numbers),
)
def test_replica_request_is_the_same_in_both_codecs(
    topics: Any, replica: tuple[int, int], session: tuple[int, int]
) -> None:
    framed = request(topics, replica, session)
    assert framed == fetch.encode_request(
        VERSION,
        0,
        CLIENT_ID,
        [(None, topic_id, partitions) for topic_id, partitions in topics.items()],
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=1 << 20,
        replica_id=replica[0],
        replica_epoch=replica[1],
        session_id=session[0],
        session_epoch=session[1],
    )
    frame = memoryview(framed)[4:]
    body = read_request_header(frame).body_position
    assert fetch.decode_replica_request(frame, body) == fetch.decode_request(VERSION, frame, body)


@seldom
@given(topics=asked)
def test_other_requests_are_left_to_the_general_codec(topics: Any) -> None:
    framed = request(topics, (2, 77))
    body = read_request_header(framed[4:]).body_position
    for bad in damages(framed[4 + body :]):
        frame = memoryview(bad)
        found = fetch.decode_replica_request(frame, 0)
        assert found is None or found == fetch.decode_request(VERSION, frame, 0)


@often
@given(topics=answered, correlation_id=numbers, error_code=st.sampled_from((0, 77)), session_id=numbers)
def test_replica_response_is_the_same_in_both_codecs(
    topics: Any, correlation_id: int, error_code: int, session_id: int
) -> None:
    pieces = fetch.encode_replica_response(correlation_id, topics, error_code, session_id)
    plain = all(
        one.aborted_transactions is None and one.diverging_epoch is None
        for _, _, partitions in topics
        for one in partitions
    )
    assert (pieces is not None) == plain
    general = b"".join(fetch.encode_response(VERSION, correlation_id, topics, 0, error_code, session_id))
    assert pieces is None or b"".join(pieces) == general
    found = fetch.decode_replica_response(general[4:])
    assert (found is not None) == plain
    assert found is None or found == fetch.decode_response(VERSION, general[4:])


@seldom
@given(topics=answered)
def test_other_replica_responses_are_left_to_the_general_codec(topics: Any) -> None:
    for bad in damages(b"".join(fetch.encode_response(VERSION, 1, topics))[4:400]):
        found = outcome(fetch.decode_replica_response, bad)
        assert found is None or found == outcome(fetch.decode_response, VERSION, bad)


def test_counts_above_one_byte_are_left_to_the_general_codec() -> None:
    many: list[Any] = [(None, bytes([number]) * 16, []) for number in range(fetch.ONE_BYTE_COUNT_MAX + 1)]
    assert fetch.encode_replica_response(1, many) is None
    assert fetch.encode_replica_response(1, many[1:]) is not None
    framed = b"".join(fetch.encode_response(VERSION, 1, many))
    assert fetch.decode_replica_response(framed[4:]) is None


def one_by_one(buffer: bytes) -> tuple[list[BatchHeader], int]:
    headers, size = [], 0
    for position, header in iterate_batches(buffer):
        size = position + header.size
        headers.append(check_stored_batch(buffer[position:size]))
    return headers, size


@seldom
@given(sizes=st.lists(st.integers(1, 5), max_size=4))
def test_stored_batches_are_accepted_as_one_by_one(sizes: list[int]) -> None:
    whole = b"".join(
        build_batch([(7, None, b"value", ())] * size, base_offset=10 * number, leader_epoch=3)
        for number, size in enumerate(sizes)
    )
    assert read_stored_batches(whole) == one_by_one(whole)
    for bad in damages(whole):
        assert outcome(read_stored_batches, bad) == outcome(one_by_one, bad)


def test_invalid_stored_batch_raises_the_same_error() -> None:
    """Under a good CRC: what damage alone does not show."""
    batch = build_batch([(7, None, b"value", ())] * 3, base_offset=10, leader_epoch=3)
    header, body = read_header(batch), batch[HEADER_BYTES:]
    for changed in (
        {"attributes": 5},
        {"record_count": 4},
        {"record_count": -1},
        {"record_count": 0},
        {"last_offset_delta": 9},
    ):
        other = encode_batch(header._replace(**changed), body)
        assert outcome(read_stored_batches, batch + other) == outcome(one_by_one, batch + other)
