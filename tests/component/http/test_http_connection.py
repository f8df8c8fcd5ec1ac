"""HTTP connections and hostile bytes: every request gets one answer or the end of its connection, within bounds."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest

from mansio.api.asgi import connection
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = b"POST /v1/topics/t/records/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JSON = b'{"records":[{"value":"a"}]}'
LIST = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n"
FLOOD_BYTES = 4 << 20


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        with started.client() as client:
            client.admin.create_topic("t", partitions=1)
        yield started


@contextlib.contextmanager
def connected(broker: TestBroker) -> Iterator[socket.socket]:
    host, _, port = broker.http_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as opened:
        yield opened


def exchange(broker: TestBroker, *parts: bytes, half_close: bool = False) -> bytes:
    """Send bytes and return everything that the server sends until the end. `half_close`: end this direction, for
    bytes that may be an incomplete request."""
    received = b""
    with connected(broker) as opened, contextlib.suppress(ConnectionError):
        for part in parts:
            opened.sendall(part)
        if half_close:
            opened.shutdown(socket.SHUT_WR)
        while part := opened.recv(65_536):
            received += part
    return received


def closing(head: bytes) -> bytes:
    return head.replace(b"\r\nHost:", b"\r\nConnection: close\r\nHost:", 1)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        BATCH + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        BATCH + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        BATCH + b"Content-Length: -1\r\n\r\n",
        BATCH + b"Content-Length: 99999999999999999999999\r\n\r\n",
        BATCH + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        BATCH + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        BATCH + b"Content-Length : 3\r\n\r\nabc",
        BATCH + b" folded\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET v1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/topics HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\nHost localhost\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\x00" * 1000,
    ],
)
def test_malformed_requests_are_refused(broker: TestBroker, sent: bytes) -> None:
    answer = exchange(broker, sent, half_close=True)
    assert status_of(answer) in (0, 400, 404, 405, 421), answer


def test_the_first_of_two_hosts_does_not_hide_the_other_one(broker: TestBroker) -> None:
    two = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(broker, two)) == 400


@pytest.mark.parametrize("trailer", [b"Host: attacker.example", b"Content-Encoding: gzip"])
def test_trailers_add_and_replace_no_header(broker: TestBroker, trailer: bytes) -> None:
    body = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(JSON), JSON, trailer)
    answer = exchange(broker, closing(BATCH) + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert status_of(answer) == 200, answer


def test_a_trailer_does_not_pass_the_guard(broker: TestBroker) -> None:
    form = BATCH.replace(b"application/json", b"text/plain")
    body = b"1\r\na\r\n0\r\nX-Mansio-Request: 1\r\n\r\n"
    answer = exchange(broker, closing(form) + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert status_of(answer) == 403, answer


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"x"),
        (b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nX: ", b"x"),
        (b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n", b"A: b\r\n"),
        (BATCH + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ", b"x"),
        (BATCH + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"A: b\r\n"),
        (BATCH + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"", b"\r\n"),
    ],
    ids=["url", "header", "headers", "trailer", "trailers", "chunk extension", "empty lines"],
)
def test_what_is_not_complete_is_bounded(broker: TestBroker, begin: bytes, piece: bytes) -> None:
    flood = piece * (65_536 // len(piece))
    sent = 0
    with connected(broker) as opened:
        try:
            opened.sendall(begin)
            while sent < FLOOD_BYTES:
                opened.sendall(flood)
                sent += len(flood)
            ended = opened.recv(12)[9:] in (b"400", b"431")
        except ConnectionError:
            ended = True
    assert ended, f"{sent} bytes were accepted"


@pytest.mark.parametrize("lines", [b"A: b\r\n" * 20_000, b"A: " + b"x" * 100_000 + b"\r\n"])
def test_a_large_head_is_refused_although_it_is_complete(broker: TestBroker, lines: bytes) -> None:
    answer = exchange(broker, closing(LIST)[:-2] + lines + b"\r\n")
    assert status_of(answer) in (0, 431), answer


def test_pipelined_requests_are_answered_in_order_and_bounded(broker: TestBroker) -> None:
    lines = exchange(broker, LIST * 20 + closing(LIST))
    assert lines.count(b"HTTP/1.1 200 OK") == 21
    flooded = exchange(broker, LIST * 1000 + closing(LIST))
    assert flooded.count(b"HTTP/1.1 200 OK") <= connection.PIPELINED_MAX + 1


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_a_request_that_offers_an_upgrade_is_answered(broker: TestBroker, upgrade: bytes) -> None:
    offer = b"Connection: Upgrade, close\r\nUpgrade: %s\r\nContent-Length: %d\r\n\r\n" % (upgrade, len(JSON))
    for parts in ([BATCH + offer + JSON], [BATCH + offer, JSON]):
        answer = exchange(broker, *parts)
        assert status_of(answer) == 200, answer
        assert b'"failed":0' in answer


def test_a_client_that_waits_for_100_continue_gets_it(broker: TestBroker) -> None:
    with connected(broker) as opened:
        opened.sendall(BATCH + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(JSON))
        assert opened.recv(1000).startswith(b"HTTP/1.1 100")
        opened.sendall(JSON)
        assert status_of(opened.recv(1000)) == 200


def test_a_client_that_ends_in_the_middle_of_a_body_is_no_failure_of_the_broker(
    broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with connected(broker) as opened:
                opened.sendall(BATCH + b"Content-Length: 1000\r\n\r\n" + JSON)
        wait_until(lambda: status_of(exchange(broker, closing(LIST))) == 200)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


def test_a_client_cannot_claim_another_address(broker: TestBroker) -> None:
    with connected(broker) as opened:
        opened.sendall(LIST.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"))
        assert status_of(opened.recv(1000)) == 200
        addresses = {address[0] for each in connections_of(broker) if (address := each.scope["client"])}
    assert addresses == {"127.0.0.1"}


def connections_of(broker: TestBroker) -> list[connection.HttpConnection]:
    """Return the open connections on which a request has begun."""
    server = broker._http
    assert server is not None
    connections: list[Any] = list(server._server.server_state.connections)
    return [each for each in connections if each.scope]
