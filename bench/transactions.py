"""`python -m bench.transactions`: cost of transactions, with confluent-kafka as client, beside Apache Kafka.

    produce     batches of 100 records of 100 B: one idempotent stream, the same with a wait after each 10 and 100
                batches, and transactions of 10 and of 100 batches
    commit      transactions of one record in each of 1 and 64 partitions, one after the other: time of the commit, of
                EndTxn alone (without a client library), and until a reader with read_committed has all records;
                beside the duration of a flush of this disk in the same run
    syncs       flushes (fsync and similar calls) of the server per transaction, counted with strace
    memory      memory of Mansio for records behind an open transaction, beside the same without one

Apache Kafka runs if tools/peer_servers.sh has fetched it; its data topics, offsets and transaction topics have
`flush.messages=1`, so that both are durable. Servers run on one processor, the load generator on another one. Rounds
alternate between servers and kinds. Requests are counted by the client, so that each one that was sent again shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient, NewTopic

from bench.peers import apache_kafka, mansio_broker
from bench.peers.peer import PeerUnavailableError, ServerLocation
from bench.peers.server import Server, free_port
from bench.peers.syncs import sync_times
from bench.peers.workloads import STARTED_WAIT_S, wait_until_quiet
from mansio.host.disk import HostDisk

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD_SECONDS_MAX = 300
FLUSH_BYTES = 1024
FLUSHES = 100
PRODUCE_KINDS = {
    "idempotent": (0, 0),
    "idempotent, wait per 10": (0, 10),
    "idempotent, wait per 100": (0, 100),
    "10 a transaction": (10, 0),
    "100 a transaction": (100, 0),
}
"""Kind -> batches per transaction, batches until the producer waits."""
PAIRS = (
    ("10 a transaction", "idempotent", 0.6),
    ("100 a transaction", "idempotent", 0.9),
    ("10 a transaction", "idempotent, wait per 10", 0.0),
    ("100 a transaction", "idempotent, wait per 100", 0.0),
)
"""Kinds that are compared round by round, and the required ratio."""
PARTITIONS = (1, 64)
COMMIT_KINDS = (
    ("commit", "commit", 1),
    ("commit", "readable", 1),
    ("commit", "commit", 64),
    ("commit", "readable", 64),
    ("end", "EndTxn", 1),
)
"""Kind of load, what is timed, partitions."""
CASES = ("produce", "commit", "syncs", "memory")
SERVERS = {"mansio": mansio_broker.serve, "kafka": apache_kafka.serve}


@dataclass(slots=True)
class Found:
    """Results of all rounds: figures by server and kind, and requests per transaction."""

    figures: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; all, if there is none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2_000, help="of a round of produce")
    parser.add_argument("--transactions", type=int, default=200, help="of a round of commit")
    parser.add_argument("--records", type=int, default=1_000_000, help="of memory")
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--directory", default=None, help="where the servers keep their data")
    options = parser.parse_args()
    cases = options.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if {"produce", "commit"} & set(cases):
            with running(Path(directory), options.servers.split(","), traced=False) as servers:
                if "produce" in cases:
                    measure_produce(servers, options)
                if "commit" in cases:
                    measure_commit(servers, Path(directory), options)
        if "syncs" in cases:
            count_syncs(Path(directory), options)
        if "memory" in cases:
            measure_memory(Path(directory), options)


# ---------------------------------------------------------------------- cases


def measure_produce(servers: dict[str, Server], options: argparse.Namespace) -> None:
    found, load = Found(), [os.getloadavg()[0]]
    for number in range(-1, options.rounds):  # the first round is the warm-up
        for name, server in turned(servers, number):
            for kind, (per_transaction, per_flush) in PRODUCE_KINDS.items():
                spec = {
                    "batches": options.batches,
                    "per_transaction": per_transaction,
                    "per_flush": per_flush,
                }
                used = server.cpu_s()
                result = run_load(server, "produce", 1, spec)
                used = server.cpu_s() - used
                if number < 0:
                    continue
                found.figures[name, kind].append(result["records"] / result["seconds"])
                found.samples[name, kind].append(used / options.batches * 1e6)
                add_requests(found, (name, kind), result)
        load.append(os.getloadavg()[0])
    print(f"\nproduce, {options.rounds} rounds of {options.batches} batches, load {spread(load, '.1f')}")
    for (name, kind), rates in found.figures.items():
        cpu_us = statistics.median(found.samples[name, kind])
        print(f"  {name:7} {kind:25} {spread(rates):>30} records/s   server {cpu_us:6.0f} us/batch")
    for name in servers:
        for kind, reference, ratio_min in PAIRS:
            ratios = pairwise(found.figures[name, kind], found.figures[name, reference])
            required = f"   required {ratio_min}" if ratio_min else ""
            print(f"  {name:7} {kind} / {reference}: {spread(ratios, '.2f')}{required}")
    compare(found, servers)
    print_requests(found)


def measure_commit(servers: dict[str, Server], directory: Path, options: argparse.Namespace) -> None:
    found, load, flushes = Found(), [os.getloadavg()[0]], []
    for number in range(-1, options.rounds):
        flushes += flush_times_s(directory) if number >= 0 else []
        for name, server in turned(servers, number):
            for kind, what, partitions in COMMIT_KINDS:
                count = max(20, options.transactions // (1 if partitions == 1 else 4))
                spec = {"partitions": partitions, "transactions": count, "reads": what == "readable"}
                result = run_load(server, kind, partitions, spec)
                if number < 0:
                    continue
                named = f"{what}, {partitions} partition{'s' if partitions > 1 else ''}"
                times = result[f"{'readable' if what == 'readable' else 'commit'}_s"]
                found.samples[name, named] += times
                found.figures[name, named].append(statistics.median(times))
                add_requests(found, (name, named), result)
        load.append(os.getloadavg()[0])
    flush_s = statistics.median(flushes)
    print(
        f"\ncommit, {options.rounds} rounds of {options.transactions} transactions, load {spread(load, '.1f')}"
    )
    print(
        f"  a flush of {FLUSH_BYTES} B: p50 {flush_s * 1e3:.2f} ms, p99 {percentile(flushes, 99) * 1e3:.2f} ms"
    )
    for (name, kind), times in found.samples.items():
        p50, p99 = statistics.median(times), percentile(times, 99)
        medians = [each * 1e3 for each in found.figures[name, kind]]
        print(
            f"  {name:7} {kind:24} p50 {p50 * 1e3:6.2f} ms ({min(medians):.2f}-{max(medians):.2f}),"
            f" p99 {p99 * 1e3:6.2f} ms   p50 is {p50 / flush_s:.1f} flushes"
        )
    for name in servers:
        for what in ("commit", "readable"):
            many, one = (found.figures[name, f"{what}, {kind}"] for kind in ("64 partitions", "1 partition"))
            print(f"  {name:7} {what}, 64 partitions / 1 partition: {spread(pairwise(many, one), '.2f')}")
    print_requests(found)


def count_syncs(directory: Path, options: argparse.Namespace) -> None:
    """Count flushes in a run of its own, because strace slows the server down."""
    print("\nsyncs: flushes of the server per transaction")
    with running(directory, options.servers.split(","), traced=True) as servers:
        for name, server in servers.items():
            runs = []
            for partitions in PARTITIONS:
                spec = {"partitions": partitions, "transactions": 100, "reads": False}
                result = run_load(server, "commit", partitions, spec)
                runs.append((f"one record in {partitions} partition(s), one after the other", result))
            for per_transaction in (10, 100):
                spec = {"batches": 1_000, "per_transaction": per_transaction, "per_flush": 0}
                runs.append((f"{per_transaction} batches", run_load(server, "produce", 1, spec)))
            trace = server.place.trace
            server.stop()
            assert trace is not None
            times = sync_times(trace)
            for kind, result in runs:
                during = sum(1 for each in times if result["began"] <= each <= result["ended"])
                print(f"  {name:7} {kind}: {during / result['transactions']:.1f}")


def measure_memory(directory: Path, options: argparse.Namespace) -> None:
    print(f"\nmemory of Mansio, growth while {options.records:,} records are stored, after as many before")
    for is_open in (False, True):
        with running(directory, ["mansio"], traced=False) as servers:
            (server,) = servers.values()
            topic = new_topic(server, 1)
            spec = {"kind": "behind", "port": server.place.port, "topic": topic, "open": is_open}
            process = start_load({**spec, "records": options.records})
            assert process.stdout is not None
            assert process.stdin is not None
            sizes = []
            for _ in range(2):
                process.stdout.readline()
                sizes.append(sum(each.memory_info().rss for each in server.tree()))
                process.stdin.write("\n")
                process.stdin.flush()
            process.communicate(timeout=LOAD_SECONDS_MAX)
            kind = "behind an open transaction, a reader waits" if is_open else "without a transaction"
            growth = sizes[1] - sizes[0]
            print(
                f"  {kind}: {sizes[1] >> 20} MiB, growth {growth / (1 << 20):.1f} MiB,"
                f" {growth / options.records:.2f} B a record"
            )


# ---------------------------------------------------------------------- servers and load


@contextmanager
def running(directory: Path, names: list[str], *, traced: bool) -> Iterator[dict[str, Server]]:
    """The servers that can run here, on the first processor."""
    processor = min(os.sched_getaffinity(0))
    servers: dict[str, Server] = {}
    try:
        for name in names:
            trace = directory / f"{name}.trace" if traced else None
            place = ServerLocation(directory / name, free_port(), trace)
            place.directory.mkdir()
            try:
                servers[name] = SERVERS[name](place)
            except PeerUnavailableError as error:
                print(f"{name} does not run: {error}")
                continue
            pin(servers[name], processor)
        wait_until_quiet(STARTED_WAIT_S)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def pin(server: Server, processor: int) -> None:
    """Run all threads of a server on one processor."""
    for process in server.tree():
        for thread in process.threads():
            try:
                os.sched_setaffinity(thread.id, {processor})
            except ProcessLookupError:
                continue


def turned(servers: dict[str, Server], number: int) -> list[tuple[str, Server]]:
    """The servers, beginning with another one in each round."""
    entries = list(servers.items())
    first = number % max(1, len(entries))
    return entries[first:] + entries[:first]


def admin(server: Server) -> AdminClient:
    return AdminClient({"bootstrap.servers": f"127.0.0.1:{server.place.port}", "log_level": 0})


def new_topic(server: Server, partitions: int) -> str:
    name = f"topic-{time.monotonic_ns()}"
    topic = NewTopic(name, partitions, 1)
    client = admin(server)
    client.create_topics([topic])[name].result(30)
    return name


def run_load(server: Server, kind: str, partitions: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Run the load generator with a topic of its own; return what it printed."""
    topic = new_topic(server, partitions)
    process = start_load({"kind": kind, "port": server.place.port, "topic": topic, **spec})
    output, _ = process.communicate(timeout=LOAD_SECONDS_MAX)
    if process.returncode:
        raise RuntimeError(f"the load generator failed with {process.returncode}")
    client = admin(server)
    client.delete_topics([topic])[topic].result(30)
    result: dict[str, Any] = json.loads(output)
    return result


