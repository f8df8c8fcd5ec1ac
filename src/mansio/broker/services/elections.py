"""Leader elections (KIP-460).

On a single node every partition has one replica, which is its leader, so elections are never needed. In a cluster, the
broker that receives the request executes the elections, each as a compare-and-set transaction of the metadata store.

An unclean election elects the first replica whose broker is up, one that a reassignment adds last. Records that only
other replicas have are lost; by requesting this type of election the client accepts that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    ConcurrentChange,
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    InvalidRequest,
    MansioError,
    PreferredLeaderNotAvailable,
    RequestTimedOut,
    Unavailable,
    UnknownTopicOrPartition,
)
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.cluster import ClusterServices
    from mansio.broker.topics.topics import TopicService
    from mansio.metadata.controller.controller import Controller
    from mansio.metadata.model import PartitionState
    from mansio.ports import Clock, Scheduler

PREFERRED_ELECTION: Final = 0
UNCLEAN_ELECTION: Final = 1
"""Election types of Kafka's protocol (KIP-460)."""


@dataclass(frozen=True, slots=True)
class ElectionResult:
    """Outcome of the election for one partition. `error`: None if a new leader was elected."""

    topic: str
    partition: int
    error: MansioError | None


class ElectionService:
    """Executes leader elections. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_clock", "_cluster", "_scheduler", "_topics")

    def __init__(
        self,
        *,
        topics: TopicService,
        cluster: ClusterServices | None,
        clock: Clock,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        """`cluster` is None on a single node."""
        self._topics = topics
        self._cluster = cluster
        self._clock = clock
        self._scheduler = scheduler
        self._authorization = authorization

    async def elect_leaders(
        self,
        partitions: Iterable[tuple[str, int]] | None,
        *,
        election_type: int,
        timeout_ms: int,
        caller: Caller,
    ) -> list[ElectionResult]:
        """Elect leaders of `partitions`, one after the other. Elections that have not begun when `timeout_ms` expires
        fail with `RequestTimedOut`. Raises `ClusterAuthorizationFailed` unless the caller may ALTER the cluster.

        `partitions` None: all partitions; those that need no election are then omitted from the results, as in Kafka
        (KIP-460)."""
        self._authorization.check_cluster(caller, Operation.ALTER)
        deadline = self._clock.monotonic() + max(timeout_ms, 0) / 1000
        results = []
        turns = ItemTurns(self._scheduler)
        for topic, index in self._all_partitions() if partitions is None else partitions:
            await turns.next()
            error: MansioError | None = None
            try:
                await self._elect(topic, index, election_type, deadline)
            except ElectionNotNeeded as not_needed:
                if partitions is None:
                    continue
                error = without_traceback(not_needed)
            except MansioError as failure:
                error = without_traceback(failure)
            results.append(ElectionResult(topic, index, error))
        return results

    def _all_partitions(self) -> list[tuple[str, int]]:
        return [
            (topic.name, index)
            for topic in self._topics.state.topics.values()
            for index in range(len(topic.partitions))
        ]

    async def _elect(self, topic: str, index: int, election_type: int, deadline: float) -> None:
        partition = self._find_partition(topic, index)
        if election_type not in (PREFERRED_ELECTION, UNCLEAN_ELECTION):
            raise InvalidRequest(f"there is no election of type {election_type}")
        if self._cluster is None:
            raise _single_node_error(partition, election_type)
        self._check_needed(
            partition, election_type
        )  # checks the metadata image, without a request to the store
        if self._clock.monotonic() >= deadline:
            raise RequestTimedOut("the request timed out before this election")
        controller = self._cluster.controller
        if election_type == PREFERRED_ELECTION:
            await _elect_preferred(controller, topic, index, partition)
        else:
            await self._elect_unclean(controller, topic, index, partition)

    def _check_needed(self, partition: PartitionState, election_type: int) -> None:
        leader = partition.leader
        epoch = self._topics.state.epoch_of(leader)
        if not epoch or not partition.is_led_by(leader, epoch):
            return
        if election_type == UNCLEAN_ELECTION:
            raise ElectionNotNeeded(f"broker {leader} leads the partition")
        if leader == partition.replicas[0]:
            raise ElectionNotNeeded(f"broker {leader}, the preferred leader, leads the partition")

    async def _elect_unclean(
        self, controller: Controller, topic: str, index: int, before: PartitionState
    ) -> None:
        former_first = sorted(before.replicas, key=lambda node_id: node_id in before.adding)
        eligible = [node_id for node_id in former_first if self._topics.state.may_lead(node_id)]
        if not eligible:
            replicas = ", ".join(map(str, before.replicas))
            raise EligibleLeadersNotAvailable(f"no broker with a replica ({replicas}) is up")
        try:
            await controller.elect_unclean(topic, index, eligible[0])
        except ConcurrentChange:
            raise
        except InvalidRequest as error:  # an in-sync broker is or becomes the leader
            raise ElectionNotNeeded(error.message) from error
        except Unavailable as error:
            raise EligibleLeadersNotAvailable(error.message) from error

    def _find_partition(self, topic: str, index: int) -> PartitionState:
        partitions = self._topics.find(topic).partitions
        if not 0 <= index < len(partitions):
            raise UnknownTopicOrPartition(f"there is no partition {topic}-{index}")
        return partitions[index]


def _single_node_error(partition: PartitionState, election_type: int) -> MansioError:
    if partition.leader >= 0:
        return ElectionNotNeeded("the partition has its only replica as its leader")
    if election_type == PREFERRED_ELECTION:
        return PreferredLeaderNotAvailable("the partition's only replica is not available")
    return EligibleLeadersNotAvailable("the partition's only replica is not available")


async def _elect_preferred(controller: Controller, topic: str, index: int, before: PartitionState) -> None:
    try:
        after = await controller.elect_preferred(topic, index)
    except ConcurrentChange:
        raise
    except Unavailable as error:
        raise PreferredLeaderNotAvailable(error.message) from error
    if after.leader_epoch == before.leader_epoch:
        raise ElectionNotNeeded(f"broker {after.leader}, the preferred leader, leads the partition")
