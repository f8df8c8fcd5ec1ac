"""What a leader knows of a partition's replicas, and what a follower knows of its leader; from that the high watermark.

Pure. One replica is the smallest case of the rule, not an exception to it: the high watermark is the lowest *durable*
(fdatasync-ed) end over the in-sync set, so nobody reads a record that a power loss, or the loss of a broker, could
take back.

    committed in-sync set     what the metadata store says
    pending in-sync set       what this leader has asked the store for, and does not know the answer to
    both together             who has to have a record: a growth counts at once, a shrinking when it is committed

Always true:
* `high_watermark` never goes back, and never passes the leader's own durable end;
* while a member of either set has not told its end in this leader epoch, the high watermark stands still; so it does
  while the committed set has fewer than `min_insync_replicas` members, and while the `is_session_valid` is shut.

Source: KIP-101, KIP-497 (both sets count), KIP-903 (broker epochs), KIP-966 (nothing moves below min.insync.replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNKNOWN = -1
NOBODY = -1


class ReplicaState:
    """What a leader knows of one follower in this leader epoch. Times are milliseconds of some steady clock."""

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
        """The session of the broker in which it asked last."""
        self.durable_end = UNKNOWN
        """What it said then: it has everything below on stable storage."""
        self.caught_up_ms = now_ms
        """When it last had all that the leader had."""
        self.last_fetch_ms = now_ms
        self.leader_end = UNKNOWN
        """The end of the leader's log when it asked last."""
        self.durable_start = UNKNOWN
        """Where it said then that its log begins, whatever happens to it."""
        self.reported_start_offset = UNKNOWN
        """Where it was last told that the leader's log begins."""


