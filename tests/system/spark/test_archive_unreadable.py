"""Unreadable records stop an archive until the user accepts their loss; then they are listed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.types import OutgoingRecord
from mansio.errors import UnreadableRecords
from mansio.iceberg.archive.dead_letters import open_dead_letters
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import LostRange
from mansio.iceberg.archive.table_scan import scan
from mansio.pipelines.archive import ArchiveJob, archive
from support.spark_source import Topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker


@pytest.mark.full
def test_records_that_cannot_be_read_are_an_error_or_are_listed_and_kept_apart(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    here = Topic(broker_process, topic_name("in"))
    here.fill(10)
    marker = f"header of {here.name}"
    with mansio.blocking.connect(here.bootstrap_servers) as client:
        client.publish_many(
            here.name,
            [
                OutgoingRecord(b"%d" % n, headers=(("fine" if n % 4 else marker, b"x"),))
                for n in range(10, 20)
            ],
        )
    here.fill(5, first=20)
    here.damage(marker.encode(), b"\xff" + marker.encode()[1:], seal=True)
    job = ArchiveJob(here.name, str(tmp_path), here.bootstrap_servers, here.name, stops_when_caught_up=True)
    with pytest.raises(UnreadableRecords, match=r"offsets 12 to 12 of partition 0 .* --on-unreadable skip"):
        archive(spark, job)
    done = archive(spark, replace(job, on_unreadable="dead-letter"))
    assert done.offsets == {0: 25}
    table = open_table(None, str(tmp_path), here.name)
    assert table.lost_ranges() == (LostRange(0, 12, 13), LostRange(0, 16, 17))
    offsets = [value for batch in scan(table) for value in batch.column("__offset").to_pylist()]
    assert offsets == [n for n in range(25) if n not in (12, 16)]
    apart = open_dead_letters(table, create=False)
    assert apart is not None
    columns = ("__partition", "__offset", "__last_offset", "kind", "value")
    table_rows = [[one[name] for name in columns] for one in apart.iceberg.scan().to_arrow().to_pylist()]
    assert sorted(table_rows) == [[0, n, n, "record", b"%d" % n] for n in (12, 16)]
