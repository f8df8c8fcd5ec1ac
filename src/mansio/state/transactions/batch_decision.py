"""Decisions about the batches of a query, each of which has written several held transactions.

    None ──decide──> Deciding (with the transactions to commit) ──finish──> Decided ──decide a later batch──> ...

Beside its last batch a query has the transactions that are being aborted: they are named before the first request to
abort one is sent (`decide` with `abandoned`, `start_aborts`) and until all are ended (`finish_aborts`).

Invariants:
* A batch is decided once. A repeated batch, whose tasks have written again, changes nothing: its transactions that are
  not in the decision are to be aborted.
* A later batch is decided, and further transactions are aborted, only when all transactions that the query names are
  ended, so one record for each query is enough, and its size is bounded by that of one request.
* No transaction is both to be committed and to be aborted, and one that is being aborted is in no later decision: a
  request to abort it may arrive late.
* An earlier batch is refused: a driver that another one has replaced cannot commit, nor can a query whose checkpoint
  was set back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConcurrentTransactions, InvalidTxnState

if TYPE_CHECKING:
    from collections.abc import Iterable

SINGLE_WRITE: Final = -1
"""Batch id of a write that has no query and no further batch. Its id is never used again, so its decision matters only
while its driver may repeat the commit."""
SINGLE_WRITE_EXPIRATION_MS: Final = 60 * 60_000

NO_BATCH: Final = -(2**63)
"""Batch id of a query that has aborted transactions and not decided a batch: before all others."""


class TaskTransaction(NamedTuple):
    """A transaction of one task, as its producer named it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class BatchDecision(NamedTuple):
    """The last decided batch of a query. `transactions`: those of its transactions that are to be committed, none when
    all are ended; `updated_ms`: time of the wall clock of its decision or its end; `aborting`: transactions of the
    query that are to be aborted, none when all are ended."""

    batch_id: int
    transactions: tuple[TaskTransaction, ...]
    updated_ms: int
    aborting: tuple[TaskTransaction, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Whether all transactions of the batch are ended."""
        return not self.transactions

    @property
    def is_settled(self) -> bool:
        """Whether all transactions that the query names are ended, those that are aborted, too."""
        return not self.transactions and not self.aborting


def check_batch(
    known: BatchDecision | None, batch_id: int, transactions: Iterable[TaskTransaction]
) -> BatchDecision | None:
    """Return the decision about this batch, None if it is not decided yet.

    Raises `InvalidTxnState` for a batch before the last one, and for one with a transaction that is being aborted.
    """
    if known is None or batch_id == known.batch_id:
        return known
    if batch_id < known.batch_id:
        raise InvalidTxnState(
            f"batch {batch_id} is not committed: batch {known.batch_id} of the query is committed already. Another"
            " driver runs the query, or its checkpoint was set back"
        )
    if known.aborting and not set(known.aborting).isdisjoint(transactions):
        raise InvalidTxnState(
            f"batch {batch_id} is not committed: the transaction of a task is being aborted"
        )
    return None


def decide(
    known: BatchDecision | None,
    batch_id: int,
    transactions: Iterable[TaskTransaction],
    abandoned: Iterable[TaskTransaction] = (),
    *,
    now_ms: int,
) -> BatchDecision:
    """Return the decision to commit a batch and to abort the abandoned transactions, or the same object if the batch is
    decided already.

    Raises the errors of `check_batch`, and `ConcurrentTransactions` while transactions of the query are not ended.
    """
    named = tuple(dict.fromkeys(transactions))
    decided = check_batch(known, batch_id, named)
    if decided is not None:
        return decided
    _check_settled(known)
    decision = BatchDecision(batch_id, named, now_ms)
    return decision._replace(aborting=tuple(newcomers(decision, abandoned)))


def newcomers(known: BatchDecision | None, transactions: Iterable[TaskTransaction]) -> list[TaskTransaction]:
    """Return the transactions that the query does not name yet: they are to be aborted. Those of a finished decision
    are ended, so that an abort does not change them."""
    named = set(() if known is None else (*known.transactions, *known.aborting))
    return [each for each in dict.fromkeys(transactions) if each not in named]


def start_aborts(
    known: BatchDecision | None, transactions: Iterable[TaskTransaction], *, now_ms: int
) -> BatchDecision:
    """Return the query with transactions that are to be aborted from then on.

    Raises `ConcurrentTransactions` while transactions of the query are not ended.
    """
    _check_settled(known)
    if known is None:
        known = BatchDecision(NO_BATCH, (), now_ms)
    return known._replace(aborting=tuple(dict.fromkeys(transactions)))


def _check_settled(known: BatchDecision | None) -> None:
    if known is not None and not known.is_settled:
        raise ConcurrentTransactions("earlier transactions of the query are being ended")


def finish(known: BatchDecision, *, now_ms: int) -> BatchDecision:
    """Return the decision of a batch whose transactions are all ended."""
    return known._replace(transactions=(), updated_ms=now_ms)


def finish_aborts(known: BatchDecision) -> BatchDecision:
    """Return the decision when all transactions that were to be aborted are ended."""
    return known._replace(aborting=())


def is_expired(known: BatchDecision, *, expiration_ms: int, now_ms: int) -> bool:
    """Whether the query has not committed a batch for `expiration_ms`; one without a further batch expires sooner."""
    if known.batch_id in (SINGLE_WRITE, NO_BATCH):
        expiration_ms = min(expiration_ms, SINGLE_WRITE_EXPIRATION_MS)
    return known.is_settled and now_ms - known.updated_ms >= expiration_ms
