"""A standalone cluster over a night: random kills, the commands of docs/how-to/spark-cluster.md, and packed Python."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mansio.spark import find_java
from support.iceberg import checksum
from support.machine import scaled
from support.paths import ROOT, free_port, mansio_command
from support.process import inherited
from support.seeds import chosen_seed
from system.spark.archives import assert_archived
from system.spark.test_backfill import rows
from system.spark.test_cluster import ClusterJob, KilledJobs, bare_python
from system.spark.test_cluster_workers import KilledWorkers
from system.spark.test_pipelines_document import examples
from system.spark.test_run_table_kills import FILE as ROWS
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.process import ServedBroker
    from support.spark_cluster import SparkCluster

pytestmark = pytest.mark.spark

KILLS = int(os.environ.get("MANSIO_NIGHTLY_PIPELINE_KILLS", "20"))
TIMEOUT_S = 7_200
DOCUMENT = "docs/how-to/spark-cluster.md"
COMMANDS_S = 900.0
FLIGHTS = 4


def run_commands(place: Path, broker: ServedBroker, port: int, *codes: str) -> str:
    """The output of commands of the document, in one shell; only the ports are other ones."""
    script = "\n".join(codes).replace("127.0.0.1:7077", f"127.0.0.1:{port}").replace("7077", str(port))
    script = script.replace("127.0.0.1:9092", broker.bootstrap_servers).replace("8080", "0")
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=place,
        env={
            **{
                name: value
                for name, value in inherited().items()
                if not name.startswith(("PYSPARK", "SPARK"))
            },
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(COMMANDS_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def publish_flights(broker: ServedBroker) -> None:
    create(broker.bootstrap_servers, "flights", 2)
    publish(broker.bootstrap_servers, "flights", [(b"N%d" % n, b"%d,2013" % n) for n in range(FLIGHTS)])


@pytest.mark.timeout(TIMEOUT_S)
def test_jobs_on_a_cluster_killed_twenty_times_have_every_record_once(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    kill_at_random(KilledJobs(spark_cluster, broker_process, topic_name("in"), tmp_path))


@pytest.mark.timeout(TIMEOUT_S)
def test_table_jobs_on_a_cluster_killed_twenty_times_have_every_row_once(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    kill_at_random(
        KilledJobs(spark_cluster, broker_process, topic_name("in"), tmp_path, table_jobs, assert_tables)
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_workers_on_a_cluster_killed_twenty_times_have_each_result_once(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    jobs = KilledWorkers(spark_cluster, broker_process, topic_name("in"), tmp_path)
    kill_at_random(jobs, jobs.kill_broker)


def kill_at_random(jobs: KilledJobs, *more: Callable[[random.Random], None]) -> None:
    """Kill executors, workers and drivers, and do `more`, in a random order."""
    dice = random.Random(chosen_seed())
    kinds = (jobs.kill_executor, jobs.kill_executor, jobs.kill_worker, jobs.kill_drivers, *more)
    try:
        jobs.start("--trigger", "0.1")
        for number in range(KILLS):
            jobs.publish_and_wait()
            kill = dice.choice(kinds)
            kill(dice)
            print(f"kill {number + 1}: {kill.__name__}")
        print(f"{KILLS} kills, {jobs.finish()} records, each once in both targets")
    finally:
        jobs.close()


def table_jobs(
    cluster: SparkCluster, broker: ServedBroker, topic: str, place: Path
) -> tuple[ClusterJob, ClusterJob]:
    """The user's function into an Iceberg table, appended and upserted by key, in one warehouse."""
    file = place / "rows.py"
    file.write_text(ROWS)
    words = ["run", str(file), "--topic", topic, "--warehouse", str(place / "lake"), "--name"]
    append = [*words, f"append-{topic}", "--to-table", "ns.appended", "--checkpoint", str(place / "append")]
    upsert = [*words, f"upsert-{topic}", "--to-table", "ns.upserted", "--checkpoint", str(place / "upsert")]
    upsert += ["--mode", "update", "--key", "id"]
    return (
        ClusterJob(cluster, broker, place / "append-job", append),
        ClusterJob(cluster, broker, place / "upsert-job", upsert),
    )


def assert_tables(broker: ServedBroker, topic: str, place: Path) -> None:
    """One table has a row for each record, the other one for each key, of its last record."""
    logged = [
        ((one.key or b"").decode(), one.partition, one.offset, (one.value or b"").decode())
        for one in contents(broker.bootstrap_servers, topic)
    ]
    for table, expected in (
        ("appended", logged),
        ("upserted", list({row[0]: row for row in logged}.values())),
    ):
        found = sorted(
            (row["id"], row["partition"], row["at"], row["value"])
            for row in rows(place / "lake", f"ns.{table}")
        )
        assert len(found) == len(expected), table
        assert checksum(found) == checksum(sorted(expected)), table
        print(f"{table}: {len(found)} rows, {checksum(found)}")


@pytest.mark.timeout(TIMEOUT_S)
def test_standalone_section_of_the_document_works_by_copy_and_paste(
    served_broker: ServedBroker, tmp_path: Path
) -> None:
    publish_flights(served_broker)
    found = examples(DOCUMENT)
    codes = [found[name][1] for name in ("standalone-start", "standalone-jobs", "standalone-stop")]
    trap = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
    output = run_commands(tmp_path, served_broker, free_port(), trap, *codes)
    assert output.count("worker ") == 2, output
    assert "problem" not in output
    assert f"{FLIGHTS} records" in output
    assert_archived(served_broker, tmp_path / "lake", "flights")


@pytest.mark.timeout(TIMEOUT_S)
def test_packed_environment_is_sent_to_workers_that_have_no_packages(
    spark_cluster: SparkCluster, served_broker: ServedBroker, tmp_path: Path
) -> None:
    publish_flights(served_broker)
    found = examples(DOCUMENT)
    (tmp_path / "job.py").write_text(
        found["job.py"][1].replace("127.0.0.1:9092", served_broker.bootstrap_servers)
    )
    code = found["archives"][1].replace("'.[spark]'", f"'{ROOT}[spark]'")
    settings = shlex.join(spark_cluster.settings())
    code = code.replace("--archives", f"{settings} --archives")
    prepared = f'export JAVA_HOME="{find_java().home}"'
    port = int(spark_cluster.master.rpartition(":")[2])
    assert f"{FLIGHTS} flights" in run_commands(tmp_path, served_broker, port, prepared, code)
    unpacked = list(Path(spark_cluster.place).glob("work-*/app-*/*/environment/bin/python"))
    assert unpacked, "the executors have unpacked it"


@pytest.mark.timeout(TIMEOUT_S)
def test_job_on_a_cluster_that_lacks_something_ends_with_a_line_for_each_problem(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    bare = bare_python(tmp_path)
    words = [*mansio_command(), "pipeline", "hot-keys", topic, "--master", spark_cluster.master]
    words += [*spark_cluster.settings(), "--bootstrap-servers", broker_process.bootstrap_servers]
    done = subprocess.run(
        words,
        env={**inherited(), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(bare)},
        capture_output=True,
        text=True,
        timeout=scaled(COMMANDS_S),
        check=False,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("mansio: ")]
    assert len(lines) == 2, done.stderr
    assert all("Run `pip install 'mansio" in line for line in lines)
    assert "Traceback" not in done.stderr
