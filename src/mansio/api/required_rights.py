"""Rights that each request of each protocol needs: one table, from which docs/reference/authorization.md and the tests
of refusals are made.

The services ask the authorizer; this table says what they ask. A broker whose server has an API, a route, a method or
an action without a row does not start.

Operations of HTTP, gRPC and SQS name the Kafka APIs as which they act: they need the same rights.

Source: Kafka's "Operations and Resources on Protocols", and KafkaApis and ControllerApis of Kafka 4.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.authorization.acls import Operation, ResourceType
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Place(StrEnum):
    """Where a refusal is in the answer."""

    REQUEST = "request"
    """The whole request is refused: the error stands for all of it, or is at each of its items."""
    ITEM = "item"
    """Each topic, partition, group, id or other resource that the request names has its own error."""
    OMITTED = "omitted"
    """The answer does not contain the resource, and has no error."""


class Effect(StrEnum):
    """What a request changes."""

    READS = "reads"
    RECORDS = "records"
    """Records, or what is done to them: leases, acknowledgements, delays, transactions."""
    POSITIONS = "positions"
    """Members and committed offsets of groups."""
    ADMINISTERS = "administers"
    """Anything else; each such request has a line in the audit log."""


class Right(NamedTuple):
    """An operation on a type of resource. The resource is the one that the request names."""

    operation: Operation
    resource_type: ResourceType

    def __str__(self) -> str:
        return f"{self.operation.name} {self.resource_type.name}"


class Need(NamedTuple):
    """One condition of a request: the client has one of `rights`. `when`: empty if it always applies."""

    rights: tuple[Right, ...]
    place: Place = Place.ITEM
    when: str = ""

    @property
    def error_code(self) -> int:
        """Kafka's code of the refusal."""
        return ERROR_CODES[self.rights[-1].resource_type]


class Row(NamedTuple):
    """What a request needs: every need. `brokers_only`: it also needs the proven identity of a broker of the cluster.
    A row without needs says in `note` why there are none."""

    effect: Effect
    needs: tuple[Need, ...] = ()
    brokers_only: bool = False
    note: str = ""


ERROR_CODES: Final[Mapping[ResourceType, int]] = {
    ResourceType.TOPIC: 29,
    ResourceType.GROUP: 30,
    ResourceType.CLUSTER: 31,
    ResourceType.TRANSACTIONAL_ID: 53,
    ResourceType.DELEGATION_TOKEN: 65,
    ResourceType.USER: 65,
    ResourceType.SUBJECT: 31,
}
"""Kafka's error codes of refusals."""

_O, _T = Operation, ResourceType
_READ_TOPIC = Right(_O.READ, _T.TOPIC)
_WRITE_TOPIC = Right(_O.WRITE, _T.TOPIC)
_DESCRIBE_TOPIC = Right(_O.DESCRIBE, _T.TOPIC)
_DELETE_TOPIC = Right(_O.DELETE, _T.TOPIC)
_READ_GROUP = Right(_O.READ, _T.GROUP)
_DESCRIBE_GROUP = Right(_O.DESCRIBE, _T.GROUP)
_DELETE_GROUP = Right(_O.DELETE, _T.GROUP)
_WRITE_TRANSACTION = Right(_O.WRITE, _T.TRANSACTIONAL_ID)
_DESCRIBE_TRANSACTION = Right(_O.DESCRIBE, _T.TRANSACTIONAL_ID)
_READ_SUBJECT = Right(_O.READ, _T.SUBJECT)
_DESCRIBE_CLUSTER = Right(_O.DESCRIBE, _T.CLUSTER)
_ALTER_CLUSTER = Right(_O.ALTER, _T.CLUSTER)
_CLUSTER_ACTION = Right(_O.CLUSTER_ACTION, _T.CLUSTER)
_CREATE_TOPIC = (Right(_O.CREATE, _T.CLUSTER), Right(_O.CREATE, _T.TOPIC))
_WHOLE = Place.REQUEST


def _configs(operation: Operation) -> tuple[Need, ...]:
    return tuple(
        Need((Right(operation, each),), when=f"{each.name.lower()} settings")
        for each in (_T.TOPIC, _T.GROUP, _T.CLUSTER)
    )


