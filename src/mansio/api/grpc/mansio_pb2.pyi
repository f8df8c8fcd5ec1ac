from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class NewRecord(_message.Message):
    __slots__ = ("value", "key", "headers", "partition", "timestamp_ms", "delay_ms", "deliver_at_ms", "priority", "dedup_id")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    key: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    partition: int
    timestamp_ms: int
    delay_ms: int
    deliver_at_ms: int
    priority: str
    dedup_id: bytes
    def __init__(self, value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., partition: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., delay_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ..., priority: _Optional[str] = ..., dedup_id: _Optional[bytes] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("topic", "records", "schema")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    topic: str
    records: _containers.RepeatedCompositeFieldContainer[NewRecord]
    schema: str
    def __init__(self, topic: _Optional[str] = ..., records: _Optional[_Iterable[_Union[NewRecord, _Mapping]]] = ..., schema: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("name", "code", "message", "retriable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    code: int
    message: str
    retriable: bool
    def __init__(self, name: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retriable: _Optional[bool] = ...) -> None: ...

class PublishedRange(_message.Message):
    __slots__ = ("first", "count", "partition", "offset", "timestamp_ms", "error")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    partition: int
    offset: int
    timestamp_ms: int
    error: Error
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[PublishedRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[PublishedRange, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers", "receipt", "delivery_count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    receipt: str
    delivery_count: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., timestamp_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., receipt: _Optional[str] = ..., delivery_count: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset", "time_ms", "latest", "max_records", "max_bytes", "wait_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    time_ms: int
    latest: bool
    max_records: int
    max_bytes: int
    wait_ms: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., time_ms: _Optional[int] = ..., latest: _Optional[bool] = ..., max_records: _Optional[int] = ..., max_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("records", "next_offset", "unreadable")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    next_offset: int
    unreadable: _containers.RepeatedCompositeFieldContainer[UnreadableOffsets]
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., next_offset: _Optional[int] = ..., unreadable: _Optional[_Iterable[_Union[UnreadableOffsets, _Mapping]]] = ...) -> None: ...

class UnreadableOffsets(_message.Message):
    __slots__ = ("first", "last", "reason")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    reason: str
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ListOffsetsRequest(_message.Message):
    __slots__ = ("topic", "earliest", "time_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    earliest: bool
    time_ms: int
    def __init__(self, topic: _Optional[str] = ..., earliest: _Optional[bool] = ..., time_ms: _Optional[int] = ...) -> None: ...

class PartitionOffset(_message.Message):
    __slots__ = ("partition", "offset", "timestamp_ms")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: int
    timestamp_ms: int
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[int] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class ListOffsetsResponse(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionOffset]
    def __init__(self, partitions: _Optional[_Iterable[_Union[PartitionOffset, _Mapping]]] = ...) -> None: ...

class ReceiveRequest(_message.Message):
    __slots__ = ("open", "ack", "retry", "reject", "extend", "credits")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    open: ReceiveOpen
    ack: _containers.RepeatedScalarFieldContainer[str]
    retry: _containers.RepeatedCompositeFieldContainer[Retry]
    reject: _containers.RepeatedCompositeFieldContainer[Reject]
    extend: _containers.RepeatedCompositeFieldContainer[Extend]
    credits: int
    def __init__(self, open: _Optional[_Union[ReceiveOpen, _Mapping]] = ..., ack: _Optional[_Iterable[str]] = ..., retry: _Optional[_Iterable[_Union[Retry, _Mapping]]] = ..., reject: _Optional[_Iterable[_Union[Reject, _Mapping]]] = ..., extend: _Optional[_Iterable[_Union[Extend, _Mapping]]] = ..., credits: _Optional[int] = ...) -> None: ...

class ReceiveOpen(_message.Message):
    __slots__ = ("group", "topics", "max_records", "lease_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    max_records: int
    lease_ms: int
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., max_records: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ReceiveResponse(_message.Message):
    __slots__ = ("records", "failed", "acknowledged")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    failed: _containers.RepeatedCompositeFieldContainer[FailedAcknowledgement]
    acknowledged: int
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[FailedAcknowledgement, _Mapping]]] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class FailedAcknowledgement(_message.Message):
    __slots__ = ("receipt", "error")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    error: Error
    def __init__(self, receipt: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Retry(_message.Message):
    __slots__ = ("receipt", "delay_ms")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    delay_ms: int
    def __init__(self, receipt: _Optional[str] = ..., delay_ms: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("receipt", "reason")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    reason: str
    def __init__(self, receipt: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("receipt", "lease_ms")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    lease_ms: int
    def __init__(self, receipt: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("group", "receipts")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ...) -> None: ...

class RetryRequest(_message.Message):
    __slots__ = ("group", "records")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    records: _containers.RepeatedCompositeFieldContainer[Retry]
    def __init__(self, group: _Optional[str] = ..., records: _Optional[_Iterable[_Union[Retry, _Mapping]]] = ...) -> None: ...

class RejectRequest(_message.Message):
    __slots__ = ("group", "records")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    records: _containers.RepeatedCompositeFieldContainer[Reject]
    def __init__(self, group: _Optional[str] = ..., records: _Optional[_Iterable[_Union[Reject, _Mapping]]] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("group", "records")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    records: _containers.RepeatedCompositeFieldContainer[Extend]
    def __init__(self, group: _Optional[str] = ..., records: _Optional[_Iterable[_Union[Extend, _Mapping]]] = ...) -> None: ...

class AcknowledgeResponse(_message.Message):
    __slots__ = ("failed",)
    FAILED_FIELD_NUMBER: _ClassVar[int]
    failed: _containers.RepeatedCompositeFieldContainer[FailedAcknowledgement]
    def __init__(self, failed: _Optional[_Iterable[_Union[FailedAcknowledgement, _Mapping]]] = ...) -> None: ...

class RedriveRequest(_message.Message):
    __slots__ = ("group", "topic", "partition", "redrive_id", "max_records")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REDRIVE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    partition: int
    redrive_id: str
    max_records: int
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., redrive_id: _Optional[str] = ..., max_records: _Optional[int] = ...) -> None: ...

class RedriveResponse(_message.Message):
    __slots__ = ("redriven", "repeated", "deleted", "dead")
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    redriven: int
    repeated: int
    deleted: int
    dead: int
    def __init__(self, redriven: _Optional[int] = ..., repeated: _Optional[int] = ..., deleted: _Optional[int] = ..., dead: _Optional[int] = ...) -> None: ...

class TopicName(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("include_internal",)
    INCLUDE_INTERNAL_FIELD_NUMBER: _ClassVar[int]
    include_internal: bool
    def __init__(self, include_internal: _Optional[bool] = ...) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "partitions", "replication_factor", "config")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    replication_factor: int
    config: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., replication_factor: _Optional[int] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AlterTopicRequest(_message.Message):
    __slots__ = ("name", "partitions", "set", "reset")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    set: _containers.ScalarMap[str, str]
    reset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., set: _Optional[_Mapping[str, str]] = ..., reset: _Optional[_Iterable[str]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("partition", "leader", "replicas", "in_sync_replicas")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    leader: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    in_sync_replicas: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition: _Optional[int] = ..., leader: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., in_sync_replicas: _Optional[_Iterable[int]] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "id", "partitions", "config")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: bytes
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    config: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., id: _Optional[bytes] = ..., partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GroupName(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "type", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    state: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "is_complete")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    is_complete: bool
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class GroupOffset(_message.Message):
    __slots__ = ("topic", "partition", "offset", "lag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    lag: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., lag: _Optional[int] = ...) -> None: ...

class GroupOffsets(_message.Message):
    __slots__ = ("offsets",)
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    def __init__(self, offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ...) -> None: ...

class ResetGroupOffsetsRequest(_message.Message):
    __slots__ = ("group", "topics", "earliest", "latest", "offset", "time_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    earliest: bool
    latest: bool
    offset: int
    time_ms: int
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., earliest: _Optional[bool] = ..., latest: _Optional[bool] = ..., offset: _Optional[int] = ..., time_ms: _Optional[int] = ...) -> None: ...

class ExplainGroupRequest(_message.Message):
    __slots__ = ("group", "sample_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    sample_ms: int
    def __init__(self, group: _Optional[str] = ..., sample_ms: _Optional[int] = ...) -> None: ...

class GroupFinding(_message.Message):
    __slots__ = ("cause", "impact", "is_certain", "text", "advice", "command", "records", "topic", "partition", "offset", "member_id", "client_id", "principal", "key", "transactional_id", "producer_id", "schedule", "evidence")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    IMPACT_FIELD_NUMBER: _ClassVar[int]
    IS_CERTAIN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    impact: str
    is_certain: bool
    text: str
    advice: str
    command: str
    records: int
    topic: str
    partition: int
    offset: int
    member_id: str
    client_id: str
    principal: str
    key: bytes
    transactional_id: str
    producer_id: int
    schedule: str
    evidence: _containers.ScalarMap[str, int]
    def __init__(self, cause: _Optional[str] = ..., impact: _Optional[str] = ..., is_certain: _Optional[bool] = ..., text: _Optional[str] = ..., advice: _Optional[str] = ..., command: _Optional[str] = ..., records: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., member_id: _Optional[str] = ..., client_id: _Optional[str] = ..., principal: _Optional[str] = ..., key: _Optional[bytes] = ..., transactional_id: _Optional[str] = ..., producer_id: _Optional[int] = ..., schedule: _Optional[str] = ..., evidence: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GroupExplanation(_message.Message):
    __slots__ = ("group", "group_type", "state", "status", "summary", "lag", "rate", "members", "findings", "more_findings", "hidden_topics", "silent_brokers")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    MORE_FINDINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TOPICS_FIELD_NUMBER: _ClassVar[int]
    SILENT_BROKERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    group_type: str
    state: str
    status: str
    summary: str
    lag: int
    rate: float
    members: int
    findings: _containers.RepeatedCompositeFieldContainer[GroupFinding]
    more_findings: int
    hidden_topics: int
    silent_brokers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., group_type: _Optional[str] = ..., state: _Optional[str] = ..., status: _Optional[str] = ..., summary: _Optional[str] = ..., lag: _Optional[int] = ..., rate: _Optional[float] = ..., members: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[GroupFinding, _Mapping]]] = ..., more_findings: _Optional[int] = ..., hidden_topics: _Optional[int] = ..., silent_brokers: _Optional[_Iterable[int]] = ...) -> None: ...

class AlterGroupRequest(_message.Message):
    __slots__ = ("group", "set", "reset")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    group: str
    set: _containers.ScalarMap[str, str]
    reset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., set: _Optional[_Mapping[str, str]] = ..., reset: _Optional[_Iterable[str]] = ...) -> None: ...

class DelayedId(_message.Message):
    __slots__ = ("partition", "id")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    partition: int
    id: int
    def __init__(self, partition: _Optional[int] = ..., id: _Optional[int] = ...) -> None: ...

class ListDelayedRequest(_message.Message):
    __slots__ = ("topic", "max_records", "cursor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    max_records: int
    cursor: str
    def __init__(self, topic: _Optional[str] = ..., max_records: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class DelayedRecord(_message.Message):
    __slots__ = ("id", "due_ms", "record")
    ID_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    id: DelayedId
    due_ms: int
    record: Record
    def __init__(self, id: _Optional[_Union[DelayedId, _Mapping]] = ..., due_ms: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class ListDelayedResponse(_message.Message):
    __slots__ = ("records", "next_cursor")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DelayedRecord]
    next_cursor: str
    def __init__(self, records: _Optional[_Iterable[_Union[DelayedRecord, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class ChangeDelayedRequest(_message.Message):
    __slots__ = ("topic", "ids", "cancel", "deliver_now", "delay_ms", "deliver_at_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DELIVER_NOW_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ids: _containers.RepeatedCompositeFieldContainer[DelayedId]
    cancel: bool
    deliver_now: bool
    delay_ms: int
    deliver_at_ms: int
    def __init__(self, topic: _Optional[str] = ..., ids: _Optional[_Iterable[_Union[DelayedId, _Mapping]]] = ..., cancel: _Optional[bool] = ..., deliver_now: _Optional[bool] = ..., delay_ms: _Optional[int] = ..., deliver_at_ms: _Optional[int] = ...) -> None: ...

class ChangeDelayedResponse(_message.Message):
    __slots__ = ("changed", "not_pending", "unknown")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    NOT_PENDING_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[DelayedId]
    not_pending: _containers.RepeatedCompositeFieldContainer[DelayedId]
    unknown: _containers.RepeatedCompositeFieldContainer[DelayedId]
    def __init__(self, changed: _Optional[_Iterable[_Union[DelayedId, _Mapping]]] = ..., not_pending: _Optional[_Iterable[_Union[DelayedId, _Mapping]]] = ..., unknown: _Optional[_Iterable[_Union[DelayedId, _Mapping]]] = ...) -> None: ...

class CreateScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "cron", "every_ms", "timezone", "catch_up", "value", "key", "headers")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    cron: str
    every_ms: int
    timezone: str
    catch_up: str
    value: bytes
    key: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., timezone: _Optional[str] = ..., catch_up: _Optional[str] = ..., value: _Optional[bytes] = ..., key: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("topic", "name", "partition", "cron", "every_ms", "timezone", "is_paused", "firings", "next_times_ms", "error")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    partition: int
    cron: str
    every_ms: int
    timezone: str
    is_paused: bool
    firings: int
    next_times_ms: _containers.RepeatedScalarFieldContainer[int]
    error: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., partition: _Optional[int] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., timezone: _Optional[str] = ..., is_paused: _Optional[bool] = ..., firings: _Optional[int] = ..., next_times_ms: _Optional[_Iterable[int]] = ..., error: _Optional[str] = ...) -> None: ...

class ListSchedulesResponse(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[Schedule]
    def __init__(self, schedules: _Optional[_Iterable[_Union[Schedule, _Mapping]]] = ...) -> None: ...

class ChangeScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "pause", "resume", "delete")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    pause: bool
    resume: bool
    delete: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., pause: _Optional[bool] = ..., resume: _Optional[bool] = ..., delete: _Optional[bool] = ...) -> None: ...

class ListTransactionsRequest(_message.Message):
    __slots__ = ("states", "producer_ids", "open_ms_min", "pattern")
    STATES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_IDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_MS_MIN_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[str]
    producer_ids: _containers.RepeatedScalarFieldContainer[int]
    open_ms_min: int
    pattern: str
    def __init__(self, states: _Optional[_Iterable[str]] = ..., producer_ids: _Optional[_Iterable[int]] = ..., open_ms_min: _Optional[int] = ..., pattern: _Optional[str] = ...) -> None: ...

class TransactionSummary(_message.Message):
    __slots__ = ("transactional_id", "producer_id", "state", "coordinator_id")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int
    def __init__(self, transactional_id: _Optional[str] = ..., producer_id: _Optional[int] = ..., state: _Optional[str] = ..., coordinator_id: _Optional[int] = ...) -> None: ...

class ListTransactionsResponse(_message.Message):
    __slots__ = ("transactions", "is_complete")
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    transactions: _containers.RepeatedCompositeFieldContainer[TransactionSummary]
    is_complete: bool
    def __init__(self, transactions: _Optional[_Iterable[_Union[TransactionSummary, _Mapping]]] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class TransactionalId(_message.Message):
    __slots__ = ("transactional_id",)
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    def __init__(self, transactional_id: _Optional[str] = ...) -> None: ...

class TransactionPartition(_message.Message):
    __slots__ = ("topic", "partition")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class Transaction(_message.Message):
    __slots__ = ("transactional_id", "coordinator_id", "state", "producer_id", "producer_epoch", "timeout_ms", "started_ms", "partitions")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    coordinator_id: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    partitions: _containers.RepeatedCompositeFieldContainer[TransactionPartition]
    def __init__(self, transactional_id: _Optional[str] = ..., coordinator_id: _Optional[int] = ..., state: _Optional[str] = ..., producer_id: _Optional[int] = ..., producer_epoch: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., started_ms: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[TransactionPartition, _Mapping]]] = ...) -> None: ...

class DescribeProducersRequest(_message.Message):
    __slots__ = ("topic", "partition")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class Producer(_message.Message):
    __slots__ = ("producer_id", "producer_epoch", "last_sequence", "last_timestamp_ms", "coordinator_epoch", "transaction_start_offset")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int
    def __init__(self, producer_id: _Optional[int] = ..., producer_epoch: _Optional[int] = ..., last_sequence: _Optional[int] = ..., last_timestamp_ms: _Optional[int] = ..., coordinator_epoch: _Optional[int] = ..., transaction_start_offset: _Optional[int] = ...) -> None: ...

class Producers(_message.Message):
    __slots__ = ("producers",)
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    producers: _containers.RepeatedCompositeFieldContainer[Producer]
    def __init__(self, producers: _Optional[_Iterable[_Union[Producer, _Mapping]]] = ...) -> None: ...

class FindHangingRequest(_message.Message):
    __slots__ = ("topic", "partition", "broker_id", "open_ms_min")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_MS_MIN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    broker_id: int
    open_ms_min: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., broker_id: _Optional[int] = ..., open_ms_min: _Optional[int] = ...) -> None: ...

class HangingTransaction(_message.Message):
    __slots__ = ("topic", "partition", "producer_id", "producer_epoch", "coordinator_epoch", "start_offset", "last_timestamp_ms", "open_ms", "transactional_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    last_timestamp_ms: int
    open_ms: int
    transactional_id: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., producer_id: _Optional[int] = ..., producer_epoch: _Optional[int] = ..., coordinator_epoch: _Optional[int] = ..., start_offset: _Optional[int] = ..., last_timestamp_ms: _Optional[int] = ..., open_ms: _Optional[int] = ..., transactional_id: _Optional[str] = ...) -> None: ...

class HangingTransactions(_message.Message):
    __slots__ = ("transactions",)
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    transactions: _containers.RepeatedCompositeFieldContainer[HangingTransaction]
    def __init__(self, transactions: _Optional[_Iterable[_Union[HangingTransaction, _Mapping]]] = ...) -> None: ...

class AbortTransactionRequest(_message.Message):
    __slots__ = ("topic", "partition", "start_offset", "force")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    start_offset: int
    force: bool
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., start_offset: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class TraceRecordRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset", "last_failed_group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILED_GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    last_failed_group: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., last_failed_group: _Optional[str] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("kind", "time_ms", "group", "attempt", "who", "detail", "wait_ms", "is_computed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    time_ms: int
    group: str
    attempt: int
    who: str
    detail: str
    wait_ms: int
    is_computed: bool
    def __init__(self, kind: _Optional[str] = ..., time_ms: _Optional[int] = ..., group: _Optional[str] = ..., attempt: _Optional[int] = ..., who: _Optional[str] = ..., detail: _Optional[str] = ..., wait_ms: _Optional[int] = ..., is_computed: _Optional[bool] = ...) -> None: ...

class RecordTrace(_message.Message):
    __slots__ = ("topic", "partition", "offset", "events", "certain", "uncertainties", "total_ms", "leader", "replicas", "in_sync", "is_stored", "timestamp_ms", "size_bytes")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CERTAIN_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    IS_STORED_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    events: _containers.RepeatedCompositeFieldContainer[TraceEvent]
    certain: bool
    uncertainties: _containers.RepeatedScalarFieldContainer[str]
    total_ms: int
    leader: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    in_sync: _containers.RepeatedScalarFieldContainer[int]
    is_stored: bool
    timestamp_ms: int
    size_bytes: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TraceEvent, _Mapping]]] = ..., certain: _Optional[bool] = ..., uncertainties: _Optional[_Iterable[str]] = ..., total_ms: _Optional[int] = ..., leader: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., in_sync: _Optional[_Iterable[int]] = ..., is_stored: _Optional[bool] = ..., timestamp_ms: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FindRecordsRequest(_message.Message):
    __slots__ = ("topic", "key", "record_id", "partition", "since_ms", "until_ms", "limit", "timeout_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: bytes
    record_id: str
    partition: int
    since_ms: int
    until_ms: int
    limit: int
    timeout_ms: int
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[bytes] = ..., record_id: _Optional[str] = ..., partition: _Optional[int] = ..., since_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., limit: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class FoundRecord(_message.Message):
    __slots__ = ("partition", "offset", "timestamp_ms")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: int
    timestamp_ms: int
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[int] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class SkippedRange(_message.Message):
    __slots__ = ("partition", "first_offset", "end_offset", "reason")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    partition: int
    first_offset: int
    end_offset: int
    reason: str
    def __init__(self, partition: _Optional[int] = ..., first_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SearchProgress(_message.Message):
    __slots__ = ("partitions", "finished_partitions", "searched_bytes", "left_bytes", "skipped", "skipped_count")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    partitions: int
    finished_partitions: int
    searched_bytes: int
    left_bytes: int
    skipped: _containers.RepeatedCompositeFieldContainer[SkippedRange]
    skipped_count: int
    def __init__(self, partitions: _Optional[int] = ..., finished_partitions: _Optional[int] = ..., searched_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ..., skipped: _Optional[_Iterable[_Union[SkippedRange, _Mapping]]] = ..., skipped_count: _Optional[int] = ...) -> None: ...

class FindRecordsResponse(_message.Message):
    __slots__ = ("found", "progress")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    found: FoundRecord
    progress: SearchProgress
    def __init__(self, found: _Optional[_Union[FoundRecord, _Mapping]] = ..., progress: _Optional[_Union[SearchProgress, _Mapping]] = ...) -> None: ...
