"""Pending records are visible and changeable: client, command line, metrics and health, over real sockets."""

from __future__ import annotations

import json
import urllib.request
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import ConnectionLost, InvalidRequest, UnknownTopicOrPartition
from mansio.net import connection as net_connection
from mansio.testing import TestBroker
from mansio.wire.api_versions import ApiKey
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

TOPIC = "reminders"
SEED = 20105


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=3, config={"mansio.delay.enable": "true"})
        yield running


def visible(broker: TestBroker) -> list[bytes | None]:
    with broker.client().consume(TOPIC, to_end=True) as consumer:
        return sorted((message.value for message in consumer), key=bytes)  # type: ignore[arg-type]


def everything(broker: TestBroker, limit: int, **options: Any) -> list[mansio.PendingRecord]:
    """All pending records, page by page."""
    found: list[mansio.PendingRecord] = []
    after = None
    while True:
        page = broker.client().admin.delays.list(TOPIC, limit=limit, after=after, **options)
        assert len(page.records) <= limit
        found += page.records
        if page.next is None:
            return found
        assert len(page.records) == limit
        after = page.next


def moment(broker: TestBroker, seconds: float) -> datetime:
    return datetime.fromtimestamp(broker.clock.time_ms() / 1000, UTC) + timedelta(seconds=seconds)


@pytest.mark.row("D6")
def test_pages_of_any_size_list_each_pending_record_once_in_the_order_of_due_times(
    broker: TestBroker,
) -> None:
    random = Random(SEED)
    client = broker.client()
    expected = []
    for number in range(120):
        partition, delay = random.randrange(3), random.choice((60, 61, 62, random.uniform(50, 9000)))
        stored = client.publish(
            TOPIC,
            b"%d" % number,
            key=b"k%d" % (number % 7),
            partition=partition,
            headers={"h": b"1"},
            delay=delay,
        )
        expected.append((partition, stored.offset, b"%d" % number))
    for limit in (1, 7, 120, 1000):
        found = everything(broker, limit)
        assert sorted((one.partition, one.id, one.value) for one in found) == sorted(expected)
        order = [(one.due, one.partition, one.id) for one in found]
        assert order == sorted(order)
    first = found[0]
    assert (first.topic, first.value_size, first.error) == (TOPIC, len(first.value or b""), None)
    assert first.headers[0] == ("h", b"1")
    middle = found[60].due
    early = everything(broker, 50, due_to=middle)
    late = everything(broker, 50, due_from=middle)
    assert early + late == found
    assert all(one.due < middle for one in early)
    keyed = everything(broker, 5, key=b"k3")
    assert keyed == [one for one in found if one.key == b"k3"]
    assert keyed
    assert everything(broker, 9, partitions=[1]) == [one for one in found if one.partition == 1]
    counts = client.admin.delays.counts(TOPIC)
    assert {index: one.count for index, one in counts.items()} == {
        index: sum(one.partition == index for one in found) for index in range(3)
    }
    assert min(one.next_due for one in counts.values() if one.next_due) == found[0].due
    assert all(one.overdue_ms == 0 and one.size_bytes > 0 for one in counts.values())


def test_values_are_truncated_in_a_list_and_whole_in_a_description(broker: TestBroker) -> None:
    client = broker.client()
    value = bytes(range(256)) * 2_000
    stored = [client.publish(TOPIC, value, partition=0, delay=60 + n) for n in range(5)]
    listed = everything(broker, 10)
    assert [one.value for one in listed] == [value[:1024]] * 5
    assert {one.value_size for one in listed} == {len(value)}
    null = client.publish(TOPIC, None, key=b"k", partition=0, delay=60)
    described = client.admin.delays.describe(TOPIC, [(0, one.offset) for one in [*stored, null]] + [(1, 5)])
    assert {one.id for one in described.values()} == {one.offset for one in [*stored, null]}
    assert described[mansio.RecordId(0, stored[3].offset)].value == value  # 2.5 MB: more than one response
    assert (
        described[mansio.RecordId(0, null.offset)].value,
        described[mansio.RecordId(0, null.offset)].value_size,
    ) == (
        None,
        None,
    )


