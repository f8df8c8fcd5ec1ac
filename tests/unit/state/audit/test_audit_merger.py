"""Merging of audit events: each one is in one line or counted as lost, and a kind has at most one line a minute."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mansio.state.audit.audit_merger import (
    OTHER_RESOURCES,
    PRINCIPAL_KINDS_MAX,
    AuditLine,
    AuditMerger,
    EventKind,
)

WINDOW_MS = 60_000

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["User:a", "User:b", "User:c"]),
        st.integers(0, 12).map(str),
        st.sampled_from([0, 0, 0, 1, 999, 30_000, 60_000, 200_000]),
        st.booleans(),
        st.integers(1, 3),
    ),
    max_size=200,
)


def kind_of(principal: str, resource: str) -> EventKind:
    return EventKind(principal, "FETCH", "refused", "READ", "topic", resource)


def change_of(principal: str, resource: str) -> EventKind:
    return EventKind(principal, "CREATE_TOPICS", "done", "", "topic", resource)


@given(EVENTS, st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))
def test_each_change_is_in_one_line_each_refusal_too_or_lost_and_a_refused_kind_has_one_line_a_minute(
    events: list[tuple[str, str, int, bool, int]], kinds_max: int, resources_max: int, principal_max: int
) -> None:
    merger = AuditMerger(WINDOW_MS, kinds_max, resources_max, principal_max)
    lines: list[tuple[int, AuditLine]] = []
    now_ms = 0
    for principal, resource, step_ms, is_refusal, count in events:
        for _ in range(2):
            end_ms = merger.next_end_ms
            if end_ms is not None and end_ms <= now_ms + step_ms:
                lines += [(end_ms, line) for line in merger.end_windows(end_ms)]
        now_ms += step_ms
        lines += [(now_ms, line) for line in merger.end_windows(now_ms)]
        kind = (kind_of if is_refusal else change_of)(principal, resource)
        line = merger.add(kind, None, now_ms, is_refusal=is_refusal, event_count=count)
        if line is not None:
            assert line.event_count == count
            lines.append((now_ms, line))
        assert merger.window_count <= min(kinds_max, 3 * (principal_max + 1))
    while (next_ms := merger.next_end_ms) is not None:
        lines += [(next_ms, line) for line in merger.end_windows(next_ms)]

    def counted(outcome: str) -> Counter[tuple[str, str]]:
        """Number of events by principal and resource, or by principal only for refusals, which are merged."""
        found: Counter[tuple[str, str]] = Counter()
        for _, line in lines:
            if line.kind.outcome == outcome:
                resource = line.kind.resource if outcome == "done" else ""
                found[line.kind.principal, resource] += line.event_count
        return found

    done: Counter[tuple[str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    for principal, resource, _, is_refusal, count in events:
        if is_refusal:
            refused[principal, ""] += count
        else:
            done[principal, resource] += count
    assert counted("done") == done
    assert counted("refused") <= refused
    assert counted("refused").total() + merger.lost_count == refused.total()
    at: dict[EventKind, int] = {}
    for written_ms, line in lines:
        assert line.first_ms <= line.last_ms <= written_ms
        if line.kind.outcome == "refused":
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


def test_two_users_that_are_refused_everything_do_not_hide_the_changes_and_refusals_of_others() -> None:
    merger = AuditMerger()
    for user in ("User:a", "User:b"):
        for number in range(20_000):
            merger.add(kind_of(user, f"r{number}")._replace(api=f"API_{number % 200}"), None, 0)
    assert merger.lost_count == 0
    assert merger.add(kind_of("User:c", "orders"), None, 0) is not None
    assert merger.add(change_of("User:root", "orders"), None, 0, is_refusal=False) is not None
    assert merger.window_count == 2 * (PRINCIPAL_KINDS_MAX + 1) + 2
    counts: Counter[str] = Counter()
    for line in merger.end_all():
        counts[line.kind.principal] += line.event_count
    assert counts == dict.fromkeys(("User:a", "User:b"), 20_000 - PRINCIPAL_KINDS_MAX - 1)


def test_each_change_is_a_line_where_no_window_is_left() -> None:
    merger = AuditMerger(kinds_max=1)
    merger.add(kind_of("User:a", "orders"), None, 0)
    for _ in range(2):
        assert merger.add(change_of("User:root", "orders"), None, 0, is_refusal=False) is not None
    assert merger.lost_count == 0
