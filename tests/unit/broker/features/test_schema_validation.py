"""Check of schemas on a partition of a broker without a schema registry: what was not checked is not stored."""

from __future__ import annotations

import asyncio

import pytest

from mansio.broker.features.feature_ports import NoSchemaIds, SchemaUse
from mansio.broker.partition.append_validation import inspect_records
from mansio.broker.partition.partition_hook import LookUpRequired
from mansio.config import topic_config
from mansio.errors import InvalidConfig, InvalidRecord, LeaderNotAvailable
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import PartitionBench, small_bench
from support.schema_ids import framed

ON, OFF = ({"mansio.value.schema.validation": text} for text in ("true", "false"))


def checked() -> PartitionBench:
    return small_bench(None, "producers", "schema validation", "delays")


def batch_of(value: bytes) -> bytes:
    return build_batch([(1_000_000, None, value, ())])


def test_a_batch_whose_schema_is_not_known_is_not_stored() -> None:
    bench = checked()
    with pytest.raises(LookUpRequired):
        bench.partition.append(batch_of(framed(7)))
    with pytest.raises(InvalidRecord, match="no schema id"):
        bench.partition.append(batch_of(b"plain"))
    assert bench.partition.end_offset == 0
    bench.partition.append(build_batch([(1_000_000, b"key", None, ())]))
    assert bench.partition.end_offset == 1


def test_a_batch_that_a_thread_has_inspected_is_not_stored_either() -> None:
    bench = checked()
    batch = batch_of(framed(7))
    inspected = inspect_records("t-0", bench.partition.rules, batch, 0)
    with pytest.raises(LookUpRequired):
        bench.partition.append(batch, inspected=inspected)
    assert bench.partition.end_offset == 0


def test_a_broker_without_a_registry_cannot_be_asked() -> None:
    ids = NoSchemaIds()
    use = SchemaUse(7, "t-value")
    assert ids.known(use) is None
    with pytest.raises(LeaderNotAvailable, match="no schema registry"):
        asyncio.run(ids.resolve([use]))


def test_only_turning_the_check_on_needs_the_registry() -> None:
    for before in ({}, OFF):
        with pytest.raises(InvalidConfig, match="no schema registry"):
            topic_config.check_schema_registry(before, ON, is_enabled=False)
    for before, after in ((ON, ON), (ON, OFF), (ON, {}), ({}, OFF)):
        topic_config.check_schema_registry(before, after, is_enabled=False)
    topic_config.check_schema_registry({}, ON, is_enabled=True)
