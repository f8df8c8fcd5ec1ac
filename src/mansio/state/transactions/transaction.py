"""State machine of one transactional id.

A `Transaction` is an immutable value: each function returns the next one, or the same object if a repeated request has
nothing to change. The caller stores it and answers when it is durable. Time is an argument.

    Empty ──add──> Ongoing ──end──> PrepareCommit ──> CompleteCommit ──add──> Ongoing
                      └────end, timeout, fence────> PrepareAbort ──> CompleteAbort ──add──> Ongoing

`initialize` leads from Empty and the complete states to Empty with the next epoch. An abort with transaction version 2
leads from them to CompleteAbort, because the producer does not know whether it had a transaction. An unused
transactional id expires.

An ongoing transaction that is *held* (`hold`) has all its records and waits for the decision of another system, as in a
two-phase commit: its own timeout no longer applies, and only its producer and epoch, or the end of the time for which
it may be held, end it.

Invariants:
* A decision (PrepareCommit, PrepareAbort) does not change until all partitions have its marker.
* A producer with a lower epoch, or with another producer id, changes nothing, unless it repeats the request that led to
  the current state: it then gets the same answer.
* A held transaction gets no further partition, and a new producer with the transactional id does not abort it.
* The pair (producer id, epoch) of a transactional id is never used by two producers: each initialization bumps the
  epoch, and a new producer id follows an exhausted epoch. A fenced or timed-out transaction ends with a bumped epoch.
* From transaction version 2 on each end bumps the epoch, so that a late batch or request of one transaction cannot
  become part of the next one.

Sources: KIP-98, KIP-360 (repeated initialization), KIP-890 (transaction version 2). KIP-939 calls a transaction
"prepared" that waits for the decision of another system; here, as in Kafka's names of the states, a prepared one is
decided.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTxnState,
    ProducerFenced,
    TransactionAbortable,
)
from mansio.wire.field_values import PRODUCER_EPOCH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.errors import MansioError
    from mansio.wire.topic_partition import PartitionKey

NO_ID: Final = -1
NO_EPOCH: Final = -1

NO_TIME: Final = -1

BUMPING_VERSION: Final = 2
"""Transaction version from which each end of a transaction bumps the epoch."""


class TransactionState(IntEnum):
    """State of a transactional id; the numbers are stored, as by Kafka."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def title(self) -> str:
        """Kafka's name of the state."""
        return self.name.title().replace("_", "")


_PREPARED: Final = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
_COMPLETE: Final = (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)


class Transaction(NamedTuple):
    """A transactional id with its producer and its last transaction.

    `producer_id`, `producer_epoch`: of the client and its open transaction or, once that is decided, of its markers.
    `next_producer_id`: the client's next producer id, with the epoch 0, if the transaction is decided and the epoch is
    exhausted. `last_producer_epoch`: the epoch with which a request that led to the client's current epoch may be
    repeated, -1 for none. `previous_producer_id`: the producer id before the client's current one, if its epoch was
    exhausted. `updated_ms`, `started_ms`: times of the wall clock; `held_ms`: the time since which the transaction is
    held, -1 if it is not.
    """

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[PartitionKey] = frozenset()
    updated_ms: int = NO_TIME
    started_ms: int = NO_TIME
    last_producer_epoch: int = NO_EPOCH
    previous_producer_id: int = NO_ID
    next_producer_id: int = NO_ID
    client_version: int = 0
    held_ms: int = NO_TIME

    @property
    def is_held(self) -> bool:
        """Whether the transaction is ongoing and waits for the decision of another system."""
        return self.held_ms != NO_TIME

    @property
    def is_prepared(self) -> bool:
        """Whether the transaction is decided and markers are missing."""
        return self.state in _PREPARED

    @property
    def is_commit(self) -> bool:
        """Whether the decision is to commit."""
        return self.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)

    @property
    def is_epoch_exhausted(self) -> bool:
        """Whether the next bump of the epoch needs a new producer id."""
        return self.current_producer[1] >= PRODUCER_EPOCH_MAX - 1

    @property
    def lacks_producer_id(self) -> bool:
        """Whether the transition needed a new producer id and got none: it must not be stored."""
        needs_next = self.producer_epoch == PRODUCER_EPOCH_MAX and self.client_version >= BUMPING_VERSION
        return self.producer_id == NO_ID or (needs_next and self.next_producer_id == NO_ID)

    @property
    def current_producer(self) -> tuple[int, int]:
        """Producer id and epoch of the client, whose requests are accepted. Once a transaction is decided, they are
        those of its next transaction."""
        if self.next_producer_id != NO_ID:
            return self.next_producer_id, 0
        return self.producer_id, self.producer_epoch


