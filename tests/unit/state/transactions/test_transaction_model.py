"""The state machine of one transactional id against a simple model, with producers that repeat requests, producers that
another one has replaced, timeouts, and epochs close to their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mansio.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTxnState,
    MansioError,
    ProducerFenced,
    TransactionAbortable,
)
from mansio.state.transactions import transaction as machine
from mansio.state.transactions.transaction import Transaction, TransactionState
from mansio.wire.field_values import PRODUCER_EPOCH_MAX
from support.tiers import examples

if TYPE_CHECKING:
    from random import Random

PARTITIONS = [("a", 0), ("a", 1), ("b", 0)]
RENEWAL_MS = 5_000
"""Time after which a held transaction is held anew."""
FENCED = (ProducerFenced, InvalidProducerIdMapping)
State = TransactionState


@dataclass
class Producer:
    """A client with the producer id and epoch that it knows. `version`: its transaction version."""

    version: int
    identity: tuple[int, int]
    last_end: tuple[tuple[int, int], bool, tuple[int, int]] | None = None


@dataclass
class Model:
    """What must be true: who may write, and what was decided."""

    owner: Producer | None = None
    phase: str = "idle"  # idle, open, deciding
    added: set[tuple[str, int]] = field(default_factory=set)
    is_commit: bool = False
    is_held: bool = False


class TransactionModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.known: Transaction | None = None
        self.model = Model()
        self.producers: list[Producer] = []
        self.replaced: list[Producer] = []
        self.new_ids = 100
        self.now_ms = 0
        self.given: set[tuple[int, int]] = set()

    def new_id(self) -> int:
        self.new_ids += 1
        return self.new_ids

    @initialize(
        epoch=st.sampled_from([0, PRODUCER_EPOCH_MAX - 6, PRODUCER_EPOCH_MAX - 2, PRODUCER_EPOCH_MAX - 1])
    )
    def begin_at(self, epoch: int) -> None:
        if epoch:
            self.known = Transaction(99, epoch, 1000, updated_ms=0)

    def _initialize(self, producer_id: int, epoch: int) -> Transaction:
        return machine.initialize(
            self.known,
            timeout_ms=1000,
            producer_id=producer_id,
            producer_epoch=epoch,
            new_producer_id=self.new_id(),
            now_ms=self.now_ms,
        )

    @rule(version=st.sampled_from([1, 2]))
    def a_new_producer_replaces_the_current_one(self, version: int) -> None:
        try:
            found = self._initialize(-1, -1)
        except ConcurrentTransactions:
            assert self.model.phase == "deciding" or self.model.is_held
            return
        assert not self.model.is_held, "a held transaction was aborted"
        if self.model.phase == "open":
            assert found.state is State.PREPARE_ABORT
            self._replace_owner(None)
            self.model.phase, self.model.is_commit = "deciding", False
        else:
            assert self.model.phase == "idle"
            assert found.state is State.EMPTY
            self._given_once((found.producer_id, found.producer_epoch))
            self._replace_owner(Producer(version, (found.producer_id, found.producer_epoch)))
        self.known = found

    @precondition(lambda self: self.model.owner is not None)
    @rule(is_answer_lost=st.booleans())
    def the_producer_bumps_its_epoch_after_an_error(self, is_answer_lost: bool) -> None:
        owner = self.model.owner
        assert owner is not None
        before = self.model.phase
        try:
            found = self._initialize(*owner.identity)
        except ConcurrentTransactions:
            assert before == "deciding" or self.model.is_held
            return
        assert not self.model.is_held, "a held transaction was aborted"
        if before == "open":
            assert found.state is State.PREPARE_ABORT
            self.model.phase, self.model.is_commit = "deciding", False
            self.known = found
            found = machine.complete(found, now_ms=self.now_ms)
            self.model.phase = "idle"
            self.model.added.clear()
            self.known = found
            found = self._initialize(*owner.identity)
        self.known = found
        identity = found.current_producer
        if is_answer_lost:
            repeated = self._initialize(*owner.identity)
            assert repeated.current_producer == identity
            self.known = repeated
        self.given.add(identity)
        owner.identity, owner.last_end = identity, None

    @precondition(lambda self: self.model.owner is not None)
    @rule(wanted=st.sets(st.sampled_from(PARTITIONS), min_size=1))
    def the_producer_adds_partitions(self, wanted: set[tuple[str, int]]) -> None:
        owner = self.model.owner
        assert owner is not None
        try:
            self.known = machine.add_partitions(
                self.known, *owner.identity, wanted, client_version=owner.version, now_ms=self.now_ms
            )
        except ConcurrentTransactions:
            assert self.model.phase == "deciding"
            return
        except InvalidTxnState:
            assert self.model.is_held
            assert not wanted <= self.model.added
            return
        assert not self.model.is_held or wanted <= self.model.added
        assert self.model.phase in ("idle", "open")
        self.model.added |= wanted
        self.model.phase = "open"
        owner.last_end = None

    @precondition(lambda self: self.model.owner is not None)
    @rule(is_repeated=st.booleans())
    def the_transaction_is_held(self, is_repeated: bool) -> None:
        owner = self.model.owner
        assert owner is not None
        try:
            self.known = machine.hold(self.known, *owner.identity, now_ms=self.now_ms, renewal_ms=RENEWAL_MS)
        except ConcurrentTransactions:
            assert self.model.phase == "deciding"
            return
        except InvalidTxnState:
            assert self.model.phase == "idle"
            return
        assert self.model.phase == "open"
        self.model.is_held = True
        if is_repeated:
            held = self.known
            for passed_ms, since_ms in ((RENEWAL_MS - 1, 0), (RENEWAL_MS, RENEWAL_MS)):
                now_ms = held.held_ms + passed_ms
                again = machine.hold(held, *owner.identity, now_ms=now_ms, renewal_ms=RENEWAL_MS)
                assert again.held_ms == held.held_ms + since_ms
                assert since_ms or again is held

    @precondition(lambda self: self.model.owner is not None)
    @rule()
    def the_producer_verifies_partitions(self) -> None:
        owner = self.model.owner
        assert owner is not None
        try:
            found = machine.verify_partitions(self.known, *owner.identity, PARTITIONS)
        except ConcurrentTransactions:
            assert self.model.phase == "deciding"
            return
        for partition, error in zip(PARTITIONS, found, strict=True):
            is_in = self.model.phase == "open" and partition in self.model.added
            assert (error is None) == is_in
            assert error is None or isinstance(error, TransactionAbortable)

    def _end(self, identity: tuple[int, int], is_commit: bool, bumps: bool) -> Transaction:
        return machine.end(
            self.known,
            *identity,
            is_commit=is_commit,
            bumps_epoch=bumps,
            new_producer_id=self.new_id(),
            now_ms=self.now_ms,
        )

    @precondition(lambda self: self.model.owner is not None)
    @rule(is_commit=st.booleans())
    def the_producer_ends_its_transaction(self, is_commit: bool) -> None:
        owner = self.model.owner
        assert owner is not None
        bumps = owner.version == 2
        asked = owner.identity
        try:
            found = self._end(asked, is_commit, bumps)
        except ConcurrentTransactions:
            assert self.model.phase == "deciding"
            return
        except InvalidTxnState:
            is_other_decision = not bumps and is_commit != self.model.is_commit
            assert self.model.phase == "idle" or is_other_decision
            return
        if self.model.phase == "open":
            assert found.is_prepared
            assert found.is_commit == is_commit
            assert found.partitions == self.model.added
            self._check_marker(found)
            self.model.phase, self.model.is_commit = "deciding", is_commit
        else:
            assert self.model.phase == "idle"
            assert not found.is_commit or not bumps, "nothing was committed twice"
        self.known = found
        if bumps:
            assert found.current_producer != asked
            self._given_once(found.current_producer)
            owner.identity = found.current_producer
            owner.last_end = (asked, found.is_commit, found.current_producer)

    def _check_marker(self, decided: Transaction) -> None:
        """The marker reaches the transaction's batches and is not below an epoch that a producer has got."""
        assert self.known is not None
        assert decided.producer_id == self.known.producer_id
        assert decided.producer_epoch >= self.known.producer_epoch
        given = [epoch for producer_id, epoch in self.given if producer_id == decided.producer_id]
        assert decided.producer_epoch >= max(given, default=0)

    def _given_once(self, identity: tuple[int, int]) -> None:
        assert identity not in self.given, "two producers, or two transactions, have the same epoch"
        assert identity[1] < PRODUCER_EPOCH_MAX
        self.given.add(identity)

    @precondition(lambda self: self.model.owner is not None and self.model.owner.last_end is not None)
    @rule(is_commit=st.booleans())
    def a_repeated_end_has_the_same_answer_and_changes_nothing(self, is_commit: bool) -> None:
        owner = self.model.owner
        assert owner is not None
        assert owner.last_end is not None
        asked, was_commit, answer = owner.last_end
        before = self.known
        try:
            found = self._end(asked, is_commit, bumps=True)
        except ConcurrentTransactions:
            assert self.model.phase == "deciding"
            assert is_commit == was_commit
        except InvalidTxnState:
            assert is_commit != was_commit
        else:
            assert is_commit == was_commit
            assert found is before
            assert found.current_producer == answer

    @precondition(lambda self: self.model.phase == "open")
    @rule()
    def the_transaction_times_out(self) -> None:
        assert self.known is not None
        timed_out = machine.time_out(self.known, now_ms=self.now_ms)
        self._check_marker(timed_out)
        self.known = timed_out
        self.model.phase, self.model.is_commit = "deciding", False
        self._replace_owner(None)

    @precondition(lambda self: self.model.phase == "deciding")
    @rule()
    def all_markers_are_written(self) -> None:
        assert self.known is not None
        self.known = machine.complete(self.known, now_ms=self.now_ms)
        self.model.phase = "idle"
        self.model.added.clear()
        expected = State.COMPLETE_COMMIT if self.model.is_commit else State.COMPLETE_ABORT
        assert self.known.state is expected

    def _replace_owner(self, producer: Producer | None) -> None:
        if self.model.owner is not None:
            self.replaced.append(self.model.owner)
        self.model.owner = producer

    @precondition(lambda self: self.replaced)
    @rule(which=st.randoms(use_true_random=False), is_commit=st.booleans(), request=st.integers(0, 4))
    def a_replaced_producer_changes_nothing(self, which: Random, is_commit: bool, request: int) -> None:
        producer = which.choice(self.replaced)
        number, epoch = producer.identity
        outcome: MansioError | None = None
        try:
            if request == 4:
                machine.hold(self.known, *producer.identity, now_ms=self.now_ms, renewal_ms=RENEWAL_MS)
            elif request == 0:
                self._end(producer.identity, is_commit, producer.version == 2)
            elif request == 1:
                machine.add_partitions(
                    self.known, number, epoch, PARTITIONS, client_version=2, now_ms=self.now_ms
                )
            elif request == 2:
                machine.verify_partitions(self.known, number, epoch, PARTITIONS)
            else:
                self._initialize(*producer.identity)
        except MansioError as error:
            outcome = error
        assert isinstance(outcome, FENCED), outcome

    @invariant()
    def the_state_is_that_of_the_model(self) -> None:
        if self.known is None:
            return
        if self.model.phase != "open":
            self.model.is_held = False
        assert self.known.is_held == self.model.is_held
        assert not self.known.lacks_producer_id
        assert self.known.producer_epoch <= PRODUCER_EPOCH_MAX
        assert (self.known.state is State.ONGOING) == (self.model.phase == "open")
        assert self.known.is_prepared == (self.model.phase == "deciding")
        if self.model.phase == "deciding":
            assert self.known.is_commit == self.model.is_commit, "a decision never changes"
        if self.model.phase != "idle":
            assert self.known.partitions == self.model.added


TransactionModel.TestCase.settings = settings(max_examples=examples(30, 500), stateful_step_count=30)
TestTransactionModel = TransactionModel.TestCase


def test_nothing_is_aborted_without_the_producer_id_that_an_exhausted_epoch_needs() -> None:
    last_epoch = PRODUCER_EPOCH_MAX - 1
    found = machine.end(
        Transaction(42, last_epoch, 1000, client_version=2),
        42,
        last_epoch,
        is_commit=False,
        bumps_epoch=True,
        new_producer_id=machine.NO_ID,
        now_ms=2,
    )
    assert found.lacks_producer_id
