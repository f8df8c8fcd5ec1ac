"""A topic partition may have any number of share partitions: with an index that the broker does not know, of 16 by the
hash of a key, all that a share group can do works unchanged."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.broker.coordinator.share import share_partition_manager
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.share_groups.leases import Acknowledgement
from mansio.errors import InvalidRecordState
from mansio.state.share_partition.types import ACCEPT, REJECT, RELEASE, RENEW
from mansio.wire.api_versions import ApiKey
from support.client_fixtures import broker_in, connected, run
from support.hash_index import COUNT, HashIndexes, number_of
from support.machine import scaled
from support.present import present
from support.receive_fixtures import group_of, publish, taken, values

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.client.admin.shares import ShareLeases

KEYS = [f"k{number}" for number in range(40)]
RECORDS = [f"{KEYS[0]}:{number}" for number in range(20)] + [f"{key}:0" for key in KEYS[1:]]
"""Many records of one key before the only one of each other."""


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mansio.Broker]:
    monkeypatch.setattr(share_partition_manager, "TopicShareIndexes", lambda _: HashIndexes())
    with broker_in(tmp_path) as started:
        yield started


def services_of(broker: mansio.Broker) -> BrokerServices:
    return present(broker._broker).service


async def leases(client: mansio.Client, group: str, topic: str = "hashed") -> ShareLeases:
    place = mansio.TopicPartition(topic, 0)
    return present((await client.admin.shares.leases(group, [place], ranges_max=100))[place])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition of the broker; the scenario's own time bounds it."""
    while not await condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.02)


def numbers_in_use(broker: mansio.Broker, group: str) -> set[int]:
    shares = services_of(broker).share_partition_manager
    return {each.key.number for each in shares.share_partitions() if each.key.group == group}


def test_records_of_many_share_partitions_are_received_in_the_order_of_the_index(
    broker: mansio.Broker,
) -> None:
    assert len({number_of(key.encode()) for key in KEYS}) > 12

    async def scenario() -> None:
        async with connected(broker, hashed=1) as client:
            group = await group_of(client, "g")
            await publish(client, "hashed", *RECORDS)
            got: list[str] = []
            async with client.receive("hashed", group=group, max_records=1) as receiver:
                for _ in range(COUNT):
                    (message,) = await taken(receiver, 1)
                    got += values([message])
                    await message.ack()
            served = {number_of(text.partition(":")[0].encode()) for text in got}
            assert len(served) > 12, "no share partition waits for the backlog of another one"
            assert (await leases(client, group)).lag == len(RECORDS) - COUNT
            async with client.receive("hashed", group=group, max_records=100) as receiver:
                rest = await taken(receiver, len(RECORDS) - COUNT)
                assert (await leases(client, group)).leased == len(rest)
                for message in rest:
                    await message.ack()
            got += values(rest)
            assert sorted(got) == sorted(RECORDS)
            by_key = defaultdict(list)
            for text in got:
                by_key[text.partition(":")[0]].append(text)
            assert by_key["k0"] == RECORDS[:20]
            found = await leases(client, group)
            assert (found.lag, found.leased, found.priorities) == (0, 0, ())
            place = mansio.TopicPartition("hashed", 0)
            offset = (await client.admin.shares.offsets(group))[place]
            assert offset.lag == 0
            assert numbers_in_use(broker, group) == set(range(COUNT))

    run(scenario)


def test_a_batch_of_acknowledgements_over_many_share_partitions_applies_whole_or_not_at_all(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, hashed=1) as client:
            group = await group_of(client, "g")
            await publish(client, "hashed", *RECORDS)
            async with client.receive("hashed", group=group, auto_extend=False, max_records=100) as receiver:
                messages = await taken(receiver, len(RECORDS))
                description = await client.admin.describe_topic("hashed")
                connection = await client._cluster.connection(description.partitions[0].leader)

                async def acknowledge(last: int) -> int:
                    batch = {"first_offset": 0, "last_offset": last, "types": bytes([ACCEPT])}
                    partition = {"partition_index": 0, "batches": [batch]}
                    fields = {
                        "group_id": group,
                        "member_id": receiver.member_id,
                        "topics": [{"topic_id": description.topic_id, "partitions": [partition]}],
                    }
                    response = await connection.request(ApiKey.ACKNOWLEDGE_RECORDS, fields)
                    return int(response.topics[0].partitions[0].error_code)

                last = max(messages, key=lambda message: message.offset)
                await last.retry(600)
                assert await acknowledge(last.offset) == InvalidRecordState.kafka_code
                assert (await leases(client, group)).leased == len(RECORDS) - 1
                assert await acknowledge(last.offset - 1) == 0
                found = await leases(client, group)
                assert (found.lag, found.leased, found.in_backoff) == (1, 0, 1)

    run(scenario)


