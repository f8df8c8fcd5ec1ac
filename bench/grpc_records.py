"""`python -m bench.grpc_records`: the gRPC API, measured by a load generator in a process of its own.

    publish    batches of 1,000 records of 100 B, unary calls on two channels, two open at a time on each
    stream     the same batches on two PublishStream streams, two unanswered at a time on each
    receive    records received and acknowledged in a share group on two Receive streams, 1,000 per response

The broker runs on one processor, the load generator on another one. What was published is read back over Kafka's
protocol: each record exactly once. What was received is acknowledged exactly once: the group has no lag.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.http_json import BATCH, LOAD_SECONDS_MAX, SIZE, configure_group, verify_acknowledged, verify_stored
from bench.servers import Server, create_topic, free_port

CHANNELS = 2
WINDOW = 2
CASES = ("publish", "stream", "receive")
RECEIVED_PART = 5
"""The records of `receive` are this part of the others."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="publish, stream, receive; all, if there is none")
    parser.add_argument(
        "--records", type=int, default=1_000_000, help="of publish and stream; receive: a 5th"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cases = arguments.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    rates: dict[str, list[float]] = {case: [] for case in cases}
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            for case in cases:
                count = arguments.records // (RECEIVED_PART if case == "receive" else 1)
                count = max(count // BATCH, 1) * BATCH
                rates[case].append(measure(Path(directory) / f"{case}{number}", case, count))
    print(f"load after: {os.getloadavg()[0]:.1f}")
    for case, found in rates.items():
        print(
            f"{case:8} median {statistics.median(found):9,.0f} ({min(found):,.0f} to {max(found):,.0f}) records/s"
        )


def measure(data: Path, case: str, count: int) -> float:
    """Run one case against a broker of its own, verify it, print its figures, and return its records per second."""
    processors = sorted(os.sched_getaffinity(0))
    http, port = free_port(), free_port()
    server = start(data, http, port, processors[0])
    try:
        create_topic(server, case, 1)
        if case == "receive":
            configure_group(http, case)
            load(port, "publish", case, count, processors[-1])
        server.wait_idle()
        used = server.cpu_precise_s()
        found = load(port, case, case, count, processors[-1])
        used = server.cpu_precise_s() - used
        if case == "receive":
            verify_acknowledged(http, case, found["done"], count)
        else:
            verify_stored(server, case, count)
    finally:
        server.stop()
    latency = "" if case == "receive" else f"   p50 {found['p50_ms']:.2f} ms p99 {found['p99_ms']:.2f} ms"
    print(
        f"{case:8} {count / found['seconds']:9,.0f} records/s   "
        f"broker {used / count * 1e6:6.2f} us/record, {used / found['seconds']:4.0%} of a processor   "
        f"generator {found['cpu_seconds'] / found['seconds']:4.0%}{latency}",
        flush=True,
    )
    return count / float(found["seconds"])


def start(data: Path, http: int, port: int, processor: int) -> Server:
    """Start a broker with gRPC on `port`. `http`: port of the HTTP API, which configures the group and verifies."""
    kafka = free_port()
    serve = ["serve", "--data", str(data), "--kafka", f"127.0.0.1:{kafka}"]
    serve += ["--http", f"127.0.0.1:{http}", "--grpc", f"127.0.0.1:{port}"]
    server = Server(
        [sys.executable, "-m", "mansio.cli.main", *serve], kafka, data, processor, b" ready kafka="
    )
    server.wait_idle()
    return server


def load(port: int, case: str, topic: str, count: int, processor: int) -> dict[str, Any]:
    """Run the load generator; return what it printed."""
    spec = {
        "port": port,
        "case": case,
        "topic": topic,
        "count": count,
        "size": SIZE,
        "channels": CHANNELS,
        "window": WINDOW,
        "per_request": BATCH,
    }
    command = [sys.executable, "-m", "bench.grpc_records_load", json.dumps(spec)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, {processor})
        output, _ = process.communicate(timeout=LOAD_SECONDS_MAX)
    if process.returncode:
        raise RuntimeError(f"the load generator failed with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


if __name__ == "__main__":
    main()
