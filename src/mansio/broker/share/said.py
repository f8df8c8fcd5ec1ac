"""What members say in a request of the records they have leased: given to the machines, then stored.

Always true: all the machines take what is theirs before anything is stored, in one turn of the loop with whoever stores
it; each partition's part holds as a whole, or nothing of it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.share.acknowledging import settle, settles
from mansio.broker.share.together import together
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.share.live_share import LiveShare
    from mansio.broker.share.share_partitions import SharePartitions
    from mansio.ports import Scheduler
    from mansio.state.modern_types import TopicPartition
    from mansio.state.share_types import Settle, Update
    from mansio.wire.share_acknowledge import AckPartition

    Acks = list[tuple[TopicPartition, AckPartition]]


class Outcome:
    """What became of one partition's acknowledgements, and what is to be stored for them."""

    __slots__ = ("error", "live", "update")

    def __init__(self) -> None:
        self.error: MansioError | None = None
        self.live: LiveShare | None = None
        self.update: Update | None = None


def acks_of(topics: Sequence[tuple[bytes, list[AckPartition]]]) -> Acks:
    """The partitions of a request of which anything is said."""
    return [((topic_id, part.index), part) for topic_id, parts in topics for part in parts if part.batches]


def check_once(acks: Acks) -> None:
    """Raises `InvalidRequest` for a partition that is there twice."""
    if len(acks) > 1 and len({key for key, _ in acks}) < len(acks):
        raise InvalidRequest("a partition is named twice")


async def settled(
    shares: SharePartitions, group: str, member: str, acks: Acks, *, is_renew_ack: bool
) -> dict[TopicPartition, Outcome]:
    """Check what is acknowledged, and have the machines take it; nothing of it is stored yet."""
    outcomes: dict[TopicPartition, Outcome] = {}
    checked: list[tuple[Outcome, LiveShare, list[Settle]]] = []
    for key, part in acks:
        outcome = outcomes[key] = Outcome()
        try:
            said = settles(part.batches, is_renew_ack=is_renew_ack)
            live = shares.find(group, *key)
            await live.loaded()
        except MansioError as error:
            outcome.error = error
        else:
            checked.append((outcome, live, said))
    for outcome, live, said in checked:  # in one turn of the loop with whatever stores it
        outcome.live = live
        try:
            outcome.update = live.decide(settle, live, member, said)
        except MansioError as error:
            outcome.error = error
    return outcomes


async def store(scheduler: Scheduler, outcomes: Iterable[Outcome]) -> None:
    """Store what the machines took, all at once; `error` says of each why it may not have been."""
    waiting = [each for each in outcomes if each.update is not None]
    works = [each.live.perform(each.update) for each in waiting if each.live and each.update]
    for each, error in zip(waiting, await together(scheduler, works, name="share acks"), strict=True):
        each.error = each.error or error
