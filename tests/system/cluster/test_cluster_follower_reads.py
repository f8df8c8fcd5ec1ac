"""Consumers with client.rack read from the follower in their rack, and from the leader when it is gone (KIP-392)."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import mansio
from support.cluster import cluster
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from support.cluster import Cluster

TOPIC = "near"
FOLLOWER_WAIT_MS = 60_000
"""A follower that is not told of a high watermark learns it after this time."""


def fetched_bytes(one: Cluster, node_id: int) -> float:
    with urllib.request.urlopen(f"{one.brokers[node_id].http_url}/metrics", timeout=scaled(10)) as response:
        text = response.read().decode()
    found = re.search(r"^mansio_fetched_bytes_total ([0-9.e+]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def poll(consumer: Consumer, wanted: int, values: list[bytes | None]) -> None:
    def take() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            values.append(message.value())
        return len(values) >= wanted

    wait_until(take, FOLLOWER_WAIT_MS / 2000)


@pytest.mark.full
@pytest.mark.row("C3")
@pytest.mark.timeout(240)
def test_consumers_read_from_the_follower_in_their_rack_until_it_is_killed(tmp_path: Path) -> None:
    with cluster(
        tmp_path,
        http=True,
        replica_selector="rack",
        replica_fetch_wait_max_ms=FOLLOWER_WAIT_MS,
        broker_settings=lambda node_id, _: {"broker_rack": f"rack-{node_id}"},
    ) as one:
        admin = AdminClient({"bootstrap.servers": one.bootstrap_servers})
        for created in admin.create_topics([NewTopic(TOPIC, 1, 3)]).values():
            created.result(scaled(30))
        one.wait_in_sync(TOPIC)
        follower, other = one.followers(TOPIC)
        options: dict[str, Any] = {
            "bootstrap.servers": one.bootstrap_servers,
            "client.rack": f"rack-{follower}",
            "group.id": "near",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        producer = Producer({"bootstrap.servers": one.bootstrap_servers, "transactional.id": "one"})
        producer.init_transactions(scaled(30))
        values: list[bytes | None] = []
        expected: list[bytes | None] = []
        consumer = Consumer(options)
        consumer.subscribe([TOPIC])

        def transact(name: str, *, commit: bool = True) -> None:
            producer.begin_transaction()
            for number in range(20):
                value = f"{name}-{number}".encode()
                producer.produce(TOPIC, value)
                if commit:
                    expected.append(value)
            producer.flush(scaled(30))
            (producer.commit_transaction if commit else producer.abort_transaction)(scaled(30))

        # Each transaction is read at once, although the follower's fetch would wait for a minute.
        for name, commit in (("first", True), ("aborted", False), ("second", True), ("third", True)):
            transact(name, commit=commit)
            poll(consumer, len(expected), values)
            assert values == expected
        assert fetched_bytes(one, follower) > 0
        assert fetched_bytes(one, other) == 0
        leader_bytes = fetched_bytes(one, one.leader(TOPIC))
        transact("fourth")
        poll(consumer, len(expected), values)
        assert fetched_bytes(one, one.leader(TOPIC)) == leader_bytes, "it names the follower only"

        # Our own client.
        with mansio.blocking.connect(one.bootstrap_servers) as client:
            own = [one.value for one in client.consume(TOPIC, to_end=True, rack=f"rack-{other}")]
        assert own == expected
        assert fetched_bytes(one, other) > 0

        one.kill(follower)
        transact("fifth")
        poll(consumer, len(expected), values)
        assert values == expected, "none twice, none left out"
        one.start(follower)
        one.wait_in_sync(TOPIC)
        transact("sixth")
        poll(consumer, len(expected), values)
        assert values == expected
        consumer.close()
        one.check_logs()
