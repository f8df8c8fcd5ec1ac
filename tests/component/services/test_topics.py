"""Topic service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from component.services.services_fixtures import run
from mansio.broker.topics.topics import NewTopic
from mansio.config.config_def import Change, Operation
from mansio.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidTopic,
    PolicyViolation,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices


def test_a_topic_is_created_extended_and_deleted(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        topics = services.topics
        created = await topics.create(NewTopic("orders", 3, configs=[("retention.ms", "60000")]))
        assert len(created.partitions) == 3
        assert topics.find("orders") == topics.find_by_id(created.topic_id) == created
        assert topics.settings_of(created).retention_ms == 60_000
        assert services.partitions.find("orders", None, 2).high_watermark == 0
        grown = await topics.add_partitions("orders", 5)
        assert len(grown.partitions) == 5
        assert services.partitions.find("orders", None, 4).high_watermark == 0
        await topics.delete(grown)
        assert services.partitions.get("orders", 0) is None
        with pytest.raises(UnknownTopicOrPartition):
            topics.find("orders")
        with pytest.raises(UnknownTopicId):
            topics.find_by_id(created.topic_id)
        again = await topics.create(NewTopic("orders"))
        assert again.topic_id != created.topic_id

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (NewTopic("t"), TopicAlreadyExists),
        (NewTopic("no/name"), InvalidTopic),
        (NewTopic("__consumer_offsets"), InvalidTopic),
        (NewTopic("a", 0), InvalidPartitions),
        (NewTopic("a", 1, 3), InvalidReplicationFactor),
        (NewTopic("a", configs=[("retention.ms", "soon")]), InvalidConfig),
        (NewTopic("a", 1_000_000), PolicyViolation),
    ],
)
def test_an_invalid_topic_is_not_created(tmp_path: Path, new: NewTopic, error: type[Exception]) -> None:
    async def work(services: BrokerServices) -> None:
        with pytest.raises(error):
            await services.topics.create(new)
        assert list(services.topics.state.topics) == ["t"]

    run(tmp_path, work)


def test_validation_changes_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        planned = await services.topics.create(NewTopic("a", 4), validate_only=True)
        assert (planned.topic_id, len(planned.partitions)) == (UUID(int=0), 4)
        assert len((await services.topics.add_partitions("t", 9, validate_only=True)).partitions) == 9
        change = [Change("retention.ms", Operation.SET, "1")]
        await services.topics.alter_configs("t", change, validate_only=True)
        (topic,) = services.topics.state.topics.values()
        assert (len(topic.partitions), topic.configs) == (2, {})

    run(tmp_path, work)


def test_a_topic_that_exists_is_returned_by_automatic_creation(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        created = await services.topics.auto_create("a")
        assert await services.topics.auto_create("a") == created

    run(tmp_path, work)


def test_internal_topics_cannot_be_deleted_or_extended(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        internal = await services.topics.create(NewTopic("__consumer_offsets", 1), internal=True)
        with pytest.raises(InvalidTopic):
            await services.topics.delete(internal)
        with pytest.raises(InvalidTopic):
            await services.topics.add_partitions("__consumer_offsets", 9)
        with pytest.raises(PolicyViolation):
            await services.topics.alter_configs(
                "__consumer_offsets", [Change("retention.ms", Operation.SET, "1")]
            )

    run(tmp_path, work)
