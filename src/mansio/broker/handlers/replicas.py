"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments: who keeps and who leads a partition.

Behaviour: a partition has one replica, which leads it. So there is never an election to hold, and no other place to
move to: a plan that leaves a partition where it is succeeds, as in Kafka, and any other is refused.
Non-obvious: asked for all partitions, ElectLeaders leaves out those that need no election, as Kafka does (KIP-460).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidReplicaAssignment, MansioError, UnknownTopicOrPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.context import RequestContext
    from mansio.broker.service import Service
    from mansio.cluster.state import PartitionState
    from mansio.wire.messages import Struct

PREFERRED: Final = 0
PREFERRED_LEADER_NOT_AVAILABLE: Final = 80
ELIGIBLE_LEADERS_NOT_AVAILABLE: Final = 83
ELECTION_NOT_NEEDED: Final = 84
NO_REASSIGNMENT_IN_PROGRESS: Final = 85


async def elect_leaders(service: Service, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Preferred and unclean elections (KIP-460): none is needed where there is a leader, none possible where not."""
    del context
    results = []
    everything = request.topic_partitions is None
    wanted: list[tuple[str, Iterable[int]]]
    if everything:
        topics = service.topics.state.topics.values()
        wanted = [(topic.name, range(len(topic.partitions))) for topic in topics]
    else:
        wanted = [(item.topic, item.partitions) for item in request.topic_partitions]
    for topic, indexes in wanted:
        found = [_election(service, topic, index, request.election_type) for index in indexes]
        if everything:
            found = [one for one in found if one["error_code"] != ELECTION_NOT_NEEDED]
        if found or not everything:
            results.append({"topic": topic, "partition_result": found})
    return {"replica_election_results": results}


def _election(service: Service, topic: str, index: int, election_type: int) -> dict[str, Any]:
    try:
        partition = _find(service, topic, index)
    except MansioError as error:
        return {"partition_id": index, "error_code": error.kafka_code, "error_message": error.message}
    if partition.leader >= 0:
        code, message = ELECTION_NOT_NEEDED, "the partition has its only replica as its leader"
    elif election_type == PREFERRED:
        code, message = PREFERRED_LEADER_NOT_AVAILABLE, "the partition's only replica is not there"
    else:
        code, message = ELIGIBLE_LEADERS_NOT_AVAILABLE, "the partition's only replica is not there"
    return {"partition_id": index, "error_code": code, "error_message": message}


async def alter_partition_reassignments(
    service: Service, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Each partition succeeds or fails by itself (KIP-455)."""
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
    service: Service, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Nothing is ever being moved."""
    del service, request, context
    return {"topics": []}


def _find(service: Service, topic: str, index: int) -> PartitionState:
    partitions = service.topics.find(topic).partitions
    if not 0 <= index < len(partitions):
        raise UnknownTopicOrPartition(f"there is no partition {topic}-{index}")
    return partitions[index]
