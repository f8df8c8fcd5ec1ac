"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions, DescribeQuorum, UpdateFeatures, and DescribeHealth
(20114) and ConfirmHandOver (20124) of Mansio.

Behavior: clients that request the authorized operations (KIP-430) get them; others get Kafka's value for "omitted".
DescribeTopicPartitions always has those of topics.

Not obvious:
* Metadata and DescribeCluster mean different things by the controller: the broker to send changes to, which is any
  broker, and the active controller.
* In Metadata 0 an empty list of topics means all of them, from 1 on null does. `allow_auto_topic_creation` is true
  where the version has no such field.
* Creation by a Metadata request is never refused because of a quota, as in Kafka: no version of the API has the error.
* A topic that the caller may not describe has the error TOPIC_AUTHORIZATION_FAILED, and neither name nor partitions if
  it is asked for by its id; among all topics it is left out.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.services.topic_admin import MissingTopic, TopicReference
from mansio.config.item_limit import ITEMS_MAX
from mansio.errors import LeaderNotAvailable, MansioError, TopicAuthorizationFailed, UnknownTopicOrPartition
from mansio.host.item_turns import ItemTurns
from mansio.metadata.feature_level import SUPPORTED, FeatureUpdate
from mansio.metadata.metadata_response import encode_metadata, encode_missing_topic
from mansio.metadata.model import NO_LEADER
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import advertised_versions
from mansio.wire.features import FIXED_FEATURES, SAFE_DOWNGRADE, UPGRADE, VERSION_FEATURE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.cluster import DescribedTopic, QuorumDescription
    from mansio.broker.services.health import Problem
    from mansio.metadata.metadata_response import ListenerTopicEncoder
    from mansio.metadata.model import Topic
    from mansio.wire.codec.messages import Struct

OPERATIONS_OMITTED: Final = -(1 << 31)
"""Value of authorized operations that were not requested."""
TOPIC_ID_VERSION_MIN: Final = 12
"""First version of Metadata that names topics by id (KIP-516)."""

ENDPOINT_TYPE_BROKERS: Final = 1
MISMATCHED_ENDPOINT_TYPE: Final = 114
LEADER_NOT_AVAILABLE: Final = 5
LISTENER_NOT_FOUND: Final = 72
"""The leader does not advertise the listener through which the client asks."""
PROBLEMS_MAX: Final = 100
"""Maximum number of problems, and of warnings, in a DescribeHealth response."""
NO_PORT: Final = -1
"""Port of a fenced broker, whose address is unknown."""

FIXED_FEATURE_MIN: Final = 0

METADATA_PARTITION: Final = ("__cluster_metadata", 0)
"""Partition of the metadata quorum in Kafka, which clients name in DescribeQuorum."""


async def api_versions(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return the API versions that this broker supports, from the versions table, and the supported and finalized
    features (KIP-584)."""
    del request, context
    found = service.cluster_description.feature_level()
    supported = dict.fromkeys(FIXED_FEATURES, FIXED_FEATURE_MIN) | {VERSION_FEATURE: SUPPORTED.lowest}
    finalized = FIXED_FEATURES | {VERSION_FEATURE: found.level}
    highest = FIXED_FEATURES | {VERSION_FEATURE: SUPPORTED.highest}
    return {
        "supported_features": [
            {"name": name, "min_version": lowest, "max_version": highest[name]}
            for name, lowest in supported.items()
        ],
        "finalized_features_epoch": found.epoch,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in finalized.items()
        ],
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, lowest, highest in advertised_versions()
        ],
    }


async def metadata(service: BrokerServices, request: Struct, context: RequestContext) -> bytes:
    """Return brokers, controller, and topics by name, by id, or all. The response is encoded without the general
    codec."""
    version, caller = context.api_version, context.caller
    described = service.cluster_description.describe(context.listener)
    encoder = service.topics.encoder.for_listener(
        context.listener.name, described.live_broker_ids, described.without_listener
    )
    if request.topics is None or (version == 0 and not request.topics):
        topics, throttle_ms = await _all_topics(service, request, version, caller, encoder), 0
    else:
        topics, throttle_ms = await _named_topics(service, request, version, caller, encoder)
        if throttle_ms:
            context.throttle(throttle_ms)
    return encode_metadata(
        version,
        context.correlation_id,
        brokers=described.brokers,
        cluster_id=described.cluster_id,
        controller_id=service.cluster_description.controller_request_target(described),
        topics=topics,
        cluster_operations=service.cluster_description.authorized_operations(caller=caller)
        if request.include_cluster_authorized_operations
        else OPERATIONS_OMITTED,
        throttle_ms=throttle_ms,
    )


async def _all_topics(
    service: BrokerServices, request: Struct, version: int, caller: Caller, encoder: ListenerTopicEncoder
) -> list[bytes]:
    turns = ItemTurns(service.scheduler)
    found = await service.topic_admin.list_topics(caller=caller)
    operations: Iterable[int] = repeat(OPERATIONS_OMITTED)
    if request.include_topic_authorized_operations:
        names = (topic.name for topic in found)
        operations = service.topic_admin.authorized_operations_each(names, caller=caller)
    topics = []
    for topic, allowed in zip(found, operations, strict=False):
        await turns.next()
        topics.append(encoder.encode(version, topic, allowed))
    return topics


async def _named_topics(
    service: BrokerServices, request: Struct, version: int, caller: Caller, encoder: ListenerTopicEncoder
) -> tuple[list[bytes], int]:
    """Return the encoded topics, and the throttle time in ms for those that were created. By its id, the name of a
    topic is null or, from Kafka's Java client, empty."""
    admin, may_create = service.topic_admin, version < 4 or request.allow_auto_topic_creation
    wanted = dict.fromkeys(
        [
            TopicReference(item.name)
            if item.topic_id is None or version < TOPIC_ID_VERSION_MIN
            else TopicReference(None, UUID(bytes=item.topic_id))
            for item in request.topics
        ]
    )
    is_small = len(request.topics) <= ITEMS_MAX
    found = await admin.find_each(wanted, may_create=may_create and is_small, caller=caller)
    has_operations, operations = request.include_topic_authorized_operations, OPERATIONS_OMITTED
    turns = ItemTurns(service.scheduler)
    topics = []
    for each in found.results:
        await turns.next()
        if isinstance(each, MissingTopic):
            topics.append(_missing_topic(service, request, version, caller, each))
            continue
        if has_operations:
            operations = admin.authorized_operations(each.name, caller=caller)
        topics.append(encoder.encode(version, each, operations))
    return topics, found.throttle_ms


def _missing_topic(
    service: BrokerServices, request: Struct, version: int, caller: Caller, missing: MissingTopic
) -> bytes:
    (name, topic_id), error = missing
    operations = OPERATIONS_OMITTED
    has_operations = request.include_topic_authorized_operations
    if has_operations and name is not None and not isinstance(error, TopicAuthorizationFailed):
        operations = service.topic_admin.authorized_operations(name, caller=caller)
    id_bytes = None if topic_id is None else topic_id.bytes
    return encode_missing_topic(version, error.kafka_code, name, id_bytes, operations)


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
        "cluster_authorized_operations": service.cluster_description.authorized_operations(
            caller=context.caller
        )
        if asked
        else OPERATIONS_OMITTED,
    }


