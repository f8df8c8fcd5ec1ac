"""Recovery-point checkpoint of one log: a lower bound of its durable end offset, written about once a second.

Recovery starts to read at the checkpoint. Invalid bytes above it are a torn tail, which recovery truncates; invalid
bytes below it are damage, which recovery reports. The file has two slots that are overwritten in turn, each with a
sequence number and a CRC. A torn write damages only the slot that is being written.

Invariants: a slot is written only after the records it covers were synced, and only when the other slot is on disk. A
checkpoint may be old; it is never ahead of the log.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile

CHECKPOINT_MAGIC = b"MANSIOCP"
CHECKPOINT_VERSION = 1
CHECKPOINT_NAME = "checkpoint"
SLOT_DISTANCE_BYTES = 4096  # further apart than any sector: one torn write cannot reach both
_SLOT = struct.Struct(">8sHHQqqQq")  # magic, version, flags, sequence, durable end, segment, position, start
_NEEDS_NEW_EPOCH = 1
_CRC = struct.Struct(">I")


class Checkpoint(NamedTuple):
    """Checkpoint of a log that starts at `start_offset` and is durable up to `durable_end_offset`.

    `durable_end_offset` is at byte `position` of the segment with the base offset `segment_base`. The slot with the
    higher `sequence` is the newer one. `needs_new_epoch`: a recovery truncated the log, or was about to, and no leader
    epoch was started since.
    """

    sequence: int
    durable_end_offset: int
    segment_base: int
    position: int
    start_offset: int
    needs_new_epoch: bool = False

    def encode(self) -> bytes:
        """Return the bytes of one slot of the checkpoint file (docs/internals/file-format.md)."""
        body = _SLOT.pack(
            CHECKPOINT_MAGIC,
            CHECKPOINT_VERSION,
            _NEEDS_NEW_EPOCH if self.needs_new_epoch else 0,
            self.sequence,
            self.durable_end_offset,
            self.segment_base,
            self.position,
            self.start_offset,
        )
        return body + _CRC.pack(crc32c(body))


def load_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """Read the newest intact slot of the checkpoint file at `path`; None if there is none."""
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return None
    slots = [_decode(data, at) for at in (0, SLOT_DISTANCE_BYTES)]
    return max((slot for slot in slots if slot is not None), default=None)


def are_slots_intact(data: bytes) -> tuple[bool, bool]:
    """Whether the first slot, and whether the second slot, of a checkpoint file with the bytes `data` is intact."""
    return _decode(data, 0) is not None, _decode(data, SLOT_DISTANCE_BYTES) is not None


def write_slot(file: DiskFile, checkpoint: Checkpoint) -> None:
    """Write the slot that the checkpoint's sequence number selects. The caller syncs it before it writes the next."""
    file.write_at([checkpoint.encode()], SLOT_DISTANCE_BYTES * (checkpoint.sequence % 2))


def write_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint, *, sync: bool = True) -> None:
    """Write one slot of the checkpoint file, which may be new. The slot is durable on return unless `sync` is false."""
    file = disk.open(path, create=True)
    try:
        write_slot(file, checkpoint)
        if sync:
            file.sync()
    finally:
        file.close()


def write_both_slots(disk: Disk, path: str, checkpoint: Checkpoint) -> Checkpoint:
    """Write the checkpoint of a new or truncated log to both slots, durably. Returns the newer slot's checkpoint.

    With one slot, an old checkpoint with a higher end would become valid again if the newer slot were damaged.
    """
    write_checkpoint(disk, path, checkpoint)
    second = checkpoint._replace(sequence=checkpoint.sequence + 1)
    write_checkpoint(disk, path, second)
    return second


def _decode(data: bytes, at: int) -> Checkpoint | None:
    if len(data) < at + _SLOT.size + _CRC.size:
        return None
    if crc32c(data[at : at + _SLOT.size]) != _CRC.unpack_from(data, at + _SLOT.size)[0]:
        return None
    magic, version, flags, sequence, end, segment, position, start = _SLOT.unpack_from(data, at)
    if magic != CHECKPOINT_MAGIC or version != CHECKPOINT_VERSION:
        return None
    return Checkpoint(sequence, end, segment, position, start, bool(flags & _NEEDS_NEW_EPOCH))
