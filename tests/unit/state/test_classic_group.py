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


class GroupBench:
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
    bench = GroupBench()
    bench.join("a")
    bench.after(150)
    bench.join("b")
    bench.after(50)  # the delay is over, but somebody came: it grows once (KIP-134)
    assert bench.answers == {}
    bench.after(200)
    a, b = bench.answers["a"], bench.answers["b"]
    assert (a.generation, b.generation) == (1, 1)
    assert a.leader == b.leader == a.member_id
    assert [each.member_id for each in a.members] == [a.member_id, b.member_id]
    assert b.members == ()


def test_the_initial_delay_never_grows_beyond_the_rebalance_timeout() -> None:
    bench = GroupBench(size_max=1000)
    bench.join("first")
    for turn in range(149):
        bench.join(f"j{turn}")
        bench.after(200)
        assert bench.answers == {}
    bench.after(200)
    assert len(bench.answers) == 150


def test_a_member_without_id_must_come_back_with_the_one_it_is_given() -> None:
    bench = GroupBench()
    bench.join("first", requires_member_id=True)
    given = bench.answers["first"]
    assert given.must_rejoin
    assert bench.group.state is EMPTY
    bench.join("second", given.member_id, requires_member_id=True)
    bench.after(200)
    assert bench.answers["second"].member_id == given.member_id


def test_an_id_that_is_not_used_lapses_after_the_session_timeout() -> None:
    bench = GroupBench()
    bench.join("first", requires_member_id=True)
    bench.after(10_000)
    assert bench.group.pending_joins == {}
    with pytest.raises(UnknownMember):
        bench.join("second", bench.answers["first"].member_id)


def test_a_rebalance_waits_for_a_member_that_was_given_an_id() -> None:
    bench = GroupBench()
    (leader,) = bench.stable(None)
    bench.join("new", requires_member_id=True)
    bench.join("again", leader)
    assert "again" not in bench.answers
    bench.join("newer", bench.answers["new"].member_id)
    assert bench.answers["again"].generation == bench.answers["newer"].generation == 2


def test_an_assignment_is_not_given_out_before_it_is_stored() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.after(200)
    member_id = bench.answers["a"].member_id
    bench.sync("s", member_id, {member_id: b"mine"})
    assert "s" not in bench.answers
    assert bench.group.state is COMPLETING
    assert bench.writes[0].metadata.members[0].assignment == b"mine"
    bench.stored()
    assert bench.answers["s"] == SyncResponse(b"mine", "consumer", "range")


def test_after_a_failed_write_all_members_must_join_again() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.after(200)
    member_id = bench.answers["a"].member_id
    bench.sync("s", member_id, {member_id: b"mine"})
    error = StorageError()
    bench.stored(error)
    assert bench.answers["s"] is error
    assert bench.group.state is PREPARING


def test_a_store_that_ends_after_the_next_rebalance_began_changes_nothing() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.after(200)
    member_id = bench.answers["a"].member_id
    bench.sync("s", member_id, {member_id: b"old"})
    bench.join("b")
    assert isinstance(bench.answers["s"], RebalanceInProgress)
    bench.stored()
    assert bench.group.state is PREPARING


def test_the_slowest_member_has_its_rebalance_timeout_and_no_longer() -> None:
    bench = GroupBench()
    leader, other = bench.stable(None, None)
    bench.join("again", leader)
    for _ in range(5):
        bench.after(5_000)
        with pytest.raises(RebalanceInProgress):
            bench.group.heartbeat(other, None, 1, bench.now_ms)
    assert "again" not in bench.answers
    bench.after(5_000)
    assert bench.answers["again"].generation == 2
    with pytest.raises(UnknownMember):
        bench.group.heartbeat(other, None, 1, bench.now_ms)


def test_a_silent_member_is_gone_after_its_session_and_the_others_rebalance() -> None:
    bench = GroupBench()
    leader, other = bench.stable(None, None)
    bench.after(9_000)
    bench.group.heartbeat(leader, None, 1, bench.now_ms)
    assert bench.group.next_deadline_ms() == bench.now_ms + 1_000
    bench.after(1_000)
    assert list(bench.group.members.by_id) == [leader]
    assert bench.group.state is PREPARING
    assert other not in bench.group.members.by_id


def test_a_member_that_never_syncs_is_gone_after_the_rebalance_timeout() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.join("b")
    bench.after(200)
    bench.after(200)
    a, b = bench.answers["a"].member_id, bench.answers["b"].member_id
    bench.sync("s", a, {a: b"x"})
    bench.stored()
    for _ in range(4):
        bench.after(7_500)
        if b in bench.group.members.by_id:
            bench.group.heartbeat(b, None, 1, bench.now_ms)
            bench.group.heartbeat(a, None, 1, bench.now_ms)
    assert list(bench.group.members.by_id) == [a]


