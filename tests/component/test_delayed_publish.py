"""Publishing with a delay: both clients and the command line, their refusals, and what consumers get."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client.producer import delays, topic_setting_check
from mansio.errors import DelaysNotEnabled, UnknownTopicOrPartition
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio import Message

TOPIC = "reminders"
REFUSAL = "topic 'plain' does not accept delays: mansio topic alter plain -c mansio.delay.enable=true"
FIFTEEN = timedelta(minutes=15)


@pytest.fixture(scope="module")
def shared() -> Iterator[TestBroker]:
    """A broker for the tests that do not move its clock."""
    with TestBroker() as running:
        running.client().admin.create_topic("plain", partitions=1)
        yield running


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=1, config={"mansio.delay.enable": "true"})
        yield running


def visible(broker: TestBroker, topic: str = TOPIC) -> list[Message]:
    with broker.client().consume(mansio.TopicPartition(topic, 0), to_end=True) as consumer:
        return list(consumer)


def ids(messages: list[Message]) -> dict[bytes | None, int]:
    """The id of each delivered record by its value."""
    return {message.value: int(message.header("mansio-delayed-id") or -1) for message in messages}


@pytest.mark.row("D6", "A5")
def test_every_publish_method_of_the_blocking_client_delays(broker: TestBroker) -> None:
    client = broker.client()
    at = datetime.fromtimestamp(broker.clock.time_ms() / 1000, UTC) + FIFTEEN
    results = {b"one": client.publish(TOPIC, b"one", key=b"k", headers={"a": b"1"}, delay=FIFTEEN)}
    results[b"at"] = client.publish(TOPIC, b"at", at=at)
    many = client.publish_many(TOPIC, [b"m0", "m1"], delay=900)
    results |= {b"m%d" % number: stored for number, stored in enumerate(many)}
    records: list[mansio.Publishable] = [
        mansio.OutgoingRecord(b"own", delay=60),
        mansio.OutgoingRecord(b"at2", at=at),
        b"now",
    ]
    *own, now = client.publish_many(TOPIC, records)
    results |= dict(zip((b"own", b"at2"), own, strict=True))
    producer = client.producer()
    results[b"send"] = producer.send(TOPIC, b"send", delay=0.5 * 1800).result()
    assert [message.value for message in visible(broker)] == [b"now"]
    broker.clock.advance(minutes=1)
    assert [message.value for message in visible(broker)] == [b"now", b"own"]
    broker.clock.advance(minutes=14, seconds=1)
    _, *delivered = visible(broker)
    assert ids(delivered) == {value: stored.offset for value, stored in results.items()}
    assert now.offset not in ids(delivered).values()
    one = next(message for message in delivered if message.value == b"one")
    assert (one.key, one.header("a"), one.header(DELAY_HEADER)) == (b"k", b"1", None)


def test_every_publish_method_of_the_asyncio_client_delays(broker: TestBroker) -> None:
    async def publish() -> list[int]:
        async with mansio.connect(broker.bootstrap_servers) as client:
            producer = client.producer()
            stored = [
                await client.publish(TOPIC, b"one", delay=FIFTEEN),
                await (await producer.send(TOPIC, b"two", delay=FIFTEEN)),
                *await producer.publish_many(TOPIC, iter([b"three", b"four"]), delay=FIFTEEN),
                *await asyncio.gather(*(client.publish(TOPIC, b"%d" % n, delay=900) for n in range(50))),
            ]
            return [metadata.offset for metadata in stored]

    offsets = asyncio.run(publish())
    assert visible(broker) == []
    broker.clock.advance(minutes=15, seconds=5)
    assert sorted(ids(visible(broker)).values()) == sorted(offsets)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"delay": 1, "at": datetime.now(UTC)}, "not both"),
        ({"delay": -1}, "not between 0 and 365 days: -1"),
        ({"delay": -0.0001}, "not between"),
        ({"delay": timedelta(microseconds=-1)}, "not between"),
        ({"delay": timedelta(days=365, microseconds=1)}, "not between 0 and 365 days"),
        ({"delay": 1e300}, "not between"),
        ({"delay": float("nan")}, "not between"),
        ({"delay": "15m"}, "not a timedelta or a number of seconds"),
        ({"at": datetime(2026, 12, 1)}, "without time zone"),  # noqa: DTZ001
        ({"at": 1}, "not a datetime"),
        ({"at": datetime.now(UTC) + timedelta(days=366)}, "more than 365 days from now"),
        ({"delay": 1, "headers": {DELIVER_AT_HEADER: b"1"}}, "as an argument or as the header"),
    ],
)
def test_an_invalid_delay_is_refused_before_anything_is_sent(
    shared: TestBroker, arguments: dict[str, Any], reason: str
) -> None:
    client = shared.client()
    before = shared_end(shared)
    producer = client.producer()
    calls: list[Any] = [client.publish, producer.publish, producer.send]
    for call in calls:
        with pytest.raises(ValueError, match=reason) as raised:
            call("plain", b"x", **arguments)
        assert "\n" not in str(raised.value)
    record = mansio.OutgoingRecord(
        b"x",
        headers=tuple(arguments.get("headers", {}).items()),
        delay=arguments.get("delay"),
        at=arguments.get("at"),
    )
    with pytest.raises(ValueError, match=reason):
        client.publish_many("plain", [record])
    assert shared_end(shared) == before


def shared_end(broker: TestBroker) -> int:
    partition = mansio.TopicPartition("plain", 0)
    return broker.client().admin.list_offsets([partition], "latest")[partition].offset


def test_no_delay_is_shorter_than_the_given_one() -> None:
    for given in (timedelta(microseconds=1), 1e-6, timedelta(milliseconds=1), 0.001):
        assert delays.with_delay_header(None, given, None) == [(DELAY_HEADER, b"1")]
    at = datetime.fromtimestamp(1_700_000_000, UTC)
    for moment, value in (
        (at, b"1700000000000"),
        (at + timedelta(microseconds=1), b"1700000000001"),
        (at - timedelta(days=36_500), b"0"),
    ):
        assert delays.with_delay_header(None, None, moment) == [(DELIVER_AT_HEADER, value)]


def test_a_topic_without_the_setting_is_refused_by_name_by_both_clients(shared: TestBroker) -> None:
    client = shared.client()
    before = shared_end(shared)
    producer = client.producer()
    calls: list[Any] = [client.publish, producer.publish, producer.send]
    for call in calls:
        with pytest.raises(DelaysNotEnabled) as raised:
            call("plain", b"x", delay=1)
        assert str(raised.value) == REFUSAL
    with pytest.raises(DelaysNotEnabled):
        client.publish_many("plain", [b"x"], delay=1)

    async def publish() -> None:
        async with mansio.connect(shared.bootstrap_servers) as other:
            attempts = (other.publish("plain", b"x", delay=1) for _ in range(20))
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            assert {str(outcome) for outcome in outcomes} == {REFUSAL}
            assert len({id(outcome) for outcome in outcomes}) == 20

    asyncio.run(publish())
    assert shared_end(shared) == before


def test_an_unknown_topic_is_no_topic_without_delays() -> None:
    with TestBroker(auto_create_topics_enable=False) as broker:
        client = broker.client(request_timeout_ms=2000)
        wrapper: Any = client
        wrapper._original._cluster.topic_wait_ms = 0
        with pytest.raises(UnknownTopicOrPartition):
            client.publish("absent", b"x", delay=1)


def test_the_setting_is_asked_once_and_its_change_is_noticed(
    shared: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(topic_setting_check, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asked: list[str] = []

    async def scenario() -> None:
        async with mansio.connect(shared.bootstrap_servers) as client:
            topic = "changing"
            await client.admin.create_topic(topic, partitions=1)
            await client.publish(topic, b"undelayed", headers={"a": b"1"})
            original = client._cluster.request

            async def request(api_key: int, *arguments: Any, **options: Any) -> Any:
                if api_key == ApiKey.DESCRIBE_CONFIGS:
                    asked.append(topic)
                return await original(api_key, *arguments, **options)

            monkeypatch.setattr(client._cluster, "request", request)
            await client.publish_many(topic, [b"undelayed"] * 3)
            assert asked == []
            with pytest.raises(DelaysNotEnabled):
                await client.publish(topic, b"x", delay=1)
            await client.admin.alter_topic_config(topic, {"mansio.delay.enable": "true"})
            await asyncio.gather(*(client.publish(topic, b"x", delay=60) for _ in range(30)))
            await client.publish_many(topic, [b"x"] * 30, delay=60)
            assert len(asked) == 2
            await client.admin.alter_topic_config(topic, {"mansio.delay.enable": "false"})
            now[0] += topic_setting_check.CHECK_INTERVAL_S + 1
            with pytest.raises(DelaysNotEnabled):
                await client.publish(topic, b"x", delay=60)
            assert len(asked) == 3

    asyncio.run(scenario())


class TestCommandLine:
    @pytest.mark.row("D6", "A6")
    def test_records_are_produced_with_a_delay_and_at_a_time(self, broker: TestBroker) -> None:
        shell = Shell(broker.bootstrap_servers)
        shell("topic", "create", "orders", "--delays", "--partitions", "1")
        printed = shell.json("topic", "describe", "orders")
        assert printed["configs"]["mansio.delay.enable"] == {"value": "true", "source": "topic"}
        shell("produce", "orders", "--delay", "15m", "-H", "a=1", stdin=b"a\nb\n")
        at = datetime.fromtimestamp(broker.clock.time_ms() / 1000 + 1800, UTC).astimezone()
        shell("produce", "orders", "--at", at.isoformat(timespec="minutes"), stdin=b"c\n")
        read = ("consume", "orders", "--from-beginning", "--exit-at-end")
        assert shell(*read) == ""
        broker.clock.advance(minutes=15, seconds=5)
        assert shell(*read) == "a\nb\n"
        broker.clock.advance(minutes=15)
        assert shell(*read) == "a\nb\nc\n"
        assert '"mansio-due-at-ms"' in shell(*read, "--output", "json")

    def test_a_topic_without_the_setting_is_refused_until_it_is_altered(self, shared: TestBroker) -> None:
        shell = Shell(shared.bootstrap_servers)
        shell("topic", "create", "later", "--partitions", "1")
        shell("produce", "later", "--delay", "15m", stdin=b"x\n", code=1)
        assert "does not accept delays: mansio topic alter later -c mansio.delay.enable=true" in shell.errors
        shell("topic", "alter", "later", "-c", "mansio.delay.enable=true")
        shell("produce", "later", "--delay", "15m", stdin=b"x\n")
        assert shell("consume", "later", "--from-beginning", "--exit-at-end") == ""
