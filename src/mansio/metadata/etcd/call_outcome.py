"""Interpretation of failed calls to etcd: whether they were executed, whether to retry, and the error to raise.

Invariant: a failure is `NOT_DONE` or `REFUSED` only if etcd reports it, or gRPC before it sent anything. All others are
`UNKNOWN`: the request may be executed, now or later.

Source: the texts and codes in etcd's api/v3rpc/rpctypes, which are part of its interface.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from grpc import StatusCode

from mansio.errors import (
    ConfigError,
    DiskFull,
    InvalidRequest,
    MansioError,
    MessageTooLarge,
    StorageError,
    Unavailable,
)
from mansio.metadata.metadata_store import Compacted, LeaseExpired

DETAILS_CHARACTERS_MAX: Final = 300


class EtcdUnsupported(ConfigError):
    """This etcd cannot store the metadata of a cluster."""


class EtcdDenied(ConfigError):
    """etcd denies the permission to this user."""


class EtcdWithoutUsers(EtcdDenied):
    """User and password are configured, but this etcd has no users."""


class Outcome(Enum):
    """What is known about a failed call."""

    NOT_DONE = auto()
    """Not executed; it may be retried, at another endpoint or later."""
    UNKNOWN = auto()
    """It may have been executed, or may be executed later."""
    STALE_TOKEN = auto()
    """Not executed; a new token is required."""
    REFUSED = auto()
    """Not executed, and a retry does not help."""


class Failure(NamedTuple):
    outcome: Outcome
    error: MansioError
    """Raised if the call is not repeated."""
    rotate: bool = False
    """Whether another endpoint may succeed."""


_NOT_DONE: Final = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "etcdserver: unhealthy cluster",
    "failed to connect to all addresses",  # from gRPC: nothing was sent
)
_STALE_TOKEN: Final = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)
_REFUSED: Final[tuple[tuple[str, type[MansioError], str], ...]] = (
    ("etcdserver: mvcc: required revision has been compacted", Compacted, ""),
    ("etcdserver: mvcc: required revision is a future", StorageError, "etcd has forgotten revisions"),
    ("etcdserver: requested lease not found", LeaseExpired, ""),
    ("etcdserver: request is too large", MessageTooLarge, "the transaction is larger than etcd takes"),
    ("etcdserver: too many operations in txn", InvalidRequest, "etcd takes fewer operations"),
    ("etcdserver: authentication failed", EtcdDenied, "etcd refused the user name or password"),
    ("etcdserver: authentication is not enabled", EtcdWithoutUsers, ""),
    ("etcdserver: permission denied", EtcdDenied, "etcd's user may not do that"),
)
_REFUSING_CODES: Final[dict[StatusCode, type[MansioError]]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.FAILED_PRECONDITION: InvalidRequest,
    StatusCode.NOT_FOUND: InvalidRequest,
    StatusCode.OUT_OF_RANGE: InvalidRequest,
    StatusCode.PERMISSION_DENIED: EtcdDenied,
    StatusCode.UNAUTHENTICATED: EtcdDenied,
    StatusCode.UNIMPLEMENTED: EtcdUnsupported,
}
_FULL: Final = "etcdserver: mvcc: database space exceeded"
"""etcd returns this for rejected transactions, and for the executed one that exceeded the limit."""
_LARGER: Final = "larger than max"
TOO_MANY_REQUESTS: Final = "etcdserver: too many requests"


def one_line(text: str | None) -> str:
    """A text of a peer as one line of bounded length."""
    return " ".join((text or "no reason given").split())[:DETAILS_CHARACTERS_MAX]


def classify(code: StatusCode, details: str | None, endpoint: str) -> Failure:
    """Classify a call that ended with `code` and `details` at `endpoint`."""
    details_line = one_line(details)
    unavailable = Unavailable(f"etcd at {endpoint} does not answer: {details_line}")
    if details_line.startswith(_STALE_TOKEN):
        return Failure(Outcome.STALE_TOKEN, EtcdDenied(f"etcd wants a user and password: {details_line}"))
    for text, kind, meaning in _REFUSED:
        if details_line.startswith(text):
            return Failure(Outcome.REFUSED, kind(f"{meaning}: {details_line}" if meaning else details_line))
    if details_line.startswith(_FULL):
        return Failure(Outcome.UNKNOWN, DiskFull(f"etcd's database is full: {details_line}"))
    if details_line.startswith(TOO_MANY_REQUESTS):
        return Failure(Outcome.NOT_DONE, Unavailable("etcd has more to do than it can: try again later"))
    if code is StatusCode.UNAVAILABLE and details_line.startswith(_NOT_DONE):
        return Failure(Outcome.NOT_DONE, unavailable, rotate=True)
    if code is StatusCode.RESOURCE_EXHAUSTED and _LARGER in details_line:
        return Failure(
            Outcome.REFUSED, MessageTooLarge(f"a message is larger than etcd takes or sends: {details_line}")
        )
    if code in _REFUSING_CODES:
        return Failure(Outcome.REFUSED, _REFUSING_CODES[code](f"etcd at {endpoint} refuses: {details_line}"))
    if code is StatusCode.DEADLINE_EXCEEDED:
        unavailable = Unavailable(f"etcd at {endpoint} does not answer in time")
    return Failure(Outcome.UNKNOWN, unavailable, rotate=True)
