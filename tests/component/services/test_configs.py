"""Config service without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.broker.services.configs import ConfigResource
from mansio.config.config_def import Change, Operation
from mansio.errors import InvalidRequest, UnknownTopicOrPartition

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_of_topics_and_groups_change_and_those_of_the_broker_do_not(tmp_path: Path) -> None:
    async def work() -> None:
        configs = broker.broker.service.configs
        for kind, name, setting in (
            (ConfigResource.TOPIC, "t", "retention.ms"),
            (ConfigResource.GROUP, "g", "share.record.lock.duration.ms"),
        ):
            change = Change(setting, Operation.SET, "20000")
            await configs.alter(kind, name, [change], replace=False, validate_only=False)
            values = {entry.name: entry.value for entry in configs.describe(kind, name)}
            assert values[setting] == "20000"
        own = str(broker.broker.settings.node_id)
        assert configs.describe(ConfigResource.BROKER, own)
        assert configs.describe(ConfigResource.BROKER, "") == []
        assert configs.resources([ConfigResource.TOPIC, 99]) == [("t", ConfigResource.TOPIC)]
        with pytest.raises(InvalidRequest):
            configs.describe(99, "t")
        with pytest.raises(InvalidRequest):
            await configs.alter(ConfigResource.BROKER, own, [], replace=False, validate_only=False)
        with pytest.raises(UnknownTopicOrPartition):
            configs.describe(ConfigResource.TOPIC, "absent")

    with mansio.Broker(tmp_path / "data") as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t", partitions=1)
        asyncio.run_coroutine_threadsafe(work(), broker.broker.server.loop).result(30)
