"""Replication progress of one partition: the leader's knowledge of its followers, and a follower's knowledge of its
leader.

This module does no I/O. The leader computes the high watermark: the smallest flushed (fdatasync) end offset of all
in-sync replicas, so that readers see only records that survive a power failure and the loss of a broker. A follower
uses the leader's value, but at most its own flushed end offset. A partition with a single replica follows the same
rule.

    committed in-sync set     the set in the metadata store
    pending in-sync set       proposed by this leader to the store, outcome not known yet
    union of both             replicas that must have a record before it is committed: a new member counts from its
                              proposal on, a removed member until the removal is committed

Invariants:
* `high_watermark` never exceeds the flushed end offset of its replica; it decreases only when a follower truncates its
  log.
* The high watermark does not advance while a member of either set has not fetched in this leader epoch, while the
  committed set has fewer than `min_insync_replicas` members, and while `is_session_valid` returns False.

Sources: KIP-101, KIP-497 (both sets count), KIP-903 (broker epochs), KIP-966 (no progress below min.insync.replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNKNOWN = -1
"""Epoch or offset that is not known."""
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
        "reported_high_watermark",
        "reported_start_offset",
    )

    def __init__(self, now_ms: float) -> None:
        self.broker_epoch = UNKNOWN
        """Broker epoch of the follower in its last fetch."""
        self.durable_end = UNKNOWN
        """Flushed end offset of the follower as of its last fetch."""
        self.caught_up_ms = now_ms
        """Time at which the follower last had all records of the leader's log."""
        self.last_fetch_ms = now_ms
        self.leader_end = UNKNOWN
        """End offset of the leader's log at the follower's last fetch."""
        self.durable_start = UNKNOWN
        """Flushed log start offset of the follower as of its last fetch."""
        self.reported_start_offset = UNKNOWN
        """Log start offset of the leader in the last response to the follower."""
        self.reported_high_watermark = UNKNOWN
        """High watermark that the follower has, or is being sent."""

    def has_position(self, broker_epoch: int, durable_end: int, durable_start: int) -> bool:
        """Whether this is what the follower reported last."""
        return (
            durable_end == self.durable_end
            and durable_start == self.durable_start
            and broker_epoch == self.broker_epoch
        )

    def repeat_fetch(self, now_ms: float) -> None:
        """Record that the follower confirmed its position until `now_ms`. Its fetch session did not name the partition,
        because the follower had all records of the leader's log."""
        self.last_fetch_ms = max(self.last_fetch_ms, now_ms)
        if self.leader_end <= self.durable_end != UNKNOWN:
            self.caught_up_ms = max(self.caught_up_ms, now_ms)


