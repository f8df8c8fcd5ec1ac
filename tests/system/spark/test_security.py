"""Spark's jobs over TLS and SASL, with the options of Spark's Kafka source: they work, and show no password."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

import mansio.blocking
from mansio import OutgoingRecord
from mansio.spark.sync_client import close_sync_clients
from support.certificates import Authority
from support.machine import scaled
from support.paths import mansio_command
from support.secure_front import SecureFront, server_context

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

USER, PASSWORD = "alice", "correct horse"
ROWS = 200

pytestmark = pytest.mark.full


def plans(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().toString())


def test_a_topic_is_written_and_read_and_no_plan_shows_the_password(
    spark: SparkSession, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as front:
        topic = topic_name("orders")
        jaas = "org.apache.kafka.common.security.scram.ScramLoginModule required"
        kafka_options = {
            "kafka.bootstrap.servers": front.address,
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": f'{jaas} username="{USER}" password="{PASSWORD}";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": str(authority.certificate),
        }
        own_options = {
            "kafka.bootstrap.servers": front.address,
            "tls": str(authority.certificate),
            "user": USER,
            "password": PASSWORD,
        }
        with mansio.blocking.connect(
            front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
        ) as client:
            client.admin.create_topic(topic, partitions=3)
            client.admin.create_topic(f"{topic}-copy", partitions=1)
        written = spark.range(ROWS).selectExpr("cast(id as string) as key", "cast(id as string) as value")
        writer = written.write.format("mansio").options(**kafka_options).option("topic", topic)
        writer.mode("append").save()
        for options in (kafka_options, own_options):
            read = spark.read.format("mansio").options(**options).option("subscribe", topic).load()
            assert read.count() == ROWS
            shown = plans(read) + read._jdf.toString()
            assert PASSWORD not in shown

        query = (
            spark.readStream.format("mansio")
            .options(**own_options)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
            .selectExpr("key", "value")
            .writeStream.format("mansio")
            .options(**own_options)
            .option("topic", f"{topic}-copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None
        progress = " ".join(one.json for one in query.recentProgress)
        assert PASSWORD not in progress + str(query.lastProgress)
        stored = b"".join(
            path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()
        )
        assert PASSWORD.encode() not in stored
        assert (
            spark.read.format("mansio").options(**own_options, subscribe=f"{topic}-copy").load().count()
            == ROWS
        )
        assert set(front.authentications) == {USER}
    close_sync_clients()


def test_a_wrong_password_fails_a_read_with_the_reason(
    spark: SparkSession, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as front:
        options = {"kafka.bootstrap.servers": front.address, "tls": str(authority.certificate), "user": USER}
        frame = (
            spark.read.format("mansio")
            .options(**options, password="wrong secret", subscribe=topic_name("any"))
            .load()
        )
        with pytest.raises(Exception, match=f"refused user '{USER}'") as caught:
            frame.count()
        assert "wrong secret" not in str(caught.value)


def test_a_command_starts_spark_with_the_context_of_the_user(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    with SecureFront(server_context(authority.issue()), {USER: PASSWORD}) as front:
        with mansio.blocking.connect(
            front.address, tls=str(authority.certificate), user=USER, password=PASSWORD
        ) as client:
            client.admin.create_topic("orders", partitions=2)
            client.publish_many("orders", [OutgoingRecord(b"value", key=b"key")] * ROWS)
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("MANSIO_BOOTSTRAP")},
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        }
        add = (
            "context",
            "add",
            "here",
            "-b",
            front.address,
            "--ca",
            str(authority.certificate),
            "--user",
            USER,
        )
        commands = (
            (*add, "--password-file", str(password)),
            ("pipeline", "hot-keys", "orders", "--output", "json"),
        )
        for words in commands:
            done = subprocess.run(
                [*mansio_command(), *words],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=scaled(200.0),
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert PASSWORD not in done.stderr + done.stdout
        assert json.loads(done.stdout)["records"] == ROWS
        assert set(front.authentications) == {USER}
