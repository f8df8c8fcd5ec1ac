"""JSON-RPC over a WebSocket, as far as the Quarkus Dev UI speaks it: what its pages in a browser call.

Owns one socket. Always true: every wait has a deadline; an answer that is an error is raised with its text; messages
that nobody asked for (the server sends some of its own) are skipped. Source: RFC 6455, JSON-RPC 2.0.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import socket
import struct
import time
from typing import Any, Self

from support.machine import scaled

DEADLINE_S = 60.0
FINAL_TEXT, CLOSE, PING, FINAL_PONG = 0x81, 0x8, 0x9, 0x8A
MASKED = 0x80
SHORT, MEDIUM = 126, 127
"""The 7-bit lengths that say that a 16-bit or a 64-bit one follows."""


class CallError(Exception):
    """The server answered a call with an error; its text."""


class JsonRpcSocket:
    """One connection to `path` of a server on a port of loopback."""

    def __init__(self, port: int, path: str, namespace: str) -> None:
        """`namespace` goes in front of every method's name, with an underscore."""
        self._namespace = namespace
        self._ids = itertools.count(1)
        self._socket = socket.create_connection(("127.0.0.1", port), scaled(DEADLINE_S))
        self._stream = self._socket.makefile("rb")
        host = f"localhost:{port}"
        head = {
            "Host": host,
            "Origin": f"http://{host}",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        status = self._stream.readline().decode(errors="replace").strip()
        if " 101 " not in f"{status} ":
            self._socket.close()
            raise ConnectionError(f"no WebSocket at {path}: {status!r}")
        while self._stream.readline().strip():
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def call(self, method: str, **params: object) -> Any:
        """What the method returned. Raises `CallError` when the server answers that it failed."""
        wanted = next(self._ids)
        name = f"{self._namespace}_{method}"
        request = {"jsonrpc": "2.0", "id": wanted, "method": name, "params": params}
        self._send(FINAL_TEXT, json.dumps(request).encode())
        end = time.monotonic() + scaled(DEADLINE_S)
        while time.monotonic() < end:
            answer = json.loads(self._message())
            if answer.get("id") != wanted:
                continue
            if "error" in answer:
                raise CallError(f"{name}: {answer['error']}")
            return answer["result"]["object"]
        raise TimeoutError(f"{name} was not answered in {DEADLINE_S:g} s")

    def _send(self, kind: int, payload: bytes) -> None:
        """Send one message of less than 64 KiB; its length has to be in the shortest form that holds it."""
        mask = os.urandom(4)
        if len(payload) < SHORT:
            length = struct.pack(">B", MASKED | len(payload))
        else:
            length = struct.pack(">BH", MASKED | SHORT, len(payload))
        body = bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
        self._socket.sendall(bytes([kind]) + length + mask + body)

    def _message(self) -> bytes:
        """The next message, its fragments joined; pings are answered on the way."""
        whole = bytearray()
        while True:
            first, length = self._exactly(2)
            if length == SHORT:
                (length,) = struct.unpack(">H", self._exactly(2))
            elif length == MEDIUM:
                (length,) = struct.unpack(">Q", self._exactly(8))
            payload = self._exactly(length)
            if first & 0xF == PING:
                self._send(FINAL_PONG, payload)
            elif first & 0xF == CLOSE:
                raise ConnectionError(f"the server closed the WebSocket: {payload[2:]!r}")
            else:
                whole += payload
                if first & 0x80:
                    return bytes(whole)

    def _exactly(self, length: int) -> bytes:
        data = self._stream.read(length)
        if len(data) < length:
            raise ConnectionError("the server closed the connection")
        return data