@pytest.mark.row("D6")
def test_cancelled_records_are_never_delivered_and_others_when_they_are_due(broker: TestBroker) -> None:
    client = broker.client()
    ids = [(0, client.publish(TOPIC, b"%d" % n, partition=0, delay=60).offset) for n in range(4)]
    ids += [(2, client.publish(TOPIC, b"other", partition=2, delay=60).offset)]
    result = client.admin.delays.cancel(TOPIC, [ids[1], ids[4], (0, 77), ids[1]])
    assert (set(result.changed), set(result.not_pending), result.unknown) == ({ids[1], ids[4]}, {(0, 77)}, ())
    again = client.admin.delays.cancel(TOPIC, [ids[1]])
    assert (again.changed, again.not_pending) == ((), (ids[1],))
    broker.clock.advance(minutes=2)
    assert visible(broker) == [b"0", b"2", b"3"]
    late = client.admin.delays.cancel(TOPIC, [ids[0]])
    assert (late.changed, late.not_pending) == ((), (ids[0],))
    assert client.admin.delays.describe(TOPIC, ids) == {}


@pytest.mark.row("D6")
def test_rescheduled_records_are_delivered_at_their_new_time(broker: TestBroker) -> None:
    client = broker.client()
    broker.clock.advance(hours=5)  # a delay counts from the broker's clock
    ids = [(0, client.publish(TOPIC, b"%d" % n, partition=0, delay=600).offset) for n in range(4)]
    assert client.admin.delays.reschedule(TOPIC, [ids[0]], delay=60).changed == (ids[0],)
    assert client.admin.delays.reschedule(TOPIC, [ids[1]], at=moment(broker, 1200)).changed == (ids[1],)
    assert client.admin.delays.deliver_now(TOPIC, [ids[2]]).changed == (ids[2],)
    broker.clock.advance(seconds=1)
    assert visible(broker) == [b"2"]
    broker.clock.advance(minutes=1)
    assert visible(broker) == [b"0", b"2"]
    broker.clock.advance(minutes=9)
    assert visible(broker) == [b"0", b"2", b"3"]
    broker.clock.advance(minutes=10)
    assert visible(broker) == [b"0", b"1", b"2", b"3"]


def test_a_list_without_content_has_ids_and_due_times(broker: TestBroker) -> None:
    client = broker.client()
    for number in range(5):
        client.publish(TOPIC, b"value", key=b"k", partition=number % 3, delay=60 + number)
    whole = everything(broker, 2)
    short = everything(broker, 2, with_content=False)
    assert [(one.partition, one.id, one.due) for one in short] == [
        (one.partition, one.id, one.due) for one in whole
    ]
    assert {(one.key, one.value, one.headers) for one in short} == {(None, None, ())}


def test_changes_survive_a_restart(broker: TestBroker) -> None:
    client = broker.client()
    ids = [(0, client.publish(TOPIC, b"%d" % n, partition=0, delay=600).offset) for n in range(3)]
    client.admin.delays.cancel(TOPIC, ids[:1])
    client.admin.delays.reschedule(TOPIC, ids[1:2], delay=1200)
    broker.restart()
    assert [one.value for one in everything(broker, 10)] == [b"2", b"1"]
    broker.clock.advance(minutes=11)
    assert visible(broker) == [b"2"]