def test_older_generations_are_fenced() -> None:
    bench = GroupBench()
    (leader,) = bench.stable(None)
    bench.join("again", leader)
    for call in (bench.group.heartbeat, bench.group.check_commit):
        with pytest.raises(IllegalGeneration):
            call(leader, None, 1, bench.now_ms)
    with pytest.raises(IllegalGeneration):
        bench.sync("s", leader, {}, generation=1)


def test_commits_are_refused_while_the_assignment_is_being_computed() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.after(200)
    with pytest.raises(RebalanceInProgress):
        bench.group.check_commit(bench.answers["a"].member_id, None, 1, bench.now_ms)


def test_only_an_empty_group_takes_commits_from_outside() -> None:
    bench = GroupBench()
    bench.group.check_commit("", None, -1, 0)
    bench.stable(None)
    with pytest.raises(UnknownMember):
        bench.group.check_commit("", None, -1, bench.now_ms)


def test_a_member_of_a_stable_group_that_joins_again_disturbs_no_member() -> None:
    bench = GroupBench()
    leader, other = bench.stable(None, None)
    bench.join("again", other)
    assert bench.answers["again"] == JoinResponse(other, 1, "consumer", "range", leader)
    assert bench.group.state is STABLE
    bench.join("changed", other, protocols=(Protocol("range", b"other topics"),))
    assert bench.group.state is PREPARING


def test_a_leader_that_joins_again_wants_a_rebalance() -> None:
    bench = GroupBench()
    leader, _ = bench.stable(None, None)
    bench.join("again", leader)
    assert bench.group.state is PREPARING


def test_the_protocol_most_members_prefer_wins_among_those_all_can_do() -> None:
    bench = GroupBench()
    sticky, plain, other = Protocol("sticky", b"s"), Protocol("range", b"r"), Protocol("other", b"o")
    bench.join("a", protocols=(other, plain, sticky))
    bench.join("b", protocols=(sticky, plain))
    bench.join("c", protocols=(sticky, plain))
    bench.after(200)
    bench.after(200)
    assert bench.answers["a"].protocol == "sticky"
    with pytest.raises(InconsistentGroupProtocol):
        bench.join("d", protocols=(other,))
    with pytest.raises(InconsistentGroupProtocol):
        bench.join("d", protocol_type="connect")
    with pytest.raises(InconsistentGroupProtocol):
        bench.sync("s", bench.answers["a"].member_id, {}, protocol="range")


def test_a_full_group_refuses_new_members() -> None:
    bench = GroupBench(size_max=1)
    (leader,) = bench.stable(None)
    with pytest.raises(GroupMaxSizeReached):
        bench.join("b")
    bench.join("again", leader)
    assert bench.answers["again"].generation == 2


def test_ids_given_out_are_bounded_too() -> None:
    bench = GroupBench(size_max=2)
    bench.join("a", requires_member_id=True)
    bench.join("b", requires_member_id=True)
    with pytest.raises(GroupMaxSizeReached):
        bench.join("c", requires_member_id=True)


def test_the_last_member_to_leave_empties_the_group_and_that_is_stored() -> None:
    bench = GroupBench()
    (leader,) = bench.stable(None)
    bench.perform(bench.group.leave(leader, None, bench.now_ms))
    assert bench.group.state is EMPTY
    assert bench.writes[0].metadata.members == ()
    assert bench.group.next_deadline_ms() == math.inf
    bench.group.delete()
    assert bench.group.state is DEAD
    with pytest.raises(CoordinatorNotAvailable):
        bench.join("late")


def test_a_group_with_members_is_not_deleted() -> None:
    bench = GroupBench()
    bench.stable(None)
    with pytest.raises(NonEmptyGroup):
        bench.group.delete()


def test_a_static_member_that_restarts_keeps_its_assignment_without_a_rebalance() -> None:
    bench = GroupBench()
    leader, static = bench.stable(None, "i")
    bench.join("again", instance_id="i")
    assert "again" not in bench.answers  # its new id must be stored first
    bench.stored()
    answer = bench.answers["again"]
    assert (answer.generation, answer.leader, answer.members) == (1, leader, ())
    assert bench.group.state is STABLE
    bench.sync("s", answer.member_id, instance_id="i")
    assert bench.answers["s"].assignment == static.encode()
    with pytest.raises(FencedInstanceId):
        bench.group.heartbeat(static, "i", 1, bench.now_ms)


