"""What a peer is: a server to start, and a client that publishes and takes.

Owns the interfaces between one peer's file and everything that is measured, and how programs are found. A client's
methods are coroutines so that asyncio and blocking clients are measured by one loop; a blocking client simply blocks,
as nothing else runs in its process.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.peers.server import Server

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".tools"
TAKE_WAIT_S = 0.5
"""How long a consumer's `take` waits for the first message before it gives up."""


class PeerUnavailableError(Exception):
    """A peer cannot run on this machine; the text says why."""


class Producer(Protocol):
    """Publishes to one queue."""

    async def publish(self, values: Sequence[bytes]) -> None:
        """Send these and wait until every one is acknowledged, by the peer's quickest way for so many."""

    async def close(self) -> None: ...


class Consumer(Protocol):
    """Takes from one queue, and has taken its place there when it is made."""

    async def take(self, count: int) -> list[bytes]:
        """Up to `count` messages as soon as there is one, acknowledged; none after `TAKE_WAIT_S`."""

    async def close(self) -> None: ...


class Deliverer(Protocol):
    """Gets records from one queue and acknowledges each; has taken its place there when it is made.

    Each record could be acknowledged by itself, or given back: what moves one mark for all before it is no
    acknowledgement of records. How the peer's client says it of many at once is its own quick way.
    """

    async def next(self) -> list[bytes]:
        """Acknowledge what was handed out before, and hand out more, as many as was asked for if there are so many;
        none after `TAKE_WAIT_S`.

        One at a time: the acknowledgement is confirmed when the next record is handed out, and nothing was fetched
        ahead. Both may be asked for in one message. Of several at a time the next batch may be handed out while
        acknowledgements are under way, and be fetched ahead: that is the peer's own way."""

    async def acknowledge(self) -> None:
        """Acknowledge what was handed out, and wait until all acknowledgements are confirmed, where the protocol has
        an answer to them; else until the server has handled them."""

    async def close(self) -> None: ...


class Driver(Protocol):
    """One client library against one server. Made in every client process anew, after it was forked."""

    async def version(self) -> str: ...
    async def create(self, queue: str) -> None: ...
    async def delete(self, queue: str) -> None: ...
    async def producer(self, queue: str) -> Producer: ...
    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        """`confirmed`: every `take` waits until the server has answered the acknowledgements, where its protocol has
        an answer; otherwise they are sent and the next messages need not wait for them."""
        ...

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        """One that is handed `count` records at a time."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLocation:
    """Where a server is to run: an empty directory of its own, a port on 127.0.0.1, and what else there is.

    `trace`: a file for the times of its fsyncs; the server then runs under strace.
    """

    directory: Path
    port: int
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the table: a server as configured, and a client.

    `serve` names and starts the server; contestants with the same `server` share it. `is_synced`: the configuration
    says that an acknowledged message is on the disk (what was counted decides). `skips`: workloads it has no way for.
    `is_raw`: prebuilt requests of `bench.load` instead of a client: what the server can do, not what a program gets.
    """

    name: str
    title: str
    durability: str
    is_synced: bool
    server: str
    serve: Callable[[ServerLocation], Server] = field(repr=False)
    driver: Callable[[int], Driver] = field(repr=False)
    skips: frozenset[str] = frozenset()
    is_raw: bool = False

    @property
    def is_mansio(self) -> bool:
        return self.server == "mansio"


def find_program(name: str) -> str:
    """The path of a program unpacked into .tools/, or else of the system's. `PeerUnavailableError`."""
    found = shutil.which(str(TOOLS / "bin" / name)) or shutil.which(name)
    if found is None:
        raise PeerUnavailableError(f"no program {name} in .tools/bin or on the PATH")
    return found
