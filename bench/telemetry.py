"""`python -m bench.telemetry [--before SOURCE]`: what tracing costs a client, in processor time.

    publish     a call of `publish_many` with 100 values of 100 B
    receive     a call of `poll` of a receiver that returns 100 records, and one of `ack` that acknowledges them

The client is not traced, traced without sampling, or traced and sampled, by OpenTelemetry's SDK without an exporter.
The variants take turns in one process, each with a client, a topic and a group of its own; the broker is another one.
Printed are the processor time of the client's process for a call, and the ratio to the client that is not traced: mean
of the pairs, with its 95 % interval. `--before`: the source of another version (a directory `src`), whose client takes
turns with that of this one, both without tracing, in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mansio
from bench.delays import address
from bench.servers import start_mansio
from mansio.net.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RECORDS = 100
VALUES = [bytes(100)] * RECORDS
CALLS = 200
"""Calls of a client in one turn."""
WARM_UP_CALLS = 100
STUDENT_95 = {10: 2.262, 20: 2.093, 40: 2.023}
"""Factor of a 95 % interval, by the number of pairs."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20, choices=STUDENT_95)
    parser.add_argument("--before", metavar="SOURCE", help="source of the version to compare with")
    parser.add_argument("--turn", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(asyncio.run(measure_untraced(arguments.turn))))
        return
    with tempfile.TemporaryDirectory() as directory:
        server = start_mansio(Path(directory) / "data", None)
        if arguments.before is None:
            asyncio.run(compare_variants(address(server), arguments.pairs))
        else:
            compare_versions(address(server), arguments.before, arguments.pairs)
        server.stop()


async def compare_variants(servers: str, pairs: int) -> None:
    variants = ("off", "not sampled", "sampled")
    measured: dict[str, dict[str, list[float]]] = {
        case: {variant: [] for variant in variants} for case in CASES
    }
    clients = {variant: client_of(variant, servers) for variant in variants}
    for number, client in enumerate(clients.values()):
        await client.__aenter__()
        for case in CASES:
            await client.admin.create_topic(f"{case}-{number}", partitions=1)
            await client.admin.alter_group_config(f"{case}-{number}", {"share.auto.offset.reset": "earliest"})
    for turn in range(pairs):
        order = variants if turn % 2 else variants[::-1]
        for variant in order:
            for case, measure in CASES.items():
                name = f"{case}-{variants.index(variant)}"
                measured[case][variant].append(await measure(clients[variant], name))
    for client in clients.values():
        await client.close()
    for case, found in measured.items():
        for variant in variants:
            report(f"{case}, {variant}", found[variant], found["off"])


def compare_versions(servers: str, before: str, pairs: int) -> None:
    sources = {"before": before, "now": str(Path(mansio.__file__).parent.parent)}
    found: dict[str, dict[str, list[float]]] = {case: {one: [] for one in sources} for case in CASES}
    for turn in range(pairs):
        for source in sources if turn % 2 else reversed(sources):
            command = [sys.executable, "-m", "bench.telemetry", "--turn", servers]
            environment = {**os.environ, "PYTHONPATH": sources[source]}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            for case, cost in json.loads(done.stdout).items():
                found[case][source].append(cost)
    for case in CASES:
        report(f"{case}, not traced, before", found[case]["before"], found[case]["before"])
        report(f"{case}, not traced, now", found[case]["now"], found[case]["before"])


async def measure_untraced(servers: str) -> dict[str, float]:
    """One turn of a client that is not traced, in a process of its own."""
    found = {}
    async with mansio.connect(servers) as client:
        for case, measure in CASES.items():
            name = f"{case}-{os.getpid()}"
            await client.admin.create_topic(name, partitions=1)
            await client.admin.alter_group_config(name, {"share.auto.offset.reset": "earliest"})
            found[case] = await measure(client, name)
    return found


def client_of(variant: str, servers: str) -> mansio.Client:
    if variant == "off":
        return mansio.Client(Cluster(servers))
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    from mansio.telemetry.client_telemetry import ClientTelemetry

    sampler = ALWAYS_ON if variant == "sampled" else ALWAYS_OFF
    providers = TracerProvider(sampler=sampler), MeterProvider([InMemoryMetricReader()])
    telemetry = ClientTelemetry(*providers, client_id="bench", server=("127.0.0.1", 9092))
    return mansio.Client(Cluster(servers), telemetry=telemetry)


async def measure_publish(client: mansio.Client, name: str) -> float:
    async def publish() -> None:
        await client.publish_many(name, VALUES)

    return await microseconds_per_call(publish)


async def measure_receive(client: mansio.Client, name: str) -> float:
    for _ in range(WARM_UP_CALLS + CALLS):
        await client.publish_many(name, VALUES)
    async with client.receive(name, group=name, max_records=RECORDS) as receiver:

        async def receive() -> None:
            count = 0
            while count < RECORDS:
                messages = await receiver.poll(max_records=RECORDS)
                await receiver.ack(messages)
                count += len(messages)

        return await microseconds_per_call(receive)


CASES: dict[str, Callable[[mansio.Client, str], Awaitable[float]]] = {
    "publish": measure_publish,
    "receive": measure_receive,
}


async def microseconds_per_call(call: Callable[[], Awaitable[Any]]) -> float:
    for _ in range(WARM_UP_CALLS):
        await call()
    began = time.process_time()
    for _ in range(CALLS):
        await call()
    return (time.process_time() - began) / CALLS * 1_000_000


def report(name: str, costs: list[float], base: list[float]) -> None:
    logs = [math.log(one / other) for one, other in zip(costs, base, strict=True)]
    mean = statistics.fmean(logs)
    error = STUDENT_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(mean - error), math.exp(mean + error)
    added = statistics.median(one - other for one, other in zip(costs, base, strict=True))
    print(
        f"{name}: median {statistics.median(costs):.0f} us ({min(costs):.0f}-{max(costs):.0f}),"
        f" {added:+.1f} us, ratio {math.exp(mean):.3f} ({low:.3f}-{high:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
