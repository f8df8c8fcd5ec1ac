"""Check of a Spark cluster before a job starts.

>>> problems = check_cluster(spark, "broker-1:9092").problems

The probe runs on every worker. A classic session starts it as an external command of a query (`TRANSFORM`), which needs
no Python worker, so it also reports a Python that does not exist or lacks every package. A Spark Connect session starts
it in a Python function, because the client does not know which Python the server uses.

Invariants:
* The check reads and writes no topic. It creates small files in the shared directories, and removes them.
* Every wait has a limit.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConnectionLost
from mansio.spark.cluster import probe
from mansio.spark.cluster.problems import (
    DOCUMENT,
    MARKER_PREFIX,
    MODULES,
    ClusterNotReady,
    ClusterProblem,
    Expectation,
    PythonReport,
    SharedDirectory,
    find_problems,
    local_path,
)
from mansio.spark.session.addresses import is_connect, is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

EXECUTORS_TIMEOUT_S: Final = 120.0
"""Maximum wait for the first executor."""
ANSWER_TIMEOUT_S: Final = 180.0
"""Maximum wait for the reports of the workers that have executors."""
ROUNDS_MAX: Final = 3
"""Maximum number of queries: an executor may register, or get no task, while one runs."""
TASKS_MIN: Final = 2
CONNECT_TASKS: Final = 16
"""Number of tasks where the number of executors is unknown."""
BROKER_REMEDY: Final = "Start a broker, or name one (--bootstrap-servers)"
DRIVER_PYTHON_VARIABLE: Final = "PYSPARK_DRIVER_PYTHON"
"""Environment variable with the Python of the driver, which Spark also uses for sources in Python, everywhere."""
POLL_INTERVAL_S: Final = 0.1

_COMMAND = """cat >/dev/null
if ! command -v {python} >/dev/null 2>&1; then echo "missing ${{HOSTNAME:-unknown}} $(pwd)"; exit 0; fi
output=$({python} -c "$(echo {code} | base64 -d)" {request} 2>&1)
found=$(printf '%s\\n' "$output" | grep '^{prefix}')
if [ -n "$found" ]; then echo "$found"; exit 0; fi
echo "failed ${{HOSTNAME:-unknown}} $(pwd) $(printf '%s' "$output" | tail -n 1 | tr '\\t' ' ')"
"""
"""Shell program of one task. It prints one line: the probe's report, `missing HOST DIRECTORY`, or
`failed HOST DIRECTORY ERROR`.
"""
_FUNCTION = """
def run(_number):
    namespace = {"__name__": "mansio_probe"}
    exec(CODE, namespace)
    return namespace["OUTPUT_PREFIX"] + __import__("json").dumps(namespace["report"](REQUEST))
"""
"""Source of the Python function for Spark Connect: pickled by value, because a worker may lack this module."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Result of a check. `workers` is empty for a session on this machine, which needs no check."""

    workers: tuple[PythonReport, ...]
    problems: tuple[ClusterProblem, ...]


def check_cluster(
    spark: SparkSession, bootstrap_servers: str | None = None, directories: Sequence[SharedDirectory] = ()
) -> ClusterReport:
    """Examine driver and workers of a session.

    `bootstrap_servers`: brokers that the workers must reach; `directories`: what driver and workers must share. Raises
    `ConnectionLost` if the driver reaches no broker.
    """
    if not is_remote(spark):
        return ClusterReport((), ())
    return _Check(spark, bootstrap_servers, directories).run()


def require_cluster(
    spark: SparkSession, bootstrap_servers: str | None = None, directories: Sequence[SharedDirectory] = ()
) -> None:
    """Raise `ClusterNotReady` if `check_cluster` finds problems."""
    problems = check_cluster(spark, bootstrap_servers, directories).problems
    if problems:
        raise ClusterNotReady(problems)


