"""The shortest round trips of this machine: what is faster was not confirmed.

A client that gets an answer before it goes on needs at least one round trip over loopback for each message or batch,
and where the answer says that something is on the disk, a sync in it. Both are measured during the run, between two
processes that do nothing else, with records of 100 B that are written into a file of fixed size. The fastest hundredth
of all of them is the bound, because the disk varies by a factor of three within minutes. A row that is better than the
bound is an error of the measurement (or of the peer), and is not shown.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.peers.clients import FORK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.peers.table import Entry
    from bench.peers.workloads import Run, Workload

RECORD_BYTES = 100
FILE_BYTES = 1 << 20
PROBE_S = 0.1
WARM_UP = 20
FASTEST = 0.01
"""The part of all round trips that is regarded as the fastest."""
ANSWER_DEADLINE_S = 30.0


@dataclass(slots=True)
class RoundTrips:
    """Durations in seconds of the round trips of all probes."""

    plain: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)

    def probe(self, directory: Path, seconds: float = PROBE_S) -> None:
        """Measure for a time without, and for the same time with a sync of a file in this directory."""
        self.plain += _measure(None, seconds)
        self.synced += _measure(directory, seconds)

    def fastest_us(self, *, synced: bool) -> float | None:
        """The bound in microseconds; None if nothing was measured."""
        found = sorted(self.synced if synced else self.plain)
        return found[int(len(found) * FASTEST)] * 1e6 if found else None

    def median_us(self, *, synced: bool) -> float | None:
        found = self.synced if synced else self.plain
        return statistics.median(found) * 1e6 if found else None


def refusal(run: Run, workload: Workload, bound_us: float) -> str:
    """Why a run cannot be what it says; empty if it can."""
    if (
        workload.name == "latency"
    ):  # to the server and from there to the consumer, which may be before the sync
        shortest = run.p50_us or bound_us
        return (
            "" if shortest >= bound_us else f"p50 of {shortest:.0f} us, a round trip takes {bound_us:.0f} us"
        )
    most = workload.waiting_clients * workload.batch * 1e6 / bound_us
    if not workload.waiting_clients or run.messages_per_s <= most:
        return ""
    return (
        f"{run.messages_per_s:,.0f}/s, but no more than {most:,.0f}/s can have been confirmed: a round trip takes "
        f"{bound_us:.0f} us"
    )


def refuse(entries: list[Entry], workloads: list[Workload], trips: RoundTrips) -> list[str]:
    """Replace the runs that are better than the bound by failures. Returns the reasons."""
    return [
        reason
        for entry in entries
        for workload in workloads
        for reason in _refuse_runs(entry, workload, trips)
    ]


def _refuse_runs(entry: Entry, workload: Workload, trips: RoundTrips) -> list[str]:
    synced = workload.name != "latency" and entry.claims_sync(workload)
    bound_us = trips.fastest_us(synced=synced)
    if bound_us is None:
        return []
    refused = []
    for (name, size), runs in entry.runs.items():
        for number, run in enumerate(runs if name == workload.name else ()):
            reason = "" if run is None else refusal(run, workload, bound_us)
            if reason:
                runs[number] = None
                with_sync = " with a sync" if synced else ""
                refused.append(f"{workload.title}, {size} B: not confirmed: {reason}{with_sync}")
    entry.failures += refused
    return refused


def _measure(directory: Path | None, seconds: float) -> list[float]:
    """Durations of round trips between this process and one that answers, which syncs a record first if there is a
    directory."""
    ours, theirs = _connected()
    process = FORK.Process(target=_answer, args=(theirs, ours, directory), daemon=True)
    process.start()
    theirs.close()
    took = []
    try:
        ours.settimeout(ANSWER_DEADLINE_S)
        ask, answer, clock, record = ours.sendall, ours.recv, time.perf_counter, bytes(RECORD_BYTES)
        for _ in range(WARM_UP):
            ask(record)
            answer(RECORD_BYTES)
        begin = now = clock()
        while now < begin + seconds:
            ask(record)
            answer(RECORD_BYTES)
            before, now = now, clock()
            took.append(now - before)
    finally:
        ours.close()
        process.join()
        process.close()
    return took


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    for each in (ours, theirs):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _answer(connection: socket.socket, other: socket.socket, directory: Path | None) -> None:
    other.close()  # a copy, which would keep the connection open
    if directory is None:
        _echo(connection, lambda record: None)
        return
    with tempfile.TemporaryFile(dir=directory) as file:
        descriptor = file.fileno()
        os.write(descriptor, bytes(FILE_BYTES))
        os.fsync(descriptor)
        position = 0

        def store(record: bytes) -> None:
            nonlocal position
            os.pwrite(descriptor, record, position)
            os.fdatasync(descriptor)
            position = (position + RECORD_BYTES) % (FILE_BYTES - RECORD_BYTES)

        _echo(connection, store)


def _echo(connection: socket.socket, store: Callable[[bytes], None]) -> None:
    with connection:
        while record := connection.recv(RECORD_BYTES):
            store(record)
            connection.sendall(record)
