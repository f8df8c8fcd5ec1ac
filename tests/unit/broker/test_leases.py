"""Mansio's own requests on leases, over a socket to a broker: acknowledge, describe, redrive, and the resulting
dead-lettered records."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.api.http import metrics_broker
from mansio.broker.coordinator.share import share_partition_manager
from mansio.client import connect
from mansio.client.types import TopicPartition
from mansio.config.config_def import Change, Operation
from mansio.config.settings import Settings
from mansio.errors import (
    FencedLeaderEpoch,
    FencedStateEpoch,
    InvalidRecordState,
    InvalidRequest,
    MansioError,
    NonEmptyGroup,
    NotLeaderOrFollower,
)
from mansio.metadata.topic_plan import NewTopic
from mansio.node.broker import Broker
from mansio.state.share_partition import dead_letters
from mansio.state.share_partition.types import ACCEPT, REJECT, RELEASE, RENEW, ShareKey
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.present import present
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from mansio.client import Client
    from mansio.client.types import Message

DEADLINE_S = 20.0
ONE = TopicPartition("t", 0)
OFFSETS = 10


class LeaseBench:
    """A broker, a client of it, and a share group "g" that reads topic "t" from its beginning."""

    def __init__(self, broker: Broker, client: Client) -> None:
        self.broker = broker
        self.service = broker.service
        self.client = client
        self.shares = client.admin.shares

    @property
    def topic_id(self) -> bytes:
        return self.service.topics.find("t").topic_id.bytes

    async def lease(self, first: int, last: int, member: str = "m1", group: str = "g", index: int = 0) -> Any:
        """As a fetch would: these offsets are the member's."""
        share_partition = self.service.share_partition_manager.find_one(ShareKey(group, self.topic_id, index))
        state_machine = await share_partition.wait_until_loaded()

        async def due() -> bool:
            now_ms, wall_ms = share_partition.now_ms(), self.service.clock.wall_ms()
            if (
                update := share_partition.call_machine_and_set_timer(state_machine.tick, now_ms, wall_ms, 0.5)
            ) is not None:
                await share_partition.persist(present(update))
            return any(
                low <= first and last <= high
                for low, high in state_machine.acquirable_ranges(
                    member, 100, share_partition.partition.high_watermark, share_partition.now_ms()
                )
            )

        await eventually(due, DEADLINE_S, f"{first} to {last} are to be had")
        got, update = share_partition.call_machine_and_set_timer(
            state_machine.acquire,
            member,
            [(first, last)],
            100,
            strict=True,
            batch_ends=(),
            now_ms=share_partition.now_ms(),
        )
        assert [(one.first, one.last) for one in got] == [(first, last)]
        await share_partition.persist(present(update))
        return share_partition

    async def acknowledge(self, *batches: dict[str, Any], member: str = "m1", index: int = 0) -> Any:
        """One partition's answer."""
        partition = {"partition_index": index, "batches": list(batches)}
        fields = {
            "group_id": "g",
            "member_id": member,
            "topics": [{"topic_id": self.topic_id, "partitions": [partition]}],
        }
        answer = await self.call_and_rearm(ApiKey.ACKNOWLEDGE_RECORDS, fields)
        (settled,) = answer.topics[0].partitions
        return settled

    async def call_and_rearm(self, key: ApiKey, fields: dict[str, Any]) -> Any:
        connection = await self.client._cluster.any_connection()
        return await connection.request(key, fields)

    async def reject(self, first: int, last: int, reason: str = "poison") -> None:
        await self.lease(first, last)
        assert (await self.acknowledge(batch(first, last, REJECT, reason=reason))).error_code == 0
        await self.archived()

    async def archived(self) -> None:
        async def none_waits() -> bool:
            found = (await self.shares.leases("g", [ONE]))[ONE]
            return found is not None and found.archiving == 0

        await eventually(none_waits, DEADLINE_S, "no dead letter waits")

    async def stored_dead_letters(self) -> list[Message]:
        async with self.client.consume("dlq.t", to_end=True) as consumer:
            return [message async for message in consumer]


