"""Signatures of requests (AWS Signature Version 4), checked where access keys are configured.

Source: "Create a signed AWS API request", AWS Identity and Access Management user guide.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

from mansio.api.sqs.queues.queue_errors import QueueError
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW_S_MAX: Final = 15 * 60
"""Maximum difference between the time of a request and the clock of the broker; a request can be replayed so long."""

_AUTHORIZATION: Final = re.compile(
    rf"{ALGORITHM} +Credential=(?P<key>[^/,\s]+)/(?P<date>\d{{8}})/(?P<region>[^/,\s]+)/(?P<service>[^/,\s]+)"
    r"/aws4_request"
    r", *SignedHeaders=(?P<headers>[a-z0-9;._-]+), *Signature=(?P<signature>[0-9a-f]{64})"
)


class MissingAuthenticationToken(QueueError):
    """Request is missing Authentication Token"""

    code = "MissingAuthenticationToken"
    http_status = 403


class InvalidClientTokenId(QueueError):
    """The security token included in the request is invalid."""

    code = "InvalidClientTokenId"
    http_status = 403


class SignatureDoesNotMatch(QueueError):
    """The request signature we calculated does not match the signature you provided."""

    code = "SignatureDoesNotMatch"
    http_status = 403


class RequestExpired(QueueError):
    """The request was signed more than 15 minutes ago, or in the future."""

    code = "RequestExpired"
    http_status = 403


class SignedRequest(NamedTuple):
    """The signed parts of a request. `headers`: with names in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


class Authorization(NamedTuple):
    """The parts of the head of a request that name its signature and its access key. `secret`: the secret key of
    `access_key`; `signed`: names of the signed headers; `sent`: X-Amz-Date."""

    access_key: str
    secret: str
    region: str
    signed: list[str]
    sent: str
    signature: str


def check_authorization(headers: Mapping[str, str], keys: Mapping[str, str], now: datetime) -> Authorization:
    """Check all of the signature of a request that its head shows: the form, the access key, and when it was made.
    `headers`: with names in lower case. `keys`: secret keys by access key id.

    Raises `MissingAuthenticationToken`, `InvalidClientTokenId`, `SignatureDoesNotMatch`, `RequestExpired`."""
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", "").strip())
    if match is None:
        raise MissingAuthenticationToken
    secret = keys.get(match["key"])
    if secret is None:
        raise InvalidClientTokenId
    sent = headers.get("x-amz-date", "")
    try:
        sent_at = datetime.strptime(sent, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise SignatureDoesNotMatch("The request has no valid X-Amz-Date.") from error
    signed = match["headers"].split(";")
    amz_headers = [name for name in headers if name.startswith("x-amz-")]
    if (
        "host" not in signed
        or any(name not in signed for name in amz_headers)
        or sent[:8] != match["date"]
        or match["service"] != "sqs"
    ):
        raise SignatureDoesNotMatch(
            "The signature does not cover Host, X-Amz-Date, the date and the service."
        )
    if abs((now - sent_at).total_seconds()) > SKEW_S_MAX:
        raise RequestExpired
    return Authorization(match["key"], secret, match["region"], signed, sent, match["signature"])


def check_signature(request: SignedRequest, authorization: Authorization) -> None:
    """Check the signature itself. Raises `SignatureDoesNotMatch`."""
    expected = sign(
        request, authorization.secret, authorization.region, authorization.signed, authorization.sent
    )
    if not hmac.compare_digest(expected, authorization.signature):
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


def sign(request: SignedRequest, secret: str, region: str, signed: list[str], sent: str) -> str:
    """Return the signature of a request in hexadecimal. `signed`: names of the signed headers; `sent`: X-Amz-Date."""
    pairs = sorted(
        (quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~"))
        for name, _, value in (part.partition("=") for part in request.query.split("&") if part)
    )
    canonical = "\n".join(
        (
            request.method,
            quote(request.path, safe="/-_.~%"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in signed),
            "",
            ";".join(signed),
            hashlib.sha256(request.body).hexdigest(),
        )
    )
    scope = f"{sent[:8]}/{region}/sqs/aws4_request"
    text = f"{ALGORITHM}\n{sent}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (sent[:8], region, "sqs", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, text.encode(), "sha256").hexdigest()
