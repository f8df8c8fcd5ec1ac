"""Child process that does jobs for its parent, also on open files: the first job starts it, and it ends after idling.

    parent -> child: a frame and, with it, the descriptors of the files    (a pair of sockets; SCM_RIGHTS)
    child -> parent: a frame

The child runs `serve_jobs`, if wanted with the lowest priority that the system has. It gets descriptors in place of
paths, so a file that is replaced or removed meanwhile is read as it was. On Linux the child ends with its parent, on
other systems at the latest when the parent's end of the sockets is closed.

Invariants:
* A child has one job at a time; jobs wait in the order of the calls. The caller bounds their number.
* A frame has at most `FRAME_BYTES_MAX`, a job at most `FILES_MAX` files.
* When `close` returns, there is no child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

from mansio.errors import RequestTimedOut, Unavailable
from mansio.host.child_process import ChildProcess, RelayedOutput, exit_reason
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.ports import DiskFile, FileJob

logger = logging.getLogger(__name__)

FRAME_BYTES_MAX: Final = 32 << 20
FILES_MAX: Final = 64
IDLE_S: Final = 60.0
STOP_S_MAX: Final = 1.0
"""Time after which a child that does not end is killed."""

STANDARD_INPUT: Final = 0

_LENGTH: Final = Struct(">I")
_READ_BYTES: Final = 64 << 10
_NICE: Final = 19


class WorkerProcess:
    """The parent's end (`mansio.ports.FileWorker`). All methods run on one event loop."""

    def __init__(self, command: Sequence[str], name: str, *, idle_s: float = IDLE_S) -> None:
        """`command`: starts a process that calls `serve_jobs`; `name`: of the process, for errors."""
        self._name = name
        self._child = ChildProcess(command, RelayedOutput(_log_line))
        self._idle_s = idle_s
        self._socket: socket.socket | None = None
        self._turn: asyncio.Lock | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if there is none."""
        return self._child.pid if self._socket is not None and self._child.is_running else None

    async def run(self, prepare: Callable[[], FileJob], *, timeout_ms: float) -> bytes:
        """Call `prepare` when it is the turn of this job, and return what the child answers. `timeout_ms`: for the job
        itself; after it the child is ended.

        Raises `Unavailable` if the child cannot be started or ends before it has answered, `RequestTimedOut`, and the
        errors of `prepare`."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return await self._run(prepare, timeout_ms)
            finally:
                if self._socket is not None:
                    loop = asyncio.get_running_loop()
                    self._idle = loop.call_later(self._idle_s, self._end_idle)

    async def _run(self, prepare: Callable[[], FileJob], timeout_ms: float) -> bytes:
        job, files = prepare()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._exchange(job, files)
        except TimeoutError:
            await self._end()
            raise RequestTimedOut(f"the {self._name} process does not answer") from None
        except (OSError, EOFError, asyncio.IncompleteReadError) as error:
            code = await self._end()
            reason = str(error) if code is None else exit_reason(code)
            raise Unavailable(f"the {self._name} process has failed: {reason}") from error
        except asyncio.CancelledError:  # the answer would be taken for that of the next job
            await self._end()
            raise

    async def close(self) -> None:
        """End the child."""
        self._is_closed = True
        if self._idle is not None:
            self._idle.cancel()
        if self._ending is not None:
            await self._ending
        await self._child.stop(wait_s=STOP_S_MAX)  # a job that is running fails, and those that wait
        if self._turn is not None:
            async with self._turn:
                await self._end()

    async def _exchange(self, job: bytes, files: Sequence[DiskFile]) -> bytes:
        if self._socket is None or not self._child.is_running:
            await self._start()
        assert self._socket is not None
        if len(files) > FILES_MAX or len(job) > FRAME_BYTES_MAX:
            raise ValueError(f"a job of {len(job)} bytes with {len(files)} files")
        loop = asyncio.get_running_loop()
        # The buffer of the socket is empty, so the descriptors are sent at once.
        frame = _LENGTH.pack(len(job)) + job
        sent = socket.send_fds(self._socket, [frame], [each.fileno() for each in files])
        if sent < len(frame):
            await loop.sock_sendall(self._socket, memoryview(frame)[sent:])
        received = bytearray()
        while (missing := _missing(received)) > 0:
            data = await loop.sock_recv(self._socket, min(missing, _READ_BYTES))
            if not data:
                raise EOFError("it has ended")
            received += data
        return bytes(received[_LENGTH.size :])

    async def _start(self) -> None:
        await self._end()
        if self._is_closed:
            raise Unavailable("the broker is stopping")
        own, other = socket.socketpair()
        try:
            own.setblocking(False)
            await self._child.start(stdin=other.fileno())
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        self._socket = own

    async def _end(self) -> int | None:
        """End the child, if there is one. Return its exit code."""
        if self._socket is None:
            return None
        self._socket.close()  # ends a child that waits for a job
        self._socket = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S_MAX):
                return await self._child.wait()
        return await self._child.stop(wait_s=STOP_S_MAX)

    def _end_idle(self) -> None:
        async def end() -> None:
            if self._turn is not None and not self._turn.locked():
                async with self._turn:
                    await self._end()

        self._ending = asyncio.get_running_loop().create_task(end(), name="end of an idle process")


def _missing(received: bytearray) -> int:
    """Return how many bytes of a frame are missing, as far as it is known. Raises `OSError`."""
    if len(received) < _LENGTH.size:
        return _LENGTH.size - len(received)
    length: int = _LENGTH.unpack_from(received)[0]
    if length > FRAME_BYTES_MAX:
        raise OSError(f"a frame of {length} bytes")
    return _LENGTH.size + length - len(received)


def _log_line(line: bytes) -> None:
    logger.warning("worker_process_output", extra=fields(line=line.decode(errors="replace").rstrip()))


# -- in the child --------


def serve_jobs(run: Callable[[bytes, Sequence[int]], bytes], *, is_idle: bool = True) -> None:
    """Run jobs until the parent closes its end: `run(job, descriptors)` returns the answer. Its errors end the
    process. `is_idle`: with the lowest priority."""
    if is_idle:
        lower_priority()
    with socket.socket(fileno=STANDARD_INPUT) as channel:
        channel.setblocking(True)
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, _READ_BYTES, FILES_MAX)
            try:
                received = bytearray(data)
                while data and (missing := _missing(received)) > 0:
                    data = channel.recv(min(missing, _READ_BYTES))
                    received += data
                if not data:
                    return
                answer = run(bytes(received[_LENGTH.size :]), descriptors)
            finally:
                for each in descriptors:
                    os.close(each)
            channel.sendall(_LENGTH.pack(len(answer)) + answer)


def lower_priority() -> None:
    """Let this process run only when no other one wants to: SCHED_IDLE, or else the highest nice value."""
    # A session is scheduled as one group (sched(7), "The autogroup feature"), in which alone the priorities count.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(f"{_NICE}\n")
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return
    with contextlib.suppress(OSError):
        os.nice(_NICE)
