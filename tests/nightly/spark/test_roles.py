"""Roles of the page about security through Spark: a reader reads, a writer writes, in batches and streams, and what a
role lacks fails the query with an error that names the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.spark.sync_client import close_sync_clients
from system.cluster.role_cluster import OPERATOR, READER, TOPIC, WORKER, WRITER, role_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from system.cluster.role_cluster import RoleCluster

ROWS = 50

pytestmark = pytest.mark.row("A8")


def options(room: RoleCluster, user: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": room.cluster.bootstrap_servers,
        "tls": room.ca,
        "user": user,
        "password": room.password(user),
    }


def count(spark: SparkSession, room: RoleCluster, user: str) -> int:
    return spark.read.format("mansio").options(**options(room, user), subscribe=TOPIC).load().count()


def write(rows: DataFrame, room: RoleCluster, user: str) -> None:
    rows.write.format("mansio").options(**options(room, user), topic=TOPIC).mode("append").save()


def copy_stream(spark: SparkSession, room: RoleCluster, checkpoint: Path) -> None:
    """Read all records as the reader, and write them again as the writer."""
    records = spark.readStream.format("mansio").options(**options(room, READER), subscribe=TOPIC)
    rows = records.option("startingOffsets", "earliest").load().select("key", "value")
    writer = rows.writeStream.format("mansio").options(**options(room, WRITER), topic=TOPIC)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None


@pytest.mark.timeout(600)
def test_a_reader_reads_a_writer_writes_and_a_refusal_names_the_right(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(ROWS).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    with role_cluster(tmp_path) as room:
        room.run_example("roles")
        with pytest.raises(Exception, match="DESCRIBE the transactional id mansio-spark:"):
            write(rows, room, WRITER)
        room.run_example("protocol-rights")
        write(rows, room, WRITER)
        assert count(spark, room, READER) == ROWS
        assert count(spark, room, WORKER) == ROWS, "it has READ, too"
        copy_stream(spark, room, tmp_path / "checkpoint")
        assert count(spark, room, READER) == 2 * ROWS
        for user in (WRITER, OPERATOR):
            with pytest.raises(Exception, match=f"not allowed to READ the topic {TOPIC}"):
                count(spark, room, user)
        with pytest.raises(Exception, match="DESCRIBE the transactional id mansio-spark:"):
            write(rows, room, READER)
        close_sync_clients()
