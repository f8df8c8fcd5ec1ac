"""`mansio pipeline archive` and `run` are killed as real processes; the same commands go on by themselves.

A start is a JVM and costs ten seconds, so the short test starts all at once, and the last start of each is made in the
session that the other tests have. Kills at every single step of a batch are in `test_archive_kills.py`, without a JVM.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.spark.lake.catalog import open_table
from mansio.spark.pipelines.run import RunJob, run
from mansio.wire.hold import hold_group
from spark.archives import archive_once, assert_archived
from spark.topics import contents, create, publish
from support.pipeline_process import PipelineProcess

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
"""A start of it waits for a file, its turn: so all JVMs can start at the same time, and run one after the other."""
PARTITIONS = 2
BATCH = 100
RUN_KILLS = 1
NIGHTLY_KILLS = int(os.environ.get("MANSIO_NIGHTLY_PIPELINE_KILLS", "20"))


class Job:
    """A pipeline that reads a topic of its own: the topic's records, and the processes that were started."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path) -> None:
        self.broker, self.place = broker, place
        self.source = create(broker.bootstrap, topic, PARTITIONS)
        self.published = 0
        self.started: list[PipelineProcess] = []
        place.mkdir()

    def publish(self, count: int) -> None:
        """That many more records; a value is the record's number."""
        numbers = range(self.published, self.published + count)
        publish(self.broker.bootstrap, self.source, [(b"%d" % (n % 50), b"%d" % n) for n in numbers])
        self.published += count

    def words(self) -> list[str]:
        """The command."""
        raise NotImplementedError

    def start(self) -> PipelineProcess:
        words = [*self.words(), "--broker", self.broker.bootstrap, "--master", "local[2]"]
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
        committed = open_table(None, str(self.warehouse), self.source).committed()
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
        self.target = create(broker.bootstrap, target, PARTITIONS)
        (place / "passing.py").write_text(FILE)

    def words(self) -> list[str]:
        return ["run", "passing.py", "--topic", self.source, "--to", self.target]

    def done(self) -> int:
        """How many records are in the target."""
        return len(contents(self.broker.bootstrap, self.target))

    def finish(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last start goes to the end; then each record is there, and twice at most what was under way at a kill."""
        monkeypatch.setenv("TURN", str(self.place))
        job = RunJob(
            file=str(self.place / "passing.py"),
            name="passing",
            bootstrap=self.broker.bootstrap,
            checkpoint=str(self.place / "checkpoints" / "passing"),
            inputs=(self.source,),
            topic=self.target,
            is_once=True,
        )
        assert run(spark, job).lag == 0
        seen = Counter(int(message.value or b"") for message in contents(self.broker.bootstrap, self.target))
        assert sorted(seen) == list(range(self.published))
        assert seen.total() - self.published <= len(self.started) * BATCH
        with mansio.blocking.connect(self.broker.bootstrap) as client:
            lags = client.admin.group_lag(hold_group("passing"))
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


@pytest.mark.timeout(300)
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
        process.wait_for_batches(1)
        time.sleep(random.uniform(0, 1))
        process.kill()
    for job in jobs:
        assert 0 < job.done() < job.published, "killed in the middle"
    archive.finish(spark)
    copy.finish(spark, monkeypatch)


def kill_at_random(job: Job) -> None:
    """Records come all the time. Some kills hit while Spark starts; some hit Python only, whose JVM may still be at
    work when the next one starts."""
    dice = random.Random()
    for number in range(NIGHTLY_KILLS):
        job.publish(500)
        job.turn(number).touch()
        process = job.start()
        batches = dice.choice((0, 1, 1, 2, 3))
        process.wait_for_batches(batches)
        time.sleep(dice.uniform(0, 1.5 if batches else 8))
        if dice.random() < 0.3:
            process.kill_driver()
        else:
            process.kill()


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_archive_killed_twenty_times_has_every_record_once(
    spark: SparkSession, jobs: tuple[Archive, Copy]
) -> None:
    kill_at_random(jobs[0])
    jobs[0].finish(spark)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_run_killed_twenty_times_misses_nothing(
    spark: SparkSession, jobs: tuple[Archive, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_random(jobs[1])
    jobs[1].finish(spark, monkeypatch)
