"""The handlers of topics, settings and the cluster: requests in every version, as bytes in and bytes out."""

from __future__ import annotations

import asyncio
import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

import pytest

from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers.cluster import OPERATIONS_OMITTED
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.broker_configs import BrokerConfigManager
from mansio.broker.services.cluster import ClusterDescriptionService
from mansio.broker.services.configs import ConfigService
from mansio.broker.services.topic_admin import TopicAdminService
from mansio.broker.topics.topics import NewTopic
from mansio.config.settings import Settings
from mansio.host.clock import HostRandom
from mansio.state.authorization.acls import ResourceType
from mansio.state.authorization.authorizer import OPERATIONS_OF_TYPE
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, advertised_versions
from mansio.wire.codec import messages
from support.listeners import served_listener
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, sqlite_store, topic_admin
from support.quotas import NoQuotas

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.services.cluster import ServedListener
    from mansio.broker.services.quotas import QuotaService
    from mansio.metadata.model import Topic
    from mansio.wire.codec.messages import Struct
    from support.metadata import Admin

LISTENER = ("broker.example", 19092)
OK, UNKNOWN_TOPIC, INVALID_TOPIC, EXISTS, BAD_PARTITIONS, BAD_REPLICAS, BAD_CONFIG, BAD_REQUEST, UNKNOWN_ID = (
    0,
    3,
    17,
    36,
    37,
    38,
    40,
    42,
    100,
)  # fmt: skip


class Peer:
    """Speaks to the handlers as the server does."""

    listener: ServedListener | None = None
    """The listener through which it asks; None: one that advertises `LISTENER`."""

    def __init__(self, admin: Admin, settings: Settings) -> None:
        self.admin = admin
        groups: Any = None
        brokers = BrokerConfigManager(
            store=admin.store,
            state=admin.state,
            scheduler=admin.scheduler,
            random=HostRandom(),
            settings=settings,
        )
        authorization = Authorization(None)
        configs = ConfigService(
            topics=admin.topics,
            groups=groups,
            brokers=brokers,
            settings=settings,
            authorization=authorization,
        )
        description = ClusterDescriptionService(
            topics=admin.topics, settings=settings, cluster=None, authorization=authorization
        )
        topic_admin = TopicAdminService(
            admin.topics,
            quotas=cast("QuotaService", NoQuotas()),
            scheduler=admin.scheduler,
            authorization=authorization,
        )
        self.service: Any = SimpleNamespace(
            scheduler=admin.scheduler,
            topics=admin.topics,
            settings=settings,
            configs=configs,
            cluster_description=description,
            transactions=None,
            topic_admin=topic_admin,
        )

    async def ask(self, api_key: ApiKey, version: int, fields: dict[str, Any]) -> Struct:
        frame = messages.encode_request(api_key, version, 77, "client", fields)
        request = messages.decode_request(api_key, version, body_of(frame, api_key, version))
        name = SUPPORTED_APIS[api_key].handler
        assert name is not None
        module, _, function = name.partition(".")
        handler = getattr(importlib.import_module(f"mansio.api.kafka.handlers.{module}"), function)
        rack = self.service.settings.broker_rack or None
        listener = self.listener or served_listener(*LISTENER, rack=rack)
        context = RequestContext(api_key, version, 77, "client", "127.0.0.1", listener)
        answer = await handler(self.service, request, context)
        if not isinstance(answer, bytes):
            answer = messages.encode_response(api_key, version, 77, answer)
        assert int.from_bytes(answer[:4]) == len(answer) - 4
        correlation_id, response = messages.decode_response_frame(api_key, version, answer[4:])
        assert correlation_id == 77
        return response


def body_of(frame: bytes, api_key: ApiKey, version: int) -> bytes:
    from mansio.wire.headers import read_request_header

    return frame[4:][read_request_header(frame[4:]).body_position :]


