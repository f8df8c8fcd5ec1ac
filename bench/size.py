"""Scaling: many partitions, connections, segments, bytes and group members.

Each case has a unit and a limit. There is no baseline; costs are ratios between the large and the small case, measured
alternately on one server, in processor time of the server.

Invariant: a server is stopped by its process id and its data is removed, also if a case fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import shutil
import signal
import socket
import statistics
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import mansio
from bench import frames
from bench.servers import Server, create_topic, start_mansio
from mansio.client.producer.producer import ProducerOptions
from mansio.host.clock import HostClock
from mansio.host.disk import HostDisk
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log, LogSettings
from mansio.wire.batch.record_batch import check_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.run import Bench

PARTITIONS = 2_000
FEW_PARTITIONS = 10
CONNECTIONS = 1_000
SEGMENTS = 1_000
FEW_SEGMENTS = 10
SEGMENT_BYTES = 1 << 20
MEMBERS = 100
GROUP_TOPICS = 5
GROUP_PARTITIONS = 500
HEARTBEAT_MS = 500
REBALANCE_DEADLINE_S = 60.0
GIGABYTE = 1 << 30
COST_ROUNDS = 4
READS_EACH = 20
ANSWER_DEADLINE_S = 30.0
TOPIC = "size"


class SizeCase(NamedTuple):
    """`measure(bench, times)` returns one figure per repetition, in `unit`; `limit` bounds their median.

    `on_request`: takes so much disk space or time that it runs only when it is named.
    """

    name: str
    title: str
    unit: str
    limit: float
    measure: Callable[[Bench, int], list[float]]
    on_request: bool = False

    def missed(self, figures: list[float]) -> bool:
        return bool(figures) and statistics.median(figures) > self.limit


# Partitions


@contextlib.contextmanager
def running(bench: Bench, data: Path | None = None) -> Iterator[Server]:
    """An idle server; its data is removed with it."""
    server = start_mansio(data or bench.data(), bench.server_processor)
    try:
        yield server
    finally:
        server.stop()


def fill_partitions(server: Server, topic: str, partitions: int) -> None:
    """Publish a record to every partition, acknowledged from the page cache."""

    async def fill() -> None:
        options = ProducerOptions(acks=1)
        async with mansio.connect(f"127.0.0.1:{server.port}") as client, client.producer(options) as producer:
            sent = [await producer.send(topic, b"x" * 500, partition=index) for index in range(partitions)]
            for delivery in sent:
                await delivery

    asyncio.run(fill())


def start_s(bench: Bench, times: int, number: int) -> list[float]:
    """Seconds to `ready` after every partition got a record and the server was stopped by a signal."""
    data = bench.data()
    figures = []
    with running(bench, data) as server:
        create_topic(server, TOPIC, PARTITIONS)
        fill_partitions(server, TOPIC, PARTITIONS)
        server.end(number)
        for _ in range(times):
            again = start_mansio(data, bench.server_processor)
            figures.append(again.ready_s)
            try:
                fill_partitions(again, TOPIC, PARTITIONS)
            finally:
                again.end(number)
    return figures


def start_closed_s(bench: Bench, times: int) -> list[float]:
    return start_s(bench, times, signal.SIGTERM)


def start_killed_s(bench: Bench, times: int) -> list[float]:
    return start_s(bench, times, signal.SIGKILL)


def create_s(bench: Bench, times: int) -> list[float]:
    figures = []
    for _ in range(times):
        with running(bench) as server:
            began = time.monotonic()
            create_topic(server, TOPIC, PARTITIONS)
            figures.append(time.monotonic() - began)
    return figures


# Memory


def exchange(line: socket.socket, request: bytes) -> bytes:
    """Send a framed request and return the framed response."""
    line.sendall(request)
    answer = receive(line, 4)
    return answer + receive(line, struct.unpack(">i", answer)[0])


def receive(line: socket.socket, length: int) -> bytes:
    held = bytearray()
    while len(held) < length:
        piece = line.recv(length - len(held))
        if not piece:
            raise RuntimeError("the server closed the connection")
        held += piece
    return bytes(held)


def memory_mb(bench: Bench, times: int) -> list[float]:
    """Resident megabytes, with a record in every partition and connections that have each produced and fetched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, CONNECTIONS + 256)), hard))
    figures = []
    for _ in range(times):
        with running(bench) as server, contextlib.ExitStack() as lines:
            create_topic(server, TOPIC, PARTITIONS)
            fill_partitions(server, TOPIC, PARTITIONS)
            batch = frames.batch(10, 100)
            for number in range(CONNECTIONS):
                line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                line.settimeout(ANSWER_DEADLINE_S)
                partition = number % PARTITIONS
                exchange(line, frames.produce_request(TOPIC, partition, 1, batch))
                exchange(line, frames.fetch_request(TOPIC, partition, 0, 1 << 16))
            server.wait_idle()
            figures.append(server.resident_bytes() / 1e6)
    return figures


