"""Jobs on a standalone Spark cluster of two workers: the check before they start, results, and kills.

Drivers are processes of their own, as on a cluster; each start is a JVM, so a test makes few.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from mansio.pipelines.restarts import WORKER_START_TIMEOUT_TEXT
from support.iceberg import checksum
from support.machine import scaled
from support.paths import ROOT
from support.pipeline_process import PipelineProcess
from support.process import inherited
from support.spark_cluster import WORKERS
from support.waiting import wait_until
from system.spark.archives import assert_archived
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker
    from support.spark_cluster import SparkCluster

    TopicName = Callable[[str], str]
    MakeJobs = Callable[["SparkCluster", "ServedBroker", str, "Path"], tuple["ClusterJob", ...]]

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.timeout(1_800)]

PARTITIONS = 2
BATCH = 200
DRIVER_S = 300.0
ATTEMPTS = 4
VECTOR_WARNING = "Using incubator modules: jdk.incubator.vector"
"""Line of the JVM itself, which Spark starts with this module."""
FILE = """
def transform(frame):
    return frame.selectExpr("cast(key as string) key", "cast(value as string) value", "partition", "offset")
"""


class ClusterJob:
    """A job that reads a topic on the cluster, as the command that a user would type."""

    def __init__(self, cluster: SparkCluster, broker: ServedBroker, place: Path, words: list[str]) -> None:
        self._cluster, self._broker, self._words = cluster, broker, words
        self.place = place
        place.mkdir(exist_ok=True)

    def start(self, *more: str, records_max: int = BATCH) -> PipelineProcess:
        words = [*self._words, "--master", self._cluster.master, *self._cluster.settings(2), *more]
        words += ["--bootstrap-servers", self._broker.bootstrap_servers, "--max-records", str(records_max)]
        return PipelineProcess(self.place, words, {"SPARK_LOCAL_IP": "127.0.0.1"})


def job_pair(
    cluster: SparkCluster, broker: ServedBroker, topic: str, place: Path
) -> tuple[ClusterJob, ClusterJob]:
    """An archive, and the user's function into files, of the same topic."""
    file = place / "plain.py"
    file.write_text(FILE)
    archive = ["archive", topic, "--warehouse", str(place / "lake"), "--name", f"archive-{topic}"]
    copy = ["run", str(file), "--topic", topic, "--name", f"run-{topic}", "--to-path", str(place / "files")]
    copy += ["--checkpoint", str(place / "checkpoint")]
    return (
        ClusterJob(cluster, broker, place / "archive", archive),
        ClusterJob(cluster, broker, place / "run", copy),
    )


def assert_complete(broker: ServedBroker, topic: str, place: Path) -> None:
    """Archive and files have each record of the topic once."""
    assert_archived(broker, place / "lake", topic)
    logged = sorted(
        (one.partition, one.offset, (one.value or b"").decode())
        for one in contents(broker.bootstrap_servers, topic)
    )
    names = committed_files(place / "files")
    rows = [row for name in names for row in pq.read_table(name, partitioning=None).to_pylist()]
    written = sorted((row["partition"], row["offset"], row["value"]) for row in rows)
    assert len(written) == len(logged)
    assert checksum(written) == checksum(logged)


def committed_files(directory: Path) -> list[str]:
    """The files of a directory that Spark has written as a stream, by its log of them."""
    names: set[str] = set()
    entries = [one for one in (directory / "_spark_metadata").iterdir() if not one.name.startswith(".")]
    for entry in entries:
        names |= {json.loads(line)["path"] for line in entry.read_text().splitlines()[1:]}
    return sorted(name.removeprefix("file://") for name in names)


def fill(broker: ServedBroker, topic: str, begin: int, end: int) -> None:
    publish(broker.bootstrap_servers, topic, [(b"%d" % (n % 50), b"value %d" % n) for n in range(begin, end)])


class KilledJobs:
    """Jobs over a topic that grows, and what is killed meanwhile. `make_jobs`: makes the jobs; `check`: whether their
    targets are complete.
    """

    def __init__(
        self,
        cluster: SparkCluster,
        broker: ServedBroker,
        topic: str,
        place: Path,
        make_jobs: MakeJobs = job_pair,
        check: Callable[[ServedBroker, str, Path], None] = assert_complete,
    ) -> None:
        self._cluster, self._broker, self._place, self._check = cluster, broker, place, check
        self._topic = create(broker.bootstrap_servers, topic, PARTITIONS)
        self._published = 0
        self._jobs = make_jobs(cluster, broker, self._topic, place)
        self.running: list[PipelineProcess] = []

    def start(self, *more: str, records_max: int = BATCH) -> None:
        self.running = [job.start("--skip-check", *more, records_max=records_max) for job in self._jobs]

    def publish_and_wait(self, records: int = 10 * BATCH) -> None:
        """Return when all jobs have completed a batch of the new records, and others are left."""
        before = [one.batches for one in self.running]
        fill(self._broker, self._topic, self._published, self._published + records)
        self._published += records
        for one, batches in zip(self.running, before, strict=True):
            one.wait_for_batches(batches + 1)

    def kill_executor(self, dice: random.Random) -> None:
        wait_until(self._cluster.executors, DRIVER_S, "an executor runs")
        dice.choice(self._cluster.executors()).kill()

    def kill_worker(self, dice: random.Random) -> None:
        """The jobs need the other worker until it is back, which `start_worker` does."""
        number = dice.randrange(WORKERS)
        self._cluster.kill_worker(number)
        self.publish_and_wait()
        self._cluster.start_worker(number)
        self._cluster.wait_for_worker(number)

    def kill_drivers(self, dice: random.Random) -> None:
        for one in self.running:
            one.kill()
        self.start("--trigger", "0.1")

    def finish(self) -> int:
        """Run the jobs to the end, in few batches; returns the number of records, which all targets have once."""
        for one in self.running:
            one.kill()
        self.start("--once", records_max=100 * BATCH)
        for one in self.running:
            assert one.wait(scaled(DRIVER_S)) == 0, one.printed
        self._check(self._broker, self._topic, self._place)
        return self._published

    def close(self) -> None:
        for one in self.running:
            one.kill()


