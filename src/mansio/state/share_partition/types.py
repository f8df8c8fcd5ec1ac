"""Value types of share partitions: keys, settings, state changes and counts.

A share partition is one topic partition as seen by one share group. Its state is a list of offset ranges, never of
records. Every change is a `StateBatch` of a range, gathered in an `Update` that is stored before it is reported.

Invariants: a `StateBatch` is the complete state of its range. The ranges of an update are ascending and disjoint.
`deliveries` never decreases; `uncounted_deliveries` of them do not count as attempts.

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
"""In memory only, never in a message or record: possibly leased before a loss, so not delivered yet."""

GAP: Final = 0
ACCEPT: Final = 1
RELEASE: Final = 2
REJECT: Final = 3
RENEW: Final = 4
CAUSE_REJECTED: Final = 1
CAUSE_LIMIT: Final = 2

REQUESTED_DELAY_MS_MAX: Final = 365 * 24 * 60 * 60 * 1000
"""The longest delay a consumer may ask for."""

_DOUBLINGS_MAX: Final = 64
"""Every backoff has reached its maximum by then."""


class ShareKey(NamedTuple):
    """One share partition. `topic_id`: the 16 bytes of the topic's id."""

    group: str
    topic_id: bytes
    partition: int


class Backoff(NamedTuple):
    """Delay before a released or expired record is offered again: base times multiplier for each further attempt, at
    most `max_ms`, plus or minus a random part of up to `jitter` (0 to 1) of it."""

    base_ms: int
    multiplier: float
    max_ms: int
    jitter: float

    def delay_ms(self, attempts: int, random_fraction: float, requested_ms: int = -1) -> int:
        """The delay after so many attempts (from 1), between 0 and `max_ms`.

        `random_fraction`: uniform, 0 to below 1; `requested_ms`: delay that the consumer asked for, which takes
        precedence up to `REQUESTED_DELAY_MS_MAX`; -1 for none. Jitter aside, the delay does not shrink with attempts.
        """
        if requested_ms >= 0:
            return min(requested_ms, REQUESTED_DELAY_MS_MAX)
        grown = self.base_ms * max(self.multiplier, 1.0) ** min(max(attempts - 1, 0), _DOUBLINGS_MAX)
        delay = min(grown, float(self.max_ms))
        delay += delay * self.jitter * (2 * random_fraction - 1)
        return max(0, min(round(delay), self.max_ms))


class ShareSettings(NamedTuple):
    """Settings of one group. `locks_max`: records leased at once; `ranges_max`: bound of in-flight batches;
    `lease_bound_step`: offsets by which the lease bound advances; `ordered`: no record is delivered before a lower one
    that is not done; `renew`: leases may be renewed; `dead_letters`: records given up are copied to a topic."""

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
    """Reserved position of a range of records in the dead-letter topic, which makes repeated appends idempotent.

    `sequence` is that of the first record of the range, the k-th has `sequence + k` modulo 2**31; `producer_id` is -1
    while no position is reserved. `cause`: `CAUSE_REJECTED` or `CAUSE_LIMIT`; `consumer`: the last holder; `first_ms`:
    wall clock, when the records were given up.
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
    """Offsets `first` to `last`, both included, have this state. `due_ms`: wall clock, -1 for at once."""

    first: int
    last: int
    state: int
    deliveries: int
    uncounted_deliveries: int = 0
    holder: str = ""
    due_ms: int = -1
    reservation: DeadLetterReservation | None = None


class DeadRange(NamedTuple):
    """Dead-lettered offsets that were not offered again since."""

    first: int
    last: int
    deliveries: int
    uncounted_deliveries: int


class Redrive(NamedTuple):
    """Offsets offered again under one id."""

    redrive_id: str
    ranges: tuple[tuple[int, int], ...]


class Producer(NamedTuple):
    """Producer of the dead letters of one share partition. `sequences`: (target topic id, partition, next sequence)."""

    producer_id: int
    epoch: int
    sequences: tuple[tuple[bytes, int, int], ...]


class Update(NamedTuple):
    """One change of the state of a share partition, stored atomically and confirmed by its `token`.

    `durable`: effective when committed, otherwise when appended. `done_count`: offsets at or above `start_offset` that
    are done. `snapshot`: the whole state. A field that is None is unchanged. `dead_added`: dead ranges in addition to
    `dead`, or to the earlier ones.
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
    """Stored state of a share partition. `is_complete`: no appended update can be missing; `withheld_ms`: how much
    longer possibly leased records are withheld, 0 if complete."""

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
    """The numbers a lag is computed from. `is_archiving`: some records wait for their dead letter."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    done_count: int
    is_archiving: bool = False


class AcquiredRange(NamedTuple):
    """Leased offsets `first` to `last`; `deliveries`: delivery count, from 1."""

    first: int
    last: int
    deliveries: int


class AcknowledgementBatch(NamedTuple):
    """Acknowledgement of offsets `first` to `last`: one type for all, or one for each. `delay_ms`: delay of a release,
    -1 for the group's backoff; `delivery_count`: the delivery that is meant, -1 for any."""

    first: int
    last: int
    types: bytes
    delay_ms: int = -1
    reason: str = ""
    delivery_count: int = -1


class ArchivingRange(NamedTuple):
    """Records that wait for their dead letter."""

    key: ShareKey
    first: int
    last: int
    deliveries: int
    reservation: DeadLetterReservation


class RedriveResult(NamedTuple):
    """Numbers of offsets offered again now, offered before under the same id, and deleted from the log."""

    redriven: int
    repeated: int
    deleted: int


class HolderCount(NamedTuple):
    """Records leased by one member; `oldest_ms`: age of its oldest lease."""

    member_id: str
    leased: int
    oldest_ms: int


class ShareCounts(NamedTuple):
    """Numbers of records of one share partition. `start` and `end` are offsets; `open`: not done yet."""

    start: int
    end: int
    open: int
    leased: int
    in_backoff: int
    withheld: int
    archiving: int
    dead: int
    holders: tuple[HolderCount, ...]
