"""Assignors: pure functions from members and topics to a target assignment for each member.

Built in are `uniform` and `range`; others are installed as entry points. Share groups use `simple`.

Invariants of a result:
* Every partition to which any member subscribes has exactly one owner, who subscribes to its topic.
* Equal input in any order gives an equal result.
* Partitions that need not move do not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of the topic id, and the partition index."""


class MemberSpec(NamedTuple):
    """Input for one member. `topics`: ids of subscribed topics; `assigned`: its current target."""

    member_id: str
    instance_id: str | None
    topics: tuple[bytes, ...]
    assigned: frozenset[TopicPartition]


class Assignor(Protocol):
    """An assignor. Clients select it by `name` (`group.remote.assignor`)."""

    name: str

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> Mapping[str, Collection[TopicPartition]]:
        """The target of every member by its id, in any order; `partitions`: topic id -> number of partitions."""
