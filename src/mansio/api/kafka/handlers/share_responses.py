"""Common parts of ShareFetch, ShareAcknowledge and AcknowledgeRecords: requests as the service takes them, error codes,
leader hints.

Invariant: clients do not get errors that concern brokers only. A fenced leader is reported as not the leader, and
damage on the disk as CORRUPT_MESSAGE, as for Fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from mansio.broker.services.share import PartitionAcknowledgements
from mansio.errors import (
    CorruptLog,
    CorruptMessage,
    FencedLeaderEpoch,
    FencedStateEpoch,
    MansioError,
    NotLeaderOrFollower,
)
from mansio.state.share_partition.types import AcknowledgementBatch
from mansio.wire.apis.share_acknowledge import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.apis.share_acknowledge import AckPartition


def acknowledgements_of(
    topics: Sequence[tuple[bytes, list[AckPartition]]],
) -> list[PartitionAcknowledgements]:
    """The acknowledgements of a request, by partition."""
    return [
        PartitionAcknowledgements(
            topic_id, part.index, [AcknowledgementBatch(*batch) for batch in part.batches]
        )
        for topic_id, parts in topics
        for part in parts
        if part.batches
    ]


def error_for_client(error: MansioError | None) -> tuple[int, str | None]:
    """Code and message for a client; (0, None) for no error."""
    if error is None:
        return 0, None
    if isinstance(error, FencedLeaderEpoch | FencedStateEpoch):
        return NotLeaderOrFollower.kafka_code, error.message
    if isinstance(error, CorruptLog):
        return CorruptMessage.kafka_code, error.message
    return error.kafka_code, error.message


class LeaderHints:
    """Current leaders of partitions that this broker does not lead, with their endpoints."""

    __slots__ = ("_endpoints", "_service")

    def __init__(self, service: BrokerServices) -> None:
        self._service = service
        self._endpoints: dict[int, Endpoint] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        """Endpoints of all leaders returned by `of`."""
        return list(self._endpoints.values())

    def of(self, topic_id: bytes, index: int, error: MansioError | None) -> tuple[int, int]:
        """(leader, leader epoch) in the metadata for an error NOT_LEADER_OR_FOLLOWER; (-1, -1) for any other."""
        if error is None or error_for_client(error)[0] != NotLeaderOrFollower.kafka_code:
            return -1, -1
        state = self._service.topics.state
        topic = state.topics_by_id.get(UUID(bytes=topic_id))
        if topic is None or not 0 <= index < len(topic.partitions):
            return -1, -1
        partition = topic.partitions[index]
        broker = state.brokers.get(partition.leader)
        if broker is None:
            return -1, -1
        if broker.node_id not in self._endpoints:
            self._endpoints[broker.node_id] = Endpoint(
                broker.node_id, broker.host, broker.port, broker.rack or None
            )
        return broker.node_id, partition.leader_epoch
