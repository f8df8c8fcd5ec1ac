"""The container image with Spark reads and writes topics of a broker on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from support.container_image import HAS_TOOLS, build_image, output_of
from support.process import served

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
from mansio.spark import session

servers = sys.argv[1]
spark = session()
topic = spark.read.format("mansio").option("kafka.bootstrap.servers", servers).option("subscribe", "orders")
rows = topic.load().selectExpr("CAST(value AS STRING) AS value").collect()
copy = spark.createDataFrame([(row.value.encode(),) for row in rows], "value BINARY")
target = copy.write.format("mansio").option("kafka.bootstrap.servers", servers).option("topic", "copies")
target.mode("append").save()
"""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not HAS_TOOLS, reason="the tools come from Debian")
def test_spark_in_the_image_reads_a_topic_and_writes_another_one(tmp_path: Path) -> None:
    image = build_image("spark", tmp_path / "image")
    data = tmp_path / "data"
    data.mkdir()
    (data / "orders_job.py").write_text(SCRIPT, encoding="utf-8")
    with served(tmp_path / "broker") as broker, mansio.blocking.connect(broker.bootstrap_servers) as client:
        client.admin.create_topic("orders", partitions=2)
        client.admin.create_topic("copies")
        for number in range(10):
            client.publish("orders", b"order %d" % number)
        command = image.command(data, image.environment)
        entrypoint = image.config["config"]["Entrypoint"]
        arguments = ("python3", "/data/orders_job.py", broker.bootstrap_servers)
        output_of(*command, *entrypoint, *arguments, seconds=300)
        copies = sorted(message.value or b"" for message in client.consume("copies", to_end=True))
    assert copies == [b"order %d" % number for number in range(10)]
