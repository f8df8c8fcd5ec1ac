"""Share sessions (KIP-932): the partitions that each member of a share group fetches from this broker.

A member has one session on each broker it fetches from. Epoch 0 opens a session, each further request has the
epoch that the broker expects, -1 ends it. Repeated and late requests, and requests of an earlier incarnation of
the member, are detected by their epoch.

    no session ──── 0 ───► open, next 1 ──── 1, 2, ... ───► open, next one more (after 2**31 - 1 follows 1)
         ▲                      │  0: the old one is replaced
         └── -1, connection lost┘

Invariants: a member of a group has at most one session. There are at most `sessions_max` sessions, with at most
`partitions_max` partitions each and `all_partitions_max` in total. A refused request changes nothing. The caller
that ends a session releases the leases of its member.

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

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.consumer_group.types import TopicPartition

OPEN_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
PARTITIONS_MAX: Final = 20_000
ALL_PARTITIONS_MAX: Final = 1_000_000
"""Of all sessions: the existence of partitions is not checked before they are fetched."""

_EPOCH_MAX: Final = 2**31 - 1


class Session:
    """Session of one member. `replaced`: it replaced an older one, whose leases are to be released."""

    __slots__ = ("_partitions", "_turn", "connection", "epoch", "group", "member", "replaced")

    def __init__(self, group: str, member: str, connection: Any, *, replaced: bool) -> None:
        self.group = group
        self.member = member
        self.connection = connection
        self.epoch = 1
        """Epoch expected in the next request."""
        self.replaced = replaced
        self._partitions: dict[TopicPartition, None] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._partitions)

    def partitions(self) -> list[TopicPartition]:
        """The partitions, rotated with each call, so that none is always served last."""
        found = list(self._partitions)
        if not found:
            return found
        self._turn = (self._turn + 1) % len(found)
        return found[self._turn :] + found[: self._turn]

    def missing(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Those of the partitions that are not in the session."""
        return [each for each in partitions if each not in self._partitions]

    def change(self, add: Iterable[TopicPartition], forget: Iterable[TopicPartition]) -> None:
        for partition in forget:
            self._partitions.pop(partition, None)
        self._partitions.update(dict.fromkeys(add))


class Sessions:
    """Sessions of one broker (Kafka's ShareSessionCache). A `connection` is any object that identifies it."""

    __slots__ = ("_partitions", "_sessions", "all_partitions_max", "partitions_max", "sessions_max")

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
        self._partitions = 0
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def fetch(
        self,
        group: str,
        member: str,
        epoch: int,
        add: Iterable[TopicPartition],
        forget: Iterable[TopicPartition],
        *,
        has_acks: bool,
        connection: Any,
    ) -> Session:
        """A ShareFetch in this epoch; an epoch of -1 ends the session, and its partitions are ignored.

        Raises `InvalidRequest` (a new session has nothing to acknowledge or forget), `ShareSessionNotFound`,
        `InvalidShareSessionEpoch`, `ShareSessionLimitReached`.
        """
        if epoch == FINAL_EPOCH:
            return self.final(group, member)
        add, forget = list(add), list(forget)
        if epoch != OPEN_EPOCH:
            session = self._checked(group, member, epoch)
            new = session.missing(add)  # a request also names the partitions that it only acknowledges
            if new or forget:
                self._check_limits(session, new)
                self._change(session, add, forget)
            self._next(session, connection)
            return session
        if has_acks or forget:
            raise InvalidRequest("a new share session has nothing to acknowledge, and nothing to forget")
        replaced = (group, member) in self._sessions
        if not replaced and len(self._sessions) >= self.sessions_max:
            raise ShareSessionLimitReached(f"the limit of {len(self._sessions)} share sessions is reached")
        session = Session(group, member, connection, replaced=replaced)
        before = self._sessions.get((group, member))
        self._check_limits(session, add, leaving=0 if before is None else len(before))
        if before is not None:
            self._drop(before)
        self._change(session, add, ())
        self._sessions[group, member] = session
        return session

    def acknowledge(self, group: str, member: str, epoch: int, *, connection: Any) -> Session:
        """A ShareAcknowledge in this epoch; an epoch of -1 ends the session.

        Raises `ShareSessionNotFound`, `InvalidShareSessionEpoch` (also for 0).
        """
        if epoch == FINAL_EPOCH:
            return self.final(group, member)
        if epoch == OPEN_EPOCH:
            raise InvalidShareSessionEpoch("a share session starts with a ShareFetch")
        session = self._checked(group, member, epoch)
        self._next(session, connection)
        return session

    def final(self, group: str, member: str) -> Session:
        """End a session; the leases of its member are to be released. Raises `ShareSessionNotFound`."""
        session = self._sessions.get((group, member))
        if session is None:
            raise ShareSessionNotFound(f"member {member} of group {group} has no share session here")
        self._drop(session)
        return session

    def holds(self, group: str, member: str) -> bool:
        """Whether the member has a session here."""
        return (group, member) in self._sessions

    def lost(self, connection: Any) -> list[Session]:
        """The sessions that ended with a connection; the leases of their members are to be released."""
        ended = [session for session in self._sessions.values() if session.connection is connection]
        for session in ended:
            self._drop(session)
        return ended

    def _drop(self, session: Session) -> None:
        del self._sessions[session.group, session.member]
        self._partitions -= len(session)

    def _change(self, session: Session, add: list[TopicPartition], forget: Iterable[TopicPartition]) -> None:
        before = len(session)
        session.change(add, forget)
        self._partitions += len(session) - before

    def _checked(self, group: str, member: str, epoch: int) -> Session:
        session = self._sessions.get((group, member))
        if session is None:
            raise ShareSessionNotFound(f"member {member} of group {group} has no share session here")
        if epoch != session.epoch:
            raise InvalidShareSessionEpoch(f"share session epoch {epoch}, expected {session.epoch}")
        return session

    def _check_limits(self, session: Session, add: list[TopicPartition], *, leaving: int = 0) -> None:
        if len(session) + len(add) > self.partitions_max:
            raise InvalidRequest(f"a share session has at most {self.partitions_max} partitions")
        if self._partitions - leaving + len(add) > self.all_partitions_max:
            raise ShareSessionLimitReached(
                f"share sessions have {self._partitions} partitions, and at most {self.all_partitions_max}"
            )

    @staticmethod
    def _next(session: Session, connection: Any) -> None:
        session.epoch = session.epoch + 1 if session.epoch < _EPOCH_MAX else 1
        session.connection = connection
        session.replaced = False
