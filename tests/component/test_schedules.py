"""Recurring schedules on a test broker: when they fire, how often, and what keeps them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import urllib.request
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

import mansio
from mansio.broker.features.delays import schedule_manager
from mansio.errors import (
    DelaysNotEnabled,
    InvalidSchedule,
    MessageTooLarge,
    PolicyViolation,
    ScheduleAlreadyExists,
    ScheduleNotFound,
)
from mansio.testing import TestBroker
from support.forked_serve import run_command
from support.tiers import smoke_first
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio import Message

pytestmark = pytest.mark.row("D6")

TOPIC = "reports"
BERLIN = ZoneInfo("Europe/Berlin")
HOUR_MS = 3_600_000
DELAYS = {"mansio.delay.enable": "true"}


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(
            TOPIC, partitions=1, config={**DELAYS, "retention.ms": "-1", "retention.bytes": "-1"}
        )
        yield running


def create(broker: TestBroker, name: str = "daily", topic: str = TOPIC, **options: Any) -> mansio.Schedule:
    return broker.client().admin.schedules.create(topic, name, options.pop("value", b"v"), **options)


def visible(broker: TestBroker, topic: str = TOPIC) -> list[Message]:
    """All records of a topic that a consumer receives."""
    with broker.client().consume(topic, to_end=True) as consumer:
        return list(consumer)


def due_times(broker: TestBroker, topic: str = TOPIC) -> list[int]:
    """Due times of the records of schedules, in the order of the log."""
    return [int(dict(message.headers)["mansio-schedule-due-ms"] or 0) for message in visible(broker, topic)]


def local(milliseconds: int, zone: ZoneInfo = BERLIN) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, zone).strftime("%m-%d %H:%M %z")


def advance_to(broker: TestBroker, moment: datetime) -> None:
    broker.clock.advance(moment.timestamp() - broker.clock.time_ms() / 1000)


def next_change(broker: TestBroker, *, forward: bool) -> datetime:
    """The next moment at which Berlin's clocks are set forward or back."""
    moment = datetime.fromtimestamp(broker.clock.time_ms() // HOUR_MS * HOUR_MS / 1000, UTC)
    while True:
        later = moment + timedelta(hours=1)
        difference = later.astimezone(BERLIN).utcoffset() - moment.astimezone(BERLIN).utcoffset()  # type: ignore[operator]
        moment = later
        if difference and (difference > timedelta()) is forward:
            return moment


class TestFiring:
    def test_a_schedule_publishes_its_record_again_and_again(self, broker: TestBroker) -> None:
        created = create(broker, key="k", headers={"kind": "report"}, every=900)
        began_ms = broker.clock.time_ms()
        broker.clock.advance(minutes=46)
        found = visible(broker)
        assert len(found) == 3
        for number, message in enumerate(found, 1):
            headers = dict(message.headers)
            due_ms = int(headers["mansio-schedule-due-ms"] or 0)
            assert (message.key, message.value) == (b"k", b"v")
            assert headers["kind"] == b"report"
            assert headers["mansio-schedule"] == b"daily"
            assert headers["mansio-schedule-firing"] == b"%d" % number
            assert 0 <= began_ms + number * 900_000 - due_ms < 5_000
            assert 0 <= message.timestamp_ms - due_ms < 5_000, "never early"
        state = broker.client().admin.schedules.describe(TOPIC, "daily")
        assert state.firings == 3
        assert state.next_times == tuple(created.created + timedelta(minutes=15 * n) for n in range(4, 9))

    @pytest.mark.parametrize("forward", [True, False], ids=["forward", "back"])
    def test_schedules_follow_changes_of_daylight_saving(self, broker: TestBroker, forward: bool) -> None:
        change = next_change(broker, forward=forward)
        day = change.astimezone(BERLIN).strftime("%m-%d")
        advance_to(broker, change - timedelta(hours=4))
        for name, cron in (("night", "30 2 * * *"), ("morning", "0 9 * * *"), ("hourly", "0 * * * *")):
            create(broker, name, cron=cron, timezone="Europe/Berlin")
        broker.client().publish(TOPIC, b"delayed", at=change + timedelta(minutes=45))
        advance_to(broker, change + timedelta(hours=8))
        fired: dict[str, list[str]] = {}
        timestamps = []
        for message in visible(broker):
            headers = dict(message.headers)
            due = headers.get("mansio-schedule-due-ms") or headers["mansio-due-at-ms"]
            timestamps.append(int(due or 0))
            fired.setdefault((headers.get("mansio-schedule") or b"").decode(), []).append(
                local(int(due or 0))
            )
        assert timestamps == sorted(timestamps), (
            "schedules and delayed records in the order of their due times"
        )
        if forward:
            assert fired["night"] == [f"{day} 03:00 +0200"]
            assert fired["morning"] == [f"{day} 09:00 +0200"]
            hours = [f"{day} 00:00 +0100", f"{day} 01:00 +0100", f"{day} 03:00 +0200", f"{day} 04:00 +0200"]
        else:
            assert fired["night"] == [f"{day} 02:30 +0200"]
            assert fired["morning"] == [f"{day} 09:00 +0100"]
            hours = [f"{day} 01:00 +0200", f"{day} 02:00 +0200", f"{day} 02:00 +0100", f"{day} 03:00 +0100"]
        assert [one for one in fired["hourly"] if one in hours] == hours
        assert len(fired["hourly"]) == len({*fired["hourly"]})

    def test_a_long_advance_fires_each_time(self, broker: TestBroker) -> None:
        create(broker, cron="0 9 * * mon-fri", timezone="Europe/Berlin")
        broker.clock.advance(days=21)
        fired = [datetime.fromtimestamp(due_ms / 1000, BERLIN) for due_ms in due_times(broker)]
        assert 14 <= len(fired) <= 16
        assert all((one.hour, one.minute) == (9, 0) and one.weekday() < 5 for one in fired)

    def test_a_schedule_fires_after_the_setting_was_turned_off(self, broker: TestBroker) -> None:
        create(broker, every=3600)
        broker.client().admin.alter_topic_config(TOPIC, {"mansio.delay.enable": "false"})
        broker.restart()
        broker.clock.advance(minutes=61)
        assert len(visible(broker)) == 1
        refusal = (
            "topic 'reports' does not accept delays: mansio topic alter reports -c mansio.delay.enable=true"
        )
        with pytest.raises(DelaysNotEnabled, match=f"^{refusal}$"):
            create(broker, "other", every=3600)
        assert schedule_manager.not_enabled_error(TOPIC).message == refusal

    def test_a_schedule_without_key_does_not_fire_in_a_topic_that_is_compacted_later(
        self, broker: TestBroker
    ) -> None:
        admin = broker.client().admin
        create(broker, "keyed", every=60, key="k")
        create(broker, "unkeyed", every=60)
        admin.alter_topic_config(TOPIC, {"mansio.delay.enable": "false", "cleanup.policy": "compact"})
        broker.clock.advance(seconds=61)
        assert [message.key for message in visible(broker)] == [b"k"]
        assert "'reports' is compacted" in (admin.schedules.describe(TOPIC, "unkeyed").error or "")
        assert admin.schedules.describe(TOPIC, "keyed").error is None
        admin.alter_topic_config(TOPIC, {"cleanup.policy": "delete"})
        broker.clock.advance(seconds=30)
        assert [message.key for message in visible(broker)] == [b"k", None]
        assert admin.schedules.describe(TOPIC, "unkeyed").error is None


class TestCatchUp:
    @pytest.mark.parametrize(
        ("catch_up", "missed"), smoke_first(("all", [1, 2, 3, 4, 5]), ("none", []), ("last", [5]))
    )
    def test_missed_firings_are_caught_up_as_required(
        self, broker: TestBroker, catch_up: Any, missed: list[int]
    ) -> None:
        created = create(broker, every=600, catch_up=catch_up)
        with broker.faults.full_disk():
            broker.clock.advance(minutes=55)
        broker.clock.advance(minutes=6)
        created_ms = round(created.created.timestamp() * 1000)
        assert [(due_ms - created_ms) // 600_000 for due_ms in due_times(broker)] == [*missed, 6]
        numbers = [dict(one.headers)["mansio-schedule-firing"] for one in visible(broker)]
        assert numbers == [b"%d" % number for number in range(1, len(missed) + 2)]

    @pytest.mark.full
    def test_thousands_of_missed_firings_are_fired_once_each(self, broker: TestBroker) -> None:
        create(broker, every=1, catch_up="all")
        with broker.faults.full_disk():
            broker.clock.advance(minutes=20)
        broker.clock.advance(seconds=2)
        found = due_times(broker)
        assert len(found) >= 1_201
        assert found == [found[0] + 1_000 * number for number in range(len(found))]


class TestChanges:
    def test_a_paused_schedule_does_not_fire(self, broker: TestBroker) -> None:
        created = create(broker, every=600, catch_up="all")
        schedules = broker.client().admin.schedules
        schedules.pause(TOPIC, "daily")
        schedules.pause(TOPIC, "daily")
        paused = schedules.describe(TOPIC, "daily")
        assert (paused.is_paused, paused.next_due) == (True, None)
        broker.clock.advance(minutes=25)
        broker.restart()
        broker.clock.advance(minutes=1)
        assert visible(broker) == []
        schedules = broker.client().admin.schedules
        schedules.resume(TOPIC, "daily")
        broker.clock.advance(minutes=5)
        created_ms = round(created.created.timestamp() * 1000)
        assert due_times(broker) == [created_ms + 1_800_000]

    def test_a_deleted_schedule_is_gone_and_its_name_is_free(self, broker: TestBroker) -> None:
        create(broker, every=600)
        schedules = broker.client().admin.schedules
        broker.clock.advance(minutes=11)
        schedules.delete(TOPIC, "daily")
        for call in (schedules.delete, schedules.pause, schedules.resume, schedules.describe):
            with pytest.raises(ScheduleNotFound, match="daily"):
                call(TOPIC, "daily")
        broker.restart()
        broker.clock.advance(minutes=30)
        assert len(visible(broker)) == 1
        create(broker, every=60)
        broker.clock.advance(seconds=61)
        assert len(visible(broker)) == 2

    def test_creating_the_same_again_changes_nothing(self, broker: TestBroker) -> None:
        first = create(broker, every=600, key="k", headers={"h": "x"})
        broker.clock.advance(minutes=11)
        again = create(broker, every=600, key="k", headers={"h": "x"})
        assert (again.id, again.created, again.firings) == (first.id, first.created, 1)
        for options in ({"every": 601}, {"every": 600, "value": b"w"}, {"every": 600, "catch_up": "all"}):
            with pytest.raises(ScheduleAlreadyExists, match="mansio schedule delete daily"):
                create(broker, key="k", headers={"h": "x"}, **options)
        assert [one.name for one in broker.client().admin.schedules.list(TOPIC)] == ["daily"]

    def test_a_name_is_unique_in_a_topic_with_many_partitions(self, broker: TestBroker) -> None:
        admin = broker.client().admin
        admin.create_topic("wide", partitions=8, config=DELAYS)
        by_key = create(broker, "a", "wide", key="tea", every=60)
        by_name = create(broker, "b", "wide", every=60)
        chosen = create(broker, "c", "wide", every=60, partition=5)
        assert broker.client().publish("wide", b"x", key="tea").partition == by_key.partition
        assert chosen.partition == 5
        assert create(broker, "b", "wide", every=60).id == by_name.id
        with pytest.raises(ScheduleAlreadyExists):
            create(broker, "b", "wide", key="another key", every=60)
        with pytest.raises(ScheduleAlreadyExists):
            create(broker, "c", "wide", every=60, partition=4)
        admin.create_partitions("wide", 20)
        assert create(broker, "b", "wide", every=60).id == by_name.id
        assert [one.name for one in admin.schedules.list("wide")] == ["a", "b", "c"]

    def test_the_asyncio_client_manages_schedules(self, broker: TestBroker) -> None:
        async def use() -> list[str]:
            async with mansio.connect(broker.bootstrap_servers) as client:
                schedules = client.admin.schedules
                await schedules.create(TOPIC, "a", "v", cron="0 9 * * *", timezone="Europe/Berlin")
                await schedules.create(TOPIC, "b", "v", every=timedelta(minutes=5))
                await schedules.pause(TOPIC, "a")
                await schedules.resume(TOPIC, "a")
                await schedules.delete(TOPIC, "b")
                described = await schedules.describe(TOPIC, "a", times=7)
                assert len(described.next_times) == 7
                assert described.next_times[0].astimezone(BERLIN).hour == 9
                return [one.name for one in await schedules.list(TOPIC)]

        assert asyncio.run(use()) == ["a"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cron": "99 * * * *"}, "bad minute"),
            ({"cron": "* * * * * *"}, "6 fields"),
            ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
            ({"cron": "0 9 * * *", "timezone": "Europe/Bern"}, "time zone 'Europe/Bern' is unknown"),
            ({"every": 60, "timezone": "Europe/Berlin"}, "no time zone"),
            ({"cron": "0 9 * * *", "timezone": ""}, "time zone is empty"),
            ({"every": 60, "timezone": ""}, "time zone is empty"),
            ({"cron": " "}, "the cron expression is empty"),
            ({"cron": "daily"}, "has 1 field, not 5"),
            ({"cron": "@daily"}, r"has to be written as '0 0 \* \* \*'"),
            ({}, "either a cron expression or an interval"),
            ({"cron": "0 9 * * *", "every": 60}, "either a cron expression or an interval"),
            ({"every": 60, "name": ""}, "name"),
            ({"every": 60, "name": "a\nb"}, "name"),
            ({"every": 60, "headers": {"mansio-delay-ms": "5"}}, "mansio-delay-ms"),
            ({"every": 60, "catch_up": "some"}, "none, last or all"),
        ],
    )
    def test_an_invalid_schedule_is_one_line(
        self, broker: TestBroker, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InvalidSchedule, match=message) as caught:
            create(broker, **options)
        assert "\n" not in caught.value.message
        assert broker.client().admin.schedules.list(TOPIC) == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"every": 0.5}, "every: .* at least 1 second .*, not 0.5"),
            ({"every": timedelta(days=367)}, "every: .* at most 366 days"),
            ({"every": float("nan")}, "every: .* not nan"),
            ({"every": float("inf")}, "every: .* not inf"),
            ({"every": 1e300}, "every: .* not 1e"),
            ({"every": "15m"}, "every: not a timedelta or a number of seconds: '15m'"),
            ({"every": True}, "every: not a timedelta"),
            ({"every": 1.0005}, "every: not a whole number of milliseconds: 1.0005"),
            ({"every": 60, "name": 5}, "name: not a text: 5"),
            ({"cron": 5}, "cron: not a text: 5"),
        ],
    )
    def test_an_invalid_argument_is_a_value_error(
        self, broker: TestBroker, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            create(broker, **options)
        assert broker.client().admin.schedules.list(TOPIC) == []

    def test_a_topic_without_delays_is_refused_with_the_command(self, broker: TestBroker) -> None:
        broker.client().admin.create_topic("plain", partitions=1)
        with pytest.raises(DelaysNotEnabled, match=r"mansio topic alter plain -c mansio\.delay"):
            create(broker, topic="plain", every=60)

    def test_limits(self, broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(MessageTooLarge, match=r"max\.message\.bytes"):
            create(broker, every=60, value=bytes(1_048_560))
        monkeypatch.setattr(schedule_manager, "SCHEDULES_MAX", 2)
        for name in "ab":
            create(broker, name, every=60)
        with pytest.raises(PolicyViolation, match="2 schedules"):
            create(broker, "c", every=60)
        create(broker, "b", every=60)
        monkeypatch.setattr(schedule_manager, "SCHEDULES_MAX", 9)
        monkeypatch.setattr(schedule_manager, "SCHEDULES_BYTES_MAX", 100)
        with pytest.raises(PolicyViolation, match="MiB"):
            create(broker, "c", every=60, value=bytes(100))


class TestDurability:
    def test_each_firing_is_appended_once_whenever_the_broker_restarts(self, broker: TestBroker) -> None:
        chance = random.Random(3)
        periods = {"a": 30, "b": 45, "c": 600}
        created = {name: create(broker, name, every=every, catch_up="all") for name, every in periods.items()}
        create(broker, "minutely", cron="* * * * *", timezone="Asia/Kathmandu", catch_up="all")
        for _ in range(25):
            broker.clock.advance(chance.randrange(0, 120))
            if chance.random() < 0.4:
                broker.restart()
        broker.clock.advance(60)
        found: dict[str, list[tuple[int, int]]] = {}
        for message in visible(broker):
            headers = dict(message.headers)
            number, due_ms = (int(headers[f"mansio-schedule-{name}"] or 0) for name in ("firing", "due-ms"))
            found.setdefault((headers["mansio-schedule"] or b"").decode(), []).append((number, due_ms))
            assert message.timestamp_ms >= due_ms
        for name, every in periods.items():
            created_ms = round(created[name].created.timestamp() * 1000)
            count = (broker.clock.time_ms() - created_ms) // (every * 1000)
            expected = [(number, created_ms + number * every * 1000) for number in range(1, count + 1)]
            assert found[name] == expected or found[name] == expected[:-1]
        minutes = [due_ms // 60_000 for _, due_ms in found["minutely"]]
        assert minutes == [*range(minutes[0], minutes[0] + len(minutes))]

    def test_a_full_disk_delays_a_firing(self, broker: TestBroker) -> None:
        create(broker, every=60)
        with broker.faults.full_disk():
            broker.clock.advance(seconds=65)
        broker.clock.advance(seconds=5)
        assert len(visible(broker)) == 1


class TestRetention:
    def test_schedules_outlive_the_records_around_them(self, broker: TestBroker) -> None:
        config = {**DELAYS, "retention.ms": str(HOUR_MS), "segment.ms": "600000", "segment.bytes": "1048576"}
        broker.client().admin.create_topic("old", partitions=1, config=config)
        created = create(broker, topic="old", every=4 * 3600, headers={"kept": "yes"})
        broker.client().publish("old", b"gone")
        broker.clock.advance(hours=13)
        partition = mansio.TopicPartition("old", 0)
        start = broker.client().admin.list_offsets([partition], "earliest")[partition].offset
        assert start > 4
        broker.restart()
        broker.clock.advance(hours=3, minutes=10)
        state = broker.client().admin.schedules.describe("old", "daily")
        assert (state.id, state.firings, state.created) == (created.id, 4, created.created)
        (message,) = visible(broker, "old")
        assert (message.value, dict(message.headers)["kept"]) == (b"v", b"yes")

    def test_a_deletion_on_request_keeps_schedules(self, broker: TestBroker) -> None:
        create(broker, every=3600)
        broker.client().publish(TOPIC, b"deleted")
        broker.client().admin.delete_records([TOPIC], before="end")
        assert visible(broker) == []
        broker.restart()
        broker.clock.advance(minutes=61)
        assert [message.value for message in visible(broker)] == [b"v"]


def test_every_kind_of_consumer_gets_each_firing_once(broker: TestBroker) -> None:
    create(broker, every=600)
    broker.clock.advance(minutes=31)
    client = broker.client()
    client.admin.alter_group_config("workers", {"share.auto.offset.reset": "earliest"})
    with client.receive(TOPIC, group="workers") as receiver:
        received: Counter[bytes | None] = Counter()
        for message in receiver:
            received[dict(message.headers)["mansio-schedule-firing"]] += 1
            message.ack()
            if sum(received.values()) == 3:
                break
    assert received == {b"1": 1, b"2": 1, b"3": 1}


@pytest.mark.row("O1")
def test_operators_see_the_schedules_and_which_of_them_cannot_fire(broker: TestBroker) -> None:
    def get(path: str) -> str:
        with urllib.request.urlopen(
            f"{broker.http_url}{path}", timeout=30
        ) as response:  # the broker of this test
            return str(response.read().decode())

    shell = Shell(broker.bootstrap_servers)
    broker.client().publish(TOPIC, b"delayed", delay=86_400)
    for name in ("a", "b"):
        create(broker, name, every=600)
    create(broker, "keyed", every=900, key="k")
    metrics = get("/metrics")
    assert 'mansio_topic_schedules{topic="reports"} 3.0' in metrics
    assert 'mansio_partition_schedules{partition="0",topic="reports"} 3.0' in metrics
    assert 'mansio_partition_schedules_failing{partition="0",topic="reports"} 0.0' in metrics
    due = next(
        line for line in metrics.splitlines() if line.startswith("mansio_partition_next_firing_seconds{")
    )
    assert 0 < float(due.split()[-1]) <= 600
    assert json.loads(get("/health/ready"))["warnings"] == []
    described = shell("topic", "describe", TOPIC)
    assert "\nschedules  3\n" in described
    assert re.search(r" \d{4}-\d\d-\d\dT[0-9:.]+Z ", described), "due times as in other commands"
    broker.client().admin.alter_topic_config(
        TOPIC, {"mansio.delay.enable": "false", "cleanup.policy": "compact"}
    )
    broker.clock.advance(seconds=601)
    (warning,) = json.loads(get("/health/ready"))["warnings"]
    assert (warning["reason"], warning["topic"], warning["partition"]) == ("schedule_cannot_fire", TOPIC, 0)
    assert "schedule 'a' (and 1 more): topic 'reports' is compacted" in warning["detail"]
    assert 'mansio_topic_schedules_failing{topic="reports"} 2.0' in get("/metrics")
    assert "\nschedules  3, 2 cannot fire\n" in shell("topic", "describe", TOPIC)
    row = next(line for line in shell("schedule", "list").splitlines() if line.startswith("a "))
    assert row.endswith("...")
    assert "is compacted, so its records need keys" in shell("schedule", "describe", "a", "-t", TOPIC)
    broker.client().admin.schedules.pause(TOPIC, "a")
    assert 'mansio_topic_schedules_failing{topic="reports"} 1.0' in get("/metrics")
    shell("topic", "delete", TOPIC)
    assert "reports: 1 pending delayed record and 3 schedules were deleted" in shell.errors


@pytest.mark.full
def test_the_command_line_manages_schedules(broker: TestBroker) -> None:
    def command(*arguments: str, code: int = 0, notes: list[str] | None = None) -> str:
        done = run_command(["schedule", *arguments, "-b", broker.bootstrap_servers], os.environ)
        printed, errors = done.stdout.decode(), done.stderr.decode()
        assert done.returncode == code, errors
        if notes is not None:
            notes.append(errors)
        assert code == 0 or errors.count("\n") == 1, errors
        return printed if code == 0 else errors

    weekdays = ("create", "report", "-t", TOPIC, "--cron", "0 9 * * mon-fri", "--timezone", "Europe/Berlin")
    shown = command(*weekdays, "--value", "go", "-H", "a=b", "-k", "k")
    assert len(re.findall(r"^next +\d{4}-\d\d-\d\dT09:00:00\+0[12]:00$", shown, re.MULTILINE)) == 5
    assert command(*weekdays, "--value", "go", "-H", "a=b", "-k", "k") == shown
    command("create", "tick", "-t", TOPIC, "--every", "15m", "--catch-up", "last")
    listed = command("list").splitlines()
    assert len(listed) == 11
    assert re.search(r"^report +reports +0 9 \* \* mon-fri Europe/Berlin +none +0 +\d{4}-", listed[1])
    assert re.search(r"^tick +reports +every 15m +last +0 +\d{4}-.*Z$", listed[6])
    command("pause", "report", "-t", TOPIC)
    assert "paused" in command("describe", "report", "-t", TOPIC)
    broker.clock.advance(minutes=16)
    rows = json.loads(command("list", "-t", TOPIC, "-o", "json"))
    assert [(row["name"], row["paused"], row["firings"], len(row["next"])) for row in rows] == [
        ("report", True, 0, 0),
        ("tick", False, 1, 5),
    ]
    assert json.loads(command("pause", "report", "-t", TOPIC, "-o", "json"))["paused"] is True
    notes: list[str] = []
    command(*weekdays, "--value", "go", "-H", "a=b", "-k", "k", notes=notes)
    assert notes == [
        "mansio: schedule 'report' exists and stays paused: mansio schedule resume report --topic reports\n"
    ]
    assert json.loads(command("resume", "report", "-t", TOPIC, "-o", "json"))["paused"] is False
    deleted = {"name": "report", "topic": TOPIC, "deleted": True}
    assert json.loads(command("delete", "report", "-t", TOPIC, "-o", "json")) == deleted
    assert "no schedule 'report'" in command("describe", "report", "-t", TOPIC, code=1)
    assert "bad minute" in command("create", "x", "-t", TOPIC, "--cron", "99 * * * *", code=1)
    assert "exists with another definition" in command(
        "create", "tick", "-t", TOPIC, "--every", "16m", code=1
    )
    for wrong in (["--cron", "0 9 * * *", "--every", "1m"], ["--every", "soon"], ["--every", "999ms"], []):
        command("create", "x", "-t", TOPIC, *wrong, code=2)
    assert "1s (the minimum)" in command("create", "x", "-t", TOPIC, "--every", "0.1s", code=2)
    command("create", "a b; ls", "-t", TOPIC, "--every", "15m")
    hint = "mansio schedule delete 'a b; ls' --topic reports"
    assert hint in command("create", "a b; ls", "-t", TOPIC, "--every", "16m", code=1)
    broker.client().admin.create_partitions(TOPIC, 2)
    assert hint in command("create", "a b; ls", "-t", TOPIC, "--every", "15m", "-p", "1", code=1)
