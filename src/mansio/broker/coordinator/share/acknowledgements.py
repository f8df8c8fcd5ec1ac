"""What members say in a request of the records they have leased: given to the machines, then stored.

Always true: all the machines take what is theirs before anything is stored, in one turn of the loop with whoever stores
it; each partition's part holds as a whole, or nothing of it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.coordinator.share.acknowledgement_conversion import acknowledge, to_acknowledgements
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.ports import Scheduler
    from mansio.state.consumer_group.types import TopicPartition
    from mansio.state.share_partition.types import AcknowledgementBatch, Update
    from mansio.wire.apis.share_acknowledge import AckPartition

    Acks = list[tuple[TopicPartition, AckPartition]]


class AcknowledgeOutcome:
    """What became of one partition's acknowledgements, and what is to be stored for them."""

    __slots__ = ("error", "share_partition", "update")

    def __init__(self) -> None:
        self.error: MansioError | None = None
        self.share_partition: SharePartitionLeader | None = None
        self.update: Update | None = None


def acknowledged_partitions(topics: Sequence[tuple[bytes, list[AckPartition]]]) -> Acks:
    """The partitions of a request of which anything is said."""
    return [((topic_id, part.index), part) for topic_id, parts in topics for part in parts if part.batches]


def check_no_duplicates(acks: Acks) -> None:
    """Raises `InvalidRequest` for a partition that is there twice."""
    if len(acks) > 1 and len({key for key, _ in acks}) < len(acks):
        raise InvalidRequest("a partition is named twice")


async def apply_acknowledgements(
    shares: SharePartitionManager, group: str, member: str, acks: Acks, *, is_renew_ack: bool
) -> dict[TopicPartition, AcknowledgeOutcome]:
    """Check what is acknowledged, and have the machines take it; nothing of it is stored yet."""
    outcomes: dict[TopicPartition, AcknowledgeOutcome] = {}
    checked: list[tuple[AcknowledgeOutcome, SharePartitionLeader, list[AcknowledgementBatch]]] = []
    for key, part in acks:
        outcome = outcomes[key] = AcknowledgeOutcome()
        try:
            said = to_acknowledgements(part.batches, is_renew_ack=is_renew_ack)
            share_partition = shares.find(group, *key)
            await share_partition.loaded()
        except MansioError as error:
            outcome.error = error
        else:
            checked.append((outcome, share_partition, said))
    for outcome, share_partition, said in checked:  # in one turn of the loop with whatever stores it
        outcome.share_partition = share_partition
        try:
            outcome.update = share_partition.call(acknowledge, share_partition, member, said)
        except MansioError as error:
            outcome.error = error
    return outcomes


async def persist_acknowledgements(scheduler: Scheduler, outcomes: Iterable[AcknowledgeOutcome]) -> None:
    """Store what the machines took, all at once; `error` says of each why it may not have been."""
    waiting = [each for each in outcomes if each.update is not None]
    works = [
        each.share_partition.persist(each.update) for each in waiting if each.share_partition and each.update
    ]
    for each, error in zip(waiting, await gather_results(scheduler, works, name="share acks"), strict=True):
        each.error = each.error or error
