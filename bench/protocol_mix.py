"""`python -m bench.protocol_mix`: time of Kafka's Produce requests while another protocol runs at half its rate.

    http      batches of 1,000 records of 100 B as JSON, over two connections
    keyed     such batches, whose records have a key and a header, too
    single    one record of 100 B per HTTP request, over eight connections
    grpc      batches of 1,000 records of 100 B, two unary calls at a time
    sqs       send, receive and delete of ten messages of 100 B, over eight connections

One broker with all listeners on one processor, both load generators on the other one. For each protocol: its rate at
full speed; then in turn Produce requests alone and beside half of this rate. A Produce request has one record of 100 B
and acks=all; 200 are due per second, and each is timed from when it is due.
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
from pathlib import Path
from typing import Any

from bench.protocol_mix_load import CONNECTIONS, OTHERS_TOPIC, RECORDS, TOPIC
from bench.servers import Server, create_topic, free_port

LEAD_S = 0.5
"""Time from the start of the other protocol's load to that of the Produce requests."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("protocols", nargs="*", help="http, keyed, single, grpc, sqs; all, if there is none")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    protocols = arguments.protocols or list(CONNECTIONS)
    if unknown := set(protocols) - set(CONNECTIONS):
        parser.error(f"no such protocol: {', '.join(sorted(unknown))}")
    for protocol in protocols:
        with tempfile.TemporaryDirectory() as directory:
            measure(Path(directory) / "data", protocol, arguments.seconds, arguments.rounds)


def measure(data: Path, protocol: str, seconds: float, rounds: int) -> None:
    """Measure beside one protocol, and print the figures."""
    ports = {name: free_port() for name in ("kafka", "http", "grpc", "sqs")}
    serve = ["serve", "--data", str(data)]
    for name, port in ports.items():
        serve += [f"--{name}", f"127.0.0.1:{port}"]
    processor = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "mansio.cli.main", *serve]
    server = Server(command, ports["kafka"], data, processor, b" ready kafka=")
    try:
        server.wait_idle()
        create_topic(server, TOPIC, 1)
        create_topic(server, OTHERS_TOPIC, 1)
        spec = {"protocol": protocol, "port": ports["http" if protocol in ("single", "keyed") else protocol]}
        full = finished(start("load", spec | {"seconds": seconds, "rate": 0.0}))["rate"]
        probe = {"port": server.port, "seconds": seconds}
        ratios = []
        for _ in range(rounds):
            alone = finished(start("produce", probe))
            load = start("load", spec | {"seconds": seconds + 2 * LEAD_S, "rate": full / 2})
            time.sleep(LEAD_S)
            beside = finished(start("produce", probe))
            rate = finished(load)["rate"]
            ratios.append(beside["p99_ms"] / alone["p99_ms"])
            print(
                f"{protocol:7} {rate * RECORDS[protocol]:9,.0f} of {full * RECORDS[protocol]:9,.0f} records/s   Produce"
                f" p50 {alone['p50_ms']:.2f} ms alone, {beside['p50_ms']:.2f} beside   p99 {alone['p99_ms']:.2f}"
                f" alone, {beside['p99_ms']:.2f} beside: {ratios[-1]:.2f} times   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        print(
            f"{protocol:7} p99 beside it: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to"
            f" {max(ratios):.2f}) times that alone"
        )
    finally:
        server.stop()


def start(kind: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a load generator: `load` or `produce`."""
    command = [sys.executable, "-m", "bench.protocol_mix_load", kind, json.dumps(spec)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    return process


def finished(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return what a load generator printed at its end."""
    output, _ = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError(f"a load generator failed with {process.returncode}")
    found: dict[str, float] = json.loads(output)
    return found


if __name__ == "__main__":
    main()
