"""Delivery demo: retries, dead letters and redrive in a share group; rebalance of a consumer group.

First a share group processes the flights of one day. Four of them were cancelled and have no delay, which the workers'
code does not expect. Then a fourth consumer joins a consumer group of eight partitions under constant load. Everything
a user could do goes through the public client.

Invariants:
* The broker's process and its directory are removed in any case.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.cli.support.common import UnreadableReport, connect
from mansio.client.dead_letters import read_dead_letters
from mansio.client.producer.producer import ProducerOptions
from mansio.client.types import TopicPartition
from mansio_demo.broker_process import BrokerProcess
from mansio_demo.console_output import new_console, print_line
from mansio_demo.delay_chart import CARRIER, DELAY, departure_ms
from mansio_demo.flights import FIRST_DAY_FLIGHTS, load_flights
from mansio_demo.proofs import Proof
from mansio_demo.rebalance_demo import RebalanceRun, join_and_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from rich.console import Console

    from mansio.client import Client, Leased, Receiver
    from mansio.client.dead_letters import DeadLetter
    from mansio_demo.flights import Flight

TOPIC: Final = "flights"
PARTITIONS: Final = 4
GROUP: Final = "departures"
AUDIT: Final = "audit"
WORKERS: Final = 3
CONCURRENCY: Final = 4
TRIES: Final = 4
BACKOFF_MS: Final = 250
BACKOFFS_S: Final = (0.25, 0.5, 1.0)
SETTINGS: Final = {
    "share.auto.offset.reset": "earliest",
    "share.delivery.count.limit": str(TRIES),
    "mansio.retry.backoff.ms": str(BACKOFF_MS),
    "mansio.retry.backoff.multiplier": "2",
    "mansio.retry.jitter": "0",
}
REDRIVE_HEADER: Final = "demo"
RUN_S_MAX: Final = 60.0
POLL_INTERVAL_S: Final = 0.05


@dataclass(slots=True)
class DemoState:
    """State of the run."""

    flights: list[Flight]
    attempts: Attempts
    is_fixed: bool = False
    audited: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    traced_events: int = 0
    """Number of events in the history that is shown."""

    def check(self, holds: bool, otherwise: str) -> None:
        """Record an error, which is printed at the end."""
        if not holds:
            self.wrong.append(otherwise)

    def handle(self, message: Leased) -> None:
        """Handle a flight. A cancelled one has no delay, which fails until the handler is fixed."""
        value = message.value or b""
        place = (message.partition, message.offset)
        attempt = Attempt(time.monotonic(), line_of(value), message.delivery_count, *place, is_done=True)
        try:
            self.attempts.delays[attempt.line] = delay_min(value)
        except ValueError:
            if not self.is_fixed:
                self.attempts.add(attempt._replace(is_done=False))
                raise
        self.attempts.add(attempt)


async def run_demo(*, is_secure: bool = False) -> list[Proof]:
    """Run the demo; returns what it proved. `is_secure`: with TLS and users."""
    console = new_console()
    flights = sorted(load_flights(FIRST_DAY_FLIGHTS), key=departure_ms)
    state = DemoState(flights, Attempts(flights, TRIES, BACKOFFS_S))
    rebalance: RebalanceRun | None = None
    console.print(
        f"\n [bold]Mansio[/]: {len(flights)} flights, {len(state.attempts.poison)} that always fail;"
        " and a consumer that joins\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="mansio-demo-") as directory,
        BrokerProcess(directory, is_secure=is_secure) as process,
    ):
        ready_s = await asyncio.to_thread(process.start)
        print_line(console, "broker", f"ready in {ready_s:.2f} s at {process.kafka}, data in {directory}")
        try:
            async with asyncio.timeout(RUN_S_MAX), connect(process.kafka) as client:
                await _flights_of_a_day(console, state, process.kafka, client)
                rebalance = await join_and_watch(process.kafka)
                _show(console, state, rebalance)
                await _show_history(console, state, client)
        except TimeoutError:
            state.check(False, f"it did not finish in {RUN_S_MAX:.0f} s")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        process.stop()
    for line in state.wrong[:10]:
        console.print(f"\n [bold red]Error:[/] {line}")
    holds, poison = not state.wrong, len(state.attempts.poison)
    return [
        Proof(
            "retries with backoff",
            f"{poison} records that always fail",
            f"{TRIES} attempts each",
            holds,
        ),
        Proof("no head-of-line blocking", "records behind a failing one", "all handled", holds),
        Proof("dead letters, each once", "headers, position, reason", f"{poison} dead letters", holds),
        Proof("redrive to one group only", "repeated with the same id", f"{poison} offered, then 0", holds),
        Proof(
            "history of each record", "of one that failed", f"{state.traced_events} events, certain", holds
        ),
        Proof(
            "rebalance without a pause",
            "a consumer joins (KIP-848)",
            "not finished" if rebalance is None else f"{rebalance.stayed_ms:.0f} ms at most",
            holds and rebalance is not None,
        ),
    ]


async def _flights_of_a_day(
    console: Console, state: DemoState, bootstrap_servers: str, client: Client
) -> None:
    await client.admin.create_topic(TOPIC, partitions=PARTITIONS)
    await client.admin.alter_group_config(GROUP, SETTINGS)
    await client.admin.alter_group_config(AUDIT, {"share.auto.offset.reset": "earliest"})
    backoffs_of = ", ".join(f"{backoff_s:g} s" for backoff_s in BACKOFFS_S)
    print_line(
        console,
        "group",
        f"{GROUP!r}: {WORKERS} workers, backoffs {backoffs_of}, then dead letter",
    )
    receivers: list[Receiver] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(WORKERS):
            tasks.create_task(_work(bootstrap_servers, GROUP, state.handle, receivers))
        tasks.create_task(
            _work(
                bootstrap_servers,
                AUDIT,
                lambda message: state.audited.append(line_of(message.value or b"")),
                receivers,
            )
        )
        try:
            await _publish(client, state.flights)
            await _until(lambda: state.attempts.good_done_at > 0)
            await _give_up(console, state, client)
            await _redrive(console, state, client)
        finally:
            for receiver in receivers:
                receiver.stop()


async def _work(
    bootstrap_servers: str, group: str, handle: Callable[[Leased], object], receivers: list[Receiver]
) -> None:
    """One member of a share group, in parallel mode, until its receiver is stopped."""
    async with connect(bootstrap_servers) as client, client.receive(TOPIC, group=group) as receiver:
        receivers.append(receiver)
        await receiver.run(handle, mode="parallel", concurrency=CONCURRENCY)


async def _publish(client: Client, flights: list[Flight]) -> None:
    async with client.producer(ProducerOptions(acks="all")) as producer:
        for flight in flights:
            await producer.send(TOPIC, flight.value, key=flight.key)
        await producer.flush()


async def _give_up(console: Console, state: DemoState, client: Client) -> None:
    """Wait until all failing records are in the dead-letter topic; then check the deliveries."""
    attempts, poison = state.attempts, state.attempts.poison
    began = min(one.at for each in attempts.found.values() for one in each)
    good = len(state.flights) - len(poison)
    seconds = attempts.good_done_at - began
    print_line(
        console,
        "handled",
        f"{good} flights in {seconds:.2f} s; their mean delay, {attempts.mean_min():.2f} min, is correct",
    )
    while await _dead(client) < len(poison):  # noqa: ASYNC110 - the broker tells nobody
        await asyncio.sleep(POLL_INTERVAL_S)
    state.wrong += attempts.wrong_before_redrive()
    print_line(console, "poison", f"{len(poison)} were cancelled and have no delay: int('NA') fails")
    for flight in poison[:1]:
        found = attempts.found[flight.line]
        times = "  ".join(f"{one.at - found[0].at:.2f} s" for one in found)
        print_line(console, "", f"{name_of(flight)} was tried at {times}")
        passed, later_records = attempts.passed(flight.line)
        print_line(
            console,
            "",
            f"meanwhile {passed} of {later_records} flights after it in its partition were handled",
        )
        state.check(passed > 0, f"{name_of(flight)} held up the flights behind it")
    dead_letters = await _dead_letters(client)
    state.wrong += wrong_dead_letters(dead_letters, poison, TOPIC, GROUP, TRIES)
    print_line(
        console,
        "dlq",
        f"'dlq.{TOPIC}' has {len(dead_letters)} dead letters with record, position and reason",
    )


async def _dead(client: Client) -> int:
    found = await client.admin.shares.leases(GROUP, [TopicPartition(TOPIC, at) for at in range(PARTITIONS)])
    return sum(0 if each is None else each.dead for each in found.values())


async def _dead_letters(client: Client) -> list[DeadLetter]:
    """All dead letters."""
    return [
        dead_letter
        async for dead_letter in read_dead_letters(
            client, f"dlq.{TOPIC}", on_unreadable=UnreadableReport().show
        )
    ]


async def _redrive(console: Console, state: DemoState, client: Client) -> None:
    """Fix the handlers, and redrive the dead records once."""
    attempts, poison = state.attempts, state.attempts.poison
    state.is_fixed = True
    offered, _ = await _redrive_all(client)
    again, done_before = await _redrive_all(client)
    right = (offered, again, done_before) == (len(poison), 0, len(poison))
    state.check(right, f"{offered} were offered again, and then {again}, {done_before} being known")
    print_line(
        console,
        "redrive",
        f"handlers fixed; {offered} offered again; repeated with the same id: {again}",
    )
    await _until(lambda: attempts.done >= len(state.flights) and len(state.audited) >= len(state.flights))
    with suppress(TimeoutError):  # no further delivery is expected
        async with asyncio.timeout(0.3):
            await _until(lambda: len(state.audited) > len(state.flights))
    state.wrong += attempts.wrong_after_redrive()
    once = sorted(state.audited) == sorted(flight.line for flight in state.flights)
    state.check(
        once, f"group {AUDIT!r} got {len(state.audited)} flights, not each of {len(state.flights)} once"
    )
    text = f"all {attempts.done} flights are done; group {AUDIT!r} received each once"
    print_line(console, "", text)


async def _redrive_all(client: Client) -> tuple[int, int]:
    """Redrive all dead letters. Return (number of redriven records, number redriven earlier with the same id)."""
    redriven = repeated = 0
    positions = [(headers.partition, headers.offset) for _, headers in await _dead_letters(client)]
    for index in range(PARTITIONS):
        partition = TopicPartition(TOPIC, index)
        offsets = [(offset, offset) for at, offset in positions if at == index]
        if offsets:
            done = await client.admin.shares.redrive(
                GROUP, partition, redrive_id=REDRIVE_HEADER, offsets=offsets
            )
            redriven, repeated = redriven + done.redriven, repeated + done.repeated
    return redriven, repeated


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it changes in callbacks of several clients
        await asyncio.sleep(POLL_INTERVAL_S)


async def _show_history(console: Console, state: DemoState, client: Client) -> None:
    """Print what happened to one of the failing records, as the brokers have written it down."""
    _, headers = (await _dead_letters(client))[0]
    found = await client.admin.traces.record(TOPIC, headers.partition, headers.offset)
    console.print()
    print_line(console, "trace", f"mansio trace {TOPIC}/{headers.partition}/{headers.offset}")
    begin: datetime | None = None
    for event in found.events:
        if event.is_computed or event.time is None or event.group not in (None, GROUP):
            continue
        begin = begin or event.time
        attempt = f"attempt {event.attempt}" if event.attempt else ""
        after_s = (event.time - begin).total_seconds()
        print_line(console, "", f"{after_s:7.2f} s  {event.kind:<17} {attempt:<10} {event.detail}".rstrip())
        state.traced_events += 1
    print_line(
        console, "", "certain: nothing is missing" if found.certain else "; ".join(found.uncertainties)
    )
    deliveries = sum(event.kind == "delivered" and event.group == GROUP for event in found.events)
    state.check(found.certain, f"the history of a record is uncertain: {found.uncertainties}")
    state.check(deliveries == TRIES + 1, f"its history has {deliveries} deliveries instead of {TRIES + 1}")


def _show(console: Console, state: DemoState, rebalance: RebalanceRun) -> None:
    """Print the result of the second part."""
    state.wrong += rebalance.wrong()
    console.print()
    print_line(console, "group", rebalance.sentence())
    for line in rebalance.chart_lines():
        print_line(console, "", line)
    print_line(
        console,
        "gaps",
        f"{len(rebalance.stayed)} partitions stayed: longest {rebalance.stayed_ms:.0f} ms,"
        f" {rebalance.before_ms:.0f} ms before; {len(rebalance.moved)} moved: {rebalance.moved_ms:.0f} ms",
    )


# -- attempts --------


NUMBER, TAIL = 11, 12
"""Fields of a record's value, split at commas; the line number comes first."""

