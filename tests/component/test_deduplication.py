"""Deduplication window on a test broker: what is a repeat, what its producer gets, and what keeps the ids."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, Producer

import mansio
from mansio.broker.features.deduplication import deduplicator
from mansio.errors import DeduplicationNotEnabled, InvalidConfig, InvalidRecord
from mansio.testing import TestBroker
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.delay_headers import DELAY_HEADER
from mansio.wire.batch.record_batch import build_batch
from support.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mansio import Message

pytestmark = pytest.mark.row("P3")

TOPIC = "orders"
MINUTE_MS = 60_000
WINDOW: Mapping[str, str] = {"mansio.dedup.ms": str(5 * MINUTE_MS)}


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=1, config=WINDOW)
        yield running


def visible(broker: TestBroker, topic: str = TOPIC) -> list[Message]:
    """All records of partition 0 that a consumer receives."""
    with broker.client().consume(mansio.TopicPartition(topic, 0), to_end=True) as consumer:
        return list(consumer)


def values(broker: TestBroker, topic: str = TOPIC) -> list[bytes | None]:
    return [message.value for message in visible(broker, topic)]


def start_offset(broker: TestBroker, topic: str) -> int:
    partition = mansio.TopicPartition(topic, 0)
    return broker.client().admin.list_offsets([partition], "earliest")[partition].offset


def end_offset(broker: TestBroker, topic: str) -> int:
    partition = mansio.TopicPartition(topic, 0)
    return broker.client().admin.list_offsets([partition], "latest")[partition].offset


def peer(broker: TestBroker) -> RawPeer:
    return RawPeer(int(broker.bootstrap_servers.rpartition(":")[2]))


def batch(
    broker: TestBroker,
    records: Sequence[tuple[bytes, bytes | None]],
    *,
    sequence: int | None = None,
    headers: Sequence[tuple[str, bytes]] = (),
    **fields: Any,
) -> bytes:
    """A batch of (value, id or None), of an idempotent producer if it has a sequence."""
    if sequence is not None:
        fields |= {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
    now_ms = broker.clock.time_ms()
    rows = [
        (now_ms, None, value, [*headers, *([] if dedup_id is None else [(DEDUP_ID_HEADER, dedup_id)])])
        for value, dedup_id in records
    ]
    return build_batch(rows, **fields)


class TestWindow:
    def test_a_repeat_is_not_stored_and_gets_the_first_offset(self, broker: TestBroker) -> None:
        client = broker.client()
        first = client.publish(TOPIC, b"one", dedup_id="order-1")
        client.publish(TOPIC, b"two", dedup_id="order-2")
        repeat = client.publish(TOPIC, b"another content", dedup_id="order-1")
        assert repeat.offset == first.offset
        assert values(broker) == [b"one", b"two"]
        (found, _) = visible(broker)
        assert (found.offset, found.header(DEDUP_ID_HEADER)) == (first.offset, b"order-1")

    def test_the_window_is_exact_and_counts_from_the_first_acceptance(self, broker: TestBroker) -> None:
        client = broker.client()
        accepted_ms = broker.clock.time_ms()
        client.publish(TOPIC, b"0", dedup_id="id")
        for minutes in (2, 2):
            broker.clock.advance(minutes=minutes)
            client.publish(TOPIC, b"repeat", dedup_id="id")
        remaining_ms = accepted_ms + 5 * MINUTE_MS - broker.clock.time_ms()
        broker.clock.advance(remaining_ms / 1000 - 1)
        client.publish(TOPIC, b"repeat", dedup_id="id")
        broker.clock.advance(seconds=2)
        client.publish(TOPIC, b"1", dedup_id="id")
        client.publish(TOPIC, b"repeat", dedup_id="id")
        assert values(broker) == [b"0", b"1"]

    def test_records_without_an_id_are_never_repeats(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish_many(TOPIC, [b"same"] * 3)
        client.publish(TOPIC, b"same", headers={"other": b"mansio-dedup-id"})
        client.publish(TOPIC, b"mansio-dedup-id", key=b"mansio-dedup-id")
        client.publish(TOPIC, b"mansio-dedup-id", key=b"mansio-dedup-id")
        assert len(values(broker)) == 6

    def test_partitions_have_their_own_windows(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("two", partitions=2, config=WINDOW)
        for partition in (0, 1, 0):
            client.publish("two", b"%d" % partition, partition=partition, dedup_id="id")
        assert values(broker, "two") == [b"0"]
        with client.consume("two", to_end=True) as consumer:
            assert sorted(message.value or b"" for message in consumer) == [b"0", b"1"]

    def test_a_topic_without_the_setting_keeps_the_header_as_bytes(self, broker: TestBroker) -> None:
        broker.client().admin.create_topic("plain", partitions=1)
        for _ in range(2):
            broker.client().publish("plain", b"x", headers={DEDUP_ID_HEADER: b"id"})
        assert [message.header(DEDUP_ID_HEADER) for message in visible(broker, "plain")] == [b"id"] * 2

    def test_the_window_can_be_changed_turned_off_and_on(self, broker: TestBroker) -> None:
        client = broker.client()
        headers = {DEDUP_ID_HEADER: b"id"}
        client.publish(TOPIC, b"first", headers=headers)
        client.admin.alter_topic_config(TOPIC, {"mansio.dedup.ms": "0"})
        client.publish(TOPIC, b"off", headers=headers)
        client.admin.alter_topic_config(TOPIC, {"mansio.dedup.ms": str(60 * MINUTE_MS)})
        client.publish(TOPIC, b"repeat", headers=headers)
        broker.clock.advance(minutes=10)
        client.publish(TOPIC, b"repeat", headers=headers)
        client.admin.alter_topic_config(TOPIC, {"mansio.dedup.ms": "1000"})
        client.publish(TOPIC, b"expired", headers=headers)
        assert values(broker) == [b"first", b"off", b"expired"]

    def test_a_topic_with_records_gets_a_window(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("late", partitions=1)
        client.publish_many("late", [b"before"] * 100)
        client.admin.alter_topic_config("late", dict(WINDOW))
        for _ in range(2):
            client.publish("late", b"x", dedup_id="id")
        assert values(broker, "late")[100:] == [b"x"]


class TestBatches:
    @pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
    @pytest.mark.parametrize("idempotent", [False, True])
    def test_batches_of_a_stock_client_may_be_mixed_and_compressed(
        self, broker: TestBroker, codec: str, *, idempotent: bool
    ) -> None:
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "linger.ms": 50,
            }
        )
        failed: list[KafkaError] = []
        chance = random.Random(codec)
        sent: list[bytes] = []
        for _ in range(5):
            for number in [chance.randrange(60) for _ in range(20)]:
                producer.produce(
                    TOPIC,
                    b"%d" % number,
                    headers={DEDUP_ID_HEADER: b"id-%d" % number},
                    on_delivery=lambda error, _: failed.append(error) if error else None,
                )
                sent.append(b"%d" % number)
            assert producer.flush(30) == 0
        assert not failed
        assert values(broker) == list(dict.fromkeys(sent))

    @pytest.mark.parametrize("codec", list(Codec))
    def test_the_new_records_of_a_mixed_batch_are_stored_once(self, broker: TestBroker, codec: Codec) -> None:
        with peer(broker) as raw:
            first = raw.produce(TOPIC, batch(broker, [(b"a", b"1"), (b"b", None)], sequence=0, codec=codec))
            mixed = batch(
                broker,
                [(b"new", b"2"), (b"A", b"1"), (b"c", None), (b"again", b"2"), (b"d", b"3")],
                sequence=2,
                codec=codec,
            )
            second = raw.produce(TOPIC, mixed)
            assert (first.error_code, second.error_code) == (0, 0)
            assert values(broker) == [b"a", b"b", b"new", b"c", b"d"]
            assert second.base_offset == visible(broker)[2].offset
            broker.restart()
        with peer(broker) as raw:
            assert raw.produce(TOPIC, mixed).base_offset == second.base_offset
            third = raw.produce(TOPIC, batch(broker, [(b"e", b"4")], sequence=7, codec=codec))
            assert third.error_code == 0, "the sequence has advanced by the whole batch"
            repeat_first = batch(broker, [(b"A", b"1"), (b"f", b"5")], sequence=8, codec=codec)
            for _ in range(2):
                assert raw.produce(TOPIC, repeat_first).base_offset == first.base_offset
        assert values(broker) == [b"a", b"b", b"new", b"c", b"d", b"e", b"f"]

    def test_the_sequence_of_an_idempotent_producer_advances_over_repeats(self, broker: TestBroker) -> None:
        with peer(broker) as raw:
            first = raw.produce(TOPIC, batch(broker, [(b"a", b"1"), (b"b", b"2")], sequence=0))
            repeats = batch(broker, [(b"B", b"2"), (b"A", b"1"), (b"A", b"1")], sequence=2)
            for _ in range(2):
                assert raw.produce(TOPIC, repeats).base_offset == first.base_offset + 1
            broker.restart()
        with peer(broker) as raw:
            assert raw.produce(TOPIC, repeats).base_offset == first.base_offset + 1
            assert raw.produce(TOPIC, batch(broker, [(b"c", b"3")], sequence=6)).error_code == 45
            assert raw.produce(TOPIC, batch(broker, [(b"c", b"3")], sequence=5)).error_code == 0
        assert values(broker) == [b"a", b"b", b"c"]

    def test_repeats_of_another_producer_append_nothing(self, broker: TestBroker) -> None:
        with peer(broker) as raw:
            first = raw.produce(TOPIC, batch(broker, [(b"a", b"1")]))
            end = raw.end_offset(TOPIC)
            for acks in (-1, 1):
                assert (
                    raw.produce(TOPIC, batch(broker, [(b"A", b"1")]), acks=acks).base_offset
                    == first.base_offset
                )
            assert raw.end_offset(TOPIC) == end

    def test_log_append_time_is_that_of_the_first_record(self, broker: TestBroker) -> None:
        config = {**WINDOW, "message.timestamp.type": "LogAppendTime"}
        broker.client().admin.create_topic("stamped", partitions=1, config=config)
        with peer(broker) as raw:
            first = raw.produce("stamped", batch(broker, [(b"a", b"1")]))
            broker.clock.advance(minutes=1)
            repeat = raw.produce("stamped", batch(broker, [(b"A", b"1")]))
        (found,) = visible(broker, "stamped")
        assert (found.offset, found.timestamp_ms) == (first.base_offset, first.log_append_time_ms)
        assert (repeat.base_offset, repeat.log_append_time_ms) == (
            first.base_offset,
            first.log_append_time_ms,
        )


class TestRefusals:
    @pytest.mark.parametrize("headers", [[b""], [b"x" * 129], [b"a", b"a"]])
    def test_an_invalid_id_is_refused_with_the_index_of_its_record(
        self, broker: TestBroker, headers: list[bytes]
    ) -> None:
        now_ms = broker.clock.time_ms()
        rows = [
            (now_ms, None, b"good", ()),
            (now_ms, None, b"bad", [(DEDUP_ID_HEADER, one) for one in headers]),
        ]
        with peer(broker) as raw:
            refused = raw.produce(TOPIC, build_batch(rows))
        assert refused.error_code == InvalidRecord.kafka_code
        assert [index for index, _ in refused.record_errors] == [1]
        assert DEDUP_ID_HEADER in (refused.error_message or "")
        assert values(broker) == []

    def test_ids_beyond_the_limit_are_refused_until_others_expire(self, broker: TestBroker) -> None:
        broker.client().admin.alter_topic_config(TOPIC, {"mansio.dedup.ids.max": "2"})
        errors: list[KafkaError | None] = []
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "retries": 0})

        def produce(dedup_id: bytes) -> int | None:
            producer.produce(
                TOPIC,
                dedup_id,
                headers={DEDUP_ID_HEADER: dedup_id},
                on_delivery=lambda error, _: errors.append(error),
            )
            producer.flush(30)
            error = errors[-1]
            return None if error is None else error.code()

        assert [produce(b"1"), produce(b"2"), produce(b"1")] == [None, None, None]
        assert produce(b"3") == KafkaError.THROTTLING_QUOTA_EXCEEDED
        assert produce(b"2") is None, "no id is forgotten"
        broker.clock.advance(minutes=6)
        assert produce(b"3") is None
        assert values(broker) == [b"1", b"2", b"3"]

    def test_a_compacted_topic_has_no_window(self, broker: TestBroker) -> None:
        admin = broker.client().admin
        with pytest.raises(InvalidConfig, match="compact"):
            admin.create_topic("latest", config={**WINDOW, "cleanup.policy": "compact"})
        with pytest.raises(InvalidConfig, match="compact"):
            admin.alter_topic_config(TOPIC, {"cleanup.policy": "compact,delete"})

    def test_a_topic_for_dead_letters_has_no_window(self, broker: TestBroker) -> None:
        config = {**WINDOW, "errors.deadletterqueue.group.enable": "true"}
        with pytest.raises(InvalidConfig, match="dead letters"):
            broker.client().admin.create_topic("dead", config=config)

    @pytest.mark.parametrize("value", ["-1", "604800001", "5m"])
    def test_an_impossible_window_is_refused(self, broker: TestBroker, value: str) -> None:
        with pytest.raises(InvalidConfig, match=r"mansio\.dedup\.ms"):
            broker.client().admin.alter_topic_config(TOPIC, {"mansio.dedup.ms": value})


class TestDurability:
    def test_no_repeat_is_stored_whenever_the_broker_restarts(self, broker: TestBroker) -> None:
        chance = random.Random(13)
        client = broker.client()
        accepted: dict[int, tuple[int, int]] = {}
        expected: list[bytes] = []
        for step in range(150):
            number = chance.randrange(20)
            value = b"%d-%d" % (number, step)
            before_ms = broker.clock.time_ms()
            offset = client.publish(TOPIC, value, dedup_id=b"id-%d" % number).offset
            first = accepted.get(number)
            if first is None or before_ms >= first[1] + 5 * MINUTE_MS:
                expected.append(value)
                accepted[number] = (offset, before_ms)
            else:
                assert offset == first[0]
            broker.clock.advance(chance.randrange(40))
            if chance.random() < 0.15:
                broker.restart()
                client = broker.client()
        assert values(broker) == expected
        assert 30 < len(expected) < 120

    def test_a_full_disk_leaves_no_id_of_a_record_that_was_not_stored(self, broker: TestBroker) -> None:
        with broker.faults.full_disk(), peer(broker) as raw:
            assert raw.produce(TOPIC, batch(broker, [(b"x", b"1")])).error_code != 0
        broker.clock.advance(seconds=5)
        broker.client().publish(TOPIC, b"x", dedup_id="1")
        assert values(broker) == [b"x"]

    def test_ids_outlive_their_records(self, broker: TestBroker) -> None:
        config = {
            "mansio.dedup.ms": str(24 * 60 * MINUTE_MS),
            "retention.ms": str(60 * MINUTE_MS),
            "segment.ms": "600000",
        }
        client = broker.client()
        client.admin.create_topic("old", partitions=1, config=config)
        first = client.publish("old", b"gone", dedup_id="id")
        client.publish_many("old", [b"other"] * 10)
        broker.clock.advance(hours=12)
        assert values(broker, "old") == []
        assert start_offset(broker, "old") > first.offset
        assert client.publish("old", b"repeat", dedup_id="id").offset == first.offset
        broker.restart()
        client = broker.client()
        assert client.publish("old", b"repeat", dedup_id="id").offset == first.offset
        broker.clock.advance(hours=12, minutes=1)
        client.publish("old", b"new", dedup_id="id")
        assert values(broker, "old") == [b"new"]

    def test_ids_that_are_larger_than_the_retention_size_are_not_copied_at_each_check(
        self, broker: TestBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deduplicator, "COPIED_IDS_MAX", 50)
        config = {
            "mansio.dedup.ms": str(24 * 60 * MINUTE_MS),
            "retention.bytes": "3000",
            "segment.bytes": "1024",
        }
        client = broker.client()
        client.admin.create_topic("old", partitions=1, config=config)
        ids = [str(number) for number in range(300)]  # 10 KB when copied
        client.publish_many("old", [mansio.OutgoingRecord(b"x" * 100, dedup_id=one) for one in ids])
        broker.clock.advance(minutes=15)
        client.publish("old", b"newest", dedup_id="newest")
        broker.clock.advance(minutes=15)
        before = end_offset(broker, "old")
        broker.clock.advance(minutes=30)
        assert end_offset(broker, "old") == before
        assert values(broker, "old")[-1:] == [b"newest"]
        assert start_offset(broker, "old") > 0
        client.publish_many("old", [mansio.OutgoingRecord(b"again", dedup_id=one) for one in ids])
        assert values(broker, "old")[-1:] == [b"newest"]

    def test_a_deletion_on_request_keeps_ids(self, broker: TestBroker) -> None:
        client = broker.client()
        first = client.publish(TOPIC, b"deleted", dedup_id="id")
        client.admin.delete_records([TOPIC], before="end")
        assert start_offset(broker, TOPIC) > first.offset
        broker.restart()
        assert broker.client().publish(TOPIC, b"repeat", dedup_id="id").offset == first.offset
        assert values(broker) == []


class TestDelays:
    def test_a_delayed_record_is_accepted_once_and_delivered_once(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("later", partitions=1, config={**WINDOW, "mansio.delay.enable": "true"})
        first = client.publish("later", b"tea", delay=120, dedup_id="tea")
        assert client.publish("later", b"tea", delay=120, dedup_id="tea").offset == first.offset
        assert client.publish("later", b"tea", dedup_id="tea").offset == first.offset
        client.publish("later", b"now", dedup_id="now")
        broker.restart()
        client = broker.client()
        assert client.publish("later", b"tea", delay=120, dedup_id="tea").offset == first.offset
        broker.clock.advance(minutes=3)
        assert values(broker, "later") == [b"now", b"tea"]
        assert client.publish("later", b"tea", dedup_id="tea").offset == first.offset
        broker.clock.advance(minutes=3)
        client.publish("later", b"tea", dedup_id="tea")
        assert values(broker, "later") == [b"now", b"tea", b"tea"]

    def test_a_batch_with_delays_and_repeats_is_stored_without_the_repeats(self, broker: TestBroker) -> None:
        config = {**WINDOW, "mansio.delay.enable": "true"}
        broker.client().admin.create_topic("later", partitions=1, config=config)
        delay = [(DELAY_HEADER, b"60000")]
        with peer(broker) as raw:
            raw.produce("later", batch(broker, [(b"a", b"1")], sequence=0, headers=delay))
            mixed = batch(broker, [(b"A", b"1"), (b"b", b"2"), (b"c", None)], sequence=1, headers=delay)
            assert raw.produce("later", mixed).error_code == 0
            assert raw.produce("later", mixed).error_code == 0
            assert raw.produce("later", batch(broker, [(b"d", b"4")], sequence=4)).error_code == 0
        broker.clock.advance(minutes=2)
        assert values(broker, "later") == [b"d", b"a", b"b", b"c"]


class TestClients:
    def test_every_publish_method_of_both_clients_has_ids(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish(TOPIC, b"0", dedup_id="0")
        producer = client.producer()
        producer.publish(TOPIC, b"1", key=b"k", dedup_id=b"1")
        producer.send(TOPIC, b"2", dedup_id="2").result()
        client.publish_many(TOPIC, [mansio.OutgoingRecord(b"%d" % n, dedup_id=str(n)) for n in range(5)])

        async def publish() -> None:
            async with mansio.connect(broker.bootstrap_servers) as other:
                await other.publish(TOPIC, b"5", dedup_id="5")
                await asyncio.gather(*(other.publish(TOPIC, b"%d" % n, dedup_id=str(n)) for n in range(9)))
                async with other.producer() as producer:
                    await (await producer.send(TOPIC, b"9", dedup_id="9"))
                    records = [mansio.OutgoingRecord(b"%d" % n, dedup_id=str(n)) for n in range(12)]
                    await producer.publish_many(TOPIC, records)

        asyncio.run(publish())
        assert sorted(values(broker), key=lambda value: int(value or b"")) == [b"%d" % n for n in range(12)]

    def test_a_record_without_key_goes_to_the_partition_of_its_id(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("many", partitions=6, config=WINDOW)
        for _ in range(2):
            for number in range(30):
                client.publish("many", b"%d" % number, dedup_id=f"id-{number}")
        with client.consume("many", to_end=True) as consumer:
            found = list(consumer)
        assert sorted(int(message.value or b"") for message in found) == list(range(30))
        assert len({message.partition for message in found}) > 3

    def test_a_topic_without_the_setting_is_refused_by_name_until_it_has_it(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("plain", partitions=1)
        refusal = (
            r"topic 'plain' has no deduplication window: mansio topic alter plain -c mansio\.dedup\.ms=300000"
        )
        with pytest.raises(DeduplicationNotEnabled, match=refusal):
            client.publish("plain", b"x", dedup_id="id")
        with pytest.raises(DeduplicationNotEnabled):
            client.publish_many("plain", [mansio.OutgoingRecord(b"x", dedup_id="id")])
        client.admin.alter_topic_config("plain", dict(WINDOW))
        for _ in range(2):
            client.publish("plain", b"y", dedup_id="id")
        assert values(broker, "plain") == [b"y"]

    @pytest.mark.parametrize("dedup_id", [b"", "", b"x" * 129, 5])
    def test_an_impossible_id_is_a_value_error(self, broker: TestBroker, dedup_id: Any) -> None:
        with pytest.raises(ValueError, match="1 to 128 bytes"):
            broker.client().publish(TOPIC, b"x", dedup_id=dedup_id)
        with pytest.raises(ValueError, match="as an argument or as the header"):
            broker.client().publish(TOPIC, b"x", dedup_id="id", headers={DEDUP_ID_HEADER: b"id"})


@pytest.mark.row("O1")
def test_metrics_and_health_show_ids_and_repeats(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.alter_topic_config(TOPIC, {"mansio.dedup.ids.max": "10"})
    for number in (0, 1, 2, 3, 4, 5, 6, 6, 6):
        client.publish(TOPIC, b"x", dedup_id=f"id-{number}")
    metrics = get(f"{broker.http_url}/metrics")
    assert "mansio_deduplication_ids 7.0" in metrics
    assert "mansio_deduplication_repeats_total 2.0" in metrics
    assert json.loads(get(f"{broker.http_url}/health/ready"))["warnings"] == []
    client.publish(TOPIC, b"x", dedup_id="id-8")
    (warning,) = json.loads(get(f"{broker.http_url}/health/ready"))["warnings"]
    assert (warning["reason"], warning["topic"], warning["partition"]) == (
        "deduplication_ids_near_limit",
        TOPIC,
        0,
    )
    assert "80%" in warning["detail"]
    broker.clock.advance(minutes=6)
    assert json.loads(get(f"{broker.http_url}/health/ready"))["warnings"] == []


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:  # the broker of this test
        return str(response.read().decode())
