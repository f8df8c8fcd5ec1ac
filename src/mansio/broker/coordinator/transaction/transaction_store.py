"""Store of transactional ids: the view of the topic `__transaction_state`.

Invariants:
* A transactional id changes only by a record of the log, so that the next leader of the partition has the same state.
* The deadline of an ongoing transaction is by the monotonic clock from its begin on, or, after a load, from the load on
  with what the wall clock says is left of its timeout, at most the whole timeout. The time of a held transaction begins
  when it is held, and again when that is renewed.
* Each ongoing transaction ends by a time that this broker's settings bound, also one that an earlier version has stored
  as kept by a later producer, or without a timeout (KIP-939).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from mansio.broker.coordinator.transaction.decision_store import DecisionStore
from mansio.broker.routing.routes import partition_for
from mansio.errors import CorruptLog
from mansio.logs import fields
from mansio.ports import complete
from mansio.state.transactions.transaction import NO_EPOCH, NO_ID, Transaction, TransactionState
from mansio.wire.field_values import PRODUCER_EPOCH_MAX
from mansio.wire.internal_records.batch_decision_records import decode_decision_key
from mansio.wire.internal_records.transaction_records import (
    HELD_TIMEOUT_MS,
    TRANSACTION_STATE_TOPIC,
    TransactionValue,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.broker.coordinator.runtime import CoordinatorRuntime, KeyValue
    from mansio.broker.coordinator.transaction.decision_store import DecisionEntry
    from mansio.ports import Clock, Promise

logger = logging.getLogger(__name__)


class TransactionEntry:
    """A transactional id on its coordinator. `deadline_s`: monotonic time at which its ongoing transaction is aborted.
    `waiters`: promises that are completed when the transaction is completed or the entry is unloaded.
    `is_completing`: a task writes its markers."""

    __slots__ = ("deadline_s", "index", "is_completing", "transaction", "transactional_id", "waiters")

    def __init__(self, transactional_id: str, index: int, transaction: Transaction) -> None:
        self.transactional_id = transactional_id
        self.index = index
        self.transaction = transaction
        self.deadline_s = 0.0
        self.waiters: list[Promise[None]] = []
        self.is_completing = False


class TransactionStore:
    """The transactional ids that this broker coordinates (`CoordinatorView` of `__transaction_state`)."""

    def __init__(
        self,
        clock: Clock,
        *,
        held_ms_max: int,
        timeout_ms_max: int,
        on_loaded: Callable[[list[TransactionEntry]], None],
        on_decisions_loaded: Callable[[list[DecisionEntry]], None],
        open_runtime: Callable[[TransactionStore], CoordinatorRuntime],
    ) -> None:
        """`held_ms_max`: time after which a held transaction is aborted. `timeout_ms_max`: timeout of a transaction
        that is stored without one. `on_loaded` and `on_decisions_loaded` are called with the entries and the queries of
        a partition when it is loaded. `open_runtime` returns the runtime of the topic, whose view is this object."""
        self._clock = clock
        self._held_ms_max = held_ms_max
        self._timeout_ms_max = timeout_ms_max
        self.entries: dict[str, TransactionEntry] = {}
        self.ongoing: dict[str, TransactionEntry] = {}
        """The entries with an ongoing transaction."""
        self.prepared: dict[str, TransactionEntry] = {}
        """The entries whose transaction is decided and not complete."""
        self._by_partition: dict[int, dict[str, TransactionEntry]] = defaultdict(dict)
        self.decisions = DecisionStore()
        self._on_loaded = on_loaded
        self._on_decisions_loaded = on_decisions_loaded
        self.topic = open_runtime(self)

    def partition_for(self, transactional_id: str) -> int:
        """Return the partition of the topic that stores a transactional id."""
        return partition_for(transactional_id, self.topic.partition_count)

    def find(self, transactional_id: str) -> TransactionEntry | None:
        """Return the entry of a transactional id, or None. Raises `CoordinatorLoadInProgress` during a load, and in a
        cluster `NotCoordinator` if another broker coordinates it."""
        self.topic.check_available()
        if self.topic.partition_count:
            self.topic.check_loaded(self.partition_for(transactional_id))
        return self.entries.get(transactional_id)

    def find_decision(self, query_id: str) -> DecisionEntry | None:
        """Return the entry of a query, or None. Raises the errors of `find`."""
        self.topic.check_available()
        if self.topic.partition_count:
            self.topic.check_loaded(self.partition_for(query_id))
        return self.decisions.entries.get(query_id)

    def append(self, transactional_id: str, transaction: Transaction) -> Promise[None]:
        """Append and apply the new state of a transactional id. Returns the promise of its commit. Raises the errors of
        the partition; then nothing is changed."""
        return self.topic.append(
            self.partition_for(transactional_id), [_to_record(transactional_id, transaction)]
        )

    def append_without_flush(self, transactional_id: str, transaction: Transaction) -> None:
        """Append and apply the new state like `append`, but let the next flush of the partition make it durable."""
        self.topic.append_without_flush(
            self.partition_for(transactional_id), [_to_record(transactional_id, transaction)]
        )

    def delete(self, index: int, transactional_ids: list[str]) -> Promise[None]:
        """Append the deletion of transactional ids of one partition. Returns the promise of its commit."""
        records: list[KeyValue] = [(encode_key(each), None) for each in transactional_ids]
        return self.topic.append(index, records)

    # ------------------------------------------------------------------ view

    def apply(self, index: int, key: bytes, value: bytes | None, offset: int) -> None:
        transactional_id = decode_key(key)
        if transactional_id is None:
            query_id = decode_decision_key(key)
            if query_id is not None:
                self.decisions.apply(index, query_id, value)
                return
            known = fields(topic=TRANSACTION_STATE_TOPIC, partition=index, offset=offset)
            logger.warning("unknown_record_skipped", extra=known)
            return
        transaction = None if value is None else self._to_transaction(decode_value(value))
        entry = self.entries.get(transactional_id)
        if transaction is None or transaction.state is TransactionState.DEAD:
            if entry is not None:
                self._remove(entry)
            return
        if entry is None:
            entry = TransactionEntry(transactional_id, index, transaction)
            self.entries[transactional_id] = self._by_partition[index][transactional_id] = entry
        is_known = transactional_id in self.ongoing and entry.transaction.held_ms == transaction.held_ms
        entry.transaction = transaction
        if transaction.state is not TransactionState.ONGOING:
            self.ongoing.pop(transactional_id, None)
        elif not is_known:
            self.ongoing[transactional_id] = entry
            begin_ms, timeout_ms = transaction.started_ms, transaction.timeout_ms
            if transaction.is_held:
                begin_ms, timeout_ms = transaction.held_ms, self._held_ms_max
            passed_ms = max(self._clock.wall_ms() - begin_ms, 0)
            left_ms = max(timeout_ms - passed_ms, 0)
            entry.deadline_s = self._clock.monotonic() + left_ms / 1000
        if transaction.is_prepared:
            self.prepared[transactional_id] = entry
        else:
            self.prepared.pop(transactional_id, None)
            _wake(entry)

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        entries = self._by_partition[index]
        for transactional_id in list(entries):
            if transactional_id in entries:
                key, value = _to_record(transactional_id, entries[transactional_id].transaction)
                assert value is not None
                yield key, value
        yield from self.decisions.snapshot(index)

    def finish_load(self, index: int) -> None:
        self._on_loaded(list(self._by_partition[index].values()))
        self._on_decisions_loaded(self.decisions.of_partition(index))

    def unload(self, index: int) -> None:
        self.decisions.unload(index)
        for entry in list(self._by_partition.pop(index, {}).values()):
            self._remove(entry)

    def _to_transaction(self, value: TransactionValue) -> Transaction:
        """Build the transaction of a record. Raises `CorruptLog` for an unknown state: it may be a decision."""
        try:
            state = TransactionState(value.status)
        except ValueError as error:
            raise CorruptLog(f"{TRANSACTION_STATE_TOPIC}: unknown state {value.status}") from error
        return _as_not_kept(
            Transaction(
                producer_id=value.producer_id,
                producer_epoch=value.producer_epoch,
                timeout_ms=self._timeout_ms_max if value.timeout_ms == HELD_TIMEOUT_MS else value.timeout_ms,
                state=state,
                partitions=frozenset(
                    (topic, index) for topic, indexes in value.partitions or () for index in indexes
                ),
                updated_ms=value.updated_ms,
                started_ms=value.started_ms,
                last_producer_epoch=value.last_producer_epoch,
                previous_producer_id=value.previous_producer_id,
                next_producer_id=value.next_producer_id,
                client_version=value.client_version,
                held_ms=value.held_ms,
            ),
            value.next_producer_epoch,
        )

    def _remove(self, entry: TransactionEntry) -> None:
        self.entries.pop(entry.transactional_id, None)
        self.ongoing.pop(entry.transactional_id, None)
        self.prepared.pop(entry.transactional_id, None)
        if entry.index in self._by_partition:
            self._by_partition[entry.index].pop(entry.transactional_id, None)
        _wake(entry)


def _wake(entry: TransactionEntry) -> None:
    waiters, entry.waiters = entry.waiters, []
    for promise in waiters:
        complete(promise, None)


def _to_record(transactional_id: str, transaction: Transaction) -> KeyValue:
    indexes: dict[str, list[int]] = defaultdict(list)
    for topic, index in sorted(transaction.partitions):
        indexes[topic].append(index)
    partitions = tuple((topic, tuple(each)) for topic, each in indexes.items())
    value = TransactionValue(
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        timeout_ms=transaction.timeout_ms,
        status=transaction.state,
        partitions=None if transaction.state is TransactionState.EMPTY else partitions,
        updated_ms=transaction.updated_ms,
        started_ms=transaction.started_ms,
        previous_producer_id=transaction.previous_producer_id,
        next_producer_id=transaction.next_producer_id,
        next_producer_epoch=NO_EPOCH if transaction.next_producer_id == NO_ID else 0,
        client_version=transaction.client_version,
        last_producer_epoch=transaction.last_producer_epoch,
        held_ms=transaction.held_ms,
    )
    return encode_key(transactional_id), encode_value(value)


def _as_not_kept(stored: Transaction, next_producer_epoch: int) -> Transaction:
    """Return a transaction that an earlier version has stored as kept by a later producer (KIP-939) as an ordinary one.

    While it is open it belongs to the producer that has kept it last. If that one has another producer id, because the
    epochs were exhausted, no producer has the transaction: it is aborted by its timeout or by a new producer. Once it
    is decided, only the producer id of the next transaction is lost, for which the client gets another one."""
    is_open = stored.state is TransactionState.ONGOING
    if stored.next_producer_id == NO_ID or not (is_open or next_producer_epoch > 0):
        return stored
    if stored.next_producer_id == stored.producer_id:
        return stored._replace(next_producer_id=NO_ID, producer_epoch=next_producer_epoch)
    return stored._replace(next_producer_id=NO_ID, producer_epoch=PRODUCER_EPOCH_MAX, client_version=0)
