"""Share service without any wire protocol: receive, acknowledge, describe and redrive."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.share_groups.share import (
    PartitionAcknowledgements,
    ReceiveOperation,
    check_partitions_unique,
    find_lock_ms,
    validate_ids,
)
from mansio.errors import (
    GroupIdNotFound,
    InvalidGroupId,
    InvalidRecordState,
    InvalidRequest,
    StorageError,
    UnknownTopicId,
)
from mansio.state.share_partition.types import ACCEPT, RELEASE, RENEW, AcknowledgementBatch
from unit.broker.share_fixtures import ShareBench, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mansio.broker.services.share_groups.share import AcknowledgeResult, ReceivedPartition
    from mansio.wire.topic_partition import TopicIdPartition


def acknowledgements(room: ShareBench, *batches: tuple[int, int, int]) -> PartitionAcknowledgements:
    return PartitionAcknowledgements(
        room.partition.topic_id.bytes,
        0,
        [AcknowledgementBatch(first, last, bytes([kind])) for first, last, kind in batches],
    )


async def receive(
    room: ShareBench,
    member: str = "m1",
    *,
    max_records: int = 10,
    max_wait_ms: int = 5_000,
    prepared: Sequence[AcknowledgeResult] = (),
) -> tuple[dict[TopicIdPartition, ReceivedPartition], int]:
    key = room.partition.topic_id.bytes, 0
    request = ReceiveOperation(
        room.service.share_service,
        "g",
        member,
        user="ANONYMOUS",
        client_id=None,
        grants=None,
        partitions=lambda: [key],
        is_connected=lambda: True,
        is_active=lambda: True,
        max_records=max_records,
        max_bytes=1 << 20,
        max_wait_ms=max_wait_ms,
        strict=True,
    )
    return await request.run(prepared), request.lock_ms


def test_records_are_received_acknowledged_and_described_without_a_protocol(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        await receive(room, max_wait_ms=200)  # a new group starts at the end of the log
        await room.write(5)
        share, key = room.service.share_service, (room.partition.topic_id.bytes, 0)
        received, lock_ms = await receive(room)
        assert received[key].error is None
        assert [tuple(each) for each in received[key].acquired] == [(0, 4, 1)]
        assert received[key].size_bytes == sum(each.length for each in received[key].slices) > 0
        assert lock_ms > 0
        (result,) = await share.acknowledge(
            "g", "m1", [acknowledgements(room, (0, 1, ACCEPT))], caller=ANONYMOUS
        )
        assert (result.error, result.lock_ms) == (None, lock_ms)
        (found,) = await share.describe_leases("g", [key], ranges_max=10, caller=ANONYMOUS)
        assert found.counts is not None
        assert (found.counts.start_offset, found.counts.leased, found.dead_letter_error) == (2, 3, "")
        assert [(each.first_offset, each.last_offset, each.member_id) for each in found.ranges] == [
            (2, 4, "m1")
        ]
        assert await share.describe_leases("g", None, ranges_max=0, caller=ANONYMOUS) != []

    run(check, tmp_path)


def test_prepared_acknowledgements_are_stored_with_the_next_leases(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        await receive(room, max_wait_ms=200)
        await room.write(6)
        share, key = room.service.share_service, (room.partition.topic_id.bytes, 0)
        await receive(room, max_records=3)
        prepared = await share.apply_acknowledgements(
            "g",
            "m1",
            [acknowledgements(room, (0, 1, ACCEPT), (2, 2, RELEASE))],
            allows_renewal=False,
            grants=None,
        )
        assert all(each.error is None and each.updates for each in prepared)
        received, _ = await receive(room, max_records=2, prepared=prepared)
        assert prepared[0].error is None
        assert sum(last - first + 1 for first, last, _ in received[key].acquired) == 2
        assert find_lock_ms(prepared) > 0

    run(check, tmp_path)


def test_errors_are_results_of_their_partitions(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        share, key = room.service.share_service, (room.partition.topic_id.bytes, 0)
        (unread,) = await share.acknowledge(
            "g", "m1", [acknowledgements(room, (0, 0, ACCEPT))], caller=ANONYMOUS
        )
        assert isinstance(unread.error, InvalidRecordState)
        (unknown,) = await share.describe_leases("g", [key], ranges_max=1, caller=ANONYMOUS)
        assert isinstance(unknown.error, GroupIdNotFound)
        await receive(room, max_wait_ms=200)
        await room.write(2)
        await receive(room)
        other = PartitionAcknowledgements(bytes(16), 0, [AcknowledgementBatch(0, 0, bytes([ACCEPT]))])
        wrong, right = await share.acknowledge(
            "g", "m1", [other, acknowledgements(room, (0, 0, ACCEPT))], caller=ANONYMOUS
        )
        assert isinstance(wrong.error, UnknownTopicId)
        assert right.error is None
        (stolen,) = await share.acknowledge(
            "g", "m2", [acknowledgements(room, (1, 1, ACCEPT))], caller=ANONYMOUS
        )
        assert isinstance(stolen.error, InvalidRecordState)
        (renewal,) = await share.apply_acknowledgements(
            "g", "m1", [acknowledgements(room, (1, 1, RENEW))], allows_renewal=False, grants=None
        )
        assert isinstance(renewal.error, InvalidRequest)
        with pytest.raises(InvalidRequest):
            await share.redrive("g", *key, redrive_id="", offsets=None, records_max=1, caller=ANONYMOUS)
        result, dead = await share.redrive(
            "g", *key, redrive_id="r", offsets=None, records_max=1, caller=ANONYMOUS
        )
        assert (result.redriven, dead) == (0, 0)

    run(check, tmp_path)


@pytest.mark.parametrize("member", [None, "", "m" * 256])
def test_invalid_members_are_rejected(member: str | None) -> None:
    with pytest.raises(InvalidRequest):
        validate_ids("g", member)
    with pytest.raises(InvalidGroupId):
        validate_ids("", "m")


def test_duplicate_partitions_are_rejected() -> None:
    part = PartitionAcknowledgements(bytes(16), 0, [])
    check_partitions_unique([part, PartitionAcknowledgements(bytes(16), 1, [])])
    with pytest.raises(InvalidRequest):
        check_partitions_unique([part, part])


def test_unreadable_sector_that_a_receive_meets_is_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(room: ShareBench) -> None:
        await receive(room, max_wait_ms=200)  # a new group starts at the end of the log
        await room.write(5)

        def read_range(*_: object) -> None:
            raise StorageError("cannot read the segment") from OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(type(room.partition.log), "read_range", read_range)
        received, _ = await receive(room)
        assert isinstance(received[room.partition.topic_id.bytes, 0].error, StorageError)
        assert room.partition.storage_health.damaged

    run(check, tmp_path)
