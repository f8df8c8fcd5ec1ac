"""Rows of the trace log that a broker has collected, and has not written yet.

`PartitionTrace` is what a partition reports to while this broker leads it. It keeps what it is given, packs nothing and
encodes nothing: consecutive batches of one publisher are one run, and the changes of a share partition are kept as they
are stored. `SealedRows.pack` makes rows of them, later and in parts.

Invariants:
* What is reported for a partition is in the order in which it happened.
* A partition reports `LED` before anything else, so that a reader knows where a stretch of it begins.
* At most `2 * ROWS_MAX` rows are kept; more are dropped and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.state.trace.share_rows import NO_ROW, kind_of
from mansio.wire.internal_records.trace_records import (
    CONTINUED,
    CONTROL_KINDS,
    DUE,
    ENDED,
    LED,
    LED_WITHOUT_TRACE,
    LOADED,
    NAME_CHARACTERS_MAX,
    NAMES_MAX,
    NO_VALUE,
    POSITION,
    PUBLISHED,
    ROW,
    TURNED_OFF,
    TURNED_ON,
    UNKNOWN_OUTCOME,
    PartitionRows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.state.share_partition.types import StateBatch, Update

ROWS_MAX: Final = 14_000
"""Number of rows after which they are written without waiting for the end of the second: 450 kB."""

RUN_MS_MAX: Final = 50
"""Time of a run: the publication of a record is known as precisely."""

LED_INTERVAL_MS: Final = 3_600_000
"""Time after which a leadership is reported again, so that it is known when the older blocks are deleted."""

NAME_BYTES_MAX: Final = 1 << 20
"""Size of the names in a block."""

LOADED_ROWS_MAX: Final = 200
"""Maximum number of ranges of a loaded share partition that are reported."""

OFFSET_MAX: Final = (1 << 63) - 1
_UINT16_MAX: Final = (1 << 16) - 1
_UINT32_MAX: Final = (1 << 32) - 1


class Publisher(Protocol):
    """A client that publishes; the same object as long as it is the same client."""

    @property
    def trace_name(self) -> str:
        """The client id and the address, and the user of an authenticated client."""


class _Changes(NamedTuple):
    group: str
    updates: Sequence[Update]
    time_ms: int


class _Row(NamedTuple):
    kind: int
    cause: int
    attempt: int
    group: str
    who: str
    time_ms: int
    first: int
    size: int
    extra: int


if TYPE_CHECKING:
    _Event = tuple[Publisher | None, int, int, int] | _Changes | _Row
    """A run of batches of one publisher, as the publisher, first offset, end offset and time; or something else."""


class PartitionTrace:
    """What happens to one partition while this broker leads it in one leader epoch."""

    __slots__ = (
        "_buffer",
        "_events",
        "_is_dirty",
        "_is_off",
        "_run_first",
        "_run_ms",
        "begin_ms",
        "leader_epoch",
        "led_ms",
        "partition",
        "publisher",
        "run_end",
        "run_until_ms",
        "topic_id",
    )

    def __init__(self, buffer: TraceBuffer, topic_id: bytes, partition: int, leader_epoch: int) -> None:
        self._buffer = buffer
        self.topic_id = topic_id
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.publisher: Publisher | None = None
        """Publisher of the current run. A caller extends the run, by `run_end`, if it is the publisher's next batch."""
        self.run_end = NO_VALUE
        """End offset of the current run, -1 if there is none."""
        self._run_first = NO_VALUE
        self._run_ms = 0
        self.run_until_ms = 0
        """Time up to which a batch extends the run."""
        self.led_ms = self.begin_ms = NO_VALUE
        """When the leadership was reported last, and when it began; -1 for positions of groups, which need none."""
        self._events: list[_Event] = []
        self._is_dirty = False
        self._is_off = False

    def begin_run(self, publisher: Publisher | None, first: int, end: int, now_ms: int) -> None:
        """Report the batch of another publisher, or at another offset, than the last one."""
        buffer = self._buffer
        if self.run_end >= 0:
            self._events.append((self.publisher, self._run_first, self.run_end, self._run_ms))
        elif not self._is_dirty:
            self._is_dirty = True
            buffer.dirty.append(self)
        if not buffer.has_events:
            buffer.begin_events()
        buffer.row_count += 1
        if buffer.row_count >= ROWS_MAX and not buffer.admits(1):
            self.publisher, self.run_end = None, NO_VALUE
            return
        self.publisher, self._run_first, self.run_end, self._run_ms = publisher, first, end, now_ms
        self.run_until_ms = now_ms + RUN_MS_MAX

    def report_updates(self, group: str, updates: Sequence[Update], now_ms: int) -> None:
        """Report updates of a share partition that are stored."""
        self._add(_Changes(group, updates, now_ms), sum([len(each.changes) for each in updates]))

    def report_unknown(self, group: str, ranges: Iterable[tuple[int, int, int]], now_ms: int) -> None:
        """Report changes of a share partition, as first offset, last offset and deliveries, of which it is not known
        whether they are stored."""
        for first, last, deliveries in ranges:
            self._add_row(UNKNOWN_OUTCOME, now_ms, first, last + 1 - first, group=group, attempt=deliveries)

    def report_loaded(self, group: str, changes: Sequence[StateBatch], now_ms: int) -> None:
        """Report the state of a share partition that was loaded, at most `LOADED_ROWS_MAX` ranges of it."""
        for each in changes[:LOADED_ROWS_MAX]:
            self._add_row(
                LOADED,
                now_ms,
                each.first,
                each.last + 1 - each.first,
                cause=each.state,
                attempt=each.deliveries,
                group=group,
                who=each.holder,
            )

    def report_position(self, group: str, before: int, offset: int, now_ms: int) -> None:
        """Report that a group has committed the position `offset`, if it passes a record; `before` was its last one, -1
        for none."""
        if offset > max(before, 0):
            first = max(before, 0)
            self._add_row(POSITION, now_ms, first, offset - first, group=group)

    def report_due(self, accepted: Sequence[int], first: int, now_ms: int) -> None:
        """Report that the delayed records that were accepted at these offsets are appended at the offsets from `first`
        on. Those that follow one another in both have one row."""
        begin = 0
        for number in range(1, len(accepted) + 1):
            if number == len(accepted) or accepted[number] != accepted[number - 1] + 1:
                self._add_row(DUE, now_ms, accepted[begin], number - begin, extra=first + begin)
                begin = number

    def report_led(self, now_ms: int, *, is_turned_on: bool, is_off: bool) -> None:
        """Report that this broker leads the partition from now on. `is_turned_on`: and that its trace was off before;
        `is_off`: and that nothing is traced."""
        self.led_ms = self.begin_ms = now_ms
        cause = LED_WITHOUT_TRACE if is_off else TURNED_ON if is_turned_on else 0
        self._add_row(LED, now_ms, 0, 0, cause=cause)

    def end(self, now_ms: int, *, is_turned_off: bool = False) -> None:
        """Report that this broker does not lead the partition in this epoch any more, or that its trace is off."""
        self._add_row(ENDED, now_ms, 0, 0, cause=TURNED_OFF if is_turned_off else 0)
        self._is_off = is_turned_off

    def _add_row(
        self,
        kind: int,
        now_ms: int,
        first: int,
        count: int,
        *,
        cause: int = 0,
        attempt: int = 0,
        group: str = "",
        who: str = "",
        extra: int = NO_VALUE,
    ) -> None:
        self._add(_Row(kind, cause, attempt, group, who, now_ms, first, count, extra), 1)

    def _add(self, event: _Changes | _Row, row_count: int) -> None:
        buffer = self._buffer
        if self._is_off:
            return
        if event[0] in CONTROL_KINDS:
            buffer.on_control()
        elif not buffer.has_events:
            buffer.begin_events()
        buffer.row_count += row_count
        if buffer.row_count >= ROWS_MAX and not buffer.admits(row_count):
            return
        if self.run_end >= 0:
            self._events.append((self.publisher, self._run_first, self.run_end, self._run_ms))
            self.publisher, self.run_end = None, NO_VALUE
        elif not self._is_dirty:
            self._is_dirty = True
            buffer.dirty.append(self)
        self._events.append(event)

    def take(self) -> list[_Event]:
        """Return what was reported, and forget it."""
        if self.run_end >= 0:
            self._events.append((self.publisher, self._run_first, self.run_end, self._run_ms))
            self.publisher, self.run_end = None, NO_VALUE
        events, self._events = self._events, []
        self._is_dirty = False
        return events


