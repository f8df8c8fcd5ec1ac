"""Channels of kombu: queues of single processes, and queues of tasks over connections that fail."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kombu
import pytest
from celery.worker import state as worker_state

import mansio.celery  # the scheme mansio://
from mansio.celery import kept_readers, queue_admin
from mansio.client.types import TopicPartition
from mansio.errors import MansioError
from mansio.testing import TestBroker
from support.machine import scaled
from support.process import inherited
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

NEWS = kombu.Exchange("news", type="fanout")
CALLS = kombu.Exchange("calls", type="direct")


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: TestBroker) -> TestBroker:
    admin = shared_broker.client().admin
    for topic in admin.list_topics():
        if not topic.startswith("__"):
            admin.delete_topic(topic)
    return shared_broker


@pytest.fixture
def connection(broker: TestBroker) -> Iterator[kombu.Connection]:
    with connected(broker) as connection:
        yield connection


@contextlib.contextmanager
def connected(broker: TestBroker) -> Iterator[kombu.Connection]:
    with kombu.Connection(f"mansio://{broker.bootstrap_servers}") as connection:
        connection.connect()
        yield connection


def queue_of_process(name: str, exchange: kombu.Exchange = NEWS, **options: Any) -> kombu.Queue:
    return kombu.Queue(name, exchange, routing_key="key", **{"auto_delete": True, **options})


def publish(connection: kombu.Connection, *bodies: str, exchange: kombu.Exchange = NEWS) -> None:
    with connection.channel() as channel:
        producer = kombu.Producer(channel, exchange)
        for body in bodies:
            producer.publish(body, routing_key="key", declare=[exchange])


def read(channel: Any, queue: kombu.Queue, count: int) -> list[str]:
    """Consume a queue until `count` messages came."""
    found: list[str] = []
    consumer = kombu.Consumer(
        channel, [queue], callbacks=[lambda body, _: found.append(body)], no_ack=True, auto_declare=False
    )
    with consumer:
        while len(found) < count:
            channel.connection.client.drain_events(timeout=scaled(20))
        with contextlib.suppress(TimeoutError):
            channel.connection.client.drain_events(timeout=0.05)
    return found


def test_each_queue_gets_what_was_published_after_it_was_bound_and_before_it_was_read(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    with connected(broker) as publisher:
        publish(publisher, "early")
        first, second = connection.channel(), connection.channel()
        queue_of_process("one")(first).declare()
        publish(publisher, "a")
        queue_of_process("other")(second).declare()
        publish(publisher, "b")
    assert read(first, queue_of_process("one")(first), 2) == ["a", "b"]
    assert read(second, queue_of_process("other")(second), 1) == ["b"]


@pytest.mark.parametrize("exchange", [NEWS, CALLS])
def test_a_queue_declared_on_one_channel_gets_messages_published_and_read_on_others(
    connection: kombu.Connection, exchange: kombu.Exchange
) -> None:
    queue = queue_of_process("mine", exchange, exclusive=True)
    declaring, reading = connection.channel(), connection.channel()
    queue(declaring).declare()
    publish(connection, "a", exchange=exchange)
    queue(reading).declare()
    publish(connection, "b", exchange=exchange)
    assert read(reading, queue(reading), 2) == ["a", "b"]


def test_no_topic_is_created_for_a_queue_of_a_process(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    queue_of_process("mine")(connection.channel()).declare()
    publish(connection, "a")
    assert "mine" not in broker.client().admin.list_topics()


def test_a_queue_that_is_declared_again_after_its_channel_was_closed_gets_messages(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    queue = queue_of_process("mine")
    with connection.channel() as closed:
        queue(closed).declare()
        publish(connection, "a")
        assert read(closed, queue(closed), 1) == ["a"]
    publish(connection, "missed")  # as with RabbitMQ: auto_delete deletes the queue with its consumer
    channel = connection.channel()
    queue(channel).declare()
    with connected(broker) as publisher:
        publish(publisher, "b")
    assert read(channel, queue(channel), 1) == ["b"]
    assert "mine" not in broker.client().admin.list_topics()


def test_a_queue_that_was_not_consumed_stays_when_its_channel_is_closed(
    connection: kombu.Connection,
) -> None:
    queue = queue_of_process("mine", exclusive=True)
    with connection.channel() as closed:
        queue(closed).declare()
    publish(connection, "a")
    channel = connection.channel()
    queue(channel).declare()
    publish(connection, "b")
    assert read(channel, queue(channel), 2) == ["a", "b"]


def test_a_queue_stays_while_another_channel_consumes_it(connection: kombu.Connection) -> None:
    queue = queue_of_process("mine")
    first, second = connection.channel(), connection.channel()
    for channel in (first, second):
        queue(channel).declare()
        publish(connection, "a")
        assert read(channel, queue(channel), 1) == ["a"]
    first.close()
    publish(connection, "b")
    assert read(second, queue(second), 1) == ["b"]


FORK = """
import os, sys, kombu, mansio.celery
exchange = kombu.Exchange("news", type="fanout")
queue = kombu.Queue("mine", exchange, auto_delete=True)
connection = kombu.Connection(sys.argv[1])
queue(connection.default_channel).declare()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
found = []
with connection.Consumer([queue], callbacks=[lambda body, _: found.append(body)], no_ack=True):
    kombu.Producer(connection, exchange).publish("a")
    connection.drain_events(timeout=float(sys.argv[2]))
