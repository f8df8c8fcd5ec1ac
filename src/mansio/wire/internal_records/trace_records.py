"""Codec of the records of the internal topic `__mansio_trace`.

A record is one trace block: what a broker has seen of its partitions in about a second, as rows of fixed size. The rows
of one partition are adjacent. An index, sorted by topic and partition, says which rows belong to which partition, and
which offsets they concern, so that a reader skips a block that has nothing for it after a few comparisons.

    header | topic ids | index entries | rows | names

A block of a broker process (`incarnation`) has the number after that of the block before it: a missing number is a
missing block. `end_ms` of a block is the time up to which everything is in it or in the blocks before it.
"""

from __future__ import annotations

from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

VERSION: Final = 0
NAME_CHARACTERS_MAX: Final = 249
NAMES_MAX: Final = 4_096
"""Maximum number of different names in a block; rows have their numbers."""

TOPIC_ID_BYTES: Final = 16
NO_VALUE: Final = -1

HEADER: Final = Struct(">BBHiqqqqIIIII")
ENTRY: Final = Struct(">HxxIIqqi")
ROW: Final = Struct(">BBHHHIqIq")
_NAME_LENGTH: Final = Struct(">H")

# Kinds of rows.
PUBLISHED: Final = 1
DELIVERED: Final = 2
RELEASED: Final = 3
EXPIRED: Final = 4
ACKNOWLEDGED: Final = 5
REJECTED: Final = 6
ATTEMPTS_USED_UP: Final = 7
DEAD_LETTERED: Final = 8
REDRIVEN: Final = 9
RENEWED: Final = 10
DISCARDED: Final = 11
DELETED: Final = 12
DUE: Final = 13
POSITION: Final = 14
LOADED: Final = 15
LED: Final = 16
ENDED: Final = 17
UNKNOWN_OUTCOME: Final = 18

CONTROL_KINDS: Final = frozenset({LED, ENDED})
"""Rows about a partition, not about its records."""

# Causes of `RELEASED`, `LED` and `ENDED`.
BY_MEMBER: Final = 1
MEMBER_LEFT: Final = 2
LED_WITHOUT_TRACE: Final = 1
TURNED_ON: Final = 2
CONTINUED: Final = 3
TURNED_OFF: Final = 1


class TraceRow(NamedTuple):
    """What happened to the `size` records from the offset `first` on.

    `cause`: why, as far as the kind has several causes; of `LOADED` the delivery state. `attempt`: number of
    deliveries. `group`, `who`: names, "" for none; `who` is a member, or the client that has published. `time_ms`:
    since the Unix epoch. `extra`: of `PUBLISHED`, the time of the last record; of `RELEASED` and `EXPIRED`, the time at
    which the records are offered again; of `DUE`, the offset at which the first delayed record is delivered; otherwise
    -1.
    """

    kind: int
    cause: int
    attempt: int
    group: str
    who: str
    time_ms: int
    first: int
    size: int
    extra: int


class BlockHeader(NamedTuple):
    """Header of a block. `incarnation`: time at which the process began, ms since the Unix epoch. `sequence`: number of
    the block. `begin_ms`, `end_ms`: the time that it covers. `dropped`: number of rows of this time that are not in
    it."""

    version: int
    flags: int
    broker_id: int
    incarnation: int
    sequence: int
    begin_ms: int
    end_ms: int
    dropped: int
    topics: int
    entries: int
    rows: int
    names: int


class IndexEntry(NamedTuple):
    """The rows of one partition in one leader epoch: `row_count` from `row` on. `first`, `end`: bounds of the offsets
    that they concern."""

    topic_id: bytes
    partition: int
    leader_epoch: int
    row: int
    row_count: int
    first: int
    end: int


class PartitionRows(NamedTuple):
    """Packed rows of one partition in one leader epoch, to encode. `first`, `end`: as in `IndexEntry`."""

    topic_id: bytes
    partition: int
    leader_epoch: int
    rows: bytes | bytearray
    first: int
    end: int


