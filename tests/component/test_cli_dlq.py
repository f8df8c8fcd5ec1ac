"""`mansio dlq` with a real broker: show, redrive, append and purge dead-lettered records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.cli.admin.dlq import Filter, parse_filter, parse_position
from mansio.net.redrive import offset_ranges
from mansio.state.share_partition.types import REJECT, ShareKey
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.present import present
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECORDS = 6
DEADLINE_S = 20.0


class World:
    """A broker with topic "t", whose share group "g" has rejected all six records of it."""

    def __init__(self, broker: mansio.Broker) -> None:
        self.shell = Shell(broker.address)
        self._broker = broker
        self.service = present(broker._broker).service
        self.partition = mansio.TopicPartition("t", 0)
        self.shell("topic", "create", "t", "--partitions", "1")
        with mansio.blocking.connect(broker.address) as client:
            for at in range(RECORDS):
                client.publish("t", f"v{at}", key=f"k{at}", headers=[("kind", b"odd" if at % 2 else b"even")])
        self.reject(0, RECORDS - 1)

    def on_loop(self, work: Any) -> Any:
        return self._broker._call(work, scaled(DEADLINE_S))

    def reject(self, first: int, last: int, reason: str = "poison") -> None:
        """Lease these and reject them, and wait for their dead letters."""

        async def lease() -> bool:
            from mansio.config.config_def import Change, Operation

            configs = self.service.group_configs
            assert configs is not None
            await configs.alter("g", [Change("share.auto.offset.reset", Operation.SET, "earliest")])
            live = self.service.share_partition_manager.find_one(ShareKey("g", self.topic_id, 0))
            core = await live.wait_until_loaded()
            if (
                update := live.call_machine_and_set_timer(
                    core.tick, live.now_ms(), self.service.clock.wall_ms(), 0.5
                )
            ) is not None:
                await live.persist(update)
            core.acquirable_ranges("m", 100, live.partition.high_watermark, live.now_ms())
            got, update = live.call_machine_and_set_timer(
                core.acquire, "m", [(first, last)], 100, strict=True, batch_ends=(), now_ms=live.now_ms()
            )
            if update is not None:
                await live.persist(update)
            return bool(got)

        wait_until(lambda: self.on_loop(lease()), DEADLINE_S)

        async def acknowledge() -> None:
            async with mansio.connect(self._broker.address) as client:
                batch = {
                    "first_offset": first,
                    "last_offset": last,
                    "types": bytes([REJECT]),
                    "reason": reason,
                }
                partition = {"partition_index": 0, "batches": [batch]}
                fields = {
                    "group_id": "g",
                    "member_id": "m",
                    "topics": [{"topic_id": self.topic_id, "partitions": [partition]}],
                }
                connection = await client._cluster.any_connection()
                answer = await connection.request(ApiKey.ACKNOWLEDGE_RECORDS, fields)
                assert answer.topics[0].partitions[0].error_code == 0

        self.on_loop(acknowledge())
        wait_until(lambda: self.leases().archiving == 0, DEADLINE_S)

    @property
    def topic_id(self) -> bytes:
        return self.service.topics.find("t").topic_id.bytes

    def leases(self) -> Any:
        with mansio.blocking.connect(self._broker.address) as client:
            return client.admin.shares.leases("g", [self.partition])[self.partition]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with mansio.Broker(tmp_path / "data", auto_create_topics_enable=False) as broker:
        yield World(broker)


def test_dead_letters_from_list_to_purge(world: World) -> None:
    shell = world.shell
    (listed,) = shell.json("dlq", "list")
    assert (listed["topic"], listed["partitions"], listed["records"]) == ("dlq.t", 1, RECORDS)
    peeked = shell.json("dlq", "peek", "t", "--max", "2")
    assert [(one["position"], one["source"], one["group"], one["deliveries"]) for one in peeked] == [
        ("0:0", "t-0@0", "g", 1),
        ("0:1", "t-0@1", "g", 1),
    ]
    assert (peeked[0]["key"], peeked[0]["value"], peeked[0]["reason"]) == ("k0", "v0", "poison")
    assert "t-0@5" in shell("dlq", "peek", "dlq.t", "--filter", "key=k5")
    assert shell.json("dlq", "peek", "t", "--group", "other") == []

    before = shell.json("dlq", "redrive", "t", "--all", "--dry-run")["rows"]
    assert [(row["records"], row["redriven"]) for row in before] == [(RECORDS, 0)]
    assert world.leases().dead == RECORDS, "a dry run changes nothing"
    (one,) = shell.json("dlq", "redrive", "t", "--record", "0:1", "--id", "first")["rows"]
    assert (one["group"], one["topic"], one["records"], one["redriven"]) == ("g", "t", 1, 1)
    (again,) = shell.json("dlq", "redrive", "t", "--record", "0:1", "--id", "first")["rows"]
    assert (again["redriven"], again["repeated"]) == (0, 1)
    (even,) = shell.json("dlq", "redrive", "t", "--filter", "header.kind=even")["rows"]
    assert (even["records"], even["redriven"], even["not_dead_lettered"]) == (3, 3, 0)
    (rest,) = shell.json("dlq", "redrive", "t", "--all", "--group", "g")["rows"]
    assert (rest["records"], rest["redriven"], rest["not_dead_lettered"]) == (RECORDS, 2, 4)
    assert world.leases().dead == 0


def test_a_rate_is_kept_and_what_was_redriven_is_not_dead(world: World) -> None:
    began = time.monotonic()
    (row,) = world.shell.json("dlq", "redrive", "t", "--all", "--rate", "6")["rows"]
    assert row["redriven"] == RECORDS
    assert time.monotonic() - began >= 0.9
    (other,) = world.shell.json("dlq", "redrive", "t", "--all")["rows"]
    assert (other["redriven"], other["not_dead_lettered"]) == (0, RECORDS)


def test_appended_records_are_no_repeats_in_a_deduplication_window(world: World) -> None:
    shell = world.shell
    shell("topic", "alter", "t", "-c", "mansio.dedup.ms=600000")
    with mansio.blocking.connect(shell.environment["MANSIO_BOOTSTRAP_SERVERS"]) as client:
        headers = [("mansio-dedup-id", b"1"), ("kind", b"unique")]
        stored = client.publish("t", "content", headers=headers)
        end = client.admin.list_offsets([world.partition], "latest")[world.partition].offset
        world.reject(stored.offset, stored.offset)
        arguments = ("--filter", "header.kind=unique", "--to", "t", "--id", "r")
        (row,) = shell.json("dlq", "redrive", "t", *arguments)["rows"]
        assert row["appended"] == 1
        assert client.admin.list_offsets([world.partition], "latest")[world.partition].offset == end + 1


def test_records_are_appended_once_for_each_id(world: World) -> None:
    shell = world.shell
    shell("topic", "create", "fixed", "--partitions", "1")
    (row,) = shell.json("dlq", "redrive", "t", "--filter", "header.kind=odd", "--to", "fixed", "--id", "x")[
        "rows"
    ]
    assert (row["records"], row["appended"], row["repeated"]) == (3, 3, 0)
    (row,) = shell.json("dlq", "redrive", "t", "--all", "--to", "fixed", "--id", "x")["rows"]
    assert (row["records"], row["appended"], row["repeated"]) == (RECORDS, 3, 3)
    with mansio.blocking.connect(shell.environment["MANSIO_BOOTSTRAP_SERVERS"]) as client:
        consumer = client.consume("fixed", to_end=True)
        found = sorted((one.key, one.value, one.headers[0]) for one in consumer)
        consumer.close()
    assert [(key, value) for key, value, _ in found] == [(b"k%d" % at, b"v%d" % at) for at in range(RECORDS)]
    assert found[1][2] == ("kind", b"odd")
    assert world.leases().dead == RECORDS, "the group is not offered them"


def test_purge_leaves_the_records_and_takes_the_dead_letters(world: World) -> None:
    (row,) = world.shell.json("dlq", "purge", "t", "--before", "4")
    assert (row["topic"], row["offsets"], row["new_start"]) == ("dlq.t", 4, 4)
    assert world.shell.json("dlq", "list")[0]["records"] == RECORDS - 4
    (row,) = world.shell.json("dlq", "redrive", "t", "--all")["rows"]
    assert row["records"] == 2
    with mansio.blocking.connect(world.shell.environment["MANSIO_BOOTSTRAP_SERVERS"]) as client:
        assert client.admin.list_offsets([world.partition], "earliest")[world.partition].offset == 0


def test_what_is_wrong_is_reported_in_one_line(world: World) -> None:
    world.shell("topic", "create", "other")
    for arguments, code, words in (
        (("redrive", "t"), 2, "select dead letters with"),
        (("redrive", "t", "--all", "--record", "0:1"), 2, "not both"),
        (("redrive", "t", "--record", "7"), 2, "PARTITION:OFFSET"),
        (("redrive", "t", "--filter", "size=7"), 2, "is none of"),
        (("peek", "nowhere"), 1, "there is no topic nowhere"),
        (("peek", "other"), 1, "has no dead letters"),
        (("redrive", "t", "--all", "--to", "nowhere"), 1, "nowhere"),
        (("purge", "t", "--before", "soon"), 2, "none of"),
    ):
        world.shell("dlq", *arguments, code=code)
        assert words in " ".join(world.shell.errors.split()), arguments


def test_filters_and_places_are_read_as_they_are_written() -> None:
    assert parse_filter("header.a=b=c") == Filter("header.a", "b=c")
    assert parse_position("3:42") == (3, 42)
    assert offset_ranges([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]
    for wrong in ("key", "header.=1", "=1"):
        with pytest.raises(ValueError, match="is none of"):
            parse_filter(wrong)
    for wrong in ("1", "a:1", "1:-2"):
        with pytest.raises(ValueError, match="PARTITION:OFFSET"):
            parse_position(wrong)


def test_the_dead_letters_of_a_topic_with_a_long_name_are_found_by_that_name(tmp_path: Path) -> None:
    name = "t" * 249
    with mansio.Broker(tmp_path / "data") as broker, mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic(name, partitions=1)
        client.admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"})
        client.publish(name, b"poison")
        with client.receive(name, group="g") as receiver:
            (message,) = receiver.poll(timeout_ms=scaled(DEADLINE_S) * 1000)
            message.reject("bad")
        shell = Shell(broker.address)
        wait_until(lambda: len(client.admin.list_topics()) == 2, DEADLINE_S, "the dead-letter topic")
        wait_until(lambda: len(shell.json("dlq", "peek", name)) == 1, DEADLINE_S, "the dead letter")
