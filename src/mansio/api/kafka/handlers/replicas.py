"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments.

Behavior: on a single node a partition has one replica, which is its leader, so no election is ever needed. In a cluster
any broker carries out the elections that it receives, each as a guarded transaction. Partitions are not moved: a plan
that does not change a partition succeeds, as in Kafka, and any other is rejected.

Not obvious: if all partitions are requested, ElectLeaders omits those that need no election, as Kafka does (KIP-460).
An unclean election elects the first replica that is up; what only the others had is lost, which is what the client
requested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import (
    ConcurrentChange,
    InvalidReplicaAssignment,
    InvalidRequest,
    MansioError,
    RequestTimedOut,
    Unavailable,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.metadata.controller.controller import Controller
    from mansio.metadata.model import PartitionState
    from mansio.wire.codec.messages import Struct

PREFERRED: Final = 0
UNCLEAN: Final = 1
PREFERRED_LEADER_NOT_AVAILABLE: Final = 80
ELIGIBLE_LEADERS_NOT_AVAILABLE: Final = 83
ELECTION_NOT_NEEDED: Final = 84
NO_REASSIGNMENT_IN_PROGRESS: Final = 85

Answer = tuple[int, str | None]
"""Error code and message of one election."""

ELECTED: Final[Answer] = (0, None)


async def elect_leaders(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Preferred and unclean elections (KIP-460), one by one, until the request times out."""
    del context
    deadline = service.clock.monotonic() + max(request.timeout_ms, 0) / 1000
    results = []
    everything = request.topic_partitions is None
    wanted: list[tuple[str, Iterable[int]]]
    if everything:
        topics = service.topics.state.topics.values()
        wanted = [(topic.name, range(len(topic.partitions))) for topic in topics]
    else:
        wanted = [(item.topic, item.partitions) for item in request.topic_partitions]
    for topic, indexes in wanted:
        found = []
        for index in indexes:
            code, message = await _election(service, topic, index, request.election_type, deadline)
            if code != ELECTION_NOT_NEEDED or not everything:
                found.append({"partition_id": index, "error_code": code, "error_message": message})
        if found or not everything:
            results.append({"topic": topic, "partition_result": found})
    return {"replica_election_results": results}


async def _election(
    service: BrokerServices, topic: str, index: int, election_type: int, deadline: float
) -> Answer:
    try:
        partition = _find(service, topic, index)
        if election_type not in (PREFERRED, UNCLEAN):
            raise InvalidRequest(f"there is no election of type {election_type}")
        if service.cluster is None:
            return _single_node_election(partition, election_type)
        controller = service.cluster.controller
        if (needless := _unneeded_election(service, partition, election_type)) is not None:
            return needless
        if service.clock.monotonic() >= deadline:
            raise RequestTimedOut("the time of the request was over before this election")
        if election_type == PREFERRED:
            return await _elect_preferred(controller, topic, index, partition)
        return await _elect_unclean(service, controller, topic, index, partition)
    except MansioError as error:
        return error.kafka_code, error.message


def _single_node_election(partition: PartitionState, election_type: int) -> Answer:
    """On a single node: not needed if there is a leader, not possible otherwise."""
    if partition.leader >= 0:
        return ELECTION_NOT_NEEDED, "the partition has its only replica as its leader"
    if election_type == PREFERRED:
        return PREFERRED_LEADER_NOT_AVAILABLE, "the partition's only replica is not there"
    return ELIGIBLE_LEADERS_NOT_AVAILABLE, "the partition's only replica is not there"


def _unneeded_election(
    service: BrokerServices, partition: PartitionState, election_type: int
) -> Answer | None:
    """The result if the metadata image shows that nothing has to be done; the store is not asked then."""
    epoch = service.topics.state.epoch_of(partition.leader)
    if not epoch or not partition.led_by(partition.leader, epoch):
        return None
    if election_type == UNCLEAN:
        return ELECTION_NOT_NEEDED, f"broker {partition.leader} leads the partition"
    if partition.leader == partition.replicas[0]:
        return ELECTION_NOT_NEEDED, f"broker {partition.leader}, the preferred leader, leads the partition"
    return None


async def _elect_preferred(controller: Controller, topic: str, index: int, before: PartitionState) -> Answer:
    try:
        after = await controller.elect_preferred(topic, index)
    except ConcurrentChange:
        raise
    except Unavailable as error:
        return PREFERRED_LEADER_NOT_AVAILABLE, error.message
    if after.leader_epoch == before.leader_epoch:
        return ELECTION_NOT_NEEDED, f"broker {after.leader}, the preferred leader, leads the partition"
    return ELECTED


async def _elect_unclean(
    service: BrokerServices, controller: Controller, topic: str, index: int, before: PartitionState
) -> Answer:
    there = [node_id for node_id in before.replicas if service.topics.state.may_lead(node_id)]
    if not there:
        replicas = ", ".join(map(str, before.replicas))
        return ELIGIBLE_LEADERS_NOT_AVAILABLE, f"none of the brokers with a copy ({replicas}) is there"
    try:
        await controller.elect_unclean(topic, index, there[0])
    except ConcurrentChange:
        raise
    except InvalidRequest as error:  # an in-sync broker is or becomes the leader
        return ELECTION_NOT_NEEDED, error.message
    except Unavailable as error:
        return ELIGIBLE_LEADERS_NOT_AVAILABLE, error.message
    return ELECTED


async def alter_partition_reassignments(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Each partition succeeds or fails on its own (KIP-455)."""
    del context
    responses = []
    for topic in request.topics:
        partitions = []
        for wanted in topic.partitions:
            result = {"partition_index": wanted.partition_index}
            try:
                result |= _reassignment(_find(service, topic.name, wanted.partition_index), wanted.replicas)
            except MansioError as error:
                result |= {"error_code": error.kafka_code, "error_message": error.message}
            partitions.append(result)
        responses.append({"name": topic.name, "partitions": partitions})
    return {
        "allow_replication_factor_change": request.allow_replication_factor_change,
        "responses": responses,
    }


def _reassignment(partition: PartitionState, replicas: list[int] | None) -> dict[str, Any]:
    if replicas is None:
        return {"error_code": NO_REASSIGNMENT_IN_PROGRESS, "error_message": "nothing is being moved"}
    if tuple(replicas) != partition.replicas:
        raise InvalidReplicaAssignment(
            f"partitions are not moved: it stays on {list(partition.replicas)}, not {replicas}"
        )
    return {}


async def list_partition_reassignments(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Ongoing reassignments of the requested partitions, or of all. Partitions that do not exist or are not moved are
    omitted."""
    del context
    topics = service.topics.state.topics
    wanted: list[tuple[str, Iterable[int]]]
    if request.topics is None:
        wanted = [(topic.name, range(len(topic.partitions))) for topic in topics.values()]
    else:
        wanted = [(item.name, item.partition_indexes) for item in request.topics]
    found = []
    for name, indexes in wanted:
        there = topics[name].partitions if name in topics else ()
        moving = [
            _ongoing_reassignment(index, there[index])
            for index in indexes
            if 0 <= index < len(there) and (there[index].adding or there[index].removing)
        ]
        if moving:
            found.append({"name": name, "partitions": moving})
    return {"topics": found}


def _ongoing_reassignment(index: int, partition: PartitionState) -> dict[str, Any]:
    return {
        "partition_index": index,
        "replicas": partition.replicas,
        "adding_replicas": partition.adding,
        "removing_replicas": partition.removing,
    }


def _find(service: BrokerServices, topic: str, index: int) -> PartitionState:
    partitions = service.topics.find(topic).partitions
    if not 0 <= index < len(partitions):
        raise UnknownTopicOrPartition(f"there is no partition {topic}-{index}")
    return partitions[index]