def encode_block(header: BlockHeader, partitions: Sequence[PartitionRows], names: Sequence[str]) -> bytes:
    """Return a block. The counts in `header` are set here; `names` has the names that rows refer to, from 1 on."""
    ordered = sorted(partitions, key=lambda each: (each.topic_id, each.partition))
    topics = sorted({each.topic_id for each in ordered})
    numbers = {topic_id: number for number, topic_id in enumerate(topics)}
    entries: list[bytes] = []
    rows: list[bytes | bytearray] = []
    row = 0
    for each in ordered:
        entries.append(
            ENTRY.pack(numbers[each.topic_id], each.partition, row, each.first, each.end, each.leader_epoch)
        )
        rows.append(each.rows)
        row += len(each.rows) // ROW.size
    encoded = [name[:NAME_CHARACTERS_MAX].encode() for name in names]
    return b"".join(
        (
            HEADER.pack(
                header.version,
                header.flags,
                0,
                header.broker_id,
                header.incarnation,
                header.sequence,
                header.begin_ms,
                header.end_ms,
                header.dropped,
                len(topics),
                len(entries),
                row,
                len(encoded),
            ),
            *topics,
            *entries,
            *rows,
            *(part for name in encoded for part in (_NAME_LENGTH.pack(len(name)), name)),
        )
    )


