"""Cost of three synced replicas: a cluster of three brokers and etcd, compared with three baseline processes that
replicate and sync the same bytes.

    python -m bench.cluster [--times N] [--seconds S] [--directory DIR] [--only CASE]

Both run at the same time and are measured in pairs; the order alternates, and the ratio is taken per pair, because
figures of a shared machine drift. Producers use acks=all and send to the leader of a partition with three replicas;
with several producers, each of the three leaders has one. Everything runs on one machine and one disk: absolute figures
describe the machine, ratios the overhead of Mansio. The processor time per batch, over all processes of a side, is
shown as well: it is more reliable than wall time if other processes need the processors.

The baseline follows the same rules: it acknowledges a batch when all three processes have synced it, so at most the
producer's window is in one sync (as many batches as with the brokers: about half a window), and batches that arrive
during a sync share the next one. It has two advantages: it pushes data to replicas without requests, and each of its
files has its own sync thread. It has one disadvantage: its files grow with every batch, which a sync must record, while
a broker preallocates its files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.interpreter import interpreter
from bench.servers import free_port
from mansio.client import blocking
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S = 120.0
STOP_S = 30.0
LOAD_S = 120.0
BROKERS = 3
RATIO_MIN = 0.6
WARM_UP_S = 0.5
TOPICS_MAX = 20
BYTES_MAX = 512 << 20
"""Limit of one producer in one run: all replicas of a case are on the disk at the same time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `producers`: number of processes, each with its own leader."""

    name: str
    records: int
    producers: int
    connections: int
    depth: int
    ratio_min: float | None = None


CASES = (
    Case("1 record, 1 producer, one at a time", 1, 1, 1, 1),
    Case("1 record, 3 producers of 64", 1, 3, 4, 16),
    Case("100 records, 1 producer", 100, 1, 1, 8, RATIO_MIN),
    Case("100 records, 3 producers", 100, 3, 2, 8, RATIO_MIN),
    Case("1000 records, 1 producer", 1000, 1, 1, 4, RATIO_MIN),
    Case("1000 records, 3 producers", 1000, 3, 2, 4, RATIO_MIN),
)


@dataclass(frozen=True, slots=True)
class ProduceTarget:
    """Target of a producer: a leader's port, and a topic with one partition there."""

    port: int
    topic: str


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: a target per leader, and its processes."""

    places: list[ProduceTarget]
    processes: list[int]

    def processor_s(self) -> float:
        """Processor time of these processes and their children."""
        return sum(_processor_s(process) for process in self.processes)


def _processor_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # the process has ended
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(_processor_s, children))


class Started:
    """A process that reported it is ready, with its children."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, word: str) -> str:
        """The output line that contains this word."""
        end = time.monotonic() + READY_S
        while True:
            text = self.log.read_text(errors="replace")
            for line in text.splitlines(keepends=True):
                if word in line and line.endswith("\n"):
                    return line
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"not ready:\n{text}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def baseline(directory: Path) -> Iterator[Side]:
    """Three baseline processes, each the leader of one log; their data is removed afterwards."""
    clients, copies = ([free_port() for _ in range(BROKERS)] for _ in range(2))
    ports = [",".join(map(str, each)) for each in (clients, copies)]
    directory.mkdir()
    started: list[Started] = []
    try:
        for number in range(BROKERS):
            command = [sys.executable, "-m", "bench.baseline_cluster", str(number), *ports]
            own = directory / f"baseline-{number}"
            started.append(Started([*command, str(own)], own.with_suffix(".log")))
        for one in started:
            one.wait_for("ready")
        yield Side(
            [ProduceTarget(port, "baseline") for port in clients], [one.process.pid for one in started]
        )
    finally:
        for one in started:
            one.stop()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def brokers(directory: Path) -> Iterator[tuple[str, int]]:
    """A cluster: its addresses, and the process that started it."""
    command = [sys.executable, "-m", "mansio.cli.main", "dev-cluster", "--brokers", str(BROKERS)]
    started = Started([*command, "--data", str(directory / "cluster")], directory / "cluster.log")
    try:
        line = started.wait_for("dev-cluster ready")
        addresses = next(word for word in line.split() if word.startswith("kafka=")).removeprefix("kafka=")
        yield addresses, started.process.pid
    finally:
        started.stop()


