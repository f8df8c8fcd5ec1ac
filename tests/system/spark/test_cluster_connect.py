"""Jobs with Spark Connect: the commands and the notebook's session without a JVM in the client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import mansio
from mansio.spark import find_java
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from support.machine import scaled
from support.paths import free_port, mansio_command
from support.process import inherited
from support.spark_cluster import spark_home
from support.waiting import wait_until
from system.spark.archives import assert_archived
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.timeout(1_200)]

START_DEADLINE_S = 120.0
COMMAND_S = 300.0
SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
RECORDS = 300
FILE = """
from pyspark.sql import functions as f

def transform(frame):
    return frame.select("key", f.udf(lambda value: MARK + bytes(value).decode(), "string")("value").alias("value"))

MARK = "!"
"""
HALVE = """
from mansio.spark import work

def halve(row):
    if row.value == b"7":
        raise ValueError("seven")
    return {"value": b"%d" % (int(row.value) // 2)}

def transform(frame):
    return work.apply(frame, halve, schema="value binary")
"""


@contextmanager
def connect_server(place: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Spark Connect server that answers; stopped at the end. It is started by its class: the packages of PySpark 4.1
    and 4.2 have no `sbin/start-connect-server.sh`."""
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.driver.memory": "700m",
        "spark.sql.shuffle.partitions": "2",
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(spark_home() / "bin" / "spark-submit"),
                "--class",
                SERVER_CLASS,
                "--master",
                "local[2]",
                *words,
            ],
            cwd=place,
            env={
                **inherited(),
                "JAVA_HOME": find_java().home,
                "SPARK_HOME": str(spark_home()),
                "SPARK_LOCAL_IP": "127.0.0.1",
                "PYSPARK_PYTHON": sys.executable,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answers() -> bool:
        assert process.poll() is None, (place / "log").read_text(errors="replace")
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    everyone: list[psutil.Process] = []
    try:
        wait_until(answers, START_DEADLINE_S, "the server answers")
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            everyone = psutil.Process(process.pid).children(recursive=True)
        processes: list[Any] = [process, *everyone]
        for one in processes:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(everyone, scaled(30))
        for left in alive:
            left.kill()
        process.wait(scaled(60))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Spark Connect server."""
    port = free_port()
    with connect_server(tmp_path_factory.mktemp("connect"), port):
        yield f"sc://127.0.0.1:{port}"


def pipeline(place: Path, broker: ServedBroker, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of `mansio pipeline` in a process without Java."""
    environment = {name: value for name, value in inherited().items() if name != "JAVA_HOME"}
    return subprocess.run(
        [*mansio_command(), "pipeline", *words, "--output", "json"],
        cwd=place,
        env={**environment, "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers, "PATH": os.defpath},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(COMMAND_S),
        check=False,
    )


def test_run_and_archive_over_spark_connect_continue_where_they_were(
    server: str, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic, target = create(servers, topic_name("in"), 2), create(servers, topic_name("out"), 2)
    (tmp_path / "mark.py").write_text(FILE)
    run = ["run", "mark.py", "--topic", topic, "--to", target, "--name", topic, "--once", "--remote", server]
    archive = ["archive", topic, "--warehouse", str(tmp_path / "lake"), "--once", "--remote", server]
    publish(servers, topic, [(b"k", b"%d" % n) for n in range(RECORDS)])
    for published, commands in ((RECORDS, (run, archive)), (RECORDS + 1, (run,))):
        for words in commands:
            # The cluster is checked once, by the first command.
            more = () if words is run and published == RECORDS else ("--skip-check",)
            done = pipeline(tmp_path, broker_process, *words, *more)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["records"] == (RECORDS if published == RECORDS else 1)
        if published == RECORDS:
            assert_archived(broker_process, tmp_path / "lake", topic)
            publish(servers, topic, [(b"k", b"%d" % RECORDS)])
    values = sorted(one.value or b"" for one in contents(servers, target))
    assert values == sorted(b"!%d" % n for n in range(RECORDS + 1)), (
        "each once: the checkpoint was found again"
    )
    with mansio.blocking.connect(servers) as client:
        lags = client.admin.group_lag(pipeline_group_id(topic))
    assert [lag.lag for lag in lags.values()] == [0, 0], "the listener has committed from the client"
    assert not [path for path in (tmp_path / "lake").iterdir() if path.name.startswith(".mansio")]


def test_what_spark_connect_cannot_do_is_refused_with_one_line(
    server: str, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create(broker_process.bootstrap_servers, topic_name("in"))
    for more, line in (
        (
            ["--conf", "spark.executor.memory=2g"],
            "spark.executor.memory cannot be set in a session of a Spark Connect",
        ),
        (["--master", "spark://127.0.0.1:7077"], "give one of them"),
    ):
        done = pipeline(tmp_path, broker_process, "hot-keys", topic, "--remote", server, *more)
        assert done.returncode != 0
        assert line in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr


@pytest.mark.row("S13")
def test_workers_over_spark_connect_retry_and_dead_letter_rows(
    server: str, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic, target = create(servers, topic_name("in")), topic_name("out")
    (tmp_path / "halve.py").write_text(HALVE)
    with mansio.blocking.connect(servers) as client:
        settings = {"share.auto.offset.reset": "earliest", "share.delivery.count.limit": "1"}
        client.admin.alter_group_config(topic, settings)
    publish(servers, topic, [(b"%d" % n, b"%d" % n) for n in range(20)])
    words = ["run", "halve.py", "--topic", topic, "--share-group", topic, "--to", target, "--once"]
    done = pipeline(tmp_path, broker_process, *words, "--remote", server, "--skip-check")
    assert done.returncode == 0, done.stderr
    found = {int(one.key or b""): int(one.value or b"") for one in contents(servers, target)}
    assert found == {n: n // 2 for n in range(20) if n != 7}
    place = mansio.TopicPartition(topic, 0)
    with mansio.blocking.connect(servers) as client:

        def dead() -> int:
            state = client.admin.shares.leases(topic, [place])[place]
            return 0 if state is None else state.dead

        wait_until(lambda: dead() == 1, START_DEADLINE_S, "the dead letter")
