"""Decisions about the batches of queries: the part of the view of `__transaction_state` with their records.

Invariant: a decision changes only by a record of the log, so that the next leader of the partition has the same one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mansio.broker.coordinator.transaction.waiters import Waiters
from mansio.state.transactions.batch_decision import BatchDecision, TaskTransaction
from mansio.wire.internal_records.batch_decision_records import (
    DecisionValue,
    decode_decision_value,
    encode_decision_key,
    encode_decision_value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class DecisionEntry:
    """A query on the broker that decides about its batches. `waiters`: woken when the decision is settled or the
    entry is unloaded. `is_finishing`: a task ends the transactions. `ended`: those of the decision's
    transactions that it has ended."""

    __slots__ = ("decision", "ended", "index", "is_finishing", "query_id", "waiters")

    def __init__(self, query_id: str, index: int, decision: BatchDecision) -> None:
        self.query_id = query_id
        self.index = index
        self.decision = decision
        self.is_finishing = False
        self.ended: set[TaskTransaction] = set()
        self.waiters = Waiters()


class DecisionStore:
    """The decisions that this broker has loaded. `entries`: by query id."""

    def __init__(self) -> None:
        self.entries: dict[str, DecisionEntry] = {}
        self._by_partition: dict[int, dict[str, DecisionEntry]] = defaultdict(dict)

    def apply(self, index: int, query_id: str, value: bytes | None) -> None:
        """Apply a record of the log; None deletes the query."""
        entry = self.entries.get(query_id)
        if value is None:
            if entry is not None:
                self._remove(entry)
            return
        found = decode_decision_value(value)
        decision = BatchDecision(
            found.batch_id,
            tuple(TaskTransaction(*each) for each in found.transactions),
            found.updated_ms,
            tuple(TaskTransaction(*each) for each in found.aborting),
        )
        if entry is None:
            entry = DecisionEntry(query_id, index, decision)
            self.entries[query_id] = self._by_partition[index][query_id] = entry
        entry.decision = decision
        if decision.is_settled:
            entry.ended.clear()
            entry.waiters.wake()

    def snapshot(self, index: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the records of the queries of a partition."""
        entries = self._by_partition[index]
        for query_id in list(entries):
            if query_id in entries:
                yield to_record(query_id, entries[query_id].decision)

    def of_partition(self, index: int) -> list[DecisionEntry]:
        """Return the queries of a partition."""
        return list(self._by_partition[index].values())

    def unload(self, index: int) -> None:
        """Remove the queries of a partition."""
        for entry in list(self._by_partition.pop(index, {}).values()):
            self._remove(entry)

    def _remove(self, entry: DecisionEntry) -> None:
        self.entries.pop(entry.query_id, None)
        if entry.index in self._by_partition:
            self._by_partition[entry.index].pop(entry.query_id, None)
        entry.waiters.wake()


def to_record(query_id: str, decision: BatchDecision) -> tuple[bytes, bytes]:
    """Return key and value of the record of a decision."""
    value = DecisionValue(decision.batch_id, decision.updated_ms, decision.transactions, decision.aborting)
    return encode_decision_key(query_id), encode_decision_value(value)
