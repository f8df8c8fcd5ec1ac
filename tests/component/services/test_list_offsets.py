"""Record service without any wire protocol: list offsets, end of a leader epoch, delete records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.records import ListedOffset, OffsetQuery, RecordsToDelete
from mansio.broker.topics.topics import NewTopic
from mansio.errors import (
    InvalidRequest,
    InvalidTopic,
    OffsetOutOfRange,
    PolicyViolation,
    UnknownLeaderEpoch,
    UnknownTopicOrPartition,
)
from mansio.wire.field_values import (
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


async def publish(services: BrokerServices, count: int) -> int:
    """Publish to partition 0, one timestamp per record; returns the first timestamp."""
    now_ms = services.clock.wall_ms()
    records = [RecordToPublish(b"v", timestamp_ms=now_ms + number, partition=0) for number in range(count)]
    result = await services.publish.publish_records("t", records, timeout_ms=5000)
    assert all(each.error is None for each in result.records)
    return now_ms


def test_offsets_are_listed_by_position_and_timestamp(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        first_ms = await publish(services, 10)

        async def offset_of(timestamp_ms: int) -> ListedOffset:
            (found,) = await services.records.list_offsets(
                [OffsetQuery("t", 0, timestamp_ms)], caller=ANONYMOUS
            )
            assert isinstance(found, ListedOffset), found
            return found

        assert (await offset_of(EARLIEST_TIMESTAMP)).offset == 0
        assert (await offset_of(LATEST_TIMESTAMP)).offset == 10
        assert (await offset_of(LATEST_TIERED_TIMESTAMP)) == ListedOffset()
        found = await offset_of(first_ms + 3)
        assert (found.offset, found.timestamp_ms) == (3, first_ms + 3)
        assert (await offset_of(MAX_TIMESTAMP)).offset == 9
        assert (await offset_of(first_ms + 100)) == ListedOffset()

    run(tmp_path, work)


def test_each_query_fails_on_its_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        queries = [
            OffsetQuery("t", 0, LATEST_TIMESTAMP),
            OffsetQuery("none", 0, LATEST_TIMESTAMP),
            OffsetQuery("t", 1, LATEST_TIMESTAMP, leader_epoch=99),
            OffsetQuery("t", 5, LATEST_TIMESTAMP),
            OffsetQuery("t", 5, EARLIEST_TIMESTAMP),
        ]
        results = await services.records.list_offsets(queries, caller=ANONYMOUS)
        assert [type(each) for each in results] == [
            ListedOffset,
            UnknownTopicOrPartition,
            UnknownLeaderEpoch,
            InvalidRequest,
            InvalidRequest,
        ]

    run(tmp_path, work)


def test_records_are_deleted_and_each_deletion_fails_on_its_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("c", 1, configs=[("cleanup.policy", "compact")]))
        await services.topics.create(NewTopic("__consumer_offsets", 1), internal=True)
        await publish(services, 10)
        deletions = [
            RecordsToDelete("t", 0, 4),
            RecordsToDelete("t", 1, 4),
            RecordsToDelete("c", 0, 0),
            RecordsToDelete("__consumer_offsets", 0, 0),
            RecordsToDelete("none", 0, 0),
        ]
        results = await services.records.delete_records(deletions, timeout_ms=5000, caller=ANONYMOUS)
        assert results[0] == 4
        assert [type(each) for each in results[1:]] == [
            OffsetOutOfRange,
            PolicyViolation,
            InvalidTopic,
            UnknownTopicOrPartition,
        ]
        assert services.records.list_offset("t", None, 0, EARLIEST_TIMESTAMP).offset == 4

    run(tmp_path, work)


def test_the_end_of_a_leader_epoch_is_the_end_of_the_log(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await publish(services, 3)
        epoch = services.partitions.find("t", None, 0).leader_epoch
        assert services.records.offset_for_leader_epoch("t", None, 0, epoch, caller=ANONYMOUS).end_offset == 3

    run(tmp_path, work)
