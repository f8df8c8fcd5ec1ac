"""Reassignments over a store in memory, on virtual time: how many transactions they take, and who may leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.errors import BrokerIdNotRegistered, InvalidRequest
from mansio.metadata.cluster_view import PartitionChange
from mansio.metadata.reassignment import Reassignment, is_reassigned
from mansio.metadata.transactions import BATCH_CHANGES_MAX, commit_changes, split_into_transactions
from unit.metadata.test_controller import other_than, run, three

if TYPE_CHECKING:
    from support.brokers import Cluster, Member

PARTITIONS = 200


async def catch_up(member: Member, topic: str) -> None:
    """Add all added replicas to the in-sync sets, as the leaders do."""
    found = member.state.topics[topic]
    changes = [
        PartitionChange(
            found.topic_id,
            index,
            state,
            state._replace(isr=(*state.isr, *state.adding), partition_epoch=state.partition_epoch + 1),
            "",
            {},
        )
        for index, state in enumerate(found.partitions)
        if state.adding
    ]
    for batch in split_into_transactions(changes, member.store_client.operations_max, BATCH_CHANGES_MAX):
        await commit_changes(member.store_client, member.state.keys, batch, None, member.random)


def test_moves_begin_and_end_in_few_transactions() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await (await cluster.start_one(4)).registered()
        member = cluster.brokers[1]
        await member.create("t", PARTITIONS, 3)
        states = member.partitions("t")
        wanted = [
            Reassignment("t", index, [replica % 4 + 1 for replica in state.replicas])
            for index, state in enumerate(states)
        ]
        first = cluster.store.revision
        errors = await member.controller.reassign(wanted, may_change_factor=False)
        assert errors == [None] * PARTITIONS
        assert cluster.store.revision - first <= PARTITIONS / BATCH_CHANGES_MAX * 2
        assert all(is_reassigned(state) for state in member.partitions("t"))
        await catch_up(member, "t")
        first = cluster.store.revision
        await cluster.until(lambda: not any(is_reassigned(state) for state in member.partitions("t")))
        assert cluster.store.revision - first <= PARTITIONS / BATCH_CHANGES_MAX * 2 + 5
        assert [state.replicas for state in member.partitions("t")] == [
            tuple(each.replicas or ()) for each in wanted
        ]

    run(check)


def test_of_several_requests_for_one_partition_the_last_one_counts() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = cluster.brokers[1]
        await member.create("t", 1, 2)
        first, second = member.partition("t").replicas
        third = other_than(cluster, first, second)
        wanted = [Reassignment("t", 0, [third]), Reassignment("t", 0, [second, third])]
        assert await member.controller.reassign(wanted, may_change_factor=True) == [None, None]
        assert member.partition("t").replicas == (second, third, first)

    run(check)


def test_only_a_broker_that_is_down_and_has_no_replicas_is_unregistered() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        victim = other_than(cluster, *cluster.controllers())
        member = cluster.brokers[other_than(cluster, victim)]
        with pytest.raises(BrokerIdNotRegistered):
            await member.controller.unregister(9)
        with pytest.raises(InvalidRequest, match="running"):
            await member.controller.unregister(victim)
        await member.create("t", 1, 3)
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: victim not in member.state.brokers)
        with pytest.raises(InvalidRequest, match="has 1 replica: move"):
            await member.controller.unregister(victim)
        left = [replica for replica in member.partition("t").replicas if replica != victim]
        assert await member.controller.reassign([Reassignment("t", 0, left)], may_change_factor=True) == [
            None
        ]
        await cluster.until(lambda: not is_reassigned(member.partition("t")))
        await member.controller.unregister(victim)
        assert victim not in member.state.registrations
        again = await cluster.start_one(victim)
        await again.registered()
        await cluster.until(lambda: victim in member.state.registrations)

    run(check)


@pytest.mark.parametrize("loses", ["answers", "requests"])
def test_a_reassignment_whose_transaction_is_uncertain_happens_once(loses: str) -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = cluster.brokers[1]
        await member.create("t", 1, 2)
        first, second = member.partition("t").replicas
        third = other_than(cluster, first, second)
        if loses == "answers":
            member.store_client.lost_response_count = 1
        else:
            member.store_client.lost_request_count = 1
        before = member.partition("t").partition_epoch
        wanted = [Reassignment("t", 0, [third, second])]
        assert await member.controller.reassign(wanted, may_change_factor=False) == [None]
        assert member.partition("t").replicas == (third, second, first)
        assert member.partition("t").partition_epoch == before + 1

    run(check)
