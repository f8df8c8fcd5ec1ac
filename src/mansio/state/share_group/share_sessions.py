"""Share sessions (KIP-932): the partitions that each member of a share group fetches from this broker.

A member has one session on each broker from which it fetches. Epoch 0 opens a session, each further request has the
epoch that the broker expects, -1 ends the session. The epoch reveals repeated and late requests, and requests of an
earlier incarnation of the member.

    no session ──── 0 ───► open, next 1 ──── 1, 2, ... ───► open, next one more (after 2**31 - 1 follows 1)
         ▲                      │  0: the old one is replaced
         └── -1, connection lost┘

Invariants: a member of a group has at most one session. There are at most `sessions_max` sessions, with at most
`partitions_max` partitions each and `all_partitions_max` in total. A refused request changes nothing. The caller that
ends a session releases the leases of its member, unless the session `keeps_leases` and its connection was lost.

Source: KIP-932, as Apache Kafka's SharePartitionManager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import (
    InvalidRequest,
    InvalidShareSessionEpoch,
    ShareSessionLimitReached,
    ShareSessionNotFound,
)
from mansio.wire.field_values import (
    FINAL_SHARE_SESSION_EPOCH,
    OPEN_SHARE_SESSION_EPOCH,
    SHARE_SESSION_EPOCH_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.wire.topic_partition import TopicIdPartition


PARTITIONS_MAX: Final = 20_000
"""Maximum number of partitions in a session."""
ALL_PARTITIONS_MAX: Final = 1_000_000
"""Maximum number of partitions in all sessions together. A session may name partitions that do not exist, so their
number needs a bound."""


class ShareSession:
    """Share session of one member. `replaces_older`: this session has just replaced an older one of the member, whose
    leases the caller has to release unless the member `keeps_leases`: then leases end with their duration, or when the
    member ends its session, and not with a connection."""

    __slots__ = (
        "_partitions",
        "_rotation",
        "connection",
        "epoch",
        "group",
        "is_disconnected",
        "keeps_leases",
        "member",
        "replaces_older",
    )

    def __init__(
        self, group: str, member: str, connection: Any, *, replaces_older: bool, keeps_leases: bool = False
    ) -> None:
        self.group = group
        self.member = member
        self.connection = connection
        self.epoch = 1
        """Epoch that the next request must have."""
        self.replaces_older = replaces_older
        self.keeps_leases = keeps_leases
        self.is_disconnected = False
        """Whether the session has ended with its connection."""
        self._partitions: dict[TopicIdPartition, None] = {}
        self._rotation = 0

    def __len__(self) -> int:
        """Return the number of partitions in the session."""
        return len(self._partitions)

    def partitions(self) -> list[TopicIdPartition]:
        """Return the partitions, rotated by one with each call, so that no partition is always the last to be
        served."""
        found = self.upcoming_partitions()
        self.rotate()
        return found

    def rotate(self) -> None:
        """Rotate the partitions by one."""
        self._rotation = (self._rotation + 1) % max(len(self._partitions), 1)

    def upcoming_partitions(self) -> list[TopicIdPartition]:
        """Return what the next call of `partitions` returns."""
        found = list(self._partitions)
        if len(found) < 2:
            return found
        rotation = (self._rotation + 1) % len(found)
        return found[rotation:] + found[:rotation]

    def __contains__(self, partition: TopicIdPartition) -> bool:
        """Whether the session has the partition."""
        return partition in self._partitions

    def missing(self, partitions: Iterable[TopicIdPartition]) -> list[TopicIdPartition]:
        """Return those of the given partitions that are not in the session."""
        return [each for each in partitions if each not in self._partitions]

    @property
    def releases_leases(self) -> bool:
        """Whether the end of this session releases the leases of its member."""
        return not (self.keeps_leases and self.is_disconnected)

    def change(self, add: Iterable[TopicIdPartition], forget: Iterable[TopicIdPartition]) -> None:
        """Add partitions to the session, and remove others from it."""
        for partition in forget:
            self._partitions.pop(partition, None)
        self._partitions.update(dict.fromkeys(add))


class ShareSessions:
    """Share sessions of one broker (Kafka's ShareSessionCache). `connection` arguments are any objects that identify a
    connection."""

    __slots__ = ("_partition_count", "_sessions", "all_partitions_max", "partitions_max", "sessions_max")

    def __init__(
        self,
        sessions_max: int,
        *,
        partitions_max: int = PARTITIONS_MAX,
        all_partitions_max: int = ALL_PARTITIONS_MAX,
    ) -> None:
        self.sessions_max = sessions_max
        self.partitions_max = partitions_max
        self.all_partitions_max = all_partitions_max
        self._partition_count = 0
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def fetch(
        self,
        group: str,
        member: str,
        epoch: int,
        add: Iterable[TopicIdPartition],
        forget: Iterable[TopicIdPartition],
        *,
        has_acks: bool,
        connection: Any,
        keeps_leases: bool = False,
    ) -> ShareSession:
        """Handle a ShareFetch with this session epoch; returns its session. The epoch -1 ends the session; `add` and
        `forget` are then ignored.

        Raises `InvalidRequest` (a new session has nothing to acknowledge or forget), `ShareSessionNotFound`,
        `InvalidShareSessionEpoch`, `ShareSessionLimitReached`.
        """
        if epoch == FINAL_SHARE_SESSION_EPOCH:
            return self.end(group, member)
        add, forget = list(add), list(forget)
        if epoch != OPEN_SHARE_SESSION_EPOCH:
            session = self._find_session(group, member, epoch)
            new = session.missing(add)  # a request also names the partitions that it only acknowledges
            if new or forget:
                self._check_limits(session, new)
                self._change(session, add, forget)
            self._advance_epoch(session, connection)
            return session
        if has_acks or forget:
            raise InvalidRequest("a new share session has nothing to acknowledge, and nothing to forget")
        replaces_older = (group, member) in self._sessions
        if not replaces_older and len(self._sessions) >= self.sessions_max:
            raise ShareSessionLimitReached(f"the limit of {len(self._sessions)} share sessions is reached")
        session = ShareSession(
            group, member, connection, replaces_older=replaces_older, keeps_leases=keeps_leases
        )
        before = self._sessions.get((group, member))
        self._check_limits(session, add, removed_count=0 if before is None else len(before))
        if before is not None:
            self._remove(before)
        self._change(session, add, ())
        self._sessions[group, member] = session
        return session

    def acknowledge(self, group: str, member: str, epoch: int, *, connection: Any) -> ShareSession:
        """Handle a ShareAcknowledge with this session epoch; returns its session. The epoch -1 ends the session.

        Raises `ShareSessionNotFound`, `InvalidShareSessionEpoch` (also for epoch 0).
        """
        if epoch == FINAL_SHARE_SESSION_EPOCH:
            return self.end(group, member)
        if epoch == OPEN_SHARE_SESSION_EPOCH:
            raise InvalidShareSessionEpoch("a share session starts with a ShareFetch")
        session = self._find_session(group, member, epoch)
        self._advance_epoch(session, connection)
        return session

    def end(self, group: str, member: str) -> ShareSession:
        """End a session and return it; the caller releases the leases of its member. Raises `ShareSessionNotFound`."""
        session = self._sessions.get((group, member))
        if session is None:
            raise ShareSessionNotFound(f"member {member} of group {group} has no share session here")
        self._remove(session)
        return session

    def find(self, group: str, member: str, epoch: int) -> ShareSession | None:
        """Return the session of a member if its next request has this epoch, otherwise None."""
        session = self._sessions.get((group, member))
        return session if session is not None and session.epoch == epoch else None

    def advance(self, session: ShareSession, connection: Any) -> None:
        """Handle a request, with the right epoch, that changes no partitions of the session."""
        self._advance_epoch(session, connection)

    def has_session(self, group: str, member: str) -> bool:
        """Whether the member has a session on this broker."""
        return (group, member) in self._sessions

    def end_sessions_of_connection(self, connection: Any) -> list[ShareSession]:
        """End the sessions of a closed connection and return them; the caller releases the leases of their members."""
        ended = [session for session in self._sessions.values() if session.connection is connection]
        for session in ended:
            session.is_disconnected = True
            self._remove(session)
        return ended

    def _remove(self, session: ShareSession) -> None:
        del self._sessions[session.group, session.member]
        self._partition_count -= len(session)

    def _change(
        self, session: ShareSession, add: list[TopicIdPartition], forget: Iterable[TopicIdPartition]
    ) -> None:
        before = len(session)
        session.change(add, forget)
        self._partition_count += len(session) - before

    def _find_session(self, group: str, member: str, epoch: int) -> ShareSession:
        session = self._sessions.get((group, member))
        if session is None:
            raise ShareSessionNotFound(f"member {member} of group {group} has no share session here")
        if epoch != session.epoch:
            raise InvalidShareSessionEpoch(f"share session epoch {epoch}, expected {session.epoch}")
        return session

    def _check_limits(
        self, session: ShareSession, add: list[TopicIdPartition], *, removed_count: int = 0
    ) -> None:
        if len(session) + len(add) > self.partitions_max:
            raise InvalidRequest(f"a share session has at most {self.partitions_max} partitions")
        if self._partition_count - removed_count + len(add) > self.all_partitions_max:
            raise ShareSessionLimitReached(
                f"share sessions have {self._partition_count} partitions, and at most {self.all_partitions_max}"
            )

    @staticmethod
    def _advance_epoch(session: ShareSession, connection: Any) -> None:
        session.epoch = session.epoch + 1 if session.epoch < SHARE_SESSION_EPOCH_MAX else 1
        session.connection = connection
        session.replaces_older = False