# Cost of a batch


def partitions_cost(bench: Bench, times: int, load: tuple[str, ...]) -> list[float]:
    """Ratio of the processor time per request with many partitions to that with few, on one broker with both."""
    with running(bench) as server:
        for count in (FEW_PARTITIONS, PARTITIONS):
            create_topic(server, f"{TOPIC}-{count}", count)
            if load[0] == "fetch":
                fill_partitions(server, f"{TOPIC}-{count}", count)
        server.wait_idle()
        cost_us(
            bench, server, PARTITIONS, load
        )  # the first batch of a log costs more: it starts a leader epoch
        return [
            statistics.median(cost_us(bench, server, PARTITIONS, load) for _ in range(2))
            / statistics.median(cost_us(bench, server, FEW_PARTITIONS, load) for _ in range(2))
            for _ in range(times)
        ]


def cost_us(bench: Bench, server: Server, count: int, load: tuple[str, ...]) -> float:
    limit = 1 << 40 if load[0] == "fetch" else 256 << 20
    used = server.cpu_precise_s()
    done = bench.load(
        server,
        (*load, "--warm-up", "0"),
        topic=f"{TOPIC}-{count}",
        partitions=count,
        seconds=bench.options.seconds,
        bytes=limit,
    )
    return (server.cpu_precise_s() - used) / int(done["requests"]) * 1e6


def produce_cost(bench: Bench, times: int) -> list[float]:
    return partitions_cost(
        bench, times, ("produce", "--connections", "4", "--depth", "8", "--records", "100")
    )


def produce_synced_cost(bench: Bench, times: int) -> list[float]:
    load = ("produce", "--acks", "-1", "--connections", "16", "--depth", "4", "--records", "100")
    return partitions_cost(bench, times, load)


def fetch_cost(bench: Bench, times: int) -> list[float]:
    return partitions_cost(bench, times, ("fetch", "--connections", "4", "--depth", "4"))


def segments_cost(bench: Bench, times: int) -> list[float]:
    """Ratio of append, sync and random read in a log of many segments to one of few."""
    data = bench.data()
    disk, batch = HostDisk(), frames.batch(100, 100)
    files = FileCache(disk, files_max=4096)
    try:
        logs = [grown(disk, files, f"{data}/{count}", count, batch) for count in (SEGMENTS, FEW_SEGMENTS)]
        for log in logs:  # use every index and file once
            for info in log.segments():
                log.read(info.base_offset, 1, log.end_offset)
            log_cost_s(log, batch)
        figures = []
        for _ in range(times):
            pairs = [[log_cost_s(log, batch) for log in logs] for _ in range(COST_ROUNDS)]
            many, few = (statistics.median(side) for side in zip(*pairs, strict=True))
            figures.append(many / few)
        return figures
    finally:
        shutil.rmtree(data, ignore_errors=True)


