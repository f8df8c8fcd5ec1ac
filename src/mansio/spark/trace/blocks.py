"""Decodes blocks of the trace log to Arrow columns, without a Python object per row.

Rows and index entries have a fixed size, so numpy reads them where they lie in the block. Names have numbers in each
block; in the result they are the values of a dictionary column.

Invariants:
* The result has what `TraceBlock.rows` yields for the selected entries, in the same order.
* A block in which a position or a number is out of range raises `CorruptMessage`, and adds no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from mansio.errors import CorruptMessage
from mansio.state.trace.timeline import KIND_NAMES
from mansio.wire.internal_records.trace_records import CONTROL_KINDS, ENDED, ENTRY, LED, ROW

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from mansio.wire.internal_records.trace_records import BlockHeader, TraceBlock

ROW_DTYPE: Final = np.dtype(
    [
        ("kind", "u1"),
        ("cause", "u1"),
        ("attempt", ">u2"),
        ("group", ">u2"),
        ("who", ">u2"),
        ("delta_ms", ">u4"),
        ("first", ">i8"),
        ("size", ">u4"),
        ("extra", ">i8"),
    ]
)
ENTRY_DTYPE: Final = np.dtype(
    {
        "names": ["topic", "partition", "row", "first", "end", "leader_epoch"],
        "formats": [">u2", ">u4", ">u4", ">i8", ">i8", ">i4"],
        "offsets": [0, 4, 8, 12, 20, 28],
        "itemsize": ENTRY.size,
    }
)
assert ROW_DTYPE.itemsize == ROW.size

KIND_COLUMN_NAMES: Final = [
    {**KIND_NAMES, LED: "leadership-begun", ENDED: "leadership-ended"}.get(number, f"kind-{number}")
    for number in range(256)
]
"""Names of the kinds of rows, by number."""

_IS_CONTROL: Final = np.zeros(256, np.bool_)
_IS_CONTROL[[*CONTROL_KINDS]] = True

NAME_TYPE: Final = pa.dictionary(pa.int32(), pa.string())

TRACE_SCHEMA: Final = pa.schema(
    [
        ("topic", NAME_TYPE),
        ("topic_id", pa.dictionary(pa.int32(), pa.binary())),
        ("partition", pa.int32()),
        ("first_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("kind", pa.dictionary(pa.uint8(), pa.string())),
        ("cause", pa.uint8()),
        ("time", pa.timestamp("ms", tz="UTC")),
        ("group", NAME_TYPE),
        ("member", NAME_TYPE),
        ("attempt", pa.int32()),
        ("leader_epoch", pa.int32()),
        ("broker", pa.int32()),
        ("incarnation", pa.int64()),
        ("sequence", pa.int64()),
        ("extra", pa.int64()),
    ]
)
"""Columns of the trace, a row for each row of a block (`TraceRow`).

`topic`: null if the name is not known. `group`, `member`: null for none; of a publication `member` is the publisher.
`kind`: its number is the index of the dictionary. `broker`, `incarnation`: the process that has written the block, with
the number `sequence`. A row about a partition has no offsets: `last_offset` is below `first_offset`.
"""


class TraceSelection:
    """The rows to decode: those about partitions of a topic, by partition with the first and the end of the offsets,
    that have one of these kinds. Rows about the partitions themselves are selected, whatever the offsets."""

    __slots__ = ("_bounds", "_kinds", "_partitions", "topic_id")

    def __init__(
        self, topic_id: bytes, ranges: Mapping[int, tuple[int, int]], kinds: Collection[int]
    ) -> None:
        self.topic_id = topic_id
        self._partitions = np.array(sorted(ranges), np.int64)
        self._bounds = np.array([ranges[each] for each in sorted(ranges)], np.int64)
        self._kinds = np.zeros(256, np.bool_)
        self._kinds[[*kinds]] = True

    def entries(self, topic: int, entries: NDArray[Any]) -> NDArray[np.int64]:
        """Return which index entries may have selected rows. `topic`: number of the topic in the block."""
        first, end, is_known = self._ranges(entries["partition"])
        wanted = (entries["topic"] == topic) & is_known & (entries["first"] < end) & (entries["end"] > first)
        return np.flatnonzero(wanted)

    def rows(self, rows: NDArray[Any], partitions: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether each row of selected entries, about these partitions, is selected."""
        first, end, _ = self._ranges(partitions)
        touches = (rows["first"] < end) & (rows["first"] + rows["size"] > first)
        chosen: NDArray[np.bool_] = (self._kinds[rows["kind"]] & touches) | _IS_CONTROL[rows["kind"]]
        return chosen

    def _ranges(self, partitions: NDArray[Any]) -> tuple[Any, Any, NDArray[np.bool_]]:
        """Return the first and the end offset of the range of each partition, and whether it has one."""
        if len(self._partitions) == 1:
            first, end = self._bounds[0]
            return first, end, partitions == self._partitions[0]
        places = np.minimum(np.searchsorted(self._partitions, partitions), len(self._partitions) - 1)
        return self._bounds[places, 0], self._bounds[places, 1], self._partitions[places] == partitions


class BlockRows(NamedTuple):
    """The selected rows of a block, and the index entry of each row."""

    header: BlockHeader
    rows: NDArray[Any]
    entries: NDArray[Any]
    topic_ids: Sequence[bytes]
    names: Sequence[str]


