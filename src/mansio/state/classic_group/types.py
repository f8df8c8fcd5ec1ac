"""What goes into and comes out of a classic consumer group: states, requests, answers, effects, members.

Only data. The rules are in `classic_group`. A *waiter* is whatever the caller handed over with a join or sync
that cannot be answered yet; it comes back in an `Response` effect, exactly once, or is dropped with the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from mansio.errors import MansioError
    from mansio.wire.internal_records.offset_and_group_records import GroupMetadata


class GroupState(StrEnum):
    """The five states, under the names that `DescribeGroups` and `ListGroups` show."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS: Final[dict[GroupState, frozenset[GroupState]]] = {
    GroupState.EMPTY: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.PREPARING_REBALANCE: frozenset({GroupState.COMPLETING_REBALANCE, GroupState.EMPTY}),
    GroupState.COMPLETING_REBALANCE: frozenset({GroupState.STABLE, GroupState.PREPARING_REBALANCE}),
    GroupState.STABLE: frozenset({GroupState.PREPARING_REBALANCE}),
    GroupState.DEAD: frozenset({GroupState.EMPTY}),  # only when deleting it failed
}
"""From a state to those that may follow it. Any other step is a defect in the machine, and fails loudly."""


class Protocol(NamedTuple):
    """One assignment strategy a member can do, and the bytes (its subscription) that go with it."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Join:
    """A JoinGroup request. `member_id` is "" for a member that has none yet; `must_know_member_id` (version
    4+,
    KIP-394) makes such a member come back with the id it is given; `can_skip_assignment`: version 9+
    (KIP-814)."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[Protocol, ...]
    must_know_member_id: bool = True
    can_skip_assignment: bool = True


@dataclass(frozen=True, slots=True)
class Sync:
    """A SyncGroup request; `assignments` (member id -> bytes) is empty but from the leader. Protocol type and
    name are checked where the client gave them (version 5+, KIP-559)."""

    member_id: str
    instance_id: str | None
    generation: int
    assignments: dict[str, bytes]
    protocol_type: str | None = None
    protocol: str | None = None


class JoinedMember(NamedTuple):
    """What the leader is told of each member."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """`members` is filled for the leader only. `must_rejoin`: MEMBER_ID_REQUIRED, join again with
    `member_id`.
    """

    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False
    must_rejoin: bool = False


@dataclass(frozen=True, slots=True)
class SyncResponse:
    """A member's assignment."""

    assignment: bytes
    protocol_type: str | None
    protocol: str | None


@dataclass(frozen=True, slots=True)
class Response:
    """Effect: give `value` to whoever waits as `waiter`."""

    waiter: Any
    value: JoinResponse | SyncResponse | MansioError


@dataclass(frozen=True, slots=True)
class Persist:
    """Effect: write the group's metadata, then report `persisted(token, ...)`."""

    token: int
    metadata: GroupMetadata


Effect = Response | Persist


@dataclass(slots=True)
class Member:
    """One member. `deadline_ms` is when its session ends unless it is heard of before."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    deadline_ms: float
    assignment: bytes = b""
    is_new: bool = True  # has not been given a generation yet
    join_waiter: Any = field(default=None, repr=False)
    sync_waiter: Any = field(default=None, repr=False)

    def metadata_for(self, protocol: str | None) -> bytes:
        """Its subscription under `protocol`."""
        return next((each.metadata for each in self.protocols if each.name == protocol), b"")

    def extend_session(self, now_ms: float) -> None:
        """A sign of life: its session begins anew."""
        self.deadline_ms = now_ms + self.session_timeout_ms

    def may_expire(self) -> bool:
        """A member that waits for our answer cannot send heartbeats. A new one is given a long time to wait
        (its client may be gone for good, and we cannot tell), any other as long as it takes."""
        return self.is_new or (self.join_waiter is None and self.sync_waiter is None)
