"""Value types of share partitions: keys, settings, state changes and counts.

A share partition is one topic partition as seen by one share group, or a part of it, if a feature of the topic divides
the offsets (`share_index`). Its state is a list of offset ranges, never of records. A `StateBatch` is the new state of
one range; an `Update` holds the changed ranges and is stored before clients receive its result.

Invariants: a `StateBatch` is the complete state of its range. The ranges of an update are ascending and disjoint.
The delivery count (`deliveries`) of a range never decreases; `uncounted_deliveries` of these deliveries do not count
towards the limit of delivery attempts.

Source: KIP-932 (states and types of acknowledgement), KIP-1222 (renewal), KIP-1191 (dead letters).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.backoff import grown_delay

if TYPE_CHECKING:
    from collections.abc import Sequence

# Delivery states, with the numbers of KIP-932.
AVAILABLE: Final = 0
ACQUIRED: Final = 1
ACKNOWLEDGED: Final = 2
ARCHIVING: Final = 3
ARCHIVED: Final = 4
WITHHELD: Final = 9
"""State in memory only, never sent or stored: a member may have leased the records before stored state was lost, so
they are not offered until such a lease must have expired."""

# Acknowledgement types, with the numbers of KIP-932 and KIP-1222.
GAP: Final = 0
ACCEPT: Final = 1
RELEASE: Final = 2
REJECT: Final = 3
RENEW: Final = 4

# Causes for which a record is copied to the dead-letter topic.
CAUSE_REJECTED: Final = 1
CAUSE_DELIVERY_LIMIT: Final = 2

# Causes of updates, for the trace of the records; 0 for those that change no delivery.
BY_ACQUISITION: Final = 1
BY_EXCHANGE: Final = 2
BY_ACKNOWLEDGEMENT: Final = 3
BY_MEMBER_END: Final = 4
BY_DEADLINE: Final = 5
BY_COPY: Final = 6
BY_REDRIVE: Final = 7
BY_LOG_START: Final = 8
BY_CLAIM: Final = 9

LEASE_MS_MAX: Final = 12 * 60 * 60 * 1000
"""Maximum duration that a member can choose for a lease, as in SQS."""

REQUESTED_DELAY_MS_MAX: Final = 365 * 24 * 60 * 60 * 1000
"""Maximum delay that a consumer can request when it releases a record."""

BASE: Final = 0
"""Number of the only share partition of a topic partition, or, if there are several, of the one whose state is loaded
first."""

NUMBER_MAX: Final = 127
"""Maximum number of a share partition, which is stored in seven bits."""

BACKLOG_QUEUES: Final = range(16, 32)
"""The numbers of backlog queues: share partitions with the records of isolated keys (`fairness`)."""

OPEN_END: Final = 2**63 - 1
"""End of an isolation that has not ended."""


class RangeOperation(IntEnum):
    """What a member does with its range leases: let them last longer, process them again after an interruption, which
    counts as a delivery, or accept them."""

    KEEP = 0
    CLAIM = 1
    ACCEPT = 2


class ShareKey(NamedTuple):
    """Identifier of a share partition: group id, the 16 bytes of the topic id, partition index, and its number among
    the share partitions of this group and topic partition; 0 if it is the only one."""

    group: str
    topic_id: bytes
    partition: int
    number: int = BASE


class Backoff(NamedTuple):
    """Delay before a released or expired record is offered again.

    The delay is `base_ms` after the first attempt and grows by the factor `multiplier` with each further one, up to
    `max_ms`. A random part of at most `jitter` (0 to 1) of the delay is added or subtracted.
    """

    base_ms: int
    multiplier: float
    max_ms: int
    jitter: float

    def delay_ms(self, attempts: int, random_fraction: float, requested_ms: int = -1) -> int:
        """Return the delay after this number of attempts (from 1), between 0 and `max_ms`.

        `random_fraction`: random number, uniform, 0 to below 1. `requested_ms`: delay that the consumer has requested,
        -1 for none; it is used instead, up to `REQUESTED_DELAY_MS_MAX`. Without jitter the delay never decreases with
        the number of attempts.
        """
        if requested_ms >= 0:
            return min(requested_ms, REQUESTED_DELAY_MS_MAX)
        delay = grown_delay(attempts, self.base_ms, self.max_ms, max(self.multiplier, 1.0))
        delay += delay * self.jitter * (2 * random_fraction - 1)
        return max(0, min(round(delay), self.max_ms))


class ShareSettings(NamedTuple):
    """Settings of the share partitions of one group.

    `lock_ms`: duration of a lease. `delivery_limit`: maximum number of delivery attempts. `record_locks_max`: maximum
    number of records of a share partition that are leased at the same time. `in_flight_batches_max`: maximum number of
    in-flight batches. `lease_bound_step`: number of offsets by which the lease bound advances. `is_ordered`: a record
    is offered only if each record at a lower offset is done, is being copied to the dead-letter topic, or is leased to
    the same member. `is_ordered_by_key`: it is offered only when no earlier record of its group key is in flight.
    `is_committed_only`: records of open and aborted transactions are not offered. `renewal_enabled`: members can renew
    leases. `dead_letters_enabled`: rejected records and those that reached `delivery_limit` are copied to the
    dead-letter topic. `backoff`: delay before a released or expired record is offered again. `key_header`: name of the
    header with the group key of a record; empty for the record's key. `key_leases_max`: maximum number of records of a
    group key that are leased at once in a topic partition, 0 for no limit. `key_rate`: maximum number of deliveries of
    a group key that start per second in a topic partition, 0 for no limit; `key_burst` more can start at once.
    `is_fair`: records of a group key with a backlog do not delay those of others. `range_locks_max`: maximum number of
    records of a share partition in range leases, which do not count towards `record_locks_max`.
    """

    lock_ms: int
    delivery_limit: int
    record_locks_max: int
    in_flight_batches_max: int
    lease_bound_step: int
    is_ordered: bool
    renewal_enabled: bool
    dead_letters_enabled: bool
    backoff: Backoff
    is_ordered_by_key: bool = False
    is_committed_only: bool = False
    key_header: str = ""
    is_fair: bool = False
    key_leases_max: int = 0
    key_rate: float = 0.0
    key_burst: int = 1
    range_locks_max: int = 0

    def locks_max(self, *, is_range: bool) -> int:
        """Return the maximum number of records in range leases, or in the other leases."""
        return self.range_locks_max if is_range else self.record_locks_max

    @property
    def has_key_limits(self) -> bool:
        """Whether there are limits by key."""
        return bool(self.key_leases_max or self.key_rate)


class DeadLetterReservation(NamedTuple):
    """Target partition, producer id, epoch and sequence with which a range of records is copied to the dead-letter
    topic, so that a repeated append is recognized.

    `sequence` is that of the first record of the range; the k-th record after it has `sequence + k` modulo 2**31.
    `producer_id` is -1 while nothing is reserved. `cause`: `CAUSE_REJECTED` or `CAUSE_DELIVERY_LIMIT`. `consumer`: id
    of the last member that had leased the records. `archiving_since_ms`: wall-clock time at which the records entered
    the state ARCHIVING.
    """

    topic_id: bytes
    partition: int
    producer_id: int
    epoch: int
    sequence: int
    cause: int
    reason: str
    consumer: str
    archiving_since_ms: int


class Isolation(NamedTuple):
    """The records of a group key at the offsets `first` to below `end` are in the backlog queue `number`.

    `header`: name of the header that has the group key; empty if it is the record's key. `key`: the group key, or its
    digest (`fair_index.key_id`).
    """

    number: int
    first: int
    end: int
    header: str
    key: bytes


class StateBatch(NamedTuple):
    """State of the offsets `first` to `last`, both included.

    `holder`: id of the member that has leased an ACQUIRED range, otherwise empty. `due_ms`: wall-clock time before
    which an AVAILABLE range is not offered, -1 for none. `lease_ms`: duration that the member has chosen for the lease,
    -1 for the group's. `is_range`: the lease is a range lease.
    """

    first: int
    last: int
    state: int
    deliveries: int
    uncounted_deliveries: int = 0
    holder: str = ""
    due_ms: int = -1
    lease_ms: int = -1
    is_range: bool = False
    reservation: DeadLetterReservation | None = None


class DeadRange(NamedTuple):
    """Range of dead-lettered offsets that no redrive has offered again."""

    first: int
    last: int
    deliveries: int
    uncounted_deliveries: int


class RedrivenRanges(NamedTuple):
    """Offset ranges that requests with this redrive id have offered again."""

    redrive_id: str
    ranges: tuple[tuple[int, int], ...]


class Producer(NamedTuple):
    """Producer id and epoch with which the records of one share partition are copied to the dead-letter topic.

    `sequences`: per target partition its topic id, its index and the next sequence.
    """

    producer_id: int
    epoch: int
    sequences: tuple[tuple[bytes, int, int], ...]


class Update(NamedTuple):
    """Change of the state of a share partition, which is stored atomically.

    `token`: number that identifies the update in `SharePartition.mark_persisted`. `durable`: the update takes effect
    when it is committed; otherwise when it is appended. `done_count`: number of offsets at or above `start_offset` that
    are done. `is_snapshot`: the update is the whole state. `dead_ranges`, `redrives` and `producer` replace the stored
    values; None leaves them unchanged, as it does `isolations`. `added_dead_ranges`: dead ranges in addition to
    `dead_ranges`, or, if that is None, to the stored ones. `cause`: which step has made the update; `traced`: the
    changes of this step, None if they are `changes`. These two are not stored.
    """

    token: int
    durable: bool
    start_offset: int
    lease_bound: int
    done_count: int
    changes: tuple[StateBatch, ...] = ()
    is_snapshot: bool = False
    dead_ranges: tuple[DeadRange, ...] | None = None
    redrives: tuple[RedrivenRanges, ...] | None = None
    producer: Producer | None = None
    added_dead_ranges: tuple[DeadRange, ...] = ()
    isolations: tuple[Isolation, ...] | None = None
    cause: int = 0
    traced: tuple[StateBatch, ...] | None = None


class LoadedState(NamedTuple):
    """Stored state of a share partition.

    `is_complete`: no appended update can be missing. `withheld_ms`: remaining time for which records that may be leased
    are withheld; 0 if the state is complete. `isolations`: of the share partition `BASE`, ascending by `first`.
    """

    state_epoch: int
    leader_epoch: int
    snapshot_epoch: int
    start_offset: int
    lease_bound: int
    done_count: int
    changes: tuple[StateBatch, ...]
    dead_ranges: tuple[DeadRange, ...]
    redrives: tuple[RedrivenRanges, ...]
    producer: Producer | None
    is_complete: bool
    withheld_ms: int
    isolations: tuple[Isolation, ...] = ()


class ShareSummary(NamedTuple):
    """Epochs and progress of a share partition, from which its lag is computed.

    `done_count`: number of offsets at or above `start_offset` that are done. `is_archiving`: some records are not
    copied to the dead-letter topic yet. `queues`: numbers of the backlog queues that may have a state.
    """

    state_epoch: int
    leader_epoch: int
    start_offset: int
    done_count: int
    is_archiving: bool = False
    queues: tuple[int, ...] = ()


class AcquiredRange(NamedTuple):
    """Offsets `first` to `last` leased to one member, with their delivery count (from 1)."""

    first: int
    last: int
    deliveries: int


class AlteredRanges(NamedTuple):
    """Result of an operation on range leases: the ranges for which it was done, those of the others that are
    dead-lettered or discarded, and the update to store, None for none."""

    altered: list[AcquiredRange]
    ended: list[AcquiredRange]
    update: Update | None


class AcknowledgementBatch(NamedTuple):
    """Acknowledgement of the offsets `first` to `last`.

    `types`: one acknowledgement type for all offsets, or one for each. `delay_ms`: delay before a released record is
    offered again, -1 for the group's backoff; of a renewal, the duration of the lease from now on, -1 to leave it
    unchanged. `reason`: reason of a rejection, or of a release, for which a record without an attempt left is
    dead-lettered. `delivery_count`: number of the delivery
    that is acknowledged, -1 for any. `was_handed_out`: false in the release of records that no client has received:
    their delivery does not count as an attempt, and they are offered again at once.
    """

    first: int
    last: int
    types: bytes
    delay_ms: int = -1
    reason: str = ""
    delivery_count: int = -1
    was_handed_out: bool = True


class ArchivingRange(NamedTuple):
    """Range of records in the state ARCHIVING, which are not copied to the dead-letter topic yet."""

    key: ShareKey
    first: int
    last: int
    deliveries: int
    reservation: DeadLetterReservation


class RedriveResult(NamedTuple):
    """Numbers of offsets that a redrive request offered again, that an earlier request with the same redrive id had
    offered, and that are deleted from the log."""

    redriven: int
    repeated: int
    deleted: int


class LeaseHolder(NamedTuple):
    """Number of records leased to one member, and the age of its oldest lease in ms."""

    member_id: str
    leased: int
    oldest_ms: int


class ShareCounts(NamedTuple):
    """Numbers of records of one share partition, by state.

    `start_offset` and `end_offset`: bounds of the in-flight batches. `lag`: number of records that are not done, up
    to the end of the log that the group may read. `dead`: number of dead-lettered records that no redrive has offered
    again. `holders`: the members that have leased records.
    """

    start_offset: int
    end_offset: int
    lag: int
    leased: int
    in_backoff: int
    withheld: int
    archiving: int
    dead: int
    holders: tuple[LeaseHolder, ...]


def merge_counts(counts: Sequence[ShareCounts]) -> ShareCounts:
    """Return the sums of the counts of several share partitions of one topic partition."""
    if len(counts) == 1:
        return counts[0]
    holders: dict[str, LeaseHolder] = {}
    for each in (holder for one in counts for holder in one.holders):
        known = holders.get(each.member_id, LeaseHolder(each.member_id, 0, 0))
        holders[each.member_id] = LeaseHolder(
            each.member_id, known.leased + each.leased, max(known.oldest_ms, each.oldest_ms)
        )
    return ShareCounts(
        start_offset=min(one.start_offset for one in counts),
        end_offset=max(one.end_offset for one in counts),
        lag=sum(one.lag for one in counts),
        leased=sum(one.leased for one in counts),
        in_backoff=sum(one.in_backoff for one in counts),
        withheld=sum(one.withheld for one in counts),
        archiving=sum(one.archiving for one in counts),
        dead=sum(one.dead for one in counts),
        holders=tuple(holders[member] for member in sorted(holders)),
    )
