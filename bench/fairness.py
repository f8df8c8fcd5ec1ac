"""`python -m bench.fairness`: a share group with `mansio.share.fair`, beside the same without it.

    wait       time that records of many tenants wait in the queue, while one more has a large backlog
    single     rate of one member that accepts one record and takes the next one, when no key has a backlog
    batches    the same with 100 records at a time
    restart    time from the start of the broker to the first record, with the backlog waiting

Workers of `wait` are one process with asynchronous members, each of which takes a few milliseconds for a record;
tenants publish at a part of the rate that the workers could handle. Times are those of one machine's clock, in the
records' values.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import mansio
from bench.key_order import answer
from bench.servers import Server, create_topic, start_mansio
from bench.share_frames import ShareFetches, acquired
from mansio import OutgoingRecord
from mansio.client import blocking

if TYPE_CHECKING:
    from collections.abc import Iterable

SEED = 11
_TIME = struct.Struct(">d")
NOISY = b"noisy"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["wait", "single", "batches", "restart"])
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--backlog", type=int, default=1_000_000, help="records of the noisy tenant")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--work-ms", type=float, default=20.0, help="time that a record takes a worker")
    parser.add_argument("--load", type=float, default=0.65, help="part of the workers' time that tenants use")
    parser.add_argument(
        "--skip", type=float, default=5.0, help="seconds at the begin that are reported apart"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--records", type=int, default=20_000, help="of `single` and `batches`")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as directory:
            data = Path(directory) / "data"
            server = start_mansio(data, None)
            try:
                if case == "wait":
                    measure_waits(server, arguments)
                elif case == "restart":
                    server = measure_restart(server, data, arguments)
                else:
                    measure_rates(server, 1 if case == "single" else 100, case, arguments)
            finally:
                server.stop()


def configure(client: blocking.Client, group: str, *, is_fair: bool) -> None:
    settings = {"share.auto.offset.reset": "earliest", "mansio.share.fair": str(is_fair).lower()}
    client.admin.alter_group_config(group, settings)


def publish(server: Server, topic: str, keys: Iterable[bytes], *, value: bytes = bytes(100)) -> None:
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        client.publish_many(topic, [OutgoingRecord(value, key=key) for key in keys])


# ---------------------------------------------------------------------- time in the queue


def measure_waits(server: Server, arguments: argparse.Namespace) -> None:
    quiet = asyncio.run(waits(server, "quiet", arguments, backlog=0, is_fair=False))
    report("others alone", quiet, arguments.skip)
    for is_fair in (True, False):
        name = "fair" if is_fair else "unfair"
        report(
            f"others beside a backlog, {name}",
            asyncio.run(waits(server, name, arguments, backlog=arguments.backlog, is_fair=is_fair)),
            arguments.skip,
        )


def report(name: str, found: list[tuple[float, float]], skip: float) -> None:
    began = min((at for at, _ in found), default=0.0)
    for part, is_begin in ((f"first {skip:.0f} s", True), ("then", False)):
        report_part(f"{name}, {part}", sorted(wait for at, wait in found if (at < began + skip) == is_begin))


def report_part(name: str, found: list[float]) -> None:
    if not found:
        print(f"{name}: no record was delivered", flush=True)
        return
    values = [found[min(int(len(found) * part), len(found) - 1)] * 1000 for part in (0.5, 0.99, 1.0)]
    print(
        f"{name}: {len(found):,} records waited {values[0]:.1f} ms (median), {values[1]:.1f} (p99),"
        f" {values[2]:.1f} (max); load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


async def waits(
    server: Server, topic: str, arguments: argparse.Namespace, *, backlog: int, is_fair: bool
) -> list[tuple[float, float]]:
    """Return when records of the tenants were delivered, and for how long each had waited, in seconds."""
    create_topic(server, topic, 1)
    found: list[tuple[float, float]] = []
    rate = arguments.workers * 1000 / arguments.work_ms * arguments.load
    async with mansio.connect(f"127.0.0.1:{server.port}") as client:
        settings = {"share.auto.offset.reset": "earliest", "mansio.share.fair": str(is_fair).lower()}
        await client.admin.alter_group_config(topic, settings)
        for first in range(0, backlog, 10_000):
            count = min(10_000, backlog - first)
            await client.publish_many(topic, [OutgoingRecord(b"", key=NOISY)] * count)
        end = time.monotonic() + arguments.seconds
        workers = [
            asyncio.create_task(work(client, topic, arguments, found, end)) for _ in range(arguments.workers)
        ]
        chance = random.Random(SEED)
        while (now := time.monotonic()) < end - 1:
            tenants = [
                b"tenant-%d" % chance.randrange(arguments.tenants) for _ in range(max(round(rate / 50), 1))
            ]
            await client.publish_many(topic, [OutgoingRecord(_TIME.pack(now), key=each) for each in tenants])
            await asyncio.sleep(max(now + 0.02 - time.monotonic(), 0))
        await asyncio.gather(*workers)
    return found


async def work(
    client: mansio.Client,
    topic: str,
    arguments: argparse.Namespace,
    found: list[tuple[float, float]],
    end: float,
) -> None:
    async with client.receive(topic, group=topic, prefetch=0) as receiver:
        done = None
        while time.monotonic() < end:
            message = await receiver.receive_next(done, timeout_ms=500)
            done = message
            if message is not None:
                if message.key != NOISY:
                    now = time.monotonic()
                    found.append((now, now - _TIME.unpack(message.value or b"")[0]))
                await asyncio.sleep(arguments.work_ms / 1000)
        if done is not None:
            await done.ack()


# ---------------------------------------------------------------------- rates


def measure_rates(server: Server, batch: int, name: str, arguments: argparse.Namespace) -> None:
    chance = random.Random(SEED)
    records = arguments.records * (10 if batch > 1 else 1)
    create_topic(server, name, 1)
    publish(server, name, [b"tenant-%d" % chance.randrange(arguments.tenants) for _ in range(records)])
    ratios = []
    for number in range(arguments.rounds):
        rates = {}
        for is_fair in (False, True) if number % 2 else (True, False):
            rates[is_fair] = rate_of(
                server, name, f"{name}-{number}-{is_fair}", batch, records, is_fair=is_fair
            )
        ratios.append(rates[True] / rates[False])
    print(
        f"{name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the rate without"
        f" fairness; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def rate_of(server: Server, topic: str, group: str, batch: int, records: int, *, is_fair: bool) -> float:
    """Take and accept all records; return the number per second."""
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        configure(client, group, is_fair=is_fair)
        topic_id = bytes(client.admin.describe_topic(topic).topic_id)
    fetches, done = ShareFetches(group, "member", topic_id), 0
    leased: list[tuple[int, int]] = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        reader = connection.makefile("rb")
        began = time.perf_counter()
        while done < records or leased:
            connection.sendall(fetches.request(batch if done < records else 0, leased))
            leased = acquired(answer(reader))
            done += sum(last - first + 1 for first, last in leased)
        return done / (time.perf_counter() - began)


# ---------------------------------------------------------------------- restart


def measure_restart(server: Server, data: Path, arguments: argparse.Namespace) -> Server:
    create_topic(server, "restart", 1)
    for first in range(0, arguments.backlog, 100_000):
        publish(server, "restart", [NOISY] * min(100_000, arguments.backlog - first))
    publish(server, "restart", [b"tenant-%d" % number for number in range(100)])
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        configure(client, "restart", is_fair=True)
        take_tenants(client, 100)
    server.end()
    began = time.perf_counter()
    server = start_mansio(data, None)
    started = time.perf_counter()
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        publish(server, "restart", [b"tenant-new"])
        seen = take_tenants(client, 1)
    print(
        f"restart with {arguments.backlog:,} waiting: the broker {started - began:.2f} s, then"
        f" {time.perf_counter() - started:.2f} s to a tenant's first record, after {seen:,} of the noisy one",
        flush=True,
    )
    return server


def take_tenants(client: blocking.Client, count: int) -> int:
    """Take and accept records until so many of other tenants came; return the number of those of the noisy one."""
    noisy = 0
    with client.receive("restart", group="restart", max_records=10, prefetch=0) as receiver:
        while count > 0:
            messages = receiver.poll(max_records=10, timeout_ms=10_000)
            receiver.ack(messages)
            others = sum(message.key != NOISY for message in messages)
            count -= others
            noisy += len(messages) - others
    return noisy


if __name__ == "__main__":
    main()
