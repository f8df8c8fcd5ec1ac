"""Deliveries of share groups, computed from the trace of one partition: a row for each delivery attempt of a record.

The rules are those of timelines (`mansio.state.trace.timeline`), applied to many records at once: rows of the trace,
which concern ranges of offsets, are expanded to one for each record, in pieces of bounded size, and sorted by record,
group and order. A delivery begins with its row, or, if that is missing, with the first row that shows that there was
this attempt, and ends with the first row that ends the lease.

Invariants:
* Times, waits, members and certainty are those of the record's timeline, of which the brokers know more: a record that
  the broker itself has appended (delayed, scheduled, or a dead letter) has no publication here, so it is not certain.
* Each delivery is in one row, whatever the sizes of the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from mansio.spark.arrow.schema import TIMESTAMP_TYPE
from mansio.spark.trace.blocks import KIND_COLUMN_NAMES, name_column, spans, to_columns
from mansio.state.share_partition.types import ACQUIRED, ARCHIVING
from mansio.state.trace.coverage import TracedRow
from mansio.state.trace.timeline import (
    DETAILS,
    NO_PUBLICATION,
    STATE_AFTER,
    coverage_gaps,
    find_leaderships,
    gap_changes,
    unknown_outcome,
)
from mansio.wire.internal_records import trace_records as kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mansio.state.trace.coverage import Coverage

    Integers = NDArray[np.int64]

DELIVERY_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("group", pa.string()),
        ("attempt", pa.int32()),
        ("member", pa.string()),
        ("published_at", TIMESTAMP_TYPE),
        ("delivered_at", TIMESTAMP_TYPE),
        ("ended_at", TIMESTAMP_TYPE),
        ("end", pa.string()),
        ("cause", pa.string()),
        ("offered_again_at", TIMESTAMP_TYPE),
        ("dead_lettered_at", TIMESTAMP_TYPE),
        ("wait_ms", pa.int64()),
        ("held_ms", pa.int64()),
        ("certain", pa.bool_()),
        ("uncertainties", pa.list_(pa.field("element", pa.string()))),
    ]
)
"""Columns of the deliveries of a topic.

