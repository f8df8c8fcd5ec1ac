"""The checkpoint file of a view: its bytes, and how it gets onto the disk.

One file per partition of an internal topic, `<directory>/<topic>-<partition>.checkpoint`: magic `MVIW`,
version, the offset from which to replay, the number of pairs, then each key and value with its length, and a
CRC-32 of all of it. It is written beside its place, synced, and renamed, off the loop.

Always true: a file that is not whole and sound is `CorruptLog`, never a shorter view.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.off_loop import off_loop
from mansio.broker.whole_file import replace_file
from mansio.errors import CorruptLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Background, Disk, Scheduler

_MAGIC: Final = b"MVIW"
_VERSION: Final = 1
_HEAD = struct.Struct(">4sHqI")
_LENGTHS = struct.Struct(">II")
_CHECKSUM = struct.Struct(">I")


def encode_checkpoint(end_offset: int, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """`pairs` rebuild the view; the log's records from `end_offset` on are applied over them."""
    pieces = [_HEAD.pack(_MAGIC, _VERSION, end_offset, len(pairs))]
    for key, value in pairs:
        pieces += (_LENGTHS.pack(len(key), len(value)), key, value)
    body = b"".join(pieces)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_checkpoint(data: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The offset to replay from, and the pairs. Raises `CorruptLog`."""
    body = data[: -_CHECKSUM.size]
    if len(body) < _HEAD.size or zlib.crc32(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise CorruptLog("the checkpoint is damaged")
    magic, version, end_offset, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptLog(f"the checkpoint has format {magic!r} version {version}, unknown here")
    pairs: list[tuple[bytes, bytes]] = []
    position = _HEAD.size
    for _ in range(count):
        if position + _LENGTHS.size > len(body):
            break
        key_length, value_length = _LENGTHS.unpack_from(body, position)
        position += _LENGTHS.size
        middle = position + key_length
        pairs.append((body[position:middle], body[middle : middle + value_length]))
        position = middle + value_length
    if len(pairs) != count or position != len(body):
        raise CorruptLog(f"the checkpoint does not hold the {count} pairs it speaks of")
    return end_offset, pairs


class CheckpointRoom(NamedTuple):
    """Where checkpoints live, and the worker that writes them. `interval_bytes`: how much may be appended to a
    partition before its checkpoint is written anew, and so how much a start has to read (1 MiB of small commits
    take a few tenths of a second). A view larger than that is written only after as much again was appended."""

    disk: Disk
    background: Background
    directory: str
    interval_bytes: int = 1024 * 1024


class ViewCheckpoints:
    """The files of one internal topic."""

    def __init__(self, room: CheckpointRoom, topic: str, scheduler: Scheduler) -> None:
        self._room = room
        self._topic = topic
        self._scheduler = scheduler
        self._sizes: dict[int, int] = {}

    def due_after_bytes(self, index: int) -> int:
        """How much to append before the next checkpoint: writing them may at most double what is written."""
        return max(self._room.interval_bytes, self._sizes.get(index, 0))

    def path(self, index: int) -> str:
        return f"{self._room.directory}/{self._topic}-{index}.checkpoint"

    def read(self, index: int) -> bytes | None:
        path = self.path(index)
        return self._room.disk.read_file(path) if self._room.disk.exists(path) else None

    def remove(self, index: int) -> None:
        self._room.disk.remove(self.path(index))
        self._room.disk.sync_directory(self._room.directory)

    async def write(self, index: int, data: bytes) -> None:
        """Replace the file; raises `StorageError`, and then the old one is still there."""
        disk, directory, path = self._room.disk, self._room.directory, self.path(index)
        self._sizes[index] = len(data)

        def work() -> None:
            disk.make_directory(directory)
            replace_file(disk, path, data)

        await off_loop(self._scheduler, self._room.background, work)