def run(check: Callable[[Peer], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        chosen = Settings(**settings)
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store() as store,
            topic_admin(store, settings=chosen) as admin,
        ):
            await check(Peer(admin, chosen))

    asyncio.run(main())


def versions(api_key: ApiKey) -> range:
    return range(SUPPORTED_APIS[api_key].min_version, SUPPORTED_APIS[api_key].max_version + 1)


def each_version(api_key: ApiKey) -> Any:
    return pytest.mark.parametrize("version", versions(api_key))


# Metadata


@each_version(ApiKey.METADATA)
def test_metadata_of_all_topics(version: int) -> None:
    async def check(peer: Peer) -> None:
        first = await peer.admin.topics.create(NewTopic("a", 3))
        await peer.admin.topics.create(NewTopic("__consumer_offsets", 1), internal=True)
        response = await peer.ask(ApiKey.METADATA, version, {"topics": [] if version == 0 else None})
        assert [topic.name for topic in response.topics] == ["a", "__consumer_offsets"]
        topic = response.topics[0]
        assert [part.partition_index for part in topic.partitions] == [0, 1, 2]
        assert {(part.error_code, part.leader_id) for part in topic.partitions} == {(0, 1)}
        assert [(one.node_id, one.host, one.port) for one in response.brokers] == [(1, *LISTENER)]
        if version >= 1:
            assert [topic.is_internal for topic in response.topics] == [False, True]
            assert response.controller_id == 1
            assert response.brokers[0].rack == "r1"
        if version >= 2:
            assert response.cluster_id == peer.admin.state.cluster_id
        if version >= 7:
            assert topic.partitions[0].leader_epoch == 0
        if version >= 10:
            assert topic.topic_id == first.topic_id.bytes
        assert topic.topic_authorized_operations == OPERATIONS_OMITTED

    run(check, broker_rack="r1")


@each_version(ApiKey.METADATA)
def test_metadata_of_no_topics(version: int) -> None:
    """From version 1 on an empty list asks for brokers only."""

    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("a"))
        response = await peer.ask(ApiKey.METADATA, version, {"topics": []})
        assert len(response.topics) == (1 if version == 0 else 0)
        assert len(response.brokers) == 1

    run(check)


@each_version(ApiKey.METADATA)
def test_metadata_by_name_reports_what_is_wrong_with_each(version: int) -> None:
    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("a"))
        names = ["none", "a", "bad/name", "a"]
        response = await peer.ask(ApiKey.METADATA, version, {"topics": [{"name": name} for name in names]})
        assert [(topic.name, topic.error_code) for topic in response.topics] == [
            ("none", UNKNOWN_TOPIC),
            ("a", OK),
            ("bad/name", INVALID_TOPIC),
        ]
        assert not peer.admin.state.topics.keys() - {"a"}

    run(check)


@pytest.mark.parametrize("version", [12, 13])
def test_metadata_by_id(version: int) -> None:
    async def check(peer: Peer) -> None:
        topic = await peer.admin.topics.create(NewTopic("a"))
        stranger = uuid4()
        asked = [{"name": None, "topic_id": one} for one in (topic.topic_id, stranger)]
        response = await peer.ask(ApiKey.METADATA, version, {"topics": asked})
        assert [(one.name, one.topic_id, one.error_code) for one in response.topics] == [
            ("a", topic.topic_id.bytes, OK),
            (None, stranger.bytes, UNKNOWN_ID),
        ]

    run(check)


@pytest.mark.parametrize("version", [10, 12])
def test_metadata_of_a_topic_with_neither_name_nor_usable_id(version: int) -> None:
    async def check(peer: Peer) -> None:
        topic = await peer.admin.topics.create(NewTopic("a"))
        item = {"name": None, "topic_id": topic.topic_id if version == 10 else None}
        response = await peer.ask(ApiKey.METADATA, version, {"topics": [item]})
        assert [one.error_code for one in response.topics] == [BAD_REQUEST]

    run(check)


@pytest.mark.parametrize(
    ("version", "allowed", "enabled", "created"),
    [(3, True, True, True), (4, True, True, True), (12, False, True, False), (12, True, False, False)],
)
def test_auto_creation_needs_the_broker_and_the_client(
    version: int, allowed: bool, enabled: bool, created: bool
) -> None:
    async def check(peer: Peer) -> None:
        fields = {
            "topics": [{"name": "new"}, {"name": "bad/name"}, {"name": "__consumer_offsets"}],
            "allow_auto_topic_creation": allowed,
        }
        response = await peer.ask(ApiKey.METADATA, version, fields)
        codes = [topic.error_code for topic in response.topics]
        assert codes == [OK if created else UNKNOWN_TOPIC, INVALID_TOPIC, UNKNOWN_TOPIC]
        assert len(response.topics[0].partitions) == (2 if created else 0)
        assert ("new" in peer.admin.state.topics) == created

    run(check, auto_create_topics_enable=enabled, num_partitions=2)


