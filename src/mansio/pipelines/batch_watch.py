"""Notice that a batch of a query takes long: without it a command prints nothing for minutes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from mansio.spark.session.addresses import is_connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

INTERVAL_S: Final = 30.0
"""Time after which a running batch is reported, and between two reports."""


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """A batch that is not complete: its number, how long it runs, and how many of the tasks of its stages that run now
    are done; None where Spark does not tell it."""

    batch: int
    seconds: float
    tasks_done: int | None = None
    tasks: int | None = None


class BatchWatch:
    """Reports a batch that runs for long, every `INTERVAL_S`."""

    def __init__(
        self,
        spark: SparkSession,
        report: Callable[[RunningBatch], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spark = spark
        self._report = report
        self._clock = clock
        self._began_s = clock()
        self._reported_s = self._began_s
        self._batch = -1

    def look(self, last_batch: int, *, is_active: bool) -> None:
        """Report the batch after `last_batch` if it is time. `is_active`: Spark plans or runs a batch now."""
        now_s = self._clock()
        if last_batch != self._batch or not is_active:
            self._batch, self._began_s, self._reported_s = last_batch, now_s, now_s
        if now_s - self._reported_s < INTERVAL_S:
            return
        self._reported_s = now_s
        done, tasks = self._tasks()
        self._report(RunningBatch(last_batch + 1, now_s - self._began_s, done, tasks))

    def _tasks(self) -> tuple[int | None, int | None]:
        """Return how many tasks of the running stages are done, and how many there are."""
        if is_connect(self._spark):
            return None, None
        done = tasks = 0
        with suppress(Py4JError, PySparkException):
            tracker = self._spark.sparkContext.statusTracker()
            for stage_id in tracker.getActiveStageIds():
                stage = tracker.getStageInfo(stage_id)
                if stage is not None:
                    done += stage.numCompletedTasks
                    tasks += stage.numTasks
        return (done, tasks) if tasks else (None, None)
