"""Schemas of Mansio's own APIs in Kafka's framing: operations on leases, delayed records and schedules, which Kafka's
protocol lacks, the commit of batches, and the authentication of brokers.

`AcknowledgeRecords` acknowledges leased records like ShareAcknowledge, and in addition with the delay of a release, the
reason of a rejection and the delivery count; it needs no session. `DescribeLeases` returns leases and counts of share
partitions that a broker leads. `RedriveRecords` makes dead-lettered records available to their group again.
`ListDelayedRecords` returns pending records of partitions, `AlterDelayedRecords` cancels or reschedules them.
`ListSchedules` returns the recurring schedules of partitions, `AlterSchedules` creates, pauses, resumes or deletes one.
All of these go to the leader of the partition and are advertised in ApiVersions: other clients skip unknown keys
(KIP-35).

`PrepareTransaction` lets a transaction wait for a decision instead of timing out, `CommitBatch` decides about the
transactions of all tasks of a batch. They go to the coordinator of the transactional id or of the query id, found by
FindCoordinator with the key type of transactional ids, and are advertised, too. `DescribeHealth` returns the health of
the broker that answers, and is advertised.

`SetPassword` changes the password of a user and keeps the previous one valid for some time, which KIP-554 cannot: both
need the same salt, which clients do not know. `CheckAuthorization` returns what a user may do, and the ACL that
decides it. Any broker processes both; they are advertised.
`CreateSqsAccessKey`, `DescribeSqsAccessKeys` and `DeleteSqsAccessKey` manage the access keys with which users sign
requests to the SQS endpoint. Any broker processes them; they are advertised.

`CreateApiKey`, `DescribeApiKeys` and `DeleteApiKey` administer the API keys of users. Any broker processes them; they
are advertised.

`TraceRecord` returns what has happened to a record. Any broker processes it; it is advertised. `ReadTrace` is what it
asks the other brokers; it is not advertised. `SearchRecords` is one step of a search for records by key or id. It goes
to the leader of the partition and is advertised.

`LeaseRanges` leases ranges of offsets to a member that reads the records by Fetch; `AlterRangeLeases` renews,
claims or accepts such leases, and releases those that it does not name. Both go to the leader of the partition and are
advertised.

`DescribeSchemas` and `AlterSchemas` are the operations of the schema registry, with JSON objects as in Confluent's REST
API. They go to the leader of `_schemas`, found by FindCoordinator with key type 100, and are advertised.

`ReceiveRecords`, `ReleaseLeases` and `RegisterShareGroup` are sent by a broker that receives records for a client from
share partitions that other brokers lead. They are not advertised.

`ExplainGroup` returns what keeps a group from going on. It goes to the coordinator of the group and is advertised.
`CollectGroupFacts` is sent by that coordinator to the other brokers, and is not advertised.

`ChallengeBroker` and `AuthenticateBroker` are the two steps in which a broker and the broker to which it connected
prove to each other that they know the cluster secret (`state.broker_handshake`). They are not advertised.
`ConfirmHandOver` asks another broker whether it, too, finds a broker killed (`metadata.hand_over`); it is not
advertised either.

`DescribeHotPartitions` returns load and hot partitions of the broker that answers, and is advertised.
`DescribePartitionRates`, by which brokers learn the rates of partitions that others lead, is not.

The schemas are classes like those of the package kio, from which `messages` compiles codecs. Every message is flexible
(KIP-482), so that tagged fields can be added.
"""

# No postponed annotations: `schema_compiler.schema_fields` needs the types themselves.

import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final

from mansio.wire.api_versions import ApiKey

REQUEST: Final = "request"

_BOOL: Final = {"kafka_type": "bool"}
_INT8: Final = {"kafka_type": "int8"}
_INT16: Final = {"kafka_type": "int16"}
_INT32: Final = {"kafka_type": "int32"}
_INT64: Final = {"kafka_type": "int64"}
_FLOAT64: Final = {"kafka_type": "float64"}
_TEXT: Final = {"kafka_type": "string"}
_BYTES: Final = {"kafka_type": "bytes"}
_UUID: Final = {"kafka_type": "uuid"}
_ERROR: Final = {"kafka_type": "error_code"}

NO_DUE_MS: Final = -1
"""Due time in a response if there is none."""
NO_END_MS: Final = -1
"""End, or duration, of an API key that does not end."""


class DelayChange(IntEnum):
    """Changes of pending records in AlterDelayedRecords."""

    CANCEL = 0
    DELIVER_AT = 1
    """Deliver at the time `time_ms`, since the Unix epoch."""
    DELIVER_AFTER = 2
    """Deliver `time_ms` after the leader has received the request."""


class ScheduleChange(IntEnum):
    """Changes of schedules in AlterSchedules."""

    CREATE = 0
    PAUSE = 1
    RESUME = 2
    DELETE = 3