class _Check:
    """State of one check."""

    def __init__(
        self, spark: SparkSession, bootstrap_servers: str | None, directories: Sequence[SharedDirectory]
    ) -> None:
        self._spark = spark
        self._bootstrap_servers = bootstrap_servers
        self._directories = tuple(directories)
        self._marker = f"{MARKER_PREFIX}{uuid.uuid4().hex}"

    def run(self) -> ClusterReport:
        unreachable: list[ClusterProblem] = []
        try:
            brokers = self._brokers()
        except ConnectionLost as error:
            brokers = {}
            reason = error.message.partition("; ")[0]
            unreachable.append(ClusterProblem("driver", reason, BROKER_REMEDY))
        request = {
            "modules": list(MODULES),
            "brokers": [address.rpartition(":")[::2] for address in brokers],
            "directories": [
                {"location": local_path(one.location), "marker": self._marker, "token": self._marker}
                for one in self._directories
            ],
        }
        driver = PythonReport.parse(probe.report({**request, "brokers": [], "directories": []}))
        shared = tuple(
            SharedDirectory(one.name, local_path(one.location), one.option) for one in self._directories
        )
        expected = Expectation(driver, self._python(), brokers, shared)
        problems = [*unreachable, *self._create_markers()]
        try:
            problems += self._driver_problems(expected)
            workers, failures = self._ask_workers(request, expected.python)
            expected = Expectation(driver, expected.python, brokers, shared, self._written_files())
        finally:
            self._remove_files()
        return ClusterReport(workers, (*problems, *failures, *find_problems(workers, expected)))

    def _brokers(self) -> dict[str, int]:
        """Id of each broker by its advertised address."""
        if self._bootstrap_servers is None:
            return {}
        from mansio.spark.sync_client import sync_client

        nodes = sync_client(self._bootstrap_servers).cluster.nodes.values()
        return {f"{node.host}:{node.port}": node.node_id for node in nodes}

    def _python(self) -> str:
        """Return the command with which Spark starts Python workers."""
        if is_connect(self._spark):
            return "the server's Python"
        return str(self._spark.sparkContext.pythonExec)

    # -- driver --------

    def _driver_problems(self, expected: Expectation) -> tuple[ClusterProblem, ...]:
        """Problems of the Python with which the driver plans queries: Spark uses PYSPARK_PYTHON there as well."""
        if is_connect(self._spark):
            return self._server_problems()
        from pyspark.find_spark_home import _find_spark_home

        planning = os.environ.get(DRIVER_PYTHON_VARIABLE, expected.python)
        if planning != expected.python:
            return (
                ClusterProblem(
                    "driver",
                    f'{DRIVER_PYTHON_VARIABLE} is {planning}, which Spark starts for format("mansio") on the workers'
                    f" too, and the other tasks use {expected.python}",
                    f"Unset {DRIVER_PYTHON_VARIABLE}, and set PYSPARK_PYTHON only ({DOCUMENT})",
                ),
            )
        request = {"modules": list(MODULES), "brokers": [], "directories": []}
        done = subprocess.run(  # noqa: S603  # the command of PYSPARK_PYTHON
            ["bash", "-c", _shell_program(expected.python, request)],  # noqa: S607  # as Spark starts it
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SPARK_HOME": _find_spark_home()},
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
        found = [report for line in done.stdout.splitlines() for report in _parse_line(line)]
        return find_problems(found, expected, "driver")

    def _server_problems(self) -> tuple[ClusterProblem, ...]:
        """Problems of the Python with which a Spark Connect server plans queries."""
        from pyspark.errors import PySparkException

        try:
            frame = self._spark.read.format("mansio")
            frame.option("kafka.bootstrap.servers", "127.0.0.1:9092").option("subscribe", "any").load().schema  # noqa: B018  # the server looks the format up
        except PySparkException as error:
            remedy = f"Install mansio for the server's Python and start the server with PYSPARK_PYTHON ({DOCUMENT})"
            return (
                ClusterProblem("server", f'format("mansio") cannot be loaded ({_one_line(error)})', remedy),
            )
        return ()

    # -- workers --------

    def _ask_workers(
        self, request: dict[str, Any], python: str
    ) -> tuple[tuple[PythonReport, ...], tuple[ClusterProblem, ...]]:
        """Return the reports of the workers, and the problems of getting them."""
        found: dict[tuple[str, str], PythonReport] = {}
        for _ in range(ROUNDS_MAX):
            tasks = max(TASKS_MIN, self._executor_count(), CONNECT_TASKS if is_connect(self._spark) else 0)
            query = _Query(self._spark, partial(self._run_probe, request, python, tasks))
            try:
                lines = query.result(self._executor_count)
            except _QueryFailed as error:
                return tuple(found.values()), (error.problem,)
            for report in (one for line in lines for one in _parse_line(line)):
                found[report.host, report.process_directory] = report
            if len(found) >= self._executor_count():
                break
        return tuple(found.values()), ()

    def _run_probe(self, request: dict[str, Any], python: str, tasks: int) -> list[str]:
        if is_connect(self._spark):
            return self._run_function(request, tasks)
        program = base64.b64encode(_shell_program(python, request).encode()).decode()
        rows = self._spark.sql(
            f"SELECT TRANSFORM(id) USING 'eval \"$(echo {program} | base64 -d)\"' AS (line STRING)"  # noqa: S608  # base64
            f" FROM range(0, {tasks}, 1, {tasks})"
        )
        return [str(row.line) for row in rows.collect()]

    def _run_function(self, request: dict[str, Any], tasks: int) -> list[str]:
        from pyspark.sql.functions import udf

        namespace: dict[str, Any] = {"__name__": "__main__", "CODE": _probe_source(), "REQUEST": request}
        exec(_FUNCTION, namespace)  # noqa: S102  # the source is above
        function = udf(namespace["run"], "string", useArrow=False)
        frame = self._spark.range(0, tasks, 1, tasks)
        return [str(row.line) for row in frame.select(function(frame.id).alias("line")).collect()]

    def _executor_count(self) -> int:
        """Return the number of registered executors; 0 with Spark Connect, which does not report it."""
        if is_connect(self._spark):
            return 0
        tracker = self._spark.sparkContext._jsc.sc().statusTracker()
        return max(0, len(tracker.getExecutorInfos()) - 1)  # one of them is the driver

    # -- shared directories --------

    def _local_directories(self) -> Iterator[SharedDirectory]:
        return (one for one in self._directories if "://" not in local_path(one.location))

    def _create_markers(self) -> Iterator[ClusterProblem]:
        """Create the marker in each shared directory, and the directory if it is missing."""
        for directory in self._local_directories():
            path = local_path(directory.location)
            try:
                os.makedirs(path, exist_ok=True)
                Path(path, self._marker).write_text(self._marker, encoding="utf-8")
            except OSError as error:
                yield ClusterProblem(
                    "driver",
                    f"the {directory.name} {path} cannot be written ({probe.error_text(error)})",
                    f"Name another one ({directory.option})",
                )

    def _files(self) -> Iterator[Path]:
        for directory in self._local_directories():
            with suppress(OSError):
                yield from Path(local_path(directory.location)).glob(f"{self._marker}*")

    def _written_files(self) -> frozenset[str]:
        return frozenset(path.name for path in self._files())

    def _remove_files(self) -> None:
        for path in self._files():
            with suppress(OSError):
                path.unlink()


class _QueryFailed(Exception):
    """The query of the probe failed; `problem` describes the reason."""

    def __init__(self, problem: ClusterProblem) -> None:
        super().__init__(problem.line)
        self.problem = problem


class _Query:
    """A query in a thread of its own, which can be interrupted."""

    def __init__(self, spark: SparkSession, collect: Callable[[], list[str]]) -> None:
        self._spark = spark
        self._collect = collect
        self._tag = f"mansio-check-{uuid.uuid4().hex}"
        self._lines: list[str] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self._tag, daemon=True)

    def result(self, executor_count: Callable[[], int]) -> list[str]:
        """Return the rows of the query. Raises `_QueryFailed` after an error or a timeout."""
        self._thread.start()
        started = time.monotonic()
        counts = not is_connect(self._spark)
        while self._thread.is_alive():
            self._thread.join(POLL_INTERVAL_S)
            elapsed_s = time.monotonic() - started
            if elapsed_s > EXECUTORS_TIMEOUT_S and counts and executor_count() == 0:
                self._interrupt()
                raise _QueryFailed(self._no_executor_problem())
            if elapsed_s > EXECUTORS_TIMEOUT_S + ANSWER_TIMEOUT_S:
                self._interrupt()
                raise _QueryFailed(
                    ClusterProblem(
                        "cluster",
                        f"the workers have not answered within {elapsed_s:.0f} s",
                        "Look for tasks without free cores, and for errors in the logs of the executors",
                    )
                )
        if self._error is not None:
            raise _QueryFailed(_query_problem(self._error)) from self._error
        return self._lines

    def _run(self) -> None:
        try:
            self._spark.addTag(self._tag)
            self._lines = self._collect()
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            self._error = error

    def _interrupt(self) -> None:
        self._spark.interruptTag(self._tag)

    def _no_executor_problem(self) -> ClusterProblem:
        conf = self._spark.sparkContext.getConf()
        address = f"{conf.get('spark.driver.host')}:{conf.get('spark.driver.port')}"
        cores, memory = (conf.get("spark.executor.cores"), conf.get("spark.executor.memory", "1g"))
        wanted = f"{f'{cores} cores and ' if cores else ''}{memory} of memory"
        return ClusterProblem(
            "cluster",
            f"no executor has started within {EXECUTORS_TIMEOUT_S:.0f} s",
            f"Either no worker has {wanted} free for an executor (the master's web page shows it; `--conf"
            " spark.executor.memory=...`, `--conf spark.cores.max=...`), or the workers cannot connect to this driver"
            f" at {address} (`--conf spark.driver.host=...`)",
        )


