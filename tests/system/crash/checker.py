"""The judge of crash tests: what clients received and saw, against what the log holds at the end.

A crash test writes down a `History` while brokers die under it; `check` compares it with the log as read
after the last restart. Pure: no client, no clock, so that each kind of violation can be planted and must be
found.

Always true: every value a test sends is made by `value_of`, so it names its producer and its number, and no
two are equal; what is in the log and was never sent is therefore found too. Numbers grow by one per producer
over all partitions. No violation from `check` means that no promise of the log was broken in this history.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Kind(StrEnum):
    """What can be wrong with a history."""

    LOST = "lost"
    MOVED = "moved"
    OVERWRITTEN = "overwritten"
    TWICE_PROMISED = "two acknowledgements of one offset"
    DUPLICATE = "duplicate of an idempotent producer"
    REORDERED = "out of the producer's order"
    INVENTED = "never sent"
    HOLE = "hole between offsets"
    READ_THEN_GONE = "read, and later not there"
    READ_THEN_CHANGED = "read, and later another value"
    POLL_WENT_BACK = "poll went back"
    POLL_SKIPPED = "poll skipped"
    COMMIT_LOST = "committed offset lost"


class Acknowledged(NamedTuple):
    """The broker acknowledged to a producer: this value is at this place.

    `offset` None: stored, and nobody says where. librdkafka reports a batch so whose own answer was lost when a later
    one of the same idempotent producer is answered, which cannot be stored without it.
    """

    partition: int
    offset: int | None
    value: bytes


class Seen(NamedTuple):
    """A record as a consumer was given it."""

    partition: int
    offset: int
    value: bytes


class Violation(NamedTuple):
    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(slots=True)
class History:
    """What happened, as the clients know it."""

    sent: Counter[str] = field(default_factory=Counter)
    """Producer -> how many values it has handed to its client: the numbers 0..n-1."""
    acknowledged: list[Acknowledged] = field(default_factory=list)
    reads: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    """Reader -> its records in the order they came, from each partition's beginning, without seeking."""
    commits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition -> (last offset whose commit was acknowledged, last offset whose commit was tried)."""


class Verdict(NamedTuple):
    violations: list[Violation]
    acknowledged: int
    stored: int
    duplicates: int
    """Extra copies left by producers that are not idempotent: allowed, and counted."""

    def __str__(self) -> str:
        found = "".join(f"\n  {one}" for one in self.violations[:20])
        more = f"\n  and {len(self.violations) - 20} more" if len(self.violations) > 20 else ""
        return (
            f"acknowledged {self.acknowledged}, stored {self.stored}, duplicates {self.duplicates}, "
            f"violations {len(self.violations)}{found}{more}"
        )


def value_of(producer: str, number: int) -> bytes:
    """The value with this number of this producer: 40 to 239 bytes that no other has."""
    name = f"{producer}/{number}/".encode()
    digest = hashlib.blake2b(name, digest_size=20).hexdigest().encode()
    return name + digest + b"." * (int(digest[:4], 16) % 160)


def sender_of(value: bytes) -> tuple[str, int] | None:
    """(producer, number) of a value `value_of` has made; None for any other bytes."""
    producer, _, rest = value.partition(b"/")
    number, separator, _ = rest.partition(b"/")
    if not separator or not number.isdigit():
        return None
    sender = (producer.decode(errors="replace"), int(number))
    return sender if value_of(*sender) == value else None


def check(
    history: History,
    final: Sequence[Seen],
    *,
    idempotent: Iterable[str],
    committed: Mapping[int, int] | None = None,
) -> Verdict:
    """Judge a history. `final`: the whole log after the last restart, per partition in the order of delivery;
    `committed`: partition -> the group's offset then."""
    log = {(one.partition, one.offset): one.value for one in final}
    once = frozenset(idempotent)
    violations = [
        *_check_log_shape(final),
        *_check_senders(history, final, once),
        *_check_acknowledged(history.acknowledged, log),
        *_check_overtaken(history.acknowledged, once),
    ]
    for reader, seen in history.reads.items():
        violations += _check_reads(reader, seen, log)
    if committed is not None:
        violations += _check_commits(history.commits, committed)
    copies = Counter(one.value for one in final)
    return Verdict(violations, len(history.acknowledged), len(final), sum(copies.values()) - len(copies))


def _check_log_shape(final: Sequence[Seen]) -> list[Violation]:
    """Offsets of a partition begin at 0 and have no hole: nothing here compacts, deletes or aborts."""
    found = []
    expected: Counter[int] = Counter()
    for one in final:
        if one.offset != expected[one.partition]:
            where = f"partition {one.partition}: {expected[one.partition]} expected, {one.offset} there"
            found.append(Violation(Kind.HOLE, where))
        expected[one.partition] = one.offset + 1
    return found


