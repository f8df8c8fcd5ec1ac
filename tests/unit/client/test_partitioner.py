"""Partitioner: the same partitions as other Kafka clients."""

from __future__ import annotations

from collections import Counter

import pytest

from mansio.client.producer.partitioner import next_sticky_partition
from mansio.wire.murmur2 import murmur2

KAFKAS_OWN_VECTORS = [  # org.apache.kafka.common.utils.UtilsTest
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("data", "expected"), KAFKAS_OWN_VECTORS)
def test_murmur2_matches_kafkas_test_vectors(data: bytes, expected: int) -> None:
    assert murmur2(data) == expected & 0xFFFFFFFF


def test_sticky_partition_changes_and_uses_all_partitions() -> None:
    seen: Counter[int] = Counter()
    current = None
    for _ in range(600):
        following = next_sticky_partition(range(6), current)
        assert following != current
        seen[following] += 1
        current = following
    assert set(seen) == set(range(6))
    assert min(seen.values()) > 40
    assert next_sticky_partition([3], 3) == 3
    with pytest.raises(ValueError, match="at least one"):
        next_sticky_partition([], None)
