"""Dead-lettered records: each is written once to its topic, with all headers, whatever fails in between."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from mansio.broker.coordinator.share import dead_letter_copies, dead_letter_manager
from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.config.config_def import Change, Operation
from mansio.errors import (
    ConnectionLost,
    CoordinatorNotAvailable,
    DiskFull,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    RequestTimedOut,
    UnknownProducerId,
)
from mansio.logs import FIELDS
from mansio.metadata.topic_plan import NewTopic, check_topic_name
from mansio.net.peer_connections import PeerConnections
from mansio.state.share_partition import dead_letters
from mansio.state.share_partition.types import REJECT, AcknowledgementBatch
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from support.machine import scaled
from support.present import present
from support.waiting import eventually
from unit.broker.dead_letters_fixtures import MEMBER, DeadLetterBench, expected_ids, headers, ids, room_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterPartition
    from mansio.errors import MansioError

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "RETRY_MS_MIN", 5)
    monkeypatch.setattr(dead_letters, "RETRY_MS_MAX", 20)
    monkeypatch.setattr("mansio.broker.coordinator.share.dead_letter_manager.RETRY_MS_MIN", 5)
    monkeypatch.setattr("mansio.broker.coordinator.share.dead_letter_manager.RETRY_MS_MAX", 20)


def run(check: Callable[[DeadLetterBench], Awaitable[None]], tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)), room_in(tmp_path) as room:
            await check(room)

    asyncio.run(main())


def records(count: int, *, size: int = 10) -> list[Any]:
    return [(b"k%d" % at, b"v%d" % at + b"x" * size, [("own", b"h%d" % at)]) for at in range(count)]


async def settled(room: DeadLetterBench) -> None:
    await eventually(lambda: room.dead_letters.waiting_record_count == 0, DEADLINE_S, "no dead letter waits")
    await eventually(lambda: all(not s.is_working for s in room.dead_letters._tasks.values()))


def test_a_rejected_record_is_in_the_topic_as_it_was_with_where_it_came_from(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic(partitions=3, max_message_bytes="70000")
        await room.write(*records(4), index=2)
        share_partition = await room.share_partition(index=2)
        await share_partition.reject(1, 2, "no such flight")
        await settled(room)
        found = room.stored_dead_letters(index=2)
        assert [(one.key, present(one.value)[:2]) for one in found] == [(b"k1", b"v1"), (b"k2", b"v2")]
        first = found[0]
        assert [name for name, _ in first.headers] == [
            "own",
            "__dlq.errors.topic",
            "__dlq.errors.partition",
            "__dlq.errors.offset",
            "__dlq.errors.group",
            "__dlq.errors.delivery.count",
            "__dlq.errors.message",
            "mansio-dlq-id",
            "mansio-dlq-consumer",
            "mansio-dlq-first-ms",
            "mansio-dlq-reason",
        ]
        reported = headers(first)
        assert reported.pop("mansio-dlq-first-ms").isdigit()
        assert reported == {
            "own": "h1",
            "__dlq.errors.topic": "t",
            "__dlq.errors.partition": "2",
            "__dlq.errors.offset": "1",
            "__dlq.errors.group": "g",
            "__dlq.errors.delivery.count": "1",
            "__dlq.errors.message": "Offset rejected by client.",
            "mansio-dlq-id": expected_ids(share_partition.key, [1])[0],
            "mansio-dlq-consumer": "member-7",
            "mansio-dlq-reason": "no such flight",
        }
        made = room.service.topics.find("dlq.t")
        assert len(made.partitions) == 3
        assert dict(made.configs) == {
            "errors.deadletterqueue.group.enable": "true",
            "max.message.bytes": str(70_000 + 65_536),
            "message.timestamp.type": "CreateTime",
            "retention.ms": str(14 * 24 * 3600 * 1000),
        }
        assert room.dead(share_partition.key) == [(1, 2)]
        assert room.dead_letters.counts.written_count == 2

    run(check, tmp_path)


def batches(room: DeadLetterBench) -> int:
    log = room.partition("dlq.t").log
    return sum(1 for batch in log.batches(0) for _ in iterate_batches(batch))


def test_records_that_are_rejected_one_after_the_other_are_copied_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one does not wait; what follows is collected until the batch is full or the time is over."""
    monkeypatch.setattr(dead_letter_manager, "LINGER_MS", 1e9)
    monkeypatch.setattr(dead_letter_copies, "COPIES_MAX", 20)

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(41))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 0)
        await settled(room)
        for offset in range(1, 20):
            await share_partition.reject(offset, offset)
        assert (room.dead_letters.counts.written_count, batches(room)) == (1, 1)
        for offset in range(20, 41):
            await share_partition.reject(offset, offset)
        written = room.dead_letters.counts
        await eventually(lambda: written.written_count == 41, DEADLINE_S, "two batches are full")
        await settled(room)
        assert batches(room) == 3
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(41))

    run(check, tmp_path)


