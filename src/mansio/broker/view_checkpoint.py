"""The checkpoint file of a view: its bytes, when it is written and how it gets onto the disk, and when it is believed.

One file per partition of an internal topic, `<directory>/<topic>-<partition>.checkpoint`: magic `MVIW`,
version, the offset from which to replay, the number of pairs, then each key and value with its length, and a
CRC-32 of all of it. It is written beside its place, synced, and renamed, off the loop.

Always true: a file that is not whole and sound is `CorruptLog`, never a shorter view. What is written was committed.
"""

from __future__ import annotations

import logging
import struct
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.internal_load import RECORDS_PER_TURN
from mansio.broker.off_loop import off_loop
from mansio.broker.whole_file import replace_file
from mansio.errors import CorruptLog
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.internal_view import HeldView, View
    from mansio.ports import Background, Disk, Scheduler

    Known = tuple[int, list[tuple[bytes, bytes]]]
    """An offset, and what the log said below it: the newest value of each key."""

logger = logging.getLogger(__name__)

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
    """The files of one internal topic and its view. `breathe` gives the loop back for a turn."""

    def __init__(
        self,
        room: CheckpointRoom,
        topic: str,
        scheduler: Scheduler,
        view: View,
        breathe: Callable[[], Awaitable[None]],
    ) -> None:
        self._room = room
        self._topic = topic
        self._scheduler = scheduler
        self._view = view
        self._breathe = breathe
        self._sizes: dict[int, int] = {}

    def is_due(self, held: HeldView) -> bool:
        """Whether enough was appended since the last one: writing them may at most double what is written."""
        due_bytes = max(self._room.interval_bytes, self._sizes.get(held.index, 0))
        return held.appended_bytes >= due_bytes and not held.checkpointing

    def read(self, held: HeldView) -> Known | None:
        """What the file knows, and up to which offset; None if there is none, or none of this log."""
        partition = held.opened()
        disk, path = self._room.disk, self._path(held.index)
        if not disk.exists(path):
            return None
        try:
            end_offset, pairs = decode_checkpoint(disk.read_file(path))
        except CorruptLog as error:
            logger.warning(
                "view checkpoint not read; reading the log instead",
                extra=fields(topic=self._topic, partition=held.index, reason=error),
            )
            return None
        if not partition.log.start_offset <= end_offset <= partition.end_offset:
            logger.warning(
                "view checkpoint is not of this log; reading the log instead",
                extra=fields(topic=self._topic, partition=held.index),
            )
            disk.remove(path)  # the log must not grow up to it
            disk.sync_directory(self._room.directory)
            return None
        return end_offset, pairs

    async def write(self, held: HeldView) -> None:
        """Replace the file by what the view knows, unless that is under way; raises `StorageError`, and then the old
        one is still there.

        The snapshot is taken in slices while writes go on. It is labelled with the offset it began at: what came later
        is either in it or replayed over it, with the same result.
        """
        if held.checkpointing:
            return
        held.checkpointing = True
        try:
            partition = held.opened()
            held.appended_bytes = 0
            end_offset = partition.end_offset
            pairs: list[tuple[bytes, bytes]] = []
            snapshot = self._view.snapshot(held.index)
            while piece := list(islice(snapshot, RECORDS_PER_TURN)):
                pairs += piece
                await self._breathe()
            await partition.committed(partition.end_offset)
            await self._replace(held.index, encode_checkpoint(end_offset, pairs))
            held.tail = end_offset
        finally:
            held.checkpointing = False

    async def _replace(self, index: int, data: bytes) -> None:
        disk, directory, path = self._room.disk, self._room.directory, self._path(index)
        self._sizes[index] = len(data)

        def work() -> None:
            disk.make_directory(directory)
            replace_file(disk, path, data)

        await off_loop(self._scheduler, self._room.background, work)

    def _path(self, index: int) -> str:
        return f"{self._room.directory}/{self._topic}-{index}.checkpoint"
