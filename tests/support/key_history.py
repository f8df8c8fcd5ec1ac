"""Checker of deliveries in order by key: what the members of one share group received, compared with what must never
happen.

* A record that was accepted, and whose acknowledgement was answered, is not delivered again.
* No member gets a record while another one has an earlier one of its key, and no record is delivered twice with one
  delivery count.
* The first deliveries of a key are in the order of the offsets, and so are the records of a key in one answer.
* After a restart, a lease has the duration that its member has chosen last.
* Each record whose publication was answered is accepted by somebody.

With a limit by key and without order, instead of the rules about the order of a key:
* No more records of a key are leased at once than the limit.

What is not known for sure is taken in the broker's favour: a member has a record from the moment at which it sees it
until it ends the lease, or until the lease ends by its own clock. A lease begins at the broker, before the member
receives the answer: `delay_s` is how late an answer received at a time can have been, because a disk or a process stood
still.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.client import Leased
    from mansio.client.admin.shares import LeasedRange


class Delivery(NamedTuple):
    """One delivery of one record."""

    partition: int
    offset: int
    delivery_count: int


class Hold(NamedTuple):
    """A record that a member has, surely until `until_s` (of the monotonic clock) if its connection lasts."""

    name: str
    message: Leased
    until_s: float


def delivery_of(message: Leased) -> Delivery:
    return Delivery(message.partition, message.offset, message.delivery_count)


class KeyHistory:
    """Of one group and one topic, with keys that are in one partition only. Every method raises `AssertionError` when
    it is told what may not be."""

    def __init__(
        self, delay_s: Callable[[float], float] = lambda received_s: 0.0, leases_max: int | None = None
    ) -> None:
        """`leases_max`: the limit of leased records of a key; None for order by key."""
        self._delay_s = delay_s
        self._leases_max = leases_max
        self.published: dict[bytes, None] = {}
        """Values whose publication was answered."""
        self.sent_accepts: set[bytes] = set()
        """Values whose acceptance was sent."""
        self.accepted: dict[tuple[int, int], int] = {}
        """Partition and offset -> delivery count whose acceptance was answered."""
        self._deliveries: dict[Delivery, set[int]] = {}
        """Durations in milliseconds that the lease of each delivery may have."""
        self._members: dict[Delivery, str] = {}
        self._extended_until_s: dict[Delivery, float] = {}
        """The earliest end of each lease that a member has asked to extend."""
        self._holds: defaultdict[bytes, dict[Delivery, Hold]] = defaultdict(dict)
        self._newest: dict[bytes, int] = {}
        """The highest offset of each key that was delivered."""
        self._seen: set[tuple[int, int]] = set()
        self._numbers: Counter[str] = Counter()

    def take(self, name: str, member_id: str, messages: Sequence[Leased], lease_ms: int) -> None:
        """`messages` were given to a member, in this order. `name`: of the receiver."""
        now_s = time.monotonic()
        latest: dict[bytes, int] = {}
        for message in messages:
            key, delivery = message.key or b"", delivery_of(message)
            what = f"{delivery} of key {key!r} was given to {name}"
            place = delivery[:2]
            assert place not in self.accepted, f"{what}, accepted in delivery {self.accepted[place]}"
            assert delivery not in self._deliveries, f"{what}, and before to somebody else"
            if self._leases_max is None:
                assert latest.get(key, -1) < message.offset, f"{what} after {latest.get(key)} in one answer"
                latest[key] = message.offset
                self._check_order(name, message, now_s, what)
            self._numbers["delivered again"] += place in self._seen
            self._seen.add(place)
            self._deliveries[delivery] = {lease_ms}
            self._members[delivery] = member_id
        for message in messages:
            until_s = self._surely_until(message, lease_ms)
            self._holds[message.key or b""][delivery_of(message)] = Hold(name, message, until_s)
        self._numbers["delivered"] += len(messages)
        if self._leases_max is not None:
            self._check_limit(messages, now_s, self._leases_max)

    def _check_order(self, name: str, message: Leased, now_s: float, what: str) -> None:
        key = message.key or b""
        for other, hold in self._holds[key].items():
            is_held = hold.until_s > now_s and not hold.message.is_lost
            if hold.name != name and other.offset < message.offset and is_held:
                left_ms = (hold.until_s - now_s) * 1000
                raise AssertionError(f"{what}; {hold.name} has {other} for {left_ms:.0f} ms more")
        if delivery_of(message)[:2] not in self._seen:
            newest = self._newest.get(key, -1)
            assert newest < message.offset, f"{what} for the first time, after offset {newest}"
            self._newest[key] = message.offset

    def _check_limit(self, messages: Sequence[Leased], now_s: float, leases_max: int) -> None:
        """The new messages are among those that are held."""
        for key in {message.key or b"" for message in messages}:
            held = [
                (hold.name, delivery)
                for delivery, hold in self._holds[key].items()
                if hold.until_s > now_s and not hold.message.is_lost
            ]
            assert len(held) <= leases_max, (
                f"more records of key {key!r} are leased than {leases_max}: {held}"
            )
            self._numbers["at the limit"] += len(held) == leases_max

    def extend(self, message: Leased, lease_ms: int) -> None:
        """The member is about to extend the lease: it has the old duration or the new one until the answer."""
        delivery = delivery_of(message)
        self._deliveries[delivery].add(lease_ms)
        self._extended_until_s[delivery] = until_s = time.monotonic() + lease_ms / 1000
        holds = self._holds[message.key or b""]
        if (hold := holds.get(delivery)) is not None:
            holds[delivery] = hold._replace(until_s=min(hold.until_s, until_s))

    def extended(self, message: Leased, lease_ms: int) -> None:
        """The broker has answered that the lease is extended: by the whole duration, from the request on or later."""
        delivery = delivery_of(message)
        self._deliveries[delivery] = {lease_ms}
        holds = self._holds[message.key or b""]
        if (hold := holds.get(delivery)) is not None:
            holds[delivery] = hold._replace(until_s=self._extended_until_s[delivery])
        self._numbers["extended"] += 1

    def _surely_until(self, message: Leased, lease_ms: int) -> float:
        until_s = time.monotonic() + (message.lease_until.timestamp() - time.time())
        return until_s - self._delay_s(until_s - lease_ms / 1000)

    def give_up(self, name: str, message: Leased, *, is_accepted: bool) -> None:
        """The member is about to accept or release the record."""
        self._holds[message.key or b""].pop(delivery_of(message), None)
        if is_accepted:
            self.sent_accepts.add(message.value or b"")

    def accept(self, message: Leased) -> None:
        """The broker has answered that the record is accepted."""
        delivery = delivery_of(message)
        self.accepted[delivery[:2]] = delivery.delivery_count

    def leave(self, name: str) -> None:
        """A member has left the group, or is about to."""
        for holds in self._holds.values():
            for delivery in [delivery for delivery, hold in holds.items() if hold.name == name]:
                del holds[delivery]

    def on_killed(self) -> None:
        """The broker was killed."""
        self._numbers["held at a kill"] += sum(map(len, self._holds.values()))

    # Durations of leases

    def durations(self) -> dict[Delivery, set[int]]:
        """The durations that each lease may have now."""
        return {delivery: set(allowed) for delivery, allowed in self._deliveries.items()}

    def check_durations(
        self,
        partition: int,
        ranges: Iterable[LeasedRange],
        allowed: Mapping[Delivery, set[int]],
        age_ms_max: float,
    ) -> None:
        """Compare what the broker reports of its leases with the durations `allowed` before it was asked, and now.
        `age_ms_max`: time in milliseconds since the broker was started."""
        for one in ranges:
            assert one.age_ms <= age_ms_max, f"a lease began {one.age_ms - age_ms_max} ms before the restart"
            for offset in range(one.first_offset, one.last_offset + 1):
                delivery = Delivery(partition, offset, one.delivery_count)
                known = allowed.get(delivery, set()) | self._deliveries.get(delivery, set())
                if delivery in allowed:
                    assert one.lease_ms in known, f"{delivery} has a lease of {one.lease_ms} ms, not {known}"
                    assert one.member_id == self._members[delivery]
                    self._numbers["leases compared"] += 1

    def finish(self) -> None:
        """Everything is handled: nothing may be missing."""
        lost = self.published.keys() - self.sent_accepts
        assert not lost, f"{len(lost)} of {len(self.published)} published records were never accepted"

    def numbers(self) -> Counter[str]:
        """What there was in all."""
        self._numbers["accepted"] = len(self.accepted)
        self._numbers["published"] = len(self.published)
        return self._numbers
