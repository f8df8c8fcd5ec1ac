"""`mansio pipeline archive` and `run_pipeline` are killed as real processes; the same commands go on by themselves.

A start is a JVM and costs ten seconds, so the short test starts all at once, and the last start of each is made in the
session that the other tests have. Kills at every single step of a batch are in `test_archive_kills.py`, without a JVM.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.iceberg.archive.table import open_table
from mansio.pipelines.run import PipelineJob, run_pipeline
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from support.pipeline_process import PipelineProcess
from system.spark.archives import archive_once, assert_archived
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

FILE = """
import os
import time

def transform(frame):
    while not os.path.exists(os.environ["TURN"]):
        time.sleep(0.02)
    return frame.select("key", "value")
"""
"""A start of it waits for a file, its turn: so all JVMs can start at the same time, and run one after the other. It is
called `random.py`, beside which nothing of Python's own that imports `random` works: no worker may look there."""
PARTITIONS = 2
BATCH = 100
PLACE_AND_VALUE = ("__partition", "__offset", "value")
RUN_KILLS = 2
TIMEOUT_S = 1_800


class Job:
    """A pipeline that reads a topic of its own: the topic's records, and the processes that were started."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path) -> None:
        self.broker, self.place = broker, place
        self.source = create(broker.bootstrap_servers, topic, PARTITIONS)
        self.published = 0
        self.started: list[PipelineProcess] = []
        place.mkdir()

    def publish(self, count: int) -> None:
        """That many more records; a value is the record's number."""
        numbers = range(self.published, self.published + count)
        publish(self.broker.bootstrap_servers, self.source, [(b"%d" % (n % 50), b"%d" % n) for n in numbers])
        self.published += count

    def words(self) -> list[str]:
        """The command."""
        raise NotImplementedError

    def start(self) -> PipelineProcess:
        words = [*self.words(), "--bootstrap-servers", self.broker.bootstrap_servers, "--master", "local[2]"]
        words += ["--max-records", str(BATCH), "--trigger", "0.1"]
        turn = str(self.turn(len(self.started)))
        self.started.append(PipelineProcess(self.place, words, {"TURN": turn}))
        return self.started[-1]

    def turn(self, number: int) -> Path:
        """The file that lets start `number` begin."""
        return self.place / f"turn-{number}"


class Archive(Job):
    """Into a table."""

    @property
    def warehouse(self) -> Path:
        return self.place / "lake"

    def words(self) -> list[str]:
        return [
            "archive",
            self.source,
            "--warehouse",
            str(self.warehouse),
            "--name",
            f"archive-{self.source}",
        ]

    def done(self) -> int:
        """How many records are in the table."""
        committed = open_table(None, str(self.warehouse), self.source).last_commit()
        return 0 if committed is None else sum(committed.offsets.values())

    def finish(self, spark: SparkSession) -> None:
        """The last start goes to the end; then each record is there exactly once."""
        before = self.done()
        assert (
            archive_once(spark, self.broker, self.source, self.warehouse).records == self.published - before
        )
        assert_archived(self.broker, self.warehouse, self.source)


class Copy(Job):
    """Into another topic, by the user's own file."""

    def __init__(self, broker: ServedBroker, topic: str, target: str, place: Path) -> None:
        super().__init__(broker, topic, place)
        self.target = create(broker.bootstrap_servers, target, PARTITIONS)
        (place / "random.py").write_text(FILE)

    def words(self) -> list[str]:
        return ["run", "random.py", "--topic", self.source, "--to", self.target]

    def done(self) -> int:
        """How many records are in the target."""
        return len(contents(self.broker.bootstrap_servers, self.target))

    def finish(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last start goes to the end; then each record is there exactly once."""
        monkeypatch.setenv("TURN", str(self.place))
        job = PipelineJob(
            file=str(self.place / "random.py"),
            name="random",
            bootstrap_servers=self.broker.bootstrap_servers,
            checkpoint=str(self.place / "checkpoints" / "random"),
            inputs=(self.source,),
            topic=self.target,
            stops_when_caught_up=True,
        )
        assert run_pipeline(spark, job).lag == 0
        seen = Counter(
            int(message.value or b"") for message in contents(self.broker.bootstrap_servers, self.target)
        )
        assert sorted(seen) == list(range(self.published))
        assert seen.total() == self.published, "a record is there twice"
        with mansio.blocking.connect(self.broker.bootstrap_servers) as client:
            lags = client.admin.group_lag(pipeline_group_id("random"))
        assert [lag.lag for place, lag in lags.items() if place.topic == self.source] == [0] * PARTITIONS


@pytest.fixture
def jobs(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> Iterator[tuple[Archive, Copy]]:
    archive = Archive(broker_process, topic_name("archived"), tmp_path / "archive")
    copy = Copy(broker_process, topic_name("in"), topic_name("out"), tmp_path / "passing")
    yield archive, copy
    for process in archive.started + copy.started:
        process.kill()


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S)
def test_archive_and_run_killed_in_the_middle_go_on_with_the_same_command(
    spark: SparkSession, jobs: tuple[Archive, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, copy = jobs
    for job in jobs:
        job.publish(4_000)
    archive.start()
    for _ in range(RUN_KILLS):
        copy.start()
    archive.started[0].wait_for_batches(2)
    time.sleep(random.uniform(0, 1))  # the point of the kill, not a wait for anything
    archive.started[0].kill()
    for number, process in enumerate(copy.started):
        copy.turn(number).touch()
        process.wait_for_batches(number)  # the first one dies in or before its first batch
        time.sleep(random.uniform(0, 1))
        process.kill()
    for job in jobs:
        assert 0 < job.done() < job.published, "killed in the middle"
    archive.finish(spark)
    copy.finish(spark, monkeypatch)
