"""Delayed records on a test broker: when they are delivered, how often, and what keeps them."""

from __future__ import annotations

import asyncio
import os
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, Producer

import mansio
from mansio.errors import DelaysNotEnabled, InvalidConfig, InvalidRecord
from mansio.testing import TestBroker
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from support.forked_serve import run_command
from support.present import present

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping

    from mansio import Message

pytestmark = pytest.mark.row("D6")

TOPIC = "reminders"
HOUR_MS = 3_600_000
DELAYS = {"mansio.delay.enable": "true"}


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=1, config=DELAYS)
        yield running


def delayed(delay_ms: int) -> dict[str, str | bytes | None]:
    return {DELAY_HEADER: b"%d" % delay_ms}


def visible(broker: TestBroker, topic: str = TOPIC) -> list[Message]:
    """All records of partition 0 that a consumer receives."""
    with broker.client().consume(mansio.TopicPartition(topic, 0), to_end=True) as consumer:
        return list(consumer)


def values(broker: TestBroker, topic: str = TOPIC) -> list[bytes | None]:
    return [message.value for message in visible(broker, topic)]


class TestDelivery:
    def test_a_record_is_delivered_when_it_is_due_and_not_before(self, broker: TestBroker) -> None:
        written = broker.client().publish(TOPIC, b"tea", key=b"k", headers=delayed(900_000))
        due_ms = broker.clock.time_ms() + 900_000
        broker.clock.advance(seconds=890)
        assert values(broker) == []
        broker.clock.advance(seconds=11)
        (message,) = visible(broker)
        headers = dict(message.headers)
        assert (message.key, message.value) == (b"k", b"tea")
        assert DELAY_HEADER not in headers
        assert headers["mansio-delayed-id"] == b"%d" % written.offset
        assert abs(int(headers["mansio-due-at-ms"] or 0) - due_ms) < 5_000
        assert message.timestamp_ms >= int(headers["mansio-due-at-ms"] or 0)

    def test_records_are_delivered_in_the_order_in_which_they_are_due(self, broker: TestBroker) -> None:
        client = broker.client()
        order = random.Random(7).sample(range(40), 40)
        for number in order:
            client.publish(TOPIC, b"%d" % number, headers=delayed(60_000 * (number + 1)))
        broker.clock.advance(hours=1)
        assert values(broker) == [b"%d" % number for number in range(40)]

    def test_a_time_in_the_past_is_delivered_at_once(self, broker: TestBroker) -> None:
        broker.client().publish(TOPIC, b"late", headers={DELIVER_AT_HEADER: b"5"})
        assert values(broker) == [b"late"]

    @pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
    def test_batches_of_a_stock_client_may_be_mixed_and_compressed(
        self, broker: TestBroker, codec: str
    ) -> None:
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "compression.type": codec,
                "enable.idempotence": True,
                "linger.ms": 100,
            }
        )
        offsets: list[int] = []
        for number in range(20):
            headers: Any = delayed(60_000 * number) if number % 2 else None
            producer.produce(
                TOPIC,
                b"%d" % number,
                headers=headers,
                on_delivery=lambda error, message: offsets.append(-1 if error else present(message.offset())),
            )
        assert producer.flush(30) == 0
        assert len({*offsets}) == 20
        assert values(broker) == [b"%d" % number for number in range(0, 20, 2)]
        broker.clock.advance(minutes=20)
        assert values(broker)[10:] == [b"%d" % number for number in range(1, 20, 2)]

    def test_a_topic_without_the_setting_keeps_the_headers_as_bytes(self, broker: TestBroker) -> None:
        broker.client().admin.create_topic("plain", partitions=1)
        broker.client().publish("plain", b"now", headers=delayed(HOUR_MS))
        (message,) = visible(broker, "plain")
        assert dict(message.headers) == delayed(HOUR_MS)

    def test_pending_records_are_delivered_after_the_setting_was_turned_off(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish(TOPIC, b"before", headers=delayed(HOUR_MS))
        client.admin.alter_topic_config(TOPIC, {"mansio.delay.enable": "false"})
        client.publish(TOPIC, b"after", headers=delayed(HOUR_MS))
        assert values(broker) == [b"after"]
        broker.restart()
        broker.clock.advance(hours=2)
        assert values(broker) == [b"after", b"before"]


class TestRefusals:
    @pytest.mark.parametrize("value", [b"soon", b"-1", b"", b"99999999999999"])
    def test_an_invalid_header_is_refused(self, broker: TestBroker, value: bytes) -> None:
        with pytest.raises(InvalidRecord):
            broker.client().publish(TOPIC, b"x", headers={DELAY_HEADER: value})
        assert values(broker) == []

    def test_too_many_pending_records_are_refused_for_now(self, broker: TestBroker) -> None:
        broker.client().admin.alter_topic_config(TOPIC, {"mansio.delay.pending.records.max": "2"})
        errors: list[KafkaError | None] = []
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "retries": 0})
        for _ in range(3):
            producer.produce(
                TOPIC, b"x", headers=delayed(60_000), on_delivery=lambda error, _: errors.append(error)
            )
            producer.flush(30)
        assert [None if error is None else error.code() for error in errors] == [
            None,
            None,
            KafkaError.THROTTLING_QUOTA_EXCEEDED,
        ]
        broker.clock.advance(minutes=2)
        assert len(values(broker)) == 2

    def test_a_compacted_topic_accepts_no_delays(self, broker: TestBroker) -> None:
        admin = broker.client().admin
        with pytest.raises(InvalidConfig, match="compact"):
            admin.create_topic("latest", config={**DELAYS, "cleanup.policy": "compact"})
        with pytest.raises(InvalidConfig, match="compact"):
            admin.alter_topic_config(TOPIC, {"cleanup.policy": "compact"})


