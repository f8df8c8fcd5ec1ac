"""Consumer groups whose partitions the broker assigns (KIP-848), as confluent-kafka's members live them.

Members ask for them with `group.protocol=consumer`. A group's own settings make its members come often, so that nobody
waits for the five seconds between two heartbeats.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from support.machine import scaled
from support.present import present
from support.process import served
from support.waiting import wait_until
from system.interop.clients import QUIET, Item, confluent_write
from system.interop.conftest import ARGUMENTS, create_topic
from system.interop.members import (
    COMMIT_MS,
    MEMBERS,
    POLL_S,
    ConfluentMember,
    Member,
    wait_for_shares,
    wait_for_values,
)
from system.interop.test_groups import committed, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PARTITIONS = 4
HEARTBEAT_MS = 200
SESSION_MS = 6_000
INTERVAL, SESSION = "consumer.heartbeat.interval.ms", "consumer.session.timeout.ms"
DEADLINE_S = 15.0
MOVED_S_MAX = 1.0


class NextMember(Member):
    """A member of the new protocol. `topic` may be an expression; what it holds is kept by topic in `places`."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str, **options: Any) -> None:
        super().__init__(bootstrap_servers, group, topic, **options)
        self.places: frozenset[tuple[str, int]] = frozenset()
        self.lost = 0

    def _run(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": self.group,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": COMMIT_MS,
                "fetch.wait.max.ms": 50,
                "reconnect.backoff.max.ms": 200,
                **QUIET,
                **self.options,
            }
        )
        consumer.subscribe([self.topic], on_assign=self._given, on_revoke=self._taken, on_lost=self._dropped)
        try:
            while not self.stopping.is_set():
                message = consumer.poll(POLL_S)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    self.received.append(
                        (present(message.partition()), present(message.offset()), message.value())
                    )
                elif error.fatal() or error.code() == KafkaError._FATAL:
                    raise KafkaException(
                        consumer.fatal_error() if hasattr(consumer, "fatal_error") else error
                    )
        finally:
            consumer.close()

    def _given(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._hold(self.places | {(one.topic, one.partition) for one in partitions})

    def _taken(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._hold(self.places - {(one.topic, one.partition) for one in partitions})

    def _dropped(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += 1
        self._taken(consumer, partitions)

    def _hold(self, places: frozenset[tuple[str, int]]) -> None:
        self.places = places
        self._assigned(index for _, index in places)


@pytest.fixture
def members() -> Iterator[ExitStack]:
    """Where a test registers its members, so that they leave even when it fails."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    return make_topic(PARTITIONS)


@pytest.fixture
def group(bootstrap_servers: str, unique: str) -> str:
    """A group whose members come often."""
    often(bootstrap_servers, unique)
    return unique


def often(bootstrap_servers: str, group: str) -> None:
    alter(bootstrap_servers, group, {INTERVAL: HEARTBEAT_MS, SESSION: SESSION_MS})


def alter(bootstrap_servers: str, group: str, settings: dict[str, int]) -> None:
    changes = [
        ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=changes)
    admin = admin_of(bootstrap_servers)
    admin.incremental_alter_configs([resource])[resource].result(scaled(15))


def admin_of(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})


def enter(members: ExitStack, member: Member) -> Any:
    members.callback(member.stopping.set)
    return member.join()


def wait_for_places(members: list[NextMember], places: set[tuple[str, int]]) -> None:
    def held() -> bool:
        for member in members:
            if member.failure is not None:
                raise member.failure
        return sorted(place for member in members for place in member.places) == sorted(places)

    wait_until(held, DEADLINE_S, f"{places} held, not {[sorted(one.places) for one in members]}")


@pytest.mark.row("G2")
def test_members_share_the_partitions_and_nothing_is_left_out_or_read_twice(
    bootstrap_servers: str, topic: str, group: str, members: ExitStack
) -> None:
    values = publish(bootstrap_servers, topic, "alone")
    first = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([first], 4)
    wait_for_values([first], values)
    second = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([first, second], 2, 2)
    stayed = first.assignment
    assert all(share >= stayed for share in first.assignments[first.assignments.index(frozenset(range(4))) :])
    values |= publish(bootstrap_servers, topic, "both")
    wait_for_values([first, second], values)
    third = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([first, second, third], 1, 1, 2)
    second.leave()
    wait_for_shares([first, third], 2, 2)
    values |= publish(bootstrap_servers, topic, "others")
    wait_for_values([first, second, third], values)
    got = [value for member in (first, second, third) for value in member.values]
    assert len(got) == len(set(got))
    third.leave()
    first.leave()
    assert committed(bootstrap_servers, group, topic) == [30] * 4


@pytest.mark.row("G2", "G3")
def test_a_killed_member_costs_its_session_and_no_record(
    bootstrap_servers: str, topic: str, group: str, members: ExitStack
) -> None:
    program = (
        "import sys; from confluent_kafka import Consumer\n"
        "c = Consumer({'bootstrap.servers': sys.argv[1], 'group.id': sys.argv[2], 'group.protocol': 'consumer',"
        " 'auto.offset.reset': 'earliest'})\n"
        "c.subscribe([sys.argv[3]], on_assign=lambda c, p: print(len(p), flush=True))\n"
        "while True: c.poll(0.1)\n"
    )
    command = [sys.executable, "-c", program, bootstrap_servers, group, topic]
    dying = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"4\n"
        living = enter(members, NextMember(bootstrap_servers, group, topic))
        wait_for_shares([living], 2)
    finally:
        dying.kill()
        killed_s = time.monotonic()
        dying.communicate()
    values = publish(bootstrap_servers, topic, "after")
    wait_for_shares([living], 4)
    wait_for_values([living], values)
    assert time.monotonic() - killed_s <= scaled(SESSION_MS / 1000 + MOVED_S_MAX)
    living.leave()


@pytest.mark.row("G3")
def test_with_the_settings_as_they_are_partitions_move_within_a_second(
    bootstrap_servers: str, topic: str, unique: str, members: ExitStack
) -> None:
    """Members join and leave; each figure is the middle one of three, as the machine may have other things to do."""
    first = enter(members, NextMember(bootstrap_servers, unique, topic))
    wait_for_shares([first], 4)
    joined, left = [], []
    for _ in range(3):
        began = time.monotonic()
        second = enter(members, NextMember(bootstrap_servers, unique, topic))
        wait_for_shares([first, second], 2, 2)
        joined.append(time.monotonic() - began)
        began = time.monotonic()
        second.leave()
        wait_for_shares([first], 4)
        left.append(time.monotonic() - began)
    first.leave()
    assert sorted(joined)[1] <= scaled(MOVED_S_MAX), joined
    assert sorted(left)[1] <= scaled(MOVED_S_MAX), left


@pytest.mark.row("G2", "L5")
@pytest.mark.parametrize("way", [pytest.param("stop", marks=pytest.mark.full), "kill"])
def test_members_go_on_after_a_restart_of_the_broker_without_losing_a_partition(
    tmp_path: Path, members: ExitStack, way: str
) -> None:
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        topic = create_topic(broker.bootstrap_servers, "restarted", PARTITIONS)
        often(broker.bootstrap_servers, "g")
        pair = [enter(members, NextMember(broker.bootstrap_servers, "g", topic)) for _ in range(2)]
        wait_for_shares(pair, 2, 2)
        values = publish(broker.bootstrap_servers, topic, "before")
        wait_for_values(pair, values)
        wait_until(lambda: committed(broker.bootstrap_servers, "g", topic) == [10] * 4, DEADLINE_S, "commits")
        seen = [len(member.assignments) for member in pair]
        if way == "stop":
            assert broker.stop() == 0
        else:
            broker.kill()
        broker.start()
        values |= publish(broker.bootstrap_servers, topic, "after")
        wait_for_values(pair, values)
        assert [len(member.assignments) for member in pair] == seen  # nobody had to join anew
        assert [member.lost for member in pair] == [0, 0]
        for member in pair:
            member.leave()
        assert committed(broker.bootstrap_servers, "g", topic) == [20] * 4
        got = [value for member in pair for value in member.values]
        assert len(got) == len(set(got))
        assert "Traceback" not in broker.text()


@pytest.mark.row("G2")
def test_an_expression_subscribes_to_what_comes_later(
    bootstrap_servers: str, group: str, members: ExitStack
) -> None:
    names = [create_topic(bootstrap_servers, f"{group}-wide-{n}", 2) for n in range(2)]
    create_topic(bootstrap_servers, f"{group}-other", 2)
    pair = [enter(members, NextMember(bootstrap_servers, group, f"^{group}-wide.*")) for _ in range(2)]
    places = {(name, index) for name in names for index in range(2)}
    wait_for_places(pair, places)
    later = create_topic(bootstrap_servers, f"{group}-wide-later", 3)
    wait_for_places(pair, places | {(later, index) for index in range(3)})
    for member in pair:
        member.leave()


@pytest.mark.row("G2")
def test_the_broker_refuses_an_expression_or_an_assignor_that_it_does_not_know(
    bootstrap_servers: str, topic: str, group: str
) -> None:
    wrong = {
        "^(" + topic + "){2000}": {},  # librdkafka takes it, RE2 does not
        topic: {"group.remote.assignor": "mine"},
    }
    for subscription, options in wrong.items():
        member = NextMember(bootstrap_servers, group, subscription, **options)
        member.join()
        try:
            wait_until(lambda one=member: one.failure is not None, DEADLINE_S, "the client is told")
        finally:
            member.stopping.set()
        assert isinstance(member.failure, KafkaException)


@pytest.mark.row("G2")
def test_a_static_member_finds_its_partitions_again_and_the_others_notice_nothing(
    bootstrap_servers: str, topic: str, group: str, members: ExitStack
) -> None:
    first = enter(members, NextMember(bootstrap_servers, group, topic, **{"group.instance.id": "one"}))
    second = enter(members, NextMember(bootstrap_servers, group, topic, **{"group.instance.id": "two"}))
    wait_for_shares([first, second], 2, 2)
    share, noticed = first.assignment, len(second.assignments)
    first.leave()
    values = publish(bootstrap_servers, topic, "away")
    again = enter(members, NextMember(bootstrap_servers, group, topic, **{"group.instance.id": "one"}))
    wait_for_values([second, again], values)
    assert again.assignment == share
    assert len(second.assignments) == noticed
    again.leave()
    second.leave()


@pytest.mark.row("G2")
@pytest.mark.parametrize(("assignor", "aligned"), [("range", True), ("uniform", False)])
def test_members_choose_the_assignor(
    bootstrap_servers: str,
    make_topic: Callable[..., str],
    group: str,
    members: ExitStack,
    assignor: str,
    aligned: bool,
) -> None:
    topics = [make_topic(3), make_topic(3)]
    expression = "^(" + "|".join(topics) + ")$"
    options = {"group.remote.assignor": assignor}
    pair = [enter(members, NextMember(bootstrap_servers, group, expression, **options)) for _ in range(2)]
    wait_for_places(pair, {(topic, index) for topic in topics for index in range(3)})
    wait_until(lambda: all(member.places for member in pair), DEADLINE_S, "both read")
    by_topic = [[{i for name, i in member.places if name == topic} for topic in topics] for member in pair]
    # range gives the same indexes of every topic to one member; uniform gives everybody as many
    assert all(first == second for first, second in by_topic) == aligned
    assert sorted(len(member.places) for member in pair) == ([2, 4] if aligned else [3, 3])
    for member in pair:
        member.leave()


CLASSIC: dict[str, dict[str, Any]] = {
    "confluent-kafka cooperative": {"partition.assignment.strategy": "cooperative-sticky"},
    "confluent-kafka range": {"partition.assignment.strategy": "range"},
    "kafka-python": {},
    "aiokafka": {},
}


@pytest.mark.row("G2")
@pytest.mark.parametrize("client", CLASSIC)
def test_a_group_changes_its_protocol_member_by_member_and_back(
    bootstrap_servers: str, topic: str, group: str, members: ExitStack, client: str
) -> None:
    make = MEMBERS.get(client, ConfluentMember)
    classic = enter(members, make(bootstrap_servers, group, topic, **CLASSIC[client]))
    wait_for_shares([classic], 4)
    values = publish(bootstrap_servers, topic, "classic")
    wait_for_values([classic], values)
    following = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([classic, following], 2, 2)
    values |= publish(bootstrap_servers, topic, "both")
    wait_for_values([classic, following], values)
    assert kind_of(bootstrap_servers, group) == ConsumerGroupType.CONSUMER
    classic.leave()
    wait_for_shares([following], 4)
    classic_again = enter(members, make(bootstrap_servers, group, topic, **CLASSIC[client]))
    wait_for_shares([classic_again, following], 2, 2)
    following.leave()
    wait_for_shares([classic_again], 4)
    assert kind_of(bootstrap_servers, group) == ConsumerGroupType.CLASSIC
    values |= publish(bootstrap_servers, topic, "again")
    wait_for_values([classic, classic_again, following], values)
    classic_again.leave()
    assert committed(bootstrap_servers, group, topic) == [30] * 4


@pytest.mark.row("G2")
@pytest.mark.parametrize("client", ["confluent-kafka range", "kafka-python", "aiokafka"])
def test_a_classic_member_commits_what_it_has_done_when_the_others_are_gone(
    bootstrap_servers: str,
    topic: str,
    group: str,
    members: ExitStack,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It commits only when it has to join again, in the epoch it had: refused, it would read all that twice."""
    monkeypatch.setattr("system.interop.members.COMMIT_MS", 60_000)
    make = MEMBERS.get(client, ConfluentMember)
    following = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([following], 4)
    classic = enter(members, make(bootstrap_servers, group, topic, **CLASSIC[client]))
    wait_for_shares([classic, following], 2, 2)
    values = publish(bootstrap_servers, topic, "both")
    wait_for_values([classic, following], values)
    assert classic.values
    following.leave()
    wait_for_shares([classic], 4)
    values |= publish(bootstrap_servers, topic, "alone")
    wait_for_values([classic, following], values)
    classic.leave()
    got = [*classic.values, *following.values]
    assert len(got) == len(set(got))
    assert committed(bootstrap_servers, group, topic) == [20] * 4


def kind_of(bootstrap_servers: str, group: str) -> ConsumerGroupType:
    admin = admin_of(bootstrap_servers)
    listed = admin.list_consumer_groups().result(scaled(15))
    assert not listed.errors
    return next(each.type for each in listed.valid if each.group_id == group)


@pytest.mark.row("G2")
def test_administration_sees_the_group_and_changes_its_offsets(
    bootstrap_servers: str, topic: str, group: str, members: ExitStack
) -> None:
    admin = admin_of(bootstrap_servers)
    member = enter(members, NextMember(bootstrap_servers, group, topic))
    wait_for_shares([member], 4)
    described = admin.describe_consumer_groups([group])[group].result(scaled(15))
    assert described.state == ConsumerGroupState.STABLE
    assert described.type == ConsumerGroupType.CONSUMER
    (shown,) = described.members
    assert {one.partition for one in shown.assignment.topic_partitions} == set(range(4))
    with pytest.raises(KafkaException) as refused:
        admin.delete_consumer_groups([group])[group].result(scaled(15))
    assert refused.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
    member.leave()
    described = admin.describe_consumer_groups([group])[group].result(scaled(15))
    assert described.state == ConsumerGroupState.EMPTY
    confluent_write(bootstrap_servers, topic, [Item(None, b"one")], partition=0)
    admin.delete_consumer_groups([group])[group].result(scaled(15))
    assert group not in {each.group_id for each in admin.list_consumer_groups().result(scaled(15)).valid}
