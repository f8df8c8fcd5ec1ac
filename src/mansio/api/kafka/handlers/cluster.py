"""ApiVersions, Metadata, DescribeCluster, DescribeTopicPartitions.

Behavior: without authorization every operation is allowed, which is returned to clients that request the authorized
operations (KIP-430); others get Kafka's value for "omitted".

Not obvious:
* This broker's own address is that of the listener through which the request came, not the one in the metadata.
* In a cluster the other brokers are those with a session, and no broker without one is returned as leader. A registered
  broker without a session is *fenced*, and its address is unknown.
* Metadata and DescribeCluster mean different things by the controller: the broker to send changes to, which is any
  broker, and the active controller.
* In Metadata 0 an empty list of topics means all of them, from 1 on null does. `allow_auto_topic_creation` is true
  where the version has no such field.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.errors import InvalidRequest, MansioError, UnknownTopicOrPartition
from mansio.logs import fields
from mansio.metadata.metadata_response import encode_metadata, encode_missing_topic
from mansio.metadata.model import NO_LEADER, BrokerState
from mansio.metadata.topic_plan import INTERNAL_TOPICS, check_topic_name
from mansio.wire.api_versions import advertised_versions

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.metadata.model import Topic
    from mansio.wire.codec.messages import Struct

logger = logging.getLogger(__name__)

OPERATIONS_OMITTED: Final = -(1 << 31)
# Bits by Kafka's AclOperation: read 3, write 4, create 5, delete 6, alter 7, describe 8, cluster action 9,
# describe configs 10, alter configs 11, idempotent write 12.
ALL_OF_TOPIC: Final = sum(1 << operation for operation in (3, 4, 5, 6, 7, 8, 10, 11))
ALL_OF_CLUSTER: Final = sum(1 << operation for operation in (5, 7, 8, 9, 10, 11, 12))
BROKERS_ENDPOINT: Final = 1
MISMATCHED_ENDPOINT_TYPE: Final = 114
LEADER_NOT_AVAILABLE: Final = 5
NO_CONTROLLER: Final = -1
NO_PORT: Final = -1
PARTITIONS_PER_PAGE_MAX: Final = 2000  # Kafka's max.request.partition.size.limit


async def api_versions(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """The offered versions, from the versions table."""
    del service, request, context
    return {
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, lowest, highest in advertised_versions()
        ]
    }


async def metadata(service: BrokerServices, request: Struct, context: RequestContext) -> bytes:
    """Topics by name or by id, or all; brokers; the controller. Encoded by hand."""
    version = context.api_version
    operations = ALL_OF_TOPIC if request.include_topic_authorized_operations else OPERATIONS_OMITTED
    brokers = _brokers(service, context)
    encoder = service.topics.encoder
    alive = frozenset(broker.node_id for broker in brokers)
    if request.topics is None or (version == 0 and not request.topics):
        topics = [
            encoder.encode(version, topic, alive, operations)
            for topic in service.topics.state.topics.values()
        ]
    else:
        may_create = service.settings.auto_create_topics_enable and (
            version < 4 or request.allow_auto_topic_creation
        )
        topics = []
        for name, topic_id in dict.fromkeys((item.name, item.topic_id) for item in request.topics):
            try:
                topic = await _find(service, version, name, topic_id, may_create=may_create)
            except MansioError as error:
                topics.append(encode_missing_topic(version, error.kafka_code, name, topic_id, operations))
            else:
                topics.append(encoder.encode(version, topic, alive, operations))
    return encode_metadata(
        version,
        context.correlation_id,
        brokers=brokers,
        cluster_id=service.topics.state.cluster_id,
        controller_id=_request_target(service, brokers),
        topics=topics,
        cluster_operations=ALL_OF_CLUSTER
        if request.include_cluster_authorized_operations
        else OPERATIONS_OMITTED,
    )


async def describe_cluster(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """The cluster's id, controller and brokers (KIP-700); also the fenced ones, if requested (KIP-1073)."""
    if context.api_version >= 1 and request.endpoint_type != BROKERS_ENDPOINT:
        return {
            "error_code": MISMATCHED_ENDPOINT_TYPE,
            "error_message": "this listener describes brokers; there are no separate controllers",
            "endpoint_type": BROKERS_ENDPOINT,
        }
    brokers = _brokers(service, context)
    asked = request.include_cluster_authorized_operations
    described = [
        {"broker_id": broker.node_id, "host": broker.host, "port": broker.port, "rack": broker.rack}
        for broker in brokers
    ]
    if context.api_version >= 2 and request.include_fenced_brokers:
        alive = {broker.node_id for broker in brokers}
        described += [
            {"broker_id": node_id, "host": "", "port": NO_PORT, "rack": None, "is_fenced": True}
            for node_id in sorted(service.topics.state.registrations)
            if node_id not in alive
        ]
    return {
        "endpoint_type": BROKERS_ENDPOINT,
        "cluster_id": service.topics.state.cluster_id,
        "controller_id": _controller(service, brokers),
        "brokers": described,
        "cluster_authorized_operations": ALL_OF_CLUSTER if asked else OPERATIONS_OMITTED,
    }


