"""Spark's own Kafka connector with a Mansio broker: batch and stream, reading and writing.

Its jars come from Maven. What it asks of the broker is compared with what was recorded;
`tests/system/spark/test_kafka_connector_replay.py` sends that again wherever there is no Maven.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from mansio.spark.session.java import find_java
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.headers import read_request_header
from support.machine import scaled
from support.paths import ROOT, free_port
from support.process import served
from support.raw_peer import RawPeer
from support.recording_proxy import recording
from support.web_ui import needs_java_and_maven, read_golden, write_golden
from system.interop.clients import QUIET
from system.spark.test_kafka_connector_replay import GOLDEN, PARTITIONS, ROWS

if TYPE_CHECKING:
    from support.recording_proxy import Recorded

JARS = ROOT / ".tools" / "spark-kafka"
PREFIX = "connector-"
FETCH_DEADLINE_S = 300
RUN_DEADLINE_S = 280


def as_recorded(requests: list[Recorded]) -> list[Recorded]:
    """One request of each API, version and length: what differs beyond that are offsets and times. Of what an
    idempotent producer sent, the first batches only, because a broker takes them in no other order."""
    kept = {(one.api_key, one.version, len(one.frame)): one for one in reversed(requests) if is_first(one)}
    return [one for one in requests if kept.get((one.api_key, one.version, len(one.frame))) is one]


def is_first(one: Recorded) -> bool:
    """Whether a request holds no batch that has to follow another."""
    if one.api_key != ApiKey.PRODUCE:
        return True
    frame = memoryview(one.frame)[4:]
    topics = produce.decode_request(one.version, frame, read_request_header(frame).body_position).topics
    batches = [records for _, _, partitions in topics for _, records in partitions if records is not None]
    return all(header.base_sequence == 0 for batch in batches for _, header in iterate_batches(batch))


@pytest.mark.timeout(FETCH_DEADLINE_S + RUN_DEADLINE_S + 60)
def test_sparks_own_connector_reads_writes_and_streams(tmp_path: Path) -> None:
    fetch()
    port = free_port()
    arguments = ["--set", f"advertised_listeners=127.0.0.1:{port}"]
    with (
        served(tmp_path / "data", arguments=arguments, http=False) as broker,
        recording(port, broker.kafka_port) as proxy,
        RawPeer(broker.kafka_port) as raw,
    ):
        for topic in ("in", "out"):
            raw.create_topic(PREFIX + topic, PARTITIONS)
        checkpoint = str(tmp_path / "checkpoint")
        found = run_connector("kafka_connector.py", tmp_path, f"127.0.0.1:{port}", PREFIX, checkpoint)
        reported = raw.call(ApiKey.METADATA, 12, {"topics": None}).topics
        topic_ids = {
            str(one.name): bytes(one.topic_id) for one in reported if str(one.name).startswith(PREFIX)
        }
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
    assert found == {
        "numbers": sum(range(ROWS)),
        "by_time": ROWS,
        "ranges": ROWS - 10,
        "copied": ROWS,
        "copied_again": ROWS,
        "written": 2 * ROWS,
        "distinct": ROWS,
    }
    if os.environ.get("MANSIO_TEST_RECORD"):
        write_golden(GOLDEN, topic_ids, as_recorded(proxy.requests))
    asked = {(one.api_key, one.version) for one in proxy.requests}
    recorded = {(one.api_key, one.version) for one in read_golden(GOLDEN)[1]}
    assert asked <= recorded, "record it anew: MANSIO_TEST_RECORD=1"


def fetch() -> None:
    """Fetch the connector's jars, once. Skips the test without Java or Maven."""
    needs_java_and_maven()
    subprocess.run(
        [ROOT / "tools" / "maven_jars.sh", "spark-kafka"], check=True, timeout=scaled(FETCH_DEADLINE_S)
    )


def run_connector(program: str, place: Path, *arguments: str) -> dict[str, Any]:
    """A program of this directory with the connector, to its end; what it saw."""
    environment = {
        **os.environ,
        "JAVA_HOME": find_java().home,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), str(JARS), *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(RUN_DEADLINE_S),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6_000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.row("P4")
@pytest.mark.timeout(FETCH_DEADLINE_S + RUN_DEADLINE_S + 60)
def test_sparks_own_connector_reads_what_is_committed_without_missing_offsets(tmp_path: Path) -> None:
    """Aborted transactions, control records at the ends of the partitions, and one that is open behind all of it."""
    fetch()
    with served(tmp_path / "data", http=False) as broker, RawPeer(broker.kafka_port) as raw:
        raw.create_topic("transactions", PARTITIONS)
        committed: list[Any] = []
        aborted: list[Any] = []
        one = transactional_producer(broker.bootstrap_servers, "one")
        for number in range(24):
            value = f"value {number:02}"
            one.begin_transaction()
            for part in range(1 + number % 3):
                one.produce("transactions", f"{value}.{part}", partition=number // 4 % PARTITIONS)
                (aborted if number % 3 == 1 else committed).append(f"{value}.{part}")
            one.flush(scaled(30))
            (one.abort_transaction if number % 3 == 1 else one.commit_transaction)(scaled(30))
        left_open = transactional_producer(broker.bootstrap_servers, "two")
        left_open.begin_transaction()
        left_open.produce("transactions", "value open", partition=0)
        assert left_open.flush(scaled(30)) == 0
        place = str(tmp_path / "streams")
        found = run_connector(
            "kafka_connector_committed.py", tmp_path, broker.bootstrap_servers, "transactions", place
        )
        left_open.abort_transaction(scaled(30))
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0
    assert found == {
        "batch": committed,
        "split": committed,
        "count": len(committed),
        "uncommitted": sorted([*committed, *aborted, "value open"]),
        "stream": committed,
    }


def transactional_producer(bootstrap_servers: str, transactional_id: str) -> Producer:
    one = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": transactional_id, **QUIET})
    one.init_transactions(scaled(30))
    return one
