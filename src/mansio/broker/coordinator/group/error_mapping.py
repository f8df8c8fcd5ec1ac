"""How a coordinator says no: to names that cannot be stored, and when the topic it writes to fails.

Always true: a failure of the internal topic reaches nobody as it is. Clients know what to do about a coordinator that
is elsewhere or not available; a storage error or a lack of replicas would tell them nothing.
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
    """Raise `InvalidGroupId` for an id that group membership cannot have."""
    if not group_id or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId(f"{(group_id or '')[:40]!r} is not a group id")


def check_offsets_group_id(group_id: str | None) -> None:
    """The same of an id under which offsets are kept: that may be the empty one (very old simple consumers)."""
    if group_id is None or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId


def as_coordinator_error(error: MansioError) -> MansioError:
    """What a member is told when the internal topic fails: the errors its client knows how to handle."""
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
    """What is raised within is raised `as_coordinator_error`."""
    try:
        yield
    except MansioError as error:
        raise as_coordinator_error(error) from error
