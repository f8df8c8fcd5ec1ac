"""A proxy that loses answers: it passes requests on, and where asked ends the connection instead of answering.

Owns one listening port of loopback. Always true: what it does not answer has reached the broker whole, and the broker
has answered it; so the client cannot know that its request was obeyed.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = struct.Struct(">ihhi")
LENGTH = struct.Struct(">i")


class CuttingProxy:
    """Counts the requests of one API (`api_key`), and loses the answers to those whose number is in `lost`."""

    def __init__(self, port: int, broker_port: int, api_key: int, lost: frozenset[int]) -> None:
        self.seen = 0
        self._broker_port, self._api_key, self._lost = broker_port, api_key, lost
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, api_key: int, lost: frozenset[int]) -> None:
        """Count the requests of another API from now on."""
        self.seen, self._api_key, self._lost = 0, api_key, lost

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request after the other, so that it is known which answer belongs to which."""
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._broker_port)) as broker:
            while request := frame(client):
                api_key = HEAD.unpack_from(request)[1]
                broker.sendall(request)
                answer = frame(broker)
                if api_key == self._api_key:
                    self.seen += 1
                    if self.seen in self._lost:
                        return
                client.sendall(answer)


def frame(connection: socket.socket) -> bytes:
    """One whole frame with its length; nothing at the end."""
    head = read_exactly(connection, 4)
    return head + read_exactly(connection, LENGTH.unpack(head)[0]) if head else b""


def read_exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            return b""
        found += piece
    return bytes(found)


@contextmanager
def losing_answers(port: int, broker_port: int, api_key: int, lost: frozenset[int]) -> Iterator[CuttingProxy]:
    """A running proxy for a `with` block."""
    proxy = CuttingProxy(port, broker_port, api_key, lost)
    try:
        yield proxy
    finally:
        proxy.close()
