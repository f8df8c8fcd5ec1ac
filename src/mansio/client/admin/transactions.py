"""Transactions of producers with a transactional id (KIP-664); available as `client.admin.transactions`.

A transaction has two sides: its coordinator, which knows the transactional id, and the partitions, which know the
producer id and the offset at which the transaction begins. A transaction that is open in a partition and unknown to
its coordinator is *hanging*: nothing ends it, and readers of committed records wait at its first offset.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.client.admin.coordinator_listing import list_on_coordinators
from mansio.errors import (
    InvalidRequest,
    InvalidTxnState,
    TransactionalIdNotFound,
    Unavailable,
    UnknownTopicOrPartition,
)
from mansio.net.cluster import TRANSACTION_KEY_TYPE, group_by_topic
from mansio.net.offsets import request_leaders
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.transaction_records import HELD_TIMEOUT_MS, TRANSACTION_STATE_TOPIC
from mansio.wire.query_transactional_ids import query_id_of
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from mansio.client.admin.coordinator_listing import CoordinatorListing
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

HANGING_OPEN_MS_MIN: Final = 15 * 60_000
"""Default age from which a transaction counts as hanging: Kafka's default of `transaction.max.timeout.ms`, after which
each transaction that its coordinator knows is aborted."""

PARTITIONS_PER_REQUEST: Final = 5
"""Partitions in one DescribeProducers request, because the answer has all idempotent producers, too."""

STATES: Final = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "PrepareEpochFence",
)
"""Kafka's names of the states of transactional ids."""

