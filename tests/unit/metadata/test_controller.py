"""The controller and membership over a store in memory, on virtual time: fail-over, and what must not become of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.broker.topics.topics import NewTopic
from mansio.errors import InvalidReplicationFactor, InvalidRequest, Unavailable
from mansio.metadata.cluster_view import PartitionChange
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import AMBIGUOUS_ATTEMPTS_MAX, Compare, Put, decode, encode
from mansio.metadata.model import BROKER_ACTIVE, BROKER_DRAINING, BROKER_FENCED, NO_LEADER
from mansio.metadata.transactions import commit_changes
from mansio.testing.metadata import InMemoryStoreClient
from support.brokers import CLUSTER_ID, TTL_S, Cluster, Member
from support.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from mansio.metadata.metadata_store import Event

TAKEN_OVER_S_MAX = TTL_S + 1.0


def run(check: Callable[[Cluster], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        cluster = Cluster(**options)
        try:
            await check(cluster)
        finally:
            await cluster.stop()

    run_virtually(main())


async def three(cluster: Cluster) -> None:
    """Three brokers, a controller, and all of them there for longer than a lease lives."""
    await cluster.start(1, 2, 3)
    for member in cluster.alive():
        await member.registered()
    await cluster.until(lambda: len(cluster.controllers()) == 1)
    await cluster.sleep(2 * TTL_S)


def other_than(cluster: Cluster, *node_ids: int) -> int:
    return next(one.node_id for one in cluster.alive() if one.node_id not in node_ids)


# Electing


def test_a_plan_is_about_the_sessions_of_its_begin() -> None:
    """It is made in turns of the event loop. A session that ends meanwhile may be one of a broker that is expected
    back, of which the plan does not know."""

    async def check(cluster: Cluster) -> None:
        await three(cluster)
        (controller,) = cluster.controllers()
        member = cluster.brokers[controller]
        view = member.controller._view(cluster.clock.monotonic())
        member.state.brokers.pop(other_than(cluster, controller))
        member.state.registrations.clear()
        assert set(view.brokers) == set(view.registrations) == {1, 2, 3}

    run(check)


def test_leaders_of_a_killed_broker_move_to_in_sync_brokers_when_its_session_ends() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        victim = other_than(cluster, *cluster.controllers())
        seen = cluster.brokers[other_than(cluster, victim)]
        before = seen.partitions("t")
        assert {one.leader for one in before} == {1, 2, 3}
        await cluster.brokers[victim].kill()
        took = await cluster.until(lambda: all(one.leader != victim for one in seen.partitions("t")))
        assert took <= TAKEN_OVER_S_MAX
        for old, new in zip(before, seen.partitions("t"), strict=True):
            assert victim not in new.isr
            assert len(new.isr) == 2
            assert new.leader in old.isr
            assert new.leader_epoch == old.leader_epoch + (old.leader == victim)
            assert new.partition_epoch == old.partition_epoch + 1
            assert new.is_led_by(new.leader, seen.state.epoch_of(new.leader))
        assert seen.state.registrations[victim].state == BROKER_FENCED

    run(check)


def test_killed_controller_costs_no_more_time_than_another_broker() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        (victim,) = cluster.controllers()
        seen = cluster.brokers[other_than(cluster, victim)]
        await cluster.brokers[victim].kill()
        took = await cluster.until(lambda: all(one.leader != victim for one in seen.partitions("t")))
        assert took <= TAKEN_OVER_S_MAX
        assert victim not in cluster.controllers()

    run(check)


@pytest.mark.full
def test_two_thousand_partitions_move_within_two_hundred_transactions() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 2000, 3)
        victim = other_than(cluster, *cluster.controllers())
        seen = cluster.brokers[other_than(cluster, victim)]
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: victim not in seen.state.brokers)
        first = cluster.store.revision
        await cluster.until(lambda: all(victim not in one.isr for one in seen.partitions("t")))
        assert cluster.store.revision - first <= 2000 / 50 + 5

    run(check)


def test_the_elections_of_many_partitions_wait_for_a_slow_store_together() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 2000, 3)
        (controller,) = cluster.controllers()
        victim = other_than(cluster, controller)
        seen = cluster.brokers[other_than(cluster, victim, controller)]
        await cluster.brokers[victim].kill()
        cluster.brokers[controller].store_client.delay_ms = lambda: 100.0
        await cluster.until(lambda: victim not in seen.state.brokers)
        took = await cluster.until(lambda: all(one.leader != victim for one in seen.partitions("t")))
        assert took < 1.5, "fourteen transactions of 0.2 s, eight at a time"

    run(check)


def test_last_replica_standing_stays_in_sync_and_leads_again_when_it_returns() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 2)
        seen = cluster.brokers[1]
        first, second = seen.partition("t").replicas
        if 1 in (first, second):
            third = ({1, 2, 3} - {first, second}).pop()
            seen = cluster.brokers[third]
        await cluster.brokers[second].kill()
        await cluster.until(lambda: seen.partition("t").isr == (first,))
        await cluster.brokers[first].kill()
        await cluster.until(lambda: seen.partition("t").leader == NO_LEADER)
        assert seen.partition("t").isr == (first,)
        epoch = seen.partition("t").leader_epoch
        await (await cluster.start_one(second)).registered()
        await cluster.sleep(3 * TTL_S)
        assert seen.partition("t").leader == NO_LEADER, "it may lack what the last one confirmed alone"
        await (await cluster.start_one(first)).registered()
        await cluster.until(lambda: seen.partition("t").leader == first)
        assert seen.partition("t").leader_epoch == epoch + 1
        assert seen.partition("t").isr == (first,)

    run(check)


def test_dead_broker_is_kept_in_no_in_sync_set() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 9, 3)
        victim = other_than(cluster, *cluster.controllers())
        seen = cluster.brokers[other_than(cluster, victim)]
        followed = [n for n, one in enumerate(seen.partitions("t")) if one.leader != victim]
        epochs = [seen.partition("t", n).leader_epoch for n in followed]
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: all(victim not in one.isr for one in seen.partitions("t")))
        assert [seen.partition("t", n).leader_epoch for n in followed] == epochs, "these leaders went on"

    run(check)


def test_leader_that_restarts_before_anybody_looked_begins_a_new_epoch() -> None:
    async def check(cluster: Cluster) -> None:
        await cluster.start(1)
        await cluster.brokers[1].registered()
        await cluster.until(lambda: cluster.controllers() == [1])
        await cluster.brokers[1].create("t", 1, 1)
        before = cluster.brokers[1].partition("t")
        await cluster.brokers[1].kill()
        again = await cluster.start_one(1)
        assert again.partition("t").leader == 1
        assert not again.partition("t").is_led_by(1, again.membership.epoch), (
            "not before it has been chosen anew"
        )
        await again.registered()
        await cluster.until(lambda: again.partition("t").is_led_by(1, again.membership.epoch))
        assert again.partition("t").leader_epoch == before.leader_epoch + 1

    run(check)


def test_two_fast_leader_changes_give_two_epochs_and_only_in_sync_leaders() -> None:
    async def check(cluster: Cluster) -> None:
        await cluster.start(1, 2, 3, 4)
        for member in cluster.alive():
            await member.registered()
        await cluster.sleep(2 * TTL_S)
        await cluster.brokers[4].create("t", 1, 3)
        seen = cluster.brokers[4]
        if 4 in seen.partition("t").replicas:
            seen = cluster.brokers[({1, 2, 3, 4} - set(seen.partition("t").replicas)).pop()]
        before = seen.partition("t")
        first, second, third = before.replicas
        kept = cluster.brokers[first].membership.session
        also = cluster.brokers[second].membership.session
        assert kept is not None
        assert also is not None
        await cluster.brokers[first].kill()
        await cluster.brokers[second].kill()
        cluster.store.end_lease(kept.lease)
        cluster.store.end_lease(also.lease)
        await cluster.until(lambda: seen.partition("t").leader == third)
        after = seen.partition("t")
        assert after.isr == (third,)
        assert before.leader_epoch < after.leader_epoch <= before.leader_epoch + 2

    run(check)


# What must be refused


def test_late_write_of_a_replaced_controller_is_refused() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        (old,) = cluster.controllers()
        zombie = cluster.brokers[old]
        term = zombie.controller._term
        assert term is not None
        zombie.keeps_alive = False
        zombie.store_client.watch_stalls = True
        seen = cluster.brokers[other_than(cluster, old)]
        before = seen.partition("t")
        decided = PartitionChange(
            seen.state.topics["t"].topic_id, 0, before, before._replace(isr=(old,), leader=old), "late", {}
        )
        await cluster.until(lambda: old not in cluster.controllers() and len(cluster.controllers()) == 1)
        await cluster.until(lambda: old not in seen.partition("t").isr)
        now = seen.partition("t")
        late = decided._replace(before=now)  # even if the partition is just as the zombie saw it
        guard = zombie.controller._term_guard(term)
        done = await commit_changes(zombie.store_client, zombie.state.keys, [late], guard, zombie.random)
        assert not done.succeeded
        assert seen.partition("t") == now

    run(check)


def test_replaced_controller_takes_no_topic_from_its_maker() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        (old,) = cluster.controllers()
        zombie = cluster.brokers[old]
        term = zombie.controller._term
        session = zombie.membership.session
        assert term is not None
        assert session is not None
        created_by = cluster.brokers[other_than(cluster, old)]
        created_by.host.gate = asyncio.Event()
        work = asyncio.ensure_future(created_by.create("t", 3, 3))
        await cluster.until(lambda: "t" in zombie.state.unfinished_topics)
        topic = zombie.state.unfinished_topics["t"]
        cluster.store.end_lease(session.lease)
        await zombie.controller._complete_deletion(topic, term)
        created_by.host.gate.set()
        await work
        assert created_by.state.topics["t"].topic_id == topic.topic_id

    run(check)


def test_controller_replaced_in_the_middle_of_its_decisions_changes_nothing_more() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 3, 3)
        (old,) = cluster.controllers()
        zombie = cluster.brokers[old]
        victim = other_than(cluster, old)
        seen = cluster.brokers[other_than(cluster, old, victim)]
        session = zombie.membership.session
        assert session is not None
        ended: list[int] = []

        def end_session() -> None:
            cluster.store.end_lease(session.lease)
            ended.append(cluster.store.revision)

        await cluster.brokers[victim].kill()
        await cluster.sleep(TTL_S - 2)
        zombie.store_client.before_transaction = end_session
        await cluster.until(lambda: all(victim not in one.isr for one in seen.partitions("t")))
        keys = seen.state.keys
        later = [event for event in cluster.store.history if event.mod_revision > ended[0]]
        elected = next(event.mod_revision for event in later if event.key == keys.controller)
        changed = [event.mod_revision for event in later if event.key.startswith(keys.partitions)]
        assert min(changed) > elected, "what the old one had decided was refused"

    run(check)


def test_decision_on_a_broker_that_came_back_meanwhile_is_refused() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        seen = cluster.brokers[1]
        partition = seen.partition("t")
        follower = partition.isr[-1]
        shrunk = partition._replace(isr=partition.isr[:-1])
        change = PartitionChange(seen.state.topics["t"].topic_id, 0, partition, shrunk, "died", {follower: 0})
        done = await commit_changes(seen.store_client, seen.state.keys, [change], None, seen.random)
        assert not done.succeeded

    run(check)


def test_session_is_never_taken_from_another_process_with_the_same_number() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        first = cluster.brokers[2]
        epoch = first.membership.epoch
        second = await cluster.start_one(2)
        await cluster.sleep(5 * TTL_S)
        assert second.membership.epoch == 0
        assert first.membership.epoch == epoch
        assert cluster.brokers[1].state.epoch_of(2) == epoch
        await first.kill()
        assert await cluster.until(lambda: second.membership.epoch > epoch) <= TTL_S + 1

    run(check)


def test_of_two_processes_that_start_at_once_with_one_number_one_is_registered() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        first, second = Member(cluster, 4, ()), Member(cluster, 4, ())
        cluster.brokers[4], cluster.brokers[5] = first, second
        await asyncio.gather(first.start(), second.start())
        await cluster.sleep(2 * TTL_S)
        assert sorted(one.membership.epoch == 0 for one in (first, second)) == [False, True]
        key = first.state.keys.session(4)
        assert len([event for event in cluster.store.history if event.key == key]) == 1

    run(check)


# What must not be made of an etcd that stood still


def test_mass_expiry_empties_no_in_sync_set() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        before = cluster.brokers[1].partitions("t")
        epochs = {node_id: member.membership.epoch for node_id, member in cluster.brokers.items()}
        cluster.store.end_all_leases()
        await cluster.until(
            lambda: all(one.membership.epoch > epochs[one.node_id] for one in cluster.alive())
        )
        seen = cluster.brokers[1]
        await cluster.until(
            lambda: all(
                one.is_led_by(one.leader, seen.state.epoch_of(one.leader)) for one in seen.partitions("t")
            )
        )
        await cluster.sleep(3 * TTL_S)
        assert [one.isr for one in seen.partitions("t")] == [one.isr for one in before]
        assert all(one.leader_epoch > 0 for one in seen.partitions("t")), "each leader has a new session"

    run(check)


def test_after_a_mass_expiry_who_does_not_return_is_given_up_after_one_lease() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        victim = other_than(cluster, *cluster.controllers())
        await cluster.brokers[victim].kill()
        cluster.store.end_all_leases()
        seen = cluster.brokers[other_than(cluster, victim)]
        await cluster.sleep(TTL_S - 1)
        assert any(victim in one.isr for one in seen.partitions("t")), "it is still awaited"
        took = await cluster.until(lambda: all(victim not in one.isr for one in seen.partitions("t")))
        assert took <= 2.5

    run(check)


# Lost answers


def test_transaction_whose_answer_is_lost_happens_once() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        victim = cluster.brokers[1].partition("t").leader
        seen = cluster.brokers[other_than(cluster, victim)]
        for member in cluster.alive():
            member.store_client.lost_response_count = 3
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: seen.partition("t").leader != victim)
        await cluster.sleep(TTL_S)
        assert seen.partition("t").leader_epoch == 1

    run(check)


def test_transaction_whose_request_is_lost_is_made_again() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        victim = cluster.brokers[1].partition("t").leader
        seen = cluster.brokers[other_than(cluster, victim)]
        for member in cluster.alive():
            member.store_client.lost_request_count = 3
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: seen.partition("t").leader != victim, within_s=TAKEN_OVER_S_MAX + 1)
        assert seen.partition("t").leader_epoch == 1

    run(check)


def test_registration_whose_answer_is_lost_is_one_session() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = await cluster.start_one(4)
        member.store_client.lost_response_count = 1
        await member.registered()
        sessions = [one for one in cluster.store.history if one.key == member.state.keys.session(4)]
        assert len(sessions) == 1
        assert sessions[0].create_revision == member.membership.epoch

    run(check)


# Sessions


def test_broker_that_lost_its_session_registers_again_with_a_later_epoch_and_logs_it() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = cluster.brokers[2]
        reported: list[int] = []
        member.membership.on_session(lambda session: reported.append(0 if session is None else session.epoch))
        session = member.membership.session
        assert session is not None
        cluster.store.end_lease(session.lease)
        await cluster.until(lambda: member.membership.epoch > session.epoch)
        assert reported == [0, member.membership.epoch]
        assert not session.is_valid(cluster.clock.monotonic())
        assert cluster.brokers[1].state.registrations[2].state == BROKER_ACTIVE

    run(check)


def test_broker_cut_off_from_the_store_stops_acting_before_its_session_ends_there() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = cluster.brokers[2]
        member.store_client.unreachable = True
        key = member.state.keys.session(2)
        held = True
        for _ in range(200):
            await cluster.sleep(0.05)
            there = cluster.store.get(key) is not None
            held = member.membership.is_session_valid()
            assert there or not held
            if not there:
                break
        assert not held
        member.store_client.heal()
        epoch = member.membership.epoch
        await cluster.until(lambda: member.membership.epoch > epoch)

    run(check)


def test_lease_lengthened_by_an_election_of_the_store_lengthens_no_deadline() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        member = cluster.brokers[2]
        member.keeps_alive = False
        await cluster.sleep(4)
        cluster.store.renew_all_leases()
        await cluster.sleep(0.5)
        assert cluster.store.get(member.state.keys.session(2)) is not None
        assert not member.membership.is_session_valid()
        member.keeps_alive = True
        await cluster.sleep(1.5)
        assert member.membership.is_session_valid(), "the session never ended"

    run(check)


def test_broker_with_lost_logs_leaves_their_in_sync_sets_before_it_has_a_session() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 2, 3)
        await cluster.brokers[1].create("alone", 1, 1)
        seen = cluster.brokers[other_than(cluster, cluster.brokers[1].partition("alone").leader)]
        victim = seen.partition("alone").leader
        await cluster.brokers[victim].kill()
        places = ((seen.state.topics["t"].topic_id, 0), (seen.state.topics["alone"].topic_id, 0))
        again = await cluster.start_one(victim, lost=places)
        await again.registered()
        await cluster.sleep(2 * TTL_S)
        left = [
            event.mod_revision
            for event in cluster.store.history
            if event.key == seen.state.keys.partition(places[1][0], 0)
        ]
        assert seen.partition("alone").isr == ()
        assert seen.partition("alone").leader == NO_LEADER, "an empty log must not lead as if it were whole"
        assert left[-1] < again.membership.epoch
        assert victim not in seen.partition("t", 0).isr
        with pytest.raises(InvalidRequest):
            await seen.controller.elect_unclean("t", 0, victim)
        elected = await seen.controller.elect_unclean("alone", 0, victim)
        assert elected.is_led_by(victim, again.membership.epoch)
        assert elected.isr == (victim,)

    run(check)


def test_broker_whose_log_failed_gives_it_up_where_another_is_in_sync() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        await cluster.brokers[1].create("alone", 1, 1)
        for name, given_up in (("t", 1), ("alone", 0)):
            before = cluster.brokers[1].partition(name)
            member = cluster.brokers[before.leader]
            topic_id = member.state.topics[name].topic_id
            assert await member.membership.resign([(topic_id, 0)]) == given_up
            await cluster.sleep(1)
            after = cluster.brokers[1].partition(name)
            assert (after.leader == before.leader) is (given_up == 0)
            assert set(before.isr) - set(after.isr) == ({before.leader} if given_up else set())
            assert after.leader_epoch == before.leader_epoch + 2 * given_up, "to nobody, then to the next"

    run(check)


# Handing over


def test_stopping_broker_gives_its_leaderships_away_before_its_session_ends() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 9, 3)
        await cluster.brokers[1].create("alone", 3, 1)
        seen = cluster.brokers[2]
        for node_id in (3, 1):  # one of them is the controller
            member = cluster.brokers[node_id]
            epoch = member.membership.epoch
            own = [n for n, one in enumerate(seen.partitions("t")) if one.leader == node_id]
            assert own
            assert await member.terminate() == 0
            keys = [seen.state.keys.partition(seen.state.topics["t"].topic_id, n) for n in own]
            session = seen.state.keys.session(node_id)
            ended = next(e.mod_revision for e in reversed(cluster.store.history) if e.key == session)
            for key in keys:
                moves = [
                    decode(key, event.value)
                    for event in cluster.store.history
                    if event.key == key and event.mod_revision < ended and event.value is not None
                ]
                assert moves[-1]["leader"] != node_id
                assert node_id in moves[-1]["isr"], "it was in sync to the last"
            assert seen.state.epoch_of(node_id) in (0, epoch)
            await cluster.until(lambda n=node_id: seen.state.registrations[n].state == BROKER_FENCED)
        assert cluster.controllers() == [2]

    run(check)


def test_draining_broker_gets_no_leadership_but_where_no_other_can() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 3, 2)
        member = cluster.brokers[3]
        await member.membership.transfer_leaderships(2000)
        assert cluster.brokers[1].state.registrations[3].state == BROKER_DRAINING
        assert all(one.leader != 3 for one in member.partitions("t"))
        victims = [n for n, one in enumerate(member.partitions("t")) if one.isr in ((1, 3), (3, 1))]
        await cluster.brokers[1].kill()
        await cluster.until(lambda: all(one.leader in (2, 3) for one in member.partitions("t")))
        assert all(member.partition("t", n).leader == 3 for n in victims)

    run(check)


# Balancing


def test_preferred_leaders_get_their_partitions_back() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        before = cluster.brokers[1].partitions("t")
        await cluster.brokers[3].kill()
        seen = cluster.brokers[1]
        await cluster.until(lambda: all(3 not in one.isr for one in seen.partitions("t")))
        await (await cluster.start_one(3)).registered()
        await cluster.sleep(TTL_S)
        assert all(one.leader != 3 for one in seen.partitions("t")), "it is not in sync yet"
        puts = [
            Put(
                seen.state.keys.partition(seen.state.topics["t"].topic_id, n),
                encode(
                    {
                        "replicas": one.replicas,
                        "adding": (),
                        "removing": (),
                        "leader": one.leader,
                        "leader_epoch": one.leader_epoch,
                        "isr": (*one.isr, 3),
                        "part_epoch": one.partition_epoch + 1,
                        "leader_broker_epoch": one.leader_broker_epoch,
                    },
                    f"leader{n}",
                ),
            )
            for n, one in enumerate(seen.partitions("t"))
        ]
        await seen.store_client.transact([], puts)
        await cluster.until(
            lambda: [one.leader for one in seen.partitions("t")] == [one.leader for one in before],
            within_s=30,
        )
        assert all(3 in one.isr for one in seen.partitions("t"))

    run(check, balance_interval_ms=10_000)


# Topics


def test_half_made_topic_of_a_dead_creator_is_removed_and_its_name_is_free() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        creator = cluster.brokers[other_than(cluster, *cluster.controllers())]
        seen = cluster.brokers[other_than(cluster, creator.node_id)]
        creator.host.gate = asyncio.Event()
        work = asyncio.ensure_future(creator.create("t", 200, 3))
        await cluster.until(lambda: len(seen.state.unfinished_topics) == 1)
        topic_id = seen.state.unfinished_topics["t"].topic_id
        await cluster.sleep(2 * TTL_S)
        assert "t" in seen.state.unfinished_topics, "its creator lives"
        await creator.kill()
        work.cancel()
        await cluster.until(lambda: not seen.state.unfinished_topics)
        assert not cluster.store.list(f"{seen.state.keys.partitions}{topic_id}/").entries
        await seen.create("t", 2, 2)

    run(check)


def test_creator_whose_session_ended_cannot_finish_what_it_began() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        creator = cluster.brokers[other_than(cluster, *cluster.controllers())]
        seen = cluster.brokers[other_than(cluster, creator.node_id)]
        creator.host.gate = asyncio.Event()
        work = asyncio.ensure_future(creator.create("t", 3, 3))
        await cluster.until(lambda: len(seen.state.unfinished_topics) == 1)
        session = creator.membership.session
        assert session is not None
        await cluster.sleep(1)
        creator.store_client.before_transaction = lambda: cluster.store.end_lease(session.lease)
        creator.host.gate.set()
        with pytest.raises(Unavailable):
            await work
        await cluster.until(lambda: not seen.state.unfinished_topics)
        assert "t" not in seen.state.topics

    run(check)


def test_half_deleted_topic_of_a_dead_broker_is_removed() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        deleter = cluster.brokers[other_than(cluster, *cluster.controllers())]
        seen = cluster.brokers[other_than(cluster, deleter.node_id)]
        await deleter.create("t", 3, 3)
        gate = asyncio.Event()

        async def stuck(topic: object) -> None:
            await gate.wait()

        deleter.topics._lifecycle._close_partitions = stuck
        work = asyncio.ensure_future(deleter.topics.delete(deleter.state.topics["t"]))
        await cluster.until(lambda: "t" in seen.state.unfinished_topics)
        await deleter.kill()
        work.cancel()
        await cluster.until(lambda: not seen.state.unfinished_topics)
        assert not cluster.store.list(seen.state.keys.partitions).entries

    run(check)


def test_topic_made_again_under_its_name_meets_no_late_change_of_the_old_one() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 1, 3)
        seen = cluster.brokers[2]
        await cluster.until(lambda: "t" in seen.state.topics)
        old, old_id = seen.partition("t"), seen.state.topics["t"].topic_id
        await cluster.brokers[1].topics.delete(cluster.brokers[1].state.topics["t"])
        await cluster.brokers[1].create("t", 1, 3)
        await cluster.until(lambda: "t" in seen.state.topics and seen.state.topics["t"].topic_id != old_id)
        new = seen.partition("t")
        late = PartitionChange(old_id, 0, old, old._replace(isr=old.isr[:1]), "late", {})
        assert not (
            await commit_changes(seen.store_client, seen.state.keys, [late], None, seen.random)
        ).succeeded
        assert seen.partition("t") == new
        assert cluster.store.get(seen.state.keys.partition(old_id, 0)) is None

    run(check)


def test_topic_is_placed_on_all_brokers_and_racks_and_also_on_one_that_is_away() -> None:
    async def check(cluster: Cluster) -> None:
        cluster.racks = {1: "a", 2: "a", 3: "b", 4: "b"}
        await cluster.start(1, 2, 3, 4)
        for member in cluster.alive():
            await member.registered()
        await cluster.until(lambda: len(cluster.brokers[1].state.brokers) == 4)
        await cluster.brokers[1].create("t", 8, 2)
        for one in cluster.brokers[1].partitions("t"):
            assert {cluster.racks[node_id] for node_id in one.replicas} == {"a", "b"}
        leaders = [one.leader for one in cluster.brokers[1].partitions("t")]
        assert sorted(leaders) == [1, 1, 2, 2, 3, 3, 4, 4]
        with pytest.raises(InvalidReplicationFactor):
            await cluster.brokers[1].create("u", 1, 5)
        await cluster.brokers[4].kill()
        await cluster.until(lambda: 4 not in cluster.brokers[1].state.brokers)
        await cluster.brokers[1].create("v", 1, 4)
        (placed,) = cluster.brokers[1].partitions("v")
        assert set(placed.replicas) == {1, 2, 3, 4}
        assert set(placed.isr) == {1, 2, 3}
        assert placed.leader != 4

    run(check)


def test_view_reaches_a_revision_that_only_another_cluster_wrote() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        foreign = cluster.store.store_client()
        done = await foreign.transact([Compare("/other", create_revision=0)], [Put("/other", b"")])
        await asyncio.wait_for(
            cluster.brokers[1].state.wait_for_revision(done.revision, cluster.brokers[1].scheduler), 5
        )

    run(check)


def test_topic_can_be_made_by_any_broker_while_another_creates_the_same() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        results = await asyncio.gather(
            *(member.topics.auto_create("t") for member in cluster.alive()), return_exceptions=True
        )
        made = [one for one in results if not isinstance(one, BaseException)]
        assert made
        assert len({one.topic_id for one in made}) == 1
        assert NewTopic("t").replication_factor == -1
        assert made[0].replication_factor == 3

    run(check)


def test_creator_that_cannot_finish_deletes_what_it_began_while_its_session_lasts() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        creator = cluster.brokers[1]
        seen = cluster.brokers[2]
        epoch = creator.membership.epoch
        creator.host.gate = asyncio.Event()
        work = asyncio.ensure_future(creator.create("t", 3, 3))
        await cluster.until(lambda: "t" in seen.state.unfinished_topics)
        await cluster.sleep(1)
        creator.store_client.lost_request_count = AMBIGUOUS_ATTEMPTS_MAX
        creator.host.gate.set()
        with pytest.raises(Unavailable):
            await work
        assert await cluster.until(lambda: not seen.state.unfinished_topics) < TTL_S
        assert "t" not in seen.state.topics
        assert not creator.host.directories
        assert creator.membership.epoch == epoch
        await seen.create("t", 3, 3)

    run(check)


def test_topic_that_became_live_although_its_creator_got_an_error_keeps_its_data() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        creator = cluster.brokers[1]
        seen = cluster.brokers[2]
        creator.host.gate = asyncio.Event()
        work = asyncio.ensure_future(creator.create("t", 3, 3))
        await cluster.until(lambda: "t" in seen.state.unfinished_topics)
        await cluster.sleep(1)
        creator.store_client.before_transaction = lambda: setattr(creator.store_client, "unreachable", True)
        creator.host.gate.set()
        with pytest.raises(Unavailable):
            await work
        await cluster.sleep(1)
        creator.store_client.heal()
        await cluster.sleep(TTL_S)
        assert "t" in seen.state.topics
        assert list(creator.host.directories) == [str(seen.state.topics["t"].topic_id)]

    run(check)


class BrokenWatch(InMemoryStoreClient):
    """A way to a store whose watch breaks off."""

    failures = 3

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        async for events in super().watch(prefix, from_revision):
            if self.failures:
                self.failures -= 1
                raise Unavailable("the watch broke off")
            yield events


def test_view_follows_on_from_where_a_watch_broke_off() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        broken = BrokenWatch(cluster.store, cluster.scheduler)
        state = await MetadataImage.load(broken, CLUSTER_ID, cluster.brokers[1].random)
        state.start(broken, cluster.scheduler, shared=True)
        await cluster.brokers[1].create("t", 3, 3)
        await cluster.until(lambda: "t" in state.topics)
        assert broken.failures == 0
        state.stop()

    run(check)


# A number in use


def test_broker_whose_number_another_one_keeps_is_refused_with_where_that_is() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        second = Member(cluster, 2, ())
        second.other_session_s_max = 30.0
        await second.start()
        await cluster.sleep(29)
        assert second.refused is None
        await cluster.sleep(2)
        assert "broker 2 is already running at 127.0.0.1:9002" in str(second.refused)
        assert cluster.brokers[2].membership.is_session_valid(), "the one that was there first goes on"
        await second.kill()

    run(check)


def test_broker_that_was_killed_waits_for_its_own_session_to_end_and_is_not_taken_for_another() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[2].kill()
        again = cluster.brokers[2] = Member(cluster, 2, ())
        again.other_session_s_max = 2 * TTL_S
        await again.start()
        await cluster.until(lambda: again.membership.epoch != 0 or again.refused is not None)
        assert again.refused is None

    run(check)


def test_changes_of_leader_are_counted_by_cause_where_they_are_decided() -> None:
    async def check(cluster: Cluster) -> None:
        await three(cluster)
        await cluster.brokers[1].create("t", 6, 3)
        (controller,) = cluster.controllers()
        victim = other_than(cluster, controller)
        counted = cluster.brokers[controller].controller.elections
        state = cluster.brokers[controller].state
        led = sum(one.leader == victim for one in state.topics["t"].partitions)
        assert led > 0
        await cluster.brokers[victim].kill()
        await cluster.until(lambda: counted["leader_failed"] > 0)
        assert (counted["leader_failed"], counted["preferred"], counted["unclean"]) == (led, 0, 0)

    run(check)
