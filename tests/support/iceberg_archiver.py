"""An archive without Spark, to be killed at a step: `python -m support.iceberg_archiver WAREHOUSE OFFSETS`.

For every number on standard input it starts a process that archives a log of two partitions, each with so many
offsets, from the table's offsets on, as `mansio pipeline archive` does: plan, write files, commit. At the step of that
number the process kills itself with SIGKILL (0: never). A step is each sync of a file or a directory, and each answer
of the catalog: between two of them nothing reaches the disk in an order that matters. How it ended is printed.
What it needs is imported before, so a start is quick.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import uuid

from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import BatchPlan
from support.iceberg import write_parts

TOPIC = "t"
PARTITIONS = 2
BATCH_OFFSETS = 10

IMPORTED_AT_FIRST_USE = (
    "mansio.iceberg.fsync_io",
    "pyiceberg.catalog.sql",
    "pyiceberg.expressions.parser",
    "pyiceberg.table.locations",
    "requests.exceptions",
    "sqlalchemy.dialects.sqlite",
)
"""Otherwise by every process anew."""

sync = os.fsync


class Steps:
    """Counts them, and dies at one."""

    def __init__(self, last: int) -> None:
        self._left = last

    def take(self) -> None:
        """One more."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def sync(self, descriptor: int) -> None:
        """In place of `os.fsync`."""
        self.take()
        sync(descriptor)


def archive(warehouse: str, count: int, steps: Steps) -> None:
    """To the end of the log."""
    table = open_table(None, warehouse, TOPIC, create=True)
    commit_table = table.iceberg.catalog.commit_table

    def commit(*given: object) -> object:
        answer = commit_table(*given)  # type: ignore[arg-type]
        steps.take()
        return answer

    table.iceberg.catalog.commit_table = commit  # type: ignore[assignment]
    query, batch = uuid.uuid4().hex, 0
    while True:
        committed = table.last_commit()
        start = dict.fromkeys(range(PARTITIONS), 0) if committed is None else committed.offsets
        end = {partition: min(count, offset + BATCH_OFFSETS) for partition, offset in start.items()}
        if start == end:
            return
        plan = BatchPlan(query, batch, start, end)
        table.commit(plan, write_parts(table, plan))
        batch += 1


def main() -> None:
    """Serve standard input."""
    for name in IMPORTED_AT_FIRST_USE:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            steps = Steps(int(line))
            vars(os)["fsync"] = steps.sync
            archive(sys.argv[1], int(sys.argv[2]), steps)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(
            "killed" if os.WIFSIGNALED(status) else f"ended {os.waitstatus_to_exitcode(status)}", flush=True
        )


if __name__ == "__main__":
    main()
