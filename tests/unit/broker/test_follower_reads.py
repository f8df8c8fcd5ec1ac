"""Consumers read from followers in their rack: committed records only, all of them, in order (KIP-392)."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from mansio.errors import NotEnoughReplicas, NotLeaderOrFollower
from mansio.metadata.feature_level import FIRST_RELEASE
from mansio.wire.apis.fetch import FetchPartition, FetchRequest
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.batch.record_reader import read_records
from support.replicas import TOPIC, Cluster, rack_of

if TYPE_CHECKING:
    from mansio.broker.services.fetch import FetchResult, PartitionData

NOWHERE = "a rack without brokers"


class Reader:
    """A consumer in a rack, as Kafka's: it asks the leader, then the follower that the leader has named, and after each
    error the leader again."""

    def __init__(self, cluster: Cluster, rack: str) -> None:
        self.cluster = cluster
        self.rack = rack
        self.offset = 0
        self.follower: int | None = None
        self.values: list[bytes | None] = []
        self.read_from: set[int] = set()

    def request(self, max_wait_ms: int = 0) -> FetchRequest:
        wanted = FetchPartition(0, -1, self.offset, -1, -1, 1 << 20)
        topics: list[tuple[str | None, bytes | None, list[FetchPartition]]] = [(None, TOPIC.bytes, [wanted])]
        return FetchRequest(-1, max_wait_ms, 1, 1 << 20, 0, 0, -1, topics, [], self.rack)

    def fetch(self) -> PartitionData:
        asked = self.cluster.state().leader if self.follower is None else self.follower
        result, _ = self.cluster[asked].service.fetch.begin_fetch(self.request(), "", None, None)
        return self.take(asked, result)

    def take(self, asked: int, result: FetchResult) -> PartitionData:
        ((_, _, (data,)),) = result.topics
        if data.error is not None:
            self.follower = None
        elif data.preferred_replica >= 0:
            assert data.records is None
            assert result.is_urgent, "the consumer is told at once"
            self.follower = data.preferred_replica
        elif data.records is not None:
            records = data.records if isinstance(data.records, bytes) else data.records.read()
            for begin, header in iterate_batches(records):
                batch = records[begin : begin + header.size]
                for record in read_records(batch, output_bytes_max=1 << 24):
                    if record.offset >= self.offset:
                        assert record.offset == self.offset
                        self.values.append(record.value)
                        self.offset += 1
            self.read_from.add(asked)
        return data


def assert_asks_the_leader(reader: Reader) -> None:
    assert reader.follower is None


def started(brokers: int = 3) -> Cluster:
    cluster = Cluster(brokers, configs={"min.insync.replicas": "2"})
    cluster.run_for(500)
    return cluster


def acknowledged(cluster: Cluster, *values: bytes) -> None:
    ack = cluster[cluster.state().leader].append(*values)
    cluster.run_until(lambda: ack.acknowledged)


def test_a_consumer_reads_from_the_in_sync_follower_in_its_rack() -> None:
    cluster = started()
    acknowledged(cluster, b"a", b"b")
    cluster.run_until(cluster.settled)
    near, at_the_leader, elsewhere = (Reader(cluster, rack) for rack in (rack_of(3), rack_of(1), NOWHERE))
    for reader, expected in ((near, 3), (at_the_leader, 1), (elsewhere, 1)):
        for _ in range(2):
            reader.fetch()
        assert (reader.values, reader.read_from) == ([b"a", b"b"], {expected})


def test_a_follower_serves_no_consumer_without_a_rack() -> None:
    cluster = started()
    acknowledged(cluster, b"a")
    reader = Reader(cluster, "")
    reader.follower = 3
    assert isinstance(reader.fetch().error, NotLeaderOrFollower)


def test_consumers_at_a_follower_get_a_record_as_soon_as_it_is_committed() -> None:
    """The leader sends the high watermark at once, instead of with the next batch or the end of the wait."""
    cluster = started()
    reader = Reader(cluster, rack_of(3))
    reader.fetch()
    cluster.run_for(1000)  # the followers wait for the next batch
    service = cluster[3].service.fetch
    first, is_final = service.begin_fetch(reader.request(500), "", None, None)
    assert not is_final

    def take(result: FetchResult) -> None:
        reader.take(3, result)

    service.park(reader.request(500), "", None, None, first, take)
    acknowledged(cluster, b"a")
    cluster.run_until(lambda: reader.values, within_ms=100)


def test_a_follower_of_a_version_that_does_not_serve_consumers_is_not_named() -> None:
    cluster = started()
    acknowledged(cluster, b"a")
    cluster.run_until(cluster.settled)
    cluster.levels[3] = FIRST_RELEASE
    reader = Reader(cluster, rack_of(3))
    for _ in range(2):
        reader.fetch()
    assert (reader.values, reader.read_from) == ([b"a"], {1})


def test_a_follower_serves_consumers_whatever_its_own_setting_is() -> None:
    """The setting is changed broker by broker."""
    cluster = started()
    acknowledged(cluster, b"a")
    cluster.run_until(cluster.settled)
    reads = cluster[3].service.fetch._follower_reads
    assert reads is not None
    reads._names_followers = False
    reader = Reader(cluster, rack_of(3))
    for _ in range(2):
        reader.fetch()
    assert (reader.values, reader.read_from) == ([b"a"], {3})


@pytest.mark.parametrize("way", ["not in sync", "session over", "older epoch", "no leader"])
def test_a_follower_that_may_be_cut_off_sends_consumers_back_to_the_leader(way: str) -> None:
    cluster = started()
    acknowledged(cluster, b"a")
    cluster.run_until(cluster.settled)
    reader = Reader(cluster, rack_of(3))
    reader.fetch()
    if way == "not in sync":
        cluster.elect(1, isr=(1, 2))
        cluster.tell()
        cluster.run_for(0)
    elif way == "session over":
        cluster[3].session_until_s = 0
    elif way == "older epoch":
        cluster.elect(2)
    else:
        cluster._write(0, cluster.state()._replace(leader=-1))
    assert reader.follower == 3
    assert isinstance(reader.fetch().error, NotLeaderOrFollower)
    assert not reader.values
    assert_asks_the_leader(reader)


def test_a_follower_that_lacks_the_offset_is_not_named() -> None:
    cluster = started()
    cluster.network.isolate(3)
    acknowledged_by_two = cluster[1].append(b"a")
    cluster.run_until(lambda: cluster[2].values() == [b"a"], 1000)
    assert not acknowledged_by_two.acknowledged
    reader = Reader(cluster, rack_of(3))
    reader.offset = 1
    assert reader.fetch().preferred_replica == -1


@pytest.mark.parametrize("seed", range(12))
def test_a_consumer_reads_each_committed_record_once_while_leaders_change(seed: int) -> None:
    """Leaders change, brokers are cut off and killed; elections are clean."""
    chosen = random.Random(seed)
    cluster = started()
    readers = [Reader(cluster, rack_of(node_id)) for node_id in cluster.node_ids]
    number = 0
    for _ in range(120):
        action = chosen.choices(
            ("append", "read", "run", "elect", "cut", "heal", "kill"), (8, 12, 8, 1, 1, 2, 0.5)
        )[0]
        leader = cluster.state().leader
        if action == "append" and cluster[leader].partition.is_leader and leader in cluster.epochs:
            number += 1
            with suppress(NotLeaderOrFollower, NotEnoughReplicas):
                cluster[leader].append(f"{seed}-{number}".encode())
        elif action == "read":
            for reader in readers:
                asked = leader if reader.follower is None else reader.follower
                if not cluster[asked].scheduler.stopped:
                    reader.fetch()
                else:
                    reader.follower = None
        elif action == "run":
            cluster.run_for(chosen.choice((1, 5, 50, 700)))
        elif action == "elect":
            living = [one for one in cluster.state().isr if one in cluster.epochs]
            if living:
                cluster.elect(chosen.choice(living))
                cluster.tell(*chosen.sample(cluster.node_ids, chosen.randint(1, 3)))
        elif action == "cut":
            cluster.network.isolate(chosen.choice(cluster.node_ids))
        elif action == "heal":
            cluster.network.cut.clear()
            cluster.tell()
        elif action == "kill":
            node_id = chosen.choice(cluster.node_ids)
            if node_id != leader:
                cluster.kill(node_id, power=chosen.random() < 0.5)
                cluster.restart(node_id)
    cluster.network.cut.clear()
    cluster.tell()
    cluster.run_until(cluster.settled)
    for reader in readers:
        for _ in range(2 * number + 10):
            reader.fetch()
        assert reader.values == cluster[reader.cluster.state().leader].values(committed=True)
        own = int(reader.rack.split()[1])
        assert own in reader.read_from or own not in cluster.state().isr