def batch(first: int, last: int, kind: int, **more: Any) -> dict[str, Any]:
    return {"first_offset": first, "last_offset": last, "types": bytes([kind]), **more}


@asynccontextmanager
async def world_in(directory: Path) -> AsyncIterator[LeaseBench]:
    broker = Broker(Settings(listeners="127.0.0.1:0", http_listener="", data_dir=str(directory)))
    await broker.start()
    try:
        host, port = broker.listener_address
        async with connect(f"{host}:{port}") as client:
            yield LeaseBench(broker, client)
    finally:
        await broker.stop()


async def prepared(world: LeaseBench) -> None:
    set_ = Operation.SET
    changes = [
        Change("share.auto.offset.reset", set_, "earliest"),
        Change("mansio.retry.backoff.ms", set_, "0"),
    ]
    assert world.service.group_configs is not None
    await world.service.group_configs.alter("g", changes)
    await world.service.topics.create(NewTopic("t", 2, 1))
    for at in range(OFFSETS):
        await world.client.publish("t", f"v{at}", key=f"k{at}", headers=[("own", b"%d" % at)], partition=0)


def run(check: Callable[[LeaseBench], Awaitable[None]], directory: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)), world_in(directory) as world:
            await prepared(world)
            await check(world)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "RETRY_MS_MIN", 20)


def test_what_is_settled_is_settled_and_what_is_wrong_changes_nothing(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        share_partition = await world.lease(0, 5)
        wrong = await world.acknowledge(batch(0, 1, ACCEPT), batch(2, 2, ACCEPT, delivery_count=7))
        assert wrong.error_code == InvalidRecordState.kafka_code
        assert share_partition.state_machine.counts(share_partition.now_ms()).leased == 6, (
            "all of a partition's part holds, or nothing"
        )
        assert (await world.acknowledge(batch(0, 0, ACCEPT), member="m2")).error_code == 121
        assert (await world.acknowledge(batch(3, 2, ACCEPT))).error_code == InvalidRequest.kafka_code
        done = await world.acknowledge(
            batch(0, 1, ACCEPT), batch(2, 2, RELEASE, delay_ms=60_000), batch(3, 3, RENEW, delivery_count=1)
        )
        assert (done.error_code, done.error_message) == (0, None)
        found = (await world.shares.leases("g", [ONE], ranges_max=10))[ONE]
        assert found is not None
        assert (found.start_offset, found.lag, found.leased, found.in_backoff) == (2, 8, 3, 1)
        assert [(one.member_id, one.leased) for one in found.holders] == [("m1", 3)]
        assert found.holders[0].oldest_ms < 10_000
        shown = [(one.first_offset, one.last_offset, one.delivery_count) for one in found.ranges]
        assert shown == [(3, 5, 1)] or shown == [(3, 3, 1), (4, 5, 1)]

    run(check, tmp_path)


@pytest.mark.parametrize("fenced", [FencedLeaderEpoch, FencedStateEpoch])
def test_a_fenced_leader_reports_that_another_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fenced: type[MansioError]
) -> None:
    async def check(world: LeaseBench) -> None:
        await world.lease(0, 5)

        def begin_write(*arguments: Any) -> None:
            on_stored = arguments[-1]
            on_stored(fenced("behind"))

        monkeypatch.setattr(world.service.share_partition_manager.persister, "begin_write", begin_write)
        refused = await world.acknowledge(batch(0, 1, ACCEPT))
        assert refused.error_code == NotLeaderOrFollower.kafka_code

    run(check, tmp_path)


