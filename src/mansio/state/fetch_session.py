"""Fetch sessions between brokers (KIP-227): a follower names a partition in a request only if something changed for it,
and the leader answers only partitions for which something changed.

    FollowerFetchSession (follower)                    FetchSession (leader), in FetchSessions
      ── id 0, epoch 0, all partitions ────────────►     created; every partition has changed
      ◄── id, all partitions ───────────────────────
      ── id, epoch 1, new positions, forgotten ─────►    2 is the next epoch
      ◄── id, partitions with news ─────────────────     ... after 2**31 - 1 follows 1

A request with the epoch 0 also ends the session that it names. After any error the follower sends such a request: a
response may be lost, so neither side knows what the other one has.

The leader keeps the partitions that *have changed*: a read of the others at the position of the follower would give
nothing that the follower lacks. A partition marks its entries in sessions when that may end, so a request costs what
changed, not what the session has. A request confirms the positions of all partitions of its session. The leader records
this when it reads the changed ones; for the others it matters only when they change, see `SessionPartition.mark`.

Invariants:
* A partition that has not changed has nothing for the follower: no records, no error, no divergence, and the high
  watermark and log start offset that the follower was sent last.
* Each partition that a request names is answered in its response.
* A session belongs to one session of one broker; a request of another one does not find it.
* The follower never claims a position of a partition that it has given up: its next request forgets the partition.
* There are at most `slots_max` sessions with `partitions_max` partitions each, and `SESSIONS_PER_BROKER_MAX` of one
  broker.

Source: KIP-227, as Apache Kafka's FetchSession and FetchSessionHandler. Unlike there, a partition that a request names
is always answered, and the leader does not read partitions that have not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from mansio.errors import FetchSessionNotFound, FetchSessionTopicIdError, InvalidFetchSessionEpoch
from mansio.wire.field_values import (
    FETCH_SESSION_EPOCH_MAX,
    FINAL_FETCH_SESSION_EPOCH,
    NO_FETCH_SESSION_ID,
    OPEN_FETCH_SESSION_EPOCH,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.errors import MansioError
    from mansio.state.broker_handshake import BrokerIdentity
    from mansio.state.replica import ReplicaState

    Topics = Sequence[tuple[str | None, bytes | None, Sequence["WantedPartition"]]]
    ForgottenTopics = Sequence[tuple[str | None, bytes | None, Sequence[int]]]

SLOTS_MAX: Final = 1000
"""Maximum number of sessions, as Kafka's default of max.incremental.fetch.session.cache.slots."""
PARTITIONS_MAX: Final = 100_000
"""Maximum number of partitions in a session."""
SESSIONS_PER_BROKER_MAX: Final = 2
"""A follower has one fetcher for replicas in sync and one for those that are behind. A third session replaces the one
that was used least recently: the follower has lost the response with the id."""
UNUSED_MS_MIN: Final = 120_000
"""A session that was not used for this time gives way to a new one, as with Kafka's
min.incremental.fetch.session.eviction.ms."""

UNKNOWN: Final = -1

Position = TypeVar("Position")


def next_epoch(epoch: int) -> int:
    """Return the epoch of the request that follows the one with `epoch`."""
    return epoch + 1 if epoch < FETCH_SESSION_EPOCH_MAX else OPEN_FETCH_SESSION_EPOCH + 1


