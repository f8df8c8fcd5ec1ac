"""Receive service without any wire protocol."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.configs import ConfigAlteration, ConfigResource
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.share_groups import receive_records
from mansio.broker.services.share_groups.share import PartitionAcknowledgements
from mansio.config.config_def import Change, Operation, ResourceType
from mansio.errors import InvalidGroupId, InvalidRequest, UnknownTopicOrPartition
from mansio.state.share_partition.types import ACCEPT, RELEASE, AcknowledgementBatch
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch, encode_batch, read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.dead_letter_headers import (
    OFFSET_HEADER,
    REASON_HEADER,
    VALUE_OMITTED_HEADER,
)
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.batch.record_reader import Record

CONFIGS = {
    "share.auto.offset.reset": "earliest",
    "mansio.retry.backoff.ms": "0",
    "mansio.deadletterqueue.enable": "false",
    "share.delivery.count.limit": "2",
}


UNREADABLE = {
    "gzip garbage": (Codec.GZIP, b"\x1f\x8bnot gzip at all........"),
    "zstd truncated": (Codec.ZSTD, compress(Codec.ZSTD, bytes(1000))[:-6]),
    "snappy garbage": (Codec.SNAPPY, b"\xff\xfe\xfd" * 10),
    "lz4 garbage": (Codec.LZ4, b"\x04\x22\x4d\x18" + bytes(9)),
    "too few records": (Codec.GZIP, compress(Codec.GZIP, b"\x0e" + bytes(7))),
    "not compressed": (Codec.NONE, b"\x7f" * 30),
}
"""Contents of batches of two records with a valid checksum: codec and bytes."""


def store_unreadable(services: BrokerServices, content: tuple[Codec, bytes]) -> None:
    """Store a batch as brokers accepted it that did not check contents."""
    codec, data = content
    header = read_header(build_batch([(1_700_000_000_000, None, b"v", ())] * 2))
    batch = encode_batch(header._replace(attributes=int(codec)), data)
    services.partitions.find("t", None, 0).append(batch, internal=True)


async def publish_one(services: BrokerServices, value: bytes, codec: Codec = Codec.NONE) -> None:
    """Publish one record to partition 0, as a batch of its own."""
    record = RecordToPublish(value, b"key", partition=0)
    result = await services.publish.publish_records("t", [record], timeout_ms=5000, codec=codec)
    assert result.records[0].error is None


async def dead_letters(services: BrokerServices, count: int = 1) -> list[Record]:
    """Wait for so many dead letters, and return them."""
    while True:
        found: list[Record] = []
        for index in range(2):
            with contextlib.suppress(UnknownTopicOrPartition):
                for batch in services.partitions.find("dlq.t", None, index).log.batches(0):
                    found += read_records(batch)
        if len(found) >= count:
            assert len(found) == count
            return found
        await asyncio.sleep(0.02)


async def prepare(services: BrokerServices, configs: Mapping[str, str] | None = None) -> None:
    values = CONFIGS | dict(configs or {})
    changes = [Change(name, Operation.SET, value) for name, value in values.items()]
    group = ConfigResource(ResourceType.GROUP, "g")
    assert await services.configs.alter([ConfigAlteration(group, changes)], caller=ANONYMOUS) == [None]


async def publish(services: BrokerServices, *values: bytes, codec: Codec = Codec.NONE) -> None:
    records = [
        RecordToPublish(value, b"key", [("h", b"x")], partition=number % 2)
        for number, value in enumerate(values)
    ]
    result = await services.publish.publish_records("t", records, timeout_ms=5000, codec=codec)
    assert all(each.error is None for each in result.records)


async def receive(services: BrokerServices, max_records: int = 100, max_wait_ms: int = 5000) -> ReceiveResult:
    return await services.receive.receive_records(
        "g", ["t"], max_records=max_records, max_wait_ms=max_wait_ms
    )


async def acknowledge(
    services: BrokerServices, member_id: str, records: Sequence[ReceivedRecord], kind: int = ACCEPT
) -> None:
    for each in records:
        batch = AcknowledgementBatch(each.offset, each.offset, bytes([kind]))
        parts = [PartitionAcknowledgements(each.topic_id, each.partition, [batch])]
        (result,) = await services.share_service.acknowledge("g", member_id, parts, caller=ANONYMOUS)
        assert result.error is None


def test_records_are_received_decoded_and_acknowledged(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        values = [b"v%d" % number for number in range(10)]
        await publish(services, *values, codec=Codec.GZIP)
        first = await receive(services, 3)
        assert len(first.records) == 3
        assert not first.errors
        assert first.lock_ms > 0
        assert {(one.topic, one.key, one.headers, one.delivery_count) for one in first.records} == {
            ("t", b"key", (("h", b"x"),), 1)
        }
        await acknowledge(services, first.member_id, first.records)
        second = await receive(services)
        assert second.member_id != first.member_id
        received = [one.value for one in (*first.records, *second.records)]
        while len(received) < len(values):
            received += [one.value for one in (await receive(services)).records]
        assert sorted(map(present, received)) == values

    run(tmp_path, work)


def test_a_released_record_is_delivered_again_with_a_higher_count(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        await publish(services, b"v")
        first = await receive(services)
        await acknowledge(services, first.member_id, first.records, RELEASE)
        (again,) = (await receive(services)).records
        assert (again.value, again.delivery_count) == (b"v", 2)

    run(tmp_path, work)


def test_a_call_waits_for_records_until_its_timeout(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        assert list((await receive(services, max_wait_ms=50)).records) == []
        waiting = asyncio.ensure_future(receive(services))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await publish(services, b"late")
        assert [one.value for one in (await waiting).records] == [b"late"]

    run(tmp_path, work)


def test_a_call_does_not_end_at_offsets_without_a_record(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        setting = [Change("mansio.delay.enable", Operation.SET, "true")]
        topic = ConfigResource(ResourceType.TOPIC, "t")
        assert await services.configs.alter([ConfigAlteration(topic, setting)], caller=ANONYMOUS) == [None]
        delayed = [RecordToPublish(b"later", partition=0, delay_ms=3_600_000)] * 5
        await services.publish.publish_records("t", delayed, timeout_ms=5000)
        await services.publish.publish_records("t", [RecordToPublish(b"v", partition=0)], timeout_ms=5000)
        assert [one.value for one in (await receive(services, 1)).records] == [b"v"]
        for value in (b"1", b"2", b"3"):
            await services.publish.publish_records("t", delayed[:1], timeout_ms=5000)
            await services.publish.publish_records(
                "t", [RecordToPublish(value, partition=0)], timeout_ms=5000
            )
        assert [one.value for one in (await receive(services, 3)).records] == [b"1", b"2", b"3"]

    run(tmp_path, work)


def test_a_cancelled_call_leases_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        waiting = asyncio.ensure_future(receive(services))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await publish(services, b"v")
        for steps in range(12):  # cancelled at several steps of acquiring and storing
            waiting = asyncio.ensure_future(receive(services))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not waiting.cancel():
                break  # the disk was quick: the call is complete
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            waiting = asyncio.ensure_future(receive(services))
        assert steps > 4, "no call was cancelled while its leases were stored"
        (one,) = (await waiting).records
        assert one.value == b"v"  # more deliveries than the limit, if those had counted as attempts
        assert not services.share_partition_manager.parked

    run(tmp_path, work)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.ZSTD])
def test_records_beyond_the_bounds_of_a_call_are_left_to_the_next_ones_and_no_delivery_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    """At least one batch is decompressed in each call, whatever its size."""

    async def work(services: BrokerServices) -> None:
        await prepare(services)
        for number in range(7):
            await publish_one(services, b"%d" % number + bytes(100_000), codec)
        monkeypatch.setattr(receive_records, "CALL_DECOMPRESSED_BYTES_MAX", 50_000)
        found: list[int] = []
        for _ in range(7):  # the last ones are leased seven times; the limit of deliveries is 2
            result = await receive(services)
            assert not result.errors
            found += [record.offset for record in result.records]
            await acknowledge(services, result.member_id, result.records)
        assert found == list(range(7))
        assert not services.partitions.storage_health.unreadable

    run(tmp_path, work)


def test_records_beyond_the_size_of_an_answer_are_left_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        records = [RecordToPublish(bytes(100_000), partition=0) for _ in range(5)]
        await services.publish.publish_records("t", records, timeout_ms=5000, codec=Codec.ZSTD)
        monkeypatch.setattr(receive_records, "ANSWER_BYTES_MAX", 250_000)
        counts = []
        for _ in range(3):
            result = await receive(services)
            counts.append(len(result.records))
            await acknowledge(services, result.member_id, result.records)
        assert counts == [2, 2, 1]

    run(tmp_path, work)


def test_a_record_that_no_answer_can_hold_is_rejected_alone_and_visibly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services, {"mansio.deadletterqueue.enable": "true"})
        for value in (b"0", bytes(300_000), b"2", b"3"):
            await publish_one(services, value, Codec.ZSTD)
        monkeypatch.setattr(receive_records, "ANSWER_BYTES_MAX", 250_000)
        result = await receive(services)
        assert [(record.offset, record.delivery_count) for record in result.records] == [
            (0, 1),
            (2, 1),
            (3, 1),
        ]
        (letter,) = await dead_letters(services)
        assert letter.value == bytes(300_000), "the dead-letter topic keeps it"
        assert b"a receive returns at most 250000" in present(dict(letter.headers)[REASON_HEADER])

    run(tmp_path, work)


@pytest.mark.parametrize("order", ["none", "partition", "key"])
@pytest.mark.parametrize("content", UNREADABLE)
def test_an_unreadable_batch_is_rejected_alone_and_its_neighbours_are_delivered_once(
    tmp_path: Path, order: str, content: str
) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services, {"mansio.deadletterqueue.enable": "true", "mansio.share.order": order})
        await publish_one(services, b"0")
        store_unreadable(services, UNREADABLE[content])
        await publish_one(services, b"3")
        await publish_one(services, b"4", Codec.LZ4)
        found: list[Any] = []
        for _ in range(20):
            result = await receive(services, max_wait_ms=100)
            assert not result.errors
            found += [(record.offset, record.delivery_count) for record in result.records]
            await acknowledge(services, result.member_id, result.records)
            if len(found) == 3:
                break
        assert found == [(0, 1), (3, 1), (4, 1)]
        rejected_records = await dead_letters(services, 2)
        assert [letter.value for letter in rejected_records] == [None, None]
        for offset, letter in zip((1, 2), rejected_records, strict=True):
            headers = dict(letter.headers)
            assert headers[OFFSET_HEADER] == b"%d" % offset
            assert present(headers[REASON_HEADER]).startswith(b"the record cannot be read: ")
            assert headers[VALUE_OMITTED_HEADER] == b"the record cannot be read"
        health = services.partitions.storage_health
        assert health.unreadable["t", 0].offset == 1
        assert not health.damaged, "the log is intact"
        assert not health.corrupt_batches

    run(tmp_path, work)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_records_before_the_unreadable_rest_of_a_batch_are_delivered(tmp_path: Path, codec: Codec) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services, {"mansio.deadletterqueue.enable": "true"})
        await publish_one(services, b"0")
        whole = build_batch([(1_700_000_000_000, None, b"v", ())] * 3)
        body = bytearray(whole[HEADER_BYTES:])
        body[-4] = 0x7E  # length of the key of the last record: longer than the batch
        batch = encode_batch(read_header(whole)._replace(attributes=int(codec)), compress(codec, bytes(body)))
        services.partitions.find("t", None, 0).append(batch, internal=True)
        await publish_one(services, b"4")
        found: list[Any] = []
        while len(found) < 4:
            result = await receive(services, max_wait_ms=100)
            found += [(record.offset, record.delivery_count) for record in result.records]
            await acknowledge(services, result.member_id, result.records)
        assert found == [(0, 1), (1, 1), (2, 1), (4, 1)]
        (letter,) = await dead_letters(services, 1)
        assert dict(letter.headers)[OFFSET_HEADER] == b"3"

    run(tmp_path, work)


def test_invalid_calls_are_rejected(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        call = services.receive.receive_records
        with pytest.raises(InvalidGroupId):
            await call("", ["t"], max_records=1, max_wait_ms=0)
        with pytest.raises(InvalidRequest):
            await call("g", ["t"], max_records=0, max_wait_ms=0)
        with pytest.raises(UnknownTopicOrPartition):
            await call("g", ["none"], max_records=1, max_wait_ms=0)

    run(tmp_path, work)
