"""Spark part of the pipeline demo: archive a topic, query archive and log, replay a deleted day.

Everything runs in one thread beside the loop: a session belongs to the thread that created it. The standard error of
Java and of Spark's workers goes to a file, which is printed after a failure.

Invariants:
* A session that existed before the demo is not changed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from mansio.errors import MansioError
from mansio_demo.delay_chart import CARRIER, DELAY, MONTH, Mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from mansio.pipelines.pipeline_progress import BatchProgress

TRIGGER_S = 1.0
LOG_LINES_SHOWN = 15

T = TypeVar("T")


class _Archived(Exception):
    """All records to be archived are in the table."""


class SparkThread:
    """A Spark session in a thread of its own."""

    def __init__(self, bootstrap_servers: str, topic: str, warehouse: str, pipeline: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._warehouse = warehouse
        self._pipeline = pipeline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mansio-demo-spark")
        self._session: SparkSession | None = None
        self._is_ours = False

    async def do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def start(self) -> str:
        """Start the session; returns its description."""
        from mansio.host.extras import require_extra
        from mansio.spark.session import is_jvm_running, session
        from mansio.spark.session.java import find_java

        require_extra("spark")
        java = find_java()
        self._is_ours = not is_jvm_running()
        self._session = session(name="mansio-demo")
        if not self._is_ours:
            # Any DataFrame makes it the active session of this thread.
            self._session.createDataFrame([], "nothing int")
        return f"Spark {self._session.version} on Java {java.version} from {java.source}"

    async def stop(self) -> None:
        """Stop the session, unless it existed before, and the thread."""
        running, self._session = self._session, None
        if running is not None and self._is_ours:
            await asyncio.to_thread(running.stop)
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def spark(self) -> SparkSession:
        if self._session is None:
            raise MansioError("the demo has no Spark session")
        return self._session

    def archive(self, archived: Callable[[int], bool]) -> int:
        """Archive until `archived`, called with the number of records of each batch, returns true. Returns the number
        of batches.
        """
        from mansio.pipelines.archive import ArchiveJob, archive

        batches = 0

        def report(progress: BatchProgress) -> None:
            nonlocal batches
            batches += 1
            if archived(progress.records):
                raise _Archived

        job = ArchiveJob(
            self._topic, self._warehouse, self._bootstrap_servers, self._pipeline, trigger_s=TRIGGER_S
        )
        with suppress(_Archived):
            archive(self.spark, job, report)
        return batches

    def means(self) -> dict[tuple[str, int], Mean]:
        """Return the query over archive and log as one table."""
        from pyspark.sql import functions

        from mansio.iceberg.archive.table import open_table
        from mansio.spark.topic_table import read_topic_as_table

        table = open_table(None, self._warehouse, self._topic)
        rows = read_topic_as_table(
            self.spark,
            self._topic,
            table,
            {"kafka.bootstrap.servers": self._bootstrap_servers, "columns": "value"},
        )
        cells = functions.split(functions.col("value").cast("string"), ",")
        flights = rows.select(
            cells[CARRIER].alias("carrier"),
            cells[MONTH].cast("int").alias("month"),
            functions.expr(f"try_cast(split(cast(value as string), ',')[{DELAY}] as double)").alias("delay"),
        )
        found = flights.groupBy("carrier", "month").agg(
            functions.count("*").alias("flights"), functions.avg("delay").alias("mean")
        )
        return {(row["carrier"], row["month"]): Mean(row["flights"], row["mean"]) for row in found.collect()}

    def replay(self, target: str, from_ms: int, to_ms: int) -> int:
        """Replay archived records of that time to `target`; returns the number of records written."""
        from mansio.iceberg.archive.table import open_table
        from mansio.iceberg.archive.table_scan import Selection
        from mansio.pipelines.replay import replay

        table = open_table(None, self._warehouse, self._topic)
        selection = Selection(from_us=from_ms * 1000, to_us=to_ms * 1000)
        return replay(table, self._bootstrap_servers, target, selection).written


@contextmanager
def quiet(path: str) -> Iterator[None]:
    """Redirect standard error, including that of Java and Spark's workers, to a file; its end is printed after a
    failure.
    """
    sys.stderr.flush()
    own = os.dup(2)
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)
        if failed:
            with open(path, encoding="utf-8", errors="replace") as file:
                sys.stderr.writelines(deque(file, LOG_LINES_SHOWN))
