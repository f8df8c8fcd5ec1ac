"""Topics as tables of Spark SQL: in a session, in a view and in `spark-sql`, with typed columns, as of each query."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

import mansio
from mansio.client.types import OutgoingRecord
from mansio.errors import ConfigError
from mansio.pipelines.archive import ArchiveJob, archive
from mansio.spark.topic_views import register_topics
from support.machine import scaled
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

SCHEMA = json.dumps({"type": "object", "properties": {"delay": {"type": "integer"}}})


def publish(broker: ServedBroker, topic: str, first: int, count: int) -> None:
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.publish_many(topic, [json.dumps({"delay": n}).encode() for n in range(first, first + count)])


def create_topic(broker: ServedBroker, topic: str) -> str:
    with mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=1)
    publish(broker, topic, 0, 10)
    return topic


@pytest.mark.full
def test_table_has_archive_and_log_as_of_each_query(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic, servers = create_topic(broker_process, topic_name("in")), broker_process.bootstrap_servers
    decode = {"valueFormat": "json", "valueSchema": SCHEMA}
    job = ArchiveJob(topic, str(tmp_path), servers, topic, stops_when_caught_up=True, decode=decode)
    archive(spark, job)
    publish(broker_process, topic, 10, 5)
    names = register_topics(spark, [topic], servers, warehouse=str(tmp_path), options=decode)
    name = names[topic]
    assert name == topic.replace("-", "_")
    query = f"select count(*) n, sum(decoded_value.delay) total, max(offset) last, count(distinct topic) t from {name}"
    assert tuple(present(spark.sql(query).first())) == (15, 105, 14, 1)
    spark.sql(f"create or replace temporary view late as select * from {name} where decoded_value.delay > 12")
    assert spark.table("late").count() == 2
    publish(broker_process, topic, 15, 1)
    archive(spark, job)
    publish(broker_process, topic, 16, 1)
    assert tuple(present(spark.sql(query).first())) == (17, 136, 16, 1)
    assert spark.table("late").count() == 4
    with mansio.blocking.connect(servers) as client:
        client.admin.create_partitions(topic, 3)
        client.publish_many(topic, [OutgoingRecord(b"{}", partition=one) for one in (1, 2)])
    assert tuple(
        present(spark.sql(f"select count(*) n, count(distinct partition) p from {name}").first())
    ) == (19, 3)
    register_topics(spark, [topic], servers)  # replaced: the log alone, without decoded columns
    columns = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert spark.table(name).columns == columns
    assert spark.table(name).count() == 19
    spark.catalog.dropTempView(name)


def test_topics_with_the_same_view_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two of the topics would have the name a_b"):
        register_topics(None, ["a-b", "a.b"], "127.0.0.1:1")  # type: ignore[arg-type]


CONNECT_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from mansio.spark import register_topics
from mansio.spark.functions import from_json_schema

topic, servers, schema = sys.argv[1:]
spark = SparkSession.builder.remote("local[1]").getOrCreate()
options = {"valueFormat": "json", "valueSchema": schema}
name = register_topics(spark, [topic], servers, options=options)[topic]
total = spark.sql(f"select sum(decoded_value.delay) from {name}").collect()[0][0]
delay = from_json_schema("value", schema).alias("v")
largest = spark.table(name).select(delay).selectExpr("max(v.delay)").collect()[0][0]
print(type(spark).__module__, total, largest)
spark.stop()
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_topics_are_views_over_spark_connect(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create_topic(broker_process, topic_name("connect"))
    done = subprocess.run(
        [sys.executable, "-c", CONNECT_PROGRAM, topic, broker_process.bootstrap_servers, SCHEMA],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        timeout=scaled(120),
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["pyspark.sql.connect.session 45 9"], done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_table_of_a_topic_in_spark_sql(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create_topic(broker_process, topic_name("sql"))
    options = {
        "kafka.bootstrap.servers": broker_process.bootstrap_servers,
        "subscribe": topic,
        "asTable": "true",
        "valueFormat": "json",
        "valueSchema": SCHEMA,
    }
    script = tmp_path / "query.sql"
    texts = ", ".join(f"`{name}` '{value}'" for name, value in options.items())
    script.write_text(
        f"CREATE TEMPORARY VIEW flights USING mansio OPTIONS ({texts});\n"
        "select concat('total ', sum(decoded_value.delay)) from flights;\n"
    )
    command = Path(pyspark.__file__).parent / "bin" / "spark-sql"
    done = subprocess.run(
        [command, "--master", "local[1]", "--conf", f"spark.sql.warehouse.dir={tmp_path}", "-f", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        timeout=scaled(120),
        check=False,
    )
    assert "total 45" in done.stdout.splitlines(), done.stderr[-3000:]
