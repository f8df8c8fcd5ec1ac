"""Spark with Mansio compared with Spark with Parquet: the same rows, the same session, alternating.

    python -m bench.spark [--records 1000000] [--shape fixed] [--repetitions 5] [--only read,archive]
    python -m bench.spark --memory 1000000,10000000

One broker in its own process and one session with two threads. Each round runs every case once, so that a slow period
of the machine affects all of them. Printed are medians, ranges, and the ratio to the Parquet case of the same round: of
processor time (JVM, Python and broker), which other processes hardly influence, and of wall time. With `--memory` the
peak resident memory of the JVM and of the Python workers, for each number of records in a new process.

Records have one of three shapes (`SHAPES`) and are in six partitions. The topic is read with the option `columns`, with
five columns: Spark prunes the columns of Parquet files itself, but cannot do so for a Python source. `--connector DIR`
compares the archive also with Spark's own Kafka connector that writes Parquet files; `tools/maven_jars.sh spark-kafka`
fetches its jars into .tools/spark-kafka.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.interpreter import interpreter
from bench.servers import create_topic, start_mansio
from bench.spark_processes import Memory, processor_time
from mansio.client import blocking
from mansio.client.types import OutgoingRecord
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_scan import ALL_RECORDS, selected_files
from mansio.pipelines.archive import ArchiveJob, archive
from mansio.pipelines.compact import compact
from mansio.spark import session
from mansio.spark.topic_table import ARCHIVE_COLUMN_NAMES, read_topic_as_table
from mansio_demo.flights import load_flights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from bench.servers import Server
    from mansio.iceberg.archive.table import ArchiveTable

PARTITIONS = 6
TOPIC = "flights"
HALF = "half"
MICRO = "micro"
MICRO_BATCHES = 12
COLUMNS = ("key", "value", "partition", "offset", "timestamp")


DISTINCT_RECORDS = 300_000
"""Number of records after which those of `fixed` and `mixed` repeat."""


def flights() -> list[OutgoingRecord]:
    return [OutgoingRecord(one.value, key=one.key) for one in load_flights()]


def random_records(length_min: int, length_max: int) -> list[OutgoingRecord]:
    """Records with a key of 8 bytes and a value of random bytes."""
    source = random.Random(1)
    return [
        OutgoingRecord(source.randbytes(source.randint(length_min, length_max)), key=b"%08d" % number)
        for number in range(DISTINCT_RECORDS)
    ]


SHAPES: dict[str, Callable[[], list[OutgoingRecord]]] = {
    "flights": flights,
    "fixed": lambda: random_records(100, 100),
    "mixed": lambda: random_records(20, 180),
}
"""The flights of New York (a key, about 100 bytes of CSV); 100 random bytes; 20 to 180 random bytes, 100 on average."""


def fill(server: Server, topic: str, records: int, shape: str = "flights") -> None:
    """Publish `records` records of this shape."""
    distinct = SHAPES[shape]()
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        while records > 0:
            client.publish_many(topic, distinct[:records])
            records -= len(distinct)


def consume(frame: DataFrame) -> None:
    """Read a whole DataFrame and discard it."""
    frame.write.format("noop").mode("overwrite").save()


class Cases:
    """The measured cases. Each has no lasting effect except files under `root`. What a case needs is prepared when it
    first runs, which is in the warm-up round."""

    def __init__(self, spark: SparkSession, server: Server, root: Path, records: int, shape: str) -> None:
        self.spark = spark
        self.server = server
        self.root = root
        self.records = records
        self.shape = shape
        self.broker = f"127.0.0.1:{server.port}"
        self._numbers = itertools.count()

    @cached_property
    def parquet(self) -> str:
        """The rows of the topic in Parquet files."""
        path = str(self.root / "parquet")
        self.topic(TOPIC).write.parquet(path)
        return path

    def topic(self, name: str, **others: str) -> DataFrame:
        options = {
            "kafka.bootstrap.servers": self.broker,
            "subscribe": name,
            "columns": ",".join(COLUMNS),
            **others,
        }
        return self.spark.read.format("mansio").options(**options).load()

    def read_topic(self) -> None:
        consume(self.topic(TOPIC))

    def read_first(self) -> None:
        """Fixed cost of a read."""
        ends = json.dumps({TOPIC: {str(index): 1 for index in range(PARTITIONS)}})
        consume(self.topic(TOPIC, endingOffsets=ends))

    def read_parquet(self) -> None:
        consume(self.spark.read.parquet(self.parquet))

    def write_topic(self) -> None:
        name = self._new("written")
        create_topic(self.server, name, PARTITIONS)
        rows = self.spark.read.parquet(self.parquet).select("key", "value")
        rows.write.format("mansio").options(**{"kafka.bootstrap.servers": self.broker}, topic=name).mode(
            "append"
        ).save()

    def write_parquet(self) -> None:
        rows = self.spark.read.parquet(self.parquet).select("key", "value")
        rows.write.parquet(str(self.root / self._new("written")))

    def archive(self) -> None:
        self._archive(TOPIC, str(self.root / self._new("warehouse")))

    def parquet_to_parquet(self) -> None:
        self.spark.read.parquet(self.parquet).write.parquet(str(self.root / self._new("copied")))

    def _archive(self, topic: str, warehouse: str) -> None:
        job = ArchiveJob(
            topic, warehouse, self.broker, self._new("bench"), stops_when_caught_up=True, records_max=1 << 40
        )
        archive(self.spark, job)

    def connector_to_parquet(self) -> None:
        """A batch of Spark's own Kafka connector into Parquet files."""
        options = {"kafka.bootstrap.servers": self.broker, "subscribe": TOPIC, "startingOffsets": "earliest"}
        rows = self.spark.readStream.format("kafka").options(**options).load().select(*COLUMNS)
        path, checkpoint = (str(self.root / self._new(name)) for name in ("connector", "checkpoint"))
        query = rows.writeStream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
        query.format("parquet").start(path).awaitTermination()

    @cached_property
    def _half_warehouse(self) -> str:
        """The archive of a topic whose first half is only in this archive and whose second half is only in the log."""
        warehouse = str(self.root / "half")
        create_topic(self.server, HALF, PARTITIONS)
        fill(self.server, HALF, self.records // 2, self.shape)
        self._archive(HALF, warehouse)
        fill(self.server, HALF, self.records // 2, self.shape)
        return warehouse

    def union(self) -> None:
        consume(self.plan_union())

    def plan_union(self) -> DataFrame:
        options = {"kafka.bootstrap.servers": self.broker, "columns": ",".join(COLUMNS)}
        return read_topic_as_table(self.spark, HALF, self._half_table(), options)

    def archived_half(self) -> None:
        """The files of the union, read by Spark's own reader."""
        consume(self.plan_archived_half())

    def plan_archived_half(self) -> DataFrame:
        rows = self.spark.read.parquet(
            *(file.path for file in selected_files(self._half_table(), ALL_RECORDS))
        )
        return rows.select(*(ARCHIVE_COLUMN_NAMES.get(name, name) for name in COLUMNS))

    def live_half(self) -> None:
        """The log of the union, from the end of the archive."""
        consume(self.plan_live_half())

    def plan_live_half(self) -> DataFrame:
        done = self._half_table().last_commit()
        assert done is not None, "the half was archived"
        starts = {HALF: {str(index): offset for index, offset in done.offsets.items()}}
        rows = (
            self.spark.read.format("mansio")
            .option("kafka.bootstrap.servers", self.broker)
            .option("subscribe", HALF)
        )
        rows = rows.option("columns", ",".join(COLUMNS)).option("startingOffsets", json.dumps(starts))
        return rows.load()

    def _half_table(self) -> ArchiveTable:
        return open_table(None, self._half_warehouse, HALF)

    def _new(self, name: str) -> str:
        return f"{name}-{next(self._numbers)}"


class Cost(NamedTuple):
    """Cost of one run of a case."""

    wall_s: float
    jvm_s: float
    python_s: float
    broker_s: float

    @property
    def processor_s(self) -> float:
        return self.jvm_s + self.python_s + self.broker_s


class Pair(NamedTuple):
    """A case, its reference, and the required ratio of speeds; None: only printed."""

    title: str
    case: str
    other: str
    aim: str


PAIRS = {
    "read": Pair("batch read", "read_topic", "read_parquet", "0.65"),
    "write": Pair("batch write", "write_topic", "write_parquet", "0.6"),
    "archive": Pair("archive", "archive", "parquet_to_parquet", "0.5"),
    "connector": Pair("archive, Spark's Kafka connector", "archive", "connector_to_parquet", "1.0"),
    "first": Pair("one record of each partition", "read_first", "read_parquet", "-"),
}
UNION = ("union", "archived_half", "live_half")
PLANS = tuple(f"plan_{name}" for name in UNION)


def measured(work: Callable[[], object], server: Server) -> Cost:
    before, broker_s, begin = processor_time(), server.cpu_s(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - begin
    used = processor_time().since(before)
    return Cost(wall_s, used.jvm_s, used.python_s, server.cpu_s() - broker_s)


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def measure(cases: Cases, repetitions: int, names: Sequence[str]) -> dict[str, list[Cost]]:
    """The cost of each case in each round; the first round is a warm-up."""
    costs: dict[str, list[Cost]] = defaultdict(list)
    for round_ in range(repetitions + 1):
        for name in names:
            cost = measured(getattr(cases, name), cases.server)
            if round_:
                costs[name].append(cost)
        print(f"round {round_} of {repetitions}", file=sys.stderr, flush=True)
    return costs


def print_table(costs: dict[str, list[Cost]], records: int) -> None:
    print(f"Python {interpreter()}\n")
    print(
        f"| {records:,} records | processor s | of that JVM, Python, broker | beside it | speed | aim |",
        end="",
    )
    print(" time, s | beside it | speed |")
    print(f"|{'---|' * 9}")
    for title, name, other, aim in PAIRS.values():
        if name not in costs or other not in costs:
            continue
        ours, theirs = costs[name], costs[other]
        parts = ", ".join(f"{statistics.median(part):.2f}" for part in list(zip(*ours, strict=True))[1:])
        cells = [title, spread([cost.processor_s for cost in ours]), parts]
        cells += [spread([cost.processor_s for cost in theirs]), ratios(theirs, ours, "processor_s"), aim]
        cells += [spread([cost.wall_s for cost in ours]), spread([cost.wall_s for cost in theirs])]
        print(f"| {' | '.join([*cells, ratios(theirs, ours, 'wall_s')])} |")
    if UNION[0] in costs:
        print_union("union", *(costs[name] for name in UNION))
        print_union("planning of the union", *(costs[name] for name in PLANS))


def ratios(ones: Sequence[Cost], others: Sequence[Cost], measure: str) -> str:
    """Ratios of the costs, round by round."""
    return spread([getattr(a, measure) / getattr(b, measure) for a, b in zip(ones, others, strict=True)])


def print_union(title: str, union: Sequence[Cost], archived: Sequence[Cost], live: Sequence[Cost]) -> None:
    for measure, unit in (("processor_s", "processor time"), ("wall_s", "time")):
        rounds = [
            (getattr(u, measure), getattr(a, measure), getattr(b, measure))
            for u, a, b in zip(union, archived, live, strict=True)
        ]
        whole, first, second = (spread(column) for column in zip(*rounds, strict=True))
        slower = spread([u / max(a, b) for u, a, b in rounds])
        both = spread([u / (a + b) for u, a, b in rounds])
        print(f"{title}, {unit}: {whole} s, its archived half {first} s, its live half {second} s:", end="")
        print(f" {slower} times its slower half, {both} times both halves one after the other")


def case_names(only: str) -> list[str]:
    """The cases of these pairs, each once."""
    chosen = only.split(",")
    pairs = [PAIRS[name] for name in chosen if name in PAIRS]
    names = [name for pair in pairs for name in (pair.case, pair.other)]
    return list(dict.fromkeys([*names, *((*UNION, *PLANS) if UNION[0] in chosen else ())]))


def micro_batches(cases: Cases) -> list[float]:
    """Seconds of a streaming batch with one record: the minimal cost of a trigger."""
    create_topic(cases.server, MICRO, 1)
    checkpoint = str(cases.root / "checkpoint")
    with blocking.connect(cases.broker) as client:
        client.publish(MICRO, b"first")
        options = {"kafka.bootstrap.servers": cases.broker, "subscribe": MICRO, "startingOffsets": "earliest"}
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


def print_memory(broker: str, heap: str) -> None:
    """In its own process: read the topic, archive it, compact the archive, and print the cost of each."""
    with tempfile.TemporaryDirectory(prefix="mansio-bench-") as warehouse:
        spark = session("local[2]", "mansio-bench", **{"spark.driver.memory": heap})
        options = {"kafka.bootstrap.servers": broker, "subscribe": TOPIC}
        work: dict[str, Callable[[], object]] = {
            "read": lambda: consume(spark.read.format("mansio").options(**options).load()),
            "archive": lambda: archive(
                spark, ArchiveJob(TOPIC, warehouse, broker, "bench", stops_when_caught_up=True)
            ),
            "compact": lambda: compact(spark, open_table(None, warehouse, TOPIC), "latest"),
        }
        for name, run in work.items():
            with Memory() as memory:
                run()
            sizes = (memory.jvm_bytes >> 20, memory.workers_bytes >> 20)
            print(f"{name}: JVM {sizes[0]} MiB, Python's workers {sizes[1]} MiB", flush=True)
        spark.stop()


def compare_memory(counts: list[int], heap: str, root: Path) -> None:
    for count in counts:
        server = start_mansio(root / f"memory-{count}", None)
        try:
            create_topic(server, TOPIC, PARTITIONS)
            fill(server, TOPIC, count)
            print(f"{count:,} records", flush=True)
            command = [sys.executable, "-m", "bench.spark", "--memory-of", f"127.0.0.1:{server.port}"]
            subprocess.run([*command, "--heap", heap], check=True)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Spark over Mansio beside Spark over Parquet.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--shape", choices=SHAPES, default="flights")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", help=f"some of {', '.join((*PAIRS, UNION[0]))}; all if not given")
    parser.add_argument("--connector", type=Path, help="directory with the jars of Spark's Kafka connector")
    parser.add_argument("--memory", help="numbers of records, with commas: memory instead of times")
    parser.add_argument("--heap", default="1g", help="how much of that the JVM's objects may take")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print_memory(given.memory_of, given.heap)
        return
    root = Path(tempfile.mkdtemp(prefix="mansio-bench-"))
    try:
        if given.memory:
            compare_memory([int(count) for count in given.memory.split(",")], given.heap, root)
            return
        server = start_mansio(root / "data", None)
        try:
            create_topic(server, TOPIC, PARTITIONS)
            fill(server, TOPIC, given.records, given.shape)
            settings = {"spark.sql.shuffle.partitions": "2"}
            if given.connector:
                settings["spark.jars"] = ",".join(map(str, given.connector.glob("*.jar")))
            spark = session("local[2]", "mansio-bench", **settings)
            cases = Cases(spark, server, root, given.records, given.shape)
            all_names = [name for name in (*PAIRS, UNION[0]) if name != "connector" or given.connector]
            names = case_names(given.only or ",".join(all_names))
            print_table(measure(cases, given.repetitions, names), given.records)
            if not given.only:
                print(f"a streaming batch of one record: {spread(micro_batches(cases))} s")
            spark.stop()
        finally:
            server.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