def initialize(
    known: Transaction | None,
    *,
    timeout_ms: int,
    producer_id: int,
    producer_epoch: int,
    new_producer_id: int,
    now_ms: int,
) -> Transaction:
    """Return the transactional id for a producer that starts, or restarts after an error; its `state` is PrepareAbort
    if an open transaction has to be aborted first: the caller repeats the call after that.

    `producer_id`, `producer_epoch`: what the producer had, -1 if it is new (KIP-360). `new_producer_id`: used if there
    is no transactional id yet, or if its epoch is exhausted.

    Raises `ProducerFenced` if there is a newer producer, and `ConcurrentTransactions` while a transaction is being
    completed or is held.
    """
    if known is None:
        return Transaction(new_producer_id, 0, timeout_ms, updated_ms=now_ms)
    is_new = producer_id == NO_ID
    is_current = known.current_producer == (producer_id, producer_epoch)
    if not is_new and not is_current and not _is_repeated(known, producer_id, producer_epoch):
        raise ProducerFenced("another producer with the same transactional id has a newer epoch")
    if known.is_prepared:
        raise ConcurrentTransactions("the transaction is being completed")
    if known.is_held:
        raise ConcurrentTransactions("the transaction waits for the decision to commit or abort it")
    if known.state is TransactionState.ONGOING:
        if not is_new and not is_current:
            raise ProducerFenced("another producer has begun a transaction")
        return _fence(known, now_ms, may_repeat=not is_new)
    empty = known._replace(
        timeout_ms=timeout_ms,
        state=TransactionState.EMPTY,
        partitions=frozenset(),
        updated_ms=now_ms,
        started_ms=NO_TIME,
        last_producer_epoch=NO_EPOCH if is_new else producer_epoch,
    )
    if not is_new and not is_current and not _is_beyond_last_epoch(known):
        return empty  # a repeated request
    if known.is_epoch_exhausted:
        return empty._replace(
            producer_id=new_producer_id, producer_epoch=0, previous_producer_id=known.producer_id
        )
    return empty._replace(producer_epoch=known.producer_epoch + 1)


def _is_beyond_last_epoch(known: Transaction) -> bool:
    """Whether the epoch is the one that only markers have: a fenced transaction with the last epoch was aborted."""
    return known.current_producer[1] == PRODUCER_EPOCH_MAX


def _is_repeated(known: Transaction, producer_id: int, producer_epoch: int) -> bool:
    """Whether the current epoch was the answer to an earlier request with this producer id and epoch, so that this
    request is a repeat."""
    if producer_epoch == NO_EPOCH or producer_epoch != known.last_producer_epoch:
        return False
    current_id, current_epoch = known.current_producer
    if producer_id == current_id:
        return current_epoch == producer_epoch + 1
    return producer_id == known.previous_producer_id and current_epoch == 0


def check_producer(known: Transaction | None, producer_id: int, producer_epoch: int) -> Transaction:
    """Return the transactional id if this is its current producer. Raises `InvalidProducerIdMapping`,
    `ProducerFenced`."""
    if known is None:
        raise InvalidProducerIdMapping
    current_id, current_epoch = known.current_producer
    if current_id != producer_id:
        raise InvalidProducerIdMapping
    if current_epoch != producer_epoch or _is_beyond_last_epoch(known):
        raise ProducerFenced("the epoch of the producer is not the current one")
    return known


def add_partitions(
    known: Transaction | None,
    producer_id: int,
    producer_epoch: int,
    partitions: Iterable[PartitionKey],
    *,
    client_version: int,
    now_ms: int,
) -> Transaction:
    """Return the ongoing transaction with these partitions; begins it if there is none.

    Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState` for a held one.
    """
    known = _check_not_completing(known, producer_id, producer_epoch)
    if known.state is TransactionState.ONGOING:
        added = known.partitions.union(partitions)
        if added == known.partitions:
            return known
        if known.is_held:
            raise InvalidTxnState("no partition can be added to the transaction: it waits for its decision")
        return known._replace(partitions=added, updated_ms=now_ms)
    return known._replace(
        state=TransactionState.ONGOING,
        partitions=frozenset(partitions),
        updated_ms=now_ms,
        started_ms=now_ms,
        client_version=client_version,
    )


def verify_partitions(
    known: Transaction | None, producer_id: int, producer_epoch: int, partitions: Sequence[PartitionKey]
) -> list[MansioError | None]:
    """Return None for each partition that is in the ongoing transaction, `TransactionAbortable` for others.

    Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`.
    """
    known = _check_not_completing(known, producer_id, producer_epoch)
    is_ongoing = known.state is TransactionState.ONGOING
    return [
        None
        if is_ongoing and each in known.partitions
        else TransactionAbortable(f"{each[0]}-{each[1]} is not in the transaction")
        for each in partitions
    ]


def _check_not_completing(known: Transaction | None, producer_id: int, producer_epoch: int) -> Transaction:
    if known is not None and known.is_prepared and known.current_producer == (producer_id, producer_epoch):
        raise ConcurrentTransactions("the previous transaction is being completed")
    known = check_producer(known, producer_id, producer_epoch)
    if known.is_prepared:
        raise ConcurrentTransactions("the transaction is being completed")
    return known