def spans(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of several spans, one behind the other: `counts[0]` numbers from `first[0]` on, and so on."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    numbers: NDArray[np.int64] = np.arange(total, dtype=np.int64) + np.repeat(first - before, counts)
    return numbers


def select_rows(block: TraceBlock, selection: TraceSelection | None = None) -> BlockRows | None:
    """Return the selected rows of a block, all without a selection; None if there is none. Raises `CorruptMessage`."""
    header = block.header
    topic = -1 if selection is None else block.topic_number(selection.topic_id)
    if not header.entries or (selection is not None and topic < 0):
        return None
    entries = np.frombuffer(block.packed_entries(), ENTRY_DTYPE)
    begins = entries["row"].astype(np.int64)
    counts = np.append(begins[1:], header.rows) - begins
    if begins[0] < 0 or (counts < 0).any():
        raise CorruptMessage("the index of a trace block refers to rows that it does not have")
    chosen = np.arange(len(entries))
    if selection is not None:
        chosen = selection.entries(topic, entries)
        if not len(chosen):
            return None
    numbers = np.repeat(chosen, counts[chosen])
    rows = np.frombuffer(block.packed_rows(), ROW_DTYPE)[spans(begins[chosen], counts[chosen])]
    if selection is not None:
        keep = selection.rows(rows, entries["partition"][numbers])
        rows, numbers = rows[keep], numbers[keep]
    if not len(rows):
        return None
    names = block.names()
    if max(rows["group"].max(), rows["who"].max()) > len(names):
        raise CorruptMessage("a row of a trace block has an unknown name")
    if entries["topic"][numbers].max() >= header.topics:
        raise CorruptMessage("the index of a trace block has an unknown topic")
    return BlockRows(header, rows, entries[numbers], block.topic_ids(), names)


def decode_blocks(blocks: Iterable[TraceBlock], topics: Mapping[bytes, str] | None = None) -> pa.RecordBatch:
    """Return all rows of the blocks with the columns of `TRACE_SCHEMA`. `topics`: names of topics by id. Raises
    `CorruptMessage`."""
    found = [select_rows(block) for block in blocks]
    return to_columns([each for each in found if each is not None], topics)


def to_columns(selected: Sequence[BlockRows], topics: Mapping[bytes, str] | None = None) -> pa.RecordBatch:
    """Return the rows with the columns of `TRACE_SCHEMA`. `topics`: names of topics by id."""
    if not selected:
        return pa.RecordBatch.from_pylist([], TRACE_SCHEMA)
    rows = np.concatenate([each.rows for each in selected])
    entries = np.concatenate([each.entries for each in selected])
    counts = np.array([len(each.rows) for each in selected])
    names: dict[str, int] = {}
    topic_ids: dict[bytes, int] = {}
    groups, members, topic_codes = [], [], []
    for each in selected:
        codes = np.array([-1, *(names.setdefault(name, len(names)) for name in each.names)], np.int32)
        groups.append(codes[each.rows["group"]])
        members.append(codes[each.rows["who"]])
        ids = np.array([topic_ids.setdefault(one, len(topic_ids)) for one in each.topic_ids], np.int32)
        topic_codes.append(ids[each.entries["topic"]])
    first = rows["first"].astype(np.int64)
    begins_ms = _of_blocks([each.header.begin_ms for each in selected], counts)
    id_codes = np.concatenate(topic_codes)
    topic_names = [(topics or {}).get(each) for each in topic_ids]
    is_named = np.array([each is not None for each in topic_names])
    return pa.RecordBatch.from_arrays(
        [
            name_column(np.where(is_named[id_codes], id_codes, -1), [each or "" for each in topic_names]),
            pa.DictionaryArray.from_arrays(pa.array(id_codes), pa.array([*topic_ids], pa.binary())),
            pa.array(entries["partition"].astype(np.int32)),
            pa.array(first),
            pa.array(first + rows["size"].astype(np.int64) - 1),
            pa.DictionaryArray.from_arrays(pa.array(rows["kind"]), pa.array(KIND_COLUMN_NAMES)),
            pa.array(rows["cause"]),
            pa.array(begins_ms + rows["delta_ms"].astype(np.int64)).cast(TRACE_SCHEMA.field("time").type),
            name_column(np.concatenate(groups), [*names]),
            name_column(np.concatenate(members), [*names]),
            pa.array(rows["attempt"].astype(np.int32)),
            pa.array(entries["leader_epoch"].astype(np.int32)),
            pa.array(_of_blocks([each.header.broker_id for each in selected], counts).astype(np.int32)),
            pa.array(_of_blocks([each.header.incarnation for each in selected], counts)),
            pa.array(_of_blocks([each.header.sequence for each in selected], counts)),
            pa.array(rows["extra"].astype(np.int64)),
        ],
        schema=TRACE_SCHEMA,
    )


def _of_blocks(values: Sequence[int], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a value of each block for each of its rows."""
    return np.repeat(np.array(values, np.int64), counts)


def name_column(codes: NDArray[np.int32], names: Sequence[str]) -> pa.DictionaryArray:
    """Return a column of names by their codes; null for a code below 0."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(names, pa.string()))