EARLY_S = 0.001
"""Resolution of a computer's clock."""


class Attempt(NamedTuple):
    """One delivery of a flight to a worker, and whether it was processed."""

    at: float
    line: int
    delivery: int
    partition: int
    offset: int
    is_done: bool


def line_of(value: bytes) -> int:
    return int(value[: value.index(b",")])


def name_of(flight: Flight) -> str:
    cells = flight.value.split(b",")
    return f"{cells[CARRIER].decode()}{cells[NUMBER].decode()} {cells[TAIL].decode()}"


def is_cancelled(flight: Flight) -> bool:
    return flight.value.split(b",")[DELAY] == b"NA"


def delay_min(value: bytes) -> int:
    """Return the delay of a flight. Raises `ValueError` for a cancelled one: the error in the handlers."""
    return int(value.split(b",")[DELAY])


def mean_delay_min(flights: Iterable[Flight]) -> float:
    """Mean delay of the flights that departed."""
    delays = [delay_min(flight.value) for flight in flights if not is_cancelled(flight)]
    return sum(delays) / len(delays)


@dataclass(slots=True)
class Attempts:
    """All deliveries."""

    flights: Sequence[Flight]
    limit: int
    backoffs_s: tuple[float, ...]
    found: dict[int, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    delays: dict[int, int] = field(default_factory=dict)

    def add(self, attempt: Attempt) -> None:
        self.found[attempt.line].append(attempt)

    @property
    def poison(self) -> list[Flight]:
        return [flight for flight in self.flights if is_cancelled(flight)]

    @property
    def done(self) -> int:
        """Number of processed flights."""
        return sum(any(one.is_done for one in attempts) for attempts in self.found.values())

    @property
    def good_done_at(self) -> float:
        """When the last flight without an error was processed; 0 before."""
        good = {flight.line for flight in self.flights if not is_cancelled(flight)}
        times = [one.at for line in good for one in self.found.get(line, ()) if one.is_done]
        return max(times) if len(times) >= len(good) else 0.0

    def mean_min(self) -> float:
        return sum(self.delays.values()) / max(1, len(self.delays))

    def backoffs_of(self, line: int) -> list[float]:
        """Return the times between the deliveries of a flight, in seconds."""
        times = [one.at for one in self.found[line][: self.limit]]
        return [later - earlier for earlier, later in pairwise(times)]

    def passed(self, line: int) -> tuple[int, int]:
        """Return (number of later flights of its partition processed before its last delivery, number processed in
        total)."""
        last = self.found[line][: self.limit][-1]
        later_records = [
            one
            for attempts in self.found.values()
            for one in attempts
            if one.is_done and one.partition == last.partition and one.offset > last.offset
        ]
        return sum(one.at < last.at for one in later_records), len(later_records)

    def wrong_before_redrive(self) -> list[str]:
        """Errors: each valid flight must be delivered once, each failing one up to the limit with backoffs."""
        wrong = []
        poison = {flight.line for flight in self.poison}
        for flight in self.flights:
            attempts = self.found.get(flight.line, [])
            deliveries = [one.delivery for one in attempts]
            if flight.line not in poison:
                if [(one.delivery, one.is_done) for one in attempts] != [(1, True)]:
                    wrong.append(f"{name_of(flight)} was delivered as {deliveries}, not once")
                continue
            if deliveries != list(range(1, self.limit + 1)) or any(one.is_done for one in attempts):
                wrong.append(f"{name_of(flight)}, which always fails, was delivered as {deliveries}")
            for backoff_s, wanted in zip(self.backoffs_of(flight.line), self.backoffs_s, strict=False):
                if backoff_s < wanted - EARLY_S:
                    wrong.append(f"{name_of(flight)} came again after {backoff_s:.3f} s, before {wanted} s")
        if abs(self.mean_min() - mean_delay_min(self.flights)) > 1e-9:
            wrong.append(
                f"the mean delay is {self.mean_min():.3f} min, not {mean_delay_min(self.flights):.3f}"
            )
        return wrong

    def wrong_after_redrive(self) -> list[str]:
        """Errors: each failing flight must be delivered once more and be processed."""
        wrong = []
        for flight in self.poison:
            again = [(one.delivery, one.is_done) for one in self.found[flight.line][self.limit :]]
            if again != [(self.limit + 1, True)]:
                wrong.append(f"{name_of(flight)} came after the redrive as {again}")
        return wrong


def wrong_dead_letters(
    dead_letters: Sequence[DeadLetter], poison: Sequence[Flight], topic: str, group: str, limit: int
) -> list[str]:
    """Errors of the dead letters: one per flight, with the whole record and its position."""
    values = Counter(dead_letter.message.value for dead_letter in dead_letters)
    if values != Counter(flight.value for flight in poison):
        return [
            f"there are {len(dead_letters)} dead letters of {len(values)} flights, for {len(poison)} flights"
        ]
    return [
        f"a dead letter says {found_text}, not {wanted}"
        for _, headers in dead_letters
        if (found_text := (headers.topic, headers.group, headers.deliveries))
        != (wanted := (topic, group, limit))
    ]
