"""Classic group in single scenarios: the guarantees of Kafka's KIPs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from mansio.errors import (
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    NonEmptyGroup,
    RebalanceInProgress,
    StorageError,
    UnknownMember,
)
from mansio.state.classic_group.group import COMPLETING, DEAD, EMPTY, PREPARING, STABLE, ClassicGroup
from mansio.state.classic_group.types import (
    Join,
    JoinResponse,
    Persist,
    Protocol,
    Response,
    Sync,
    SyncResponse,
)

RANGE = (Protocol("range", b"sub"),)


class Room:
    """A group, its clock, and everything it has answered and asked to be stored."""

    def __init__(self, **options: Any) -> None:
        self.group = ClassicGroup("g", **{"initial_delay_ms": 200, "size_max": 10} | options)
        self.now_ms = 0.0
        self.ids = itertools.count()
        self.answers: dict[str, Any] = {}
        self.writes: list[Persist] = []

    def perform(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, Response):
                assert effect.waiter not in self.answers
                self.answers[effect.waiter] = effect.value
            else:
                self.writes.append(effect)

    def join(self, waiter: str, member_id: str = "", instance_id: str | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "client_id": "c",
            "client_host": "/h",
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 30_000,
            "protocol_type": "consumer",
            "protocols": RANGE,
            "requires_member_id": False,
        }
        request = Join(member_id, instance_id, **(fields | changes))
        self.perform(self.group.join(request, waiter, f"m{next(self.ids)}", self.now_ms))

    def sync(self, waiter: str, member_id: str, assignments: dict | None = None, **changes: Any) -> None:
        fields = {"instance_id": None, "generation": self.group.generation, "assignments": assignments or {}}
        self.perform(self.group.sync(Sync(member_id, **(fields | changes)), waiter, self.now_ms))

    def after(self, ms: float) -> None:
        self.now_ms += ms
        self.perform(self.group.tick(self.now_ms))

    def stored(self, error: StorageError | None = None) -> None:
        self.perform(self.group.handle_persisted(self.writes.pop(0).token, error, self.now_ms))

    def stable(self, *instances: str | None) -> list[str]:
        """Bring members in and the group to Stable; their ids, the leader's first."""
        for position, instance in enumerate(instances):
            self.join(f"j{position}", instance_id=instance)
        self.after(200)
        self.after(200)
        ids = [self.answers.pop(f"j{position}").member_id for position in range(len(instances))]
        for position, member_id in enumerate(ids):
            assignments = {each: each.encode() for each in ids} if position == 0 else {}
            self.sync(f"s{position}", member_id, assignments, instance_id=instances[position])
        self.stored()
        for position, member_id in enumerate(ids):
            assert self.answers.pop(f"s{position}").assignment == member_id.encode()
        assert self.group.state is STABLE
        return ids


def test_members_that_come_within_the_initial_delay_share_one_rebalance() -> None:
    room = Room()
    room.join("a")
    room.after(150)
    room.join("b")
    room.after(50)  # the delay is over, but somebody came: it grows once (KIP-134)
    assert room.answers == {}
    room.after(200)
    a, b = room.answers["a"], room.answers["b"]
    assert (a.generation, b.generation) == (1, 1)
    assert a.leader == b.leader == a.member_id
    assert [each.member_id for each in a.members] == [a.member_id, b.member_id]
    assert b.members == ()


def test_the_initial_delay_never_grows_beyond_the_rebalance_timeout() -> None:
    room = Room(size_max=1000)
    room.join("first")
    for turn in range(149):
        room.join(f"j{turn}")
        room.after(200)
        assert room.answers == {}
    room.after(200)
    assert len(room.answers) == 150


def test_a_member_without_id_must_come_back_with_the_one_it_is_given() -> None:
    room = Room()
    room.join("first", requires_member_id=True)
    given = room.answers["first"]
    assert given.must_rejoin
    assert room.group.state is EMPTY
    room.join("second", given.member_id, requires_member_id=True)
    room.after(200)
    assert room.answers["second"].member_id == given.member_id


