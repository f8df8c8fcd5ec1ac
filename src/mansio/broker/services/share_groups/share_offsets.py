"""Start offsets of share groups: describe, alter, delete (KIP-932; KIP-1226 for the lag).

The broker that coordinates the group executes these requests; it reads and writes share state on the broker that leads
the partition of `__share_group_state`. Altering a start offset replaces the state of a share partition and increases
its state epoch. The leader of the share partition is fenced when it next writes the state; if it runs on this broker,
it ends at once.

Invariants: offsets of a group with members are not changed. Topics of a group are altered or deleted one at a time;
errors are reported per partition or topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error, check_group_id
from mansio.errors import (
    AuthorizationFailed,
    InvalidRequest,
    MansioError,
    NonEmptyGroup,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.share_partition.types import BASE, ShareKey
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.group.group_store import GroupEntry
    from mansio.broker.coordinator.share.share_coordinator import ShareCoordinator
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.topics.topics import TopicService
    from mansio.metadata.model import BrokerState, Topic
    from mansio.ports import Scheduler
    from mansio.state.share_group.group import ShareGroup
    from mansio.state.share_partition.types import ShareSummary

UNKNOWN_OFFSET_OR_LAG: Final = -1
"""Start offset of a share partition without state; lag if this broker has no replica of the partition."""

NO_TOPIC_ID: Final = bytes(16)
"""Topic id of a topic that does not exist."""


@dataclass(frozen=True, slots=True)
class ShareOffset:
    """Start offset of one share partition, the leader epoch stored with it, and the lag in records."""

    partition: int
    start_offset: int = UNKNOWN_OFFSET_OR_LAG
    leader_epoch: int = 0
    lag: int = UNKNOWN_OFFSET_OR_LAG
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class TopicShareOffsets:
    """Start offsets of the share partitions of one topic. `topic_id` is `NO_TOPIC_ID` if the topic does not exist.
    `error` concerns the whole topic."""

    topic: str
    topic_id: bytes
    partitions: Sequence[ShareOffset] = ()
    error: MansioError | None = None


class ShareOffsetService:
    """Describes, alters and deletes start offsets of share groups that this broker coordinates. All methods run on the
    broker's event loop."""

    __slots__ = (
        "_authorization",
        "_group_coordinator",
        "_partitions",
        "_scheduler",
        "_share_coordinator",
        "_share_partition_manager",
        "_topics",
    )

    def __init__(
        self,
        *,
        group_coordinator: GroupCoordinator,
        share_coordinator: ShareCoordinator,
        share_partition_manager: SharePartitionManager,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        self._group_coordinator = group_coordinator
        self._share_coordinator = share_coordinator
        self._share_partition_manager = share_partition_manager
        self._topics = topics
        self._partitions = partitions
        self._scheduler = scheduler
        self._authorization = authorization

    async def find_coordinator(self, key: str, *, caller: Caller) -> BrokerState | None:
        """Return the broker that stores the state of a share partition (`group:topic id:partition`), which needs
        CLUSTER_ACTION; None if it is this broker. Raises `ClusterAuthorizationFailed` and the errors of
        `ShareCoordinator.find_state_leader`."""
        self._authorization.check_cluster(caller, Operation.CLUSTER_ACTION)
        return await self._share_coordinator.find_state_leader(key)

    def _check(self, caller: Caller, operation: Operation, group_id: str) -> None:
        self._authorization.check(caller, operation, ResourceType.GROUP, group_id)

    def _check_topic(self, caller: Caller, operation: Operation, topic: str) -> None:
        self._authorization.check(caller, operation, ResourceType.TOPIC, topic)

    # ------------------------------------------------------------------ describe

    async def describe(
        self, group_id: str, topics: Sequence[tuple[str, Sequence[int]]] | None, *, caller: Caller
    ) -> list[TopicShareOffsets]:
        """Return the start offsets of the (topic, partitions) in `topics`, or, if it is None, of all share partitions
        of the group that have a state. The caller needs DESCRIBE for the group and the topics; topics that it does not
        name are left out.

        Raises `GroupAuthorizationFailed`, `InvalidGroupId`, `GroupIdNotFound` and errors of the coordinator, such as
        `CoordinatorLoadInProgress`; other errors are in the results."""
        self._check(caller, Operation.DESCRIBE, group_id)
        try:
            check_group_id(group_id)
            _, group = self._group_coordinator.share_groups.find(group_id)
            wanted = self._partitions_with_state(group, caller) if topics is None else topics
            turns = ItemTurns(self._scheduler)
            return [await self._describe_topic(group_id, *each, turns, caller) for each in wanted]
        except MansioError as error:
            raise _to_coordinator_error(error) from error

    def _partitions_with_state(self, group: ShareGroup, caller: Caller) -> list[tuple[str, Sequence[int]]]:
        name_of = self._group_coordinator.topic_resolver.name_of
        return [
            (name, each.partitions)
            for each in group.state_partitions.initialized
            if (name := name_of(each.topic_id)) is not None
            and self._authorization.allows(caller, Operation.DESCRIBE, ResourceType.TOPIC, name)
        ]

    async def _describe_topic(
        self, group_id: str, name: str, indexes: Sequence[int], turns: ItemTurns, caller: Caller
    ) -> TopicShareOffsets:
        await turns.next()
        try:
            self._check_topic(caller, Operation.DESCRIBE, name)
        except AuthorizationFailed as error:
            refused = without_traceback(error)
            return TopicShareOffsets(
                name, NO_TOPIC_ID, [ShareOffset(index, error=refused) for index in indexes]
            )
        topic = self._topics.state.topics.get(name)
        topic_id = _topic_id_bytes(topic)
        offsets = []
        for index in indexes:
            await turns.next()
            try:
                _check_partition(topic, name, index)
                offsets.append(await self._describe_partition(name, ShareKey(group_id, topic_id, index)))
            except MansioError as error:
                offsets.append(ShareOffset(index, error=without_traceback(error)))
        return TopicShareOffsets(name, topic_id, offsets)

    async def _describe_partition(self, name: str, key: ShareKey) -> ShareOffset:
        """Describe the share partitions of a topic partition by the lowest start offset and the sum of the lags."""
        manager = self._share_partition_manager
        summary = await manager.persister.summary(key)
        if summary is None:
            return ShareOffset(key.partition)
        start, others = summary.start_offset, (await manager.keys_of(key))[1:]
        for other in others:
            if (more := await manager.persister.summary(other)) is not None:
                start = min(start, more.start_offset)
        lag = await self._sum_lags(name, key) if others else self._lag(name, key, summary)
        return ShareOffset(key.partition, start, max(summary.leader_epoch, 0), lag)

    async def _sum_lags(self, name: str, key: ShareKey) -> int:
        """Return the lag of several share partitions in records. Which offsets each has is known where the partition
        has a replica, but only its leader knows how many of them are done; elsewhere it is `UNKNOWN_OFFSET_OR_LAG`."""
        partition = self._partitions.get(name, key.partition)
        if partition is None or not partition.is_leader:
            return UNKNOWN_OFFSET_OR_LAG
        shares = await self._share_partition_manager.load(key.group, (key.topic_id, key.partition))
        return sum(leader.counts().lag for leader in shares.leaders)

    def _lag(self, name: str, key: ShareKey, summary: ShareSummary) -> int:
        """Return the lag of an only share partition in records, `UNKNOWN_OFFSET_OR_LAG` if this broker has no replica
        of the partition. It is too small while the high watermark of the local replica is behind that of the leader."""
        partition = self._partitions.get(name, key.partition)
        if partition is None:
            return UNKNOWN_OFFSET_OR_LAG
        start = max(summary.start_offset, partition.start_offset)
        return max(partition.high_watermark - start - summary.done_count, 0)

    # ------------------------------------------------------------------ alter

    async def alter(
        self,
        group_id: str,
        start_offsets: Sequence[tuple[str, Sequence[tuple[int, int]]]],
        *,
        caller: Caller,
    ) -> list[TopicShareOffsets]:
        """Set new start offsets: (topic, [(partition, offset), ...]). The leases and delivery state of these share
        partitions are deleted. The caller needs READ for the group and the topics.

        If the group does not exist and at least one of the partitions does, the group is created, so that an
        administrator can set the offsets before its first member joins (KAFKA-19662). Raises
        `GroupAuthorizationFailed`, `InvalidGroupId`, `NonEmptyGroup` and errors of the coordinator; other errors are in
        the results."""
        self._check(caller, Operation.READ, group_id)
        names = dict.fromkeys(name for name, _ in start_offsets)
        allowed = set(self._authorization.allowed_of_named(caller, Operation.READ, ResourceType.TOPIC, names))
        topics = self._topics.state.topics
        owner: tuple[GroupEntry, ShareGroup] | None = None
        try:
            check_group_id(group_id)
            if any(
                _has_partition(topics.get(name), index)
                for name, partitions in start_offsets
                if name in allowed
                for index, _ in partitions
            ):
                owner = await self._group_coordinator.share_groups.find_or_create(group_id)
                _check_empty(owner[1])
        except MansioError as error:
            raise _to_coordinator_error(error) from error
        turns = ItemTurns(self._scheduler)
        results = []
        for name, partitions in start_offsets:
            await turns.next()
            if name not in allowed:
                refused = TopicAuthorizationFailed()
                offsets = [ShareOffset(index, offset, error=refused) for index, offset in partitions]
                results.append(TopicShareOffsets(name, NO_TOPIC_ID, offsets))
                continue
            topic = topics.get(name)
            topic_id = _topic_id_bytes(topic)
            offsets = []
            for index, start_offset in partitions:
                await turns.next()
                failure: MansioError | None = None
                try:
                    _check_partition(topic, name, index)
                    await self._alter_partition(ShareKey(group_id, topic_id, index), start_offset)
                except MansioError as error:
                    failure = _to_coordinator_error(error)
                offsets.append(ShareOffset(index, start_offset, error=failure))
            if topic is not None and owner is not None and any(each.error is None for each in offsets):
                # For all partitions of the topic, so that the group does not treat the others as newly added
                # partitions.
                await self._record_initialized_partitions(
                    *owner, topic_id, name, range(len(topic.partitions))
                )
            results.append(TopicShareOffsets(name, topic_id, offsets))
        return results

    async def _alter_partition(self, key: ShareKey, start_offset: int) -> None:
        if start_offset < 0:
            raise InvalidRequest(f"{start_offset} is not an offset")
        manager = self._share_partition_manager
        await manager.wait_until_dead_lettered(key)
        for one in await manager.keys_of(
            key
        ):  # a state that does not exist yet begins where the first one does
            summary = await manager.persister.summary(one)
            if summary is not None or one.number == BASE:
                state_epoch = 0 if summary is None else summary.state_epoch + 1
                await manager.persister.initialize(one, state_epoch, start_offset)
            manager.drop(one)

    async def _record_initialized_partitions(
        self, entry: GroupEntry, group: ShareGroup, topic_id: bytes, name: str, indexes: Sequence[int]
    ) -> None:
        """Record partitions with state in the group, so that the state is deleted with the group."""
        if not entry.is_unloaded and entry.group is group:
            await self._group_coordinator.share_groups.add_initialized_partitions(
                entry, group, topic_id, name, indexes
            )

    # ------------------------------------------------------------------ delete

    async def delete(
        self, group_id: str, topics: Sequence[str], *, caller: Caller
    ) -> list[TopicShareOffsets]:
        """Delete the delivery state of topics. In these topics, the group then starts like a new group. The caller
        needs DELETE for the group and READ for the topics.

        Raises `GroupAuthorizationFailed`, `InvalidGroupId`, `GroupIdNotFound`, `NonEmptyGroup` and errors of the
        coordinator; other errors are in the results."""
        self._check(caller, Operation.DELETE, group_id)
        try:
            check_group_id(group_id)
            entry, group = self._group_coordinator.share_groups.find(group_id)
            _check_empty(group)
        except MansioError as error:
            raise _to_coordinator_error(error) from error
        turns = ItemTurns(self._scheduler)
        results = []
        for name in topics:
            await turns.next()
            topic_id = NO_TOPIC_ID
            failure: MansioError | None = None
            try:
                self._check_topic(caller, Operation.READ, name)
                topic = self._topics.state.topics.get(name)
                topic_id = _topic_id_bytes(topic)
                if topic is None:
                    raise UnknownTopicOrPartition(f"there is no topic {name!r}")
                await self._group_coordinator.share_groups.delete_topics(entry, group, [topic_id])
            except MansioError as error:
                failure = _to_coordinator_error(error)
            results.append(TopicShareOffsets(name, topic_id, error=failure))
        return results


def _topic_id_bytes(topic: Topic | None) -> bytes:
    return NO_TOPIC_ID if topic is None else topic.topic_id.bytes


def _has_partition(topic: Topic | None, index: int) -> bool:
    return topic is not None and 0 <= index < len(topic.partitions)


def _check_partition(topic: Topic | None, name: str, index: int) -> None:
    if not _has_partition(topic, index):
        raise UnknownTopicOrPartition(f"there is no partition {name}-{index}")


def _check_empty(group: ShareGroup) -> None:
    if group.members:
        raise NonEmptyGroup(f"group {group.group_id!r} has members")


def _to_coordinator_error(error: MansioError) -> MansioError:
    """Convert an error of a log that belongs to the coordinator into the coordinator error that clients expect."""
    return copied(error) if isinstance(error, UnknownTopicOrPartition) else as_coordinator_error(error)
