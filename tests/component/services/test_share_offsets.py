"""Share offset service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.share_groups.share_offsets import NO_TOPIC_ID, UNKNOWN_OFFSET_OR_LAG
from mansio.errors import (
    GroupAuthorizationFailed,
    GroupIdNotFound,
    InvalidGroupId,
    InvalidRequest,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from mansio.state.authorization.acls import Operation
from mansio.state.authorization.authorizer import Authorizer
from support.authorization import ADMIN, ALICE, GROUP, TOPIC, acl

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


def test_start_offsets_are_set_described_and_deleted_without_a_member(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.group_coordinator.ensure_topic_exists()
        offsets = services.share_offsets
        with pytest.raises(GroupIdNotFound):
            await offsets.describe("g", None, caller=ANONYMOUS)
        (altered,) = await offsets.alter("g", [("t", [(0, 5), (1, -3), (7, 0)])], caller=ANONYMOUS)
        assert [type(each.error) for each in altered.partitions] == [
            type(None),
            InvalidRequest,
            UnknownTopicOrPartition,
        ]
        (described,) = await offsets.describe("g", [("t", [0, 1])], caller=ANONYMOUS)
        assert [(each.start_offset, each.lag) for each in described.partitions] == [
            (5, 0),
            (UNKNOWN_OFFSET_OR_LAG, UNKNOWN_OFFSET_OR_LAG),
        ]
        assert [each.topic for each in await offsets.describe("g", None, caller=ANONYMOUS)] == ["t"]
        deleted = await offsets.delete("g", ["t", "none"], caller=ANONYMOUS)
        assert [(each.topic, type(each.error)) for each in deleted] == [
            ("t", type(None)),
            ("none", UnknownTopicOrPartition),
        ]
        assert await offsets.describe("g", None, caller=ANONYMOUS) == []

    run(tmp_path, work)


def test_a_request_without_an_existing_partition_creates_no_group(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.group_coordinator.ensure_topic_exists()
        (altered,) = await services.share_offsets.alter("g", [("none", [(0, 0)])], caller=ANONYMOUS)
        assert altered.topic_id == NO_TOPIC_ID
        with pytest.raises(GroupIdNotFound):
            await services.share_offsets.describe("g", None, caller=ANONYMOUS)
        with pytest.raises(InvalidGroupId):
            await services.share_offsets.delete("", ["t"], caller=ANONYMOUS)

    run(tmp_path, work)


def test_offsets_need_the_group_and_each_topic_and_unseen_topics_are_left_out(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.group_coordinator.ensure_topic_exists()
        offsets = services.share_offsets
        authorizer = Authorizer(["User:admin"])
        offsets._authorization = Authorization(authorizer)
        for call in (
            lambda: offsets.describe("g", None, caller=ALICE),
            lambda: offsets.alter("g", [("t", [(0, 5)])], caller=ALICE),
            lambda: offsets.delete("g", ["t"], caller=ALICE),
        ):
            with pytest.raises(GroupAuthorizationFailed):
                await call()
        for operation in (Operation.READ, Operation.DELETE):  # READ implies DESCRIBE
            authorizer.add(acl(GROUP, "g", operation))
        refused = await offsets.alter("g", [("t", [(0, 5)]), ("none", [(0, 5)])], caller=ALICE)
        assert {type(one.error) for each in refused for one in each.partitions} == {TopicAuthorizationFailed}
        with pytest.raises(GroupIdNotFound):  # nothing was created
            await offsets.describe("g", None, caller=ADMIN)

        await offsets.alter("g", [("t", [(0, 5)])], caller=ADMIN)
        assert await offsets.describe("g", None, caller=ALICE) == []
        named = await offsets.describe("g", [("t", [0]), ("none", [0])], caller=ALICE)
        assert [each.topic_id for each in named] == [NO_TOPIC_ID] * 2
        assert {type(each.partitions[0].error) for each in named} == {TopicAuthorizationFailed}
        deleted = await offsets.delete("g", ["t", "none"], caller=ALICE)
        assert {type(each.error) for each in deleted} == {TopicAuthorizationFailed}

        authorizer.add(acl(TOPIC, "t", Operation.READ))
        assert [each.topic for each in await offsets.describe("g", None, caller=ALICE)] == ["t"]
        mixed = await offsets.alter("g", [("none", [(0, 1)]), ("t", [(0, 7)])], caller=ALICE)
        assert [type(each.partitions[0].error) for each in mixed] == [TopicAuthorizationFailed, type(None)]
        (described,) = await offsets.describe("g", [("t", [0])], caller=ALICE)
        assert described.partitions[0].start_offset == 7
        assert [each.error for each in await offsets.delete("g", ["t"], caller=ALICE)] == [None]

    run(tmp_path, work)