def grown(disk: HostDisk, files: FileCache, directory: str, segments: int, batch: bytes) -> Log:
    log = Log.open(disk, HostClock(), directory, LogSettings(segment_bytes=SEGMENT_BYTES), files=files)
    header = check_batch(batch)
    for _ in range((segments - 1) * (SEGMENT_BYTES // len(batch)) + 1):
        log.append(batch, header, 0)
    log.sync()
    return log


def log_cost_s(log: Log, batch: bytes) -> float:
    """Processor time of two appends with sync and maintenance, and of reads at the end and at random positions."""
    header = check_batch(batch)
    chance = random.Random(1)
    began = time.process_time()
    for _ in range(2):
        log.append(batch, header, 0)
        log.sync()
        for _ in range(READS_EACH):
            log.read(chance.randrange(log.end_offset), 1 << 20, log.end_offset)
            log.read(log.end_offset - 1, 1 << 20, log.end_offset)
    return time.process_time() - began


# Opening


def open_killed_s(bench: Bench, times: int) -> list[float]:
    """Seconds to `ready` with a log of 1 GiB whose broker was killed while writing it."""
    figures = []
    load = (
        "produce",
        "--connections",
        "4",
        "--depth",
        "4",
        "--records",
        "1000",
        "--size",
        "1000",
        "--warm-up",
        "0",
    )
    for _ in range(times):
        data = bench.data()
        with running(bench, data) as server:
            create_topic(server, TOPIC, 1)
            bench.load(server, load, topic=TOPIC, partitions=1, seconds=120, bytes=GIGABYTE)
            server.end(signal.SIGKILL)
            again = start_mansio(data, bench.server_processor)
            figures.append(again.ready_s)
            again.end(signal.SIGKILL)
    return figures


def open_closed_s(bench: Bench, times: int) -> list[float]:
    """Seconds to open a log of 10 GiB in closed segments of 1 GiB whose broker was killed later."""
    data = bench.data()
    disk, batch = HostDisk(), frames.batch(1000, 1000)
    header = check_batch(batch)
    settings = LogSettings(segment_bytes=GIGABYTE)
    try:
        log = Log.open(disk, HostClock(), f"{data}/log", settings)
        for written in range(10 * (GIGABYTE // len(batch)) + 1):
            log.append(batch, header, 0)
            if written % 100 == 0:
                log.sync()
        log.sync()
        log.close(save=False)
        figures = []
        for _ in range(times):
            began = time.monotonic()
            Log.open(disk, HostClock(), f"{data}/log", settings).close(save=False)
            figures.append(time.monotonic() - began)
        return figures
    finally:
        shutil.rmtree(data, ignore_errors=True)


# Groups


def rebalance_s(bench: Bench, times: int) -> list[float]:
    """Seconds from the join or leave of a member until all members have their assignment; two heartbeats per second."""
    from confluent_kafka import Consumer

    told: dict[int, tuple[float, int]] = {}
    members: list[Consumer] = []

    def member(server: Server) -> Consumer:
        made = Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{server.port}",
                "group.id": "size",
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": HEARTBEAT_MS,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        topics = [f"{TOPIC}-{number}" for number in range(GROUP_TOPICS)]
        made.subscribe(
            topics, on_assign=lambda one, found: told.update({id(one): (time.monotonic(), len(found))})
        )
        members.append(made)
        return made

    def stable_s(began: float) -> float:
        while time.monotonic() < began + REBALANCE_DEADLINE_S:
            for one in members:
                one.poll(0.0005)
            new = [told.get(id(one), (0.0, 0)) for one in members]
            if all(at > began for at, _ in new) and sum(count for _, count in new) == GROUP_PARTITIONS:
                return max(at for at, _ in new) - began
        raise RuntimeError("the group is not stable")

    with running(bench) as server:
        try:
            for number in range(GROUP_TOPICS):
                create_topic(server, f"{TOPIC}-{number}", GROUP_PARTITIONS // GROUP_TOPICS)
            began = time.monotonic()
            for _ in range(MEMBERS):
                member(server)
            stable_s(began)
            figures = []
            for _ in range(times):
                began = time.monotonic()
                member(server)
                figures.append(stable_s(began))
                began = time.monotonic()
                members.pop().close()
                figures.append(stable_s(began))
            return figures
        finally:
            for one in members:
                one.close()


SIZE_CASES = (
    SizeCase("start-closed", "start, 2,000 partitions, closed cleanly", "s", 4, start_closed_s),
    SizeCase("start-killed", "start, 2,000 partitions, SIGKILL", "s", 4, start_killed_s),
    SizeCase("create-2000", "create a topic of 2,000 partitions", "s", 4, create_s),
    SizeCase("memory-2000", "memory, 2,000 partitions, 1,000 connections", "MB", 400, memory_mb),
    SizeCase("cost-partitions", "produce cost, 2,000 partitions / 10", "ratio", 1.1, produce_cost),
    SizeCase("cost-partitions-synced", "the same, acks=all", "ratio", 1.1, produce_synced_cost),
    SizeCase("cost-partitions-fetch", "fetch cost, 2,000 partitions / 10", "ratio", 1.1, fetch_cost),
    SizeCase("cost-segments", "cost of a batch, 1,000 segments / 10", "ratio", 1.1, segments_cost),
    SizeCase("open-killed", "start, log of 1 GiB, SIGKILL", "s", 2, open_killed_s),
    SizeCase("open-closed", "open, 10 GiB of closed segments", "s", 3, open_closed_s, on_request=True),
    SizeCase("rebalance", "rebalance, 100 members, 500 partitions", "s", 3, rebalance_s),
)
