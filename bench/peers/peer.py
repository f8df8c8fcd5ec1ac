"""Interfaces of a peer: its server, and a client that publishes and consumes.

Client methods are coroutines, so that asyncio and blocking clients are measured by one loop; a blocking client blocks,
because nothing else runs in its process.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import date

    from bench.peers.server import Server

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"
TAKE_WAIT_S = 0.5
"""How long `take` of a consumer waits for the first message."""


class PeerUnavailableError(Exception):
    """A peer cannot run on this machine; the message is the reason."""


class Producer(Protocol):
    """Publishes to one queue."""

    async def publish(self, values: Sequence[bytes]) -> None:
        """Publish these and wait until all are acknowledged, with the fastest method of the peer for that number."""

    async def close(self) -> None: ...


class Consumer(Protocol):
    """Consumes from one queue; subscribed when it is constructed."""

    async def take(self, count: int) -> list[bytes]:
        """Up to `count` acknowledged messages as soon as there is one; none after `TAKE_WAIT_S`."""

    async def close(self) -> None: ...


class Deliverer(Protocol):
    """Consumes records from one queue and acknowledges each one; subscribed when it is constructed.

    Each record must be individually acknowledgeable: committing an offset does not count. A client may combine
    acknowledgements in its fastest way.
    """

    async def next(self) -> list[bytes]:
        """Acknowledge the previous records and return the next ones, up to the requested number; none after
        `TAKE_WAIT_S`.

        One at a time: the server has confirmed the acknowledgement before the next record is returned, and no other
        record was leased meanwhile; one message may carry both requests (`Candidate.confirmation` says what confirms
        it). A client that acknowledges without an answer, or in the background, has no row. Several at a time: the
        next batch may be returned while acknowledgements are in flight, and be prefetched, if that is how the peer
        works."""

    async def acknowledge(self) -> None:
        """Acknowledge the returned records and wait until all acknowledgements are confirmed if the protocol has a
        response to them, else until the server has processed them."""

    async def close(self) -> None: ...


class Driver(Protocol):
    """One client library with one server. Constructed in every forked client process."""

    async def version(self) -> str: ...
    async def create(self, queue: str) -> None: ...
    async def delete(self, queue: str) -> None: ...
    async def producer(self, queue: str) -> Producer: ...
    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        """`confirmed`: every `take` waits for the response to its acknowledgements if the protocol has one; otherwise
        they are sent, and the next messages need not wait for them."""
        ...

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        """A deliverer that gets `count` records at a time."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLocation:
    """Location of a server: its empty directory and its port on 127.0.0.1.

    `trace`: file for the times of its fsyncs; the server then runs under strace.
    """

    directory: Path
    port: int
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the table: a configured server and a client.

    `serve` names and starts the server; candidates with the same `server` share it. `is_synced`: according to the
    configuration, an acknowledged message is on the disk (the counted fsyncs decide). `confirmation`: what tells a
    consumer of one record at a time that its acknowledgement was carried out. `released`: when this version of the
    server, which `Driver.version` names first, was released; None if that is not known. `skips`: unsupported workloads.
    `is_raw`: prebuilt requests of `bench.load` instead of a client: the capacity of the server.
    """

    name: str
    title: str
    durability: str
    is_synced: bool
    server: str
    serve: Callable[[ServerLocation], Server] = field(repr=False)
    driver: Callable[[int], Driver] = field(repr=False)
    confirmation: str
    released: Callable[[str], date | None] = field(repr=False, default=lambda version: None)
    skips: frozenset[str] = frozenset()
    is_raw: bool = False

    @property
    def is_mansio(self) -> bool:
        return self.server == "mansio"


def find_program(name: str) -> str:
    """The path of a program in .tools/, or else of the system. Raises `PeerUnavailableError`."""
    found = shutil.which(str(TOOLS / "bin" / name)) or shutil.which(name)
    if found is None:
        raise PeerUnavailableError(f"no program {name} in .tools/bin or on the PATH")
    return found
