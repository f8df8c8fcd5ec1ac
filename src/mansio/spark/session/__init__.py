"""Spark session configured for Mansio: on one machine, on a cluster, or of a Spark Connect server.

`COMMON_SETTINGS` are required by source, sink and jobs wherever Spark runs. `LOCAL_SETTINGS` reduce Spark's resources
and output on the user's machine; a session on a cluster does not get them. A program that `spark-submit` has started
gets its master and settings from there.

Invariants:
* A setting given by the caller has precedence over the settings of this module.
* pyspark is not imported before a session is created.
* The files of a session are in one temporary directory, which is removed when the process ends, or by the next process
  if it was killed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError, MansioError
from mansio.host.extras import require_extra
from mansio.spark.session.addresses import is_local_master, require_reachable
from mansio.spark.session.java import find_java
from mansio.spark.session.temp_dirs import make_directory, remove_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[*]"
LOCAL_MASTER_WITH_ATTEMPTS = "local[*,4]"
"""A local master that repeats a failed task, as clusters do: a row that has killed its worker is isolated then."""

COMMON_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
"""Settings required by source, sink and jobs.

`maxRecordsPerBatch` is small because of a cost of Spark 4.3: for each row with a null list it iterates over all rows of
the Arrow batch. With 65,536 rows per batch, writing rows with null headers takes minutes.
"""

LOCAL_SETTINGS = {
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
"""Settings of a local session: little memory, no web UI, loopback address only."""

CLUSTER_SETTINGS = {"spark.ui.showConsoleProgress": "false"}
"""Settings of a session on a cluster: no progress bars between the lines of a command."""

REMOTE_VARIABLE: Final = "SPARK_REMOTE"
"""Environment variable with the address of a Spark Connect server, as in PySpark."""
GATEWAY_VARIABLE: Final = "PYSPARK_GATEWAY_PORT"
"""Environment variable that `spark-submit` sets for the program that it starts."""
SUBMIT_OPTIONS_VARIABLE: Final = "SPARK_SUBMIT_OPTS"
LOG4J_PROPERTY: Final = "log4j2.configurationFile"
REASON_CHARACTERS_MAX: Final = 500

LOG4J_PROPERTIES = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %c{1}: %m%n
appender.stderr.layout.alwaysWriteExceptions = false
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Configuration of log4j. Without a level of its own for Spark's gateway, Spark sets that of all loggers to WARN, and
prints lines about it."""


class ConnectFailed(MansioError):
    """A Spark Connect server refused the session."""


def session(
    master: str | None = None, name: str = "mansio", *, remote: str | None = None, **settings: str
) -> SparkSession:
    """Return the Spark session of this process. If none is active, a session is created with these arguments.

    `master`: any master that Spark supports (`spark://...`, `k8s://...`, `yarn`); by default that of `spark-submit`, or
    `local[*]`. `remote`: the address of a Spark Connect server (`sc://...`) instead of a master; by default the
    environment variable SPARK_REMOTE. `settings`: Spark's settings, as in `session(**{"spark.sql.shuffle.partitions":
    "8"})`. Raises `MissingExtra`, `JavaNotFound`, `MasterUnreachable`, and `ConfigError` if there are both a master and
    a server, and for a version of PySpark that is not supported.
    """
    require_extra("spark")
    from pyspark.sql import SparkSession

    from mansio.spark.spark_versions import check_spark_version

    check_spark_version()
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    server = remote or os.environ.get(REMOTE_VARIABLE)
    if server:
        if master is not None:
            raise ConfigError(
                f"there are a master ({master}) and a Spark Connect server ({server}): give one of them, and unset"
                f" {REMOTE_VARIABLE} to use the master"
            )
        return _connect_session(server, settings)
    chosen = {**session_settings(master, name), **settings}
    require_reachable(chosen.get("spark.master", ""))
    if not is_jvm_running():
        os.environ["JAVA_HOME"] = find_java().home
    builder = SparkSession.Builder()
    for key, value in chosen.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def master_with_attempts(master: str | None, remote: str | None) -> str | None:
    """Return the master for a job whose rows may kill a worker: `LOCAL_MASTER_WITH_ATTEMPTS` where `session` would
    choose `local[*]`, otherwise the given one."""
    is_chosen = master is not None or remote is not None
    if is_chosen or GATEWAY_VARIABLE in os.environ or os.environ.get(REMOTE_VARIABLE):
        return master
    return LOCAL_MASTER_WITH_ATTEMPTS


def session_settings(master: str | None, name: str) -> dict[str, str]:
    """Spark's settings for a new session. This also creates the directory of the session, and sets environment
    variables for its JVM.
    """
    if master is None and GATEWAY_VARIABLE in os.environ:
        return _submitted_settings()
    chosen = {"spark.master": master or LOCAL_MASTER, "spark.app.name": name, **COMMON_SETTINGS}
    if is_local_master(chosen["spark.master"]):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        return {**chosen, **LOCAL_SETTINGS, **_local_file_settings()}
    os.environ.setdefault(PYSPARK_PYTHON_VARIABLE, sys.executable)
    _configure_driver_logging()
    return {**chosen, **CLUSTER_SETTINGS}


def _submitted_settings() -> dict[str, str]:
    """Return the settings that `spark-submit`, which has started this program, does not have yet."""
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    submitted = SparkConf()
    return {key: value for key, value in COMMON_SETTINGS.items() if submitted.get(key) is None}


