"""Histories that were found broken once, each as short as it can be told."""

from __future__ import annotations

from sim.clients import TOPIC
from sim.world import World


def test_a_broker_that_dies_again_before_it_is_registered_still_knows_that_its_disk_was_lost() -> None:
    """Its old session stands for a while, so it waits; the next start finds a directory that it made itself, and must
    not take the logs it lost for logs that never were: it would lead, in sync, with nothing."""
    world = World(0, faults_ms=200)
    world.run()
    topic = world.brokers()[0].core.state.topics[TOPIC]
    broker = world.network.brokers[topic.partitions[0].leader]
    world.lose_disk(broker)
    world.start(broker.node_id, broker.disk)
    world.simulation.run_for(100)
    waiting = world.network.brokers[broker.node_id]
    waiting.die()
    world.start(waiting.node_id, waiting.disk)
    world.simulation.run_for(100)
    again = world.network.brokers[broker.node_id]
    assert not again.ready, "its old session stands"
    assert (topic.topic_id, 0) in again.clustering._residence.lost_logs()  # type: ignore[union-attr]
