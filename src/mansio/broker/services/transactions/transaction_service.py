"""Transaction service: transactions of producers with a transactional id, and their description.

All methods that name a transactional id raise `TransactionalIdAuthorizationFailed`, before any look-up, unless the
caller may WRITE it or do what the method names. They raise `InvalidRequest` for an invalid id, and `NotCoordinator`,
`CoordinatorNotAvailable` or `CoordinatorLoadInProgress`, on which a client looks up the coordinator and tries again.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.group.error_mapping import check_group_id, coordinator_errors
from mansio.broker.coordinator.name_pattern import compile_pattern
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import InvalidRequest, OperationNotAttempted, TopicAuthorizationFailed
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.transactions.transaction import TransactionState
from mansio.tracebacks import copied
from mansio.wire.internal_records.transaction_records import HELD_TIMEOUT_MS
from mansio.wire.query_transactional_ids import query_id_of, transactional_id_prefix

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.transaction.batch_committer import BatchCommitter
    from mansio.broker.coordinator.transaction.transaction_coordinator import TransactionCoordinator
    from mansio.broker.coordinator.transaction.transaction_store import TransactionEntry
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.errors import MansioError
    from mansio.metadata.model import BrokerState
    from mansio.ports import Clock
    from mansio.state.transactions.batch_decision import TaskTransaction
    from mansio.state.transactions.transaction import Transaction
    from mansio.wire.topic_partition import PartitionKey

TITLES: Final = {state.title: state for state in TransactionState if state is not TransactionState.DEAD}
"""Kafka's names of the states."""

NOT_BUMPING_VERSION: Final = 1


class DescribedTransaction(NamedTuple):
    """A transactional id. `state`: Kafka's name of it; `started_ms`: time of the wall clock, -1 without a
    transaction; `timeout_ms`: the highest number for a transaction that waits for the decision of another system, as in
    Kafka."""

    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    producer_epoch: int
    partitions: tuple[PartitionKey, ...]


class ListedTransaction(NamedTuple):
    """A transactional id in a list. `state`: Kafka's name of it."""

    transactional_id: str
    producer_id: int
    state: str


class TransactionStatistics(NamedTuple):
    """Numbers of the transactions that this broker coordinates. `open`: begun, and not all partitions have the marker;
    `oldest_open_ms`: age of the oldest of them, 0 without any; `markers_waiting`: partitions that have still to get the
    marker of a decided transaction. The others count since the start: decisions, and refused requests."""

    transactional_ids: int
    open: int
    oldest_open_ms: int
    markers_waiting: int
    committed: int
    aborted: int
    timed_out: int
    fenced: int
    concurrent: int


