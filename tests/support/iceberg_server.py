"""Iceberg's own REST catalog in a process of its own: its Java classes, from Maven, behind the HTTP server of the JDK.

Owns the process. Always true: it answers when `start` returns, its tables survive it, and it is gone at the end of the
block, at the latest when this process has ended.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from support.machine import scaled
from support.paths import ROOT
from support.process import inherited
from support.web_ui import needs_java_and_maven

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = ROOT / "tests" / "support" / "IcebergRestServer.java"
JARS = ROOT / ".tools" / "spark-iceberg"
FETCH_DEADLINE_S = 300
START_DEADLINE_S = 120


def fetch_jars() -> Path:
    """The directory with Iceberg's runtime. Skips the test without Java or Maven."""
    needs_java_and_maven()
    subprocess.run(
        [ROOT / "tools" / "maven_jars.sh", JARS.name], check=True, timeout=scaled(FETCH_DEADLINE_S)
    )
    return JARS


class IcebergServer:
    """`with IcebergServer(directory) as server:` serves on `server.address`, with the tables in the directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address = ""
        self._directory = directory
        self._log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Self:
        """Start it, on another port than before."""
        if shutil.which("javac") is None:
            pytest.skip("a Java development kit is missing: install openjdk-17-jdk-headless (or newer)")
        package = importlib.util.find_spec("pyspark")
        assert package is not None
        assert package.origin is not None
        jars = f"{fetch_jars()}/*{os.pathsep}{Path(package.origin).parent}/jars/*"  # the latter have Hadoop's classes
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["java", "-cp", jars, PROGRAM, self._directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited(),
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], scaled(START_DEADLINE_S))
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            raise AssertionError(f"the catalog did not start:\n{self._log.read_text()[-4_000:]}")
        self.address = line.decode().strip()
        return self

    def kill(self) -> None:
        """Kill it. Its tables are in the directory."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def settings(self, name: str) -> Mapping[str, str]:
        """Spark's settings of a catalog of this name, for Mansio's jobs."""
        return {
            f"spark.sql.catalog.{name}.type": "rest",
            f"spark.sql.catalog.{name}.uri": self.address,
        }