class TraceBlock:
    """A block to read. Nothing is decoded before it is asked for."""

    __slots__ = ("_data", "_names", "header")

    def __init__(self, data: bytes | memoryview) -> None:
        """Read the header. Raises `CorruptMessage`."""
        view = memoryview(data)
        if len(view) < HEADER.size:
            raise CorruptMessage("a trace block is too short")
        version, flags, _, *others = HEADER.unpack_from(view)
        if version != VERSION:
            raise CorruptMessage(f"a trace block has the unknown version {version}")
        self.header = BlockHeader(version, flags, *others)
        self._data = view
        self._names: list[str] | None = None
        if self._names_position > len(view):
            raise CorruptMessage("a trace block is shorter than its header says")

    @property
    def _entries_position(self) -> int:
        return HEADER.size + self.header.topics * TOPIC_ID_BYTES

    @property
    def _rows_position(self) -> int:
        return self._entries_position + self.header.entries * ENTRY.size

    @property
    def _names_position(self) -> int:
        return self._rows_position + self.header.rows * ROW.size

    def _topic_id(self, number: int) -> bytes:
        begin = HEADER.size + number * TOPIC_ID_BYTES
        return bytes(self._data[begin : begin + TOPIC_ID_BYTES])

    def entries(self) -> Iterator[IndexEntry]:
        """Yield all index entries, in their order."""
        for number in range(self.header.entries):
            yield self._entry(number)

    def bounds(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield, for each index entry, the key of its partition (topic id and number, 20 bytes), and the bounds of the
        offsets."""
        ids = [self._topic_id(number) for number in range(self.header.topics)]
        data = self._data[self._entries_position : self._rows_position]
        try:
            for topic, partition, _, first, end, _ in ENTRY.iter_unpack(data):
                yield ids[topic] + partition.to_bytes(4, "big"), first, end
        except IndexError as damage:
            raise CorruptMessage("an entry of a trace block has an unknown topic") from damage

    def _entry(self, number: int) -> IndexEntry:
        position, size = self._entries_position, ENTRY.size
        topic, partition, row, first, end, epoch = ENTRY.unpack_from(self._data, position + number * size)
        row_end = self.header.rows
        if number + 1 < self.header.entries:
            row_end = ENTRY.unpack_from(self._data, position + (number + 1) * size)[2]
        return IndexEntry(self._topic_id(topic), partition, epoch, row, row_end - row, first, end)

    def topic_number(self, topic_id: bytes) -> int:
        """Return the number of a topic in the index entries, -1 if the block has no rows about it."""
        low, high = 0, self.header.topics
        while low < high:
            middle = (low + high) // 2
            if self._topic_id(middle) < topic_id:
                low = middle + 1
            else:
                high = middle
        return low if low < self.header.topics and self._topic_id(low) == topic_id else -1

    def topic_ids(self) -> Sequence[bytes]:
        """Return the ids of the topics in the order of their numbers."""
        return [self._topic_id(number) for number in range(self.header.topics)]

    def packed_entries(self) -> memoryview:
        """Return all index entries as they are stored, to read many at once."""
        return self._data[self._entries_position : self._rows_position]

    def packed_rows(self) -> memoryview:
        """Return all rows as they are stored, to read many at once. Their names are numbers in `names`, from 1 on."""
        return self._data[self._rows_position : self._names_position]

    def entries_of(self, topic_id: bytes, partition: int) -> Iterator[IndexEntry]:
        """Yield the index entries of a partition: more than one if it was led in several epochs."""
        topic = self.topic_number(topic_id)
        if topic < 0:
            return
        wanted = (topic, partition)
        low, high = 0, self.header.entries
        position, size = self._entries_position, ENTRY.size
        while low < high:
            middle = (low + high) // 2
            found = ENTRY.unpack_from(self._data, position + middle * size)
            if (found[0], found[1]) < wanted:
                low = middle + 1
            else:
                high = middle
        for number in range(low, self.header.entries):
            found = ENTRY.unpack_from(self._data, position + number * size)
            if (found[0], found[1]) != (topic, partition):
                return
            yield self._entry(number)

    def rows(self, entry: IndexEntry, offsets: Sequence[int] | None = None) -> Iterator[TraceRow]:
        """Yield the rows of an entry, or only those that concern one of these offsets, and those about the partition.

        Raises `CorruptMessage`."""
        begin = self._rows_position + entry.row * ROW.size
        part = self._data[begin : begin + entry.row_count * ROW.size]
        base_ms = self.header.begin_ms
        for kind, cause, attempt, group, who, delta_ms, offset, size, extra in ROW.iter_unpack(part):
            if offsets is not None and kind not in CONTROL_KINDS:
                for each in offsets:
                    if offset <= each < offset + size:
                        break
                else:
                    continue
            yield TraceRow(
                kind,
                cause,
                attempt,
                self._name(group),
                self._name(who),
                base_ms + delta_ms,
                offset,
                size,
                extra,
            )

    def rows_of_group(self, group: str, kinds: Collection[int]) -> Iterator[tuple[IndexEntry, TraceRow]]:
        """Yield the rows of these kinds about a group, with their entries. Raises `CorruptMessage`."""
        names = self.names()
        if group not in names:
            return
        wanted = names.index(group) + 1
        for entry in self.entries():
            begin = self._rows_position + entry.row * ROW.size
            part = self._data[begin : begin + entry.row_count * ROW.size]
            if any(row[0] in kinds and row[3] == wanted for row in ROW.iter_unpack(part)):
                for each in self.rows(entry):
                    if each.kind in kinds and each.group == group:
                        yield entry, each

    def names(self) -> Sequence[str]:
        """Return the names of groups, members and publishers. Raises `CorruptMessage`."""
        if self._names is None:
            self._names = self._decode_names()
        return self._names

    def _name(self, number: int) -> str:
        if not number:
            return ""
        names = self.names()
        if number > len(names):
            raise CorruptMessage("a row of a trace block has an unknown name")
        return names[number - 1]

    def _decode_names(self) -> list[str]:
        position, data, names = self._names_position, self._data, []
        try:
            for _ in range(self.header.names):
                (length,) = _NAME_LENGTH.unpack_from(data, position)
                position += _NAME_LENGTH.size
                names.append(str(data[position : position + length], "utf-8", "replace"))
                position += length
        except error as damage:
            raise CorruptMessage("a trace block is shorter than its header says") from damage
        if position > len(data):
            raise CorruptMessage("a trace block is shorter than its header says")
        return names
