"""A topic in its archive table: each record once, as it was, after restarts and kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mansio
from mansio.client.types import OutgoingRecord
from mansio.errors import DataLoss
from mansio.spark.lake.catalog import open_table
from mansio.spark.lake.errors import ForeignTable
from mansio.spark.lake.layout import LostRange
from mansio.spark.pipelines.archive import Archived, ArchiveJob, archive
from mansio.wire.hold import hold_group
from spark.topics import contents, create, publish
from support.places import mansio_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from mansio.spark.pipelines.archive import Progress
    from support.process import ServedBroker

FIRST_BATCH_DEADLINE_S = 150


def run(
    spark: SparkSession,
    broker: ServedBroker,
    topic: str,
    warehouse: Path,
    records_max: int = 1_000_000,
    report: Callable[[Progress], None] | None = None,
) -> Archived:
    job = ArchiveJob(
        topic, str(warehouse), broker.bootstrap, f"archive-{topic}", is_once=True, records_max=records_max
    )
    return archive(spark, job, report)


def archived(warehouse: Path, topic: str) -> pa.Table:
    """All rows of the table's data files, by partition and offset."""
    table = open_table(None, str(warehouse), topic)
    files = [
        pq.read_table(file.path.removeprefix("file://"), partitioning=None) for file in table.live_files()
    ]
    return pa.concat_tables(files).sort_by([("__partition", "ascending"), ("__offset", "ascending")])


def assert_archived(broker: ServedBroker, warehouse: Path, topic: str) -> None:
    """The table has what the log has, field by field."""
    rows = archived(warehouse, topic)
    log = contents(broker.bootstrap, topic)
    assert rows["__partition"].to_pylist() == [message.partition for message in log]
    assert rows["__offset"].to_pylist() == [message.offset for message in log]
    assert rows["key"].to_pylist() == [message.key for message in log]
    assert rows["value"].to_pylist() == [message.value for message in log]
    assert rows["__timestamp"].cast(pa.int64()).to_pylist() == [
        message.timestamp_ms * 1000 for message in log
    ]
    headers = [[(one["key"], one["value"]) for one in many or ()] for many in rows["headers"].to_pylist()]
    assert headers == [list(message.headers) for message in log]


def test_archive_goes_on_where_the_table_ends_and_keeps_every_field(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap, topic_name("in"), partitions=2)
    with mansio.blocking.connect(broker_process.bootstrap) as client:
        client.publish_many(
            topic,
            [
                OutgoingRecord(b"v", key=b"k", partition=0, headers=(("a", b"1"), ("a", None))),
                OutgoingRecord(None, key=b"deleted", partition=0, timestamp_ms=1_384_992_000_123),
                OutgoingRecord(b"", key=None, partition=1),
            ],
        )
    first = run(spark, broker_process, topic, tmp_path)
    assert (first.records, first.offsets) == (3, {0: 2, 1: 1})
    assert_archived(broker_process, tmp_path, topic)

    publish(broker_process.bootstrap, topic, [(None, b"%d" % n) for n in range(50)], partition=1)
    told: list[Progress] = []
    second = run(spark, broker_process, topic, tmp_path, records_max=20, report=told.append)
    assert second.offsets == {0: 2, 1: 51}
    assert second.records == 50
    assert sum(progress.records for progress in told) == 50
    assert second.batches >= 3
    assert_archived(broker_process, tmp_path, topic)

    with mansio.blocking.connect(broker_process.bootstrap) as client:
        lag = client.admin.group_lag(hold_group(f"archive-{topic}"))
    assert {place.partition: entry.lag for place, entry in lag.items()} == {0: 0, 1: 0}
    assert run(spark, broker_process, topic, tmp_path).records == 0


def test_partition_that_came_between_two_runs_is_archived(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap, topic_name("in"))
    publish(broker_process.bootstrap, topic, [(b"old", b"partition")])
    run(spark, broker_process, topic, tmp_path)
    with mansio.blocking.connect(broker_process.bootstrap) as client:
        client.admin.create_partitions(topic, 2)
    publish(broker_process.bootstrap, topic, [(b"new", b"partition")], partition=1)
    assert run(spark, broker_process, topic, tmp_path).offsets == {0: 1, 1: 1}
    assert_archived(broker_process, tmp_path, topic)


