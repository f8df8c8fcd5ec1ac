"""What partitions report is bounded, and packed into as few rows as tell the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.trace.trace_buffer import (
    LED_INTERVAL_MS,
    ROWS_MAX,
    RUN_MS_MAX,
    NameTable,
    PartitionTrace,
    TraceBuffer,
)
from mansio.wire.internal_records.trace_records import CONTINUED, LED, POSITION, PUBLISHED, ROW

if TYPE_CHECKING:
    from mansio.state.trace.trace_buffer import SealedRows

NOW_MS = 1_790_000_000_000


class Client:
    def __init__(self, name: str) -> None:
        self.trace_name = name


def rows_of(sealed: SealedRows, end_ms: int = NOW_MS) -> list[tuple[int, ...]]:
    return [row for part in sealed.pack(NameTable(), NOW_MS, end_ms) for row in ROW.iter_unpack(part.rows)]


def led(buffer: TraceBuffer) -> PartitionTrace:
    trace = buffer.lead(bytes(16), 0, 3, NOW_MS)
    buffer.seal()
    return trace


def test_batches_of_one_client_on_several_connections_are_one_row_within_the_time_of_a_run() -> None:
    buffer = TraceBuffer()
    trace = led(buffer)
    for offset, name, ms in ((0, "a", 0), (1, "a", 1), (2, "b", 2), (3, "b", 2 + RUN_MS_MAX), (4, "b", 999)):
        trace.begin_run(Client(name), offset, offset + 1, NOW_MS + ms)
    found = [(row[5], row[6], row[7]) for row in rows_of(buffer.seal())]
    assert found == [(0, 0, 2), (2, 2, 2), (999, 4, 1)]


def test_rows_beyond_the_bound_are_dropped_and_counted() -> None:
    full = 0

    def on_full() -> None:
        nonlocal full
        full += 1

    buffer = TraceBuffer()
    buffer.listen(lambda: None, lambda: None, on_full)
    trace = led(buffer)
    publishers = [Client("a"), Client("b")]
    count = 3 * ROWS_MAX
    for offset in range(count):
        trace.begin_run(publishers[offset % 2], 2 * offset, 2 * offset + 1, NOW_MS)
    sealed = buffer.seal()
    assert full > 0
    assert sealed.row_count <= 2 * ROWS_MAX
    assert sealed.row_count + sealed.dropped == count
    assert len(rows_of(sealed)) == sealed.row_count


def test_a_position_that_passes_no_record_has_no_row() -> None:
    buffer = TraceBuffer()
    trace = PartitionTrace(buffer, bytes(16), 0, -1)
    for before, offset in ((-1, -1), (-1, 0), (5, 5), (5, 3), (5, 8)):
        trace.report_position("g", before, offset, NOW_MS)
    assert [(row[0], row[6], row[7]) for row in rows_of(buffer.seal())] == [(POSITION, 5, 3)]


def test_a_leadership_is_reported_again_with_the_first_row_after_an_hour() -> None:
    buffer = TraceBuffer()
    trace = led(buffer)
    for hours in (0.5, 1.1, 1.2):
        now_ms = NOW_MS + round(hours * LED_INTERVAL_MS)
        trace.begin_run(None, 0, 1, now_ms)
        found = [(row[0], row[1], row[8]) for row in rows_of(buffer.seal(), now_ms)]
        again = [(LED, CONTINUED, NOW_MS)] if hours == 1.1 else []
        assert found == [*again, (PUBLISHED, 0, -1)]


def test_names_beyond_the_size_of_a_block_are_left_out() -> None:
    names = NameTable()
    numbers = [names.number(f"{number}" + "\U0001f600" * 249) for number in range(3_000)]
    assert numbers[0] == 1
    assert numbers[-1] == 0
    assert sum(len(name.encode()) for name in names.names()) < 2 << 20


def test_delayed_records_that_follow_one_another_have_one_row() -> None:
    buffer = TraceBuffer()
    trace = led(buffer)
    buffer.seal()
    trace.report_due([5, 6, 7, 9, 20, 21], 100, NOW_MS)
    found = [(first, size, extra) for *_, first, size, extra in rows_of(buffer.seal())]
    assert found == [(5, 3, 100), (9, 1, 103), (20, 2, 104)]
