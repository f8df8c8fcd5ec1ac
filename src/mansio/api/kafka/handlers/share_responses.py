"""What the answers to ShareFetch and ShareAcknowledge have in common: who asked, what is told of an error, who leads.

Always true: no client is told of what only brokers know: who was fenced hears that somebody else leads, and damage on
our disk is CORRUPT_MESSAGE, as for Fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.errors import (
    CorruptLog,
    CorruptMessage,
    FencedLeaderEpoch,
    FencedStateEpoch,
    InvalidRequest,
    MansioError,
    NotLeaderOrFollower,
)
from mansio.wire.apis.share_acknowledge import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.coordinator.share.acknowledgements import AcknowledgeOutcome
    from mansio.broker.services.broker_services import BrokerServices

MEMBER_BYTES_MAX: Final = 255
"""A member's id is kept with every range of records it has leased."""


def checked_ids(group_id: str | None, member_id: str | None) -> tuple[str, str]:
    """Who asks. Raises `InvalidGroupId`, `InvalidRequest`."""
    check_group_id(group_id)
    if not member_id or len(member_id.encode()) > MEMBER_BYTES_MAX:
        raise InvalidRequest(f"a member's id has 1 to {MEMBER_BYTES_MAX} bytes")
    return group_id or "", member_id


def error_for_client(error: MansioError | None) -> tuple[int, str | None]:
    """Code and message for a client; (0, None) for no error."""
    if error is None:
        return 0, None
    if isinstance(error, FencedLeaderEpoch | FencedStateEpoch):
        return NotLeaderOrFollower.kafka_code, error.message
    if isinstance(error, CorruptLog):
        return CorruptMessage.kafka_code, error.message
    return error.kafka_code, error.message


def lock_ms_of(outcomes: Iterable[AcknowledgeOutcome]) -> int:
    """How long a lease of any of them lasts; 0 where none is there."""
    for outcome in outcomes:
        if outcome.share_partition is not None and outcome.share_partition.is_ready:
            return int(outcome.share_partition.state_machine.settings.lock_ms)
    return 0


class LeaderHints:
    """Who leads what this broker does not, with the places of those brokers."""

    __slots__ = ("_places", "_service")

    def __init__(self, service: BrokerServices) -> None:
        self._service = service
        self._places: dict[int, Endpoint] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        """Of those that were asked for."""
        return list(self._places.values())

    def of(self, topic_id: bytes, index: int, error: MansioError | None) -> tuple[int, int]:
        """(leader, leader epoch) as the metadata have it, for an answer of NOT_LEADER_OR_FOLLOWER; (-1, -1) else."""
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
        if broker.node_id not in self._places:
            self._places[broker.node_id] = Endpoint(
                broker.node_id, broker.host, broker.port, broker.rack or None
            )
        return broker.node_id, partition.leader_epoch
