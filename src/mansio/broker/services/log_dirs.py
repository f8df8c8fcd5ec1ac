"""Description of the log directory of this broker, for administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import AuthorizationFailed, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Scheduler


class ReplicaSize(NamedTuple):
    """A partition on this broker, and the size of its segments."""

    partition: int
    size_bytes: int


class ReplicaMove(NamedTuple):
    """Request to move the replica of a partition to a directory."""

    topic: str
    partition: int
    directory: str


class LogDirService:
    """Describes the log directory of this broker. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_partitions", "_scheduler", "_topics")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        topics: TopicService,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        self._partitions = partitions
        self._topics = topics
        self._scheduler = scheduler
        self._authorization = authorization

    async def describe(
        self, wanted: Iterable[tuple[str, Sequence[int]]] | None, *, caller: Caller
    ) -> dict[str, list[ReplicaSize]]:
        """Return the sizes of partitions (topic, indexes), or of all if `wanted` is None, by topic. Partitions that are
        not on this broker are left out. Raises `ClusterAuthorizationFailed` without DESCRIBE for the cluster."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        if wanted is None:
            topics = self._topics.state.topics
            wanted = [(name, range(len(topic.partitions))) for name, topic in topics.items()]
        turns = ItemTurns(self._scheduler)
        found: dict[str, list[ReplicaSize]] = {}
        for name, indexes in wanted:
            await turns.next()
            for index in indexes:
                await turns.next()
                if (partition := self._partitions.get(name, index)) is not None:
                    found.setdefault(name, []).append(ReplicaSize(index, partition.log.size_bytes))
        return found

    async def move_each(self, moves: Sequence[ReplicaMove], *, caller: Caller) -> list[MansioError | None]:
        """Move replicas, which needs ALTER for the cluster: there is one directory, in which all of them are. Return
        the error of each, or None. Errors: `ClusterAuthorizationFailed`, those of `PartitionSet.check_directory`."""
        try:
            self._authorization.check_cluster(caller, Operation.ALTER)
        except AuthorizationFailed as error:
            return [without_traceback(error)] * len(moves)
        turns = ItemTurns(self._scheduler)
        errors: list[MansioError | None] = []
        for topic, index, directory in moves:
            await turns.next()
            try:
                self._partitions.check_directory(topic, index, directory)
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return errors
