"""Facts about a group from which `findings` finds what keeps it from going on.

The coordinator of the group knows its members and positions, the leader of a partition its log and its share
partitions, and each broker whom it has throttled or refused. Nothing here says what is wrong: these are numbers, as
they were when the brokers were asked, and, for what changes, by how much it has changed during the sample.

Times are durations in milliseconds up to the moment of the question. -1 stands for an unknown number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

UNKNOWN: Final = -1
"""A number that is not known."""

NO_LEADER: Final = -1
"""Id of the leader of a partition without one."""


class GroupType(StrEnum):
    """Types of groups, as in lists of groups."""

    CLASSIC = "classic"
    CONSUMER = "consumer"
    SHARE = "share"


class ShareOrder(StrEnum):
    """Order in which a share group gets records (`mansio.share.order`)."""

    NONE = "none"
    KEY = "key"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True)
class Place:
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member of a group. `silent_ms`: time since its last heartbeat, `UNKNOWN` while one of its requests is parked;
    `session_ms`: its session timeout. `is_awaited`: a rebalance waits for it, to join again or to revoke partitions."""

    member_id: str
    client_id: str
    client_host: str
    places: tuple[Place, ...] = ()
    silent_ms: int = UNKNOWN
    session_ms: int = 0
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class OpenTransactionFacts:
    """The first transaction of a partition that is not ended. `open_ms`: since the timestamp of its first batch."""

    first_offset: int
    producer_id: int
    open_ms: int


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The log of a partition on its leader.

    `start_offset`, `stable_offset` (last stable offset) and `end_offset` (high watermark) are offsets.
    `records_ahead`: number of records, without control records, from the position of the group to `end_offset`;
    `stable_records_ahead`: to `stable_offset`. Both are `UNKNOWN` if there are too many batches to count them.
    `appended`: number of offsets that were appended during the sample. `next_due_ms`: time until the first delayed
    record is due. `paused_schedules`: names of some of the schedules that are paused. `is_hot`: far more records are
    published to it than to the other partitions of its topic."""

    start_offset: int
    stable_offset: int
    end_offset: int
    records_ahead: int = UNKNOWN
    stable_records_ahead: int = UNKNOWN
    appended: int = 0
    transaction: OpenTransactionFacts | None = None
    delayed: int = 0
    next_due_ms: int = UNKNOWN
    schedules: int = 0
    paused_schedules: tuple[str, ...] = ()
    is_hot: bool = False


@dataclass(frozen=True, slots=True)
class HolderFacts:
    """A member that has leased records of a partition. `oldest_ms`: age of its oldest lease since the delivery or the
    last renewal."""

    member_id: str
    leased: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class RetriedFacts:
    """The record of a share partition with the most attempts that is not done. `due_ms`: time until it is offered
    again, 0 if it is offered or leased now."""

    offset: int
    attempts: int
    due_ms: int = 0


@dataclass(frozen=True, slots=True)
class HeldFacts:
    """Records of a share partition that wait for an earlier one of their key, or, in order by partition, of their
    partition. `offset`: the record for which most of them wait; `waiting`: number of records that wait for it; `key`:
    its group key, None if it is not known or not shown; `total`: number of records that wait for any; `is_complete`:
    whether all were counted."""

    offset: int
    waiting: int
    total: int
    key: bytes | None = None
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """The delivery state of a partition for a share group.

    Numbers of records: `lag` (not done, as far as the group may read, without control records behind the last delivered
    one), `leased`, `in_backoff`, `withheld`, `archiving`, and `done` during the sample. `has_available`: whether a
    member without leases could lease a record now. `waiting_receives`: requests that wait for records; `idle_ms`: time
    since a request has asked for records. `record_locks_max`, `lock_ms`, `delivery_limit`: settings of the group."""

    lag: int
    leased: int = 0
    in_backoff: int = 0
    withheld: int = 0
    archiving: int = 0
    done: int = 0
    has_available: bool = False
    waiting_receives: int = 0
    idle_ms: int = UNKNOWN
    record_locks_max: int = 0
    lock_ms: int = 0
    delivery_limit: int = 0
    order: ShareOrder = ShareOrder.NONE
    is_committed_only: bool = False
    holders: tuple[HolderFacts, ...] = ()
    retried: RetriedFacts | None = None
    held: HeldFacts | None = None
    keys_at_lease_limit: int = 0
    keys_at_rate_limit: int = 0
    dead_letter_error: str = ""


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A partition that a group reads.

    `position`: committed offset of an ordinary group at the begin of the sample; `committed_ms`: since it was
    committed; `progress`: by how many offsets it has moved during the sample. `leader` and `missing_brokers` (in-sync
    replicas without a session) are of the metadata. `error`: why the leader has told nothing, "" if it has."""

    place: Place
    leader: int
    missing_brokers: tuple[int, ...] = ()
    error: str = ""
    position: int = UNKNOWN
    committed_ms: int = UNKNOWN
    progress: int = 0
    log: LogFacts | None = None
    share: ShareFacts | None = None

    @property
    def lag(self) -> int:
        """Number of records that the group has not done, without control records as far as they were counted;
        `UNKNOWN` if the leader or the position is not known."""
        if self.share is not None:
            return self.share.lag
        if self.log is None:
            return UNKNOWN
        if self.position < 0:
            return 0 if self.log.end_offset == self.log.start_offset else UNKNOWN
        ahead = self.log.records_ahead
        if ahead < 0:
            ahead = self.log.end_offset - max(self.position, self.log.start_offset)
        return max(ahead - self.progress, 0)

    @property
    def done(self) -> int:
        """Number of records, or offsets, that the group has done during the sample."""
        return self.progress if self.share is None else self.share.done