def _probe_source() -> str:
    return Path(probe.__file__).read_text(encoding="utf-8")


def _shell_program(python: str, request: dict[str, Any]) -> str:
    return _COMMAND.format(
        python=shlex.quote(python),
        code=base64.b64encode(_probe_source().encode()).decode(),
        request=base64.b64encode(json.dumps(request).encode()).decode(),
        prefix=probe.OUTPUT_PREFIX,
    )


def _parse_line(line: str) -> Iterator[PythonReport]:
    """Yield the report in a line of the probe's output, or none in a line of something else."""
    if line.startswith(probe.OUTPUT_PREFIX):
        yield PythonReport.parse(json.loads(line.removeprefix(probe.OUTPUT_PREFIX)))
        return
    kind, _, rest = line.partition(" ")
    host, _, rest = rest.partition(" ")
    directory, _, output = rest.partition(" ")
    if kind == "missing":
        yield PythonReport(host, process_directory=directory)
    elif kind == "failed":
        yield PythonReport(
            host, "Python", failure=output or "it ended without output", process_directory=directory
        )


def _query_problem(error: BaseException) -> ClusterProblem:
    """Return the problem behind an exception of the query."""
    text = str(error)
    if "PYTHON_VERSION_MISMATCH" in text:
        return ClusterProblem(
            "workers",
            _one_line(error),
            f"Use the same Python for client and server (PYSPARK_PYTHON of the server, {DOCUMENT})",
        )
    return ClusterProblem(
        "cluster",
        f"the query that examines the workers failed ({_one_line(error)})",
        "Look into the logs of the executors",
    )


def _one_line(error: BaseException) -> str:
    from mansio.pipelines.run import failure_reason

    return failure_reason(str(error))
