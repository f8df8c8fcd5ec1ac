"""Spark over Mansio beside Spark over Parquet: the same rows, the same session, one after the other.

    python -m bench.spark [--records 1000000] [--repetitions 5] [--memory 1000000,10000000]

One broker in a process of its own and one session with two threads. Each round runs every case once, so that a slow
minute of the machine meets all of them; printed are medians, ranges, and the ratio to the Parquet case of the same
round. With `--memory` also the highest resident memory of the JVM and of Python's workers, each number of records in a
new process.

Records are the flights of New York (a key, about 100 bytes of CSV), over and over, in six partitions. The topic is
read with the option `columns`, as somebody does who wants five of its columns: Spark prunes those of Parquet files by
itself, and has no way to tell a Python source.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bench.servers import create_topic, start_mansio
from mansio.cli.demo.flights import data_file, read_flights
from mansio.client import blocking
from mansio.client.types import OutgoingRecord
from mansio.spark import session
from mansio.spark.lake.catalog import open_table
from mansio.spark.lake.scan import EVERYTHING, files_of
from mansio.spark.pipelines.archive import ArchiveJob, archive
from mansio.spark.pipelines.union import ARCHIVED_AS, read_topic_as_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from bench.servers import Server
    from mansio.spark.lake.catalog import LakeTable

PARTITIONS = 6
TOPIC = "flights"
HALF = "half"
MICRO = "micro"
MICRO_BATCHES = 12
COLUMNS = ("key", "value", "partition", "offset", "timestamp")
SAMPLE_S = 0.05


def fill(server: Server, topic: str, records: int) -> None:
    """Publish so many flights."""
    flights = [OutgoingRecord(one.value, key=one.key) for one in read_flights(data_file())]
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        while records > 0:
            client.publish_many(topic, flights[:records])
            records -= len(flights)


def consume(frame: DataFrame) -> None:
    """Read everything of a frame and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


class Cases:
    """What is timed. Each case leaves the machine as it found it, but for files under `root`."""

    def __init__(self, spark: SparkSession, server: Server, root: Path) -> None:
        self.spark = spark
        self.server = server
        self.root = root
        self.broker = f"127.0.0.1:{server.port}"
        self.parquet = str(root / "parquet")
        self._numbers = itertools.count()
        self.topic(TOPIC).write.parquet(self.parquet)
        self._half_of_the_topic()

    def topic(self, name: str) -> DataFrame:
        options = {"broker": self.broker, "subscribe": name, "columns": ",".join(COLUMNS)}
        return self.spark.read.format("mansio").options(**options).load()

    def read_topic(self) -> None:
        consume(self.topic(TOPIC))

    def read_parquet(self) -> None:
        consume(self.spark.read.parquet(self.parquet))

    def write_topic(self) -> None:
        name = self._new("written")
        create_topic(self.server, name, PARTITIONS)
        rows = self.spark.read.parquet(self.parquet).select("key", "value")
        rows.write.format("mansio").options(broker=self.broker, topic=name).mode("append").save()

    def write_parquet(self) -> None:
        rows = self.spark.read.parquet(self.parquet).select("key", "value")
        rows.write.parquet(str(self.root / self._new("written")))

    def archive(self) -> None:
        self._archive(TOPIC, str(self.root / self._new("warehouse")))

    def parquet_to_parquet(self) -> None:
        self.spark.read.parquet(self.parquet).write.parquet(str(self.root / self._new("copied")))

    def _archive(self, topic: str, warehouse: str) -> None:
        job = ArchiveJob(topic, warehouse, self.broker, self._new("bench"), is_once=True, records_max=1 << 40)
        archive(self.spark, job)

    def _half_of_the_topic(self) -> None:
        """A topic whose first half is in an archive, and no more in the log; the other half only in the log."""
        half = self.topic(TOPIC).count() // 2
        create_topic(self.server, HALF, PARTITIONS)
        fill(self.server, HALF, half)
        self._half_warehouse = str(self.root / "half")
        self._archive(HALF, self._half_warehouse)
        fill(self.server, HALF, half)

    def union(self) -> None:
        options = {"broker": self.broker, "columns": ",".join(COLUMNS)}
        consume(read_topic_as_table(self.spark, HALF, self._half_table(), options))

    def archived_half(self) -> None:
        """The files of the union, by Spark's own reader."""
        rows = self.spark.read.parquet(*(file.path for file in files_of(self._half_table(), EVERYTHING)))
        consume(rows.select(*(ARCHIVED_AS.get(name, name) for name in COLUMNS)))

    def live_half(self) -> None:
        """The log of the union, from where the archive ends."""
        done = self._half_table().committed()
        assert done is not None, "the half was archived"
        starts = {HALF: {str(index): offset for index, offset in done.offsets.items()}}
        rows = self.spark.read.format("mansio").option("broker", self.broker).option("subscribe", HALF)
        rows = rows.option("columns", ",".join(COLUMNS)).option("startingOffsets", json.dumps(starts))
        consume(rows.load())

    def _half_table(self) -> LakeTable:
        return open_table(None, self._half_warehouse, HALF)

    def _new(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}"


