"""Share groups (KIP-932) as librdkafka's `ShareConsumer` uses them: leases, acknowledgements, and what ends a lease."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from support.machine import scaled
from support.process import served
from system.interop.clients import QUIET
from system.interop.conftest import ARGUMENTS, create_topic
from system.interop.share_members import Given, ShareMember, member

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LOCK_MS = 1_000
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "mansio.retry.backoff.ms": "100",
    "mansio.retry.jitter": "0",
    "mansio.deadletterqueue.enable": "false",
}


def write(bootstrap_servers: str, topic: str, values: Sequence[str], partition: int = 0) -> None:
    """One batch for every ten of them, so that leases end within batches, too."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 0, **QUIET})
    for begin in range(0, len(values), 10):
        for value in values[begin : begin + 10]:
            producer.produce(topic, value.encode(), partition=partition)
        assert producer.flush(scaled(10)) == 0


def alter(bootstrap_servers: str, group: str, **settings: str) -> None:
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in {
            **SETTINGS,
            **{key.replace("_", "."): value for key, value in settings.items()},
        }.items()
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(scaled(10))


def drain(one: ShareMember, count: int, within_s: float = 15.0) -> list[Given]:
    """An explicit member takes and accepts until it has had so many."""
    found: list[Given] = []
    end = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < end:
        given = one.poll(count - len(found), max(0.1, end - time.monotonic()))
        one.acknowledge(given, "ACCEPT")
        found += given
    one.commit_well()
    return found


def offsets(given: Sequence[Given]) -> list[int]:
    return [each.offset for each in given]


