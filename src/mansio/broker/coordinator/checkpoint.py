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

from mansio.broker.coordinator.loader import RECORDS_PER_YIELD
from mansio.errors import CorruptLog
from mansio.host.atomic_file import write_file_atomically
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.view import CoordinatorContext, CoordinatorView
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


class CheckpointStorage(NamedTuple):
    """Where checkpoints live, and the worker that writes them. `interval_bytes`: how much may be appended to a
    partition before its checkpoint is written anew, and so how much a start has to read (1 MiB of small commits
    take a few tenths of a second). A view larger than that is written only after as much again was appended."""

    disk: Disk
    background: Background
    directory: str
    interval_bytes: int = 1024 * 1024


class CheckpointStore:
    """The files of one internal topic and its view. `yield_to_loop` gives the loop back for a turn."""

    def __init__(
        self,
        storage: CheckpointStorage,
        topic: str,
        scheduler: Scheduler,
        view: CoordinatorView,
        yield_to_loop: Callable[[], Awaitable[None]],
    ) -> None:
        self._storage = storage
        self._topic = topic
        self._scheduler = scheduler
        self._view = view
        self._yield_to_loop = yield_to_loop
        self._sizes: dict[int, int] = {}

    def is_due(self, context: CoordinatorContext) -> bool:
        """Whether enough was appended since the last one: writing them may at most double what is written."""
        due_bytes = max(self._storage.interval_bytes, self._sizes.get(context.index, 0))
        return context.appended_bytes >= due_bytes and not context.checkpointing

    def read(self, context: CoordinatorContext) -> Known | None:
        """What the file knows, and up to which offset; None if there is none, or none of this log."""
        partition = context.opened()
        disk, path = self._storage.disk, self._path(context.index)
        if not disk.exists(path):
            return None
        try:
            end_offset, pairs = decode_checkpoint(disk.read_file(path))
        except CorruptLog as error:
            logger.warning(
                "view checkpoint not read; reading the log instead",
                extra=fields(topic=self._topic, partition=context.index, reason=error),
            )
            return None
        if not partition.log.start_offset <= end_offset <= partition.end_offset:
            logger.warning(
                "view checkpoint is not of this log; reading the log instead",
                extra=fields(topic=self._topic, partition=context.index),
            )
            disk.remove(path)  # the log must not grow up to it
            disk.sync_directory(self._storage.directory)
            return None
        return end_offset, pairs

    async def write(self, context: CoordinatorContext) -> None:
        """Replace the file by what the view knows, unless that is under way; raises `StorageError`, and then the old
        one is still there.

        The snapshot is taken in slices while writes go on. It is labelled with the offset it began at: what came later
        is either in it or replayed over it, with the same result.
        """
        if context.checkpointing:
            return
        context.checkpointing = True
        try:
            partition = context.opened()
            context.appended_bytes = 0
            end_offset = partition.end_offset
            pairs: list[tuple[bytes, bytes]] = []
            snapshot = self._view.snapshot(context.index)
            while piece := list(islice(snapshot, RECORDS_PER_YIELD)):
                pairs += piece
                await self._yield_to_loop()
            await partition.committed(partition.end_offset)
            await self._replace(context.index, encode_checkpoint(end_offset, pairs))
            context.tail = end_offset
        finally:
            context.checkpointing = False

    async def _replace(self, index: int, data: bytes) -> None:
        disk, directory, path = self._storage.disk, self._storage.directory, self._path(index)
        self._sizes[index] = len(data)

        def work() -> None:
            disk.make_directory(directory)
            write_file_atomically(disk, path, data)

        await run_in_thread(self._scheduler, self._storage.background, work)

    def _path(self, index: int) -> str:
        return f"{self._storage.directory}/{self._topic}-{index}.checkpoint"