class SealedRows(NamedTuple):
    """What was reported up to a time, by partition; `dropped`: number of rows that are missing."""

    events: list[tuple[PartitionTrace, list[_Event]]]
    row_count: int
    dropped: int

    def pack(self, names: NameTable, begin_ms: int, end_ms: int) -> Iterator[PartitionRows]:
        """Yield the rows of each partition. Their times are relative to `begin_ms`; `end_ms`: the time up to which they
        were reported."""
        for trace, events in self.events:
            if 0 <= trace.led_ms < end_ms - LED_INTERVAL_MS:
                trace.led_ms = end_ms
                events.insert(0, _Row(LED, CONTINUED, 0, "", "", begin_ms, 0, 0, trace.begin_ms))
            rows, first, end = _pack(events, names, begin_ms)
            yield PartitionRows(trace.topic_id, trace.partition, trace.leader_epoch, rows, first, end)


class NameTable:
    """Numbers of names in a block, from 1 on. A name that has no place is left out: its number is 0."""

    __slots__ = ("_bytes_left", "_numbers", "_publishers")

    def __init__(self) -> None:
        self._bytes_left = NAME_BYTES_MAX
        self._numbers: dict[str, int] = {"": 0}
        self._publishers: dict[int, tuple[Publisher, int]] = {}

    def number(self, name: str) -> int:
        """Return the number of a name."""
        number = self._numbers.get(name)
        if number is None:
            self._bytes_left -= 4 * min(len(name), NAME_CHARACTERS_MAX)  # in UTF-8 at most
            if len(self._numbers) > NAMES_MAX or self._bytes_left < 0:
                return 0
            number = self._numbers[name] = len(self._numbers)
        return number

    def number_of(self, publisher: Publisher | None) -> int:
        """Return the number of a publisher's name, which is made once."""
        if publisher is None:
            return 0
        known = self._publishers.get(id(publisher))
        if known is None:
            known = self._publishers[id(publisher)] = (publisher, self.number(publisher.trace_name))
        return known[1]

    def names(self) -> list[str]:
        """Return the names in the order of their numbers."""
        return list(self._numbers)[1:]


