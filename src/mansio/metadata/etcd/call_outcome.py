"""What a failed call to etcd means: whether it may have happened, whom to ask next, and what to tell people.

Always true: a failure is `NOT_DONE` or `REFUSED` only where etcd, or gRPC before a byte was sent, has said so. All
else is `UNKNOWN`: the request may be carried out, now or later.

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
    """This etcd cannot hold a cluster's metadata."""


class EtcdDenied(ConfigError):
    """etcd does not let this user do it."""


class EtcdWithoutUsers(EtcdDenied):
    """A user and password are set, and this etcd has no users."""


class Outcome(Enum):
    """What is known of a call that failed."""

    NOT_DONE = auto()
    """It did not happen; it may be tried again, elsewhere or later."""
    UNKNOWN = auto()
    """It may have happened, or still happen."""
    STALE_TOKEN = auto()
    """It did not happen; with a new token it may."""
    REFUSED = auto()
    """It did not happen, and asking again does not help."""


class Failure(NamedTuple):
    outcome: Outcome
    error: MansioError
    """To raise, where the call is not made again."""
    rotate: bool = False
    """Another endpoint may do better."""


_NOT_DONE: Final = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "etcdserver: unhealthy cluster",
    "failed to connect to all addresses",  # gRPC's own: nothing was sent
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
    ("etcdserver: authentication failed", EtcdDenied, "etcd knows no such user and password"),
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
"""etcd says this of transactions that it has refused, and of the one that it has carried out and that was too many."""
_LARGER: Final = "larger than max"
TOO_MANY_REQUESTS: Final = "etcdserver: too many requests"


def one_line(text: str | None) -> str:
    """What a peer said, fit for a message."""
    return " ".join((text or "no reason given").split())[:DETAILS_CHARACTERS_MAX]


def classify(code: StatusCode, details: str | None, endpoint: str) -> Failure:
    """Of a call that ended with `code` and `details` at `endpoint`."""
    said = one_line(details)
    unavailable = Unavailable(f"etcd at {endpoint} does not answer: {said}")
    if said.startswith(_STALE_TOKEN):
        return Failure(Outcome.STALE_TOKEN, EtcdDenied(f"etcd wants a user and password: {said}"))
    for text, kind, meaning in _REFUSED:
        if said.startswith(text):
            return Failure(Outcome.REFUSED, kind(f"{meaning}: {said}" if meaning else said))
    if said.startswith(_FULL):
        return Failure(Outcome.UNKNOWN, DiskFull(f"etcd's database is full: {said}"))
    if said.startswith(TOO_MANY_REQUESTS):
        return Failure(Outcome.NOT_DONE, Unavailable("etcd has more to do than it can: try again later"))
    if code is StatusCode.UNAVAILABLE and said.startswith(_NOT_DONE):
        return Failure(Outcome.NOT_DONE, unavailable, rotate=True)
    if code is StatusCode.RESOURCE_EXHAUSTED and _LARGER in said:
        return Failure(
            Outcome.REFUSED, MessageTooLarge(f"a message is larger than etcd takes or sends: {said}")
        )
    if code in _REFUSING_CODES:
        return Failure(Outcome.REFUSED, _REFUSING_CODES[code](f"etcd at {endpoint} refuses: {said}"))
    if code is StatusCode.DEADLINE_EXCEEDED:
        unavailable = Unavailable(f"etcd at {endpoint} does not answer in time")
    return Failure(Outcome.UNKNOWN, unavailable, rotate=True)