@pytest.mark.row("D1")
def test_what_was_polled_before_counts_as_accepted_and_is_not_delivered_again(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    values = [f"v{n}" for n in range(50)]
    write(bootstrap_servers, topic, values)
    with member(bootstrap_servers, unique, topic) as first:
        assert [each.value for each in first.poll(50)] == values
        first.commit_well()
        first.close()
    with member(bootstrap_servers, unique, topic) as second:
        write(bootstrap_servers, topic, ["later"])
        assert second.poll(1) == [Given(0, 50, "later", 1)]


@pytest.mark.row("D1")
def test_each_record_is_accepted_released_or_rejected_by_itself(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    write(bootstrap_servers, topic, [f"v{n}" for n in range(10)])
    with member(bootstrap_servers, unique, topic, explicit=True) as one:
        given = one.poll(10)
        assert [each[1:] for each in given] == [(n, f"v{n}", 1) for n in range(10)]
        one.acknowledge(given[0::3], "ACCEPT")
        one.acknowledge(given[1::3], "RELEASE")
        one.acknowledge(given[2::3], "REJECT")
        one.commit_well()
        again = one.poll(3)
        assert [each[1:] for each in again] == [(n, f"v{n}", 2) for n in (1, 4, 7)], "after their rest"
        one.acknowledge(again, "ACCEPT")
        one.commit_well()
        write(bootstrap_servers, topic, ["later"])
        assert offsets(one.poll(1)) == [10], "nothing else comes again"


@pytest.mark.row("D1", "D2")
def test_a_record_is_delivered_up_to_the_delivery_limit(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_delivery_count_limit="3", mansio_retry_backoff_ms="0")
    write(bootstrap_servers, topic, ["poison", "good"])
    counts = []
    with member(bootstrap_servers, unique, topic, explicit=True) as one:
        for _ in range(3):
            given = one.poll(1)
            counts += [each.deliveries for each in given if each.offset == 0]
            one.acknowledge([each for each in given if each.offset == 0], "RELEASE")
            one.acknowledge([each for each in given if each.offset], "ACCEPT")
            one.commit_well()
        write(bootstrap_servers, topic, ["later"])
        assert offsets(one.poll(1)) == [2]
    assert counts == [1, 2, 3]


@pytest.mark.row("D2")
def test_a_lease_that_ends_is_another_members_and_a_late_ack_is_refused(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_record_lock_duration_ms=str(LOCK_MS))
    write(bootstrap_servers, topic, [f"v{n}" for n in range(5)])
    with (
        member(bootstrap_servers, unique, topic, explicit=True) as slow,
        member(bootstrap_servers, unique, topic, explicit=True) as quick,
    ):
        held = slow.poll(5)
        began = time.monotonic()
        assert [each.deliveries for each in held] == [1] * 5
        again = quick.poll(5)
        assert [each[1:] for each in again] == [(n, f"v{n}", 2) for n in range(5)]
        assert time.monotonic() - began > LOCK_MS / 1000 / 2, "not before the lease had ended"
        slow.acknowledge(held, "ACCEPT")
        late = slow.commit()
        assert any(error is not None and "INVALID_RECORD_STATE" in error for error in late.values()), late
        quick.acknowledge(again, "ACCEPT")
        quick.commit_well()
        write(bootstrap_servers, topic, ["later"])
        assert offsets(quick.poll(1)) == [5]


@pytest.mark.row("D1")
def test_two_members_share_the_records_of_one_partition(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    write(bootstrap_servers, topic, [f"v{n}" for n in range(60)])
    options = {"explicit": True, "max.poll.records": 10}
    with (
        member(bootstrap_servers, unique, topic, **options) as one,
        member(bootstrap_servers, unique, topic, **options) as other,
    ):
        first, second = one.poll(1), other.poll(1)
        assert first, "both are given records while neither has acknowledged any"
        assert second
        assert not set(offsets(first)) & set(offsets(second))
        one.acknowledge(first, "ACCEPT")
        other.acknowledge(second, "ACCEPT")
        rest = drain(one, 60 - len(first) - len(second))
        other.commit_well()
    everything = sorted(offsets(first + second + rest))
    assert everything == list(range(60)), "each record once"


@pytest.mark.row("D1", "D2")
def test_two_groups_of_one_topic_do_not_touch_each_other(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    for group in (f"{unique}-a", f"{unique}-b"):
        alter(bootstrap_servers, group, share_record_lock_duration_ms="60000")
    write(bootstrap_servers, topic, [f"v{n}" for n in range(20)])
    with (
        member(bootstrap_servers, f"{unique}-a", topic, explicit=True) as one,
        member(bootstrap_servers, f"{unique}-b", topic, explicit=True) as other,
    ):
        held = one.poll(20)
        assert offsets(held) == list(range(20))
        given = drain(other, 20)
        assert [(each.offset, each.deliveries) for each in given] == [(n, 1) for n in range(20)]
        one.acknowledge(held, "RELEASE")
        one.commit_well()
        assert {each.deliveries for each in drain(one, 20)} == {2}
        write(bootstrap_servers, topic, ["later"])
        assert offsets(other.poll(1)) == [20]


@pytest.mark.row("D2")
@pytest.mark.parametrize("way", ["close", "kill"])
def test_what_a_member_had_is_free_at_once_when_it_goes(
    bootstrap_servers: str, unique: str, make_topic: Callable[..., str], way: str
) -> None:
    topic = make_topic()
    alter(bootstrap_servers, unique, share_record_lock_duration_ms="60000")
    write(bootstrap_servers, topic, [f"v{n}" for n in range(5)])
    with member(bootstrap_servers, unique, topic, explicit=True) as goes:
        assert len(goes.poll(5)) == 5
        if way == "close":
            goes.close()
        else:
            goes.kill()
        with member(bootstrap_servers, unique, topic, explicit=True) as stays:
            assert [(each.offset, each.deliveries) for each in stays.poll(5)] == [(n, 2) for n in range(5)]


@pytest.mark.full
@pytest.mark.row("D5")
def test_acks_and_leases_and_counts_outlive_a_broker_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path / "data", arguments=ARGUMENTS, http=False) as broker:
        group = "g"
        topic = create_topic(broker.bootstrap_servers, "leased", 1)
        alter(broker.bootstrap_servers, group, share_record_lock_duration_ms="4000")
        write(broker.bootstrap_servers, topic, [f"v{n}" for n in range(30)])
        with member(broker.bootstrap_servers, group, topic, explicit=True, **{"max.poll.records": 10}) as one:
            accepted = one.poll(10)
            one.acknowledge(accepted, "ACCEPT")
            one.commit_well()
            held = one.poll(10)
            broker.kill()
        broker.start()
        began = time.monotonic()
        with member(broker.bootstrap_servers, group, topic, explicit=True) as two:
            rest = drain(two, 30 - len(accepted))
            assert time.monotonic() - began > 2, "leased still, for all that is known: their lease began anew"
            assert sorted(offsets(rest)) == sorted(set(range(30)) - set(offsets(accepted)))
            again = {each.offset for each in rest if each.deliveries == 2}
            assert again == set(offsets(held))
            write(broker.bootstrap_servers, topic, ["later"])
            assert offsets(two.poll(1)) == [30], "nothing else was left"
        assert "Traceback" not in broker.text()
