"""`python -m bench.http_json`: the HTTP API, measured by a load generator in a process of its own.

    batch      batches of 1,000 records of 100 B as JSON, over two connections
    single     one record of 100 B per request, over eight keep-alive connections; each answer means that it is durable
    receive    records received and acknowledged in a share group, 100 per request, over four connections

The broker runs on one processor, the load generator on another one. What was published is read back over Kafka's
protocol: each record exactly once. What was received is acknowledged exactly once: the group has no lag.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench.http_json_load import value_of
from bench.servers import Server, create_topic, free_port
from mansio.client import blocking

SIZE = 100
BATCH = 1_000
CASES = {"batch": (2, BATCH), "single": (8, 1), "receive": (4, 100)}
"""Case -> connections, records per request."""

LOAD_SECONDS_MAX = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="batch, single, receive; all, if there is none")
    parser.add_argument(
        "--records", type=int, default=500_000, help="of batch; single: a 20th, receive: a 5th"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cases = arguments.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    counts = {
        "batch": arguments.records,
        "single": arguments.records // 20,
        "receive": arguments.records // 5,
    }
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            for number in range(arguments.rounds):
                measure(Path(directory) / f"{case}{number}", case, max(counts[case] // BATCH, 1) * BATCH)


def measure(data: Path, case: str, count: int) -> None:
    """Run one case against a broker of its own, verify it, and print its figures."""
    processors = sorted(os.sched_getaffinity(0))
    http = free_port()
    server = start(data, http, processors[0])
    try:
        create_topic(server, case, 1)
        if case == "receive":
            configure_group(http, case)
            load(http, "batch", case, count, processors[-1])
        server.wait_idle()
        used = server.cpu_precise_s()
        found = load(http, case, case, count, processors[-1])
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


def start(data: Path, http: int, processor: int) -> Server:
    port = free_port()
    serve = ["serve", "--data", str(data), "--kafka", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{http}"]
    server = Server([sys.executable, "-m", "mansio.cli.main", *serve], port, data, processor, b"ready")
    server.wait_idle()
    return server


def load(http: int, case: str, topic: str, count: int, processor: int) -> dict[str, Any]:
    """Run the load generator; return what it printed."""
    connections, per_request = CASES[case]
    spec = {
        "port": http,
        "case": case,
        "topic": topic,
        "count": count,
        "size": SIZE,
        "connections": connections,
        "per_request": per_request,
    }
    command = [sys.executable, "-m", "bench.http_json_load", json.dumps(spec)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, {processor})
        output, _ = process.communicate(timeout=LOAD_SECONDS_MAX)
    if process.returncode:
        raise RuntimeError(f"the load generator failed with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


def configure_group(http: int, group: str) -> None:
    body = json.dumps({"config": {"share.auto.offset.reset": "earliest"}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{http}/v1/groups/{group}/config",
        body,
        {"Content-Type": "application/json"},
        method="PATCH",
    )
    urllib.request.urlopen(request).close()


def verify_stored(server: Server, topic: str, count: int) -> None:
    """Raise `RuntimeError` unless the topic has each record exactly once."""
    missing = set(range(count))
    read = 0
    with (
        blocking.connect(f"127.0.0.1:{server.port}") as client,
        client.consume(topic, from_="earliest", to_end=True) as consumer,
    ):
        for message in consumer:
            number = int((message.value or b"")[:8])
            if (message.value or b"").decode() != value_of(number, SIZE):
                raise RuntimeError(f"record {message.offset} has another value")
            missing.discard(number)
            read += 1
    if missing or read != count:
        raise RuntimeError(f"{read} records were read back of {count}; {len(missing)} are missing")


def verify_acknowledged(http: int, group: str, acknowledged: int, count: int) -> None:
    """Raise `RuntimeError` unless each record is acknowledged exactly once and the group has no lag."""
    url = f"http://127.0.0.1:{http}/v1/groups/{group}/leases?topic={group}"
    with urllib.request.urlopen(url) as response:
        states = [each["state"] for each in json.load(response)["partitions"]]
    if acknowledged != count or any(state["lag"] or state["leased"] or state["dead"] for state in states):
        raise RuntimeError(f"{acknowledged} records were acknowledged of {count}; afterwards: {states}")


if __name__ == "__main__":
    main()