class TransactionService:
    """Transactions of producers with a transactional id."""

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        groups: GroupCoordinator,
        clock: Clock,
        batches: BatchCommitter,
        authorization: Authorization,
    ) -> None:
        self._coordinator = coordinator
        self._batches = batches
        self._groups = groups
        self._clock = clock
        self._authorization = authorization

    def _check(self, caller: Caller, transactional_id: str, operation: Operation = Operation.WRITE) -> None:
        self._authorization.check(caller, operation, ResourceType.TRANSACTIONAL_ID, transactional_id)

    async def find_coordinator(self, transactional_id: str, *, caller: Caller) -> BrokerState | None:
        """Return the broker that coordinates a transactional id, which needs DESCRIBE; None if it is this broker.
        Creates `__transaction_state` if it does not exist.

        The id may be that of a query, whose coordinator decides about its batches: DESCRIBE for the transactional ids
        of its tasks is enough."""
        names = transactional_id, transactional_id_prefix(transactional_id)
        kind, operation = ResourceType.TRANSACTIONAL_ID, Operation.DESCRIBE
        if not any(self._authorization.allows(caller, operation, kind, name) for name in names):
            raise self._authorization.refusal(caller, operation, kind, transactional_id)
        return await self._coordinator.find_coordinator(transactional_id)

    async def new_producer_id(self, *, caller: Caller) -> int:
        """Assign a producer id to an idempotent producer, which needs IDEMPOTENT_WRITE for the cluster or WRITE for any
        topic (KIP-679). Raises `ClusterAuthorizationFailed`."""
        if not self._authorization.allows_any(caller, Operation.WRITE, ResourceType.TOPIC):
            self._authorization.check_cluster(caller, Operation.IDEMPOTENT_WRITE)
        return await self._coordinator.new_producer_id()

    async def init_producer_id(
        self,
        transactional_id: str,
        timeout_ms: int,
        producer_id: int = -1,
        producer_epoch: int = -1,
        *,
        caller: Caller,
    ) -> tuple[int, int]:
        """Fence other producers with this transactional id and abort their transaction. Return producer id and epoch.

        `producer_id`, `producer_epoch`: those that the producer had, to bump the epoch after an error (KIP-360).
        Raises `InvalidTransactionTimeout`, `ProducerFenced`, `ConcurrentTransactions`."""
        self._check(caller, transactional_id)
        found = await self._coordinator.initialize(transactional_id, timeout_ms, producer_id, producer_epoch)
        return found.current_producer

    async def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
        *,
        client_version: int = NOT_BUMPING_VERSION,
        caller: Caller,
    ) -> list[MansioError | None]:
        """Add partitions to the producer's transaction, which begins with the first one: all of them or none. Return
        None or an error for each: `TopicAuthorizationFailed` for a topic that the caller may not WRITE, and then
        `OperationNotAttempted` for the others.

        `client_version`: transaction version of the request, 2 for a partition that a batch adds (KIP-890).
        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`."""
        self._check(caller, transactional_id)
        topics = dict.fromkeys(topic for topic, _ in partitions)
        allowed = self._authorization.allowed_of_named(caller, Operation.WRITE, ResourceType.TOPIC, topics)
        if len(allowed) < len(topics):
            return [
                OperationNotAttempted() if topic in allowed else TopicAuthorizationFailed()
                for topic, _ in partitions
            ]
        return await self._coordinator.add_partitions(
            transactional_id, producer_id, producer_epoch, partitions, client_version=client_version
        )

    async def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
    ) -> list[MansioError | None]:
        """Return None for each partition that is in the ongoing transaction, else `TransactionAbortable`. For brokers,
        which have asked the authorizer.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`."""
        return await self._coordinator.verify_partitions(
            transactional_id, producer_id, producer_epoch, partitions
        )

    async def add_offsets(
        self, transactional_id: str, producer_id: int, producer_epoch: int, group_id: str, *, caller: Caller
    ) -> None:
        """Add the partition of `__consumer_offsets` that stores the offsets of a group, which needs READ for the group.
        Raises `GroupAuthorizationFailed`, `InvalidGroupId`, and the errors of `add_partitions`."""
        self._check(caller, transactional_id)
        self._authorization.check(caller, Operation.READ, ResourceType.GROUP, group_id)
        check_group_id(group_id)
        with coordinator_errors():
            await self._groups.ensure_topic_exists()
        partition = (OFFSETS_TOPIC, self._groups.store.partition_for(group_id))
        errors = await self._coordinator.add_partitions(
            transactional_id, producer_id, producer_epoch, [partition], client_version=NOT_BUMPING_VERSION
        )
        for error in errors:
            if error is not None:
                with coordinator_errors():
                    raise copied(error)

    async def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        is_commit: bool,
        bumps_epoch: bool,
        caller: Caller,
    ) -> tuple[int, int]:
        """Commit or abort the transaction. Return producer id and epoch for the next one when the decision is durable.

        `bumps_epoch`: the end bumps the epoch (KIP-890). Raises `InvalidProducerIdMapping`, `ProducerFenced`,
        `InvalidTxnState`, `ConcurrentTransactions`."""
        self._check(caller, transactional_id)
        ended = await self._coordinator.end(
            transactional_id, producer_id, producer_epoch, is_commit=is_commit, bumps_epoch=bumps_epoch
        )
        return ended.current_producer

    async def prepare(
        self, transactional_id: str, producer_id: int, producer_epoch: int, *, caller: Caller
    ) -> None:
        """Let the producer's transaction, whose records are all acknowledged, wait for the decision about its batch:
        it is aborted only after `transaction_prepared_max_ms`, or by its producer and epoch. Idempotent.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `InvalidTxnState`, `ConcurrentTransactions`."""
        self._check(caller, transactional_id)
        await self._coordinator.hold(transactional_id, producer_id, producer_epoch)

    async def commit_batch(
        self,
        query_id: str,
        batch_id: int,
        transactions: Sequence[TaskTransaction],
        abandoned: Sequence[TaskTransaction] = (),
        *,
        is_commit: bool,
        caller: Caller,
    ) -> int:
        """Commit the transactions of a batch, all or none, and abort the abandoned ones; return the id of the last
        batch of the query that is decided, `NO_BATCH` for none. With `is_commit` false, or if
        the batch is decided already, the transactions that no decision commits are aborted. Returns when all of them
        are ended. Idempotent. The caller may WRITE the `transactional_id_prefix` of the query, because the decision
        binds it, and each transactional id.

        Raises `InvalidTxnState` if a transaction has ended otherwise, or if a later batch is decided,
        `ConcurrentTransactions` while another request of the query is processed, and `InvalidRequest` for a commit
        without any transaction, or for one that is not of the query."""
        self._check(caller, transactional_id_prefix(query_id))
        for each in chain(transactions, abandoned):
            self._check(caller, each.transactional_id)
            if query_id_of(each.transactional_id) != query_id:
                raise InvalidRequest(
                    f"{each.transactional_id!r} is not a transactional id of the query {query_id!r}"
                )
        if not transactions and not abandoned and is_commit:
            raise InvalidRequest("the request names no transaction")
        if is_commit:
            await self._batches.commit(query_id, batch_id, transactions, abandoned)
        elif transactions or abandoned:
            await self._batches.abort(query_id, [*transactions, *abandoned])
        return await self._batches.last_batch(query_id)

    def statistics(self) -> TransactionStatistics:
        """Return the numbers of the transactions that this broker coordinates. The cost grows with the number of open
        transactions."""
        coordinator = self._coordinator
        store, counts = coordinator.store, coordinator.counts
        begun = [each.transaction.started_ms for each in self._open()]
        return TransactionStatistics(
            transactional_ids=len(store.entries),
            open=len(begun),
            oldest_open_ms=max(self._clock.wall_ms() - min(begun), 0) if begun else 0,
            markers_waiting=coordinator.markers_waiting,
            committed=counts.committed,
            aborted=counts.aborted,
            timed_out=counts.timed_out,
            fenced=counts.fenced,
            concurrent=counts.concurrent,
        )

    def open_longer_than(self, open_ms: int) -> list[tuple[DescribedTransaction, int]]:
        """Return the transactions of this coordinator that are open for longer than `open_ms`, the oldest first, with
        their ages in milliseconds."""
        now_ms = self._clock.wall_ms()
        found = [each for each in self._open() if now_ms - each.transaction.started_ms > open_ms]
        found.sort(key=lambda each: each.transaction.started_ms)
        return [
            (_described(each.transactional_id, each.transaction), now_ms - each.transaction.started_ms)
            for each in found
        ]

    def open_partitions(self) -> dict[int, frozenset[PartitionKey]]:
        """Return the partitions of the open transactions of this coordinator by producer id."""
        return {each.transaction.producer_id: each.transaction.partitions for each in self._open()}

    def open_in(self, partitions: Collection[PartitionKey], count_max: int) -> list[tuple[str, int, int]]:
        """Return the transactional id, the producer id and the begin, by the wall clock in milliseconds, of at most
        `count_max` open transactions of this coordinator that have one of these partitions."""
        wanted = frozenset(partitions)
        found = (
            (each.transactional_id, each.transaction.producer_id, each.transaction.started_ms)
            for each in self._open()
            if not wanted.isdisjoint(each.transaction.partitions)
        )
        return list(islice(found, count_max))

    def _open(self) -> Iterator[TransactionEntry]:
        store = self._coordinator.store
        return chain(store.ongoing.values(), store.prepared.values())

    async def describe(self, transactional_id: str, *, caller: Caller) -> DescribedTransaction:
        """Describe a transactional id, which needs DESCRIBE; topics that the caller may not DESCRIBE are left out.
        Raises `TransactionalIdNotFound`."""
        self._check(caller, transactional_id, Operation.DESCRIBE)
        found = _described(transactional_id, await self._coordinator.describe(transactional_id))
        topics = dict.fromkeys(topic for topic, _ in found.partitions)
        allowed = self._authorization.allowed_names(caller, Operation.DESCRIBE, ResourceType.TOPIC, topics)
        return found._replace(partitions=tuple(key for key in found.partitions if key[0] in allowed))

    def list_transactions(
        self,
        *,
        states: Collection[str] = (),
        producer_ids: Collection[int] = (),
        duration_ms_min: int = -1,
        pattern: str = "",
        caller: Caller,
    ) -> list[ListedTransaction]:
        """List the transactional ids that this broker coordinates; those that the caller may not DESCRIBE are left out.

        An empty filter selects all. `states`: Kafka's names; unknown ones select nothing. `duration_ms_min`: only
        transactions that are open for longer. `pattern`: RE2 expression for whole ids. Raises
        `InvalidRegularExpression`, `CoordinatorLoadInProgress`."""
        is_match = compile_pattern(pattern) if pattern else None
        now_ms = self._clock.wall_ms()
        found = []
        for entry in self._coordinator.list_transactions():
            transaction = entry.transaction
            title = transaction.state.title
            if (states and title not in states) or (
                producer_ids and transaction.producer_id not in producer_ids
            ):
                continue
            is_open = transaction.state is TransactionState.ONGOING or transaction.is_prepared
            if duration_ms_min >= 0 and not (is_open and now_ms - transaction.started_ms > duration_ms_min):
                continue
            if is_match is None or is_match(entry.transactional_id):
                found.append(ListedTransaction(entry.transactional_id, transaction.producer_id, title))
        names = [each.transactional_id for each in found]
        allowed = set(
            self._authorization.allowed_names(
                caller, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, names
            )
        )
        return [each for each in found if each.transactional_id in allowed]


def _described(transactional_id: str, found: Transaction) -> DescribedTransaction:
    return DescribedTransaction(
        transactional_id,
        found.state.title,
        HELD_TIMEOUT_MS if found.is_held else found.timeout_ms,
        found.started_ms,
        found.producer_id,
        found.producer_epoch,
        tuple(sorted(found.partitions)),
    )
