"""beanstalkd with its binlog, synced before every reply (-f0).

Single operations use greenstalk. The protocol has no batches, but commands may be pipelined; no Python client supports
that, so batches are written directly to a socket, which is the fastest method available.
"""

from __future__ import annotations

import socket
import subprocess
from functools import partial
from typing import TYPE_CHECKING

from bench.peers.peer import TAKE_WAIT_S, Candidate, PeerUnavailableError, ServerLocation, find_program
from bench.peers.releases import of_debian
from bench.peers.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    import greenstalk
except ImportError:
    greenstalk = None  # reported when it is measured

PRIORITY, TIME_TO_RUN_S = 1024, 60


def serve(place: ServerLocation) -> Server:
    if greenstalk is None:
        raise PeerUnavailableError("no Python package greenstalk")
    server = Server(place)
    server.start(
        [find_program("beanstalkd"), "-l", "127.0.0.1", "-p", place.port, "-b", place.directory, "-f0"]
    )
    server.wait_for_port()
    return server


class Pipelined:
    """A connection with pipelined commands."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.socket.makefile("rb", 1 << 16)

    def ask(self, commands: bytes, count: int, expected: bytes) -> None:
        self.socket.sendall(commands)
        for _ in range(count):
            answer = self.answers.readline()
            if not answer.startswith(expected):
                raise RuntimeError(f"beanstalkd answered {answer!r}")


class Driver:
    def __init__(self, port: int) -> None:
        self.port = port

    async def version(self) -> str:
        command = [find_program("beanstalkd"), "-v"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: ASYNC221  # nothing else runs
        return f"{done.stdout.split()[-1]}, greenstalk {greenstalk.__version__}"

    async def create(self, queue: str) -> None:
        """Nothing to do: tubes are created on first use."""

    async def delete(self, queue: str) -> None:
        """Empty the tube: remaining jobs would stay in memory and in the binlog."""
        consumer = Consumer(self.port, queue, confirmed=True)
        while await consumer.take(1000):
            pass

    async def producer(self, queue: str) -> Producer:
        return Producer(self.port, queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        return Consumer(self.port, queue, confirmed=confirmed)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        return Deliverer(Consumer(self.port, queue, confirmed=False), count)


class Producer:
    def __init__(self, port: int, queue: str) -> None:
        self.client = greenstalk.Client(("127.0.0.1", port), use=queue, encoding=None)
        self.pipelined = Pipelined(port)
        self.pipelined.ask(f"use {queue}\r\n".encode(), 1, b"USING")

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            self.client.put(values[0], PRIORITY, 0, TIME_TO_RUN_S)
            return
        commands = b"".join(
            b"put %d 0 %d %d\r\n%b\r\n" % (PRIORITY, TIME_TO_RUN_S, len(value), value) for value in values
        )
        self.pipelined.ask(commands, len(values), b"INSERTED")

    async def close(self) -> None:
        self.client.close()


class Consumer:
    """The first reserve waits, the others take what is there. An acknowledgement that need not be confirmed leaves
    with the next reserve."""

    def __init__(self, port: int, queue: str, *, confirmed: bool) -> None:
        self.confirmed = confirmed
        self.connection = Pipelined(port)
        self.connection.ask(f"watch {queue}\r\nignore default\r\n".encode(), 2, b"WATCHING")
        self.unacknowledged: list[bytes] = []

    async def take(self, count: int) -> list[bytes]:
        bodies = self.reserve(count if self.confirmed else 1)
        if self.confirmed and bodies:
            self.connection.ask(*self.deletes())
        return bodies

    def reserve(self, count: int) -> list[bytes]:
        """Delete the unacknowledged jobs and reserve `count` more."""
        deletes, deleted, expected = self.deletes()
        wait_s = max(1, round(TAKE_WAIT_S))
        reserves = b"reserve-with-timeout %d\r\n" % wait_s + b"reserve-with-timeout 0\r\n" * (count - 1)
        self.connection.ask(deletes + reserves, deleted, expected)
        answers, jobs = self.connection.answers, []
        for _ in range(count):
            words = answers.readline().split()
            if words[0] == b"RESERVED":
                jobs.append((words[1], answers.read(int(words[2]) + 2)[:-2]))
        self.unacknowledged = [identity for identity, _ in jobs]
        return [body for _, body in jobs]

    def deletes(self) -> tuple[bytes, int, bytes]:
        identities, self.unacknowledged = self.unacknowledged, []
        return b"".join(b"delete %b\r\n" % identity for identity in identities), len(identities), b"DELETED"

    async def close(self) -> None:
        self.connection.socket.close()


class Deliverer:
    """Deletes of the previous jobs and reserves of the next in one write; a delete is confirmed after its fsync."""

    def __init__(self, consumer: Consumer, count: int) -> None:
        self.consumer, self.count = consumer, count

    async def next(self) -> list[bytes]:
        return self.consumer.reserve(self.count)

    async def acknowledge(self) -> None:
        self.consumer.connection.ask(*self.consumer.deletes())

    async def close(self) -> None:
        await self.consumer.close()


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name="beanstalkd",
            title="beanstalkd -f0",
            durability="fsync before every reply",
            is_synced=True,
            server="beanstalkd",
            serve=serve,
            driver=Driver,
            confirmation="the answer to delete, in one round trip with reserve",
            released=partial(of_debian, "beanstalkd"),
        )
    ]