@contextmanager
def topics(bootstrap_servers: str, process: int, name: str) -> Iterator[Side]:
    """A topic for each leader, deleted afterwards; each got a record, so that its leader is active."""
    made: list[str] = []
    found: dict[int, str] = {}
    number = 0
    with blocking.connect(bootstrap_servers) as client:
        try:
            ports = {one.node_id: one.port for one in client.admin.cluster.status().brokers}
            while len(found) < BROKERS:
                if number == TOPICS_MAX:
                    raise RuntimeError(f"only brokers {sorted(found)} lead anything")
                made.append(f"{name}-{number}")
                number += 1
                client.admin.create_topic(made[-1], partitions=1, replication_factor=BROKERS)
                (partition,) = client.admin.cluster.partitions([made[-1]])
                if found.setdefault(partition.leader, made[-1]) != made[-1]:
                    client.admin.delete_topic(made.pop())
            for topic in made:
                client.publish_many(topic, [b"first"])
            yield Side(
                [ProduceTarget(ports[node_id], topic) for node_id, topic in sorted(found.items())], [process]
            )
        finally:
            for topic in made:
                client.admin.delete_topic(topic)


def load(case: Case, side: Side, seconds: float) -> dict[str, float]:
    """Run the producers of a case concurrently: sums, worst percentiles, and processor time per batch."""
    command = [sys.executable, "-m", "bench.load", "produce", "--acks", "-1", "--size", "100"]
    command += [
        "--records",
        str(case.records),
        "--connections",
        str(case.connections),
        "--depth",
        str(case.depth),
    ]
    command += ["--seconds", str(seconds), "--warm-up", str(WARM_UP_S), "--bytes", str(BYTES_MAX)]
    began_s = side.processor_s()
    running = [
        subprocess.Popen(
            [*command, "--port", str(place.port), "--topic", place.topic], stdout=subprocess.PIPE, text=True
        )
        for place in side.places[: case.producers]
    ]
    results: list[dict[str, Any]] = []
    for process in running:
        output, _ = process.communicate(timeout=LOAD_S)
        if process.returncode:
            raise RuntimeError(f"the load ended with {process.returncode}")
        results.append(json.loads(output))
    batches = sum(one["requests"] * (1 + WARM_UP_S / one["seconds"]) for one in results)
    return {
        "records_per_s": sum(one["records_per_s"] for one in results),
        "megabytes_per_s": sum(one["megabytes_per_s"] for one in results),
        "processor_us": (side.processor_s() - began_s) / batches * 1e6,
        "p50_ms": max(one["p50_us"] for one in results) / 1000,
        "p99_ms": max(one["p99_us"] for one in results) / 1000,
    }


def measure(case: Case, sides: dict[str, Side], times: int, seconds: float) -> dict[str, Any]:
    """`times` pairs; the medians, the spread and the ratio per pair."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(times):
        for name in sorted(sides, reverse=bool(number % 2)):
            runs[name].append(load(case, sides[name], seconds))
    ratios = [
        ours["records_per_s"] / theirs["records_per_s"]
        for ours, theirs in zip(runs["mansio"], runs["baseline"], strict=True)
    ]
    return {"case": case.name, "ratio_min": case.ratio_min, "ratios": ratios, **runs}


def show(outcome: dict[str, Any]) -> str:
    ours, theirs = outcome["mansio"], outcome["baseline"]

    def middle(runs: list[dict[str, float]], figure: str) -> float:
        return statistics.median(run[figure] for run in runs)

    rates = [run["records_per_s"] for run in ours]
    ratios = outcome["ratios"]
    missed = outcome["ratio_min"] and statistics.median(ratios) < outcome["ratio_min"]
    below = f"  BELOW {outcome['ratio_min']}" if missed else ""
    return (
        f"{outcome['case']:38} {middle(ours, 'records_per_s'):10,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) records/s "
        f"{middle(ours, 'megabytes_per_s'):7.1f} MB/s  p50 {middle(ours, 'p50_ms'):6.1f}  p99 "
        f"{middle(ours, 'p99_ms'):6.1f} ms  baseline {middle(theirs, 'records_per_s'):10,.0f}  ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}){below}  processors "
        f"{middle(ours, 'processor_us'):,.0f} us/batch, baseline {middle(theirs, 'processor_us'):,.0f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="pairs of each case")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each run after the warm-up")
    parser.add_argument("--directory", help="parent of the temporary data directory")
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write all runs to this file")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="mansio-bench-cluster-", dir=options.directory))
    outcomes = []
    try:
        with brokers(directory) as (bootstrap_servers, process):
            processors = len(os.sched_getaffinity(0))
            print(
                f"Mansio {__version__}, 3 brokers, 3 replicas, acks=all, 100 B; {processors} processors; "
                f"Python {interpreter()}",
                flush=True,
            )
            for number, case in enumerate(CASES):
                if options.only and options.only not in case.name:
                    continue
                name = f"case-{number}"
                with baseline(directory / name) as bare, topics(bootstrap_servers, process, name) as led:
                    sides = {"baseline": bare, "mansio": led}
                    outcomes.append(measure(case, sides, options.times, options.seconds))
                print(show(outcomes[-1]), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1))
    missed = [
        one for one in outcomes if one["ratio_min"] and statistics.median(one["ratios"]) < one["ratio_min"]
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
