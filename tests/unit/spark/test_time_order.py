"""Inputs of a pipeline advance together in time, whatever the limits and restarts. Planning only, without a JVM."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.spark.source.time_order import SIMULTANEOUS_SHARE, end_in_time_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

Place = tuple[int, str]
Logs = dict[Place, list[int]]
LOOKUPS_MAX = 200

places = st.tuples(st.integers(0, 2), st.sampled_from("ab"))
timestamps = st.one_of(
    st.integers(-1, 40),
    st.integers(1_700_000_000_000, 1_700_086_400_000),
    st.sampled_from([1_700_000_000_000, 1 << 47, 1 << 60]),
)
logs_of_any_order = st.dictionaries(places, st.lists(timestamps, max_size=40), min_size=1)


def times_of(log: Sequence[int]) -> list[int]:
    """The time of each record: no record is older than one before it."""
    return list(accumulate(log, max))


def lookup(logs: Logs) -> Callable[[int, Collection[Place]], Mapping[Place, int]]:
    """ListOffsets over these logs."""
    times = {place: times_of(log) for place, log in logs.items()}
    return lambda time_ms, wanted: {place: bisect_left(times[place], time_ms) for place in wanted}


@given(logs_of_any_order, st.integers(1, 60), timestamps, st.data())
def test_batch_is_the_oldest_records_and_as_large_as_allowed(
    logs: Logs, offsets_max: int, guess_ms: int, data: st.DataObject
) -> None:
    begin = {place: data.draw(st.integers(0, len(log))) for place, log in logs.items()}
    latest = {place: len(log) for place, log in logs.items()}
    calls = 0
    look_up = lookup(logs)

    def counted(time_ms: int, wanted: Collection[Place]) -> Mapping[Place, int]:
        nonlocal calls
        calls += 1
        assert time_ms >= 0, "negative timestamps have other meanings in ListOffsets"
        return look_up(time_ms, wanted)

    end, time_ms = end_in_time_order(begin, latest, offsets_max, counted, guess_ms=guess_ms)
    assert calls <= LOOKUPS_MAX
    assert end.keys() == latest.keys()
    assert all(begin[place] <= end[place] <= latest[place] for place in end)
    backlog = sum(latest.values()) - sum(begin.values())
    assert sum(end.values()) - sum(begin.values()) == min(backlog, offsets_max)
    # Times beyond the last one of the search are simultaneous.
    times = {place: [min(one, (1 << 48) - 1) for one in times_of(log)] for place, log in logs.items()}
    read = [one for place in end for one in times[place][begin[place] : end[place]]]
    left = [one for place in end for one in times[place][end[place] :]]
    assert not read or not left or max(read) <= min(left)
    assert all(one >= time_ms for one in left)
    again = end_in_time_order(begin, latest, offsets_max, lookup(logs))
    assert again.offsets == end, "independent of the path of the search"


@pytest.mark.parametrize("offsets_max", [1, 7, 500, 10_000])
def test_search_needs_few_requests_for_evenly_distributed_records(offsets_max: int) -> None:
    day_ms = 86_400_000
    first_ms = 1_700_000_000_000
    logs: Logs = {
        (0, "a"): [first_ms + day_ms * n // 40_000 for n in range(40_000)],
        (1, "a"): [first_ms + day_ms * n // 2_000 for n in range(2_000)],
    }
    calls: list[int] = []
    look_up = lookup(logs)

    def counted(time_ms: int, wanted: Collection[Place]) -> Mapping[Place, int]:
        calls.append(time_ms)
        return look_up(time_ms, wanted)

    position, time_ms, batches = dict.fromkeys(logs, 0), -1, 0
    latest = {place: len(log) for place, log in logs.items()}
    while position != latest and batches < 20:
        position, time_ms = end_in_time_order(
            position, latest, offsets_max, counted, after_ms=time_ms, guess_ms=first_ms + day_ms
        )
        batches += 1
    assert len(calls) / batches < 13


@given(st.integers(0, 1 << 32), st.integers(256, 1_400))
def test_in_large_batches_only_the_last_few_records_are_out_of_order(seed: int, offsets_max: int) -> None:
    chance = random.Random(seed)
    logs: Logs = {
        (number, "a"): sorted(chance.randrange(100_000) for _ in range(count))
        for number, count in enumerate((1_300, 200))
    }
    latest = {place: len(log) for place, log in logs.items()}
    end = end_in_time_order(dict.fromkeys(logs, 0), latest, offsets_max, lookup(logs)).offsets
    read = sorted(one for place in logs for one in logs[place][: end[place]])
    assert len(read) == offsets_max
    left_first = min(one for place in logs for one in logs[place][end[place] :])
    assert sum(one > left_first for one in read) <= offsets_max // SIMULTANEOUS_SHARE


class Readers:
    """The readers of a pipeline's inputs, each of which plans the batches of all inputs and reads its own."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        self.inputs = sorted({number for number, _ in logs})
        self.times_ms = dict.fromkeys(self.inputs, -1)
        self.known = {number: dict.fromkeys(logs, 0) for number in self.inputs}
        """The positions of all inputs, as the offsets of each input contain them."""

    def batch(self, offsets_max: int | None, latest: Mapping[Place, int]) -> dict[Place, tuple[int, int]]:
        """The ranges of the next batch."""
        ranges: dict[Place, tuple[int, int]] = {}
        for number in self.inputs:
            begin = self.known[number]
            end: Mapping[Place, int] = latest
            if offsets_max is not None:
                end, self.times_ms[number] = end_in_time_order(
                    begin, latest, offsets_max, lookup(self.logs), after_ms=self.times_ms[number]
                )
            self.known[number] = dict(end)
            ranges |= {place: (begin[place], end[place]) for place in latest if place[0] == number}
        return ranges


