"""Price of verification: first and repeated reads, beside a broker that verifies nothing.

Two brokers have copies of the same files, which are in the page cache, and are read alternately. One is made to forget
before each first read what it has verified, as if it had been restarted; the other takes everything on its disk for
verified. Meanwhile another client produces small batches to another topic of the same broker; its slowest responses
show what others pay. System calls (with strace, if it is installed) and Python calls of repeated fetches are counted.

    python -m bench.verified_reads [--pairs 30] [--megabytes 64]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from bench import frames
from bench.interpreter import interpreter
from bench.servers import Server, create_topic, free_port

TOPIC, OTHER = "read", "other"
FETCH_BYTES = 1 << 20
DEPTH = 16
ROUNDS = 5
"""Pairs of processes: two processes that do the same may differ by a factor of two, by the layout of their heaps."""

COUNTED_FETCHES = 200

SERVER = """
import signal, sys
from mansio.storage import log
verified, counts = sys.argv[1] == "verified", sys.argv[2]
del sys.argv[1:3]
logs, made = [], log.Log.__init__
def init(self, *given, **named):
    made(self, *given, **named)
    logs.append(self)
    if not verified:
        for segment in self._segments.segments:
            segment.checked = None
log.Log.__init__ = init
def forget(*_):
    if verified:
        for each in logs:
            each.forget_checks()
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
def toggle(*_):
    global calls
    if sys.getprofile() is None:
        calls = 0
        sys.setprofile(count)
    else:
        sys.setprofile(None)
        with open(counts, "w") as file:
            file.write(str(calls))
signal.signal(signal.SIGUSR1, forget)
signal.signal(signal.SIGUSR2, toggle)
from mansio.cli.main import main
sys.exit(main())
"""
"""The broker; SIGUSR1: forget what is verified, SIGUSR2: begin and end to count calls."""


class Case(NamedTuple):
    """Batches of `records` records of `record_bytes` bytes. `first_min`: required ratio of the first read."""

    name: str
    records: int
    record_bytes: int
    share: float
    """Of the amount of data."""
    first_min: float | None


CASES = (
    Case("batches of 256 KB", 256, 1024, 1.0, 0.8),
    Case("batches of 10 KB", 10, 1024, 1.0, 0.67),
    Case("single records of 100 B", 1, 100, 0.1, None),
)


class Peer:
    """A connection that has one request in flight."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(4 << 20)

    def exchange(self, request: bytes) -> memoryview:
        """The framed response."""
        self._socket.sendall(request)
        view, filled, wanted = memoryview(self._buffer), 0, 4
        while filled < wanted:
            filled += self._socket.recv_into(view[filled:])
            if wanted == 4 and filled >= 4:
                wanted = 4 + struct.unpack_from(">i", view)[0]
        return view[:wanted]

    def pipeline(self, request: bytes, count: int) -> None:
        """Send a request many times, `DEPTH` of them at once."""
        sent = 0
        for received in range(count):
            while sent < min(count, received + DEPTH):
                self._socket.sendall(request)
                sent += 1
            length = struct.unpack(">i", self._exactly(4))[0]
            self._exactly(length)

    def _exactly(self, size: int) -> memoryview:
        view, filled = memoryview(self._buffer)[:size], 0
        while filled < size:
            filled += self._socket.recv_into(view[filled:])
        return view

    def close(self) -> None:
        self._socket.close()


def read_all(peer: Peer, end_offset: int) -> float:
    """Bytes per second of fetching the whole partition."""
    offset = size = 0
    began = time.perf_counter()
    while offset < end_offset:
        response = peer.exchange(frames.fetch_request(TOPIC, 0, offset, FETCH_BYTES))
        if frames.fetch_error(response, TOPIC):
            raise SystemExit(f"error {frames.fetch_error(response, TOPIC)} at offset {offset}")
        head = 34 + len(TOPIC) + 8 * 3 + 4 + 4 + 4
        position, last = head, -1
        while position + 61 <= len(response):
            base, length = struct.unpack_from(">qi", response, position)
            if position + 12 + length > len(response):
                break
            last = base + struct.unpack_from(">i", response, position + 23)[0]
            position += 12 + length
        if last >= 0:
            offset = last + 1
        size += len(response)
    return size / (time.perf_counter() - began)


class Others(threading.Thread):
    """A client that produces and fetches small batches of another topic; `waits` are its times of response, in s."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._peer = Peer(port)
        self._ended = threading.Event()
        self.waits: list[float] = []

    def run(self) -> None:
        request = frames.produce_request(OTHER, 0, 1, frames.batch(1, 100))
        while not self._ended.is_set():
            began = time.perf_counter()
            self._peer.exchange(request)
            self.waits.append(time.perf_counter() - began)
            time.sleep(0.001)

    def end(self) -> list[float]:
        self._ended.set()
        self.join()
        self._peer.close()
        return self.waits


def server(data: Path, *, verified: bool) -> Server:
    """A broker on `data`."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, "verified" if verified else "unverified"]
    command += [str(data.with_suffix(".calls")), "serve", "--data", str(data)]
    one = Server([*command, "--kafka", f"127.0.0.1:{port}", "--http", ""], port, data, None, b"ready")
    one.wait_idle()
    return one


def fill(data: Path, case: Case, megabytes: float) -> int:
    """Write the partition; its end offset."""
    batch = frames.batch(case.records, case.record_bytes)
    count = max(1, round(megabytes * case.share * (1 << 20) / len(batch)))
    one = server(data, verified=True)
    try:
        create_topic(one, TOPIC, 1)
        create_topic(one, OTHER, 1)
        peer = Peer(one.port)
        peer.pipeline(frames.produce_request(TOPIC, 0, 1, batch), count)
        peer.close()
    finally:
        one.end()
    return count * case.records