WRITES = 3  # what is stored of a rejection: given up, placed, archived


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("nth", range(WRITES))
def test_exactly_one_dead_letter_when_the_state_cannot_be_stored(
    tmp_path: Path, nth: int, stored: bool
) -> None:
    """Each arrow: the state's store fails, or its answer is lost; the broker is killed; the state is loaded again."""

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(6))
        share_partition = await room.share_partition()
        await share_partition.lease(0, 5)
        key = share_partition.key
        room.persister.fail(nth + 1, CoordinatorNotAvailable("away"), stored=stored)
        done = nth + 1 if stored else nth
        try:
            await live_reject(share_partition, 0, 3)
        except CoordinatorNotAvailable:
            assert nth == 0
        await eventually(lambda: share_partition.is_dropped)
        room.renew()
        share_partition = await room.share_partition()
        if done == 0:  # nobody was told that they are rejected
            assert room.stored_dead_letters() == []
            await live_reject(share_partition, 0, 3)
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(key, range(4))
        assert room.dead(key) == [(0, 3)]
        assert share_partition.state_machine.counts(0.0).archiving == 0

    run(check, tmp_path)


async def live_reject(share_partition: Any, first: int, last: int) -> None:
    update = share_partition.state_machine.acknowledge(
        MEMBER, [AcknowledgementBatch(first, last, bytes([REJECT]))], 0.0, share_partition.room.wall_ms(), 0.5
    )
    await share_partition.persist(update)


@pytest.mark.parametrize(
    ("error", "there"),
    [
        (RequestTimedOut("no answer"), False),
        (RequestTimedOut("no answer"), True),
        (DiskFull("no room"), False),
    ],
    ids=["before", "after", "full disk"],
)
@pytest.mark.parametrize("killed", [False, True], ids=["retried", "killed"])
def test_exactly_one_dead_letter_when_the_append_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MansioError, there: bool, killed: bool
) -> None:
    """The append does not happen, or its answer is lost; it is tried again here, or after the broker died and came
    back on the same directory."""

    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)):
            async with room_in(tmp_path) as room:
                persister = room.persister
                await room.topic()
                await room.write(*records(6))
                times = 1_000_000 if killed else 2
                failing = Failing(monkeypatch, room, times=times, there=there, error=error)
                share_partition = await room.share_partition()
                key = share_partition.key
                await share_partition.reject(0, 1)
                await share_partition.reject(3, 5)
                await eventually(lambda: failing.failed >= 2)
                if not killed:
                    await settled(room)
                    assert ids(room.stored_dead_letters()) == expected_ids(key, [0, 1, 3, 4, 5])
                    return
                room.dead_letters.close()
            monkeypatch.undo()
            async with room_in(tmp_path, persister) as room:
                await room.share_partition()
                await settled(room)
                assert ids(room.stored_dead_letters()) == expected_ids(key, [0, 1, 3, 4, 5])
                assert room.dead(key) == [(0, 1), (3, 5)]

    asyncio.run(main())


class Failing:
    """Appends to dead-letter topics that fail so many times, with their batch there or not."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        room: DeadLetterBench,
        *,
        times: int,
        there: bool,
        error: Any = None,
    ) -> None:
        self.failed = 0
        append = type(room.targets).append

        async def failing(targets: Any, target: DeadLetterPartition, data: bytes) -> None:
            if self.failed >= times:
                await append(targets, target, data)
                return
            if there:
                await append(targets, target, data)
            self.failed += 1
            raise error or RequestTimedOut("no answer")

        monkeypatch.setattr(type(room.targets), "append", failing)


def test_a_defect_costs_the_queue_and_not_the_dead_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is, the state is loaded again, and they go on."""

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(4))
        Failing(monkeypatch, room, times=1, there=True, error=KeyError("a defect"))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 3)
        await eventually(
            lambda: share_partition.is_dropped, DEADLINE_S, "it is given up, for another one to be loaded"
        )
        share_partition = await room.share_partition()
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(4))
        assert room.dead(share_partition.key) == [(0, 3)]
        assert "dead_letters_failed" in caplog.messages

    run(check, tmp_path)


