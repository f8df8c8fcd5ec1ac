"""The history of records in a cluster: each broker answers, and only a kill leaves a gap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from mansio import blocking
from mansio.config.topic_names import TRACE_TOPIC
from mansio.spark.sync_client import close_sync_clients
from support.cluster import cluster
from support.handled_records import as_timelines, of_timelines
from support.machine import scaled
from support.read_deliveries import deliveries
from support.waiting import wait_until
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from pathlib import Path

    import mansio
    from support.cluster import Cluster

TOPIC, GROUP, KEY = "orders", "billing", "ann"
PARTITIONS = 3
INVOLVED = [TOPIC, TRACE_TOPIC, "__share_group_state"]
"""Topics of which all partitions need a leader, so that acknowledgements and rows are stored at once."""

DONE = ["published", "delivered", "acknowledged"]


def traced(one: Cluster, node_id: int, partition: int, offset: int) -> mansio.RecordTrace:
    """What one broker answers."""
    with blocking.connect(one.brokers[node_id].bootstrap_servers) as client:
        return client.admin.traces.record(TOPIC, partition, offset)


def found_by_key(one: Cluster, node_id: int) -> list[tuple[int, int]]:
    """Partition and offset of the records with the key, through one broker, which asks the leaders."""
    url = f"{one.brokers[node_id].http_url}/v1/topics/{TOPIC}/search"
    with httpx.stream("GET", url, params={"key": KEY}, timeout=scaled(60)) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[-1] == {"end": True}, lines
    return sorted((each["found"]["partition"], each["found"]["offset"]) for each in lines if "found" in each)


def publish_and_accept(one: Cluster) -> list[int]:
    """One record in each partition, which a share group accepts; their offsets."""
    with blocking.connect(one.bootstrap_servers) as client:
        settings = {"share.auto.offset.reset": "earliest", "share.record.lock.duration.ms": "15000"}
        client.admin.alter_group_config(GROUP, settings)
        offsets = [
            client.publish(TOPIC, b"v", key=KEY, partition=index).offset for index in range(PARTITIONS)
        ]
        left = set(enumerate(offsets))
        with client.receive(TOPIC, group=GROUP) as receiver:
            while left:
                for message in receiver.poll(timeout_ms=scaled(30) * 1000):
                    message.ack()
                    left.discard((message.partition, message.offset))
    return offsets


def check_deliveries(one: Cluster, node_id: int, offsets: list[int]) -> None:
    """The deliveries that Spark reads are those of the timelines."""
    servers, records = one.brokers[node_id].bootstrap_servers, list(enumerate(offsets))
    try:
        rows = deliveries(servers, TOPIC).to_pylist()
    finally:
        close_sync_clients()
    expected = of_timelines(servers, TOPIC, records)
    assert len(expected) >= len(records)
    assert as_timelines(each for each in rows if (each["partition"], each["offset"]) in records) == expected


def done(found: mansio.RecordTrace) -> list[str]:
    return [each.kind for each in found.events if not each.is_computed and each.kind != "state-loaded"]


@pytest.mark.full
@pytest.mark.row("T1", "C5", "S7")
@pytest.mark.timeout(300)
def test_each_broker_has_the_whole_history_and_names_what_a_kill_has_taken(tmp_path: Path) -> None:
    with cluster(tmp_path, http=True) as one:
        create_topic(one, TOPIC, PARTITIONS)
        before = publish_and_accept(one)
        for partition, offset in enumerate(before):
            for node_id in one.brokers:
                found = traced(one, node_id, partition, offset)
                assert done(found) == DONE
                assert found.certain, found.uncertainties
        for node_id in one.brokers:
            assert found_by_key(one, node_id) == [(each, before[each]) for each in range(PARTITIONS)]
        check_deliveries(one, one.leader(TOPIC), before)

        stopped = one.leader(TOPIC)
        one.brokers[stopped].stop()
        one.wait_led_by_others(INVOLVED, stopped, 60)
        other = one.leader(TOPIC)
        found = traced(one, other, 0, before[0])
        assert done(found) == DONE
        assert found.certain, f"broker {stopped} was stopped in an orderly way: {found.uncertainties}"
        check_deliveries(one, other, before)
        one.start(stopped)
        one.wait_in_sync(TOPIC)

        killed = one.leader(TOPIC)
        one.kill(killed)
        one.wait_led_by_others(INVOLVED, killed, 60)
        wait_until(lambda: traced(one, stopped, 0, before[0]).leader == one.leader(TOPIC), scaled(30))
        found = traced(one, stopped, 0, before[0])
        assert done(found) == DONE
        assert any(f"broker {killed} stopped after" in each for each in found.uncertainties), found
        check_deliveries(one, stopped, before)
        after = publish_and_accept(one)
        # The leader may wait before it tries again to write its rows to a partition that the killed broker led.
        wait_until(lambda: done(traced(one, stopped, 0, after[0])) == DONE, scaled(30), "the last rows")
        found = traced(one, stopped, 0, after[0])
        assert found.certain, found.uncertainties
        one.check_logs()
