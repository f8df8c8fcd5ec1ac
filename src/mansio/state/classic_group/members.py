"""Members of a classic group: protocols, leader, and parked requests.

`group` decides when members join and leave; this module keeps the members consistent.

Invariants:
* `joined_count` is the number of parked joins; the count of a protocol is the number of members that support it.
* A group with members has a leader; a group without members has none.
* The instance id of a static member maps to its current member id only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import FencedInstanceId, RebalanceInProgress, UnknownMember
from mansio.state.classic_group.types import JoinedMember, Member, Response
from mansio.tracebacks import without_traceback
from mansio.wire.internal_records.offset_and_group_records import MemberMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.errors import MansioError
    from mansio.state.classic_group.types import Join, Protocol


class GroupMembers:
    """The members of one classic group, in the order in which they joined."""

    __slots__ = ("_supported", "by_id", "joined_count", "leader", "static_members")

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}  # instance id -> member id
        self.leader: str | None = None
        self.joined_count = 0
        self._supported: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Member]:
        """Iterate over a copy of the members, so that callers can add and remove members meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, member: Member) -> None:
        self.by_id[member.member_id] = member
        self._supported.update(each.name for each in member.protocols)
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member: Member, error: MansioError) -> list[Response]:
        """Remove a member. Returns responses with `error` to its parked requests."""
        waiters = (self.take_join_waiter(member), member.take_sync_waiter())
        del self.by_id[member.member_id]
        self._supported.subtract(each.name for each in member.protocols)
        if member.instance_id is not None:
            del self.static_members[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.by_id), None)
        return [Response(waiter, without_traceback(error)) for waiter in waiters if waiter is not None]

    def update(self, member: Member, request: Join) -> None:
        """Update a member that joins again, possibly with other protocols and timeouts."""
        self._supported.subtract(each.name for each in member.protocols)
        member.protocols = request.protocols
        self._supported.update(each.name for each in member.protocols)
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms

    def find_valid(self, member_id: str, instance_id: str | None) -> Member:
        """Return the member that sent a request. Raises `UnknownMember`, or `FencedInstanceId` if another member has
        taken over its instance id."""
        if instance_id is not None:
            current = self.static_members.get(instance_id)
            if current is None:
                raise UnknownMember(f"the group has no member with instance id {instance_id}")
            if current != member_id:
                raise FencedInstanceId(f"instance id {instance_id} belongs to another member now")
        member = self.by_id.get(member_id)
        if member is None:
            raise UnknownMember(f"the group has no member {member_id!r}")
        return member

    # ------------------------------------------------------------------ protocols and leader

    def all_support(self, protocol: str) -> bool:
        """Whether all members support this protocol."""
        return self._supported[protocol] == len(self.by_id)

    def has_common_protocol(self, protocols: tuple[Protocol, ...]) -> bool:
        """Whether all members support one of these protocols."""
        return any(self.all_support(each.name) for each in protocols)

    def select_protocol(self) -> str:
        """Return the protocol with the most votes. Each member votes for the first of its protocols that all members
        support; in a tie the protocol that got the earliest vote, in join order, wins."""
        votes = Counter(
            next(each.name for each in member.protocols if self.all_support(each.name))
            for member in self.by_id.values()
        )
        return votes.most_common(1)[0][0]

    def elect_joined_leader(self) -> bool:
        """Elect a leader that has joined, preferably the current one. Returns False if no member has joined."""
        if self.leader is not None and self.by_id[self.leader].join_waiter is not None:
            return True
        for member in self.by_id.values():
            if member.join_waiter is not None:
                self.leader = member.member_id
                return True
        return False

    def rebalance_timeout_ms(self) -> int:
        """Return the longest rebalance timeout of any member."""
        return max((each.rebalance_timeout_ms for each in self.by_id.values()), default=0)

    # ------------------------------------------------------------------ waiters

    def all_joined(self) -> bool:
        """Whether all members have a parked join."""
        return self.joined_count == len(self.by_id)

    def survives_join_phase(self, member: Member) -> bool:
        """Whether the member stays in the group at the end of the join phase: it has joined, or is static."""
        return member.join_waiter is not None or member.instance_id is not None

    def surviving_count(self) -> int:
        """Return the number of members that stay in the group at the end of the join phase."""
        return sum(self.survives_join_phase(each) for each in self.by_id.values())

    def park_join(self, member: Member, waiter: Any) -> list[Response]:
        """Park a join until the join phase ends. Returns an error response to an older join of the same member, which
        its client has abandoned."""
        older = self.take_join_waiter(member)
        member.join_waiter = waiter
        self.joined_count += 1
        return [] if older is None else [Response(older, RebalanceInProgress())]

    def take_join_waiter(self, member: Member) -> Any:
        """Remove and return the waiter of a parked join, if any."""
        waiter, member.join_waiter = member.join_waiter, None
        if waiter is not None:
            self.joined_count -= 1
        return waiter

    def fail_syncs(self, error: MansioError, now_ms: float) -> list[Response]:
        """Return responses with `error` to all parked syncs. A member with a parked sync cannot send heartbeats, so its
        session is restarted."""
        responses = []
        for member in self.by_id.values():
            if (waiter := member.take_sync_waiter()) is not None:
                member.extend_session(now_ms)
                responses.append(Response(waiter, without_traceback(error)))
        return responses

    # ------------------------------------------------------------------ views

    def members_for_leader(self, protocol: str | None) -> tuple[JoinedMember, ...]:
        """Return the members as the leader receives them to compute the assignment."""
        return tuple(
            JoinedMember(each.member_id, each.instance_id, each.metadata_for(protocol))
            for each in self.by_id.values()
        )

    def to_records(self, protocol: str | None, assignments: dict[str, bytes]) -> tuple[MemberMetadata, ...]:
        """Return the members as they are stored in the record of the group."""
        return tuple(
            MemberMetadata(
                each.member_id,
                each.instance_id,
                each.client_id,
                each.client_host,
                each.rebalance_timeout_ms,
                each.session_timeout_ms,
                each.metadata_for(protocol),
                assignments.get(each.member_id, b""),
            )
            for each in self.by_id.values()
        )