def test_two_groups_have_each_their_own_dead_letters(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(3))
        one, other = await room.share_partition("a"), await room.share_partition("b")
        await one.reject(0, 1)
        await other.reject(1, 2)
        await settled(room)
        assert sorted(ids(room.stored_dead_letters())) == sorted(
            expected_ids(one.key, [0, 1]) + expected_ids(other.key, [1, 2])
        )

    run(check, tmp_path)


def test_partitions_with_their_first_dead_letters_at_once_make_the_topic_once(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic("t", partitions=4)
        share_partitions = []
        for index in range(4):
            await room.write(*records(1), index=index)
            share_partitions.append(await room.share_partition(index=index))
            await share_partitions[-1].lease(0, 0)
        await asyncio.gather(*(live_reject(share_partition, 0, 0) for share_partition in share_partitions))
        await settled(room)
        assert room.dead_letters.counts.written_count == 4
        assert room.dead_letters.counts.failure_count == 0

    run(check, tmp_path)


@pytest.mark.parametrize(
    ("count", "size", "codec", "batches"),
    [(1200, 10, Codec.NONE, [500, 500, 200]), (20, 500, Codec.ZSTD, [20])],
    ids=["more than fit into one batch", "compressed"],
)
def test_dead_letters_come_in_order_in_batches_like_those_of_their_records(
    tmp_path: Path, count: int, size: int, codec: Codec, batches: list[int]
) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(count, size=size), codec=codec)
        share_partition = await room.share_partition()
        await share_partition.reject(0, count - 1)
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(count))
        found = list(room.partition("dlq.t").log.batch_headers(0))
        assert [(each.record_count, each.codec) for each in found] == [(size, codec) for size in batches]

    run(check, tmp_path)


def test_a_record_too_large_for_the_target_comes_without_its_value(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.topic("small", errors_deadletterqueue_group_enable="true", max_message_bytes="6000")
        room.configs["errors.deadletterqueue.topic.name"] = "small"
        await room.write((b"k0", b"a" * 3000, []), (b"k1", b"b" * 9000, []), (b"k2", b"c" * 3000, []))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 2)
        await settled(room)
        found = room.stored_dead_letters("small")
        assert [(one.key, one.value and len(one.value)) for one in found] == [
            (b"k0", 3000),
            (b"k1", None),
            (b"k2", 3000),
        ]
        omitted = [headers(one).get("mansio-dlq-value-omitted") for one in found]
        assert omitted == [None, "the record is too large for the dead-letter topic", None]
        assert room.dead_letters.counts.omitted_count == 1

    run(check, tmp_path)


TAKES, SIZE = "errors.deadletterqueue.group.enable", "max.message.bytes"


@pytest.mark.parametrize(
    ("configs", "last_error", "mended"),
    [
        ({TAKES: "true", SIZE: "100"}, "max.message.bytes=100", Change(SIZE, Operation.SET, "100000")),
        ({}, "errors.deadletterqueue.group.enable=true", Change(TAKES, Operation.SET, "true")),
    ],
    ids=["too small for anything", "takes no dead letters"],
)
def test_a_target_that_cannot_be_used_gets_none_and_is_reported_until_it_can(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    configs: dict[str, str],
    last_error: str,
    mended: Change,
) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        named: Any = {name.replace(".", "_"): value for name, value in configs.items()}
        await room.topic("own", **named)
        room.configs["errors.deadletterqueue.topic.name"] = "own"
        await room.write(*records(2))
        share_partition = await room.share_partition()
        with caplog.at_level(logging.WARNING):
            await share_partition.reject(0, 1)
            await eventually(lambda: room.dead_letters.counts.failure_count >= 2)
        assert room.stored_dead_letters("own") == []
        assert room.dead_letters.waiting_record_count == 2
        assert last_error in room.dead_letters.last_error_of(share_partition.key)
        reported = next(one for one in caplog.records if one.message == "dead_letter_not_written")
        assert getattr(reported, FIELDS)["group"] == "g"
        assert getattr(reported, FIELDS)["topic"] == "t"
        assert share_partition.state_machine.counts(0.0).archiving == 2
        await room.service.topics.alter_configs("own", [mended])
        await settled(room)
        assert ids(room.stored_dead_letters("own")) == expected_ids(share_partition.key, [0, 1])
        assert room.dead_letters.last_error_of(share_partition.key) == ""

    run(check, tmp_path)


