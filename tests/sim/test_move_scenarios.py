"""Moves of one partition in a simulated cluster, with what may happen between two steps of a removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.maintenance.log_cleaner import LogCleaner
from mansio.broker.maintenance.orphaned_directories import OrphanedDirectories
from mansio.broker.partition.partition import Partition
from mansio.errors import StorageError
from mansio.metadata.reassignment import Reassignment, is_reassigned
from sim.clients import TOPIC
from sim.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from mansio.metadata.model import PartitionState
    from sim.brokers import SimulatedBroker

MOVED_MS_MAX = 30_000


@pytest.fixture
def world() -> World:
    """A cluster of at least four brokers; partition 0 is on 1, 2 and 3, and has records."""
    world = World(0, faults_ms=200, has_moves=True)
    world.run()
    move(world, [1, 2, 3])
    finish_move(world)
    return world


def state(world: World) -> PartitionState:
    return world.brokers()[0].core.state.topics[TOPIC].partitions[0]


def move(world: World, replicas: Sequence[int]) -> None:
    """Begin a move of partition 0."""
    answers: list[Any] = []
    core = world.brokers()[0].core
    assert core.cluster_member is not None
    controller = core.cluster_member.controller

    async def ask() -> None:
        wanted = [Reassignment(TOPIC, 0, replicas)]
        answers.extend(await controller.reassign(wanted, may_change_factor=True))

    core.host_ports.scheduler.spawn(ask(), name="reassign")
    world.simulation.run_until(lambda: bool(answers), within_ms=5000)
    assert answers == [None]


def finish_move(world: World) -> None:
    world.simulation.run_until(lambda: not is_reassigned(state(world)), within_ms=MOVED_MS_MAX)
    world.simulation.run_for(1500)


def replica(broker: SimulatedBroker) -> Partition:
    (found, *_) = broker.core.partitions.partitions_or_errors(broker.core.state.topics[TOPIC])
    assert isinstance(found, Partition)
    return found


def directory(broker: SimulatedBroker) -> str:
    return f"{broker.core.partitions._files.directory(broker.core.state.topics[TOPIC])}/0"


def test_a_replica_that_is_assigned_again_during_its_removal_does_not_lead_with_an_empty_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be in use for a while, by a compaction: meanwhile it must not follow with its old log, which would
    get in sync and then be deleted."""
    broker = world.network.brokers[3]
    end = replica(world.network.brokers[1]).log.end_offset
    assert end > 0
    waits: list[UUID] = []
    abort = LogCleaner.abort

    async def abort_slowly(cleaner: LogCleaner, topic_id: UUID, index: int | None = None) -> None:
        if cleaner is broker.core.log_cleaner:
            waits.append(topic_id)
            await broker.core.host_ports.scheduler.sleep(300)
        await abort(cleaner, topic_id, index)

    monkeypatch.setattr(LogCleaner, "abort", abort_slowly)
    move(world, [1, 2])
    world.simulation.run_until(lambda: bool(waits), within_ms=MOVED_MS_MAX)
    move(world, [3, 4])
    finish_move(world)
    assert state(world).replicas == (3, 4)
    assert {replica(world.network.brokers[node_id]).log.end_offset for node_id in (3, 4)} == {end}


def test_a_removal_that_fails_is_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = world.network.brokers[3]
    tries: list[int] = []
    remove_replica = OrphanedDirectories.remove_replica

    async def fail_once(directories: OrphanedDirectories, topic: Any, index: int) -> None:
        if directories is broker.core.orphaned_directories:
            tries.append(index)
            if len(tries) == 1:
                raise StorageError("input/output error")
        await remove_replica(directories, topic, index)

    monkeypatch.setattr(OrphanedDirectories, "remove_replica", fail_once)
    assert directory(broker) in broker.disk._directories
    move(world, [1, 2])
    finish_move(world)
    world.simulation.run_for(5000)
    assert tries == [0, 0]
    assert directory(broker) not in broker.disk._directories


def test_the_metadata_revision_of_a_move_is_recorded_before_its_replica_is_in_sync(world: World) -> None:
    """Under metadata from before the move, its directory is not removed but quarantined."""
    broker = world.network.brokers[4]
    begun = state(world).mod_revision
    move(world, [1, 2, 4])
    world.simulation.run_until(lambda: 4 in state(world).isr, within_ms=MOVED_MS_MAX)
    seen = broker.core.orphaned_directories._read_last_seen()
    assert seen is not None
    assert seen.revision > begun
