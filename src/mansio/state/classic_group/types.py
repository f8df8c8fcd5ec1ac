"""Data types of a classic consumer group: states, requests, responses, effects, members.

The state machine is in `group`. A *waiter* is an object that the caller passes with a join or sync. If the request
cannot be answered at once, the waiter is parked and later returned in exactly one `Response` effect, or dropped with
the group.
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
    """States of a classic group, with their names in DescribeGroups and ListGroups."""

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
    """Assignment strategy that a member supports, and its metadata (the subscription)."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Join:
    """JoinGroup request. `member_id`: "" for a new member. `requires_member_id`: a new member has to join again with
    the id in the response (version 4+, KIP-394). `can_skip_assignment`: version 9+ (KIP-814)."""

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
    """SyncGroup request. `assignments`: assignment by member id, sent by the leader only. Protocol type and name are
    checked if the client sends them (version 5+, KIP-559)."""

    member_id: str
    instance_id: str | None
    generation: int
    assignments: dict[str, bytes]
    protocol_type: str | None = None
    protocol: str | None = None


class JoinedMember(NamedTuple):
    """Member in the response to the leader's join."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """Response to a join. `members`: sent to the leader only. `must_rejoin`: the error code is MEMBER_ID_REQUIRED, and
    the client has to join again with `member_id`."""

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
    """Response to a sync, with the assignment of the member."""

    assignment: bytes
    protocol_type: str | None
    protocol: str | None


@dataclass(frozen=True, slots=True)
class Response:
    """Effect: the caller completes the request with this waiter by `value`, a response or an error."""

    waiter: Any
    value: JoinResponse | SyncResponse | MansioError


@dataclass(frozen=True, slots=True)
class Persist:
    """Effect: the caller appends the record of the group and reports the outcome by `handle_persisted` with this
    token."""

    token: int
    metadata: GroupMetadata


Effect = Response | Persist


@dataclass(slots=True)
class Member:
    """Member of a classic group. `deadline_ms`: end of its session unless a heartbeat arrives before. `is_new`: the
    member has not taken part in a generation yet."""

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
        """Return the member's metadata for a protocol; empty if it does not support the protocol."""
        return next((each.metadata for each in self.protocols if each.name == protocol), b"")

    def extend_session(self, now_ms: float) -> None:
        """Restart the session timeout of the member."""
        self.deadline_ms = now_ms + self.session_timeout_ms

    def may_expire(self) -> bool:
        """Whether the session may end at its deadline. A member with a parked request cannot send heartbeats. A new
        member with a parked join still expires, after `NEW_MEMBER_JOIN_TIMEOUT_MS`, because its client may have failed.
        """
        return self.is_new or (self.join_waiter is None and self.sync_waiter is None)

    def park_sync(self, waiter: Any) -> list[Response]:
        """Park a sync until the assignment is stored. Returns an error response to an older sync of the same member,
        which its client has abandoned."""
        older, self.sync_waiter = self.sync_waiter, waiter
        return [] if older is None else [Response(older, RebalanceInProgress())]

    def take_sync_waiter(self) -> Any:
        """Remove and return the waiter of a parked sync, if any."""
        waiter, self.sync_waiter = self.sync_waiter, None
        return waiter