class ReplicationProgress:
    """The leader's knowledge of one partition's replicas. End offsets are exclusive: the next offset to be written.

    `in_sync` and `pending_in_sync`: node ids of the committed and the pending in-sync set; the latter is None if no
    change is pending.
    """

    __slots__ = (
        "_followers",
        "_has_earlier_leader",
        "_is_session_valid",
        "_is_sole_member",
        "_local_end",
        "_required_followers",
        "confirmed_end",
        "epoch_start_offset",
        "has_follower_readers",
        "high_watermark",
        "in_sync",
        "leader",
        "leader_epoch",
        "min_insync_replicas",
        "pending_in_sync",
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
        has_earlier_leader: Callable[[], bool] | None = None,
        now_ms: float = 0,
    ) -> None:
        """`has_earlier_leader` returns whether a broker may still act as an earlier leader; None: there is none.
        `high_watermark`: highest value that this broker knew before. `durable_end`: flushed end offset of its own
        log, by default `high_watermark`. `epoch_start_offset`: end offset of its log when it became leader."""
        if leader not in in_sync:
            raise ValueError(f"leader {leader} is not in the in-sync set {sorted(in_sync)}")
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.epoch_start_offset = epoch_start_offset
        self.in_sync = in_sync
        self.pending_in_sync: frozenset[int] | None = None
        self.min_insync_replicas = min_insync_replicas
        self._is_session_valid = is_session_valid
        self._has_earlier_leader = has_earlier_leader
        self._local_end = high_watermark if durable_end is None else durable_end
        self.confirmed_end = UNKNOWN
        """End offset that all members of both in-sync sets have confirmed in this leader epoch; UNKNOWN before."""
        self._followers = {node: ReplicaState(now_ms) for node in {*replicas, *in_sync} if node != leader}
        self._required_followers: tuple[ReplicaState, ...] = ()
        self.waits_for_followers = False
        """Whether the high watermark depends on any follower."""
        self.has_follower_readers = False
        """Whether clients read from followers in this leader epoch, so that these are sent each new high watermark."""
        self._is_sole_member = False
        self._update_required_followers()
        self.advance()

    def continue_in_epoch(self, leader_epoch: int) -> None:
        """Lead in a later epoch without a change of role: on a single node, where no other broker can have led
        meanwhile. An earlier epoch is ignored."""
        self.leader_epoch = max(self.leader_epoch, leader_epoch)

    # Flushed ends

    def on_local_flush(self, end_offset: int) -> bool:
        """Handle a flush of the leader's own log up to `end_offset`. Returns True if the high watermark has
        advanced."""
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
        """Handle a follower's fetch at the offset `durable_end`, which confirms that the follower has flushed all
        records below. Returns True if the high watermark has advanced. `leader_end`: current end offset of the leader's
        log. `durable_start`: log start offset of the follower.

        A fetch from an older broker epoch is ignored. Raises `KeyError` for a broker without a replica.
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
        """Advance the high watermark as far as the flushed end offsets allow. Returns True if it has advanced."""
        lowest = self._local_end
        for follower in self._required_followers:
            if follower.durable_end < lowest:
                lowest = follower.durable_end
        self.confirmed_end = lowest
        if lowest <= self.high_watermark or self.is_under_min_isr:
            return False
        if self._is_session_valid is not None and not self._is_session_valid():
            return False
        self.high_watermark = lowest
        return True

    @property
    def is_under_min_isr(self) -> bool:
        """Whether the committed in-sync set is smaller than `min_insync_replicas`, so that nothing can be committed."""
        return len(self.in_sync) < self.min_insync_replicas

    @property
    def is_session_uncertain(self) -> bool:
        """Whether the broker's session may have expired, so that nothing may be committed."""
        return self._is_session_valid is not None and not self._is_session_valid()

    @property
    def has_earlier_leader(self) -> bool:
        """Whether an earlier leader may not know that its session was ended early. It can commit nothing any more, but
        it may answer from memory: lease records, and tell positions of groups."""
        if self._has_earlier_leader is None:
            return False
        if self._has_earlier_leader():
            return True
        self._has_earlier_leader = None
        return False

    @property
    def earlier_leader(self) -> Callable[[], bool] | None:
        """What `has_earlier_leader` calls, for the next leader epoch of the same leader."""
        return self._has_earlier_leader

    @property
    def is_high_watermark_known(self) -> bool:
        """Whether the high watermark is at or above all offsets that earlier leaders committed (KIP-207)."""
        return self.high_watermark >= self.epoch_start_offset

    def all_start_at(self, offset: int) -> bool:
        """Whether the flushed log start offset of every follower in either in-sync set is at or above `offset`."""
        return all(follower.durable_start >= offset for follower in self._required_followers)

    def followers(self) -> dict[int, ReplicaState]:
        """Return the followers by broker id; callers must not change them."""
        return self._followers

    # In-sync set

    def can_join_isr(self, node_id: int) -> bool:
        """Whether this replica is not in sync and meets all conditions for being added. Only valid while no change is
        pending."""
        follower = self._followers.get(node_id)
        return (
            follower is not None
            and node_id not in self.in_sync
            and follower.durable_end >= self.high_watermark
            and follower.durable_end >= self.epoch_start_offset
        )

    def lagging_replicas(self, now_ms: float, lag_ms_max: float, leader_end: int) -> frozenset[int]:
        """Return the in-sync followers that have lacked records of the leader's log for more than `lag_ms_max`."""
        return frozenset(
            node
            for node in self.in_sync
            if node != self.leader
            and (follower := self._followers[node]).durable_end < leader_end
            and now_ms - follower.caught_up_ms > lag_ms_max
        )

    def propose_isr(self, in_sync: frozenset[int]) -> None:
        """Record that the leader proposes this in-sync set to the metadata store, which may commit it at any time.
        Raises `ValueError` if the leader is not in the set."""
        if self.leader not in in_sync:
            raise ValueError(f"leader {self.leader} cannot leave the in-sync set")
        self.pending_in_sync = in_sync
        self._update_required_followers()

    def on_isr_committed(self, in_sync: frozenset[int], now_ms: float = 0) -> bool:
        """Handle the in-sync set that the metadata store has committed; no earlier proposal can be committed any more.
        Returns True if the high watermark has advanced."""
        for node in in_sync - self.in_sync - {self.leader}:
            follower = self._followers.setdefault(node, ReplicaState(now_ms))
            follower.caught_up_ms = max(follower.caught_up_ms, now_ms)  # its lag is measured from now on
        for node in self.in_sync - in_sync:
            self._followers[node].durable_end = UNKNOWN  # only later fetches can bring it back
        self.in_sync = in_sync
        self.pending_in_sync = None
        self._update_required_followers()
        return self.advance()

    def set_replicas(self, replicas: Iterable[int], now_ms: float) -> None:
        """Set the brokers that have a replica of the partition."""
        wanted = {*replicas, *self.in_sync, *(self.pending_in_sync or ())} - {self.leader}
        self._followers = {node: self._followers.get(node) or ReplicaState(now_ms) for node in wanted}
        self._update_required_followers()

    def set_min_insync_replicas(self, min_insync_replicas: int) -> bool:
        """Set the minimum number of in-sync replicas for a commit. Returns True if the high watermark has advanced."""
        self.min_insync_replicas = min_insync_replicas
        self._update_required_followers()
        return self.advance()

    def _update_required_followers(self) -> None:
        others = (self.in_sync | (self.pending_in_sync or frozenset())) - {self.leader}
        self._required_followers = tuple(self._followers[node] for node in others)
        self.waits_for_followers = bool(others)
        self._is_sole_member = not others and self._is_session_valid is None and not self.is_under_min_isr


