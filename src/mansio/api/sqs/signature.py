"""Signatures of requests (AWS Signature Version 4), checked where clients have access keys.

Source: "Create a signed AWS API request", AWS Identity and Access Management user guide.

A request is checked in two steps: its head, before the body is read (`check_head`), and the signature itself, which
covers the body (`check_signature`). A request can be repeated as long as its date is valid: two requests of a client in
one second may have the same signature.

Invariants:
* The signature covers Host, X-Amz-Date, each header that begins with X-Amz-, the query, and the body.
* A header that decides what a request means is there once: what is checked is what is used.
* Signatures are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from mansio.api.sqs.queues.queue_errors import QueueError
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW_S_MAX: Final = 15 * 60
"""Maximum difference between the time of a request and the clock of the broker; a request can be repeated so long."""

SIGNING_KEYS_KEPT_MAX: Final = 1_024

_AUTHORIZATION: Final = re.compile(
    rf"{ALGORITHM} +Credential=(?P<key>[!-+\--.0-~]{{1,128}})/(?P<date>[0-9]{{8}})/(?P<region>[!-+\--.0-~]{{1,64}})"
    r"/(?P<service>[a-z0-9-]{1,64})/aws4_request"
    r" *, *SignedHeaders=(?P<headers>[a-z0-9;._-]+) *, *Signature=(?P<signature>[0-9a-f]{64})"
)
_DATE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_PRESIGNED: Final = re.compile(r"(?:^|&)X-Amz-(?:Signature|Credential|Algorithm)=", re.IGNORECASE)
_AMZ: Final = "x-amz-"
_BODY_HASH: Final = "x-amz-content-sha256"
_SINGLE: Final = ("authorization", "host", "content-type", "content-encoding")
_UNRESERVED: Final = "-_.~"


class MissingAuthenticationToken(QueueError):
    """Request is missing Authentication Token"""

    code = "MissingAuthenticationToken"
    http_status = 403


class SignatureDoesNotMatch(QueueError):
    """There is no such access key, or the request signature we calculated does not match the signature you provided."""

    code = "SignatureDoesNotMatch"
    http_status = 403


class RequestExpired(QueueError):
    """The request was signed more than 15 minutes ago, or in the future."""

    code = "RequestExpired"
    http_status = 403


class SignedRequest(NamedTuple):
    """The signed parts of a request. `path` and `query`: as they were sent; `headers`: see `join_headers`;
    `body_sha256`: of the body, in hexadecimal."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body_sha256: str


class Authorization(NamedTuple):
    """The parts of the head of a request that name its signature and its access key. `signed`: names of the signed
    headers; `sent`: X-Amz-Date."""

    access_key: str
    region: str
    signed: Sequence[str]
    sent: str
    signature: str


def join_headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request by name, in lower case, with the values of a repeated one joined by commas.
    Raises `SignatureDoesNotMatch` if one that is used is repeated."""
    found: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if name in found:
            if name in _SINGLE or name.startswith(_AMZ):
                raise SignatureDoesNotMatch(f"The request has the header {name} more than once.")
            value = f"{found[name]},{value}"
        found[name] = value
    return found


def check_head(headers: Mapping[str, str], query: str, now: datetime) -> Authorization:
    """Check all of the signature of a request that its head shows, but the access key: the form, what it covers, and
    when it was made. `headers`: see `join_headers`.

    Raises `MissingAuthenticationToken`, `SignatureDoesNotMatch`, `RequestExpired`."""
    if _PRESIGNED.search(query):
        raise MissingAuthenticationToken(
            "Presigned requests are not supported; sign the header Authorization."
        )
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", "").strip())
    if match is None:
        raise MissingAuthenticationToken
    sent = headers.get("x-amz-date", "")
    if not _DATE.fullmatch(sent):
        raise SignatureDoesNotMatch("The request has no valid X-Amz-Date.")
    try:
        sent_at = datetime.strptime(sent, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise SignatureDoesNotMatch("The request has no valid X-Amz-Date.") from error
    signed = match["headers"].split(";")
    if sorted(set(signed)) != signed or any(name not in headers for name in signed):
        raise SignatureDoesNotMatch("SignedHeaders names headers of the request, sorted, each once.")
    if (
        "host" not in signed
        or any(name.startswith(_AMZ) and name not in signed for name in headers)
        or sent[:8] != match["date"]
        or match["service"] != "sqs"
    ):
        raise SignatureDoesNotMatch(
            "The signature does not cover Host, X-Amz-Date and other X-Amz headers, the date and the service."
        )
    if abs((now - sent_at).total_seconds()) > SKEW_S_MAX:
        raise RequestExpired
    return Authorization(match["key"], match["region"], signed, sent, match["signature"])


def check_signature(request: SignedRequest, authorization: Authorization, secret: str) -> None:
    """Check the signature itself. Raises `SignatureDoesNotMatch`."""
    expected = sign(request, secret, authorization.region, authorization.signed, authorization.sent)
    is_right = hmac.compare_digest(expected, authorization.signature)
    if not is_right or request.headers.get(_BODY_HASH, request.body_sha256) != request.body_sha256:
        raise SignatureDoesNotMatch


def read_access_keys(path: str) -> dict[str, str]:
    """Return the secret keys by access key id in a file, none without a file. Raises `ConfigError`."""
    if not path:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sqs_access_keys_file: {path}: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if parts and not line.startswith("#"):
            if len(parts) != 2:
                raise ConfigError(
                    f"sqs_access_keys_file: {path}, line {number}: not a key id and a secret key"
                )
            found[parts[0]] = parts[1]
    if not found:
        raise ConfigError(f"sqs_access_keys_file: {path} has no keys")
    return found


def sign(request: SignedRequest, secret: str, region: str, signed: Sequence[str], sent: str) -> str:
    """Return the signature of a request in hexadecimal. `signed`: names of the signed headers; `sent`: X-Amz-Date."""
    pairs = sorted(
        (_encoded(name), _encoded(value))
        for name, _, value in (part.partition("=") for part in request.query.split("&") if part)
    )
    canonical = "\n".join(
        (
            request.method,
            _canonical_path(request.path),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in signed),
            "",
            ";".join(signed),
            request.body_sha256,
        )
    )
    scope = f"{sent[:8]}/{region}/sqs/aws4_request"
    text = f"{ALGORITHM}\n{sent}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    return hmac.digest(_signing_key(secret, sent[:8], region), text.encode(), "sha256").hex()


def _canonical_path(path: str) -> str:
    """Return a path without `.`, `..` and empty segments, encoded once more, as for all services but S3."""
    if path == "/":
        return path
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if kept:
                kept.pop()
        elif part and part != ".":
            kept.append(part)
    end = "/" if path.endswith("/") and kept else ""
    return f"/{quote('/'.join(kept), safe='/' + _UNRESERVED)}{end}"


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text), safe=_UNRESERVED)


@lru_cache(SIGNING_KEYS_KEPT_MAX)
def _signing_key(secret: str, date: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, "sqs", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
