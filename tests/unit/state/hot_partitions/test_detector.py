"""Which partitions are flagged as hot: 1,000 synthetic loads with known truth, and the rules one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.hot_partitions.detector import (
    HOT_WINDOWS,
    WINDOWS,
    HotPartitionDetector,
    Thresholds,
    topic_rates,
)
from support.tiers import examples, tier
from unit.state.hot_partitions.loads import KINDS, Load, is_clear, load, observed, score

RATES = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


def is_uneven(rate: float, *others: float, partitions: int | None = None) -> bool:
    rates = [rate, *others]
    return topic_rates(rates, partitions or len(rates)).skew(rate).is_uneven


def test_hot_partitions_of_a_thousand_loads_are_found_and_others_are_not() -> None:
    """The figures are in docs/reference/performance.md: `python -m unit.state.hot_partitions.loads`."""
    found = score(examples(100, 1_000), noise=0.1)
    least = 0.94 if tier() == "test" else 0.97  # of few loads, single errors count more
    assert found.precision >= least
    assert found.recall >= least


def test_away_from_the_thresholds_none_is_missed_and_none_is_wrong() -> None:
    found = score(examples(100, 1_000), noise=0.1, is_counted=is_clear)
    assert (found.wrong, found.missed) == (0, 0)
    assert found.right >= 0.4 * examples(100, 1_000)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_ever_flagged_where_nothing_is_hot(kind: str) -> None:
    checked = 0
    for seed in range(examples(10, 200)):
        random = Random(seed)
        made = load(kind, random)
        if made.truth or not all(is_clear(made, index) for index in range(len(made.rates))):
            continue
        checked += 1
        assert not any(observed(made, random)), (seed, made)
    if kind == "uniform":
        assert checked


def test_a_burst_of_two_windows_is_no_hot_partition_and_a_lasting_one_is_in_the_third() -> None:
    rates = (1_000.0,) * 6
    flagged = observed(Load("bursts", rates, 0.0, ((3, 2, 40.0), (4, 2, 40.0))), Random(1))
    assert not any(flagged)
    flagged = observed(Load("bursts", rates, 0.0, tuple((at, 2, 40.0) for at in (3, 4, 5))), Random(1))
    assert [bool(each) for each in flagged[:6]] == [False] * 5 + [True]
    assert flagged[5] == {2}
    assert not flagged[-1]


def test_idle_partitions_make_no_hot_one_of_those_in_use() -> None:
    """Of twelve, seven are in use: the mean would be that of hot ones."""
    assert not is_uneven(500, *[500.0] * 6, partitions=12)
    assert is_uneven(500, *[500.0] * 4, partitions=12)


def test_with_three_partitions_the_share_counts_and_with_one_nothing() -> None:
    assert is_uneven(800, 200)
    assert not is_uneven(790, 210)
    assert is_uneven(800, 100, 100)
    assert not is_uneven(500, 1, 499)
    assert not is_uneven(1_000_000)


def test_the_floor_is_a_part_of_what_the_broker_takes_in() -> None:
    assert Thresholds().floor(1_000) == 100
    assert Thresholds().floor(100_000) == 5_000


@given(RATES, RATES, st.integers(0, 10))
def test_a_partition_that_is_even_among_some_is_even_among_all(
    own: list[float], others: list[float], idle: int
) -> None:
    """A broker asks others only about partitions that could be hot."""
    count = len(own) + len(others) + idle
    if not is_uneven(own[0], *own[1:], partitions=count):
        assert not is_uneven(own[0], *own[1:], *others, partitions=count)


@given(st.lists(st.tuples(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4))), max_size=30))
def test_flags_are_those_of_the_last_windows_that_count(windows: list[tuple[set[int], set[int]]]) -> None:
    detector: HotPartitionDetector[int] = HotPartitionDetector()
    counted: dict[int, list[bool]] = {key: [] for key in range(5)}
    for hot, unknown in windows:
        detector.add_window(hot, unknown=unknown)
        for key in counted:
            if key not in unknown:
                counted[key].append(key in hot)
        assert detector.flagged == {
            key for key, bits in counted.items() if sum(bits[-WINDOWS:]) >= HOT_WINDOWS
        }
        assert set(detector.known) == {key for key, bits in counted.items() if any(bits[-WINDOWS:])}


def test_a_partition_that_is_not_led_any_more_is_forgotten() -> None:
    detector: HotPartitionDetector[int] = HotPartitionDetector()
    for _ in range(HOT_WINDOWS):
        detector.add_window([1, 2])
    detector.retain(lambda key: key == 2)
    assert detector.flagged == {2}
    detector.add_window([1, 2])
    assert detector.flagged == {2}
