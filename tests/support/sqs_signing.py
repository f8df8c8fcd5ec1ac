"""Signed requests to the SQS endpoint: botocore signs them, and tests change what is sent."""

from __future__ import annotations

import http.client
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock
from urllib.parse import urlsplit

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

REGION: Final = "us-east-1"
TIMEOUT_S: Final = 30
JSON: Final = "application/x-amz-json-1.0"


class Answer(NamedTuple):
    """Status and body of a response, without the id of the request."""

    status: int
    body: str


def signed_headers(
    url: str,
    key_id: str,
    secret: str,
    body: bytes = b"{}",
    *,
    action: str = "ListQueues",
    method: str = "POST",
    age: timedelta = timedelta(),
    more: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Return the headers of a request as botocore signs it. `age`: how long ago; `more`: further headers."""
    request = AWSRequest(method, url, data=body)
    request.headers["host"] = urlsplit(url).netloc
    if action:
        request.headers["x-amz-target"] = f"AmazonSQS.{action}"
        request.headers["content-type"] = JSON
    for name, value in more:
        request.headers[name] = value
    moment = datetime.now(UTC) - age
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
        botocore.auth.SigV4Auth(Credentials(key_id, secret), "sqs", REGION).add_auth(request)
    return [(name, str(value)) for name, value in request.headers.items()]


def send(url: str, headers: Sequence[tuple[str, str]], body: bytes = b"{}", method: str = "POST") -> Answer:
    """Send exactly these headers, and the length of the body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 80, timeout=scaled(TIMEOUT_S))
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.putrequest(method, target or "/", skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return Answer(response.status, response.read().decode())
    finally:
        connection.close()


def send_signed(url: str, key_id: str, secret: str, body: bytes = b"{}", **options: Any) -> Answer:
    """Sign a request, and send it as it was signed."""
    headers = signed_headers(url, key_id, secret, body, **options)
    return send(url, headers, body, options.get("method", "POST"))
