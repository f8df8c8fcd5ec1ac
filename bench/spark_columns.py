"""Cost of converting record batches to Arrow columns and back: `python -m bench.spark_columns`. One core, no broker, no
JVM.

Measured in processor time, because wall time on a busy machine depends on other processes: seconds for one million
rows, the median of several rounds with minimum and maximum, compared with the general reader (`read_record_tuples`) and
the general writer (`build_batch`) for the same rows. Responses have about 4 MB, as a task fetches them, and tables the
same size."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from mansio.spark.arrow.decode import decode_batches
from mansio.spark.arrow.encode import encode_batches
from mansio.spark.arrow.schema import HEADERS_TYPE, RECORD_SCHEMA
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_record_tuples

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_BYTES = 4 << 20
NOISE = random.Random(1).randbytes(1 << 20)
FEW = ("key", "value", "partition", "offset", "timestamp")
ROUNDS = 7


class Row(NamedTuple):
    """Row type for `read_record_tuples`, as the client's message."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Shape(NamedTuple):
    """A kind of rows: the length of the n-th value, and the records per batch."""

    title: str
    length: Callable[[int], int]
    rows_per_batch: int
    has_key: bool = True
    has_header: bool = False
    codec: Codec = Codec.NONE


SHAPES = (
    Shape("100 B, 8,000 a batch", lambda n: 100, 8_000),
    Shape("100 B, 500 a batch", lambda n: 100, 500),
    Shape("100 B, 100 a batch", lambda n: 100, 100),
    Shape("100 B, 10 a batch", lambda n: 100, 10),
    Shape("60-140 B, 8,000 a batch", lambda n: 60 + n * 7919 % 80, 8_000),
    Shape("60-140 B, 500 a batch", lambda n: 60 + n * 7919 % 80, 500),
    Shape("60-140 B, no two batches alike", lambda n: 60 + int(n**1.7) % 80, 500),
    Shape("60-140 B, no keys, 500 a batch", lambda n: 60 + n * 7919 % 80, 500, has_key=False),
    Shape("100 B, 500 a batch, zstd", lambda n: 100, 500, codec=Codec.ZSTD),
    Shape("100 B and a header, 500 a batch", lambda n: 100, 500, has_header=True),
    Shape("1 KB, 1,000 a batch", lambda n: 1_024, 1_000),
    Shape("0.8-1.2 KB, 1,000 a batch", lambda n: 800 + n * 7919 % 400, 1_000),
)


def main() -> None:
    """Print one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="shapes whose title contains this")
    only = parser.parse_args().only
    print(
        f"{'CPU seconds for 1 M rows':34} {'9 columns':>17} {'5 columns':>17} {'read_record_tuples':>10}",
        end="",
    )
    print(f" {'encode':>17} {'build_batch':>11}")
    for shape in SHAPES:
        if only in shape.title:
            print(measured(shape), flush=True)


def measured(shape: Shape) -> str:
    """The line of one shape."""
    rows = rows_of(shape)
    batches = [
        build_batch(rows[first : first + shape.rows_per_batch], base_offset=first, codec=shape.codec)
        for first in range(0, len(rows), shape.rows_per_batch)
    ]
    answer = b"".join(batches)
    table = table_of(rows)

    def general_reader() -> None:
        for position, header in iterate_batches(answer):
            read_record_tuples(
                answer[position : position + header.size], Row, "t", 0, output_bytes_max=1 << 30
            )

    batch_bytes = max(map(len, batches)) if shape.codec is Codec.NONE else 1 << 20

    def encoder() -> None:
        for _ in encode_batches(table, partition_count=1, bytes_max=batch_bytes, codec=shape.codec):
            pass

    def general_writer() -> None:
        for first in range(0, len(rows), shape.rows_per_batch):
            build_batch(rows[first : first + shape.rows_per_batch], codec=shape.codec)

    count = len(rows)
    return (
        f"{shape.title:34} "
        f"{timed(lambda: list(decode_batches(answer, 't', 0, columns=RECORD_SCHEMA.names)), count):>17}"
        f" {timed(lambda: list(decode_batches(answer, 't', 0, columns=FEW)), count):>17}"
        f" {timed(general_reader, count)[:5]:>10} {timed(encoder, count):>17} {timed(general_writer, count)[:5]:>11}"
    )


def rows_of(shape: Shape) -> list[tuple[int, bytes | None, bytes, list[tuple[str, bytes]]]]:
    """Records for a response of the usual size, in complete batches."""
    mean = sum(shape.length(n) for n in range(200)) / 200 + 20
    count = max(1, round(ANSWER_BYTES / mean / shape.rows_per_batch)) * shape.rows_per_batch
    header = [("traceparent", b"x" * 30)] if shape.has_header else []
    return [
        (
            1_700_000_000_000 + n // 7,
            b"%08d" % n if shape.has_key else None,
            NOISE[n * 7 % 900_000 :][: shape.length(n)],
            header,
        )
        for n in range(count)
    ]


def table_of(rows: list[tuple[int, bytes | None, bytes, list[tuple[str, bytes]]]]) -> pa.RecordBatch:
    """The same rows as columns."""
    columns = {
        "key": pa.array([row[1] for row in rows], pa.binary()),
        "value": pa.array([row[2] for row in rows], pa.binary()),
        "timestamp": pa.array([row[0] * 1000 for row in rows]).cast(pa.timestamp("us", tz="UTC")),
    }
    if rows[0][3]:
        headers = [[{"key": key, "value": value} for key, value in row[3]] for row in rows]
        columns["headers"] = pa.array(headers, HEADERS_TYPE)
    return pa.RecordBatch.from_pydict(columns)


def timed(work: Callable[[], object], rows: int) -> str:
    """`median (least-most)` seconds of processor time for one million rows."""
    work()
    times = []
    for _ in range(ROUNDS):
        before = time.process_time()
        work()
        times.append((time.process_time() - before) / rows * 1e6)
    return f"{statistics.median(times):.3f} ({min(times):.2f}-{max(times):.2f})"


if __name__ == "__main__":
    main()