PAIRS: dict[str, tuple[str, str, str]] = {
    "batch read": ("read_topic", "read_parquet", "0.9"),
    "batch write": ("write_topic", "write_parquet", "0.6"),
    "archive": ("archive", "parquet_to_parquet", "0.5"),
}
"""Case -> what is measured, what it is held against, the ratio of speeds that is aimed at."""
UNION = ("union", "archived_half", "live_half")


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def measure(cases: Cases, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; the first round only warms up."""
    names = [*(name for pair in PAIRS.values() for name in pair[:2]), *UNION]
    seconds: dict[str, list[float]] = defaultdict(list)
    for round_ in range(repetitions + 1):
        for name in names:
            took = timed(getattr(cases, name))
            if round_:
                seconds[name].append(took)
        print(f"round {round_} of {repetitions}", file=sys.stderr, flush=True)
    return seconds


def print_table(seconds: dict[str, list[float]], records: int) -> None:
    print(f"| {records:,} records | Mansio, s | Parquet, s | speed against Parquet | aim |")
    print("|---|---|---|---|---|")
    for title, (ours, theirs, aim) in PAIRS.items():
        ratios = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        print(f"| {title} | {spread(seconds[ours])} | {spread(seconds[theirs])} | {spread(ratios)} | {aim} |")
    union, archived, live = (seconds[name] for name in UNION)
    slower = [u / max(a, b) for u, a, b in zip(union, archived, live, strict=True)]
    both = [u / (a + b) for u, a, b in zip(union, archived, live, strict=True)]
    print(f"union {spread(union)} s, its archived half {spread(archived)} s, its live half {spread(live)} s:")
    print(
        f"{spread(slower)} times its slower half, {spread(both)} times both halves read one after the other"
    )


def micro_batches(cases: Cases) -> list[float]:
    """Seconds of a streaming batch that carries one record: what a trigger costs at least."""
    create_topic(cases.server, MICRO, 1)
    checkpoint = str(cases.root / "checkpoint")
    with blocking.connect(cases.broker) as client:
        client.publish(MICRO, b"first")
        options = {"broker": cases.broker, "subscribe": MICRO, "startingOffsets": "earliest"}
        rows = cases.spark.readStream.format("mansio").options(**options).load()
        query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        try:
            for _ in range(MICRO_BATCHES):
                query.processAllAvailable()
                client.publish(MICRO, b"next")
            query.processAllAvailable()
            durations = [one["batchDuration"] / 1000 for one in query.recentProgress if one["numInputRows"]]
        finally:
            query.stop()
    return durations[2:]


class Memory:
    """The highest resident memory of the JVM below this process, and of all other processes below it together: what
    several of them share, as forked ones do, is counted once."""

    def __init__(self) -> None:
        self.jvm_bytes = self.workers_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            jvm = workers = 0
            for pid in below(os.getpid()):
                try:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    size = proportional_bytes(pid)
                except OSError:  # it has ended
                    continue
                jvm, workers = (jvm + size, workers) if name == "java" else (jvm, workers + size)
            self.jvm_bytes, self.workers_bytes = max(self.jvm_bytes, jvm), max(self.workers_bytes, workers)


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with its part of what it shares with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def below(pid: int) -> Iterator[int]:
    """The processes that this one has started, and theirs; not the broker, which is in a session of its own."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
            ours = [child for child in children if os.getsid(child) == os.getsid(0)]
        except OSError:  # one of them has ended: it is looked at again soon
            continue
        for child in ours:
            yield child
            yield from below(child)


def print_memory(broker: str) -> None:
    """In a process of its own: read the topic, archive it, and say what that took."""
    with tempfile.TemporaryDirectory(prefix="mansio-bench-") as warehouse:
        spark = session("local[2]", "mansio-bench")
        for name in ("read", "archive"):
            with Memory() as memory:
                if name == "read":
                    options = {"broker": broker, "subscribe": TOPIC}
                    consume(spark.read.format("mansio").options(**options).load())
                else:
                    archive(spark, ArchiveJob(TOPIC, warehouse, broker, "bench", is_once=True))
            sizes = (memory.jvm_bytes >> 20, memory.workers_bytes >> 20)
            print(f"{name}: JVM {sizes[0]} MiB, Python's workers {sizes[1]} MiB", flush=True)
        spark.stop()


def compare_memory(counts: list[int], root: Path) -> None:
    for count in counts:
        server = start_mansio(root / f"memory-{count}", None)
        try:
            create_topic(server, TOPIC, PARTITIONS)
            fill(server, TOPIC, count)
            print(f"{count:,} records", flush=True)
            command = [sys.executable, "-m", "bench.spark", "--memory-of", f"127.0.0.1:{server.port}"]
            subprocess.run(command, check=True)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Spark over Mansio beside Spark over Parquet.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", help="numbers of records, with commas: memory instead of times")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print_memory(given.memory_of)
        return
    root = Path(tempfile.mkdtemp(prefix="mansio-bench-"))
    try:
        if given.memory:
            compare_memory([int(count) for count in given.memory.split(",")], root)
            return
        server = start_mansio(root / "data", None)
        try:
            create_topic(server, TOPIC, PARTITIONS)
            fill(server, TOPIC, given.records)
            spark = session("local[2]", "mansio-bench", **{"spark.sql.shuffle.partitions": "2"})
            cases = Cases(spark, server, root)
            print_table(measure(cases, given.repetitions), given.records)
            print(f"a streaming batch of one record: {spread(micro_batches(cases))} s")
            spark.stop()
        finally:
            server.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
