"""Regression tests: simulated histories that once violated a guarantee, reduced to few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.api.http.broker_stats import RunningBroker
from mansio.api.http.service_stats import ServiceStats
from mansio.api.routing.routed_clients import RoutedClients
from mansio.config.addresses import Address
from mansio.metadata.metadata_store import Put, decode, encode
from sim.brokers import TTL_MS
from sim.clients import TOPIC
from sim.world import World

if TYPE_CHECKING:
    import pytest

    from sim.etcd import EtcdModel


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
    assert (topic.topic_id, 0) in again.cluster_member._replica_manager.lost_logs()  # type: ignore[union-attr]


def test_a_lost_log_of_a_replica_that_is_not_in_sync_stays_lost_until_the_broker_has_registered() -> None:
    """A late fetch request of the process that lost the disk can put the broker back into the in-sync set while its
    old session is alive. After another restart it must not take the empty log that it made for its old one."""
    world = World(0, faults_ms=200)
    world.run()
    topic = world.brokers()[0].core.state.topics[TOPIC]
    node_id = next(one for one in topic.partitions[0].replicas if one != topic.partitions[0].leader)
    world.lose_disk(world.network.brokers[node_id])
    for put_back in (False, True):
        entry = next(
            entry
            for entry in world.etcd.list("/mansio/").entries
            if "/parts/" in entry.key and entry.key.endswith(f"{topic.topic_id}/0")
        )
        document = decode(entry.key, entry.value)
        document["isr"] = [one for one in topic.partitions[0].isr if one != node_id or put_back]
        document["part_epoch"] += 1
        world.etcd.transact([], [Put(entry.key, encode(document, "test"))])
        world.start(node_id, world.network.brokers[node_id].disk)
        world.simulation.run_for(100)
        started = world.network.brokers[node_id]
        assert not started.ready, "its old session is alive"
        lost_logs = started.cluster_member._replica_manager.lost_logs()  # type: ignore[union-attr]
        assert (topic.topic_id, 0) in lost_logs
        started.die()


class NewerMetadata:
    """The error of etcd for a broker that is too old for what has been written."""

    def __init__(self, model: EtcdModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def events(self, prefix: str, position: int) -> Any:
        found, position = self._model.events(prefix, position)
        return [event._replace(value=b'{"schema": 99}') for event in found], position


def test_a_broker_that_cannot_read_the_metadata_gives_its_session_back_and_others_take_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was the controller: no leader would be elected any more, and its readers would receive nothing new."""
    world = World(4, faults_ms=2000)
    found: dict[str, Any] = {}

    def fail() -> None:
        controller = world.brokers()[0].core.state.controller
        assert controller is not None
        broker = world.network.brokers[controller.node_id]
        found["broker"], found["led"] = broker.node_id, led_by(broker.node_id)
        found["acknowledged before"] = world.acknowledged
        broker.etcd_client.store = NewerMetadata(world.etcd)  # type: ignore[assignment]
        world.etcd.transact([], [Put(broker.core.state.keys.progress, encode({}, ""))])
        world.driver.call_later(TTL_MS / 3, look)

    def look() -> None:
        """Before its lease would have ended by itself, and long after it would have registered again."""
        broker = world.network.brokers[found["broker"]]
        state, view = broker.core.state, ServiceStats(broker.core.settings)
        view.attach(
            RunningBroker(
                broker.core.service,
                broker.server,
                RoutedClients(broker.server, None),
                Address("", 0),
                lambda: broker.ready,
            )
        )
        found["session"] = world.etcd.get(state.keys.session(broker.node_id))
        found["controller"] = other(broker.node_id).controller
        found["led after"] = led_by(broker.node_id)
        found["problems"] = [problem.reason for problem in view.problems()]
        found["shown"] = broker.node_id in state.brokers
        found["acknowledged after"] = world.acknowledged
        broker.terminate()
        world.restart_later(broker)

    def other(node_id: int) -> Any:
        return next(one.core.state for one in world.brokers() if one.node_id != node_id)

    def led_by(node_id: int) -> int:
        return sum(one.leader == node_id for one in other(node_id).topics[TOPIC].partitions)

    world._fault = fail
    world.run()
    assert found["led"] > 0
    assert found["session"] is None
    assert found["controller"].node_id != found["broker"]
    assert found["led after"] == 0
    assert found["problems"] == ["metadata_failed", "session_not_held"]
    assert not found["shown"], "clients are sent to others"
    assert found["acknowledged after"] > found["acknowledged before"]
    event_log = [record for record in caplog.records if record.message.startswith("metadata_image_failed")]
    assert len(event_log) == 1
    assert not any("watch metadata" in line for line in world.event_log), "it is said once"