class _Flexible:
    __slots__ = ()
    __flexible__: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeBatch(_Flexible):
    """Acknowledgement of the offsets `first_offset` to `last_offset`, both included.

    `types`: acknowledge types, one byte for all offsets or one for each; `delay_ms`: time before released records are
    offered again, -1 for the group's backoff; of a renewal, the duration of the lease, -1 for the one it has;
    `reason`: of a rejection, or of a release after the last attempt, for the dead-lettered record;
    `delivery_count`: the acknowledgement applies only to the delivery with this count, -1 to any."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    types: bytes = field(metadata=_BYTES)
    delay_ms: int = field(metadata=_INT64, default=-1)
    reason: str = field(metadata=_TEXT, default="")
    delivery_count: int = field(metadata=_INT32, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgePartition(_Flexible):
    partition_index: int = field(metadata=_INT32)
    batches: tuple[AcknowledgeBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AcknowledgePartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeRecordsRequest(_Flexible):
    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)
    topics: tuple[AcknowledgeTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedPartition(_Flexible):
    """Result of one partition. With an error none of its acknowledgements is applied."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AcknowledgedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeRecordsResponse(_Flexible):
    """Response. `acquisition_lock_timeout_ms`: duration of renewed leases; 0 if unknown."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    acquisition_lock_timeout_ms: int = field(metadata=_INT32, default=0)
    topics: tuple[AcknowledgedTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[int, ...] = field(metadata=_INT32, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLeasesRequest(_Flexible):
    """Request. `topics` None: all share partitions of the group that the broker has loaded; `ranges_max`: limit on the
    leased ranges of each share partition in the response, which begin with the lowest. `with_states`: also return the
    ranges that wait for a retry or are dead-lettered; `from_offset`: only those that begin at or above it."""

    group_id: str = field(metadata=_TEXT)
    topics: tuple[DescribeTopic, ...] | None
    ranges_max: int = field(metadata=_INT32)
    with_states: bool = field(metadata={**_BOOL, "tag": 0}, default=False)
    from_offset: int = field(metadata={**_INT64, "tag": 1}, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeases(_Flexible):
    """Leases of one member. `leased`: number of records; `oldest_ms`: age of the oldest lease since it was granted or
    renewed."""

    member_id: str = field(metadata=_TEXT)
    leased: int = field(metadata=_INT64)
    oldest_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRange(_Flexible):
    """Consecutive offsets that are leased to one member and have the same delivery count. `age_ms`: time since the
    lease was granted or renewed; `lease_ms`: its duration, -1 if the broker does not say it. `state`: 1 leased, and in
    an answer with states 0 waiting for a retry, due at the wall-clock time `due_ms`, -1 for at once; 3 being
    dead-lettered; 4 dead-lettered."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    member_id: str = field(metadata=_TEXT)
    delivery_count: int = field(metadata=_INT32)
    age_ms: int = field(metadata=_INT64)
    lease_ms: int = field(metadata={**_INT64, "tag": 0}, default=-1)
    state: int = field(metadata={**_INT8, "tag": 1}, default=1)
    due_ms: int = field(metadata={**_INT64, "tag": 2}, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedPriority(_Flexible):
    """Records of one priority in one share partition. `priority`: 0 normal, 1 high, 2 low; the others are as in
    `DescribedPartition`."""

    priority: int = field(metadata=_INT32)
    start_offset: int = field(metadata=_INT64)
    end_offset: int = field(metadata=_INT64)
    lag: int = field(metadata=_INT64)
    leased: int = field(metadata=_INT64)
    in_backoff: int = field(metadata=_INT64)
    dead: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey(_Flexible):
    """A group key."""

    key: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedPartition(_Flexible):
    """State of one share partition. `start_offset` and `end_offset` bound the records in flight.

    Numbers of records: `lag` (neither acknowledged nor dead), `leased`, `in_backoff`, `withheld`, `archiving`, `dead`.
    `holders`: leases by member; `dead_letter_error`: last error of a copy to the dead-letter topic, "" for none;
    `priorities`: the records of each priority, if the topic has priorities. `keys_at_lease_limit` and
    `keys_at_rate_limit`: number of group keys with records that a limit by key holds back, `limited_keys`: some of
    them. `isolated_key_count`: number of group keys with a backlog that a fair group has isolated, `isolated_keys`:
    some of them, a long one as its digest."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    start_offset: int = field(metadata=_INT64, default=-1)
    end_offset: int = field(metadata=_INT64, default=-1)
    lag: int = field(metadata=_INT64, default=-1)
    leased: int = field(metadata=_INT64, default=0)
    in_backoff: int = field(metadata=_INT64, default=0)
    withheld: int = field(metadata=_INT64, default=0)
    archiving: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)
    dead_letter_error: str = field(metadata=_TEXT, default="")
    holders: tuple[MemberLeases, ...]
    ranges: tuple[LeasedRange, ...]
    priorities: tuple[DescribedPriority, ...] = field(metadata={"tag": 0}, default=())
    keys_at_lease_limit: int = field(metadata={**_INT64, "tag": 1}, default=0)
    keys_at_rate_limit: int = field(metadata={**_INT64, "tag": 2}, default=0)
    limited_keys: tuple[GroupKey, ...] = field(metadata={"tag": 3}, default=())
    isolated_key_count: int = field(metadata={**_INT64, "tag": 4}, default=0)
    isolated_keys: tuple[GroupKey, ...] = field(metadata={"tag": 5}, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[DescribedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLeasesResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    topics: tuple[DescribedTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange(_Flexible):
    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveRecordsRequest(_Flexible):
    """Request. `offsets` None: all dead records of the share partition; `most`: maximum number of records to redrive.
    With the same `redrive_id` an offset is redriven only once, even if its record is dead again."""

    redrive_id: str = field(metadata=_TEXT)
    group_id: str = field(metadata=_TEXT)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    offsets: tuple[OffsetRange, ...] | None
    most: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveRecordsResponse(_Flexible):
    """Response, with numbers of records. `redriven` by this request; `repeated`: redriven by an earlier request with
    the same id; `deleted` from the log; `dead`: records of the share partition that remain dead."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    redriven: int = field(metadata=_INT64, default=0)
    repeated: int = field(metadata=_INT64, default=0)
    deleted: int = field(metadata=_INT64, default=0)
    dead: int = field(metadata=_INT64, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecordsQuery(_Flexible):
    """Query for pending records of one partition that are due in [`due_from_ms`, `due_to_ms`), in the order of due time
    and id, behind (`after_due_ms`, `after_id`).

    `ids` None: all ids; otherwise only these, whatever their due time. `key` None: all keys. `records_max`: 0 for the
    counts only. `value_bytes_max`: longer values are truncated; -1: records without content, whose ids and due times
    need not be read from the log."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    due_from_ms: int = field(metadata=_INT64)
    due_to_ms: int = field(metadata=_INT64)
    after_due_ms: int = field(metadata=_INT64, default=-1)
    after_id: int = field(metadata=_INT64, default=-1)
    ids: tuple[int, ...] | None = field(metadata=_INT64, default=None)
    key: bytes | None = field(metadata=_BYTES, default=None)
    records_max: int = field(metadata=_INT32)
    value_bytes_max: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListDelayedRecordsRequest(_Flexible):
    queries: tuple[PendingRecordsQuery, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecordHeader(_Flexible):
    name: str = field(metadata=_TEXT)
    value: bytes | None = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecordDescription(_Flexible):
    """A pending record. `id`: the offset at which it was accepted; `due_ms`: Unix time of its delivery;
    `timestamp_ms`: of the producer; `value_size`: of
    the whole value in bytes, -1 for null; `error_message`: why the stored record cannot be read; it has no content
    then."""

    id: int = field(metadata=_INT64)
    due_ms: int = field(metadata=_INT64)
    timestamp_ms: int = field(metadata=_INT64, default=-1)
    key: bytes | None = field(metadata=_BYTES, default=None)
    value: bytes | None = field(metadata=_BYTES, default=None)
    value_size: int = field(metadata=_INT32, default=-1)
    headers: tuple[PendingRecordHeader, ...]
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPendingRecords(_Flexible):
    """Result of one query. `pending_count`, `pending_bytes`: of the partition; `next_due_ms`: of its earliest record,
    `NO_DUE_MS` if none is pending; `now_ms`: the leader's wall clock; `after_due_ms` and `after_id`: behind which the
    next query continues, -1 if `records` has the last one."""

    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    pending_count: int = field(metadata=_INT64, default=0)
    pending_bytes: int = field(metadata=_INT64, default=0)
    next_due_ms: int = field(metadata=_INT64, default=-1)
    now_ms: int = field(metadata=_INT64, default=-1)
    records: tuple[PendingRecordDescription, ...]
    after_due_ms: int = field(metadata=_INT64, default=-1)
    after_id: int = field(metadata=_INT64, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListDelayedRecordsResponse(_Flexible):
    """Response. `results`: in the order of the queries."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    results: tuple[ListedPendingRecords, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterDelayedRecordsRequest(_Flexible):
    """Request. `change`: a `DelayChange`; `timeout_ms`: how long the response waits until the change is committed."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    ids: tuple[int, ...] = field(metadata=_INT64)
    change: int = field(metadata=_INT8)
    time_ms: int = field(metadata=_INT64, default=0)
    timeout_ms: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterDelayedRecordsResponse(_Flexible):
    """Response. `ids`: of the records that were pending and are changed now."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    ids: tuple[int, ...] = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulesQuery(_Flexible):
    """Query for the schedules of one partition. `name` None: all."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    name: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedulesRequest(_Flexible):
    """Request. `times_max`: number of due times per schedule; `value_bytes_max`: longer values are truncated."""

    queries: tuple[SchedulesQuery, ...]
    times_max: int = field(metadata=_INT32)
    value_bytes_max: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecordHeader(_Flexible):
    name: str = field(metadata=_TEXT)
    value: bytes | None = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDescription(_Flexible):
    """A schedule. `cron`: "" if it has an interval; `every_ms`: 0 if it has a cron expression; `catch_up`: 0 none, 1
    the last one, 2 all missed firings; `next_due_ms`: `NO_DUE_MS` if it is paused or never fires again, `next_times_ms`
    continues it; `firings`: number of records that it has appended; `value_size`: of the whole value in bytes, -1 for
    null; `error_message`: why it cannot fire at present."""

    id: uuid.UUID | None = field(metadata=_UUID)
    name: str = field(metadata=_TEXT)
    cron: str = field(metadata=_TEXT)
    every_ms: int = field(metadata=_INT64)
    timezone: str = field(metadata=_TEXT)
    catch_up: int = field(metadata=_INT8)
    key: bytes | None = field(metadata=_BYTES)
    value: bytes | None = field(metadata=_BYTES)
    value_size: int = field(metadata=_INT32)
    headers: tuple[ScheduleRecordHeader, ...]
    created_ms: int = field(metadata=_INT64)
    is_paused: bool = field(metadata=_BOOL)
    next_due_ms: int = field(metadata=_INT64)
    next_times_ms: tuple[int, ...] = field(metadata=_INT64, default=())
    firings: int = field(metadata=_INT64)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSchedules(_Flexible):
    """Result of one query, sorted by name."""

    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    schedules: tuple[ScheduleDescription, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedulesResponse(_Flexible):
    """Response. `results`: in the order of the queries."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    results: tuple[ListedSchedules, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterSchedulesRequest(_Flexible):
    """Request. `change`: a `ScheduleChange` of the schedule `name`; the fields from `id` to `headers` are those of
    `ScheduleDescription`, for CREATE only; `timeout_ms`: how long the response waits until the change is committed."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    change: int = field(metadata=_INT8)
    name: str = field(metadata=_TEXT)
    id: uuid.UUID | None = field(metadata=_UUID, default=None)
    cron: str = field(metadata=_TEXT, default="")
    every_ms: int = field(metadata=_INT64, default=0)
    timezone: str = field(metadata=_TEXT, default="")
    catch_up: int = field(metadata=_INT8, default=0)
    key: bytes | None = field(metadata=_BYTES, default=None)
    value: bytes | None = field(metadata=_BYTES, default=None)
    headers: tuple[ScheduleRecordHeader, ...] = ()
    timeout_ms: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterSchedulesResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRecordsRequest(_Flexible):
    """Request of the broker `node_id` for available records of the partitions of `topics` that the receiver leads,
    leased to `member_id`, a new id. `records_max`: 0 to lease none, but to wait
    for at most `wait_ms` until one may be available; `bytes_max`: of stored batches; `lease_ms`: duration of the
    leases, -1 for the group's."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)
    topics: tuple[str, ...] = field(metadata=_TEXT)
    records_max: int = field(metadata=_INT32)
    bytes_max: int = field(metadata=_INT32)
    wait_ms: int = field(metadata=_INT32)
    lease_ms: int = field(metadata=_INT64, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedHeader(_Flexible):
    name: str = field(metadata=_TEXT)
    value: bytes | None = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRecord(_Flexible):
    """A leased record. `delivery_count`: 1 for the first delivery; `timestamp_ms`: since the Unix epoch."""

    offset: int = field(metadata=_INT64)
    delivery_count: int = field(metadata=_INT32)
    timestamp_ms: int = field(metadata=_INT64)
    key: bytes | None = field(metadata=_BYTES, default=None)
    value: bytes | None = field(metadata=_BYTES, default=None)
    headers: tuple[ReceivedHeader, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPartition(_Flexible):
    """Leased records of one partition, or the error for which none were leased."""

    topic: str = field(metadata=_TEXT)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    records: tuple[ReceivedRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveRecordsResponse(_Flexible):
    """Response. `lock_ms`: duration of the leases, 0 if there are none. `is_available`: of a request for 0 records,
    whether one may be available."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    lock_ms: int = field(metadata=_INT64, default=0)
    is_available: bool = field(metadata=_BOOL, default=False)
    partitions: tuple[ReceivedPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeasesRequest(_Flexible):
    """Request of the broker `node_id` to release all leases of a member of ReceiveRecords, those of a request in
    progress included. The deliveries do not count."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeasesResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterShareGroupRequest(_Flexible):
    """Request of the broker `node_id` to the coordinator of a share group: to create the group if there is none, and to
    record that it has state of these topics."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    group_id: str = field(metadata=_TEXT)
    topics: tuple[str, ...] = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterShareGroupResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmHandOverRequest(_Flexible):
    """Request of the broker `node_id`, whose connections to the broker `suspect_id` have ended and whose connects to it
    are refused. `suspect_epoch`: the epoch of the session that it would end."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    suspect_id: int = field(metadata=_INT32)
    suspect_epoch: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmHandOverResponse(_Flexible):
    """Response. `confirmed`: whether the same is true of the broker that answers."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    confirmed: bool = field(metadata=_BOOL, default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTransactionRequest(_Flexible):
    """Request of a producer whose batches in the transaction are all acknowledged."""

    transactional_id: str = field(metadata=_TEXT)
    producer_id: int = field(metadata=_INT64)
    producer_epoch: int = field(metadata=_INT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTransactionResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTransaction(_Flexible):
    """A prepared transaction of one task."""

    transactional_id: str = field(metadata=_TEXT)
    producer_id: int = field(metadata=_INT64)
    producer_epoch: int = field(metadata=_INT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatchRequest(_Flexible):
    """Request. `batch_id`: ascending within the query; `committed`: false aborts the transactions, except those that a
    decision commits, and without any it changes nothing and asks for the last batch; `transactions`: those of the tasks
    of the batch; `abandoned`: further ones to abort, of tasks that were repeated."""

    query_id: str = field(metadata=_TEXT)
    batch_id: int = field(metadata=_INT64)
    committed: bool = field(metadata=_BOOL)
    transactions: tuple[BatchTransaction, ...]
    abandoned: tuple[BatchTransaction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatchResponse(_Flexible):
    """Response. `last_batch_id`: the last batch of the query that is decided, -2**63 for none."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    last_batch_id: int = field(metadata={**_INT64, "tag": 0}, default=-(2**63))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeBrokerRequest(_Flexible):
    """Request. `nonce`: random bytes of the broker that connects."""

    nonce: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeBrokerResponse(_Flexible):
    """Response. `nonce`: random bytes of the broker that accepted the connection, valid for one proof on this
    connection."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    nonce: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticateBrokerRequest(_Flexible):
    """Request with the id, the broker epoch and the proof of the broker that connects."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    proof: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticateBrokerResponse(_Flexible):
    """Response. `proof`: that of the broker that accepted the connection; empty with an error, after which that broker
    closes the connection."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    proof: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequestRequest(_Flexible):
    """Request. `node_id`, `broker_epoch`: of the broker that forwards. `is_own`: whether the request is that broker's
    own, which clients may not send; `client_address`: of the client for which it is made, "" for none; `user`,
    `listener`, `credential_revision`, `groups`, `credential_id`, `is_by_token`: see `ports.ForwardedClient`. `request`:
    the request without its length, whose header has the client id."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    is_own: bool = field(metadata=_BOOL)
    client_address: str = field(metadata=_TEXT)
    user: str = field(metadata=_TEXT)
    listener: str = field(metadata=_TEXT)
    credential_revision: int = field(metadata=_INT64)
    request: bytes = field(metadata=_BYTES)
    groups: tuple[str, ...] = field(metadata={**_TEXT, "tag": 0}, default=())
    credential_id: str = field(metadata={**_TEXT, "tag": 1}, default="")
    is_by_token: bool = field(metadata={**_BOOL, "tag": 2}, default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequestResponse(_Flexible):
    """Response. `throttle_time_ms`: the client exceeds its quota; the broker that forwards delays it. `response`: that
    to the forwarded request, without its length; empty with an error."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    response: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPasswordRequest(_Flexible):
    """Request. `password`: the new one in UTF-8; `previous_valid_ms`: time for which the present one stays valid, 0:
    not at all."""

    user: str = field(metadata=_TEXT)
    password: bytes = field(metadata=_BYTES, repr=False)
    previous_valid_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPasswordResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizationQuery(_Flexible):
    """An operation on a resource, with the numbers of ACLs."""

    operation: int = field(metadata=_INT8)
    resource_type: int = field(metadata=_INT8)
    resource_name: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAuthorizationRequest(_Flexible):
    """Request. `user`: the name of a user who is in `groups` and connects from `host`; None: the client that asks, and
    `groups` and `host` do not count."""

    user: str | None = field(metadata=_TEXT)
    groups: tuple[str, ...] = field(metadata=_TEXT, default=())
    host: str = field(metadata=_TEXT, default="")
    queries: tuple[AuthorizationQuery, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizationDecision(_Flexible):
    """Answer to one query. `error_code`: the query is invalid, and nothing else counts. If `has_acl`, the fields from
    `resource_type` on are the ACL that decides; else the user is a super user (`is_super_user`), there is no authorizer
    (`is_open`), or no ACL applies."""

    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    is_allowed: bool = field(metadata=_BOOL, default=False)
    is_super_user: bool = field(metadata=_BOOL, default=False)
    is_open: bool = field(metadata=_BOOL, default=False)
    has_acl: bool = field(metadata=_BOOL, default=False)
    resource_type: int = field(metadata=_INT8, default=0)
    pattern_type: int = field(metadata=_INT8, default=0)
    resource_name: str = field(metadata=_TEXT, default="")
    principal: str = field(metadata=_TEXT, default="")
    host: str = field(metadata=_TEXT, default="")
    operation: int = field(metadata=_INT8, default=0)
    permission: int = field(metadata=_INT8, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAuthorizationResponse(_Flexible):
    """Response. `decisions`: in the order of the queries."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    decisions: tuple[AuthorizationDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSqsAccessKeyRequest(_Flexible):
    """Request for a new access key of a user."""

    user: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSqsAccessKeyResponse(_Flexible):
    """Response. `secret`: the secret access key, "" with an error."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    key_id: str = field(metadata=_TEXT, default="")
    secret: str = field(metadata=_TEXT, default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeSqsAccessKeysRequest(_Flexible):
    """Request. `user`: None for the keys of all users."""

    user: str | None = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedSqsAccessKey(_Flexible):
    """An access key. `created_ms`: Unix time; `secrets_key_id`: of the secrets key with which the secret is
    encrypted."""

    key_id: str = field(metadata=_TEXT)
    user: str = field(metadata=_TEXT)
    created_ms: int = field(metadata=_INT64)
    secrets_key_id: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeSqsAccessKeysResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    access_keys: tuple[DescribedSqsAccessKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteSqsAccessKeyRequest(_Flexible):
    """Request for the end of an access key."""

    key_id: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteSqsAccessKeyResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeHealthRequest(_Flexible):
    """Request for the health of the broker that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthProblem(_Flexible):
    """A problem or warning. `reason`: see docs/how-to/operations.md; `topic` None and `partition_index` -1 if it does
    not concern one partition."""

    reason: str = field(metadata=_TEXT)
    detail: str = field(metadata=_TEXT)
    topic: str | None = field(metadata=_TEXT, default=None)
    partition_index: int = field(metadata=_INT32, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLabel(_Flexible):
    """The label of the host of a broker."""

    broker_id: int = field(metadata=_INT32)
    label: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeHealthResponse(_Flexible):
    """Response. `is_session_held`: true on a single node; `session_lost_ms`: time since the Unix epoch from which the
    session is not held, -1 if it is held or the time is unknown; `problems`: why the broker is not ready;
    `broker_epoch`: the epoch of the session that is held, -1 without one. `host_labels`: of all brokers that are not
    hosts of their own."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    is_session_held: bool = field(metadata=_BOOL)
    session_lost_ms: int = field(metadata=_INT64)
    problems: tuple[HealthProblem, ...]
    warnings: tuple[HealthProblem, ...]
    broker_epoch: int = field(metadata={**_INT64, "tag": 0}, default=-1)
    host_labels: tuple[HostLabel, ...] = field(metadata={"tag": 1}, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedApiKey(_Flexible):
    """An API key, without the key itself. `created_ms`, `expires_ms`: since the Unix epoch."""

    key_id: str = field(metadata=_TEXT)
    user: str = field(metadata=_TEXT)
    created_ms: int = field(metadata=_INT64)
    expires_ms: int = field(metadata=_INT64, default=NO_END_MS)
    description: str = field(metadata=_TEXT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateApiKeyRequest(_Flexible):
    """Request. `valid_ms`: time after which the key ends, -1: it does not."""

    user: str = field(metadata=_TEXT)
    description: str = field(metadata=_TEXT, default="")
    valid_ms: int = field(metadata=_INT64, default=NO_END_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateApiKeyResponse(_Flexible):
    """Response. `key`: the key itself; empty with an error."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    api_key: DescribedApiKey | None = None
    key: bytes = field(metadata=_BYTES, default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeApiKeysRequest(_Flexible):
    """Request. `user` None: the keys of all users."""

    user: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeApiKeysResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    api_keys: tuple[DescribedApiKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteApiKeyRequest(_Flexible):
    key_id: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteApiKeyResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts(_Flexible):
    """What the leader of a partition knows of a record: see `state.trace.timeline`."""

    leader: int = field(metadata=_INT32)
    replicas: tuple[int, ...] = field(metadata=_INT32)
    in_sync: tuple[int, ...] = field(metadata=_INT32)
    log_start: int = field(metadata=_INT64)
    log_end: int = field(metadata=_INT64)
    is_stored: bool = field(metadata=_BOOL)
    timestamp_ms: int = field(metadata=_INT64)
    leader_epoch: int = field(metadata=_INT32)
    size_bytes: int = field(metadata=_INT32)
    origin: str = field(metadata=_TEXT)
    accepted_offset: int = field(metadata=_INT64)
    due_ms: int = field(metadata=_INT64)
    is_pending: bool = field(metadata=_BOOL)
    is_aborted: bool = field(metadata=_BOOL)
    kept_until_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraceRequest(_Flexible):
    """Request of the broker `node_id` for the rows of the trace about a record, in the partitions of the trace that the
    receiver leads. `accepted_offset`: offset at which a delayed record was accepted, -1 for none; `needs_facts`: the
    receiver leads the partition of the record, and finds that offset. `failed_group`: a share group of which the last
    failed record is asked for instead, "" for none."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    offset: int = field(metadata=_INT64)
    accepted_offset: int = field(metadata=_INT64)
    needs_facts: bool = field(metadata=_BOOL)
    failed_group: str = field(metadata=_TEXT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRecord(_Flexible):
    """A record that a share group has rejected, or used up the attempts of, at `time_ms`."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    offset: int = field(metadata=_INT64)
    time_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow(_Flexible):
    """A row: see `wire.internal_records.trace_records` and `state.trace.coverage`."""

    kind: int = field(metadata=_INT8)
    cause: int = field(metadata=_INT8)
    attempt: int = field(metadata=_INT32)
    group: str = field(metadata=_TEXT)
    who: str = field(metadata=_TEXT)
    time_ms: int = field(metadata=_INT64)
    first: int = field(metadata=_INT64)
    size: int = field(metadata=_INT64)
    extra: int = field(metadata=_INT64)
    broker_id: int = field(metadata=_INT32)
    incarnation: int = field(metadata=_INT64)
    leader_epoch: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGap(_Flexible):
    """A time in which rows are missing. `dropped`: their number, -1 if it is unknown."""

    begin_ms: int = field(metadata=_INT64)
    end_ms: int = field(metadata=_INT64)
    dropped: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCoverage(_Flexible):
    """What the trace has of a broker process."""

    broker_id: int = field(metadata=_INT32)
    incarnation: int = field(metadata=_INT64)
    begin_ms: int = field(metadata=_INT64)
    end_ms: int = field(metadata=_INT64)
    is_live: bool = field(metadata=_BOOL)
    gaps: tuple[TraceGap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraceResponse(_Flexible):
    """Response. `missing`: what could not be read; the others are as in `broker.trace.trace_reader.LocalTrace`."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    facts: RecordFacts | None = None
    failed: FailedRecord | None = None
    rows: tuple[TraceRow, ...] = ()
    coverage: tuple[TraceCoverage, ...] = ()
    missing: tuple[str, ...] = field(metadata=_TEXT, default=())
    broker_id: int = field(metadata=_INT32, default=-1)
    incarnation: int = field(metadata=_INT64, default=-1)
    written_ms: int = field(metadata=_INT64, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecordRequest(_Flexible):
    """Request for the timeline of a record, or of the one that failed last in a share group. `group`: "" for the record
    at an offset."""

    topic: str = field(metadata=_TEXT)
    partition_index: int = field(metadata=_INT32)
    offset: int = field(metadata=_INT64)
    group: str = field(metadata=_TEXT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent(_Flexible):
    """An event of a timeline. `time_ms`: since the Unix epoch, `wait_ms`: since the event before it of the same group;
    -1 if they are not known. `attempt`: number of the delivery, 0 for none. `is_computed`: derived from what the broker
    knows now."""

    kind: str = field(metadata=_TEXT)
    time_ms: int = field(metadata=_INT64)
    group: str = field(metadata=_TEXT)
    attempt: int = field(metadata=_INT32)
    who: str = field(metadata=_TEXT)
    detail: str = field(metadata=_TEXT)
    wait_ms: int = field(metadata=_INT64)
    is_computed: bool = field(metadata=_BOOL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecordResponse(_Flexible):
    """Response. `total_ms`: from the publication to the last event with which a group was done, -1 if there is none.
    `uncertainties`: why events may be missing."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    topic: str = field(metadata=_TEXT, default="")
    partition_index: int = field(metadata=_INT32, default=-1)
    offset: int = field(metadata=_INT64, default=-1)
    events: tuple[TraceEvent, ...] = ()
    total_ms: int = field(metadata=_INT64, default=-1)
    uncertainties: tuple[str, ...] = field(metadata=_TEXT, default=())
    facts: RecordFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecordsRequest(_Flexible):
    """Request for one step of a search for records with a key, or with an id in the header `mansio-id`.

    `offset`: where the step begins, -1 at the first record of the time range; `end_offset`: where the search ends, -1:
    at the present end of what is committed, or of the time range. Records with a timestamp from `since_ms` to
    `until_ms`, both included, are found. `max_wait_ms`: for how long the broker searches. Either `key` or `record_id`
    is set."""

    topic: str = field(metadata=_TEXT)
    partition_index: int = field(metadata=_INT32)
    offset: int = field(metadata=_INT64)
    end_offset: int = field(metadata=_INT64)
    since_ms: int = field(metadata=_INT64)
    until_ms: int = field(metadata=_INT64)
    key: bytes | None = field(metadata=_BYTES)
    record_id: str | None = field(metadata=_TEXT)
    max_wait_ms: int = field(metadata=_INT32)
    max_matches: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMatch(_Flexible):
    """A record that was found."""

    offset: int = field(metadata=_INT64)
    timestamp_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedOffsets(_Flexible):
    """Offsets from `first_offset` to below `end_offset` that were not searched."""

    first_offset: int = field(metadata=_INT64)
    end_offset: int = field(metadata=_INT64)
    reason: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecordsResponse(_Flexible):
    """Response. The search of the partition is finished if `next_offset` is `end_offset`. `searched_bytes`: of the
    batches that the step has read; `left_bytes`: about so many are left."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    next_offset: int = field(metadata=_INT64, default=-1)
    end_offset: int = field(metadata=_INT64, default=-1)
    matches: tuple[RecordMatch, ...] = ()
    skipped: tuple[SkippedOffsets, ...] = ()
    searched_bytes: int = field(metadata=_INT64, default=0)
    left_bytes: int = field(metadata=_INT64, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainGroupRequest(_Flexible):
    """Request. `sample_ms`: for how long the brokers look at what changes; 0: only once."""

    group_id: str = field(metadata=_TEXT)
    sample_ms: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingNumber(_Flexible):
    """A number behind a finding."""

    name: str = field(metadata=_TEXT)
    value: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFinding(_Flexible):
    """One cause: see `mansio.state.blockage.findings.Finding`. `impact`: 0 blocks, 1 slows, 2 waits."""

    cause: str = field(metadata=_TEXT)
    impact: int = field(metadata=_INT8)
    is_certain: bool = field(metadata=_BOOL)
    text: str = field(metadata=_TEXT)
    advice: str = field(metadata=_TEXT)
    command: str = field(metadata=_TEXT)
    records: int = field(metadata=_INT64, default=-1)
    topic: str = field(metadata=_TEXT, default="")
    partition: int = field(metadata=_INT32, default=-1)
    offset: int = field(metadata=_INT64, default=-1)
    member_id: str = field(metadata=_TEXT, default="")
    client_id: str = field(metadata=_TEXT, default="")
    principal: str = field(metadata=_TEXT, default="")
    key: bytes | None = field(metadata=_BYTES, default=None)
    transactional_id: str = field(metadata=_TEXT, default="")
    producer_id: int = field(metadata=_INT64, default=-1)
    schedule: str = field(metadata=_TEXT, default="")
    evidence: tuple[FindingNumber, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainGroupResponse(_Flexible):
    """Response: see `mansio.state.blockage.findings.Explanation`."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    group_type: str = field(metadata=_TEXT, default="")
    state: str = field(metadata=_TEXT, default="")
    status: str = field(metadata=_TEXT, default="")
    summary: str = field(metadata=_TEXT, default="")
    lag: int = field(metadata=_INT64, default=-1)
    done: int = field(metadata=_INT64, default=0)
    sample_ms: int = field(metadata=_INT32, default=0)
    members: int = field(metadata=_INT32, default=0)
    findings: tuple[GroupFinding, ...] = ()
    more_findings: int = field(metadata=_INT32, default=0)
    hidden_topics: int = field(metadata=_INT32, default=0)
    silent_brokers: tuple[int, ...] = field(metadata=_INT32, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGroupPartition(_Flexible):
    """A partition of a group. `position`: its committed offset, -1 without one; `is_led`: whether the broker should
    lead the partition, and report about it."""

    partition_index: int = field(metadata=_INT32)
    position: int = field(metadata=_INT64, default=-1)
    is_led: bool = field(metadata=_BOOL, default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedGroupTopic(_Flexible):
    name: str = field(metadata=_TEXT)
    partitions: tuple[AskedGroupPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectGroupFactsRequest(_Flexible):
    """Request of the broker `node_id`, which coordinates a group that has read these partitions."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    group_id: str = field(metadata=_TEXT)
    is_share: bool = field(metadata=_BOOL)
    sample_ms: int = field(metadata=_INT32)
    topics: tuple[AskedGroupTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLog(_Flexible):
    """See `mansio.state.blockage.facts.LogFacts`. The fields from `open_offset` on are those of its open transaction,
    -1 without one."""

    start_offset: int = field(metadata=_INT64)
    stable_offset: int = field(metadata=_INT64)
    end_offset: int = field(metadata=_INT64)
    records_ahead: int = field(metadata=_INT64, default=-1)
    stable_records_ahead: int = field(metadata=_INT64, default=-1)
    appended: int = field(metadata=_INT64, default=0)
    delayed: int = field(metadata=_INT64, default=0)
    next_due_ms: int = field(metadata=_INT64, default=-1)
    schedules: int = field(metadata=_INT32, default=0)
    paused_schedules: tuple[str, ...] = field(metadata=_TEXT, default=())
    is_hot: bool = field(metadata=_BOOL, default=False)
    open_offset: int = field(metadata=_INT64, default=-1)
    open_producer_id: int = field(metadata=_INT64, default=-1)
    open_ms: int = field(metadata=_INT64, default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedShare(_Flexible):
    """See `mansio.state.blockage.facts.ShareFacts`. The fields `retried_` are those of `RetriedFacts`, `held_` those of
    `HeldFacts`; their offset is -1 without one."""

    lag: int = field(metadata=_INT64)
    leased: int = field(metadata=_INT64, default=0)
    in_backoff: int = field(metadata=_INT64, default=0)
    withheld: int = field(metadata=_INT64, default=0)
    archiving: int = field(metadata=_INT64, default=0)
    done: int = field(metadata=_INT64, default=0)
    has_available: bool = field(metadata=_BOOL, default=False)
    waiting_receives: int = field(metadata=_INT32, default=0)
    idle_ms: int = field(metadata=_INT64, default=-1)
    record_locks_max: int = field(metadata=_INT64, default=0)
    lock_ms: int = field(metadata=_INT64, default=0)
    delivery_limit: int = field(metadata=_INT32, default=0)
    order: str = field(metadata=_TEXT, default="none")
    is_committed_only: bool = field(metadata=_BOOL, default=False)
    holders: tuple[MemberLeases, ...] = ()
    retried_offset: int = field(metadata=_INT64, default=-1)
    retried_attempts: int = field(metadata=_INT32, default=0)
    retried_due_ms: int = field(metadata=_INT64, default=0)
    held_offset: int = field(metadata=_INT64, default=-1)
    held_waiting: int = field(metadata=_INT64, default=0)
    held_total: int = field(metadata=_INT64, default=0)
    held_key: bytes | None = field(metadata=_BYTES, default=None)
    held_is_complete: bool = field(metadata=_BOOL, default=True)
    keys_at_lease_limit: int = field(metadata=_INT64, default=0)
    keys_at_rate_limit: int = field(metadata=_INT64, default=0)
    dead_letter_error: str = field(metadata=_TEXT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPartition(_Flexible):
    """What the leader of a partition knows, or why it knows nothing, "" if it does."""

    topic: str = field(metadata=_TEXT)
    partition_index: int = field(metadata=_INT32)
    error: str = field(metadata=_TEXT, default="")
    log: ReportedLog | None = None
    share: ReportedShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedTransaction(_Flexible):
    """An open transaction that the broker coordinates, in a partition of the group."""

    transactional_id: str = field(metadata=_TEXT)
    producer_id: int = field(metadata=_INT64)
    open_ms: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedThrottle(_Flexible):
    """See `mansio.state.blockage.facts.ThrottleFacts`."""

    user: str = field(metadata=_TEXT)
    client_id: str = field(metadata=_TEXT)
    pause_ms: int = field(metadata=_INT64)
    rate: int = field(metadata=_INT64)
    quota: str = field(metadata=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRefusal(_Flexible):
    """See `mansio.state.blockage.facts.RefusalFacts`."""

    principal: str = field(metadata=_TEXT)
    client_id: str = field(metadata=_TEXT)
    operation: str = field(metadata=_TEXT)
    resource_type: str = field(metadata=_TEXT)
    name: str = field(metadata=_TEXT)
    ago_ms: int = field(metadata=_INT64)
    count: int = field(metadata=_INT32)
    remedy: str = field(metadata=_TEXT)
    denied_by: str = field(metadata=_TEXT, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectGroupFactsResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    partitions: tuple[ReportedPartition, ...] = ()
    transactions: tuple[ReportedTransaction, ...] = ()
    throttles: tuple[ReportedThrottle, ...] = ()
    refusals: tuple[ReportedRefusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeHotPartitionsRequest(_Flexible):
    """Request for the hot partitions that the broker which answers leads. `keys_max`: number of keys of each; 0:
    none."""

    keys_max: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotKey(_Flexible):
    """A key, and the least number of sampled records that have it."""

    key: bytes = field(metadata=_BYTES, repr=False)
    records: int = field(metadata=_INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPartition(_Flexible):
    """A hot partition. Rates are records per second: `rate` that of the partition, `median_rate` that of its topic's
    partitions, `topic_rate` that of the topic. `led_s`: for how long the broker has led it. `key_access`: 0 if the
    fields after it count, 1 if no keys are sampled, 2 if the client may not read the topic, 3 if it asked for none. Of
    the `sampled_records` of `sampled_batches` batches, a key has at least its `records` and at most `records +
    count_error`."""

    topic: str = field(metadata=_TEXT)
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partition_index: int = field(metadata=_INT32)
    partition_count: int = field(metadata=_INT32)
    rate: float = field(metadata=_FLOAT64)
    median_rate: float = field(metadata=_FLOAT64)
    topic_rate: float = field(metadata=_FLOAT64)
    led_s: float = field(metadata=_FLOAT64)
    key_access: int = field(metadata=_INT8)
    sampled_records: int = field(metadata=_INT64, default=0)
    sampled_batches: int = field(metadata=_INT32, default=0)
    records_without_key: int = field(metadata=_INT64, default=0)
    count_error: int = field(metadata=_INT64, default=0)
    keys: tuple[HotKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeHotPartitionsResponse(_Flexible):
    """Response. `window_ms`: length of a window, 0 if the broker looks for no hot partitions. `rate`: records per
    second that the broker takes in; `busy`: part of one processor core that it uses."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    window_ms: int = field(metadata=_INT32, default=0)
    rate: float = field(metadata=_FLOAT64, default=0.0)
    busy: float = field(metadata=_FLOAT64, default=0.0)
    partitions: tuple[HotPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribePartitionRatesRequest(_Flexible):
    """Request of the broker `node_id` for the rates of the partitions of topics."""

    node_id: int = field(metadata=_INT32)
    broker_epoch: int = field(metadata=_INT64)
    topic_ids: tuple[uuid.UUID | None, ...] = field(metadata=_UUID)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRates(_Flexible):
    """Rates in records per second of those partitions that the broker which answers leads and that take in anything, in
    its last window or in the present one."""

    topic_id: uuid.UUID | None = field(metadata=_UUID)
    rates: tuple[float, ...] = field(metadata=_FLOAT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribePartitionRatesResponse(_Flexible):
    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    topics: tuple[TopicRates, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeSchemasRequest(_Flexible):
    """Request to the schema registry that changes nothing. `operation`: see
    `mansio.broker.services.schema_registry`; `subject`: None for all; `arguments`: a JSON object."""

    operation: str = field(metadata=_TEXT)
    subject: str | None = field(metadata=_TEXT)
    arguments: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeSchemasResponse(_Flexible):
    """Response. `registry_code`: of a refusal by the registry, the error code of the REST API, else 0. `result`: JSON;
    empty with an error."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    registry_code: int = field(metadata=_INT32, default=0)
    result: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterSchemasRequest(_Flexible):
    """Request to the schema registry that changes something; see `DescribeSchemasRequest`."""

    operation: str = field(metadata=_TEXT)
    subject: str | None = field(metadata=_TEXT)
    arguments: bytes = field(metadata=_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterSchemasResponse(_Flexible):
    """Response; see `DescribeSchemasResponse`."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    registry_code: int = field(metadata=_INT32, default=0)
    result: bytes = field(metadata=_BYTES, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRangesRequest(_Flexible):
    """Request to lease at most `records_max` records of the partitions to a member, for `lease_ms`, in at most 4,096
    ranges. While there are none, the broker waits for at most `wait_ms`. The group is created if it does not exist."""

    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)
    records_max: int = field(metadata=_INT64)
    lease_ms: int = field(metadata=_INT64)
    wait_ms: int = field(metadata=_INT32)
    topics: tuple[DescribeTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRangeLease(_Flexible):
    """Consecutive offsets that are leased by a range lease and have the same delivery count."""

    first_offset: int = field(metadata=_INT64)
    last_offset: int = field(metadata=_INT64)
    delivery_count: int = field(metadata=_INT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLeasesPartition(_Flexible):
    """Range leases of one partition, ascending, or an error. `ended_ranges`: ranges in the request that are
    dead-lettered or discarded, with delivery count 0."""

    partition_index: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    ranges: tuple[OffsetRangeLease, ...]
    ended_ranges: tuple[OffsetRangeLease, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLeasesTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[RangeLeasesPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeLeasesResponse(_Flexible):
    """`order`: the order of the group, none, key or partition, empty without leases; `isolation_level`: 1 if it reads
    only committed records."""

    throttle_time_ms: int = field(metadata=_INT32)
    error_code: int = field(metadata=_ERROR)
    error_message: str | None = field(metadata=_TEXT, default=None)
    order: str = field(metadata=_TEXT, default="")
    isolation_level: int = field(metadata=_INT8, default=0)
    topics: tuple[RangeLeasesTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRangesResponse(_RangeLeasesResponse):
    """Response, with the partitions that have leases or an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlteredPartition(_Flexible):
    partition_index: int = field(metadata=_INT32)
    ranges: tuple[OffsetRangeLease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlteredTopic(_Flexible):
    topic_id: uuid.UUID | None = field(metadata=_UUID)
    partitions: tuple[AlteredPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterRangeLeasesRequest(_Flexible):
    """Request of a member about its range leases. A range has the delivery count that the member knows; parts that it
    has not leased are left out. `operation`: 0, those with that delivery count last for `lease_ms` from now on; 1, the
    same for those with at least that delivery count, and the member processes the records again, which counts as a
    delivery; 2, those with at least that delivery count are accepted. `releases_others`: release the other range leases
    that the member has in the partitions. The response has the ranges for which the operation was done."""

    group_id: str = field(metadata=_TEXT)
    member_id: str = field(metadata=_TEXT)
    lease_ms: int = field(metadata=_INT64)
    operation: int = field(metadata=_INT8)
    releases_others: bool = field(metadata=_BOOL)
    topics: tuple[AlteredTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterRangeLeasesResponse(_RangeLeasesResponse):
    """Response, with all partitions of the request."""


_MESSAGES: Final[dict[int, tuple[Any, Any]]] = {
    ApiKey.ACKNOWLEDGE_RECORDS: (AcknowledgeRecordsRequest, AcknowledgeRecordsResponse),
    ApiKey.DESCRIBE_LEASES: (DescribeLeasesRequest, DescribeLeasesResponse),
    ApiKey.REDRIVE_RECORDS: (RedriveRecordsRequest, RedriveRecordsResponse),
    ApiKey.LIST_DELAYED_RECORDS: (ListDelayedRecordsRequest, ListDelayedRecordsResponse),
    ApiKey.ALTER_DELAYED_RECORDS: (AlterDelayedRecordsRequest, AlterDelayedRecordsResponse),
    ApiKey.LIST_SCHEDULES: (ListSchedulesRequest, ListSchedulesResponse),
    ApiKey.ALTER_SCHEDULES: (AlterSchedulesRequest, AlterSchedulesResponse),
    ApiKey.CHALLENGE_BROKER: (ChallengeBrokerRequest, ChallengeBrokerResponse),
    ApiKey.AUTHENTICATE_BROKER: (AuthenticateBrokerRequest, AuthenticateBrokerResponse),
    ApiKey.RECEIVE_RECORDS: (ReceiveRecordsRequest, ReceiveRecordsResponse),
    ApiKey.RELEASE_LEASES: (ReleaseLeasesRequest, ReleaseLeasesResponse),
    ApiKey.REGISTER_SHARE_GROUP: (RegisterShareGroupRequest, RegisterShareGroupResponse),
    ApiKey.PREPARE_TRANSACTION: (PrepareTransactionRequest, PrepareTransactionResponse),
    ApiKey.COMMIT_BATCH: (CommitBatchRequest, CommitBatchResponse),
    ApiKey.DESCRIBE_HEALTH: (DescribeHealthRequest, DescribeHealthResponse),
    ApiKey.FORWARD_REQUEST: (ForwardRequestRequest, ForwardRequestResponse),
    ApiKey.SET_PASSWORD: (SetPasswordRequest, SetPasswordResponse),
    ApiKey.CREATE_SQS_ACCESS_KEY: (CreateSqsAccessKeyRequest, CreateSqsAccessKeyResponse),
    ApiKey.DESCRIBE_SQS_ACCESS_KEYS: (DescribeSqsAccessKeysRequest, DescribeSqsAccessKeysResponse),
    ApiKey.DELETE_SQS_ACCESS_KEY: (DeleteSqsAccessKeyRequest, DeleteSqsAccessKeyResponse),
    ApiKey.CHECK_AUTHORIZATION: (CheckAuthorizationRequest, CheckAuthorizationResponse),
    ApiKey.CREATE_API_KEY: (CreateApiKeyRequest, CreateApiKeyResponse),
    ApiKey.DESCRIBE_API_KEYS: (DescribeApiKeysRequest, DescribeApiKeysResponse),
    ApiKey.DELETE_API_KEY: (DeleteApiKeyRequest, DeleteApiKeyResponse),
    ApiKey.CONFIRM_HAND_OVER: (ConfirmHandOverRequest, ConfirmHandOverResponse),
    ApiKey.TRACE_RECORD: (TraceRecordRequest, TraceRecordResponse),
    ApiKey.READ_TRACE: (ReadTraceRequest, ReadTraceResponse),
    ApiKey.EXPLAIN_GROUP: (ExplainGroupRequest, ExplainGroupResponse),
    ApiKey.COLLECT_GROUP_FACTS: (CollectGroupFactsRequest, CollectGroupFactsResponse),
    ApiKey.DESCRIBE_HOT_PARTITIONS: (DescribeHotPartitionsRequest, DescribeHotPartitionsResponse),
    ApiKey.DESCRIBE_PARTITION_RATES: (DescribePartitionRatesRequest, DescribePartitionRatesResponse),
    ApiKey.SEARCH_RECORDS: (SearchRecordsRequest, SearchRecordsResponse),
    ApiKey.DESCRIBE_SCHEMAS: (DescribeSchemasRequest, DescribeSchemasResponse),
    ApiKey.ALTER_SCHEMAS: (AlterSchemasRequest, AlterSchemasResponse),
    ApiKey.LEASE_RANGES: (LeaseRangesRequest, LeaseRangesResponse),
    ApiKey.ALTER_RANGE_LEASES: (AlterRangeLeasesRequest, AlterRangeLeasesResponse),
}

_VERSION_MAX: Final[dict[int, int]] = {ApiKey.AUTHENTICATE_BROKER: 1}
"""Highest versions, apart from 0. The fields are those of version 0."""


def is_mansio_api(api_key: int) -> bool:
    """Whether `api_key` is that of one of Mansio's own APIs, whose schemas are in this module."""
    return api_key in _MESSAGES


def schema(api_key: int, version: int, direction: str) -> Any:
    """Return the class of an API's request or response. Raises `ValueError` for an unknown version."""
    if not 0 <= version <= _VERSION_MAX.get(api_key, 0):
        raise ValueError(f"there is no {direction} {api_key} in version {version}")
    request, response = _MESSAGES[api_key]
    return request if direction == REQUEST else response
