"""Consumer groups (KIP-848) in the coordinator: responses, stored records, and the state after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.group.group_factory import load_assignors
from mansio.errors import ConfigError, NotEnoughReplicas, StorageError
from mansio.wire.api_versions import ApiKey
from unit.broker.consumer_groups_fixtures import (
    FENCED_EPOCH,
    GROUP_NOT_FOUND,
    STALE_EPOCH,
    UNKNOWN_MEMBER,
    Catalogue,
    ConsumerBroker,
    Member,
    check_alone,
    stabilize,
)
from unit.broker.test_groups import code, commit_fields

if TYPE_CHECKING:
    from unit.broker.groups_fixtures import AppendResult

INVALID_REQUEST, NON_EMPTY, UNSUPPORTED_ASSIGNOR, INVALID_REGEX, UNRELEASED_INSTANCE = 42, 68, 112, 128, 111


def two(broker: ConsumerBroker) -> tuple[Member, Member]:
    members = Member(broker, "a"), Member(broker, "b")
    stabilize(members)
    return members


# Members


def test_two_members_share_what_there_is_and_one_takes_over_when_the_other_leaves() -> None:
    broker = ConsumerBroker()
    first = Member(broker, "a")
    assert first.beat() == 0
    assert len(first.owned) == 4
    second = Member(broker, "b")
    assert second.beat() == 0
    assert not second.owned  # the first has not let go of anything yet
    stabilize((first, second))
    assert sorted(map(len, (first.owned, second.owned))) == [2, 2]
    assert second.leave() == 0
    stabilize((first,))
    assert len(first.owned) == 4


def test_members_in_a_hurry_are_asked_to_come_back_soon() -> None:
    broker = ConsumerBroker()
    first, second = Member(broker, "a"), Member(broker, "b")
    first.beat()
    assert first.interval_ms == 500
    second.beat()
    assert second.interval_ms == 300  # it waits for what the first has
    first.beat()
    assert first.interval_ms == 300  # it has to give up some


def test_an_unchanged_heartbeat_writes_nothing_and_waits_for_nothing() -> None:
    broker = ConsumerBroker()
    first, second = two(broker)
    before = broker.stored_bytes()
    broker.home.holds = True
    for member in (first, second):
        answering = member.begin()
        assert answering.done()
        assert member.answered(answering.result()) == 0
    assert broker.stored_bytes() == before


def test_no_member_gets_an_assignment_before_it_is_committed() -> None:
    broker = ConsumerBroker()
    broker.home.holds = True
    joining = Member(broker, "a").begin()
    assert not joining.done()
    again = Member(broker, "a")
    asking = again.begin()  # its client lost patience; what it is told must be no less durable
    assert not asking.done()
    broker.home.sync()
    broker.scheduler.turn()
    assert again.answered(asking.result()) == 0
    assert len(again.owned) == 4


def test_a_heartbeat_that_missed_its_answer_waits_for_the_commit_of_what_it_missed() -> None:
    broker = ConsumerBroker()
    first, second = Member(broker, "a"), Member(broker, "b")
    first.beat()
    second.beat()
    first.beat()
    broker.home.holds = True
    lost = first.begin()  # gives up two, and goes to the next epoch
    assert not lost.done()
    first.sends_owned = True
    asking = first.begin()
    assert not asking.done()
    broker.home.sync()
    broker.scheduler.turn()
    assert first.answered(asking.result()) == 0


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_without_an_id_is_given_one_in_version_0_and_refused_from_1_on(version: int) -> None:
    broker = ConsumerBroker()
    fields = {**Member(broker, "").request(), "subscribed_topic_regex": None}
    answer = broker.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, version, **fields)
    if version == 0:
        assert answer.error_code == 0
        assert len(answer.member_id) == 36
        assert answer.member_epoch == 1
    else:
        assert answer.error_code == INVALID_REQUEST


@pytest.mark.parametrize(
    "wrong",
    [
        {"rebalance_timeout_ms": -1},
        {"topic_partitions": None},
        {"subscribed_topic_names": None},
        {"member_epoch": -3},
        {"instance_id": ""},
        {"member_id": "x" * 40_000},
        {"subscribed_topic_names": ["t"] * 10_001},
        {"subscribed_topic_names": ["t", "t" * 250]},
    ],
)
def test_a_join_that_makes_no_sense_is_refused_and_leaves_no_group(wrong: dict[str, object]) -> None:
    broker = ConsumerBroker()
    answer = broker.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, **{**Member(broker, "a").request(), **wrong})
    assert answer.error_code == INVALID_REQUEST
    assert answer.error_message
    assert "g" not in broker.groups.store.entries


def test_unknown_members_and_assignors_are_refused() -> None:
    broker = ConsumerBroker()
    stranger = Member(broker, "x")
    stranger.epoch = 3
    assert stranger.beat() == UNKNOWN_MEMBER  # no such group: it joins again
    two(broker)
    stranger.epoch = 3
    assert stranger.beat() == UNKNOWN_MEMBER
    assert Member(broker, "y", assignor="mine").beat() == UNSUPPORTED_ASSIGNOR


# Time


def test_a_silent_member_is_removed_and_its_partitions_go_to_the_others() -> None:
    broker = ConsumerBroker(consumer_session_timeout_ms=10_000)
    first, second = two(broker)
    for _ in range(3):
        broker.scheduler.pass_time(4_000)
        assert first.beat() == 0
    first.beat()
    assert len(first.owned) == 4
    assert second.beat() == UNKNOWN_MEMBER


def test_a_member_that_does_not_let_go_within_its_rebalance_timeout_is_removed() -> None:
    broker = ConsumerBroker()
    first, second = Member(broker, "a"), Member(broker, "b")
    first.beat()
    second.beat()
    first.beat()  # told to give up two; it says from now on that it still has all four
    everything = frozenset(("t", index) for index in range(4))
    for _ in range(13):
        broker.scheduler.pass_time(5_000)
        second.beat()
        first.owned, first.sends_owned = everything, True
        if first.beat():
            break
    assert first.error == UNKNOWN_MEMBER
    stabilize((second,))
    assert len(second.owned) == 4


def test_shorter_sessions_of_a_group_hold_from_the_next_heartbeat_on() -> None:
    broker = ConsumerBroker()
    first, second = two(broker)
    broker.overrides["g"] = {"consumer.session.timeout.ms": "6000", "consumer.heartbeat.interval.ms": "1000"}
    broker.groups.apply_settings("g")
    first.beat()
    second.beat()
    assert first.interval_ms == 1_000
    broker.scheduler.pass_time(5_000)
    first.beat()
    broker.scheduler.pass_time(1_500)
    assert second.beat() == UNKNOWN_MEMBER
    assert first.beat() == 0


def test_after_a_stall_heartbeats_are_read_before_sessions_end() -> None:
    broker = ConsumerBroker(consumer_session_timeout_ms=10_000)
    first, second = two(broker)
    broker.scheduler.now_ms += 60_000  # the process stood still
    broker.scheduler.pass_time(10)  # its timer fires much too late
    assert first.beat() == 0
    assert second.beat() == 0


# Topics


def test_new_partitions_are_given_out_and_deleted_topics_are_taken_away() -> None:
    broker = ConsumerBroker(Catalogue(t=2, u=2))
    first, second = Member(broker, "a", ("t", "u")), Member(broker, "b", ("t", "u"))
    stabilize((first, second))
    broker.catalogue.set("t", 6)
    stabilize((first, second))
    assert sorted(map(len, (first.owned, second.owned))) == [4, 4]
    broker.catalogue.set("u", None)
    stabilize((first, second))
    assert {name for name, _ in first.owned | second.owned} == {"t"}


def test_a_recreated_topic_is_another_topic() -> None:
    broker = ConsumerBroker()
    member = Member(broker, "a")
    stabilize((member,))
    epoch = member.epoch
    broker.catalogue.set("t", 4, again=True)
    stabilize((member,))
    assert len(member.owned) == 4
    assert member.epoch > epoch


def test_a_change_of_leaders_computes_no_targets() -> None:
    broker = ConsumerBroker()
    first, second = two(broker)
    view = broker.groups.topic_resolver.topics()
    broker.catalogue.set("t", 4)  # the same topic with other partition states
    assert broker.groups.topic_resolver.topics() is view
    before = broker.stored_bytes()
    stabilize((first, second))
    assert broker.stored_bytes() == before


def test_an_expression_follows_the_topics_and_matches_the_brokers_own_too() -> None:
    broker = ConsumerBroker(Catalogue(ta=1, tb=1, u=1))
    broker.catalogue.set("t__internal", 1, internal=True)
    member = Member(broker, "a", None, regex="^t.*")
    stabilize((member,))
    assert member.owned == {("ta", 0), ("tb", 0), ("t__internal", 0)}
    broker.catalogue.set("tc", 1)
    stabilize((member,))
    assert member.owned == {("ta", 0), ("tb", 0), ("tc", 0), ("t__internal", 0)}
    again = broker.restarted()
    member.broker = again
    again.catalogue.set("td", 1)
    stabilize((member,))
    assert ("td", 0) in member.owned


@pytest.mark.parametrize("regex", ["(t", "(((a{100}){100}){100})", "t(?=a)", "a" * 5_000, "(.*){200}" * 3])
def test_what_is_no_expression_of_re2_is_refused_with_the_reason(regex: str) -> None:
    broker = ConsumerBroker()
    member = Member(broker, "a", None, regex=regex)
    answer = broker.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, **member.request())
    assert answer.error_code == INVALID_REGEX
    assert answer.error_message
    assert "g" not in broker.groups.store.entries


def test_an_expression_matches_whole_names() -> None:
    broker = ConsumerBroker(Catalogue(t=1, ta=1, at=1))
    member = Member(broker, "a", None, regex="t")
    stabilize((member,))
    assert member.owned == {("t", 0)}


def test_an_expression_that_would_take_for_ever_elsewhere_takes_no_time() -> None:
    broker = ConsumerBroker(Catalogue(**{"a" * 200: 1, "t": 1}))
    member = Member(broker, "a", None, regex="(a+)+b|t")
    stabilize((member,))
    assert member.owned == {("t", 0)}


# Static members


def test_a_static_member_that_comes_back_has_its_partitions_again_and_disturbs_no_member() -> None:
    broker = ConsumerBroker()
    first, second = Member(broker, "a", instance_id="i1"), Member(broker, "b", instance_id="i2")
    stabilize((first, second))
    had, epoch = first.owned, second.epoch
    assert Member(broker, "c", instance_id="i1").beat() == UNRELEASED_INSTANCE
    assert first.leave() == 0
    assert second.beat() == 0
    assert second.epoch == epoch
    back = Member(broker, "a2", instance_id="i1")
    stabilize((back, second))
    assert back.owned == had


# Offsets


def test_offsets_are_committed_in_the_members_epoch_only() -> None:
    broker = ConsumerBroker()
    first, second = two(broker)
    assert first.commit(5) == 0
    assert first.commit(6, epoch=first.epoch - 1) == STALE_EPOCH
    assert first.commit(6, epoch=first.epoch + 1) == STALE_EPOCH
    assert code(broker.begin(ApiKey.OFFSET_COMMIT, **commit_fields(7))) == UNKNOWN_MEMBER
    second.leave()
    first.leave()
    assert code(broker.begin(ApiKey.OFFSET_COMMIT, **commit_fields(7))) == 0  # nobody is in it


def test_a_member_reads_offsets_in_its_epoch_and_anybody_else_may_as_well() -> None:
    broker = ConsumerBroker()
    first, _ = two(broker)
    first.commit(5)

    def fetched(member_id: str | None, epoch: int) -> int:
        group = {"group_id": "g", "member_id": member_id, "member_epoch": epoch, "topics": None}
        return int(broker.call(ApiKey.OFFSET_FETCH, 9, groups=[group]).groups[0].error_code)

    assert fetched(first.member_id, first.epoch) == 0
    assert fetched(first.member_id, first.epoch + 1) == STALE_EPOCH
    assert fetched("x", 1) == UNKNOWN_MEMBER
    assert fetched(None, -1) == 0
    assert broker.committed() == {("t", 0): 5}


def test_offsets_of_topics_that_members_read_are_kept_and_those_of_an_empty_group_expire() -> None:
    broker = ConsumerBroker(Catalogue(t=1, u=1), offsets_retention_ms=60_000)
    member = Member(broker, "a")
    stabilize((member,))
    member.commit(5)
    member.commit(5, topic="u")
    for _ in range(5):
        broker.scheduler.pass_time(20_000)
        member.beat()
    assert broker.scheduler.run(broker.groups.offset_expiration.expire()) == 1  # nobody reads u
    assert broker.committed() == {("t", 0): 5}
    member.leave()
    broker.scheduler.pass_time(30_000)
    assert (
        broker.scheduler.run(broker.groups.offset_expiration.expire()) == 0
    )  # it has no members for half a minute only
    broker.scheduler.pass_time(40_000)
    assert broker.scheduler.run(broker.groups.offset_expiration.expire()) == 1
    assert "g" not in broker.groups.store.entries
    assert broker.restarted().describe_consumer().error_code == GROUP_NOT_FOUND


# Looking at groups, deleting them


def test_groups_of_both_kinds_are_listed_and_described_each_by_its_own_api() -> None:
    broker = ConsumerBroker()
    broker.stable()
    modern = Member(broker, "a", ("t",), group_id="m")
    stabilize((modern,))

    def listed(**filters: Any) -> list[tuple[str, str, str, str]]:
        answer = broker.call(ApiKey.LIST_GROUPS, **({"states_filter": [], "types_filter": []} | filters))
        return [
            (each.group_id, each.group_type, each.protocol_type, each.group_state) for each in answer.groups
        ]

    classic, consumer = ("g", "classic", "consumer", "Stable"), ("m", "consumer", "consumer", "Stable")
    assert listed() == [classic, consumer]
    assert listed(types_filter=["Consumer"]) == [consumer]
    assert listed(types_filter=["Classic"]) == [classic]
    assert listed(types_filter=["Share"]) == []
    assert listed(states_filter=["stable"], types_filter=["consumer", "classic"]) == [classic, consumer]
    assert broker.call(ApiKey.DESCRIBE_GROUPS, groups=["m"]).groups[0].error_code == GROUP_NOT_FOUND
    old = broker.call(ApiKey.DESCRIBE_GROUPS, 5, groups=["m"]).groups[0]
    assert (old.error_code, old.group_state) == (0, "Dead")
    assert broker.describe_consumer("g").error_code == GROUP_NOT_FOUND
    assert broker.describe_consumer("nobody").error_code == GROUP_NOT_FOUND
    found = broker.describe_consumer("m")
    assert (found.group_state, found.assignor_name, found.assignment_epoch) == ("Stable", "uniform", 1)
    (member,) = found.members
    assert (member.member_id, member.member_epoch, member.member_type) == ("a", 1, 1)
    assert member.client_host == "/10.0.0.1"
    assert member.subscribed_topic_names == ["t"]
    for shown in (member.assignment, member.target_assignment):
        ((topic, partitions),) = [(each.topic_name, each.partitions) for each in shown.topic_partitions]
        assert (topic, partitions) == ("t", [0, 1, 2, 3])


def test_a_group_that_is_named_a_thousand_times_is_described_once() -> None:
    broker = ConsumerBroker()
    broker.stable()
    stabilize((Member(broker, "a", ("t",), group_id="m"),))
    named = ["m", "g", "nobody"] * 1_000
    for api, field in ((ApiKey.CONSUMER_GROUP_DESCRIBE, "group_ids"), (ApiKey.DESCRIBE_GROUPS, "groups")):
        fields: dict[str, Any] = {field: named}
        found = broker.call(api, **fields).groups
        assert [each.group_id for each in found] == ["m", "g", "nobody"]


def test_who_reads_what_and_how_far_is_shown_for_consumer_groups() -> None:
    broker = ConsumerBroker()
    member = Member(broker, "a")
    stabilize((member,))
    member.commit(40)
    lags = {each.partition: (each.lag, each.member_id) for each in broker.groups.inspection.lag("g")}
    assert lags == {0: (60, "a"), 1: (None, "a"), 2: (None, "a"), 3: (None, "a")}


def test_a_group_is_deleted_when_it_has_no_member_and_stays_deleted() -> None:
    broker = ConsumerBroker()
    first, second = two(broker)
    first.commit(5)

    def delete() -> int:
        return int(broker.call(ApiKey.DELETE_GROUPS, groups_names=["g"]).results[0].error_code)

    assert delete() == NON_EMPTY
    first.leave()
    second.leave()
    assert broker.describe_consumer().group_state == "Empty"
    broker.home.refuses = StorageError("the disk is full")
    assert delete() != 0
    broker.home.refuses = None
    assert delete() == 0
    again = broker.restarted()
    assert again.committed() == {}
    assert "g" not in again.groups.store.entries


# Starts, moves, and what cannot be written


def test_members_carry_on_after_a_restart_and_their_sessions_begin_again() -> None:
    broker = ConsumerBroker(consumer_session_timeout_ms=10_000)
    first, second = two(broker)
    had = first.owned, second.owned, first.epoch
    again = broker.restarted()
    assert again.stored()[0] == broker.stored()[0]
    first.broker = second.broker = again
    before = again.stored_bytes()
    stabilize((first, second))
    assert (first.owned, second.owned, first.epoch) == had
    assert again.stored_bytes() == before
    again.scheduler.pass_time(8_000)
    assert first.beat() == 0
    again.scheduler.pass_time(2_500)  # the other one never came back
    assert second.beat() == UNKNOWN_MEMBER
    stabilize((first,))
    assert len(first.owned) == 4


@pytest.mark.parametrize("nth", range(10))
@pytest.mark.parametrize("how", ["append", "commit"])
def test_whatever_cannot_be_written_the_group_goes_on_as_it_is_stored(nth: int, how: str) -> None:
    """The n-th append of a history fails, or its commit does; then all is well again."""
    broker = ConsumerBroker(Catalogue(t=4, u=3))
    members = [Member(broker, name, ("t", "u")) for name in "abc"]
    home, appends = broker.home, iter(range(1_000_000))
    append = home.append

    def failing(
        batch: bytes, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> AppendResult:
        number = next(appends)
        if number == nth and how == "append":
            raise StorageError("no room")
        home.holds = number == nth
        appended = append(batch, internal=internal, urgent=urgent)
        if number == nth:
            home.holds = False
            broker.scheduler.call_soon(refuse_commit)
        return appended

    def refuse_commit() -> None:
        for _, promise in home.waits:
            if not promise.done():
                promise.set_exception(NotEnoughReplicas("too few"))
        home.sync()

    home.append = failing
    failed = 0
    for member in members:
        for each in members[: members.index(member) + 1]:
            each.beat()
            failed += each.error not in (0, UNKNOWN_MEMBER, FENCED_EPOCH)
            check_alone(members)
            machine, stored = broker.stored() if "g" in broker.groups.store.entries else ({}, {})
            assert machine == stored
    if members[0].leave() not in (0, UNKNOWN_MEMBER):
        assert members[0].leave() in (0, UNKNOWN_MEMBER)
    stabilize(members[1:])
    assert failed <= 1
    assert {place for each in members[1:] for place in each.owned} == {
        *(("t", index) for index in range(4)),
        *(("u", index) for index in range(3)),
    }
    machine, stored = broker.stored()
    assert machine == stored
    again = broker.restarted()
    assert again.stored()[0] == machine


def test_the_append_that_fails_is_among_those_of_the_history_above() -> None:
    """Else the test above would prove nothing for its larger numbers."""
    broker = ConsumerBroker(Catalogue(t=4, u=3))
    members = [Member(broker, name, ("t", "u")) for name in "abc"]
    for member in members:
        for each in members[: members.index(member) + 1]:
            each.beat()
    stabilize(members)
    assert len(broker.home.stored) >= 7


def test_an_assignor_that_fails_costs_its_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = ConsumerBroker()
    first = Member(broker, "a")
    stabilize((first,))
    machine = broker.stored()[0]
    assignor = broker.groups._factory.assignors["uniform"]
    monkeypatch.setattr(type(assignor), "assign", lambda *_: 1 // 0)
    assert Member(broker, "b").beat() == 15
    assert broker.stored()[0] == machine
    monkeypatch.undo()
    second = Member(broker, "b")
    stabilize((first, second))
    assert len(second.owned) == 2


def test_assignors_are_loaded_by_name_and_what_cannot_be_is_reported_at_the_start() -> None:
    assert list(load_assignors(("range", " uniform ", "range"))) == ["range", "uniform"]
    for names in ((), ("mine",)):
        with pytest.raises(ConfigError, match="group_consumer_assignors"):
            load_assignors(names)
