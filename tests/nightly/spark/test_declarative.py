"""Example of a Spark Declarative Pipeline with Mansio's source and sink, run by Spark's own command.

A run takes two JVMs and half a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mansio.spark.session.java import find_java
from support.paths import ROOT
from system.spark.flights import flights, records
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker

EXAMPLE = ROOT / "examples" / "pipelines" / "declarative"
DEADLINE_S = 400


@pytest.mark.spark
@pytest.mark.timeout(DEADLINE_S + 60)
def test_declared_pipeline_reads_and_writes_topics_and_goes_on_where_it_ended(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    bootstrap_servers, source, target = broker_process.bootstrap_servers, topic_name("in"), topic_name("out")
    for topic in (source, target):
        create(bootstrap_servers, topic, 2)
    place = tmp_path / "declared"
    shutil.copytree(EXAMPLE, place)
    spec = (place / "spark-pipeline.yml").read_text()
    for name, value in {
        "storage": f"file://{tmp_path}/storage",
        "spark.mansio.bootstrap.servers": bootstrap_servers,
        "spark.mansio.from": source,
        "spark.mansio.to": target,
    }.items():
        spec, found = re.subn(rf"^(\s*{name}: ).*$", rf"\g<1>{value}", spec, flags=re.MULTILINE)
        assert found == 1
    (place / "spark-pipeline.yml").write_text(spec)
    half = len(flights()) // 2
    for part in (flights()[:half], flights()[half:]):
        publish(bootstrap_servers, source, records(part))
        run(place)
    late = [
        row["text"].encode()
        for row in flights()
        if row["dep_delay"] != "NA" and float(row["dep_delay"]) >= 15
    ]
    assert sorted(message.value or b"" for message in contents(bootstrap_servers, target)) == sorted(late)


def run(place: Path) -> None:
    """`spark-pipelines run` in that directory, to its end."""
    scripts = os.path.dirname(sys.executable)
    environment = {
        **os.environ,
        "JAVA_HOME": find_java().home,
        "PYSPARK_PYTHON": sys.executable,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    settings = ["spark.ui.enabled=false", "spark.driver.memory=1g", "spark.sql.shuffle.partitions=2"]
    arguments = [word for setting in settings for word in ("--conf", setting)]
    done = subprocess.run(
        [os.path.join(scripts, "spark-pipelines"), *arguments, "run"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S / 2,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-5_000:]
