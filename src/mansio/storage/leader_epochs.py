"""Leader-epoch cache of one log: which leader epoch wrote which offsets (KIP-101, KIP-279).

A list of (epoch, start offset), both increasing: an epoch has the offsets from its start to the start of the next
entry. A follower uses it to find the offset at which its log diverges from the leader's.

Invariants: epochs and start offsets grow strictly from entry to entry (an epoch that wrote nothing is replaced by the
next one at the same offset). Below the log's durable end the file holds every entry; above it, recovery reads them from
the batches themselves.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from mansio.storage.checksummed_file import encode_checksummed, read_checksummed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.ports import Disk

EPOCHS_NAME = "epochs"
EPOCHS_MAGIC = b"MANSIOEP"
EPOCHS_VERSION = 1
UNDEFINED_EPOCH_AND_OFFSET = (-1, -1)
_ENTRY = struct.Struct(">iq")


class LeaderEpochCache:
    """The leader epochs of one log. `latest_epoch` is the newest epoch, -1 when there is none yet."""

    __slots__ = ("_epochs", "_starts", "latest_epoch")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.latest_epoch = -1
        for epoch, start in entries:
            self.assign(epoch, start)

    def entries(self) -> list[tuple[int, int]]:
        """All (epoch, start offset), oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` starts at `start_offset`. False for older or equal epochs, which change nothing."""
        if epoch <= self.latest_epoch:
            return False
        while self._starts and self._starts[-1] >= start_offset:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.latest_epoch = epoch
        return True

    def epoch_for_offset(self, offset: int) -> int:
        """The epoch that wrote `offset`; -1 if it is below the first entry."""
        found = -1
        for epoch, start in zip(self._epochs, self._starts, strict=True):
            if start > offset:
                break
            found = epoch
        return found

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(largest epoch at or below the requested one, its end offset), as in OffsetForLeaderEpoch (KIP-279).

        (-1, -1) if the cache is empty or the requested epoch is newer than all. For an epoch older than all the result
        is that epoch and the first start offset: it wrote nothing that this log has.
        """
        if epoch < 0 or epoch > self.latest_epoch or not self._epochs:
            return UNDEFINED_EPOCH_AND_OFFSET
        if epoch == self.latest_epoch:
            return epoch, log_end_offset
        found = epoch
        for known, start in zip(self._epochs, self._starts, strict=True):
            if known > epoch:
                return found, start
            found = known
        return UNDEFINED_EPOCH_AND_OFFSET

    def truncate_to(self, end_offset: int) -> bool:
        """Remove the epochs that begin at or above the new end. True if there were any."""
        before = len(self._epochs)
        while self._starts and self._starts[-1] >= end_offset:
            self._starts.pop()
            self._epochs.pop()
        self.latest_epoch = self._epochs[-1] if self._epochs else -1
        return len(self._epochs) != before

    def trim_to(self, start_offset: int) -> None:
        """Remove the epochs that ended at or below the new start."""
        while len(self._starts) > 1 and self._starts[1] <= start_offset:
            del self._starts[0], self._epochs[0]

    def encode(self) -> bytes:
        """The bytes of the epochs file (docs/FILE_FORMAT.md)."""
        return encode_checksummed(
            EPOCHS_MAGIC, EPOCHS_VERSION, b"".join(_ENTRY.pack(*entry) for entry in self.entries())
        )


def load_leader_epochs(disk: Disk, path: str) -> LeaderEpochCache | None:
    """Read an epochs file; None when it is missing or damaged."""
    payload = read_checksummed(disk, path, EPOCHS_MAGIC, EPOCHS_VERSION)
    if payload is None or len(payload) % _ENTRY.size:
        return None
    return LeaderEpochCache(_ENTRY.iter_unpack(payload))
