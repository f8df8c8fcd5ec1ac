"""Settings of single groups: what is kept, what is in force, what is refused, through the handlers that clients ask."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import mansio.broker.coordinator.group.group_config_manager
from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers import configs as handlers
from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.configs import ConfigService
from mansio.config import group_config
from mansio.config.config_def import Change, Operation
from mansio.config.config_entries import Source
from mansio.config.settings import Settings
from mansio.errors import InvalidConfig, InvalidGroupId, InvalidRequest, PolicyViolation
from mansio.host.clock import HostRandom
from mansio.metadata import metadata_store
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import Put
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import read_request_header
from support.listeners import served_listener
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GROUP, INVALID_CONFIG, INVALID_REQUEST = 32, 40, 42
SESSION, INTERVAL = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
SETTINGS = Settings(group_consumer_session_timeout_ms=30_000)


def configs_of(admin: Admin, state: MetadataImage) -> GroupConfigManager:
    return GroupConfigManager(
        store=admin.store, state=state, scheduler=admin.scheduler, random=HostRandom(), settings=SETTINGS
    )


def run(check: Callable[[Admin, GroupConfigManager], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store() as store,
            topic_admin(store) as admin,
        ):
            await check(admin, configs_of(admin, admin.state))

    asyncio.run(main())


def change(name: str, value: str | None) -> Change:
    return Change(name, Operation.DELETE if value is None else Operation.SET, value)


async def call(admin: Admin, configs: GroupConfigManager, api: ApiKey, version: int, **fields: Any) -> Any:
    """A request through the wire codec and its handler."""
    topics: Any = SimpleNamespace(state=admin.state)
    no_brokers: Any = None
    service: Any = SimpleNamespace(
        scheduler=admin.scheduler,
        configs=ConfigService(
            topics=topics,
            groups=configs,
            brokers=no_brokers,
            settings=Settings(node_id=1),
            authorization=Authorization(None),
        ),
    )
    frame = messages.encode_request(int(api), version, 7, "client", fields)[4:]
    request = messages.decode_request(int(api), version, frame[read_request_header(frame).body_position :])
    handler = {
        ApiKey.DESCRIBE_CONFIGS: handlers.describe_configs,
        ApiKey.ALTER_CONFIGS: handlers.alter_configs,
        ApiKey.INCREMENTAL_ALTER_CONFIGS: handlers.incremental_alter_configs,
        ApiKey.LIST_CONFIG_RESOURCES: handlers.list_config_resources,
    }[api]
    context = RequestContext(int(api), version, 7, "client", "10.0.0.1", served_listener())
    answer = await handler(service, request, context)
    encoded = messages.encode_response(int(api), version, 7, answer)
    return messages.decode_response_frame(int(api), version, encoded[4:])[1]


def test_changes_at_the_same_time_are_all_kept_and_reported() -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        reported: list[str] = []
        admin.state.on_group_config_change(reported.append)
        await asyncio.gather(
            configs.alter("g", [change(SESSION, "10000")]),
            configs.alter("g", [change(INTERVAL, "500")]),
            configs.alter("a/b%", [change(INTERVAL, "600")]),
        )
        assert configs.overrides("g") == {SESSION: "10000", INTERVAL: "500"}
        assert configs.overrides("a/b%") == {INTERVAL: "600"}
        assert configs.groups() == ["a/b%", "g"]
        assert sorted(set(reported)) == ["a/b%", "g"]
        late = await MetadataImage.load(admin.store, "", HostRandom())
        assert configs_of(admin, late).groups() == ["a/b%", "g"]
        await configs.alter("a/b%", [change(INTERVAL, None)])
        late._apply_listing(await admin.store.list(late.keys.prefix))
        assert configs_of(admin, late).groups() == ["g"]

    run(check)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (SESSION, "5999", InvalidConfig, "below the minimum of 6000"),
        (INTERVAL, "soon", InvalidConfig, "not a whole number"),
        (INTERVAL, "50", InvalidConfig, "below the minimum of 100"),
        ("consumer.assignment.interval.ms", "1", InvalidConfig, "not supported"),
        ("retention.ms", "1", InvalidConfig, "no such group setting"),
        ("group.consumer.assignors", "uniform", InvalidConfig, "no such group setting"),
    ],
)
def test_what_would_do_nothing_is_refused(
    name: str, value: str | None, error: type[Exception], message: str
) -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        del admin
        with pytest.raises(error, match=message):
            await configs.alter("g", [change(name, value)])
        assert configs.groups() == []

    run(check)


def test_a_heartbeat_interval_that_is_longer_than_the_session_is_refused() -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        del admin
        with pytest.raises(InvalidConfig, match="not less than"):
            await configs.alter("g", [change(SESSION, "6000"), change(INTERVAL, "6000")])
        with pytest.raises(InvalidRequest, match="twice"):
            await configs.alter("g", [change(SESSION, "6000"), change(SESSION, "7000")])
        with pytest.raises(InvalidConfig, match="lists"):
            await configs.alter("g", [Change(SESSION, Operation.APPEND, "1")])
        with pytest.raises(InvalidGroupId):
            await configs.alter("", [change(SESSION, "6000")])

    run(check)


def test_as_many_groups_as_are_allowed_have_settings_and_those_can_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mansio.broker.coordinator.group.group_config_manager, "CONFIGURED_GROUPS_MAX", 1)

    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        del admin
        await configs.alter("g", [change(SESSION, "6000")])
        with pytest.raises(PolicyViolation):
            await configs.alter("h", [change(SESSION, "6000")])
        await configs.alter("g", [change(SESSION, "7000")])
        assert configs.overrides("g") == {SESSION: "7000"}

    run(check)


def test_what_another_version_has_kept_is_not_in_force_and_can_be_removed() -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        key = admin.state.keys.group_config("g")
        put = Put(key, metadata_store.encode({"configs": {"streams.session.timeout.ms": "1"}}, "w"))
        done = await admin.store.transact([], [put])
        await admin.state.wait_for_revision(done.revision, admin.scheduler)
        assert {entry.name for entry in configs.describe("g")} == set(group_config.SETTINGS)
        await configs.alter("g", [change("streams.session.timeout.ms", None)])
        assert configs.groups() == []

    run(check)


def test_clients_see_where_a_value_comes_from_and_set_it_both_ways() -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        async def shown() -> dict[str, tuple[str, int]]:
            resource = {"resource_type": GROUP, "resource_name": "g", "configuration_keys": None}
            answer = await call(admin, configs, ApiKey.DESCRIBE_CONFIGS, 4, resources=[resource])
            assert answer.results[0].error_code == 0
            configs_ = answer.results[0].configs
            assert {each.name for each in configs_} == set(group_config.SETTINGS)
            consumers = [each for each in configs_ if each.name.startswith("consumer.")]
            return {each.name: (each.value, each.config_source) for each in consumers}

        default = {
            SESSION: ("30000", int(Source.STATIC_BROKER)),
            INTERVAL: ("500", int(Source.DEFAULT)),
        }
        assert await shown() == default
        resource = {"resource_type": GROUP, "resource_name": "g"}
        one = {"name": INTERVAL, "config_operation": 0, "value": "700"}
        fields = {"resources": [{**resource, "configs": [one]}], "validate_only": True}
        answer = await call(admin, configs, ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, **fields)
        assert answer.responses[0].error_code == 0
        assert await shown() == default
        await call(admin, configs, ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, **{**fields, "validate_only": False})
        assert await shown() == {**default, INTERVAL: ("700", int(Source.GROUP))}
        whole = {"resources": [{**resource, "configs": [{"name": SESSION, "value": "9000"}]}]}
        answer = await call(admin, configs, ApiKey.ALTER_CONFIGS, 2, **whole, validate_only=False)
        assert answer.responses[0].error_code == 0
        assert await shown() == {**default, SESSION: ("9000", int(Source.GROUP))}
        whole["resources"][0]["configs"] = [{"name": SESSION, "value": "1"}]
        answer = await call(admin, configs, ApiKey.ALTER_CONFIGS, 2, **whole, validate_only=False)
        assert answer.responses[0].error_code == INVALID_CONFIG

    run(check)


def test_what_has_settings_is_listed_by_type() -> None:
    async def check(admin: Admin, configs: GroupConfigManager) -> None:
        await configs.alter("g", [change(SESSION, "9000")])

        async def listed(version: int, **fields: Any) -> list[tuple[str, int]]:
            answer = await call(admin, configs, ApiKey.LIST_CONFIG_RESOURCES, version, **fields)
            return [(each.resource_name, each.resource_type) for each in answer.config_resources]

        assert await listed(0) == []
        assert await listed(1, resource_types=[GROUP]) == [("g", GROUP)]
        assert ("g", GROUP) in await listed(1, resource_types=[])
        assert ("1", 4) in await listed(1, resource_types=[])
        assert await listed(1, resource_types=[16, 8]) == []

    run(check)