def test_an_id_that_is_not_used_lapses_after_the_session_timeout() -> None:
    room = Room()
    room.join("first", requires_member_id=True)
    room.after(10_000)
    assert room.group.pending_joins == {}
    with pytest.raises(UnknownMember):
        room.join("second", room.answers["first"].member_id)


def test_a_rebalance_waits_for_a_member_that_was_given_an_id() -> None:
    room = Room()
    (leader,) = room.stable(None)
    room.join("new", requires_member_id=True)
    room.join("again", leader)
    assert "again" not in room.answers
    room.join("newer", room.answers["new"].member_id)
    assert room.answers["again"].generation == room.answers["newer"].generation == 2


def test_an_assignment_is_not_given_out_before_it_is_stored() -> None:
    room = Room()
    room.join("a")
    room.after(200)
    member_id = room.answers["a"].member_id
    room.sync("s", member_id, {member_id: b"mine"})
    assert "s" not in room.answers
    assert room.group.state is COMPLETING
    assert room.writes[0].metadata.members[0].assignment == b"mine"
    room.stored()
    assert room.answers["s"] == SyncResponse(b"mine", "consumer", "range")


def test_after_a_failed_write_all_members_must_join_again() -> None:
    room = Room()
    room.join("a")
    room.after(200)
    member_id = room.answers["a"].member_id
    room.sync("s", member_id, {member_id: b"mine"})
    error = StorageError()
    room.stored(error)
    assert room.answers["s"] is error
    assert room.group.state is PREPARING


def test_a_store_that_ends_after_the_next_rebalance_began_changes_nothing() -> None:
    room = Room()
    room.join("a")
    room.after(200)
    member_id = room.answers["a"].member_id
    room.sync("s", member_id, {member_id: b"old"})
    room.join("b")
    assert isinstance(room.answers["s"], RebalanceInProgress)
    room.stored()
    assert room.group.state is PREPARING


def test_the_slowest_member_has_its_rebalance_timeout_and_no_longer() -> None:
    room = Room()
    leader, other = room.stable(None, None)
    room.join("again", leader)
    for _ in range(5):
        room.after(5_000)
        with pytest.raises(RebalanceInProgress):
            room.group.heartbeat(other, None, 1, room.now_ms)
    assert "again" not in room.answers
    room.after(5_000)
    assert room.answers["again"].generation == 2
    with pytest.raises(UnknownMember):
        room.group.heartbeat(other, None, 1, room.now_ms)


def test_a_silent_member_is_gone_after_its_session_and_the_others_rebalance() -> None:
    room = Room()
    leader, other = room.stable(None, None)
    room.after(9_000)
    room.group.heartbeat(leader, None, 1, room.now_ms)
    assert room.group.next_deadline_ms() == room.now_ms + 1_000
    room.after(1_000)
    assert list(room.group.members.by_id) == [leader]
    assert room.group.state is PREPARING
    assert other not in room.group.members.by_id


def test_a_member_that_never_syncs_is_gone_after_the_rebalance_timeout() -> None:
    room = Room()
    room.join("a")
    room.join("b")
    room.after(200)
    room.after(200)
    a, b = room.answers["a"].member_id, room.answers["b"].member_id
    room.sync("s", a, {a: b"x"})
    room.stored()
    for _ in range(4):
        room.after(7_500)
        if b in room.group.members.by_id:
            room.group.heartbeat(b, None, 1, room.now_ms)
            room.group.heartbeat(a, None, 1, room.now_ms)
    assert list(room.group.members.by_id) == [a]


def test_older_generations_are_fenced() -> None:
    room = Room()
    (leader,) = room.stable(None)
    room.join("again", leader)
    for call in (room.group.heartbeat, room.group.check_commit):
        with pytest.raises(IllegalGeneration):
            call(leader, None, 1, room.now_ms)
    with pytest.raises(IllegalGeneration):
        room.sync("s", leader, {}, generation=1)


