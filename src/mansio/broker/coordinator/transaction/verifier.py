"""Verification of transactional batches with the coordinator of their transactional id, on this broker or another one.

Implements `TransactionVerifier` of the produce service. Another broker is asked by AddPartitionsToTxn, from version 4
on, which only brokers may send. Requests for one broker that arrive while one is in flight are sent together in the
next one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from mansio.broker.coordinator.transaction.partition_errors import partition_errors
from mansio.broker.routing.combining_queue import CombiningQueue
from mansio.broker.routing.routes import coordinator_node_id
from mansio.errors import CoordinatorNotAvailable, MansioError, error_for_code
from mansio.state.transactions.transaction import BUMPING_VERSION
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.ports import Peers, Scheduler
    from mansio.wire.topic_partition import PartitionKey

VERIFICATION_CLIENT_ID: Final = "mansio-transaction-verifier"
ADD_PARTITIONS_VERSION: Final = 5
VERIFICATION_TIMEOUT_MS: Final = 5_000
TRANSACTIONS_PER_REQUEST_MAX: Final = 1_000

Outcomes = list["MansioError | None"]


class LocalTransactions(Protocol):
    """The transactions that this broker coordinates; implemented by `TransactionCoordinator`."""

    async def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
        *,
        client_version: int,
    ) -> Outcomes: ...

    async def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
    ) -> Outcomes: ...


class RoutedVerifier:
    """`TransactionVerifier` that asks the coordinator. All methods run on the broker's event loop."""

    def __init__(
        self,
        local: LocalTransactions,
        *,
        node_id: int,
        scheduler: Scheduler,
        lookup: CoordinatorLookup | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`lookup`: metadata of `__transaction_state`; it and `peers` are None on a single node."""
        self._local = local
        self._node_id = node_id
        self._scheduler = scheduler
        self._lookup = lookup
        self._peers = peers
        self._queues: dict[int, _BrokerQueue] = {}

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
        *,
        adds: bool,
    ) -> Outcomes:
        """See `TransactionVerifier.verify`. An error of the whole request is returned for each partition."""
        asked = _Asked(transactional_id, producer_id, producer_epoch, tuple(partitions), adds)
        try:
            leader = coordinator_node_id(transactional_id, self._node_id, self._lookup)
            if leader == self._node_id:
                return await self._verify_locally(asked)
        except MansioError as error:
            return [without_traceback(error)] * len(asked.partitions)
        assert self._peers is not None
        queue = self._queues.get(leader)
        if queue is None:
            queue = self._queues[leader] = _BrokerQueue(leader, self._peers, self._scheduler)
        return await queue.put(asked)

    async def _verify_locally(self, asked: _Asked) -> Outcomes:
        named = asked.transactional_id, asked.producer_id, asked.producer_epoch, asked.partitions
        if asked.adds:
            return await self._local.add_partitions(*named, client_version=BUMPING_VERSION)
        return await self._local.verify_partitions(*named)


class _Asked(NamedTuple):
    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: tuple[PartitionKey, ...]
    adds: bool


class _BrokerQueue(CombiningQueue[_Asked, Outcomes]):
    """Verifications that wait for a request to one broker. A request has one entry per transactional id, because the
    response names only the id."""

    name = "verify transactions"
    items_max = TRANSACTIONS_PER_REQUEST_MAX

    def __init__(self, node_id: int, peers: Peers, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._node_id = node_id
        self._peers = peers

    def order_key(self, item: _Asked) -> str:
        return item.transactional_id

    def failure(self, item: _Asked, reason: Exception | None) -> Outcomes:
        message = "the coordinator did not answer"
        error = CoordinatorNotAvailable(message if reason is None else f"{message}: {reason}")
        return [error] * len(item.partitions)

    async def request(self, items: Sequence[_Asked]) -> list[Outcomes]:
        request = messages.encode_request(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            ADD_PARTITIONS_VERSION,
            0,
            VERIFICATION_CLIENT_ID,
            {"transactions": [_transaction_fields(each) for each in items]},
        )
        frame = await self._peers.send(self._node_id, request, timeout_ms=VERIFICATION_TIMEOUT_MS)
        _, response = messages.decode_response_frame(
            ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, frame
        )
        if response.error_code:
            raise error_for_code(response.error_code)
        codes = {
            (found.transactional_id, topic.name, each.partition_index): each.partition_error_code
            for found in response.results_by_transaction
            for topic in found.topic_results
            for each in topic.results_by_partition
        }
        return [
            partition_errors(codes, each.transactional_id, each.partitions, self.failure(each, None))
            for each in items
        ]


def _transaction_fields(asked: _Asked) -> dict[str, Any]:
    indexes: dict[str, list[int]] = defaultdict(list)
    for topic, index in asked.partitions:
        indexes[topic].append(index)
    return {
        "transactional_id": asked.transactional_id,
        "producer_id": asked.producer_id,
        "producer_epoch": asked.producer_epoch,
        "verify_only": not asked.adds,
        "topics": [{"name": topic, "partitions": each} for topic, each in indexes.items()],
    }
