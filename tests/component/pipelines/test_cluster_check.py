"""The check of a cluster without Spark: the probe as workers run it, and addresses of masters, over real sockets."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import ConfigError
from mansio.pipelines import cluster_check as check
from mansio.spark import session
from mansio.spark.cluster import probe
from mansio.spark.cluster.problems import MODULES, Expectation, PythonReport
from mansio.spark.session.addresses import MasterUnreachable, require_reachable
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 60.0


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_probe(python: str, request: dict[str, Any], place: Path, **environment: str) -> list[PythonReport]:
    """What one task of a worker finds: the same shell program, with an environment that has no package of Mansio."""
    done = subprocess.run(
        ["bash", "-c", check._shell_program(python, request)],
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOSTNAME": "w1", **environment},
        input="0\n",
        capture_output=True,
        text=True,
        timeout=scaled(TIMEOUT_S),
        check=True,
    )
    return [report for line in done.stdout.splitlines() for report in check._parse_line(line)]


def request(**more: Any) -> dict[str, Any]:
    return {"modules": list(MODULES), "brokers": [], "directories": [], **more}


def test_worker_reports_versions_brokers_and_directories(
    tmp_path: Path, listening: int, closed_port: int
) -> None:
    marker = "mark"
    (tmp_path / marker).write_text(marker)
    locations = [str(tmp_path), str(tmp_path / "missing"), "mock://bucket/lake", "nothing://lake"]
    (report,) = run_probe(
        sys.executable,
        request(
            brokers=[["127.0.0.1", str(listening)], ["127.0.0.1", str(closed_port)]],
            directories=[{"location": one, "marker": marker, "token": marker} for one in locations],
        ),
        tmp_path,
    )
    assert report.failures == {}
    assert report.python_minor == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert set(report.versions) == set(MODULES)
    assert report.unreachable == {f"127.0.0.1:{closed_port}": "Connection refused"}
    seen, missing, remote, unknown = (report.directories[one] for one in locations)
    assert (tmp_path / seen.written).read_text() == marker
    assert not missing.sees_marker
    assert remote.sees_marker
    assert "nothing" in unknown.error


def test_worker_without_python_or_with_a_broken_one_reports_that(tmp_path: Path) -> None:
    assert run_probe("./environment/bin/python", request(), tmp_path) == [
        PythonReport("w1", process_directory=str(tmp_path))
    ]
    broken = tmp_path / "broken python"
    broken.write_text("#!/bin/sh\necho 'cannot load libpython'\nexit 1\n")
    broken.chmod(0o755)
    (report,) = run_probe(str(broken), request(), tmp_path)
    assert report.failure == "cannot load libpython"


def test_worker_without_packages_reports_them_as_missing(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -I "$@"\n')
    bare.chmod(0o755)
    (report,) = run_probe(str(bare), request(), tmp_path)
    assert {name: report.failures[name] for name in ("pyarrow", "mansio")} == {
        name: f"No module named '{name}'" for name in ("pyarrow", "mansio")
    }


def test_probe_can_be_compiled_by_an_old_python() -> None:
    source = check._probe_source()
    compile(source, "probe", "exec", dont_inherit=True)
    assert "from __future__" not in source, "Python 3.6 knows no annotations from there"
    assert json.loads(json.dumps(probe.report(request(modules=[]))))["versions"] == {}


def test_master_or_server_that_does_not_answer_is_named_at_once(listening: int, closed_port: int) -> None:
    require_reachable(f"spark://127.0.0.1:{closed_port},127.0.0.1:{listening}")
    require_reachable(f"sc://127.0.0.1:{listening}/;user_id=a")
    for other in ("yarn", "local[2]", "k8s://https://example.invalid:443"):
        require_reachable(other)
    for url, name in (
        (f"spark://127.0.0.1:{closed_port}", "master"),
        (f"sc://127.0.0.1:{closed_port}", "Connect"),
    ):
        with pytest.raises(
            MasterUnreachable, match=rf"{name}.*127.0.0.1:{closed_port} \(Connection refused\)"
        ):
            require_reachable(url)


def test_session_takes_a_master_or_a_server(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setenv("SPARK_REMOTE", f"sc://127.0.0.1:{closed_port}")
    with pytest.raises(ConfigError, match="give one of them"):
        session("spark://127.0.0.1:7077")
    with pytest.raises(MasterUnreachable, match="Spark Connect server"):
        session()


def test_driver_python_that_differs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark starts it for a source in Python on the workers too, where it may not exist."""
    driver = PythonReport("driver", sys.executable, "3.11.2")
    examined = check._Check(SimpleNamespace(), None, ())  # type: ignore[arg-type]  # no session is needed
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "environment/bin/python")
    (problem,) = examined._driver_problems(Expectation(driver, "./env/bin/python"))
    assert "PYSPARK_DRIVER_PYTHON is environment/bin/python" in problem.line
    assert "Unset PYSPARK_DRIVER_PYTHON" in problem.line
