"""`run --to`, `backfill` and `dlq` on a standalone cluster and with Spark Connect, as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import mansio
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from nightly.spark.test_kills import NIGHTLY_KILLS, NIGHTLY_TIMEOUT_S
from support.machine import scaled
from support.paths import free_port, mansio_command
from support.pipeline_process import PipelineProcess
from support.process import inherited
from support.seeds import chosen_seed
from system.spark import test_cluster_connect
from system.spark.archives import assert_archived
from system.spark.test_backfill import EVEN, at, numbers, publish_numbers, rows
from system.spark.test_cluster_connect import FILE, connect_server
from system.spark.test_dlq import PLANTED, TEMPLATES, plant, receive_again
from system.spark.test_run_table_kills import FILE as ROWS
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.timeout(1_200)]

COMMAND_S = 300.0
RECORDS = 400
ROUND = 20
PAUSE_S = 0.2
CLIENT_KILLS = max(1, NIGHTLY_KILLS // 4)

server = test_cluster_connect.server


class Pipelines:
    """Runs `mansio pipeline` with one place to run at: a cluster's master, or a server of Spark Connect."""

    def __init__(self, place: Path, broker: ServedBroker, where: list[str]) -> None:
        self.place, self.broker = place, broker
        self._where = where

    def run(self, *words: str) -> dict[str, Any]:
        """The result of a command that succeeds."""
        command = [*mansio_command(), "pipeline", *words, *self._where, "--output", "json"]
        done = subprocess.run(
            [*command, "--bootstrap-servers", self.broker.bootstrap_servers],
            cwd=self.place,
            env={**inherited(), "SPARK_LOCAL_IP": "127.0.0.1", "PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(COMMAND_S),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(params=["cluster", "connect"])
def pipelines(request: pytest.FixtureRequest, broker_process: ServedBroker, tmp_path: Path) -> Pipelines:
    if request.param == "connect":
        return Pipelines(tmp_path, broker_process, ["--remote", request.getfixturevalue("server")])
    cluster = request.getfixturevalue("spark_cluster")
    return Pipelines(tmp_path, broker_process, ["--master", cluster.master, *cluster.settings(2)])


@pytest.mark.parametrize("mode", ["append", "update"])
def test_run_to_a_topic_continues_with_the_records_that_have_come(
    pipelines: Pipelines, topic_name: Callable[[str], str], mode: str
) -> None:
    servers = pipelines.broker.bootstrap_servers
    topic, target = create(servers, topic_name("in"), 2), create(servers, topic_name("out"), 2)
    (pipelines.place / "mark.py").write_text(FILE)
    words = ["run", "mark.py", "--topic", topic, "--to", target, "--name", topic, "--once", "--mode", mode]
    words += ["--checkpoint", str(pipelines.place / "checkpoint"), "--max-records", "150"]
    for begin in (0, RECORDS):
        publish(servers, topic, [(b"k%d" % (n % 9), b"%d" % n) for n in range(begin, begin + RECORDS)])
        done = pipelines.run(*words)
        assert (done["records"], done["lag"]) == (RECORDS, 0)
        assert done["batches"] > 1
    assert pipelines.run(*words)["records"] == 0
    values = sorted(one.value or b"" for one in contents(servers, target))
    assert values == sorted(b"!%d" % n for n in range(2 * RECORDS)), "each once"
    with mansio.blocking.connect(servers) as client:
        lags = client.admin.group_lag(pipeline_group_id(topic))
    assert [lag.lag for lag in lags.values()] == [0, 0]


@pytest.mark.parametrize("key", ["", "id"], ids=["append", "upsert"])
def test_run_to_a_table_has_every_row_once(
    pipelines: Pipelines, topic_name: Callable[[str], str], key: str
) -> None:
    servers = pipelines.broker.bootstrap_servers
    topic = create(servers, topic_name("in"), 2)
    words = table_words(pipelines, topic, key)
    for begin in (0, RECORDS):
        publish_round(servers, topic, begin)
        done = pipelines.run(*words, "--once")
        assert (done["records"], done["lag"]) == (RECORDS, 0)
        assert done["batches"] > 1
    assert_table_holds_the_topic(pipelines, topic, key)


def table_words(pipelines: Pipelines, topic: str, key: str) -> list[str]:
    """`run` into a table of the warehouse `lake`."""
    (pipelines.place / "rows.py").write_text(ROWS)
    words = ["run", "rows.py", "--topic", topic, "--name", topic, "--max-records", "150"]
    words += ["--to-table", "ns.rows", "--warehouse", str(pipelines.place / "lake")]
    words += ["--checkpoint", str(pipelines.place / "checkpoint")]
    return [*words, "--mode", "update", "--key", key] if key else words


def publish_round(servers: str, topic: str, begin: int, count: int = RECORDS) -> None:
    publish(servers, topic, [(b"k%d" % (n % 9), b"%d" % n) for n in range(begin, begin + count)])


def assert_table_holds_the_topic(pipelines: Pipelines, topic: str, key: str) -> int:
    """Each record has a row, or each key the row of its last record; returns the number of rows."""
    servers, lake = pipelines.broker.bootstrap_servers, pipelines.place / "lake"
    logged = [
        ((one.key or b"").decode(), one.partition, one.offset, (one.value or b"").decode())
        for one in contents(servers, topic)
    ]
    expected = list({row[0]: row for row in logged}.values()) if key else logged
    found = [(row["id"], row["partition"], row["at"], row["value"]) for row in rows(lake, "ns.rows")]
    assert sorted(found) == sorted(expected)
    return len(found)


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
@pytest.mark.parametrize("key", ["", "id"], ids=["append", "upsert"])
def test_client_of_spark_connect_is_killed_and_the_same_command_goes_on(
    server: str, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path, key: str
) -> None:
    """The server still runs the query of a killed client when the next one starts."""
    pipelines = Pipelines(tmp_path, broker_process, ["--remote", server])
    servers, dice = broker_process.bootstrap_servers, random.Random(chosen_seed())
    topic = create(servers, topic_name("in"), 2)
    words = table_words(pipelines, topic, key)
    process, published = None, 0
    try:
        for number in range(CLIENT_KILLS):
            process = PipelineProcess(
                tmp_path,
                [*words, "--trigger", "0.1", "--remote", server, "--bootstrap-servers", servers],
            )
            published = publish_until(process, dice.choice((0, 1, 2)), servers, topic, published)
            time.sleep(dice.uniform(0, 3))  # the point of the kill
            process.kill()
            print(f"kill {number + 1} after {process.batches} batches")
    finally:
        if process is not None:
            process.kill()
    pipelines.run(*words, "--once")
    rows_found = assert_table_holds_the_topic(pipelines, topic, key)
    print(f"{CLIENT_KILLS} kills, {published} records, {rows_found} rows")


def publish_until(process: PipelineProcess, batches: int, servers: str, topic: str, published: int) -> int:
    """Publish records until a process has reported so many batches: a server goes on with those that exist, and a
    new client would have none. Returns the number of records in the topic.
    """
    end = time.monotonic() + scaled(COMMAND_S)
    while process.batches < batches:
        assert process.process.poll() is None, process.printed
        assert time.monotonic() < end, process.printed
        publish_round(servers, topic, published, ROUND)
        published += ROUND
        time.sleep(PAUSE_S)
    return published


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
@pytest.mark.parametrize("key", ["", "id"], ids=["append", "upsert"])
def test_server_of_spark_connect_is_killed_and_the_same_command_goes_on(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path, key: str
) -> None:
    """The client of a killed server ends with one line."""
    servers, dice, port = broker_process.bootstrap_servers, random.Random(chosen_seed()), free_port()
    pipelines = Pipelines(tmp_path, broker_process, ["--remote", f"sc://127.0.0.1:{port}"])
    topic = create(servers, topic_name("in"), 2)
    words = [*table_words(pipelines, topic, key), "--trigger", "0.1"]
    clients: list[PipelineProcess] = []
    published = 0
    try:
        for number in range(CLIENT_KILLS):
            (place := tmp_path / f"server-{number}").mkdir()
            with connect_server(place, port) as server:
                if clients:  # its server is back, and does not know its session
                    assert clients[-1].wait(scaled(COMMAND_S)) == 1, clients[-1].printed
                    assert "Traceback" not in clients[-1].printed
                    assert clients[-1].printed.splitlines()[-1].startswith("mansio: ")
                remote = ["--remote", f"sc://127.0.0.1:{port}", "--bootstrap-servers", servers]
                clients.append(PipelineProcess(tmp_path, [*words, *remote]))
                published = publish_until(clients[-1], dice.choice((1, 2, 3)), servers, topic, published)
                time.sleep(dice.uniform(0, 2))  # the point of the kill
                everyone = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
                only_java = dice.random() < 0.5
                killed = [one for one in everyone if not only_java or one.name() == "java"]
                for one in killed:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(killed, scaled(COMMAND_S))  # the next server needs its port
                print(f"kill {number + 1} after {clients[-1].batches} batches")
        (place := tmp_path / "server").mkdir()
        with connect_server(place, port):
            pipelines.run(*words, "--once")
    finally:
        for client in clients:
            client.kill()
    rows_found = assert_table_holds_the_topic(pipelines, topic, key)
    print(f"{CLIENT_KILLS} kills, {published} records, {rows_found} rows")


def test_backfill_of_archive_and_log_has_each_record_once_however_often_it_runs(
    pipelines: Pipelines, topic_name: Callable[[str], str]
) -> None:
    servers, lake = pipelines.broker.bootstrap_servers, pipelines.place / "lake"
    topic = create(servers, topic_name("in"), 2, retention_ms="-1")
    (pipelines.place / "even.py").write_text(EVEN)
    publish_numbers(servers, topic, 0, 60)
    pipelines.run("archive", topic, "--warehouse", str(lake), "--once")
    assert_archived(pipelines.broker, lake, topic)
    with mansio.blocking.connect(servers) as client:
        client.admin.delete_records([mansio.TopicPartition(topic, 0)], before=25)
    publish_numbers(servers, topic, 60, 100)
    words = ["backfill", "even.py", "--topic", topic, "--to-table", "even", "--warehouse", str(lake)]
    words += ["--from-time", str(at(10)), "--to-time", str(at(90))]
    first, second = pipelines.run(*words), pipelines.run(*words)
    assert first["topics"] == {topic: "archive and log"}
    assert first["rows"] == second["rows"] == 40
    assert second["replaced_files"] == first["files"]
    assert numbers(lake) == list(range(10, 90, 2))


def test_dead_letters_are_counted_by_cause_and_redriven_once(
    pipelines: Pipelines, topic_name: Callable[[str], str]
) -> None:
    servers = pipelines.broker.bootstrap_servers
    topic, group = create(servers, topic_name("in"), 3), topic_name("group")
    counts = {cause: count for cause, (_, count) in PLANTED.items()}
    plant(servers, topic, group, counts)
    found = pipelines.run("dlq", topic, "--samples", "2")
    by_reason = {one["reason"]: one for one in found["causes"]}
    assert {reason: one["dead_letters"] for reason, one in by_reason.items()} == {
        TEMPLATES[cause]: count for cause, count in counts.items()
    }
    assert all(len(one["samples"]) == 2 for one in found["causes"])
    words = ["dlq", topic, "--cause", by_reason[TEMPLATES["date"]]["cause"], "--redrive", "--id", "dates"]
    for redriven, repeated in ((counts["date"], 0), (0, counts["date"])):
        rows = pipelines.run(*words)["redrive"]["rows"]
        assert sum(row["redriven"] for row in rows) == redriven
        assert sum(row["repeated"] for row in rows) == repeated
    values = asyncio.run(receive_again(servers, topic, group, counts["date"]))
    assert Counter(value.split()[0] for value in values) == {b"date": counts["date"]}
    assert len(set(values)) == counts["date"]
