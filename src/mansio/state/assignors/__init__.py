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

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of the topic id, and the partition index."""


class MemberSpec(NamedTuple):
    """Input of an assignor for one member. `topics`: ids of the subscribed topics. `assigned`: its current target
    assignment."""

    member_id: str
    instance_id: str | None
    topics: tuple[bytes, ...]
    assigned: frozenset[TopicPartition]


class Assignor(Protocol):
    """Interface of an assignor. Clients select it by `name` (`group.remote.assignor`)."""

    name: str

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> Mapping[str, Collection[TopicPartition]]:
        """Return the target assignment of every member by member id. `members` may be in any order; `partitions`: topic
        id -> number of partitions."""
