"""Consumer group in single scenarios that the model test reaches rarely or not at all: errors, and state from older
versions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import (
    CoordinatorNotAvailable,
    CorruptLog,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    InconsistentGroupProtocol,
    InvalidRequest,
    MansioError,
    NonEmptyGroup,
    StaleMemberEpoch,
    UnknownMember,
    UnreleasedInstanceId,
    UnsupportedAssignor,
)
from mansio.state.assignors.uniform import UniformAssignor
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.classic_group.types import Join, Protocol
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.consumer_group.types import (
    ASSIGNING,
    DEAD,
    EMPTY,
    STABLE,
    ConsumerGroupSettings,
    Heartbeat,
    HeartbeatResponse,
    MemberState,
    Topics,
)
from mansio.wire.internal_records import consumer_group_records as records
from support.consumer_groups import ASSIGNORS, Codec, World
from support.present import present

if TYPE_CHECKING:
    from mansio.state.assignors import Assignor

WORLD = World({"a": 4})
TOPICS = WORLD.topics
A = WORLD.ids["a"]
NOTHING: frozenset[tuple[bytes, int]] = frozenset()


def new_group(size_max: int = 10, assignors: dict[str, Assignor] | None = None) -> ConsumerGroup:
    return ConsumerGroup(
        "g",
        assignors=ASSIGNORS if assignors is None else assignors,
        default_assignor="uniform",
        settings=ConsumerGroupSettings(6_000, 5_000, size_max),
        codec=Codec(),
    )


def joining(member_id: str, instance_id: str | None = None, **other: Any) -> Heartbeat:
    request = Heartbeat(
        member_id, 0, instance_id, rebalance_timeout_ms=5_000, topic_names=("a",), owned=NOTHING
    )
    return request._replace(**other)


def beat(group: ConsumerGroup, request: Heartbeat, topics: Topics = TOPICS) -> HeartbeatResponse:
    return group.heartbeat(request, topics, 0.0)[0]


def classic_join(metadata: bytes) -> Join:
    return Join("c", None, "client", "/host", 6_000, 5_000, "consumer", (Protocol("range", metadata),))


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (joining("n", rebalance_timeout_ms=-1), InvalidRequest),
        (joining("n", owned=None), InvalidRequest),
        (joining("n", owned=frozenset({(A, 0)})), InvalidRequest),
        (joining("n", topic_names=None), InvalidRequest),
        (joining("n", assignor="magic"), UnsupportedAssignor),
        (joining("n"), GroupMaxSizeReached),
        (joining("n", instance_id="i"), UnreleasedInstanceId),
        (joining("m", instance_id="i"), FencedInstanceId),
        (Heartbeat("n", 1), UnknownMember),
        (Heartbeat("m", -2), InvalidRequest),
        (Heartbeat("m", -3), InvalidRequest),
        (Heartbeat("m", 99), FencedMemberEpoch),
        (Heartbeat("m", 2, assignor="magic"), UnsupportedAssignor),
        (Heartbeat("n", 1, "i"), FencedInstanceId),
    ],
)
def test_a_request_that_is_refused_changes_nothing(request_: Heartbeat, error: type[MansioError]) -> None:
    group = new_group(size_max=2)
    beat(group, joining("m"))
    beat(group, joining("s", "i"))
    beat(group, Heartbeat("m", 1, owned=frozenset((A, index) for index in range(2))))
    before = dict(group.snapshot())
    with pytest.raises(error):
        group.heartbeat(request_, TOPICS, 0.0)
    assert dict(group.snapshot()) == before
    assert group.tick(TOPICS, 0.0) == []


def test_a_static_member_that_comes_back_has_what_it_had_and_the_old_id_is_fenced() -> None:
    group = new_group()
    beat(group, joining("s1", "i"))
    beat(group, joining("m"))
    beat(group, Heartbeat("s1", 1, "i", owned=frozenset({(A, 0), (A, 1)})))
    had = group.members["s1"].target
    epoch = group.group_epoch
    left = beat(group, Heartbeat("s1", -2, "i"))
    assert left.member_epoch == -2
    assert group.members["s1"].is_static_offline
    with pytest.raises(StaleMemberEpoch):
        group.check_commit("s1", "i", epoch, 0.0)
    back = beat(group, joining("s2", "i"))
    assert set(present(back.assignment)) == had
    assert group.group_epoch == epoch, "nobody else has to move for it"
    for late in (Heartbeat("s1", epoch, "i"), Heartbeat("s1", -1, "i")):
        with pytest.raises(FencedInstanceId):
            group.heartbeat(late, TOPICS, 0.0)
    beat(group, Heartbeat("s2", -2, "i"))
    group.heartbeat(Heartbeat("m", group.members["m"].current.epoch), TOPICS, 5_999.0)
    group.tick(TOPICS, 5_999.0)
    assert "s2" in group.members
    group.tick(TOPICS, 6_000.0)
    assert list(group.members) == ["m"], "its place is kept for a session, not for ever"


def test_a_member_that_missed_an_answer_gets_it_again() -> None:
    group = new_group()
    beat(group, joining("m"))
    beat(group, joining("n"))
    revoking = beat(group, Heartbeat("m", 1))
    assert len(present(revoking.assignment)) == 2
    assert revoking.heartbeat_interval_ms == 300
    owned = frozenset(present(revoking.assignment))
    missed = beat(group, Heartbeat("m", 1, owned=owned))
    assert (missed.member_epoch, missed.heartbeat_interval_ms) == (2, 5_000)
    again = beat(group, Heartbeat("m", 1, owned=owned))
    assert (again.member_epoch, frozenset(present(again.assignment))) == (2, owned)
    for foreign in (owned | {(A, 9)}, None):
        with pytest.raises(FencedMemberEpoch):
            group.heartbeat(Heartbeat("m", 1, owned=foreign), TOPICS, 0.0)


def test_a_partition_goes_to_another_only_when_who_had_it_has_let_go() -> None:
    group = new_group()
    beat(group, joining("m"))
    beat(group, joining("n"))
    revoking = beat(group, Heartbeat("m", 1))
    had = frozenset((A, index) for index in range(4))
    for owned in (None, had, had - {min(had - set(present(revoking.assignment)))}):
        assert beat(group, Heartbeat("n", group.members["n"].current.epoch)).assignment is None
        assert beat(group, Heartbeat("m", 1, owned=owned)).member_epoch == 1
    beat(group, Heartbeat("m", 1, owned=frozenset(present(revoking.assignment))))
    beaten = beat(group, Heartbeat("n", group.members["n"].current.epoch))
    assert frozenset(present(beaten.assignment)) == had - frozenset(present(revoking.assignment))


def test_topics_that_are_wanted_no_more_go_at_once_even_while_others_are_given_up() -> None:
    world = World({"a": 2, "b": 2})
    group = new_group()
    beat(group, joining("m", topic_names=("a", "b")), world.topics)
    beat(group, joining("n", topic_names=("a", "b")), world.topics)
    first = beat(group, Heartbeat("m", 1), world.topics)
    assert group.members["m"].current.state == MemberState.UNREVOKED
    gone = (
        world.ids["b"]
        if any(topic == world.ids["b"] for topic, _ in present(first.assignment))
        else world.ids["a"]
    )
    kept = "a" if gone == world.ids["b"] else "b"
    second = beat(group, Heartbeat("m", 1, topic_names=(kept,)), world.topics)
    assert all(topic != gone for topic, _ in present(second.assignment))
    assert any(topic == gone for topic, _ in group.members["m"].current.pending), "it may still read them"


def test_an_expression_that_is_not_resolved_yet_matches_nothing_and_later_what_it_matches() -> None:
    group = new_group()
    unresolved = TOPICS._replace(matches={})
    answer = beat(group, joining("m", topic_names=None, topic_regex="^a"), unresolved)
    assert answer.assignment == ()
    assert group.subscribed_regexes() == ["^a"]
    assert group.handle_topic_change(TOPICS._replace(matches={"^a": ("a",)}), 0.0)
    assert (
        len(present(beat(group, Heartbeat("m", 1), TOPICS._replace(matches={"^a": ("a",)})).assignment)) == 4
    )
    cleared = beat(group, Heartbeat("m", 2, topic_regex=""), unresolved)
    assert cleared.assignment == ()
    assert not any(
        present(records.decode_group_record_key(key)).record_type == records.CONSUMER_GROUP_REGULAR_EXPRESSION
        for key, _ in group.snapshot()
    )


def test_only_an_empty_group_is_deleted_and_nothing_of_it_stays() -> None:
    group = new_group()
    beat(group, joining("m"))
    with pytest.raises(NonEmptyGroup):
        group.delete()
    beat(group, Heartbeat("m", -1))
    assert (group.is_idle(), group.state) == (True, EMPTY)
    group.check_commit("", None, -1, 0.0)
    old = records.GroupRecordKey(records.CONSUMER_GROUP_PARTITION_METADATA, "g")
    loaded = new_group()
    for key, value in [*group.snapshot(), (records.encode_group_record_key(old), b"\x00\x00")]:
        loaded.apply(present(records.decode_group_record_key(key)), value)
    loaded.finish_restore(0.0)
    deleted = dict(loaded.delete())
    assert set(deleted) == {key for key, _ in group.snapshot()} | {records.encode_group_record_key(old)}
    assert set(deleted.values()) == {None}
    assert loaded.state is DEAD
    with pytest.raises(CoordinatorNotAvailable):
        loaded.heartbeat(joining("m"), TOPICS, 0.0)
    loaded.undelete()
    assert loaded.state is EMPTY


def test_offsets_are_read_by_members_in_their_epoch_and_by_those_who_are_none() -> None:
    group = new_group()
    beat(group, joining("m"))
    group.check_fetch("m", 1)
    group.check_fetch("", -1)
    for member_id, epoch, error in (("m", 0, StaleMemberEpoch), ("n", 1, UnknownMember)):
        with pytest.raises(error):
            group.check_fetch(member_id, epoch)
    with pytest.raises(UnknownMember):
        group.check_commit("", None, -1, 0.0)


def test_a_group_epoch_without_its_target_is_made_good_by_the_next_heartbeat() -> None:
    """Another broker (Kafka's) stores the two apart."""
    group = new_group()
    beat(group, joining("m"))
    stored = dict(group.snapshot())
    epoch_key = records.encode_group_record_key(records.GroupRecordKey(records.CONSUMER_GROUP_METADATA, "g"))
    stored[epoch_key] = records.encode_group_epoch(records.GroupEpoch(7, 0))
    loaded = new_group()
    for key, value in stored.items():
        loaded.apply(present(records.decode_group_record_key(key)), value)
    loaded.finish_restore(0.0)
    assert loaded.state is ASSIGNING
    beat(loaded, Heartbeat("m", 1))
    assert loaded.state is STABLE
    assert loaded.assignment_epoch == loaded.group_epoch > 7


def test_a_log_in_which_two_members_hold_one_partition_is_corrupt() -> None:
    group = new_group()
    for member_id in ("m", "n"):
        member = records.MemberMetadata(None, None, "", "", ("a",), None, 5_000, None)
        current = records.CurrentAssignment(1, 0, 0, frozenset({(A, 0)}))
        group.apply(
            records.GroupRecordKey(records.CONSUMER_GROUP_MEMBER_METADATA, "g", member_id),
            records.encode_member_metadata(member),
        )
        group.apply(
            records.GroupRecordKey(records.CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT, "g", member_id),
            records.encode_current_assignment(current),
        )
    with pytest.raises(CorruptLog):
        group.finish_restore(0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"m": [(A, 0)], "n": [(A, 0)]},
        {"m": [(A, 0), (A, 0)], "n": []},
        {"m": [(A, 4)], "n": []},
        {"m": [(b"?" * 16, 0)], "n": []},
        {"m": []},
    ],
    ids=["to two", "twice", "not there", "not wanted", "a member left out"],
)
def test_what_a_foreign_assignor_returns_is_used_only_if_it_is_valid(
    wrong: dict[str, list[tuple[bytes, int]]],
) -> None:
    class Wrong:
        name = "wrong"

        def assign(self, members: object, partitions: object) -> dict[str, list[tuple[bytes, int]]]:
            return wrong

    group = new_group(assignors={"uniform": UniformAssignor(), "wrong": Wrong()})
    beat(group, joining("m"))
    with pytest.raises(AssertionError, match="invalid target"):
        group.heartbeat(joining("n", assignor="wrong"), TOPICS, 0.0)


