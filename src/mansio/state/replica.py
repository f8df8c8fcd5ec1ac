"""Replication progress of one partition: what the leader knows of its followers, what a follower knows of its leader.

Pure. The leader computes the high watermark: the smallest flushed (fdatasync) end offset of all in-sync replicas, so
that no record becomes readable that a power failure or the loss of a broker could remove. A follower uses the leader's
value, but never more than it has flushed itself. A single replica is the smallest case of the same rule.

    committed in-sync set     the set in the metadata store
    pending in-sync set       proposed by this leader to the store, outcome not known yet
    union of both             must have a record before it is committed: an expansion counts when it is proposed, a
                              shrink when it is committed

Invariants:
* `high_watermark` never passes the flushed end of its replica; it decreases only when a follower truncates its log.
* The high watermark does not move while a member of either set has not reported its end in this leader epoch, while the
  committed set has fewer than `min_insync_replicas` members, and while `is_session_valid` returns False.

Sources: KIP-101, KIP-497 (both sets count), KIP-903 (broker epochs), KIP-966 (no progress below min.insync.replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNKNOWN = -1
NO_LEADER = -1


class ReplicaState:
    """A leader's knowledge of one follower in this leader epoch. Times are milliseconds of a monotonic clock."""

    __slots__ = (
        "broker_epoch",
        "caught_up_ms",
        "durable_end",
        "durable_start",
        "last_fetch_ms",
        "leader_end",
        "reported_start_offset",
    )

    def __init__(self, now_ms: float) -> None:
        self.broker_epoch = UNKNOWN
        """The broker epoch of its last fetch."""
        self.durable_end = UNKNOWN
        """Its flushed end offset as of that fetch."""
        self.caught_up_ms = now_ms
        """When it last had everything that the leader had."""
        self.last_fetch_ms = now_ms
        self.leader_end = UNKNOWN
        """The end of the leader's log at the last fetch."""
        self.durable_start = UNKNOWN
        """Its flushed log start offset as of that fetch."""
        self.reported_start_offset = UNKNOWN
        """The log start offset of the leader that was last sent to it."""


