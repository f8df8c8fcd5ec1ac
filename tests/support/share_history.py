"""Checker of deliveries: what members of a share group received and acknowledged, compared with what must never happen.

* An acknowledgement that was confirmed stands: what was accepted is given to nobody again, what was rejected only after
  a redrive.
* Nothing is lost: in the end every record was accepted by somebody, or is among the dead letters.
* No two members have one record at the same time.
* One dead letter for each record that died: as many as it was rejected or tried too often, redrives counted.
* Delivery counts of a record grow from one delivery to the next, and no two deliveries have the same.

Always true: times are of one clock; what is not known for sure is taken in the broker's favour, so a breach is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping


class Place(NamedTuple):
    """One record of the shared topic."""

    partition: int
    offset: int


class Breach(AssertionError):
    """A guarantee of docs/reference/guarantees.md (16, 17) is broken."""


@dataclass(slots=True)
class Lease:
    """One delivery: asked for at `sent_ms`, known at `got_ms`, surely over at `ends_ms`. `stands`: whether the broker
    may still think so; a connection that ended gives up what came on it."""

    member: str
    count: int
    sent_ms: float
    got_ms: float
    ends_ms: float
    stands: Callable[[], bool]


@dataclass(slots=True)
class Record:
    """What is known of one place."""

    leases: list[Lease] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    accepted_ms: float = float("inf")
    rejected_ms: float = float("inf")
    redrives: dict[str, None] = field(default_factory=dict)
    """Asked for, whether or not anybody answered."""


def _always() -> bool:
    return True


class ShareHistory:
    """Of one group and one topic. Every method raises `Breach` when it is given what may not be; so does `breach`
    again, for whoever looks later."""

    def __init__(self) -> None:
        self.records: defaultdict[Place, Record] = defaultdict(Record)
        self._of: defaultdict[str, list[Lease]] = defaultdict(list)
        self.offered: Counter[tuple[str, Place]] = Counter()
        self.breach: Breach | None = None
        self.deliveries = self.accepted = self.rejected = self.released = 0
        self.refused = self.offered_again = self.extensions = 0

    def broken(self, how: str) -> None:
        self.breach = self.breach or Breach(how)
        raise self.breach

    # What members are given and say

    def given(
        self,
        member: str,
        partition: int,
        first: int,
        last: int,
        count: int,
        *,
        sent_ms: float,
        got_ms: float,
        lock_ms: float,
        stands: Callable[[], bool] = _always,
    ) -> None:
        """`lock_ms`: the lease surely lasts so long from the moment it was asked for."""
        for offset in range(first, last + 1):
            place = Place(partition, offset)
            record = self.records[place]
            lease = Lease(member, count, sent_ms, got_ms, sent_ms + lock_ms, stands)
            self._check(place, record, lease)
            record.leases.append(lease)
            self._of[member].append(lease)
            self.deliveries += 1

    def _check(self, place: Place, record: Record, lease: Lease) -> None:
        what = f"{place.partition}/{place.offset} was given to {lease.member} in delivery {lease.count}"
        if record.accepted_ms <= lease.sent_ms:
            self.broken(f"{what}, accepted {lease.sent_ms - record.accepted_ms:.0f} ms before")
        if record.rejected_ms <= lease.sent_ms and not record.redrives:
            self.broken(f"{what}, rejected {lease.sent_ms - record.rejected_ms:.0f} ms before")
        for other in record.leases:
            before = f"{what}; {other.member} had it in delivery {other.count}"
            if other.count == lease.count:
                self.broken(f"{before}, too")
            if other.got_ms <= lease.sent_ms and other.count > lease.count:
                self.broken(f"{before} before")
            if lease.got_ms < min(other.ends_ms, lease.ends_ms) and other.stands() and lease.stands():
                self.broken(f"{before}, and has it for {other.ends_ms - lease.got_ms:.0f} ms more")

    def acks(self, member: str, partition: int, offsets: Iterable[int], kind: str, now_ms: float) -> None:
        """The member sent `accept`, `release` or `reject`: from now on the lease may have ended."""
        for offset in offsets:
            record = self.records[Place(partition, offset)]
            record.outcomes[kind] += 1
            self._over(record, member, now_ms)

    def acknowledged(self, partition: int, offsets: Iterable[int], kind: str, now_ms: float) -> None:
        """The broker confirmed the acknowledgement."""
        for offset in offsets:
            record = self.records[Place(partition, offset)]
            if kind == "accept":
                record.accepted_ms = min(record.accepted_ms, now_ms)
                self.accepted += 1
            elif kind == "reject":
                record.rejected_ms = min(record.rejected_ms, now_ms)
                self.rejected += 1
            else:
                self.released += 1

    def extends(self, member: str, place: Place, ends_ms: float) -> None:
        """The member asked for a lease that lasts until `ends_ms`: it lasts that long or as before, which is
        unknown."""
        for lease in self.records[place].leases:
            if lease.member == member:
                lease.ends_ms = min(lease.ends_ms, ends_ms)

    def extended(self, member: str, place: Place, ends_ms: float) -> None:
        """The broker confirmed that; the member has ended the lease by nothing since it asked."""
        newest = [lease for lease in self.records[place].leases if lease.member == member][-1]
        newest.ends_ms = max(newest.ends_ms, ends_ms)
        if not any(lease is newest for lease in self._of[member]):
            self._of[member].append(newest)  # it was given up before, but the broker still had it
        self.extensions += 1

    def gone(self, member: str, now_ms: float) -> None:
        """It begins a new session, or ends its connection: what it has may be given to others."""
        for lease in self._of.pop(member, ()):
            lease.ends_ms = min(lease.ends_ms, now_ms)

    def restarted(self, killed_ms: float, started_ms: float, lock_ms: float) -> None:
        """The only broker was killed, and another process of it began: leases that stood begin again with it."""
        for record in self.records.values():
            for lease in record.leases:
                if lease.ends_ms > killed_ms:
                    lease.ends_ms = max(lease.ends_ms, started_ms + lock_ms)

    def _over(self, record: Record, member: str, now_ms: float) -> None:
        for lease in record.leases:
            if lease.member == member:
                lease.ends_ms = min(lease.ends_ms, now_ms)

    # Redrives

    def asks_redrive(self, redrive_id: str, place: Place) -> None:
        self.records[place].redrives[redrive_id] = None

    def redriven(self, redrive_id: str, place: Place, offered: int) -> None:
        """An answer: so many records were offered again, of this one."""
        self.offered[redrive_id, place] += offered
        self.offered_again += offered
        if self.offered[redrive_id, place] > 1:
            self.broken(f"redrive {redrive_id} offered {place.partition}/{place.offset} twice")

    # The end

    def finish(
        self, ends: Mapping[int, int], dead: Iterable[Place], still_open: Container[Place] = ()
    ) -> None:
        """Nothing is open any more but `still_open`. `ends`: how many records each partition had by then; `dead`: the
        place of each record in the dead-letter topic."""
        dead_letters = Counter(dead)
        for partition, end in ends.items():
            for offset in range(end):
                place = Place(partition, offset)
                if place not in still_open:
                    self._finish(place, self.records[place], dead_letters[place])
        strangers = [place for place in dead_letters if place.offset >= ends.get(place.partition, 0)]
        if strangers:
            self.broken(f"dead letters of no record: {strangers[:3]}")

    def _finish(self, place: Place, record: Record, dead_letters: int) -> None:
        name = f"{place.partition}/{place.offset}"
        if not record.outcomes["accept"] and not dead_letters:
            self.broken(f"{name} is lost: {record}")
        if dead_letters > 1 + len(record.redrives):
            self.broken(f"{name} has {dead_letters} dead letters after {len(record.redrives)} redrives")
        if record.rejected_ms < float("inf") and not dead_letters:
            self.broken(f"{name} was rejected and has no dead letter")
        if record.accepted_ms < float("inf") and dead_letters > len(record.redrives):
            self.broken(f"{name} was accepted and has {dead_letters} dead letters")

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.numbers().items())

    def numbers(self) -> dict[str, int]:
        """What there was in all."""
        return {
            "records": len(self.records),
            "deliveries": self.deliveries,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "released": self.released,
            "redriven": self.offered_again,
            "unanswered": self.unanswered,
        }

    @property
    def unanswered(self) -> int:
        """Settlements whose outcome is unknown."""
        outcomes = sum(record.outcomes.total() for record in self.records.values())
        return outcomes - self.accepted - self.rejected - self.released - self.refused
