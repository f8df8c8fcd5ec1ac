"""Storage medium of a simulated disk: visible and durable content of files and names, and the effect of a crash.

Contains the files (`Inode`) and directories (`Directory`) of `disk`, and every random choice that a crash makes among
the changes that were not synced.

Invariants: synced content is in every crash image, unless changed since; `crashed` itself changes nothing. Changes of a
failed sync may or may not survive, until a covering change has been synced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

SECTOR_BYTES = 512


class Change(NamedTuple):
    """A write of `data` at `position`; or, with `data` None, a truncation to `position`."""

    position: int
    data: bytes | None


class Inode:
    """One file: its durable bytes, its visible bytes, and the changes between the two."""

    __slots__ = ("content", "doomed", "durable", "occupied", "pending")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.content = bytearray(durable)
        self.occupied = len(durable)  # bytes of the disk; holes occupy none
        self.pending: list[Change] = []
        self.doomed: list[Change] = []

    def change(self, change: Change) -> None:
        """Apply a change: visible at once, durable with the next sync."""
        _apply(self.content, change)
        position, data = change
        self.occupied = (
            min(self.occupied, position) if data is None else max(self.occupied, position + len(data))
        )
        self.pending.append(change)

    def sync(self) -> None:
        if not self.pending:
            return
        if self.doomed:
            content = bytearray(self.durable)
            for change in self.pending:
                _apply(content, change)
            self.durable = bytes(content)
            self.doomed = [old for old in self.doomed if not any(_covers(new, old) for new in self.pending)]
        else:
            self.durable = bytes(self.content)
        self.pending.clear()

    def sync_failed(self) -> None:
        """Mark the pending changes as doomed: they stay visible, and no later sync makes them durable."""
        self.doomed.extend(self.pending)
        self.pending.clear()

    def crashed(self, random: Random) -> bytes:
        """The bytes after a crash."""
        changes = self.doomed + self.pending
        mode = random.random() if changes else 0.0
        if mode < 0.2:
            return self.durable
        content = bytearray(self.durable)
        keep_first = random.randint(0, len(changes)) if mode < 0.5 else len(changes)
        for change in changes[:keep_first]:
            if mode >= 0.6 and random.random() < 0.4:
                continue
            torn = mode >= 0.5 and change.data is not None and random.random() < 0.5
            for piece in _sectors(change, random) if torn else (change,):
                _apply(content, piece)
        if changes and mode < 0.5 and keep_first < len(changes) and changes[keep_first].data is not None:
            for piece in _sectors(changes[keep_first], random):  # the write that was interrupted
                _apply(content, piece)
        return bytes(content)


def _covers(new: Change, old: Change) -> bool:
    """Whether a new change overwrites all effects of an old one.

    A file has one length: the newer one applies, and what was written beyond it is removed.
    """
    if new.data is None:
        return old.data is None or old.position >= new.position
    if old.data is None:
        return False
    return new.position <= old.position and old.position + len(old.data) <= new.position + len(new.data)


def _apply(content: bytearray, change: Change) -> None:
    position, data = change
    if data is None:
        if position <= len(content):
            del content[position:]
        else:
            content.extend(bytes(position - len(content)))
        return
    if position > len(content):
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _sectors(change: Change, random: Random) -> list[Change]:
    """A random choice of the sectors of a write."""
    position, data = change
    assert data is not None
    pieces = []
    at = 0
    while at < len(data):
        step = SECTOR_BYTES - (position + at) % SECTOR_BYTES
        if random.random() < 0.5:
            pieces.append(Change(position + at, data[at : at + step]))
        at += step
    return pieces


class Directory:
    """Durable names, visible names, and the changes between the two (each a dict name -> inode or None)."""

    __slots__ = ("durable", "entries", "pending")

    def __init__(self, durable: dict[str, Inode] | None = None) -> None:
        self.durable = durable or {}
        self.entries = dict(self.durable)
        self.pending: list[dict[str, Inode | None]] = []

    def change(self, names: dict[str, Inode | None]) -> None:
        """Add, remove or move names, atomically."""
        _rename(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def crashed(self, random: Random) -> dict[str, Inode]:
        """The names after a crash."""
        entries = dict(self.durable)
        mode = random.random()
        for names in self.pending:
            if mode < 0.2 or (mode < 0.8 and random.random() < 0.5):
                continue
            _rename(entries, names)
        return entries


def _rename(entries: dict[str, Inode], names: dict[str, Inode | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode
