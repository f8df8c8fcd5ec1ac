"""`mansio.testing`: the test broker, its clock and its faults, with stock clients over real sockets."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

import mansio
from mansio.blocking import LoopUnavailable
from mansio.errors import MansioError, Unavailable
from mansio.node.broker import Broker
from mansio.testing import TestBroker
from support.documents import examples
from support.machine import scaled
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEASE_S = 30
GROUP = {"share.auto.offset.reset": "earliest"}


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


def values_in(broker: TestBroker, topic: str) -> list[bytes | None]:
    """All values in partition 0 of a topic."""
    with broker.client().consume(mansio.TopicPartition(topic, 0), to_end=True) as consumer:
        return [message.value for message in consumer]


def client_threads() -> int:
    """How many clients are open, apart from those in reference cycles that the garbage collector finds."""
    gc.collect()
    return sum(thread.name == "mansio-client" for thread in threading.enumerate())


async def refuse(broker: Broker) -> None:
    raise OSError("no start")


class TestClock:
    def test_an_expired_lease_is_delivered_again_after_an_advance(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.alter_group_config("work", GROUP)
        client.publish("jobs", b"one")
        with client.receive("jobs", group="work", auto_extend=False) as slow:
            messages = iter(slow)
            assert next(messages).delivery_count == 1
            broker.clock.advance(seconds=LEASE_S)
            again = next(messages)
            assert (again.value, again.delivery_count) == (b"one", 2)
            again.ack()

    def test_retries_come_back_in_the_order_of_their_times(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.alter_group_config("work", GROUP)
        delays = {b"late": 600.0, b"early": 300.0}
        for value in delays:
            client.publish("jobs", value)
        with client.receive("jobs", group="work") as receiver:
            messages = iter(receiver)
            for _ in delays:
                message = next(messages)
                message.retry(after=delays[message.value or b""])
            for value in (b"early", b"late"):
                broker.clock.advance(timedelta(minutes=5))
                message = next(messages)
                assert (message.value, message.delivery_count) == (value, 2)
                message.ack()

    def test_retention_deletes_after_an_advance(self, broker: TestBroker) -> None:
        client = broker.client()
        client.admin.create_topic(
            "old", partitions=1, config={"retention.ms": "3600000", "segment.ms": "600000"}
        )
        client.publish("old", b"first")
        broker.clock.advance(minutes=20)
        client.publish("old", b"second")
        broker.clock.advance(hours=2)
        assert b"first" not in values_in(broker, "old")

    def test_members_that_send_heartbeats_keep_their_sessions(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish("orders", b"one")
        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "group.id": "readers",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 10_000,
            }
        )
        consumer.subscribe(["orders"])
        assert present(consumer.poll(30)).value() == b"one"
        before = client.admin.describe_group("readers").members
        broker.clock.advance(minutes=15)
        assert client.admin.describe_group("readers").members == before != ()
        broker.clock.advance(minutes=15, sessions=True)
        assert client.admin.describe_group("readers").members != before
        consumer.close()

    def test_the_clock_never_goes_back(self, broker: TestBroker) -> None:
        before = broker.clock.time_ms()
        broker.clock.advance(days=1)
        assert broker.clock.time_ms() >= before + 86_400_000 - 1  # both are rounded down
        with pytest.raises(ValueError, match="set back"):
            broker.clock.advance(seconds=-1)

    def test_record_timestamps_follow_the_clock(self, broker: TestBroker) -> None:
        broker.clock.advance(days=365)
        client = broker.client()
        client.admin.create_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})
        written = client.publish("stamped", b"x")
        assert written.timestamp_ms >= broker.clock.time_ms() - 60_000


class TestLife:
    def test_stock_clients_write_and_read(self, broker: TestBroker) -> None:
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        producer.produce("flights", b"value", key=b"key")
        assert producer.flush(30) == 0
        reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "g"})
        reader.assign([TopicPartition("flights", 0, 0)])
        message = present(reader.poll(30))
        assert (message.key(), message.value()) == (b"key", b"value")
        reader.close()

    def test_a_restart_keeps_records_topics_and_address(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish("orders", b"kept")
        address = broker.bootstrap_servers
        broker.restart()
        assert broker.bootstrap_servers == address
        assert values_in(broker, "orders") == [b"kept"]

    def test_health_is_served_over_http(self, broker: TestBroker) -> None:
        with urllib.request.urlopen(f"{broker.http_url}/health/ready") as response:
            assert response.status == 200

    def test_a_stopped_broker_is_reported_as_stopped(self) -> None:
        broker = TestBroker()
        with pytest.raises(Unavailable, match="not running"):
            broker.clock.advance(seconds=1)
        with pytest.raises(Unavailable, match="not running"):
            _ = broker.bootstrap_servers
        broker.close()

    def test_fifty_brokers_leave_no_thread_and_no_descriptor(self) -> None:
        with TestBroker() as first:
            first.client().publish("warm", b"up")
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            with TestBroker() as broker:
                broker.client().publish("orders", b"one")
        gc.collect()
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    def test_a_client_of_which_nothing_is_used_any_more_is_closed(self, broker: TestBroker) -> None:
        broker.client().publish("orders", b"one")
        wait_until(lambda: client_threads() == 0)
        for _ in range(5):
            assert values_in(broker, "orders") == [b"one"], "its consumer keeps a client open"
            admin = broker.client().admin
            gc.collect()
            assert "orders" in admin.list_topics()
        del admin
        wait_until(lambda: client_threads() == 0)

    def test_a_record_sent_by_a_client_that_is_dropped_is_stored(self, broker: TestBroker) -> None:
        broker.client().publish("orders", b"one")
        broker.client().producer(mansio.ProducerOptions(linger_ms=200)).send("orders", b"two")
        wait_until(lambda: client_threads() == 0)
        assert values_in(broker, "orders") == [b"one", b"two"]

    def test_clients_that_only_consumed_leave_no_thread_to_the_garbage_collector(
        self, broker: TestBroker
    ) -> None:
        broker.client().publish("orders", b"one")
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert values_in(broker, "orders") == [b"one"]
            wait_until(lambda: not any(thread.name == "mansio-client" for thread in threading.enumerate()))
        finally:
            gc.enable()

    def test_a_client_that_is_used_is_closed_with_its_broker(self) -> None:
        with TestBroker() as broker:
            used, closed = broker.client(), broker.client()
            closed.close()
            used.publish("orders", b"one")
        assert client_threads() == 0
        with pytest.raises(LoopUnavailable):
            used.publish("orders", b"two")

    def test_everything_is_closed_after_a_restart_that_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = threading.active_count()
        broker = TestBroker().start()
        client = broker.client()
        client.publish("orders", b"one")
        monkeypatch.setattr(Broker, "start", refuse)
        with pytest.raises(OSError, match="no start"):
            broker.restart()
        broker.close()
        assert threading.active_count() == threads


class TestFaults:
    def test_a_full_disk_refuses_records_and_serves_reads(self, broker: TestBroker) -> None:
        client = broker.client(request_timeout_ms=3000)
        client.publish("orders", b"before")
        with broker.faults.full_disk(), pytest.raises(MansioError):
            client.publish("orders", b"during")
        assert values_in(broker, "orders") == [b"before"]

    def test_a_failed_flush_ends_the_log_until_a_restart(self, broker: TestBroker) -> None:
        client = broker.client(request_timeout_ms=3000)
        client.publish("orders", b"before")
        with broker.faults.failing_flush(), pytest.raises(MansioError):
            client.publish("orders", b"during")
        with pytest.raises(MansioError):
            client.publish("orders", b"after")
        broker.restart()
        broker.client().publish("orders", b"again")

    def test_chosen_requests_fail_and_the_next_succeed(self, broker: TestBroker) -> None:
        broker.client().publish("orders", b"created")
        broker.faults.error("Produce", "MESSAGE_TOO_LARGE", count=2)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        outcomes: list[KafkaError | None] = []
        for _ in range(3):
            producer.produce("orders", b"x", on_delivery=lambda error, _: outcomes.append(error))
            producer.flush(30)
        assert [None if error is None else error.code() for error in outcomes] == [
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.MSG_SIZE_TOO_LARGE,
            None,
        ]

    def test_an_unknown_api_or_error_is_refused(self, broker: TestBroker) -> None:
        with pytest.raises(ValueError, match="no API"):
            broker.faults.error("Nothing", "UNKNOWN_SERVER_ERROR")
        with pytest.raises(ValueError, match="no error"):
            broker.faults.error("Produce", "NOTHING")

    def test_a_partition_without_leader_takes_records_when_it_has_one_again(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish("orders", b"before")
        with broker.faults.no_leader("orders", 0):
            metadata = AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics("orders", 30)
            assert metadata.topics["orders"].partitions[0].leader == -1
            producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
            producer.produce("orders", b"waits")
            assert producer.flush(0.5) == 1
        assert producer.flush(30) == 0
        assert values_in(broker, "orders") == [b"before", b"waits"]

    def test_dropped_connections_are_made_again(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish("orders", b"one")
        broker.faults.drop_connections()
        client.publish("orders", b"two")

    def test_refused_connections_are_an_error_of_the_client(self, broker: TestBroker) -> None:
        with broker.faults.refused_connections(), pytest.raises(MansioError):
            broker.client(connect_timeout_ms=1000, request_timeout_ms=1000)
        broker.client().publish("orders", b"one")

    def test_slow_connections_delay_the_next_request(self, broker: TestBroker) -> None:
        client = broker.client()
        client.publish("orders", b"one")
        with broker.faults.slow_connections(0.2):
            began = time.monotonic()
            for _ in range(3):
                client.publish("orders", b"two")
            assert time.monotonic() - began >= 0.4


class TestDocument:
    """The examples of docs/how-to/testing.md."""

    def test_they_are_all_run(self) -> None:
        assert set(examples("docs/how-to/testing.md")) == {"fixture", "context", "faults"}

    @pytest.mark.parametrize("name", ["context", "faults"])
    def test_a_program(self, name: str) -> None:
        source = examples("docs/how-to/testing.md")[name].code
        subprocess.run([sys.executable, "-c", source], check=True, timeout=scaled(60))

    @pytest.mark.full
    def test_a_test_with_fixtures(self, tmp_path: Path) -> None:
        (tmp_path / "test_example.py").write_text(examples("docs/how-to/testing.md")["fixture"].code)
        command = [sys.executable, "-m", "pytest", "-q", "-n0", str(tmp_path)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=scaled(120))


class TestPlugin:
    def test_it_imports_no_broker_until_a_fixture_is_used(self) -> None:
        code = (
            "import sys, pytest, mansio.testing.pytest_plugin;"
            "heavy = [name for name in sys.modules if name.startswith('mansio.') and name not in"
            " {'mansio.version', 'mansio.testing', 'mansio.testing.pytest_plugin'}];"
            "sys.exit(repr(heavy) if heavy else 0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))

    @pytest.mark.row("A5")
    @pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.full)])
    def test_its_fixtures_work_in_a_project_of_a_user(self, tmp_path: Path, workers: str) -> None:
        (tmp_path / "test_orders.py").write_text(
            """
import pytest, mansio

def test_retry(mansio_broker, mansio_client):
    mansio_client.publish("orders", b"x")
    mansio_broker.clock.advance(minutes=15)

def test_schema(mansio_schemas):
    assert mansio_schemas("orders-value", '"string"') == 1

def test_empty(mansio_broker):
    assert "orders" not in mansio_broker.client().admin.list_topics()

@pytest.mark.parametrize("number", range(3))
def test_shared(mansio_broker_session, number):
    mansio_broker_session.client().publish("shared", b"x")

def test_factory(mansio_broker_factory):
    one, two = mansio_broker_factory(num_partitions=3), mansio_broker_factory()
    assert one.bootstrap_servers != two.bootstrap_servers
"""
        )
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:randomly", str(tmp_path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=scaled(120),
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "7 passed" in result.stdout
