"""Data types of a classic consumer group: states, requests, responses, effects, members.

The rules are in `group`. A *waiter* is the object that the caller passes with a join or sync that cannot be answered
yet; it is returned in a `Response` effect, exactly once, or dropped with the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import RebalanceInProgress

if TYPE_CHECKING:
    from mansio.errors import MansioError
    from mansio.wire.internal_records.offset_and_group_records import GroupMetadata


class GroupState(StrEnum):
    """States, with the names in DescribeGroups and ListGroups."""

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
    GroupState.DEAD: frozenset({GroupState.EMPTY}),  # only if the deletion could not be written
}
"""Possible next states. Any other transition is a defect and raises `AssertionError`."""


class Protocol(NamedTuple):
    """An assignment strategy that a member supports, and its metadata (the subscription)."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Join:
    """A JoinGroup request. `member_id` is "" for a new member; with `requires_member_id` (version 4+, KIP-394) it has
    to join again with the id in the response; `can_skip_assignment`: version 9+ (KIP-814)."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[Protocol, ...]
    requires_member_id: bool = True
    can_skip_assignment: bool = True


@dataclass(frozen=True, slots=True)
class Sync:
    """A SyncGroup request. `assignments` (member id -> bytes) is sent by the leader only. Protocol type and name are
    checked if the client sends them (version 5+, KIP-559)."""

    member_id: str
    instance_id: str | None
    generation: int
    assignments: dict[str, bytes]
    protocol_type: str | None = None
    protocol: str | None = None


class JoinedMember(NamedTuple):
    """A member in the response to the leader."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """Response to a join. `members` is sent to the leader only. `must_rejoin`: MEMBER_ID_REQUIRED, join again with
    `member_id`."""

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
    """Effect: answer the request that waits as `waiter` with `value`."""

    waiter: Any
    value: JoinResponse | SyncResponse | MansioError


@dataclass(frozen=True, slots=True)
class Persist:
    """Effect: append the metadata of the group, then call `persisted(token, ...)`."""

    token: int
    metadata: GroupMetadata


Effect = Response | Persist


@dataclass(slots=True)
class Member:
    """One member. `deadline_ms`: end of its session unless a heartbeat arrives before."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    deadline_ms: float
    assignment: bytes = b""
    is_new: bool = True  # has no generation yet
    join_waiter: Any = field(default=None, repr=False)
    sync_waiter: Any = field(default=None, repr=False)

    def metadata_for(self, protocol: str | None) -> bytes:
        """Its metadata for `protocol`."""
        return next((each.metadata for each in self.protocols if each.name == protocol), b"")

    def extend_session(self, now_ms: float) -> None:
        """Restart the session timeout."""
        self.deadline_ms = now_ms + self.session_timeout_ms

    def may_expire(self) -> bool:
        """Whether its session may end. A member that waits for a response cannot send heartbeats. A new member may wait
        for a long but limited time (its client may have failed), any other without a limit."""
        return self.is_new or (self.join_waiter is None and self.sync_waiter is None)

    def park_sync(self, waiter: Any) -> list[Response]:
        """Let a sync wait. An older sync of the same member is answered: its client has abandoned it."""
        older, self.sync_waiter = self.sync_waiter, waiter
        return [] if older is None else [Response(older, RebalanceInProgress())]

    def take_sync_waiter(self) -> Any:
        waiter, self.sync_waiter = self.sync_waiter, None
        return waiter
