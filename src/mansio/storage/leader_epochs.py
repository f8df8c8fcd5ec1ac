"""Leader-epoch cache of one log: which leader epoch wrote which offsets (KIP-101, KIP-279).

An entry is (epoch, start offset). An epoch wrote the offsets from its start offset up to the start offset of the next
entry. A follower uses the cache to find the offset at which its log diverges from the leader's.

Invariants: epochs and start offsets increase strictly from entry to entry (an epoch that wrote nothing is replaced by
the next one at the same offset). The epochs file contains every entry below the log's durable end; recovery reads the
later entries from the batches.
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
    """The leader epochs of one log (Kafka: LeaderEpochFileCache). `latest_epoch` is -1 if there is no entry."""

    __slots__ = ("_epochs", "_starts", "latest_epoch")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.latest_epoch = -1
        for epoch, start in entries:
            self.assign(epoch, start)

    def entries(self) -> list[tuple[int, int]]:
        """All entries, (epoch, start offset), oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` starts at `start_offset`. Returns False, without effect, if it is not a newer epoch."""
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
        """Return the epoch that wrote the record at `offset`; -1 if `offset` is below the first entry."""
        found = -1
        for epoch, start in zip(self._epochs, self._starts, strict=True):
            if start > offset:
                break
            found = epoch
        return found

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(largest known epoch at or below `epoch`, its end offset), as OffsetForLeaderEpoch requires (KIP-279).

        The result is (-1, -1) if the cache is empty or `epoch` is newer than all entries. If `epoch` is older than all
        entries, the result is `epoch` and the first start offset: this log has no record of `epoch`.
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
        """Remove the entries that start at or above `end_offset`. Returns whether there were any."""
        before = len(self._epochs)
        while self._starts and self._starts[-1] >= end_offset:
            self._starts.pop()
            self._epochs.pop()
        self.latest_epoch = self._epochs[-1] if self._epochs else -1
        return len(self._epochs) != before

    def trim_to(self, start_offset: int) -> None:
        """Remove the entries whose epochs ended at or below the new log start offset."""
        while len(self._starts) > 1 and self._starts[1] <= start_offset:
            del self._starts[0], self._epochs[0]

    def encode(self) -> bytes:
        """Return the bytes of the epochs file (docs/internals/file-format.md)."""
        return encode_checksummed(
            EPOCHS_MAGIC, EPOCHS_VERSION, b"".join(_ENTRY.pack(*entry) for entry in self.entries())
        )


def load_leader_epochs(disk: Disk, path: str) -> LeaderEpochCache | None:
    """Read the epochs file at `path`; None if it is missing or damaged."""
    payload = read_checksummed(disk, path, EPOCHS_MAGIC, EPOCHS_VERSION)
    if payload is None or len(payload) % _ENTRY.size:
        return None
    return LeaderEpochCache(_ENTRY.iter_unpack(payload))
