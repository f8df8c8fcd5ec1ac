"""Assignors: pure functions from members and topics to a target assignment for each member.

`uniform` and `range` are built in; others are installed as Python entry points. Share groups use `simple`.

Invariants of the assignors for consumer groups:
* Every partition to which any member subscribes has exactly one owner, which subscribes to its topic.
* Equal input in any order gives an equal result.
* A partition changes its owner only if the balance requires it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mansio.wire.topic_partition import TopicIdPartition


class MemberSpec(NamedTuple):
    """Input of an assignor for one member. `topics`: ids of the subscribed topics. `assigned`: its current target
    assignment."""

    member_id: str
    instance_id: str | None
    topics: tuple[bytes, ...]
    assigned: frozenset[TopicIdPartition]


class Assignor(Protocol):
    """Interface of an assignor. Clients select it by `name` (`group.remote.assignor`)."""

    name: str

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> Mapping[str, Collection[TopicIdPartition]]:
        """Return the target assignment of every member by member id. `members` may be in any order; `partitions`: topic
        id -> number of partitions."""
