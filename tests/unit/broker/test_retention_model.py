"""What retention deletes, against a model that takes one segment at a time and counts everything again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.storage.log import SegmentInfo
from mansio.storage.retention import UNLIMITED, ExpiredSegments, find_expired

TIMES = st.integers(0, 60)
SIZES = st.integers(1, 5)


@st.composite
def segments(draw: st.DrawFn) -> list[SegmentInfo]:
    """One to eight segments in a row; the newest may be empty."""
    found = []
    base = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 7))):
        end = base + draw(st.integers(1, 3))
        found.append(SegmentInfo(base, end, draw(SIZES), draw(TIMES)))
        base = end
    if draw(st.booleans()):
        return [*found, SegmentInfo(base, base, 0, -(1 << 63))]
    return [*found, SegmentInfo(base, base + draw(st.integers(1, 3)), draw(SIZES), draw(TIMES))]


def model(log: list[SegmentInfo], now_ms: int, retention_ms: int, retention_bytes: int, floor: int) -> int:
    """How many segments go, decided one by one on what is left."""
    left = list(log)
    while left:
        first, rest = left[0], left[1:]
        old = retention_ms >= 0 and first.size_bytes > 0 and first.max_timestamp_ms < now_ms - retention_ms
        spare = retention_bytes >= 0 and bool(rest) and sum(s.size_bytes for s in rest) >= retention_bytes
        if not (old or spare) or first.end_offset > floor:
            break
        left = rest
    return len(log) - len(left)


@given(
    log=segments(),
    now_ms=st.integers(0, 100),
    retention_ms=st.one_of(st.just(UNLIMITED), st.integers(0, 60)),
    retention_bytes=st.one_of(st.just(UNLIMITED), st.integers(0, 40)),
    floor=st.integers(0, 30),
)
def test_retention_agrees_with_a_model_that_removes_one_segment_at_a_time(
    log: list[SegmentInfo], now_ms: int, retention_ms: int, retention_bytes: int, floor: int
) -> None:
    looked_at = 0

    def closed() -> object:
        nonlocal looked_at
        for segment in log[:-1]:
            looked_at += 1
            yield segment

    found = find_expired(
        closed(),  # type: ignore[arg-type]  # a generator of them
        log[-1],
        size_bytes=sum(segment.size_bytes for segment in log),
        now_ms=now_ms,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        floor_offset=floor,
    )
    count = model(log, now_ms, retention_ms, retention_bytes, floor)
    assert found.segment_count == count
    assert found.end_offset == (log[count - 1].end_offset if count else -1)
    assert found.size_bytes == sum(segment.size_bytes for segment in log[:count])
    assert found.includes_active == (count == len(log))
    assert looked_at <= count + 1, "the cost is that of what goes, not of what stays"
    assert bool(found.reason) == bool(count)


def test_an_empty_log_has_nothing_to_let_go_of() -> None:
    empty = SegmentInfo(5, 5, 0, -(1 << 63))
    assert (
        find_expired([], empty, size_bytes=0, now_ms=1, retention_ms=0, floor_offset=5) == ExpiredSegments()
    )