def test_commits_are_refused_while_the_assignment_is_being_computed() -> None:
    room = Room()
    room.join("a")
    room.after(200)
    with pytest.raises(RebalanceInProgress):
        room.group.check_commit(room.answers["a"].member_id, None, 1, room.now_ms)


def test_only_an_empty_group_takes_commits_from_outside() -> None:
    room = Room()
    room.group.check_commit("", None, -1, 0)
    room.stable(None)
    with pytest.raises(UnknownMember):
        room.group.check_commit("", None, -1, room.now_ms)


def test_a_member_of_a_stable_group_that_joins_again_disturbs_nobody() -> None:
    room = Room()
    leader, other = room.stable(None, None)
    room.join("again", other)
    assert room.answers["again"] == JoinResponse(other, 1, "consumer", "range", leader)
    assert room.group.state is STABLE
    room.join("changed", other, protocols=(Protocol("range", b"other topics"),))
    assert room.group.state is PREPARING


def test_a_leader_that_joins_again_wants_a_rebalance() -> None:
    room = Room()
    leader, _ = room.stable(None, None)
    room.join("again", leader)
    assert room.group.state is PREPARING


def test_the_protocol_most_members_prefer_wins_among_those_all_can_do() -> None:
    room = Room()
    sticky, plain, other = Protocol("sticky", b"s"), Protocol("range", b"r"), Protocol("other", b"o")
    room.join("a", protocols=(other, plain, sticky))
    room.join("b", protocols=(sticky, plain))
    room.join("c", protocols=(sticky, plain))
    room.after(200)
    room.after(200)
    assert room.answers["a"].protocol == "sticky"
    with pytest.raises(InconsistentGroupProtocol):
        room.join("d", protocols=(other,))
    with pytest.raises(InconsistentGroupProtocol):
        room.join("d", protocol_type="connect")
    with pytest.raises(InconsistentGroupProtocol):
        room.sync("s", room.answers["a"].member_id, {}, protocol="range")


def test_a_full_group_refuses_new_members() -> None:
    room = Room(size_max=1)
    (leader,) = room.stable(None)
    with pytest.raises(GroupMaxSizeReached):
        room.join("b")
    room.join("again", leader)
    assert room.answers["again"].generation == 2


def test_ids_given_out_are_bounded_too() -> None:
    room = Room(size_max=2)
    room.join("a", requires_member_id=True)
    room.join("b", requires_member_id=True)
    with pytest.raises(GroupMaxSizeReached):
        room.join("c", requires_member_id=True)


def test_the_last_member_to_leave_empties_the_group_and_that_is_stored() -> None:
    room = Room()
    (leader,) = room.stable(None)
    room.perform(room.group.leave(leader, None, room.now_ms))
    assert room.group.state is EMPTY
    assert room.writes[0].metadata.members == ()
    assert room.group.next_deadline_ms() == math.inf
    room.group.delete()
    assert room.group.state is DEAD
    with pytest.raises(CoordinatorNotAvailable):
        room.join("late")


def test_a_group_with_members_is_not_deleted() -> None:
    room = Room()
    room.stable(None)
    with pytest.raises(NonEmptyGroup):
        room.group.delete()


def test_a_static_member_that_restarts_keeps_its_assignment_without_a_rebalance() -> None:
    room = Room()
    leader, static = room.stable(None, "i")
    room.join("again", instance_id="i")
    assert "again" not in room.answers  # its new id must be stored first
    room.stored()
    answer = room.answers["again"]
    assert (answer.generation, answer.leader, answer.members) == (1, leader, ())
    assert room.group.state is STABLE
    room.sync("s", answer.member_id, instance_id="i")
    assert room.answers["s"].assignment == static.encode()
    with pytest.raises(FencedInstanceId):
        room.group.heartbeat(static, "i", 1, room.now_ms)