def _need(*rights: Right, place: Place = Place.ITEM, when: str = "") -> Need:
    return Need(rights, place, when)


_BROKERS = (_need(_CLUSTER_ACTION, place=_WHOLE),)
_READS, _RECORDS, _POSITIONS, _ADMINISTERS = (
    Effect.READS,
    Effect.RECORDS,
    Effect.POSITIONS,
    Effect.ADMINISTERS,
)
_IN_GROUP = (_need(_READ_GROUP, place=_WHOLE), _need(_READ_TOPIC))
_MEMBER = Row(_POSITIONS, (_need(_READ_GROUP, place=_WHOLE),))
_FORWARDED_LEASES = Row(
    _RECORDS,
    _BROKERS,
    brokers_only=True,
    note="The client for whom it is done needs READ GROUP and READ TOPIC.",
)
_STATES = Row(_RECORDS, _BROKERS, brokers_only=True)

KAFKA: Final[Mapping[ApiKey, Row]] = {
    ApiKey.PRODUCE: Row(
        _RECORDS,
        (_need(_WRITE_TOPIC), _need(_WRITE_TRANSACTION, place=_WHOLE, when="with a transactional id")),
    ),
    ApiKey.FETCH: Row(_READS, (_need(_READ_TOPIC),), note="A replica needs the identity of its broker."),
    ApiKey.LIST_OFFSETS: Row(_READS, (_need(_DESCRIBE_TOPIC),)),
    ApiKey.METADATA: Row(
        _READS,
        (
            _need(_DESCRIBE_TOPIC, when="topics by name or id"),
            _need(_DESCRIBE_TOPIC, place=Place.OMITTED, when="all topics"),
            _need(*_CREATE_TOPIC, when="automatic creation"),
        ),
    ),
    ApiKey.OFFSET_COMMIT: Row(_POSITIONS, _IN_GROUP),
    ApiKey.OFFSET_FETCH: Row(
        _READS,
        (
            _need(_DESCRIBE_GROUP),
            _need(_DESCRIBE_TOPIC, when="topics by name"),
            _need(_DESCRIBE_TOPIC, place=Place.OMITTED, when="all topics"),
        ),
    ),
    ApiKey.FIND_COORDINATOR: Row(
        _READS,
        (
            _need(_DESCRIBE_GROUP, when="groups"),
            _need(_DESCRIBE_TRANSACTION, when="transactional ids"),
            _need(_CLUSTER_ACTION, when="share partitions"),
        ),
        note="For a query of Spark, DESCRIBE TRANSACTIONAL_ID for `mansio-spark:QUERY:` is enough. For the schema "
        "registry, none is needed.",
    ),
    ApiKey.JOIN_GROUP: _MEMBER,
    ApiKey.HEARTBEAT: _MEMBER,
    ApiKey.LEAVE_GROUP: _MEMBER,
    ApiKey.SYNC_GROUP: _MEMBER,
    ApiKey.DESCRIBE_GROUPS: Row(_READS, (_need(_DESCRIBE_GROUP),)),
    ApiKey.LIST_GROUPS: Row(_READS, (_need(_DESCRIBE_CLUSTER, _DESCRIBE_GROUP, place=Place.OMITTED),)),
    ApiKey.SASL_HANDSHAKE: Row(_READS, note="It begins the log-in."),
    ApiKey.API_VERSIONS: Row(_READS, note="Clients choose versions before they log in."),
    ApiKey.CREATE_TOPICS: Row(
        _ADMINISTERS, (_need(*_CREATE_TOPIC),), note="The settings in the answer need DESCRIBE_CONFIGS TOPIC."
    ),
    ApiKey.DELETE_TOPICS: Row(
        _ADMINISTERS,
        (_need(Right(_O.DELETE, _T.CLUSTER), _DELETE_TOPIC),),
        note="The name of a topic that is given by its id needs DESCRIBE TOPIC.",
    ),
    ApiKey.DELETE_RECORDS: Row(_ADMINISTERS, (_need(_DELETE_TOPIC),)),
    ApiKey.INIT_PRODUCER_ID: Row(
        _RECORDS,
        (
            _need(_WRITE_TRANSACTION, place=_WHOLE, when="with a transactional id"),
            _need(
                _WRITE_TOPIC,
                Right(_O.IDEMPOTENT_WRITE, _T.CLUSTER),
                place=_WHOLE,
                when="without one; WRITE of any topic (KIP-679)",
            ),
        ),
    ),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: Row(_READS, (_need(_DESCRIBE_TOPIC),)),
    ApiKey.ADD_PARTITIONS_TO_TXN: Row(
        _RECORDS,
        (
            _need(_WRITE_TRANSACTION, place=_WHOLE),
            _need(_WRITE_TOPIC),
            _need(_CLUSTER_ACTION, place=_WHOLE, when="from version 4 on"),
        ),
    ),
    ApiKey.ADD_OFFSETS_TO_TXN: Row(
        _RECORDS, (_need(_WRITE_TRANSACTION, place=_WHOLE), _need(_READ_GROUP, place=_WHOLE))
    ),
    ApiKey.END_TXN: Row(_RECORDS, (_need(_WRITE_TRANSACTION, place=_WHOLE),)),
    ApiKey.WRITE_TXN_MARKERS: Row(_ADMINISTERS, (_need(_CLUSTER_ACTION, _ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.TXN_OFFSET_COMMIT: Row(_RECORDS, (_need(_WRITE_TRANSACTION, place=_WHOLE), *_IN_GROUP)),
    ApiKey.DESCRIBE_ACLS: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.CREATE_ACLS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.DELETE_ACLS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.DESCRIBE_CONFIGS: Row(_READS, _configs(_O.DESCRIBE_CONFIGS)),
    ApiKey.ALTER_CONFIGS: Row(_ADMINISTERS, _configs(_O.ALTER_CONFIGS)),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: Row(
        _ADMINISTERS,
        _configs(_O.ALTER_CONFIGS),
        note="Who names a dead-letter topic needs WRITE TOPIC for it.",
    ),
    ApiKey.ALTER_REPLICA_LOG_DIRS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.DESCRIBE_LOG_DIRS: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.SASL_AUTHENTICATE: Row(_READS, note="It is the log-in."),
    ApiKey.CREATE_DELEGATION_TOKEN: Row(
        _ADMINISTERS,
        (
            _need(
                Right(_O.CREATE_TOKENS, _T.USER), place=_WHOLE, when="for another owner, named as User:NAME"
            ),
        ),
        note="A client that has logged in with a token or key gets none.",
    ),
    ApiKey.RENEW_DELEGATION_TOKEN: Row(
        _ADMINISTERS, note="The owner, the requester and the renewers of a token may."
    ),
    ApiKey.EXPIRE_DELEGATION_TOKEN: Row(
        _ADMINISTERS, note="The owner, the requester and the renewers of a token may."
    ),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: Row(
        _READS,
        (
            _need(
                Right(_O.DESCRIBE, _T.DELEGATION_TOKEN),
                Right(_O.DESCRIBE_TOKENS, _T.USER),
                place=Place.OMITTED,
                when="tokens of others",
            ),
        ),
    ),
    ApiKey.CREATE_PARTITIONS: Row(_ADMINISTERS, (_need(Right(_O.ALTER, _T.TOPIC)),)),
    ApiKey.DELETE_GROUPS: Row(_ADMINISTERS, (_need(_DELETE_GROUP),)),
    ApiKey.ELECT_LEADERS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.UNREGISTER_BROKER: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.OFFSET_DELETE: Row(_ADMINISTERS, (_need(_DELETE_GROUP, place=_WHOLE), _need(_READ_TOPIC))),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: Row(
        _READS, (_need(Right(_O.DESCRIBE_CONFIGS, _T.CLUSTER), place=_WHOLE),)
    ),
    ApiKey.ALTER_CLIENT_QUOTAS: Row(
        _ADMINISTERS, (_need(Right(_O.ALTER_CONFIGS, _T.CLUSTER), place=_WHOLE),)
    ),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.DESCRIBE_QUORUM: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.UPDATE_FEATURES: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
    ApiKey.DESCRIBE_CLUSTER: Row(_READS, note="Every client has to find the brokers."),
    ApiKey.DESCRIBE_PRODUCERS: Row(_READS, (_need(_READ_TOPIC),)),
    ApiKey.DESCRIBE_TRANSACTIONS: Row(
        _READS, (_need(_DESCRIBE_TRANSACTION), _need(_DESCRIBE_TOPIC, place=Place.OMITTED, when="its topics"))
    ),
    ApiKey.LIST_TRANSACTIONS: Row(_READS, (_need(_DESCRIBE_TRANSACTION, place=Place.OMITTED),)),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: Row(
        _POSITIONS,
        (
            _need(_READ_GROUP, place=_WHOLE),
            _need(_DESCRIBE_TOPIC, place=_WHOLE, when="each topic that it names"),
            _need(_DESCRIBE_TOPIC, place=Place.OMITTED, when="topics that a regular expression matches"),
        ),
    ),
    ApiKey.CONSUMER_GROUP_DESCRIBE: Row(
        _READS, (_need(_DESCRIBE_GROUP), _need(_DESCRIBE_TOPIC, when="each assigned topic"))
    ),
    ApiKey.LIST_CONFIG_RESOURCES: Row(_READS, (_need(Right(_O.DESCRIBE_CONFIGS, _T.CLUSTER), place=_WHOLE),)),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: Row(
        _READS,
        (
            _need(_DESCRIBE_TOPIC, when="topics by name"),
            _need(_DESCRIBE_TOPIC, place=Place.OMITTED, when="all topics"),
        ),
    ),
    ApiKey.SHARE_GROUP_HEARTBEAT: Row(
        _POSITIONS,
        (
            _need(_READ_GROUP, place=_WHOLE),
            _need(_DESCRIBE_TOPIC, place=_WHOLE, when="each topic that it names"),
        ),
    ),
    ApiKey.SHARE_GROUP_DESCRIBE: Row(
        _READS, (_need(_DESCRIBE_GROUP), _need(_DESCRIBE_TOPIC, when="each assigned topic"))
    ),
    ApiKey.SHARE_FETCH: Row(_RECORDS, _IN_GROUP),
    ApiKey.SHARE_ACKNOWLEDGE: Row(_RECORDS, _IN_GROUP),
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: _STATES,
    ApiKey.READ_SHARE_GROUP_STATE: _STATES,
    ApiKey.WRITE_SHARE_GROUP_STATE: _STATES,
    ApiKey.DELETE_SHARE_GROUP_STATE: _STATES,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: _STATES,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: Row(_READS, (_need(_DESCRIBE_GROUP), _need(_DESCRIBE_TOPIC))),
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: Row(_ADMINISTERS, _IN_GROUP),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: Row(
        _ADMINISTERS, (_need(_DELETE_GROUP, place=_WHOLE), _need(_READ_TOPIC))
    ),
    ApiKey.ACKNOWLEDGE_RECORDS: Row(_RECORDS, _IN_GROUP),
    ApiKey.LEASE_RANGES: Row(_RECORDS, _IN_GROUP),
    ApiKey.ALTER_RANGE_LEASES: Row(_RECORDS, _IN_GROUP),
    ApiKey.DESCRIBE_LEASES: Row(_READS, (_need(_DESCRIBE_GROUP, place=_WHOLE), _need(_DESCRIBE_TOPIC))),
    ApiKey.REDRIVE_RECORDS: Row(
        _ADMINISTERS, (*_IN_GROUP, _need(_WRITE_TOPIC, place=_WHOLE, when="the topic to which they go"))
    ),
    ApiKey.CHALLENGE_BROKER: Row(_READS, note="It begins the handshake of brokers."),
    ApiKey.AUTHENTICATE_BROKER: Row(_READS, note="It is the handshake of brokers."),
    ApiKey.LIST_DELAYED_RECORDS: Row(_READS, (_need(_READ_TOPIC, place=_WHOLE),)),
    ApiKey.ALTER_DELAYED_RECORDS: Row(_RECORDS, (_need(_WRITE_TOPIC, place=_WHOLE),)),
    ApiKey.LIST_SCHEDULES: Row(_READS, (_need(_READ_TOPIC, place=_WHOLE),)),
    ApiKey.ALTER_SCHEDULES: Row(_ADMINISTERS, (_need(_WRITE_TOPIC, place=_WHOLE),)),
    ApiKey.RECEIVE_RECORDS: _FORWARDED_LEASES,
    ApiKey.RELEASE_LEASES: _FORWARDED_LEASES,
    ApiKey.REGISTER_SHARE_GROUP: _FORWARDED_LEASES,
    ApiKey.PREPARE_TRANSACTION: Row(
        _RECORDS,
        (_need(_WRITE_TRANSACTION, place=_WHOLE),),
        note="TWO_PHASE_COMMIT is not needed: `transaction_prepared_max_ms` bounds the wait for the decision.",
    ),
    ApiKey.COMMIT_BATCH: Row(
        _RECORDS,
        (_need(_WRITE_TRANSACTION, place=_WHOLE),),
        note="For the prefix of the transactional ids of the query, and for each id: a PREFIXED ACL has both.",
    ),
    ApiKey.DESCRIBE_HEALTH: Row(_READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE),)),
    ApiKey.FORWARD_REQUEST: Row(
        _READS, _BROKERS, brokers_only=True, note="The request inside needs the rights of its own API."
    ),
    ApiKey.CONFIRM_HAND_OVER: Row(_READS, _BROKERS, brokers_only=True),
    ApiKey.TRACE_RECORD: Row(
        _READS,
        (
            _need(_READ_TOPIC, place=_WHOLE),
            _need(_DESCRIBE_GROUP, place=_WHOLE, when="the last record that failed"),
        ),
        note="Groups that the user may not DESCRIBE are in the timeline without their names and members.",
    ),
    ApiKey.READ_TRACE: Row(_READS, _BROKERS, brokers_only=True),
    ApiKey.SEARCH_RECORDS: Row(_READS, (_need(_READ_TOPIC, place=_WHOLE),)),
    ApiKey.DESCRIBE_SCHEMAS: Row(
        _READS,
        (
            _need(_READ_SUBJECT, place=_WHOLE, when="schemas"),
            _need(Right(_O.DESCRIBE_CONFIGS, _T.SUBJECT), place=_WHOLE, when="settings of a subject"),
            _need(Right(_O.DESCRIBE_CONFIGS, _T.CLUSTER), place=_WHOLE, when="settings of all subjects"),
            _need(_READ_SUBJECT, place=Place.OMITTED, when="lists"),
        ),
        note="A schema is found by its id if one of its subjects may be read.",
    ),
    ApiKey.ALTER_SCHEMAS: Row(
        _ADMINISTERS,
        (
            _need(Right(_O.WRITE, _T.SUBJECT), place=_WHOLE, when="register"),
            _need(Right(_O.DELETE, _T.SUBJECT), place=_WHOLE, when="delete"),
            _need(Right(_O.ALTER_CONFIGS, _T.SUBJECT), place=_WHOLE, when="settings of a subject"),
            _need(Right(_O.ALTER_CONFIGS, _T.CLUSTER), place=_WHOLE, when="settings of all subjects"),
        ),
    ),
    ApiKey.EXPLAIN_GROUP: Row(
        _READS,
        (
            _need(_DESCRIBE_GROUP, place=_WHOLE),
            _need(_DESCRIBE_TOPIC, place=Place.OMITTED),
            _need(_DESCRIBE_TRANSACTION, place=Place.OMITTED, when="its transactional ids"),
        ),
        note="Keys of records are left out without READ TOPIC.",
    ),
    ApiKey.COLLECT_GROUP_FACTS: Row(_READS, _BROKERS, brokers_only=True),
    ApiKey.DESCRIBE_HOT_PARTITIONS: Row(
        _READS,
        (_need(_DESCRIBE_CLUSTER, place=_WHOLE),),
        note="Without READ TOPIC, a hot partition of the topic has no keys in the answer.",
    ),
    ApiKey.DESCRIBE_PARTITION_RATES: Row(_READS, _BROKERS, brokers_only=True),
    ApiKey.CHECK_AUTHORIZATION: Row(
        _READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE, when="about another user"),)
    ),
    ApiKey.CREATE_SQS_ACCESS_KEY: Row(
        _ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE, when="for another user"),)
    ),
    ApiKey.DESCRIBE_SQS_ACCESS_KEYS: Row(
        _READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE, when="of another user, or of all"),)
    ),
    ApiKey.DELETE_SQS_ACCESS_KEY: Row(
        _ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE, when="of another user"),)
    ),
    ApiKey.CREATE_API_KEY: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE, when="for another user"),)),
    ApiKey.DESCRIBE_API_KEYS: Row(
        _READS, (_need(_DESCRIBE_CLUSTER, place=_WHOLE, when="of another user, or of all"),)
    ),
    ApiKey.DELETE_API_KEY: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE, when="of another user"),)),
    ApiKey.SET_PASSWORD: Row(_ADMINISTERS, (_need(_ALTER_CLUSTER, place=_WHOLE),)),
}
"""By Kafka API, those of Mansio included."""

