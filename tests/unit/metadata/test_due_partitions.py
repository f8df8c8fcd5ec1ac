"""The controller decides again about whatever it did not carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.many_partitions import SimulatedCluster

from mansio.metadata import reassignment
from mansio.metadata.controller_plan import without_replica
from mansio.metadata.metadata_store import Put, encode
from mansio.metadata.model import partition_document
from support.present import present

if TYPE_CHECKING:
    from mansio.metadata.model import PartitionState, Topic


def put(cluster: SimulatedCluster, topic: Topic, index: int, partition: PartitionState) -> Put:
    return Put(cluster.state.keys.partition(topic.topic_id, index), encode(partition_document(partition), ""))


def test_a_replication_factor_is_stored_although_elections_come_first() -> None:
    cluster = SimulatedCluster(5)
    cluster.start()
    cluster.create(2, 4)
    state = cluster.state
    reduced, other = sorted(state.topics.values(), key=lambda topic: topic.name)
    view = cluster.controller._view(cluster.clock.monotonic())
    puts = []
    for index, each in enumerate(reduced.partitions):
        begun = present(reassignment.begin(view, reduced, index, each.replicas[:2]))
        puts.append(put(cluster, reduced, index, begun.after))
    first = other.partitions[0]
    puts.append(put(cluster, other, 0, without_replica(first, first.leader)))
    assert cluster.store.transact([], puts).succeeded
    cluster.simulation.run_for(30_000)
    assert state.topics[other.name].partitions[0].leader > 0
    assert state.topics[reduced.name].replication_factor == 2
    assert not any(each.removing for each in state.topics[reduced.name].partitions)


def test_keys_of_partitions_that_were_never_added_are_no_replicas() -> None:
    """A broker that adds many partitions may end before it writes their number."""
    cluster = SimulatedCluster(4)
    cluster.start()
    cluster.create(1, 4)
    (topic,) = cluster.state.topics.values()
    before = cluster.state.count_replicas(4)
    added = topic.partitions[0]._replace(replicas=(4, 1, 2), isr=(4, 1, 2), leader=4)
    puts = [put(cluster, topic, 4 + number, added) for number in range(100)]
    assert cluster.store.transact([], puts).succeeded
    cluster.simulation.run_for(1000)
    assert cluster.state.count_replicas(4) == before
