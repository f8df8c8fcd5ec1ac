"""Load generator for share groups: members without a client library that acquire records and acknowledge them with
their next request.

The counterpart of `bench.load`. Each member is a connection with one share session and up to `depth` unanswered
requests. A response is decoded for the acquired offsets, which the next request of the member acknowledges (as a range
with one type for all). With a depth of one, a record is durably acknowledged before the next one is delivered, in one
round trip.

Invariants:
* Every counted record was acquired and acknowledged, both without an error; the clock stops with the response to the
  last acknowledgement.
* The topic has one partition with enough records; if none arrive for `DRY_S`, the run ends early, and the clock with
  the last record.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING

from bench.share_frames import ShareFetches, acquired
from mansio.client import blocking

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

READ_BYTES = 1 << 18
WARM_UP_ANSWERS = 3
"""Responses with records of each member before the clock starts."""
DRY_S = 1.0
LAST_ANSWER_S = 20.0


class Member:
    """One connection, its share session, and its acquired records."""

    def __init__(self, options: argparse.Namespace, topic_id: bytes, number: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", options.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.records = options.records
        member = f"raw-{os.getpid()}-{number}"
        self.fetches = ShareFetches(f"share-{options.topic}", member, topic_id)
        self.leased: list[tuple[int, int]] = []
        self.sent: deque[float] = deque()
        self.held = bytearray()
        self.answers = self.accepted = 0

    def ask(self, records: int) -> None:
        acks, self.leased = self.leased, []
        self.accepted += sum(last - first + 1 for first, last in acks)
        self.sent.append(time.perf_counter())
        self.socket.sendall(self.fetches.request(records, acks))

    def read(self, buffer: memoryview) -> list[float]:
        """Read responses; the duration of each complete one. Raises `ValueError` for an error code."""
        received = self.socket.recv_into(buffer)
        if not received:
            raise ValueError("the server closed the connection")
        self.held += buffer[:received]
        took, position, now = [], 0, time.perf_counter()
        with memoryview(self.held) as held:
            while len(held) - position >= 4:
                end = position + 4 + struct.unpack_from(">i", held, position)[0]
                if end > len(held):
                    break
                ranges = acquired(held[position:end])
                self.leased += ranges
                self.answers += bool(ranges)
                took.append(now - self.sent.popleft())
                position = end
        del self.held[:position]
        return took


class ShareLoad:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        topic_id = prepared(options.port, options.topic)
        self.members = [Member(options, topic_id, number) for number in range(options.connections)]
        self.options = options
        self.latencies: list[tuple[float, int]] = []
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.poll = select.epoll()
        self.by_descriptor = {member.socket.fileno(): member for member in self.members}
        for descriptor in self.by_descriptor:
            self.poll.register(descriptor, select.EPOLLIN)

    def accepted(self) -> int:
        return sum(member.accepted for member in self.members)

    def run(self) -> tuple[int, int, float, float]:
        """(records accepted, responses, seconds, processor use of this process in cores)."""
        for member in self.members:
            for _ in range(self.options.depth):
                member.ask(member.records)
        self.turn(lambda: all(member.answers >= WARM_UP_ANSWERS for member in self.members), LAST_ANSWER_S)
        self.latencies.clear()
        before, begin, cpu = self.accepted(), time.perf_counter(), time.process_time()
        end = begin + self.options.seconds
        last = self.turn(lambda: time.perf_counter() >= end, DRY_S)
        # Requests in flight still acquire records; these are accepted by requests for no records.
        for member in self.members:
            member.records = 0
        last = max(last, self.turn(self.is_over, LAST_ANSWER_S))
        seconds = last - begin
        done = self.accepted() - before
        return done, len(self.latencies), seconds, (time.process_time() - cpu) / (time.perf_counter() - begin)

    def is_over(self) -> bool:
        return not any(member.sent or member.leased for member in self.members)

    def turn(self, is_enough: Callable[[], bool], dry_s: float) -> float:
        """Send a request per response until the target is reached or no record arrives for a time; time of the last
        record."""
        last = time.perf_counter()
        while not is_enough() and time.perf_counter() < last + dry_s:
            for descriptor, _ in self.poll.poll(0.1):
                member = self.by_descriptor[descriptor]
                took = member.read(self.buffer)
                self.latencies += [(one, 1) for one in took]
                if member.leased or not member.records:
                    last = time.perf_counter()
                for _ in took:
                    if member.records or member.leased:
                        member.ask(member.records)
        return last


def prepared(port: int, topic: str) -> bytes:
    """The topic id; the group starts at the oldest record."""
    with blocking.connect(f"127.0.0.1:{port}") as client:
        client.admin.alter_group_config(f"share-{topic}", {"share.auto.offset.reset": "earliest"})
        return bytes(client.admin.describe_topic(topic).topic_id)
