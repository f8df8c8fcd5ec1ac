"""The case that the rules decide: facts, what is derived from them once, and common words of findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Final

from mansio.state.blockage.findings import by_place, count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.blockage.facts import GroupFacts, MemberFacts, PartitionFacts, Place, ShareFacts

NAMED_MAX: Final = 3
"""Number of partitions that a text names."""


@dataclass(slots=True)
class Case:
    """The facts, what is derived from them once, and the partitions whose standstill is explained already."""

    facts: GroupFacts
    hidden: frozenset[str] = frozenset()
    """Topics that the caller may not know; the facts have other names for them."""
    explained: set[Place] = field(default_factory=set)
    members: dict[Place, list[MemberFacts]] = field(default_factory=dict)
    """The members to which a partition is assigned: one of an ordinary group, several of a share group."""
    held: dict[str, int] = field(default_factory=dict)
    """Number of records that each member has leased."""
    stopped: set[str] = field(default_factory=set)
    """Ids of members that an earlier rule has found."""

    def __post_init__(self) -> None:
        for member in self.facts.members:
            for place in member.places:
                self.members.setdefault(place, []).append(member)
        for share in (each.share for each in self.facts.partitions):
            for holder in () if share is None else share.holders:
                self.held[holder.member_id] = self.held.get(holder.member_id, 0) + holder.leased

    @property
    def is_going_on(self) -> bool:
        """Whether the group has done a record during the sample."""
        return self.facts.done > 0

    def stands_still(self, part: PartitionFacts) -> bool:
        """Whether records wait in a partition, and none is known to be done."""
        return part.lag > 0 and part.done <= 0

    def has_stopped(self, part: PartitionFacts) -> bool:
        """Whether a sample shows that records wait in a partition and none is done."""
        return self.facts.sample_ms > 0 and self.stands_still(part)

    def open_partitions(self) -> list[PartitionFacts]:
        """Return the partitions that no earlier rule has explained."""
        return [each for each in self.facts.partitions if each.place not in self.explained]

    def mark_explained(self, parts: Iterable[PartitionFacts]) -> None:
        """Note that a finding explains why nothing is done in these partitions."""
        self.explained.update(each.place for each in parts)


def share_partitions(case: Case) -> list[tuple[PartitionFacts, ShareFacts]]:
    """Return the partitions of a share group that no earlier rule has explained, with their delivery state."""
    return [(each, each.share) for each in case.open_partitions() if each.share is not None]


def named(parts: list[PartitionFacts]) -> str:
    """Return the names of partitions, of many only some."""
    names = [str(each.place) for each in sorted(parts, key=by_place)[:NAMED_MAX]]
    more = len(parts) - len(names)
    return ", ".join(names) + (f" and {count(more, 'other')}" if more else "")


def name_of(member: MemberFacts) -> str:
    """Return how a text names a member."""
    host = member.client_host.removeprefix("/")
    return f"member {member.member_id} (client {member.client_id or '-'}{f' at {host}' if host else ''})"


def verb(members: list[MemberFacts]) -> str:
    """Return the verb for one or several members."""
    return "has" if len(members) == 1 else "have"


def seeing_command(place: Place, offset: int) -> str:
    """Return the command that shows one record."""
    return (
        f"mansio consume {quote(place.topic)} --partition {place.partition} --from-offset {offset} --max 1 "
        "--exit-at-end"
    )