_A = ApiKey
_CONSUME = (_A.LIST_OFFSETS, _A.METADATA, _A.FETCH)
_PUBLISH = (_A.PRODUCE,)
_RECEIVE = (_A.SHARE_FETCH,)
_ACKNOWLEDGE = (_A.SHARE_ACKNOWLEDGE,)
_DESCRIBE_TOPICS = (_A.METADATA, _A.DESCRIBE_CONFIGS)
_RESET_OFFSETS = (_A.LIST_GROUPS, _A.LIST_OFFSETS, _A.OFFSET_COMMIT, _A.ALTER_SHARE_GROUP_OFFSETS)

HTTP: Final[Mapping[tuple[str, str], tuple[ApiKey, ...]]] = {
    ("GET", "/topics"): (_A.METADATA,),
    ("POST", "/topics"): (_A.CREATE_TOPICS,),
    ("GET", "/topics/{topic}"): _DESCRIBE_TOPICS,
    ("PATCH", "/topics/{topic}"): (_A.INCREMENTAL_ALTER_CONFIGS, _A.CREATE_PARTITIONS),
    ("DELETE", "/topics/{topic}"): (_A.DELETE_TOPICS,),
    ("POST", "/topics/{topic}/records"): _PUBLISH,
    ("POST", "/topics/{topic}/records/batch"): _PUBLISH,
    ("GET", "/topics/{topic}/partitions/{partition}/records"): _CONSUME,
    ("GET", "/topics/{topic}/offsets"): (_A.LIST_OFFSETS,),
    ("GET", "/topics/{topic}/events"): _CONSUME,
    ("POST", "/groups/{group}/receive"): _RECEIVE,
    ("POST", "/groups/{group}/ack"): _ACKNOWLEDGE,
    ("POST", "/groups/{group}/retry"): _ACKNOWLEDGE,
    ("POST", "/groups/{group}/reject"): _ACKNOWLEDGE,
    ("POST", "/groups/{group}/extend"): _ACKNOWLEDGE,
    ("GET", "/groups"): (_A.LIST_GROUPS,),
    ("GET", "/groups/{group}"): (_A.DESCRIBE_GROUPS, _A.CONSUMER_GROUP_DESCRIBE, _A.SHARE_GROUP_DESCRIBE),
    ("DELETE", "/groups/{group}"): (_A.DELETE_GROUPS,),
    ("GET", "/groups/{group}/why"): (_A.EXPLAIN_GROUP,),
    ("GET", "/groups/{group}/config"): (_A.DESCRIBE_CONFIGS,),
    ("PATCH", "/groups/{group}/config"): (_A.INCREMENTAL_ALTER_CONFIGS,),
    ("GET", "/groups/{group}/offsets"): (_A.OFFSET_FETCH, _A.DESCRIBE_SHARE_GROUP_OFFSETS),
    ("POST", "/groups/{group}/offsets/reset"): _RESET_OFFSETS,
    ("GET", "/groups/{group}/leases"): (_A.DESCRIBE_LEASES,),
    ("POST", "/groups/{group}/dead-letters/redrive"): (_A.REDRIVE_RECORDS,),
    ("GET", "/topics/{topic}/delayed"): (_A.LIST_DELAYED_RECORDS,),
    ("POST", "/topics/{topic}/delayed/cancel"): (_A.ALTER_DELAYED_RECORDS,),
    ("POST", "/topics/{topic}/delayed/reschedule"): (_A.ALTER_DELAYED_RECORDS,),
    ("POST", "/topics/{topic}/delayed/deliver-now"): (_A.ALTER_DELAYED_RECORDS,),
    ("GET", "/topics/{topic}/schedules"): (_A.LIST_SCHEDULES,),
    ("PUT", "/topics/{topic}/schedules/{name}"): (_A.ALTER_SCHEDULES,),
    ("GET", "/topics/{topic}/schedules/{name}"): (_A.LIST_SCHEDULES,),
    ("DELETE", "/topics/{topic}/schedules/{name}"): (_A.ALTER_SCHEDULES,),
    ("POST", "/topics/{topic}/schedules/{name}/pause"): (_A.ALTER_SCHEDULES,),
    ("POST", "/topics/{topic}/schedules/{name}/resume"): (_A.ALTER_SCHEDULES,),
    ("GET", "/transactions"): (_A.LIST_TRANSACTIONS,),
    ("GET", "/transactions/{transactional_id}"): (_A.DESCRIBE_TRANSACTIONS,),
    ("POST", "/transactions/{transactional_id}/terminate"): (_A.INIT_PRODUCER_ID,),
    ("GET", "/hanging-transactions"): (_A.METADATA, _A.DESCRIBE_PRODUCERS, _A.LIST_TRANSACTIONS),
    ("GET", "/topics/{topic}/partitions/{partition}/producers"): (_A.DESCRIBE_PRODUCERS,),
    ("POST", "/topics/{topic}/partitions/{partition}/transactions/abort"): (
        _A.DESCRIBE_PRODUCERS,
        _A.WRITE_TXN_MARKERS,
    ),
    ("GET", "/topics/{topic}/partitions/{partition}/records/{offset}/trace"): (_A.TRACE_RECORD,),
    ("GET", "/groups/{group}/last-failed/trace"): (_A.TRACE_RECORD,),
    ("GET", "/topics/{topic}/search"): (_A.METADATA, _A.SEARCH_RECORDS),
    ("GET", "/cluster"): (_A.DESCRIBE_CLUSTER,),
    ("GET", "/cluster/hot-partitions"): (_A.DESCRIBE_HOT_PARTITIONS,),
}
"""By method and path of an operation of the HTTP API."""

