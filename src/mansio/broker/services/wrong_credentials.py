"""Wrong credentials by address: an address from which `WRONG_PER_S_MAX` of them came within a second has to wait.

A wrong credential costs the broker a check. Whoever checks credentials of one kind asks before each check that is not
answered from memory, so that clients with remembered credentials do not wait behind the same address.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, IPv6Network
from typing import TYPE_CHECKING, Final

from mansio.state.authentication.outcomes import Refused

if TYPE_CHECKING:
    from mansio.ports import Clock

WRONG_PER_S_MAX: Final = 10
"""Number of wrong credentials in a second after which an address has to wait."""

ADDRESSES_MAX: Final = 10_000
"""Maximum number of addresses whose wrong credentials are counted."""

TOO_MANY_WRONG: Final = "too_many_wrong"
"""Reason of a `Refused`."""


class WrongCredentials:
    """Counts wrong credentials of one kind by address. All methods run on the broker's event loop."""

    __slots__ = ("_buckets", "_clock")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def refuse(self, address: str) -> Refused | None:
        """Return the outcome of a check for a client at an address that has to wait; None if the check may run."""
        bucket = self._buckets.get(network_of(address))
        if bucket is not None and bucket.level(self._clock.monotonic()) >= WRONG_PER_S_MAX:
            return Refused(TOO_MANY_WRONG)
        return None

    def count(self, address: str) -> None:
        """Count a wrong credential."""
        network, now_s = network_of(address), self._clock.monotonic()
        bucket = self._buckets.setdefault(network, _Bucket(now_s))
        bucket.add(now_s)
        self._buckets.move_to_end(network)
        if len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)


def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits, all of which a client usually has."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Network((int(parsed), 64), strict=False))


class _Bucket:
    """Wrong credentials of one address: a level that falls by `WRONG_PER_S_MAX` in a second."""

    __slots__ = ("_at_s", "_level")

    def __init__(self, now_s: float) -> None:
        self._level = 0.0
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the level at a time in monotonic seconds."""
        return max(0.0, self._level - (now_s - self._at_s) * WRONG_PER_S_MAX)

    def add(self, now_s: float) -> None:
        """Count one wrong credential."""
        self._level = self.level(now_s) + 1
        self._at_s = now_s
