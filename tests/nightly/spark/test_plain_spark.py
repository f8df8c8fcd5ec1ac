"""An archive in Spark 4.1 with Iceberg's runtime: without Mansio by the printed command, the catalog and the metadata
file; and in one session with Mansio's source.

The jars come from Maven. There is a runtime for Spark 4.1 only, so `make nightly-spark-versions` runs this with 4.1.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mansio.iceberg.archive.open_elsewhere import SPARK_RUNTIME_PACKAGE, SQLITE_DRIVER_PACKAGE, open_elsewhere
from mansio.spark.session.java import find_java
from support.archive_tables import Archive
from support.machine import scaled
from support.paths import ROOT
from support.web_ui import needs_java_and_maven
from system.spark.topics import create, publish

if TYPE_CHECKING:
    from mansio.iceberg.archive.table import ArchiveTable
    from support.process import ServedBroker

JARS = ROOT / ".tools" / "spark-iceberg"
FETCH_DEADLINE_S = 300
RUN_DEADLINE_S = 280
TOPIC = "late-flights.2013"
"""A name that SQL and identifiers have to quote."""
COUNTS = {0: 30, 1: 12}

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        not version("pyspark").startswith("4.1."), reason="Iceberg's runtime is for Spark 4.1"
    ),
    pytest.mark.timeout(FETCH_DEADLINE_S + RUN_DEADLINE_S + 60),
]


@pytest.fixture
def table(tmp_path: Path) -> ArchiveTable:
    """An archive of two batches."""
    needs_java_and_maven()
    subprocess.run(
        [ROOT / "tools" / "maven_jars.sh", "spark-iceberg"], check=True, timeout=scaled(FETCH_DEADLINE_S)
    )
    archive = Archive(tmp_path / "lake", topic=TOPIC)
    table = archive.open()
    archive.add(table, {0: 20, 1: 12})
    archive.add(table, {0: 10})
    return table


def run(words: list[str], directory: Path) -> str:
    """Run a command of Spark; its standard output."""
    environment = {
        **os.environ,
        "JAVA_HOME": find_java().home,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        words,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(RUN_DEADLINE_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    return done.stdout


def test_archive_is_read_and_joined_by_catalog_and_by_metadata_file(
    table: ArchiveTable, tmp_path: Path
) -> None:
    program = str(Path(__file__).parent / "plain_spark.py")
    words = [
        sys.executable,
        program,
        str(JARS),
        str(tmp_path / "lake"),
        TOPIC,
        table.iceberg.metadata_location,
    ]
    found = json.loads(run(words, tmp_path).splitlines()[-1])
    rows = table.iceberg.scan().to_arrow().sort_by([("__partition", "ascending"), ("__offset", "ascending")])
    assert found == {
        "tables": [TOPIC],
        "rows": [
            [row["__partition"], row["__offset"], None if row["value"] is None else row["value"].decode()]
            for row in rows.to_pylist()
        ],
        "headers": sum(len(row["headers"] or ()) for row in rows.to_pylist()),
        "by_time": 10,
        "joined": {"zero": COUNTS[0], "one": COUNTS[1]},
        "snapshots": 2,
        "by_metadata": sum(COUNTS.values()),
    }


def test_printed_command_works(table: ArchiveTable, tmp_path: Path) -> None:
    """The command as printed, with the same jars from Maven's directory instead of another download."""
    words = shlex.split(open_elsewhere(table.iceberg)[0].removeprefix("Spark 4.1: "))
    place = words.index("--packages")
    assert words[place + 1].split(",") == [SPARK_RUNTIME_PACKAGE, SQLITE_DRIVER_PACKAGE]
    jars = sorted(JARS.glob("*.jar"))
    assert [jar.stem for jar in jars] == [
        "-".join(package.split(":")[1:]) for package in (SPARK_RUNTIME_PACKAGE, SQLITE_DRIVER_PACKAGE)
    ]
    words[place : place + 2] = ["--jars", ",".join(map(str, jars)), "--master", "local[1]"]
    shown = run(words, tmp_path)
    assert len(shown.splitlines()) == 20
    assert "value 0 of" in shown


def test_topic_and_table_are_joined_in_one_session(
    table: ArchiveTable, tmp_path: Path, broker_process: ServedBroker
) -> None:
    servers = broker_process.bootstrap_servers
    create(servers, TOPIC, 2)
    publish(servers, TOPIC, [(b"k", b"%d" % number) for number in range(25)], partition=0)
    program = str(Path(__file__).parent / "topic_and_table.py")
    shown = run([sys.executable, program, str(JARS), str(tmp_path / "lake"), TOPIC, servers], tmp_path)
    assert shown.splitlines()[-1] == "25"
    joined = table.iceberg.catalog.load_table("results.joined").scan().to_arrow()
    assert sorted(joined["offset"].to_pylist()) == list(range(25))
