"""Checks what share groups made of the flights: tries, rests, dead letters. Pure: no client, no clock.

Always true: a flight is known by its line; what is said to be wrong is said in words a person can use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mansio_demo.delay_chart import CARRIER, DELAY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.cli.admin.dead_letters import DeadLetter
    from mansio_demo.flights import Flight

NUMBER, TAIL = 11, 12
"""Where these are in a record's value, split at commas; the line number comes first."""

EARLY_S = 0.001
"""A clock of a computer is no better."""


class Attempt(NamedTuple):
    """A flight reached a worker: which delivery of it, and whether it was dealt with."""

    at: float
    line: int
    delivery: int
    partition: int
    offset: int
    is_done: bool


def line_of(value: bytes) -> int:
    return int(value[: value.index(b",")])


def name_of(flight: Flight) -> str:
    cells = flight.value.split(b",")
    return f"{cells[CARRIER].decode()}{cells[NUMBER].decode()} {cells[TAIL].decode()}"


def is_cancelled(flight: Flight) -> bool:
    return flight.value.split(b",")[DELAY] == b"NA"


def delay_min(value: bytes) -> int:
    """What the workers work out. Raises `ValueError` for a flight that never left: that is what is wrong with them."""
    return int(value.split(b",")[DELAY])


def mean_delay_min(flights: Iterable[Flight]) -> float:
    """Of those that left."""
    delays = [delay_min(flight.value) for flight in flights if not is_cancelled(flight)]
    return sum(delays) / len(delays)


@dataclass(slots=True)
class Attempts:
    """Feed it every attempt."""

    flights: Sequence[Flight]
    limit: int
    backoffs_s: tuple[float, ...]
    found: dict[int, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    delays: dict[int, int] = field(default_factory=dict)

    def add(self, attempt: Attempt) -> None:
        self.found[attempt.line].append(attempt)

    @property
    def poison(self) -> list[Flight]:
        return [flight for flight in self.flights if is_cancelled(flight)]

    @property
    def done(self) -> int:
        """Flights that were dealt with."""
        return sum(any(one.is_done for one in attempts) for attempts in self.found.values())

    @property
    def good_done_at(self) -> float:
        """When the last of those was dealt with that nothing is wrong with; 0 before."""
        good = {flight.line for flight in self.flights if not is_cancelled(flight)}
        times = [one.at for line in good for one in self.found.get(line, ()) if one.is_done]
        return max(times) if len(times) >= len(good) else 0.0

    def mean_min(self) -> float:
        return sum(self.delays.values()) / max(1, len(self.delays))

    def backoffs_of(self, line: int) -> list[float]:
        """How long a flight rested between its tries, in seconds."""
        times = [one.at for one in self.found[line][: self.limit]]
        return [later - earlier for earlier, later in pairwise(times)]

    def passed(self, line: int) -> tuple[int, int]:
        """Of the flights behind this one in its partition: how many were done before its last try, and how many are."""
        last = self.found[line][: self.limit][-1]
        later_records = [
            one
            for attempts in self.found.values()
            for one in attempts
            if one.is_done and one.partition == last.partition and one.offset > last.offset
        ]
        return sum(one.at < last.at for one in later_records), len(later_records)

    def wrong_before_redrive(self) -> list[str]:
        """Each good flight once; each poison one tried up to the limit, after its rests."""
        wrong = []
        poison = {flight.line for flight in self.poison}
        for flight in self.flights:
            attempts = self.found.get(flight.line, [])
            deliveries = [one.delivery for one in attempts]
            if flight.line not in poison:
                if [(one.delivery, one.is_done) for one in attempts] != [(1, True)]:
                    wrong.append(f"{name_of(flight)} was delivered as {deliveries}, not once")
                continue
            if deliveries != list(range(1, self.limit + 1)) or any(one.is_done for one in attempts):
                wrong.append(f"{name_of(flight)}, which nobody can deal with, was delivered as {deliveries}")
            for backoff_s, wanted in zip(self.backoffs_of(flight.line), self.backoffs_s, strict=False):
                if backoff_s < wanted - EARLY_S:
                    wrong.append(f"{name_of(flight)} came again after {backoff_s:.3f} s, before {wanted} s")
        if abs(self.mean_min() - mean_delay_min(self.flights)) > 1e-9:
            wrong.append(
                f"the mean delay is {self.mean_min():.3f} min, not {mean_delay_min(self.flights):.3f}"
            )
        return wrong

    def wrong_after_redrive(self) -> list[str]:
        """Each poison flight came once more, in the delivery after the last one, and was dealt with."""
        wrong = []
        for flight in self.poison:
            again = [(one.delivery, one.is_done) for one in self.found[flight.line][self.limit :]]
            if again != [(self.limit + 1, True)]:
                wrong.append(f"{name_of(flight)} came after the redrive as {again}")
        return wrong


def wrong_dead_letters(
    dead_letters: Sequence[DeadLetter], poison: Sequence[Flight], topic: str, group: str, limit: int
) -> list[str]:
    """What is wrong with the dead letters: one for each flight, with the record whole, and where it was."""
    values = Counter(dead_letter.message.value for dead_letter in dead_letters)
    if values != Counter(flight.value for flight in poison):
        return [
            f"there are {len(dead_letters)} dead letters of {len(values)} flights, for {len(poison)} flights"
        ]
    return [
        f"a dead letter says {found_text}, not {wanted}"
        for dead_letter in dead_letters
        if (found_text := (dead_letter.topic, dead_letter.group, dead_letter.deliveries))
        != (wanted := (topic, group, limit))
    ]
