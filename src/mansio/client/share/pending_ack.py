"""One thing that is said of leases: of neighbouring messages together, or of a range of offsets without any.

Always true: the messages of one are neighbours in the log, in the same delivery; what is said of them is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.client.share.leased import RENEW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.share.leased import AckListener, Leased
    from mansio.errors import MansioError
    from mansio.wire.topic_partition import TopicPartition

    PendingAcks = dict[TopicPartition, list["PendingAck"]]


class PendingAck:
    """One thing said: of neighbouring messages of one delivery, or of a range without any.

    `lost_count`: how many the book had lost when nobody of `messages` was lost.
    """

    __slots__ = (
        "delay_ms",
        "expires",
        "first",
        "kind",
        "last",
        "lost_count",
        "messages",
        "outcome",
        "reason",
        "requested",
    )

    def __init__(
        self,
        kind: int,
        first: int,
        last: int,
        requested: float,
        expires: float,
        *,
        messages: Sequence[Leased] = (),
        outcome: AckListener | None = None,
        delay_ms: int = -1,
        reason: str = "",
        lost_count: int = 0,
    ) -> None:
        self.kind = kind
        self.first = first
        self.last = last
        self.requested = requested
        self.expires = expires
        self.messages = messages
        self.outcome = outcome
        self.delay_ms = delay_ms
        self.reason = reason
        self.lost_count = lost_count

    @property
    def fits_share_acknowledge(self) -> bool:
        """Whether Kafka's own protocol can say it, along with a fetch."""
        return self.kind != RENEW and self.delay_ms < 0 and not self.reason

    @property
    def renewed(self) -> Leased | None:
        """The message whose lease is to be extended; those are said one by one."""
        return self.messages[0] if self.kind == RENEW and self.messages else None

    def of(self, messages: Sequence[Leased]) -> PendingAck:
        """The same, said of some of the messages, which are neighbours."""
        return PendingAck(
            self.kind,
            messages[0].offset,
            messages[-1].offset,
            self.requested,
            self.expires,
            messages=messages,
            outcome=self.outcome,
            delay_ms=self.delay_ms,
            reason=self.reason,
            lost_count=self.lost_count,
        )

    def completed(self, error: MansioError | None) -> None:
        """It is known what became of it."""
        if self.outcome is not None:
            self.outcome.completed(self.messages, error)


def halves(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Two parts of it, if it is said of more than one record."""
    if len(pending) > 1:
        middle = len(pending) // 2
        return [pending[:middle], pending[middle:]]
    messages = pending[0].messages if pending else ()
    if len(messages) > 1:
        middle = len(messages) // 2
        return [[pending[0].of(messages[:middle])], [pending[0].of(messages[middle:])]]
    return []


def merge_contiguous(pending: list[PendingAck]) -> list[list[PendingAck]]:
    """Neighbours of which the same is said, in order; what is said twice of an offset counts once."""
    if len(pending) == 1:
        return [pending]
    runs: list[list[PendingAck]] = []
    end = -1
    alike: tuple[Any, ...] = ()
    for each in sorted(pending, key=_first):
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


def _first(pending: PendingAck) -> int:
    return pending.first