@pytest.mark.parametrize("version", range(8, 14))
def test_authorized_operations_are_returned_when_requested(version: int) -> None:
    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("a"))
        fields = {
            "topics": None,
            "include_topic_authorized_operations": True,
            "include_cluster_authorized_operations": True,
        }
        response = await peer.ask(ApiKey.METADATA, version, fields)
        assert response.topics[0].topic_authorized_operations == OPERATIONS_OF_TYPE[ResourceType.TOPIC]
        if version <= 10:
            assert response.cluster_authorized_operations == OPERATIONS_OF_TYPE[ResourceType.CLUSTER]

    run(check)


def test_metadata_shows_a_change_at_once() -> None:
    async def check(peer: Peer) -> None:
        async def counts() -> dict[str, int]:
            response = await peer.ask(ApiKey.METADATA, 12, {"topics": None})
            return {topic.name: len(topic.partitions) for topic in response.topics}

        topic = await peer.admin.topics.create(NewTopic("a", 1))
        assert await counts() == {"a": 1}
        await peer.admin.topics.add_partitions("a", 4)
        assert await counts() == {"a": 4}
        await peer.admin.topics.delete(peer.admin.topics.find_by_id(topic.topic_id))
        assert await counts() == {}

    run(check)


# ApiVersions, DescribeCluster


@each_version(ApiKey.API_VERSIONS)
def test_api_versions_returns_the_table(version: int) -> None:
    async def check(peer: Peer) -> None:
        fields = {"client_software_name": "x", "client_software_version": "1"}
        response = await peer.ask(ApiKey.API_VERSIONS, version, fields)
        assert response.error_code == OK
        shown = [(one.api_key, one.min_version, one.max_version) for one in response.api_keys]
        assert shown == advertised_versions()

    run(check)


@each_version(ApiKey.DESCRIBE_CLUSTER)
def test_describe_cluster(version: int) -> None:
    async def check(peer: Peer) -> None:
        response = await peer.ask(ApiKey.DESCRIBE_CLUSTER, version, {"endpoint_type": 1})
        assert (response.error_code, response.cluster_id) == (OK, peer.admin.state.cluster_id)
        assert response.controller_id == 1
        assert [(one.broker_id, one.host, one.port, one.rack) for one in response.brokers] == [
            (1, *LISTENER, None)
        ]
        assert response.cluster_authorized_operations == OPERATIONS_OMITTED
        if version >= 1:
            response = await peer.ask(ApiKey.DESCRIBE_CLUSTER, version, {"endpoint_type": 2})
            assert response.error_code == 114

    run(check)


# Topics


@each_version(ApiKey.CREATE_TOPICS)
def test_create_topics_one_by_one(version: int) -> None:
    def item(name: str, partitions: int = 1, replicas: int = 1, **more: Any) -> dict[str, Any]:
        fields = {"name": name, "num_partitions": partitions, "replication_factor": replicas}
        return {"assignments": [], "configs": [], **fields, **more}

    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("there"))
        assigned = [{"partition_index": 0, "broker_ids": [1]}, {"partition_index": 1, "broker_ids": [1]}]
        topics = [
            item("good", 2, 1, configs=[{"name": "retention.ms", "value": "5"}]),
            item("defaults", -1, -1),
            item("assigned", -1, -1, assignments=assigned),
            item("there"),
            item("bad/name"),
            item("none", 0),
            item("three", 1, 3),
            item("setting", configs=[{"name": "cleanup.policy", "value": "shred"}]),
            item("twice"),
            item("twice"),
            item("twice-assigned", -1, -1, assignments=[assigned[0], assigned[0]]),
            item("__consumer_offsets"),
        ]
        response = await peer.ask(ApiKey.CREATE_TOPICS, version, {"topics": topics, "timeout_ms": 1000})
        codes = {topic.name: topic.error_code for topic in response.topics}
        assert codes == {
            "good": OK,
            "defaults": OK,
            "assigned": OK,
            "there": EXISTS,
            "bad/name": INVALID_TOPIC,
            "none": BAD_PARTITIONS,
            "three": BAD_REPLICAS,
            "setting": BAD_CONFIG,
            "twice": BAD_REQUEST,
            "twice-assigned": BAD_REQUEST,
            "__consumer_offsets": INVALID_TOPIC,
        }
        assert len(response.topics) == len(topics)
        assert set(peer.admin.state.topics) == {"there", "good", "defaults", "assigned"}
        assert "not a cleanup policy" in response.topics[7].error_message
        good = response.topics[0]
        if version >= 5:
            assert (good.num_partitions, good.replication_factor) == (2, 1)
            assert {one.name: (one.value, one.config_source) for one in good.configs}["retention.ms"] == (
                "5",
                1,
            )
        if version >= 7:
            assert good.topic_id == peer.admin.topics.find("good").topic_id.bytes

    run(check)