async def describe_health(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the health of this broker."""
    del request
    found = service.health.report(caller=context.caller)
    return {
        "is_session_held": found.is_session_held,
        "session_lost_ms": found.session_lost_ms,
        "broker_epoch": found.broker_epoch,
        "problems": [_problem_fields(each) for each in found.problems[:PROBLEMS_MAX]],
        "warnings": [_problem_fields(each) for each in found.warnings[:PROBLEMS_MAX]],
        "host_labels": [
            {"broker_id": node_id, "label": label} for node_id, label in found.host_labels.items()
        ],
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
    described: QuorumDescription | LeaderNotAvailable
    try:
        described = service.cluster_description.describe_quorum(caller=context.caller)
    except LeaderNotAvailable as error:
        described = without_traceback(error)
    turns = ItemTurns(service.scheduler)
    topics = []
    for topic in request.topics:
        await turns.next()
        partitions = []
        for partition in topic.partitions:
            await turns.next()
            partitions.append(
                _quorum_partition_fields(described, topic.topic_name, partition.partition_index)
            )
        topics.append({"topic_name": topic.topic_name, "partitions": partitions})
    return {"topics": topics}


def _quorum_partition_fields(
    found: QuorumDescription | LeaderNotAvailable, topic: str, index: int
) -> dict[str, Any]:
    result: dict[str, Any] = {"partition_index": index, "leader_id": NO_LEADER}
    if (topic, index) != METADATA_PARTITION:
        return result | _error_fields(
            UnknownTopicOrPartition(f"{topic}-{index} is not {METADATA_PARTITION[0]}-0")
        )
    if isinstance(found, LeaderNotAvailable):
        return result | _error_fields(found)
    observers = [] if found.observer is None else [found.observer]
    return result | {
        "leader_id": found.leader_id,
        "leader_epoch": found.epoch,
        "high_watermark": found.revision,
        "current_voters": [{"replica_id": found.leader_id, "log_end_offset": found.revision}],
        "observers": [{"replica_id": each, "log_end_offset": found.revision} for each in observers],
    }


def _error_fields(error: MansioError) -> dict[str, Any]:
    return {"error_code": error.kafka_code, "error_message": error.message}


async def update_features(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Raise the feature level of the cluster (KIP-584). The answer has one error for all updates, as that of version 2;
    before that, a result for each update if they were executed."""
    version = context.api_version
    turns = ItemTurns(service.scheduler)
    updates = []
    for each in request.feature_updates:
        await turns.next()
        kind = (SAFE_DOWNGRADE if each.allow_downgrade else UPGRADE) if version == 0 else each.upgrade_type
        updates.append(FeatureUpdate(each.feature, each.max_version_level, kind))
    try:
        await service.cluster_description.update_features(
            updates, validate_only=version >= 1 and request.validate_only, caller=context.caller
        )
    except MansioError as error:
        return _error_fields(error)
    return {"results": [{"feature": each.feature} for each in updates]} if version <= 1 else {}


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
        caller=context.caller,
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
    topic, operations = found.topic, found.authorized_operations
    shown = {} if operations is None else {"topic_authorized_operations": operations}
    if topic is None:
        code = 0 if found.error is None else found.error.kafka_code
        return {"name": found.name, "error_code": code, **shown}
    return {
        **shown,
        "name": found.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.internal,
        "partitions": [
            _partition_fields(topic, index, alive, without_listener) for index in found.partitions
        ],
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


async def confirm_hand_over(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return whether this broker, too, finds another one killed. Only a broker may ask."""
    service.authenticator.require_identity(
        context.peer, request.node_id, request.broker_epoch, context.client_host
    )
    cluster = service.cluster
    confirmed = cluster is not None and await cluster.hand_over.confirm(
        request.suspect_id, request.suspect_epoch
    )
    return {"confirmed": confirmed}
