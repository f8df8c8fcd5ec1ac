"""Who has no right for a group or a topic learns and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.broker.services.groups import LeavingMember
from mansio.errors import (
    AuthorizationFailed,
    GroupAuthorizationFailed,
    GroupIdNotFound,
    MansioError,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    Acl,
    Operation,
    Permission,
)
from mansio.state.authorization.authorizer import Authorizer
from mansio.state.classic_group.types import Join, Protocol, Sync
from mansio.state.consumer_group.types import Heartbeat
from mansio.state.share_group.group import ShareHeartbeat
from support.authorization import ADMIN, ALICE, CLUSTER, GROUP, PEER, TOPIC, TRANSACTIONAL_ID, acl
from unit.broker.consumer_groups_fixtures import Catalogue, ConsumerBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.groups import GroupService

COMMIT = [OffsetToCommit("t", 0, 7)]


class Room:
    """A coordinator whose authorizer has these ACLs of alice."""

    def __init__(self, *acls: Acl) -> None:
        self.authorizer = Authorizer(["User:admin"])
        for each in acls:
            self.authorizer.add(each)
        self.broker = ConsumerBroker(Catalogue(t=4, u=1), authorizer=self.authorizer)
        self.groups = self.broker.group_service

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.broker.scheduler.run(work)

    def call(self, method: Callable[[GroupService, Caller], Any], caller: Caller) -> Any:
        found = method(self.groups, caller)
        return self.run(found) if hasattr(found, "send") else found


def join(groups: GroupService, caller: Caller) -> Any:
    protocols = (Protocol("range", b""),)
    return groups.join("g", Join("", None, "c", "/h", 10_000, 10_000, "consumer", protocols), caller=caller)


def leave(groups: GroupService, caller: Caller) -> Any:
    return list(groups.leave_each("g", [LeavingMember("m", None)], caller=caller))


def consume(groups: GroupService, caller: Caller, *topics: str) -> Any:
    joining = Heartbeat("m", 0, rebalance_timeout_ms=10_000, topic_names=topics or ("t",), owned=frozenset())
    return groups.consumer_heartbeat("g", joining, caller=caller)


def share(groups: GroupService, caller: Caller) -> Any:
    return groups.share_heartbeat("s", ShareHeartbeat("m", 0, topic_names=("t",)), caller=caller)


def commit_in_transaction(groups: GroupService, caller: Caller) -> Any:
    return groups.commit_offsets_in_transaction("x", "g", 1, 0, COMMIT, adds=True, caller=caller)


METHODS: dict[str, tuple[Operation, Callable[[GroupService, Caller], Any]]] = {
    "find_coordinator": (Operation.DESCRIBE, lambda groups, who: groups.find_coordinator("g", caller=who)),
    "join": (Operation.READ, join),
    "sync": (Operation.READ, lambda groups, who: groups.sync("g", Sync("m", None, 1, {}), caller=who)),
    "heartbeat": (Operation.READ, lambda groups, who: groups.heartbeat("g", "m", None, 1, caller=who)),
    "leave": (Operation.READ, leave),
    "consumer_heartbeat": (Operation.READ, consume),
    "commit": (Operation.READ, lambda groups, who: groups.commit_offsets("g", COMMIT, caller=who)),
    "fetch": (Operation.DESCRIBE, lambda groups, who: groups.fetch_offsets("g", caller=who)),
    "delete_offsets": (
        Operation.DELETE,
        lambda groups, who: groups.delete_offsets("g", [("t", 0)], caller=who),
    ),
    "describe": (Operation.DESCRIBE, lambda groups, who: groups.describe("g", caller=who)),
    "describe_consumer": (
        Operation.DESCRIBE,
        lambda groups, who: groups.describe_consumer_group("g", caller=who),
    ),
    "describe_share": (Operation.DESCRIBE, lambda groups, who: groups.describe_share_group("g", caller=who)),
}


def outcome(room: Room, method: Callable[[GroupService, Caller], Any], caller: Caller) -> Any:
    try:
        return room.call(method, caller)
    except MansioError as error:
        return error


@pytest.mark.parametrize("name", METHODS)
def test_without_the_right_for_the_group_nothing_is_looked_up_or_changed(name: str) -> None:
    operation, method = METHODS[name]
    everything_else = [
        acl(GROUP, "g", each)
        for each in (Operation.READ, Operation.DELETE, Operation.DESCRIBE)
        if each is not operation and operation is not Operation.DESCRIBE
    ]
    room = Room(acl(GROUP, "other", operation), acl(TOPIC, "t", Operation.ALL), *everything_else)
    refused = outcome(room, method, ALICE)
    assert type(refused) is GroupAuthorizationFailed
    assert room.broker.partitions == [], "not even the topic of the groups was created"

    existing = Room(acl(TOPIC, "t", Operation.ALL), *everything_else)
    existing.run(consume(existing.groups, ADMIN))
    assert str(outcome(existing, method, ALICE)) == str(refused), "the same answer for a group that exists"


@pytest.mark.parametrize("name", METHODS)
def test_the_right_for_the_group_is_enough_with_the_right_for_the_topic(name: str) -> None:
    operation, method = METHODS[name]
    room = Room(acl(GROUP, "g", operation), acl(TOPIC, "t", Operation.READ))
    room.run(room.broker.groups.ensure_topic_exists())
    found, expected = outcome(room, method, ALICE), outcome(Room(), method, PEER)
    assert not isinstance(found, AuthorizationFailed)
    assert isinstance(found, MansioError) == isinstance(expected, MansioError) or name == "leave"


def test_an_offset_needs_the_topic_and_the_others_are_committed() -> None:
    room = Room(acl(GROUP, "g", Operation.READ), acl(TOPIC, "t", Operation.READ))
    offsets = [OffsetToCommit("u", 0, 1), OffsetToCommit("t", 1, 2), OffsetToCommit("absent", 0, 3)]
    errors = room.run(room.groups.commit_offsets("g", offsets, caller=ALICE))
    assert [type(error) for error in errors] == [
        TopicAuthorizationFailed,
        type(None),
        TopicAuthorizationFailed,
    ]
    every = room.run(room.groups.fetch_offsets("g", caller=ADMIN))
    assert {key: found.offset for key, found in every.committed.items()} == {("t", 1): 2}


def test_offsets_of_unseen_topics_are_left_out_or_refused_by_name() -> None:
    room = Room(acl(GROUP, "g", Operation.DESCRIBE), acl(TOPIC, "t", Operation.DESCRIBE))
    both = [OffsetToCommit("t", 0, 7), OffsetToCommit("u", 0, 8)]
    assert room.run(room.groups.commit_offsets("g", both, caller=ADMIN)) == [None, None]
    every = room.run(room.groups.fetch_offsets("g", caller=ALICE))
    assert set(every.committed) == {("t", 0)}
    assert every.refused == frozenset()
    named = room.run(room.groups.fetch_offsets("g", [("t", 0), ("u", 0), ("absent", 0)], caller=ALICE))
    assert set(named.committed) == {("t", 0)}
    assert named.refused == {("u", 0), ("absent", 0)}


def test_deleting_an_offset_needs_the_topic() -> None:
    room = Room(acl(GROUP, "g", Operation.DELETE), acl(TOPIC, "t", Operation.READ))
    both = [OffsetToCommit("t", 0, 7), OffsetToCommit("u", 0, 8)]
    room.run(room.groups.commit_offsets("g", both, caller=ADMIN))
    errors = room.run(room.groups.delete_offsets("g", [("t", 0), ("u", 0)], caller=ALICE))
    assert [type(error) for error in errors] == [type(None), TopicAuthorizationFailed]
    assert set(room.run(room.groups.fetch_offsets("g", caller=ADMIN)).committed) == {("u", 0)}


def test_a_subscription_needs_each_topic_and_one_missing_right_refuses_all() -> None:
    room = Room(
        acl(GROUP, "g", Operation.READ), acl(GROUP, "s", Operation.READ), acl(TOPIC, "u", Operation.DESCRIBE)
    )
    with pytest.raises(TopicAuthorizationFailed):
        room.run(consume(room.groups, ALICE, "u", "t"))
    with pytest.raises(TopicAuthorizationFailed):
        room.run(share(room.groups, ALICE))
    assert room.groups.list_groups(caller=ADMIN) == []
    assert room.run(consume(room.groups, ALICE, "u")).member_epoch == 1


def test_a_group_with_an_unseen_assigned_topic_is_not_described() -> None:
    room = Room(
        acl(GROUP, "g", Operation.DESCRIBE),
        acl(GROUP, "s", Operation.DESCRIBE),
        acl(TOPIC, "u", Operation.ALL),
    )
    room.run(consume(room.groups, ADMIN))
    room.run(share(room.groups, ADMIN))
    with pytest.raises(TopicAuthorizationFailed):
        room.groups.describe_consumer_group("g", caller=ALICE)
    with pytest.raises(TopicAuthorizationFailed):
        room.groups.describe_share_group("s", caller=ALICE)
    room.authorizer.add(acl(TOPIC, "t", Operation.DESCRIBE))
    assert len(room.groups.describe_consumer_group("g", caller=ALICE).members) == 1
    assert len(room.groups.describe_share_group("s", caller=ALICE).members) == 1


def test_groups_without_the_right_are_not_listed_unless_the_cluster_may_be_described() -> None:
    room = Room(acl(GROUP, "s", Operation.DESCRIBE))
    room.run(consume(room.groups, ADMIN))
    room.run(share(room.groups, ADMIN))
    listed = room.groups.list_groups(caller=ALICE)
    assert [each.group_id for each in listed] == ["s"]
    room.authorizer.add(acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE))
    assert {each.group_id for each in room.groups.list_groups(caller=ALICE)} == {"g", "s"}


def test_groups_are_deleted_each_with_its_own_right() -> None:
    room = Room(acl(GROUP, "a", Operation.DELETE))
    for group_id in ("a", "b"):
        room.run(room.groups.commit_offsets(group_id, COMMIT, caller=ADMIN))
    errors = room.run(room.groups.delete(["a", "b", "absent"], caller=ALICE))
    assert errors[0] is None
    assert [type(error) for error in errors[1:]] == [GroupAuthorizationFailed] * 2
    assert [each.group_id for each in room.groups.list_groups(caller=ADMIN)] == ["b"]
    assert isinstance(room.run(room.groups.delete(["absent"], caller=ADMIN))[0], GroupIdNotFound)


def test_offsets_in_a_transaction_need_the_transactional_id_the_group_and_the_topics() -> None:
    room = Room(acl(TOPIC, "t", Operation.READ))
    for needed, error in (
        (acl(TRANSACTIONAL_ID, "x", Operation.WRITE), TransactionalIdAuthorizationFailed),
        (acl(GROUP, "g", Operation.READ), GroupAuthorizationFailed),
    ):
        with pytest.raises(error):
            room.call(commit_in_transaction, ALICE)
        room.authorizer.add(needed)
    room.authorizer.remove(acl(TOPIC, "t", Operation.READ))
    errors = room.call(commit_in_transaction, ALICE)
    assert [type(each) for each in errors] == [TopicAuthorizationFailed]
    assert room.broker.partitions == []


def test_a_denial_wins_over_the_right() -> None:
    room = Room(acl(GROUP, "g", Operation.ALL), acl(GROUP, "g", Operation.READ, Permission.DENY))
    with pytest.raises(GroupAuthorizationFailed):
        room.run(consume(room.groups, ALICE, "t"))
    assert room.groups.describe("g", caller=ALICE).state == "Dead"


def heartbeat(room: Room, member: str, epoch: int, caller: Caller, regex: str | None = None) -> Any:
    fields: dict[str, Any] = {"topic_regex": regex}
    if not epoch:
        fields |= {"rebalance_timeout_ms": 10_000, "owned": frozenset()}
    return room.run(room.groups.consumer_heartbeat("g", Heartbeat(member, epoch, **fields), caller=caller))


def matched(room: Room, regex: str = ".*") -> tuple[str, ...]:
    """The topics that an expression of the group matches."""
    group: Any = room.broker.groups.store.entries["g"].group
    return tuple(group.stored.resolved_regexes[regex].topics)


def test_an_expression_matches_the_topics_that_the_member_may_describe_as_long_as_it_may() -> None:
    describe = acl(TOPIC, "t", Operation.DESCRIBE)
    room = Room(acl(GROUP, "g", Operation.READ), describe)
    epoch = heartbeat(room, "m", 0, ALICE, ".*").member_epoch
    assert matched(room) == ("t",)
    room.authorizer.add(acl(TOPIC, "u", Operation.READ))
    epoch = heartbeat(room, "m", epoch, ALICE).member_epoch
    assert matched(room) == ("t", "u")
    room.authorizer.remove(describe)
    epoch = heartbeat(room, "m", epoch, ALICE).member_epoch
    assert matched(room) == ("u",)
    room.broker.catalogue.set("new", 1)
    heartbeat(room, "m", epoch, ALICE)
    assert matched(room) == ("u",)


def test_members_with_other_rights_share_the_result_of_their_expression() -> None:
    room = Room(acl(GROUP, "g", Operation.READ), acl(TOPIC, "t", Operation.DESCRIBE))
    epoch_of_all = heartbeat(room, "all", 0, ADMIN, ".*").member_epoch
    assert matched(room) == ("t", "u")
    epoch = heartbeat(room, "few", 0, ALICE, ".*").member_epoch
    assert matched(room) == ("t",), "the member that subscribed last has resolved it"
    heartbeat(room, "few", epoch, ALICE)
    room.authorizer.add(acl(TOPIC, "x", Operation.DESCRIBE))
    heartbeat(room, "all", epoch_of_all, ADMIN)
    assert matched(room) == ("t", "u"), "the first heartbeat after a change of the ACLs resolves it"


def test_without_a_heartbeat_the_coordinator_shows_a_group_no_topic() -> None:
    room = Room(acl(GROUP, "g", Operation.READ), acl(TOPIC, "t", Operation.DESCRIBE))
    heartbeat(room, "m", 0, ALICE, ".*")
    entry: Any = room.broker.groups.store.entries["g"]
    entry._visible = None  # as after the group has moved to another coordinator
    groups: Any = room.broker.groups
    room.broker.catalogue.set("new", 1)
    assert groups.consumer_groups._resolve_topics(entry).matches == {}
    assert matched(room) == ("t",)
