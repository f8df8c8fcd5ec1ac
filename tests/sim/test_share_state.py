"""Share state in a simulated cluster: created on first use, replicated, and found after its leader moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC
from mansio.state.share_partition.types import ACKNOWLEDGED, StateBatch
from sim.world import World
from support.share_state_fixtures import begun, key_of, leased

if TYPE_CHECKING:
    from sim.brokers import SimulatedBroker

KEYS = [key_of(f"g{number}") for number in range(6)]


def calm_world(seed: int) -> World:
    """One whose history is over: all brokers are there and nothing goes wrong."""
    world = World(seed, faults_ms=200)
    world.run()
    return world


def run(world: World, work: Any) -> Any:
    return world.simulation.run(work)


async def begin(broker: SimulatedBroker) -> None:
    persister = broker.core.share_state.persister
    for number, key in enumerate(KEYS):
        assert await persister.read(key, 0) is None
        await persister.write(key, 0, 0, begun())
        acked = StateBatch(number, number, ACKNOWLEDGED, 1)
        await persister.write(key, 0, 0, leased(0, 9, durable=True)._replace(changes=(acked,)))
        await persister.write(key, 0, 0, leased(20, 29))


async def found(broker: SimulatedBroker, leader_epoch: int) -> list[Any]:
    persister = broker.core.share_state.persister
    while True:
        try:
            return [await persister.read(key, leader_epoch) for key in KEYS]
        except MansioError:  # its leaders are being found
            continue


def test_what_was_acknowledged_survives_every_broker_in_turn() -> None:
    world = calm_world(0)
    brokers = world.brokers()
    assert all(SHARE_STATE_TOPIC not in broker.core.state.topics for broker in brokers)
    run(world, begin(brokers[0]))
    topic = brokers[0].core.state.topics[SHARE_STATE_TOPIC]
    assert dict(topic.configs)["cleanup.policy"] == "delete"
    leaders = {partition.leader for partition in topic.partitions}
    assert len(leaders) == len(brokers), "the states are spread over the brokers"
    for leader_epoch, node_id in enumerate(sorted(leaders), start=1):
        world.lose_power(world.network.brokers[node_id])
        asker = next(broker for broker in world.brokers() if broker.ready and broker.node_id != node_id)
        states = world.simulation.run(found(asker, leader_epoch), within_ms=120_000)
        for number, state in enumerate(states):
            acked = StateBatch(number, number, ACKNOWLEDGED, 1)
            assert acked in state.changes, f"{KEYS[number]}: {state}"
            assert state.leader_epoch == leader_epoch
        world.simulation.run_until(  # the world starts it again
            lambda: all(broker.ready and broker.running for broker in world.brokers()), within_ms=120_000
        )
        world.simulation.run_for(10_000)
