"""State machine of a producer with a transactional id (Kafka's TransactionManager). It does no I/O; time is not in it.

    Uninitialized ──initialized──> Ready ──begin──> Open ──prepare──> Committing, Aborting ──ended──> Ready
                                                     └──fail──> Failed ──prepare(abort)──> Aborting

Where the coordinator bumps the epoch at each end (transaction version 2, KIP-890), a partition joins the transaction
with its first batch. With older brokers it has to be added first (AddPartitionsToTxn), and an abort leads to
Uninitialized: InitProducerId bumps the epoch, because the broker may lack sequence numbers (KIP-360).

Errors are divided as in KIP-1050: retriable errors do not get here; an abortable one fails the transaction, which can
only be aborted then, and after it the next one can begin; a fatal one (fenced) ends this producer.

Invariants:
* A batch or an offset is sent in states Open and Committing only, with the epoch of the transaction.
* After the first error of a transaction it is not committed.
* An end is decided by its answer only. If there is none, the next state is Uninitialized: InitProducerId with the last
  id and epoch aborts the transaction if it is still open, and fences it otherwise.
* Fenced is final.

Sources: KIP-98, KIP-360, KIP-890, KIP-1050.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from mansio.client.producer.accumulator import NO_IDENTITY, ProducerIdentity
from mansio.errors import InvalidProducerEpoch, InvalidTxnState, MansioError, ProducerFenced
from mansio.tracebacks import copied

BUMPING_VERSION: Final = 2
"""Level of the feature `transaction.version` from which each end of a transaction bumps the epoch (KIP-890)."""


class TransactionPhase(Enum):
    """State of a transactional producer."""

    UNINITIALIZED = auto()
    READY = auto()
    OPEN = auto()
    FAILED = auto()
    COMMITTING = auto()
    ABORTING = auto()
    FENCED = auto()


WRITABLE: Final = (TransactionPhase.OPEN, TransactionPhase.COMMITTING)
IN_TRANSACTION: Final = (*WRITABLE, TransactionPhase.FAILED, TransactionPhase.ABORTING)


class TransactionManager:
    """State of one transactional id in one client."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.phase: TransactionPhase = TransactionPhase.UNINITIALIZED
        self.identity: ProducerIdentity = NO_IDENTITY
        """Producer id and epoch; another object after each change."""
        self.bumps_epoch: bool = False
        """Whether each end bumps the epoch: transaction version 2."""
        self.error: MansioError | None = None
        """First error of the current transaction, or the fatal error."""
        self.partitions: set[tuple[str, int]] = set()
        """Partitions of the current transaction."""
        self.missing_partitions: set[tuple[str, int]] = set()
        """Partitions that have to be added before their batches can be sent."""
        self.groups: set[str] = set()
        """Groups whose offsets are in the current transaction."""

    @property
    def is_writable(self) -> bool:
        """Whether batches of the current transaction may be sent."""
        return self.phase in WRITABLE

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open or being ended, and can be aborted."""
        return self.phase in IN_TRANSACTION

    @property
    def is_begun(self) -> bool:
        """Whether the coordinator may know the current transaction, so that it has to be ended there."""
        return bool(self.partitions or self.missing_partitions or self.groups)

    # -- initialization --------

    def on_initialized(self, producer_id: int, producer_epoch: int, *, transaction_version: int) -> None:
        """Apply the response of InitProducerId. `transaction_version`: level of the feature `transaction.version`."""
        self._expect(TransactionPhase.UNINITIALIZED)
        self.identity = ProducerIdentity(producer_id, producer_epoch)
        self.bumps_epoch = transaction_version >= BUMPING_VERSION
        self._enter_ready()

    def require_initialization(self) -> None:
        """Initialize the producer again before the next transaction, for example because its timeout changed."""
        self._expect(TransactionPhase.READY)
        self.phase = TransactionPhase.UNINITIALIZED

    def forget_identity(self) -> None:
        """Initialize as a new producer next time. Only for a producer that knows that it was not replaced."""
        self.identity = NO_IDENTITY
        self.error = None
        self.phase = TransactionPhase.UNINITIALIZED

    # -- one transaction --------

    def begin(self) -> None:
        """Begin a transaction, locally. Raises `ProducerFenced`, `InvalidTxnState`."""
        if self.phase is TransactionPhase.FENCED:
            raise self._fenced_error()
        self._expect(TransactionPhase.READY)
        self.phase = TransactionPhase.OPEN

    def check_open(self) -> None:
        """Raise the first error of the current transaction, or `InvalidTxnState` if none is open."""
        if self.error is not None:
            raise type(self.error)(self.error.message)
        self._expect(TransactionPhase.OPEN)

    def add_partition(self, topic: str, partition: int) -> bool:
        """Note that a partition has a batch. Returns whether the batch may be sent now; otherwise the partition has to
        be added to the transaction first."""
        named = topic, partition
        if named in self.partitions:
            return True
        if self.bumps_epoch:
            self.partitions.add(named)
            return True
        self.missing_partitions.add(named)
        return False

    def on_partitions_added(self, added: set[tuple[str, int]]) -> None:
        """Apply a successful response of AddPartitionsToTxn."""
        self.missing_partitions -= added
        self.partitions |= added

    def add_group(self, group: str) -> bool:
        """Note that offsets of a group are sent. Returns whether the group has to be added to the transaction first
        (AddOffsetsToTxn)."""
        is_new = group not in self.groups
        self.groups.add(group)
        return is_new and not self.bumps_epoch

    def fail(self, error: MansioError) -> None:
        """Apply an error that is not retried: of a batch, of adding a partition or of offsets."""
        if isinstance(error, ProducerFenced | InvalidProducerEpoch) and self.phase in IN_TRANSACTION:
            self.fence()
        elif self.phase in WRITABLE:
            self.phase, self.error = TransactionPhase.FAILED, copied(error)

    def fence(self) -> None:
        """End this producer: another one has its transactional id."""
        self.phase = TransactionPhase.FENCED
        self.error = self._fenced_error()

    def prepare_end(self, *, is_commit: bool) -> bool:
        """Begin to end the transaction. Returns whether the coordinator has to be asked; if not, the transaction was
        empty and is over. Raises the first error of the transaction instead of a commit."""
        if is_commit:
            self.check_open()
        elif self.phase is TransactionPhase.FENCED:
            raise self._fenced_error()
        elif self.phase not in IN_TRANSACTION:
            raise InvalidTxnState(f"transactional id {self.transactional_id!r} has no open transaction")
        if self.is_begun:
            self.phase = TransactionPhase.COMMITTING if is_commit else TransactionPhase.ABORTING
            return True
        self._enter_ready()
        return False

    def cancel_commit(self) -> None:
        """Return from Committing, because the coordinator has certainly refused the commit; only an abort is possible
        then."""
        self._expect(TransactionPhase.COMMITTING)
        self.phase = TransactionPhase.FAILED

    def on_ended(self, producer_id: int, producer_epoch: int) -> None:
        """Apply the response of EndTxn: producer id and epoch of the next transaction, -1 without a bump."""
        was_abort = self.phase is TransactionPhase.ABORTING
        if not was_abort:
            self._expect(TransactionPhase.COMMITTING)
        needs_epoch = was_abort and not self.bumps_epoch
        if self.bumps_epoch and producer_id >= 0:
            self.identity = ProducerIdentity(producer_id, producer_epoch)
        self._enter_ready()
        if needs_epoch:
            self.phase = TransactionPhase.UNINITIALIZED

    def abandon(self) -> None:
        """Give up ending the transaction: whether the coordinator has ended it is not known. The next InitProducerId
        ends it."""
        if self.phase is not TransactionPhase.FENCED:
            self._enter_ready()
            self.phase = TransactionPhase.UNINITIALIZED

    # -- helpers --------

    def _enter_ready(self) -> None:
        self.phase, self.error = TransactionPhase.READY, None
        self.partitions, self.missing_partitions, self.groups = set(), set(), set()

    def _expect(self, phase: TransactionPhase) -> None:
        if self.phase is TransactionPhase.FENCED:
            raise self._fenced_error()
        if self.phase is not phase:
            raise InvalidTxnState(
                f"transactional id {self.transactional_id!r}: the producer is {self.phase.name.lower()}, "
                f"not {phase.name.lower()}"
            )

    def _fenced_error(self) -> ProducerFenced:
        return ProducerFenced(
            f"another producer with transactional id {self.transactional_id!r} has taken over; "
            "this one cannot write any more"
        )
