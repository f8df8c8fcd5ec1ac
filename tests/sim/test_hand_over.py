"""Histories of clusters with early hand-overs: processes are killed, and something between the brokers refuses and
resets connections."""

from __future__ import annotations

import pytest

from sim.brokers import TTL_MS
from sim.checker import Broken
from sim.clients import TOPIC
from sim.hand_over import FIRST_SEED, HAND_OVER_FAULTS, mislead
from sim.run import Summary, quick_collections, run_seed
from sim.test_seeds import run
from sim.world import World
from support.tiers import smoke_first

SEEDS_OF_FULL = 5
SHARES_SEED = 300_000


@pytest.mark.timeout(600)
def test_no_simulated_history_with_early_hand_overs_violates_a_guarantee() -> None:
    run(FIRST_SEED, 1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_simulated_history_of_several_with_early_hand_overs_violates_a_guarantee() -> None:
    summary = run(FIRST_SEED + 1, SEEDS_OF_FULL)
    assert summary.early_ends + summary.early_ends_of_living > 0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_lease_is_held_twice_in_a_history_with_early_hand_overs() -> None:
    summary = Summary()
    with quick_collections():
        summary.add(run_seed(SHARES_SEED, hand_over=True))
    assert not summary.failures, summary.failures[0].report


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_two_brokers_are_certain_to_lead_after_a_session_ended_without_knowledge_of_its_broker() -> None:
    """The broker is refused to all others, does not reach etcd, and serves clients until its deadline."""
    world = World(3, faults_ms=8 * TTL_MS, only="clock jump", hand_over=True)
    world._fault = lambda: None

    def begin() -> None:
        seen = world.brokers()[0].core.state.topics[TOPIC]
        victim = seen.partitions[0].leader
        mislead(world, victim)
        world.driver.call_later(1.5 * TTL_MS, lambda: world.reach_etcd(victim, reach=True))
        world.driver.call_later(1.5 * TTL_MS, world.network.open_all)

    world.driver.call_later(3 * TTL_MS, begin)
    world.run()
    assert world.early_ends is not None
    assert world.early_ends.living == 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) for name in HAND_OVER_FAULTS if name != "kill"]
)
def test_every_fault_of_these_histories_can_be_injected(name: str) -> None:
    world = World(3, faults_ms=6000, only=name, hand_over=True)
    world.run()
    assert world.faults[name] > 0
    assert world.acknowledged > 0


@pytest.mark.parametrize("ends_connections", smoke_first(True, False))
def test_session_of_a_dead_process_ends_early_but_not_that_of_a_machine_without_power(
    ends_connections: bool,
) -> None:
    world = World(3, faults_ms=10 * TTL_MS, only="clock jump", hand_over=True)
    found: dict[str, float] = {}

    def kill() -> None:
        victim = next(iter(world.brokers()))
        key = victim.core.state.keys.session(victim.node_id)
        began_ms = world.simulation.now_ms

        def look() -> None:
            if world.etcd.get(key) is None:
                found["ended after"] = world.simulation.now_ms - began_ms
            else:
                world.driver.call_later(10, look)

        world.driver.call_later(10, look)
        if ends_connections:
            victim.die()
        else:
            world.lose_power(victim)

    world._fault = lambda: None
    world.driver.call_later(4 * TTL_MS, kill)
    world.run()
    if ends_connections:
        assert found["ended after"] < TTL_MS / 3
    else:
        assert found["ended after"] > TTL_MS / 2


def test_the_judge_sees_the_early_end_of_a_session_whose_broker_answers() -> None:
    world = World(3, faults_ms=200, hand_over=True)
    world.run()
    broker = world.brokers()[0]
    assert world.early_ends is not None
    with pytest.raises(Broken, match="it answered"):
        world.early_ends.ended(broker.node_id, broker.epoch)
