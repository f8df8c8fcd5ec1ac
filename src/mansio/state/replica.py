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
  while the committed set has fewer than `in_sync_min` members, and while the `gate` is shut.

Source: KIP-101, KIP-497 (both sets count), KIP-903 (broker epochs), KIP-966 (nothing moves below min.insync.replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNKNOWN = -1
NOBODY = -1


class ReplicaCopy:
    """What a leader knows of one follower in this leader epoch. Times are milliseconds of some steady clock."""

    __slots__ = (
        "asked_ms",
        "broker_epoch",
        "caught_up_ms",
        "durable_end",
        "durable_start",
        "leader_end",
        "told_start",
    )

    def __init__(self, now_ms: float) -> None:
        self.broker_epoch = UNKNOWN
        """The session of the broker in which it asked last."""
        self.durable_end = UNKNOWN
        """What it said then: it has everything below on stable storage."""
        self.caught_up_ms = now_ms
        """When it last had all that the leader had."""
        self.asked_ms = now_ms
        self.leader_end = UNKNOWN
        """The end of the leader's log when it asked last."""
        self.durable_start = UNKNOWN
        """Where it said then that its log begins, whatever happens to it."""
        self.told_start = UNKNOWN
        """Where it was last told that the leader's log begins."""


class ReplicaProgress:
    """The leader's view of one partition's replicas. Offsets are ends: the next offset to be written."""

    __slots__ = (
        "_alone",
        "_copies",
        "_gate",
        "_own_end",
        "_waited_for",
        "high_watermark",
        "in_sync",
        "in_sync_min",
        "leader",
        "leader_epoch",
        "pending",
        "start_of_epoch",
        "waits_for_others",
    )

    def __init__(
        self,
        leader: int,
        leader_epoch: int,
        in_sync: frozenset[int],
        high_watermark: int,
        *,
        durable_end: int | None = None,
        start_of_epoch: int = 0,
        replicas: Iterable[int] = (),
        in_sync_min: int = 1,
        gate: Callable[[], bool] | None = None,
        now_ms: float = 0,
    ) -> None:
        """`high_watermark`: the highest this broker knew before; `durable_end`: its own, the same unless given.

        `start_of_epoch`: where its log ended when it began to lead. `gate`: may the high watermark move now?
        """
        if leader not in in_sync:
            raise ValueError(f"leader {leader} is not in the in-sync set {sorted(in_sync)}")
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self.start_of_epoch = start_of_epoch
        self.in_sync = in_sync
        self.pending: frozenset[int] | None = None
        self.in_sync_min = in_sync_min
        self._gate = gate
        self._own_end = high_watermark if durable_end is None else durable_end
        self._copies = {node: ReplicaCopy(now_ms) for node in {*replicas, *in_sync} if node != leader}
        self._waited_for: tuple[ReplicaCopy, ...] = ()
        self.waits_for_others = False
        """Does the high watermark depend on anybody else?"""
        self._alone = False
        self._settle()
        self.advance()

    # What is durable where

    def durable(self, end_offset: int) -> bool:
        """The leader itself has everything below `end_offset` on stable storage. True when the high watermark moved."""
        self._own_end = end_offset
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
            copy.caught_up_ms = max(copy.caught_up_ms, copy.asked_ms)
        copy.broker_epoch = broker_epoch
        copy.durable_end = durable_end
        copy.durable_start = durable_start
        copy.asked_ms, copy.leader_end = now_ms, leader_end
        return self.advance()

    def advance(self) -> bool:
        """Move the high watermark up to where it may be. True when it moved."""
        lowest = self._own_end
        for copy in self._waited_for:
            if copy.durable_end < lowest:
                lowest = copy.durable_end
        if lowest <= self.high_watermark or self.under_min:
            return False
        if self._gate is not None and not self._gate():
            return False
        self.high_watermark = lowest
        return True

    @property
    def under_min(self) -> bool:
        """Has the committed in-sync set fewer members than are needed to commit anything?"""
        return len(self.in_sync) < self.in_sync_min

    @property
    def gate_shut(self) -> bool:
        """May nothing be committed for now, whoever has it?"""
        return self._gate is not None and not self._gate()

    @property
    def complete(self) -> bool:
        """Is the high watermark known to be at or above all that earlier leaders committed (KIP-207)?"""
        return self.high_watermark >= self.start_of_epoch

    def begins_at(self, offset: int) -> bool:
        """Do the logs of all other members begin at or above `offset`, and stay so?"""
        return all(copy.durable_start >= offset for copy in self._waited_for)

    def copies(self) -> dict[int, ReplicaCopy]:
        """The followers by broker; to be read, not changed."""
        return self._copies

    # Who is in sync

    def may_join(self, node_id: int) -> bool:
        """Has this replica, which is not in sync, all it needs to be? Asked when no other change is pending."""
        copy = self._copies.get(node_id)
        return (
            copy is not None
            and node_id not in self.in_sync
            and copy.durable_end >= self.high_watermark
            and copy.durable_end >= self.start_of_epoch
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
            copy = self._copies.setdefault(node, ReplicaCopy(now_ms))
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
        self._copies = {node: self._copies.get(node) or ReplicaCopy(now_ms) for node in wanted}
        self._settle()

    def require(self, in_sync_min: int) -> bool:
        """So many members are needed from now on. True when the high watermark moved."""
        self.in_sync_min = in_sync_min
        self._settle()
        return self.advance()

    def _settle(self) -> None:
        others = (self.in_sync | (self.pending or frozenset())) - {self.leader}
        self._waited_for = tuple(self._copies[node] for node in others)
        self.waits_for_others = bool(others)
        self._alone = not others and self._gate is None and not self.under_min


class Following:
    """A follower's view of one partition: who leads it, and how much of what it has is committed.

    Always true: `high_watermark` is not above what this replica has durable, and goes back only when the log does.
    """

    __slots__ = ("_leader_high_watermark", "_own_end", "high_watermark", "leader", "leader_epoch")
    waits_for_others: Final = False

    def __init__(self, leader: int, leader_epoch: int, high_watermark: int, durable_end: int) -> None:
        """`leader`: -1 for nobody that is known."""
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._leader_high_watermark = high_watermark
        self._own_end = durable_end

    def durable(self, end_offset: int) -> bool:
        """This replica has everything below `end_offset` on stable storage. True when the high watermark moved."""
        self._own_end = end_offset
        return self._advance()

    def heard(self, leader_high_watermark: int) -> bool:
        """The leader told its high watermark. True when this replica's moved."""
        self._leader_high_watermark = max(self._leader_high_watermark, leader_high_watermark)
        return self._advance()

    def cut(self, start_offset: int, end_offset: int) -> bool:
        """The log begins and ends there now. False when that took back what was said to be committed."""
        self._own_end = end_offset
        intact = end_offset >= self.high_watermark
        self.high_watermark = max(start_offset, min(self.high_watermark, end_offset))
        if not intact:
            self._leader_high_watermark = self.high_watermark
        return intact

    def _advance(self) -> bool:
        lowest = min(self._leader_high_watermark, self._own_end)
        if lowest <= self.high_watermark:
            return False
        self.high_watermark = lowest
        return True
