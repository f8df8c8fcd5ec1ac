"""Client as member of consumer groups whose assignment the broker computes (KIP-848). Tests that apply to classic
groups as well are in `test_client_groups`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from component.test_client_groups import Reader, die, fill
from mansio.client import TopicPartition
from mansio.client.group import consumer_member
from mansio.client.group.classic_member import ClassicMember
from mansio.client.group.consumer_member import ConsumerMember
from mansio.errors import (
    ClientFailed,
    InvalidRegularExpression,
    InvalidRequest,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from mansio.net.cluster import check_top_level_error
from mansio.net.connection import Connection
from mansio.wire.api_versions import ApiKey
from support.client_fixtures import QUICK_MEMBER, broker_in, connected, run, until
from support.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.row("G2")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("next")) as started:
        yield started


def membership(reader: Reader) -> ConsumerMember:
    part = reader.consumer._membership
    assert part is not None
    assert isinstance(part.membership, ConsumerMember)
    return part.membership


def test_group_changes_its_protocol_member_by_member_and_back(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, changing=4) as client:

            async def kind() -> str:
                return (await client.admin.describe_group("changing")).group_type

            old = Reader(client, "changing", group_protocol="classic")
            await fill(client, "changing", 4, 10)
            await until(lambda: len(old.seen) == 40)
            assert await kind() == "classic"
            new = Reader(client, "changing")
            await until(lambda: len(old.partitions) == len(new.partitions) == 2)
            described = await client.admin.describe_group("changing")
            assert described.group_type == "consumer"
            assert sorted(member.protocol for member in described.members) == ["classic", "consumer"]
            await fill(client, "changing", 4, 10, first=10)
            await until(lambda: len(old.seen) + len(new.seen) == 80)
            await old.stop()
            await until(lambda: len(new.partitions) == 4)
            again = Reader(client, "changing", group_protocol="classic")
            await until(lambda: len(again.partitions) == len(new.partitions) == 2)
            await new.stop()
            await until(lambda: len(again.partitions) == 4)
            assert await kind() == "classic"
            await fill(client, "changing", 4, 10, first=20)
            await until(lambda: len(old.seen) + len(new.seen) + len(again.seen) == 120)
            assert len({*old.seen, *new.seen, *again.seen}) == 120
            await again.stop()

    run(scenario)


def test_classic_protocol_is_used_with_an_old_broker(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    negotiate = Connection._negotiate

    async def with_an_old_broker(connection: Connection) -> None:
        await negotiate(connection)
        connection.versions = {
            key: offered
            for key, offered in connection.versions.items()
            if key not in (ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.CONSUMER_GROUP_DESCRIBE)
        }

    monkeypatch.setattr(Connection, "_negotiate", with_an_old_broker)

    async def scenario() -> None:
        async with connected(broker, old=2) as client:
            reader = Reader(client, "old")
            await fill(client, "old", 2, 5)
            await until(lambda: len(reader.seen) == 10)
            part = reader.consumer._membership
            assert part is not None
            assert isinstance(part.membership, ClassicMember)
            described = await client.admin.describe_group("old")
            assert (described.group_type, len(described.members)) == ("classic", 1)
            wide = client.consume("^old", group="wide")
            with pytest.raises(UnsupportedVersion):
                await anext(wide)
            await reader.stop()
            assert (await client.admin.group_lag("old"))[TopicPartition("old", 0)].lag == 0

    run(scenario)


@pytest.mark.row("G4")
def test_reading_to_the_end_waits_for_partitions_of_a_dead_member(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, inherited=2, enough=1) as client:
            how: dict[str, Any] = {"to_end": True, **QUICK_MEMBER}
            only = Reader(client, "enough")
            await until(lambda: len(only.partitions) == 1)
            excess = client.consume("enough", group="enough", **how)
            assert [message async for message in excess] == []  # nothing is left for it
            await only.stop()
            first = Reader(client, "inherited")
            await until(lambda: len(first.partitions) == 2)
            die(first)
            await fill(client, "inherited", 2, 5)
            heir = client.consume("inherited", group="inherited", **how)
            # A member whose session times out on a busy machine reads records again.
            read = {(message.partition, message.offset) async for message in heir}
            assert sorted(read) == [(partition, offset) for partition in range(2) for offset in range(5)]
            await first.stop()

    run(scenario)


@pytest.mark.row("G1")
def test_crashed_static_member_waits_for_its_session_timeout_and_rejoins(
    broker: mansio.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with connected(broker, crashed=4) as client:
            # Long enough for the new member to find the session of the old one on a busy machine.
            await client.admin.alter_group_config("crashed", {"consumer.session.timeout.ms": "6000"})
            other = Reader(client, "crashed", instance_id="b")
            first = Reader(client, "crashed", instance_id="a")
            await until(lambda: len(first.partitions) == len(other.partitions) == 2)
            die(first)
            back = Reader(client, "crashed", instance_id="a")
            await until(lambda: len(back.partitions) == len(other.partitions) == 2)
            assert "waiting for its session to time out" in caplog.text
            for reader in (back, other, first):
                await reader.stop()

    run(scenario)


@pytest.mark.row("G1")
def test_second_live_member_with_the_same_instance_id_is_refused(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_member, "INSTANCE_RELEASE_WAIT_MS_MAX", 100)

    async def scenario() -> None:
        async with connected(broker, double=1) as client:
            first = Reader(client, "double", instance_id="a")
            await until(lambda: len(first.partitions) == 1)
            second = Reader(client, "double", instance_id="a")
            with pytest.raises(UnreleasedInstanceId):
                await second.task
            assert len(first.partitions) == 1
            await first.stop()

    run(scenario)


@pytest.mark.row("G4")
def test_commit_with_a_stale_epoch_is_retried(broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with connected(broker, overtaken=2) as client, mansio.connect(broker.address) as other:
            await fill(client, "overtaken", 2, 5)
            first = Reader(client, "overtaken", auto_commit=False)
            await until(lambda: len(first.seen) == 10)
            held, goes_on = asyncio.Event(), asyncio.Event()
            member = membership(first)
            ask = member._cluster.request_coordinator

            async def held_up(group: str, api_key: int, *given: Any, **how: Any) -> Any:
                answer = await ask(group, api_key, *given, **how)
                if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT and answer.member_epoch == 2:
                    held.set()
                    await goes_on.wait()
                return answer

            monkeypatch.setattr(member._cluster, "request_coordinator", held_up)
            second = Reader(other, "overtaken", auto_commit=False)
            await held.wait()
            assert member.epoch == 1
            committing = asyncio.ensure_future(first.consumer.commit())
            await until(lambda: len(second.partitions) == 1)
            assert not committing.done()
            goes_on.set()
            await committing
            assert member.epoch == 2
            lags = await client.admin.group_lag("overtaken")
            assert [lags[one].lag for one in first.consumer.assignment()] == [0]
            await first.stop()
            await second.stop()

    run(scenario)


@pytest.mark.row("G3")
def test_fenced_member_loses_its_partitions_and_rejoins_with_its_id(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, fenced=2) as client:
            lost: list[Any] = []
            reader = Reader(client, "fenced", on_lost=lost.append, auto_commit=False)
            await fill(client, "fenced", 2, 5)
            await until(lambda: len(reader.seen) == 10)
            member = membership(reader)
            name = member.member_id
            await client._cluster.request_coordinator(
                "fenced",
                ApiKey.CONSUMER_GROUP_HEARTBEAT,
                {"group_id": "fenced", "member_id": name, "member_epoch": -1, "topic_partitions": None},
                check=check_top_level_error,
            )
            await until(lambda: len(reader.seen) == 20)  # nothing was committed: it begins again
            assert lost == [sorted(reader.consumer.assignment())]
            assert member.member_id == name
            await reader.stop()

    run(scenario)


@pytest.mark.row("G3")
def test_slow_revocation_keeps_the_session_and_the_partition(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, farewell=2) as client:
            events: list[str] = []
            goes_on = asyncio.Event()

            async def revoked(partitions: list[TopicPartition]) -> None:
                events.append("asked for")
                await goes_on.wait()
                events.append("given up")

            first = Reader(client, "farewell", on_revoked=revoked)
            await until(lambda: len(first.partitions) == 2)
            second = Reader(client, "farewell", on_assigned=lambda _: events.append("taken"))
            await until(lambda: events == ["asked for"])
            beats: list[int] = []
            member = membership(first)
            ask = member._cluster.request_coordinator

            async def counted(key: str, api_key: int, *given: Any, **how: Any) -> Any:
                answer = await ask(key, api_key, *given, **how)
                if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
                    beats.append(answer.member_epoch)
                return answer

            member._cluster.request_coordinator = counted
            await until(lambda: len(beats) >= 20)  # of both, over more than a session in all
            await fill(client, "farewell", 2, 5)
            await until(lambda: len(first.seen) == 5)  # the one that stays
            assert events == ["asked for"]
            goes_on.set()
            await until(lambda: len(second.seen) == 5)
            assert events == ["asked for", "given up", "taken"]
            await first.stop()
            await second.stop()

    run(scenario)


def test_topic_pattern_includes_topics_created_later(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, wide1=1, wide2=1, narrow=1) as client:
            reader = Reader(client, "^wide.*", group="wide")
            await until(lambda: {topic for topic, _ in reader.consumer.assignment()} == {"wide1", "wide2"})
            await client.admin.create_topic("wide3", partitions=2)
            await until(lambda: len(reader.consumer.assignment()) == 4)
            await fill(client, "wide3", 2, 5)
            await until(lambda: len(reader.seen) == 10)
            (member,) = (await client.admin.describe_group("wide")).members
            assert member.topic_regex == "^wide.*"
            await reader.stop()
            with pytest.raises(InvalidRegularExpression):
                await anext(client.consume("^wide(", group="wrong"))
            with pytest.raises(InvalidRequest, match="needs a group"):
                client.consume("^wide.*")

    run(scenario)


def test_failing_callback_is_raised_by_poll(broker: mansio.Broker) -> None:
    def fail(_: list[TopicPartition]) -> None:
        raise KeyError("the callback failed")

    async def scenario() -> None:
        async with connected(broker, failing=1) as client:
            consumer = client.consume("failing", group="failing", on_assigned=fail, **QUICK_MEMBER)
            with pytest.raises(ClientFailed, match="the callback failed"):
                await anext(consumer)
            await consumer.close()
            assert (await client.admin.describe_group("failing")).members == ()

    run(scenario)


@pytest.mark.full
@pytest.mark.row("L5", "G3")
def test_members_survive_a_broker_restart(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:

        async def scenario() -> None:
            async with mansio.connect(broker.bootstrap_servers) as client:
                await client.admin.create_topic("staying", partitions=4)
                await client.admin.alter_group_config("staying", {"consumer.heartbeat.interval.ms": "100"})
                moved: list[Any] = []
                how: dict[str, Any] = {"on_revoked": moved.append, "auto_commit_interval_ms": 50}
                readers = [Reader(client, "staying", **how) for _ in range(2)]
                await until(lambda: all(len(reader.partitions) == 2 for reader in readers))
                await fill(client, "staying", 4, 10)
                await until(lambda: sum(len(reader.seen) for reader in readers) == 40)
                had, epochs = (
                    [reader.partitions for reader in readers],
                    [membership(r).epoch for r in readers],
                )
                moved.clear()
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                await fill(client, "staying", 4, 10, first=10)
                await until(lambda: sum(len(reader.seen) for reader in readers) == 80)
                assert len({place for reader in readers for place in reader.seen}) == 80
                assert [reader.partitions for reader in readers] == had
                assert [membership(reader).epoch for reader in readers] == epochs
                assert moved == []
                for reader in readers:
                    await reader.stop()
                lags = await client.admin.group_lag("staying")
                assert {lag.lag for lag in lags.values()} == {0}

        run(scenario)
