"""Spark's Python daemon for local sessions, with the workers' imports done before the first fork.

Spark starts a daemon for each kind of worker, and the daemon forks the workers: for tasks, and for each step of
planning. With Spark's own daemon every worker imports pyarrow, numpy and the source, and the garbage collector
traverses them after each task. Workers forked from this daemon share the imported, frozen modules.

Spark imports nothing before the fork because a library may start threads, and threads are not forked. Here the
libraries are configured to start none, and this is verified: a daemon with a second thread restarts without the
imports. No event loop, connection or file is opened.

Invariants:
* A process that forks has one thread; otherwise this is `pyspark.daemon`.
* Numerical libraries compute with one thread in each worker, as there is a worker for each processor.
* Only local sessions use it: on a cluster this module may be missing.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress
from typing import Final

from pyspark import daemon

WITHOUT_THREADS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "mimalloc",
}
"""Variables that keep numpy and pyarrow single-threaded during import."""
BARE: Final = "PYSPARK_DAEMON_WITHOUT_MANSIO"
"""Set in the environment of a daemon that restarts without the imports."""
TASK_MODULES: Final = (
    "pyarrow.compute",
    "mansio.spark.source.task_reader",
    "mansio.spark.sink.writers",
    "mansio.spark.sink.iceberg_sink",
)
"""Modules of reading and writing tasks, in addition to the worker's own. Planning needs them too, for pickling."""


def preload(worker: str) -> None:
    """Import the modules of this kind of worker. A missing module is not needed, or is reported where it is used."""
    added = {name: value for name, value in WITHOUT_THREADS.items() if name not in os.environ}
    os.environ.update(added)
    for name in (worker, *TASK_MODULES):
        with suppress(ImportError):
            importlib.import_module(name)
    for name in added:
        del os.environ[name]
    gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Number of threads of this process, libraries included; 1 if it is unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def main() -> None:
    """Import, then run as Spark's daemon."""
    worker = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("pyspark") else "pyspark.worker"
    if BARE not in os.environ:
        preload(worker)
        if thread_count() > 1:
            os.environ[BARE] = "1"
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])  # noqa: S606 - our own program
    daemon.manager()


if __name__ == "__main__":
    main()
