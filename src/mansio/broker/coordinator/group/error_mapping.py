"""Errors of coordinators: invalid names, and failures of the internal topic.

Invariant: clients never receive the error of an internal topic itself. They handle a coordinator that has moved or is
not available; a storage error or missing replicas would be meaningless to them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    InvalidGroupId,
    MansioError,
    NotCoordinator,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    RequestTimedOut,
    StorageError,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_BYTES_MAX: Final = 32_767
"""Group ids, instance ids and protocol names are stored with a 16-bit length."""


def check_group_id(group_id: str | None) -> None:
    """Raise `InvalidGroupId` for an id that is invalid for a group with members."""
    if not group_id or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId(f"{(group_id or '')[:40]!r} is not a group id")


def check_offsets_group_id(group_id: str | None) -> None:
    """As `check_group_id`, for committed offsets: the empty id is valid (very old simple consumers)."""
    if group_id is None or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId


def as_coordinator_error(error: MansioError) -> MansioError:
    """The error for clients when the internal topic fails: one that they handle."""
    if isinstance(error, StorageError | NotLeaderOrFollower | FencedLeaderEpoch):
        return NotCoordinator(error.message)
    if isinstance(
        error,
        NotEnoughReplicas | NotEnoughReplicasAfterAppend | RequestTimedOut | UnknownTopicOrPartition,
    ):
        return CoordinatorNotAvailable(error.message)
    return error


@contextmanager
def coordinator_errors() -> Iterator[None]:
    """Convert errors within the context by `as_coordinator_error`."""
    try:
        yield
    except MansioError as error:
        raise as_coordinator_error(error) from error
