"""Network of a cluster under test: a proxy between brokers, clients and etcd whose connections can be blocked or
delayed, in one direction or both.

A broker advertises one address to everybody, so who is on the other side of a connection is found out by the process
that holds its socket. Owns one thread with a loop, and all listening ports and connections on it.

Always true: what is lost, is lost in silence, and no connection ends by it, as where packets are dropped; a connection
that has lost bytes is closed before bytes pass again, because a stream has no holes.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from support.machine import scaled
from support.paths import free_port
from support.socket_owner import holds, socket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

PIECE_BYTES: Final = 1 << 17
DEADLINE_S: Final = 10.0
LOOKS: Final = 100
LOOK_AGAIN_S: Final = 0.01

CLIENTS: Final = 0
ETCD: Final = -1
"""Ends of a way that are no broker; brokers go by their numbers."""


class Way(NamedTuple):
    """What travels from one end to another."""

    source: int
    target: int


class _Passage:
    """One connection, both halves of it."""

    __slots__ = ("called", "caller", "ends", "lost")

    def __init__(
        self, caller: int, called: int, ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    ) -> None:
        self.caller = caller
        self.called = called
        self.ends = ends
        self.lost: set[Way] = set()
        """Directions in which something was lost."""

    def close(self) -> None:
        for end in self.ends:
            end.transport.abort()


class Network:
    """See the module. `pids`: the processes of the brokers now, by their numbers."""

    def __init__(self, pids: Callable[[], Mapping[int, int]]) -> None:
        self._pids = pids
        self._shut: frozenset[Way] = frozenset()
        self._slow: dict[Way, float] = {}
        self._passages: set[_Passage] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network under test", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # what was closed just now is let go in the loop's next turn

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(scaled(DEADLINE_S))
        self._loop.close()

    def listener(self, called: int, port: int, *, caller: int | None = None) -> int:
        """A port that leads to `port`, where `called` listens. `caller`: who uses it; None: any caller."""
        own = free_port()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._pass_on(reader, writer, called, port, caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        async def listen() -> None:
            server = await asyncio.start_server(accepted, "127.0.0.1", own)
            self._tasks.add(asyncio.ensure_future(server.serve_forever()))

        self._call(listen())
        return own

    def shut(self, ways: Iterable[Way]) -> None:
        """From now on nothing gets through on these ways, on all others everything."""

        async def change() -> None:
            self._shut = frozenset(ways)
            for passage in [one for one in self._passages if not one.lost <= self._shut]:
                passage.close()

        self._call(change())

    def part(self, *pairs: tuple[int, int]) -> None:
        """Nothing between the two of a pair any more, in either direction; everything between all others."""
        self.shut(way for one, other in pairs for way in (Way(one, other), Way(other, one)))

    def slow(self, ways: Iterable[Way], delay_s: float) -> None:
        """From now on every piece on these ways takes so much longer, and what comes behind it waits."""

        async def change() -> None:
            self._slow = dict.fromkeys(ways, delay_s)

        self._call(change())

    def heal(self) -> None:
        self.slow((), 0)
        self.shut(())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(scaled(DEADLINE_S))

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        called: int,
        port: int,
        caller: int | None,
    ) -> None:
        try:
            if caller is None:
                ends = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
                caller = await self._caller(*ends)
            answers, to_called = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, asyncio.CancelledError) as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        passage = _Passage(caller, called, (writer, to_called))
        self._passages.add(passage)
        try:
            await asyncio.gather(
                self._copy(passage, reader, to_called, Way(caller, called)),
                self._copy(passage, answers, writer, Way(called, caller)),
            )
        finally:
            self._passages.discard(passage)
            passage.close()

    async def _copy(
        self, passage: _Passage, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: Way
    ) -> None:
        with suppress(OSError):
            while piece := await source.read(PIECE_BYTES):
                if way in self._slow:
                    await asyncio.sleep(self._slow[way])
                if way in self._shut:
                    passage.lost.add(way)
                    continue
                target.write(piece)
                await target.drain()
        if way in self._shut:  # nobody hears that it ended
            passage.lost.add(way)
        else:
            passage.close()

    async def _caller(self, port: int, listener: int) -> int:
        """The broker whose connection from this port to this listener it is; `CLIENTS` for any other. Raises OSError
        for a connection that nobody holds any more.

        One that is not found is looked for again: a broker that is taken for a client is cut off from nobody."""
        for _ in range(LOOKS):
            if (inode := socket_of(port, listener)) is not None:
                return self._holder(inode)
            await asyncio.sleep(LOOK_AGAIN_S)
        raise ConnectionAbortedError(f"nobody holds the socket of port {port}")

    def _holder(self, inode: int) -> int:
        for node_id, pid in self._pids().items():
            if holds(pid, inode):
                return node_id
        return CLIENTS
