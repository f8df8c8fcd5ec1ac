"""Blocking client: the same API and guarantees as the asyncio client."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client import Admin, Client, Consumer, Producer, ProducerOptions, TopicPartition, blocking
from mansio.errors import ConnectionLost, InvalidRecord, MessageTooLarge, UnknownTopicOrPartition
from mansio.testing import TestBroker
from support.client_fixtures import QUICK_MEMBER, broker_in
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("blocking")) as started:
        yield started


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.row("A5")
@pytest.mark.parametrize(
    ("original", "counterpart"),
    [
        (Admin, blocking.Admin),
        (Client, blocking.Client),
        (Consumer, blocking.Consumer),
        (Producer, blocking.Producer),
    ],
)
def test_blocking_and_asyncio_clients_have_the_same_api(original: type, counterpart: type) -> None:
    assert public(original) == public(counterpart)
    for name in public(original):
        ours, theirs = getattr(counterpart, name), getattr(original, name)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), (
                name
            )
            assert (
                not inspect.iscoroutinefunction(inspect.unwrap(ours, stop=lambda f: False))
                or ours is not theirs
            )


@pytest.mark.row("A5")
def test_publish_consume_and_administer(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("plain", partitions=2)
        assert client.publish("plain", b"first", key=b"k").offset == 0
        stored = client.publish_many("plain", (b"%d" % number for number in range(25_000)))
        assert len(stored) == 25_000
        with client.producer() as producer:
            delivery = producer.send("plain", b"last")
            assert delivery.result().topic == "plain"
            assert delivery.done()
        assert sum(1 for _ in client.consume("plain", to_end=True)) == 25_002
        assert sum(map(len, client.consume("plain", max_records=100).batches())) == 100
        with pytest.raises(UnknownTopicOrPartition):
            client.publish("missing", b"x")
        with pytest.raises(UnknownTopicOrPartition):
            next(client.consume("missing"))


@pytest.mark.row("A5", "G4")
def test_commit_covers_exactly_the_delivered_messages(broker: mansio.Broker) -> None:
    place = TopicPartition("stepwise", 0)
    how: dict[str, Any] = {"group": "stepwise", **QUICK_MEMBER}
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("stepwise", partitions=1)
        client.publish_many("stepwise", [b"%d" % number for number in range(50)])
        with client.consume("stepwise", **how, auto_commit=False) as consumer:
            for _ in range(7):
                next(consumer)
            consumer.commit()
            next(consumer)
            assert consumer.positions() == {place: 8}
        assert client.admin.group_offsets("stepwise")[place].offset == 7
        with client.consume("stepwise", **how) as consumer:
            for message in consumer:
                if message.offset == 20:
                    break
        assert client.admin.group_offsets("stepwise")[place].offset == 21
        with (  # noqa: PT012  # how the consumer is left is the point
            pytest.raises(KeyError),
            client.consume("stepwise", **how) as consumer,
        ):
            for message in consumer:
                if message.offset == 30:
                    raise KeyError("the work on message 30 failed")
        assert client.admin.group_offsets("stepwise")[place].offset == 30
        with client.consume("stepwise", **how) as consumer:
            assert next(consumer).offset == 30
            consumer.seek(place, 5)
            assert next(consumer).offset == 5


@pytest.mark.row("A5", "G4")
def test_group_offsets_are_committed_when_an_iteration_ends(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("ends", partitions=1)
        client.publish_many("ends", [b"%d" % number for number in range(4)])
        for expected in ([0, 1], [2, 3]):
            consumer = client.consume("ends", group="ends", max_records=2)  # its session lasts 45 s
            assert [message.offset for message in consumer] == expected
            assert consumer.is_closed
        assert client.admin.group_offsets("ends")[TopicPartition("ends", 0)].offset == 4
        kept = client.consume("ends", group="kept", max_records=2, auto_commit=False)
        assert [message.offset for message in kept] == [0, 1]
        kept.commit()
        assert client.admin.group_offsets("kept")[TopicPartition("ends", 0)].offset == 2
        with pytest.raises(UnknownTopicOrPartition, match="topic ends has no partition 99"):
            next(client.consume(TopicPartition("ends", 99)))


def test_poll_returns_nothing_after_its_timeout(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("quiet", partitions=1)
        with client.consume("quiet") as consumer:
            assert consumer.poll(50) == []
            client.publish("quiet", b"x")
            assert [message.value for message in consumer.poll(10_000)] == [b"x"]


def test_client_is_shared_between_threads(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("threads", partitions=1)

        def work(number: int) -> None:
            for step in range(20):
                client.publish("threads", b"%d:%d" % (number, step))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [(m.value or b"").split(b":") for m in client.consume("threads", to_end=True)]
        for number in range(4):
            assert [int(step) for owner, step in found if int(owner) == number] == list(range(20))


def test_closed_client_has_no_thread_and_refuses_calls(broker: mansio.Broker) -> None:
    client = mansio.blocking.connect(broker.address)
    client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mansio-client"]
    with pytest.raises(RuntimeError, match="closed"):
        client.publish("any", b"x")


def test_failed_connect_is_a_typed_error_and_leaves_no_thread() -> None:
    with pytest.raises(ConnectionLost):
        mansio.blocking.connect("127.0.0.1:1", connect_timeout_ms=200)
    assert not [thread for thread in threading.enumerate() if thread.name == "mansio-client"]


def test_blocking_client_works_in_a_program_with_an_event_loop(broker: mansio.Broker) -> None:
    async def program() -> int:
        with mansio.blocking.connect(broker.address) as client:
            return client.admin.describe_cluster().controller_id

    assert asyncio.run(program()) > 0


@pytest.mark.row("A5")
def test_publish_from_many_threads_keeps_each_ones_order_and_raises_typed_errors(
    broker: mansio.Broker,
) -> None:
    """Publishing takes a way of its own through the loop; errors and metadata come along it too."""
    with blocking.connect(broker.address) as client:
        client.admin.create_topic("peers", partitions=1)
        stored: dict[int, list[int]] = {}

        def publisher(number: int) -> None:
            stored[number] = [
                client.publish("peers", b"%d %d" % (number, count), key=b"k").offset for count in range(50)
            ]

        threads = [threading.Thread(target=publisher, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        with pytest.raises(InvalidRecord, match="not int"):
            client.publish("peers", 5)  # type: ignore[arg-type]  # the mistake itself
        with pytest.raises(UnknownTopicOrPartition, match="no partition 7"):
            client.publish("peers", b"x", partition=7)
        with pytest.raises(MessageTooLarge):
            client.publish("peers", bytes(3 << 20))
        for thread in threads:
            thread.join(scaled(60))
        found = [message.value or b"" for message in client.consume("peers", to_end=True)]
        assert sorted(offset for offsets in stored.values() for offset in offsets) == list(range(300))
        for number, offsets in stored.items():
            assert [found[offset] for offset in offsets] == [
                b"%d %d" % (number, count) for count in range(50)
            ]
    with pytest.raises(RuntimeError, match="closed"):
        client.publish("peers", b"late")


@pytest.mark.row("A5")
def test_publish_waits_for_buffer_space(broker: mansio.Broker) -> None:
    with blocking.connect(broker.address) as client:
        client.admin.create_topic("room", partitions=1)
        options = ProducerOptions(buffer_bytes_max=1_000, batch_bytes_max=1_000)
        with client.producer(options) as producer:
            sent = [producer.send("room", bytes(300)) for _ in range(3)]
            assert producer.publish("room", bytes(600)).offset == 3
            assert [delivery.result().offset for delivery in sent] == [0, 1, 2]


@pytest.mark.full
def test_partitions_beyond_the_limit_of_a_response_come_first_in_the_next() -> None:
    """Each response has room for one batch: the first partition must not keep the others waiting until it is read."""
    with TestBroker(fetch_max_bytes=1024) as started, closing(started.client()) as client:
        client.admin.create_topic("shared", partitions=3)
        for partition in range(3):
            for _ in range(20):
                client.publish("shared", bytes(700), partition=partition)
        seen = [message.partition for message in client.consume("shared", from_="earliest", max_records=60)]
    for length in range(1, len(seen)):
        read = [seen[:length].count(partition) for partition in range(3)]
        assert max(read) - min(read) <= 2, seen