def _pack(events: Sequence[_Event], names: NameTable, begin_ms: int) -> tuple[bytearray, int, int]:
    """Return the rows of a partition, and the bounds of their offsets."""
    rows = bytearray()
    pack, number = ROW.pack, names.number
    lowest, highest = OFFSET_MAX, 0
    run_who = run_first = run_end = run_ms = -1
    """The last row, if it is a run."""
    for event in events:
        if type(event) is tuple:
            publisher, first, end, time_ms = event  # type: ignore[misc]  # the others have a class of their own
            who = names.number_of(publisher)
            if first == run_end and who == run_who and time_ms <= run_ms + RUN_MS_MAX:
                del rows[-ROW.size :]  # of the same client on another connection, or in another request
                first = run_first
            else:
                run_who, run_first, run_ms = who, first, time_ms
            run_end = end
            rows += pack(PUBLISHED, 0, 0, 0, who, max(run_ms - begin_ms, 0), first, end - first, -1)
            if first < lowest:
                lowest = first
            if end > highest:
                highest = end
            continue
        run_end = -1
        for kind, cause, attempt, group, member, time_ms, first, size, extra in _rows_of(event):  # type: ignore[arg-type]
            rows += pack(
                kind,
                cause,
                min(attempt, _UINT16_MAX),
                number(group),
                number(member),
                min(max(time_ms - begin_ms, 0), _UINT32_MAX),
                first,
                min(size, _UINT32_MAX),
                extra,
            )
            if kind in CONTROL_KINDS:  # whatever the offset that is looked for
                lowest, highest = 0, OFFSET_MAX
            lowest, highest = min(lowest, first), max(highest, first + size)
    return rows, lowest, highest


def _rows_of(event: _Changes | _Row) -> Iterator[_Row | tuple[int, int, int, str, str, int, int, int, int]]:
    if isinstance(event, _Row):
        yield event
        return
    for update in event.updates:
        for change in update.changes if update.traced is None else update.traced:
            kind, cause = kind_of(change, update.cause)
            if kind != NO_ROW:
                yield (
                    kind,
                    cause,
                    change.deliveries,
                    event.group,
                    change.holder,
                    event.time_ms,
                    change.first,
                    change.last + 1 - change.first,
                    change.due_ms,
                )


def _ignore() -> None:
    """Do nothing."""


class TraceBuffer:
    """The rows that all partitions of a broker have reported since they were last sealed."""

    __slots__ = ("_on_event", "_on_full", "dirty", "dropped", "has_events", "on_control", "row_count")

    def __init__(self) -> None:
        self._on_event = self.on_control = self._on_full = _ignore
        self.dirty: list[PartitionTrace] = []
        """Partitions that have something to report."""
        self.has_events = False
        """Whether there is a row about records."""
        self.dropped = 0
        """Number of rows that have found no place, or could not be written."""
        self.row_count = 0

    def listen(
        self,
        on_event: Callable[[], None],
        on_control: Callable[[], None],
        on_full: Callable[[], None],
    ) -> None:
        """`on_event` is called when the first row about records is reported after the rows were sealed; `on_control`
        with each row about a partition; `on_full` when there are `ROWS_MAX` rows, once for each further one until they
        are sealed. None of them may seal by itself."""
        self._on_event = on_event
        self.on_control = on_control
        self._on_full = on_full

    def lead(
        self,
        topic_id: bytes,
        partition: int,
        leader_epoch: int,
        now_ms: int,
        *,
        is_turned_on: bool = False,
        is_off: bool = False,
    ) -> PartitionTrace:
        """Return the trace of a partition that this broker leads from now on, or whose trace is on from now on.
        `is_off`: nothing is traced, which is reported only."""
        trace = PartitionTrace(self, topic_id, partition, leader_epoch)
        trace.report_led(now_ms, is_turned_on=is_turned_on, is_off=is_off)
        return trace

    def begin_events(self) -> None:
        """Note that there is a row about records."""
        self.has_events = True
        self._on_event()

    def admits(self, row_count: int) -> bool:
        """Whether rows, which `row_count` counts already, have a place; otherwise they are counted as dropped."""
        self._on_full()
        if self.row_count <= 2 * ROWS_MAX:
            return True
        self.row_count -= row_count
        self.dropped += row_count
        return False

    def drop(self, row_count: int) -> None:
        """Count rows that were sealed and could not be written."""
        self.dropped += row_count

    def seal(self) -> SealedRows:
        """Return what was reported since the last call."""
        dirty, self.dirty = self.dirty, []
        sealed = SealedRows([(trace, trace.take()) for trace in dirty], self.row_count, self.dropped)
        self.row_count = self.dropped = 0
        self.has_events = False
        return sealed
