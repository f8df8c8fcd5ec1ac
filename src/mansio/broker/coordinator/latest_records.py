"""Result of a replay of a compacted internal topic: the latest value of each key, and the pending records of
transactions.

Invariant: the order of the log decides. A record of a transaction becomes the value of its key with the commit of the
transaction, unless the key has a value from a later offset then. A deletion removes the pending records of its key,
because they are older.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.batch.end_marker import EndMarker


class _Transaction(NamedTuple):
    producer_epoch: int
    records: dict[bytes, tuple[bytes, int]]


class LatestRecords:
    """The latest records of a log, to which its records are added in order. `values`: value and offset of each key."""

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self._transactions: dict[int, _Transaction] = {}

    def add(self, key: bytes, value: bytes | None, offset: int) -> None:
        """Add a record outside of transactions; the value None deletes the key."""
        if value is not None:
            self.values[key] = (value, offset)
            return
        self.values.pop(key, None)
        for transaction in self._transactions.values():
            transaction.records.pop(key, None)

    def add_pending(
        self, producer_id: int, producer_epoch: int, key: bytes, value: bytes, offset: int
    ) -> None:
        """Add a record of a producer's open transaction."""
        transaction = self._transactions.get(producer_id)
        if transaction is None or transaction.producer_epoch != producer_epoch:
            records = {} if transaction is None else transaction.records
            transaction = self._transactions[producer_id] = _Transaction(producer_epoch, records)
        transaction.records[key] = (value, offset)

    def end(self, marker: EndMarker) -> None:
        """Commit or drop the pending records of a producer."""
        transaction = self._transactions.pop(marker.producer_id, None)
        if transaction is None or not marker.is_commit:
            return
        for key, (value, offset) in transaction.records.items():
            latest = self.values.get(key)
            if latest is None or latest[1] < offset:
                self.values[key] = (value, offset)

    def pending_records(self) -> Iterator[tuple[int, int, bytes, bytes, int]]:
        """Yield producer id, producer epoch, key, value and offset of each pending record."""
        for producer_id, transaction in self._transactions.items():
            for key, (value, offset) in transaction.records.items():
                yield producer_id, transaction.producer_epoch, key, value, offset
