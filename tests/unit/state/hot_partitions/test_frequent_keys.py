"""Frequent keys: the counts are within their bound, the memory is bounded, and keys of the past leave."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mansio.state.hot_partitions.frequent_keys import (
    COUNTERS_MAX,
    KEY_BYTES_MAX,
    FrequentKeys,
    KeyCount,
    KeySample,
    RecentKeys,
)
from support.tiers import examples

KEYS = st.lists(st.integers(0, 40).map(lambda number: b"%d" % number), max_size=400)


def check_bounds(sketch: FrequentKeys, true: Counter[bytes], counters_max: int) -> None:
    for key in {*true, *sketch.counts}:
        assert sketch.counts[key] <= true[key] <= sketch.counts[key] + sketch.error
    assert sketch.records == true.total()
    assert sketch.error <= true.total() // (counters_max + 1)
    assert len(sketch.counts) <= 2 * counters_max


@given(st.lists(KEYS, max_size=8), st.integers(1, 20))
def test_the_true_count_of_every_key_is_within_the_error(
    batches: list[list[bytes]], counters_max: int
) -> None:
    sketch = FrequentKeys(counters_max)
    true: Counter[bytes] = Counter()
    for keys in batches:
        sketch.add(keys)
        true.update(keys)
        check_bounds(sketch, true, counters_max)


def test_a_frequent_key_is_found_among_more_keys_than_counters() -> None:
    for seed in range(examples(5, 50)):
        random = Random(seed)
        sketch, true = FrequentKeys(), Counter[bytes]()
        for _ in range(100):
            keys = [b"hot" if random.random() < 0.2 else b"%d" % random.randrange(10**6) for _ in range(100)]
            sketch.add(keys)
            true.update(keys)
        check_bounds(sketch, true, COUNTERS_MAX)
        assert sketch.counts.most_common(1)[0][0] == b"hot"
        assert sketch.error <= 0.004 * true.total()


def test_keys_of_the_past_leave_and_those_of_the_last_window_stay() -> None:
    keys = RecentKeys()
    keys.add([b"old"] * 10)
    keys.rotate()
    keys.add([b"new"] * 5 + [None])
    assert keys.sample(10) == KeySample(16, 1, 0, (KeyCount(b"old", 10), KeyCount(b"new", 5)), 2)
    keys.rotate()
    assert keys.sample(10) == KeySample(6, 1, 0, (KeyCount(b"new", 5),), 1)
    keys.rotate()
    assert keys.sample(10) == KeySample(0, 0, 0)


def test_the_sample_has_the_most_frequent_keys_only() -> None:
    keys = RecentKeys()
    keys.add([b"%d" % number for number in range(20) for _ in range(number)])
    found = keys.sample(2)
    assert found.keys == ((b"19", 19), (b"18", 18))
    assert found.share_min(found.keys[0]) == found.share_max(found.keys[0]) == 0.1
    assert keys.sample(0).keys == ()


def test_long_keys_take_bounded_memory_and_stay_different() -> None:
    keys = RecentKeys()
    keys.add([b"k" * 100_000 + b"%d" % number for number in range(3)] * 2)
    found = keys.sample(10).keys
    assert [(len(each.key), each.records) for each in found] == [(KEY_BYTES_MAX, 2)] * 3
    assert all(each.key.startswith(b"k" * 200) for each in found)
