"""Verification of transactional batches with the coordinator of their transactional id, on this broker or another one.

Implements `TransactionVerifier` of the produce service. Another broker is asked by AddPartitionsToTxn, from version 4
on, which only brokers may send. Requests for one broker that arrive while one is in flight are sent together in the
next one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from mansio.broker.coordinator.group.group_store import java_string_hash
from mansio.errors import CoordinatorNotAvailable, MansioError, WireError, error_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.coordinator.coordinator_lookup import CoordinatorLookup
    from mansio.ports import Peers, Promise, Scheduler

CLIENT_ID: Final = "mansio-transaction-verifier"
ADD_PARTITIONS_VERSION: Final = 5
BUMPING_VERSION: Final = 2
REQUEST_TIMEOUT_MS: Final = 5_000
TRANSACTIONS_PER_REQUEST_MAX: Final = 1_000
_HASH_MASK: Final = 0x7FFFFFFF

TopicPartition = tuple[str, int]
Outcomes = list["MansioError | None"]


class LocalTransactions(Protocol):
    """The transactions that this broker coordinates; implemented by `TransactionCoordinator`."""

    async def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        client_version: int,
    ) -> Outcomes: ...

    async def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
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
        partitions: Sequence[TopicPartition],
        *,
        adds: bool,
    ) -> Outcomes:
        """See `TransactionVerifier.verify`. An error of the whole request is returned for each partition."""
        asked = _Asked(transactional_id, producer_id, producer_epoch, tuple(partitions), adds)
        try:
            leader = self._coordinator_of(transactional_id)
            if leader == self._node_id:
                return await self._verify_locally(asked)
        except MansioError as error:
            return [error] * len(asked.partitions)
        assert self._peers is not None
        queue = self._queues.get(leader)
        if queue is None:
            queue = self._queues[leader] = _BrokerQueue(leader, self._peers, self._scheduler)
        return await queue.put(asked)

    def _coordinator_of(self, transactional_id: str) -> int:
        lookup = self._lookup
        if lookup is None:
            return self._node_id
        count = lookup.partition_count()
        broker = lookup.leader((java_string_hash(transactional_id) & _HASH_MASK) % count) if count else None
        if broker is None:
            raise CoordinatorNotAvailable(f"transactional id {transactional_id!r} has no coordinator now")
        return broker.node_id

    async def _verify_locally(self, asked: _Asked) -> Outcomes:
        named = asked.transactional_id, asked.producer_id, asked.producer_epoch, asked.partitions
        if asked.adds:
            return await self._local.add_partitions(*named, client_version=BUMPING_VERSION)
        return await self._local.verify_partitions(*named)


class _Asked(NamedTuple):
    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]
    adds: bool


class _BrokerQueue:
    """Verifications that wait for a request to one broker. A request has one entry per transactional id and kind,
    because the response names only the id; equal producers are combined."""

    __slots__ = ("_is_sending", "_node_id", "_peers", "_scheduler", "_waiting")

    def __init__(self, node_id: int, peers: Peers, scheduler: Scheduler) -> None:
        self._node_id = node_id
        self._peers = peers
        self._scheduler = scheduler
        self._waiting: deque[tuple[_Asked, Promise[Outcomes]]] = deque()
        self._is_sending = False

    def put(self, asked: _Asked) -> Promise[Outcomes]:
        promise: Promise[Outcomes] = self._scheduler.promise()
        self._waiting.append((asked, promise))
        if not self._is_sending:
            self._is_sending = True
            self._scheduler.spawn(self._send_all(), name="verify transactions")
        return promise

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send(self._take())
        finally:
            self._is_sending = False

    def _take(self) -> list[tuple[_Asked, Promise[Outcomes]]]:
        """Take the waiting verifications of different transactional ids; others stay for the next request."""
        taken: dict[str, tuple[_Asked, Promise[Outcomes]]] = {}
        left: deque[tuple[_Asked, Promise[Outcomes]]] = deque()
        while self._waiting:
            asked, promise = self._waiting.popleft()
            if asked.transactional_id in taken or len(taken) == TRANSACTIONS_PER_REQUEST_MAX:
                left.append((asked, promise))
            else:
                taken[asked.transactional_id] = asked, promise
        self._waiting = left
        return list(taken.values())

    async def _send(self, sent: list[tuple[_Asked, Promise[Outcomes]]]) -> None:
        failure: MansioError = CoordinatorNotAvailable("the coordinator did not answer")
        codes: dict[tuple[str, str, int], int] = {}
        try:
            codes = await self._request([asked for asked, _ in sent])
        except (MansioError, WireError) as error:
            failure = CoordinatorNotAvailable(f"the coordinator did not answer: {error}")
        finally:
            for asked, promise in sent:
                errors: Outcomes = []
                for topic, index in asked.partitions:
                    code = codes.get((asked.transactional_id, topic, index))
                    errors.append(failure if code is None else error_for_code(code) if code else None)
                if not promise.done():
                    promise.set_result(errors)

    async def _request(self, sent: list[_Asked]) -> dict[tuple[str, str, int], int]:
        request = messages.encode_request(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            ADD_PARTITIONS_VERSION,
            0,
            CLIENT_ID,
            {"transactions": [_transaction_fields(each) for each in sent]},
        )
        frame = await self._peers.send(self._node_id, request, timeout_ms=REQUEST_TIMEOUT_MS)
        _, response = messages.decode_response_frame(
            ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, frame
        )
        if response.error_code:
            raise error_for_code(response.error_code)
        return {
            (found.transactional_id, topic.name, each.partition_index): each.partition_error_code
            for found in response.results_by_transaction
            for topic in found.topic_results
            for each in topic.results_by_partition
        }


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