def test_invalid_requests_are_refused(broker: TestBroker) -> None:
    delays = broker.client().admin.delays
    with pytest.raises(ValueError, match="give delay or at"):
        delays.reschedule(TOPIC, [(0, 1)])
    with pytest.raises(ValueError, match="not between 0 and 365 days"):
        delays.reschedule(TOPIC, [(0, 1)], delay=timedelta(days=366))
    with pytest.raises(ValueError, match="without time zone"):
        delays.list(TOPIC, due_from=datetime(2026, 12, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="not the value of `next`"):
        delays.list(TOPIC, after="7")
    with pytest.raises(ValueError, match="limit: not between"):
        delays.list(TOPIC, limit=0)
    with pytest.raises(UnknownTopicOrPartition, match="has no partition 7"):
        delays.cancel(TOPIC, [(7, 1)])
    with pytest.raises(UnknownTopicOrPartition):
        delays.counts("no-such-topic")
    for wrong in ((-1, 1), (0, 1 << 63), (1 << 31, 0)):
        with pytest.raises(InvalidRequest, match=f"{wrong[0]}:{wrong[1]} is not the id"):
            delays.cancel(TOPIC, [wrong])
    with pytest.raises(ValueError, match="key: not bytes"):
        delays.list(TOPIC, key="text")  # type: ignore[arg-type]
    distant = datetime.now(UTC) + timedelta(days=5_000)
    assert delays.list(TOPIC, due_to=distant).records == ()
    client = broker.client()
    client.admin.create_topic("plain", partitions=1)
    assert client.admin.delays.list("plain") == mansio.PendingPage((), None)
    assert client.admin.delays.counts("plain")[0].count == 0
    assert client.admin.delays.cancel("plain", [(0, 0)]).not_pending == ((0, 0),)


def test_a_lost_answer_to_a_cancellation_is_reported_as_unknown(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = broker.client()
    stored = client.publish(TOPIC, b"x", partition=0, delay=600)
    send = net_connection.Connection.request
    lost: list[Any] = []

    async def lose_first(self: Any, api_key: int, *arguments: Any, **options: Any) -> Any:
        answer = await send(self, api_key, *arguments, **options)
        if api_key == ApiKey.ALTER_DELAYED_RECORDS and not lost:
            lost.append(answer)
            raise ConnectionLost("the answer is lost")
        return answer

    monkeypatch.setattr(net_connection.Connection, "request", lose_first)
    result = client.admin.delays.cancel(TOPIC, [(0, stored.offset), (0, 999)])
    assert (result.changed, result.not_pending) == ((), ())
    assert set(result.unknown) == {(0, stored.offset), (0, 999)}
    assert everything(broker, 10) == []


def test_more_records_than_one_request_takes(broker: TestBroker) -> None:
    client = broker.client()
    stored = client.publish_many(TOPIC, [b"%d" % n for n in range(2_500)], delay=600)
    ids = [(one.partition, one.offset) for one in stored]
    assert len(everything(broker, 10_000)) == 2_500
    result = client.admin.delays.cancel(TOPIC, ids[:1_700])
    assert (len(result.changed), result.not_pending) == (1_700, ())
    broker.clock.advance(minutes=11)
    assert len(visible(broker)) == 800


@pytest.mark.row("D6", "A5")
def test_the_commands_list_describe_and_change_pending_records(broker: TestBroker) -> None:
    shell, client = Shell(broker.bootstrap_servers), broker.client()
    assert shell("delayed", "list", TOPIC) == ""
    assert "no pending records" in shell.errors
    for number in range(5):
        client.publish(
            TOPIC,
            b"value %d" % number,
            key=b"k%d" % (number % 2),
            partition=0,
            delay=timedelta(hours=number + 1),
        )
    lines = shell("delayed", "list", TOPIC, "--max", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["RECORD", "0:0", "0:1"]
    assert shell.errors.startswith("more: --after ")
    rest = json.loads(shell("delayed", "list", TOPIC, "--after", shell.errors.split()[-1], "-o", "json"))
    assert ([one["record"] for one in rest["records"]], rest["next"]) == (["0:2", "0:3", "0:4"], None)
    assert [one["key"] for one in rest["records"]] == ["k0", "k1", "k0"]
    text = shell("delayed", "describe", TOPIC, "0:3")
    assert "record     0:3 of reminders" in text
    assert "value      value 3" in text
    shell("delayed", "describe", TOPIC, "0:3", "0:9", code=1)
    assert "not pending: 0:9" in shell.errors
    assert shell("delayed", "cancel", TOPIC, "--key", "k1", "--dry-run").split()[-1] == "2"
    assert shell("delayed", "cancel", TOPIC, "--key", "k1").split()[-4:] == [TOPIC, "2", "0", "0"]
    shell("delayed", "cancel", TOPIC, "0:1", code=1)
    assert "not pending: 0:1" in shell.errors
    shell("delayed", "reschedule", TOPIC, "0:4", "--delay", "90m")
    order = json.loads(shell("delayed", "list", TOPIC, "-o", "json"))["records"]
    assert [one["record"] for one in order] == ["0:0", "0:4", "0:2"]
    moved = json.loads(shell("delayed", "deliver-now", TOPIC, "--due-to", order[1]["due"], "-o", "json"))
    assert moved["changed"] == ["0:0"]
    broker.clock.advance(seconds=1)
    assert visible(broker) == [b"value 0"]
    described = shell("topic", "describe", TOPIC)
    assert "PENDING" in described
    assert json.loads(shell("topic", "describe", TOPIC, "-o", "json"))["partitions"][0]["pending"] == 2
    shell("topic", "delete", TOPIC)
    assert "reminders: 2 pending delayed records were deleted" in shell.errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cancel", TOPIC), "give records, or options that select them, or --all"),
        (("cancel", TOPIC, "0:1", "--all"), "give records, or options that select them, or --all"),
        (("cancel", TOPIC, "17"), "'17' is not PARTITION:ID"),
        (("reschedule", TOPIC, "0:1"), "give either a duration or a time"),
        (("reschedule", TOPIC, "0:1", "--delay", "9000d"), "not between 0 and 365 days"),
        (("list", TOPIC, "--due-from", "soon"), "is not a time"),
        (("list", TOPIC, "--after", "x"), "not the value of `next`"),
        (("cancel", TOPIC, f"0:{1 << 63}"), "cannot be the id of a record"),
        (("describe", TOPIC, f"{1 << 31}:0"), "cannot be the id of a record"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    broker: TestBroker, arguments: tuple[str, ...], reason: str
) -> None:
    shell = Shell(broker.bootstrap_servers)
    shell("delayed", *arguments, code=2)
    assert reason in shell.errors
    assert shell.errors.count("\n") == 1


@pytest.mark.row("O1")
def test_metrics_and_health_show_what_is_pending(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.alter_topic_config(TOPIC, {"mansio.delay.pending.records.max": "10"})
    client.publish_many(TOPIC, [mansio.OutgoingRecord(b"%d" % n, partition=1) for n in range(7)], delay=600)
    metrics = get(f"{broker.http_url}/metrics")
    assert 'mansio_topic_pending_records{topic="reminders"} 7.0' in metrics
    assert 'mansio_partition_pending_records{partition="1",topic="reminders"} 7.0' in metrics
    assert 'mansio_partition_pending_records{partition="0"' not in metrics
    due = next(line for line in metrics.splitlines() if line.startswith("mansio_partition_next_due_seconds{"))
    assert 0 < float(due.split()[-1]) <= 600
    assert json.loads(get(f"{broker.http_url}/health/ready"))["warnings"] == []
    client.publish(TOPIC, b"8", partition=1, delay=600)
    (warning,) = json.loads(get(f"{broker.http_url}/health/ready"))["warnings"]
    assert (warning["reason"], warning["topic"], warning["partition"]) == (
        "delayed_records_near_limit",
        TOPIC,
        1,
    )
    assert "80%" in warning["detail"]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:  # the broker of this test
        return str(response.read().decode())