def test_a_classic_group_whose_members_cannot_be_read_stays_what_it_is() -> None:
    classic = ClassicGroup("g", initial_delay_ms=0, size_max=9)
    classic.join(
        Join(
            "",
            None,
            "c",
            "/h",
            6_000,
            5_000,
            "consumer",
            (Protocol("range", b"\x00"),),
            requires_member_id=False,
        ),
        "waiter",
        "c",
        0.0,
    )
    arguments: dict[str, Any] = {
        "assignors": ASSIGNORS,
        "default_assignor": "uniform",
        "settings": ConsumerGroupSettings(),
        "codec": Codec(),
        "topics": TOPICS,
        "now_ms": 0.0,
    }
    with pytest.raises(InconsistentGroupProtocol):
        ConsumerGroup.from_classic(classic, **arguments)
    classic.protocol_type = "connect"
    with pytest.raises(InconsistentGroupProtocol):
        ConsumerGroup.from_classic(classic, **arguments)
    assert [each.join_waiter for each in classic.members] == ["waiter"]


def test_a_classic_member_that_does_not_fit_is_refused() -> None:
    group = new_group()
    beat(group, joining("m"))
    for request in (
        classic_join(b"\x00"),
        Join("c", None, "c", "/h", 6_000, 5_000, "connect", (Protocol("x", b""),)),
    ):
        with pytest.raises(InconsistentGroupProtocol):
            group.join(request, "c", TOPICS, 0.0)
    assert list(group.members) == ["m"]


def test_a_heartbeat_without_news_costs_less_than_twenty_microseconds() -> None:
    world = World({"a": 1_000})
    group = new_group(size_max=200)
    epochs = {}
    for number in range(200):
        epochs[f"m{number}"] = beat(group, joining(f"m{number}"), world.topics).member_epoch
    last_owned = dict.fromkeys(epochs, NOTHING)
    for _ in range(4):
        for member_id, epoch in epochs.items():
            answer = beat(group, Heartbeat(member_id, epoch, owned=last_owned[member_id]), world.topics)
            epochs[member_id] = answer.member_epoch
            last_owned[member_id] = NOTHING if answer.assignment is None else frozenset(answer.assignment)
    assert group.state is STABLE
    requests = [Heartbeat(member_id, epoch) for member_id, epoch in epochs.items()]
    best_us = 1e9
    for _ in range(10):
        before = time.process_time()
        for request in requests:
            assert group.heartbeat(request, world.topics, 0.0)[1] == []
        best_us = min(best_us, (time.process_time() - before) / len(requests) * 1e6)
    assert best_us <= 20