class FollowerReplica:
    """A follower's knowledge of one partition: its leader, and how much of its own log is committed.

    Invariant: `high_watermark` is at most the flushed end offset of this replica, and decreases only on truncation.
    """

    __slots__ = ("_leader_high_watermark", "_local_end", "high_watermark", "leader", "leader_epoch")
    waits_for_followers: Final = False
    has_follower_readers: Final = False

    def __init__(self, leader: int, leader_epoch: int, high_watermark: int, durable_end: int) -> None:
        """`leader`: node id of the leader, -1 if unknown. `durable_end`: flushed end offset of this replica."""
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._leader_high_watermark = high_watermark
        self._local_end = durable_end

    def on_local_flush(self, end_offset: int) -> bool:
        """Handle a flush of this replica's log up to `end_offset`. Returns True if the high watermark has advanced."""
        self._local_end = end_offset
        return self._advance()

    def on_leader_high_watermark(self, leader_high_watermark: int) -> bool:
        """Handle the high watermark that the leader sent. Returns True if this replica's high watermark has
        advanced."""
        self._leader_high_watermark = max(self._leader_high_watermark, leader_high_watermark)
        return self._advance()

    def on_truncation(self, start_offset: int, end_offset: int) -> bool:
        """Handle a truncation of the log, which now starts and ends at these offsets. Returns False if committed
        records were removed."""
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