@dataclass(frozen=True, slots=True)
class TransactionFacts:
    """A transaction that its coordinator knows and that is open in a partition of the group. `open_ms`: since its
    begin."""

    transactional_id: str
    producer_id: int
    open_ms: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class ThrottleFacts:
    """A client whose reads are throttled. `pause_ms`: the rest of its pause; `quota`: arguments of `mansio quota set`
    for its quota; `rate`: bytes per second."""

    user: str
    client_id: str
    pause_ms: int
    rate: int
    quota: str


@dataclass(frozen=True, slots=True)
class RefusalFacts:
    """An operation that a client was refused recently and still is. `resource_type`: "group" or "topic"; `denied_by`:
    the ACL that denies it, "" if none allows it; `remedy`: the command that helps."""

    principal: str
    client_id: str
    operation: str
    resource_type: str
    name: str
    ago_ms: int
    count: int
    remedy: str
    denied_by: str = ""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """All that is known about a group.

    `state`: Kafka's name of it, "Dead" if there is no group. `settled_ms`: since the group has its members and their
    partitions. `rebalances`: number of rebalances since it committed an offset, or joined first. `rebalance_ms`: how
    long a rebalance still waits for members. `sample_ms`: duration of the sample, 0 if there was none.
    `silent_brokers`: ids of brokers that did not answer."""

    group: str
    group_type: GroupType
    state: str
    members: tuple[MemberFacts, ...] = ()
    partitions: tuple[PartitionFacts, ...] = ()
    transactions: tuple[TransactionFacts, ...] = ()
    throttles: tuple[ThrottleFacts, ...] = ()
    refusals: tuple[RefusalFacts, ...] = ()
    settled_ms: int = UNKNOWN
    rebalances: int = 0
    rebalance_ms: int = UNKNOWN
    sample_ms: int = 0
    silent_brokers: tuple[int, ...] = ()

    @property
    def is_share(self) -> bool:
        return self.group_type is GroupType.SHARE

    @property
    def lag(self) -> int:
        """Number of records that the group has not done in the partitions where it is known."""
        return sum(max(each.lag, 0) for each in self.partitions)

    @property
    def done(self) -> int:
        """Number of records, or offsets, that the group has done during the sample."""
        return sum(max(each.done, 0) for each in self.partitions)