`end`: how the lease ended, as timelines name it; null for a delivery of which no end is known. `cause`: details of the
end. `offered_again_at`: of a record that was offered again later. `wait_ms`: time from the event before the delivery,
of the same group, or from the publication. `held_ms`: time from the delivery to its end. `certain`, `uncertainties`:
whether the trace has everything about the record from its publication until now, and why not. What is not known is
null.
"""

_SPARK_TYPES: Final = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    TIMESTAMP_TYPE: "timestamp",
    DELIVERY_SCHEMA.field("uncertainties").type: "array<string>",
}
DELIVERY_SPARK_TYPES: Final = {each.name: _SPARK_TYPES[each.type] for each in DELIVERY_SCHEMA}
"""Spark types of the columns, by name."""

ENDS: Final = (
    kinds.RELEASED,
    kinds.EXPIRED,
    kinds.ACKNOWLEDGED,
    kinds.REJECTED,
    kinds.ATTEMPTS_USED_UP,
    kinds.DEAD_LETTERED,
    kinds.DISCARDED,
    kinds.DELETED,
)
"""Kinds of rows that end a delivery; the first one of an attempt does."""

ATTEMPT_KINDS: Final = (
    kinds.RENEWED,
    kinds.RELEASED,
    kinds.EXPIRED,
    kinds.ACKNOWLEDGED,
    kinds.REJECTED,
    kinds.ATTEMPTS_USED_UP,
    kinds.DEAD_LETTERED,
)
"""Kinds of rows that show that there was their attempt, even if the row of its delivery is missing."""

GROUP_KINDS: Final = (
    kinds.DELIVERED,
    *ENDS,
    *ATTEMPT_KINDS,
    kinds.REDRIVEN,
    kinds.LOADED,
    kinds.UNKNOWN_OUTCOME,
)
DELIVERY_KINDS: Final = frozenset({*GROUP_KINDS, kinds.PUBLISHED})
"""Kinds of rows that deliveries are computed from, beside those about the partition."""

PIECE_OFFSETS_MAX: Final = 1 << 16
PIECE_ROWS_MAX: Final = 1 << 20
"""Number of records, and of rows expanded to records, that are processed at once; a single record may have more."""

_NONE: Final = -1
_STATES: Final = np.full(256, _NONE, np.int16)
for _kind, _state in STATE_AFTER.items():
    _STATES[_kind] = _state


OFFSET_END: Final = (1 << 63) - 1


class DeliveryRange(NamedTuple):
    """Deliveries to compute: those of the records from the offset `first` to below `end`, that began at `from_ms` or
    later and before `to_ms` (ms since the Unix epoch). A delivery whose begin is not known counts from the first time
    that is known of it."""

    first: int = 0
    end: int = OFFSET_END
    from_ms: int = 0
    to_ms: int = OFFSET_END


class _Rows(NamedTuple):
    """Rows of the trace as columns: in the order of the leaders, then as they were written."""

    kind: NDArray[np.uint8]
    cause: NDArray[np.uint8]
    attempt: Integers
    group: NDArray[np.int32]
    member: NDArray[np.int32]
    time: Integers
    first: Integers
    end: Integers
    extra: Integers

    def take(self, chosen: NDArray[Any]) -> _Rows:
        return _Rows(*(column[chosen] for column in self))


class PartitionDeliveries:
    """The deliveries of the records of one partition."""

    def __init__(
        self,
        topic: str,
        partition: int,
        batches: Sequence[pa.RecordBatch],
        coverage: Sequence[Coverage],
        now_ms: int,
        wanted: DeliveryRange = DeliveryRange(),  # noqa: B008  # immutable
    ) -> None:
        """`batches`: rows of the trace about the partition (`TRACE_SCHEMA`), those of a process in their order.
        `coverage`: of all processes that have written to the trace. `now_ms`: when the last of it was read."""
        self._topic = topic
        self._partition = partition
        self._wanted = wanted
        self._coverage = coverage
        self._now_ms = now_ms
        table = pa.Table.from_batches(batches or [to_columns([])])
        order = np.lexsort((_integers(table, "incarnation"), _integers(table, "leader_epoch")))
        names = table.select(("group", "member")).unify_dictionaries()
        groups, self._groups = _codes(names["group"])
        members, self._members = _codes(names["member"])
        rows = _Rows(
            _codes(table["kind"])[0].astype(np.uint8),  # all blocks have the same dictionary
            table["cause"].to_numpy().astype(np.uint8),
            _integers(table, "attempt"),
            groups,
            members,
            table["time"].cast(pa.int64()).to_numpy(),
            _integers(table, "first_offset"),
            _integers(table, "last_offset") + 1,
            _integers(table, "extra"),
        ).take(order)
        control = np.flatnonzero(np.isin(rows.kind, [*kinds.CONTROL_KINDS]))
        processes = {
            name: _integers(table, name)[order] for name in ("broker", "incarnation", "leader_epoch")
        }
        self._leaderships = find_leaderships(
            TracedRow(
                kinds.TraceRow(
                    int(rows.kind[at]),
                    int(rows.cause[at]),
                    0,
                    "",
                    "",
                    int(rows.time[at]),
                    0,
                    0,
                    int(rows.extra[at]),
                ),
                int(processes["broker"][at]),
                int(processes["incarnation"][at]),
                int(processes["leader_epoch"][at]),
            )
            for at in control
        )
        self._published = rows.take(np.flatnonzero(rows.kind == kinds.PUBLISHED))
        self._rows = rows.take(np.flatnonzero(np.isin(rows.kind, GROUP_KINDS)))
        self._changes_ms = np.array(gap_changes(self._leaderships, coverage), np.int64)
        self._gaps: dict[int, tuple[str, ...]] = {_NONE: (NO_PUBLICATION,)}
        """Why rows may be missing since a time, by the number of changes before it; -1: since an unknown time."""

    def batches(self, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yield the deliveries with the columns of `DELIVERY_SCHEMA`, by offset and group in their order, at most
        `rows_max` in a batch."""
        for offsets in self._pieces():
            found = self._deliveries(offsets)
            for begin in range(0, found.num_rows, rows_max):
                yield found.slice(begin, rows_max)

    def _pieces(self) -> Iterator[Integers]:
        """Yield the offsets of the records that have deliveries, in ascending pieces of bounded size."""
        rows = self._rows
        shows_attempt = np.flatnonzero(_shows_attempt(rows))
        first = np.maximum(rows.first[shows_attempt], self._wanted.first)
        end = np.minimum(rows.end[shows_attempt], self._wanted.end)
        first, end = _joined(first[first < end], end[first < end])
        at = 0
        while at < len(first):
            sizes = np.cumsum(end[at : at + PIECE_OFFSETS_MAX] - first[at : at + PIECE_OFFSETS_MAX])
            count = int(np.searchsorted(sizes, PIECE_OFFSETS_MAX, "right"))
            if not count:  # longer than a piece
                yield from self._split(np.arange(first[at], first[at] + PIECE_OFFSETS_MAX, dtype=np.int64))
                first[at] += PIECE_OFFSETS_MAX
                continue
            yield from self._split(
                spans(first[at : at + count], end[at : at + count] - first[at : at + count])
            )
            at += count

    def _split(self, offsets: Integers) -> Iterator[Integers]:
        """Split a piece in halves until its expanded rows have a bounded size."""
        first, end = self._places(self._rows, offsets)
        if len(offsets) == 1 or int((end - first).sum()) <= PIECE_ROWS_MAX:
            yield offsets
            return
        middle = len(offsets) // 2
        yield from self._split(offsets[:middle])
        yield from self._split(offsets[middle:])

    def _places(self, rows: _Rows, offsets: Integers) -> tuple[Integers, Integers]:
        """Return, for each row, the places in `offsets` of the records that it concerns."""
        return np.searchsorted(offsets, rows.first), np.searchsorted(offsets, rows.end)

    def _expanded(self, rows: _Rows, offsets: Integers) -> tuple[Integers, Integers]:
        """Return the rows for each of their records: places in `offsets`, and places in `rows`, in the order of
        `rows`."""
        first, end = self._places(rows, offsets)
        used = np.flatnonzero(end > first)
        counts = (end - first)[used]
        return spans(first[used], counts), np.repeat(used, counts)

    def _deliveries(self, offsets: Integers) -> pa.RecordBatch:
        """Return the deliveries of the records at these offsets."""
        published_ms = np.full(len(offsets), _NONE, np.int64)
        record, at = self._expanded(self._published, offsets)
        published_ms[record] = self._published.time[at]  # the last one counts, of the latest leader
        record, at = self._expanded(self._rows, offsets)
        reasons = self._uncertainties(published_ms, record, at)
        order = np.lexsort((self._rows.group[at], record))
        record, rows = record[order], self._rows.take(at[order])
        is_event = ~_repeats_state(rows, _begins(record, rows.group))
        record, rows = record[is_event], rows.take(is_event)
        starts = _begins(record, rows.group)
        previous_ms = np.append(_NONE, rows.time[:-1])
        is_first = starts == np.arange(len(record))
        previous_ms[is_first] = published_ms[record][is_first]

        begins = _attempt_begins(rows, starts)
        owner = _last_where(begins)
        is_owned = (owner >= starts) & (rows.attempt == rows.attempt[np.maximum(owner, 0)])
        owner = np.where(is_owned, owner, _NONE)
        chosen = np.flatnonzero(
            begins & (rows.time >= self._wanted.from_ms) & (rows.time < self._wanted.to_ms)
        )
        end = _first_of(owner, np.isin(rows.kind, ENDS))[chosen]
        buried = _first_of(owner, rows.kind == kinds.DEAD_LETTERED)[chosen]
        named = _first_of(owner, rows.member >= 0)[chosen]

        has_end, is_delivered = end >= 0, rows.kind[chosen] == kinds.DELIVERED
        delivered_ms = np.where(is_delivered, rows.time[chosen], _NONE)
        ended_ms = np.where(has_end, rows.time[end], _NONE)
        wait_known = is_delivered & (previous_ms[chosen] >= 0)
        wait_ms = np.where(wait_known, np.maximum(rows.time[chosen] - previous_ms[chosen], 0), _NONE)
        held_ms = np.where(has_end & is_delivered, np.maximum(ended_ms - delivered_ms, 0), _NONE)
        end_kind = np.where(has_end, rows.kind[end], 0)
        is_back = has_end & np.isin(end_kind, (kinds.RELEASED, kinds.EXPIRED))
        again_ms = np.where(is_back & (rows.extra[end] > ended_ms), rows.extra[end], _NONE)
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(self._topic, pa.string()), len(chosen)),
                pa.repeat(pa.scalar(self._partition, pa.int32()), len(chosen)),
                pa.array(offsets[record[chosen]]),
                name_column(rows.group[chosen], self._groups).cast(pa.string()),
                pa.array(rows.attempt[chosen].astype(np.int32)),
                name_column(np.where(named >= 0, rows.member[named], _NONE), self._members).cast(pa.string()),
                _times(published_ms[record[chosen]]),
                _times(delivered_ms),
                _times(ended_ms),
                pa.array(KIND_COLUMN_NAMES).take(pa.array(end_kind.astype(np.int32), mask=~has_end)),
                _causes(end_kind, np.where(has_end, rows.cause[end], 0)),
                _times(again_ms),
                _times(np.where(buried >= 0, rows.time[buried], _NONE)),
                _known(wait_ms),
                _known(held_ms),
                *_certainty(reasons, record[chosen]),
            ],
            schema=DELIVERY_SCHEMA,
        )

    def _uncertainties(
        self, published_ms: Integers, record: Integers, at: Integers
    ) -> tuple[NDArray[np.int32], list[tuple[str, ...]]]:
        """Return why the trace of each record may lack something: its number in the list of different answers.
        `record`, `at`: the rows about the records."""
        intervals = np.searchsorted(self._changes_ms, published_ms, "right")
        intervals = np.where(published_ms >= 0, intervals, _NONE)
        found, firsts, numbers = np.unique(intervals, return_index=True, return_inverse=True)
        answers = [
            self._gaps_since(interval, int(published_ms[at]))
            for interval, at in zip(found.tolist(), firsts.tolist(), strict=True)
        ]
        codes = numbers.astype(np.int32)
        is_unknown = self._rows.kind[at] == kinds.UNKNOWN_OUTCOME
        for one, row in zip(record[is_unknown].tolist(), at[is_unknown].tolist(), strict=True):
            group = self._rows.group[row]
            text = unknown_outcome(self._groups[group] if group >= 0 else "", int(self._rows.time[row]))
            answers.append(tuple(dict.fromkeys((*answers[codes[one]], text))))
            codes[one] = len(answers) - 1
        return codes, answers

    def _gaps_since(self, interval: int, begin_ms: int) -> tuple[str, ...]:
        found = self._gaps.get(interval)
        if found is None:
            gaps = coverage_gaps(begin_ms, self._leaderships, self._coverage, self._now_ms)
            found = self._gaps[interval] = tuple(dict.fromkeys(gaps))
        return found


