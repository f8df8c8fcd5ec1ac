"""The way out of a TLS connection: order, completeness and bounds, over a real socket pair and real files, with both
event loops."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from mansio.api.kafka.connections.socket_writer import SLICE_BYTES_MIN, UnreadableSlice, read_slice_into
from mansio.api.kafka.connections.tls_writer import PIECE_BYTES_MAX, TRANSPORT_BYTES_MAX, TlsWriter
from mansio.host.disk import HostDisk
from mansio.storage.log import LogSlice
from support.certificates import Authority
from support.machine import scaled
from support.tiers import examples, smoke_first
from support.tls_listener import LOOPS, client_context, server_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

FILE_BYTES: Final = 3_000_000
SCRATCH: Final = memoryview(bytearray(512 * 1024))
HELD_BYTES_MAX: Final = 2 * (TRANSPORT_BYTES_MAX + PIECE_BYTES_MAX) + 64 * 1024
"""What the transport, the transport of the socket and the kernel may hold of a file range that nobody reads."""

EACH_LOOP = pytest.mark.parametrize("loop", smoke_first(*LOOPS))


class Setting:
    """Contexts of both sides, and a file."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory / "authority")
        self.server = server_context(authority.issue())
        self.client = client_context(authority.certificate)
        self.content = random.Random(11).randbytes(FILE_BYTES)
        self.path = directory / "segment"
        self.path.write_bytes(self.content)

    def slice_of(self, position: int, length: int) -> LogSlice:
        return LogSlice(HostDisk().open_readonly(str(self.path)), position, length, 0)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("tls"))


class WritingProtocol(asyncio.Protocol):
    """The listener's side of a connection."""

    def __init__(self) -> None:
        self.writer: TlsWriter | None = None
        self.drained = 0
        self.errors: list[OSError] = []
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.writer = TlsWriter(
            asyncio.get_running_loop(), self.transport, SCRATCH, self._on_drained, self._on_lost
        )

    def _on_drained(self) -> None:
        self.drained += 1

    def _on_lost(self, error: OSError) -> None:
        self.errors.append(error)
        self.transport.abort()

    def pause_writing(self) -> None:
        assert self.writer is not None
        self.writer.pause()

    def resume_writing(self) -> None:
        assert self.writer is not None
        self.writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.writer is not None
        self.writer.close()
        self.lost.set()


class Reader:
    """The client's side, which reads only when it is asked to."""

    def __init__(self, context: ssl.SSLContext, plain: socket.socket) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    async def handshake(self) -> None:
        await self._exchange(self._tls.do_handshake, 1 << 16)

    async def read(self, length: int) -> bytes:
        """The next bytes; empty at the end."""
        return cast("bytes", await self._exchange(lambda: self._tls.read(length), length))

    async def _exchange(self, step: Callable[[], Any], length: int) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                if sent := self._outgoing.read():
                    await loop.sock_sendall(self._plain, sent)
                try:
                    received = await loop.sock_recv(self._plain, length)
                except ConnectionResetError:
                    return b""
                if not received:
                    return b""
                self._incoming.write(received)
            else:
                if sent := self._outgoing.read():
                    await loop.sock_sendall(self._plain, sent)
                return result


def run(setting: Setting, loop: str, work: Callable[[WritingProtocol, Reader], Awaitable[None]]) -> None:
    """Run `work` with both sides of a connection over a socket pair with small buffers."""

    async def connect_and_run() -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        reader = Reader(setting.client, theirs)
        protocol = WritingProtocol()
        accepting = asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, ours, ssl=setting.server, ssl_handshake_timeout=scaled(20)
        )
        await asyncio.gather(accepting, reader.handshake())
        with theirs:
            async with asyncio.timeout(scaled(60)):
                await work(protocol, reader)
                protocol.transport.abort()
                await protocol.lost.wait()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(connect_and_run())


@pytest.mark.parametrize("loop", LOOPS)
def test_bytes_and_file_ranges_arrive_in_order_and_whole_at_a_slow_reader(
    setting: Setting, loop: str
) -> None:
    for seed in range(examples(2, 20)):
        check_order(setting, loop, random.Random(seed))