class ReplicationProgress:
    """The leader's view of one partition's replicas. Offsets are ends: the next offset to be written."""

    __slots__ = (
        "_alone",
        "_copies",
        "_is_session_valid",
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
        """`high_watermark`: the highest this broker knew before; `durable_end`: its own, the same unless given.

        `epoch_start_offset`: where its log ended when it began to lead. `is_session_valid`: may the high watermark
        move now?
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
        self._copies = {node: ReplicaState(now_ms) for node in {*replicas, *in_sync} if node != leader}
        self._required_followers: tuple[ReplicaState, ...] = ()
        self.waits_for_followers = False
        """Does the high watermark depend on anybody else?"""
        self._alone = False
        self._settle()
        self.advance()

    # What is durable where

    def durable(self, end_offset: int) -> bool:
        """The leader itself has everything below `end_offset` on stable storage. True when the high watermark moved."""
        self._local_end = end_offset
        if self._alone:
            if end_offset <= self.high_watermark:
                return False
            self.high_watermark = end_offset
            return True
        return self.advance()

    def fetched(
        self,
        node_id: int,
        broker_epoch: int,
        durable_end: int,
        leader_end: int,
        now_ms: float,
        durable_start: int = UNKNOWN,
    ) -> bool:
        """A follower asks for what comes at `durable_end`, and so says that it has all before. True when the high
        watermark moved. `leader_end`: the end of the leader's log now; `durable_start`: where the follower's begins.

        Nothing is taken from a session of its broker that is over. Raises `KeyError` for a broker without a replica.
        """
        copy = self._copies[node_id]
        if broker_epoch < copy.broker_epoch:
            return False
        if durable_end >= leader_end:
            copy.caught_up_ms = now_ms
        elif broker_epoch == copy.broker_epoch and durable_end >= copy.leader_end:
            copy.caught_up_ms = max(copy.caught_up_ms, copy.last_fetch_ms)
        copy.broker_epoch = broker_epoch
        copy.durable_end = durable_end
        copy.durable_start = durable_start
        copy.last_fetch_ms, copy.leader_end = now_ms, leader_end
        return self.advance()

    def advance(self) -> bool:
        """Move the high watermark up to where it may be. True when it moved."""
        lowest = self._local_end
        for copy in self._required_followers:
            if copy.durable_end < lowest:
                lowest = copy.durable_end
        if lowest <= self.high_watermark or self.is_under_min_isr:
            return False
        if self._is_session_valid is not None and not self._is_session_valid():
            return False
        self.high_watermark = lowest
        return True

    @property
    def is_under_min_isr(self) -> bool:
        """Has the committed in-sync set fewer members than are needed to commit anything?"""
        return len(self.in_sync) < self.min_insync_replicas

    @property
    def is_session_uncertain(self) -> bool:
        """May nothing be committed for now, whoever has it?"""
        return self._is_session_valid is not None and not self._is_session_valid()

    @property
    def complete(self) -> bool:
        """Is the high watermark known to be at or above all that earlier leaders committed (KIP-207)?"""
        return self.high_watermark >= self.epoch_start_offset

    def starts_at(self, offset: int) -> bool:
        """Do the logs of all other members begin at or above `offset`, and stay so?"""
        return all(copy.durable_start >= offset for copy in self._required_followers)

    def copies(self) -> dict[int, ReplicaState]:
        """The followers by broker; to be read, not changed."""
        return self._copies

    # Who is in sync

    def can_join_isr(self, node_id: int) -> bool:
        """Has this replica, which is not in sync, all it needs to be? Asked when no other change is pending."""
        copy = self._copies.get(node_id)
        return (
            copy is not None
            and node_id not in self.in_sync
            and copy.durable_end >= self.high_watermark
            and copy.durable_end >= self.epoch_start_offset
        )

    def lagging(self, now_ms: float, lag_ms_max: float, leader_end: int) -> frozenset[int]:
        """The members that did not have all of the leader's log for so long."""
        return frozenset(
            node
            for node in self.in_sync
            if node != self.leader
            and (copy := self._copies[node]).durable_end < leader_end
            and now_ms - copy.caught_up_ms > lag_ms_max
        )

    def propose(self, in_sync: frozenset[int]) -> None:
        """This set was asked for, and may be committed from now on at any moment."""
        if self.leader not in in_sync:
            raise ValueError(f"leader {self.leader} cannot leave the in-sync set")
        self.pending = in_sync
        self._settle()

    def committed(self, in_sync: frozenset[int], now_ms: float = 0) -> bool:
        """This is the in-sync set, and nothing that was asked for before can happen any more. True when the high
        watermark moved."""
        for node in in_sync - self.in_sync - {self.leader}:
            copy = self._copies.setdefault(node, ReplicaState(now_ms))
            copy.caught_up_ms = max(copy.caught_up_ms, now_ms)  # from now on it has to keep up
        for node in self.in_sync - in_sync:
            self._copies[node].durable_end = UNKNOWN  # only what it asks for from now on brings it back
        self.in_sync = in_sync
        self.pending = None
        self._settle()
        return self.advance()

    def assigned(self, replicas: Iterable[int], now_ms: float) -> None:
        """These brokers keep the partition from now on."""
        wanted = {*replicas, *self.in_sync, *(self.pending or ())} - {self.leader}
        self._copies = {node: self._copies.get(node) or ReplicaState(now_ms) for node in wanted}
        self._settle()

    def require(self, min_insync_replicas: int) -> bool:
        """So many members are needed from now on. True when the high watermark moved."""
        self.min_insync_replicas = min_insync_replicas
        self._settle()
        return self.advance()

    def _settle(self) -> None:
        others = (self.in_sync | (self.pending or frozenset())) - {self.leader}
        self._required_followers = tuple(self._copies[node] for node in others)
        self.waits_for_followers = bool(others)
        self._alone = not others and self._is_session_valid is None and not self.is_under_min_isr


class FollowerReplica:
    """A follower's view of one partition: who leads it, and how much of what it has is committed.

    Always true: `high_watermark` is not above what this replica has durable, and goes back only when the log does.
    """

    __slots__ = ("_leader_high_watermark", "_local_end", "high_watermark", "leader", "leader_epoch")
    waits_for_followers: Final = False

    def __init__(self, leader: int, leader_epoch: int, high_watermark: int, durable_end: int) -> None:
        """`leader`: -1 for nobody that is known."""
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._leader_high_watermark = high_watermark
        self._local_end = durable_end

    def durable(self, end_offset: int) -> bool:
        """This replica has everything below `end_offset` on stable storage. True when the high watermark moved."""
        self._local_end = end_offset
        return self._advance()

    def heard(self, leader_high_watermark: int) -> bool:
        """The leader told its high watermark. True when this replica's moved."""
        self._leader_high_watermark = max(self._leader_high_watermark, leader_high_watermark)
        return self._advance()

    def cut(self, start_offset: int, end_offset: int) -> bool:
        """The log begins and ends there now. False when that took back what was said to be committed."""
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
