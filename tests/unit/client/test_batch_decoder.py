"""Decoding of fetched batches: damaged, aborted and out-of-range records are never delivered, and none is skipped."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

import mansio
from mansio.client import TopicPartition
from mansio.client.consumer.batch_decoder import decode_fetch
from mansio.client.consumer.fetcher import CompletedFetch, FetchRequest, PartitionState
from mansio.errors import CorruptMessage
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.fetch import FetchedPartition
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from support.batch_contents import compressed_batch, encoded_record, raw_batch
from support.machine import scaled
from unit.net.stub_broker import StubBroker

PLACE = TopicPartition("t", 0)


def batch(base_offset: int, *values: bytes, **more: Any) -> bytes:
    return build_batch([(1, None, value, ()) for value in values], base_offset=base_offset, **more)


def decoded(*batches: bytes, offset: int = 0, stop: int | None = None, **how: Any) -> tuple[list[Any], int]:
    """(values, offset to go on with)."""
    state = PartitionState(PLACE, offset, stop)
    chunk = CompletedFetch(state, offset, memoryview(b"".join(batches)), how.get("aborted", ()))
    found = list(decode_fetch(chunk, how.get("read_committed", True)))
    values = [(message.offset, message.value) for each in found for message in each.messages]
    return values, found[-1].next_offset


def test_records_outside_the_requested_offsets_are_dropped() -> None:
    values, following = decoded(batch(0, b"a", b"b"), batch(2, b"c", b"d", b"e"), offset=3, stop=4)
    assert values == [(3, b"d")]
    assert following == 5


def test_incomplete_batch_is_left_for_the_next_fetch() -> None:
    values, following = decoded(batch(0, b"a"), batch(1, b"b")[:-1])
    assert (values, following) == ([(0, b"a")], 1)


def control(base_offset: int, producer_id: int, kind: int) -> bytes:
    key = b"\x00\x00" + kind.to_bytes(2, "big")
    return build_batch(
        [(1, key, b"\x00" * 6, ())],
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        transactional=True,
        control=True,
    )


def test_aborted_transactions_are_invisible_for_read_committed_only() -> None:
    ours: dict[str, Any] = {"producer_id": 9, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
    log = [
        batch(0, b"aborted", **ours),
        control(1, 9, 0),
        batch(2, b"kept", **ours),
        control(3, 9, 1),
        batch(4, b"x"),
    ]
    values, following = decoded(*log, aborted=[(9, 0)])
    assert (values, following) == ([(2, b"kept"), (4, b"x")], 5)
    values, _ = decoded(*log, aborted=[(9, 0)], read_committed=False)
    assert [offset for offset, _ in values] == [0, 2, 4]


def test_flipped_bit_is_a_typed_error_with_its_offset() -> None:
    damaged = bytearray(batch(7, b"value"))
    damaged[-2] ^= 1
    with pytest.raises(CorruptMessage, match="t-0 at offset 7"):
        decoded(bytes(damaged), offset=7)


def parts(*batches: bytes, offset: int = 0, stop: int | None = None, bytes_max: int = 1 << 20) -> list[Any]:
    state = PartitionState(PLACE, offset, stop)
    fetched = CompletedFetch(state, offset, memoryview(b"".join(batches)), ())
    return [
        (
            each.unreadable[:2] if each.unreadable else [message.offset for message in each.messages],
            each.next_offset,
        )
        for each in decode_fetch(fetched, True, bytes_max)
    ]


def test_a_batch_that_cannot_be_read_is_reported_and_those_behind_it_are_read() -> None:
    records = b"".join(encoded_record(delta, b"v") for delta in range(3))
    log = [
        batch(0, b"a"),
        raw_batch(b"no gzip", 2, codec=1, base_offset=1),
        batch(3, b"b"),
        compressed_batch(encoded_record(0, bytes(1 << 20)), 1, Codec.ZSTD, base_offset=4),
        compressed_batch(records, 7, Codec.LZ4, base_offset=5),
        batch(12, b"c"),
    ]
    expected = [([0], 1), ((1, 2), 3), ([3], 4), ((4, 4), 5), ([5, 6, 7], 8), ((8, 11), 12), ([12], 13)]
    assert parts(*log) == expected
    assert parts(*log, bytes_max=1 << 21)[3] == ([4], 5)
    assert parts(log[4], offset=9, stop=11) == [([], 8), ((9, 10), 12)]
    assert parts(log[4], offset=5, stop=8) == [([5, 6, 7], 12)]


@pytest.mark.full
def test_a_large_batch_is_decoded_in_parts_and_its_decompressed_bytes_are_kept_once() -> None:
    count = 100_000
    data = compressed_batch(b"".join(encoded_record(n, b"", None) for n in range(count)), count, Codec.ZSTD)
    state = PartitionState(PLACE, 0, None)
    fetched = CompletedFetch(state, 0, memoryview(data), ())
    tracemalloc.start()
    try:
        offset = 0
        for each in decode_fetch(fetched, True):
            assert [each.messages[0].offset, each.next_offset] == [offset, each.messages[-1].offset + 1]
            offset = each.next_offset
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert offset == count
    assert peak < 12_000_000  # all messages at once take 19 MB


def test_damaged_batch_is_reported_until_it_is_repaired_and_never_skipped() -> None:
    damaged = bytearray(batch(1, b"second"))
    damaged[-2] ^= 1

    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:
            whole = [batch(0, b"first"), bytes(damaged), batch(2, b"third")]

            def fetch(request: Any) -> Any:
                ((name, topic_id, (asked,)),) = request.topics
                records = b"".join(whole[asked.fetch_offset :])
                return [(name, topic_id, [FetchedPartition(0, 0, 3, 3, 0, None, -1, len(records), records)])]

            broker.fetch = fetch
            broker.answers[ApiKey.LIST_OFFSETS] = lambda request: {
                "topics": [
                    {"name": "t", "partitions": [{"partition_index": 0, "offset": 0, "timestamp": -1}]},
                ]
            }
            async with (
                mansio.connect(broker.address) as client,
                client.consume("t", max_records=3) as consumer,
            ):
                assert (await anext(consumer)).value == b"first"
                for _ in range(2):
                    with pytest.raises(CorruptMessage):
                        await anext(consumer)
                whole[1] = batch(1, b"second")
                assert [(await anext(consumer)).value for _ in range(2)] == [b"second", b"third"]

    asyncio.run(asyncio.wait_for(scenario(), scaled(20)))


def test_waiting_reader_gets_its_record_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the next request costs is not added to the way of a record to a reader that waits for it; and the request
    is made as soon as that reader waits for anything."""
    order: list[str] = []
    encode = FetchRequest.encode

    def asking(self: FetchRequest, *args: Any) -> bytes:
        order.append("asked")
        return encode(self, *args)

    monkeypatch.setattr(FetchRequest, "encode", asking)

    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:

            def fetch(request: Any) -> Any:
                ((name, topic_id, (asked,)),) = request.topics
                records = batch(asked.fetch_offset, b"value")
                return [(name, topic_id, [FetchedPartition(0, 0, 9, 9, 0, None, -1, len(records), records)])]

            broker.fetch = fetch
            broker.answers[ApiKey.LIST_OFFSETS] = lambda _: {
                "topics": [
                    {"name": "t", "partitions": [{"partition_index": 0, "offset": 0, "timestamp": -1}]}
                ]
            }
            async with mansio.connect(broker.address) as client, client.consume("t") as consumer:
                for _ in range(2):
                    assert len(await consumer.poll()) == 1
                    order.append("handed out")

    asyncio.run(asyncio.wait_for(scenario(), scaled(20)))
    assert order[:4] == ["asked", "handed out", "asked", "handed out"]
