"""Range leases: offsets leased to a member that reads the records by Fetch, over a real connection."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from mansio.errors import GroupIdNotFound, InvalidRequest
from mansio.net.range_leases import (
    RangeAcknowledgement,
    RangeLease,
    RangeLeases,
    acknowledge_ranges,
    alter_range_leases,
    lease_ranges,
)
from mansio.state.share_partition.types import REJECT, RELEASE, RangeOperation
from mansio.wire.topic_partition import TopicPartition
from support.client_fixtures import broker_in, connected, run
from support.machine import scaled
from support.receive_fixtures import group_of, publish, taken, values
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import mansio

KEEP, CLAIM, ACCEPT = RangeOperation
LEASE_MS = 120_000
ONE = TopicPartition("ranges", 0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("range-leases")) as started:
        yield started


async def lease(
    client: mansio.Client,
    group: str,
    *places: TopicPartition,
    member: str = "driver",
    most: int = 100_000,
    lease_ms: int = LEASE_MS,
    wait_ms: int = 0,
) -> RangeLeases:
    return await lease_ranges(
        client._cluster, group, member, places, records_max=most, lease_ms=lease_ms, wait_ms=wait_ms
    )


async def alter(
    client: mansio.Client,
    group: str,
    wanted: dict[TopicPartition, list[RangeLease]],
    operation: RangeOperation,
    *,
    member: str = "driver",
    releases_others: bool = False,
) -> dict[TopicPartition, list[RangeLease]]:
    found = await alter_range_leases(
        client._cluster,
        group,
        member,
        wanted,
        operation,
        lease_ms=LEASE_MS,
        releases_others=releases_others,
    )
    return {place: each.ranges for place, each in found.items()}


async def state(client: mansio.Client, group: str, place: TopicPartition) -> mansio.client.ShareLeases:
    found = (await client.admin.shares.leases(group, [place]))[place]
    assert found is not None
    return found


async def dead_lettered(client: mansio.Client, group: str, place: TopicPartition, count: int) -> None:
    """Wait until so many records are in the dead-letter topic."""

    async def is_there() -> bool:
        return (await state(client, group, place)).dead >= count

    await eventually(is_there)


async def numbers(client: mansio.Client, topic: str, count: int, *, partition: int = 0) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(client.publish(topic, f"{number}", partition=partition))


def offsets(leases: RangeLeases, place: TopicPartition) -> list[int]:
    return [o for each in leases.ranges.get(place, ()) for o in range(each.first, each.last + 1)]


@pytest.mark.row("S13")
def test_leased_ranges_reach_no_other_member_and_are_done_once_accepted(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, ranges=1) as client:
            group = await group_of(client, "accept")
            await numbers(client, "ranges", 30)
            found = await lease(client, group, ONE, most=20)
            assert found.ranges == {ONE: [RangeLease(0, 19, 1)]}
            assert (found.order, found.is_committed_only, found.errors) == ("none", False, {})
            async with client.receive("ranges", group=group) as receiver:
                assert {message.offset for message in await taken(receiver, 10)} == {*range(20, 30)}
            accepted = await alter(client, group, found.ranges, ACCEPT)
            assert accepted == found.ranges
            assert await alter(client, group, found.ranges, ACCEPT) == {ONE: []}, "it was done before"
            assert (await state(client, group, ONE)).leased <= 10

    run(scenario)


@pytest.mark.row("S13")
def test_a_member_that_asks_for_ranges_waits_for_records(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, waited=1) as client, connected(broker) as publisher:
            group = await group_of(client, "waits")
            place = TopicPartition("waited", 0)
            asking = asyncio.ensure_future(lease(client, group, place, wait_ms=60_000))
            await asyncio.sleep(0)
            await publish(publisher, "waited", "a")
            assert offsets(await asyncio.wait_for(asking, scaled(30)), place) == [0]
            assert not (await lease(client, group, place)).ranges

    run(scenario)


@pytest.mark.row("S13")
def test_ranges_have_a_limit_of_their_own(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, limits=1) as client:
            group = await group_of(client, "limits")
            configs = {"mansio.share.range.locks.max": "1000", "share.partition.max.record.locks": "100"}
            await client.admin.alter_group_config(group, configs)
            place = TopicPartition("limits", 0)
            await numbers(client, "limits", 1_200)
            found = await lease(client, group, place)
            assert offsets(found, place) == [*range(1_000)]
            assert not (await lease(client, group, place, member="another")).ranges
            async with client.receive("limits", group=group, max_records=150, prefetch=0) as receiver:
                assert {message.offset for message in await taken(receiver, 100)} == {*range(1_000, 1_100)}
            await alter(client, group, {place: [RangeLease(0, 99, 1)]}, ACCEPT)
            again = await lease(client, group, place)
            assert len(offsets(again, place)) == 100

    run(scenario)


@pytest.mark.row("S13")
def test_parallel_members_lease_each_record_once(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, parallel=4) as client:
            group = await group_of(client, "parallel")
            places = [TopicPartition("parallel", index) for index in range(4)]
            for place in places:
                await numbers(client, "parallel", 50, partition=place.partition)
            all_found: list[tuple[TopicPartition, int]] = []

            async def work(member: str) -> None:
                while (found := await lease(client, group, *places, member=member, most=7)).ranges:
                    assert found.records <= 7
                    all_found.extend((place, o) for place in places for o in offsets(found, place))

            await asyncio.gather(*(work(f"m{number}") for number in range(4)))
            assert sorted(all_found) == [(place, o) for place in places for o in range(50)]

    run(scenario)


@pytest.mark.row("S13")
def test_each_partition_gets_its_part_of_a_lease(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, parts=3) as client:
            group = await group_of(client, "parts")
            places = [TopicPartition("parts", index) for index in range(3)]
            for place, count in zip(places, (5, 100, 100), strict=True):
                await numbers(client, "parts", count, partition=place.partition)
            found = await lease(client, group, *places, most=60)
            sizes = [len(offsets(found, place)) for place in places]
            assert sizes[0] == 5
            assert sum(sizes) == 60
            assert min(sizes[1:]) >= 20

    run(scenario)


@pytest.mark.row("S13")
def test_an_interrupted_batch_counts_a_delivery_until_its_records_are_dead_letters(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, claims=1) as client:
            group = await group_of(client, "claims", tries=2, dead_letters=True)
            place = TopicPartition("claims", 0)
            await numbers(client, "claims", 10)
            first = await lease(client, group, place, most=4)
            assert await alter(client, group, first.ranges, KEEP) == first.ranges
            claimed = await alter(client, group, first.ranges, CLAIM)
            assert claimed == {place: [RangeLease(0, 3, 2)]}
            assert await alter(client, group, first.ranges, KEEP) == {place: []}, "of an older run"
            again = await alter_range_leases(
                client._cluster, group, "driver", first.ranges, CLAIM, lease_ms=LEASE_MS
            )
            assert again == {place: ([], [RangeLease(0, 3, 0)])}
            await dead_lettered(client, group, place, 4)

    run(scenario)


@pytest.mark.row("S13")
def test_a_member_that_claims_its_ranges_gives_back_those_that_it_does_not_know(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, others=2) as client:
            group = await group_of(client, "others")
            places = [TopicPartition("others", index) for index in range(2)]
            for place in places:
                await numbers(client, "others", 10, partition=place.partition)
            known = await lease(client, group, *places, most=8)
            await lease(client, group, *places, most=6)  # its answer is lost
            wanted = {place: known.ranges.get(place, []) for place in places}
            kept = await alter(client, group, wanted, KEEP, releases_others=True)
            assert kept == wanted
            again = await lease(client, group, *places, member="another")
            assert again.records == 12
            assert {each.delivery_count for ranges in again.ranges.values() for each in ranges} == {1, 2}

    run(scenario)


@pytest.mark.row("S13")
def test_failed_records_are_released_and_rejected_one_by_one(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, failed=1) as client:
            group = await group_of(client, "failed", dead_letters=True)
            place = TopicPartition("failed", 0)
            await numbers(client, "failed", 10)
            found = await lease(client, group, place)
            failures = {
                place: [
                    RangeAcknowledgement(2, 2, 1, RELEASE, 0),
                    RangeAcknowledgement(5, 6, 1, REJECT, reason="bad"),
                ]
            }
            assert await acknowledge_ranges(client._cluster, group, "driver", failures) == 0
            assert await acknowledge_ranges(client._cluster, group, "driver", failures) == 2, "repeated"
            accepted = await alter(client, group, found.ranges, ACCEPT)
            ranges = [RangeLease(0, 1, 1), RangeLease(3, 4, 1), RangeLease(7, 9, 1)]
            assert accepted == {place: ranges}
            async with client.receive("failed", group=group) as receiver:
                (message,) = await taken(receiver, 1)
                assert (message.offset, message.delivery_count) == (2, 2)
            await dead_lettered(client, group, place, 2)

    run(scenario)


@pytest.mark.row("S13")
def test_by_key_a_range_lease_has_the_first_record_of_each_key(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, keyed=1) as client:
            group = await group_of(client, "keyed", order="key")
            place = TopicPartition("keyed", 0)
            await publish(client, "keyed", "a:0", "b:1", "a:2", "c:3", "b:4", "a:5")
            found = await lease(client, group, place)
            assert (offsets(found, place), found.order) == ([0, 1, 3], "key")
            assert not (await lease(client, group, place)).ranges
            await alter(client, group, {place: [RangeLease(0, 0, 1)]}, ACCEPT)
            async with client.receive("keyed", group=group) as receiver:
                assert values(await taken(receiver, 2)) == ["a:2", "a:5"]

    run(scenario)


@pytest.mark.row("S13")
def test_in_order_one_member_at_a_time_has_ranges_of_a_partition(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, ordered=1) as client:
            group = await group_of(client, "ordered", order="partition")
            place = TopicPartition("ordered", 0)
            await numbers(client, "ordered", 10)
            found = await lease(client, group, place, most=4)
            assert (offsets(found, place), found.order) == ([0, 1, 2, 3], "partition")
            assert not (await lease(client, group, place, member="another")).ranges
            await alter(client, group, found.ranges, ACCEPT)
            after = await lease(client, group, place, member="another")
            assert offsets(after, place) == [*range(4, 10)]

    run(scenario)


@pytest.mark.row("S13")
def test_ranges_of_a_topic_with_priorities_are_accepted(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker) as client:
            await client.admin.create_topic("urgent", partitions=1, config={"mansio.priority.enable": "true"})
            group = await group_of(client, "urgent")
            place = TopicPartition("urgent", 0)
            for number in range(12):
                priority = "high" if number % 3 == 0 else "normal"
                await client.publish("urgent", f"{number}", priority=priority)
            found = await lease(client, group, place)
            assert sorted(offsets(found, place)) == [*range(12)]
            assert sum(each.size for each in (await alter(client, group, found.ranges, ACCEPT))[place]) == 12
            assert (await state(client, group, place)).lag == 0

    run(scenario)


@pytest.mark.row("S13")
def test_range_leases_survive_a_restart_of_the_broker(tmp_path: Path) -> None:
    place = TopicPartition("kept", 0)
    with broker_in(tmp_path) as broker:

        async def before() -> None:
            async with connected(broker, kept=1) as client:
                await group_of(client, "kept")
                await numbers(client, "kept", 10)
                assert offsets(await lease(client, "kept", place, most=6), place) == [*range(6)]

        run(before)
    with broker_in(tmp_path) as broker:

        async def after() -> None:
            async with connected(broker) as client:
                assert offsets(await lease(client, "kept", place, member="another"), place) == [6, 7, 8, 9]
                assert await alter(client, "kept", {place: [RangeLease(0, 5, 1)]}, CLAIM) == {
                    place: [RangeLease(0, 5, 2)]
                }

        run(after)


@pytest.mark.row("S13")
def test_invalid_requests_are_refused(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, refused=1) as client:
            place = TopicPartition("refused", 0)
            with pytest.raises(InvalidRequest):
                await lease(client, "refused", place, most=0)
            with pytest.raises(InvalidRequest):
                await lease(client, "refused", place, lease_ms=12 * 3_600_000 + 1)
            with pytest.raises(InvalidRequest):
                await lease(client, "refused", place, member="")
            await lease(client, "refused", place)
            for ranges in ([RangeLease(3, 2, 1)], [RangeLease(2, 3, 1), RangeLease(3, 4, 1)]):
                with pytest.raises(InvalidRequest):
                    await alter(client, "refused", {place: ranges}, KEEP)
            async with client.consume("refused", group="consumers") as consumer:
                await publish(client, "refused", "a")
                await eventually(partial(consumer.poll, timeout_ms=100))
                with pytest.raises(GroupIdNotFound):
                    await lease(client, "consumers", place)

    run(scenario)