def _check_senders(history: History, final: Sequence[Seen], once: frozenset[str]) -> list[Violation]:
    """Only what was sent; and where that was promised, in its producer's order and once."""
    found = []
    last: dict[tuple[int, str], int] = {}
    copies: Counter[bytes] = Counter()
    for one in final:
        sender = sender_of(one.value)
        place = f"partition {one.partition} offset {one.offset}"
        if sender is None or sender[1] >= history.sent[sender[0]]:
            found.append(Violation(Kind.INVENTED, f"{place}: {one.value[:40]!r}"))
            continue
        producer, number = sender
        copies[one.value] += 1
        if producer not in once:
            continue
        repeated = copies[one.value] > 1
        if repeated:
            found.append(Violation(Kind.DUPLICATE, f"{place}: {producer} number {number}"))
        before = last.get((one.partition, producer), -1)
        if number <= before and not repeated:
            found.append(Violation(Kind.REORDERED, f"{place}: {producer} number {number} after {before}"))
        last[one.partition, producer] = max(before, number)
    return found


def _check_acknowledged(
    acknowledged: Sequence[Acknowledged], log: Mapping[tuple[int, int], bytes]
) -> list[Violation]:
    """Every acknowledged value is where the broker acknowledged it."""
    found = []
    places = {value: place for place, value in log.items()}
    promised: dict[tuple[int, int], bytes] = {}
    for one in acknowledged:
        if one.offset is None:
            if (at := places.get(one.value)) is None or at[0] != one.partition:
                found.append(Violation(Kind.LOST, f"partition {one.partition}: {one.value[:40]!r}"))
            continue
        at = (one.partition, one.offset)
        place = f"partition {one.partition} offset {one.offset}: {one.value[:40]!r}"
        if promised.setdefault(at, one.value) != one.value:
            found.append(Violation(Kind.TWICE_PROMISED, f"{place} and {promised[at][:40]!r}"))
        stored = log.get(at)
        if stored == one.value:
            continue
        if stored is not None:
            found.append(Violation(Kind.OVERWRITTEN, f"{place}, holds {stored[:40]!r}"))
        elsewhere = places.get(one.value)
        if elsewhere is not None:
            found.append(Violation(Kind.MOVED, f"{place}, is now at {elsewhere}"))
        elif stored is None:
            found.append(Violation(Kind.LOST, place))
    return found


def _check_overtaken(acknowledged: Sequence[Acknowledged], once: frozenset[str]) -> list[Violation]:
    """What a producer that is not idempotent sent after an acknowledgement is behind what was acknowledged.

    One request in flight is not enough for more with librdkafka: it makes the next request while one is on its way
    (`queue.buffering.backpressure.threshold` is at least 1), and sends that one before what was refused is sent again.
    """
    found = []
    places: defaultdict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for turn, one in enumerate(acknowledged):
        sender = sender_of(one.value)
        if sender is not None and sender[0] not in once and one.offset is not None:
            places[one.partition, sender[0]].append((one.offset, turn, sender[1]))
    for (partition, producer), in_log in places.items():
        highest = turn_of_highest = -1
        for offset, turn, number in sorted(in_log):
            if number > highest:
                highest, turn_of_highest = number, turn
            elif turn < turn_of_highest:
                detail = f"partition {partition} offset {offset}: {producer} number {number} after {highest}"
                found.append(Violation(Kind.REORDERED, f"{detail}, acknowledged before it"))
    return found


def _check_reads(reader: str, seen: Sequence[Seen], log: Mapping[tuple[int, int], bytes]) -> list[Violation]:
    """A reader goes forward offset by offset, and nothing it was given vanishes or changes."""
    found = []
    expected: Counter[int] = Counter()
    for one in seen:
        place = f"{reader}, partition {one.partition} offset {one.offset}"
        if one.offset < expected[one.partition]:
            found.append(Violation(Kind.POLL_WENT_BACK, f"{place} after {expected[one.partition] - 1}"))
        elif one.offset > expected[one.partition]:
            found.append(Violation(Kind.POLL_SKIPPED, f"{place} after {expected[one.partition] - 1}"))
        expected[one.partition] = one.offset + 1
        stored = log.get((one.partition, one.offset))
        if stored is None:
            found.append(Violation(Kind.READ_THEN_GONE, f"{place}: {one.value[:40]!r}"))
        elif stored != one.value:
            found.append(
                Violation(Kind.READ_THEN_CHANGED, f"{place}: {one.value[:40]!r}, now {stored[:40]!r}")
            )
    return found


def _check_commits(commits: Mapping[int, tuple[int, int]], committed: Mapping[int, int]) -> list[Violation]:
    """The group's offset is the last one acknowledged, or one that was tried after it."""
    found = []
    for partition, (acknowledged, tried) in commits.items():
        now = committed.get(partition, -1)
        if not acknowledged <= now <= max(acknowledged, tried):
            detail = f"partition {partition}: {acknowledged} was acknowledged, {now} is there"
            found.append(Violation(Kind.COMMIT_LOST, detail))
    return found