async def describe_topic_partitions(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Topics by name, or all, sorted, in pages of at most `response_partition_limit` partitions (KIP-966).

    A page ends before the partition that `next_cursor` names; a cursor whose topic was deleted continues with the next
    topic.
    """
    state = service.topics.state
    alive = frozenset(broker.node_id for broker in _brokers(service, context))
    names = sorted({topic.name for topic in request.topics} or state.topics)
    first_name, first_index = "", 0
    if request.cursor is not None:
        first_name, first_index = request.cursor.topic_name, request.cursor.partition_index
        if first_index < 0:
            raise InvalidRequest(f"the cursor names partition {first_index}")
    remaining = min(max(request.response_partition_limit, 1), PARTITIONS_PER_PAGE_MAX)
    topics: list[dict[str, Any]] = []
    for name in names[bisect_left(names, first_name) :]:
        start = first_index if name == first_name else 0
        if remaining == 0:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": start}}
        try:
            if name not in state.topics:
                check_topic_name(name)
            topic = service.topics.find(name)
        except MansioError as error:
            topics.append({"name": name, "error_code": error.kafka_code})
            continue
        end = min(len(topic.partitions), start + remaining)
        topics.append(
            {
                "name": name,
                "topic_id": topic.topic_id,
                "is_internal": topic.internal,
                "partitions": [_partition(topic, index, alive) for index in range(start, end)],
                "topic_authorized_operations": ALL_OF_TOPIC,
            }
        )
        remaining -= max(end - start, 0)
        if end < len(topic.partitions):
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": end}}
    return {"topics": topics, "next_cursor": None}


def _partition(topic: Topic, index: int, alive: frozenset[int]) -> dict[str, Any]:
    partition = topic.partitions[index]
    return {
        "partition_index": index,
        "error_code": 0 if partition.leader in alive else LEADER_NOT_AVAILABLE,
        "leader_id": partition.leader if partition.leader in alive else NO_LEADER,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": partition.isr,
        "eligible_leader_replicas": [],  # null, which the schema allows, crashes the Java client
        "last_known_elr": [],
        "offline_replicas": [node_id for node_id in partition.replicas if node_id not in alive],
    }


async def _find(
    service: BrokerServices, version: int, name: str | None, topic_id: bytes | None, *, may_create: bool
) -> Topic:
    topics = service.topics
    if name is None:
        if topic_id is None or version < 12:  # ids are not supported before (KIP-516)
            raise InvalidRequest("a topic must be named, or given by its id from version 12 on")
        return topics.find_by_id(UUID(bytes=topic_id))
    topic = topics.state.topics.get(name)
    if topic is not None:
        return topic
    check_topic_name(name)
    if not may_create or name in INTERNAL_TOPICS:
        raise UnknownTopicOrPartition(f"there is no topic {name!r}")
    try:
        return await topics.auto_create(name)
    except MansioError as error:
        logger.warning("topic_auto_create_failed", extra=fields(topic=name, reason=error))
        raise


def _brokers(service: BrokerServices, context: RequestContext) -> list[BrokerState]:
    """The brokers with a session. The list is never empty for a client that has reached this broker."""
    own, state = service.settings.node_id, service.topics.state
    here = BrokerState(own, *context.listener, service.settings.broker_rack or None)
    known = dict(state.brokers)
    if own in known or not known:
        known[own] = here
    return [known[node_id] for node_id in sorted(known)]


def _request_target(service: BrokerServices, brokers: list[BrokerState]) -> int:
    """The broker to which clients send requests for the controller: this one, which can process them as any other can.

    Kafka's brokers also return any broker, and forward such requests (KIP-590). The broker that responds is certainly
    up; a controller that died would be returned until its session ends, and librdkafka waits for it until its request
    times out. A broker that cannot make changes now (its session may have expired, or it is stopping) returns another
    one, if there is one.
    """
    own, state = service.settings.node_id, service.topics.state
    if not state.registrations:
        return own
    if service.cluster is not None and service.cluster.is_session_valid() and state.may_lead(own):
        return own
    there = [broker.node_id for broker in brokers if broker.node_id != own and state.may_lead(broker.node_id)]
    controller = _controller(service, brokers)
    return controller if controller in there else min(there, default=own)


def _controller(service: BrokerServices, brokers: list[BrokerState]) -> int:
    """The active controller. A single node is its own; in a cluster the current one, while it has a session."""
    state = service.topics.state
    if not state.registrations:
        return brokers[0].node_id
    controller = state.controller
    if controller is None or controller.node_id not in state.brokers:
        return NO_CONTROLLER
    return controller.node_id