def test_create_topics_validate_only() -> None:
    async def check(peer: Peer) -> None:
        fields = {
            "topics": [{"name": "a", "num_partitions": 3, "replication_factor": 1}],
            "validate_only": True,
        }
        response = await peer.ask(ApiKey.CREATE_TOPICS, 7, fields)
        assert (response.topics[0].error_code, response.topics[0].num_partitions) == (OK, 3)
        assert response.topics[0].topic_id is None
        assert not peer.admin.state.topics

    run(check)


@each_version(ApiKey.DELETE_TOPICS)
def test_delete_topics_by_name(version: int) -> None:
    async def check(peer: Peer) -> None:
        for name in ("a", "b", "twice"):
            await peer.admin.topics.create(NewTopic(name))
        await peer.admin.topics.create(NewTopic("__consumer_offsets"), internal=True)
        names = ["a", "none", "twice", "twice", "__consumer_offsets"]
        fields = {"topics": [{"name": name} for name in names]} if version >= 6 else {"topic_names": names}
        response = await peer.ask(ApiKey.DELETE_TOPICS, version, fields)
        codes = [(one.name, one.error_code) for one in response.responses]
        assert codes == [
            ("a", OK),
            ("none", UNKNOWN_TOPIC),
            ("twice", BAD_REQUEST),
            ("twice", BAD_REQUEST),
            ("__consumer_offsets", INVALID_TOPIC),
        ]
        assert set(peer.admin.state.topics) == {"b", "twice", "__consumer_offsets"}

    run(check)


def test_delete_topics_by_id() -> None:
    async def check(peer: Peer) -> None:
        made: list[Topic] = [await peer.admin.topics.create(NewTopic(name)) for name in "abc"]
        stranger = UUID(int=9)
        items = [
            {"name": None, "topic_id": made[0].topic_id},
            {"name": None, "topic_id": stranger},
            {"name": "b", "topic_id": made[1].topic_id},
            {"name": None, "topic_id": None},
            {"name": "c"},
            {"name": None, "topic_id": made[2].topic_id},
        ]
        response = await peer.ask(ApiKey.DELETE_TOPICS, 6, {"topics": items})
        codes = [(one.name, one.error_code) for one in response.responses]
        assert codes == [
            ("a", OK),
            (None, UNKNOWN_ID),
            ("b", BAD_REQUEST),
            (None, BAD_REQUEST),
            ("c", BAD_REQUEST),  # once by name and once by id is twice, too
            ("c", BAD_REQUEST),
        ]
        assert set(peer.admin.state.topics) == {"b", "c"}

    run(check)


@each_version(ApiKey.CREATE_PARTITIONS)
def test_create_partitions(version: int) -> None:
    async def check(peer: Peer) -> None:
        for name in ("a", "b", "c"):
            await peer.admin.topics.create(NewTopic(name, 2))
        topics = [
            {"name": "a", "count": 4, "assignments": [{"broker_ids": [1]}, {"broker_ids": [1]}]},
            {"name": "b", "count": 3, "assignments": None},
            {"name": "c", "count": 2, "assignments": None},
            {"name": "none", "count": 2, "assignments": None},
        ]
        for validate_only, expected in ((True, (2, 2, 2)), (False, (4, 3, 2))):
            fields = {"topics": topics, "timeout_ms": 1, "validate_only": validate_only}
            response = await peer.ask(ApiKey.CREATE_PARTITIONS, version, fields)
            codes = [one.error_code for one in response.results]
            assert codes == [OK, OK, BAD_PARTITIONS, UNKNOWN_TOPIC]
            assert tuple(len(peer.admin.topics.find(name).partitions) for name in "abc") == expected

    run(check)