def test_archive_and_run_lose_and_double_nothing_when_executor_worker_and_drivers_are_killed(
    spark_cluster: SparkCluster, broker_process: ServedBroker, topic_name: TopicName, tmp_path: Path
) -> None:
    dice = random.Random(1)
    jobs = KilledJobs(spark_cluster, broker_process, topic_name("in"), tmp_path)
    try:
        jobs.start("--trigger", "0.1")
        jobs.publish_and_wait()
        jobs.kill_executor(dice)
        jobs.publish_and_wait()
        jobs.kill_worker(dice)
        assert jobs.finish() == 3 * 10 * BATCH, "finish has killed the drivers"
    finally:
        jobs.close()


def run_driver(cluster: SparkCluster, place: Path, code: str, *arguments: str, **environment: str) -> Any:
    """Run a Python program as a scheduler would: a script that starts its session, and that is run again when a worker
    of Spark did not start in time on a busy machine. Returns its last line as JSON."""
    script = place / "driver.py"
    script.write_text(code)
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            [sys.executable, str(script), cluster.master, *arguments],
            cwd=place,
            env={**inherited(), "SPARK_LOCAL_IP": "127.0.0.1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(DRIVER_S),
            check=False,
        )
        if WORKER_START_TIMEOUT_TEXT not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "errors").write_text(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


CHECKS = """
import json, os, sys
from mansio.spark import session
from mansio.pipelines.cluster_check import check_cluster
from mansio.spark.cluster.problems import SharedDirectory

settings, servers, place = sys.argv[2:]
spark = session(sys.argv[1], "a scheduled job", **json.loads(settings))
lake = SharedDirectory("warehouse", place + "/lake", "--warehouse")
found = {"good": [one.line for one in check_cluster(spark, servers, [lake]).problems]}
found["workers"] = len(check_cluster(spark).workers)
found["left"] = os.listdir(place + "/lake")
found["no broker"] = [one.line for one in check_cluster(spark, "127.0.0.1:1").problems]
used = spark.sparkContext.pythonExec
for name in ("bare", "missing"):
    spark.sparkContext.pythonExec = place + "/" + name
    found[name] = [one.line for one in check_cluster(spark).problems]
spark.sparkContext.pythonExec = used
"""
REPORT = """
print(json.dumps(found | {"union": union.count(), "batches": len(query.recentProgress)}))
"""


def notebook_code() -> str:
    """The code of the example notebook, cell by cell."""
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
    assert len(cells) >= 4
    return "\n".join(cells)


def flight(number: int) -> bytes:
    """A line of the data that the notebook reads; the seventh field is the departure delay."""
    return b"%d,2013,1,1,517,515,%d,830" % (number, number % 60)


def test_check_finds_what_workers_lack_and_the_notebook_runs(
    spark_cluster: SparkCluster, served_broker: ServedBroker, tmp_path: Path
) -> None:
    servers = served_broker.bootstrap_servers
    create(servers, "flights", PARTITIONS)
    create(servers, "late-flights", PARTITIONS)
    values = [flight(number) for number in range(600)]
    publish(servers, "flights", [(b"N%d" % (n % 9), value) for n, value in enumerate(values)])
    bare_python(tmp_path)
    words = spark_cluster.settings(WORKERS)
    settings = json.dumps(dict(word.split("=", 1) for word in words[1::2]))
    found = run_driver(
        spark_cluster,
        tmp_path,
        CHECKS + notebook_code() + REPORT,
        settings,
        servers,
        str(tmp_path),
        MANSIO_BOOTSTRAP_SERVERS=servers,
    )
    assert found["good"] == found["left"] == []
    assert found["workers"] >= 2
    assert [line.partition(" (")[0] for line in found["no broker"]] == [
        "driver: cannot connect to 127.0.0.1:1: Connection refused. Start a broker, or name one"
    ]
    assert [line.split()[0] for line in found["bare"]] == ["driver", str(found["workers"])]
    for line in found["bare"]:
        assert "has no pyspark, pyarrow, numpy, mansio. Run `pip install 'mansio" in line
    assert len(found["missing"]) == 2
    for line in found["missing"]:
        assert "/missing (PYSPARK_PYTHON) cannot be started. Set PYSPARK_PYTHON" in line
    errors = [line for line in (tmp_path / "errors").read_text().splitlines() if VECTOR_WARNING not in line]
    assert errors == [], "a cluster session is quiet"
    late = [value for value in values if int(value.split(b",")[6]) >= 30]
    assert {one.value for one in contents(servers, "late-flights")} == set(late)
    assert_archived(served_broker, tmp_path / "lake", "flights")
    assert found["union"] == len(values)


def bare_python(place: Path) -> Path:
    """A Python without any package, as on a worker that nothing was installed on."""
    python = place / "bare"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH SPARK_HOME\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    return python
