"""Hostile credentials and paths over HTTP, byte by byte: no spelling of a request gets a right that its user has not,
and no part of one request is taken for another."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

import pytest

from component.http.test_http_connection import exchange, status_of
from mansio.state.authorization.acls import ANY, AclFilter, Operation, ResourceType
from mansio.testing.broker import TestBroker
from support.authorization import PEER, acl
from support.machine import scaled
from support.secured_broker import set_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.authorization.acls import Acl

TIMEOUT_S: Final = 30
RIGHT: Final = b"Basic " + base64.b64encode(b"alice:secret")
WRONG: Final = b"Basic " + base64.b64encode(b"alice:wrong")
LINE: Final = b"Authorization: " + RIGHT + b"\r\n"
HEAD: Final = b"Host: localhost\r\nConnection: close\r\n"
LIST: Final = b"GET /v1/topics HTTP/1.1\r\n" + HEAD
CREATE: Final = b"POST /v1/topics HTTP/1.1\r\nContent-Type: application/json\r\n" + HEAD


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(
        authorizer="acl", super_users="User:admin", http_security_protocol="SASL_PLAINTEXT"
    ) as started:
        set_password(started, "alice", "secret")
        for name in ("seen", "hidden"):
            work = started._running().service.topics.auto_create(name)
            started._call(work, scaled(TIMEOUT_S))
        yield started


@pytest.fixture(autouse=True)
def wrong_passwords_are_forgotten(broker: TestBroker) -> None:
    broker._running().service.passwords._wrong._buckets.clear()


def allow(broker: TestBroker, *acls: Acl) -> None:
    """Let alice have these rights, and no others."""
    service = broker._running().service.acls
    broker._call(service.delete_each([AclFilter(ANY, ANY)], caller=PEER), scaled(TIMEOUT_S))
    assert not any(broker._call(service.create_each(acls, caller=PEER), scaled(TIMEOUT_S)))


def statuses(answer: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def get(broker: TestBroker, target: bytes) -> bytes:
    return exchange(broker, b"GET " + target + b" HTTP/1.1\r\n" + HEAD + LINE + b"\r\n")


# Authorization


@pytest.mark.parametrize("name", [b"Authorization", b"authorization", b"AUTHORIZATION"])
@pytest.mark.parametrize(("first", "second"), [(RIGHT, WRONG), (WRONG, RIGHT), (RIGHT, RIGHT), (RIGHT, b"")])
def test_a_request_with_two_credentials_is_refused(
    broker: TestBroker, name: bytes, first: bytes, second: bytes
) -> None:
    lines = b"Authorization: " + first + b"\r\n" + name + b": " + second + b"\r\n"
    assert statuses(exchange(broker, LIST + lines + b"\r\n")) == [400]


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Basic\r\n " + RIGHT[6:],
        b"Authorization:\r\n " + RIGHT,
        b"Authorization:\r\n\t" + RIGHT,
        b"Authorization: " + RIGHT + b"\r\n , " + WRONG,
        b"Authorization: " + RIGHT + b"\0",
        b"Authorization: " + RIGHT.replace(b" ", b" \0"),
        b"Authorization: \r" + RIGHT,
        b"Authorization: " + RIGHT + b"\rX: y",
        b"Authorization: " + RIGHT + b"\x7f",
        b"Authorization : " + RIGHT,
        b"Authorization\0: " + RIGHT,
        b" Authorization: " + RIGHT,
        b"X: y\r Authorization: " + RIGHT,
        b"Authorization: " + WRONG + b"\rAuthorization: " + RIGHT,
        b"Authori\xc5\xbfation: " + RIGHT,
        b"Authorization: " + RIGHT + b", " + WRONG,
        b"Authorization: Basic,Basic " + RIGHT[6:],
        b"Authorization: " + RIGHT.replace(b" ", b"\xa0"),
    ],
)
def test_a_malformed_credential_opens_nothing(broker: TestBroker, line: bytes) -> None:
    assert statuses(exchange(broker, LIST + LINE + b"\r\n")) == [200]
    found = statuses(exchange(broker, LIST + line + b"\r\n\r\n", half_close=True))
    assert found in ([400], [401]), found


@pytest.mark.parametrize(
    ("head", "trailer", "expected"),
    [(b"", RIGHT, 401), (b"Authorization: " + WRONG + b"\r\n", RIGHT, 401), (LINE, WRONG, 201)],
)
def test_a_credential_in_a_trailer_has_no_effect(
    broker: TestBroker, head: bytes, trailer: bytes, expected: int
) -> None:
    allow(broker, acl(ResourceType.TOPIC, "new", Operation.CREATE))
    body = b'{"name": "new"}'
    sent = b"%x\r\n%s\r\n0\r\nAuthorization: %s\r\n\r\n" % (len(body), body, trailer)
    answer = exchange(broker, CREATE + head + b"Transfer-Encoding: chunked\r\n\r\n" + sent)
    assert statuses(answer) == [expected]


# Requests inside of requests

HIDDEN_REQUEST: Final = b"GET /v1/topics?hidden HTTP/1.1\r\n" + HEAD + LINE + b"\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding:\tchunked\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: chunked, identity\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: identity\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding : chunked\r\n",
        b"Content-Length: %d\r\nX: y\r\n Transfer-Encoding: chunked\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: \x0bchunked\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding\0: chunked\r\n",
        b"Content-Length: %d\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: %d\r\n",
        b"Content-Length: %d, 5\r\n",
        b"Content-Length: +%d\r\n",
        b"Content-Length: 0x%x\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    ],
)
def test_a_body_of_two_lengths_is_refused_and_none_of_it_is_a_request(
    broker: TestBroker, lines: bytes
) -> None:
    body = b"0\r\n\r\n" + HIDDEN_REQUEST
    framing = lines.replace(b"%d", b"%d" % len(body)).replace(b"%x", b"%x" % len(body))
    answer = exchange(broker, CREATE.replace(b"close", b"keep-alive") + LINE + framing + b"\r\n" + body)
    assert statuses(answer) == [400], answer


@pytest.mark.parametrize("chunk", [b"1;\n", b"0x1\r\n", b"+1\r\n", b" 1\r\n", b"1\n", b"1\rX", b"\r\n1\r\n"])
def test_a_malformed_chunk_ends_the_connection(broker: TestBroker, chunk: bytes) -> None:
    head = CREATE.replace(b"close", b"keep-alive") + LINE + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = exchange(broker, head + chunk + b"a\r\n0\r\n\r\n" + HIDDEN_REQUEST)
    assert 200 not in statuses(answer), answer


def test_each_request_of_a_connection_needs_its_own_credential(broker: TestBroker) -> None:
    first = LIST.replace(b"close", b"keep-alive") + LINE + b"\r\n"
    assert statuses(exchange(broker, first + LIST + b"\r\n")) == [200, 401]
    refused = LIST.replace(b"close", b"keep-alive") + b"\r\n"
    assert statuses(exchange(broker, refused + LIST + LINE + b"\r\n")) == [401, 200]


# Paths

NAMES: Final = (
    "a",
    "a/b",
    "a%2Fb",
    "a.",
    "a ",
    "a+b",
    "a;b=c",
    "a?b",
    "a#b",
    "a\0",
    "a\r\nX-Injected: 1",
    "..",
    "é",
    "%",
)


@pytest.mark.parametrize("allowed", NAMES)
def test_the_name_that_is_authorized_is_the_decoded_one_that_is_used(
    broker: TestBroker, allowed: str
) -> None:
    allow(broker, acl(ResourceType.GROUP, allowed, Operation.DESCRIBE_CONFIGS))
    spellings = {quote(each, safe="") for each in NAMES}
    spellings |= {quote(each) for each in spellings}  # encoded twice
    spellings |= {each.lower() for each in spellings}
    spellings |= {"".join(f"%{byte:02X}" for byte in allowed.encode())}
    for spelled in spellings:
        answer = get(broker, f"/v1/groups/{spelled}/config".encode())
        assert status_of(answer) == (200 if unquote(spelled) == allowed else 403), spelled
        assert b"x-injected" not in answer.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "target",
    [
        "/v1/topics/hidden",
        "/v1/topics/%68idden",
        "/v1/topics/hidden%00",
        "/v1/topics/hidden%20",
        "/v1/topics/hidden/",
        "/v1/topics/hidden%2F",
        "/v1/topics/seen/../hidden",
        "/v1/topics/seen/..%2Fhidden",
        "/v1/topics/seen%2F..%2Fhidden",
        "/v1/topics/seen%252F..%252Fhidden",
        "/v1/topics/%2e%2e/topics/hidden",
        "/v1/topics/seen%00/../hidden",
        "/v1/topics/seen;/../hidden",
        "/v1/./topics/hidden",
        "//v1/topics/hidden",
        "/v1//topics/hidden",
        "/v1/topics//hidden",
        "/v1%2Ftopics%2Fhidden",
        "/health/live/../../v1/topics/hidden",
        "/health/live%2F..%2F..%2Fv1%2Ftopics%2Fhidden",
        "/v1/topics/seen?/../hidden",
        "/v1/topics/hidden?name=seen",
        "/v1/topics/hidden%3Fname=seen",
        "/v1/topics/hidden#/v1/topics/seen",
        "/v1/topics/h%C0%A9dden",
        "/v1/topics/%C1%A8idden",
        "/v1/topics/hid%",
        "/v1/topics/hid%u0064en",
        "\\v1\\topics\\hidden",
        "/v1/topics\\hidden",
        "http://localhost/v1/topics/hidden",
        "http://localhost/v1/topics/seen/../hidden",
    ],
)
def test_no_spelling_of_a_path_reaches_a_topic_without_its_right(broker: TestBroker, target: str) -> None:
    allow(
        broker,
        *(acl(ResourceType.TOPIC, "seen", each) for each in (Operation.READ, Operation.DESCRIBE_CONFIGS)),
    )
    assert status_of(get(broker, b"/v1/topics/seen")) == 200
    answer = get(broker, target.encode())
    assert status_of(answer) in (400, 403, 404), answer
    without = exchange(broker, b"GET " + target.encode() + b" HTTP/1.1\r\n" + HEAD + b"\r\n")
    assert status_of(without) in (400, 401), without
