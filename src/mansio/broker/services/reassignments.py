"""Reassignments of partitions to other brokers (KIP-455, KIP-860), and the removal of brokers.

The broker that receives a request stores the target replicas, and the controller finishes the reassignment
(`metadata.reassignment`). On a single node no partition can be moved: a request that changes nothing succeeds, any
other is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    InvalidReplicaAssignment,
    InvalidRequest,
    MansioError,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from mansio.host.item_turns import ItemTurns
from mansio.metadata.reassignment import is_reassigned
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.cluster import ClusterServices
    from mansio.broker.topics.topics import TopicService
    from mansio.metadata.model import PartitionState
    from mansio.metadata.reassignment import Reassignment
    from mansio.ports import Scheduler


REASSIGNMENTS_MAX: Final = 500
"""Number of partitions about which is decided in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class OngoingReassignment:
    """A partition whose replicas are being added or removed."""

    topic: str
    partition: int
    state: PartitionState


class ReassignmentService:
    """Begins, cancels and lists reassignments, and unregisters brokers. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_cluster", "_scheduler", "_topics")

    def __init__(
        self,
        *,
        topics: TopicService,
        cluster: ClusterServices | None,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        """`cluster` is None on a single node."""
        self._topics = topics
        self._cluster = cluster
        self._scheduler = scheduler
        self._authorization = authorization

    async def alter(
        self, wanted: Sequence[Reassignment], *, may_change_factor: bool, caller: Caller
    ) -> list[MansioError | None]:
        """Begin, replace or cancel reassignments; return an error or None for each.

        Raises `ClusterAuthorizationFailed` unless the caller may ALTER the cluster, and `Unavailable` if this broker
        has no session."""
        self._authorization.check_cluster(caller, Operation.ALTER)
        results: list[MansioError | None] = []
        if self._cluster is not None:
            for first in range(0, len(wanted), REASSIGNMENTS_MAX):
                part = wanted[first : first + REASSIGNMENTS_MAX]
                results += await self._cluster.controller.reassign(part, may_change_factor=may_change_factor)
            return results
        for each in wanted:
            try:
                self._check_unchanged(each)
            except MansioError as error:
                results.append(without_traceback(error))
            else:
                results.append(None)
        return results

    def _check_unchanged(self, wanted: Reassignment) -> None:
        partitions = self._topics.find(wanted.topic).partitions
        if not 0 <= wanted.partition < len(partitions):
            raise UnknownTopicOrPartition(f"there is no partition {wanted.topic}-{wanted.partition}")
        if wanted.replicas is None:
            raise NoReassignmentInProgress
        replicas = partitions[wanted.partition].replicas
        if tuple(wanted.replicas) != replicas:
            raise InvalidReplicaAssignment(
                f"a single node moves no partitions: the replicas are {list(replicas)}, not {list(wanted.replicas)}"
            )

    async def unregister(self, node_id: int, *, caller: Caller) -> None:
        """Forget a broker that has left the cluster for good (KIP-631).

        Raises `ClusterAuthorizationFailed` unless the caller may ALTER the cluster, `BrokerIdNotRegistered`,
        `InvalidRequest` if the broker runs or has replicas, `Unavailable` and `ConcurrentChange`."""
        self._authorization.check_cluster(caller, Operation.ALTER)
        if self._cluster is None:
            raise InvalidRequest("a single node is no cluster from which a broker can be removed")
        await self._cluster.controller.unregister(node_id)

    async def list_ongoing(
        self, partitions: Iterable[tuple[str, int]] | None, *, caller: Caller
    ) -> list[OngoingReassignment]:
        """Return the ongoing reassignments of `partitions`, or of all partitions if it is None, by topic. Partitions
        that do not exist are omitted. Raises `ClusterAuthorizationFailed` unless the caller may DESCRIBE the
        cluster."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        topics = self._topics.state.topics
        wanted: dict[str, list[int]] = {}
        for name, index in partitions or ():
            wanted.setdefault(name, []).append(index)
        names = [*topics] if partitions is None else wanted
        found = []
        turns = ItemTurns(self._scheduler)
        for name in names:
            await turns.next()
            if (topic := topics.get(name)) is None:
                continue
            states = topic.partitions
            found += [
                OngoingReassignment(name, index, states[index])
                for index in (range(len(states)) if partitions is None else wanted[name])
                if 0 <= index < len(states) and is_reassigned(states[index])
            ]
        return found
