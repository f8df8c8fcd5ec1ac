"""Config service without any wire protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.routing.caller import ANONYMOUS
from mansio.broker.services import configs
from mansio.broker.services.configs import ConfigAlteration, ConfigQuery, ConfigResource
from mansio.broker.topics.topics import NewTopic
from mansio.config.config_def import Change, Operation, ResourceType
from mansio.config.config_entries import Source
from mansio.errors import (
    InvalidConfig,
    InvalidGroupId,
    InvalidRequest,
    PolicyViolation,
    UnknownTopicOrPartition,
)
from support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices

TOPIC = ConfigResource(ResourceType.TOPIC, "t")
GROUP = ConfigResource(ResourceType.GROUP, "g")
BROKER = ConfigResource(ResourceType.BROKER, "1")
RETENTION, SEGMENT, SESSION = "retention.ms", "segment.bytes", "consumer.session.timeout.ms"


def alteration(resource: ConfigResource, **values: str) -> ConfigAlteration:
    changes = [Change(name.replace("_", "."), Operation.SET, value) for name, value in values.items()]
    return ConfigAlteration(resource, changes)


def value_of(services: BrokerServices, resource: ConfigResource, name: str) -> tuple[str, Source]:
    (found,) = services.configs.describe([ConfigQuery(resource, frozenset({name}))], caller=ANONYMOUS)
    (entry,) = found.entries
    return entry.value, entry.source


def test_settings_of_topics_and_groups_are_changed_and_described(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        errors = await services.configs.alter(
            [
                alteration(TOPIC, retention_ms="60000", segment_bytes="1048576"),
                alteration(GROUP, consumer_session_timeout_ms="50000"),
            ],
            caller=ANONYMOUS,
        )
        assert errors == [None, None]
        assert value_of(services, TOPIC, RETENTION) == ("60000", Source.TOPIC)
        assert value_of(services, GROUP, SESSION) == ("50000", Source.GROUP)
        assert services.topics.settings_of(services.topics.find("t")).retention_ms == 60_000
        assert await services.configs.alter(
            [alteration(TOPIC, retention_ms="70000")], replace=True, caller=ANONYMOUS
        ) == [None]
        assert value_of(services, TOPIC, RETENTION) == ("70000", Source.TOPIC)
        assert value_of(services, TOPIC, SEGMENT)[1] is Source.DEFAULT

    run(tmp_path, work)


def test_validation_changes_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        before = value_of(services, TOPIC, RETENTION)
        changes = [alteration(TOPIC, retention_ms="60000")]
        assert await services.configs.alter(changes, validate_only=True, caller=ANONYMOUS) == [None]
        assert value_of(services, TOPIC, RETENTION) == before

    run(tmp_path, work)


def test_each_resource_fails_on_its_own(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        unknown = ConfigResource(ResourceType.TOPIC, "none")
        errors = await services.configs.alter(
            [
                alteration(unknown, retention_ms="1"),
                alteration(BROKER, retention_ms="1"),
                alteration(ConfigResource(99, "x"), retention_ms="1"),
                alteration(GROUP, consumer_session_timeout_ms="50000"),
                alteration(GROUP, consumer_session_timeout_ms="60000"),
                alteration(ConfigResource(ResourceType.GROUP, "")),
                alteration(TOPIC, retention_ms="soon"),
            ],
            caller=ANONYMOUS,
        )
        assert [type(error) for error in errors] == [
            UnknownTopicOrPartition,
            InvalidConfig,
            InvalidRequest,
            InvalidRequest,
            InvalidRequest,
            InvalidGroupId,
            InvalidConfig,
        ]
        assert value_of(services, GROUP, SESSION)[1] is not Source.GROUP
        queries = [
            ConfigQuery(unknown),
            ConfigQuery(ConfigResource(ResourceType.BROKER, "7")),
            ConfigQuery(ConfigResource(99, "x")),
            ConfigQuery(ConfigResource(ResourceType.BROKER, "")),
            ConfigQuery(BROKER),
        ]
        found = list(services.configs.describe(queries, caller=ANONYMOUS))
        assert [type(each.error) for each in found] == [
            UnknownTopicOrPartition,
            InvalidRequest,
            InvalidRequest,
            type(None),
            type(None),
        ]
        assert found[3].entries == []
        read_only = {entry.name for entry in found[4].entries if entry.read_only}
        assert "listeners" in read_only
        assert "log.retention.ms" not in read_only

    run(tmp_path, work)


def test_a_description_is_bounded_and_a_repeated_query_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(services: BrokerServices) -> None:
        assert len(list(services.configs.describe([ConfigQuery(TOPIC)] * 100, caller=ANONYMOUS))) == 1
        monkeypatch.setattr(configs, "ENTRIES_MAX", 10)
        first, second = services.configs.describe([ConfigQuery(TOPIC), ConfigQuery(GROUP)], caller=ANONYMOUS)
        assert first.error is None
        assert isinstance(second.error, InvalidRequest)

    run(tmp_path, work)


def test_resources_with_settings_are_listed(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        await services.configs.alter(
            [alteration(GROUP, consumer_session_timeout_ms="50000")], caller=ANONYMOUS
        )
        assert services.configs.list_resources(caller=ANONYMOUS) == [TOPIC, BROKER, GROUP]
        assert services.configs.list_resources([ResourceType.GROUP, 99], caller=ANONYMOUS) == [GROUP]

    run(tmp_path, work)


def test_dynamic_settings_of_the_broker_reach_what_uses_them(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        def changed(name: str, value: str | None) -> ConfigAlteration:
            operation = Operation.DELETE if value is None else Operation.SET
            return ConfigAlteration(BROKER, [Change(name, operation, value)])

        async def alter(name: str, value: str | None) -> None:
            assert await services.configs.alter([changed(name, value)], caller=ANONYMOUS) == [None]

        cleaner = services.log_cleaner
        before = (cleaner.interval_ms, cleaner.bytes_per_second)
        await alter("log.cleaner.backoff.ms", "1234")
        await alter("log.cleaner.io.max.bytes.per.second", "5678")
        assert (cleaner.interval_ms, cleaner.bytes_per_second) == (1234, 5678)
        await alter("log.cleaner.backoff.ms", None)
        await alter("log.cleaner.io.max.bytes.per.second", None)
        assert (cleaner.interval_ms, cleaner.bytes_per_second) == before
        await alter("mansio.partitions_max", "1")
        with pytest.raises(PolicyViolation):
            await services.topics.create(NewTopic("more", partitions=5))
        await alter("mansio.partitions_max", None)
        await services.topics.create(NewTopic("more", partitions=5))
        (errors,) = await services.configs.alter([changed("listeners", "other:1")], caller=ANONYMOUS)
        assert isinstance(errors, InvalidConfig)

    run(tmp_path, work)


def test_the_scrubber_is_started_and_stopped_by_its_rate(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        async def alter(rate: str) -> None:
            change = Change("mansio.log_scrub_io_max_bytes_per_second", Operation.SET, rate)
            assert await services.configs.alter([ConfigAlteration(BROKER, [change])], caller=ANONYMOUS) == [
                None
            ]

        scrubber = services.log_scrubber
        assert scrubber.counts.rounds == 0
        await alter("1000000")
        await eventually(lambda: scrubber.counts.rounds >= 2, 20)
        await alter("0")
        rounds = scrubber.counts.rounds
        await scrubber.run_round()
        await alter("1000000")
        await eventually(lambda: scrubber.counts.rounds >= rounds + 2, 20)

    run(tmp_path, work, log_scrub_interval_ms=10, log_scrub_io_max_bytes_per_second=0)
