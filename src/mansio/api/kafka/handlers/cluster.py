"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions, DescribeQuorum, UpdateFeatures, and DescribeHealth
(20114) of Mansio.

Behavior: without authorization every operation is allowed, which is returned to clients that request the authorized
operations (KIP-430); others get Kafka's value for "omitted".

Not obvious:
* Metadata and DescribeCluster mean different things by the controller: the broker to send changes to, which is any
  broker, and the active controller.
* In Metadata 0 an empty list of topics means all of them, from 1 on null does. `allow_auto_topic_creation` is true
  where the version has no such field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.api.kafka.handlers.mutation_throttling import mutation_quota, throttle_mutations
from mansio.config.item_limit import ITEMS_MAX
from mansio.errors import InvalidRequest, MansioError, UnknownTopicOrPartition
from mansio.host.item_turns import ItemTurns
from mansio.metadata.metadata_response import encode_metadata, encode_missing_topic
from mansio.metadata.model import NO_LEADER
from mansio.wire.api_versions import advertised_versions

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.cluster import DescribedTopic
    from mansio.broker.services.health import Problem
    from mansio.broker.topics.mutation_quota import MutationQuota
    from mansio.metadata.model import Topic
    from mansio.wire.codec.messages import Struct

OPERATIONS_OMITTED: Final = -(1 << 31)
"""Value of authorized operations that were not requested."""

# Bits by Kafka's AclOperation: read 3, write 4, create 5, delete 6, alter 7, describe 8, cluster action 9,
# describe configs 10, alter configs 11, idempotent write 12.
ALL_TOPIC_OPERATIONS: Final = sum(1 << operation for operation in (3, 4, 5, 6, 7, 8, 10, 11))
ALL_CLUSTER_OPERATIONS: Final = sum(1 << operation for operation in (5, 7, 8, 9, 10, 11, 12))
ENDPOINT_TYPE_BROKERS: Final = 1
MISMATCHED_ENDPOINT_TYPE: Final = 114
LEADER_NOT_AVAILABLE: Final = 5
LISTENER_NOT_FOUND: Final = 72
"""The leader does not advertise the listener through which the client asks."""
PROBLEMS_MAX: Final = 100
"""Maximum number of problems, and of warnings, in a DescribeHealth response."""
NO_PORT: Final = -1
"""Port of a fenced broker, whose address is unknown."""

FEATURES: Final = {"transaction.version": 2}
"""Finalized features (KIP-584) and their levels. Clients bump the epoch with each transaction and skip
AddPartitionsToTxn from `transaction.version` 2 on (KIP-890)."""
FEATURES_EPOCH: Final = 0
"""The features never change while a broker runs."""

METADATA_PARTITION: Final = ("__cluster_metadata", 0)
"""Partition of the metadata quorum in Kafka, which clients name in DescribeQuorum."""


