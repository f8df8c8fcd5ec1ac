"""Connections of the HTTP server: uvicorn's protocol on httptools, with the bounds that both leave to their user.

Invariants:
* A server has at most `OTHER_CONNECTIONS_MAX` connections, fewer under a low limit of descriptors; a new one closes
  the one that was answered longest ago.
* A connection on which no response is completed, and no part of a large one accepted, for `UNANSWERED_S_MAX` is closed,
  whatever the reason is.
* A request has at most one Host and one Authorization header. An offer to change the protocol (Upgrade) is ignored.
* Trailers of a chunked body are ignored; they cannot add or replace a header.
* What the parser refuses is answered with problem details (RFC 9457): 400, and 431 for a head that is too large.
* What a client sends without completing a head or a piece of a body is at most `HEADER_BYTES_MAX`, plus one read: the
  parser keeps the beginning of an unfinished header in memory. The headers of a request, and trailers, are bounded by
  the same number.
* At most `PIPELINED_MAX` requests of a connection wait for the response to an earlier one.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import httptools
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mansio.api.asgi.problems import http_problem
from mansio.host.file_descriptors import descriptor_budget
from mansio.logs import fields

if TYPE_CHECKING:
    import asyncio

    from mansio.net.connection_throttle import ConnectionThrottle

UNANSWERED_S_MAX = 40.0
CONFIRMATION_S: Final = 0.2
"""Time for which a closed connection with TLS waits for the client's confirmation when the server stops."""

HEADER_BYTES_MAX: Final = 64 * 1024
HEADER_OVERHEAD_BYTES: Final = 32
"""What each header counts beside its name and value, as in HTTP/2 (RFC 9113, 6.5.2): it takes memory, too."""

PIPELINED_MAX: Final = 64
CLIENT_CERTIFICATE: Final = "mansio.client_certificate"
"""Key in the scope of a request: the certificate (DER) with which its client has connected, if it has one."""

SINGLE_HEADERS: Final = (b"host", b"authorization")
"""Headers that a request has once: a proxy in front may have examined the other one."""

_SINGLE_LENGTHS: Final = frozenset(map(len, SINGLE_HEADERS))
_UPGRADE_OPTIONS: Final = (b"upgrade", b"http2-settings")


class InvalidHead(Exception):
    """The request is refused: the parser reports an exception of a callback as an error of its own."""


class HttpConnection(HttpToolsProtocol):
    """One HTTP connection. `connections`: all connections of the server, in the order of their last response, oldest
    first. `throttle`: closes connections of addresses that connect too often; those with TLS have passed it before
    their handshake."""

    def __init__(
        self,
        connections: dict[HttpConnection, None],
        throttle: ConnectionThrottle | None = None,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._throttle = throttle
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_in_head = False
        self._single_headers: set[bytes] = set()
        """Those of `SINGLE_HEADERS` that the head has."""
        self._is_too_large = False
        self._certificate: bytes | None = None
        self._unparsed_bytes = 0
        """Bytes received since the last complete head or piece of a body."""

    # Life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        connection = transport.get_extra_info("ssl_object")
        if connection is None and self._throttle is not None and self._throttle.closes(transport):
            return
        super().connection_made(transport)
        if connection is not None:
            self._certificate = connection.getpeercert(binary_form=True)
        if len(self._connections) >= descriptor_budget(1, 0).other_connections:
            quietest = next(iter(self._connections))
            self.logger.warning(
                "too_many_connections_closing_least_recent",
                extra=fields(peer=quietest.peer, new_peer=self.peer),
            )
            quietest.end()
        self._begin_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._begin_waiting()

    def resume_writing(self) -> None:
        """Continue a response of which the client has accepted what was sent."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._begin_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.pipeline.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection, because the server stops, as soon as its response is complete."""
        super().shutdown()
        if self.scheme == "https" and self.transport.is_closing():
            self.loop.call_later(CONFIRMATION_S, self.end)

    def end(self) -> None:
        """Close the connection now and discard unsent bytes of responses."""
        self._forget()
        self.transport.abort()

    def _begin_waiting(self) -> None:
        self._forget()
        self._connections[self] = None
        self._deadline = self.loop.call_later(UNANSWERED_S_MAX, self.end)

    def _forget(self) -> None:
        self._connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # Requests

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unparsed_bytes += len(data)
        while data and not self.transport.is_closing():
            data = self._parse(data)
        if self._unparsed_bytes > HEADER_BYTES_MAX and not self.transport.is_closing():
            self._is_too_large = self._is_in_head
            self._refuse()

    def _parse(self, data: bytes) -> bytes:
        """Parse bytes; return those that are to be parsed next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            return self._head_without_upgrade() + data[stop.args[0] :]
        except httptools.HttpParserError:
            self._refuse()
        return b""

    def _head_without_upgrade(self) -> bytes:
        """Return the head of the request without its offer to change the protocol, for a new parser: the old one takes
        what follows for that protocol, although it is the body."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                lines += [
                    b"connection: " + option for option in options if option.lower() not in _UPGRADE_OPTIONS
                ]
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self) -> None:
        """Answer with problem details and close the connection."""
        self.logger.warning("invalid_http_request", extra=fields(peer=self.peer))
        if self._is_too_large:
            error = HTTPException(431, f"a head has at most {HEADER_BYTES_MAX} bytes")
        else:
            error = HTTPException(400, "this is not an HTTP/1.1 request")
        response = http_problem(error)
        content = bytes(response.body)
        head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n"
        head += f"content-type: {response.media_type}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()

    @property
    def peer(self) -> str:
        """HOST:PORT of the client, without brackets for IPv6; empty if it is unknown."""
        return "" if self.client is None else f"{self.client[0]}:{self.client[1]}"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._certificate is not None:
            self.scope[CLIENT_CERTIFICATE] = self._certificate  # type: ignore[typeddict-unknown-key]
        self._header_bytes = 0
        self._is_in_head = True
        self._single_headers.clear()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        if not self._is_in_head:
            return
        if len(name) in _SINGLE_LENGTHS and (known := name.lower()) in SINGLE_HEADERS:
            if known in self._single_headers:
                raise InvalidHead(f"two {known.decode()} headers")
            self._single_headers.add(known)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._is_in_head = False
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise InvalidHead("this is no proxy")
            return  # it is parsed again
        if len(self.pipeline) >= PIPELINED_MAX:
            self.end()
            raise InvalidHead("too many requests wait for the response to an earlier one")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _count(self, size_bytes: int) -> None:
        self._header_bytes += size_bytes
        if self._header_bytes > HEADER_BYTES_MAX:
            self._is_too_large = self._is_in_head
            raise InvalidHead("the head has too many bytes")
