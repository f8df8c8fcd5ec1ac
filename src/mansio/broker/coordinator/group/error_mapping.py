"""Errors of coordinators: checks of group ids, and conversion of the errors of an internal topic.

Invariant: clients never receive a storage or replication error of an internal topic. They receive NOT_COORDINATOR or
COORDINATOR_NOT_AVAILABLE, on which every client looks up the coordinator and retries.
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
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_BYTES_MAX: Final = 32_767
"""Maximum length of group ids, instance ids and protocol names, which are stored with a 16-bit length."""


def check_group_id(group_id: str | None) -> None:
    """Raise `InvalidGroupId` if a group with members cannot have this id: None, empty, or too long."""
    if not group_id or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId(f"{(group_id or '')[:40]!r} is not a group id")


def check_offsets_group_id(group_id: str | None) -> None:
    """Raise `InvalidGroupId` if committed offsets cannot have this group id: None, or too long. The empty id is valid,
    because very old simple consumers use it."""
    if group_id is None or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId


def as_coordinator_error(error: MansioError) -> MansioError:
    """Convert an error of an internal topic into the coordinator error that clients receive; of other errors it
    returns a copy."""
    if isinstance(error, StorageError | NotLeaderOrFollower | FencedLeaderEpoch):
        return NotCoordinator(error.message)
    if isinstance(
        error,
        NotEnoughReplicas | NotEnoughReplicasAfterAppend | RequestTimedOut | UnknownTopicOrPartition,
    ):
        return CoordinatorNotAvailable(error.message)
    return copied(error)


@contextmanager
def coordinator_errors() -> Iterator[None]:
    """Context manager that converts the errors raised in its body by `as_coordinator_error`."""
    try:
        yield
    except MansioError as error:
        raise as_coordinator_error(error) from error
