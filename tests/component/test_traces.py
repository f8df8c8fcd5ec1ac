"""The history of records, over real sockets: what the timeline of a record has, over each protocol, and when it is
certain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

import mansio
from mansio.broker.trace import trace_index, trace_reader
from mansio.config.topic_names import TRACE_TOPIC
from mansio.errors import ResourceNotFound, UnknownTopicOrPartition
from mansio.testing import TestBroker
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.trace_index_records import is_index_record
from support.machine import scaled
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUP = "billing"
LEASE_S = 30
COMPUTED = {"replicated", "kept"}


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        admin = running.client().admin
        admin.create_topic("orders", partitions=1)
        settings = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
        admin.alter_group_config(GROUP, {**settings, "share.delivery.count.limit": "2"})
        yield running


def events(trace: mansio.RecordTrace) -> list[tuple[str, int]]:
    """Kind and attempt of what was done, without what is computed."""
    return [(each.kind, each.attempt) for each in trace.events if each.kind not in COMPUTED]


def receive(broker: TestBroker, outcome: str, group: str = GROUP) -> None:
    """Receive one record, and end its delivery."""
    with broker.client().receive("orders", group=group, max_records=1, prefetch=0) as receiver:
        (message,) = receiver.poll(timeout_ms=scaled(20) * 1000)
        getattr(message, outcome)()


@pytest.mark.row("T1")
def test_the_timeline_of_a_record_has_each_attempt_with_its_end_and_its_member(broker: TestBroker) -> None:
    broker.client(client_id="shop").publish("orders", b"2 apples", key=b"ann")
    receive(broker, "retry")
    receive(broker, "reject")
    wait_until(lambda: records_of(broker, "dlq.orders") == 1, scaled(20))
    found = broker.client().admin.traces.record("orders", 0, 0)
    assert events(found) == [
        ("published", 0),
        ("delivered", 1),
        ("released", 1),
        ("delivered", 2),
        ("rejected", 2),
        ("dead-lettered", 2),
    ]
    published, first, released, second, rejected, dead = found.events[:6]
    assert published.who == "shop@127.0.0.1"
    assert first.who == released.who != second.who == rejected.who == dead.who
    assert found.certain
    assert found.total_ms is not None
    assert [each.kind for each in found.events[6:]] == ["replicated", "kept"]
    assert broker.client().admin.traces.last_failed(GROUP) == found
    with pytest.raises(ResourceNotFound):
        broker.client().admin.traces.last_failed("another")
    with pytest.raises(UnknownTopicOrPartition):
        broker.client().admin.traces.record("orders", 1, 0)


def records_of(broker: TestBroker, topic: str) -> int:
    admin, partition = broker.client().admin, mansio.TopicPartition(topic, 0)
    if topic not in {each.name for each in admin.describe_topics()}:
        return 0
    return admin.list_offsets([partition])[partition].offset


@pytest.mark.row("T1")
def test_expiry_redrive_delay_positions_and_deletion_are_in_the_timeline(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("late", partitions=1, config={"mansio.delay.enable": "true"})
    client.publish("orders", b"expires")
    for _ in range(2):
        with client.receive("orders", group=GROUP, max_records=1, prefetch=0) as receiver:
            assert receiver.poll(timeout_ms=scaled(20) * 1000)
            broker.clock.advance(seconds=LEASE_S + 1)
    wait_until(lambda: records_of(broker, "dlq.orders") == 1, scaled(20))
    found = client.admin.traces.record("orders", 0, 0)
    assert [kind for kind, _ in events(found)] == [
        "published", "delivered", "expired", "delivered", "attempts-used-up", "dead-lettered",
    ]  # fmt: skip
    assert found.events[2].wait_ms is not None
    assert found.events[2].wait_ms >= (LEASE_S - 1) * 1000
    assert found.certain

    accepted = client.publish("late", b"tea", delay=900)
    pending = client.admin.traces.record("late", 0, accepted.offset)
    assert [kind for kind, _ in events(pending)] == ["published", "accepted"]
    broker.clock.advance(minutes=15, seconds=1)
    with client.consume("late", start="earliest", group="readers", max_records=1) as consumer:
        (message,) = list(consumer)
        consumer.commit()
    delivered = client.admin.traces.record("late", 0, message.offset)
    assert [kind for kind, _ in events(delivered)] == ["published", "accepted", "due", "position-committed"]
    assert delivered.events[3].group == "readers"
    former = client.admin.traces.record("late", 0, accepted.offset)
    assert events(former) == [("published", 0), ("due", 0)]
    assert former.events[1].detail == f"delivered as the record at offset {message.offset}"
    assert delivered.certain


@pytest.mark.row("T1")
def test_the_trace_is_shown_by_the_command_over_http_and_over_grpc(broker: TestBroker) -> None:
    pytest.importorskip("grpc")
    import grpc

    from mansio.api.grpc import mansio_pb2 as pb

    broker.client().publish("orders", b"2 apples")
    receive(broker, "ack")
    shell = Shell(broker.bootstrap_servers)
    kinds = ["published", "delivered", "acknowledged", "replicated", "kept"]
    shown = json.loads(shell("trace", "orders/0/0", "-o", "json"))
    assert [each["kind"] for each in shown["events"]] == kinds
    assert all(each["time"] for each in shown["events"][:3])
    assert shown["certain"]
    table = shell("trace", "orders/0/0")
    assert "acknowledged" in table
    assert "certain: nothing is missing" in table
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(20)) as http:
        answer = http.get("/topics/orders/partitions/0/records/0/trace")
        assert answer.status_code == 200, answer.text
        assert [each["kind"] for each in answer.json()["events"]] == kinds
        assert http.get("/topics/orders/partitions/0/records/x/trace").status_code == 400
        assert http.get("/groups/nobody/last-failed/trace").status_code == 404
    with grpc.insecure_channel(broker.grpc_address) as channel:
        call = channel.unary_unary(
            "/mansio.v1.Mansio/TraceRecord",
            request_serializer=pb.TraceRecordRequest.SerializeToString,
            response_deserializer=pb.RecordTrace.FromString,
        )
        answer = call(pb.TraceRecordRequest(topic="orders"), timeout=scaled(20))
    assert [each.kind for each in answer.events] == kinds
    assert answer.certain


@pytest.mark.row("T2")
def test_a_broker_appends_one_block_a_second_whatever_the_number_of_partitions(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("wide", partitions=300)
    writer = present(broker._running()._service).traces.reader.writer
    client.admin.traces.record("wide", 0, 0)  # writes all that was reported before
    before = writer.block_count
    client.publish_many(
        "wide", [mansio.OutgoingRecord(b"v", partition=partition) for partition in range(300)]
    )
    broker.clock.advance(seconds=2)
    assert client.admin.traces.record("wide", 299, 0).certain
    assert writer.block_count == before + 1
    assert len(client.admin.describe_topic(TRACE_TOPIC).partitions) == 1


@pytest.mark.row("T2")
def test_a_broker_stores_the_index_of_its_blocks_and_reads_it_after_a_restart(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trace_index, trace_reader):
        monkeypatch.setattr(module, "BLOCKS_PER_GROUP", 4)
    client = broker.client()
    for offset in range(9):
        client.publish("orders", b"%d" % offset)
        assert client.admin.traces.record("orders", 0, offset).certain
    log = present(present(broker._running()._service).traces.reader._partitions.get(TRACE_TOPIC, 0)).log

    def index_records() -> list[int]:
        found, offset = [], 0
        while (part := log.read(offset, 1, log.end_offset)) is not None:
            (record,) = read_records(part.read())
            if is_index_record(record.value or b""):
                found.append(offset)
            offset = part.next_offset
        return found

    wait_until(lambda: len(index_records()) >= 2, 20, "index records")
    broker.restart()
    client = broker.client()
    for offset in range(9):
        trace = client.admin.traces.record("orders", 0, offset)
        assert trace.certain, trace.uncertainties
        assert events(trace) == [("published", 0)]


@pytest.mark.row("T1")
def test_times_without_a_trace_and_orderly_restarts_are_distinguished(broker: TestBroker) -> None:
    client = broker.client()
    client.publish("orders", b"a")
    broker.restart()
    client = broker.client()
    assert client.admin.traces.record("orders", 0, 0).certain, "the broker was stopped in an orderly way"
    client.admin.alter_topic_config("orders", {"mansio.trace.enable": "false"})
    client.publish("orders", b"b")
    client.admin.alter_topic_config("orders", {"mansio.trace.enable": "true"})
    client.publish("orders", b"c")
    first, second, third = (client.admin.traces.record("orders", 0, offset) for offset in range(3))
    assert any("the trace was off" in each for each in first.uncertainties)
    assert second.events[0].kind == "replicated"
    assert not second.certain
    assert third.certain


@pytest.mark.row("T1")
def test_a_killed_broker_makes_timelines_uncertain_from_then_on(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("orders", partitions=1)
            client.publish("orders", b"written")
            assert client.admin.traces.record("orders", 0, 0).certain
            client.publish("orders", b"its row is lost")
            broker.kill()
        broker.start()
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.publish("orders", b"afterwards")
            found = [client.admin.traces.record("orders", 0, offset) for offset in range(3)]
    assert [each.certain for each in found] == [False, False, True]
    assert "stopped after" in found[0].uncertainties[0]
    assert [each.kind for each in found[0].events] == ["published", "replicated", "kept"]
    assert "no row about its publication" in found[1].uncertainties[0]
