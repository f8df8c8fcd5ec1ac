"""Damage to closed segments on a real disk: flipped bits, cuts and swapped blocks, and which batches are intact then.

Owns a copy of the segments as they were written. A batch counts as damaged if any of its bytes differs from that copy
where it was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    import random
    from pathlib import Path

BLOCK_BYTES = 512
KINDS = ("flip", "flip", "cut", "swap")


class _Batch(NamedTuple):
    position: int
    end: int
    offset: int
    end_offset: int


class SegmentFile:
    """One closed segment and what it contained."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = path.read_bytes()
        self.batches = [
            _Batch(at, at + header.size, header.base_offset, header.last_offset + 1)
            for at, header in iterate_batches(self.content)
        ]
        self.is_damaged = False

    def damaged_content(self, chance: random.Random) -> bytes:
        """The content with one more damage, chosen by chance."""
        while True:
            data = bytearray(self.content)
            kind = chance.choice(KINDS)
            if kind == "flip":
                bit = chance.randrange(8 * len(data))
                data[bit // 8] ^= 1 << bit % 8
            elif kind == "cut":
                between = chance.choice(self.batches).position
                del data[chance.choice((between, chance.randrange(len(data)))) :]
            else:
                first, second = sorted(chance.sample(range(max(2, len(data) // BLOCK_BYTES)), 2))
                size = min(BLOCK_BYTES, len(data) - second * BLOCK_BYTES)
                if size > 0:
                    one = slice(first * BLOCK_BYTES, first * BLOCK_BYTES + size)
                    other = slice(second * BLOCK_BYTES, second * BLOCK_BYTES + size)
                    data[one], data[other] = data[other], data[one]
            if data != self.content:
                return bytes(data)

    def damaged_offsets(self, data: bytes) -> set[int]:
        """The offsets whose batches differ in `data`."""
        return {
            offset
            for batch in self.batches
            if data[batch.position : batch.end] != self.content[batch.position : batch.end]
            for offset in range(batch.offset, batch.end_offset)
        }

    def write(self, data: bytes) -> None:
        """Change the file in place, as a bad disk does: a broker that has it open sees the change."""
        with self.path.open("r+b") as file:
            file.write(data)
            file.truncate(len(data))
        self.is_damaged = data != self.content

    def restore(self) -> None:
        """Undo the damage."""
        if self.is_damaged:
            self.write(self.content)

    @property
    def is_as_written(self) -> bool:
        """Whether the file on disk has the original content."""
        return self.path.exists() and self.path.read_bytes() == self.content


class Partition:
    """The closed segments of one replica of a partition. `lost`: the offsets that are damaged now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments = [SegmentFile(path) for path in sorted(directory.glob("*.log"))[:-1]]
        self.lost: set[int] = set()

    def damage(self, chance: random.Random, count: int, *, spare: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """Damage up to `count` segments that are not damaged yet, none of the offsets in `spare`; returns how many."""
        whole = [segment for segment in self.segments if not segment.is_damaged and segment.batches]
        done = 0
        for segment in chance.sample(whole, len(whole)):
            if done == count:
                break
            data = segment.damaged_content(chance)
            lost = segment.damaged_offsets(data)
            if lost & spare:
                continue
            segment.write(data)
            self.lost |= lost
            done += 1
        return done

    def restore(self) -> None:
        """Undo all damage. The indexes of the segments stay."""
        for segment in self.segments:
            segment.restore()
        self.lost.clear()

    def repaired(self) -> None:
        """The broker has repaired all of it."""
        for segment in self.segments:
            segment.is_damaged = False
        self.lost.clear()

    @property
    def is_as_written(self) -> bool:
        """Whether all segments on disk have their original content."""
        return all(segment.is_as_written for segment in self.segments)


def partitions_of(data: Path, topic: str) -> dict[int, Partition]:
    """The replicas of a topic in one data directory, by index."""
    return {
        int(directory.name): Partition(directory)
        for directory in sorted(data.glob(f"topics/{topic}.*/*"))
        if directory.name.isdigit()
    }


def value_of(partition: int, offset: int) -> bytes:
    """The value of the record at an offset: no two records have the same."""
    return b"record %d of partition %d " % (offset, partition) * (1 + offset % 7)
