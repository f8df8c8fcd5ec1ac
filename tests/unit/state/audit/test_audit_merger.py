"""Merging of audit events: each one is in one line or counted as lost, and a kind has at most one line a minute."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mansio.state.audit.audit_merger import OTHER_RESOURCES, AuditLine, AuditMerger, EventKind

WINDOW_MS = 60_000

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["User:a", "User:b", "User:c"]),
        st.integers(0, 12).map(str),
        st.sampled_from([0, 0, 0, 1, 999, 30_000, 60_000, 200_000]),
    ),
    max_size=200,
)


def kind_of(principal: str, resource: str) -> EventKind:
    return EventKind(principal, "FETCH", "refused", "READ", "topic", resource)


@given(EVENTS, st.integers(1, 6), st.integers(1, 4))
def test_each_event_is_in_one_line_or_lost_and_a_kind_has_one_line_a_minute(
    events: list[tuple[str, str, int]], kinds_max: int, resources_max: int
) -> None:
    merger = AuditMerger(WINDOW_MS, kinds_max, resources_max)
    lines: list[tuple[int, AuditLine]] = []
    now_ms = 0
    for principal, resource, step_ms in events:
        for _ in range(2):
            end_ms = merger.next_end_ms
            if end_ms is not None and end_ms <= now_ms + step_ms:
                lines += [(end_ms, line) for line in merger.end_windows(end_ms)]
        now_ms += step_ms
        lines += [(now_ms, line) for line in merger.end_windows(now_ms)]
        line = merger.add(kind_of(principal, resource), None, now_ms)
        if line is not None:
            assert line.event_count == 1
            lines.append((now_ms, line))
    while (next_ms := merger.next_end_ms) is not None:
        lines += [(next_ms, line) for line in merger.end_windows(next_ms)]
    assert sum(line.event_count for _, line in lines) + merger.lost_count == len(events)
    counts = Counter(line.kind.principal for _, line in lines for _ in range(line.event_count))
    assert counts <= Counter(principal for principal, _, _ in events)
    at: dict[EventKind, int] = {}
    for written_ms, line in lines:
        assert line.first_ms <= line.last_ms <= written_ms
        if (before_ms := at.get(line.kind)) is not None:
            assert written_ms - before_ms >= WINDOW_MS
        at[line.kind] = written_ms


def test_a_repeated_event_is_one_line_at_once_and_one_with_the_count() -> None:
    merger = AuditMerger()
    kind = kind_of("User:a", "orders")
    first = merger.add(kind, "first", 0)
    assert first == AuditLine(kind, "first", 1, 0, 0)
    assert not any(merger.add(kind, f"again {number}", 10 + number) for number in range(1_000))
    assert merger.end_windows(WINDOW_MS - 1) == []
    assert merger.end_windows(WINDOW_MS) == [AuditLine(kind, "again 0", 1_000, 10, 1_009)]
    assert merger.end_windows(2 * WINDOW_MS) == []
    assert merger.next_end_ms is None


def test_a_client_that_asks_for_ever_new_names_takes_no_place_of_others() -> None:
    merger = AuditMerger(kinds_max=1_000, resources_max=100)
    lines = [merger.add(kind_of("User:a", f"name-{number}"), None, 0) for number in range(5_000)]
    written = [line for line in lines if line is not None]
    assert len(written) == 101
    assert written[-1].kind.resource == OTHER_RESOURCES
    assert merger.add(kind_of("User:b", "orders"), None, 0) is not None
    assert merger.lost_count == 0
    (others,) = merger.end_all()
    assert (others.kind.resource, others.event_count) == (OTHER_RESOURCES, 4_899)


def test_events_of_too_many_kinds_are_counted_as_lost() -> None:
    merger = AuditMerger(kinds_max=3)
    for number in range(5):
        merger.add(kind_of(f"User:{number}", "orders"), None, 0)
    assert merger.lost_count == 2
    merger.end_windows(WINDOW_MS)
    assert merger.add(kind_of("User:4", "orders"), None, WINDOW_MS) is not None
