"""Share offset service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.services.share_groups.share_offsets import NO_TOPIC_ID, UNKNOWN_OFFSET_OR_LAG
from mansio.errors import GroupIdNotFound, InvalidGroupId, InvalidRequest, UnknownTopicOrPartition

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


def test_start_offsets_are_set_described_and_deleted_without_a_member(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.group_coordinator.ensure_topic_exists()
        offsets = services.share_offsets
        with pytest.raises(GroupIdNotFound):
            await offsets.describe("g", None)
        (altered,) = await offsets.alter("g", [("t", [(0, 5), (1, -3), (7, 0)])])
        assert [type(each.error) for each in altered.partitions] == [
            type(None),
            InvalidRequest,
            UnknownTopicOrPartition,
        ]
        (described,) = await offsets.describe("g", [("t", [0, 1])])
        assert [(each.start_offset, each.lag) for each in described.partitions] == [
            (5, 0),
            (UNKNOWN_OFFSET_OR_LAG, UNKNOWN_OFFSET_OR_LAG),
        ]
        assert [each.topic for each in await offsets.describe("g", None)] == ["t"]
        deleted = await offsets.delete("g", ["t", "none"])
        assert [(each.topic, type(each.error)) for each in deleted] == [
            ("t", type(None)),
            ("none", UnknownTopicOrPartition),
        ]
        assert await offsets.describe("g", None) == []

    run(tmp_path, work)


def test_a_request_without_an_existing_partition_creates_no_group(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.group_coordinator.ensure_topic_exists()
        (altered,) = await services.share_offsets.alter("g", [("none", [(0, 0)])])
        assert altered.topic_id == NO_TOPIC_ID
        with pytest.raises(GroupIdNotFound):
            await services.share_offsets.describe("g", None)
        with pytest.raises(InvalidGroupId):
            await services.share_offsets.delete("", ["t"])

    run(tmp_path, work)
