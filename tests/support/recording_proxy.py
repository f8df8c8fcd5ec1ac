"""A proxy between a Kafka client and a broker that keeps the requests it passes on, as they were on the wire.

Owns one listening port of loopback and the connections made to it. Always true: bytes are passed on unchanged, in
both directions; `requests` holds each different request once, in the order of its first appearance. What differs
from call to call without a meaning for the broker (correlation id, client id) does not make a request different.
Requests of the clients whose id starts with `UNRECORDED` are passed on only: tests prepare with them what they need.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_DEADLINE_S = 10.0
PIECE_BYTES = 1 << 16
REQUESTS_MAX = 2_000
UNRECORDED = "setup"
HEAD = struct.Struct(">ihhi")
"""Length of what follows it, API key, version, correlation id."""
NAME_LENGTH = struct.Struct(">h")
"""Of the client id, which comes next."""


class Recorded(NamedTuple):
    """One request: `frame` is all of it with its length, its correlation id set to 0."""

    api_key: int
    version: int
    frame: bytes


class RecordingProxy:
    """Listens on `port` and passes everything on to `broker_port`, both on loopback."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.port = port
        self.broker_port = broker_port
        self._found: dict[tuple[int, int, bytes], Recorded] = {}

    @property
    def requests(self) -> list[Recorded]:
        return list(self._found.values())

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        ready.set()
        async with server:
            await stop.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # what was closed just now is let go in the loop's next turn

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            try:
                from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self.broker_port)
                answers = asyncio.create_task(_pass_on(from_broker, writer))
                try:
                    await self._requests(reader, to_broker)
                finally:
                    answers.cancel()
                    to_broker.close()
            finally:
                writer.close()

    async def _requests(self, reader: asyncio.StreamReader, to_broker: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(HEAD.size)
                length, api_key, version, _ = HEAD.unpack(head)
                rest = await reader.readexactly(length + 4 - HEAD.size)
                to_broker.write(head + rest)
                await to_broker.drain()
                self._keep(api_key, version, rest, HEAD.pack(length, api_key, version, 0) + rest)

    def _keep(self, api_key: int, version: int, rest: bytes, frame: bytes) -> None:
        (name_length,) = NAME_LENGTH.unpack_from(rest)
        name, body = rest[2 : 2 + name_length], rest[2 + name_length :]
        if len(self._found) < REQUESTS_MAX and not name.startswith(UNRECORDED.encode()):
            self._found.setdefault((api_key, version, body), Recorded(api_key, version, frame))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.close()


@contextmanager
def recording(port: int, broker_port: int) -> Iterator[RecordingProxy]:
    """A running proxy for a `with` block, in a thread of its own."""
    proxy = RecordingProxy(port, broker_port)
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready, stop),), daemon=True)
    thread.start()
    try:
        assert ready.wait(scaled(STOP_DEADLINE_S)), "the recording proxy did not start"
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(scaled(STOP_DEADLINE_S))
        assert not thread.is_alive(), "the recording proxy did not stop"
        loop.close()
