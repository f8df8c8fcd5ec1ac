"""Deliveries that wait for the thread of a worker.

Readers add deliveries on the thread of the client, the worker takes them on its own: it waits in `wait`, or its event
loop watches `fileno()`.

Invariants:
* A delivery waits in the source of its queue; each source bounds how many.
* After a delivery or error is added, `wait` returns and the file descriptor is readable.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConnectionLost
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.share.leased import Leased
    from mansio.errors import MansioError

WAKE_BYTES_MAX: Final = 4096


class Delivery(NamedTuple):
    """A message of kombu, and the leased record it was made of (None for a message of an exchange's topic)."""

    payload: dict[str, Any]
    leased: Leased | None


class Source:
    """Deliveries of one queue that wait. `on_taken` is called, on the worker's thread, after one was taken."""

    def __init__(self, inbox: Inbox, queue: str, on_taken: Callable[[], None] | None = None) -> None:
        self.queue = queue
        self._inbox = inbox
        self._on_taken = on_taken
        self._waiting: deque[Delivery] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: Delivery) -> None:
        """Add a delivery, on the client's thread."""
        self._waiting.append(delivery)
        self._inbox.wake()

    def put_back(self, delivery: Delivery) -> None:
        """Put a delivery in front of all others."""
        self._waiting.appendleft(delivery)
        self._inbox.wake()

    def move(self, inbox: Inbox) -> None:
        """Wake the worker of another connection from now on."""
        self._inbox = inbox
        inbox.wake()

    def drain(self) -> list[Delivery]:
        """Remove and return all deliveries, on the client's thread; `on_taken` is not called."""
        found = []
        while self._waiting:
            try:
                found.append(self._waiting.popleft())
            except IndexError:
                break
        return found

    def take(self) -> Delivery | None:
        """Remove and return the next delivery, on the worker's thread."""
        try:
            delivery = self._waiting.popleft()
        except IndexError:
            return None
        if self._on_taken is not None:
            self._on_taken()
        return delivery


class Inbox:
    """Waiting deliveries of all queues of one connection of kombu, and the error that ends the connection."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._error: MansioError | None = None

    def wake(self) -> None:
        """Wake the worker, from any thread."""
        self._changed.set()
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # full: it is readable already; or closed
                self._sockets[1].send(b"\0")

    def fail(self, error: MansioError) -> None:
        """End the connection with an error, which `raise_error` raises."""
        self._error = self._error or without_traceback(error)
        self.wake()

    def raise_error(self) -> None:
        """Raise `ConnectionLost` if an error ended the connection, whatever it was: then Celery connects again."""
        if self._error is not None:
            raise ConnectionLost(self._error.message) from self._error

    def clear(self) -> None:
        """Forget what has changed before now; call it before looking for deliveries."""
        self._changed.clear()
        if self._sockets is not None:
            with contextlib.suppress(BlockingIOError):
                self._sockets[0].recv(WAKE_BYTES_MAX)

    def wait(self, timeout_s: float) -> None:
        """Wait for a change since `clear`."""
        self._changed.wait(timeout_s)

    def fileno(self) -> int:
        """Return a file descriptor that is readable after a change; opened by the first call."""
        if self._sockets is None:
            reader, writer = socket.socketpair()
            reader.setblocking(False)
            writer.setblocking(False)
            self._sockets = reader, writer
        return self._sockets[0].fileno()

    def close(self) -> None:
        """Close the file descriptor."""
        sockets, self._sockets = self._sockets, None
        for one in sockets or ():
            one.close()
