"""Topics and the state of the cluster over real sockets: who has no right changes nothing, and learns nothing of what
exists; who has it gets what Kafka's broker returns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import kafka.admin
import kafka.errors
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from kafka import KafkaAdminClient

from mansio.broker.routing.caller import Caller, ClientSession
from mansio.broker.services.audit.audit_service import DONE, AuditService
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.topic_admin import TopicReference
from mansio.broker.topics import topics as broker_topics
from mansio.errors import (
    ClusterAuthorizationFailed,
    InvalidRequest,
    InvalidTopic,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.authorization.acls import (
    ANY,
    CLUSTER_NAME,
    AclFilter,
    Operation,
    Permission,
    ResourceType,
)
from mansio.state.authorization.authorizer import OPERATIONS_OF_TYPE
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from support.authorization import CLUSTER, GROUP, PEER, TOPIC, acl
from support.machine import scaled
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, log_in, sasl_broker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.metadata.model import Topic
    from mansio.state.authorization.acls import Acl
    from mansio.wire.codec.messages import Struct

PASSWORD: Final = "correct horse"
MECHANISM: Final = ScramMechanism.SHA_256.value
SEEN, HIDDEN, ABSENT = "seen", "hidden", "absent"
"""Topics: one that alice may describe in most tests, one that she may not, and a name of the same length as that."""
OMITTED: Final = -(1 << 31)
T29, C31 = TopicAuthorizationFailed.kafka_code, ClusterAuthorizationFailed.kafka_code
UNKNOWN, UNKNOWN_ID = UnknownTopicOrPartition.kafka_code, UnknownTopicId.kafka_code
INVALID_REQUEST, INVALID_TOPIC = InvalidRequest.kafka_code, InvalidTopic.kafka_code
DEADLINE_S: Final = 30
DENY: Final = Permission.DENY


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    settings = {
        "authorizer": "acl",
        "super_users": "User:admin",
        "auto_create_topics_enable": True,
        "num_partitions": 2,
    }
    with sasl_broker(tmp_path_factory.mktemp("acl") / "data", **settings) as started:
        for user in ("alice", "admin"):
            started.set_user(user, PASSWORD, (ScramMechanism.SHA_256,))
        # The topic of the trace is created some time after the first record; tests compare revisions of the metadata.
        started.run(started.broker.service.traces.reader.writer._find_target())
        yield started


class Bench:
    """A broker with the topics `SEEN` and `HIDDEN`, and a connection of alice, who has no right at first."""

    def __init__(self, broker: SaslBroker) -> None:
        self.broker = broker
        self.service = broker.broker.service
        self.peer = RawPeer(broker.port)
        assert log_in(self.peer, MECHANISM, "alice", PASSWORD).error_code == 0
        for name in (SEEN, HIDDEN):
            broker.run(self.service.topics.create(broker_topics.NewTopic(name, 1)))
        self.revision = self.metadata_revision()

    def close(self) -> None:
        self.peer.socket.close()
        self.broker.run(self.service.acls.delete_each([AclFilter()], caller=PEER))
        for topic in list(self.service.topics.state.topics.values()):
            if not topic.internal:
                self.broker.run(self.service.topics.delete(topic))

    def allow(self, *acls: Acl) -> None:
        assert set(self.broker.run(self.service.acls.create_each(acls, caller=PEER))) <= {None}
        self.revision = self.metadata_revision()

    def forbid(self, resource_type: ResourceType, name: str) -> None:
        """Remove all ACLs of a resource."""
        selected = AclFilter(resource_type, ANY, name)
        self.broker.run(self.service.acls.delete_each([selected], caller=PEER))
        self.revision = self.metadata_revision()

    def metadata_revision(self) -> int:
        return int(self.service.topics.state.revision)

    def assert_unchanged(self) -> None:
        assert self.metadata_revision() == self.revision, "the metadata has changed"

    def topic(self, name: str) -> Topic:
        return self.service.topics.state.topics[name]

    def ask(self, api: ApiKey, version: int | None = None, **fields: Any) -> Struct:
        return self.peer.call(api, SUPPORTED_APIS[api].max_version if version is None else version, fields)


@pytest.fixture
def bench(broker: SaslBroker) -> Iterator[Bench]:
    made = Bench(broker)
    try:
        yield made
    finally:
        made.close()


def versions(api: ApiKey) -> Any:
    known = SUPPORTED_APIS[api]
    return pytest.mark.parametrize("version", range(known.min_version, known.max_version + 1))


def bits(*operations: Operation) -> int:
    return sum(1 << operation for operation in operations)


# Metadata


@versions(ApiKey.METADATA)
def test_metadata_of_all_topics_leaves_out_what_the_caller_may_not_describe(
    bench: Bench, version: int
) -> None:
    everything: list[Any] | None = [] if version == 0 else None
    assert not bench.ask(ApiKey.METADATA, version, topics=everything).topics
    bench.allow(acl(TOPIC, SEEN, Operation.READ))  # implies DESCRIBE
    found = bench.ask(ApiKey.METADATA, version, topics=everything)
    assert [(each.name, len(each.partitions)) for each in found.topics] == [(SEEN, 1)]
    assert len(found.brokers) == 1, "every client may learn the brokers"


@versions(ApiKey.METADATA)
def test_metadata_of_a_hidden_topic_is_that_of_an_absent_one(bench: Bench, version: int) -> None:
    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE))
    asked = [{"name": name} for name in (HIDDEN, SEEN, ABSENT)]
    hidden, seen, absent = bench.ask(ApiKey.METADATA, version, topics=asked).topics
    assert (hidden.name, hidden.error_code, len(hidden.partitions)) == (HIDDEN, T29, 0)
    assert (seen.name, seen.error_code, len(seen.partitions)) == (SEEN, 0, 1)
    assert str(absent) == str(hidden).replace(HIDDEN, ABSENT)
    bench.assert_unchanged()


def test_metadata_by_id_names_no_hidden_topic(bench: Bench) -> None:
    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE))
    unknown = uuid4()
    ids = [bench.topic(HIDDEN).topic_id, unknown, bench.topic(SEEN).topic_id]
    found = bench.ask(ApiKey.METADATA, topics=[{"name": None, "topic_id": each} for each in ids]).topics
    assert [(each.name, each.error_code, UUID(bytes=each.topic_id)) for each in found] == [
        (None, T29, ids[0]),
        (None, UNKNOWN_ID, unknown),
        (SEEN, 0, ids[2]),
    ]
    assert not found[0].partitions


def test_automatic_creation_needs_the_topic_or_the_cluster(bench: Bench) -> None:
    bench.allow(acl(TOPIC, "new", Operation.CREATE))
    answer = bench.ask(ApiKey.METADATA, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    assert answer.topics[0].error_code == T29, "CREATE is not DESCRIBE"
    bench.forbid(TOPIC, "new")
    bench.allow(acl(TOPIC, "new", Operation.DESCRIBE))
    answer = bench.ask(ApiKey.METADATA, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    assert answer.topics[0].error_code == T29
    assert answer.topics[0].topic_id is None
    answer = bench.ask(ApiKey.METADATA, topics=[{"name": "new"}], allow_auto_topic_creation=False)
    assert answer.topics[0].error_code == UNKNOWN
    bench.assert_unchanged()

    bench.allow(acl(TOPIC, "new", Operation.CREATE))
    answer = bench.ask(ApiKey.METADATA, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    assert (answer.topics[0].error_code, len(answer.topics[0].partitions)) == (0, 2)
    bench.allow(
        acl(CLUSTER, CLUSTER_NAME, Operation.CREATE),
        *(acl(TOPIC, name, Operation.DESCRIBE) for name in ("newer", "bad name", "__consumer_offsets")),
    )
    asked = [{"name": "newer"}, {"name": "bad name"}, {"name": "__consumer_offsets"}]
    answer = bench.ask(ApiKey.METADATA, topics=asked, allow_auto_topic_creation=True)
    assert [each.error_code for each in answer.topics] == [0, INVALID_TOPIC, UNKNOWN]


def test_each_topic_that_is_created_automatically_for_a_client_is_audited_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, ...]] = []

    def record(_: AuditService, caller: Caller, outcome: str, *what: Any) -> None:
        if outcome == DONE:
            done.append((caller.session.principal, caller.api, *what))

    monkeypatch.setattr(AuditService, "_add", record)
    may_create = acl(CLUSTER, CLUSTER_NAME, Operation.CREATE)
    bench.allow(may_create, *(acl(TOPIC, name, Operation.DESCRIBE) for name in ("new", SEEN)))
    asked = [{"name": "new"}, {"name": SEEN}, {"name": "bad name"}]
    for _ in range(2):
        bench.ask(ApiKey.METADATA, topics=asked, allow_auto_topic_creation=True)
    assert done == [("User:alice", "METADATA", "CREATE", "topic", "new")]
    done.clear()
    admin = Caller(ClientSession("admin"), address="10.0.0.1", api="METADATA")

    async def ask(name: str, *callers: Caller) -> None:
        find = bench.service.topic_admin.find_each
        wanted = [TopicReference(name)]
        await asyncio.gather(*(find(wanted, may_create=True, caller=each) for each in callers))
        assert bench.topic(name)

    bench.broker.run(ask("two", admin, admin))
    bench.broker.run(ask("of-a-broker", PEER))
    assert done == [("User:admin", "METADATA", "CREATE", "topic", "two")]
    done.clear()
    exists = bench.service.topics.auto_create(SEEN, on_created=lambda name: done.append((name,)))
    assert bench.broker.run(exists).name == SEEN, "another broker has created it meanwhile"
    assert not done


@pytest.mark.parametrize("version", range(8, SUPPORTED_APIS[ApiKey.METADATA].max_version + 1))
def test_metadata_has_the_operations_of_the_caller(bench: Bench, version: int) -> None:
    bench.allow(
        acl(TOPIC, SEEN, Operation.WRITE),
        acl(TOPIC, SEEN, Operation.ALTER_CONFIGS),
        acl(TOPIC, ABSENT, Operation.ALL),
        acl(TOPIC, ABSENT, Operation.DELETE, DENY),
        acl(CLUSTER, CLUSTER_NAME, Operation.CREATE),
    )
    seen = bits(*(Operation.WRITE, Operation.DESCRIBE, Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS))
    asked: dict[str, Any] = {
        "topics": [{"name": name} for name in (SEEN, HIDDEN, ABSENT)],
        "allow_auto_topic_creation": False,
        "include_topic_authorized_operations": True,
        "include_cluster_authorized_operations": True,
    }
    answer = bench.ask(ApiKey.METADATA, version, **asked)
    assert [each.topic_authorized_operations for each in answer.topics] == [
        seen,
        OMITTED,
        OPERATIONS_OF_TYPE[TOPIC] & ~bits(Operation.DELETE),
    ]
    every = bench.ask(ApiKey.METADATA, version, **{**asked, "topics": None})
    assert [each.topic_authorized_operations for each in every.topics] == [seen]
    if version > 10:
        return
    assert answer.cluster_authorized_operations == 0, "without DESCRIBE for the cluster"
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE))
    expected = bits(Operation.CREATE, Operation.DESCRIBE)
    assert bench.ask(ApiKey.METADATA, version, **asked).cluster_authorized_operations == expected


# DescribeTopicPartitions, DescribeCluster


def test_pages_of_topics_and_their_cursors_name_no_hidden_topic(bench: Bench) -> None:
    for name in ("a", "z"):
        bench.broker.run(bench.service.topics.create(broker_topics.NewTopic(name, 2)))
        bench.allow(acl(TOPIC, name, Operation.DESCRIBE))
    found, cursor = [], None
    while True:
        page = bench.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS, topics=[], response_partition_limit=1, cursor=cursor
        )
        found += [(each.name, len(each.partitions)) for each in page.topics]
        if page.next_cursor is None:
            break
        cursor = {
            "topic_name": page.next_cursor.topic_name,
            "partition_index": page.next_cursor.partition_index,
        }
        assert cursor["topic_name"] in ("a", "z")
    assert found == [("a", 1), ("a", 1), ("z", 1), ("z", 1)]


def test_topics_described_by_name_have_the_operations_of_the_caller(bench: Bench) -> None:
    bench.allow(acl(TOPIC, SEEN, Operation.READ), acl(TOPIC, "none", Operation.READ))
    asked = [{"name": name} for name in (SEEN, HIDDEN, ABSENT, "none")]
    answer = bench.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, topics=asked, response_partition_limit=100)
    absent, hidden, none, seen = sorted(answer.topics, key=lambda each: str(each.name))
    readable = bits(Operation.READ, Operation.DESCRIBE)
    assert (seen.error_code, seen.topic_authorized_operations) == (0, readable)
    assert (none.error_code, none.topic_authorized_operations) == (UNKNOWN, readable)
    assert (hidden.error_code, hidden.topic_authorized_operations) == (T29, OMITTED)
    assert str(absent) == str(hidden).replace(HIDDEN, ABSENT)


@versions(ApiKey.DESCRIBE_CLUSTER)
def test_description_of_the_cluster_has_the_operations_of_the_caller(bench: Bench, version: int) -> None:
    def operations() -> int:
        fields = {"include_cluster_authorized_operations": True, "endpoint_type": 1}
        answer = bench.ask(ApiKey.DESCRIBE_CLUSTER, version, **fields)
        assert (answer.error_code, len(answer.brokers)) == (0, 1)
        return int(answer.cluster_authorized_operations)

    assert operations() == 0
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.ALTER))  # implies DESCRIBE
    assert operations() == bits(Operation.ALTER, Operation.DESCRIBE)
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.DESCRIBE, DENY))
    assert operations() == 0


# CreateTopics, DeleteTopics, CreatePartitions


def create(bench: Bench, *names: str, version: int | None = None, **more: Any) -> list[Struct]:
    fields = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": [], **more}
    topics = [{"name": name, **fields} for name in names]
    answer = bench.ask(ApiKey.CREATE_TOPICS, version, topics=topics, timeout_ms=10_000, validate_only=False)
    return list(answer.topics)


@versions(ApiKey.CREATE_TOPICS)
def test_creation_needs_the_topic_or_the_cluster(bench: Bench, version: int) -> None:
    found = create(bench, HIDDEN, ABSENT, "bad name", "x", "x", version=version)
    assert [each.error_code for each in found] == [T29, T29, T29, INVALID_REQUEST, INVALID_REQUEST]
    assert str(found[1]) == str(found[0]).replace(HIDDEN, ABSENT)
    twice = [{"partition_index": 0, "broker_ids": [1]}] * 2
    assert create(bench, "x", version=version, assignments=twice)[0].error_code == T29
    bench.assert_unchanged()

    bench.allow(acl(TOPIC, "one", Operation.CREATE))
    assert [each.error_code for each in create(bench, "one", "two", version=version)] == [0, T29]
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.CREATE))
    (two,) = create(bench, "two", version=version)
    assert two.error_code == 0
    if version >= 5:
        shown = two.topic_config_error_code, list(two.configs), two.num_partitions, two.replication_factor
        assert shown == (T29, [], -1, -1), "the settings need another right"
        bench.allow(acl(TOPIC, "three", Operation.DESCRIBE_CONFIGS))
        (three,) = create(bench, "three", version=version)
        assert (three.topic_config_error_code, three.num_partitions) == (0, 1)
        assert "retention.ms" in {each.name for each in three.configs}


@versions(ApiKey.DELETE_TOPICS)
def test_deletion_by_name_needs_the_topic_or_the_cluster(bench: Bench, version: int) -> None:
    def delete(*names: str) -> list[Struct]:
        named = {"topics": [{"name": name, "topic_id": None} for name in names]}
        fields = named if version >= 6 else {"topic_names": list(names)}
        return list(bench.ask(ApiKey.DELETE_TOPICS, version, **fields, timeout_ms=10_000).responses)

    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE), acl(TOPIC, "none", Operation.DESCRIBE))
    found = delete(HIDDEN, ABSENT, SEEN, "none", "x", "x")
    expected = [T29, T29, T29, UNKNOWN, INVALID_REQUEST, INVALID_REQUEST]
    assert [each.error_code for each in found] == expected
    assert str(found[1]) == str(found[0]).replace(HIDDEN, ABSENT)
    bench.assert_unchanged()

    bench.allow(acl(TOPIC, SEEN, Operation.DELETE))
    assert [each.error_code for each in delete(SEEN, HIDDEN)] == [0, T29]
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.DELETE))
    assert [each.error_code for each in delete(HIDDEN, ABSENT)] == [0, UNKNOWN]
    assert not {SEEN, HIDDEN} & bench.service.topics.state.topics.keys()


def test_deletion_by_id_names_no_hidden_topic(bench: Bench) -> None:
    def delete(*ids: UUID, name: str | None = None) -> list[tuple[str | None, UUID, int]]:
        topics: list[dict[str, Any]] = [{"name": None, "topic_id": each} for each in ids]
        topics += [{"name": name, "topic_id": None}] if name is not None else []
        answer = bench.ask(ApiKey.DELETE_TOPICS, topics=topics, timeout_ms=10_000)
        return [
            (each.name, UUID(bytes=each.topic_id or bytes(16)), each.error_code) for each in answer.responses
        ]

    hidden, seen, unknown = bench.topic(HIDDEN).topic_id, bench.topic(SEEN).topic_id, uuid4()
    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE))
    assert delete(hidden, seen, unknown) == [
        (None, hidden, T29),
        (SEEN, seen, T29),
        (None, unknown, UNKNOWN_ID),
    ]
    assert delete(hidden, hidden) == [(None, hidden, INVALID_REQUEST)] * 2
    # That a name belongs to an id is told to those who may delete the topic.
    assert delete(hidden, name=HIDDEN) == [(None, hidden, T29), (HIDDEN, UUID(int=0), T29)]
    bench.assert_unchanged()
    bench.allow(acl(TOPIC, SEEN, Operation.DELETE))
    assert delete(seen, name=SEEN) == [(SEEN, seen, INVALID_REQUEST)] * 2
    bench.assert_unchanged()
    assert delete(seen) == [(SEEN, seen, 0)]


@versions(ApiKey.CREATE_PARTITIONS)
def test_more_partitions_need_the_topic(bench: Bench, version: int) -> None:
    def grow(*names: str) -> list[Struct]:
        topics = [{"name": name, "count": 3, "assignments": None} for name in names]
        fields = {"topics": topics, "timeout_ms": 10_000, "validate_only": False}
        return list(bench.ask(ApiKey.CREATE_PARTITIONS, version, **fields).results)

    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE))
    found = grow(HIDDEN, ABSENT, SEEN, "x", "x")
    assert [each.error_code for each in found] == [T29, T29, T29, INVALID_REQUEST, INVALID_REQUEST]
    assert str(found[1]) == str(found[0]).replace(HIDDEN, ABSENT)
    bench.assert_unchanged()
    bench.allow(acl(TOPIC, SEEN, Operation.ALTER))
    assert [each.error_code for each in grow(SEEN, HIDDEN)] == [0, T29]
    assert len(bench.topic(SEEN).partitions) == 3


def test_internal_topics_stay_the_brokers_own(bench: Bench) -> None:
    """Whatever the ACLs allow; without them, an internal topic is as hidden as another one."""
    name = "__share_group_state"
    if name not in bench.service.topics.state.topics:
        bench.broker.run(bench.service.topics.create(broker_topics.NewTopic(name, 1), internal=True))
    bench.revision = bench.metadata_revision()
    deletion: dict[str, Any] = {"topics": [{"name": name, "topic_id": None}], "timeout_ms": 10_000}
    growth: dict[str, Any] = {
        "topics": [{"name": name, "count": 9, "assignments": None}],
        "timeout_ms": 1,
        "validate_only": False,
    }
    assert not bench.ask(ApiKey.METADATA, topics=None).topics
    assert create(bench, name)[0].error_code == T29
    assert bench.ask(ApiKey.DELETE_TOPICS, **deletion).responses[0].error_code == T29
    assert bench.ask(ApiKey.CREATE_PARTITIONS, **growth).results[0].error_code == T29
    bench.allow(acl(TOPIC, name, Operation.ALL), acl(CLUSTER, CLUSTER_NAME, Operation.ALL))
    (shown,) = bench.ask(ApiKey.METADATA, topics=[{"name": name}]).topics
    assert (shown.error_code, shown.is_internal) == (0, True)
    assert create(bench, name)[0].error_code == INVALID_TOPIC
    assert bench.ask(ApiKey.DELETE_TOPICS, **deletion).responses[0].error_code == INVALID_TOPIC
    assert bench.ask(ApiKey.CREATE_PARTITIONS, **growth).results[0].error_code == INVALID_TOPIC
    bench.assert_unchanged()


# The state of the cluster

DESCRIBING: Final = (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)
"""Operations that imply DESCRIBE."""
PARTITION: Final = [{"topic": SEEN, "partitions": [0]}]
MARKER: Final = {
    "producer_id": 1,
    "producer_epoch": 0,
    "transaction_result": False,
    "topics": [{"name": SEEN, "partition_indexes": [0, 1]}],
    "coordinator_epoch": 0,
    "transaction_version": 1,
}
MOVES: Final = [{"path": "/elsewhere", "topics": [{"name": SEEN, "partitions": [0, 1]}]}]
QUORUM: Final = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]

CLUSTER_REQUESTS: Final[
    dict[ApiKey, tuple[dict[str, Any], Callable[[Struct], list[int]], list[Operation]]]
] = {
    ApiKey.DESCRIBE_LOG_DIRS: (
        {"topics": PARTITION},
        lambda answer: [answer.error_code, *(each.error_code for each in answer.results)],
        [Operation.DESCRIBE],
    ),
    ApiKey.ALTER_REPLICA_LOG_DIRS: (
        {"dirs": MOVES},
        lambda answer: [each.error_code for each in answer.results[0].partitions],
        [Operation.ALTER],
    ),
    ApiKey.DESCRIBE_QUORUM: (
        {"topics": QUORUM},
        lambda answer: [
            answer.error_code,
            *(one.error_code for each in answer.topics for one in each.partitions),
        ],
        [Operation.DESCRIBE],
    ),
    ApiKey.UPDATE_FEATURES: (
        {"timeout_ms": 1, "feature_updates": [], "validate_only": False},
        lambda answer: [answer.error_code],
        [Operation.ALTER],
    ),
    ApiKey.WRITE_TXN_MARKERS: (
        {"markers": [MARKER]},
        lambda answer: [each.error_code for each in answer.markers[0].topics[0].partitions],
        [Operation.ALTER, Operation.CLUSTER_ACTION],
    ),
    ApiKey.FIND_COORDINATOR: (
        {"key_type": 2, "coordinator_keys": [f"g:{UUID(int=1)}:0", "no key"]},
        lambda answer: [each.error_code for each in answer.coordinators],
        [Operation.CLUSTER_ACTION],
    ),
    ApiKey.DESCRIBE_HEALTH: ({}, lambda answer: [answer.error_code], [Operation.DESCRIBE]),
    ApiKey.DESCRIBE_HOT_PARTITIONS: (
        {"keys_max": 1},
        lambda answer: [answer.error_code],
        [Operation.DESCRIBE],
    ),
}
"""Requests, the error codes of their answers, and the operations each of which is enough."""


@pytest.mark.parametrize("api", CLUSTER_REQUESTS, ids=lambda api: api.name.lower())
def test_the_state_of_the_cluster_needs_the_cluster(bench: Bench, api: ApiKey) -> None:
    fields, codes, rights = CLUSTER_REQUESTS[api]
    enough = {*rights, Operation.ALL, *(DESCRIBING if Operation.DESCRIBE in rights else ())}
    bench.allow(*(acl(CLUSTER, CLUSTER_NAME, each) for each in Operation if each not in enough))
    bench.allow(acl(TOPIC, SEEN, Operation.ALL))
    answer = bench.ask(api, **fields)
    assert set(codes(answer)) == {C31}
    bench.assert_unchanged()
    for each in rights:
        bench.forbid(CLUSTER, CLUSTER_NAME)
        bench.allow(acl(CLUSTER, CLUSTER_NAME, each))
        assert C31 not in codes(bench.ask(api, **fields))


def test_a_refused_description_of_directories_has_none(bench: Bench) -> None:
    answer = bench.ask(ApiKey.DESCRIBE_LOG_DIRS, topics=None)
    assert (answer.error_code, len(answer.results)) == (C31, 0)
    assert not bench.ask(ApiKey.DESCRIBE_LOG_DIRS, 2, topics=None).results


def test_a_client_with_every_right_writes_no_marker_that_commits(bench: Bench) -> None:
    bench.allow(acl(CLUSTER, CLUSTER_NAME, Operation.ALL), acl(TOPIC, SEEN, Operation.ALL))
    answer = bench.ask(ApiKey.WRITE_TXN_MARKERS, markers=[{**MARKER, "transaction_result": True}])
    assert {each.error_code for each in answer.markers[0].topics[0].partitions} == {C31}


def test_producers_of_a_hidden_topic_are_those_of_an_absent_one(bench: Bench) -> None:
    bench.allow(acl(TOPIC, SEEN, Operation.DESCRIBE))
    asked = [{"name": name, "partition_indexes": [0, 9]} for name in (HIDDEN, ABSENT, SEEN)]
    hidden, absent, seen = bench.ask(ApiKey.DESCRIBE_PRODUCERS, topics=asked).topics
    assert {each.error_code for found in (hidden, seen) for each in found.partitions} == {T29}
    assert str(absent) == str(hidden).replace(HIDDEN, ABSENT)
    bench.allow(acl(TOPIC, SEEN, Operation.READ))
    (seen,) = bench.ask(ApiKey.DESCRIBE_PRODUCERS, topics=asked[2:]).topics
    assert [each.error_code for each in seen.partitions] == [0, UNKNOWN]


# Groups


@pytest.mark.parametrize(
    "api", [ApiKey.DESCRIBE_GROUPS, ApiKey.CONSUMER_GROUP_DESCRIBE, ApiKey.SHARE_GROUP_DESCRIBE]
)
def test_descriptions_of_groups_have_the_operations_of_the_caller(bench: Bench, api: ApiKey) -> None:
    bench.allow(acl(GROUP, "g", Operation.READ), acl(GROUP, "g", Operation.CREATE))
    key, version = "groups" if api is ApiKey.DESCRIBE_GROUPS else "group_ids", 5
    asked = {key: ["g", "hidden"], "include_authorized_operations": True}
    if api is not ApiKey.DESCRIBE_GROUPS:
        version = SUPPORTED_APIS[api].max_version
    known, hidden = bench.ask(api, version, **asked).groups
    readable = bits(Operation.READ, Operation.DESCRIBE)  # there is no CREATE for groups
    assert known.authorized_operations == (OMITTED if known.error_code else readable)
    assert hidden.authorized_operations == OMITTED
    (known,) = bench.ask(api, version, **{key: ["g"], "include_authorized_operations": False}).groups
    assert known.authorized_operations == OMITTED


# A real client

REFUSED: Final = "TOPIC_AUTHORIZATION_FAILED"


def errors_of(futures: dict[str, Any]) -> dict[str, str]:
    """The names of the errors of librdkafka's requests. No traceback keeps the client alive."""
    found = {}
    for name, future in futures.items():
        try:
            future.result(scaled(DEADLINE_S))
            found[name] = ""
        except KafkaException as error:
            found[name] = error.args[0].name()
    return found


