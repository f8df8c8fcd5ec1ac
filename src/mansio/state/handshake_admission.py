"""Admission of TLS handshakes: which of the accepted connections may begin its handshake, and which gives way.

A handshake costs about a millisecond of processor time, so that connections which arrive together would stop the event
loop. At most `running_max` handshakes run at a time. The other connections wait, and nothing is read from them. A
connection gets a place only after it has sent something (`mark_readable`), so that silent ones hold none. Places are
given to the addresses in turn, and to the connections of one address in the order in which they became readable.

Connections are counted by the address of the peer: an IPv4 address, or the first 64 bits of an IPv6 address, all of
which one host may use. A fixed limit for each address would exclude hosts that share one address, so what an address
may have depends on the others:

* While readable connections of other addresses wait, an address has at most `running_per_address_max` places.
* An address that waits alone leaves as many places free, so that a connection of another one begins at once.
* A handshake that has run for `place_ms` gives way to a readable connection that could begin in its place. What its
  peer has sent since does not count: a peer could send one byte at a time.
* When `waiting_max` connections wait, the one that has been silent for longest is closed, if that is `place_ms` or
  more; otherwise the newest of the address with the most waiting connections.

A connection has `handshake_ms` from the moment when it was accepted. It is closed when it has waited so long that less
than `place_ms` remains: a flood of connections that are about to expire would otherwise be given places at the rate at
which the processor can begin handshakes.

Invariants:
* A place is free only if no readable connection waits that may have it.
* Every event costs O(1), but for the choice of a handshake that gives way, which looks at the addresses at their limit
  (at most `running_max / running_per_address_max`); what is stored is bounded by the running and the waiting
  connections.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

C = TypeVar("C")

RUNNING_MAX: Final = 64
RUNNING_PER_ADDRESS_MAX: Final = 16
WAITING_MAX: Final = 4_096
HANDSHAKE_MS: Final = 5_000
PLACE_MS: Final = 1_000

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
    """Connections of one address. `waiting`: in the order of arrival; `readable`: those of them that have sent
    something, in this order; `running`: those that have a place, in the order in which they got it."""

    __slots__ = ("key", "readable", "running", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.waiting: OrderedDict[C, None] = OrderedDict()
        self.readable: OrderedDict[C, None] = OrderedDict()
        self.running: OrderedDict[C, None] = OrderedDict()


class HandshakeAdmission(Generic[C]):
    """Admission of the handshakes of all listeners of a broker. `C`: a hashable connection. Times are seconds of any
    clock that never goes back."""

    __slots__ = (
        "_addresses",
        "_addresses_by_waiting",
        "_alone_max",
        "_at_limit",
        "_handshake_s",
        "_most_waiting",
        "_place_s",
        "_running",
        "_running_max",
        "_running_per_address_max",
        "_silent",
        "_turns",
        "_wait_s",
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
        place_ms: int = PLACE_MS,
    ) -> None:
        self._running_max = running_max
        self._running_per_address_max = min(running_per_address_max, running_max)
        self._alone_max = running_max - self._running_per_address_max
        """Places of an address that waits alone."""
        self._waiting_max = waiting_max
        self._handshake_s = handshake_ms / 1000
        self._place_s = place_ms / 1000
        self._wait_s = max(self._handshake_s - self._place_s, 0)
        self._addresses: dict[str, _Address[C]] = {}
        """Addresses with a connection that runs or waits."""
        self._running: OrderedDict[C, tuple[_Address[C], float]] = OrderedDict()
        """Connection -> (address, time at which it gives way to others), in the order of these times."""
        self._waiting: OrderedDict[C, tuple[_Address[C], float]] = OrderedDict()
        """Connection -> (address, time until which it waits), in the order of arrival, which is that of these times."""
        self._silent: OrderedDict[C, float] = OrderedDict()
        """Waiting connection that has sent nothing -> time at which it gives way to others, in this order."""
        self._turns: OrderedDict[_Address[C], None] = OrderedDict()
        """Addresses that have a readable connection and fewer places than `running_per_address_max`, the next one
        first."""
        self._at_limit: OrderedDict[_Address[C], None] = OrderedDict()
        """The other addresses that have a readable connection."""
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
    def waiting(self) -> Iterable[C]:
        """The connections that wait, in the order of arrival."""
        return self._waiting

    @property
    def next_expiry(self) -> float | None:
        """Time at which `take_expired` returns the oldest waiting connection; None if none waits."""
        for _, expires_at in self._waiting.values():
            return expires_at
        return None

    def deadline_of(self, accepted_at: float) -> float:
        """Return the time at which the handshake of a connection has to be complete."""
        return accepted_at + self._handshake_s

    def add(self, connection: C, key: str, now: float) -> C | None:
        """Let an accepted connection of the address `key` (see `address_key`) wait for its first byte. Returns the
        connection that is to be closed because too many wait, which may be the new one."""
        address = self._addresses.get(key)
        if address is None:
            address = self._addresses[key] = _Address(key)
        address.waiting[connection] = None
        self._waiting[connection] = (address, now + self._wait_s)
        self._silent[connection] = now + self._place_s
        self._on_waiting_changed(address, len(address.waiting) - 1)
        if len(self._waiting) <= self._waiting_max:
            return None
        closed, gives_way_at = next(iter(self._silent.items()))
        if gives_way_at > now:
            most = next(reversed(self._addresses_by_waiting[self._most_waiting]))
            closed = next(reversed(most.waiting))
        self.discard(closed)
        return closed

    def mark_readable(self, connection: C) -> None:
        """Let a waiting connection that has sent something take part in the turns for a place."""
        del self._silent[connection]
        address, _ = self._waiting[connection]
        address.readable[connection] = None
        self._sort_in(address)

    def begin_next(self, now: float) -> C | None:
        """Give a place to the next connection and return it; None if no readable connection may begin now. The caller
        calls `end` when its handshake has ended."""
        if len(self._running) >= self._running_max:
            return None
        if self._turns:
            address = next(iter(self._turns))
        elif len(self._at_limit) == 1:
            address = next(iter(self._at_limit))
            if len(address.running) >= self._alone_max:
                return None
        else:
            return None
        connection = next(iter(address.readable))
        address.running[connection] = None
        self._running[connection] = (address, now + self._place_s)
        self.discard(connection)
        if address in self._turns:
            self._turns.move_to_end(address)
        return connection

    def end(self, connection: C) -> None:
        """Take the place of a connection whose handshake has ended."""
        address, _ = self._running.pop(connection)
        del address.running[connection]
        self._sort_in(address)
        self._forget_unused(address)

    def next_to_give_way(self) -> tuple[C, float] | None:
        """Return the running connection that gives way next to a readable one, which can then begin, and the time from
        which on it does; None if no readable connection waits for a place. Call it when `begin_next` has returned
        None."""
        alone = next(iter(self._at_limit)) if len(self._at_limit) == 1 else None
        if self._turns or (alone is not None and len(alone.running) < self._alone_max):
            connection, (_, gives_way_at) = next(
                iter(self._running.items())
            )  # all places are taken: any will do
            return connection, gives_way_at
        oldest: tuple[C, float] | None = None
        for address in self._at_limit:  # which need one of their own
            connection = next(iter(address.running))
            gives_way_at = self._running[connection][1]
            if oldest is None or gives_way_at < oldest[1]:
                oldest = connection, gives_way_at
        return oldest

    def renew_place(self, connection: C, now: float) -> None:
        """Let a running connection keep its place for as long as if it had just begun."""
        address, _ = self._running.pop(connection)
        self._running[connection] = (address, now + self._place_s)
        address.running.move_to_end(connection)

    def discard(self, connection: C) -> None:
        """Remove a connection that waits."""
        address, _ = self._waiting.pop(connection)
        del address.waiting[connection]
        self._silent.pop(connection, None)
        address.readable.pop(connection, None)
        self._on_waiting_changed(address, len(address.waiting) + 1)
        self._forget_unused(address)

    def take_expired(self, now: float) -> list[C]:
        """Remove and return the connections that have waited for too long, oldest first."""
        expired = []
        while self._waiting:
            connection, (_, expires_at) = next(iter(self._waiting.items()))
            if expires_at > now:
                break
            self.discard(connection)
            expired.append(connection)
        return expired

    def _forget_unused(self, address: _Address[C]) -> None:
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
        if not address.readable:
            self._turns.pop(address, None)
            self._at_limit.pop(address, None)
        elif len(address.running) < self._running_per_address_max:
            self._at_limit.pop(address, None)
            self._turns.setdefault(address, None)
        else:
            self._turns.pop(address, None)
            self._at_limit.setdefault(address, None)
