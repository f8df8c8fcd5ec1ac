"""Publish service without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS_USER, Caller
from mansio.broker.services import publish_records
from mansio.broker.services.publish_records import RecordToPublish, ValuesToPublish, ranges_of
from mansio.broker.topics.topics import NewTopic
from mansio.errors import (
    InvalidRecord,
    InvalidRequest,
    InvalidRequiredAcks,
    InvalidTimestamp,
    InvalidTopic,
    MessageTooLarge,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from mansio.state.quota import PRODUCER_BYTE_RATE, NonLiteralName, QuotaEntity
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_reader import read_records
from mansio.wire.field_values import ACKS_NONE
from mansio.wire.murmur2 import partition_for_key

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.publish_records import PendingPublish
    from mansio.wire.batch.record_reader import Record

TIMEOUT_MS = 5000


def stored(services: BrokerServices, topic: str, index: int) -> list[Record]:
    partition = services.partitions.find(topic, None, index)
    records: list[Record] = []
    while (found := partition.read(records[-1].offset + 1 if records else 0, 1)) is not None:
        records += read_records(bytes(found.read()), output_bytes_max=1 << 20)
    return records


def ready(services: BrokerServices, index: int) -> Partition:
    return services.partitions.find("t", None, index)


def test_records_with_a_key_go_to_the_partition_of_kafkas_clients_in_order(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        sent = [
            RecordToPublish(
                b"v%d" % number, b"key-%d" % (number % 7), [("h", b"x"), ("n", None)], 1000 + number
            )
            for number in range(50)
        ]
        result = await services.publish.publish_records("t", sent, timeout_ms=TIMEOUT_MS)
        found = {
            (index, record.offset): record for index in (0, 1) for record in stored(services, "t", index)
        }
        assert len(found) == len(sent)
        for record, published in zip(sent, result.records, strict=True):
            assert published.error is None
            assert published.partition == partition_for_key(record.key or b"", 2)
            assert published.timestamp_ms == record.timestamp_ms
            at = found[published.partition, published.offset]
            assert (at.key, at.value, at.headers, at.timestamp_ms) == (
                record.key,
                record.value,
                tuple(record.headers),
                record.timestamp_ms,
            )
        for index in (0, 1):
            offsets = [each.offset for each in result.records if each.partition == index]
            assert offsets == sorted(offsets)
            assert ready(services, index).high_watermark == len(offsets)
        assert result.throttle_ms == 0

    run(tmp_path, work)


def test_records_without_a_key_share_a_partition_and_a_given_partition_is_used(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        used = set()
        for _ in range(40):
            result = await services.publish.publish_records(
                "t", [RecordToPublish(b"a"), RecordToPublish(b"b")], timeout_ms=TIMEOUT_MS
            )
            first, second = result.records
            assert (second.partition, second.offset) == (first.partition, first.offset + 1)
            assert first.timestamp_ms > 0
            used.add(first.partition)
        assert used == {0, 1}
        given = [RecordToPublish(b"a", b"key", partition=1), RecordToPublish(b"b", partition=7)]
        result = await services.publish.publish_records("t", given, timeout_ms=TIMEOUT_MS, codec=Codec.GZIP)
        assert (result.records[0].partition, result.records[0].error) == (1, None)
        assert result.records[1].partition == 7
        assert isinstance(result.records[1].error, UnknownTopicOrPartition)

    run(tmp_path, work)


def test_a_call_that_does_not_fit_into_one_batch_becomes_several(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("small", 1, configs=[("max.message.bytes", "1000")]))
        sent = [RecordToPublish(b"%03d" % number * 50) for number in range(30)]
        result = await services.publish.publish_records("small", sent, timeout_ms=TIMEOUT_MS)
        assert [each.offset for each in result.records] == list(range(30))
        assert [each.value for each in stored(services, "small", 0)] == [each.value for each in sent]
        assert services.produce.counters.appended_batches > 4

    run(tmp_path, work)


@pytest.mark.parametrize("batch_bytes_max", [1 << 20, 1_000], ids=["one batch", "several batches"])
@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_values_alone_are_stored_as_their_records_are(
    tmp_path: Path, kind: str, batch_bytes_max: int
) -> None:
    async def work(services: BrokerServices) -> None:
        values = [b"%03d" % number * (number % 50 + 1) for number in range(100)] + [
            b"x" * 700,
            b"",
            b"y" * 700,
        ]
        configs = [("max.message.bytes", str(batch_bytes_max)), ("message.timestamp.type", kind)]
        found: dict[str, int] = {}
        batches = 0
        for name in ("values", "records"):
            await services.topics.create(NewTopic(name, 1, configs=configs))
            sent = ValuesToPublish(values) if name == "values" else list(map(RecordToPublish, values))
            result = await services.publish.publish_records(name, sent, timeout_ms=TIMEOUT_MS)
            assert len(result.records) == len(values)
            records = stored(services, name, 0)
            assert [each.value for each in records] == values
            assert [(each.offset, each.timestamp_ms) for each in result.records] == [
                (each.offset, each.timestamp_ms) for each in records
            ]
            assert sum(each.length for each in result.ranges) == len(values)
            before, batches = batches, services.produce.counters.appended_batches
            found[name] = batches - before
        assert found["values"] == 1 if batch_bytes_max > 1_000 else found["values"] > 10
        assert found["values"] == found["records"]

    run(tmp_path, work)


def test_values_alone_fail_as_their_records_do(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("c", 1, configs=[("cleanup.policy", "compact")]))
        await services.topics.create(NewTopic("small", 1, configs=[("max.message.bytes", "1000")]))
        values = ValuesToPublish([b"first", b"x" * 2_000, b"third"])
        without_keys = await services.publish.publish_records("c", values, timeout_ms=TIMEOUT_MS)
        assert [type(each.error) for each in without_keys.records] == [InvalidRecord] * 3
        large = await services.publish.publish_records("small", values, timeout_ms=TIMEOUT_MS)
        assert [type(each.error) for each in large.records] == [type(None), MessageTooLarge, type(None)]
        assert [each.is_refused for each in large.records] == [False, True, False]
        assert [each.value for each in stored(services, "small", 0)] == [b"first", b"third"]
        with pytest.raises(MessageTooLarge):
            await services.publish.begin_publish("t", ValuesToPublish([bytes(600_000)] * 20))
        empty = await services.publish.publish_records("t", ValuesToPublish([]), timeout_ms=TIMEOUT_MS)
        assert empty.records == []

    run(tmp_path, work, socket_request_max_bytes=10_000_000)


def test_results_name_every_record_in_order_whatever_its_partition(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        sent = [
            RecordToPublish(
                b"%d" % number, partition=(0, 0, 1, 9)[number % 4], timestamp_ms=-1 if number == 5 else None
            )
            for number in range(12)
        ]
        result = await services.publish.publish_records("t", sent, timeout_ms=TIMEOUT_MS)
        assert [first for first, _, _ in result.ranges] == sorted({first for first, _, _ in result.ranges})
        assert [each.partition for each in result.records] == [each.partition for each in sent]
        for record, published in zip(sent, result.records, strict=True):
            if published.error is None:
                index = published.partition
                assert stored(services, "t", index)[published.offset].value == record.value
        assert [type(each.error) for each in result.records] == [
            InvalidTimestamp if number == 5 else UnknownTopicOrPartition if number % 4 == 3 else type(None)
            for number in range(12)
        ]
        assert ranges_of(result.records) == list(result.ranges)

    run(tmp_path, work)


def test_invalid_records_fail_on_their_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        small = [("max.message.bytes", "1000"), ("cleanup.policy", "compact")]
        await services.topics.create(NewTopic("c", 1, configs=small))
        sent = [
            RecordToPublish(b"good", b"k"),
            RecordToPublish(b"no key"),
            RecordToPublish(b"x" * 2000, b"k"),
            RecordToPublish(b"future", b"k", timestamp_ms=services.clock.wall_ms() + (1 << 50)),
            RecordToPublish(b"negative", b"k", timestamp_ms=-5),
            RecordToPublish(b"header", b"k", [("\ud800", b"")]),
            RecordToPublish(b"good, too", b"k"),
        ]
        result = await services.publish.publish_records("c", sent, timeout_ms=TIMEOUT_MS)
        assert [type(each.error) for each in result.records] == [
            type(None),
            InvalidRecord,
            MessageTooLarge,
            InvalidTimestamp,
            InvalidTimestamp,
            InvalidRecord,
            type(None),
        ]
        assert [each.value for each in stored(services, "c", 0)] == [b"good", b"good, too"]

    run(tmp_path, work)


def test_what_concerns_all_records_is_raised_and_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(services: BrokerServices) -> None:
        publish = services.publish
        await services.topics.create(NewTopic("__consumer_offsets", 1), internal=True)
        one = [RecordToPublish(b"value")]
        with pytest.raises(UnknownTopicOrPartition):
            await publish.publish_records("none", one, timeout_ms=TIMEOUT_MS)
        with pytest.raises(InvalidTopic):
            await publish.begin_publish("__consumer_offsets", one)
        with pytest.raises(InvalidRequiredAcks):
            await publish.begin_publish("t", one, acks=ACKS_NONE)
        with pytest.raises(MessageTooLarge):
            await publish.begin_publish("t", [RecordToPublish(bytes(600_000))] * 20)
        monkeypatch.setattr(publish_records, "PUBLISHED_RECORDS_MAX", 3)
        with pytest.raises(InvalidRequest):
            await publish.begin_publish("t", one * 4)
        assert (await publish.publish_records("t", [], timeout_ms=TIMEOUT_MS)).records == []
        assert services.produce.counters.appended_batches == 0

    run(tmp_path, work, socket_request_max_bytes=10_000_000)


def test_cancelling_ends_the_waiting_and_not_the_append(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[PendingPublish] = []
        pending = await services.publish.begin_publish("t", [RecordToPublish(b"value", partition=0)])
        assert not pending.is_complete
        pending.wait(TIMEOUT_MS, done.append)
        pending.cancel()
        waiting = asyncio.ensure_future(
            services.publish.publish_records(
                "t", [RecordToPublish(b"value", partition=0)], timeout_ms=TIMEOUT_MS
            )
        )
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not services.produce.pending
        await ready(services, 0).commit_promise(2)
        assert done == []
        assert len(stored(services, "t", 0)) == 2

    run(tmp_path, work)


def test_records_that_are_not_committed_in_time_are_reported_as_timed_out(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        done: list[PendingPublish] = []
        pending = await services.publish.begin_publish("t", [RecordToPublish(b"value", partition=0)] * 2)
        pending.wait(0, done.append)
        services.produce.time_out_requests(services.clock.monotonic() + 10)
        assert done == [pending]
        assert [type(each.error) for each in pending.result().records] == [RequestTimedOut] * 2

    run(tmp_path, work)


def test_the_quota_of_the_callers_client_id_is_charged(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.quotas.alter(QuotaEntity(NonLiteralName.ABSENT, "slow"), {PRODUCER_BYTE_RATE: 1000.0})
        records = [RecordToPublish(bytes(100_000))]
        slow = await services.publish.publish_records(
            "t", records, timeout_ms=TIMEOUT_MS, caller=Caller(client_id="slow")
        )
        other = await services.publish.publish_records(
            "t", records, timeout_ms=TIMEOUT_MS, caller=Caller(client_id="other")
        )
        assert slow.records[0].error is None
        assert slow.throttle_ms > 0
        assert other.throttle_ms == 0

    run(tmp_path, work)


def test_a_callers_deadline_shortens_the_timeout() -> None:
    assert Caller().session.user == ANONYMOUS_USER
    assert Caller().timeout_ms(500, 10.0) == 500
    assert Caller(deadline=10.2).timeout_ms(500, 10.0) == pytest.approx(200)
    assert Caller(deadline=9.0).timeout_ms(500, 10.0) == 0
