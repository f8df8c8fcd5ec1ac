"""Members with the classic protocol in consumer groups (KIP-848), and groups that change their type."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.errors import StorageError
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.consumer_protocol import decode_assignment
from unit.broker.consumer_groups_fixtures import UNKNOWN_MEMBER, ConsumerBroker, Member, stabilize
from unit.broker.test_groups import code

REBALANCING, INCONSISTENT, ILLEGAL_GENERATION = 27, 23, 22


def test_a_classic_group_is_taken_over_by_the_first_member_of_the_new_protocol_and_given_back() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    code(broker.commit(5, joined))
    modern = Member(broker, "a")
    assert modern.beat() == 0
    group = broker.groups.store.entries["g"].group
    assert isinstance(group, ConsumerGroup)
    assert (
        broker.groups.store.entries["g"].group_metadata_value is None
    )  # the classic record is gone, in the same batch
    assert broker.restarted().stored()[0] == broker.stored()[0]
    assert broker.heartbeat(joined) in (0, REBALANCING)
    assert broker.committed() == {("t", 0): 5}
    modern.leave()
    assert isinstance(broker.groups.store.entries["g"].group, ClassicGroup)
    assert broker.groups.store.entries["g"].group_records == {}
    assert broker.heartbeat(joined) == REBALANCING
    assert code(broker.commit(6, joined)) == 0  # it may say what it has done, before it joins
    assert broker.committed() == {("t", 0): 6}
    again = broker.restarted()
    assert isinstance(again.groups.store.entries["g"].group, ClassicGroup)
    assert again.heartbeat(joined) == ILLEGAL_GENERATION  # so it joins, and what the other had is read again
    rejoined = broker.join(joined.member_id)
    broker.scheduler.turn()
    assert rejoined.result().generation_id > joined.generation_id
    assert code(broker.commit(7, joined)) == ILLEGAL_GENERATION


def test_who_is_left_goes_on_in_its_generation_also_when_the_other_is_soon_back() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    for _ in range(3):  # a program that is started anew, again and again
        modern = Member(broker, "a")
        assert modern.beat() == 0
        assert code(broker.commit(5, joined)) == 0
        modern.leave()
        assert code(broker.commit(5, joined)) == 0
    assert broker.heartbeat(joined) == REBALANCING


def test_classic_and_new_members_share_the_partitions_of_one_group() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    modern = Member(broker, "a")
    modern.beat()
    assert broker.heartbeat(joined) == REBALANCING
    rejoining = broker.join(joined.member_id)
    broker.scheduler.turn()
    rejoined = rejoining.result()
    assert rejoined.error_code == 0
    assert rejoined.leader == ""
    syncing = broker.sync(rejoined)
    broker.scheduler.turn()
    modern.beat()
    given = {tuple(each) for each in decode_assignment(syncing.result().assignment).partitions}
    stabilize((modern,))
    assert given.isdisjoint(modern.owned)
    again = broker.join(rejoined.member_id)
    broker.scheduler.turn()
    syncing = broker.sync(again.result())
    broker.scheduler.turn()
    given = {tuple(each) for each in decode_assignment(syncing.result().assignment).partitions}
    assert len(given) == len(modern.owned) == 2
    assert given.isdisjoint(modern.owned)
    assert code(broker.commit(9, again.result())) == 0
    described = broker.describe_consumer()
    assert sorted(each.member_type for each in described.members) == [0, 1]
    left = broker.call(
        ApiKey.LEAVE_GROUP,
        group_id="g",
        members=[{"member_id": rejoined.member_id, "group_instance_id": None}],
    )
    assert left.members[0].error_code == 0
    machine, stored = broker.stored()
    assert machine == stored
    stabilize((modern,))
    assert len(modern.owned) == 4


def test_a_classic_member_receives_nothing_before_it_is_committed() -> None:
    broker = ConsumerBroker()
    modern = Member(broker, "a")
    modern.beat()
    given = broker.join().result()
    broker.home.holds = True
    joining = broker.join(given.member_id)
    assert not joining.done()
    broker.home.sync()
    broker.scheduler.turn()
    joined = joining.result()
    telling = modern.begin()  # it is to let go of two
    broker.home.sync()
    broker.scheduler.turn()
    modern.answered(telling.result())
    letting_go = modern.begin()
    broker.home.sync()
    broker.scheduler.turn()
    assert modern.answered(letting_go.result()) == 0
    joining = broker.join(joined.member_id)  # it is given the two, in the generation it has
    syncing = broker.sync(joined)
    assert not joining.done()
    assert not syncing.done()
    broker.home.sync()
    broker.scheduler.turn()
    assert joining.result().generation_id == joined.generation_id
    assert len(decode_assignment(syncing.result().assignment).partitions) == 2


def test_a_classic_member_in_a_consumer_group_has_its_own_session() -> None:
    broker = ConsumerBroker()
    modern = Member(broker, "a")
    modern.beat()
    given = broker.join().result()
    joining = broker.join(given.member_id)
    broker.scheduler.turn()
    assert joining.result().error_code == 0
    assert len(broker.describe_consumer().members) == 2
    broker.scheduler.pass_time(10_100)  # it asked for ten seconds; the others have 45
    assert [each.member_id for each in broker.describe_consumer().members] == ["a"]


def test_the_records_of_a_change_of_protocol_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them would be another group."""
    monkeypatch.setattr("mansio.broker.coordinator.runtime.RECORDS_PER_BATCH", 2)
    broker = ConsumerBroker()
    broker.stable()
    batches = len(broker.home.stored)
    modern = Member(broker, "a")
    modern.beat()
    assert len(broker.home.stored) == batches + 1
    modern.leave()
    assert len(broker.home.stored) == batches + 2