class TestDurability:
    def test_each_record_is_delivered_once_whenever_the_broker_restarts(self, broker: TestBroker) -> None:
        chance = random.Random(11)
        client = broker.client()
        due_ms: dict[bytes, int] = {}
        for step in range(60):
            for number in range(chance.randrange(1, 6)):
                delay_ms = chance.randrange(1, 600_000)
                value = b"%d-%d" % (step, number)
                due_ms[value] = broker.clock.time_ms() + delay_ms
                client.publish(TOPIC, value, headers=delayed(delay_ms))
            broker.clock.advance(chance.randrange(0, 60))
            if chance.random() < 0.2:
                broker.restart()
                client = broker.client()
        broker.clock.advance(minutes=11)
        found = visible(broker)
        assert sorted(present(message.value) for message in found) == sorted(due_ms)
        for message in found:
            assert message.timestamp_ms >= due_ms[present(message.value)] - 1

    def test_a_full_disk_delays_a_delivery(self, broker: TestBroker) -> None:
        broker.client().publish(TOPIC, b"x", headers=delayed(60_000))
        with broker.faults.full_disk():
            broker.clock.advance(minutes=2)
        broker.clock.advance(seconds=5)
        assert values(broker) == [b"x"]


class TestRetention:
    CONFIG: Mapping[str, str] = {
        **DELAYS,
        "retention.ms": str(HOUR_MS),
        "segment.ms": "600000",
        "segment.bytes": "1048576",
    }

    def test_pending_records_outlive_the_records_around_them(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("old", partitions=1, config=self.CONFIG)
        client.publish("old", b"gone")
        for number in range(5):
            client.publish("old", b"kept%d" % number, headers=delayed(24 * HOUR_MS + number))
        client.publish("old", b"gone, too")
        broker.clock.advance(hours=12)
        assert values(broker, "old") == []
        assert start_offset(broker, "old") > 1
        broker.restart()
        broker.clock.advance(hours=12, minutes=5)
        assert values(broker, "old") == [b"kept%d" % number for number in range(5)]

    def test_records_are_limited_by_size_without_the_pending_ones(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic(
            "small", partitions=1, config={**self.CONFIG, "retention.ms": "-1", "retention.bytes": "1000000"}
        )
        for number in range(40):
            client.publish("small", bytes(100_000), headers=delayed(24 * HOUR_MS) if number % 2 else None)
        broker.clock.advance(hours=1)
        before = start_offset(broker, "small")
        assert 0 < len(values(broker, "small")) < 20
        broker.clock.advance(hours=2)
        assert start_offset(broker, "small") == before
        broker.clock.advance(hours=22)
        assert len(values(broker, "small")) >= 10

    def test_a_deletion_on_request_keeps_pending_records(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish(TOPIC, b"pending", headers=delayed(HOUR_MS))
        client.publish(TOPIC, b"deleted")
        client.admin.delete_records([TOPIC], before="end")
        assert values(broker) == []
        assert start_offset(broker, TOPIC) >= 2
        broker.restart()
        broker.clock.advance(hours=2)
        assert values(broker) == [b"pending"]


def start_offset(broker: TestBroker, topic: str) -> int:
    partition = mansio.TopicPartition(topic, 0)
    return broker.client().admin.list_offsets([partition], "earliest")[partition].offset


class TestClients:
    def test_both_clients_delay_records(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish(TOPIC, b"second", delay=timedelta(minutes=15))
        client.publish(TOPIC, b"first", delay=600, headers={"kept": "yes"})
        moment = datetime.fromtimestamp(broker.clock.time_ms() / 1000 + 1_800, UTC)
        client.publish(TOPIC, b"third", at=moment)

        async def publish() -> None:
            async with mansio.connect(broker.bootstrap_servers) as other:
                await other.publish(TOPIC, b"fourth", delay=3_000)
                async with other.producer() as producer:
                    delivery = await producer.send(TOPIC, b"fifth", delay=3_100)
                    await delivery

        asyncio.run(publish())
        assert values(broker) == []
        broker.clock.advance(hours=1)
        found = visible(broker)
        assert [one.value for one in found] == [b"first", b"second", b"third", b"fourth", b"fifth"]
        assert dict(found[0].headers)["kept"] == b"yes"
        assert dict(found[2].headers)["mansio-due-at-ms"] == b"%d" % round(moment.timestamp() * 1000)

    def test_a_topic_without_the_setting_is_refused_by_name_until_it_has_it(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic("orders", partitions=1)
        with pytest.raises(
            DelaysNotEnabled, match=r"mansio topic alter orders -c mansio\.delay\.enable=true"
        ):
            client.publish("orders", b"x", delay=5)
        client.admin.alter_topic_config("orders", DELAYS)
        client.publish("orders", b"y", delay=5)
        broker.clock.advance(seconds=6)
        assert values(broker, "orders") == [b"y"]

    @pytest.mark.parametrize(
        ("delay", "at", "message"),
        [
            (-1, None, "not between"),
            (timedelta(days=366), None, "365 days"),
            (None, datetime(2030, 1, 1), "time zone"),  # noqa: DTZ001 - that is refused
            (None, datetime.now(UTC) + timedelta(days=366), "365 days"),
            (1, datetime.now(UTC), "not both"),
        ],
    )
    def test_an_impossible_delay_is_a_value_error(
        self, broker: TestBroker, delay: timedelta | float | None, at: datetime | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            broker.client().publish(TOPIC, b"x", delay=delay, at=at)

    @pytest.mark.full
    def test_the_command_line_delays_records(self, broker: TestBroker) -> None:
        def mansio_command(*arguments: str) -> subprocess.CompletedProcess[bytes]:
            words = [*arguments, "-b", broker.bootstrap_servers]
            return run_command(words, os.environ, stdin=b"tea\n")

        assert mansio_command("topic", "create", "timed", "-p", "1", "--delays").returncode == 0
        assert mansio_command("produce", "timed", "--delay", "15m").returncode == 0
        moment = datetime.fromtimestamp(broker.clock.time_ms() / 1000 + 3_600, UTC)
        assert mansio_command("produce", "timed", "--at", moment.isoformat()).returncode == 0
        for wrong in (["--delay", "400d"], ["--at", "tomorrow"], ["--delay", "1m", "--at", "now"]):
            refused = mansio_command("produce", "timed", *wrong)
            assert (refused.returncode, refused.stderr.count(b"\n")) == (2, 1), refused.stderr
        refused = mansio_command("produce", "plain", "--delay", "1m")
        assert refused.returncode == 1
        broker.clock.advance(minutes=16)
        assert values(broker, "timed") == [b"tea"]
        broker.clock.advance(hours=1)
        assert values(broker, "timed") == [b"tea", b"tea"]
