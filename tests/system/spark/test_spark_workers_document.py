"""The example of docs/how-to/spark-workers.md, as a user types it into a shell: only the ports are others; and on a
standalone cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mansio
from support.documents import examples
from support.machine import scaled
from support.paths import ROOT, free_port
from system.spark.topics import contents, create

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.process import ServedBroker
    from support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.row("S13"), pytest.mark.timeout(1_800)]

TIMEOUT_S = 240.0


def environment(kafka: str) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MANSIO_BOOTSTRAP_SERVERS": kafka,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def test_example_of_spark_workers_makes_thumbnails_and_dead_letters(tmp_path: Path) -> None:
    found = examples("docs/how-to/spark-workers.md")
    assert list(found) == ["start", "run", "look", "stop"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kafka, http = free_port(), free_port()
    script = "\n".join(one.code for one in found.values())
    script = re.sub(r"(mansio serve)", rf"\1 --kafka 127.0.0.1:{kafka} --http 127.0.0.1:{http}", script)
    done = subprocess.run(
        ["bash", "-euc", f"trap 'kill $(jobs -p) 2>/dev/null' EXIT\n{script}"],
        cwd=tmp_path,
        env=environment(f"127.0.0.1:{kafka}"),
        capture_output=True,
        text=True,
        timeout=scaled(TIMEOUT_S),
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "published 48 images" in done.stdout
    assert "\n46\n" in done.stdout, output
    assert "not a grayscale image" in done.stdout, output
    assert "ValueError: " in done.stdout, output


def test_workers_on_a_standalone_cluster_make_thumbnails(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    source, target = create(broker_process.bootstrap_servers, topic_name("in")), topic_name("out")
    with mansio.blocking.connect(broker_process.bootstrap_servers) as client:
        client.admin.alter_group_config(
            source, {"share.auto.offset.reset": "earliest", "share.delivery.count.limit": "1"}
        )
        for number in range(24):
            value = b"P5 2 2 255\n" + bytes([number] * 4)
            client.publish(source, b"no image" if number == 7 else value, key=f"{number}")
    shutil.copy(ROOT / "examples" / "workers" / "thumbnails.py", tmp_path)
    words = ["-m", "mansio", "pipeline", "run", "thumbnails.py", "--topic", source, "--share-group", source]
    words += ["--to", target, "--once", "--option", "recordsPerTask=3", "--master", spark_cluster.master]
    words += [*spark_cluster.settings(2), "--bootstrap-servers", broker_process.bootstrap_servers]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(broker_process.bootstrap_servers),
        capture_output=True,
        text=True,
        timeout=scaled(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = contents(broker_process.bootstrap_servers, target)
    assert sorted(int(one.key or b"") for one in found) == [number for number in range(24) if number != 7]
    assert {(one.value or b"")[:11] for one in found} == {b"P5 1 1 255\n"}
