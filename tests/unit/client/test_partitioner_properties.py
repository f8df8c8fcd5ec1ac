"""murmur2 and the partition of a key, compared with aiokafka."""

from __future__ import annotations

from aiokafka.partitioner import DefaultPartitioner
from aiokafka.partitioner import murmur2 as aiokafkas_murmur2
from hypothesis import given
from hypothesis import strategies as st

from mansio.wire.murmur2 import murmur2, partition_for_key


@given(st.binary(max_size=300))
def test_murmur2_equals_aiokafkas(data: bytes) -> None:
    assert murmur2(data) == aiokafkas_murmur2(data) & 0xFFFFFFFF


@given(st.binary(max_size=80), st.integers(1, 1000))
def test_partition_of_a_key_equals_aiokafkas(key: bytes, count: int) -> None:
    partitions = list(range(count))
    assert partition_for_key(key, count) == DefaultPartitioner()(key, partitions, partitions)
