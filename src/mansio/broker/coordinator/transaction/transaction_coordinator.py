"""Transaction coordinator of one broker (Kafka's TransactionCoordinator): the topic `__transaction_state`.

The topic is created when a transactional id is used for the first time. The broker that leads the partition of a
transactional id coordinates it: it stores each change of its state, aborts transactions whose time is over, sends the
markers of decided transactions, and forgets transactional ids that were not used for long.

Invariants:
* A request is answered when the state that the answer describes is committed.
* Markers are sent when the decision is committed, by one task per transactional id. A coordinator that loads a decided
  transaction sends all its markers again.
* The completion is not flushed for itself: without it the markers are sent again, and the next transaction of the id
  begins with a later record of the same partition.
* A request that meets a completing transaction waits up to `COMPLETION_WAIT_MS` for it, then it gets
  `ConcurrentTransactions`. There is one timer for all transactions, none without a transactional id.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import coordinator_errors
from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.broker.coordinator.transaction.settings import (
    CHECK_INTERVAL_MS_MIN,
    COMPLETION_WAIT_MS,
    TRANSACTIONAL_ID_BYTES_MAX,
)
from mansio.broker.coordinator.transaction.transaction_store import TransactionEntry, TransactionStore
from mansio.broker.routing.routes import coordinator_of
from mansio.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidRequest,
    InvalidTransactionTimeout,
    MansioError,
    OperationNotAttempted,
    ProducerFenced,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
)
from mansio.logs import fields
from mansio.ports import Backoff
from mansio.state.transactions import transaction as machine
from mansio.tracebacks import without_traceback
from mansio.wire.batch.end_marker import EndMarker
from mansio.wire.internal_records.transaction_records import HELD_TIMEOUT_MS, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.checkpoint import CheckpointStorage
    from mansio.broker.coordinator.transaction.decision_store import DecisionEntry
    from mansio.broker.coordinator.transaction.marker_sender import MarkerSender
    from mansio.broker.coordinator.transaction.settings import TransactionSettings
    from mansio.broker.coordinator.view import CoordinatorPartition, CoordinatorReplica
    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.errors import StorageError
    from mansio.metadata.model import BrokerState
    from mansio.ports import Clock, Promise, Scheduler, Timer
    from mansio.state.transactions.transaction import Transaction
    from mansio.wire.topic_partition import PartitionKey

    Transition = Callable[["Transaction | None"], Transaction]

logger = logging.getLogger(__name__)

COMPLETION_BACKOFF: Final = Backoff(50, 5_000, jitter=0)
"""Pauses of the completion of a transaction after an error of the coordinator's own log."""

EXPIRED_PER_BATCH: Final = 1_000
"""Maximum number of expired transactional ids that one iteration of the event loop deletes."""
EXPIRY_PAUSE_S: Final = 1.0
"""Time between two such iterations, if there are more expired ids."""


class TransactionCounts:
    """Numbers since the start. `committed`, `aborted`: decided transactions; `timed_out`: those of the aborted ones
    whose time was over. `fenced`, `concurrent`: refused requests, because of a newer producer or because the
    transaction was being completed."""

    __slots__ = ("aborted", "committed", "concurrent", "fenced", "timed_out")

    def __init__(self) -> None:
        self.committed = self.aborted = self.timed_out = 0
        self.fenced = self.concurrent = 0


