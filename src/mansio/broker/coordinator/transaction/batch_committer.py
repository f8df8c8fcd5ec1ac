"""Commits the batches of queries, whose tasks have each written a held transaction, all or nothing.

The broker that leads the partition of `__transaction_state` of the query id decides: it holds all transactions of the
batch, stores the decision to commit them, and then commits each with its coordinator.

Invariants:
* A transaction is committed only when the decision is committed to the log, and the decision is stored only when all
  transactions of the batch are held, for at least half of `held_ms_max` from then on: the time in which a decision has
  to be carried out.
* A stored decision is carried out to its end, by the next leader of the partition, too.
* A batch that is decided already keeps its decision; other transactions that a repeated request names are aborted.
* A request to abort a transaction is sent only when the log has the transaction as one that is being aborted, and this
  is removed only when the transaction is ended: such a request may arrive late, after a change of the leader, and no
  leader may have decided to commit the transaction by then.
* What a request decides is stored only while the leadership lasts in which it read the last decision.
* One request or one completion per query is processed at a time; another request gets `ConcurrentTransactions`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.coordinator.group.error_mapping import coordinator_errors
from mansio.broker.coordinator.transaction.decision_store import to_record
from mansio.broker.coordinator.transaction.settings import TRANSACTIONAL_ID_BYTES_MAX
from mansio.errors import (
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    ProducerFenced,
)
from mansio.host.gather_results import gather_results
from mansio.host.item_turns import ItemTurns
from mansio.logs import fields
from mansio.ports import Backoff
from mansio.state.transactions import batch_decision
from mansio.tracebacks import copied, without_traceback
from mansio.wire.internal_records.batch_decision_records import encode_decision_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.coordinator.transaction.decision_store import DecisionEntry
    from mansio.broker.coordinator.transaction.settings import TransactionSettings
    from mansio.broker.coordinator.transaction.transaction_store import TransactionStore
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.transactions.batch_decision import BatchDecision, TaskTransaction

logger = logging.getLogger(__name__)

FINISH_BACKOFF: Final = Backoff(50, 2_000, jitter=0)
"""Pauses between two attempts to end the transactions of a decision."""
CONCURRENT_ENDS_MAX: Final = 100
"""Maximum number of transactions that are held or ended at the same time."""
QUERY_ID_BYTES_MAX: Final = 1_000
TRANSACTIONS_MAX: Final = 100_000
"""Maximum number of transactions of a batch, and of those that one request aborts."""
IDS_BYTES_MAX: Final = 8 << 20
"""Maximum size of the transactional ids of either. A decision is one record: the log cleaner must be able to decode it,
because a decision that it keeps would be loaded again when the query has expired."""
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

        Raises `InvalidTxnState` if a transaction is not held and cannot be held, or is being aborted, or if a later
        batch is decided, and `InvalidRequest` for too many transactions; none is committed then."""
        if batch_id <= batch_decision.NO_BATCH:
            raise InvalidRequest(f"{batch_id} is not the id of a batch")
        _check_size(transactions, "transactions")
        _check_size(abandoned, "abandoned transactions")
        with self._processing(query_id), coordinator_errors():
            await self._store.topic.ensure_topic_exists()
            epoch = self._leader_epoch(query_id)
            known = await self._known_decision(query_id)
            batch_decision.check_batch(known, batch_id, transactions)
            self._check_count(query_id, self._settings.queries_max)
            await self._wait_until_settled(query_id)
            current = self._decision(query_id, epoch)
            now_ms = self._clock.wall_ms()
            decided = batch_decision.decide(current, batch_id, transactions, abandoned, now_ms=now_ms)
            if decided is current:
                await self._abort(query_id, epoch, known, [*transactions, *abandoned])
                return
            await self._hold_all(batch_id, transactions)
            await self._append(query_id, epoch, decided)
            await self._wait_until_settled(query_id)

    async def abort(self, query_id: str, transactions: Sequence[TaskTransaction]) -> None:
        """Abort the transactions that the decision about the query's last batch does not commit. Returns when all
        transactions are ended, those of that decision, too. Raises `InvalidRequest` for too many transactions."""
        _check_size(transactions, "transactions")
        with self._processing(query_id), coordinator_errors():
            await self._store.topic.ensure_topic_exists()
            epoch = self._leader_epoch(query_id)
            known = await self._known_decision(query_id)
            await self._wait_until_settled(query_id)
            await self._abort(query_id, epoch, known, transactions)

    async def last_batch(self, query_id: str) -> int:
        """Return the id of the last batch of a query that is decided, when the decision is committed; `NO_BATCH` for
        none."""
        with coordinator_errors():
            await self._store.topic.ensure_topic_exists()
            known = await self._known_decision(query_id)
        return batch_decision.NO_BATCH if known is None else known.batch_id

    # ------------------------------------------------------------------ steps

    def _processing(self, query_id: str) -> _Processing:
        if not query_id or len(query_id.encode()) > QUERY_ID_BYTES_MAX:
            raise InvalidRequest("the query id is empty or too long")
        if query_id in self._busy:
            raise ConcurrentTransactions("another request of the query is being processed")
        return _Processing(self._busy, query_id)

    def _check_count(self, query_id: str, count_max: int) -> None:
        decisions = self._store.decisions.entries
        if query_id not in decisions and len(decisions) >= count_max:
            raise CoordinatorNotAvailable(f"there are {count_max} queries")

    def _leader_epoch(self, query_id: str) -> int:
        return self._store.topic.leader_epoch_of(self._store.partition_for(query_id))

    async def _known_decision(self, query_id: str) -> BatchDecision | None:
        """Return the decision about the query's last batch when it is committed."""
        entry = self._store.find_decision(query_id)
        known = None if entry is None else entry.decision
        await self._store.topic.wait_until_committed(self._store.partition_for(query_id))
        return known

    def _decision(self, query_id: str, epoch: int) -> BatchDecision | None:
        self._check_leader_epoch(query_id, epoch)
        entry = self._store.find_decision(query_id)
        return None if entry is None else entry.decision

    def _check_leader_epoch(self, query_id: str, epoch: int) -> None:
        """Raise `CoordinatorNotAvailable` if another broker may have decided since this epoch began."""
        if self._leader_epoch(query_id) != epoch:
            raise CoordinatorNotAvailable("the leader of the query's partition has changed")

    async def _append(self, query_id: str, epoch: int, decision: BatchDecision) -> None:
        self._check_leader_epoch(query_id, epoch)
        index = self._store.partition_for(query_id)
        stored = self._store.topic.append(index, [to_record(query_id, decision)])
        entry = self._store.find_decision(query_id)
        if entry is not None and not entry.decision.is_settled:
            # Before the commit, which may fail although the record stays in the log and is committed later.
            self._start_finishing(entry)
        await stored

    async def _hold_all(self, batch_id: int, transactions: Sequence[TaskTransaction]) -> None:
        """Hold the transactions. Raises `InvalidTxnState` if one of the transactions cannot be committed, or an error
        after which the request can be repeated."""
        errors: list[MansioError | None] = []
        for at in range(0, len(transactions), CONCURRENT_ENDS_MAX):
            work = [self._ender.hold(each) for each in transactions[at : at + CONCURRENT_ENDS_MAX]]
            errors = await gather_results(self._scheduler, work, name="hold transactions")
            if any(errors):
                break  # each further part may wait for a broker that does not answer, and the query is busy until then
        for error in sorted(filter(None, errors), key=lambda each: each.retriable):
            if error.retriable:
                raise CoordinatorNotAvailable(error.message) from error
            raise InvalidTxnState(
                f"batch {batch_id} is not committed: the transaction of a task has ended ({error.message})"
            ) from error

    async def _abort(
        self,
        query_id: str,
        epoch: int,
        known: BatchDecision | None,
        transactions: Sequence[TaskTransaction],
    ) -> None:
        """Store that the transactions which `known` does not name are being aborted, then wait until they are ended."""
        aborting = batch_decision.newcomers(known, transactions)
        if not aborting:
            return
        # The limit is higher than that of commits: a query whose commit is refused because of it has to abort.
        self._check_count(query_id, 2 * self._settings.queries_max)
        current = self._decision(query_id, epoch)
        now_ms = self._clock.wall_ms()
        decision = batch_decision.start_aborts(current, aborting, now_ms=now_ms)
        await self._append(query_id, epoch, decision)
        await self._wait_until_settled(query_id)

    # ------------------------------------------------------------------ completion of a decision

    def resume(self, entries: list[DecisionEntry]) -> None:
        """Carry out the decisions and aborts of a partition that was loaded."""
        for entry in entries:
            if not entry.decision.is_settled:
                self._start_finishing(entry)

    def _start_finishing(self, entry: DecisionEntry) -> None:
        if not entry.is_finishing:
            entry.is_finishing = True
            self._scheduler.spawn(self._finish(entry), name=f"commit batch of {entry.query_id}")

    async def _wait_until_settled(self, query_id: str) -> None:
        """Wait until all transactions that the query names are ended, up to `batch_commit_wait_ms`. Raises
        `CoordinatorNotAvailable`, also if another broker decides about the query now."""
        entry = self._store.find_decision(query_id)
        if entry is None or entry.decision.is_settled:
            return
        has_aborts = bool(entry.decision.aborting)
        self._start_finishing(entry)
        await entry.waiters.wait(self._scheduler, self._settings.batch_commit_wait_ms)
        if not self._has_settled(entry):
            raise CoordinatorNotAvailable("transactions of the query are not ended yet")
        if not has_aborts:  # their removal is not flushed by itself
            await self._store.topic.wait_until_committed(entry.index)

    def _is_loaded(self, entry: DecisionEntry) -> bool:
        return not self._closed and self._store.decisions.entries.get(entry.query_id) is entry

    def _has_settled(self, entry: DecisionEntry) -> bool:
        return self._is_loaded(entry) and entry.decision.is_settled

    async def _finish(self, entry: DecisionEntry) -> None:
        """End the transactions of a decision, then those that are to be aborted, and store that each is done."""
        failures = 0
        try:
            while self._is_loaded(entry) and not entry.decision.is_settled:
                try:
                    await self._finish_once(entry, entry.decision)
                    continue
                except MansioError as error:
                    reason: Exception = without_traceback(error)
                except Exception as error:
                    logger.exception("batch_commit_failed")
                    reason = without_traceback(error)
                failures += 1
                known = fields(query=entry.query_id, batch=entry.decision.batch_id, reason=reason)
                is_aborting = entry.decision.is_finished
                logger.warning(
                    "batch_not_aborted_yet" if is_aborting else "batch_not_committed_yet", extra=known
                )
                await self._scheduler.sleep(FINISH_BACKOFF.delay_ms(failures))
        finally:
            entry.is_finishing = False

    async def _finish_once(self, entry: DecisionEntry, decision: BatchDecision) -> None:
        await self._store.topic.wait_until_committed(entry.index)
        is_commit = not decision.is_finished
        await self._end_all(entry, decision, is_commit=is_commit)
        if not self._is_loaded(entry) or entry.decision is not decision:
            return
        if is_commit:
            finished = batch_decision.finish(decision, now_ms=self._clock.wall_ms())
            await self._store.topic.append(entry.index, [to_record(entry.query_id, finished)])
        else:
            record = to_record(entry.query_id, batch_decision.finish_aborts(decision))
            self._store.topic.append_without_flush(entry.index, [record])

    async def _end_all(self, entry: DecisionEntry, decision: BatchDecision, *, is_commit: bool) -> None:
        """End the transactions that a decision commits, or those that it aborts. Raises an error after which those that
        are left are to be tried again."""
        named = decision.transactions if is_commit else decision.aborting
        left = [each for each in named if each not in entry.ended]
        errors: list[MansioError | None] = []
        for at in range(0, len(left), CONCURRENT_ENDS_MAX):
            work = [
                self._ender.end(each, is_commit=is_commit) for each in left[at : at + CONCURRENT_ENDS_MAX]
            ]
            errors += await gather_results(self._scheduler, work, name="end transactions of a batch")
        turns = ItemTurns(self._scheduler)
        replaced, failure = [], None
        for transaction, error in zip(left, errors, strict=True):
            await turns.next()
            if error is not None and not isinstance(error, ENDED):
                failure = failure or error
                continue
            entry.ended.add(transaction)
            if error is None or not is_commit:
                continue
            if isinstance(error, InvalidTxnState):
                known = fields(
                    query=entry.query_id, transactional_id=transaction.transactional_id, reason=error
                )
                logger.error("transaction_of_batch_was_aborted", extra=known)
            else:
                replaced.append(transaction)
        self._check_age(entry, decision, replaced)
        if failure is not None:
            raise copied(failure)

    def _check_age(
        self, entry: DecisionEntry, decision: BatchDecision, replaced: Sequence[TaskTransaction]
    ) -> None:
        """Log an error if transactions whose producers have a later epoch may have been aborted because their time was
        over. Otherwise each was committed before a crash, and its transactional id is in use again."""
        age_ms = self._clock.wall_ms() - decision.updated_ms
        if replaced and age_ms >= self._settings.held_ms_max // 2:
            known = fields(
                query=entry.query_id,
                batch=decision.batch_id,
                transactional_id=replaced[0].transactional_id,
                transactions=len(replaced),
                age_ms=age_ms,
            )
            logger.error("batch_may_be_committed_in_part", extra=known)

    # ------------------------------------------------------------------ expiry

    def remove_expired(self) -> bool:
        """Delete queries that have not committed a batch for long, at most `EXPIRED_PER_BATCH` of each partition.
        Returns whether there may be more of them, where the deletion did not fail."""
        now_ms, expiration_ms = self._clock.wall_ms(), self._settings.query_expiration_ms
        expired: dict[int, list[str]] = defaultdict(list)
        for entry in self._store.decisions.entries.values():
            found = expired[entry.index]
            if len(found) < EXPIRED_PER_BATCH and batch_decision.is_expired(
                entry.decision, expiration_ms=expiration_ms, now_ms=now_ms
            ):
                found.append(entry.query_id)
        is_more = False
        for index, query_ids in expired.items():
            try:
                if query_ids:
                    records = [(encode_decision_key(each), None) for each in query_ids]
                    self._store.topic.append(index, records).add_done_callback(_ignore_outcome)
                    is_more = is_more or len(query_ids) == EXPIRED_PER_BATCH
            except MansioError as error:
                logger.warning("queries_not_removed", extra=fields(partition=index, reason=error))
        return is_more


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


def _check_size(transactions: Sequence[TaskTransaction], name: str) -> None:
    """Raise `InvalidRequest` for transactions that a decision cannot have."""
    if len(transactions) > TRANSACTIONS_MAX:
        raise InvalidRequest(
            f"the batch has {len(transactions)} {name}, one of each task; the maximum is {TRANSACTIONS_MAX}"
        )
    sizes = [len(each.transactional_id.encode()) for each in transactions]
    if not all(0 < each <= TRANSACTIONAL_ID_BYTES_MAX for each in sizes):
        raise InvalidRequest("a transactional id is empty or too long")
    if sum(sizes) > IDS_BYTES_MAX:
        raise InvalidRequest(
            f"the ids of the batch's {len(transactions)} {name} have {sum(sizes)} bytes; the maximum is {IDS_BYTES_MAX}"
        )


def _ignore_outcome(promise: Promise[None]) -> None:
    try:
        promise.result()
    except MansioError as error:
        logger.warning("expiry_not_committed", extra=fields(reason=error))