def test_a_rejection_has_its_reason_and_a_dead_letter(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        await world.reject(3, 4, "no such flight")
        found = await world.stored_dead_letters()
        assert [(one.key, one.value) for one in found] == [(b"k3", b"v3"), (b"k4", b"v4")]
        assert found[0].header("mansio-dlq-reason") == b"no such flight"
        assert found[0].header("own") == b"3"
        described = (await world.shares.leases("g", [ONE]))[ONE]
        assert described is not None
        assert (described.dead, described.archiving, described.dead_letter_error) == (2, 0, "")

    run(check, tmp_path)


def test_looking_makes_no_state(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        assert await world.shares.leases("g", [ONE]) == {ONE: None}
        assert len(world.service.share_partition_manager) == 0
        nowhere = await world.call_and_rearm(
            ApiKey.DESCRIBE_LEASES,
            {"group_id": "g", "topics": [{"topic_id": b"\x07" * 16, "partitions": [0]}], "ranges_max": 1},
        )
        assert nowhere.topics[0].partitions[0].error_code == 100
        await world.lease(0, 0)
        every = await world.call_and_rearm(
            ApiKey.DESCRIBE_LEASES, {"group_id": "g", "topics": None, "ranges_max": 1}
        )
        assert [(one.topic_id, len(one.partitions)) for one in every.topics] == [(world.topic_id, 1)]

    run(check, tmp_path)


def test_acknowledging_makes_no_state(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        assert (await world.acknowledge(batch(0, 0, ACCEPT))).error_code == InvalidRecordState.kafka_code
        assert len(world.service.share_partition_manager) == 0
        assert "__share_group_state" not in world.service.topics.state.topics

    run(check, tmp_path)


def test_a_redrive_offers_what_is_dead_once_for_each_id(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        await world.lease(0, 1)
        assert (await world.acknowledge(batch(0, 1, ACCEPT))).error_code == 0
        await world.reject(2, 5)
        redrive = world.shares.redrive
        first = await redrive("g", ONE, redrive_id="a", offsets=[(0, 3)])
        assert (first.redriven, first.repeated, first.deleted, first.dead) == (2, 0, 0, 2)
        again = await redrive("g", ONE, redrive_id="a", offsets=[(0, 3)])
        assert (again.redriven, again.repeated, again.dead) == (0, 2, 2)
        share_partition = await world.lease(2, 3)
        assert [one.deliveries for one in share_partition.state_machine.ranges if one.first == 2] == [2]
        assert (await world.acknowledge(batch(2, 3, REJECT))).error_code == 0
        await world.archived()
        assert (await redrive("g", ONE, redrive_id="a")).redriven == 2, "4 and 5, and not 2 and 3 once more"
        assert (await redrive("g", ONE, redrive_id="b", records_max=1)).redriven == 1
        assert (await redrive("g", ONE, redrive_id="b")).redriven == 1
        assert (await redrive("g", ONE, redrive_id="c")).redriven == 0
        deliveries = [one.header("__dlq.errors.delivery.count") for one in await world.stored_dead_letters()]
        assert deliveries == [b"1"] * 4 + [b"2"] * 2

    run(check, tmp_path)


def test_what_the_log_has_lost_cannot_be_offered(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        await world.reject(0, 5)
        await world.client.admin.delete_records([ONE], before=4)
        found = await world.shares.redrive("g", ONE, redrive_id="a", offsets=[(0, 5)])
        assert (found.redriven, found.deleted, found.dead) == (2, 4, 0)

    run(check, tmp_path)


def test_nothing_is_offered_twice_across_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)):
            async with world_in(tmp_path) as world:
                await prepared(world)
                await world.reject(0, 3)
                assert (await world.shares.redrive("g", ONE, redrive_id="a", offsets=[(1, 2)])).redriven == 2
            async with world_in(tmp_path) as world:
                found = await world.shares.redrive("g", ONE, redrive_id="a")
                assert (found.redriven, found.dead) == (2, 0)
                await world.lease(0, 3)

    asyncio.run(main())


def test_a_redrive_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        await world.reject(0, 0)
        redrive = world.shares.redrive
        with pytest.raises(InvalidRequest):
            await redrive("g", ONE, redrive_id="")
        with pytest.raises(InvalidRequest):
            await redrive("g", ONE, redrive_id="a", records_max=0)
        with pytest.raises(InvalidRequest):
            await redrive("g", ONE, redrive_id="a", offsets=[(3, 1)])

    run(check, tmp_path)


def test_metrics_tell_of_leases_and_of_dead_letters_that_wait(tmp_path: Path) -> None:
    async def check(world: LeaseBench) -> None:
        broker: Any = SimpleNamespace(services=world.service)
        await world.reject(0, 1)
        await world.lease(2, 4)
        await world.service.topics.alter_configs(
            "dlq.t", [Change("errors.deadletterqueue.group.enable", Operation.SET, "false")]
        )
        assert (await world.acknowledge(batch(2, 2, REJECT))).error_code == 0
        await eventually(lambda: list(metrics_broker.dead_letter_warnings(broker)), DEADLINE_S)
        (warning,) = metrics_broker.dead_letter_warnings(broker)
        assert warning.reason == "dead_letters_pending"
        assert "1 dead letters wait: group 'g', partition 0: topic dlq.t does not accept" in warning.detail
        reported = {one.name: one.value for one in metrics_broker._share_groups(broker)}
        assert reported["dead_letters_pending"] == 1
        assert reported["dead_letters_written"] == 2
        assert reported["dead_letter_failures"] >= 1
        assert reported["share_leased_records"] == 2
        assert reported["share_partitions"] == 1
        described = (await world.shares.leases("g", [ONE]))[ONE]
        assert described is not None
        assert "does not accept dead letters" in described.dead_letter_error

    run(check, tmp_path)


def test_dead_letters_go_on_after_a_restart_although_no_client_uses_the_group(tmp_path: Path) -> None:
    async def takes_them(world: LeaseBench, text: str) -> None:
        change = Change("errors.deadletterqueue.group.enable", Operation.SET, text)
        await world.service.topics.alter_configs("dlq.t", [change])

    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)):
            async with world_in(tmp_path) as world:
                await prepared(world)
                await world.reject(0, 0)
                await takes_them(world, "false")
                await world.lease(1, 2)
                assert (await world.acknowledge(batch(1, 2, REJECT))).error_code == 0
            async with world_in(tmp_path) as world:
                await takes_them(world, "true")

                async def all_there() -> bool:
                    return len(await world.stored_dead_letters()) == 3

                await eventually(all_there, DEADLINE_S)

    asyncio.run(main())


def test_no_dead_letter_is_forgotten_with_the_offsets_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Altered, deleted, or deleted with the group: only when they are written, and then at once."""
    monkeypatch.setattr(share_partition_manager, "DEAD_LETTER_WAIT_MS_MAX", 200)

    async def check(world: LeaseBench) -> None:
        async def takes_them(text: str) -> None:
            change = Change("errors.deadletterqueue.group.enable", Operation.SET, text)
            await world.service.topics.alter_configs("dlq.t", [change])

        async def comes_and_goes() -> None:
            for epoch, names in ((0, ["t"]), (-1, None)):
                fields = {"member_id": "m1", "member_epoch": epoch, "subscribed_topic_names": names}
                answer = await world.call_and_rearm(ApiKey.SHARE_GROUP_HEARTBEAT, {"group_id": "g", **fields})
                assert answer.error_code == 0, answer.error_message

        await world.reject(0, 0)
        ways: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: world.shares.alter_offsets("g", {ONE: 5}),
            lambda: world.shares.delete_offsets("g", ["t"]),
            lambda: world.client.admin.delete_group("g"),
        )
        for at, way in enumerate(ways, start=1):
            await comes_and_goes()
            await takes_them("false")
            offset = 4 + at
            await world.lease(offset, offset)
            assert (await world.acknowledge(batch(offset, offset, REJECT))).error_code == 0
            with pytest.raises(NonEmptyGroup):
                await way()
            await takes_them("true")
            await world.archived()
            await way()
            assert len(await world.stored_dead_letters()) == 1 + at

    run(check, tmp_path)