OPEN_STATES: Final = frozenset({"Ongoing", "PrepareCommit", "PrepareAbort"})
"""States in which partitions may have an open transaction."""


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id with its producer id, state (Kafka's name, such as "Ongoing") and coordinator (node id)."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


class TransactionListings(list[TransactionListing]):
    """List of transactional ids, sorted.

    Those that the brokers in `unreachable` and the partitions in `missing_partitions` coordinate are missing.
    """

    def __init__(
        self,
        transactions: Iterable[TransactionListing] = (),
        unreachable: Iterable[int] = (),
        missing_partitions: Iterable[int] = (),
    ) -> None:
        super().__init__(transactions)
        self.unreachable: tuple[int, ...] = tuple(unreachable)
        """Brokers that did not respond in time."""
        self.missing_partitions: tuple[int, ...] = tuple(missing_partitions)
        """Partitions of `__transaction_state` without a coordinator that responded."""

    @property
    def is_complete(self) -> bool:
        """Whether the transactional ids of every partition of `__transaction_state` were listed."""
        return not self.unreachable and not self.missing_partitions


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """State of a transactional id on its coordinator (node id). `started_ms`: begin of the transaction in milliseconds
    since the Unix epoch, None without one; `partitions`: those that the transaction has written to."""

    transactional_id: str
    coordinator_id: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: tuple[TopicPartition, ...]

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun, and not all partitions know its end."""
        return self.state in OPEN_STATES


@dataclass(frozen=True, slots=True)
class PartitionProducer:
    """A producer that has written to a partition. None: `last_sequence` without a batch in the current epoch,
    `coordinator_epoch` before the end of its first transaction, `transaction_start_offset` without an open transaction.
    `last_timestamp_ms`: time of its last batch, in milliseconds since the Unix epoch."""

    producer_id: int
    producer_epoch: int
    last_sequence: int | None
    last_timestamp_ms: int
    coordinator_epoch: int | None
    transaction_start_offset: int | None


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a partition and not known to its coordinator. `transactional_id`: the id that has
    the producer id now, None if there is none; `open_ms`: time since the last batch of the producer, in
    milliseconds."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int | None
    start_offset: int
    last_timestamp_ms: int
    open_ms: int
    transactional_id: str | None


class TransactionAdmin:
    """Transactions of one cluster; available as `client.admin.transactions`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(
        self,
        *,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        open_ms_min: int | None = None,
        pattern: str | None = None,
        timeout_ms: float | None = None,
    ) -> TransactionListings:
        """The transactional ids of all coordinators, sorted. Filters that are not given select all.

        `states`: Kafka's names of states. `open_ms_min`: only transactions that are open for longer. `pattern`: regular
        expression (RE2) of whole ids. The requests are repeated for `timeout_ms` (default: the client's retry timeout)
        while a coordinator does not respond; `is_complete` of the result tells whether some are missing. Raises
        `InvalidRequest` for a state that does not exist, and `InvalidRegularExpression`."""
        listing = await _list(self._cluster, states, producer_ids, open_ms_min, pattern, timeout_ms)
        found = {each.transactional_id: each for each in listing.items}
        return TransactionListings(
            (found[each] for each in sorted(found)), listing.unreachable, listing.missing_partitions
        )

    async def describe(self, transactional_id: str) -> TransactionDescription:
        """State of a transactional id. Raises `TransactionalIdNotFound`."""

        async def attempt() -> TransactionDescription:
            node_id = await self._coordinator(transactional_id)
            connection = await self._cluster.connection(node_id)
            fields = {"transactional_ids": [transactional_id]}
            response = await connection.request(ApiKey.DESCRIBE_TRANSACTIONS, fields)
            (found,) = response.transaction_states
            message = None
            if found.error_code == TransactionalIdNotFound.kafka_code:
                message = f"there is no transactional id {transactional_id!r}"
            raise_for_code(found.error_code, message)
            return _description(found, node_id)

        return await self._cluster.retry(attempt)

    async def _coordinator(self, transactional_id: str) -> int:
        """Node id of the coordinator, which may have changed since the last look-up."""
        self._cluster.forget_coordinator(transactional_id, key_type=TRANSACTION_KEY_TYPE)
        node = await self._cluster.coordinator_node(transactional_id, key_type=TRANSACTION_KEY_TYPE)
        return node.node_id

    async def describe_producers(
        self, partitions: Iterable[TopicPartition], *, node_id: int | None = None
    ) -> dict[TopicPartition, tuple[PartitionProducer, ...]]:
        """Producers of each partition, with the open transaction of each. `node_id`: ask this broker, which has a
        replica, instead of the leader. Raises `UnknownTopicOrPartition`, and `NotLeaderOrFollower` if `node_id` has no
        replica."""
        wanted = [TopicPartition(*each) for each in dict.fromkeys(partitions)]
        await self._check_partitions(wanted)
        found: dict[TopicPartition, tuple[PartitionProducer, ...]] = {}
        for first in range(0, len(wanted), PARTITIONS_PER_REQUEST):
            part = wanted[first : first + PARTITIONS_PER_REQUEST]
            if node_id is None:
                found |= await request_leaders(self._cluster, dict.fromkeys(part), self._describe_on)
            else:
                await self._describe_on(node_id, dict.fromkeys(part), found)
        return found

    async def _check_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Raise `UnknownTopicOrPartition` at once, where a request would wait for the partition to be created."""
        for topic, indexes in group_by_topic(partitions).items():
            self._cluster.mark_stale((topic,))
            count = len((await self._cluster.topic(topic, wait_ms=0, may_create=False)).partitions)
            for index in indexes:
                if not 0 <= index < count:
                    raise UnknownTopicOrPartition(f"topic {topic} has no partition {index}")

    async def _describe_on(
        self,
        node_id: int,
        partitions: Mapping[TopicPartition, None],
        results: dict[TopicPartition, tuple[PartitionProducer, ...]],
    ) -> None:
        topics = [
            {"name": topic, "partition_indexes": [*indexes]}
            for topic, indexes in group_by_topic(partitions).items()
        ]
        connection = await self._cluster.connection(node_id)
        response = await connection.request(ApiKey.DESCRIBE_PRODUCERS, {"topics": topics})
        for topic in response.topics:
            for found in topic.partitions:
                raise_for_code(found.error_code, found.error_message)
                one = TopicPartition(topic.name, found.partition_index)
                results[one] = tuple(map(_producer, found.active_producers))

    async def find_hanging(
        self,
        partitions: Iterable[TopicPartition | str] | None = None,
        *,
        node_id: int | None = None,
        open_ms_min: int = HANGING_OPEN_MS_MIN,
    ) -> tuple[HangingTransaction, ...]:
        """Transactions that are open in a partition and not known to their coordinator, ordered by partition and
        offset.

        `partitions`: names of topics, or partitions; None for all. `node_id`: only partitions that this broker leads.
        `open_ms_min`: only producers without a batch for longer. Raises `UnknownTopicOrPartition`, and `Unavailable` if
        a coordinator does not respond, since its transactions would look as if they hung."""
        chosen = await _select(self._cluster, partitions, node_id)
        candidates = await self._open(chosen, open_ms_min)
        if not candidates:
            return ()
        ids, known = await self._known({each.producer_id for _, each in candidates})
        suspects = [
            (one, producer) for one, producer in candidates if (producer.producer_id, *one) not in known
        ]
        # A transaction that has ended meanwhile is not known to its coordinator any more, and not open.
        still_open = set(await self._open({one for one, _ in suspects}, open_ms_min))
        now_ms = time.time_ns() // 1_000_000
        return tuple(
            HangingTransaction(
                *one,
                producer.producer_id,
                producer.producer_epoch,
                producer.coordinator_epoch,
                producer.transaction_start_offset or 0,
                producer.last_timestamp_ms,
                max(now_ms - producer.last_timestamp_ms, 0),
                ids.get(producer.producer_id),
            )
            for one, producer in sorted(
                suspects, key=lambda pair: (pair[0], pair[1].transaction_start_offset)
            )
            if (one, producer) in still_open
        )

    async def _open(
        self, partitions: Iterable[TopicPartition], open_ms_min: int
    ) -> tuple[tuple[TopicPartition, PartitionProducer], ...]:
        """The producers with an open transaction and no batch for longer than `open_ms_min`."""
        described = await self.describe_producers(partitions)
        latest_ms = time.time_ns() // 1_000_000 - open_ms_min
        return tuple(
            (one, producer)
            for one, producers in described.items()
            for producer in producers
            if producer.transaction_start_offset is not None
            and (open_ms_min <= 0 or producer.last_timestamp_ms <= latest_ms)
        )

    async def _known(
        self, producer_ids: Collection[int]
    ) -> tuple[dict[int, str], dict[tuple[int, str, int], str]]:
        """The transactional ids of these producer ids, and those of each (producer id, topic, partition) with an open
        transaction. Raises `Unavailable` if a coordinator did not respond."""
        listing = await _list(self._cluster, producer_ids=producer_ids)
        if not listing.is_complete:
            raise Unavailable(
                f"the coordinators of partitions {[*listing.missing_partitions]} of {TRANSACTION_STATE_TOPIC}, or"
                f" brokers {[*listing.unreachable]}, did not answer: their transactions are not known"
            )
        ids: dict[int, str] = {}
        known: dict[tuple[int, str, int], str] = {}
        for each in listing.items:
            ids[each.producer_id] = each.transactional_id
            if each.state in OPEN_STATES:
                try:
                    described = await self.describe(each.transactional_id)
                except TransactionalIdNotFound:
                    continue
                if described.is_open:
                    known |= {
                        (described.producer_id, *one): each.transactional_id for one in described.partitions
                    }
        return ids, known

    async def abort(
        self, partition: TopicPartition, start_offset: int, *, force: bool = False
    ) -> PartitionProducer:
        """Abort the transaction that begins at an offset of a partition, in this partition only; returns its producer.
        Records of the transaction in the partition are never delivered to readers of committed records.

        This is for hanging transactions. One that its coordinator knows is refused, unless `force`: its producer would
        commit the other partitions later; `terminate` aborts it as a whole. Raises `InvalidTxnState` then, and if no
        open transaction begins at the offset; `UnknownTopicOrPartition`; `Unavailable` if a coordinator does not
        respond."""
        partition = TopicPartition(*partition)
        producer = await self._find_open(partition, start_offset)
        if producer is None:
            raise InvalidTxnState(
                f"no open transaction begins at offset {start_offset} of {partition.topic}-{partition.partition}"
            )
        if not force:
            _, known = await self._known({producer.producer_id})
            owner = known.get((producer.producer_id, *partition))
            if owner is not None:
                raise InvalidTxnState(
                    f"the transaction is not hanging: transactional id {owner!r} has it open; terminate it as a whole"
                )
        marker = {
            "producer_id": producer.producer_id,
            "producer_epoch": producer.producer_epoch,
            "transaction_result": False,
            "coordinator_epoch": producer.coordinator_epoch or 0,
            "topics": [{"name": partition.topic, "partition_indexes": [partition.partition]}],
        }
        try:
            await request_leaders(self._cluster, {partition: marker}, partial(_write_marker, self._cluster))
        except InvalidTxnState:
            # The answer of an earlier attempt may have been lost.
            if await self._find_open(partition, start_offset) is not None:
                raise
        return producer

    async def _find_open(self, partition: TopicPartition, start_offset: int) -> PartitionProducer | None:
        producers = (await self.describe_producers([partition]))[partition]
        found = (each for each in producers if each.transaction_start_offset == start_offset)
        return next(found, None)

    async def terminate(self, transactional_id: str) -> TransactionDescription:
        """Abort the open transaction of a transactional id in all its partitions, and fence its producer, which gets
        `ProducerFenced` from now on. Returns the state before.

        A prepared transaction of a query, which waits for the decision about its batch, is aborted by the broker that
        decides: with it, the batch cannot be committed any more. If the batch is decided already, the transaction is
        committed. One of another writer is refused, because the other transactions of its batch may be committed.
        Raises `TransactionalIdNotFound`, and `InvalidTxnState` then, or if no transaction is open."""
        described = await self.describe(transactional_id)
        if described.state != "Ongoing":
            raise InvalidTxnState(
                f"transactional id {transactional_id!r} has no open transaction: its state is {described.state}"
            )
        if described.timeout_ms == HELD_TIMEOUT_MS:
            await self._abort_prepared(described)
            return described

        async def attempt() -> None:
            connection = await self._cluster.connection(await self._coordinator(transactional_id))
            fields = {
                "transactional_id": transactional_id,
                "transaction_timeout_ms": described.timeout_ms,
                "producer_id": -1,
                "producer_epoch": -1,
            }
            response = await connection.request(ApiKey.INIT_PRODUCER_ID, fields)
            raise_for_code(response.error_code)

        await self._cluster.retry(attempt)
        return described

    async def _abort_prepared(self, described: TransactionDescription) -> None:
        transactional_id = described.transactional_id
        query_id = query_id_of(transactional_id)
        if query_id is None:
            raise InvalidTxnState(
                f"transactional id {transactional_id!r} waits for the decision about its batch: its query ends it, or"
                " transaction_prepared_max_ms"
            )
        named = {
            "transactional_id": transactional_id,
            "producer_id": described.producer_id,
            "producer_epoch": described.producer_epoch,
        }
        fields = {
            "query_id": query_id,
            "batch_id": 0,
            "committed": False,
            "transactions": [named],
            "abandoned": [],
        }

        async def attempt() -> None:
            connection = await self._cluster.connection(await self._coordinator(query_id))
            response = await connection.request(ApiKey.COMMIT_BATCH, fields)
            raise_for_code(response.error_code, response.error_message)

        await self._cluster.retry(attempt)


async def _list(
    cluster: Cluster,
    states: Iterable[str] = (),
    producer_ids: Iterable[int] = (),
    open_ms_min: int | None = None,
    pattern: str | None = None,
    timeout_ms: float | None = None,
) -> CoordinatorListing[TransactionListing]:
    fields = {
        "state_filters": [*states],
        "producer_id_filters": [*producer_ids],
        "duration_filter": -1 if open_ms_min is None else open_ms_min,
        "transactional_id_pattern": pattern,
    }

    async def read(connection: BrokerConnection, node_id: int) -> list[TransactionListing]:
        response = await connection.request(ApiKey.LIST_TRANSACTIONS, fields)
        raise_for_code(response.error_code)
        if response.unknown_state_filters:
            raise InvalidRequest(
                f"transactions have no state {response.unknown_state_filters[0]!r}; the states are {', '.join(STATES)}"
            )
        return [
            TransactionListing(each.transactional_id, each.producer_id, each.transaction_state, node_id)
            for each in response.transaction_states
        ]

    return await list_on_coordinators(cluster, TRANSACTION_STATE_TOPIC, read, timeout_ms)


async def _select(
    cluster: Cluster, partitions: Iterable[TopicPartition | str] | None, node_id: int | None
) -> list[TopicPartition]:
    topics = await cluster.topics()
    wanted = [*topics] if partitions is None else list(partitions)
    found: dict[TopicPartition, None] = {}
    for each in wanted:
        name = each if isinstance(each, str) else each[0]
        if name not in topics:
            raise UnknownTopicOrPartition(f"topic {name}: there is no such topic")
        known = topics[name].partitions
        indexes = [one.index for one in known] if isinstance(each, str) else [each[1]]
        leaders = {one.index: one.leader for one in known}
        for index in indexes:
            if index not in leaders:
                raise UnknownTopicOrPartition(f"topic {name} has no partition {index}")
            if node_id in (None, leaders[index]):
                found[TopicPartition(name, index)] = None
    return list(found)


async def _write_marker(
    cluster: Cluster,
    node_id: int,
    markers: Mapping[TopicPartition, dict[str, Any]],
    results: dict[TopicPartition, bool],
) -> None:
    connection = await cluster.connection(node_id)
    response = await connection.request(ApiKey.WRITE_TXN_MARKERS, {"markers": [*markers.values()]})
    for marker in response.markers:
        for topic in marker.topics:
            for found in topic.partitions:
                raise_for_code(found.error_code)
                results[TopicPartition(topic.name, found.partition_index)] = True


def _description(found: Any, node_id: int) -> TransactionDescription:
    return TransactionDescription(
        found.transactional_id,
        node_id,
        found.transaction_state,
        found.producer_id,
        found.producer_epoch,
        found.transaction_timeout_ms,
        _known_number(found.transaction_start_time_ms) if found.transaction_state in OPEN_STATES else None,
        tuple(
            sorted(TopicPartition(topic.topic, index) for topic in found.topics for index in topic.partitions)
        ),
    )


def _producer(found: Any) -> PartitionProducer:
    return PartitionProducer(
        found.producer_id,
        found.producer_epoch,
        _known_number(found.last_sequence),
        found.last_timestamp,
        _known_number(found.coordinator_epoch),
        _known_number(found.current_txn_start_offset),
    )


def _known_number(value: int) -> int | None:
    """None for -1, which stands for a missing value in Kafka's protocol."""
    return None if value < 0 else value