class TransactionCoordinator:
    """The transaction coordinator of one broker. All methods run on the broker's event loop.

    All requests raise `InvalidRequest` for an invalid transactional id, and `NotCoordinator`,
    `CoordinatorNotAvailable` or `CoordinatorLoadInProgress`.
    """

    def __init__(
        self,
        *,
        settings: TransactionSettings,
        node_id: int,
        clock: Clock,
        scheduler: Scheduler,
        new_producer_id: Callable[[], Awaitable[int]],
        create_topic: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        markers: MarkerSender,
        remove_expired_decisions: Callable[[], bool],
        resume_decisions: Callable[[list[DecisionEntry]], None],
        lookup: CoordinatorLookup | None = None,
        checkpoints: CheckpointStorage | None = None,
    ) -> None:
        """`new_producer_id`: assigns a producer id. `lookup`: metadata of the topic, None on a single node. Of the
        decisions about batches: `remove_expired_decisions` is called in the interval in which transactional ids expire,
        and returns whether there is more to remove soon; `resume_decisions` is called with the queries of a partition
        when it is loaded."""
        self.lookup = lookup
        self._settings = settings
        self._timeout_ms_max = min(settings.timeout_ms_max, HELD_TIMEOUT_MS - 1)
        self._node_id = node_id
        self._clock = clock
        self._scheduler = scheduler
        self.new_producer_id = new_producer_id
        self._markers = markers
        self.counts = TransactionCounts()
        self._closed = False
        self._timer: Timer | None = None
        self._timer_due_s = 0.0
        self._expiry_due_s = 0.0
        self._remove_expired_decisions = remove_expired_decisions
        self.store = TransactionStore(
            clock,
            held_ms_max=settings.held_ms_max,
            timeout_ms_max=self._timeout_ms_max,
            on_loaded=self._resume,
            on_decisions_loaded=resume_decisions,
            open_runtime=lambda view: CoordinatorRuntime(
                TRANSACTION_STATE_TOPIC,
                view=view,
                create=create_topic,
                scheduler=scheduler,
                clock=clock,
                checkpoints=checkpoints,
                partition_count=None if lookup is None else lookup.partition_count,
            ),
        )
        self.topic = self.store.topic

    # ------------------------------------------------------------------ start and close

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """Load all partitions of the topic, on a single node; continue the transactions found there."""
        await self.topic.start(partitions)

    def handle_role_change(self, partition: CoordinatorReplica) -> None:
        """Apply this broker's role for a partition of the topic, in a cluster. Called after each change of the role and
        before the partition is closed; idempotent."""
        self.topic.apply_role(partition, is_closed=self._closed)

    async def close(self) -> None:
        """Cancel the timer and close the topic. Markers that are missing are sent by the next coordinator."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self.topic.close()

    async def find_coordinator(self, transactional_id: str) -> BrokerState | None:
        """Return the broker that coordinates a transactional id; None if it is this broker. Creates the topic if it
        does not exist."""
        _check_id(transactional_id)
        with coordinator_errors():
            await self.topic.ensure_topic_exists()
        if self.lookup is None:
            return None
        broker = coordinator_of(transactional_id, self.lookup)
        return None if broker.node_id == self._node_id else broker

    # ------------------------------------------------------------------ requests

    async def initialize(
        self, transactional_id: str, timeout_ms: int, producer_id: int, producer_epoch: int
    ) -> Transaction:
        """Initialize a producer; aborts the transaction of its predecessor. See `transaction.initialize`.

        Raises `InvalidTransactionTimeout`, `ProducerFenced`, `ConcurrentTransactions`, and the errors of the
        assignment of producer ids."""
        _check_id(transactional_id)
        if not 0 < timeout_ms <= self._timeout_ms_max:
            raise InvalidTransactionTimeout(
                f"the timeout is {timeout_ms} ms; the maximum is {self._timeout_ms_max} ms"
            )
        with coordinator_errors():
            await self.topic.ensure_topic_exists()
        end_s = self._clock.monotonic() + COMPLETION_WAIT_MS / 1000
        while True:
            new_producer_id = await self._producer_id_if_needed(transactional_id, is_new_allowed=True)
            initialized = await self._change(
                transactional_id,
                lambda known, new_id=new_producer_id: machine.initialize(  # type: ignore[misc]
                    known,
                    timeout_ms=timeout_ms,
                    producer_id=producer_id,
                    producer_epoch=producer_epoch,
                    new_producer_id=new_id,
                    now_ms=self._clock.wall_ms(),
                ),
                end_s,
            )
            if not initialized.is_prepared:
                return initialized
            entry = self.store.find(transactional_id)
            if entry is not None and entry.transaction.is_prepared:
                await self._wait_for_completion(entry, end_s)

    async def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
        *,
        client_version: int,
    ) -> list[MansioError | None]:
        """Add partitions to the transaction; all of them or none. Returns None or an error for each.
        `client_version`: transaction version of the request.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`."""
        _check_id(transactional_id)
        exists = [self._markers.has_partition(*each) for each in partitions]
        if not all(exists):
            return [
                OperationNotAttempted() if known else UnknownTopicOrPartition(f"{topic}-{index}")
                for known, (topic, index) in zip(exists, partitions, strict=True)
            ]
        if not partitions or len(partitions) > self._settings.partitions_max:
            raise InvalidRequest(f"the request has {len(partitions)} partitions")
        await self._change(
            transactional_id,
            lambda known: self._check_size(
                machine.add_partitions(
                    known,
                    producer_id,
                    producer_epoch,
                    partitions,
                    client_version=client_version,
                    now_ms=self._clock.wall_ms(),
                )
            ),
        )
        return [None] * len(partitions)

    def _check_size(self, transaction: Transaction) -> Transaction:
        if len(transaction.partitions) > self._settings.partitions_max:
            raise InvalidRequest(f"a transaction has at most {self._settings.partitions_max} partitions")
        return transaction

    async def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[PartitionKey],
    ) -> list[MansioError | None]:
        """Return None for each partition that is in the ongoing transaction, else `TransactionAbortable`.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`."""
        _check_id(transactional_id)
        outcomes: list[MansioError | None] = []

        def verify(known: Transaction | None) -> Transaction:
            outcomes[:] = machine.verify_partitions(known, producer_id, producer_epoch, partitions)
            assert known is not None
            return known

        await self._change(transactional_id, verify)
        return outcomes

    async def hold(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        """Let an ongoing transaction, whose records are all acknowledged, wait for a decision: it no longer times out
        by its own timeout, but after `held_ms_max`. A repeated call leaves it at least half of this time. See
        `transaction.hold`.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `InvalidTxnState`, `ConcurrentTransactions`."""
        _check_id(transactional_id)
        return await self._change(
            transactional_id,
            lambda known: machine.hold(
                known,
                producer_id,
                producer_epoch,
                now_ms=self._clock.wall_ms(),
                renewal_ms=self._settings.held_ms_max // 2,
            ),
        )

    async def end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        *,
        is_commit: bool,
        bumps_epoch: bool,
    ) -> Transaction:
        """Decide the transaction; returns when the decision is committed, before the markers are written. See
        `transaction.end`; the result's `current_producer` is the producer of the next transaction.

        Raises `InvalidProducerIdMapping`, `ProducerFenced`, `InvalidTxnState`, `ConcurrentTransactions`, and the errors
        of the assignment of producer ids."""
        _check_id(transactional_id)
        end_s = self._clock.monotonic() + COMPLETION_WAIT_MS / 1000
        new_producer_id = machine.NO_ID
        if bumps_epoch:
            new_producer_id = await self._producer_id_if_needed(transactional_id, is_new_allowed=False)
        return await self._change(
            transactional_id,
            lambda known: machine.end(
                known,
                producer_id,
                producer_epoch,
                is_commit=is_commit,
                bumps_epoch=bumps_epoch,
                new_producer_id=new_producer_id,
                now_ms=self._clock.wall_ms(),
            ),
            end_s,
        )

    async def describe(self, transactional_id: str) -> Transaction:
        """Return a transactional id. Raises `TransactionalIdNotFound`."""
        _check_id(transactional_id)
        entry = self.store.find(transactional_id)
        if entry is None:
            raise TransactionalIdNotFound
        found = entry.transaction
        with coordinator_errors():
            await self.topic.wait_until_committed(entry.index)
        return found

    def list_transactions(self) -> list[TransactionEntry]:
        """Return all transactional ids that this broker coordinates. Raises `CoordinatorLoadInProgress`."""
        self.topic.check_all_loaded()
        return list(self.store.entries.values())

    @property
    def markers_waiting(self) -> int:
        """Number of partitions that have still to get the marker of a decided transaction."""
        return self._markers.waiting_count

    # ------------------------------------------------------------------ changes

    async def _producer_id_if_needed(self, transactional_id: str, *, is_new_allowed: bool) -> int:
        """Assign a producer id if the next change of the transactional id may need it; -1 otherwise."""
        entry = self.store.find(transactional_id)
        if entry is None:
            if not is_new_allowed:
                return machine.NO_ID
            if len(self.store.entries) >= self._settings.transactional_ids_max:
                raise CoordinatorNotAvailable(
                    f"there are {self._settings.transactional_ids_max} transactional ids"
                )
            return await self.new_producer_id()
        return await self.new_producer_id() if entry.transaction.is_epoch_exhausted else machine.NO_ID

    async def _change(
        self, transactional_id: str, transition: Transition, end_s: float | None = None
    ) -> Transaction:
        """Store the result of a transition; return it when it is committed.

        While the transition raises `ConcurrentTransactions`, the completion is awaited until `end_s`."""
        if end_s is None:
            end_s = self._clock.monotonic() + COMPLETION_WAIT_MS / 1000
        while True:
            entry = self.store.find(transactional_id)
            known = None if entry is None else entry.transaction
            try:
                changed = transition(known)
                break
            except ConcurrentTransactions:
                if entry is None or entry.transaction.is_held:
                    raise
                await self._wait_for_completion(entry, end_s)
            except ProducerFenced:
                self.counts.fenced += 1
                raise
        with coordinator_errors():
            index = self.store.partition_for(transactional_id)
            if changed is known:
                await self.topic.wait_until_committed(index)
            else:
                await self._append(transactional_id, changed)
        return changed

    def _append(self, transactional_id: str, changed: Transaction) -> Promise[None]:
        """Store a state, and what follows from it: a timer or the completion."""
        if changed.lacks_producer_id:
            # The epoch became exhausted, or the transactional id was deleted, while the request waited, so that no
            # producer id was assigned for it.
            raise ConcurrentTransactions("the producer id is being replaced")
        promise = self.store.append(transactional_id, changed)
        entry = self.store.entries[transactional_id]
        if changed.is_prepared:
            if changed.is_commit:
                self.counts.committed += 1
            else:
                self.counts.aborted += 1
            self._start_completion(entry)
        elif transactional_id in self.store.ongoing:
            self._arm(entry.deadline_s)
        else:
            self._arm_expiry()
        return promise

    async def _wait_for_completion(self, entry: TransactionEntry, end_s: float) -> None:
        """Wait until the transaction is completed. Raises `ConcurrentTransactions` at `end_s`."""
        left_ms = (end_s - self._clock.monotonic()) * 1000
        if left_ms <= 0:
            self.counts.concurrent += 1
            raise ConcurrentTransactions("the transaction is being completed")
        await entry.waiters.wait(self._scheduler, left_ms)

    # ------------------------------------------------------------------ completion

    def _resume(self, entries: list[TransactionEntry]) -> None:
        """Continue the transactions of a partition that was loaded."""
        for entry in entries:
            if entry.transaction.is_prepared:
                self._start_completion(entry)
        if ongoing := [each.deadline_s for each in entries if each.transactional_id in self.store.ongoing]:
            self._arm(min(ongoing))
        if entries:
            self._arm_expiry()

    def _start_completion(self, entry: TransactionEntry) -> None:
        if not entry.is_completing:
            entry.is_completing = True
            self._scheduler.spawn(self._complete(entry), name=f"complete {entry.transactional_id}")

    async def _complete(self, entry: TransactionEntry) -> None:
        """Send the markers of a decided transaction, then store that it is complete."""
        failures = 0
        try:
            while self._is_coordinated(entry) and entry.transaction.is_prepared:
                reason: Exception | str
                try:
                    if await self._complete_once(entry, entry.transaction):
                        return
                    reason = "another coordinator has written markers"
                except MansioError as error:
                    reason = without_traceback(error)
                except Exception as error:
                    logger.exception("transaction_completion_failed")
                    reason = without_traceback(error)
                if not (self._is_coordinated(entry) and entry.transaction.is_prepared):
                    return
                failures += 1
                known = fields(transactional_id=entry.transactional_id, reason=reason)
                logger.warning("transaction_not_completed", extra=known)
                await self._scheduler.sleep(COMPLETION_BACKOFF.delay_ms(failures))
        finally:
            entry.is_completing = False

    async def _complete_once(self, entry: TransactionEntry, decided: Transaction) -> bool:
        """Return False if another coordinator has replaced this one."""
        await self.topic.wait_until_committed(entry.index)
        marker = EndMarker(
            decided.producer_id,
            decided.producer_epoch,
            decided.is_commit,
            self.topic.leader_epoch_of(entry.index),
            bumps_epoch=decided.client_version >= machine.BUMPING_VERSION,
        )
        is_current = partial(self._is_decided, entry, decided)
        if not await self._markers.send(marker, sorted(decided.partitions), is_current) or not is_current():
            return False
        self.store.append_without_flush(
            entry.transactional_id, machine.complete(decided, now_ms=self._clock.wall_ms())
        )
        self._arm_expiry()
        return True

    def _is_coordinated(self, entry: TransactionEntry) -> bool:
        return not self._closed and self.store.entries.get(entry.transactional_id) is entry

    def _is_decided(self, entry: TransactionEntry, decided: Transaction) -> bool:
        return self._is_coordinated(entry) and entry.transaction is decided

    # ------------------------------------------------------------------ timeouts and expiry

    def _arm_expiry(self) -> None:
        if not self._expiry_due_s:
            interval_s = self._settings.expiration_check_interval_ms / 1000
            self._expiry_due_s = self._clock.monotonic() + interval_s
        self._arm(self._expiry_due_s)

    def _arm(self, due_s: float) -> None:
        """Check transactions at this monotonic time, or before."""
        if self._closed or (self._timer is not None and self._timer_due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_ms = max((due_s - self._clock.monotonic()) * 1000, CHECK_INTERVAL_MS_MIN)
        self._timer_due_s = self._clock.monotonic() + delay_ms / 1000
        self._timer = self._scheduler.call_later(delay_ms, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = self._clock.monotonic()
        for entry in list(self.store.ongoing.values()):
            if entry.deadline_s <= now_s:
                self._time_out(entry)
        if self._expiry_due_s and self._expiry_due_s <= now_s:
            removals = (self._remove_expired(), self._remove_expired_decisions())
            self._expiry_due_s = now_s + EXPIRY_PAUSE_S if any(removals) else 0.0
        if self.store.ongoing:
            self._arm(min(each.deadline_s for each in self.store.ongoing.values()))
        if self.store.entries:
            self._arm_expiry()

    def _time_out(self, entry: TransactionEntry) -> None:
        """Abort a transaction whose time is over. After an error the next check tries again."""
        was_held = entry.transaction.is_held
        try:
            timed_out = machine.time_out(entry.transaction, now_ms=self._clock.wall_ms())
            self._append(entry.transactional_id, timed_out).add_done_callback(_ignore_outcome)
        except MansioError as error:
            known = fields(transactional_id=entry.transactional_id, reason=error)
            logger.warning("transaction_not_aborted", extra=known)
            return
        self.counts.timed_out += 1
        known = fields(
            transactional_id=entry.transactional_id,
            producer_id=timed_out.producer_id,
            timeout_ms=self._settings.held_ms_max if was_held else timed_out.timeout_ms,
        )
        logger.info("transaction_timed_out", extra=known)

    def _remove_expired(self) -> bool:
        """Delete the transactional ids that were not used for long, at most `EXPIRED_PER_BATCH` of each partition.
        Returns whether there may be more of them, where the deletion did not fail."""
        now_ms, expiration_ms = self._clock.wall_ms(), self._settings.expiration_ms
        expired: dict[int, list[str]] = defaultdict(list)
        for entry in self.store.entries.values():
            found = expired[entry.index]
            if len(found) < EXPIRED_PER_BATCH and machine.is_expired(
                entry.transaction, expiration_ms=expiration_ms, now_ms=now_ms
            ):
                found.append(entry.transactional_id)
        is_more = False
        for index, transactional_ids in expired.items():
            try:
                if transactional_ids:
                    self.store.delete(index, transactional_ids).add_done_callback(_ignore_outcome)
                    is_more = is_more or len(transactional_ids) == EXPIRED_PER_BATCH
            except MansioError as error:
                known = fields(partition=index, reason=error)
                logger.warning("transactional_ids_not_removed", extra=known)
        return is_more


def _check_id(transactional_id: str) -> None:
    if not transactional_id or len(transactional_id.encode()) > TRANSACTIONAL_ID_BYTES_MAX:
        raise InvalidRequest("the transactional id is empty or too long")


def _ignore_outcome(promise: Promise[None]) -> None:
    """Retrieve and log the error of a commit that no request waits for."""
    try:
        promise.result()
    except MansioError as error:
        logger.warning("transaction_state_not_committed", extra=fields(reason=error))