def start_load(spec: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.transactions_load", json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    return process


def flush_times_s(directory: Path) -> list[float]:
    """Durations of a write at the end of a file and its flush, as a broker does it for one record."""
    disk = HostDisk()
    path = directory / "flushes"
    file = disk.open(str(path), create=True)
    times = []
    for number in range(FLUSHES):
        file.write_at([bytes(FLUSH_BYTES)], number * FLUSH_BYTES)
        began = time.perf_counter()
        file.sync()
        times.append(time.perf_counter() - began)
    disk.close()
    path.unlink()
    return times


# ---------------------------------------------------------------------- figures


def percentile(values: list[float], part: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * part // 100)]


def pairwise(values: list[float], references: list[float]) -> list[float]:
    return [value / reference for value, reference in zip(values, references, strict=True)]


def spread(values: list[float], form: str = ",.0f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def compare(found: Found, servers: dict[str, Server]) -> None:
    if len(servers) > 1:
        for kind in PRODUCE_KINDS:
            ratios = pairwise(found.figures["mansio", kind], found.figures["kafka", kind])
            print(f"  mansio / kafka, {kind}: {spread(ratios, '.2f')}")


def add_requests(found: Found, key: tuple[str, str], result: dict[str, Any]) -> None:
    found.requests[key].update(result["requests"])
    found.requests[key]["transactions"] += result["transactions"]


def print_requests(found: Found) -> None:
    """A transaction takes one EndTxn and, of one partition, one AddPartitionsToTxn; more of them were sent again."""
    for (name, kind), counted in found.requests.items():
        if counted["transactions"]:
            counts = ", ".join(f"{what} {number}" for what, number in counted.items())
            print(f"  {name:7} {kind}: {counts}")


if __name__ == "__main__":
    main()
