"""`mansio serve --dev`: topics exist on first use, for Mansio's client and for librdkafka, over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer

import mansio
from support.machine import scaled
from support.process import ServedBroker, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(tmp_path_factory.mktemp("dev") / "data", arguments=["--dev"], http=False) as one:
        yield one


def test_stock_producer_and_consumer_create_the_topic_that_they_name(broker: ServedBroker) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "early",
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": True,
        }
    )
    consumer.subscribe(["stock"])
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    producer.produce("stock", b"1")
    producer.produce("stock-2", b"2")
    assert producer.flush(scaled(20)) == 0
    try:
        message = consumer.poll(scaled(20))
        while message is not None and message.error() is not None:  # subscribed before the topic existed
            message = consumer.poll(scaled(20))
        assert message is not None
        assert message.value() == b"1"
    finally:
        consumer.close()


def test_own_client_publishes_consumes_and_receives_from_topics_that_no_client_created(
    broker: ServedBroker,
) -> None:
    async def scenario() -> tuple[bytes | None, bytes | None]:
        async with mansio.connect(broker.bootstrap_servers) as client, asyncio.timeout(scaled(30)):
            await client.publish("published", b"1")
            consuming = asyncio.ensure_future(anext(aiter(client.consume("consumed", from_="earliest"))))
            await client.publish("consumed", b"2")
            consumed = await consuming
            await client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
            async with client.receive("received", group="g") as receiver:
                await client.publish("received", b"3")
                message = await anext(aiter(receiver))
                await message.ack()
            return consumed.value, message.value

    assert asyncio.run(scenario()) == (b"2", b"3")


@pytest.mark.full
def test_administration_creates_no_topic_by_asking_for_one(broker: ServedBroker) -> None:
    missing = mansio.TopicPartition("misspelled", 0)
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        for ask in (
            lambda: client.admin.describe_topic("misspelled"),
            lambda: client.admin.delete_records([missing], before=1),
        ):
            with pytest.raises(mansio.errors.UnknownTopicOrPartition):
                ask()
        assert "misspelled" not in {topic.name for topic in client.admin.describe_topics()}


def test_dev_mode_and_its_settings_are_in_the_log(broker: ServedBroker) -> None:
    (line,) = [line for line in broker.text().splitlines() if " dev_mode " in line]
    assert " WARNING dev_mode auto_create_topics_enable=True group_initial_rebalance_delay_ms=0 " in line
    assert "not for production" in line


@pytest.mark.full
def test_explicit_setting_has_precedence_over_dev_mode(tmp_path: Path) -> None:
    arguments = ["--dev", "--set", "auto.create.topics.enable=false"]
    with (
        served(tmp_path / "data", arguments=arguments, http=False) as broker,
        mansio.blocking.connect(broker.bootstrap_servers) as client,
        pytest.raises(mansio.errors.UnknownTopicOrPartition),
    ):
        client.publish("t", b"1")
