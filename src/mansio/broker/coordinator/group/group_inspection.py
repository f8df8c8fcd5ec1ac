"""Read-only information about groups: list, description and lag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import GroupIdNotFound, WireError
from mansio.state.classic_group.group import DEAD, STABLE, ClassicGroup
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.consumer_protocol import decode_assignment, decode_subscribed_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.topic_resolver import TopicResolver
    from mansio.state.classic_group.types import Member
    from mansio.state.consumer_group.stored_state import ConsumerMember
    from mansio.wire.topic_partition import TopicIdPartition

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
SHARE: Final = "share"
"""Types of groups (KIP-848, KIP-932). "consumer" is also the protocol type of classic consumers."""


class ListedGroup(NamedTuple):
    """Entry of a list of groups. `protocol_type`: empty for a classic group that never had members."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = CLASSIC


class DescribedMember(NamedTuple):
    """Description of a member of a classic group. `metadata` and `assignment`: bytes that the clients sent, empty
    unless the group is stable. `partitions`: the decoded assignment, empty if it is not in the consumer protocol."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes
    partitions: tuple[tuple[str, int], ...]


class DescribedGroup(NamedTuple):
    """Description of a classic group. A group that does not exist has the state Dead."""

    group_id: str
    state: str
    protocol_type: str = ""
    protocol: str = ""
    generation: int = 0
    members: tuple[DescribedMember, ...] = ()


class AssignedTopic(NamedTuple):
    """Assigned partitions of one topic."""

    topic_id: bytes
    topic: str
    partitions: tuple[int, ...]


class DescribedConsumerMember(NamedTuple):
    """Description of a member of a consumer group. `assigned`: its current assignment. `target`: its target assignment.
    `is_classic`: it uses the classic protocol."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    assigned: tuple[AssignedTopic, ...]
    target: tuple[AssignedTopic, ...]
    is_classic: bool


