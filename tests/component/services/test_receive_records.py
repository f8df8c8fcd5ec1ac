"""Receive service without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.services.configs import ConfigAlteration, ConfigResource, ResourceType
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.share_groups import receive_records
from mansio.broker.services.share_groups.share import PartitionAcknowledgements
from mansio.config.config_def import Change, Operation
from mansio.errors import InvalidGroupId, InvalidRecord, InvalidRequest, UnknownTopicOrPartition
from mansio.state.share_partition.types import ACCEPT, RELEASE, AcknowledgementBatch
from mansio.wire.batch.compression import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
    from mansio.broker.services.broker_services import BrokerServices

CONFIGS = {
    "share.auto.offset.reset": "earliest",
    "mansio.retry.backoff.ms": "0",
    "mansio.deadletterqueue.enable": "false",
    "share.delivery.count.limit": "2",
}


async def prepare(services: BrokerServices) -> None:
    changes = [Change(name, Operation.SET, value) for name, value in CONFIGS.items()]
    group = ConfigResource(ResourceType.GROUP, "g")
    assert await services.configs.alter([ConfigAlteration(group, changes)]) == [None]


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
        (result,) = await services.share_service.acknowledge("g", member_id, parts)
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
        assert sorted(received) == values

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
        assert await services.configs.alter([ConfigAlteration(topic, setting)]) == [None]
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


def test_records_beyond_the_bound_of_decoded_bytes_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(services: BrokerServices) -> None:
        await prepare(services)
        await publish(services, bytes(100_000), codec=Codec.GZIP)
        monkeypatch.setattr(receive_records, "DECODED_BYTES_MAX", 50_000)
        result = await receive(services)
        assert list(result.records) == []
        assert isinstance(result.errors["t", 0], InvalidRecord)
        monkeypatch.setattr(receive_records, "DECODED_BYTES_MAX", 500_000)
        (one,) = (await receive(services)).records
        assert one.delivery_count == 2

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