def _integers(table: pa.Table, name: str) -> Integers:
    column: Integers = table[name].to_numpy().astype(np.int64)
    return column


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int32], list[str]]:
    """Return a column of names as codes, -1 for null, and the names by code. All chunks have the same names."""
    codes = [each.indices.cast(pa.int32()).fill_null(_NONE).to_numpy() for each in column.chunks]
    return np.concatenate(codes), column.chunk(0).dictionary.to_pylist()


def _joined(first: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Return the ranges as ascending ranges that do not overlap."""
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order]) if len(end) else end
    is_begin = np.append(True, first[1:] > end[:-1])[: len(first)]
    last = np.flatnonzero(np.append(is_begin[1:], True))[: int(is_begin.sum())]
    return first[is_begin], end[last] if len(end) else end


def _shows_attempt(rows: _Rows) -> NDArray[np.bool_]:
    """Whether each row shows that there was its attempt."""
    is_leased = (rows.kind == kinds.LOADED) & (rows.cause == ACQUIRED)
    found: NDArray[np.bool_] = (rows.kind == kinds.DELIVERED) | (
        (np.isin(rows.kind, ATTEMPT_KINDS) | is_leased) & (rows.attempt > 0)
    )
    return found


def _begins(record: Integers, group: NDArray[np.int32]) -> Integers:
    """Return, for each row, the place of the first row of the same record and group; the rows are sorted by them."""
    is_new = np.append(True, (record[1:] != record[:-1]) | (group[1:] != group[:-1]))[: len(record)]
    return _last_where(is_new)


def _last_where(condition: NDArray[np.bool_]) -> Integers:
    """Return, for each place, the last one up to it where the condition is true; -1 for none."""
    places = np.where(condition, np.arange(len(condition)), _NONE)
    return np.maximum.accumulate(places) if len(places) else places


def _last_before(condition: NDArray[np.bool_]) -> Integers:
    """Return, for each place, the last one before it where the condition is true; -1 for none."""
    return np.append(_NONE, _last_where(condition)[:-1])[: len(condition)]


def _first_of(owner: Integers, condition: NDArray[np.bool_]) -> Integers:
    """Return, for each place of an owner, the first one that it owns where the condition is true; -1 for none."""
    found = np.full(len(owner), _NONE, np.int64)
    places = np.flatnonzero(condition & (owner >= 0))[::-1]
    found[owner[places]] = places  # the last assignment is that of the first place
    return found


def _repeats_state(rows: _Rows, starts: Integers) -> NDArray[np.bool_]:
    """Whether each row states what was known: the state that a new leader has loaded."""
    is_loaded = rows.kind == kinds.LOADED
    state = np.where(is_loaded, rows.cause, _STATES[rows.kind])
    before = _last_before(state != _NONE)
    same = (state[before] == state) & ((rows.attempt[before] == rows.attempt) | (state == ARCHIVING))
    repeats: NDArray[np.bool_] = is_loaded & (before >= starts) & same
    return repeats


def _attempt_begins(rows: _Rows, starts: Integers) -> NDArray[np.bool_]:
    """Whether each row is the first one of an attempt."""
    shows = _shows_attempt(rows)
    before = _last_before(shows)
    is_other = (before < starts) | (rows.attempt[before] != rows.attempt)
    begins: NDArray[np.bool_] = (rows.kind == kinds.DELIVERED) | (shows & is_other)
    return begins


def _known(values: Integers) -> pa.Array:
    """Return a column in which what is below 0 is null."""
    return pa.array(values, mask=values < 0)


def _times(unix_ms: Integers) -> pa.Array:
    return _known(np.where(unix_ms >= 0, unix_ms * 1000, _NONE)).cast(TIMESTAMP_TYPE)


def _causes(kind: NDArray[Any], cause: NDArray[Any]) -> pa.Array:
    """Return the details of rows, null for those that have none."""
    pairs, numbers = np.unique(kind.astype(np.int64) << 8 | cause, return_inverse=True)
    texts = [DETAILS.get((int(each) >> 8, int(each) & 255)) for each in pairs]
    return pa.array(texts, pa.string()).take(pa.array(numbers))


def _certainty(
    reasons: tuple[NDArray[np.int32], list[tuple[str, ...]]], record: Integers
) -> tuple[pa.Array, pa.Array]:
    """Return the columns `certain` and `uncertainties` for rows about these records."""
    codes, answers = reasons
    chosen = pa.array(codes[record])
    certain = pa.array([not each for each in answers], pa.bool_())
    texts = pa.array([list(each) for each in answers], DELIVERY_SCHEMA.field("uncertainties").type)
    return certain.take(chosen), texts.take(chosen)
