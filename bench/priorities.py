"""`python -m bench.priorities`: records with priorities in one partition of a share group.

    urgent     time from the acknowledgement of a record of high priority until a consumer has it that takes one record
               at a time from a backlog of a million records of low priority
    flat       a million records of high priority, among a million of low priority in the log, are delivered and
               acknowledged, and of these the few that avoid starvation: memory of the broker, size of the stored state,
               time of a restart
    rate       records per second that are received and acknowledged, beside a topic without the setting
    bytes      bytes sent per byte acquired, from batches with records of all priorities and of one priority

The client is a Python program on the same machine; its processor time competes with the broker's.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import mansio
from bench.delays import address, percentile
from bench.servers import start_mansio
from mansio.client import OutgoingRecord

if TYPE_CHECKING:
    from mansio.client import Leased

TOPIC = "work"
VALUE = bytes(100)
SETTING = {"mansio.priority.enable": "true"}
URGENT_RECORDS = 400
PARTS = 10
RATE_RECORDS_MAX = 100_000
RATE_ROUNDS = 5
BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000, help="records of each priority")
    parser.add_argument("--cases", default=",".join(CASES), help="of the above, separated by commas")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for case in arguments.cases.split(","):
            asyncio.run(CASES[case](Path(directory) / case, arguments.records))


async def measure_urgent(data: Path, count: int) -> None:
    server = start_mansio(data, None)
    async with mansio.connect(address(server)) as client:
        await prepare(client, TOPIC)
        await publish(client, ["low"] * count)
        published: dict[bytes, float] = {}
        late_ms: list[float] = []
        total = 0

        async def work() -> None:
            nonlocal total
            async with client.receive(TOPIC, group=TOPIC, max_records=1) as receiver:
                while len(late_ms) < URGENT_RECORDS:
                    for message in await receiver.poll(max_records=1):
                        total += 1
                        moment = published.pop(message.value or b"", None)
                        if moment is not None:
                            late_ms.append((time.monotonic() - moment) * 1000)
                        await message.ack()

        began = time.monotonic()
        worker = asyncio.ensure_future(work())
        async with mansio.connect(address(server)) as other:
            for number in range(URGENT_RECORDS):
                value = b"urgent %d" % number
                published[value] = time.monotonic()
                await other.publish(TOPIC, value, priority="high")
                if value in published:
                    published[value] = time.monotonic()
                await asyncio.sleep(0.05)
        await worker
    print(
        f"urgent: {len(late_ms)} records over {count:,} of low priority: median {statistics.median(late_ms):.1f} ms,"
        f" p99 {percentile(late_ms, 99):.1f} ms, maximum {max(late_ms):.1f} ms;"
        f" {total / (time.monotonic() - began):,.0f} records a second, one at a time"
    )
    server.stop()


async def measure_flat(data: Path, count: int) -> None:
    server = start_mansio(data, None)
    async with mansio.connect(address(server)) as client:
        await prepare(client, TOPIC)
        await publish(client, [("low", "high")[number // BATCH % 2] for number in range(2 * count)])
    print(f"flat: {'acknowledged':>12} {'memory MiB':>10} {'state KiB':>9} {'restart s':>9} {'records/s':>9}")
    done, rate = 0, 0.0
    for part in range(PARTS + 1):
        wanted = part * count // PARTS - done
        if wanted > 0:
            began = time.monotonic()
            async with mansio.connect(address(server)) as client:
                taken = await take(client, wanted, "high")
            done, rate = done + taken, taken / (time.monotonic() - began)
        memory = server.resident_bytes()
        server.end(signal.SIGKILL)
        server = start_mansio(data, None)  # which releases the space that is allocated ahead
        state = log_bytes(data, "__share_group_state")
        print(f"flat: {done:12,} {memory >> 20:10} {state >> 10:9} {server.ready_s:9.2f} {rate:9,.0f}")
    server.stop()


async def measure_rate(data: Path, records_max: int) -> None:
    count = min(records_max, RATE_RECORDS_MAX)
    for round_number in range(RATE_ROUNDS):
        found, costs = {}, {}
        for config in (SETTING, {}) if round_number % 2 else ({}, SETTING):
            server = start_mansio(data / f"{round_number}{len(config)}", None)
            async with mansio.connect(address(server)) as client:
                await prepare(client, TOPIC, config)
                names = ["high", "normal", "low"] if config else [None]
                records = [
                    OutgoingRecord(VALUE, priority=names[number // BATCH % len(names)])
                    for number in range(count)
                ]
                await client.publish_many(TOPIC, records)
                began, used_s, client_s = time.monotonic(), server.cpu_s(), time.process_time()
                await take(client, count, None)
                found[bool(config)] = count / (time.monotonic() - began)
                used = server.cpu_s() - used_s, time.process_time() - client_s
                costs[bool(config)] = " + ".join(f"{each / count * 1e6:.1f}" for each in used)
            server.stop()
        print(
            f"rate: {found[True]:,.0f} a second with three priorities, {found[False]:,.0f} without:"
            f" {found[True] / found[False]:.2f}; processor time of broker and client per record, us: {costs[True]}"
            f" and {costs[False]}"
        )


async def measure_bytes(data: Path, _: int) -> None:
    names = ("high", "normal", "low")
    for kind in ("mixed", "separate"):
        with mansio.Broker(data / kind) as broker:
            async with mansio.connect(broker.address) as client:
                await prepare(client, TOPIC)
                if kind == "mixed":  # as stock clients send them
                    headers = [(("mansio-priority", name.encode()),) for name in names]
                    records = [OutgoingRecord(VALUE, headers=headers[number % 3]) for number in range(30_000)]
                else:
                    records = [OutgoingRecord(VALUE, priority=names[number % 3]) for number in range(30_000)]
                await client.publish_many(TOPIC, records)
                await take(client, len(records), None)
                assert broker._broker is not None
                sent = broker._broker.service.fetch.counters.fetched_bytes
        print(
            f"bytes: {kind} batches: {sent / log_bytes(data / kind, TOPIC):.2f} bytes sent per byte acquired"
        )


def log_bytes(data: Path, topic: str) -> int:
    """Size of the logs of a topic."""
    paths = (path for path in data.rglob("*.log") if path.parent.parent.name.startswith(topic))
    return sum(path.stat().st_size for path in paths)


async def prepare(client: mansio.Client, topic: str, config: dict[str, str] = SETTING) -> None:
    await client.admin.create_topic(topic, partitions=1, config=config)
    await client.admin.alter_group_config(topic, {"share.auto.offset.reset": "earliest"})


async def publish(client: mansio.Client, priorities: list[str]) -> None:
    for begin in range(0, len(priorities), 100_000):
        part = priorities[begin : begin + 100_000]
        await client.publish_many(TOPIC, [OutgoingRecord(VALUE, priority=each) for each in part])


async def take(client: mansio.Client, count: int, priority: str | None) -> int:
    """Receive records and acknowledge each, until `count` are; only those of a `priority` count. Returns their number,
    which may be greater."""
    done = 0
    async with client.receive(TOPIC, group=TOPIC, max_records=BATCH) as receiver:
        while done < count:
            found = await receiver.poll()
            await asyncio.gather(*(each.ack() for each in found))
            done += sum(priority is None or priority_of(each) == priority for each in found)
    return done


def priority_of(message: Leased) -> str:
    return next((value or b"").decode() for name, value in message.headers if name == "mansio-priority")


CASES = {"urgent": measure_urgent, "flat": measure_flat, "rate": measure_rate, "bytes": measure_bytes}


if __name__ == "__main__":
    main()
