"""Cost of a commit to the archive table as their number grows: commit 1,000 compared with commit 10.

    python -m bench.spark_lake [--commits 1000]

Each commit adds one small file to a table with a SQLite catalog, as a streaming archive does, with the archive's
settings: manifests merged, old snapshots expired in the same transaction, no maintenance. Printed are medians of twenty
commits around each position, processor and wall time. The largest of twenty is the commit that merges manifests.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

import pyarrow as pa

from mansio.iceberg.archive.parquet_writer import PartitionFileWriter
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import BatchPlan

ROWS = 100
PARTITIONS = 2
MARKS = (10, 20, 50, 100, 200, 400, 600, 800, 1_000)
SPAN = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one commit, in milliseconds."""

    cpu_ms: float
    wall_ms: float


def rows(partition: int, first: int) -> pa.RecordBatch:
    """Records as the source returns them."""
    offsets = range(first, first + ROWS)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k"] * ROWS, pa.binary()),
            "value": pa.array([b"v" * 30] * ROWS, pa.binary()),
            "partition": pa.array([partition] * ROWS, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "timestamp": pa.array(offsets, pa.timestamp("us", tz="UTC")),
        }
    )


def run(commits: int, warehouse: str) -> list[Cost]:
    """The cost of each of `count` commits to a new table."""
    table = open_table(None, warehouse, "bench", create=True)
    ends = dict.fromkeys(range(PARTITIONS), 0)
    costs = []
    for batch in range(commits):
        partition = batch % PARTITIONS
        start = dict(ends)
        writer = PartitionFileWriter(table.data_location, f"bench-{batch}")
        writer.write(rows(partition, ends[partition]))
        parts = writer.close()
        ends[partition] += ROWS
        cpu, wall = time.process_time(), time.perf_counter()
        table.commit(BatchPlan("bench", batch, start, dict(ends)), parts)
        costs.append(Cost(1000 * (time.process_time() - cpu), 1000 * (time.perf_counter() - wall)))
    begin = time.perf_counter()
    files = table.live_files()
    print(f"all {len(files)} live files listed in {1000 * (time.perf_counter() - begin):.0f} ms")
    return costs


def around(costs: list[Cost], number: int) -> list[Cost]:
    """The commits around one, without the first, which includes imports."""
    low = max(1, min(number, len(costs)) - SPAN // 2)
    return costs[low : low + SPAN]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Cost of a commit to the archive table.")
    parser.add_argument("--commits", type=int, default=1_000)
    commits = parser.parse_args().commits
    with tempfile.TemporaryDirectory(prefix="mansio-bench-") as warehouse:
        costs = run(commits, warehouse)
    print(f"{'commit':>7} {'CPU ms':>8} {'max':>8} {'wall ms':>8} {'max':>8}")
    for number in (mark for mark in MARKS if mark <= commits):
        found = around(costs, number)
        cpu, wall = [cost.cpu_ms for cost in found], [cost.wall_ms for cost in found]
        print(
            f"{number:>7} {statistics.median(cpu):>8.1f} {max(cpu):>8.1f}"
            f" {statistics.median(wall):>8.1f} {max(wall):>8.1f}"
        )
    ratio = statistics.median(c.cpu_ms for c in around(costs, commits)) / statistics.median(
        c.cpu_ms for c in around(costs, 10)
    )
    print(f"commit {commits} costs {ratio:.2f} of commit 10 (CPU)")


if __name__ == "__main__":
    main()