assert found == ["a"], found
connection.close()
os._exit(0)
"""


def test_a_forked_process_binds_its_queues_again(broker: TestBroker) -> None:
    command = [sys.executable, "-c", FORK, f"mansio://{broker.bootstrap_servers}", str(scaled(10))]
    done = subprocess.run(
        command, env=inherited(), capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_deleted_queue_gets_nothing_and_is_not_created_by_a_message(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    channel = connection.channel()
    one, other = queue_of_process("mine", CALLS, exclusive=True), kombu.Queue("tasks", CALLS, "key")
    for queue in (one, other):
        queue(channel).declare()
        queue(channel).delete()
    publish(connection, "missed", exchange=CALLS)
    assert not {"mine", "tasks"} & set(broker.client().admin.list_topics())
    one(channel).declare()
    publish(connection, "a", exchange=CALLS)
    assert read(channel, one(channel), 1) == ["a"]


def test_a_binding_that_failed_is_made_when_the_queue_is_declared_again(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    queue = queue_of_process("mine")
    channel = connection.channel()
    publish(connection, "early")
    broker.faults.error("ListOffsets", "INVALID_REQUEST")
    with pytest.raises(MansioError):
        queue(channel).declare()
    queue(channel).declare()
    publish(connection, "a")
    assert read(channel, queue(channel), 1) == ["a"]


def test_a_broadcast_that_is_not_stored_is_an_error_but_an_event_is_dropped(
    broker: TestBroker, connection: kombu.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    channel = connection.channel()
    queue_of_process("mine")(channel).declare()
    producer = kombu.Producer(channel, NEWS, routing_key="key")
    broker.faults.error("Produce", "INVALID_REQUEST")
    with pytest.raises(MansioError):
        producer.publish("task")
    broker.faults.error("Produce", "INVALID_REQUEST")
    producer.publish("event", delivery_mode="transient")
    wait_until(lambda: "1 events of Celery dropped" in caplog.text, 10, "the event")


def next_message(connection: kombu.Connection) -> Any:
    """Consume the queue of tasks on a new channel until one message came."""
    found: list[Any] = []
    channel = connection.channel()
    channel.basic_qos(0, 2, False)
    consumer = kombu.Consumer(channel, [TASKS], on_message=found.append, auto_declare=False)
    consumer.consume()
    while not found:
        connection.drain_events(timeout=scaled(20))
    return found[0]


TASKS = kombu.Queue("tasks", kombu.Exchange("tasks", type="direct"), routing_key="tasks")


def send(connection: kombu.Connection, *bodies: str) -> None:
    with connection.channel() as channel:
        TASKS(channel).declare()
        for body in bodies:
            kombu.Producer(channel).publish(body, exchange="", routing_key="tasks")


def test_a_task_that_runs_keeps_its_lease_when_the_connection_fails_and_its_acknowledgement_counts(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    with connected(broker) as other:
        send(other, "running", "reserved")
        running = next_message(connection)
        connection.drain_events(timeout=scaled(20))
        request = RequestOfCelery(message=running)
        worker_state.active_requests.add(request)
        try:
            connection.collect()
            connection.connect()
            again = next_message(connection)
        finally:
            worker_state.active_requests.discard(request)
        assert (running.payload, again.payload) == ("running", "reserved")
        assert again.delivery_info["redelivered"]
        send(other, "later")
        assert next_message(other).payload == "later"
        running.ack()
        again.ack()
        wait_until(lambda: leased_and_lag(broker) == (1, 1), 20, "only the last task is not acknowledged")


def test_what_the_worker_has_not_started_is_released_when_it_does_not_connect_again(
    broker: TestBroker, connection: kombu.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_readers, "KEPT_S_MAX", 0.01)
    with connected(broker) as other:
        send(other, "reserved")
        assert next_message(connection).payload == "reserved"
        connection.collect()
        assert next_message(other).payload == "reserved"


def test_a_channel_that_is_closed_in_order_releases_its_messages_at_once(
    broker: TestBroker, connection: kombu.Connection
) -> None:
    with connected(broker) as other:
        send(other, "reserved")
        assert next_message(connection).payload == "reserved"
        connection.release()
        assert next_message(other).payload == "reserved"


@pytest.mark.parametrize("chosen", [None, "2000000"])
def test_messages_of_16_mib_are_delivered_also_by_queues_of_an_earlier_version(
    broker: TestBroker, connection: kombu.Connection, chosen: str | None
) -> None:
    admin = broker.client().admin
    size = {} if chosen is None else {"max.message.bytes": chosen}
    admin.create_topic("tasks", partitions=1, config={**queue_admin.FEATURE_CONFIG, **size})
    body = "x" * (16 << 20)
    if chosen is not None:
        with pytest.raises(MansioError, match=r"max\.message\.bytes"):
            send(connection, body)
        return
    send(connection, "small", body, "small")
    # Not with `next_message`: the consumer that it leaves behind may have reserved the large message.
    assert list(map(len, read(connection.channel(), TASKS, 3))) == [5, len(body), 5]
    news = queue_of_process("mine")
    news(connection.channel()).declare()
    publish(connection, body)
    assert len(read(connection.channel(), news(connection.channel()), 1)[0]) == len(body)


class RequestOfCelery(SimpleNamespace):
    """A request of Celery, to which weak references are possible."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # a SimpleNamespace has none


@pytest.mark.parametrize("create", [queue_admin.create_queue, queue_admin.create_exchange])
def test_clients_that_create_a_queue_or_an_exchange_at_the_same_time_all_get_it(
    broker: TestBroker, create: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    async def create_all() -> None:
        async with contextlib.AsyncExitStack() as stack:
            address = broker.bootstrap_servers
            clients = [await stack.enter_async_context(mansio.connect(address)) for _ in range(8)]
            for number in range(5):
                await asyncio.gather(*(create(client, f"q{number}") for client in clients))

    asyncio.run(create_all())


def leased_and_lag(broker: TestBroker) -> tuple[int, int]:
    one = TopicPartition("tasks", 0)
    found = broker.client().admin.shares.leases("tasks", [one])[one]
    assert found is not None
    return found.leased, found.lag
