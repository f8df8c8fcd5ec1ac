"""Checker of transactions in simulated histories: what clients received, what readers of committed records saw, and
what the logs have in the end. Pure: it does no I/O and knows no broker.

* no aborted or intermediate read: a reader sees no record of a transaction before its commit was requested, and none
  that is not committed in the log in the end;
* no lost, doubled or fractured transaction: in the end all records of a transaction are committed once, in all its
  partitions, or none is; all, if its commit was acknowledged;
* no skipped record: a reader that has passed an offset has seen the committed record there;
* offsets and records commit together: the ranges of input that a group has consumed in committed transactions follow
  each other without gap and overlap, and the committed offset is the end of the last one;
* a zombie is fenced: no transaction is committed whose commit was requested after a later instance of its
  transactional id had been initialized;
* the last stable offset that one life of a broker reports to a reader does not decrease, and is at most the high
  watermark;
* no transaction is open in the end.

A record is known by its value, which one producer sends once, in one transaction, to one partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Consumed(NamedTuple):
    """Input of one partition that a transaction has consumed for a group: offsets in [first, end)."""

    group: str
    first: int
    end: int


class LoggedRecord(NamedTuple):
    """A record of a log. `is_committed`: None if its transaction has no marker; True without a transaction."""

    offset: int
    value: bytes
    is_committed: bool | None


class SentTransaction:
    """What a producer did in one transaction. `is_fenced`: its commit was requested by a zombie."""

    __slots__ = (
        "consumed",
        "instance",
        "is_acknowledged",
        "is_fenced",
        "is_requested",
        "name",
        "transactional_id",
        "values",
    )

    def __init__(self, name: str, transactional_id: str, instance: int) -> None:
        self.name = name
        self.transactional_id = transactional_id
        self.instance = instance
        self.values: dict[bytes, int] = {}
        """Partition of each record."""
        self.consumed: Consumed | None = None
        self.is_requested = self.is_acknowledged = self.is_fenced = False

    @property
    def reason_against(self) -> str:
        """Why the transaction must not be committed; empty if it may be."""
        if not self.is_requested:
            return "whose commit was not requested"
        return "of a zombie" if self.is_fenced else ""


class TransactionHistory:
    """See the module. `broken` is called with what is wrong, and raises."""

    def __init__(self, broken: Callable[[str], object]) -> None:
        self._broken = broken
        self.transactions: dict[str, SentTransaction] = {}
        self._of_value: dict[bytes, SentTransaction] = {}
        self._plain: dict[bytes, int] = {}
        self._plain_acknowledged: set[bytes] = set()
        self._instances: dict[str, int] = {}
        """Last initialized instance of each transactional id."""
        self._passes: list[tuple[str, int, int, int, tuple[int, ...]]] = []
        self._stable: dict[tuple[str, int], int] = {}
        self._committed_ends: dict[str, set[int]] = defaultdict(set)
        """Ends of the input of transactions whose commit was requested, by group."""
        self._offsets: dict[str, int] = {}
        """The last committed offset that was read, by group."""
        self._logs: dict[int, list[LoggedRecord]] = {}
        self.fenced_commits = self.records_read = self.offsets_read = 0

    # What producers do

    def send_plain(self, index: int, values: Sequence[bytes]) -> None:
        """Records without a transaction are sent."""
        self._plain.update(dict.fromkeys(values, index))

    def acknowledge_plain(self, values: Sequence[bytes]) -> None:
        self._plain_acknowledged.update(values)

    def initialize(self, transactional_id: str, instance: int) -> None:
        """An instance of a transactional id was initialized: its predecessors are zombies. Instances are numbered in
        the order in which they are initialized."""
        self._instances[transactional_id] = max(instance, self._instances.get(transactional_id, instance))

    def begin(self, name: str, transactional_id: str, instance: int) -> None:
        self.transactions[name] = SentTransaction(name, transactional_id, instance)

    def send(self, name: str, index: int, values: Sequence[bytes]) -> None:
        """Records of a transaction are sent."""
        transaction = self.transactions[name]
        for value in values:
            transaction.values[value] = index
            self._of_value[value] = transaction

    def send_offsets(self, name: str, consumed: Consumed) -> None:
        """The end of the consumed input is sent as an offset of the group, in the transaction."""
        self.transactions[name].consumed = consumed

    def is_zombie(self, transactional_id: str, instance: int) -> bool:
        """Whether a later instance was initialized."""
        return self._instances.get(transactional_id, instance) > instance

    def request_commit(self, name: str) -> None:
        """The producer is about to request the commit for the first time: everything was acknowledged."""
        transaction = self.transactions[name]
        transaction.is_requested = True
        transaction.is_fenced = self.is_zombie(transaction.transactional_id, transaction.instance)
        self.fenced_commits += transaction.is_fenced
        if transaction.consumed is not None and not transaction.is_fenced:
            self._committed_ends[transaction.consumed.group].add(transaction.consumed.end)

    def acknowledge_commit(self, name: str) -> None:
        transaction = self.transactions[name]
        transaction.is_acknowledged = True
        if transaction.is_fenced:
            self._broken(f"the commit of {name} was acknowledged, which is a transaction of a zombie")

    # What readers see

    def read(
        self, reader: str, index: int, first: int, end: int, records: Sequence[tuple[int, bytes]]
    ) -> None:
        """A reader of committed records has passed the offsets [first, end) of a partition and seen these records."""
        self.records_read += len(records)
        for offset, value in records:
            transaction = self._of_value.get(value)
            sent_to = self._plain.get(value) if transaction is None else transaction.values[value]
            if sent_to != index:
                self._broken(f"{reader} reads {value!r} at {index}/{offset}, which nobody sent there")
            elif transaction is not None and transaction.reason_against:
                self._broken(
                    f"{reader} reads {value!r} at {index}/{offset} of transaction {transaction.name},"
                    f" {transaction.reason_against}"
                )
        self._passes.append((reader, index, first, end, tuple(offset for offset, _ in records)))

    def read_stable_offset(self, where: str, index: int, offset: int, high_watermark: int) -> None:
        """A broker reports a last stable offset. `where`: the reader and this life of the broker."""
        if offset > high_watermark:
            self._broken(f"{where}: the last stable offset of {index} is {offset}, beyond {high_watermark}")
        before = self._stable.get((where, index), 0)
        if offset < before:
            self._broken(f"{where}: the last stable offset of {index} was {before} and is {offset}")
        self._stable[where, index] = offset

    def read_offset(self, group: str, offset: int, *, by: str) -> None:
        """A committed offset of a group was read; -1 for none."""
        self.offsets_read += 1
        before = self._offsets.get(group, -1)
        if offset < before:
            self._broken(f"{by}: the offset of {group} was {before} and is {offset}")
        if offset >= 0 and offset not in self._committed_ends[group]:
            self._broken(f"{by}: the offset of {group} is {offset}, and its commit was not requested")
        self._offsets[group] = offset

    # The end

    def add_log(self, index: int, records: Sequence[LoggedRecord]) -> None:
        """The whole log of a partition, as its leader has it in the end, without markers."""
        self._logs[index] = list(records)

    def finish(self) -> None:
        """Compare what was acknowledged and seen with the logs."""
        places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for index, records in self._logs.items():
            for one in records:
                if one.is_committed is None:
                    self._broken(f"{one.value!r} at {index}/{one.offset}: its transaction is open in the end")
                elif one.is_committed:
                    places[one.value].append((index, one.offset))
        for value, found in places.items():
            if len(found) > 1 and (value in self._of_value or value in self._plain_acknowledged):
                self._broken(f"{value!r} is there {len(found)} times, doubled: {found}")
        if lost := self._plain_acknowledged - places.keys():
            self._broken(f"{min(lost)!r} was acknowledged and is lost")
        for transaction in self.transactions.values():
            self._check_whole(transaction, places)
        self._check_passes()
        for group in sorted(self._committed_ends):
            self._check_offsets(group, places)

    def is_committed(self, transaction: SentTransaction, places: dict[bytes, list[tuple[int, int]]]) -> bool:
        return any(value in places for value in transaction.values)

    def _check_whole(self, transaction: SentTransaction, places: dict[bytes, list[tuple[int, int]]]) -> None:
        missing = [value for value in transaction.values if value not in places]
        name = f"transaction {transaction.name}"
        if self.is_committed(transaction, places):
            if missing:
                self._broken(f"{name} is fractured: {missing[0]!r} is not committed, others are")
            if transaction.reason_against:
                self._broken(f"{name}, {transaction.reason_against}, is committed")
        elif transaction.is_acknowledged and missing:
            self._broken(f"{name}: its commit was acknowledged, and it is lost")
        for value, found in ((value, places.get(value, ())) for value in transaction.values):
            if any(index != transaction.values[value] for index, _ in found):
                self._broken(f"{value!r} is at {found}, and was sent to {transaction.values[value]}")

    def _check_passes(self) -> None:
        committed = {
            index: [one.offset for one in records if one.is_committed]
            for index, records in self._logs.items()
        }
        for reader, index, first, end, seen in self._passes:
            offsets = committed[index]
            expected = offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]
            if list(seen) == expected:
                continue
            if extra := set(seen) - set(expected):
                self._broken(f"{reader} has read {index}/{min(extra)}, which is not committed (aborted read)")
            self._broken(
                f"{reader} has passed {index}/{min(set(expected) - set(seen))} without reading it (skipped)"
            )

    def _check_offsets(self, group: str, places: dict[bytes, list[tuple[int, int]]]) -> None:
        consumed = sorted(
            (one.consumed, one.name)
            for one in self.transactions.values()
            if one.consumed is not None and one.consumed.group == group and self.is_committed(one, places)
        )
        position = 0
        for (_, first, end), name in consumed:
            if first != position:
                what = "again" if first < position else f"without those from {position} on"
                self._broken(f"{name} consumed {first} to {end} for {group} {what}")
            position = end
        last = self._offsets.get(group, -1)
        if max(last, 0) != position:
            self._broken(
                f"the offset of {group} is {last}, and its committed transactions consumed up to {position}"
            )

    def numbers(self) -> dict[str, int]:
        """Counts of what was there."""
        requested = [one for one in self.transactions.values() if one.is_requested]
        return {
            "transactions": len(self.transactions),
            "commits requested": len(requested),
            "commits acknowledged": sum(one.is_acknowledged for one in requested),
            "commits of zombies": self.fenced_commits,
            "consumed": sum(one.is_acknowledged for one in requested if one.consumed is not None),
            "committed records read": self.records_read,
            "committed offsets read": self.offsets_read,
        }
