"""Spark's Python daemon for local sessions, with what its workers need imported before the first one is forked.

Spark starts a daemon for each kind of worker, and the daemon forks the workers: for the tasks of a query, and for each
step of planning one. With Spark's own daemon every worker imports pyarrow, numpy and the source for itself, and looks
through all of that again for garbage after each task. Workers that are forked from this one have it already, and leave
it alone.

Spark imports nothing before it forks because a library may start threads on the way, and a thread is not forked. So
the libraries are told to start none, and it is checked: a daemon that has a second thread after all starts over
without the imports. No event loop is made here, no connection, and no file is opened.

Always true: a process that forks has one thread; in all else this is `pyspark.daemon`. Numerical libraries compute with
one thread in each worker, as there is a worker for each processor. Only local sessions use it (`session`): on a cluster
this module need not be there.
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
"""What keeps numpy and pyarrow to one thread while they are imported."""
BARE: Final = "PYSPARK_DAEMON_WITHOUT_MANSIO"
"""Set in the environment of a daemon that starts over."""
TASK_MODULES: Final = (
    "pyarrow.compute",
    "mansio.spark.source.task_reader",
    "mansio.spark.sink.writers",
    "mansio.spark.sink.iceberg_sink",
)
"""Beside the worker's own module: what reads and writes in a task. Planning needs the same, to pickle it."""


def preload(worker: str) -> None:
    """Import what a worker of this kind imports. What is not there is not needed, or is missed where it is."""
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
    """How many threads this process has, those of libraries included; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def main() -> None:
    """Import, then be Spark's daemon until Spark ends it."""
    worker = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("pyspark") else "pyspark.worker"
    if BARE not in os.environ:
        preload(worker)
        if thread_count() > 1:
            os.environ[BARE] = "1"
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])  # noqa: S606 - our own program
    daemon.manager()


if __name__ == "__main__":
    main()
