"""Who gets which partition: assignors, pure functions from members and topics to a target for everybody.

Owns the seam that assignors plug into, and the two there are: `uniform` and `range`. Others come as entry points.

Always true of a result: every partition that anybody subscribes to has exactly one owner, who subscribes to its topic;
the same input gives the same result, in whatever order it is given; what need not move does not move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of its topic's id, and its index."""


class MemberSpec(NamedTuple):
    """One member as an assignor sees it. `topics`: the ids it subscribes to; `assigned`: its target so far."""

    member_id: str
    instance_id: str | None
    topics: tuple[bytes, ...]
    assigned: frozenset[TopicPartition]


class Assignor(Protocol):
    """`name` is what a client asks for (`group.remote.assignor`)."""

    name: str

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> Mapping[str, Collection[TopicPartition]]:
        """The target of every member, by its id, in any order; `partitions`: topic id -> how many there are."""