def test_records_deleted_before_they_were_archived_are_an_error(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap, topic_name("in"))
    publish(broker_process.bootstrap, topic, [(None, b"%d" % n) for n in range(5)])
    run(spark, broker_process, topic, tmp_path)
    publish(broker_process.bootstrap, topic, [(None, b"%d" % n) for n in range(5)])
    with mansio.blocking.connect(broker_process.bootstrap) as client:
        client.admin.delete_group(hold_group(f"archive-{topic}"))
        client.admin.delete_records([mansio.TopicPartition(topic, 0)], before=8)
    with pytest.raises(DataLoss, match="records 5 to 7 of partition 0"):
        run(spark, broker_process, topic, tmp_path)
    job = ArchiveJob(topic, str(tmp_path), broker_process.bootstrap, "p", is_once=True, accepts_loss=True)
    assert archive(spark, job).records == 2
    assert open_table(None, str(tmp_path), topic).lost() == (LostRange(0, 5, 8),)


def test_topic_that_was_made_again_does_not_go_into_the_old_table(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap, topic_name("in"))
    publish(broker_process.bootstrap, topic, [(None, b"old")])
    run(spark, broker_process, topic, tmp_path)
    with mansio.blocking.connect(broker_process.bootstrap) as client:
        client.admin.delete_topic(topic)
    create(broker_process.bootstrap, topic)
    with pytest.raises(ForeignTable, match="earlier topic"):
        run(spark, broker_process, topic, tmp_path)


class ArchiveProcess:
    """`mansio pipeline archive` in a process of its own, killed with all its children."""

    def __init__(
        self, broker: ServedBroker, topic: str, warehouse: Path, output: Path, records_max: int
    ) -> None:
        self.output = output
        command = [*mansio_command(), "pipeline", "archive", topic, "--warehouse", str(warehouse)]
        command += ["--broker", broker.bootstrap, "--name", f"archive-{topic}", "--trigger", "0.1"]
        command += ["--max-records", str(records_max), "--master", "local[2]"]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for_batches(self, count: int) -> None:
        end = time.monotonic() + FIRST_BATCH_DEADLINE_S
        while self.text().count("batch ") < count:
            assert self._process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to Python, the JVM and the workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[ArchiveProcess]]:
    processes: list[ArchiveProcess] = []
    yield processes
    for process in processes:
        try:
            process.kill()
        except ProcessLookupError:
            continue


def fill(broker: ServedBroker, topic: str, count: int) -> None:
    for partition in range(2):
        publish(
            broker.bootstrap,
            topic,
            [(b"%d" % (n % 7), b"%d:%d" % (partition, n)) for n in range(count)],
            partition,
        )


@pytest.mark.timeout(300)
def test_archive_killed_in_the_middle_has_every_record_once_after_a_restart(
    spark: SparkSession,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    started: list[ArchiveProcess],
) -> None:
    topic = create(broker_process.bootstrap, topic_name("in"), partitions=2)
    fill(broker_process, topic, 20_000)
    started.append(
        ArchiveProcess(broker_process, topic, tmp_path / "lake", tmp_path / "out.log", records_max=2_000)
    )
    started[0].wait_for_batches(2)
    time.sleep(random.uniform(0, 1))
    started[0].kill()
    before = open_table(None, str(tmp_path / "lake"), topic).committed()
    assert before is not None
    assert 0 < sum(before.offsets.values()) < 40_000, "killed in the middle"
    done = run(spark, broker_process, topic, tmp_path / "lake")
    assert done.records == 40_000 - sum(before.offsets.values())
    assert_archived(broker_process, tmp_path / "lake", topic)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_archive_killed_twenty_times_has_every_record_once(
    spark: SparkSession,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
    started: list[ArchiveProcess],
) -> None:
    """Records come all the time; each run is killed at a random moment, also while it starts."""
    topic = create(broker_process.bootstrap, topic_name("in"), partitions=2)
    dice = random.Random()
    for round_number in range(20):
        fill(broker_process, topic, 5_000)
        log = tmp_path / f"{round_number}.log"
        started.append(ArchiveProcess(broker_process, topic, tmp_path / "lake", log, records_max=1_000))
        started[-1].wait_for_batches(dice.choice((1, 2, 3)))
        time.sleep(dice.uniform(0, 1.5))
        started[-1].kill()
    run(spark, broker_process, topic, tmp_path / "lake")
    assert_archived(broker_process, tmp_path / "lake", topic)