def _connect_session(server: str, settings: Mapping[str, str]) -> SparkSession:
    """Return a session of a Spark Connect server."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    require_reachable(server)
    try:
        running = SparkSession.Builder().remote(server).getOrCreate()
        for key, value in {**COMMON_SETTINGS, **settings}.items():
            if running.conf.isModifiable(key):
                running.conf.set(key, value)
            elif key in settings:
                raise ConfigError(
                    f"{key} cannot be set in a session of a Spark Connect server: set it where the server is started"
                )
    except PySparkException as error:
        reason = " ".join(str(error).split())[:REASON_CHARACTERS_MAX]
        raise ConnectFailed(f"the Spark Connect server {server} refused the session: {reason}") from error
    return running


def is_jvm_running() -> bool:
    """Whether this process already runs a JVM for Spark."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _local_file_settings() -> dict[str, str]:
    """Create the directory of a local session and return the settings that put all its files there. The directory is
    removed when the process ends.
    """
    directory = make_directory("mansio-spark-")
    atexit.register(_stop_spark_and_remove, directory)
    use_symlinked_spark_home(directory)
    log4j = _write_log4j_properties(directory)
    return {
        "spark.local.dir": directory,
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        "spark.driver.extraJavaOptions": (
            f"{LOCAL_SETTINGS['spark.driver.extraJavaOptions']} -Dlog4j2.configurationFile={log4j}"
        ),
    }


def _write_log4j_properties(directory: str) -> str:
    """Write the configuration of Spark's logging to a file in `directory`; returns its path."""
    path = os.path.join(directory, "log4j2.properties")
    with open(path, "w", encoding="utf-8") as file:
        file.write(LOG4J_PROPERTIES)
    return path


def _configure_driver_logging() -> None:
    """Give the driver of a cluster session the logging of a local session, unless the user has configured its logging.

    It is passed in an environment variable, because the setting `spark.driver.extraJavaOptions` would replace the
    user's.
    """
    options = os.environ.get(SUBMIT_OPTIONS_VARIABLE, "")
    if LOG4J_PROPERTY in options or "SPARK_CONF_DIR" in os.environ or is_jvm_running():
        return
    directory = make_directory("mansio-spark-")
    atexit.register(_stop_spark_and_remove, directory)
    log4j = _write_log4j_properties(directory)
    os.environ[SUBMIT_OPTIONS_VARIABLE] = f"{options} -D{LOG4J_PROPERTY}={log4j}".strip()


def _stop_spark_and_remove(directory: str) -> None:
    """Stop the session and remove its directory. The session is stopped first, because its JVM writes to the directory.
    An ended JVM is not an error: service managers send SIGTERM to all processes at once.
    """
    if "pyspark.sql" in sys.modules:
        from py4j.protocol import Py4JError
        from pyspark.sql import SparkSession

        with suppress(Py4JError, OSError):
            running = SparkSession.getActiveSession()
            if running is not None:
                running.stop()
    remove_directory(directory)


# -- SPARK_HOME without pyspark.zip --------


SPARK_HOME_VARIABLE: Final = "SPARK_HOME"
PYSPARK_PYTHON_VARIABLE: Final = "PYSPARK_PYTHON"
EXCLUDED_DIRECTORY: Final = "python"
LINKED_HOME_DIRECTORY: Final = "mansio-spark-home"


def use_symlinked_spark_home(directory: str) -> None:
    """Set SPARK_HOME to a new directory in `directory` with links to Spark's files except `python`.

    Spark puts `SPARK_HOME/python/lib/pyspark.zip` first on the path of its Python workers. The zip holds sources only,
    so each worker compiles what it imports, which takes more than a second. Without the zip a worker imports the
    installed package, which takes a third of that time. Applies only to PySpark installed by pip and to workers of the
    same Python. PYSPARK_PYTHON is set to this Python if it is unset; the user's SPARK_HOME is not changed.
    """
    python = os.environ.setdefault(PYSPARK_PYTHON_VARIABLE, sys.executable)
    installed = _installed_spark_home()
    if (
        python == sys.executable
        and installed is not None
        and _is_unset_or_symlinked(os.environ.get(SPARK_HOME_VARIABLE))
    ):
        os.environ[SPARK_HOME_VARIABLE] = create_symlinked_spark_home(installed, directory)


def create_symlinked_spark_home(installed: str, directory: str) -> str:
    """Create a directory in `directory` with links to all entries of `installed` except `python`; returns its path."""
    home = os.path.join(directory, LINKED_HOME_DIRECTORY)
    os.mkdir(home)
    for name in os.listdir(installed):
        if name != EXCLUDED_DIRECTORY:
            os.symlink(os.path.join(installed, name), os.path.join(home, name))
    return home


def _is_unset_or_symlinked(home: str | None) -> bool:
    """Whether SPARK_HOME is unset, or was set by `use_symlinked_spark_home` in this process or its parent."""
    return home is None or os.path.basename(home) == LINKED_HOME_DIRECTORY


def _installed_spark_home() -> str | None:
    """Return the directory of the installed PySpark package, or None if it does not contain Spark."""
    package = importlib.util.find_spec("pyspark")
    for directory_with_jars in (package.submodule_search_locations or ()) if package else ():
        if os.path.isdir(os.path.join(directory_with_jars, "jars")) and os.path.isdir(
            os.path.join(directory_with_jars, "bin")
        ):
            return directory_with_jars
    return None
