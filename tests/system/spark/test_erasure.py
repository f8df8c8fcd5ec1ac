"""Erasure of one key as docs/how-to/pipelines.md describes it: from the log, the dead letters, archive and tables.

The bytes of all files of the broker and of the warehouse are searched for the value, which is random, so that it is
found in compressed files too, and the keys of all Parquet files for the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import mansio
from mansio.client.types import OutgoingRecord
from mansio.iceberg.archive.table import open_table
from mansio.pipelines.compact import compact
from mansio.spark.topic_table import read_topic_as_table
from support.machine import scaled
from support.paths import mansio_command
from support.process import ServedBroker
from support.waiting import wait_until
from system.spark.archives import archive_once, archived
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

SECRET_KEY = b"customer-17@example.org"
SECRET = random.Random(17).randbytes(400)
TOPIC, GROUP = "customers", "desk"
CONFIG = {
    "cleanup.policy": "compact",
    "max.compaction.lag.ms": "300",
    "delete.retention.ms": "300",
    "min.cleanable.dirty.ratio": "0.01",
}
DEADLINE_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServedBroker]:
    """A broker that compacts soon."""
    settings = {"MANSIO_LOG_CLEANER_BACKOFF_MS": "50", "MANSIO_LOG_RETENTION_CHECK_INTERVAL_MS": "50"}
    served = ServedBroker(tmp_path / "data", environment=settings)
    try:
        yield served.start()
    finally:
        served.kill()


def command(broker: ServedBroker, *words: str, text: str | None = None) -> Any:
    """Run a command as the document has it; returns its JSON, if it prints some."""
    done = subprocess.run(
        [*mansio_command(), *words],
        input=text,
        env={**os.environ, "MANSIO_BOOTSTRAP_SERVERS": broker.bootstrap_servers},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "json" in words else None


def files_with_secret(*places: Path) -> list[Path]:
    """The files below these directories that contain the value as bytes, or the key as bytes or in a column."""
    found = []
    for path in (path for place in places for path in place.rglob("*")):
        try:
            data = path.read_bytes() if path.is_file() else b""
            is_found = SECRET in data or SECRET_KEY in data
            if not is_found and path.suffix == ".parquet":
                table = pq.read_table(path, partitioning=None)
                is_found = "key" in table.column_names and SECRET_KEY in table["key"].to_pylist()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if is_found:
            found.append(path)
    return found


def publish(broker: ServedBroker, begin: int, end: int) -> None:
    """Three versions of each of some customers, and of the secret one."""
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        for version in range(3):
            records = [OutgoingRecord(b"%d of %d" % (version, n), key=b"c%d" % n) for n in range(begin, end)]
            if begin == 0:
                records.append(OutgoingRecord(b"%d " % version + SECRET, key=SECRET_KEY))
            client.publish_many(TOPIC, records)


async def reject_one(broker: ServedBroker) -> None:
    """Reject one record of the secret customer, and accept all others that are received until then."""
    async with (
        mansio.connect(broker.bootstrap_servers) as client,
        client.receive(TOPIC, group=GROUP) as receiver,
    ):
        async for message in receiver:
            if message.key == SECRET_KEY:
                await message.reject("no address")
                return
            await message.ack()


@pytest.mark.full
def test_no_file_contains_the_records_of_an_erased_key(
    spark: SparkSession, broker: ServedBroker, tmp_path: Path
) -> None:
    warehouse, data = tmp_path / "lake", broker.data
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.admin.create_topic(TOPIC, partitions=2, config=CONFIG)
        client.admin.alter_group_config(GROUP, {"share.auto.offset.reset": "earliest"})
    publish(broker, 0, 30)
    asyncio.run(reject_one(broker))
    wait_until(lambda: len(contents(broker.bootstrap_servers, f"dlq.{TOPIC}")) == 1, DEADLINE_S)
    archive_once(spark, broker, TOPIC, warehouse)
    compact(spark, open_table(None, str(warehouse), TOPIC), f"{TOPIC}-latest")
    places = {
        path.relative_to(data / "topics").parts[0].rpartition(".")[0] for path in files_with_secret(data)
    }
    assert places == {TOPIC, f"dlq.{TOPIC}"}, "the search finds them"
    assert {path.parts[-3] for path in files_with_secret(warehouse)} == {TOPIC, f"{TOPIC}-latest"}

    key = SECRET_KEY.decode()
    command(broker, "produce", TOPIC, "--key-separator", ":", "--null", text=f"{key}:\n")
    archive_once(spark, broker, TOPIC, warehouse)
    compact(spark, open_table(None, str(warehouse), TOPIC), f"{TOPIC}-latest")
    others = [row for row in archived(warehouse, TOPIC).to_pylist() if row["key"] != SECRET_KEY]
    report = command(
        broker, "pipeline", "erase", TOPIC, "--key", key, "--warehouse", str(warehouse),
        "--grace", "0s", "--force", "--output", "json",
    )  # fmt: skip
    assert [one["table"] for one in report["tables"]] == [f"mansio.{TOPIC}", f"mansio.{TOPIC}-latest"]
    assert 2 <= report["tables"][0]["rows"] <= 4, (
        "the versions that were not compacted before, and the tombstone"
    )
    command(broker, "dlq", "purge", TOPIC, "--before", "end")
    assert files_with_secret(warehouse) == []
    wait_until(lambda: not files_with_secret(data), DEADLINE_S, "compaction removes the tombstone too")

    assert archived(warehouse, TOPIC).to_pylist() == others
    kept = {message.key for message in contents(broker.bootstrap_servers, TOPIC)}
    assert kept == {b"c%d" % n for n in range(30)}
    publish(broker, 30, 40)  # the archive goes on, and no record is missing
    archive_once(spark, broker, TOPIC, warehouse)
    table = open_table(None, str(warehouse), TOPIC)
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers}
    united = read_topic_as_table(spark, TOPIC, table, options)
    assert united.select("key").distinct().count() == 40
    assert files_with_secret(warehouse, data) == []
