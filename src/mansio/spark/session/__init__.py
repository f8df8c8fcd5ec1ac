"""Spark session configured for Mansio, local or on a cluster.

Owns the choice of settings. Some are what the source, the sink and the jobs rely on, wherever Spark runs (UTC, the
size of Arrow batches, state in RocksDB). The others make Spark modest and quiet on the user's own machine; they are
left out when `master` names a cluster, because there they are the cluster's business.

Always true: a setting that the caller gives wins; pyspark is not imported before a session is wanted; the files of a
local session lie in one temporary directory that is removed when the process ends, or by the next one where it was
killed.
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
"""What source, sink and jobs rely on.

The batches that Spark gathers for Python are small, because Spark 4.3 walks over all rows of a batch again for each row
whose list column is null: with 65,536 rows a batch, a write with null headers takes minutes.
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
"""What makes Spark small and quiet in one process: without a page on a port, on the loopback address only."""

LOG4J = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
"""


class SparkNotInstalled(MansioError):
    """PySpark is not installed: `pip install 'mansio[spark]'` brings it."""


def session(master: str | None = None, name: str = "mansio", **settings: str) -> SparkSession:
    """The Spark session of this process, made if there is none yet.

    `master`: `local[*]` if not given, or any that Spark knows (`spark://...`, `k8s://...`, `yarn`). `settings`: Spark's
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
    """The settings of a session. A local one also gets its directory, and the environment that its processes want."""
    chosen = {"spark.master": master or LOCAL, "spark.app.name": name, **EVERYWHERE}
    if not chosen["spark.master"].startswith("local"):
        return chosen
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    return {**chosen, **LOCALLY, **_local_files()}


def is_started() -> bool:
    """Whether this process has a Java running for Spark already."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _local_files() -> dict[str, str]:
    """Settings that keep all files of a local session in one directory, which goes when the process ends."""
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
    """The JVM writes there until it is stopped. It may be gone already: service managers end all processes at once."""
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
    """Tell Spark, by the environment, which Python its workers run on, and where it lives: in links in `directory`."""
    python = os.environ.setdefault(PYSPARK_PYTHON_VARIABLE, sys.executable)
    installed = _installed()
    if (
        python == sys.executable
        and installed is not None
        and _is_set_by_mansio(os.environ.get(SPARK_HOME_VARIABLE))
    ):
        os.environ[SPARK_HOME_VARIABLE] = create_linked_home(installed, directory)


def create_linked_home(installed: str, directory: str) -> str:
    """Links in a new directory within this one to all of Spark but `python`; where they are."""
    home = os.path.join(directory, LINKED_HOME_NAME)
    os.mkdir(home)
    for name in os.listdir(installed):
        if name != EXCLUDED_ENTRY:
            os.symlink(os.path.join(installed, name), os.path.join(home, name))
    return home


def _is_set_by_mansio(home: str | None) -> bool:
    """Whether nobody else has set it: at most a session did, perhaps of the process that started this one."""
    return home is None or os.path.basename(home) == LINKED_HOME_NAME


def _installed() -> str | None:
    """PySpark's directory, where it brings Spark with it."""
    package = importlib.util.find_spec("pyspark")
    for directory_with_jars in (package.submodule_search_locations or ()) if package else ():
        if os.path.isdir(os.path.join(directory_with_jars, "jars")) and os.path.isdir(
            os.path.join(directory_with_jars, "bin")
        ):
            return directory_with_jars
    return None
