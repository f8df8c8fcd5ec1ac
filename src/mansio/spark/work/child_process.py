"""A forked process that makes calls, so that one that kills its process kills no worker of Spark.

The process inherits the rows and the function, so nothing is sent to it. It sends the result of each call over a pipe
when the call is complete; the call in progress when it dies is the one that killed it.

Forking is safe here although other threads may exist: the process makes only calls of the user's function and writes to
its pipe, Arrow restores its threads after a fork, and the process ends without the clean-up of its parent's objects.

Invariants:
* A process is reaped when `make_calls` returns or is left, and its descriptors are closed.
* It ends with its parent, also if that is killed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import select
import signal
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.spark.work.calls import Died

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from mansio.spark.work.calls import Call
    from mansio.spark.work.evaluation import Evaluated

_LENGTH: Final = struct.Struct(">Q")
_READ_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
NO_DESCRIPTOR: Final = -1


class Limits(NamedTuple):
    """Limits of a process. `memory_bytes`: memory that it may have in addition to that of its parent; `timeout_ms`:
    duration of a call. None for no limit."""

    memory_bytes: int | None = None
    timeout_ms: int | None = None


def make_calls(
    rows: pa.RecordBatch, calls: Sequence[Call], call: Callable[[pa.RecordBatch], Evaluated], limits: Limits
) -> tuple[list[Evaluated], Died | None]:
    """Make the calls in a new process. Return the results of those that are complete, and how the process died; None if
    all are."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _run_child(rows, calls, call, limits, writing)
    os.close(writing)
    ended = os.pidfd_open(child) if hasattr(os, "pidfd_open") else NO_DESCRIPTOR
    try:
        return _read_results(reading, ended, child, len(calls), limits)
    finally:
        os.close(reading)
        if ended != NO_DESCRIPTOR:
            os.close(ended)
        for kill in (os.killpg, os.kill):  # with what it has started; it may have no group of its own yet
            with suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _run_child(
    rows: pa.RecordBatch,
    calls: Sequence[Call],
    call: Callable[[pa.RecordBatch], Evaluated],
    limits: Limits,
    writing: int,
) -> None:
    """Make the calls, and end the process."""
    status = 1
    try:
        os.setsid()  # a group of its own, which is ended with it
        _end_with_parent()
        _prefer_for_oom_kill()
        with suppress(ValueError):  # only the main thread may set handlers; another one has inherited none
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
        if limits.memory_bytes is not None and (size := _address_space_bytes()):
            most = size + limits.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for each in calls:
            content = pickle.dumps(call(rows.slice(each.first, each.size)), pickle.HIGHEST_PROTOCOL)
            _write(writing, _LENGTH.pack(len(content)))
            _write(writing, content)
        status = 0
    finally:
        os._exit(status)


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux); elsewhere it ends when it writes a result."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prefer_for_oom_kill() -> None:
    """If memory is short, the kernel shall end this process, not the worker or the executor (Linux)."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _address_space_bytes() -> int:
    """Size of the address space of this process; 0 where it is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_results(
    reading: int, ended: int, child: int, count: int, limits: Limits
) -> tuple[list[Evaluated], Died | None]:
    """Read results until all are there, or the process has ended: `ended` can be read then. The end of the pipe states
    less, because a process that the child has started keeps it open; it is all there is on macOS."""
    watched = [reading] if ended == NO_DESCRIPTOR else [reading, ended]
    results: list[Evaluated] = []
    os.set_blocking(reading, False)
    received = bytearray()
    timeout_s = None if limits.timeout_ms is None else limits.timeout_ms / 1000
    began_s = time.monotonic()
    while len(results) < count:
        left_s = None if timeout_s is None else max(began_s + timeout_s - time.monotonic(), 0.0)
        readable = select.select(watched, [], [], left_s)[0]
        if not readable:
            return results, Died(f"the call took longer than {limits.timeout_ms} ms", timed_out=True)
        try:
            piece = os.read(reading, _READ_BYTES)
        except BlockingIOError:
            piece = b""
        if not piece:
            _, status = os.waitpid(child, 0)
            return results, Died(_death(status))
        received += piece
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                break
            # From the process that this one has forked, which has no other rights than this one.
            results.append(pickle.loads(bytes(received[_LENGTH.size : end])))  # noqa: S301
            del received[:end]
            began_s = time.monotonic()
    return results, None


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = str(number)
        return f"the process was killed by signal {name}"
    return f"the process ended with status {os.waitstatus_to_exitcode(status)}"