async def api_versions(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return the API versions that this broker supports, from the versions table, and the finalized features."""
    del request, context
    return {
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level} for name, level in FEATURES.items()
        ],
        "finalized_features_epoch": FEATURES_EPOCH,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in FEATURES.items()
        ],
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, lowest, highest in advertised_versions()
        ],
    }


async def metadata(service: BrokerServices, request: Struct, context: RequestContext) -> bytes:
    """Return brokers, controller, and topics by name, by id, or all. The response is encoded without the general
    codec."""
    version = context.api_version
    operations = ALL_TOPIC_OPERATIONS if request.include_topic_authorized_operations else OPERATIONS_OMITTED
    described = service.cluster_description.describe(context.listener)
    encoder = service.topics.encoder.for_listener(
        context.listener.name, described.live_broker_ids, described.without_listener
    )
    turns = ItemTurns(service.scheduler)
    throttle_ms = 0
    if request.topics is None or (version == 0 and not request.topics):
        topics = []
        for topic in list(service.topics.state.topics.values()):
            await turns.next()
            topics.append(encoder.encode(version, topic, operations))
    else:
        may_create = version < 4 or request.allow_auto_topic_creation
        may_create = may_create and len(request.topics) <= ITEMS_MAX
        quota = mutation_quota(service, context) if may_create else None
        topics = []
        for name, topic_id in dict.fromkeys((item.name, item.topic_id) for item in request.topics):
            await turns.next()
            try:
                topic = await _find_topic(
                    service, version, name, topic_id, may_create=may_create, quota=quota
                )
            except MansioError as error:
                topics.append(encode_missing_topic(version, error.kafka_code, name, topic_id, operations))
            else:
                topics.append(encoder.encode(version, topic, operations))
        throttle_ms = throttle_mutations(service, context, quota)
    return encode_metadata(
        version,
        context.correlation_id,
        brokers=described.brokers,
        cluster_id=described.cluster_id,
        controller_id=service.cluster_description.controller_request_target(described),
        topics=topics,
        cluster_operations=ALL_CLUSTER_OPERATIONS
        if request.include_cluster_authorized_operations
        else OPERATIONS_OMITTED,
        throttle_ms=throttle_ms,
    )


async def describe_cluster(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return id, controller and brokers of the cluster (KIP-700); if requested, also the fenced brokers (KIP-1073)."""
    if context.api_version >= 1 and request.endpoint_type != ENDPOINT_TYPE_BROKERS:
        return {
            "error_code": MISMATCHED_ENDPOINT_TYPE,
            "error_message": "this listener describes brokers; there are no separate controllers",
            "endpoint_type": ENDPOINT_TYPE_BROKERS,
        }
    found = service.cluster_description.describe(context.listener)
    asked = request.include_cluster_authorized_operations
    described = [
        {"broker_id": broker.node_id, "host": broker.host, "port": broker.port, "rack": broker.rack}
        for broker in found.brokers
    ]
    if context.api_version >= 2 and request.include_fenced_brokers:
        described += [
            {"broker_id": node_id, "host": "", "port": NO_PORT, "rack": None, "is_fenced": True}
            for node_id in found.fenced
        ]
    return {
        "endpoint_type": ENDPOINT_TYPE_BROKERS,
        "cluster_id": found.cluster_id,
        "controller_id": found.controller_id,
        "brokers": described,
        "cluster_authorized_operations": ALL_CLUSTER_OPERATIONS if asked else OPERATIONS_OMITTED,
    }


async def describe_health(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the health of this broker."""
    del request, context
    found = service.health.report()
    return {
        "is_session_held": found.is_session_held,
        "session_lost_ms": found.session_lost_ms,
        "problems": [_problem_fields(each) for each in found.problems[:PROBLEMS_MAX]],
        "warnings": [_problem_fields(each) for each in found.warnings[:PROBLEMS_MAX]],
    }


def _problem_fields(problem: Problem) -> dict[str, Any]:
    return {
        "reason": problem.reason,
        "detail": problem.detail,
        "topic": problem.topic or None,
        "partition_index": problem.partition,
    }


async def describe_quorum(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Describe the metadata store as a quorum with the active controller as leader and only voter (KIP-595)."""
    del context
    turns = ItemTurns(service.scheduler)
    topics = []
    for topic in request.topics:
        await turns.next()
        partitions = []
        for partition in topic.partitions:
            await turns.next()
            partitions.append(_quorum_partition_fields(service, topic.topic_name, partition.partition_index))
        topics.append({"topic_name": topic.topic_name, "partitions": partitions})
    return {"topics": topics}


def _quorum_partition_fields(service: BrokerServices, topic: str, index: int) -> dict[str, Any]:
    result: dict[str, Any] = {"partition_index": index, "leader_id": NO_LEADER}
    try:
        if (topic, index) != METADATA_PARTITION:
            raise UnknownTopicOrPartition(f"{topic}-{index} is not {METADATA_PARTITION[0]}-0")
        found = service.cluster_description.describe_quorum()
    except MansioError as error:
        return result | {"error_code": error.kafka_code, "error_message": error.message}
    observers = [] if found.observer is None else [found.observer]
    return result | {
        "leader_id": found.leader_id,
        "leader_epoch": found.epoch,
        "high_watermark": found.revision,
        "current_voters": [{"replica_id": found.leader_id, "log_end_offset": found.revision}],
        "observers": [{"replica_id": each, "log_end_offset": found.revision} for each in observers],
    }


async def update_features(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Reject the whole request if it contains an update, because no feature can be changed (KIP-584)."""
    for update in request.feature_updates:
        try:
            service.cluster_description.update_feature(update.feature, update.max_version_level)
        except MansioError as error:
            return {"error_code": error.kafka_code, "error_message": error.message}
    return {}


async def describe_topic_partitions(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Describe topics by name, or all, sorted by name, in pages of at most `response_partition_limit` partitions
    (KIP-966).

    A page ends before the partition that `next_cursor` names; a cursor whose topic was deleted continues with the next
    topic.
    """
    described = service.cluster_description.describe(context.listener)
    alive, without_listener = described.live_broker_ids, described.without_listener
    cursor = None if request.cursor is None else (request.cursor.topic_name, request.cursor.partition_index)
    turns = ItemTurns(service.scheduler)
    page = await service.cluster_description.describe_topics(
        {topic.name for topic in request.topics},
        turns,
        cursor=cursor,
        partitions_max=request.response_partition_limit,
    )
    next_cursor = None
    if page.next_cursor is not None:
        name, index = page.next_cursor
        next_cursor = {"topic_name": name, "partition_index": index}
    topics = []
    for found in page.topics:
        await turns.next(1 + len(found.partitions))
        topics.append(_topic_fields(found, alive, without_listener))
    return {"topics": topics, "next_cursor": next_cursor}


def _topic_fields(
    found: DescribedTopic, alive: frozenset[int], without_listener: frozenset[int]
) -> dict[str, Any]:
    topic = found.topic
    if topic is None:
        return {"name": found.name, "error_code": 0 if found.error is None else found.error.kafka_code}
    return {
        "name": found.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.internal,
        "partitions": [
            _partition_fields(topic, index, alive, without_listener) for index in found.partitions
        ],
        "topic_authorized_operations": ALL_TOPIC_OPERATIONS,
    }


def _partition_fields(
    topic: Topic, index: int, alive: frozenset[int], without_listener: frozenset[int]
) -> dict[str, Any]:
    partition = topic.partitions[index]
    error = 0
    if partition.leader not in alive:
        error = LISTENER_NOT_FOUND if partition.leader in without_listener else LEADER_NOT_AVAILABLE
    return {
        "partition_index": index,
        "error_code": error,
        "leader_id": NO_LEADER if error else partition.leader,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": partition.isr,
        "eligible_leader_replicas": [],  # null, which the schema allows, crashes the Java client
        "last_known_elr": [],
        "offline_replicas": [node_id for node_id in partition.replicas if node_id not in alive],
    }


async def _find_topic(
    service: BrokerServices,
    version: int,
    name: str | None,
    topic_id: bytes | None,
    *,
    may_create: bool,
    quota: MutationQuota | None,
) -> Topic:
    topics = service.topics
    if topic_id is not None and version >= 12:  # the name is null or, from Kafka's Java client, empty
        return topics.find_by_id(UUID(bytes=topic_id))
    if name is None:
        raise InvalidRequest("a topic must be named, or given by its id from version 12 on (KIP-516)")
    return await topics.find_or_auto_create(name, is_allowed_by_client=may_create, quota=quota)
