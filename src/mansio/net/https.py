"""One HTTP request with one bounded response, over TLS or on loopback: keys of an issuer of tokens, and tokens.

The client is small on purpose: HTTP/1.1, one request on a connection, no redirects, no proxies, no cookies and no
compression, so that what a response can do is what is here.

Invariants:
* Time and size are bounded for the whole exchange.
* No error contains the body of the request or of the response.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from mansio.errors import ConnectionLost, RequestTimedOut

if TYPE_CHECKING:
    from collections.abc import Mapping

READ_BYTES: Final = 16 << 10
HEADER_BYTES_MAX: Final = 32 << 10


class HttpResponse(NamedTuple):
    """A response. `status`: of HTTP."""

    status: int
    body: bytes


class _Response:
    """Callbacks of the parser."""

    __slots__ = ("body", "bytes_max", "is_complete", "is_framed", "is_headed", "is_too_large")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.body = bytearray()
        self.is_headed = False
        self.is_framed = False
        """Whether the response states where it ends."""
        self.is_complete = False
        self.is_too_large = False

    def on_header(self, name: bytes, _value: bytes) -> None:
        self.is_framed = self.is_framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.is_headed = True

    def on_body(self, body: bytes) -> None:
        if len(self.body) + len(body) > self.bytes_max:
            self.is_too_large = True
        else:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


async def request(
    url: str,
    *,
    bytes_max: int,
    timeout_ms: float,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    context: ssl.SSLContext | None = None,
) -> HttpResponse:
    """Send a request to a URL of https or http, and return the response.

    `bytes_max`: of the body of the response; `context`: with which the server's certificate is verified, by default
    with the authorities of the system. Raises `ConnectionLost`, `RequestTimedOut`."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_encrypted = parts.scheme == "https"
    port = parts.port or (443 if is_encrypted else 80)
    tls = (context or await asyncio.to_thread(ssl.create_default_context)) if is_encrypted else None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = {
        "Host": parts.netloc,
        "Accept": "application/json",
        "Connection": "close",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    head = "".join([f"{method} {target} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in lines.items()), "\r\n"])
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await _exchange((host, port), tls, head.encode("ascii") + body, bytes_max)
    except TimeoutError:
        raise RequestTimedOut(f"{host}:{port} did not respond in time") from None
    except ssl.SSLCertVerificationError as error:
        raise ConnectionLost(
            f"the certificate of {host}:{port} is not accepted: {error.verify_message}"
        ) from None
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {host}:{port}: {error.strerror or error}") from None


async def _exchange(
    address: tuple[str, int], tls: ssl.SSLContext | None, sent: bytes, bytes_max: int
) -> HttpResponse:
    import httptools

    host, port = address
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=READ_BYTES)
    try:
        writer.write(sent)
        response = _Response(bytes_max)
        parser = httptools.HttpResponseParser(response)
        received = 0
        while not response.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                if response.is_headed and not response.is_framed:
                    break
                raise ConnectionLost(f"{host}:{port} closed the connection before its response was complete")
            received += len(data)
            try:
                parser.feed_data(data)
            except httptools.HttpParserError:
                raise ConnectionLost(f"{host}:{port} did not send a valid response of HTTP") from None
            if response.is_too_large or received > 2 * bytes_max + HEADER_BYTES_MAX:
                raise ConnectionLost(f"{host}:{port} sent more than {bytes_max} bytes")
        return HttpResponse(parser.get_status_code(), bytes(response.body))
    finally:
        writer.transport.abort()