GRPC: Final[Mapping[str, tuple[ApiKey, ...]]] = {
    "Publish": _PUBLISH,
    "PublishStream": _PUBLISH,
    "Fetch": _CONSUME,
    "ListOffsets": (_A.LIST_OFFSETS,),
    "Receive": (*_RECEIVE, *_ACKNOWLEDGE),
    "Ack": _ACKNOWLEDGE,
    "Retry": _ACKNOWLEDGE,
    "Reject": _ACKNOWLEDGE,
    "Extend": _ACKNOWLEDGE,
    "Redrive": (_A.REDRIVE_RECORDS,),
    "ListTopics": (_A.METADATA,),
    "CreateTopic": (_A.CREATE_TOPICS,),
    "DescribeTopic": _DESCRIBE_TOPICS,
    "AlterTopic": (_A.INCREMENTAL_ALTER_CONFIGS, _A.CREATE_PARTITIONS),
    "DeleteTopic": (_A.DELETE_TOPICS,),
    "ListGroups": (_A.LIST_GROUPS,),
    "ExplainGroup": (_A.EXPLAIN_GROUP,),
    "GetGroupOffsets": (_A.OFFSET_FETCH, _A.DESCRIBE_SHARE_GROUP_OFFSETS),
    "ResetGroupOffsets": _RESET_OFFSETS,
    "AlterGroup": (_A.INCREMENTAL_ALTER_CONFIGS,),
    "DeleteGroup": (_A.DELETE_GROUPS,),
    "ListDelayed": (_A.LIST_DELAYED_RECORDS,),
    "ChangeDelayed": (_A.ALTER_DELAYED_RECORDS,),
    "CreateSchedule": (_A.ALTER_SCHEDULES,),
    "ListSchedules": (_A.LIST_SCHEDULES,),
    "ChangeSchedule": (_A.ALTER_SCHEDULES,),
    "ListTransactions": (_A.LIST_TRANSACTIONS,),
    "DescribeTransaction": (_A.DESCRIBE_TRANSACTIONS,),
    "TerminateTransaction": (_A.INIT_PRODUCER_ID,),
    "DescribeProducers": (_A.DESCRIBE_PRODUCERS,),
    "FindHangingTransactions": (_A.METADATA, _A.DESCRIBE_PRODUCERS, _A.LIST_TRANSACTIONS),
    "AbortTransaction": (_A.DESCRIBE_PRODUCERS, _A.WRITE_TXN_MARKERS),
    "TraceRecord": (_A.TRACE_RECORD,),
    "FindRecords": (_A.METADATA, _A.SEARCH_RECORDS),
}
"""By method of the gRPC API."""

