"""One Spark session and one broker for all tests of this room.

A session takes ten seconds and more to start, so there is one for the whole run: `spark`, with two threads. The broker
runs in a process of its own, because Spark's Python must not delay it; every test takes topics of its own
(`topic_name`). A test that asks for `spark` is marked `spark`, so that it can be run apart from the others.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from support.process import ServedBroker
from support.spark_classes import jvm_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.spark_cluster import SparkCluster
    from system.spark.streams import Streams

JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -Dspark.sql.codegen.wholeStage=false -Dspark.sql.codegen.factoryMode=NO_CODEGEN"
    " -Dspark.sql.adaptive.enabled=false"
)
"""Of all JVMs of these tests, those of commands as well; Spark's scripts find it in the environment. A test is over
before Java's second compiler, the check of Spark's own classes, or code that Spark writes and compiles for each query
have paid for themselves. The rows that come out are the same."""
JVM_TIMEOUT_S = 240
"""For the test that happens to start the session, with a cold disk and other processes beside it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "spark: needs a JVM and PySpark")
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{JVM_OPTIONS} {jvm_options()}".strip())
    if importlib.util.find_spec("pyspark") is not None and version("pyspark").startswith("4.1."):
        # It leaves the sockets of `collect` to the garbage collector; 4.2 closes them.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(JVM_TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one session: `local[2]`, as `mansio.spark.session()` makes it. Missing PySpark fails where `CI` is set."""
    if importlib.util.find_spec("pyspark") is None:
        reason = "pyspark is missing: `make setup` installs it"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    from mansio.spark import session

    running = session("local[2]", "mansio-tests", **{"spark.sql.shuffle.partitions": "2"})
    yield running
    running.stop()
    # The JVM ends with this process. It need not be told, object by object, what Python's collector finds at the end:
    # a run once waited minutes for its answer to that.
    gc.freeze()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """The one standalone cluster of two workers."""
    from support.spark_cluster import SparkCluster

    cluster = SparkCluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """The one broker of this room, in its own process; `.bootstrap_servers` is its address."""
    broker = ServedBroker(tmp_path_factory.mktemp("broker") / "data")
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """`topic_name("in")`: a name for a topic that no other test uses."""
    own = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:40].strip("-")
    mark = uuid.uuid4().hex[:8]
    return lambda role: f"{own}-{mark}-{role}"


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> Iterator[Streams]:
    """Queries with a checkpoint of their own, stopped after the test."""
    from system.spark.streams import Streams

    made = Streams(spark, tmp_path / "checkpoint")
    yield made
    for query in made.running:
        query.stop()
