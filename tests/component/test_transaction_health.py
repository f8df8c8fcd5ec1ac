"""Metrics and health of transactions, and of records that retention deletes before a share group has processed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka import KafkaException
from prometheus_client.parser import text_string_to_metric_families

from mansio.broker.routing.caller import ANONYMOUS
from mansio.cli.broker import doctor
from mansio.testing.broker import TestBroker
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.open_transactions import hang, open_transaction
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_S = 30
DAY_MS = 86_400_000


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(transaction_state_log_num_partitions=1, transactional_id_expiration_ms=DAY_MS) as one:
        yield one


def get(broker: TestBroker, path: str) -> httpx.Response:
    return httpx.get(f"{broker.http_url}{path}", timeout=scaled(CALL_S))


def metrics(broker: TestBroker) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(get(broker, "/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def warnings(broker: TestBroker, reason: str) -> list[Any]:
    found = get(broker, "/health/ready").json()["warnings"]
    return [each for each in found if each["reason"] == reason]


LAG = "mansio_partition_last_stable_offset_lag_records{partition=0,topic=orders}"


@pytest.mark.row("O3", "O1")
def test_metrics_count_open_ended_and_refused_transactions_and_what_readers_wait_for(
    broker: TestBroker,
) -> None:
    client = broker.client()
    client.admin.create_topic("orders", partitions=1)
    assert metrics(broker)["mansio_open_transactions"] == 0
    producer = open_transaction(
        broker.bootstrap_servers, "orders-1", "orders", ["a", "b", "c"], timeout_ms=600_000
    )
    broker.clock.advance(minutes=1)
    found = metrics(broker)
    assert (found["mansio_transactional_ids"], found["mansio_open_transactions"]) == (1, 1)
    assert 60 <= found["mansio_oldest_open_transaction_seconds"] < 120
    assert found[LAG] == 3
    producer.commit_transaction(CALL_S)
    wait_until(lambda: metrics(broker)["mansio_open_transactions"] == 0, CALL_S)
    found = metrics(broker)
    assert found[LAG] == found["mansio_oldest_open_transaction_seconds"] == 0
    assert found["mansio_transaction_markers_waiting"] == 0

    producer.begin_transaction()
    producer.produce("orders", "d")
    producer.flush(scaled(CALL_S))
    producer.abort_transaction(CALL_S)
    late = open_transaction(broker.bootstrap_servers, "late-1", "orders", ["e"], timeout_ms=60_000)
    broker.clock.advance(minutes=2)
    wait_until(lambda: metrics(broker)["mansio_open_transactions"] == 0, CALL_S)
    found = metrics(broker)
    ended = {
        outcome: found[f"mansio_transactions_ended_total{{outcome={outcome}}}"]
        for outcome in ("committed", "aborted", "timed_out")
    }
    assert ended == {"committed": 1, "aborted": 1, "timed_out": 1}
    assert found["mansio_transaction_requests_refused_total{reason=fenced}"] == 0
    with pytest.raises(KafkaException):
        late.commit_transaction(CALL_S)
    assert metrics(broker)["mansio_transaction_requests_refused_total{reason=fenced}"] >= 1


@pytest.mark.row("O3", "O1")
def test_health_names_the_transactional_id_that_is_open_for_too_long(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("orders", partitions=1)
    long = {"timeout_ms": 900_000}
    producer = open_transaction(broker.bootstrap_servers, "orders-1", "orders", ["a"], **long)
    broker.clock.advance(minutes=9)
    assert warnings(broker, "transaction_open") == []
    broker.clock.advance(minutes=2)
    (found,) = warnings(broker, "transaction_open")
    assert "'orders-1' is in state Ongoing" in found["detail"]
    assert "orders-0" in found["detail"]
    assert get(broker, "/health/ready").status_code == 200
    producer.commit_transaction(CALL_S)
    wait_until(lambda: warnings(broker, "transaction_open") == [], CALL_S)
    for number in range(8):
        open_transaction(broker.bootstrap_servers, f"many-{number}", "orders", ["a"], **long)
    broker.clock.advance(minutes=11)
    named = warnings(broker, "transaction_open")
    assert len(named) == 5
    assert "and 3 other transactions" in named[-1]["detail"]


@pytest.mark.row("O3", "O1")
def test_health_names_the_partition_whose_transaction_no_coordinator_can_know(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("orders", partitions=1)
    start = hang(broker, "orders")
    broker.clock.advance(minutes=14)
    assert warnings(broker, "transaction_may_hang") == []
    broker.clock.advance(minutes=2)
    (found,) = warnings(broker, "transaction_may_hang")
    assert (found["topic"], found["partition"]) == ("orders", 0)
    assert f"since offset {start}" in found["detail"]
    client.admin.create_topic("other", partitions=1)
    open_transaction(broker.bootstrap_servers, "other-1", "other", ["a"], timeout_ms=900_000)
    same_id = client.admin.transactions.describe("other-1").producer_id
    hang(broker, "orders", value="hanging, too", producer_id=same_id)
    broker.clock.advance(minutes=14)
    assert warnings(broker, "transaction_may_hang") == [found]
    client.admin.transactions.abort(TopicPartition("orders", 0), start)
    broker.clock.advance(minutes=3)
    (found,) = warnings(broker, "transaction_may_hang")
    assert f"transaction of producer {same_id}" in found["detail"], "it is open elsewhere, too"


@pytest.mark.row("O3", "P4")
def test_health_reports_that_a_transaction_waits_for_its_decision_and_not_that_it_hangs(
    broker: TestBroker,
) -> None:
    client, services = broker.client(), broker._running().service
    client.admin.create_topic("orders", partitions=1)
    open_transaction(broker.bootstrap_servers, "orders-1", "orders", ["a"])
    known = client.admin.transactions.describe("orders-1")
    broker._run_on_loop(
        services.transactions.prepare("orders-1", known.producer_id, known.producer_epoch, caller=ANONYMOUS)
    )
    broker.clock.advance(hours=2)
    (found,) = warnings(broker, "transaction_open")
    assert "waits for the decision to commit or abort it" in found["detail"]
    assert warnings(broker, "transaction_may_hang") == []


@pytest.mark.row("O3", "L6")
def test_health_names_the_group_whose_records_retention_will_delete_unprocessed(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("jobs", partitions=1, config={"retention.ms": str(DAY_MS)})
    client.admin.create_topic("kept", partitions=1, config={"retention.ms": "-1"})
    for group, topic in (("slow", "jobs"), ("done", "jobs"), ("kept", "kept")):
        client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
        client.publish(topic, b"a")
    for group, topic, count in (("slow", "jobs", 1), ("done", "jobs", 2), ("kept", "kept", 0)):
        with client.receive(topic, group=group, max_records=1) as receiver:
            for _ in range(count):
                receiver.poll(scaled(CALL_S) * 1000)[0].ack()
            if not count:
                receiver.poll(scaled(CALL_S) * 1000)[0].retry(0)
    broker.clock.advance(hours=18)
    assert warnings(broker, "share_records_near_retention") == []
    broker.clock.advance(hours=3)
    (found,) = warnings(broker, "share_records_near_retention")
    assert (found["topic"], found["partition"]) == ("jobs", 0)
    assert "group 'slow' has not processed the records from offset 1 on" in found["detail"]
    assert "in 10,7" in found["detail"] or "in 10,8" in found["detail"], "three hours are left"


@pytest.mark.row("O3")
def test_doctor_reports_hanging_transactions_as_a_problem_and_old_ones_as_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TestBroker(transaction_state_log_num_partitions=1, transaction_max_timeout_ms=3_600_000) as broker:
        servers = broker.bootstrap_servers
        client = broker.client()
        client.admin.create_topic("orders", partitions=2)
        assert doctor.check_transactions(servers).status is doctor.Status.OK
        open_transaction(servers, "old-1", "orders", ["a"], timeout_ms=3_600_000)
        broker.clock.advance(minutes=16)
        old = doctor.check_transactions(servers)
        assert (old.status, "'old-1'" in old.detail) == (doctor.Status.NOTE, True)
        hang(broker, "orders", 1)
        assert doctor.check_transactions(servers).status is doctor.Status.NOTE, "it is not old enough"
        monkeypatch.setattr("mansio.client.admin.transactions.HANGING_OPEN_MS_MIN", 0)
        hanging = doctor.check_transactions(servers)
        assert hanging.status is doctor.Status.PROBLEM
        assert "one hangs in orders-1 from offset 0 on" in hanging.detail
