"""Decisions about the batches of a query, each of which has written several held transactions.

    None ──decide──> Deciding (with the transactions to commit) ──finish──> Decided ──decide a later batch──> ...

Invariants:
* A batch is decided once. A repeated batch, whose tasks have written again, changes nothing: its transactions that are
  not in the decision are to be aborted.
* A later batch is decided only when all transactions of the batch before it are ended, so one record for each query is
  enough.
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


class TaskTransaction(NamedTuple):
    """A transaction of one task, as its producer named it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class BatchDecision(NamedTuple):
    """The last decided batch of a query. `transactions`: those of its transactions that are to be committed, none when
    all are ended; `updated_ms`: time of the wall clock."""

    batch_id: int
    transactions: tuple[TaskTransaction, ...]
    updated_ms: int

    @property
    def is_finished(self) -> bool:
        """Whether all transactions are ended."""
        return not self.transactions


def decide(
    known: BatchDecision | None, batch_id: int, transactions: Iterable[TaskTransaction], *, now_ms: int
) -> BatchDecision:
    """Return the decision to commit a batch, or the same object if the batch is decided already.

    Raises `ConcurrentTransactions` while transactions of the last batch are not ended, `InvalidTxnState` for a batch
    before the last one.
    """
    if known is not None:
        if batch_id == known.batch_id:
            return known
        if batch_id < known.batch_id:
            raise InvalidTxnState(
                f"batch {batch_id} is not committed: batch {known.batch_id} of the query is committed already. Another"
                " driver runs the query, or its checkpoint was set back"
            )
        if not known.is_finished:
            raise ConcurrentTransactions("the batch before is being committed")
    return BatchDecision(batch_id, tuple(dict.fromkeys(transactions)), now_ms)


def newcomers(known: BatchDecision | None, transactions: Iterable[TaskTransaction]) -> list[TaskTransaction]:
    """Return the transactions that the decision does not commit: they are to be aborted. Those of a finished decision
    are ended, so that an abort does not change them."""
    decided = set(() if known is None else known.transactions)
    return [each for each in dict.fromkeys(transactions) if each not in decided]


def finish(known: BatchDecision, *, now_ms: int) -> BatchDecision:
    """Return the decision of a batch whose transactions are all ended."""
    return known._replace(transactions=(), updated_ms=now_ms)


def is_expired(known: BatchDecision, *, expiration_ms: int, now_ms: int) -> bool:
    """Whether the query has not committed a batch for `expiration_ms`; a single write expires sooner."""
    if known.batch_id == SINGLE_WRITE:
        expiration_ms = min(expiration_ms, SINGLE_WRITE_EXPIRATION_MS)
    return known.is_finished and now_ms - known.updated_ms >= expiration_ms
