"""Checkpoints of coordinator views: file format, schedule and validation.

One file per partition of an internal topic, `<directory>/<topic>-<partition>.checkpoint`: magic `MVIW`, version, the
offset from which to replay, the number of pairs, each key and value with its length, and a CRC-32 of all of it. A
worker thread writes a temporary file, flushes it, and renames it.

Invariants:
* An incomplete or damaged file raises `CorruptLog`; it never yields a partial view.
* Only committed state is written.
"""

from __future__ import annotations

import logging
import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog
from mansio.host.atomic_file import write_file_atomically
from mansio.host.item_turns import ItemTurns, Work
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.coordinator.view import CoordinatorContext, CoordinatorView
    from mansio.ports import Background, Disk, Scheduler

    Checkpoint = tuple[int, list[tuple[bytes, bytes]]]
    """Offset from which to replay the log, and the latest value of each key below that offset."""

logger = logging.getLogger(__name__)

RECORDS_PER_YIELD: Final = 2000
"""Maximum number of records between two yields of a load or checkpoint to the event loop."""

_MAGIC: Final = b"MVIW"
_VERSION: Final = 1
_HEAD = struct.Struct(">4sHqI")
_LENGTHS = struct.Struct(">II")
_CHECKSUM = struct.Struct(">I")


def encode_checkpoint(end_offset: int, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode a checkpoint file. `pairs`: keys and values of the view; `end_offset`: offset from which the log is to be
    replayed."""
    parts = [_HEAD.pack(_MAGIC, _VERSION, end_offset, len(pairs))]
    for key, value in pairs:
        parts += (_LENGTHS.pack(len(key), len(value)), key, value)
    body = b"".join(parts)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_checkpoint(data: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Decode a checkpoint file; returns the offset from which to replay, and the keys and values. Raises
    `CorruptLog`."""
    body = data[: -_CHECKSUM.size]
    if len(body) < _HEAD.size or zlib.crc32(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise CorruptLog("the checkpoint is damaged")
    magic, version, end_offset, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptLog(f"the checkpoint has the unknown format {magic!r} version {version}")
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
        raise CorruptLog(f"the checkpoint does not contain its {count} pairs")
    return end_offset, pairs


class CheckpointStorage(NamedTuple):
    """Directory of the checkpoint files, and the worker thread that writes them.

    `interval_bytes`: number of bytes appended to a partition between two checkpoints, which bounds what a start has to
    read (1 MiB of small commits takes a few tenths of a second). If the view is larger, the interval is the size of the
    view.
    """

    disk: Disk
    background: Background
    directory: str
    interval_bytes: int = 1024 * 1024


class CheckpointStore:
    """The checkpoints of one internal topic. `first_pending_offset`: see `TransactionalView`."""

    def __init__(
        self,
        storage: CheckpointStorage,
        topic: str,
        scheduler: Scheduler,
        view: CoordinatorView,
        first_pending_offset: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self._storage = storage
        self._topic = topic
        self._scheduler = scheduler
        self._view = view
        self._first_pending_offset = first_pending_offset
        self._sizes: dict[int, int] = {}

    def is_due(self, context: CoordinatorContext) -> bool:
        """Whether enough bytes were appended since the last checkpoint to write another one. Checkpoints at most double
        the number of written bytes."""
        due_bytes = max(self._storage.interval_bytes, self._sizes.get(context.index, 0))
        return context.appended_bytes >= due_bytes and not context.is_checkpointing

    def read(self, context: CoordinatorContext) -> Checkpoint | None:
        """Read the checkpoint of a partition; None if there is none, or if it is damaged or outside of the log."""
        partition = context.require_partition()
        disk, path = self._storage.disk, self._path(context.index)
        if not disk.exists(path):
            return None
        try:
            end_offset, pairs = decode_checkpoint(disk.read_file(path))
        except CorruptLog as error:
            logger.warning(
                "view_checkpoint_not_read",
                extra=fields(topic=self._topic, partition=context.index, reason=error),
            )
            return None
        if not partition.log.start_offset <= end_offset <= partition.end_offset:
            logger.warning(
                "view_checkpoint_not_in_log",
                extra=fields(topic=self._topic, partition=context.index),
            )
            disk.remove(path)  # it must not become valid when the log grows
            disk.sync_directory(self._storage.directory)
            return None
        return end_offset, pairs

    async def write(self, context: CoordinatorContext) -> None:
        """Replace the checkpoint of a partition, unless another call is doing so. Raises `StorageError`; then the old
        checkpoint is unchanged.

        The snapshot of the view is taken in slices while writes continue. Its offset is the end offset at the start of
        the snapshot: later records may already be in the snapshot, and are replayed with the same result. A snapshot
        has no pending records of transactions, so the replay starts at the first of them.
        """
        if context.is_checkpointing:
            return
        context.is_checkpointing = True
        try:
            partition = context.require_partition()
            context.appended_bytes = 0
            end_offset = self.replay_start(context)
            pairs: list[tuple[bytes, bytes]] = []
            turns = ItemTurns(self._scheduler, Work.CHECKPOINT, items_max=RECORDS_PER_YIELD)
            for pair in self._view.snapshot(context.index):
                pairs.append(pair)
                await turns.next()
            turns.end()
            await partition.commit_promise(partition.end_offset)
            await self._replace_file(context.index, encode_checkpoint(end_offset, pairs))
            context.replay_start_offset = end_offset
        finally:
            context.is_checkpointing = False

    def replay_start(self, context: CoordinatorContext) -> int:
        """Return the offset from which a checkpoint that is written now requires a replay."""
        end_offset = context.require_partition().end_offset
        pending = self._first_pending_offset(context.index)
        return end_offset if pending is None else min(pending, end_offset)

    async def _replace_file(self, index: int, data: bytes) -> None:
        disk, directory, path = self._storage.disk, self._storage.directory, self._path(index)
        self._sizes[index] = len(data)

        def work() -> None:
            disk.make_directory(directory)
            write_file_atomically(disk, path, data)

        await run_in_thread(self._scheduler, self._storage.background, work)

    def _path(self, index: int) -> str:
        return f"{self._storage.directory}/{self._topic}-{index}.checkpoint"
