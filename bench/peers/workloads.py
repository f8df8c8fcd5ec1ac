"""Workloads: the same work for every candidate, in freshly forked client processes.

`WORKLOADS` lists them; a message counts when it is acknowledged. The processor time used by neither the server nor the
clients is recorded with every run: another busy process makes the run *disturbed*.

Delivery, record by record: the queue is filled first, with batches of 100 (for at most `FILL_S`; a slow peer delivers
only what it accepted in that time, and its run ends when the queue is empty). What is delivered one at a time was
published one at a time: a broker that stores the producer's batches may lease a whole one to whoever asks for a record.
Each client has subscribed and received `WARM_UP_DELIVERIES` batches before the clock starts. Values are delivered as
objects of the client's language. A record counts when it was delivered, and the clock stops when all are acknowledged;
`peer.Deliverer` defines what may be in flight meanwhile.

Invariants:
* The clock runs only from the time when all clients are ready until the last acknowledgement.
* A client gets no more records at a time than the workload says.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.clients import alone, clients_cpu_s, together
from bench.peers.raw import raw_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.peers.peer import Candidate, Deliverer, Driver, Producer
    from bench.peers.server import Server

    Ready = Callable[[], None]

RATE_PER_S = 1000
PACED_PRODUCERS = 4
PACED_LEAD_S = 0.2
PACED_TIMES_AS_LONG = 3
"""Factor by which latency runs are longer than others: a p99 needs several hundred messages above it."""
PACED_GRACE_S = 4.0
PACED_TAKE = 50
FILL_BATCH = 1000
CONSUMED_MAX = 40_000
FILL_S = 2.0
DELIVERIES_PER_S_MAX = {1: 20_000, 100: 200_000}
"""By batch size: the queue is filled for this many deliveries per second, and no more."""
WARM_UP_DELIVERIES = 3
WARM_UP_PUBLISHES = 5
DEADLINE_S = 60.0
DISTURBED_CORES = 0.3
"""Processor time of other processes, in cores, from which a run counts as disturbed."""
QUIET_WAIT_S = 0.6
QUIET_WINDOW_S = 0.1
STARTED_WAIT_S = 5.0
"""Delay for servers that are still starting: ours compiles its messages for a second, a JVM warms up."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One column. `batch`: messages that are sent, then all acknowledged, before the next are sent (or consumed at
    once).
    `consumers`: of a workload that delivers record by record, else 0.

    `lead_min`: required ratio of Mansio to each peer of equal durability; `lead_required_over`: name prefixes of the
    peers to which it applies, if not all.
    """

    name: str
    title: str
    batch: int = 1
    producers: int = 1
    lead_min: float | None = None
    consumers: int = 0
    lead_required_over: tuple[str, ...] = ("",)

    @property
    def waiting_clients(self) -> int:
        """How many clients wait for the confirmation of each batch before they go on; 0: batches are delivered while
        acknowledgements are in flight."""
        if self.consumers:
            return self.consumers if self.batch == 1 else 0
        return self.producers

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures of its runs in the table."""
        return ("p50_us", "p99_us") if self.name == "latency" else ("messages_per_s",)


