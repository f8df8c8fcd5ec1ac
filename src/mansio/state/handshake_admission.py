"""Admission of TLS handshakes: which of the accepted connections may begin its handshake.

A handshake costs about a millisecond of processor time, so that connections which arrive together would stop the event
loop. At most `running_max` handshakes run at a time. The other connections wait, and nothing is read from them. Places
are given to the addresses in turn, and to the connections of one address in the order of their arrival.

Connections are counted by the address of the peer: an IPv4 address, or the first 64 bits of an IPv6 address, all of
which one host may use. A fixed limit for each address would exclude hosts that share one address, so what an address
may have depends on the others:

* While connections of other addresses wait, an address has at most `running_per_address_max` places.
* An address that waits alone leaves as many places free, so that a connection of another one begins at once.
* When `waiting_max` connections wait, the newest of the address with the most waiting connections is closed.

A connection has `handshake_ms` from the moment when it was accepted, including the time for which it waits.

Invariants:
* A place is free only if no connection waits that may have it.
* Every event costs O(1); what is stored is bounded by the running and the waiting connections.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final, Generic, TypeVar

C = TypeVar("C")

RUNNING_MAX: Final = 64
RUNNING_PER_ADDRESS_MAX: Final = 16
WAITING_MAX: Final = 4_096
HANDSHAKE_MS: Final = 5_000

_HOST_BITS: Final = 64
"""Bits of an IPv6 address that its host chooses."""


def address_key(host: str) -> str:
    """Return the text under which connections from `host` are counted.

    The same IPv4 address has one key, however the socket prints it (`::ffff:192.0.2.1`, RFC 4291). Text that is no
    address is its own key.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except AddressValueError:
        return host
    mapped = address.ipv4_mapped
    return str(
        IPv6Address(int(address) >> _HOST_BITS << _HOST_BITS) if mapped is None else IPv4Address(mapped)
    )


class _Address(Generic[C]):
    """Connections of one address: those that wait, oldest first, and the number of those that have a place."""

    __slots__ = ("key", "running", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.waiting: deque[C] = deque()
        self.running = 0


class HandshakeAdmission(Generic[C]):
    """Admission of the handshakes of one listener. `C`: a hashable connection. Times are seconds of any clock that
    never goes back."""

    __slots__ = (
        "_addresses",
        "_addresses_by_waiting",
        "_at_limit",
        "_handshake_s",
        "_most_waiting",
        "_running",
        "_running_max",
        "_running_per_address_max",
        "_turns",
        "_waiting",
        "_waiting_max",
    )

    def __init__(
        self,
        *,
        running_max: int = RUNNING_MAX,
        running_per_address_max: int = RUNNING_PER_ADDRESS_MAX,
        waiting_max: int = WAITING_MAX,
        handshake_ms: int = HANDSHAKE_MS,
    ) -> None:
        self._running_max = running_max
        self._running_per_address_max = min(running_per_address_max, running_max)
        self._waiting_max = waiting_max
        self._handshake_s = handshake_ms / 1000
        self._addresses: dict[str, _Address[C]] = {}
        """Addresses with a connection that runs or waits."""
        self._running: dict[C, _Address[C]] = {}
        self._waiting: OrderedDict[C, tuple[_Address[C], float]] = OrderedDict()
        """Connection -> (address, deadline), in the order of arrival, which is the order of the deadlines."""
        self._turns: OrderedDict[_Address[C], None] = OrderedDict()
        """Addresses that wait and have fewer places than `running_per_address_max`, the next one first."""
        self._at_limit: OrderedDict[_Address[C], None] = OrderedDict()
        """The other addresses that wait."""
        self._addresses_by_waiting: dict[int, OrderedDict[_Address[C], None]] = {}
        """Number of waiting connections -> addresses with so many."""
        self._most_waiting = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def next_deadline(self) -> float | None:
        """Time at which `take_expired` returns the oldest waiting connection; None if none waits."""
        for _, deadline in self._waiting.values():
            return deadline
        return None

    def deadline_of(self, accepted_at: float) -> float:
        """Return the time at which the handshake of a connection has to be complete."""
        return accepted_at + self._handshake_s

    def add(self, connection: C, key: str, now: float) -> C | None:
        """Queue an accepted connection of the address `key` (see `address_key`). Returns the connection that is to be
        closed because too many wait, which may be the new one."""
        address = self._addresses.get(key)
        if address is None:
            address = self._addresses[key] = _Address(key)
        address.waiting.append(connection)
        self._waiting[connection] = (address, self.deadline_of(now))
        self._on_waiting_changed(address, len(address.waiting) - 1)
        if len(self._waiting) <= self._waiting_max:
            return None
        most = next(reversed(self._addresses_by_waiting[self._most_waiting]))
        closed = most.waiting.pop()
        self._on_waiting_removed(closed, most)
        return closed

    def begin_next(self) -> C | None:
        """Give a place to the next connection and return it; None if no waiting connection may begin now. The caller
        calls `end` when its handshake has ended."""
        if len(self._running) >= self._running_max:
            return None
        if self._turns:
            address = next(iter(self._turns))
        elif len(self._at_limit) == 1:
            address = next(iter(self._at_limit))
            if address.running >= self._running_max - self._running_per_address_max:
                return None
        else:
            return None
        connection = address.waiting.popleft()
        address.running += 1
        self._running[connection] = address
        self._on_waiting_removed(connection, address)
        if address in self._turns:
            self._turns.move_to_end(address)
        return connection

    def end(self, connection: C) -> None:
        """Take the place of a connection whose handshake has ended."""
        address = self._running.pop(connection)
        address.running -= 1
        if address.waiting:
            self._sort_in(address)
        elif not address.running:
            del self._addresses[address.key]

    def take_expired(self, now: float) -> list[C]:
        """Remove and return the connections that have waited for their whole time, oldest first."""
        expired = []
        while self._waiting:
            connection, (address, deadline) = next(iter(self._waiting.items()))
            if deadline > now:
                break
            address.waiting.popleft()  # the oldest of all is the oldest of its address
            self._on_waiting_removed(connection, address)
            expired.append(connection)
        return expired

    def take_waiting(self) -> list[C]:
        """Remove and return all connections that wait, because the listener stops."""
        return self.take_expired(float("inf"))

    def _on_waiting_removed(self, connection: C, address: _Address[C]) -> None:
        del self._waiting[connection]
        self._on_waiting_changed(address, len(address.waiting) + 1)
        if not address.waiting and not address.running:
            del self._addresses[address.key]

    def _on_waiting_changed(self, address: _Address[C], before: int) -> None:
        """Move an address to the others with as many waiting connections; the number has changed by one."""
        by_waiting = self._addresses_by_waiting
        if before:
            same = by_waiting[before]
            del same[address]
            if not same:
                del by_waiting[before]
        count = len(address.waiting)
        if count:
            by_waiting.setdefault(count, OrderedDict())[address] = None
        if count > self._most_waiting or self._most_waiting not in by_waiting:
            self._most_waiting = count
        self._sort_in(address)

    def _sort_in(self, address: _Address[C]) -> None:
        """Keep an address in the queue in which it waits."""
        if not address.waiting:
            self._turns.pop(address, None)
            self._at_limit.pop(address, None)
        elif address.running < self._running_per_address_max:
            self._at_limit.pop(address, None)
            self._turns.setdefault(address, None)
        else:
            self._turns.pop(address, None)
            self._at_limit.setdefault(address, None)
