"""What a leader knows of its replicas: how far each is durable, and from that the high watermark.

Pure. One replica today is the smallest case of the rule, not an exception to it: the high watermark is the lowest
*durable* (fdatasync-ed) end over the in-sync set, so nobody reads a record that a power loss could take back.

Always true: `high_watermark` never goes back while this broker leads, and never passes the leader's own durable end.

Source: KIP-101, KIP-497 (the maximal in-sync set).
"""

from __future__ import annotations


class ReplicaProgress:
    """The leader's view of one partition's replicas. Offsets are ends: the next offset to be written."""

    __slots__ = ("_alone", "_durable_ends", "high_watermark", "in_sync", "leader", "leader_epoch")

    def __init__(self, leader: int, leader_epoch: int, in_sync: frozenset[int], high_watermark: int) -> None:
        if leader not in in_sync:
            raise ValueError(f"leader {leader} is not in the in-sync set {sorted(in_sync)}")
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.in_sync = in_sync
        self.high_watermark = high_watermark
        self._alone = leader if len(in_sync) == 1 else None
        self._durable_ends = dict.fromkeys(in_sync, high_watermark)

    def durable(self, broker_id: int, end_offset: int) -> bool:
        """`broker_id` has everything below `end_offset` on stable storage. True when the high watermark moved."""
        self._durable_ends[broker_id] = end_offset
        ends = self._durable_ends
        lowest = end_offset if self._alone == broker_id else min(ends[member] for member in self.in_sync)
        if lowest <= self.high_watermark:
            return False
        self.high_watermark = lowest
        return True
