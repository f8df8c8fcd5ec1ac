"""Who is in a classic group: its members, their protocols, their leader, and which of them wait for an
answer.

The bookkeeping under `classic_group`, which decides *when* any of this happens.

Always true: the counters agree with the members (`joined_count` is the number of parked joins; a protocol's
count the number of members that can do it); a group with members has a leader, one without has none; a static
member's instance id maps to its current member id and to nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import FencedInstanceId, RebalanceInProgress, UnknownMember
from mansio.state.classic_group.types import JoinedMember, Member, Response
from mansio.wire.internal_records.offset_and_group_records import MemberMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.errors import MansioError
    from mansio.state.classic_group.types import Join, Protocol


class GroupMembers:
    """The members of one group, in the order they came."""

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
        """The members as they are now; they may come and go meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, member: Member) -> None:
        self.by_id[member.member_id] = member
        self._supported.update(each.name for each in member.protocols)
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id

    def remove(self, member: Member, error: MansioError) -> list[Response]:
        """Take a member out; whatever it waited for is answered with `error`."""
        waiters = (self.take_join_waiter(member), take_sync_waiter(member))
        del self.by_id[member.member_id]
        self._supported.subtract(each.name for each in member.protocols)
        if member.instance_id is not None:
            del self.static_members[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.by_id), None)
        return [Response(waiter, error) for waiter in waiters if waiter is not None]

    def update(self, member: Member, request: Join) -> None:
        """A member joins again, perhaps with other protocols and timeouts."""
        self._supported.subtract(each.name for each in member.protocols)
        member.protocols = request.protocols
        self._supported.update(each.name for each in member.protocols)
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms

    def validated(self, member_id: str, instance_id: str | None) -> Member:
        """The member a request comes from. Raises `UnknownMember`, or `FencedInstanceId` if another one has
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
        return self._supported[protocol] == len(self.by_id)

    def has_common_protocol(self, protocols: tuple[Protocol, ...]) -> bool:
        """Whether all members can do one of `protocols`."""
        return any(self.all_support(each.name) for each in protocols)

    def select_protocol(self) -> str:
        """Each member votes for the first of its protocols that everyone can do; a tie goes to the eldest."""
        votes = Counter(
            next(each.name for each in member.protocols if self.all_support(each.name))
            for member in self.by_id.values()
        )
        return votes.most_common(1)[0][0]

    def elect_joined_leader(self) -> bool:
        """Make sure the leader is one who has joined; False if nobody has."""
        if self.leader is not None and self.by_id[self.leader].join_waiter is not None:
            return True
        for member in self.by_id.values():
            if member.join_waiter is not None:
                self.leader = member.member_id
                return True
        return False

    def rebalance_timeout_ms(self) -> int:
        """The longest any member may take to join again."""
        return max((each.rebalance_timeout_ms for each in self.by_id.values()), default=0)

    # ------------------------------------------------------------------ waiters

    def all_joined(self) -> bool:
        return self.joined_count == len(self.by_id)

    def survives_join_phase(self, member: Member) -> bool:
        """Whether the end of the join phase leaves the member in: it has joined, or is static."""
        return member.join_waiter is not None or member.instance_id is not None

    def surviving_count(self) -> int:
        return sum(self.survives_join_phase(each) for each in self.by_id.values())

    def park_join(self, member: Member, waiter: Any) -> list[Response]:
        """An older request of the same member is answered: its client has given up on it."""
        older = self.take_join_waiter(member)
        member.join_waiter = waiter
        self.joined_count += 1
        return [] if older is None else [Response(older, RebalanceInProgress())]

    def take_join_waiter(self, member: Member) -> Any:
        waiter, member.join_waiter = member.join_waiter, None
        if waiter is not None:
            self.joined_count -= 1
        return waiter

    def fail_syncs(self, error: MansioError, now_ms: float) -> list[Response]:
        """Answer every parked sync with `error`. While it was parked its member could not send heartbeats, so
        its session begins anew."""
        answers = []
        for member in self.by_id.values():
            if (waiter := take_sync_waiter(member)) is not None:
                member.extend_session(now_ms)
                answers.append(Response(waiter, error))
        return answers

    # ------------------------------------------------------------------ views

    def listed(self, protocol: str | None) -> tuple[JoinedMember, ...]:
        """What the leader needs to compute an assignment."""
        return tuple(
            JoinedMember(each.member_id, each.instance_id, each.metadata_for(protocol))
            for each in self.by_id.values()
        )

    def stored(self, protocol: str | None, assignments: dict[str, bytes]) -> tuple[MemberMetadata, ...]:
        """The members as the group's record has them."""
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


def park_sync(member: Member, waiter: Any) -> list[Response]:
    older, member.sync_waiter = member.sync_waiter, waiter
    return [] if older is None else [Response(older, RebalanceInProgress())]


def take_sync_waiter(member: Member) -> Any:
    waiter, member.sync_waiter = member.sync_waiter, None
    return waiter