@pytest.mark.parametrize("recent", [True, False])
def test_a_static_leader_that_restarts_does_not_assign_again(recent: bool) -> None:
    room = Room()
    old, _ = room.stable("i", None)
    room.join("again", instance_id="i", can_skip_assignment=recent)
    room.stored()
    answer = room.answers["again"]
    if recent:  # KIP-814
        assert answer.leader == answer.member_id
        assert answer.skip_assignment
        assert len(answer.members) == 2
    else:
        assert answer.leader == old != answer.member_id
        assert not answer.skip_assignment


def test_two_processes_with_one_instance_id_do_not_both_read() -> None:
    room = Room()
    room.join("first", instance_id="i")
    room.join("second", instance_id="i")
    assert isinstance(room.answers["first"], FencedInstanceId)
    room.after(200)
    assert room.answers["second"].generation == 1
    assert len(room.group.members) == 1


def test_a_static_member_may_be_away_during_a_rebalance() -> None:
    room = Room()
    leader, static = room.stable(None, "i")
    room.join("new", session_timeout_ms=60_000)
    room.join("again", leader, session_timeout_ms=60_000)
    room.group.members.by_id[static].session_timeout_ms = 60_000
    with pytest.raises(RebalanceInProgress):
        room.group.heartbeat(static, "i", 1, room.now_ms)
    room.after(30_000)
    assert room.answers["again"].generation == 2
    assert static in room.group.members.by_id


def test_a_static_member_is_removed_by_its_instance_id_alone() -> None:
    room = Room()
    room.stable("i")
    with pytest.raises(UnknownMember):
        room.group.leave("", "other", room.now_ms)
    room.perform(room.group.leave("", "i", room.now_ms))
    assert room.group.state is EMPTY


def test_restored_members_carry_on_by_heartbeating_and_have_a_whole_session() -> None:
    room = Room()
    leader, static = room.stable(None, "i")
    room.join("again", instance_id="i")
    metadata = room.writes[0].metadata
    again = ClassicGroup("g", initial_delay_ms=200, size_max=10)
    again.restore(metadata, 50_000)
    assert again.state is STABLE
    assert again.next_deadline_ms() == 60_000
    again.heartbeat(leader, None, 1, 55_000)
    with pytest.raises(FencedInstanceId):
        again.heartbeat(static, "i", 1, 55_000)
    room.group = again
    room.now_ms = 56_000
    room.sync("s", leader)
    assert room.answers["s"].assignment == leader.encode()


def test_a_member_whose_parked_sync_is_sent_back_has_a_whole_session_to_join_again() -> None:
    room = Room()
    room.join("a")
    room.join("b")
    room.after(200)
    room.after(200)
    b = room.answers["b"].member_id
    room.sync("s", b)
    room.after(10_000)  # the leader is removed; b has been waiting for it and could not send heartbeats
    assert isinstance(room.answers["s"], RebalanceInProgress)
    room.after(9_999)
    assert b in room.group.members.by_id


def test_a_stable_group_stays_stable_as_long_as_its_members_are_heard_of() -> None:
    room = Room()
    ids = room.stable(None, "i")
    for _ in range(20):
        room.after(9_000)
        room.group.heartbeat(ids[0], None, 1, room.now_ms)
        room.group.heartbeat(ids[1], "i", 1, room.now_ms)
    assert room.group.state is STABLE


def test_a_new_member_whose_join_is_never_answered_does_not_wait_for_ever() -> None:
    room = Room()
    room.join("slow", session_timeout_ms=900_000, rebalance_timeout_ms=900_000)
    room.after(200)
    slow = room.answers["slow"].member_id
    room.sync("s", slow, {slow: b"x"})
    room.stored()
    room.join("new")
    room.after(299_999)
    assert "new" not in room.answers
    room.after(1)
    assert isinstance(room.answers["new"], UnknownMember)


def test_the_eldest_that_is_left_leads_when_the_leader_leaves() -> None:
    room = Room()
    leader, second, third = room.stable(None, None, None)
    room.perform(room.group.leave(leader, None, room.now_ms))
    assert room.group.members.leader == second
    room.join("third", third)
    room.join("second", second)
    assert room.answers["third"].leader == second
    assert len(room.answers["second"].members) == 2
