"""ShareFetch and ShareAcknowledge on a whole broker, by the wire: limits, sessions, renewals, waits, and what a member
is not told."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
from mansio.errors import (
    CoordinatorNotAvailable,
    InvalidRecordState,
    InvalidRequest,
    InvalidShareSessionEpoch,
    InvalidTopic,
    NotLeaderOrFollower,
    ShareSessionLimitReached,
    ShareSessionNotFound,
    UnknownTopicId,
)
from mansio.metadata.metadata_store import Delete, Put, encode
from mansio.state.share_partition.types import ACCEPT, ACQUIRED, RELEASE, RENEW, ShareKey
from mansio.wire.apis.share_acknowledge import AckBatch
from mansio.wire.apis.share_fetch import RECORD_LIMIT
from support.machine import scaled
from support.waiting import eventually
from unit.broker.share_fixtures import Peer, ShareBench, offsets, part_of, run

if TYPE_CHECKING:
    from pathlib import Path

NOTHING: list[Any] = []
LONG_MS = 30_000
"""Longer than a test may last."""


def ack(first: int, last: int, kind: int = ACCEPT) -> AckBatch:
    return AckBatch(first, last, bytes([kind]))


def code_of(answer: Any) -> int:
    """Of the one partition that was acknowledged."""
    ((_, (part,)),) = answer.topics
    return int(part.error_code)


async def on_loaded(room: ShareBench, *sizes: int, **more: Any) -> Peer:
    """A member with a session; the topic has batches of these sizes, and the group begins with them."""
    room.remember(**more)
    await room.write(*sizes)
    peer = await room.peer()
    await peer.fetch(0)
    return peer


def test_a_record_limit_is_kept_and_otherwise_a_batch_is_finished(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 10, 10, 50, 5)
        strict = part_of(await peer.fetch(7, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        assert offsets(strict) == list(range(7))
        finished = part_of(await peer.fetch(7, acquire_mode=0))
        assert offsets(finished) == list(range(7, 20)), "the batch of the last record is finished"
        large = part_of(await peer.fetch(7, acquire_mode=0))
        assert offsets(large) == list(range(20, 70)), "however long it is"
        assert part_of(await peer.fetch(1000, acquire_mode=RECORD_LIMIT)).acquired == [(70, 74, 1)]

    run(check, tmp_path)


def test_few_bytes_are_one_batch_and_no_offset_beyond_it(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 5, 5, 5)
        assert offsets(part_of(await peer.fetch(100, wait_ms=5000, max_bytes=1))) == list(range(5))
        await peer.acknowledge(ack(1, 1, RELEASE), ack(3, 3, RELEASE))
        both = part_of(await peer.fetch(100, max_bytes=1))
        assert both.acquired == [(1, 1, 2), (3, 3, 2)], "one batch is sent once for all that is free of it"

    run(check, tmp_path)


def test_renewals(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 4, lock_ms=1500)
        old = await room.peer("m2", version=1)
        await old.fetch(0)
        part_of(await peer.fetch(4, wait_ms=5000))
        assert code_of(await peer.acknowledge(ack(0, 3, RENEW))) == InvalidRequest.kafka_code, "not announced"
        wants = await peer.fetch(5, acks=[ack(0, 3, RENEW)], is_renew_ack=True)
        assert wants.error_code == InvalidRequest.kafka_code, "renews and asks for records"
        assert code_of(await old.acknowledge(ack(0, 3, RENEW))) == InvalidRequest.kafka_code, (
            "version 1 has none"
        )
        began, beaten = time.monotonic(), 0
        while time.monotonic() - began < 3.1:
            await asyncio.sleep(0.1)
            if beaten % 2:
                answer = await peer.acknowledge(ack(0, 1, RENEW), is_renew_ack=True)
                assert code_of(answer) == 0
                assert answer.lock_ms == 1500
            else:
                more = await peer.fetch(0, acks=[ack(0, 1, RENEW)], max_bytes=0, is_renew_ack=True)
                assert part_of(more).acknowledge_error_code == 0
            beaten += 1
        assert code_of(await peer.acknowledge(ack(0, 1))) == 0, "two leases of 1.5 s lasted longer"
        assert code_of(await peer.acknowledge(ack(2, 3))) == InvalidRecordState.kafka_code

    run(check, tmp_path)


def test_sessions_are_counted_limited_and_ended(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 6, sessions_max=2)
        assert (await peer.fetch(1, epoch=7)).error_code == InvalidShareSessionEpoch.kafka_code
        assert (await peer.acknowledge(ack(0, 0), epoch=0)).error_code == InvalidShareSessionEpoch.kafka_code
        other = await room.peer("m2")
        assert (await other.fetch(1, epoch=1)).error_code == ShareSessionNotFound.kafka_code
        assert (await other.fetch(1, epoch=-1)).error_code == ShareSessionNotFound.kafka_code
        assert (await other.fetch(1, acks=[ack(0, 0)])).error_code == InvalidRequest.kafka_code
        assert (await other.fetch(0)).error_code == 0
        third = await room.peer("m3")
        assert (await third.fetch(0)).error_code == ShareSessionLimitReached.kafka_code
        held = part_of(await peer.fetch(6, wait_ms=5000))
        assert offsets(held) == list(range(6))
        final = await peer.acknowledge(ack(0, 1), epoch=-1)
        assert code_of(final) == 0
        assert part_of(await other.fetch(6)).acquired == [(2, 5, 2)], "acked first, and the rest is free"
        assert (await third.fetch(0)).error_code == 0, "and so is its place"
        memberless = await room.peer("")
        assert (await memberless.fetch(1)).error_code == InvalidRequest.kafka_code
        large = await room.peer("m" * 256)
        assert (await large.fetch(1)).error_code == InvalidRequest.kafka_code

    run(check, tmp_path)


def test_a_fetch_whose_connection_is_gone_takes_nothing_from_the_members_next_one(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room)
        parked = asyncio.create_task(peer.fetch(3, wait_ms=LONG_MS))
        await eventually(lambda: room.service.share_partition_manager.parked)
        again = await room.peer()
        again.epoch = peer.epoch + 1
        assert (await again.fetch(0)).error_code == 0, "its session goes on over another connection"
        (waiting,) = room.service.share_partition_manager.parked
        (share_partition,) = room.service.share_partition_manager.share_partitions()
        for parked_at in (
            share_partition,
            room.partition.waits,
        ):  # the records come in the same moment as the end
            parked_at.unpark(waiting._wake)  # type: ignore[attr-defined]
        await room.write(3)
        peer.close()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await parked
        await eventually(lambda: not room.service.share_partition_manager.parked)
        assert part_of(await again.fetch(3, wait_ms=500)).acquired == [(0, 2, 1)]

    run(check, tmp_path)


def test_a_new_session_of_a_member_gives_up_what_the_old_one_had(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 3)
        assert offsets(part_of(await peer.fetch(3, wait_ms=5000))) == [0, 1, 2]
        peer.epoch = 0
        assert part_of(await peer.fetch(3)).acquired == [(0, 2, 2)]

    run(check, tmp_path)


def test_a_fetch_waits_for_records_for_a_release_and_no_longer_than_requested(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room)
        other = await room.peer("m2")
        await other.fetch(0)
        waiting = asyncio.create_task(peer.fetch(10, wait_ms=LONG_MS))
        await eventually(lambda: len(room.service.share_partition_manager.parked) == 1)
        await room.write(3)
        assert offsets(part_of(await waiting)) == [0, 1, 2]
        waiting = asyncio.create_task(other.fetch(10, wait_ms=LONG_MS))
        await eventually(lambda: len(room.service.share_partition_manager.parked) == 1)
        assert code_of(await peer.acknowledge(ack(1, 1, RELEASE))) == 0
        assert part_of(await waiting).acquired == [(1, 1, 2)]
        began = time.monotonic()
        assert (await other.fetch(10, wait_ms=200)).topics == NOTHING
        assert 0.15 < time.monotonic() - began < scaled(5)
        assert not room.service.share_partition_manager.parked

    run(check, tmp_path)


def test_locks_are_limited_and_an_ack_makes_room(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 150, 150, **{"share.partition.max.record.locks": "100"})
        other = await room.peer("m2")
        await other.fetch(0)
        assert offsets(part_of(await peer.fetch(1000, wait_ms=5000))) == list(range(100))
        assert (await other.fetch(1000, wait_ms=50)).topics == NOTHING
        waiting = asyncio.create_task(other.fetch(1000, wait_ms=LONG_MS))
        await eventually(lambda: len(room.service.share_partition_manager.parked) == 1)
        both = await peer.fetch(0, acks=[ack(0, 59)], max_bytes=0)
        assert part_of(both).acknowledge_error_code == 0
        assert offsets(part_of(await waiting)) == list(range(100, 160))

    run(check, tmp_path)


def test_acks_are_stored_with_the_next_leases_in_one_write(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 20)
        part_of(await peer.fetch(10, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        writes = len(room.known_state.writes)
        part = part_of(await peer.fetch(10, acks=[ack(0, 9)], acquire_mode=RECORD_LIMIT))
        assert (part.acknowledge_error_code, part.acquired) == (0, [(10, 19, 1)])
        (update,) = [update for _, update in room.known_state.writes[writes:]]
        assert update.durable
        assert [(each.first, each.last) for each in update.changes] == [(0, 9), (10, 19)]
        assert update.start_offset == 10
        at_once = await peer.fetch(10, acks=[ack(10, 19)], wait_ms=LONG_MS)
        assert part_of(at_once).acknowledge_error_code == 0, "confirmed now, not when there is more to fetch"

    run(check, tmp_path)


@pytest.mark.parametrize("stored", [False, True])
def test_a_write_that_fails_leases_nothing_and_confirms_nothing(tmp_path: Path, stored: bool) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 10, lock_ms=400)
        part_of(await peer.fetch(5, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        room.known_state.fail(1, CoordinatorNotAvailable("gone"), stored=stored)
        answer = await peer.fetch(5, wait_ms=5000, acquire_mode=RECORD_LIMIT)
        assert answer.topics == [], "leases that are not stored are not reported"
        answer = await peer.fetch(5, wait_ms=5000, acquire_mode=RECORD_LIMIT)
        reported = part_of(answer).acquired
        assert reported == ([(5, 9, 1)] if not stored else [(0, 4, 2)]), (
            "what may be leased waits for its end"
        )
        room.known_state.fail(1, CoordinatorNotAvailable("gone"), stored=stored)
        refused = await peer.acknowledge(ack(*reported[0][:2]))
        assert code_of(refused) == CoordinatorNotAvailable.kafka_code
        state = room.known_state.state(ShareKey("g", room.topic_id, 0))
        assert state is not None
        assert any(each.state == ACQUIRED for each in state.changes) or stored

    run(check, tmp_path)


@pytest.mark.parametrize("where", ["_read", "acknowledge"])
def test_a_defect_while_a_fetch_is_answered_leaves_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 10)
        part_of(await peer.fetch(5, wait_ms=5000, acquire_mode=RECORD_LIMIT))
        with monkeypatch.context() as broken:
            broken.setattr(SharePartitionLeader, "plan_exchange", lambda *_, **__: None)
            broken.setattr(SharePartitionLeader, where, lambda *_, **__: 1 / 0)
            refused = part_of(await peer.fetch(5, acks=[ack(0, 4)], acquire_mode=RECORD_LIMIT))
        assert (refused.acknowledge_error_code, refused.acquired) == (CoordinatorNotAvailable.kafka_code, [])
        assert part_of(await peer.fetch(5, wait_ms=5000)).acquired == [(5, 9, 1)], "it is loaded anew"
        assert code_of(await peer.acknowledge(ack(0, 4))) == 0
        assert room.service.share_partition_manager.share_partitions()[0].state_machine.ranges.start == 5

    run(check, tmp_path)


def test_no_member_gets_leases_from_a_broker_that_is_not_the_leader_any_more(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 5)
        await peer.fetch(1, wait_ms=5000, acquire_mode=RECORD_LIMIT)
        release = room.known_state.hold(1)
        waiting = asyncio.create_task(peer.fetch(4, wait_ms=100))
        await eventually(lambda: room.known_state._held == {})
        room.partition.is_leader = False
        release()
        part = part_of(await waiting)
        assert (part.error_code, part.acquired, part.records) == (NotLeaderOrFollower.kafka_code, NOTHING, ())
        room.partition.is_leader = True

    run(check, tmp_path)


@pytest.mark.parametrize("fetches", [False, True])
def test_a_leader_that_was_replaced_without_its_knowledge_renews_no_lease(
    tmp_path: Path, fetches: bool
) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 4)
        assert offsets(part_of(await peer.fetch(4, wait_ms=5000))) == [0, 1, 2, 3]
        key, before = ShareKey("g", room.topic_id, 0), len(room.known_state.writes)
        assert code_of(await peer.acknowledge(ack(0, 3, RENEW), is_renew_ack=True)) == 0
        ((_, update),) = room.known_state.writes[before:]
        assert (update.durable, update.changes) == (True, ())
        await room.known_state.read(key, room.partition.leader_epoch + 1)  # by the next leader
        if fetches:
            answer = await peer.fetch(0, acks=[ack(0, 3, RENEW)], max_bytes=0, is_renew_ack=True)
            assert part_of(answer).acknowledge_error_code != 0
        else:
            assert code_of(await peer.acknowledge(ack(0, 3, RENEW), is_renew_ack=True)) != 0

    run(check, tmp_path)


def test_leases_under_way_when_the_connection_ends_are_free_at_once(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 5)
        other = await room.peer("m2")
        await other.fetch(0)
        assert offsets(part_of(await peer.fetch(1, wait_ms=5000, acquire_mode=RECORD_LIMIT))) == [0]
        release = room.known_state.hold(1)
        waiting = asyncio.create_task(peer.fetch(5, wait_ms=5000))
        await eventually(lambda: room.known_state._held == {})
        peer.close()
        await eventually(lambda: not room.service.share_partition_manager.sessions.has_session("g", "m1"))
        release()
        assert part_of(await other.fetch(1, wait_ms=5000, acquire_mode=RECORD_LIMIT)).acquired == [(0, 0, 2)]
        await eventually(
            lambda: (
                room.service.share_partition_manager.share_partitions()[0].state_machine.counts(0).leased == 1
            )
        )
        assert part_of(await other.fetch(5, wait_ms=5000)).acquired == [(1, 4, 2)]
        with pytest.raises(asyncio.IncompleteReadError):
            await waiting

    run(check, tmp_path)


def test_a_record_that_kills_its_consumers_is_given_up_like_any_other(tmp_path: Path) -> None:
    """Each of them dies without a word; one that leaves in order has not tried."""

    async def check(room: ShareBench) -> None:
        configs: Any = {"share.delivery.count.limit": "2"}
        room.remember(**configs)
        await room.write(1)
        for deliveries, in_order in enumerate([False, True, True, False], start=1):
            peer = await room.peer(f"m{deliveries}")
            await peer.fetch(0)
            taken = part_of(await peer.fetch(1, wait_ms=5000))
            assert taken.acquired == [(0, 0, deliveries)]
            if in_order:
                await peer.acknowledge(epoch=-1)
            peer.close()
            await eventually(
                lambda name=peer.member: (
                    not room.service.share_partition_manager.sessions.has_session("g", name)
                )
            )
        share_partition = room.service.share_partition_manager.share_partitions()[0]
        await eventually(lambda: share_partition.state_machine.ranges.start == 1)

    run(check, tmp_path)


def test_a_broker_that_stood_still_ends_no_lease_before_its_member_can_speak(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room, 2, lock_ms=300)
        assert offsets(part_of(await peer.fetch(2, wait_ms=5000))) == [0, 1]
        time.sleep(1.6)  # noqa: ASYNC251 - the whole loop stands still
        await asyncio.sleep(0.05)
        assert code_of(await peer.acknowledge(ack(0, 0))) == 0
        assert part_of(await peer.fetch(2, wait_ms=5000)).acquired == [(1, 1, 2)], "then it ends all the same"

    run(check, tmp_path)


def test_what_cannot_be_shared_is_refused_by_partition(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        room.remember()
        peer = await room.peer()
        room_id = room.topic_id
        try:
            type(room).topic_id = property(lambda _: b"\x07" * 16)  # type: ignore[assignment]
            assert code_of(await peer.fetch(1)) == UnknownTopicId.kafka_code
        finally:
            type(room).topic_id = property(lambda _: room_id)  # type: ignore[assignment]
        room.partition.internal = True
        assert code_of(await (await room.peer("m2")).fetch(1)) == InvalidTopic.kafka_code
        room.partition.internal = False

    original = ShareBench.topic_id
    try:
        run(check, tmp_path)
    finally:
        ShareBench.topic_id = original


def test_a_stopping_broker_answers_waiting_requests(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await on_loaded(room)
        waiting = asyncio.create_task(peer.fetch(1, wait_ms=20_000))
        await eventually(lambda: len(room.service.share_partition_manager.parked) == 1)
        await room.broker.stop()
        assert (await waiting).topics == NOTHING

    run(check, tmp_path)


def test_a_fetch_that_waits_takes_nothing_for_a_session_that_is_over(tmp_path: Path) -> None:
    """Its records would be released at once, delivered to no member and counted."""

    async def check(room: ShareBench) -> None:
        room.remember()
        await room.write(3)
        peer, other = await room.peer(), await room.peer("m2")
        for each in (peer, other):
            await each.fetch(0)
        assert offsets(part_of(await other.fetch(3, wait_ms=5000))) == [0, 1, 2]
        waiting = asyncio.create_task(peer.fetch(3, wait_ms=LONG_MS))
        await eventually(
            lambda: any(
                share_partition.has_waiters_or_writes
                for share_partition in room.service.share_partition_manager.share_partitions()
            )
        )
        closer = await room.peer("m1")
        assert (await closer.acknowledge(epoch=-1)).error_code == 0
        await other.acknowledge(ack(0, 2, RELEASE))
        assert not any(part.acquired for _, parts in (await waiting).topics for part in parts)
        assert part_of(await other.fetch(3, wait_ms=5000)).acquired == [(0, 2, 2)]

    run(check, tmp_path)


@pytest.mark.parametrize("kind", ["set", "reset"])
def test_a_group_starts_where_another_broker_was_asked_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The change is in the metadata store, and this broker has not received it when the member subscribes."""

    async def check(room: ShareBench) -> None:
        topics = room.service.topics
        state, store = topics.state, topics._store
        key = state.keys.group_config("g")
        put = Put(key, encode({"configs": {"share.auto.offset.reset": "earliest"}}, "other"))
        if kind == "reset":
            done = await store.transact([], [put])
            await state.wait_for_revision(done.revision, room.service.scheduler)
        await room.write(5)
        delayed: list[Any] = []
        apply = state._apply
        monkeypatch.setattr(type(state), "_apply", lambda _, events: delayed.append(events))
        await store.transact([], [put if kind == "set" else Delete(key)])
        peer = await room.peer()
        await peer.fetch(0)
        waiting = asyncio.create_task(peer.fetch(10, wait_ms=LONG_MS))
        shares = room.service.share_partition_manager
        await eventually(lambda: delayed and shares.share_partitions(), 20, "the change and the group")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not shares.share_partitions()[0].is_ready
        monkeypatch.undo()
        for events in delayed:
            apply(events)
        if kind == "reset":
            await eventually(lambda: shares.share_partitions()[0].is_ready)
            await room.write(1)
        assert offsets(part_of(await waiting)) == ([0, 1, 2, 3, 4] if kind == "set" else [5])

    run(check, tmp_path)
