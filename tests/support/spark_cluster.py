"""Standalone Spark cluster of one master and two workers on loopback, started from PySpark's own files.

Owns: the processes of master and workers, and the executors that the workers start. All are stopped by their ids.
Workers have a bare environment, as on other machines: nothing of the driver's virtual environment is on their PATH.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark

from mansio.spark import find_java
from support.machine import scaled
from support.paths import free_port
from support.spark_classes import jvm_options
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 30.0
WORKERS = 2
WORKER_CORES = 2
WORKER_MEMORY = "3g"
"""What a worker offers to executors, which use a fraction of it."""
DAEMON_ENVIRONMENT = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_MEMORY": "96m",
}
DAEMON_JVM_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dspark.worker.ui.retainedExecutors=5"
EXECUTOR_JVM_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss512k"
REGISTERED = "Successfully registered with master"


class SparkCluster:
    """A running cluster; `master` is its address."""

    def __init__(self, place: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: added to that of the workers."""
        self.place = place
        self._port = free_port()
        self._environment = dict(environment or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def settings(self, cores: int = WORKERS * WORKER_CORES) -> list[str]:
        """Arguments of a command with which a job leaves the cluster to others as well."""
        values = {
            "spark.cores.max": str(cores),
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.driver.memory": "700m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.extraJavaOptions": f"{EXECUTOR_JVM_OPTIONS} {jvm_options()}".strip(),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
        }
        return [word for name, value in values.items() for word in ("--conf", f"{name}={value}")]

    def start(self) -> SparkCluster:
        """Start all processes; return when the workers are registered."""
        self._launch("master", "org.apache.spark.deploy.master.Master", "--port", str(self._port))
        for number in range(WORKERS):
            self.start_worker(number)
        for number in range(WORKERS):
            self.wait_for_worker(number)
        return self

    def start_worker(self, number: int) -> None:
        """Start a worker for the first time, or again after `kill_worker`."""
        work = self.place / f"work-{number}"
        options = ["--cores", str(WORKER_CORES), "--memory", WORKER_MEMORY, "--work-dir", str(work)]
        self._launch(_worker(number), "org.apache.spark.deploy.worker.Worker", *options, self.master)

    def wait_for_worker(self, number: int) -> None:
        """Return when a started worker is registered."""

        def is_registered() -> bool:
            process = self._processes[_worker(number)]
            assert process.poll() is None, self.log(_worker(number))
            return REGISTERED in self.log(_worker(number))

        wait_until(is_registered, START_DEADLINE_S, f"worker {number} is registered")

    def kill_worker(self, number: int) -> None:
        """SIGKILL to a worker. Its executors end by themselves, as when the connection to it is lost."""
        process = self._processes.pop(_worker(number))
        process.kill()
        process.wait(scaled(STOP_DEADLINE_S))

    def executors(self, number: int | None = None) -> list[psutil.Process]:
        """The executors of a worker, or of all."""
        found = []
        for name, process in self._processes.items():
            if name != "master" and number in (None, int(name.rpartition("-")[2])):
                found += _executors_below(process.pid)
        return found

    def log(self, name: str) -> str:
        """What `master` or `worker-0` has written since its last start."""
        return (self.place / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        """End all processes; kill what does not end in time."""
        everyone = [one for process in self._processes.values() for one in _tree(process.pid)]
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(everyone, scaled(STOP_DEADLINE_S))
        for one in alive:
            one.kill()
        for process in self._processes.values():
            process.wait(scaled(STOP_DEADLINE_S))
        self._processes.clear()

    def _launch(self, name: str, java_class: str, *arguments: str) -> None:
        home = spark_home()
        words: Sequence[str] = [str(home / "bin" / "spark-class"), java_class, "--host", "127.0.0.1"]
        with (self.place / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*words, "--webui-port", "0", *arguments],
                cwd=self.place,
                env={
                    "HOME": str(self.place),
                    "PATH": os.defpath,
                    "TMPDIR": str(self.place),
                    "JAVA_HOME": find_java().home,
                    "SPARK_HOME": str(home),
                    **DAEMON_ENVIRONMENT,
                    "SPARK_DAEMON_JAVA_OPTS": f"{DAEMON_JVM_OPTIONS} {jvm_options()}".strip(),
                    **self._environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def spark_home() -> Path:
    """The directory of the installed PySpark with Spark's scripts and jars."""
    return Path(pyspark.__file__).parent


def _worker(number: int) -> str:
    return f"worker-{number}"


def _tree(pid: int) -> Iterator[psutil.Process]:
    try:
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def _executors_below(pid: int) -> list[psutil.Process]:
    found = []
    for one in _tree(pid):
        try:
            if any("CoarseGrainedExecutorBackend" in word for word in one.cmdline()) and one.name() == "java":
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found