class DescribedConsumerGroup(NamedTuple):
    """Description of a consumer group."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[DescribedConsumerMember, ...]


class PartitionLag(NamedTuple):
    """Progress of a group in one partition.

    `committed_offset`: None if the group has not committed any. `end_offset`: high watermark, None if this broker does
    not have the partition. `lag`: None if one of the two is None. `member_id`: owner of the partition, None if there is
    none.
    """

    topic: str
    partition: int
    committed_offset: int | None
    end_offset: int | None
    lag: int | None
    metadata: str
    member_id: str | None


class GroupInspection:
    """Lists and describes the groups that this broker coordinates."""

    def __init__(
        self,
        store: GroupStore,
        end_offset: Callable[[str, int], int | None],
        topic_resolver: TopicResolver,
    ) -> None:
        self._store = store
        self._end_offset = end_offset
        self._topic_resolver = topic_resolver

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = (), *, led_partitions: Iterable[int] = ()
    ) -> list[ListedGroup]:
        """Return the groups of this broker, filtered by state and type (case-insensitive); an empty filter matches all.
        `led_partitions`: the partitions of `__consumer_offsets` that this broker leads according to the metadata.
        Raises `CoordinatorLoadInProgress` while the groups of one of these partitions are not loaded."""
        self._store.runtime.check_all_loaded(led_partitions)
        wanted_states = {each.lower() for each in states}
        wanted_types = {each.lower() for each in types}
        return [
            group
            for group in (_list_entry(entry) for _, entry in sorted(self._store.entries.items()))
            if (not wanted_types or group.group_type in wanted_types)
            and (not wanted_states or group.state.lower() in wanted_states)
        ]

    def describe(self, group_id: str) -> DescribedGroup:
        """Describe a classic group. A group of another type has the state Dead, as in Kafka."""
        entry = self._store.find(group_id)
        group = None if entry is None or entry.is_deleted else entry.group
        if not isinstance(group, ClassicGroup):
            return DescribedGroup(group_id, str(DEAD))
        stable = group.state is STABLE
        return DescribedGroup(
            group_id,
            str(group.state),
            group.protocol_type or "",
            (group.protocol or "") if stable else "",
            group.generation,
            tuple(_describe_member(member, group.protocol if stable else None) for member in group.members),
        )

    def describe_consumer(self, group_id: str) -> DescribedConsumerGroup:
        """Describe a consumer group. Raises `GroupIdNotFound` if it does not exist or is of another type."""
        entry = self._store.find(group_id)
        if entry is None or entry.is_deleted:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        group = entry.group
        if not isinstance(group, ConsumerGroup):
            raise GroupIdNotFound(f"group {group_id!r} is not a consumer group")
        return DescribedConsumerGroup(
            group_id,
            str(group.state),
            group.group_epoch,
            group.assignment_epoch,
            group.assignor,
            tuple(self._describe_consumer_member(member) for member in group.members.values()),
        )

    def _describe_consumer_member(self, member: ConsumerMember) -> DescribedConsumerMember:
        metadata = member.metadata
        return DescribedConsumerMember(
            member.member_id,
            metadata.instance_id,
            metadata.rack_id,
            member.current.epoch,
            metadata.client_id,
            metadata.client_host,
            metadata.topic_names,
            metadata.topic_regex,
            self._group_by_topic(member.current.assigned),
            self._group_by_topic(member.target),
            member.is_classic,
        )

    def _group_by_topic(self, partitions: Iterable[TopicIdPartition]) -> tuple[AssignedTopic, ...]:
        grouped: dict[bytes, list[int]] = {}
        for topic_id, index in sorted(partitions):
            grouped.setdefault(topic_id, []).append(index)
        return tuple(
            AssignedTopic(topic_id, name, tuple(indexes))
            for topic_id, indexes in grouped.items()
            if (name := self._topic_resolver.name_of(topic_id)) is not None
        )

    def lag(self, group_id: str) -> list[PartitionLag]:
        """Return the lag of all partitions with a committed offset or an owner, sorted by topic and partition."""
        entry = self._store.find(group_id)
        if entry is None:
            return []
        owners = self._owners(entry)
        offsets = {(topic, partition): found for topic, partition, found in entry.committed_offsets()}
        rows = []
        for topic, partition in sorted(owners.keys() | offsets.keys()):
            committed = offsets.get((topic, partition))
            end = self._end_offset(topic, partition)
            lag = None if committed is None or end is None else max(end - committed.offset, 0)
            rows.append(
                PartitionLag(
                    topic,
                    partition,
                    None if committed is None else committed.offset,
                    end,
                    lag,
                    "" if committed is None else committed.metadata,
                    owners.get((topic, partition)),
                )
            )
        return rows

    def _owners(self, entry: GroupEntry) -> dict[tuple[str, int], str]:
        group = entry.group
        if isinstance(group, ConsumerGroup):
            return {
                (each.topic, index): member.member_id
                for member in group.members.values()
                for each in self._group_by_topic(member.current.assigned)
                for index in each.partitions
            }
        if isinstance(group, ShareGroup) or group.state is not STABLE:
            return {}
        return {
            partition: member.member_id
            for member in group.members
            for partition in _decode_assignment(member)
        }


def _list_entry(entry: GroupEntry) -> ListedGroup:
    group = entry.group
    if isinstance(group, ConsumerGroup):
        return ListedGroup(group.group_id, CONSUMER, str(group.state), CONSUMER)
    if isinstance(group, ShareGroup):
        return ListedGroup(group.group_id, SHARE, str(group.state), SHARE)
    return ListedGroup(group.group_id, group.protocol_type or "", str(group.state))


def topics_of_subscription(metadata: bytes) -> tuple[str, ...] | None:
    """Decode the topic names in the subscription of a classic member; None if the bytes are malformed."""
    try:
        return decode_subscribed_topics(metadata)
    except WireError:
        return None


def _describe_member(member: Member, protocol: str | None) -> DescribedMember:
    stable = protocol is not None
    return DescribedMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.metadata_for(protocol) if stable else b"",
        member.assignment if stable else b"",
        _decode_assignment(member) if stable else (),
    )


def _decode_assignment(member: Member) -> tuple[tuple[str, int], ...]:
    try:
        return tuple((each[0], each[1]) for each in decode_assignment(member.assignment).partitions)
    except WireError:
        return ()  # the group does not use the consumer protocol
