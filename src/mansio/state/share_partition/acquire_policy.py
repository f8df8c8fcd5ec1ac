"""Which records a member may be given, and in which order: the one place where that is chosen.

Lanes and delays are further policies.

Always true: a policy only looks, and picks nothing but what is free, in stretches that do not overlap. What it picks is
leased, or not, by `share_partition`, which knows the limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from mansio.state.share_partition.batch_map import TERMINAL
from mansio.state.share_partition.types import ACQUIRED, ARCHIVING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.share_partition.batch_map import BatchMap

OPEN_END: Final = 2**63 - 1
"""How far the last stretch goes: nobody has been given anything of it yet."""


class Policy(Protocol):
    """See the module. `may_skip`: whoever gets a later stretch need not have all of the earlier ones."""

    may_skip: bool

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:
        """Stretches of offsets, first and last, in the order in which the member is to have them."""


class LowestFirst:
    """Whatever is free, the lowest offset first: Kafka's way."""

    may_skip = True

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the signature of all policies
        for batch in ranges.free_spans():
            yield batch.first, batch.last
        yield ranges.end, OPEN_END


class InOrder:
    """Nothing passes a lower record that is open, unless the same member has that one leased.

    What the member settled itself, and is being stored, holds up nobody but others.
    """

    may_skip = False

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the signature of all policies
        for batch in ranges:
            if batch.is_free:
                yield batch.first, batch.last
            elif batch.state in TERMINAL or batch.state == ARCHIVING:
                if batch.pending_token and batch.holder != member:
                    return
            elif batch.state != ACQUIRED or batch.holder != member:
                return
        yield ranges.end, OPEN_END