def check_order(setting: Setting, loop: str, chance: random.Random) -> None:
    expected = hashlib.sha256()
    parts: list[bytes | LogSlice] = []
    for _ in range(40):
        if chance.random() < 0.5:
            small = chance.randbytes(chance.choice((0, 1, 44, 5000, PIECE_BYTES_MAX, 300_000)))
            parts.append(small)
            expected.update(small)
        else:
            position = chance.randrange(FILE_BYTES // 2)
            length = chance.randrange(1, 6 * SLICE_BYTES_MIN)
            parts.append(setting.slice_of(position, length))
            expected.update(setting.content[position : position + length])
    total = sum(len(part) if isinstance(part, bytes) else part.length for part in parts)

    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        writer = protocol.writer
        assert writer is not None
        received = hashlib.sha256()
        left = total
        was_waiting = False
        while left:
            if parts and chance.random() < 0.3:  # while the reader lags behind
                count = chance.randrange(1, 6)
                writer.send(parts[:count])
                del parts[:count]
                assert writer.held_bytes <= writer.waiting_bytes + 1_000
                was_waiting |= writer.waiting_bytes > 0
            elif left and (writer.waiting_bytes or not parts):
                data = await reader.read(chance.randrange(1, 50_000))
                assert data
                received.update(data)
                left -= len(data)
            else:
                await asyncio.sleep(0)
        assert was_waiting, "the reader is meant to be slower than the sender"
        while writer.waiting_bytes or not protocol.drained:  # noqa: ASYNC110 - some turns of the loop
            await asyncio.sleep(0)
        assert writer.waiting_bytes == writer.held_bytes == writer.waiting_parts == 0
        assert received.hexdigest() == expected.hexdigest()
        assert not protocol.errors

    run(setting, loop, work)


@EACH_LOOP
def test_file_range_is_read_only_as_far_as_the_peer_reads(
    setting: Setting, loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 50 << 20
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", size)
    large = LogSlice(HostDisk().open_readonly(str(tmp_path / "large")), 0, size, 0)
    read = 0

    def counted(buffer: memoryview, part: LogSlice, done: int) -> int:
        nonlocal read
        count = read_slice_into(buffer, part, done)
        read += count
        return count

    monkeypatch.setattr("mansio.api.kafka.connections.tls_writer.read_slice_into", counted)

    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        writer = protocol.writer
        assert writer is not None
        writer.send([b"header", large, b"end"])
        received = 0
        while received < 6 + size // 10:
            for _ in range(3):
                await asyncio.sleep(0)
            assert read <= received + HELD_BYTES_MAX
            assert writer.held_bytes <= HELD_BYTES_MAX
            received += len(await reader.read(100_000))
        assert writer.waiting_bytes + read >= size

    run(setting, loop, work)


@pytest.mark.parametrize("loop", LOOPS)
def test_small_responses_wait_in_memory_and_are_counted(setting: Setting, loop: str) -> None:
    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        writer = protocol.writer
        assert writer is not None
        total = 0
        while not writer.waiting_parts:
            writer.send([bytes(10_000)])
            total += 10_000
        assert 0 < writer.held_bytes == writer.waiting_bytes
        received = 0
        while received < total:
            received += len(await reader.read(100_000))
        while not protocol.drained:  # noqa: ASYNC110 - some turns of the loop
            await asyncio.sleep(0)
        assert writer.held_bytes == writer.waiting_bytes == 0
        writer.send([b"again"])
        assert await reader.read(100) == b"again"

    run(setting, loop, work)


@EACH_LOOP
@pytest.mark.parametrize("length", [SLICE_BYTES_MIN, 10 * SLICE_BYTES_MIN])
def test_disk_that_fails_ends_the_connection_and_names_the_range(
    setting: Setting, loop: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    broken = setting.slice_of(0, length)

    def fail_at_the_end(descriptor: int, buffers: list[memoryview], position: int) -> int:
        if position + len(buffers[0]) >= length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", fail_at_the_end)

    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        assert protocol.writer is not None
        protocol.writer.send([b"header", broken, b"end"])
        while not protocol.errors:
            await reader.read(10_000)
        (error,) = protocol.errors
        assert isinstance(error, UnreadableSlice)
        assert error.part is broken
        await protocol.lost.wait()

    run(setting, loop, work)


@EACH_LOOP
def test_file_that_is_shorter_than_promised_ends_the_connection(
    setting: Setting, loop: str, tmp_path: Path
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 1000)
    short = LogSlice(HostDisk().open_readonly(str(tmp_path / "short")), 0, SLICE_BYTES_MIN, 0)

    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        assert protocol.writer is not None
        protocol.writer.send([b"header", short])
        await protocol.lost.wait()
        assert "ends before byte" in str(protocol.errors[0])

    run(setting, loop, work)


@pytest.mark.parametrize("loop", LOOPS)
def test_peer_that_is_gone_ends_the_connection_and_frees_what_waits(setting: Setting, loop: str) -> None:
    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        writer = protocol.writer
        assert writer is not None
        writer.send([setting.slice_of(0, FILE_BYTES), bytes(1000)])
        assert writer.waiting_bytes
        assert writer.take_socket_error() == 0
        reader._plain.close()
        await protocol.lost.wait()
        assert writer.waiting_bytes == writer.held_bytes == writer.waiting_parts == 0
        writer.send([b"after the end"])
        assert writer.waiting_bytes == 0
        assert writer.take_socket_error() == 0

    run(setting, loop, work)


@EACH_LOOP
def test_what_was_passed_on_arrives_after_a_close(setting: Setting, loop: str) -> None:
    async def work(protocol: WritingProtocol, reader: Reader) -> None:
        assert protocol.writer is not None
        protocol.writer.send([b"the last response"])
        protocol.transport.close()
        protocol.writer.send([b"too late"])
        assert await reader.read(1000) == b"the last response"
        assert await reader.read(1000) == b""

    run(setting, loop, work)
