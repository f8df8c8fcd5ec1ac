"""A share group as the source of Spark: how busy its task slots are, how many records it processes, how long it plans.

    python -m bench.spark_workers [--case busy mixed rate plan] [--rows 2000] [--records 1000000] [--backlog 10000000]

`busy`: one partition, eight task slots, rows of 0.2 s (a sleep): the time in the function, divided by eight times the
wall time from the begin of the first row to the end of the last one; beside it a tenth of the rows of a plain source.
`mixed`: the same with rows of 0.02 to 2 s. `rate`: trivial functions over 16 partitions and over one, records per
second of a query. `plan`: the time in which the driver leases and plans a batch of 200,000 records from a backlog,
without Spark. The broker runs in a process of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mansio
from bench.servers import start_mansio
from mansio.client.types import OutgoingRecord
from mansio.spark import session, start_available_now, work
from mansio.spark.options import SourceOptions
from mansio.spark.share.share_reader import ShareStreamReader
from mansio.spark.spark_versions import ReadAllAvailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

SLOTS = 8
ROW_S = 0.2
MIXED_ROWS_S = (0.02, 2.0)
PUBLISHED_AT_ONCE = 100_000
CASES = ("busy", "mixed", "rate", "plan")


def prepare(servers: str, topic: str, values: list[bytes], partitions: int = 1, repeat: int = 1) -> None:
    """Create a topic with these records, `repeat` times, and a group of its name that begins at its start."""
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=partitions)
        client.admin.alter_group_config(topic, {"share.auto.offset.reset": "earliest"})
        for _ in range(repeat):
            client.publish_many(
                topic,
                [OutgoingRecord(value, partition=at % partitions) for at, value in enumerate(values)],
            )


def sleeping() -> Callable[[Any], tuple[float, float]]:
    """A function that sleeps for the number of seconds that is the value of the record."""

    def sleep(row: Any) -> tuple[float, float]:
        import time

        began = time.time()
        time.sleep(float(row.value))
        return began, time.time()

    return sleep


def busy(spark: SparkSession, servers: str, topic: str, *, is_shared: bool) -> float:
    """Return how busy the slots are."""
    spans: list[tuple[float, float]] = []

    def take(frame: DataFrame, _: int) -> None:
        done = work.apply(frame, sleeping(), schema="began double, ended double")
        spans.extend(tuple(row) for row in done.select("result.*").collect())

    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "stopAtLatest": "true",
    }
    options |= {"shareGroup": topic} if is_shared else {"startingOffsets": "earliest"}
    with tempfile.TemporaryDirectory() as place:
        stream = spark.readStream.format("mansio").options(**options).load().writeStream
        query = start_available_now(stream.foreachBatch(take).option("checkpointLocation", place))
        query.awaitTermination()
    in_function = sum(ended - began for began, ended in spans)
    wall = max(ended for _, ended in spans) - min(began for began, _ in spans)
    return in_function / (SLOTS * wall)


def rate(spark: SparkSession, servers: str, topic: str, records: int, *, applies: bool) -> float:
    """Return how many records a second are leased, read and accepted; with `applies`, a row function is called."""
    counts: list[tuple[float, float, int]] = []

    def take(frame: DataFrame, _: int) -> None:
        began = time.monotonic()
        if applies:
            done = work.apply(frame, lambda row: row.offset, schema="at long")
            count = done.where("error IS NULL").count()
        else:
            count = frame.count()
        counts.append((began, time.monotonic(), count))

    options = {
        "kafka.bootstrap.servers": servers,
        "subscribe": topic,
        "shareGroup": topic,
        "stopAtLatest": "true",
    }
    with tempfile.TemporaryDirectory() as place:
        stream = spark.readStream.format("mansio").options(**options).load().writeStream
        began = time.monotonic()
        query = start_available_now(stream.foreachBatch(take).option("checkpointLocation", place))
        query.awaitTermination()
        wall = time.monotonic() - began
    assert sum(count for *_, count in counts) == records
    return records / wall


def plan(servers: str, topic: str, batches: int) -> list[float]:
    """Return the times in which batches are planned, in seconds."""
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": servers, "subscribe": topic, "shareGroup": topic},
        streaming=True,
    )
    assert options.share is not None
    reader = ShareStreamReader(options, options.share, ("value", "offset"))
    times: list[float] = []
    start: dict[str, Any] = reader.initialOffset()
    for _ in range(batches):
        began = time.monotonic()
        end = reader.latestOffset(start, ReadAllAvailable())
        reader.partitions(start, end)
        times.append(time.monotonic() - began)
        start = end
    reader.stop()
    return times


def shown(values: list[float], digits: int = 2) -> str:
    """Median and spread."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    """Run the cases and print their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", type=int, default=2_000, help="rows of busy and mixed")
    parser.add_argument("--records", type=int, default=1_000_000, help="records of rate over 16 partitions")
    parser.add_argument("--backlog", type=int, default=10_000_000, help="records of plan")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        server = start_mansio(Path(place), None)
        try:
            _run(f"127.0.0.1:{server.port}", options)
        finally:
            server.stop()


def _run(servers: str, options: argparse.Namespace) -> None:
    if "plan" in options.case:
        values = [b"%d" % at for at in range(PUBLISHED_AT_ONCE)]
        prepare(servers, "backlog", values, repeat=options.backlog // PUBLISHED_AT_ONCE)
        print(f"plan, s: {shown(plan(servers, 'backlog', 10), 3)}")
    if not {"busy", "mixed", "rate"} & {*options.case}:
        return
    spark = session(f"local[{SLOTS}]", "bench-workers", **{"spark.sql.shuffle.partitions": "2"})
    try:
        _run_spark(spark, servers, options)
    finally:
        spark.stop()


def _run_spark(spark: SparkSession, servers: str, options: argparse.Namespace) -> None:
    chosen = random.Random(7)
    for case in ("busy", "mixed"):
        if case not in options.case:
            continue
        found: dict[bool, list[float]] = {True: [], False: []}
        for run in range(options.runs):
            lengths = [
                ROW_S if case == "busy" else chosen.uniform(*MIXED_ROWS_S) for _ in range(options.rows)
            ]
            topic = f"{case}-{run}"
            prepare(servers, topic, [b"%f" % length for length in lengths])
            found[True].append(busy(spark, servers, topic, is_shared=True))
            if not run and case == "busy":
                prepare(servers, "plain", [b"%f" % ROW_S] * (options.rows // 10))
                found[False].append(busy(spark, servers, "plain", is_shared=False))
        print(
            f"{case}: {shown(found[True])}"
            + (f", plain source {shown(found[False])}" if found[False] else "")
        )
    if "rate" in options.case:
        for partitions, records in ((16, options.records), (1, options.records // 4)):
            for applies in (False, True):
                rates = []
                for run in range(options.runs):
                    topic = f"rate-{partitions}-{applies}-{run}".lower()
                    values = [b"%d" % at for at in range(min(records, PUBLISHED_AT_ONCE))]
                    prepare(servers, topic, values, partitions, records // len(values))
                    rates.append(
                        rate(spark, servers, topic, records // len(values) * len(values), applies=applies)
                    )
                what = "row function" if applies else "count"
                print(f"rate, {partitions} partitions, {what}, records/s: {shown(rates, 0)}")


if __name__ == "__main__":
    main()