@pytest.mark.row("A8")
def test_a_real_client_sees_and_changes_only_its_own_topics(bench: Bench) -> None:
    bench.allow(
        acl(TOPIC, "orders", Operation.ALL),
        acl(TOPIC, SEEN, Operation.DESCRIBE),
    )
    admin = AdminClient(
        {
            "bootstrap.servers": bench.broker.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": MECHANISM,
            "sasl.username": "alice",
            "sasl.password": PASSWORD,
        }
    )
    created = admin.create_topics([NewTopic("orders", 1, 1), NewTopic("bills", 1, 1)])
    assert errors_of(created) == {"orders": "", "bills": REFUSED}
    assert set(admin.list_topics(timeout=scaled(DEADLINE_S)).topics) == {"orders", SEEN}
    grown = admin.create_partitions([NewPartitions("orders", 2), NewPartitions(SEEN, 2)])
    assert errors_of(grown) == {"orders": "", SEEN: REFUSED}
    assert errors_of(admin.delete_topics(["orders", HIDDEN])) == {"orders": "", HIDDEN: REFUSED}
    assert HIDDEN in bench.service.topics.state.topics


@pytest.mark.full
def test_a_second_client_reads_the_refusals_as_kafkas(bench: Bench) -> None:
    bench.allow(acl(TOPIC, "orders", Operation.ALL))
    admin = KafkaAdminClient(
        bootstrap_servers=bench.broker.address,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=MECHANISM,
        sasl_plain_username="alice",
        sasl_plain_password=PASSWORD,
    )
    with contextlib.closing(admin):
        admin.create_topics([kafka.admin.NewTopic("orders", 1, 1)])
        with pytest.raises(kafka.errors.TopicAuthorizationFailedError):
            admin.create_topics([kafka.admin.NewTopic("bills", 1, 1)])
        assert admin.list_topics() == ["orders"]
        with pytest.raises(kafka.errors.TopicAuthorizationFailedError):
            admin.delete_topics([HIDDEN])
        admin.delete_topics(["orders"])
    assert HIDDEN in bench.service.topics.state.topics


def test_without_an_authorizer_every_operation_is_reported() -> None:
    open_to_all = Authorization(None)
    for resource_type in (TOPIC, GROUP, CLUSTER):
        operations = open_to_all.authorized_operations(PEER, resource_type, "x")
        assert operations == OPERATIONS_OF_TYPE[resource_type]
