"""What many partitions cost in planner, controller and metadata image: transactions, bytes, partitions looked at, and
calls of functions in one callback of the event loop. Counts, no times: see `bench.many_partitions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench.many_partitions import CallCounter, SimulatedCluster, check_costs, steps_of

from mansio.metadata.metadata_store import Put, encode
from mansio.metadata.model import partition_document
from mansio.metadata.topic_plan import UsableBroker, place_replicas

if TYPE_CHECKING:
    from bench.many_partitions import Costs

    from mansio.metadata.model import TopicChange

CALLS_IN_TURN_MAX = 24_000
"""Calls of functions in a callback: a turn of 500 decisions has 12,000, and the application of four transactions with
50 elections each 17,000."""


def costs_of(topics: int, partitions: int, *, brokers: int, counts_calls: bool) -> dict[str, Costs]:
    cluster = SimulatedCluster(brokers, counts_calls=counts_calls)
    cluster.start()
    return {costs.step: costs for costs in (step() for step in steps_of(cluster, topics, partitions))}


def test_a_change_of_many_partitions_costs_few_transactions_and_looks() -> None:
    for costs in costs_of(5, 40, brokers=6, counts_calls=False).values():
        check_costs(costs, 200)


@pytest.mark.full
@pytest.mark.parametrize(("topics", "partitions"), [(20, 100), (1, 1_000)])
def test_no_callback_looks_at_all_partitions(topics: int, partitions: int) -> None:
    found = costs_of(topics, partitions, brokers=10, counts_calls=True)
    for costs in found.values():
        check_costs(costs, topics * partitions)
        if costs.step != "create":  # a request for a topic is answered about all of its partitions
            assert costs.longest_calls < CALLS_IN_TURN_MAX, costs


@pytest.mark.parametrize("brokers", [5, 100])
def test_the_placement_of_a_replica_does_not_look_at_all_brokers(brokers: int) -> None:
    usable = [UsableBroker(node_id, f"rack-{node_id % 5}") for node_id in range(brokers)]
    with CallCounter() as counter:
        place_replicas(1_000, 3, usable)
    assert counter.count < 40_000


@pytest.mark.parametrize("partitions", [10, 2_000])
def test_a_change_of_one_partition_costs_the_same_in_a_large_topic(partitions: int) -> None:
    cluster = SimulatedCluster(3)
    cluster.start()
    cluster.create(1, partitions)
    changes: list[TopicChange] = []
    cluster.state.on_change(changes.append)
    (topic,) = cluster.state.topics.values()
    key = cluster.state.keys.partition(topic.topic_id, 7)
    document = {**partition_document(topic.partitions[7]), "part_epoch": 9}
    assert cluster.store.transact([], [Put(key, encode(document, ""))]).succeeded
    with CallCounter() as counter:
        cluster.simulation.run_for(100)
    assert counter.count < 1_000
    ((before, after, changed),) = [(each.before, each.after, each.partitions) for each in changes]
    assert before is topic
    assert after is cluster.state.topics[topic.name] is cluster.state.topics_by_id[topic.topic_id]
    assert changed == [7]
    assert after is not None
    assert after.partitions[7].partition_epoch == 9
    assert after.partitions[:7] + after.partitions[8:] == topic.partitions[:7] + topic.partitions[8:]
