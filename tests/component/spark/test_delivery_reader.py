"""The reader of deliveries, as a task of Spark uses it, without a JVM: what it reads from brokers, in how many passes,
and with which rights."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.config.topic_names import TRACE_TOPIC
from mansio.errors import TopicAuthorizationFailed
from mansio.spark.sync_client import close_sync_clients
from mansio.spark.trace import delivery_reader
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.testing import TestBroker
from support.handled_records import as_timelines, of_timelines, prepare
from support.process import served
from support.read_deliveries import deliveries
from support.record_rights import RecordRights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa


@pytest.fixture(autouse=True)
def clients() -> Iterator[None]:
    yield
    close_sync_clients()


def shown(table: pa.Table) -> list[tuple[Any, ...]]:
    return as_timelines(table.to_pylist())


@pytest.mark.row("S7")
def test_deliveries_are_those_of_the_timelines(monkeypatch: pytest.MonkeyPatch) -> None:
    with TestBroker() as broker:
        servers = broker.bootstrap_servers
        prepare(servers, "orders", "billing")
        expected = of_timelines(servers, "orders")
        assert len(expected) >= 11
        assert shown(deliveries(servers, "orders")) == expected
        monkeypatch.setattr(delivery_reader, "ROWS_MAX", 3)  # a pass for each of few records
        assert shown(deliveries(servers, "orders", minPartitions="1")) == expected
        chosen = deliveries(servers, "orders", startingOffsets='{"orders": {"0": 1, "1": 2}}')
        assert shown(chosen) == [row for row in expected if row[1] >= 1 + row[0]]
        some = expected[len(expected) // 2][6].astimezone(UTC)
        since = deliveries(servers, "orders", startingTimestamp=str(round(some.timestamp() * 1000)))
        assert shown(since) == [row for row in expected if row[6] >= some]


@pytest.mark.full
def test_deliveries_after_a_kill_are_uncertain_for_the_reason_of_the_timeline(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        servers = broker.bootstrap_servers
        prepare(servers, "orders", "billing")
        assert all(row[-1] for row in shown(deliveries(servers, "orders")))
        broker.kill()
        close_sync_clients()
        broker.start()
        servers = broker.bootstrap_servers
        found = deliveries(servers, "orders")
        with mansio.blocking.connect(servers) as client:
            trace = client.admin.traces.record("orders", 0, 0)
        assert not trace.certain
        assert not any(found["certain"].to_pylist())
        assert set(map(tuple, found["uncertainties"].to_pylist())) == {trace.uncertainties}
        assert shown(found) == of_timelines(servers, "orders")


@pytest.mark.full
def test_deliveries_need_the_rights_to_read_the_topic_and_the_trace() -> None:
    topic, read = ResourceType.TOPIC, Operation.READ
    with TestBroker(authorizer="acl") as broker:
        rights = RecordRights(broker)
        rights.allow_everything()
        prepare(broker.bootstrap_servers, "orders", "billing")
        rights.allow_nothing()
        rights.allow(topic, "orders", Operation.DESCRIBE)
        rights.allow(topic, TRACE_TOPIC, read)
        with pytest.raises(TopicAuthorizationFailed):
            deliveries(broker.bootstrap_servers, "orders")
        rights.allow(topic, "orders", read)
        assert deliveries(broker.bootstrap_servers, "orders").num_rows
        rights.remove(topic, TRACE_TOPIC, read)
        close_sync_clients()
        with pytest.raises(TopicAuthorizationFailed, match=f"READ on topic {TRACE_TOPIC}"):
            deliveries(broker.bootstrap_servers, "orders")
        rights.allow(topic, TRACE_TOPIC, Operation.DESCRIBE)
        close_sync_clients()
        with pytest.raises(TopicAuthorizationFailed, match=TRACE_TOPIC):
            deliveries(broker.bootstrap_servers, "orders")
