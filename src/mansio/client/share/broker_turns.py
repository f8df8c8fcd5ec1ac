"""Order in which a share consumer asks brokers for records, if it wants fewer records than there are brokers.

    has records ──── no record ────► empty
        ▲                              │
        └── records, or other brokers ─┘
            had `RECORDS_PER_TURN`

Only one broker is asked at a time, because each of several could lease a record.

Invariants:
* While a broker may have records, no fetch waits for records at another one.
* After `RECORDS_PER_TURN` records in a row from one broker all others are asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDS_PER_TURN: Final = 16


class BrokerTurns:
    """Turns of the brokers, by node id."""

    __slots__ = ("_count", "_empty", "_order")

    def __init__(self) -> None:
        self._order: dict[int, None] = {}
        """The brokers; the first one that is not empty is asked first."""
        self._empty: set[int] = set()
        """Brokers whose last answer had no records."""
        self._count = 0
        """Number of records that the first broker has given in a row."""

    def order(self, nodes: Iterable[int]) -> list[int]:
        """Return the brokers in the order in which they are asked."""
        wanted = dict.fromkeys(nodes)
        known = [node for node in self._order if node in wanted]
        self._order.update(wanted)
        return sorted(dict.fromkeys([*known, *wanted]), key=lambda node: node in self._empty)

    def may_wait(self, node: int, nodes: Iterable[int]) -> bool:
        """Whether a fetch may wait for records at a broker: none of the others may have any."""
        return all(other in self._empty for other in nodes if other != node)

    def on_answer(self, node: int, record_count: int) -> None:
        """Note the answer of a broker, with so many records."""
        if not record_count:
            self._empty.add(node)
            self._move_to_end(node)
            return
        self._empty.discard(node)
        if next(iter(self._order), node) != node:
            self._order = {node: None, **self._order}
            self._count = 0
        self._count += record_count
        if self._count >= RECORDS_PER_TURN:
            self._empty.clear()
            self._move_to_end(node)

    def _move_to_end(self, node: int) -> None:
        self._order.pop(node, None)
        self._order[node] = None
        self._count = 0