def test_what_failed_is_tried_again_at_once_when_the_target_or_the_group_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it would rest."""
    for name in ("RETRY_MS_MIN", "RETRY_MS_MAX"):
        monkeypatch.setattr(dead_letters, name, 600_000)
        monkeypatch.setattr(f"mansio.broker.coordinator.share.dead_letter_manager.{name}", 600_000)

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.topic("own")
        room.service.topics.state.on_change(room.dead_letters.handle_topic_change)
        await room.write(*records(3))
        share_partition = await room.share_partition()
        failing = Failing(monkeypatch, room, times=1, there=False)  # it has its place, and could not be sent
        await share_partition.reject(0, 0)
        await eventually(lambda: failing.failed == 1)
        await room.service.topics.alter_configs("dlq.t", [Change("retention.ms", Operation.SET, "1000000")])
        await settled(room)
        room.configs["errors.deadletterqueue.topic.name"] = "own"  # which does not take dead letters
        await share_partition.reject(1, 1)
        await eventually(lambda: room.dead_letters.last_error_of(share_partition.key))
        room.configs.clear()
        room.dead_letters.handle_settings_change("another group")
        room.dead_letters.handle_settings_change("g")
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, [0, 1])

    run(check, tmp_path)


@pytest.mark.parametrize("error", [OutOfOrderSequence("lost"), UnknownProducerId("lost")])
def test_a_target_that_forgot_the_producer_gets_them_in_a_higher_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(4))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 1)
        await settled(room)
        Failing(monkeypatch, room, times=1, there=False, error=error)
        await share_partition.reject(2, 3)
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(4))
        epochs = [header.producer_epoch for header in room.partition("dlq.t").log.batch_headers(0)]
        assert epochs == [0, 1]
        producer = room.persister.state(share_partition.key).producer  # type: ignore[union-attr]
        assert producer is not None
        assert producer.epoch == 1

    run(check, tmp_path)


@pytest.mark.parametrize("characters", [245, 246, 249])
def test_records_of_a_topic_with_a_long_name_are_dead_lettered(tmp_path: Path, characters: int) -> None:
    async def check(room: DeadLetterBench) -> None:
        topic = "t" * characters
        name = room.dead_letters._targets.dead_letter_topic_name("g", topic)
        assert (name == f"dlq.{topic}") == (characters == 245)
        check_topic_name(name)
        found = await room.dead_letters._targets.find(
            "g", await room.service.topics.create(NewTopic(topic, 1)), 0
        )
        assert found.topic == name

    run(check, tmp_path)


def test_a_dead_letter_topic_whose_name_differs_in_dot_and_underscore_is_used(tmp_path: Path) -> None:
    """As of two topics with such names, which an earlier version created: one dead-letter topic can exist."""

    async def check(room: DeadLetterBench) -> None:
        source = await room.service.topics.create(NewTopic("a.b", 1))
        there = await room.dead_letters._targets.find("g", source, 0)
        other = dataclasses.replace(source, name="a_b", topic_id=UUID(int=7))
        assert await room.dead_letters._targets.find("g", other, 0) == there

    run(check, tmp_path)


def test_a_recreated_dead_letter_topic_gets_the_pending_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is the same and its id is not: what was reserved in the old one has no meaning there."""

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(6))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 1)
        await settled(room)
        before = room.service.topics.find("dlq.t")
        with monkeypatch.context() as patch:
            failing = Failing(patch, room, times=1_000_000, there=True)
            await share_partition.reject(2, 5)
            await eventually(lambda: failing.failed >= 1)
            await room.service.topics.delete(before)
        await settled(room)
        assert room.service.topics.find("dlq.t").topic_id != before.topic_id
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(2, 6))

    run(check, tmp_path)


