"""Coordinators over replicating partitions: what a group received stays true, whatever happens to the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.errors import MansioError
from mansio.testing.scheduler import SimulatedRandom
from support.replicas import Cluster
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition
    from mansio.metadata.model import PartitionState
    from support.replicas import Node


class OnePartition:
    """`CoordinatorLookup` of a topic with one partition; the test knows who leads it."""

    def partition_count(self) -> int:
        return 1

    def leader(self, index: int) -> None:
        raise AssertionError

    def leader_id(self, index: int) -> int:
        raise AssertionError

    def has_topic(self, topic: str) -> bool:
        return True

    def has_partition(self, topic: str, index: int) -> bool:
        return True


class Groups:
    """A coordinator on each broker, informed of roles as they are applied; and a group that commits 1, 2, 3, ..."""

    def __init__(self, seed: int) -> None:
        self.cluster = Cluster(3, seed=seed)
        self.simulation = self.cluster.simulation
        self.of: dict[int, GroupCoordinator] = {}
        for node_id in self.cluster.node_ids:
            self.coordinate(self.cluster[node_id])
        self.cluster.tell()
        self.sent = self.acknowledged = 0
        self.answers = self.reported = 0

    def coordinate(self, node: Node) -> None:
        groups = self.of[node.node_id] = GroupCoordinator(
            settings=GroupSettings(),
            clock=node.clock,
            scheduler=node.scheduler,
            random=SimulatedRandom(self.simulation),
            create_topic=self.never,
            end_offset=lambda *_: None,
            lookup=OnePartition(),
        )
        apply = node.replication.apply

        def applied(partition: Partition, state: PartitionState) -> None:
            apply(partition, state)
            groups.handle_role_change(partition)

        node.replication.apply = applied

    async def never(self) -> list[Any]:
        raise AssertionError("it is there")

    def commit(self, node_id: int) -> None:
        self.sent += 1
        offset = self.sent
        node = self.cluster[node_id]

        async def work() -> None:
            try:
                await self.of[node_id].offsets.commit("g", [OffsetToCommit("t", 0, offset)])
            except MansioError:
                return
            self.acknowledged = max(self.acknowledged, offset)

        node.scheduler.spawn(work(), name="commit")

    def fetch(self, node_id: int) -> None:
        """Only the leader by the store is asked: one that does not know yet that it is over may tell what was."""
        known = max(self.acknowledged, self.reported)
        node = self.cluster[node_id]

        async def work() -> None:
            try:
                found = await self.of[node_id].offsets.fetch("g")
            except MansioError:
                return
            reported = found["t", 0].offset if found else 0
            assert reported >= known, "a committed offset went back"
            self.reported = max(self.reported, reported)
            self.answers += 1

        node.scheduler.spawn(work(), name="fetch")


@pytest.mark.parametrize("seed", range(examples(4, 12)))
def test_a_committed_offset_never_goes_back_over_fail_overs(seed: int) -> None:
    groups = Groups(seed)
    cluster, simulation = groups.cluster, groups.simulation
    simulation.run_for(500)
    for _ in range(20):
        for _ in range(simulation.random.randrange(1, 12)):
            leader = cluster.state().leader
            groups.commit(leader)
            groups.commit(simulation.random.choice(cluster.node_ids))  # wherever the client thinks it is
            groups.fetch(leader)
            simulation.run_for(simulation.random.uniform(0, 6))
        before = cluster.state().leader
        groups.commit(before)
        groups.fetch(before)
        simulation.run_for(simulation.random.uniform(0, 1))
        cluster.elect(simulation.random.choice([one for one in cluster.state().isr if one != before]))
        reported = list(cluster.node_ids)
        simulation.random.shuffle(reported)
        for node_id in reported:  # the news comes to one after the other, and work goes on
            cluster.tell(node_id)
            groups.fetch(cluster.state().leader)
            groups.commit(simulation.random.choice(cluster.node_ids))
            simulation.run_for(simulation.random.uniform(0, 20))
    simulation.run_for(3_000)
    answered = groups.answers
    groups.fetch(cluster.state().leader)
    simulation.run_for(3_000)
    assert groups.answers == answered + 1
    assert groups.acknowledged > 5
    cluster.check_same()


def test_who_leads_no_more_holds_no_group_and_who_leads_has_them() -> None:
    groups = Groups(1)
    groups.simulation.run_for(500)
    groups.commit(1)
    groups.simulation.run_for(500)
    assert groups.acknowledged == 1
    groups.cluster.elect(2)
    groups.cluster.tell()
    groups.simulation.run_for(500)
    assert [len(groups.of[node_id].store.entries) for node_id in (1, 2, 3)] == [0, 1, 0]
