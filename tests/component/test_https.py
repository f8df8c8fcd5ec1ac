"""Requests to issuers of tokens: over TLS with a verified certificate, and bounded in time and size."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest

from mansio.errors import ConnectionLost, RequestTimedOut
from mansio.net.https import HttpResponse, request
from support.certificates import Authority
from support.machine import scaled
from support.tls_listener import client_context

TIMEOUT_MS: Final = 30_000
BYTES_MAX: Final = 1_000
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def served(answer: bytes | None, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answer each connection with these bytes, then close it; None: never answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if answer is None:
                await reader.read()
            else:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def ask(answer: bytes | None, timeout_ms: float = TIMEOUT_MS) -> HttpResponse:
    async def work() -> HttpResponse:
        async with served(answer) as port:
            return await request(
                f"http://127.0.0.1:{port}/a?b=c", bytes_max=BYTES_MAX, timeout_ms=scaled(timeout_ms)
            )

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (ANSWER, b"{}"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", b"{}"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_response_is_read_however_it_ends(answer: bytes, body: bytes) -> None:
    assert ask(answer) == HttpResponse(200, body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"SSH-2.0-server\r\n",
    ],
    ids=lambda answer: str(answer[:30]),
)
def test_response_that_is_too_large_or_incomplete_is_an_error(answer: bytes) -> None:
    with pytest.raises(ConnectionLost):
        ask(answer)


def test_server_that_does_not_answer_is_left_in_time() -> None:
    with pytest.raises(RequestTimedOut):
        ask(None, timeout_ms=200)


def test_certificate_has_to_be_of_an_authority_and_for_the_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    issued = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)

    async def work(own: ssl.SSLContext | None, host: str = "localhost") -> HttpResponse:
        async with served(ANSWER, context) as port:
            return await request(
                f"https://{host}:{port}/", bytes_max=BYTES_MAX, timeout_ms=scaled(TIMEOUT_MS), context=own
            )

    assert asyncio.run(work(client_context(authority.certificate))) == HttpResponse(200, b"{}")
    with pytest.raises(ConnectionLost, match="certificate"):
        asyncio.run(work(None))