LATENESS_MS = 50
in_order = st.lists(st.integers(0, 1_000), max_size=60).map(sorted)
out_of_order = st.tuples(in_order, st.lists(st.integers(0, LATENESS_MS), min_size=60, max_size=60)).map(
    lambda found: [one - back for one, back in zip(found[0], found[1], strict=False)]
)
"""No record is older than another one before it by more than the delay of the watermark."""


@given(
    st.dictionaries(places, out_of_order, min_size=1),
    st.lists(st.none() | st.integers(1, 80), min_size=1, max_size=8),
    st.lists(st.integers(0, 1_000), max_size=3),
)
def test_no_row_is_late_whatever_the_limits_restarts_and_outages(
    logs: Logs, limits: list[int | None], outages_end_ms: list[int]
) -> None:
    """Each limit is that of one run. The records after each outage arrive while the pipeline is stopped."""
    readers = Readers(logs)
    read: dict[Place, int] = dict.fromkeys(logs, 0)
    watermark_ms = newest_ms = -(1 << 30)
    batches = 0
    for present_ms in [*sorted(outages_end_ms), 2_000]:
        latest = {place: bisect_left(times_of(log), present_ms) for place, log in logs.items()}
        while read != latest:
            offsets_max = limits[batches % len(limits)]
            ranges = readers.batch(offsets_max, latest)
            size = sum(end - begin for begin, end in ranges.values())
            assert 0 < size <= (offsets_max or size)
            for place, (begin, end) in ranges.items():
                assert begin == read[place], "each record once"
                rows = logs[place][begin:end]
                assert all(one >= watermark_ms for one in rows), "no row is late"
                newest_ms = max([newest_ms, *rows])
                read[place] = end
            watermark_ms = newest_ms - LATENESS_MS  # Spark's, from the next batch on
            batches += 1
    assert read == {place: len(log) for place, log in logs.items()}


def test_large_and_small_input_end_at_the_same_time() -> None:
    logs = {(0, "orders"): [2 * n for n in range(40_000)], (1, "customers"): [40 * n for n in range(2_000)]}
    begin, latest = dict.fromkeys(logs, 0), {place: len(log) for place, log in logs.items()}
    end = end_in_time_order(begin, latest, 10_000, lookup(logs)).offsets
    orders, customers = (end[place] for place in logs)
    assert orders + customers == 10_000
    assert abs(logs[0, "orders"][orders] - logs[1, "customers"][customers]) <= 100
