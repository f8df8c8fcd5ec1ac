"""One thing that is said of leases: of neighbouring messages together, or of a range of offsets without any.

Always true: the messages of one are neighbours in the log, in the same delivery; what is said of them is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .leased_types import RENEW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import MansioError
    from mansio.wire.topic_partition import TopicPartition

    from .leased_types import Leased, Listener

    Said = dict[TopicPartition, list["Settle"]]


class Settle:
    """One thing said: of neighbouring messages of one delivery, or of a range without any.

    `losses`: how many the book had lost when nobody of `messages` was lost.
    """

    __slots__ = (
        "asked",
        "delay_ms",
        "first",
        "give_up",
        "kind",
        "last",
        "losses",
        "messages",
        "outcome",
        "reason",
    )

    def __init__(
        self,
        kind: int,
        first: int,
        last: int,
        asked: float,
        give_up: float,
        *,
        messages: Sequence[Leased] = (),
        outcome: Listener | None = None,
        delay_ms: int = -1,
        reason: str = "",
        losses: int = 0,
    ) -> None:
        self.kind = kind
        self.first = first
        self.last = last
        self.asked = asked
        self.give_up = give_up
        self.messages = messages
        self.outcome = outcome
        self.delay_ms = delay_ms
        self.reason = reason
        self.losses = losses

    @property
    def goes_anywhere(self) -> bool:
        """Whether Kafka's own protocol can say it, along with a fetch."""
        return self.kind != RENEW and self.delay_ms < 0 and not self.reason

    @property
    def renewed(self) -> Leased | None:
        """The message whose lease is to be extended; those are said one by one."""
        return self.messages[0] if self.kind == RENEW and self.messages else None

    def of(self, messages: Sequence[Leased]) -> Settle:
        """The same, said of some of the messages, which are neighbours."""
        return Settle(
            self.kind,
            messages[0].offset,
            messages[-1].offset,
            self.asked,
            self.give_up,
            messages=messages,
            outcome=self.outcome,
            delay_ms=self.delay_ms,
            reason=self.reason,
            losses=self.losses,
        )

    def tell(self, error: MansioError | None) -> None:
        """It is known what became of it."""
        if self.outcome is not None:
            self.outcome.tell(self.messages, error)


def halves(said: list[Settle]) -> list[list[Settle]]:
    """Two parts of it, if it is said of more than one record."""
    if len(said) > 1:
        middle = len(said) // 2
        return [said[:middle], said[middle:]]
    messages = said[0].messages if said else ()
    if len(messages) > 1:
        middle = len(messages) // 2
        return [[said[0].of(messages[:middle])], [said[0].of(messages[middle:])]]
    return []


def runs_of(said: list[Settle]) -> list[list[Settle]]:
    """Neighbours of which the same is said, in order; what is said twice of an offset counts once."""
    if len(said) == 1:
        return [said]
    runs: list[list[Settle]] = []
    end = -1
    alike: tuple[Any, ...] = ()
    for each in sorted(said, key=_first):
        if each.first <= end:
            continue
        count = each.messages[0].delivery_count if each.messages else -1
        same = (each.kind, each.delay_ms, each.reason, count)
        if runs and each.first == end + 1 and same == alike:
            runs[-1].append(each)
        else:
            runs.append([each])
        end, alike = each.last, same
    return runs


def _first(said: Settle) -> int:
    return said.first