def test_a_producer_that_the_target_forgot_is_looked_for_before_a_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is there without an answer, and by the time it is sent again the target has no such producer."""

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(3))
        Failing(monkeypatch, room, times=1_000_000, there=True)
        share_partition = await room.share_partition()
        await share_partition.reject(0, 2)
        await eventually(lambda: len(room.stored_dead_letters()) == 3)
        (task,) = room.dead_letters._tasks.values()
        share_partition.drop()
        await eventually(lambda: not task.is_working)
        monkeypatch.undo()
        hook = room.partition("dlq.t").find_hook(ProducerHook)
        assert hook is not None
        assert hook.table.expire(room.wall_ms() + 48 * 3_600_000) == 1
        await room.share_partition()
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(3))
        assert room.dead(share_partition.key) == [(0, 2)]

    run(check, tmp_path)


def test_what_left_the_log_meanwhile_has_a_dead_letter_that_states_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        for record in records(4):
            await room.write(record)
        failing = Failing(monkeypatch, room, times=1_000_000, there=False)
        share_partition = await room.share_partition()
        await share_partition.reject(0, 3)
        await eventually(lambda: failing.failed >= 1)
        await room.partition().delete_records(2)
        monkeypatch.undo()
        await settled(room)
        found = room.stored_dead_letters()
        assert ids(found) == expected_ids(share_partition.key, range(4))
        assert [one.key for one in found] == [None, None, b"k2", b"k3"]
        assert headers(found[0])["mansio-dlq-value-omitted"] == "the record was deleted from the log"
        assert "own" not in headers(found[0])

    run(check, tmp_path)


def test_a_group_may_have_no_copies(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        room.configs["errors.deadletterqueue.copy.record.enable"] = "false"
        await room.write(*records(1))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 0)
        await settled(room)
        (found,) = room.stored_dead_letters()
        assert (found.key, found.value) == (None, None)
        assert headers(found)["__dlq.errors.offset"] == "0"

    run(check, tmp_path)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker of the dead letters believes to be another than the one that leads their topic, and reaches that over
    its port."""
    made = DeadLetterTopics.__init__

    def made_far(targets: DeadLetterTopics, **given: Any) -> None:
        peers = PeerConnections(lambda node_id: PORTS.get(node_id))
        made(targets, **{**given, "node_id": 99, "peers": peers})
        OPENED.append(peers)

    monkeypatch.setattr(DeadLetterTopics, "__init__", made_far)


PORTS: dict[int, tuple[str, int]] = {}
OPENED: list[PeerConnections] = []


def run_far(check: Callable[[DeadLetterBench], Awaitable[None]], tmp_path: Path) -> None:
    async def far_check(room: DeadLetterBench) -> None:
        PORTS[1] = (room.broker.listener_address.host, room.broker.listener_address.port)
        try:
            await check(room)
        finally:
            while OPENED:
                await OPENED.pop().close()

    run(far_check, tmp_path)


@pytest.mark.usefixtures("far")
def test_a_target_that_another_broker_leads_gets_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the wire, with an answer that is lost, and one batch that the target has forgotten the producer of."""

    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(6))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 1)
        await settled(room)
        with monkeypatch.context() as patch:
            failing = Failing(patch, room, times=1, there=True)
            await share_partition.reject(2, 3)
            await settled(room)
            assert failing.failed == 1
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(4))
        with monkeypatch.context() as patch:
            Failing(patch, room, times=1_000_000, there=True)
            await share_partition.reject(4, 5)
            await eventually(lambda: len(room.stored_dead_letters()) == 6)
            (task,) = room.dead_letters._tasks.values()
            share_partition.drop()
            await eventually(
                lambda: not task.is_working
            )  # what it had sent would be appended after the expiry
        hook = room.partition("dlq.t").find_hook(ProducerHook)
        assert hook is not None
        hook.table.expire(room.wall_ms() + 48 * 3_600_000)
        monkeypatch.setattr(dead_letters, "REPEAT_RECOGNITION_MS", -1)
        await room.share_partition()
        await settled(room)
        assert ids(room.stored_dead_letters()) == expected_ids(share_partition.key, range(6))
        assert room.dead(share_partition.key) == [(0, 5)]

    run_far(check, tmp_path)


@pytest.mark.usefixtures("far")
def test_what_another_broker_refuses_is_understood(tmp_path: Path) -> None:
    async def check(room: DeadLetterBench) -> None:
        await room.topic()
        await room.write(*records(2))
        share_partition = await room.share_partition()
        await share_partition.reject(0, 0)
        await settled(room)
        target = room.targets.find_by_id(room.key(topic="dlq.t").topic_id, 0)
        producer = room.persister.state(share_partition.key).producer  # type: ignore[union-attr]
        assert producer is not None

        def batch(epoch: int, sequence: int) -> bytes:
            record = (room.wall_ms(), b"k", b"v", ())
            return build_batch(
                [record],
                producer_id=producer.producer_id,
                producer_epoch=epoch,
                base_sequence=sequence,
            )

        with pytest.raises(OutOfOrderSequence):
            await room.targets.append(target, batch(0, 7))
        await room.targets.append(target, batch(1, 0))
        with pytest.raises(InvalidProducerEpoch):
            await room.targets.append(target, batch(0, 1))
        PORTS.clear()
        with pytest.raises(ConnectionLost):
            await room.targets.append(target, batch(1, 1))

    run_far(check, tmp_path)
