"""Rates of partitions that other brokers lead, which the median of a topic needs.

A broker asks only about topics of which it leads a partition that could be hot, once in each window: one request to
each broker that leads another partition of such a topic (DescribePartitionRates, 20129). The answer has the rates of
the partitions that take in anything, without their indexes. Windows of brokers are not aligned: the one that answers
takes the last window or, if more was taken in, the present one, so that its rates are not too low.

Invariant: the rates of a topic are returned only if all brokers that lead one of its partitions have answered.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.errors import MansioError, error_for_code
from mansio.host.gather_results import gather_results
from mansio.metadata.feature_level import CURRENT_LEVEL
from mansio.metadata.model import NO_LEADER
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from mansio.metadata.image import MetadataImage
    from mansio.ports import Peers, Scheduler

CLIENT_ID: Final = "mansio-hot-partitions"
TOPICS_PER_REQUEST_MAX: Final = 100
TIMEOUT_MS: Final = 2_000


class RateExchange:
    """Asks other brokers for the rates of partitions. All methods run on the broker's event loop."""

    def __init__(
        self,
        state: MetadataImage,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        peers: Peers | None,
        scheduler: Scheduler,
    ) -> None:
        """`peers`: None on a single node."""
        self._state = state
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._peers = peers
        self._scheduler = scheduler
        self.request_count = 0

    async def ask(self, topic_ids: Collection[UUID]) -> Mapping[UUID, Sequence[float]]:
        """Return the rates of the partitions of topics that other brokers lead; a topic is missing if a broker did not
        answer. At most `TOPICS_PER_REQUEST_MAX` topics are asked about."""
        found: dict[UUID, list[float]] = {}
        by_broker: dict[int, list[UUID]] = defaultdict(list)
        for topic_id in list(topic_ids)[:TOPICS_PER_REQUEST_MAX]:
            topic = self._state.topics_by_id.get(topic_id)
            if topic is None:
                continue
            found[topic_id] = []
            for leader in {each.leader for each in topic.partitions} - {NO_LEADER, self._node_id}:
                by_broker[leader].append(topic_id)
        peers = self._peers
        if peers is None:
            return found
        if self._state.feature_level < CURRENT_LEVEL:  # brokers of an older version do not know the request
            elsewhere = {topic_id for topics in by_broker.values() for topic_id in topics}
            return {topic_id: rates for topic_id, rates in found.items() if topic_id not in elsewhere}

        async def ask_broker(node_id: int, asked: list[UUID]) -> None:
            fields = {"node_id": self._node_id, "broker_epoch": self._broker_epoch(), "topic_ids": asked}
            request = messages.encode_request(ApiKey.DESCRIBE_PARTITION_RATES, 0, 0, CLIENT_ID, fields)
            self.request_count += 1
            frame = await peers.send(node_id, request, timeout_ms=TIMEOUT_MS)
            _, response = messages.decode_response_frame(ApiKey.DESCRIBE_PARTITION_RATES, 0, frame)
            if response.error_code:
                raise error_for_code(response.error_code, response.error_message or "")
            for each in response.topics:
                if each.topic_id is not None and (rates := found.get(UUID(bytes=each.topic_id))) is not None:
                    rates += each.rates

        asked = list(by_broker.items())
        errors: list[MansioError | None] = []
        if asked:
            errors = await gather_results(
                self._scheduler, [ask_broker(*each) for each in asked], name="ask for rates of partitions"
            )
        for (_, missing), error in zip(asked, errors, strict=True):
            if error is not None:
                for topic_id in missing:
                    found.pop(topic_id, None)
        return found
