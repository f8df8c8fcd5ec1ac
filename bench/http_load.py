"""HTTP requests without a client library: the load generator of `bench.http_json` and `bench.sqs`.

Each connection sends a request, waits for its answer, and sends the next one. The requests are encoded before the run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Connection:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=32 << 20)
        return self

    async def send(self, request: bytes) -> bytes:
        """Send an encoded request; the body of its answer. Raises `RuntimeError` for an error."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        if b"connection: close" in lower or head.startswith(b"HTTP/1.0"):
            body = await self._reader.read()
            self._writer.close()
            await self.open()
        elif b"transfer-encoding: chunked" in lower:
            body = b""
            while (size := int((await self._reader.readuntil(b"\r\n")).strip(), 16)) > 0:
                body += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        else:
            at = lower.find(b"content-length:")
            length = int(lower[at + 15 : lower.index(b"\r\n", at)]) if at >= 0 else 0
            body = await self._reader.readexactly(length)
        if head[9:10] != b"2":
            raise RuntimeError(f"{head.decode(errors='replace')}{body[:500]!r}")
        return body

    def close(self) -> None:
        self._writer.close()


def encode_request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return an HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
