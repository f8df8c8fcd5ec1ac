"""Memory of leases: a million records, a hundred thousand of them acquired singly and in ranges.

The pattern of states is the worst the protocol allows, and more fragmented than a hundred members would produce: of
every eight records of a partition four are leased, two accepted, one rejected, one released for a retry, so that
neighbours rarely have the same state; then the same again in the free records, and a range at the end. The broker keeps
each of these ranges, and its stored state, in memory.

Invariant: the counted records are leased when memory is measured; a lease that may have expired is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from typing import TYPE_CHECKING

from bench import frames
from bench.servers import create_topic
from bench.size import ANSWER_DEADLINE_S, SIZE_CASES, TOPIC, SizeCase, exchange, running
from mansio.client import blocking
from mansio.wire.apis import share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from bench.run import Bench
    from bench.servers import Server

GROUP = "size"
RECORDS = 1_000_000
PARTITIONS = 64
LEASED_OF_EACH = 1_563  # 100,032 in total
LOCKS_MAX = 2_000
BATCH = 1_000
FETCH_BYTES_MAX = 8 << 20
LOCK_MS = 60_000  # the maximum
HOUR_MS = 3_600_000
HELD, ACCEPT, RELEASE, REJECT = 0, 1, 2, 3
PATTERN = (HELD, ACCEPT, HELD, REJECT, HELD, RELEASE, HELD, ACCEPT)
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": str(LOCK_MS),
    "share.partition.max.record.locks": str(LOCKS_MAX),
    "mansio.retry.backoff.ms": str(HOUR_MS),
    "mansio.retry.backoff.max.ms": str(HOUR_MS),
}


class Member:
    """A member with one partition and its own connection."""

    def __init__(self, server: Server, topic_id: bytes, partition: int) -> None:
        self.line = socket.create_connection(("127.0.0.1", server.port))
        self.line.settimeout(ANSWER_DEADLINE_S)
        self.topic_id, self.partition = topic_id, partition
        self.epochs = itertools.count()
        self.leased = 0

    def fetch(self, records: int, acks: list[AckBatch]) -> list[tuple[int, int]]:
        """Acknowledge ranges and acquire at most `records`; returns the acquired ranges."""
        request = share_fetch.encode_request(
            2,
            1,
            "bench",
            GROUP,
            f"member-{self.partition}",
            next(self.epochs),
            [(self.topic_id, [AckPartition(self.partition, acks)])],
            max_wait_ms=500 if records else 0,
            min_bytes=1 if records else 0,
            max_bytes=FETCH_BYTES_MAX if records else 0,
            max_records=records,
            batch_size=records,
            acquire_mode=share_fetch.RECORD_LIMIT,
        )
        answer = share_fetch.decode_response(2, exchange(self.line, request)[4:])
        found = [part for _, parts in answer.topics for part in parts]
        errors = [answer.error_code, *(part.error_code or part.acknowledge_error_code for part in found)]
        if any(errors):
            raise RuntimeError(f"ShareFetch was answered with error codes {errors}")
        ranges = [(first, last) for part in found for first, last, _ in part.acquired]
        self.leased += sum(last - first + 1 for first, last in ranges)
        return ranges

    def lease(self, acquirable_ranges: int) -> None:
        """Acquire and acknowledge in the pattern until `count` records are leased, the last of them as a range."""
        end = time.monotonic() + LOCK_MS / 1000
        while self.leased < acquirable_ranges and time.monotonic() < end:
            most = LOCKS_MAX - self.leased
            is_last = (acquirable_ranges - self.leased) * 2 < most // 2
            ranges = self.fetch(acquirable_ranges - self.leased if is_last else most, [])
            if is_last or not ranges:
                continue
            acks = [batch for first, last in ranges for batch in self.persisted(first, last)]
            self.leased -= len(acks)
            self.fetch(0, acks)

    @staticmethod
    def persisted(first: int, last: int) -> list[AckBatch]:
        kinds = [(offset, PATTERN[offset % len(PATTERN)]) for offset in range(first, last + 1)]
        return [AckBatch(offset, offset, bytes((kind,))) for offset, kind in kinds if kind != HELD]


def fill(server: Server) -> None:
    """Publish the backlog in batches of a busy producer, acknowledged from the page cache."""
    batch = frames.batch(BATCH, 100)
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.settimeout(ANSWER_DEADLINE_S)
        for number in range(RECORDS // BATCH):
            answer = exchange(line, frames.produce_request(TOPIC, number % PARTITIONS, 1, batch))
            if error := frames.produce_error(answer, TOPIC):
                raise RuntimeError(f"Produce was answered with error code {error}")


def open_records(server: Server) -> str:
    """Open records, after all dead letters are written. Raises `RuntimeError` if leases expired."""
    partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    with blocking.connect(f"127.0.0.1:{server.port}") as client:
        while True:
            reported = client.admin.shares.leases(GROUP, partitions)
            known = [one for one in reported.values() if one is not None]
            names = ("leased", "parked", "dead", "archiving")
            leased, parked, dead, archiving = (sum(getattr(one, name) for one in known) for name in names)
            if leased < PARTITIONS * LEASED_OF_EACH:
                raise RuntimeError(
                    f"{leased:,} are leased still: the machine is too busy for this within {LOCK_MS} ms"
                )
            if not archiving:
                return (
                    f"{leased:,} leased, {parked:,} wait for a try, {dead:,} given up, of {RECORDS:,} records"
                )
            time.sleep(0.1)


def memory_mb(bench: Bench, times: int) -> list[float]:
    """Resident megabytes above those of an idle broker. Each step is recorded in the notes."""
    figures = []
    for _ in range(times):
        with running(bench) as server, contextlib.ExitStack() as lines:
            steps = {"idle": server.resident_bytes()}
            create_topic(server, TOPIC, PARTITIONS)
            fill(server)
            server.wait_idle()
            steps["with the backlog"] = server.resident_bytes()
            with blocking.connect(f"127.0.0.1:{server.port}") as client:
                client.admin.alter_group_config(GROUP, SETTINGS)
                topic_id = client.admin.describe_topic(TOPIC).topic_id
            for partition in range(PARTITIONS):
                member = Member(server, topic_id, partition)
                lines.enter_context(member.line)
                member.lease(LEASED_OF_EACH)
            on_loaded = open_records(server)
            server.wait_idle()
            steps["with the leases"] = server.resident_bytes()
            shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in steps.items())
            bench.notes.append(f"resident memory: {shown}; {on_loaded}")
            open_records(server)
            figures.append((steps["with the leases"] - steps["idle"]) / 1e6)
    return figures


SHARE_CASES = (
    SizeCase("memory-leases", "memory over idle, 1 M records, 100,000 leased", "MB", 150, memory_mb),
)
ALL_SIZE_CASES = (*SIZE_CASES, *SHARE_CASES)
