"""Problems of a Spark cluster: each is one line with its remedy, whatever a worker lacks."""

from __future__ import annotations

import importlib
from dataclasses import replace
from unittest.mock import Mock

import pytest

import mansio
from mansio.cli.broker.doctor import check_spark
from mansio.pipelines.cluster_check import ClusterReport
from mansio.spark.cluster.problems import (
    MODULES,
    ClusterNotReady,
    DirectoryReport,
    Expectation,
    PythonReport,
    SharedDirectory,
    describe_hosts,
    find_problems,
)

VERSIONS = {
    "pyspark": "4.3.0",
    "pyarrow": "26.0.1",
    "numpy": "2.4.6",
    "mansio": mansio.__version__,
    MODULES[-1]: "",
}
DRIVER = PythonReport("driver", "/usr/bin/python3", "3.11.2", VERSIONS)
WORKER = PythonReport("w1", "/opt/python", "3.11.9", VERSIONS)
LAKE = SharedDirectory("warehouse", "/lake", "--warehouse")
EXPECTED = Expectation(DRIVER, "/opt/python", {"10.0.0.1:9092": 1}, (LAKE,), frozenset({"mark.1"}))


def lines(*workers: PythonReport) -> list[str]:
    return [problem.line for problem in find_problems(workers, EXPECTED)]


def test_equal_workers_have_no_problem() -> None:
    seen = replace(WORKER, directories={"/lake": DirectoryReport(sees_marker=True, written="mark.1")})
    assert lines(seen, replace(seen, host="w2")) == []


@pytest.mark.parametrize(
    ("worker", "what", "remedy"),
    [
        (PythonReport("w1"), "/opt/python (PYSPARK_PYTHON) cannot be started", "--archives"),
        (replace(WORKER, failure="bad ELF"), "/opt/python failed: bad ELF", "PYSPARK_PYTHON"),
        (replace(WORKER, python="3.9.2"), "is Python 3.9.2, and the driver has 3.11.2", "a Python 3.11"),
        (
            replace(WORKER, versions={}, failures={n: f"No module named '{n}'" for n in MODULES[:-1]}),
            "has no pyspark, pyarrow, numpy, mansio",
            f"pip install 'mansio_mq-{mansio.__version__}-py3-none-any.whl[spark]'",
        ),
        (
            replace(WORKER, failures={MODULES[-1]: "No module named 'crc32c'"}),
            f"cannot import {MODULES[-1]} (No module named 'crc32c')",
            "pip install",
        ),
        (
            replace(WORKER, versions=VERSIONS | {"mansio": "99.0"}),
            f"mansio is 99.0, and the driver has {mansio.__version__}",
            "same version",
        ),
        (
            replace(WORKER, versions=VERSIONS | {"pyspark": "4.1.0"}),
            "pyspark is 4.1.0, and the driver has 4.3.0",
            "pyspark==4.1.0",
        ),
        (replace(WORKER, versions=VERSIONS | {"pyarrow": "9.0.0"}), "pyarrow 9.0.0 is too old", "pyarrow 18"),
        (
            replace(WORKER, unreachable={"10.0.0.1:9092": "Connection refused"}),
            "broker 1 does not answer at its advertised address 10.0.0.1:9092 (Connection refused)",
            "advertised_listeners",
        ),
        (
            replace(WORKER, directories={"/lake": DirectoryReport(sees_marker=False)}),
            "the warehouse /lake is another directory there",
            "--warehouse",
        ),
        (
            replace(WORKER, directories={"/lake": DirectoryReport(True, error="Permission denied")}),
            "the warehouse /lake cannot be used (Permission denied)",
            "--warehouse",
        ),
        (
            replace(WORKER, directories={"/lake": DirectoryReport(True, "mark.2")}),
            "is not visible to the driver",
            "--warehouse",
        ),
    ],
)
def test_problem_is_one_line_with_its_remedy(worker: PythonReport, what: str, remedy: str) -> None:
    (line,) = lines(worker)
    assert line.startswith("worker w1: ")
    assert what in line
    assert remedy in line.partition(what)[2]
    assert "\n" not in line


def test_workers_with_the_same_problem_share_a_line() -> None:
    old = replace(WORKER, python="3.9.2")
    assert lines(*(replace(old, host=f"w{number}") for number in range(5)), WORKER) == [
        "5 workers (w0, w1, w2, ...): /opt/python is Python 3.9.2, and the driver has 3.11.2. Set PYSPARK_PYTHON to a"
        " Python 3.11 with mansio that exists there (docs/how-to/spark-cluster.md)"
    ]
    assert describe_hosts(["a", "a"]) == "2 workers (a)", "two executors of one machine"


def test_error_has_a_line_for_each_problem() -> None:
    found = find_problems([PythonReport("a"), replace(WORKER, python="3.9.2")], EXPECTED)
    assert ClusterNotReady(found).message.count("\n") == 1


def test_doctor_names_workers_on_one_host_apart_and_what_they_have_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = {"/lake": DirectoryReport(sees_marker=True, written="x", error="")}
    workers = [
        PythonReport("w1", "p", "3.11.2", VERSIONS, directories=shared, process_directory="/apps/app-1/0"),
        PythonReport("w1", "p", "3.11.2", VERSIONS, directories=shared, process_directory="/apps/app-1/1"),
        PythonReport(
            "w2", "p", "3.11.2", VERSIONS, unreachable={"b:1": "refused"}, process_directory="/apps/app-1/2"
        ),
    ]
    # `mansio.spark.session` is the function of that name.
    monkeypatch.setattr(importlib.import_module("mansio.spark.session"), "session", Mock())
    found = ClusterReport(tuple(workers), ())
    monkeypatch.setattr("mansio.pipelines.cluster_check.check_cluster", Mock(return_value=found))
    checks = check_spark("spark://m:7077", None, "b:1", ("/lake",))
    assert [one.name for one in checks] == ["worker w1 (executor 0)", "worker w1 (executor 1)", "worker w2"]
    assert checks[0].detail.endswith("; reaches the brokers, shares /lake")
    assert "reaches" not in checks[2].detail