WORKLOADS = (
    Workload("seq", "one by one", lead_min=1 / 1.5),
    Workload("producers8", "8 producers", producers=8, lead_min=1.0),
    Workload("batch100", "batch 100", batch=100, lead_min=3.0),
    Workload("batch1000", "batch 1000", batch=1000, lead_min=3.0),
    Workload("consume100", "consume 100", batch=100),
    Workload("latency", "publish to deliver, 1,000/s", lead_min=1.0),
    Workload("deliver100", "batches of 100", batch=100, lead_min=1.0, consumers=1),
    Workload(
        "deliver1",
        "one at a time",
        lead_min=0.6,
        consumers=1,
        lead_required_over=("redis",),
    ),
    Workload("deliver100x4", "100, 4 consumers", batch=100, consumers=4),
    Workload(
        "deliver1x4",
        "one, 4 consumers",
        lead_min=1.0,
        consumers=4,
        lead_required_over=("postgresql", "rabbitmq-quorum"),
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition. Processor time in cores over the whole run, set-up included; latencies in microseconds."""

    messages: int
    seconds: float
    messages_per_s: float
    server_cores: float
    client_cores: float
    foreign_cores: float
    p50_us: float | None = None
    p99_us: float | None = None
    server_us: float | None = None
    client_us: float | None = None
    """Processor time per message; for deliveries without the set-up."""
    began: float = 0.0
    ended: float = 0.0
    """Seconds since the epoch: the range in the trace of the server's fsyncs."""

    @property
    def is_disturbed(self) -> bool:
        return self.foreign_cores > DISTURBED_CORES


def measure(
    candidate: Candidate, server: Server, workload: Workload, *, queue: str, size: int, seconds: float
) -> Run:
    """One run on its own queue."""
    driver = candidate.driver(server.place.port)
    alone(lambda: driver.create(queue))
    try:
        if workload.name == "consume100":
            fill(driver, queue, size, seconds, CONSUMED_MAX)
        elif workload.consumers:
            most = int(DELIVERIES_PER_S_MAX[workload.batch] * seconds) * min(workload.consumers, 2)
            fill(driver, queue, size, FILL_S, most, batch=workload.batch)
        wait_until_quiet()
        usage = Usage(server)
        length = PACED_TIMES_AS_LONG * seconds if workload.name == "latency" else seconds
        if candidate.is_raw:
            found = raw_run(server.place.port, queue, workload, size=size, seconds=length)
        elif workload.name == "latency":
            found = paced(driver, queue, size, length)
        elif workload.name == "consume100":
            found = consume(driver, queue, workload.batch, seconds)
        elif workload.consumers:
            found = deliver(driver, server, queue, workload, seconds)
        else:
            found = produce(driver, queue, workload, size=size, seconds=seconds)
        return Run(**{**usage.since(found["messages"]), **found})
    finally:
        alone(lambda: driver.delete(queue))


class Usage:
    """Processor time used by server, clients and other processes since construction."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return time.perf_counter(), self.server.cpu_s(), clients_cpu_s(), machine_cpu_s()

    def since(self, messages: int) -> dict[str, float]:
        wall, server, clients, machine = (
            now - before for now, before in zip(self._now(), self.before, strict=True)
        )
        return {
            "server_cores": round(server / wall, 2),
            "client_cores": round(clients / wall, 2),
            "foreign_cores": round(max(0.0, machine - server - clients) / wall, 2),
            "server_us": round(server / max(1, messages) * 1e6, 1),
            "client_us": round(clients / max(1, messages) * 1e6, 1),
        }


def machine_cpu_s() -> float:
    """Processor time used by all processes of this machine, or stolen from it."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(wait_s: float = QUIET_WAIT_S) -> None:
    """Wait a short time for other processes to become idle."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        before = machine_cpu_s()
        time.sleep(QUIET_WINDOW_S)
        if machine_cpu_s() - before < DISTURBED_CORES * QUIET_WINDOW_S:
            return


def value_of(size: int) -> bytes:
    """Random letters: not compressible to nothing, and different in every process."""
    return os.urandom(size // 2 + 1).hex().encode()[:size]


# -- producing --------


def produce(
    driver: Driver,
    queue: str,
    workload: Workload,
    *,
    size: int,
    seconds: float,
    messages_max: int | None = None,
) -> dict[str, Any]:
    """`workload.producers` clients, each publishing `workload.batch` messages at a time."""

    async def work(ready: Ready) -> tuple[int, float, float]:
        producer = await driver.producer(queue)
        values = [value_of(size)] * workload.batch
        for _ in range(WARM_UP_PUBLISHES):
            await producer.publish(values[:1])
        ready()
        found = await publish_for(producer, values, seconds, messages_max)
        await producer.close()
        return found

    found = together([work] * workload.producers, seconds + DEADLINE_S)
    messages, took = sum(one[0] for one in found), max(one[2] - one[1] for one in found)
    return rate(messages, took) | {
        "began": min(one[1] for one in found),
        "ended": max(one[2] for one in found),
    }


async def publish_for(
    producer: Producer, values: list[bytes], seconds: float, messages_max: int | None
) -> tuple[int, float, float]:
    """(messages published, start, end)."""
    publish, clock, count, done = producer.publish, time.time, len(values), 0
    begin = now = clock()
    while now < begin + seconds and (messages_max is None or done < messages_max):
        await publish(values)
        done += count
        now = clock()
    return done, begin, now


def fill(
    driver: Driver, queue: str, size: int, seconds: float, messages_max: int, *, batch: int = FILL_BATCH
) -> None:
    """Fill the queue for a consumer: as much as a producer publishes in the time, at most what is needed."""
    filling = Workload("fill", "", batch=batch)
    produce(driver, queue, filling, size=size, seconds=seconds, messages_max=messages_max)


# -- consuming --------


def consume(driver: Driver, queue: str, batch: int, seconds: float) -> dict[str, Any]:
    """One client consumes `batch` messages at a time and waits until each acknowledgement is confirmed."""

    async def work(ready: Ready) -> tuple[int, float, float]:
        consumer = await driver.consumer(queue, confirmed=True)
        ready()
        done, begin = 0, time.time()
        end = begin
        while end < begin + seconds:
            taken = len(await consumer.take(batch))
            if not taken:
                break
            done, end = done + taken, time.time()
        await consumer.close()
        return done, begin, end

    ((messages, began, ended),) = together([work], seconds + DEADLINE_S)
    return rate(messages, ended - began) | {"began": began, "ended": ended}


# -- delivering --------


def deliver(driver: Driver, server: Server, queue: str, workload: Workload, seconds: float) -> dict[str, Any]:
    """`workload.consumers` clients, each getting `workload.batch` records at a time and acknowledging each of them."""

    async def work(ready: Ready) -> tuple[int, float, float, float, float]:
        deliverer = await driver.deliverer(queue, workload.batch)
        for _ in range(WARM_UP_DELIVERIES):
            await deliverer.next()
        await deliverer.acknowledge()
        server_s, client_s = server.cpu_s(), time.process_time()
        ready()
        done, began, ended = await deliver_for(deliverer, workload.batch, seconds)
        client_s, server_s = time.process_time() - client_s, server.cpu_s() - server_s
        await deliverer.close()
        return done, began, ended, server_s, client_s

    found = together([work] * workload.consumers, seconds + DEADLINE_S)
    if not (messages := sum(one[0] for one in found)):
        raise RuntimeError("nothing was left to deliver: too little could be put there in the time")
    began, ended = min(one[1] for one in found), max(one[2] for one in found)
    return rate(messages, ended - began) | {
        "began": began,
        "ended": ended,
        "server_us": round(max(one[3] for one in found) / messages * 1e6, 1),
        "client_us": round(sum(one[4] for one in found) / messages * 1e6, 1),
    }


async def deliver_for(deliverer: Deliverer, batch: int, seconds: float) -> tuple[int, float, float]:
    """(records delivered and acknowledged, start, end). `RuntimeError` if more than a batch came at a time."""
    handed_out, clock, done = deliverer.next, time.time, 0
    begin = now = clock()
    while now < begin + seconds:
        taken = len(await handed_out())
        if taken > batch:
            raise RuntimeError(f"{taken} records were delivered at a time instead of {batch}")
        if not taken:  # the request for more has acknowledged all previous records
            return done, begin, now
        done += taken
        now = clock()
    await deliverer.acknowledge()
    return done, begin, clock()


# -- latency --------


def paced(driver: Driver, queue: str, size: int, seconds: float) -> dict[str, Any]:
    """`RATE_PER_S` messages at fixed times, from several producers that await each acknowledgement; one consumer.

    A message carries the time it was due, and its latency counts from there: a producer that falls behind shows.
    """
    total = int(RATE_PER_S * seconds)
    padding = value_of(size)[8:]

    def publisher(number: int) -> Callable[[Ready], Any]:
        async def work(ready: Ready) -> None:
            producer = await driver.producer(queue)
            for _ in range(WARM_UP_PUBLISHES):
                await producer.publish([bytes(8) + padding])
            ready()
            start = time.monotonic_ns() + int(PACED_LEAD_S * 1e9)
            for position in range(number, total, PACED_PRODUCERS):
                due = start + position * 1_000_000_000 // RATE_PER_S
                # Not asyncio.sleep, which is rounded to milliseconds; nothing else runs here.
                time.sleep(max(0, due - time.monotonic_ns()) / 1e9)  # noqa: ASYNC251
                await producer.publish([struct.pack("<q", due) + padding])
            await producer.close()

        return work

    async def listener(ready: Ready) -> list[int]:
        consumer = await driver.consumer(queue, confirmed=False)
        ready()
        latencies: list[int] = []
        end = time.monotonic() + PACED_LEAD_S + seconds + PACED_GRACE_S
        while len(latencies) < total and time.monotonic() < end:
            taken = await consumer.take(PACED_TAKE)
            now = time.monotonic_ns()
            dues = [struct.unpack_from("<q", value)[0] for value in taken]
            latencies += [now - due for due in dues if due]
        await consumer.close()
        return latencies

    began = time.time()
    works = [listener, *(publisher(number) for number in range(PACED_PRODUCERS))]
    latencies = together(works, seconds + DEADLINE_S)[0]
    if len(latencies) < total:
        raise RuntimeError(f"only {len(latencies)} of {total} messages were delivered in time")
    steady = sorted(latencies[total // 6 :])
    return rate(total, seconds) | {
        "p50_us": percentile(steady, 0.5) / 1000,
        "p99_us": percentile(steady, 0.99) / 1000,
        "began": began,
        "ended": time.time(),
    }


def percentile(ordered: list[int], part: float) -> int:
    """The smallest value that at least this fraction of the values does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


def rate(messages: int, seconds: float) -> dict[str, Any]:
    return {
        "messages": messages,
        "seconds": round(seconds, 4),
        "messages_per_s": round(messages / seconds, 1) if seconds else 0.0,
    }


def as_json(run: Run) -> dict[str, Any]:
    return {**asdict(run), "is_disturbed": run.is_disturbed}