def test_who_waits_in_a_classic_group_that_is_taken_over_joins_again() -> None:
    broker = ConsumerBroker()
    broker.stable()
    given = broker.join().result()
    waiting = broker.join(given.member_id)  # the group prepares a rebalance
    assert not waiting.done()
    assert Member(broker, "a").beat() == 0
    broker.scheduler.turn()
    assert waiting.result().error_code == REBALANCING


@pytest.mark.parametrize("nth", [0, 1])
def test_a_change_of_the_protocol_that_cannot_be_written_has_not_happened(nth: int) -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    modern = Member(broker, "a")
    if nth:
        modern.beat()
    broker.home.refuses = StorageError("no room")
    if nth:
        modern.leave()
        assert isinstance(broker.groups.store.entries["g"].group, ConsumerGroup)
        broker.home.refuses = None
        machine, stored = broker.stored()
        assert machine == stored
    else:
        assert modern.beat() == 16
        assert isinstance(broker.groups.store.entries["g"].group, ClassicGroup)
        broker.home.refuses = None
        assert broker.heartbeat(joined) == 0


def test_a_classic_member_whose_leaving_cannot_be_written_is_still_there() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    Member(broker, "a").beat()
    broker.home.refuses = StorageError("no room")
    leaving: dict[str, Any] = {
        "group_id": "g",
        "members": [{"member_id": joined.member_id, "group_instance_id": None}],
    }
    assert broker.call(ApiKey.LEAVE_GROUP, **leaving).members[0].error_code == 16
    broker.home.refuses = None
    machine, stored = broker.stored()
    assert machine == stored
    assert len(broker.describe_consumer().members) == 2
    assert broker.call(ApiKey.LEAVE_GROUP, **leaving).members[0].error_code == 0
    assert len(broker.describe_consumer().members) == 1


def test_a_group_without_members_whose_end_cannot_be_written_stays_what_it_is() -> None:
    broker = ConsumerBroker()
    modern = Member(broker, "a")
    modern.beat()
    modern.leave()
    broker.home.refuses = StorageError("no room")
    assert broker.join().result().error_code == 16
    before = broker.groups.store.entries["g"].group
    assert isinstance(before, ConsumerGroup)
    broker.home.refuses = None
    machine, stored = broker.stored()
    assert machine == stored
    broker.stable()
    assert isinstance(broker.groups.store.entries["g"].group, ClassicGroup)


def test_a_member_that_waits_in_a_group_that_is_rebuilt_from_its_records_joins_again() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    modern = Member(broker, "a")
    modern.beat()
    broker.home.holds = True
    modern.epoch = -1
    leaving = modern.begin()  # the classic member is alone again, if this can be committed
    given = broker.join().result()
    waiting = broker.join(given.member_id)
    assert not leaving.done()
    assert not waiting.done()
    broker.home.fail(StorageError("the disk is gone"))
    broker.scheduler.turn()
    assert leaving.result().error_code == 16
    assert waiting.result().error_code == REBALANCING
    assert joined.member_id


def test_a_classic_member_that_does_not_join_again_when_asked_is_removed() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    modern = Member(broker, "a")
    modern.beat()
    for _ in range(14):
        broker.scheduler.pass_time(5_000)
        modern.beat()
        if broker.heartbeat(joined) != REBALANCING:
            break
    assert broker.heartbeat(joined) == UNKNOWN_MEMBER
    stabilize((modern,))
    assert len(modern.owned) == 4


def test_a_group_without_members_is_of_the_kind_of_the_next_member() -> None:
    broker = ConsumerBroker()
    joined = broker.stable()
    code(broker.commit(5, joined))
    broker.call(
        ApiKey.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id, "group_instance_id": None}]
    )
    broker.scheduler.turn()
    modern = Member(broker, "a")
    assert modern.beat() == 0
    assert broker.committed() == {("t", 0): 5}
    modern.leave()
    classic = broker.stable()
    assert broker.heartbeat(classic) == 0
    assert broker.committed() == {("t", 0): 5}
    again = broker.restarted()
    assert again.heartbeat(classic) == 0
    assert again.committed() == {("t", 0): 5}


def test_a_classic_group_that_is_none_of_consumers_is_left_alone() -> None:
    broker = ConsumerBroker()
    given = broker.join(protocol_type="connect").result()
    broker.join(given.member_id, protocol_type="connect")
    broker.scheduler.pass_time(200)
    assert Member(broker, "a").beat() == INCONSISTENT
    assert isinstance(broker.groups.store.entries["g"].group, ClassicGroup)
