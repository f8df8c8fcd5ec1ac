"""Commits the batches of queries, whose tasks have each written a held transaction, all or nothing.

The broker that leads the partition of `__transaction_state` of the query id decides: it holds all transactions of the
batch, stores the decision to commit them, and then commits each with its coordinator.

Invariants:
* A transaction is committed only when the decision is committed to the log, and the decision is stored only when all
  transactions of the batch are held, for at least half of `held_ms_max` from then on: the time in which a decision has
  to be carried out.
* A stored decision is carried out to its end, by the next leader of the partition, too.
* A batch that is decided already keeps its decision; other transactions that a repeated request names are aborted.
* One request or one completion per query is processed at a time; another request gets `ConcurrentTransactions`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.coordinator.group.error_mapping import coordinator_errors
from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.broker.coordinator.transaction.decision_store import to_record
from mansio.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    ProducerFenced,
)
from mansio.logs import fields
from mansio.ports import Backoff
from mansio.state.transactions import batch_decision
from mansio.wire.internal_records.batch_decision_records import encode_decision_key

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from mansio.broker.coordinator.transaction.decision_store import DecisionEntry
    from mansio.broker.coordinator.transaction.settings import TransactionSettings
    from mansio.broker.coordinator.transaction.transaction_store import TransactionStore
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.transactions.batch_decision import BatchDecision, TaskTransaction

logger = logging.getLogger(__name__)

FINISH_BACKOFF: Final = Backoff(50, 2_000, jitter=0)
"""Pauses between two attempts to end the transactions of a decision."""
ABORT_ATTEMPTS_MAX: Final = 5
CONCURRENT_ENDS_MAX: Final = 100
"""Maximum number of transactions that are held or ended at the same time."""
QUERY_ID_BYTES_MAX: Final = 1_000
EXPIRED_PER_BATCH: Final = 1_000

ENDED: Final = (ProducerFenced, InvalidProducerIdMapping, InvalidTxnState)
"""Errors for a transaction that is ended already: its producer has a later epoch, or it has no transaction."""


class TransactionEnder(Protocol):
    """Holds and ends transactions with their coordinators; implemented by `RoutedEnder`."""

    async def hold(self, transaction: TaskTransaction) -> None: ...

    async def end(self, transaction: TaskTransaction, *, is_commit: bool) -> None: ...


class BatchCommitter:
    """Decides about the batches of the queries whose partition this broker leads. All methods run on the broker's event
    loop.

    All requests raise `NotCoordinator`, `CoordinatorNotAvailable`, `CoordinatorLoadInProgress`, or
    `ConcurrentTransactions`, after which they can be repeated.
    """

    def __init__(
        self,
        *,
        store: TransactionStore,
        ender: TransactionEnder,
        settings: TransactionSettings,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self._store = store
        self._ender = ender
        self._settings = settings
        self._clock = clock
        self._scheduler = scheduler
        self._busy: set[str] = set()
        self._closed = False
        store.on_decisions_loaded = self._resume

    def close(self) -> None:
        """Stop ending transactions. The next leader of the partition, or the next start, goes on."""
        self._closed = True

    async def commit(
        self,
        query_id: str,
        batch_id: int,
        transactions: Sequence[TaskTransaction],
        abandoned: Sequence[TaskTransaction] = (),
    ) -> None:
        """Commit the transactions of a batch, all or none; a repeated call has the same result. If the batch is decided
        already, the transactions that are not in its decision are aborted, as `abandoned` always are. Returns when all
        transactions are ended.

        Raises `InvalidTxnState` if a transaction is not held and cannot be held, or if a later batch is decided; none
        is committed then."""
        with self._processing(query_id), coordinator_errors():
            await self._store.topic.ensure_topic_exists()
            known = await self._known_decision(query_id)
            self._check_count(query_id)
            now_ms = self._clock.wall_ms()
            await self._wait_until_finished(query_id)
            decided = batch_decision.decide(self._decision(query_id), batch_id, transactions, now_ms=now_ms)
            is_new = known is None or known.batch_id != batch_id
            if is_new:
                await self._hold_all(batch_id, transactions)
                await self._append(query_id, decided)
                await self._wait_until_finished(query_id)
                known = decided
            await self._abort(batch_decision.newcomers(known, [*transactions, *abandoned]))

    async def abort(self, query_id: str, transactions: Sequence[TaskTransaction]) -> None:
        """Abort the transactions that the decision about the query's last batch does not commit. Returns when all
        transactions are ended, those of that decision, too."""
        with self._processing(query_id), coordinator_errors():
            await self._store.topic.ensure_topic_exists()
            known = await self._known_decision(query_id)
            await self._wait_until_finished(query_id)
            await self._abort(batch_decision.newcomers(known, transactions))

    # ------------------------------------------------------------------ steps

    def _processing(self, query_id: str) -> _Processing:
        if not query_id or len(query_id.encode()) > QUERY_ID_BYTES_MAX:
            raise InvalidRequest("the query id is empty or too long")
        if query_id in self._busy:
            raise ConcurrentTransactions("another request of the query is being processed")
        return _Processing(self._busy, query_id)

    def _check_count(self, query_id: str) -> None:
        decisions = self._store.decisions.entries
        if query_id not in decisions and len(decisions) >= self._settings.queries_max:
            raise CoordinatorNotAvailable(f"there are {self._settings.queries_max} queries")

    async def _known_decision(self, query_id: str) -> BatchDecision | None:
        """Return the decision about the query's last batch when it is committed."""
        known = self._decision(query_id)
        await self._store.topic.wait_until_committed(self._store.partition_for(query_id))
        return known

    def _decision(self, query_id: str) -> BatchDecision | None:
        entry = self._store.find_decision(query_id)
        return None if entry is None else entry.decision

    async def _append(self, query_id: str, decision: BatchDecision) -> None:
        index = self._store.partition_for(query_id)
        await self._store.topic.append(index, [to_record(query_id, decision)])

    async def _hold_all(self, batch_id: int, transactions: Sequence[TaskTransaction]) -> None:
        """Raises `InvalidTxnState` if one of the transactions cannot be committed, or an error after which the request
        can be repeated."""
        errors = await self._run_all([self._ender.hold(each) for each in transactions], "hold transactions")
        for error in sorted(filter(None, errors), key=lambda each: each.retriable):
            if error.retriable:
                raise CoordinatorNotAvailable(error.message) from error
            raise InvalidTxnState(
                f"batch {batch_id} is not committed: the transaction of a task has ended ({error.message})"
            ) from error

    async def _abort(self, transactions: Sequence[TaskTransaction]) -> None:
        left = list(transactions)
        for attempt in range(1, ABORT_ATTEMPTS_MAX + 1):
            errors = await self._run_all(
                [self._ender.end(each, is_commit=False) for each in left], "abort transactions"
            )
            failed = [
                (each, error)
                for each, error in zip(left, errors, strict=True)
                if error is not None and not isinstance(error, ENDED)
            ]
            if not failed:
                return
            left = [each for each, _ in failed]
            if attempt == ABORT_ATTEMPTS_MAX:
                raise CoordinatorNotAvailable(f"transactions are not aborted yet: {failed[0][1].message}")
            await self._scheduler.sleep(FINISH_BACKOFF.delay_ms(attempt))

    async def _run_all(self, work: list[Coroutine[Any, Any, None]], name: str) -> list[MansioError | None]:
        errors: list[MansioError | None] = []
        for at in range(0, len(work), CONCURRENT_ENDS_MAX):
            errors += await gather_results(self._scheduler, work[at : at + CONCURRENT_ENDS_MAX], name=name)
        return errors

    # ------------------------------------------------------------------ completion of a decision

    def _resume(self, entries: list[DecisionEntry]) -> None:
        """Carry out the decisions of a partition that was loaded."""
        for entry in entries:
            if not entry.decision.is_finished:
                self._start_finishing(entry)

    def _start_finishing(self, entry: DecisionEntry) -> None:
        if not entry.is_finishing:
            entry.is_finishing = True
            self._scheduler.spawn(self._finish(entry), name=f"commit batch of {entry.query_id}")

    async def _wait_until_finished(self, query_id: str) -> None:
        """Wait until all transactions of the last decision are ended, up to `batch_commit_wait_ms`. Raises
        `CoordinatorNotAvailable`, also if another broker decides about the query now."""
        entry = self._store.find_decision(query_id)
        if entry is None or entry.decision.is_finished:
            return
        self._start_finishing(entry)
        promise: Promise[None] = self._scheduler.promise()
        entry.waiters.append(promise)
        timer = self._scheduler.call_later(self._settings.batch_commit_wait_ms, _complete_promise, promise)
        try:
            await promise
        finally:
            timer.cancel()
            if promise in entry.waiters:
                entry.waiters.remove(promise)
        if not self._has_finished(entry):
            raise CoordinatorNotAvailable("transactions of the batch are not ended yet")
        await self._store.topic.wait_until_committed(entry.index)

    def _is_loaded(self, entry: DecisionEntry) -> bool:
        return not self._closed and self._store.decisions.entries.get(entry.query_id) is entry

    def _has_finished(self, entry: DecisionEntry) -> bool:
        return self._is_loaded(entry) and entry.decision.is_finished

    async def _finish(self, entry: DecisionEntry) -> None:
        """End the transactions of a decision, then store that it is finished."""
        failures = 0
        try:
            while self._is_loaded(entry) and not entry.decision.is_finished:
                try:
                    await self._finish_once(entry, entry.decision)
                    continue
                except MansioError as error:
                    reason: Exception = error
                except Exception as error:
                    logger.exception("batch_commit_failed")
                    reason = error
                failures += 1
                known = fields(query=entry.query_id, batch=entry.decision.batch_id, reason=reason)
                logger.warning("batch_not_committed_yet", extra=known)
                await self._scheduler.sleep(FINISH_BACKOFF.delay_ms(failures))
        finally:
            entry.is_finishing = False

    async def _finish_once(self, entry: DecisionEntry, decision: BatchDecision) -> None:
        await self._store.topic.wait_until_committed(entry.index)
        transactions = decision.transactions
        errors = await self._run_all(
            [self._ender.end(each, is_commit=True) for each in transactions], "commit transactions"
        )
        for transaction, error in zip(transactions, errors, strict=True):
            if error is None or isinstance(error, ProducerFenced | InvalidProducerIdMapping):
                continue  # a later epoch: committed before a crash, and its transactional id is in use again
            if not isinstance(error, InvalidTxnState):
                raise error
            known = fields(query=entry.query_id, transactional_id=transaction.transactional_id, reason=error)
            logger.error("transaction_of_batch_was_aborted", extra=known)
        if self._is_loaded(entry) and entry.decision is decision:
            await self._append(entry.query_id, batch_decision.finish(decision, now_ms=self._clock.wall_ms()))

    # ------------------------------------------------------------------ expiry

    def remove_expired(self) -> None:
        """Delete queries that have not committed a batch for long, at most `EXPIRED_PER_BATCH` of each partition."""
        now_ms, expiration_ms = self._clock.wall_ms(), self._settings.query_expiration_ms
        expired: dict[int, list[str]] = defaultdict(list)
        for entry in self._store.decisions.entries.values():
            found = expired[entry.index]
            if len(found) < EXPIRED_PER_BATCH and batch_decision.is_expired(
                entry.decision, expiration_ms=expiration_ms, now_ms=now_ms
            ):
                found.append(entry.query_id)
        for index, query_ids in expired.items():
            try:
                if query_ids:
                    records = [(encode_decision_key(each), None) for each in query_ids]
                    self._store.topic.append(index, records).add_done_callback(_ignore_outcome)
            except MansioError as error:
                logger.warning("queries_not_removed", extra=fields(partition=index, reason=error))


class _Processing:
    """Marks a query as busy while a request is processed."""

    __slots__ = ("_busy", "_query_id")

    def __init__(self, busy: set[str], query_id: str) -> None:
        self._busy = busy
        self._query_id = query_id

    def __enter__(self) -> None:
        self._busy.add(self._query_id)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._query_id)


def _complete_promise(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)


def _ignore_outcome(promise: Promise[None]) -> None:
    try:
        promise.result()
    except MansioError as error:
        logger.warning("expiry_not_committed", extra=fields(reason=error))
