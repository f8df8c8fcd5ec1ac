"""murmur2 and the partition of a key, held against kafka-python and librdkafka's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import DefaultPartitioner
from kafka.partitioner.default import murmur2 as kafka_pythons_murmur2

from mansio.client.partitioner import murmur2, partition_for_key


@given(st.binary(max_size=300))
def test_murmur2_equals_kafka_pythons(data: bytes) -> None:
    assert murmur2(data) == kafka_pythons_murmur2(data) & 0xFFFFFFFF


@given(st.binary(max_size=80), st.integers(1, 1000))
def test_partition_of_a_key_equals_kafka_pythons(key: bytes, count: int) -> None:
    partitions = list(range(count))
    assert partition_for_key(key, count) == DefaultPartitioner()(key, partitions, partitions)