def test_leases_without_a_session_are_renewed_released_and_rejected(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, hashed=1) as client:
            await group_of(client, "g", dead_letters="true")
            await publish(client, "hashed", *RECORDS)
            services = services_of(broker)

            async def work() -> None:
                receive = partial(
                    services.leases.receive,
                    "g",
                    ["hashed"],
                    max_records=100,
                    max_wait_ms=2000,
                    caller=ANONYMOUS,
                )
                while not (result := await receive()).records:
                    pass
                assert len(result.records) == len(RECORDS)
                receipts = [services.leases.receipt_of(result, each) for each in result.records]
                kinds = (ACCEPT, RELEASE, REJECT, RENEW)
                given = [
                    Acknowledgement(receipt, kinds[number % 4], reason="unusable" * (number % 4 == 2))
                    for number, receipt in enumerate(receipts)
                ]
                assert await services.leases.acknowledge("g", given, caller=ANONYMOUS) == [None] * len(
                    RECORDS
                )
                again = [Acknowledgement(receipts[0], ACCEPT)]
                lost = await services.leases.acknowledge("g", again, caller=ANONYMOUS)
                assert isinstance(lost[0], InvalidRecordState)

            await asyncio.to_thread(broker._call, work(), scaled(30))

            async def is_rejected() -> bool:
                found = await leases(client, "g")
                return not found.archiving and found.dead == len(RECORDS[2::4])

            await until(is_rejected)
            found = await leases(client, "g")
            assert found.leased == len(RECORDS[3::4])
            assert found.lag == len(RECORDS[1::4]) + len(RECORDS[3::4])
            assert sum(each.last_offset - each.first_offset + 1 for each in found.ranges) == found.leased
            assert [each.first_offset for each in found.ranges] == sorted(
                each.first_offset for each in found.ranges
            )

    run(scenario)


def test_dead_letters_are_redriven_and_offsets_are_reset_and_deleted_in_all_share_partitions(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, hashed=1) as client:
            place, shares = mansio.TopicPartition("hashed", 0), client.admin.shares
            group = await group_of(client, "g", dead_letters="true")
            await publish(client, "hashed", *RECORDS)
            async with client.receive("hashed", group=group, max_records=100) as receiver:
                for message in await taken(receiver, len(RECORDS)):
                    await message.reject("unusable")

            async def is_archived() -> bool:
                found = await leases(client, group)
                return found.dead == len(RECORDS) and not found.archiving

            await until(is_archived)
            first = await shares.redrive(group, place, redrive_id="first", records_max=25)
            assert (first.redriven, first.dead) == (25, len(RECORDS) - 25)
            rest = await shares.redrive(group, place, redrive_id="rest")
            assert (rest.redriven, rest.dead) == (len(RECORDS) - 25, 0)
            async with client.receive("hashed", group=group, max_records=100) as receiver:
                again = await taken(receiver, len(RECORDS))
                assert sorted(values(again)) == sorted(RECORDS)
                for message in again:
                    await message.ack()
            await shares.alter_offsets(group, {place: 5})
            async with client.receive("hashed", group=group, max_records=100) as receiver:
                again = await taken(receiver, len(RECORDS) - 5)
                assert sorted(values(again)) == sorted(RECORDS[5:])
                for message in again:
                    await message.ack()
                assert await receiver.poll(timeout_ms=100) == []
            store: Any = services_of(broker).share_coordinator.store
            assert {key.number for key, _ in store.stored_offsets()} == set(range(COUNT))
            await shares.delete_offsets(group, ["hashed"])
            assert [key for key, _ in store.stored_offsets() if key.group == group] == []

    run(scenario)


def test_states_of_all_share_partitions_are_kept_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_partition_manager, "TopicShareIndexes", lambda _: HashIndexes())
    started = broker_in(tmp_path)
    got: list[str] = []

    async def before() -> None:
        async with connected(started, hashed=1) as client:
            group = await group_of(client, "g")
            await publish(client, "hashed", *RECORDS)
            async with client.receive("hashed", group=group, max_records=30) as receiver:
                for message in await taken(receiver, 30):
                    got.extend(values([message]))
                    await message.ack()

    async def after() -> None:
        async with connected(started) as client:
            assert (await leases(client, "g")).lag == len(RECORDS) - 30
            async with client.receive("hashed", group="g", max_records=100) as receiver:
                got.extend(values(await taken(receiver, len(RECORDS) - 30)))
            assert sorted(got) == sorted(RECORDS)

    for scenario in (before, after):
        with started:
            run(scenario)
