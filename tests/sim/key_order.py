"""Checker of a share group with order by key in simulated histories.

* While a record of a key is leased, no other record of the key is given to anybody, but in one answer with it.
* The records of a key are first given in the order of their offsets.
* No later record passes one that is not done, whether that is leased, in a backoff or withheld.

Always true: what is not known for sure is taken in the broker's favour, as by `support.share_history`, whose leases
this module uses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from support.share_history import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from support.share_history import ShareHistory

FIRST_SEED: Final = 500_000
"""Histories with a share group from this seed on have order by key, and members that choose how long leases last."""

KEYS: Final = 5
LEASES_MS: Final = (-1, 1200, 7000)
"""What the members of the group choose, in turn; -1 for the group's."""

EXTENSIONS_MS: Final = (1500, 4000, 9000)


def key_of(seed: int, value: bytes) -> bytes | None:
    """Of a produced record; some have none."""
    number = crc32(value) % (KEYS + 1)
    return b"key %d" % number if seed >= FIRST_SEED and number < KEYS else None


class Answer(NamedTuple):
    """What one member got at once. `ends_ms`: its leases surely last so long."""

    member: str
    partition: int
    keys: Mapping[int, bytes | None]
    sent_ms: float
    got_ms: float
    ends_ms: float
    stands: Callable[[], bool]


class KeyChecker:
    """Of one group and one topic."""

    def __init__(self, history: ShareHistory) -> None:
        self._history = history
        self._seen: defaultdict[tuple[int, bytes], dict[int, float]] = defaultdict(dict)
        """By partition and key: each offset that somebody got, and when first."""
        self._suspects: list[tuple[Place, str]] = []
        """What was passed, unless it is found among the dead letters."""
        self.given_in_order = 0

    def given(self, answer: Answer) -> None:
        """Before `ShareHistory.given` of the same answer."""
        by_key: defaultdict[bytes, list[int]] = defaultdict(list)
        for offset, key in answer.keys.items():
            if key is not None:
                by_key[key].append(offset)
        for key, offsets in by_key.items():
            self._check(answer, key, sorted(offsets))

    def _check(self, answer: Answer, key: bytes, offsets: list[int]) -> None:
        seen, history = self._seen[answer.partition, key], self._history
        what = f"{answer.partition}/{offsets} of {key.decode()} were given to {answer.member}"
        for offset in seen:
            place = Place(answer.partition, offset)
            record = history.records[place]
            if offset in offsets or offset > offsets[-1]:
                continue  # one that is given back does not wait for those behind it
            for lease in record.leases:
                is_held = answer.got_ms < min(lease.ends_ms, answer.ends_ms)
                if is_held and lease.stands() and answer.stands():
                    left_ms = lease.ends_ms - answer.got_ms
                    history.broken(f"{what}; {lease.member} has {offset} for {left_ms:.0f} ms more")
            if offset < offsets[-1] and not (record.outcomes["accept"] or record.outcomes["reject"]):
                self._suspects.append((place, f"{what}; {offset} is not done"))
        for offset in offsets:
            if offset not in seen:
                later = [other for other, at_ms in seen.items() if other > offset and at_ms <= answer.sent_ms]
                if later:
                    history.broken(f"{what} for the first time, after {later}")
                seen[offset] = answer.got_ms
            self.given_in_order += 1

    def finish(self, dead: Iterable[Place]) -> None:
        """`dead`: the place of each record in the dead-letter topic."""
        died = set(dead)
        for place, what in self._suspects:
            if place not in died:
                self._history.broken(what)