def calls_of(one: Server, peer: Peer, end_offset: int) -> tuple[float, float | None]:
    """(Python calls, system calls or None) of one repeated fetch."""
    request = frames.fetch_request(TOPIC, 0, end_offset // 2, FETCH_BYTES)
    peer.exchange(request)
    counts = one.data.with_suffix(".calls")
    one.process.send_signal(signal.SIGUSR2)
    time.sleep(0.3)
    for _ in range(COUNTED_FETCHES):
        peer.exchange(request)
    one.process.send_signal(signal.SIGUSR2)
    end = time.monotonic() + 10
    while not (counts.exists() and counts.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    python_calls = int(counts.read_text()) / COUNTED_FETCHES
    counts.unlink()
    if shutil.which("strace") is None:
        return python_calls, None
    output = one.data.with_suffix(".strace")
    command = ["strace", "-f", "-c", "-e", "trace=!futex,epoll_wait,epoll_pwait,clock_nanosleep"]
    trace = subprocess.Popen(
        [*command, "-o", str(output), "-p", str(one.process.pid)], stderr=subprocess.DEVNULL
    )
    time.sleep(1)
    for _ in range(COUNTED_FETCHES):
        peer.exchange(request)
    trace.send_signal(signal.SIGINT)
    trace.wait(10)
    total = [line for line in output.read_text().splitlines() if line.endswith("total")]
    return python_calls, int(total[0].split()[2 if "." in total[0].split()[2] else 3]) / COUNTED_FETCHES


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def run(case: Case, directory: Path, pairs: int, megabytes: float) -> None:
    """Measure and print one case."""
    written, first_data, second_data = (directory / name for name in ("written", "verified", "unverified"))
    end_offset = fill(written, case, megabytes)
    for data in (first_data, second_data):  # both are copies: how a file was written shows when it is read
        shutil.copytree(written, data)
    shutil.rmtree(written)
    firsts: dict[bool, list[float]] = {True: [], False: []}
    repeated: dict[bool, list[float]] = {True: [], False: []}
    waits: dict[bool, list[float]] = {True: [], False: []}
    used: dict[str, dict[bool, list[float]]] = {
        name: {True: [], False: []} for name in ("first read", "repeated read")
    }
    calls: dict[bool, tuple[float, float | None]] = {}
    for number in range(ROUNDS):
        servers = {True: server(first_data, verified=True), False: server(second_data, verified=False)}
        try:
            peers = {kind: Peer(one.port) for kind, one in servers.items()}
            for kind in servers:
                read_all(peers[kind], end_offset)
            for pair in range(-(-pairs // ROUNDS)):
                for kind in (True, False) if pair % 2 else (False, True):
                    servers[kind].process.send_signal(signal.SIGUSR1)
                    time.sleep(0.05)
                    others = Others(servers[kind].port)
                    others.start()
                    before = servers[kind].cpu_precise_s()
                    firsts[kind].append(read_all(peers[kind], end_offset))
                    used["first read"][kind].append(servers[kind].cpu_precise_s() - before)
                    waits[kind] += others.end()
            for one in servers.values():
                one.wait_idle()  # what the other client produced is flushed
            for pair in range(-(-pairs // ROUNDS)):
                for kind in (True, False) if pair % 2 else (False, True):
                    before = servers[kind].cpu_precise_s()
                    repeated[kind].append(read_all(peers[kind], end_offset))
                    used["repeated read"][kind].append(servers[kind].cpu_precise_s() - before)
            if number == ROUNDS - 1:
                calls = {kind: calls_of(one, peers[kind], end_offset) for kind, one in servers.items()}
        finally:
            for one in servers.values():
                one.end()
    print(f"\n{case.name}, {end_offset // case.records} batches, {len(repeated[True])} pairs")
    for name, rates in (("first read", firsts), ("repeated read", repeated)):
        ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
        print(
            f"  {name}: {statistics.median(rates[True]) / 1e6:.0f} MB/s verified, "
            f"{statistics.median(rates[False]) / 1e6:.0f} MB/s not; ratio {statistics.median(ratios):.2f} "
            f"(quartiles {quantile(ratios, 0.25):.2f} to {quantile(ratios, 0.75):.2f})"
        )
        times = [one / other for one, other in zip(used[name][True], used[name][False], strict=True)]
        print(
            f"    processor time of the broker: {1000 * statistics.median(used[name][True]):.1f} and "
            f"{1000 * statistics.median(used[name][False]):.1f} ms; ratio {statistics.median(times):.2f} "
            f"(quartiles {quantile(times, 0.25):.2f} to {quantile(times, 0.75):.2f})"
        )
    if case.first_min is not None:
        print(f"  required of the first read: {case.first_min}")
    p99 = {kind: 1000 * quantile(found, 0.99) for kind, found in waits.items()}
    print(f"  p99 of others meanwhile: {p99[True]:.1f} ms verified, {p99[False]:.1f} ms not")
    for kind, (python_calls, system_calls) in calls.items():
        name = "verified" if kind else "not verified"
        traced = "not counted" if system_calls is None else f"{system_calls:.2f}"
        print(f"  repeated fetch, {name}: {python_calls:.1f} calls, {traced} system calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--megabytes", type=float, default=64)
    options = parser.parse_args()
    print(f"{interpreter()}, {len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}")
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="mansio-bench-") as directory:
            run(case, Path(directory), options.pairs, options.megabytes)


if __name__ == "__main__":
    main()