_QUEUE = (_A.DESCRIBE_TOPIC_PARTITIONS,)
_QUEUE_SETTINGS = (_A.DESCRIBE_CONFIGS,)
_ALTER_QUEUE = (_A.INCREMENTAL_ALTER_CONFIGS,)
_UNSUPPORTED: tuple[ApiKey, ...] = ()

SQS: Final[Mapping[str, tuple[ApiKey, ...]]] = {
    "AddPermission": _UNSUPPORTED,
    "CancelMessageMoveTask": (_A.REDRIVE_RECORDS,),
    "ChangeMessageVisibility": _ACKNOWLEDGE,
    "ChangeMessageVisibilityBatch": _ACKNOWLEDGE,
    "CreateQueue": (_A.CREATE_TOPICS, _A.INCREMENTAL_ALTER_CONFIGS),
    "DeleteMessage": _ACKNOWLEDGE,
    "DeleteMessageBatch": _ACKNOWLEDGE,
    "DeleteQueue": (_A.DELETE_TOPICS,),
    "GetQueueAttributes": (*_QUEUE, *_QUEUE_SETTINGS, _A.LIST_OFFSETS, _A.DESCRIBE_LEASES),
    "GetQueueUrl": _QUEUE,
    "ListDeadLetterSourceQueues": (*_QUEUE, *_QUEUE_SETTINGS),
    "ListMessageMoveTasks": _QUEUE,
    "ListQueueTags": (*_QUEUE, *_QUEUE_SETTINGS),
    "ListQueues": _QUEUE,
    "PurgeQueue": (_A.DELETE_RECORDS, _A.ALTER_SHARE_GROUP_OFFSETS),
    "ReceiveMessage": _RECEIVE,
    "RemovePermission": _UNSUPPORTED,
    "SendMessage": _PUBLISH,
    "SendMessageBatch": _PUBLISH,
    "SetQueueAttributes": _ALTER_QUEUE,
    "StartMessageMoveTask": (_A.REDRIVE_RECORDS,),
    "TagQueue": _ALTER_QUEUE,
    "UntagQueue": _ALTER_QUEUE,
}
"""By action of the SQS endpoint."""


class RightsUnknown(Exception):
    """A server has a request without a row."""


def check_rows(protocol: str, rows: Iterable[object], served: Iterable[object]) -> None:
    """Raise `RightsUnknown` unless each request that a server of `protocol` serves has a row."""
    missing = set(served) - set(rows)
    if missing:
        raise RightsUnknown(
            f"{protocol}: no row in required_rights for {', '.join(sorted(map(str, missing)))}"
        )


def rows_of(apis: Iterable[ApiKey]) -> list[Row]:
    """Return the rows of the Kafka APIs as which an operation acts."""
    return [KAFKA[each] for each in apis]
