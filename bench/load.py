"""Load generator without a client library: prebuilt requests, pipelined over N connections from one thread; responses
are counted, not decoded.

Works with Mansio and the baseline. `bench.run` starts it in its own process; it prints one line of JSON. It must not be
the bottleneck: requests are built before the clock starts, everything a connection may send goes out in one `send`,
Produce responses are counted by dividing the received bytes by their constant length, and the kernel drops fetched
records. Its processor use is part of the result.

Invariants:
* At most `depth` requests of a connection are unanswered.
* An error code in a checked response (the last one of every read) ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace

from bench import frames
from bench.share_load import ShareLoad

READ_BYTES = 1 << 20
CONNECT_DEADLINE_S = 20.0
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run. Rates per second, latencies in microseconds, `load_cpu` in cores."""

    requests: int
    seconds: float
    requests_per_s: float
    records_per_s: float
    megabytes_per_s: float
    p50_us: float
    p99_us: float
    load_cpu: float


def connect(port: int) -> socket.socket:
    """A non-blocking connection to a server that may still be starting."""
    end = time.monotonic() + CONNECT_DEADLINE_S
    while True:
        try:
            line = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setblocking(False)
            return line


class Pipeline:
    """One connection: data to send, number of outstanding responses, and send times of their requests."""

    def __init__(self, port: int, topic: str, requests: list[bytes], depth: int) -> None:
        self.socket = connect(port)
        self.topic = topic
        self.depth = depth
        self.request_bytes = len(requests[0])
        turns = -(-depth // len(requests))
        self.block = memoryview(b"".join(requests * turns))
        self.cursor = 0  # position of the next request in the block
        self.unsent = memoryview(b"")
        self.unanswered = 0
        self.sent: deque[tuple[float, int]] = deque()

    def send(self, now: float) -> None:
        """Send requests up to `depth`, as far as the socket accepts."""
        while True:
            if not self.unsent:
                room = min(
                    self.depth - self.unanswered, (len(self.block) - self.cursor) // self.request_bytes
                )
                if room <= 0:
                    return
                end = self.cursor + room * self.request_bytes
                self.unsent = self.block[self.cursor : end]
                self.cursor = end % len(self.block)
                self.unanswered += room
                self.sent.append((now, room))
            try:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
            except BlockingIOError:
                return

    def answered(self, count: int, now: float, latencies: list[tuple[float, int]]) -> None:
        """Match `count` responses with the oldest requests."""
        self.unanswered -= count
        while count:
            at, waiting = self.sent[0]
            taken = min(count, waiting)
            latencies.append((now - at, taken))
            count -= taken
            if taken == waiting:
                self.sent.popleft()
            else:
                self.sent[0] = (at, waiting - taken)


class ProduceResponses:
    """Counts Produce responses: all responses of a connection have the length of the first one."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.length = 0
        self.front = b""  # start of an incomplete response

    def read(self, line: socket.socket, buffer: memoryview) -> tuple[int, int]:
        """(responses, bytes) received; (-1, 0) if there is no data."""
        held = len(self.front)
        buffer[:held] = self.front
        try:
            received = line.recv_into(buffer[held:])
        except BlockingIOError:
            return -1, 0
        if not received:
            sys.exit("the server closed the connection")
        total = held + received
        if not self.length:
            if total < 4:
                self.front = bytes(buffer[:total])
                return 0, received
            self.length = 4 + struct.unpack_from(">i", buffer)[0]
        count, rest = divmod(total, self.length)
        if count:
            last = buffer[(count - 1) * self.length : count * self.length]
            if struct.unpack_from(">i", last)[0] != self.length - 4:
                sys.exit("answers of different lengths")
            check(frames.produce_error(last, self.topic))
        self.front = bytes(buffer[total - rest : total])
        return count, received


class FetchResponses:
    """Counts Fetch responses: the head of each is read, the kernel drops the records."""

    FRONT_BYTES = 34

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.front = bytearray()
        self.left = 0

    def read(self, line: socket.socket, buffer: memoryview) -> tuple[int, int]:
        """As `ProduceResponses.read`, at most one response."""
        front_bytes = self.FRONT_BYTES + len(self.topic)
        try:
            if self.left:
                received = line.recv_into(buffer[: min(self.left, READ_BYTES)], 0, socket.MSG_TRUNC)
                self.left -= received
                return (0 if self.left else 1), received or sys.exit("the server closed the connection")
            front = line.recv(front_bytes - len(self.front))
        except BlockingIOError:
            return -1, 0
        if not front:
            sys.exit("the server closed the connection")
        self.front += front
        if len(self.front) == front_bytes:
            check(frames.fetch_error(self.front, self.topic))
            self.left = 4 + struct.unpack_from(">i", self.front)[0] - front_bytes
            self.front.clear()
        return 0, len(front)


def check(error: int) -> None:
    """Raise for an error code of the server."""
    if error:
        sys.exit(f"the server answered with error code {error}")


def run(options: argparse.Namespace) -> Result:
    """Produce or fetch at full speed until the time or the bytes are used up."""
    producing = options.mode == "produce"
    batch = frames.batch(options.records, options.size) if producing else b""
    pipelines: dict[int, tuple[Pipeline, ProduceResponses | FetchResponses]] = {}
    poll = select.epoll()
    for number in range(options.connections):
        partitions = range(number % options.partitions, options.partitions, options.connections)
        if producing:
            requests = [frames.produce_request(options.topic, p, options.acks, batch) for p in partitions]
        else:
            requests = [frames.fetch_request(options.topic, p, 0, options.fetch_bytes) for p in partitions]
        pipeline = Pipeline(options.port, options.topic, requests, options.depth)
        answers = (ProduceResponses if producing else FetchResponses)(options.topic)
        pipelines[pipeline.socket.fileno()] = pipeline, answers
        poll.register(pipeline.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    return _drive(options, poll, pipelines, len(batch))


def _drive(
    options: argparse.Namespace,
    poll: select.epoll,
    pipelines: dict[int, tuple[Pipeline, ProduceResponses | FetchResponses]],
    batch_bytes: int,
) -> Result:
    buffer = memoryview(bytearray(READ_BYTES + 4096))
    latencies: list[tuple[float, int]] = []
    done = received_bytes = 0
    clock = time.perf_counter
    warm_end = clock() + options.warm_up
    begin = end = NEVER
    requests_max = options.requests
    if batch_bytes:
        requests_max = min(requests_max, options.bytes // batch_bytes)
    now, cpu = clock(), time.process_time()
    while now < end and done < requests_max:
        for descriptor, _ in poll.poll(0.1):
            pipeline, answers = pipelines[descriptor]
            pipeline.send(clock())
            while True:
                count, received = answers.read(pipeline.socket, buffer)
                if count < 0:
                    break
                received_bytes += received
                if count:
                    done += count
                    now = clock()
                    pipeline.answered(count, now, latencies)
                    pipeline.send(now)
        now = clock()
        if begin == NEVER and now >= warm_end:
            begin, end, cpu = now, now + options.seconds, time.process_time()
            requests_max += done
            done = received_bytes = 0
            latencies.clear()
    if begin == NEVER:
        sys.exit("the limit of bytes or requests was reached before the warm-up was over")
    seconds = now - begin
    moved = done * batch_bytes or received_bytes
    return _result(done, seconds, options.records, moved, latencies, (time.process_time() - cpu) / seconds)


def deliver(options: argparse.Namespace) -> Result:
    """A record every 1/rate s on one connection, a waiting Fetch on another: from due time to arrival."""
    topic = options.topic
    producer, consumer = connect(options.port), connect(options.port)
    request = memoryview(frames.produce_request(topic, 0, options.acks, frames.batch(1, options.size)))
    buffer = memoryview(bytearray(READ_BYTES))
    consumer.send(frames.fetch_request(topic, 0, 0, READ_BYTES // 2))
    total = int(options.rate * (options.warm_up + options.seconds))
    warm = int(options.rate * options.warm_up)
    latencies: list[tuple[float, int]] = []
    sent = arrived = held = 0
    start, cpu = time.perf_counter() + 0.05, time.process_time()
    give_up = start + total / options.rate + CONNECT_DEADLINE_S
    while arrived < total:
        now = time.perf_counter()
        if now > give_up:
            sys.exit(f"only {arrived} of {total} records were delivered")
        if sent < total and now >= start + sent / options.rate:
            producer.send(request)
            sent += 1
        with contextlib.suppress(BlockingIOError):  # its answers are not looked at: arrival is the proof
            producer.recv_into(buffer[held:])
        try:
            held += consumer.recv_into(buffer[held:])
        except BlockingIOError:
            continue
        if held < 4 or held < 4 + struct.unpack_from(">i", buffer)[0]:
            continue
        check(frames.fetch_error(buffer, topic))
        now = time.perf_counter()
        for offset, _ in frames.fetched_batches(buffer[:held], topic):
            if offset >= warm:
                latencies.append((now - start - offset / options.rate, 1))
            arrived = offset + 1
        held = 0
        consumer.send(frames.fetch_request(topic, 0, arrived, READ_BYTES // 2))
    seconds = time.perf_counter() - start
    return _result(total, seconds, 1, total * options.size, latencies, (time.process_time() - cpu) / seconds)


def share(options: argparse.Namespace) -> Result:
    """Members of a share group lease and accept what is there."""
    load = ShareLoad(options)
    try:
        done, answers, seconds, cpu = load.run()
    except ValueError as error:
        sys.exit(str(error))
    result = _result(answers, seconds, 1, done * options.size, load.latencies, cpu)
    return replace(result, records_per_s=round(done / seconds, 1))


def _result(
    requests: int, seconds: float, records: int, moved: int, latencies: list[tuple[float, int]], cpu: float
) -> Result:
    latencies.sort()
    total = sum(count for _, count in latencies)

    def percentile(part: float) -> float:
        left = total * part
        for latency, count in latencies:
            left -= count
            if left <= 0:
                return round(latency * 1e6, 1)
        return 0.0

    return Result(
        requests=requests,
        seconds=round(seconds, 3),
        requests_per_s=round(requests / seconds, 1),
        records_per_s=round(requests * records / seconds, 1),
        megabytes_per_s=round(moved / seconds / 1e6, 1),
        p50_us=percentile(0.5),
        p99_us=percentile(0.99),
        load_cpu=round(cpu, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--port", type=int, default=9092)
    parser.add_argument("--topic", default="bench")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--records", type=int, default=1, help="in each batch, or leased at a time")
    parser.add_argument("--size", type=int, default=100, help="bytes of each record's value")
    parser.add_argument("--acks", type=int, default=1)
    parser.add_argument("--fetch-bytes", type=int, default=1 << 20)
    parser.add_argument("--rate", type=float, default=1000.0, help="records per second of `deliver`")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--warm-up", type=float, default=0.2, help="seconds before the clock starts")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="stop after this many produced bytes")
    parser.add_argument("--requests", type=int, default=sys.maxsize, help="stop after this many answers")
    parser.add_argument("--cpu", type=int, help="run on this processor only")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    print(json.dumps(asdict(MODES[options.mode](options))))


MODES = {"produce": run, "fetch": run, "deliver": deliver, "share": share}


if __name__ == "__main__":
    main()
