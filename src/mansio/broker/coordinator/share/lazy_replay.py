"""What a load of share states reads, unread until it is known to count: a snapshot makes all before it void.

A state is written anew every few hundred updates and the log goes back further than that, so most of what a load meets
is void by its end. Taking a record in costs more than finding it.

Always true: what is put off is taken in before anybody asks for the state, in the order of the log; no more than
`BYTES_MAX` are put off, because all of it is taken in during one turn of the loop: where there is more, what comes is
taken in at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.state_records import SNAPSHOT, decode_value

if TYPE_CHECKING:
    from mansio.broker.coordinator.share.persisted_state import PersistedShareState
    from mansio.state.share_partition.types import ShareKey

BYTES_MAX: Final = 512 * 1024
"""Some 6,000 updates, which take a fifth of a second."""


class _DeferredRecords:
    """The last snapshot of a share partition, where that is, and the updates after it."""

    __slots__ = ("offset", "share", "size_bytes", "values")

    def __init__(self, share: PersistedShareState, offset: int) -> None:
        self.share = share
        self.offset = offset
        self.values: list[tuple[int, bytes]] = []
        self.size_bytes = 0


class LazyReplay:
    """See the module. Of one partition of the topic, while it is loaded."""

    def __init__(self) -> None:
        self._unread: dict[ShareKey, _DeferredRecords] = {}
        self._size_bytes = 0

    def add(self, kind: int, share: PersistedShareState, value: bytes, offset: int, now_ms: float) -> None:
        """A record is in the log. Raises `CorruptLog`."""
        if kind == SNAPSHOT:
            self.drop(share.key)
        unread = self._unread.get(share.key)
        if unread is None:
            unread = self._unread[share.key] = _DeferredRecords(share, offset)
        unread.values.append((kind, value))
        unread.size_bytes += len(value)
        self._size_bytes += len(value)
        if self._size_bytes > BYTES_MAX:
            self.drop(share.key)
            _replay(unread, now_ms)

    def drop(self, key: ShareKey) -> None:
        """What there is of it is void."""
        unread = self._unread.pop(key, None)
        if unread is not None:
            self._size_bytes -= unread.size_bytes

    def replay(self, now_ms: float) -> None:
        """The states are what the log says. Raises `CorruptLog`."""
        unread, self._unread, self._size_bytes = self._unread, {}, 0
        for each in unread.values():
            _replay(each, now_ms)


def _replay(unread: _DeferredRecords, now_ms: float) -> None:
    share = unread.share
    for kind, value in unread.values:
        stored = decode_value(kind, value)
        if kind == SNAPSHOT:
            share.apply_snapshot(stored, unread.offset, now_ms)
        else:
            share.apply_update(stored)