class WantedPartition(Protocol):
    """What a request has about one partition."""

    @property
    def index(self) -> int: ...
    @property
    def current_leader_epoch(self) -> int: ...
    @property
    def fetch_offset(self) -> int: ...
    @property
    def last_fetched_epoch(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...


class Answer(Protocol):
    """The result of a read of one partition."""

    @property
    def error(self) -> MansioError | None: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def diverging(self) -> tuple[int, int] | None: ...


class Waits(Protocol):
    """The waits of a partition that a session watches."""

    def park_follower(self, wake: Callable[[], None]) -> None: ...
    def unpark_follower(self, wake: Callable[[], None]) -> None: ...
    def add_mark(self, mark: Callable[[], None]) -> None: ...
    def remove_mark(self, mark: Callable[[], None]) -> None: ...


class Waiter(Protocol):
    """A request of a session that waits for changes."""

    def wake(self) -> None:
        """Read the session again soon."""

    def reject(self, error: MansioError) -> None:
        """Answer with the error."""


class SessionPartition:
    """One partition of a session: the position of the follower, and what the follower was sent last. It is a
    `WantedPartition`, so that the session can be read like a request."""

    __slots__ = (
        "_follower",
        "_sent_high_watermark",
        "_sent_start_offset",
        "_session",
        "current_leader_epoch",
        "fetch_offset",
        "index",
        "last_fetched_epoch",
        "log_start_offset",
        "max_bytes",
        "topic_id",
        "watched",
    )

    def __init__(self, session: FetchSession, topic_id: bytes, wanted: WantedPartition) -> None:
        self._session = session
        self.topic_id = topic_id
        self.index = wanted.index
        self.watched: Waits | None = None
        """The waits of the partition that tell this object of changes."""
        self._follower: ReplicaState | None = None
        self.name(wanted)

    def name(self, wanted: WantedPartition) -> None:
        """Take what a request has; its response has to answer. The partition comes after the others that have
        changed."""
        self.current_leader_epoch = wanted.current_leader_epoch
        self.fetch_offset = wanted.fetch_offset
        self.last_fetched_epoch = wanted.last_fetched_epoch
        self.log_start_offset = wanted.log_start_offset
        self.max_bytes = wanted.max_bytes
        self._sent_high_watermark = self._sent_start_offset = UNKNOWN
        changed = self._session.changed
        if self in changed:
            del changed[self]
        else:
            self._confirm()
        changed[self] = None

    def watch(self, waits: Waits) -> None:
        """Have these waits tell this object of changes, and no others."""
        self.unwatch()
        self.watched = waits
        waits.park_follower(self.wake)

    def unwatch(self) -> None:
        if self.watched is not None:
            self.watched.unpark_follower(self.wake)
            self.watched.remove_mark(self.mark)
            self.watched = None

    def wake(self) -> None:
        """Mark the partition, and have the waiting request read it."""
        session = self._session
        if self not in session.changed:
            self.mark()
        waiter = session.waiter
        if waiter is not None:
            waiter.wake()

    def mark(self) -> None:
        """Record that the partition may have news for the follower.

        Until now it had none: the follower had all records, and its requests since then have confirmed this."""
        changed = self._session.changed
        if self not in changed:
            changed[self] = None
            self._confirm()

    def _confirm(self) -> None:
        if self._follower is not None:
            self._follower.repeat_fetch(self._session.requested_ms)
            self._follower = None

    def record_answer(self, answer: Answer) -> bool:
        """Record that a response is being sent; return whether it has to contain `answer`."""
        if answer.error is not None:
            self._sent_high_watermark = self._sent_start_offset = UNKNOWN
            return True
        high_watermark, start_offset = answer.high_watermark, answer.log_start_offset
        is_news = (
            high_watermark != self._sent_high_watermark
            or start_offset != self._sent_start_offset
            or answer.size_bytes > 0
            or answer.diverging is not None
        )
        self._sent_high_watermark, self._sent_start_offset = high_watermark, start_offset
        return is_news

    def record_agreement(self, follower: ReplicaState | None) -> None:
        """Handle a response without news for a follower that has all records. `follower`: the leader's knowledge of it,
        None if it has none.

        The partition stays among those that have changed until the leader knows the position: a change of the in-sync
        set forgets it, and only a later request reports it again."""
        if follower is not None and follower.has_position(
            self._session.owner.broker_epoch, self.fetch_offset, self.log_start_offset
        ):
            self._session.changed.pop(self, None)
            self._follower = follower
            if self.watched is not None:
                self.watched.add_mark(self.mark)

    def leave(self) -> None:
        """End the part of the partition in the session."""
        self.unwatch()
        self._session.changed.pop(self, None)
        self._confirm()


class FetchSession:
    """The leader's side of the session of one fetcher. `owner`: the broker whose session it is."""

    __slots__ = (
        "changed",
        "epoch",
        "is_new",
        "owner",
        "partitions",
        "requested_ms",
        "session_id",
        "waiter",
    )

    def __init__(self, session_id: int, owner: BrokerIdentity, now_ms: float) -> None:
        self.session_id = session_id
        self.owner = owner
        self.epoch = next_epoch(OPEN_FETCH_SESSION_EPOCH)
        """Epoch that the next request must have."""
        self.is_new = True
        """Whether only the request that created the session has arrived; its response has all partitions."""
        self.requested_ms = now_ms
        """Monotonic time of the last request in milliseconds."""
        self.waiter: Waiter | None = None
        """The request that waits for changes."""
        self.changed: dict[SessionPartition, None] = {}
        """The partitions that may have news for the follower, in the order in which they are served."""
        self.partitions: dict[tuple[bytes, int], SessionPartition] = {}

    def __len__(self) -> int:
        """Return the number of partitions in the session."""
        return len(self.partitions)

    def name(self, topics: Topics) -> None:
        """Add the partitions, or take their new positions."""
        partitions = self.partitions
        for _, topic_id, wanted in topics:
            assert topic_id is not None
            for one in wanted:
                known = partitions.get((topic_id, one.index))
                if known is None:
                    partitions[topic_id, one.index] = SessionPartition(self, topic_id, one)
                else:
                    known.name(one)

    def advance(self, topics: Topics, forgotten: ForgottenTopics, now_ms: float) -> None:
        """Take a request with the right epoch."""
        for _, topic_id, indexes in forgotten:
            for index in indexes:
                left = self.partitions.pop((topic_id or b"", index), None)
                if left is not None:
                    left.leave()
        self.name(topics)
        self.epoch = next_epoch(self.epoch)
        self.is_new = False
        self.requested_ms = now_ms

    def wait(self, waiter: Waiter | None) -> None:
        """Have changes wake a request, None for no request."""
        self.waiter = waiter

    def reject_waiting(self, error: MansioError) -> None:
        """Answer the request that waits, if any, with an error."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.reject(error)

    def end(self) -> None:
        """End the session."""
        for one in self.partitions.values():
            one.leave()
        self.partitions.clear()
        self.reject_waiting(FetchSessionNotFound(f"fetch session {self.session_id} has ended"))

    def wanted(self) -> list[tuple[None, bytes, list[SessionPartition]]]:
        """Return the partitions to read now, as the topics of a request."""
        by_topic: dict[bytes, list[SessionPartition]] = {}
        topics: list[tuple[None, bytes, list[SessionPartition]]] = []
        for one in self.changed:
            partitions = by_topic.get(one.topic_id)
            if partitions is None:
                partitions = by_topic[one.topic_id] = []
                topics.append((None, one.topic_id, partitions))
            partitions.append(one)
        return topics


class FetchSessions:
    """The sessions of one leader (Kafka's FetchSessionCache)."""

    __slots__ = ("_next_id", "_sessions", "eviction_count", "partitions_max", "slots_max")

    def __init__(
        self, first_id: int, *, slots_max: int = SLOTS_MAX, partitions_max: int = PARTITIONS_MAX
    ) -> None:
        """`first_id`: differs between the processes of a broker, so that a follower does not mistake a session for one
        of an earlier process."""
        self.slots_max = slots_max
        self.partitions_max = partitions_max
        self.eviction_count = 0
        """Number of sessions that gave way to a new one."""
        self._next_id = first_id
        self._sessions: dict[int, FetchSession] = {}  # the least recently used one first

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def begin(
        self,
        session_id: int,
        epoch: int,
        owner: BrokerIdentity,
        topics: Topics,
        forgotten: ForgottenTopics,
        now_ms: float,
    ) -> FetchSession | None:
        """Take a request of a follower; return its session, None if it gets none.

        Raises `FetchSessionNotFound`, `InvalidFetchSessionEpoch`, `FetchSessionTopicIdError`; these change nothing,
        except that a session with too many partitions ends.
        """
        if epoch in (OPEN_FETCH_SESSION_EPOCH, FINAL_FETCH_SESSION_EPOCH):
            if session_id != NO_FETCH_SESSION_ID:
                self._end(session_id, owner)
            return None if epoch == FINAL_FETCH_SESSION_EPOCH else self._create(owner, topics, now_ms)
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise FetchSessionNotFound(f"there is no fetch session {session_id} of broker {owner.node_id}")
        if epoch != session.epoch:
            raise InvalidFetchSessionEpoch(f"fetch session epoch {epoch}, expected {session.epoch}")
        for name, _, _ in topics:
            if name is not None:
                raise FetchSessionTopicIdError(f"fetch session {session_id} has topic ids")
        if session.waiter is not None:
            session.reject_waiting(InvalidFetchSessionEpoch("the fetch session has a newer request"))
        session.advance(topics, forgotten, now_ms)
        if len(session.partitions) > self.partitions_max:
            self._end(session_id, owner)
            raise FetchSessionNotFound(f"a fetch session has at most {self.partitions_max} partitions")
        del self._sessions[session_id]
        self._sessions[session_id] = session
        return session

    def end_all_of(self, owner: BrokerIdentity) -> None:
        """End the sessions of a broker whose own session has ended."""
        for one in tuple(self._sessions.values()):
            if one.owner == owner:
                self._end(one.session_id, owner)

    def _create(self, owner: BrokerIdentity, topics: Topics, now_ms: float) -> FetchSession | None:
        is_by_name = any(name is not None for name, _, _ in topics)
        if is_by_name or sum(len(wanted) for _, _, wanted in topics) > self.partitions_max:
            return None
        own = [one for one in self._sessions.values() if one.owner == owner]
        if len(own) >= SESSIONS_PER_BROKER_MAX:
            self._evict(own[0])
        elif len(self._sessions) >= self.slots_max:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now_ms - oldest.requested_ms < UNUSED_MS_MIN:
                return None
            self._evict(oldest)
        session = self._sessions[self._next_id] = FetchSession(self._next_id, owner, now_ms)
        self._next_id = next_epoch(self._next_id)
        session.name(topics)
        return session

    def _evict(self, session: FetchSession) -> None:
        self.eviction_count += 1
        self._end(session.session_id, session.owner)

    def _end(self, session_id: int, owner: BrokerIdentity) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            del self._sessions[session_id]
            session.end()


class SessionStep(NamedTuple):
    """The session fields of a request."""

    session_id: int
    epoch: int
    forgotten: Iterable[tuple[bytes, int]] = ()


class FollowerFetchSession(Generic[Position]):
    """The follower's side of a session with one leader (Kafka's FetchSessionHandler). `Position`: what a request has
    about a partition, compared with `==`."""

    __slots__ = ("_epoch", "_forgotten", "_is_refused", "_positions", "_session_id")

    def __init__(self) -> None:
        self._session_id = NO_FETCH_SESSION_ID
        self._epoch = OPEN_FETCH_SESSION_EPOCH
        self._is_refused = False
        self._positions: dict[tuple[bytes, int], Position] = {}
        self._forgotten: dict[tuple[bytes, int], None] = {}

    @property
    def is_full(self) -> bool:
        """Whether the next request has to name all partitions."""
        return self._epoch == OPEN_FETCH_SESSION_EPOCH

    @property
    def is_refused(self) -> bool:
        """Whether the leader gave no session in its last response to a request for one."""
        return self._is_refused

    def __len__(self) -> int:
        """Return the number of partitions in the session."""
        return len(self._positions)

    def restart(self) -> None:
        """Begin a request that names all partitions."""
        self._positions.clear()
        self._forgotten.clear()

    def name(self, key: tuple[bytes, int], position: Position) -> bool:
        """Set the position of a partition (topic id, index); return whether the next request has to name it."""
        if self._positions.get(key) == position:
            return False
        self._positions[key] = position
        self._forgotten.pop(key, None)
        return True

    def forget(self, key: tuple[bytes, int]) -> None:
        """Give up a partition; the next request reports this to the leader, also if the request that opens the session
        is under way."""
        if self._positions.pop(key, None) is not None:
            self._forgotten[key] = None

    def disown(self, key: tuple[bytes, int]) -> None:
        """Report to the leader that a partition of its response is not in the session."""
        self._forgotten[key] = None

    def next_step(self) -> SessionStep:
        """Return the session fields of the next request, which is sent."""
        if not self._forgotten:
            return SessionStep(self._session_id, self._epoch)
        forgotten, self._forgotten = self._forgotten, {}
        return SessionStep(self._session_id, self._epoch, forgotten)

    def last_step(self) -> SessionStep | None:
        """Return the session fields of a request without partitions that ends the session; None if there is none."""
        if self.is_full:
            return None
        step = SessionStep(self._session_id, FINAL_FETCH_SESSION_EPOCH)
        self.restart()
        self._session_id, self._epoch = NO_FETCH_SESSION_ID, OPEN_FETCH_SESSION_EPOCH
        return step

    def on_response(self, session_id: int) -> None:
        """Handle a response without an error."""
        if session_id == NO_FETCH_SESSION_ID:
            self._is_refused = self.is_full
            self._session_id, self._epoch = NO_FETCH_SESSION_ID, OPEN_FETCH_SESSION_EPOCH
            return
        self._is_refused = False
        self._session_id, self._epoch = session_id, next_epoch(self._epoch)

    def on_error(self, error: Any) -> None:
        """Handle an error, or a response that was lost: the next request ends the session and begins another one."""
        if isinstance(error, FetchSessionNotFound):
            self._session_id = NO_FETCH_SESSION_ID
        self._is_refused = False
        self._epoch = OPEN_FETCH_SESSION_EPOCH
