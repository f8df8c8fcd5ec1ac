"""Which leader wrote which part of a log (KIP-101, KIP-279).

A list of (epoch, start offset), both growing: epoch e wrote from its start up to the start of the next entry. It is
what lets a follower find out where its log and its leader's part.

Always true: epochs and start offsets grow strictly from entry to entry (an epoch that wrote nothing is replaced by the
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
UNDEFINED = (-1, -1)
_ENTRY = struct.Struct(">iq")


class LeaderEpochCache:
    """The leader epochs of one log. `last` is the newest epoch, -1 when there is none yet."""

    __slots__ = ("_epochs", "_starts", "last")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.last = -1
        for epoch, start in entries:
            self.assign(epoch, start)

    def entries(self) -> list[tuple[int, int]]:
        """All (epoch, start offset), oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> bool:
        """From `start_offset` on, `epoch` writes. True when that is news; older or equal epochs change nothing."""
        if epoch <= self.last:
            return False
        while self._starts and self._starts[-1] >= start_offset:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.last = epoch
        return True

    def epoch_at(self, offset: int) -> int:
        """The epoch that wrote `offset`; -1 when it is below the first entry."""
        found = -1
        for epoch, start in zip(self._epochs, self._starts, strict=True):
            if start > offset:
                break
            found = epoch
        return found

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """(largest epoch at or below the asked one, where it ended), as OffsetForLeaderEpoch answers (KIP-279).

        (-1, -1) when the list is empty or the asked epoch is newer than all. An epoch older than all is answered with
        itself and the first start: nothing this log has was written by it.
        """
        if epoch < 0 or epoch > self.last or not self._epochs:
            return UNDEFINED
        if epoch == self.last:
            return epoch, log_end_offset
        found = epoch
        for known, start in zip(self._epochs, self._starts, strict=True):
            if known > epoch:
                return found, start
            found = known
        return UNDEFINED

    def truncate_to(self, end_offset: int) -> bool:
        """Forget the epochs that begin at or above the new end. True when there were any."""
        before = len(self._epochs)
        while self._starts and self._starts[-1] >= end_offset:
            self._starts.pop()
            self._epochs.pop()
        self.last = self._epochs[-1] if self._epochs else -1
        return len(self._epochs) != before

    def trim_to(self, start_offset: int) -> None:
        """Forget the epochs that ended at or below the new start."""
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
