"""Commands of docs/how-to/spark-cluster.md for YARN and Kubernetes, parsed by Spark; the entry point of the image."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from mansio.spark import find_java
from support.machine import scaled
from support.paths import ROOT
from system.spark.test_pipelines_document import examples

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60.0
DOCUMENT = "docs/how-to/spark-cluster.md"
ENTRY_POINT = ROOT / "deploy" / "container" / "spark_entrypoint.sh"


def parsed(command: str, place: Path) -> str:
    """What `spark-submit --verbose` prints up to the class that it would start; then it is ended."""
    words = shlex.split(command.replace("\\\n", " ").replace("spark-submit", "spark-submit --verbose", 1))
    (place / "job.py").touch()
    (place / "pipeline-env.tar.gz").touch()
    output = place / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [os.path.join(os.path.dirname(sys.executable), words[0]), *words[1:]],
            cwd=place,
            env={
                **os.environ,
                "JAVA_HOME": find_java().home,
                "HADOOP_CONF_DIR": str(place),
                "PYSPARK_DRIVER_PYTHON": sys.executable,
            },
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    end = time.monotonic() + scaled(DEADLINE_S)
    try:
        while "Classpath elements:" not in output.read_text(errors="replace"):
            assert process.poll() is None, output.read_text(errors="replace")
            assert time.monotonic() < end, output.read_text(errors="replace")
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(scaled(DEADLINE_S))
    return output.read_text(errors="replace")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "yarn",
            [
                "org.apache.spark.deploy.yarn.YarnClusterApplication",
                "(spark.executor.memory,2g)",
                "(spark.executor.cores,2)",
                "(spark.executor.instances,4)",
                "(spark.executorEnv.PYSPARK_PYTHON,./environment/bin/python)",
                "pipeline-env.tar.gz#environment",
            ],
        ),
        (
            "kubernetes",
            [
                "org.apache.spark.deploy.k8s.submit.KubernetesClientApplication",
                "(spark.kubernetes.container.image,registry.example/mansio-spark:1)",
                "(spark.kubernetes.executor.volumes.persistentVolumeClaim.lake.mount.path,/lake)",
                "local:///opt/jobs/job.py",
            ],
        ),
    ],
)
def test_command_of_the_document_is_what_spark_understands(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    _, command = examples(DOCUMENT)[name]
    found = parsed(command, tmp_path)
    for one in expected:
        assert one in found, found


@pytest.mark.full
def test_image_starts_executor_driver_and_other_programs(tmp_path: Path) -> None:
    tini = tmp_path / "tini"
    tini.write_text('#!/bin/sh\nshift 2\nprintf "%s\\n" "$@"\n')
    tini.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SPARK_HOME": "/opt/spark",
        "SPARK_JAVA_OPT_0": "-Dname=a value",
        "SPARK_JAVA_OPT_1": "-Xss1m",
        "SPARK_EXECUTOR_MEMORY": "2g",
        "SPARK_EXECUTOR_ID": "7",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
        "SPARK_EXECUTOR_POD_NAME": "pod-7",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_DRIVER_URL": "spark://driver",
        "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1",
    }

    def started(*words: str) -> list[str]:
        command = ["sh", str(ENTRY_POINT), *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    executor = started("executor")
    assert executor[:5] == ["java", "-Dname=a value", "-Xss1m", "-Xms2g", "-Xmx2g"]
    assert executor[executor.index("--executor-id") + 1] == "7"
    assert executor[executor.index("--podName") + 1] == "pod-7"
    driver = started("driver", "--class", "x", "job.py")
    assert driver[0] == "/opt/spark/bin/spark-submit"
    assert driver[-5:] == ["--deploy-mode", "client", "--class", "x", "job.py"]
    assert started("spark-class", "a b") == ["spark-class", "a b"]
