"""Spark's Python daemon for local sessions, which imports the workers' modules before the first fork.

Spark starts a daemon for each kind of worker. The daemon forks the workers, which run tasks and the steps of planning.
With Spark's own daemon (`pyspark.daemon`) every worker imports pyarrow, numpy and the data source, and its garbage
collector traverses these modules after each task. Workers forked from this daemon share the imported, frozen modules.

`pyspark.daemon` imports nothing before the fork, because a library may start threads, and a fork does not copy threads.
This daemon configures the libraries to start no threads, and counts its threads after the imports: if there are
several, it restarts without the imports. It opens no event loop, connection or file.

Invariants:
* A process that forks after the imports has one thread. A daemon without the imports behaves as `pyspark.daemon`.
* numpy and pyarrow compute with one thread in each worker, because there is a worker for each processor.
* Only local sessions use this daemon: on a cluster this module may be missing.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from typing import Final

from pyspark import daemon

SINGLE_THREAD_VARIABLES: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "mimalloc",
}
"""Environment variables with which numpy and pyarrow start no threads when they are imported."""
WITHOUT_IMPORTS_VARIABLE: Final = "PYSPARK_DAEMON_WITHOUT_MANSIO"
"""Environment variable of a daemon that restarts without the imports."""
TASK_MODULES: Final = (
    "pyarrow.compute",
    "mansio.spark.source.task_reader",
    "mansio.spark.sink.writers",
    "mansio.spark.sink.iceberg_sink",
)
"""Modules that tasks import in addition to PySpark's. Planning imports them too, to pickle readers and writers."""


def import_worker_modules(worker: str) -> None:
    """Import PySpark's module `worker` and `TASK_MODULES`, then freeze all objects (`gc.freeze`). A missing module is
    skipped: the task that needs it reports the error.
    """
    added = {name: value for name, value in SINGLE_THREAD_VARIABLES.items() if name not in os.environ}
    os.environ.update(added)
    for name in (worker, *TASK_MODULES):
        with suppress(ImportError):
            importlib.import_module(name)
    for name in added:
        del os.environ[name]
    gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Return the number of threads of this process, including those of libraries; 1 if it is unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def main() -> None:
    """Import the workers' modules, then run Spark's daemon."""
    worker = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("pyspark") else "pyspark.worker"
    if WITHOUT_IMPORTS_VARIABLE not in os.environ:
        import_worker_modules(worker)
        if thread_count() > 1:
            os.environ[WITHOUT_IMPORTS_VARIABLE] = "1"
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])  # noqa: S606 - our own program
    daemon.manager()


if __name__ == "__main__":
    main()
