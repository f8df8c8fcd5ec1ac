"""Processor time per record of several broker processes on a machine (`mansio serve --processes`), compared with one
broker.

    python -m bench.processes [--processes N] [--times N] [--seconds S] [--rate R] [--directory DIR]

Both sides run at the same time; each pair measures one after the other, and the order alternates. Producers send
batches with acks=all at a fixed rate, so the machine is not fully busy: above `BUSY_MAX` a pair is not counted. The
processor time is that of all processes of a side, supervisor and etcd included, also what they use when idle.

Two loads: the same one on both sides, of which each process has a part; and the same one for each process: one broker
has the Nth part of what N processes have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bench import frames
from bench.cluster import ProduceTarget, Side, Started
from bench.interpreter import interpreter
from bench.servers import free_port
from mansio.client import blocking
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS: Final = 100
RECORD_BYTES: Final = 100
CONNECTIONS: Final = 4
"""Producers of each partition; each has one request in flight."""
BUSY_MAX: Final = 0.6
RATIO_MIN: Final = 0.95
WARM_UP_S: Final = 0.5


class Run(NamedTuple):
    """One run: records, seconds of processor time of a side, and the share of all processors in use."""

    records: int
    processor_s: float
    busy: float

    @property
    def records_per_processor_s(self) -> float:
        return self.records / self.processor_s


@contextmanager
def served(directory: Path, name: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A running `mansio serve`: its addresses and its process id."""
    command = [
        sys.executable,
        "-m",
        "mansio",
        "serve",
        "--data",
        str(directory / name),
        "--http",
        "",
        *arguments,
    ]
    started = Started([*command, *arguments], directory / f"{name}.log")
    try:
        line = started.wait_for(" ready kafka=")
        yield line.partition("kafka=")[2].split()[0], started.process.pid
    finally:
        started.stop()


def place(bootstrap_servers: str, process: int, partitions: int) -> Side:
    """A topic with a partition for each of the leaders in turn."""
    with blocking.connect(bootstrap_servers) as client:
        ports = {one.node_id: one.port for one in client.admin.cluster.status().brokers}
        client.admin.create_topic("bench", partitions=partitions, replication_factor=1)
        leaders = [one.leader for one in client.admin.cluster.partitions(["bench"])]
    return Side([ProduceTarget(ports[leader], "bench") for leader in leaders], [process])


def produce(
    port: int, partition: int, interval_s: float, end_s: float, counts: list[int], number: int
) -> None:
    """Send a batch each `interval_s` until `end_s`; a late one follows at once. Counts records in `counts[number]`."""
    request = frames.produce_request("bench", partition, -1, frames.batch(RECORDS, RECORD_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due = time.monotonic()
        while due < end_s:
            time.sleep(max(0.0, due - time.monotonic()))
            line.sendall(request)
            answer = receive(line)
            if frames.produce_error(answer, "bench"):
                raise RuntimeError("a batch was refused")
            counts[number] += RECORDS
            due = max(due + interval_s, time.monotonic() - 10 * interval_s)


def receive(line: socket.socket) -> bytes:
    """One framed response."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from(">i", data)[0]:
        part = line.recv(1 << 16)
        if not part:
            raise RuntimeError("the broker closed the connection")
        data += part
    return data


def busy_and_total() -> tuple[int, int]:
    """Ticks of all processors that were not idle, and all."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def run(side: Side, records_per_s: float, seconds: float) -> Run:
    """Produce so many records per second to the partitions of a side."""
    targets = side.places
    interval_s = RECORDS * len(targets) * CONNECTIONS / records_per_s
    producers = [(partition, target) for partition, target in enumerate(targets) for _ in range(CONNECTIONS)]
    counts = [0] * len(producers)
    end_s = time.monotonic() + WARM_UP_S + seconds
    threads = [
        threading.Thread(target=produce, args=(target.port, partition, interval_s, end_s, counts, number))
        for number, (partition, target) in enumerate(producers)
    ]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    records, used_s, (busy, total) = sum(counts), side.processor_s(), busy_and_total()
    for thread in threads:
        thread.join()
    busy_after, total_after = busy_and_total()
    share = (busy_after - busy) / max(1, total_after - total)
    return Run(sum(counts) - records, side.processor_s() - used_s, share)


def compare(name: str, sides: dict[str, tuple[Side, float]], times: int, seconds: float) -> float:
    """Print the pairs of one load; returns the median of their ratios."""
    ratios: list[float] = []
    found: dict[str, list[Run]] = {side: [] for side in sides}
    discarded = 0
    for number in range(times):
        pair = {side: run(*sides[side], seconds) for side in sorted(sides, reverse=bool(number % 2))}
        if max(each.busy for each in pair.values()) > BUSY_MAX:
            discarded += 1
            continue
        for side, one in pair.items():
            found[side].append(one)
        ratios.append(pair["several"].records_per_processor_s / pair["one"].records_per_processor_s)
    if not ratios:
        print(f"{name}: all {times} pairs were busier than {BUSY_MAX:.0%}")
        return 0.0
    shown = " ".join(
        f"{side}: {statistics.median(one.records_per_processor_s for one in runs):,.0f} records per s of processor "
        f"time, {statistics.median(one.busy for one in runs):.0%} busy;"
        for side, runs in found.items()
    )
    print(
        f"{name}: {shown} ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), "
        f"{len(ratios)} pairs, {discarded} discarded",
        flush=True,
    )
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--times", type=int, default=10, help="pairs of each load")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each run after the warm-up")
    parser.add_argument("--rate", type=float, default=150_000, help="records per second of several processes")
    parser.add_argument("--directory", help="parent of the temporary data directory")
    options = parser.parse_args()
    count = options.processes
    directory = Path(tempfile.mkdtemp(prefix="mansio-bench-processes-", dir=options.directory))
    several = ("--processes", str(count), "--kafka", "127.0.0.1:0", "--set", "supervisor_listener=")
    try:
        with (
            served(directory, "one", "--kafka", f"127.0.0.1:{free_port()}") as one,
            served(directory, "several", *several) as more,
        ):
            processors = len(os.sched_getaffinity(0))
            print(
                f"Mansio {__version__}, {count} processes and one, batches of {RECORDS} records of {RECORD_BYTES} B, "
                f"acks=all, {CONNECTIONS} producers per partition; {processors} processors; Python {interpreter()}",
                flush=True,
            )
            single, many = place(*one, count), place(*more, count)
            ratios = [
                compare(
                    "the same load",
                    {"one": (single, options.rate), "several": (many, options.rate)},
                    options.times,
                    options.seconds,
                ),
                compare(
                    "the same load for each process",
                    {"one": (single, options.rate / count), "several": (many, options.rate)},
                    options.times,
                    options.seconds,
                ),
            ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return int(min(ratios) < RATIO_MIN)


if __name__ == "__main__":
    sys.exit(main())
