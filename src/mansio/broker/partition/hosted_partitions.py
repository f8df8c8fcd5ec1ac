"""Which partitions' directories this broker of a cluster has ever made: what tells a log that is lost from one that
never was.

Owns the file `partitions-made` in the data directory. A partition is written down, durably, after its directory was
made and before anybody is told that it is open here; so whatever was once confirmed from here is in the list. Missing
directories of partitions that are not in it never existed: the broker was away when they were placed on it.

Always true: there is no list before this broker is out of all in-sync sets that a lost disk had it in (`begin`);
without one nothing is concluded. What is in it of deleted topics goes from it in time.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Final
from uuid import UUID

from crc32c import crc32c

from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.ports import Disk

    PartitionKey = tuple[UUID, int]  # topic and partition

logger = logging.getLogger(__name__)

FILE: Final = "partitions-made"
_PLACE: Final = struct.Struct(">16sI")
_ENTRY: Final = struct.Struct(">16sII")  # and the checksum of both


class HostedPartitions:
    """See the module. On the file thread, but for making it."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._path = f"{data_dir}/{FILE}"
        self._size = 0
        self._places: set[PartitionKey] = set()
        self.begun = False
        """Is there a list? Without one nobody knows what was made."""

    def load(self, known: Iterable[UUID]) -> None:
        """Read the list, if there is one. What it has of topics that are not `known` is left out, and goes from the
        file once it is most of it."""
        if not self._disk.exists(self._path):
            return
        data = self._disk.read_file(self._path)
        topics = {*known}
        self._places = {place for place in _places(data) if place[0] in topics}
        self._size = len(data) // _ENTRY.size * _ENTRY.size
        self.begun = True
        if 2 * len(self._places) * _ENTRY.size < self._size:
            try:
                self._write()
            except OSError as error:  # on a full disk the old one does as well
                logger.warning("hosted_partitions_not_compacted", extra=fields(path=self._path, reason=error))

    def begin(self) -> None:
        """From now on there is a list."""
        if not self.begun:
            self._write()

    def has(self, topic_id: UUID, index: int) -> bool:
        """Was this partition's directory ever made here? Asked only where there is a list."""
        return (topic_id, index) in self._places

    def add(self, places: Iterable[PartitionKey]) -> None:
        """These directories are there, durably; and durably noted, on return, where there is a list."""
        new = [place for place in places if place not in self._places]
        if self.begun and new:
            data = b"".join(map(_entry, new))
            file = self._disk.open(self._path)
            try:
                file.write_at([data], self._size)
                file.sync()
            finally:
                file.close()
            self._size += len(data)
        self._places.update(new)

    def _write(self) -> None:
        """All of it, whole or not at all, and durable."""
        data = b"".join(_entry(place) for place in sorted(self._places, key=_in_order))
        write_file_atomically(self._disk, self._path, data)
        self._size = len(data)
        self.begun = True


def _in_order(place: PartitionKey) -> tuple[bytes, int]:
    return place[0].bytes, place[1]


def _entry(place: PartitionKey) -> bytes:
    body = _PLACE.pack(place[0].bytes, place[1])
    return body + crc32c(body).to_bytes(4, "big")


def _places(data: bytes) -> Iterable[PartitionKey]:
    """What is whole. An entry that is torn was never relied on."""
    for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
        topic_id, index, checksum = _ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _PLACE.size]) == checksum:
            yield UUID(bytes=topic_id), index