class ReplicationProgress:
    """The leader's view of one partition's replicas. Ends are exclusive: the next offset to be written."""

    __slots__ = (
        "_followers",
        "_is_session_valid",
        "_is_sole_member",
        "_local_end",
        "_required_followers",
        "epoch_start_offset",
        "high_watermark",
        "in_sync",
        "leader",
        "leader_epoch",
        "min_insync_replicas",
        "pending",
        "waits_for_followers",
    )

    def __init__(
        self,
        leader: int,
        leader_epoch: int,
        in_sync: frozenset[int],
        high_watermark: int,
        *,
        durable_end: int | None = None,
        epoch_start_offset: int = 0,
        replicas: Iterable[int] = (),
        min_insync_replicas: int = 1,
        is_session_valid: Callable[[], bool] | None = None,
        now_ms: float = 0,
    ) -> None:
        """`high_watermark` is the highest value this broker knew before; `durable_end` is its own flushed end (default:
        `high_watermark`); `epoch_start_offset` is the end of its log when it became leader.
        """
        if leader not in in_sync:
            raise ValueError(f"leader {leader} is not in the in-sync set {sorted(in_sync)}")
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.epoch_start_offset = epoch_start_offset
        self.in_sync = in_sync
        self.pending: frozenset[int] | None = None
        self.min_insync_replicas = min_insync_replicas
        self._is_session_valid = is_session_valid
        self._local_end = high_watermark if durable_end is None else durable_end
        self._followers = {node: ReplicaState(now_ms) for node in {*replicas, *in_sync} if node != leader}
        self._required_followers: tuple[ReplicaState, ...] = ()
        self.waits_for_followers = False
        """Whether the high watermark depends on any follower."""
        self._is_sole_member = False
        self._update_required_followers()
        self.advance()

    # Flushed ends

    def flushed(self, end_offset: int) -> bool:
        """The leader itself has flushed everything below `end_offset`. Returns True if the high watermark moved."""
        self._local_end = end_offset
        if self._is_sole_member:
            if end_offset <= self.high_watermark:
                return False
            self.high_watermark = end_offset
            return True
        return self.advance()

    def on_follower_fetch(
        self,
        node_id: int,
        broker_epoch: int,
        durable_end: int,
        leader_end: int,
        now_ms: float,
        durable_start: int = UNKNOWN,
    ) -> bool:
        """Record a follower's fetch at `durable_end`, which confirms that it has flushed everything below. Returns True
        if the high watermark moved. `leader_end` is the end of the leader's log now, `durable_start` the follower's log
        start offset.

        A fetch from an older broker epoch changes nothing. Raises `KeyError` for a broker without a replica.
        """
        follower = self._followers[node_id]
        if broker_epoch < follower.broker_epoch:
            return False
        if durable_end >= leader_end:
            follower.caught_up_ms = now_ms
        elif broker_epoch == follower.broker_epoch and durable_end >= follower.leader_end:
            follower.caught_up_ms = max(follower.caught_up_ms, follower.last_fetch_ms)
        follower.broker_epoch = broker_epoch
        follower.durable_end = durable_end
        follower.durable_start = durable_start
        follower.last_fetch_ms, follower.leader_end = now_ms, leader_end
        return self.advance()

    def advance(self) -> bool:
        """Move the high watermark as far as allowed. Returns True if it moved."""
        lowest = self._local_end
        for follower in self._required_followers:
            if follower.durable_end < lowest:
                lowest = follower.durable_end
        if lowest <= self.high_watermark or self.is_under_min_isr:
            return False
        if self._is_session_valid is not None and not self._is_session_valid():
            return False
        self.high_watermark = lowest
        return True

    @property
    def is_under_min_isr(self) -> bool:
        """The committed in-sync set is smaller than `min_insync_replicas`, so nothing can be committed."""
        return len(self.in_sync) < self.min_insync_replicas

    @property
    def is_session_uncertain(self) -> bool:
        """The broker's session may have expired, so nothing may be committed."""
        return self._is_session_valid is not None and not self._is_session_valid()

    @property
    def is_high_watermark_known(self) -> bool:
        """The high watermark is at or above everything that earlier leaders committed (KIP-207)."""
        return self.high_watermark >= self.epoch_start_offset

    def starts_at(self, offset: int) -> bool:
        """The logs of all other members start at or above `offset`, flushed."""
        return all(follower.durable_start >= offset for follower in self._required_followers)

    def followers(self) -> dict[int, ReplicaState]:
        """The followers by broker id; read-only for callers."""
        return self._followers

    # In-sync set

    def can_join_isr(self, node_id: int) -> bool:
        """This replica is not in sync and meets all conditions to be. Only valid while no change is pending."""
        follower = self._followers.get(node_id)
        return (
            follower is not None
            and node_id not in self.in_sync
            and follower.durable_end >= self.high_watermark
            and follower.durable_end >= self.epoch_start_offset
        )

    def lagging(self, now_ms: float, lag_ms_max: float, leader_end: int) -> frozenset[int]:
        """The members that have not had the leader's whole log for more than `lag_ms_max`."""
        return frozenset(
            node
            for node in self.in_sync
            if node != self.leader
            and (follower := self._followers[node]).durable_end < leader_end
            and now_ms - follower.caught_up_ms > lag_ms_max
        )

    def propose(self, in_sync: frozenset[int]) -> None:
        """Record a proposal to the metadata store; it may be committed at any time from now on."""
        if self.leader not in in_sync:
            raise ValueError(f"leader {self.leader} cannot leave the in-sync set")
        self.pending = in_sync
        self._update_required_followers()

    def committed(self, in_sync: frozenset[int], now_ms: float = 0) -> bool:
        """The metadata store has this in-sync set, and no earlier proposal can be committed any more. Returns True if
        the high watermark moved."""
        for node in in_sync - self.in_sync - {self.leader}:
            follower = self._followers.setdefault(node, ReplicaState(now_ms))
            follower.caught_up_ms = max(follower.caught_up_ms, now_ms)  # its lag is measured from now on
        for node in self.in_sync - in_sync:
            self._followers[node].durable_end = UNKNOWN  # only later fetches can bring it back
        self.in_sync = in_sync
        self.pending = None
        self._update_required_followers()
        return self.advance()

    def assigned(self, replicas: Iterable[int], now_ms: float) -> None:
        """Set the brokers that hold a replica."""
        wanted = {*replicas, *self.in_sync, *(self.pending or ())} - {self.leader}
        self._followers = {node: self._followers.get(node) or ReplicaState(now_ms) for node in wanted}
        self._update_required_followers()

    def require(self, min_insync_replicas: int) -> bool:
        """Set the number of members required for a commit. Returns True if the high watermark moved."""
        self.min_insync_replicas = min_insync_replicas
        self._update_required_followers()
        return self.advance()

    def _update_required_followers(self) -> None:
        others = (self.in_sync | (self.pending or frozenset())) - {self.leader}
        self._required_followers = tuple(self._followers[node] for node in others)
        self.waits_for_followers = bool(others)
        self._is_sole_member = not others and self._is_session_valid is None and not self.is_under_min_isr


class FollowerReplica:
    """A follower's view of one partition: who leads it, and how much of its own log is committed.

    Invariant: `high_watermark` is not above what this replica has flushed, and decreases only on truncation.
    """

    __slots__ = ("_leader_high_watermark", "_local_end", "high_watermark", "leader", "leader_epoch")
    waits_for_followers: Final = False

    def __init__(self, leader: int, leader_epoch: int, high_watermark: int, durable_end: int) -> None:
        """`leader` is -1 when no leader is known."""
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._leader_high_watermark = high_watermark
        self._local_end = durable_end

    def flushed(self, end_offset: int) -> bool:
        """This replica has flushed everything below `end_offset`. Returns True if the high watermark moved."""
        self._local_end = end_offset
        return self._advance()

    def on_leader_high_watermark(self, leader_high_watermark: int) -> bool:
        """The leader reported its high watermark. Returns True if this replica's moved."""
        self._leader_high_watermark = max(self._leader_high_watermark, leader_high_watermark)
        return self._advance()

    def truncated(self, start_offset: int, end_offset: int) -> bool:
        """The log now starts and ends at these offsets. Returns False if that removed committed records."""
        self._local_end = end_offset
        intact = end_offset >= self.high_watermark
        self.high_watermark = max(start_offset, min(self.high_watermark, end_offset))
        if not intact:
            self._leader_high_watermark = self.high_watermark
        return intact

    def _advance(self) -> bool:
        lowest = min(self._leader_high_watermark, self._local_end)
        if lowest <= self.high_watermark:
            return False
        self.high_watermark = lowest
        return True
