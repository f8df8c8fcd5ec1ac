"""A topic in its archive table: each record once, as it was, however often the archive is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.types import OutgoingRecord
from mansio.errors import DataLoss
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import LostRange
from mansio.pipelines import archive as archive_module
from mansio.pipelines.archive import ArchiveJob, archive
from mansio.pipelines.lag import pipeline_lag
from mansio.spark.sync_client import sync_client
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from support.archive_tables import Archive
from system.spark.archives import archive_once, assert_archived
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from mansio.pipelines.pipeline_progress import BatchProgress
    from support.process import ServedBroker


@pytest.mark.full
def test_archive_goes_on_where_the_table_ends_with_partitions_added_since_and_keeps_every_field(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"), partitions=2)
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.publish_many(
            topic,
            [
                OutgoingRecord(b"v", key=b"k", partition=0, headers=(("a", b"1"), ("a", None))),
                OutgoingRecord(None, key=b"deleted", partition=0, timestamp_ms=1_384_992_000_123),
                OutgoingRecord(b"", key=None, partition=1),
            ],
        )
    first = archive_once(spark, broker_process, topic, tmp_path)
    assert (first.records, first.offsets) == (3, {0: 2, 1: 1})
    assert_archived(broker_process, tmp_path, topic)

    publish(broker_process.bootstrap_servers, topic, [(None, b"%d" % n) for n in range(30)], partition=1)
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.create_partitions(topic, 3)
    publish(broker_process.bootstrap_servers, topic, [(b"new", b"partition")], partition=2)
    steps: list[BatchProgress] = []
    second = archive_once(spark, broker_process, topic, tmp_path, records_max=16, report=steps.append)
    assert second.offsets == {0: 2, 1: 31, 2: 1}
    assert second.records == 31
    assert sum(progress.records for progress in steps) == 31
    assert second.batches >= 2
    assert_archived(broker_process, tmp_path, topic)

    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        lag = client.admin.group_lag(pipeline_group_id(f"archive-{topic}"))
    assert {place.partition: entry.lag for place, entry in lag.items()} == {0: 0, 1: 0, 2: 0}
    assert archive_once(spark, broker_process, topic, tmp_path).records == 0


@pytest.mark.full
def test_archive_that_waits_for_records_reports_that_it_runs(
    spark: SparkSession,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = broker_process.bootstrap_servers
    topic, name = create(servers, topic_name("in")), topic_name("archive")
    publish(servers, topic, [(b"k", b"v")])
    monkeypatch.setattr(archive_module, "REPORT_INTERVAL_S", 0.0)
    reports: set[int] = set()

    def has_reported_twice() -> bool:
        for one in pipeline_lag(sync_client(servers)):
            if one.pipeline == name and one.progress is not None and one.progress.reported_ms is not None:
                assert (one.lag, one.progress.ended) == (0, None)
                reports.add(one.progress.reported_ms)
        return len(reports) >= 2

    job = ArchiveJob(topic, str(tmp_path), servers, name, trigger_s=0.2)
    assert archive(spark, job, is_stopping=has_reported_twice).records == 1
    (shown,) = pipeline_lag(sync_client(servers), name)
    assert shown.progress is not None
    assert shown.progress.ended == "stopped"


@pytest.mark.full
def test_records_deleted_before_they_were_archived_are_an_error(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    publish(broker_process.bootstrap_servers, topic, [(None, b"%d" % n) for n in range(10)])
    table = Archive(tmp_path, topic)
    table.add(table.open(), {0: 5})
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.delete_records([mansio.TopicPartition(topic, 0)], before=8)
    with pytest.raises(DataLoss, match="records 5 to 7 of partition 0"):
        archive_once(spark, broker_process, topic, tmp_path)
    job = ArchiveJob(
        topic,
        str(tmp_path),
        broker_process.bootstrap_servers,
        "p",
        stops_when_caught_up=True,
        accept_loss=True,
    )
    assert archive(spark, job).records == 2
    assert open_table(None, str(tmp_path), topic).lost_ranges() == (LostRange(0, 5, 8),)