# Settings


@each_version(ApiKey.DESCRIBE_CONFIGS)
def test_describe_configs_of_topics_and_broker(version: int) -> None:
    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("a", configs=[("retention.ms", "5")]))
        resources = [
            {"resource_type": 2, "resource_name": "a", "configuration_keys": ["retention.ms", "segment.ms"]},
            {"resource_type": 2, "resource_name": "none", "configuration_keys": None},
            {"resource_type": 4, "resource_name": "1", "configuration_keys": None},
            {"resource_type": 4, "resource_name": "2", "configuration_keys": None},
            {"resource_type": 4, "resource_name": "", "configuration_keys": None},
            {"resource_type": 8, "resource_name": "1", "configuration_keys": None},
            {"resource_type": 2, "resource_name": "a", "configuration_keys": []},
        ]
        fields = {"resources": resources, "include_synonyms": True, "include_documentation": True}
        response = await peer.ask(ApiKey.DESCRIBE_CONFIGS, version, fields)
        codes = [one.error_code for one in response.results]
        assert codes == [OK, UNKNOWN_TOPIC, OK, BAD_REQUEST, OK, BAD_REQUEST, OK]
        topic, _, broker, _, dynamic, _, whole = response.results
        retention, segment = sorted(topic.configs, key=lambda one: str(one.name))
        assert (retention.name, retention.value, retention.config_source) == ("retention.ms", "5", 1)
        assert [one.source for one in retention.synonyms] == [1, 5]
        assert (segment.value, segment.config_source, segment.read_only) == ("604800000", 5, False)
        if version >= 3:
            assert retention.config_type == 5
            assert "Age in ms" in retention.documentation
        read_only = {one.name: one.read_only for one in broker.configs}
        assert read_only["listeners"]
        assert not read_only["num.partitions"]
        assert {"num.partitions", "message.max.bytes", "listeners"} <= {one.name for one in broker.configs}
        assert dynamic.configs == []
        assert len(whole.configs) > 10

    run(check)


def test_describe_configs_keeps_quiet_when_not_asked() -> None:
    async def check(peer: Peer) -> None:
        await peer.admin.topics.create(NewTopic("a"))
        resources = [{"resource_type": 2, "resource_name": "a", "configuration_keys": None}]
        response = await peer.ask(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": resources})
        assert {len(one.synonyms) for one in response.results[0].configs} == {0}
        assert {one.documentation for one in response.results[0].configs} == {None}

    run(check)


@each_version(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def test_incremental_alter_configs(version: int) -> None:
    def resource(kind: int, name: str, *changes: tuple[str, int, str | None]) -> dict[str, Any]:
        configs = [
            {"name": one, "config_operation": operation, "value": value} for one, operation, value in changes
        ]
        return {"resource_type": kind, "resource_name": name, "configs": configs}

    async def check(peer: Peer) -> None:
        for name in ("a", "b", "c", "d"):
            await peer.admin.topics.create(NewTopic(name, configs=[("segment.ms", "9")]))
        resources = [
            resource(
                2, "a", ("retention.ms", 0, "5"), ("segment.ms", 1, None), ("cleanup.policy", 2, "delete")
            ),
            resource(2, "b", ("retention.ms", 0, "5"), ("nope", 0, "1")),
            resource(2, "none", ("retention.ms", 0, "5")),
            resource(4, "1", ("num.partitions", 0, "5")),
            resource(4, "", ("listeners", 0, "other:1")),
            resource(4, "7", ("num.partitions", 0, "5")),
            resource(2, "d", ("retention.ms", 0, "1")),
            resource(2, "d", ("retention.ms", 0, "2")),
            resource(16, "x"),
        ]
        codes = [OK, BAD_CONFIG, UNKNOWN_TOPIC, OK, BAD_CONFIG, *[BAD_REQUEST] * 4]
        kept = {"segment.ms": "9"}
        changed = {"retention.ms": "5", "cleanup.policy": "delete"}
        for validate_only, expected in ((True, kept), (False, changed)):
            fields = {"resources": resources, "validate_only": validate_only}
            response = await peer.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, version, fields)
            assert [one.error_code for one in response.responses] == codes
            assert dict(peer.admin.topics.find("a").configs) == expected
        for name in ("b", "c", "d"):
            assert dict(peer.admin.topics.find(name).configs) == kept

    run(check)
