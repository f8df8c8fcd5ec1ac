"""The jobs that look at a topic or an archive as a whole: hot keys, schema check, compaction."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mansio
from mansio.iceberg.archive.table_format import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
)
from mansio.iceberg.archive.table_scan import scan
from mansio.pipelines.compact import compact
from mansio.pipelines.hot_keys import assess_skew, count_topic
from mansio.pipelines.schema_check import ORIGIN_HEADER, REASON_HEADER, check_topic
from support.archive_tables import FIRST_US, STEP_US, Archive, row, rows_of
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

PARTITIONS = 4


@pytest.mark.full
def test_heaviest_keys_of_a_zipf_topic_are_found_and_even_keys_are_no_alarm(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    chance = random.Random(3)
    weights = [1 / rank for rank in range(1, 1001)]
    lopsided = [b"key-%04d" % number for number in chance.choices(range(1000), weights, k=20_000)]
    even = [b"%d" % chance.randrange(3_000) for _ in range(12_000)]
    counted = []
    for role, keys in (("lopsided", lopsided), ("even", even)):
        topic = create(broker_process.bootstrap_servers, topic_name(role), PARTITIONS)
        publish(broker_process.bootstrap_servers, topic, [*((key, b"v" * 10) for key in keys), (None, b"v")])
        counted.append(
            count_topic(
                spark, topic, broker_process.bootstrap_servers, PARTITIONS, measures_bytes=role == "even"
            )
        )
    expected = sorted(Counter(lopsided).items(), key=lambda item: (-item[1], item[0]))
    assert [(one.key, one.records) for one in counted[0].top] == expected[:20]
    assert (counted[0].records, counted[0].keys) == (20_001, len(expected))
    assert assess_skew(counted[0]).hot[0].key == b"key-0000"
    assert counted[1].bytes == 120_001
    assert sum(one.records for one in counted[1].partitions) == 12_001
    assert not assess_skew(counted[1]).is_alarm


@pytest.mark.full
@pytest.mark.row("S12")
def test_bad_records_are_counted_by_what_is_wrong_and_put_apart_with_the_reason(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    schema = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}
    values: list[bytes | None] = [b'{"id": %d}' % number for number in range(200)]
    values[10], values[20], values[21], values[30], values[40] = (
        b"no json",
        b"{}",
        b'{"ID": 1}',
        None,
        b'{"id": "x"}',
    )
    topic, quarantine = (
        create(broker_process.bootstrap_servers, topic_name("in")),
        topic_name("made-by-the-check"),
    )
    publish(
        broker_process.bootstrap_servers,
        topic,
        [(b"k%d" % place, value) for place, value in enumerate(values)],
    )
    report = check_topic(spark, topic, broker_process.bootstrap_servers, schema, quarantine=quarantine)
    assert (report.records, report.without_value, report.invalid) == (200, 1, 4)
    assert [(one.place, one.rule, one.records, one.offset) for one in report.groups] == [
        ("$.id", "required", 2, 20),
        ("$", "json", 1, 10),
        ("$.id", "type", 1, 40),
    ]
    apart = sorted(
        contents(broker_process.bootstrap_servers, quarantine), key=lambda one: int((one.key or b"")[1:])
    )
    assert [(one.key, one.value) for one in apart] == [
        (b"k%d" % place, values[place]) for place in (10, 20, 21, 40)
    ]
    headers = [dict(one.headers) for one in apart]
    assert [one[ORIGIN_HEADER] for one in headers] == [
        f"{topic}/0/{place}".encode() for place in (10, 20, 21, 40)
    ]
    assert headers[3][REASON_HEADER] == b"$.id: 'x' is not of type 'integer'"
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        kept_ms = client.admin.describe_config(quarantine)["retention.ms"].value
    assert kept_ms == "-1", "they have the times they had"


def folded(rows: Iterable[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """The latest record of each key, by going through them one by one."""
    in_partitions: dict[tuple[bytes, int], dict[str, Any]] = {}
    for one in sorted(rows, key=lambda one: one[OFFSET_COLUMN]):
        if one["key"] is not None:
            in_partitions[one["key"], one[PARTITION_COLUMN]] = one
    latest: dict[bytes, dict[str, Any]] = {}
    for one in sorted(in_partitions.values(), key=lambda one: (one[TIMESTAMP_COLUMN], one[PARTITION_COLUMN])):
        latest[one["key"]] = one
    return {key: one for key, one in latest.items() if one["value"] is not None}


@pytest.mark.full
def test_compacted_table_is_the_fold_of_the_archive(spark: SparkSession, tmp_path: Path) -> None:
    chance = random.Random(4)
    archive = Archive(tmp_path / "warehouse")
    source = archive.open()
    everything: list[dict[str, Any]] = []

    def archive_more(count: int) -> None:
        batch = {}
        for partition in range(3):
            first = archive.offsets.get(partition, 0)
            batch[partition] = [
                row(
                    partition,
                    offset,
                    key=chance.choice([None, *(b"key-%d" % chance.randrange(60) for _ in range(9))]),
                    value=None if chance.random() < 0.2 else json.dumps([partition, offset]).encode(),
                    __timestamp=FIRST_US + chance.randrange(500) * STEP_US,
                )
                for offset in range(first, first + count)
            ]
            everything.extend(batch[partition])
        archive.add(source, batch)

    def in_table() -> list[dict[str, Any]]:
        table = source.iceberg.catalog.load_table(("mansio", "latest"))
        paths = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
        return [one for path in paths for one in pq.read_table(path, partitioning=None).to_pylist()]

    def as_read(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(pa.Table.from_pylist(list(rows), TABLE_SCHEMA).to_pylist(), key=lambda one: one["key"])

    for count in (200, 30):
        archive_more(count)
    report = compact(spark, source, "latest")
    expected = folded(everything)
    assert as_read(in_table()) == as_read(expected.values())
    assert (report.records, report.keys) == (len(everything), len(expected))
    assert report.without_key == sum(one["key"] is None for one in everything)
    assert report.offsets == archive.offsets
    assert len(rows_of(scan(archive.open()))) == len(everything)
