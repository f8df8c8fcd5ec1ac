"""The way out of a connection: order, completeness and bounds, over a real socket pair and real files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from mansio.api.kafka.connections.socket_writer import SLICE_BYTES_MIN, SocketWriter
from mansio.host.asyncio_loop import new_event_loop
from mansio.host.disk import HostDisk
from mansio.storage.log import LogSlice
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    yield ours, theirs
    ours.close()
    theirs.close()


SCRATCHES = pytest.mark.parametrize(
    "scratch", [None, memoryview(bytearray(100_000))], ids=["sendfile", "through a buffer"]
)


def slice_of(path: Path, position: int, length: int) -> LogSlice:
    return LogSlice(HostDisk().open_readonly(str(path)), position, length, 0)


def run_on_new_loop(work: object) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)  # type: ignore[arg-type]  # a coroutine


@SCRATCHES
def test_bytes_and_file_slices_arrive_in_order_and_whole_at_a_slow_reader(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, scratch: memoryview | None
) -> None:
    chance = random.Random(7)
    content = chance.randbytes(3_000_000)
    (tmp_path / "segment").write_bytes(content)
    pieces: list[bytes | LogSlice] = []
    expected = hashlib.sha256()
    for _ in range(40):
        if chance.random() < 0.5:
            small = chance.randbytes(chance.randrange(1, 5000))
            pieces.append(small)
            expected.update(small)
        else:
            position = chance.randrange(0, 2_000_000)
            length = chance.randrange(1, 4 * SLICE_BYTES_MIN)
            pieces.append(slice_of(tmp_path / "segment", position, length))
            expected.update(content[position : position + length])
    total = sum(len(p) if isinstance(p, bytes) else p.length for p in pieces)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        room = asyncio.Event()
        ours, theirs = pair
        socket_writer = SocketWriter(
            loop, ours.fileno(), scratch, room.set, lambda error: pytest.fail(str(error))
        )
        while pieces:  # in several sends, while the reader lags behind
            count = chance.randrange(1, 6)
            socket_writer.send(pieces[:count])
            del pieces[:count]
        assert socket_writer.waiting_bytes > 0, "the reader is meant to be slower than the sender"
        received = hashlib.sha256()
        left = total
        while left:
            data = await loop.sock_recv(theirs, chance.randrange(1, 50_000))
            received.update(data)
            left -= len(data)
        async with asyncio.timeout(scaled(20)):
            await room.wait()
        assert socket_writer.waiting_bytes == 0
        assert received.hexdigest() == expected.hexdigest()
        socket_writer.close()

    run_on_new_loop(work())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs SOCK_SEQPACKET")
def test_what_is_around_a_slice_leaves_with_it_so_that_a_reader_is_woken_once(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(2 * SLICE_BYTES_MIN)
    (tmp_path / "segment").write_bytes(content)

    async def work(ours: socket.socket, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        scratch = memoryview(bytearray(3 * SLICE_BYTES_MIN))
        socket_writer = SocketWriter(
            loop, ours.fileno(), scratch, lambda: None, lambda error: pytest.fail(str(error))
        )
        socket_writer.send([b"front", slice_of(tmp_path / "segment", 1, SLICE_BYTES_MIN), b"end"])
        assert theirs.recv(1 << 20) == b"front" + content[1 : 1 + SLICE_BYTES_MIN] + b"end"
        assert socket_writer.waiting_bytes == socket_writer.held_bytes == 0
        socket_writer.close()

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        run_on_new_loop(work(ours, theirs))


def test_a_peer_that_is_gone_is_reported_once_and_nothing_more_is_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    async def work() -> None:
        errors: list[OSError] = []
        ours, theirs = pair
        socket_writer = SocketWriter(
            asyncio.get_running_loop(), ours.fileno(), None, lambda: None, errors.append
        )
        theirs.close()
        socket_writer.send([b"hello"])
        assert len(errors) == 1
        socket_writer.close()
        socket_writer.send([b"after the end"])
        assert socket_writer.waiting_bytes == 0

    run_on_new_loop(work())


@SCRATCHES
def test_a_file_that_is_shorter_than_promised_ends_the_connection_instead_of_sending_other_bytes(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, scratch: memoryview | None
) -> None:
    (tmp_path / "segment").write_bytes(b"x" * 1000)

    async def work() -> None:
        errors: list[OSError] = []
        socket_writer = SocketWriter(
            asyncio.get_running_loop(), pair[0].fileno(), scratch, lambda: None, errors.append
        )
        socket_writer.send([b"header", slice_of(tmp_path / "segment", 0, SLICE_BYTES_MIN)])
        async with asyncio.timeout(scaled(20)):
            while not errors:  # noqa: ASYNC110 - the error comes within some turns of the loop
                await asyncio.sleep(0)
        assert "ends before byte" in str(errors[0])
        socket_writer.close()

    run_on_new_loop(work())


@SCRATCHES
def test_an_empty_buffer_does_not_delay_other_buffers(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, scratch: memoryview | None
) -> None:
    (tmp_path / "segment").write_bytes(bytes(SLICE_BYTES_MIN))
    piece = slice_of(tmp_path / "segment", 0, SLICE_BYTES_MIN)
    ours, theirs = pair

    async def send() -> None:
        out = SocketWriter(asyncio.get_running_loop(), ours.fileno(), scratch, lambda: None, lambda _: None)
        sent: list[list[bytes | LogSlice]] = [[b"", b""], [b"", piece], [b"a", piece, b""]]
        for pieces in sent:
            out.send(pieces)
            while out.waiting_parts:
                await asyncio.sleep(0)
                with contextlib.suppress(BlockingIOError):
                    theirs.recv(1 << 20)
        assert out.waiting_bytes == out.held_bytes == 0
        out.close()

    run_on_new_loop(send())
