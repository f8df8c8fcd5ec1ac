"""Answers `/health/live` from a thread of its own while the event loop waits for a flush that hangs.

A restart does not help a broker whose disk does not answer, and would cost it a recovery. So while a flush on the event
loop (`storage.flush.loop_flush`) takes longer than `ANSWER_AFTER_S`, a thread accepts connections of the HTTP listener.
It answers liveness checks, and everything else with 503. Other stalls of the event loop are not answered: there a
restart may help.

Invariant: the thread handles one connection at a time, each for at most `CONNECTION_S_MAX`, and reads at most
`REQUEST_BYTES_MAX` of it.
"""

from __future__ import annotations

import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

ANSWER_AFTER_S: Final = 0.5
POLL_S: Final = 0.1
CONNECTION_S_MAX: Final = 1.0
REQUEST_BYTES_MAX: Final = 16 << 10

_LIVE: Final = b'{"live":true}'
_BUSY: Final = b'{"detail":"the broker waits for a flush to complete"}'


class StallResponder:
    """One per HTTP listener; `listener` is a descriptor of its own, not blocking. `flush_wait_s`: seconds for which the
    event loop has been waiting for a flush, 0 if it does not; it is called from the thread."""

    def __init__(self, listener: socket.socket, flush_wait_s: Callable[[], float]) -> None:
        self._listener = listener
        self._flush_wait_s = flush_wait_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mansio-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended, and close the listener."""
        self._stopped.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            while self._is_stalled() and not self._stopped.is_set():
                readable, _, _ = select.select([self._listener], [], [], POLL_S)
                if readable:
                    self._answer_one()

    def _is_stalled(self) -> bool:
        return self._flush_wait_s() > ANSWER_AFTER_S

    def _answer_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the event loop accepted it, or the client has gone
            return
        with connection, suppress(OSError):
            request = _read_request(connection)
            if request:
                connection.sendall(_response(request))


def _read_request(connection: socket.socket) -> bytes:
    """The request up to the end of its headers; empty if it does not come in time or is too long."""
    end_s = time.monotonic() + CONNECTION_S_MAX
    request = b""
    while b"\r\n\r\n" not in request:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or len(request) > REQUEST_BYTES_MAX:
            return b""
        connection.settimeout(left_s)
        received = connection.recv(4096)
        if not received:
            return b""
        request += received
    return request


def _response(request: bytes) -> bytes:
    line = request.partition(b"\r\n")[0].split(b" ")
    is_liveness = (
        len(line) == 3 and line[0] in (b"GET", b"HEAD") and line[1].split(b"?")[0] == b"/health/live"
    )
    status, body = (b"200 OK", _LIVE) if is_liveness else (b"503 Service Unavailable", _BUSY)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(body)) + (b"" if line[0] == b"HEAD" else body)