def hold(
    known: Transaction | None, producer_id: int, producer_epoch: int, *, now_ms: int, renewal_ms: int
) -> Transaction:
    """Return the ongoing transaction as held; the same object if it is held for less than `renewal_ms`. After that its
    time begins again, so that it lasts until the decision that follows is carried out.

    Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState` without an ongoing
    transaction.
    """
    known = _check_not_completing(known, producer_id, producer_epoch)
    if known.state is not TransactionState.ONGOING:
        raise InvalidTxnState(f"the transaction is in state {known.state.title}")
    if known.is_held and now_ms - known.held_ms < renewal_ms:
        return known
    return known._replace(held_ms=now_ms, updated_ms=now_ms)


def end(
    known: Transaction | None,
    producer_id: int,
    producer_epoch: int,
    *,
    is_commit: bool,
    bumps_epoch: bool,
    new_producer_id: int,
    now_ms: int,
) -> Transaction:
    """Return the transaction with its decision, or the same object if the request is a repeated one;
    `current_producer` of the result answers the request.

    `bumps_epoch`: transaction version 2. `new_producer_id`: for an exhausted epoch.

    Raises `InvalidProducerIdMapping`, `ProducerFenced`, `ConcurrentTransactions`, `InvalidTxnState`.
    """
    if known is not None and bumps_epoch and _is_repeated_end(known, producer_id, producer_epoch):
        if known.is_commit != is_commit:
            raise InvalidTxnState(f"the transaction is in state {known.state.title}")
        return known  # as the first request, it does not wait for the markers
    if known is not None and bumps_epoch:
        known = _check_not_completing(known, producer_id, producer_epoch)
    known = check_producer(known, producer_id, producer_epoch)
    if known.state is TransactionState.ONGOING:
        return _decide(known, is_commit=is_commit, bumps=bumps_epoch, new_id=new_producer_id, now_ms=now_ms)
    if bumps_epoch and not is_commit:
        # The producer does not know whether a partition was added. Nothing has to be written, but a late batch has to
        # be fenced.
        decided = _decide(known, is_commit=False, bumps=True, new_id=new_producer_id, now_ms=now_ms)
        return decided if decided.lacks_producer_id else complete(decided, now_ms=now_ms)
    if known.state is TransactionState.EMPTY or known.is_commit != is_commit or bumps_epoch:
        raise InvalidTxnState(f"the transaction is in state {known.state.title}")
    if known.is_prepared:
        raise ConcurrentTransactions("the transaction is being completed")
    return known


def _is_repeated_end(known: Transaction, producer_id: int, producer_epoch: int) -> bool:
    """Whether the last end with a bump of the epoch was requested by this producer and epoch."""
    return (
        known.client_version >= BUMPING_VERSION
        and (known.is_prepared or known.state in _COMPLETE)
        and _is_repeated(known, producer_id, producer_epoch)
    )


def _decide(known: Transaction, *, is_commit: bool, bumps: bool, new_id: int, now_ms: int) -> Transaction:
    decided = known._replace(
        state=TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT,
        updated_ms=now_ms,
        held_ms=NO_TIME,
        last_producer_epoch=known.producer_epoch if bumps else NO_EPOCH,
        client_version=BUMPING_VERSION if bumps else min(known.client_version, BUMPING_VERSION - 1),
    )
    if not bumps:
        return decided
    decided = decided._replace(producer_epoch=known.producer_epoch + 1)
    if known.is_epoch_exhausted:
        return decided._replace(next_producer_id=new_id, previous_producer_id=known.producer_id)
    return decided


def time_out(known: Transaction, *, now_ms: int) -> Transaction:
    """Return an ongoing transaction as aborted, with a bumped epoch, because its time is over."""
    return _fence(known, now_ms, may_repeat=False)


def _fence(known: Transaction, now_ms: int, *, may_repeat: bool) -> Transaction:
    """Abort with a bumped epoch. The end is not one that the producer requested, so it cannot repeat it. A transaction
    that is stored without a producer that may end it has the highest epoch already."""
    return known._replace(
        state=TransactionState.PREPARE_ABORT,
        updated_ms=now_ms,
        held_ms=NO_TIME,
        producer_epoch=min(known.producer_epoch + 1, PRODUCER_EPOCH_MAX),
        last_producer_epoch=known.producer_epoch if may_repeat else NO_EPOCH,
        client_version=0,
    )


def complete(known: Transaction, *, now_ms: int) -> Transaction:
    """Return a decided transaction whose partitions all have the marker."""
    producer_id, producer_epoch = known.current_producer
    return known._replace(
        state=TransactionState.COMPLETE_COMMIT if known.is_commit else TransactionState.COMPLETE_ABORT,
        partitions=frozenset(),
        updated_ms=now_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        next_producer_id=NO_ID,
    )


def is_expired(known: Transaction, *, expiration_ms: int, now_ms: int) -> bool:
    """Whether the transactional id has no transaction and was not used for `expiration_ms`."""
    return (
        known.state is not TransactionState.ONGOING
        and not known.is_prepared
        and now_ms - known.updated_ms >= expiration_ms
    )
