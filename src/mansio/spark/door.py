"""The way to the brokers of a process that has no event loop: a private loop without a thread.

Spark's readers and writers are plain blocking code in processes that Spark keeps and uses again. A door lives as long
as its process, so the next task finds its connections open; its loop turns only while somebody waits for an answer. A
request that was sent before stays on the wire meanwhile, and its answer waits in the socket.

Always true: a door is used by the thread that opened it and by no other; a process that was forked opens its own, and
leaves its parent's alone, whose sockets it must not touch.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.link.cluster import Cluster
from mansio.link.connection import ConnectionOptions

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

CLIENT_ID = "mansio-spark"
CONNECT_TIMEOUT_MS = 10_000
"""How long a cluster may be out of reach before that is an error."""
REQUEST_TIMEOUT_MS = 30_000


class Door:
    """One cluster, reached from blocking code."""

    def __init__(self, bootstrap: str) -> None:
        """Connect. Raises `ConnectionLost` when no broker answers, `ConfigError` for what is no address."""
        self._loop = _new_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cluster: Cluster = self.run(_open(bootstrap))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine and let it come as far as its first wait; `wait` for the rest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.run(_turn())
        return task

    def wait(self, task: asyncio.Task[T]) -> T:
        """The outcome of what `begin` started."""
        return self._loop.run_until_complete(task)

    def give_up(self, task: asyncio.Task[Any]) -> None:
        """End what `begin` started; its answer is thrown away when it comes."""
        task.cancel()
        if not self._loop.is_running() and not self._loop.is_closed():
            self.run(_turn())

    def close(self) -> None:
        """End all connections. The door of a process that only ends need not be closed."""
        if not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()
            self.run(self.cluster.close())
            self.run(_turn())
            self._loop.close()


class _Doors(threading.local):
    """The doors of one thread, and of which process they are."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.opened: dict[str, Door] = {}


_doors = _Doors()
_left_behind: list[dict[str, Door]] = []
"""Doors of the process this one was forked from: kept, because to let go of one would close its sockets."""


def door(bootstrap: str) -> Door:
    """The door of this thread to the cluster at these addresses, opened on first use."""
    if _doors.process != os.getpid():
        _left_behind.append(_doors.opened)
        _doors.process, _doors.opened = os.getpid(), {}
    found = _doors.opened.get(bootstrap)
    if found is None:
        found = _doors.opened[bootstrap] = Door(bootstrap)
    return found


def close_doors() -> None:
    """Close all doors of this thread; the next use opens new ones."""
    opened, _doors.opened = _doors.opened, {}
    for one in opened.values():
        one.close()


async def _open(bootstrap: str) -> Cluster:
    cluster = Cluster(
        bootstrap,
        options=ConnectionOptions(CLIENT_ID, CONNECT_TIMEOUT_MS, REQUEST_TIMEOUT_MS),
        auto_create_topics=False,
    )
    try:
        await cluster.start()
    except BaseException:
        await cluster.close()
        raise
    return cluster


async def _turn() -> None:
    """Two turns of the loop: enough for a task to send what it has to send over an open connection."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def _new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
