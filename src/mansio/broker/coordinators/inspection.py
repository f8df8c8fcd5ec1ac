"""Looking at groups: what exists, who is in it, who reads what, and how far behind.

Only reads. The Kafka handlers, the command line and the HTTP door show the same values from here.

Always true: what is shown of a group is one moment of it; a lag is never negative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.state.classic_group import DEAD, STABLE
from mansio.wire.consumer_protocol import decode_assignment, decode_subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mansio.broker.coordinators.store import GroupEntry, GroupStore
    from mansio.state.group_types import Member

CLASSIC: Final = "classic"
"""The only group type there is until KIP-848's "consumer" groups come."""


class ListedGroup(NamedTuple):
    """One line of a list of groups."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = CLASSIC


class DescribedMember(NamedTuple):
    """`metadata` and `assignment` are the client's own bytes; empty unless the group is stable. `partitions`
    is
    the assignment read, for groups of consumers."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes
    partitions: tuple[tuple[str, int], ...]


class DescribedGroup(NamedTuple):
    """A group as `DescribeGroups` shows it. A group that does not exist has the state Dead."""

    group_id: str
    state: str
    protocol_type: str = ""
    protocol: str = ""
    generation: int = 0
    members: tuple[DescribedMember, ...] = ()


class PartitionLag(NamedTuple):
    """How far a group is in one partition. None: nothing committed, no such partition, nobody reads it."""

    topic: str
    partition: int
    committed_offset: int | None
    end_offset: int | None
    lag: int | None
    metadata: str
    member_id: str | None


class Inspection:
    """Questions about the groups of this broker."""

    def __init__(self, store: GroupStore, end_offset: Callable[[str, int], int | None]) -> None:
        self._store = store
        self._end_offset = end_offset

    def list_groups(self, states: Collection[str] = (), types: Collection[str] = ()) -> list[ListedGroup]:
        """The groups of this broker in one of `states` and of one of `types` (any case); empty filters let all pass.
        Raises `CoordinatorLoadInProgress` while some may be missing."""
        self._store.topic.check_all_loaded()
        wanted_states = {each.lower() for each in states}
        wanted_types = {each.lower() for each in types}
        if wanted_types and CLASSIC not in wanted_types:
            return []
        return [
            ListedGroup(group_id, entry.group.protocol_type or "", str(entry.group.state))
            for group_id, entry in sorted(self._store.entries.items())
            if not wanted_states or entry.group.state.lower() in wanted_states
        ]

    def describe(self, group_id: str) -> DescribedGroup:
        """One group."""
        entry = self._store.find(group_id)
        if entry is None or entry.group.state is DEAD:
            return DescribedGroup(group_id, str(DEAD))
        group = entry.group
        stable = group.state is STABLE
        return DescribedGroup(
            group_id,
            str(group.state),
            group.protocol_type or "",
            (group.protocol or "") if stable else "",
            group.generation,
            tuple(_described(member, group.protocol if stable else None) for member in group.roster),
        )

    def lag(self, group_id: str) -> list[PartitionLag]:
        """Every partition the group has committed or is assigned, in order."""
        entry = self._store.find(group_id)
        if entry is None:
            return []
        owners = _owners(entry)
        offsets = {(topic, partition): found for topic, partition, found in entry.each_offset()}
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


def topics_of_subscription(metadata: bytes) -> tuple[str, ...] | None:
    """The topics a consumer subscribes to; None if these bytes are not a subscription."""
    try:
        return decode_subscription(metadata).topics
    except WireError:
        return None


def _described(member: Member, protocol: str | None) -> DescribedMember:
    stable = protocol is not None
    return DescribedMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.metadata_for(protocol) if stable else b"",
        member.assignment if stable else b"",
        _assigned(member) if stable else (),
    )


def _assigned(member: Member) -> tuple[tuple[str, int], ...]:
    try:
        return tuple((each[0], each[1]) for each in decode_assignment(member.assignment).partitions)
    except WireError:
        return ()  # a group that is not one of consumers: its bytes mean something else


def _owners(entry: GroupEntry) -> dict[tuple[str, int], str]:
    if entry.group.state is not STABLE:
        return {}
    return {partition: member.member_id for member in entry.group.roster for partition in _assigned(member)}
