"""Configuration of Spark sessions, local and on a cluster, and the errors where PySpark is missing. Without a JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark

from mansio.spark.session import (
    CLUSTER_SETTINGS,
    COMMON_SETTINGS,
    session_settings,
    use_symlinked_spark_home,
)
from support.machine import scaled

if TYPE_CHECKING:
    import pytest


def test_cluster_session_is_as_quiet_as_a_local_one_and_keeps_the_users_settings_of_the_jvm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dmine=1")
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    found = session_settings("spark://head:7077", "x")
    expected = {"spark.master": "spark://head:7077", "spark.app.name": "x", **COMMON_SETTINGS}
    assert found == {**expected, **CLUSTER_SETTINGS}
    assert os.environ["PYSPARK_PYTHON"] == sys.executable, "planning runs it on the driver"
    mine, logging = os.environ["SPARK_SUBMIT_OPTS"].split()
    assert mine == "-Dmine=1"
    assert "rootLogger.level = error" in Path(logging.partition("=")[2]).read_text()
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dlog4j2.configurationFile=mine")
    session_settings("yarn", "x")
    assert os.environ["SPARK_SUBMIT_OPTS"] == "-Dlog4j2.configurationFile=mine"


def test_local_session_is_quiet_on_loopback_and_its_files_go_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    code = "from mansio.spark.session import session_settings as c; print(c(None, 'x')['spark.local.dir'])"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=scaled(60),
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = session_settings("local[2]", "x")
    assert {
        settings["spark.driver.host"],
        settings["spark.driver.bindAddress"],
        os.environ["SPARK_LOCAL_IP"],
    } == {"127.0.0.1"}
    assert settings["spark.ui.enabled"] == "false"


def test_workers_import_the_installed_pyspark_and_a_home_of_the_users_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would put a zip of sources before it, which every worker compiles again."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    use_symlinked_spark_home(str(tmp_path))
    home = os.environ["SPARK_HOME"]
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert os.path.samefile(
        f"{home}/bin/spark-submit", f"{os.path.dirname(pyspark.__file__)}/bin/spark-submit"
    )
    assert not os.path.exists(f"{home}/python")
    for name, value in (("SPARK_HOME", "/opt/spark"), ("PYSPARK_PYTHON", "/usr/bin/python9")):
        monkeypatch.setenv(name, value)
        use_symlinked_spark_home(str(tmp_path / "unused"))
        assert os.environ[name] == value
    assert not (tmp_path / "unused").exists()
