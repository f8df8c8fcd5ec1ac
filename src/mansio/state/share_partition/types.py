"""What the parts of a share group say to each other: keys, settings, changes of state, and what was counted.

A share partition is one topic partition as one share group sees it. Its state is a list of ranges of offsets, never of
records; every change of it is a `StateBatch` of a range, gathered in an `Update` that is stored before anybody is told.

Always true: a `StateBatch` says all of its range (nothing is left as it was but what it says); ranges of an update are
ascending and disjoint; `deliveries` so far never go down, `uncounted_deliveries` of them do not count as
tries.

Source: KIP-932 (states and types of acknowledgement), KIP-1222 (renewal), KIP-1191 (dead letters).
"""

from __future__ import annotations

from typing import Final, NamedTuple

AVAILABLE: Final = 0
ACQUIRED: Final = 1
ACKNOWLEDGED: Final = 2
ARCHIVING: Final = 3
ARCHIVED: Final = 4
WITHHELD: Final = 9
"""In memory only, never on a wire and in no record: it may have been leased before a loss, so nobody gets it yet."""

GAP: Final = 0
ACCEPT: Final = 1
RELEASE: Final = 2
REJECT: Final = 3
RENEW: Final = 4

CAUSE_REJECTED: Final = 1
CAUSE_LIMIT: Final = 2


class ShareKey(NamedTuple):
    """One share partition. `topic_id`: the 16 bytes of the topic's id."""

    group: str
    topic_id: bytes
    partition: int


class Backoff(NamedTuple):
    """How long a released or expired record rests: base times multiplier for each further try, at most `max_ms`; plus
    or minus a share of `jitter` (0 to 1) of it."""

    base_ms: int
    multiplier: float
    max_ms: int
    jitter: float


class ShareSettings(NamedTuple):
    """Of one group. `locks_max`: records leased at once; `ranges_max`: bound of the window in ranges;
    `lease_bound_step`:
    by how many offsets the lease horizon is moved ahead; `ordered`: nothing passes a lower record that is still open;
    `renew`: leases may be renewed; `dead_letters`: what is rejected or tried too often is kept in a topic."""

    lock_ms: int
    delivery_limit: int
    locks_max: int
    ranges_max: int
    lease_bound_step: int
    ordered: bool
    renew: bool
    dead_letters: bool
    backoff: Backoff


class DeadLetterReservation(NamedTuple):
    """By what a range of records comes to the dead-letter topic once, however often it is tried.

    `sequence` is that of the range's first record, the k-th has `sequence + k` modulo 2**31; `producer_id` is -1 while
    nothing is reserved yet. `cause`: `CAUSE_REJECTED` or `CAUSE_LIMIT`; `consumer`: who had it last; `first_ms`: wall
    clock, when it was given up.
    """

    topic_id: bytes
    partition: int
    producer_id: int
    epoch: int
    sequence: int
    cause: int
    reason: str
    consumer: str
    first_ms: int


class StateBatch(NamedTuple):
    """Offsets `first` to `last`, both included, are in this state now. `due_ms`: wall clock, -1 for at once."""

    first: int
    last: int
    state: int
    deliveries: int
    uncounted_deliveries: int = 0
    holder: str = ""
    due_ms: int = -1
    reservation: DeadLetterReservation | None = None


class DeadRange(NamedTuple):
    """Offsets that were dead-lettered and not offered again since."""

    first: int
    last: int
    deliveries: int
    uncounted_deliveries: int


class Redrive(NamedTuple):
    """What was offered again under one id."""

    redrive_id: str
    ranges: tuple[tuple[int, int], ...]


class Producer(NamedTuple):
    """Reserved for the dead letters of one share partition. `sequences`: (target topic's id, partition, next one)."""

    producer_id: int
    epoch: int
    sequences: tuple[tuple[bytes, int, int], ...]


class Update(NamedTuple):
    """One change of a share partition's state, to be stored as one. `token` comes back when it is.

    `durable`: it counts only when committed; otherwise when appended. `done_count`: offsets that are settled for ever
    at or above `start_offset`. `snapshot`: it is the whole state. What is None has not changed. `dead_added`: dead from
    now on, beside what `dead` says, or was said before.
    """

    token: int
    durable: bool
    start_offset: int
    lease_bound: int
    done_count: int
    changes: tuple[StateBatch, ...] = ()
    snapshot: bool = False
    dead: tuple[DeadRange, ...] | None = None
    redrives: tuple[Redrive, ...] | None = None
    producer: Producer | None = None
    dead_added: tuple[DeadRange, ...] = ()


class LoadedState(NamedTuple):
    """A share partition's state as it is stored. `is_complete`: nothing that was appended can be missing from it;
    `withheld_ms`: how much longer what may have been leased is withheld, 0 when certain."""

    state_epoch: int
    leader_epoch: int
    snapshot_epoch: int
    start_offset: int
    lease_bound: int
    done_count: int
    changes: tuple[StateBatch, ...]
    dead: tuple[DeadRange, ...]
    redrives: tuple[Redrive, ...]
    producer: Producer | None
    is_complete: bool
    withheld_ms: int


class ShareSummary(NamedTuple):
    """What a lag is reckoned from. `is_archiving`: some records are on their way to the dead-letter topic."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    done_count: int
    is_archiving: bool = False


class AcquiredRange(NamedTuple):
    """Offsets `first` to `last` are leased; `deliveries`: which delivery of theirs this is, from 1."""

    first: int
    last: int
    deliveries: int


class AcknowledgementBatch(NamedTuple):
    """How offsets `first` to `last` ended: one type for all, or one for each. `delay_ms`: rest so long, -1 for the
    group's backoff; `delivery_count`: only if it is this delivery, -1 for whichever."""

    first: int
    last: int
    types: bytes
    delay_ms: int = -1
    reason: str = ""
    delivery_count: int = -1


class ArchivingRange(NamedTuple):
    """Records on their way to the dead-letter topic."""

    key: ShareKey
    first: int
    last: int
    deliveries: int
    reservation: DeadLetterReservation


class RedriveResult(NamedTuple):
    """How many offsets were offered again, were so before under the same id, and are in the log no more."""

    offered: int
    done_before: int
    gone: int


class HolderCount(NamedTuple):
    """What one member has leased; `oldest_ms`: for how long, the longest."""

    member_id: str
    leased: int
    oldest_ms: int


class ShareCounts(NamedTuple):
    """Of one share partition, in records: `start` and `end` are offsets, `open` what nobody settled yet."""

    start: int
    end: int
    open: int
    leased: int
    parked: int
    withheld: int
    archiving: int
    dead: int
    holders: tuple[HolderCount, ...]
