"""Interpretation of failed calls to etcd: whether they were executed, whether to retry, and the error to raise.

Invariant: a failure is `NOT_DONE` or `REFUSED` only if etcd reports it, or if gRPC reports that it sent nothing. After
all other failures (`UNKNOWN`) the request may have been executed, or may be executed later.

Source: the texts and codes in etcd's api/v3rpc/rpctypes, which are part of its public interface.
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
from mansio.metadata.metadata_store import LeaseExpired, RevisionCompacted

DETAILS_CHARACTERS_MAX: Final = 300


class EtcdUnsupported(ConfigError):
    """Raised when an etcd cannot store the metadata of a cluster, for example because of its version."""


class EtcdDenied(ConfigError):
    """Raised when etcd rejects the user, or the user lacks a permission."""


class EtcdWithoutUsers(EtcdDenied):
    """Raised when user and password are configured, but authentication is not enabled in etcd."""


class CallOutcome(Enum):
    """Outcome of a failed call: whether it was executed, and whether a retry may succeed."""

    NOT_DONE = auto()
    """The call was not executed; it may be retried, at another endpoint or later."""
    UNKNOWN = auto()
    """The call may have been executed, or may be executed later."""
    STALE_TOKEN = auto()
    """The call was not executed; it may be retried with a new authentication token."""
    REFUSED = auto()
    """The call was not executed, and a retry would fail, too."""


class Failure(NamedTuple):
    """A failed call: its outcome, and the error to raise if the call is not retried.

    `try_other_endpoint`: the call may succeed at another endpoint.
    """

    outcome: CallOutcome
    error: MansioError
    try_other_endpoint: bool = False


_NOT_DONE_TEXTS: Final = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "etcdserver: unhealthy cluster",
    "failed to connect to all addresses",  # from gRPC: nothing was sent
)
_STALE_TOKEN_TEXTS: Final = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)
_REFUSED_ERRORS: Final[tuple[tuple[str, type[MansioError], str], ...]] = (
    ("etcdserver: mvcc: required revision has been compacted", RevisionCompacted, ""),
    ("etcdserver: mvcc: required revision is a future", StorageError, "etcd has lost revisions"),
    ("etcdserver: requested lease not found", LeaseExpired, ""),
    ("etcdserver: request is too large", MessageTooLarge, "the transaction is too large for etcd"),
    (
        "etcdserver: too many operations in txn",
        InvalidRequest,
        "the transaction has too many operations for etcd",
    ),
    ("etcdserver: authentication failed", EtcdDenied, "etcd rejected the user name or password"),
    ("etcdserver: authentication is not enabled", EtcdWithoutUsers, ""),
    ("etcdserver: permission denied", EtcdDenied, "the etcd user lacks a permission"),
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
_DATABASE_FULL: Final = "etcdserver: mvcc: database space exceeded"
"""etcd returns this error for rejected transactions, and also for the executed transaction that exceeded the limit."""
_MESSAGE_TOO_LARGE: Final = "larger than max"
TOO_MANY_REQUESTS: Final = "etcdserver: too many requests"


def to_one_line(text: str | None) -> str:
    """Return a text from a peer as one line of at most `DETAILS_CHARACTERS_MAX` characters."""
    return " ".join((text or "no reason given").split())[:DETAILS_CHARACTERS_MAX]


def classify(code: StatusCode, details: str | None, endpoint: str) -> Failure:
    """Classify a call that ended with `code` and `details` at `endpoint`."""
    details_line = to_one_line(details)
    unavailable = Unavailable(f"etcd at {endpoint} does not respond: {details_line}")
    if details_line.startswith(_STALE_TOKEN_TEXTS):
        return Failure(
            CallOutcome.STALE_TOKEN, EtcdDenied(f"etcd requires a user and password: {details_line}")
        )
    for text, kind, meaning in _REFUSED_ERRORS:
        if details_line.startswith(text):
            return Failure(
                CallOutcome.REFUSED, kind(f"{meaning}: {details_line}" if meaning else details_line)
            )
    if details_line.startswith(_DATABASE_FULL):
        return Failure(CallOutcome.UNKNOWN, DiskFull(f"etcd's database is full: {details_line}"))
    if details_line.startswith(TOO_MANY_REQUESTS):
        return Failure(CallOutcome.NOT_DONE, Unavailable("etcd is overloaded: try again later"))
    if code is StatusCode.UNAVAILABLE and details_line.startswith(_NOT_DONE_TEXTS):
        return Failure(CallOutcome.NOT_DONE, unavailable, try_other_endpoint=True)
    if code is StatusCode.RESOURCE_EXHAUSTED and _MESSAGE_TOO_LARGE in details_line:
        return Failure(
            CallOutcome.REFUSED,
            MessageTooLarge(f"a message exceeds the size limit: {details_line}"),
        )
    if code in _REFUSING_CODES:
        return Failure(
            CallOutcome.REFUSED, _REFUSING_CODES[code](f"etcd at {endpoint} rejects the call: {details_line}")
        )
    if code is StatusCode.DEADLINE_EXCEEDED:
        unavailable = Unavailable(f"etcd at {endpoint} does not respond in time")
    return Failure(CallOutcome.UNKNOWN, unavailable, try_other_endpoint=True)