@pytest.mark.parametrize("recent", [True, False])
def test_a_static_leader_that_restarts_does_not_assign_again(recent: bool) -> None:
    bench = GroupBench()
    old, _ = bench.stable("i", None)
    bench.join("again", instance_id="i", can_skip_assignment=recent)
    bench.stored()
    answer = bench.answers["again"]
    if recent:  # KIP-814
        assert answer.leader == answer.member_id
        assert answer.skip_assignment
        assert len(answer.members) == 2
    else:
        assert answer.leader == old != answer.member_id
        assert not answer.skip_assignment


def test_two_processes_with_one_instance_id_do_not_both_read() -> None:
    bench = GroupBench()
    bench.join("first", instance_id="i")
    bench.join("second", instance_id="i")
    assert isinstance(bench.answers["first"], FencedInstanceId)
    bench.after(200)
    assert bench.answers["second"].generation == 1
    assert len(bench.group.members) == 1


def test_a_static_member_may_be_away_during_a_rebalance() -> None:
    bench = GroupBench()
    leader, static = bench.stable(None, "i")
    bench.join("new", session_timeout_ms=60_000)
    bench.join("again", leader, session_timeout_ms=60_000)
    bench.group.members.by_id[static].session_timeout_ms = 60_000
    with pytest.raises(RebalanceInProgress):
        bench.group.heartbeat(static, "i", 1, bench.now_ms)
    bench.after(30_000)
    assert bench.answers["again"].generation == 2
    assert static in bench.group.members.by_id


def test_a_static_member_is_removed_by_its_instance_id_alone() -> None:
    bench = GroupBench()
    bench.stable("i")
    with pytest.raises(UnknownMember):
        bench.group.leave("", "other", bench.now_ms)
    bench.perform(bench.group.leave("", "i", bench.now_ms))
    assert bench.group.state is EMPTY


def test_restored_members_carry_on_by_heartbeating_and_have_a_whole_session() -> None:
    bench = GroupBench()
    leader, static = bench.stable(None, "i")
    bench.join("again", instance_id="i")
    metadata = bench.writes[0].metadata
    again = ClassicGroup("g", initial_delay_ms=200, size_max=10)
    again.restore(metadata, 50_000)
    assert again.state is STABLE
    assert again.next_deadline_ms() == 60_000
    again.heartbeat(leader, None, 1, 55_000)
    with pytest.raises(FencedInstanceId):
        again.heartbeat(static, "i", 1, 55_000)
    bench.group = again
    bench.now_ms = 56_000
    bench.sync("s", leader)
    assert bench.answers["s"].assignment == leader.encode()


def test_a_member_whose_parked_sync_is_sent_back_has_a_whole_session_to_join_again() -> None:
    bench = GroupBench()
    bench.join("a")
    bench.join("b")
    bench.after(200)
    bench.after(200)
    b = bench.answers["b"].member_id
    bench.sync("s", b)
    bench.after(10_000)  # the leader is removed; b has been waiting for it and could not send heartbeats
    assert isinstance(bench.answers["s"], RebalanceInProgress)
    bench.after(9_999)
    assert b in bench.group.members.by_id


def test_a_stable_group_stays_stable_as_long_as_its_members_send_heartbeats() -> None:
    bench = GroupBench()
    ids = bench.stable(None, "i")
    for _ in range(20):
        bench.after(9_000)
        bench.group.heartbeat(ids[0], None, 1, bench.now_ms)
        bench.group.heartbeat(ids[1], "i", 1, bench.now_ms)
    assert bench.group.state is STABLE


def test_a_new_member_whose_join_is_never_answered_does_not_wait_for_ever() -> None:
    bench = GroupBench()
    bench.join("slow", session_timeout_ms=900_000, rebalance_timeout_ms=900_000)
    bench.after(200)
    slow = bench.answers["slow"].member_id
    bench.sync("s", slow, {slow: b"x"})
    bench.stored()
    bench.join("new")
    bench.after(299_999)
    assert "new" not in bench.answers
    bench.after(1)
    assert isinstance(bench.answers["new"], UnknownMember)


def test_the_eldest_that_is_left_leads_when_the_leader_leaves() -> None:
    bench = GroupBench()
    leader, second, third = bench.stable(None, None, None)
    bench.perform(bench.group.leave(leader, None, bench.now_ms))
    assert bench.group.members.leader == second
    bench.join("third", third)
    bench.join("second", second)
    assert bench.answers["third"].leader == second
    assert len(bench.answers["second"].members) == 2
