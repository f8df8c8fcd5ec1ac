"""Checker of simulated histories: the guarantees of docs/reference/guarantees.md, as clients can observe them.

* an acknowledged record is there, where it was said to be (lost writes);
* one record per offset, for ever, among all that anybody read or was told (conflicting offsets);
* what was below a high watermark that anybody saw is there for ever (taken back);
* a reader gets offset after offset, none left out (skipped, non-monotonic);
* a record of an idempotent producer is there once (duplicates);
* committed offsets of groups are kept (`clients.Committer`).

Always true: a promise that is broken ends the run at once.
"""

from __future__ import annotations

from typing import NoReturn


class Broken(AssertionError):
    """A promise is broken."""


class Checker:
    """See the module. Partitions by index, records by value: every value is sent by one producer, for one place."""

    def __init__(self) -> None:
        self.reported: dict[tuple[int, int], tuple[bytes, str]] = {}
        """What is at an offset, and who said so first."""
        self.acks: dict[tuple[int, int], bytes] = {}
        self.once: dict[bytes, int] = {}
        """Values of idempotent producers, and the offset where they were seen; -1: nowhere yet."""
        self.values: dict[bytes, int] = {}
        self.high_watermarks: dict[int, int] = {}
        self.producer_ids: set[int] = set()
        self.records_read = 0
        self.first: Broken | None = None

    def broken(self, how: str) -> NoReturn:
        """Raise it, and keep it: what raises this may be called by code that catches all exceptions."""
        self.first = self.first or Broken(how)
        raise self.first

    def sent(self, index: int, values: list[bytes], *, once: bool) -> None:
        for value in values:
            self.values[value] = index
            if once:
                self.once.setdefault(value, -1)

    def acknowledged(self, index: int, base_offset: int, values: list[bytes], *, where: int) -> None:
        """acks=all came back."""
        for offset, value in enumerate(values, base_offset):
            self._reported(index, offset, value, f"the acknowledgement of broker {where}")
            self.acks[index, offset] = value

    def read(self, index: int, offset: int, value: bytes, *, by: str) -> None:
        """A client read this."""
        self.records_read += 1
        self._reported(index, offset, value, by)

    def high_watermark(self, index: int, offset: int) -> None:
        """A client received that everything below is committed."""
        if offset > self.high_watermarks.get(index, 0):
            self.high_watermarks[index] = offset

    def _reported(self, index: int, offset: int, value: bytes, by: str) -> None:
        known, first = self.reported.setdefault((index, offset), (value, by))
        if known != value:
            self.broken(f"{index}/{offset} is {known!r} by {first}, and {value!r} by {by}")
        if self.values.get(value) != index:
            self.broken(f"{index}/{offset} is {value!r}, which nobody sent there, by {by}")
        if value in self.once:
            before = self.once[value]
            if before not in (-1, offset):
                self.broken(f"{value!r} is at {before} and at {offset} of partition {index}, by {by}")
            self.once[value] = offset

    def finish(self, index: int, records: list[bytes]) -> None:
        """This is the whole partition, as its leader has it in the end."""
        for offset, value in enumerate(records):
            self._reported(index, offset, value, "the end")
        for (at, offset), value in self.acks.items():
            if at == index and records[offset : offset + 1] != [value]:
                self.broken(f"{value!r} was acknowledged at {index}/{offset} and is lost")
        for (at, offset), (value, by) in self.reported.items():
            if at == index and offset >= len(records):
                self.broken(f"{value!r} at {index}/{offset}, known by {by}, is gone")
        if self.high_watermarks.get(index, 0) > len(records):
            self.broken(
                f"partition {index} was committed up to {self.high_watermarks[index]}, and ends at {len(records)}"
            )
