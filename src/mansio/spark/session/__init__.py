"""Spark session configured for Mansio, on one machine or on a cluster.

Owns the choice of settings. Some are required by source, sink and jobs wherever Spark runs (UTC, Arrow batch size,
RocksDB state store). The others reduce Spark's resources and output on the user's machine; they are omitted if `master`
names a cluster.

Invariants:
* A setting given by the caller has precedence.
* pyspark is not imported before a session is created.
* The files of a local session are in one temporary directory, which is removed when the process ends, or by the next
  process if it was killed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError
from mansio.spark.session.java import find_java
from mansio.spark.session.temp_dirs import make_directory, remove_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"

EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings required by source, sink and jobs.

Arrow batches for Python are small, because Spark 4.3 iterates over all rows of a batch again for each row whose list
column is null: with 65,536 rows a batch, a write with null headers takes minutes.
"""

LOCALLY = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-Duser.timezone=UTC -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "4",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "mansio.spark.session.worker_daemon",
    "spark.log.level": "ERROR",
}
"""Settings for a small local Spark: no web UI, loopback address only."""

LOG4J = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
"""


class SparkNotInstalled(MansioError):
    """PySpark is not installed: run `pip install 'mansio[spark]'`."""


def session(master: str | None = None, name: str = "mansio", **settings: str) -> SparkSession:
    """The Spark session of this process, created if there is none.

    `master`: default `local[*]`, or any that Spark supports (`spark://...`, `k8s://...`, `yarn`). `settings`: Spark's
    own, as in `session(**{"spark.sql.shuffle.partitions": "8"})`. Raises `SparkNotInstalled` and `JavaNotFound`.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkNotInstalled from error
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    if not is_started():
        os.environ["JAVA_HOME"] = find_java().home
    builder = SparkSession.Builder()
    for key, value in {**chosen_settings(master, name), **settings}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def chosen_settings(master: str | None, name: str) -> dict[str, str]:
    """The settings of a session. A local one also gets its directory and environment variables."""
    chosen = {"spark.master": master or LOCAL, "spark.app.name": name, **EVERYWHERE}
    if not chosen["spark.master"].startswith("local"):
        return chosen
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    return {**chosen, **LOCALLY, **_local_files()}


def is_started() -> bool:
    """Whether this process already runs a JVM for Spark."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _local_files() -> dict[str, str]:
    """Settings that put all files of a local session in one directory, which is removed at the end of the process."""
    directory = make_directory("mansio-spark-")
    atexit.register(_clean_up, directory)
    use_linked_home(directory)
    log4j = os.path.join(directory, "log4j2.properties")
    with open(log4j, "w", encoding="utf-8") as file:
        file.write(LOG4J)
    return {
        "spark.local.dir": directory,
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        "spark.driver.extraJavaOptions": (
            f"{LOCALLY['spark.driver.extraJavaOptions']} -Dlog4j2.configurationFile={log4j}"
        ),
    }


def _clean_up(directory: str) -> None:
    """Stop the JVM first, which writes to the directory. It may have ended already: service managers end all processes
    at once.
    """
    if "pyspark.sql" in sys.modules:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's own, and it has no types
        from pyspark.sql import SparkSession

        with suppress(Py4JError, OSError):
            running = SparkSession.getActiveSession()
            if running is not None:
                running.stop()
    remove_directory(directory)


# -- SPARK_HOME without pyspark.zip --------


SPARK_HOME_VARIABLE: Final = "SPARK_HOME"
PYSPARK_PYTHON_VARIABLE: Final = "PYSPARK_PYTHON"
EXCLUDED_ENTRY: Final = "python"
LINKED_HOME_NAME: Final = "mansio-spark-home"


def use_linked_home(directory: str) -> None:
    """Set SPARK_HOME to a directory of links in `directory`, and PYSPARK_PYTHON to this Python.

    Spark puts `SPARK_HOME/python/lib/pyspark.zip` first on the path of its Python workers. The zip holds sources only,
    so each worker compiles what it imports, which takes more than a second; the installed package is the same and takes
    a third of that. SPARK_HOME therefore gets links to all entries of the installation but `python`. Applies only to
    PySpark installed by pip and to workers of the same Python; a SPARK_HOME or PYSPARK_PYTHON of the user is not
    changed.
    """
    python = os.environ.setdefault(PYSPARK_PYTHON_VARIABLE, sys.executable)
    installed = _installed()
    if (
        python == sys.executable
        and installed is not None
        and _is_set_by_mansio(os.environ.get(SPARK_HOME_VARIABLE))
    ):
        os.environ[SPARK_HOME_VARIABLE] = create_linked_home(installed, directory)


def create_linked_home(installed: str, directory: str) -> str:
    """A new directory in `directory` with links to all entries of Spark but `python`; returns its path."""
    home = os.path.join(directory, LINKED_HOME_NAME)
    os.mkdir(home)
    for name in os.listdir(installed):
        if name != EXCLUDED_ENTRY:
            os.symlink(os.path.join(installed, name), os.path.join(home, name))
    return home


def _is_set_by_mansio(home: str | None) -> bool:
    """Whether SPARK_HOME is unset or was set by a session, perhaps of the parent process."""
    return home is None or os.path.basename(home) == LINKED_HOME_NAME


def _installed() -> str | None:
    """PySpark's directory, if it contains Spark."""
    package = importlib.util.find_spec("pyspark")
    for directory_with_jars in (package.submodule_search_locations or ()) if package else ():
        if os.path.isdir(os.path.join(directory_with_jars, "jars")) and os.path.isdir(
            os.path.join(directory_with_jars, "bin")
        ):
            return directory_with_jars
    return None
