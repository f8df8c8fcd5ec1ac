"""A request of each Kafka API about one topic, group and transactional id, made from the schema of its version, and
the error codes of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.broker.coordinator.share import state_messages
from mansio.broker.coordinator.share.state_messages import RequestSender, StateRequestEntry
from mansio.broker.coordinator.share.state_store import WriteToken
from mansio.state.authorization.acls import WILDCARD
from mansio.state.share_partition.types import ShareKey
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.codec import messages
from mansio.wire.codec.schema_compiler import Struct, schema_fields
from mansio.wire.query_transactional_ids import task_transactional_id
from support.raw_peer import batch_of
from support.share_state_fixtures import begun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mansio.wire.codec.schema_compiler import Field

TOPIC_ID_VERSION_MIN: Final = 13
"""First version of Produce and Fetch that names topics by id."""

MANSIO_APIS_FROM: Final = 20_000
"""First key of the APIs that Kafka does not have."""

_TOPIC_FIELDS: Final = frozenset({"topic", "topic_name", "topics", "topic_names", "subscribed_topic_names"})
_GROUP_FIELDS: Final = frozenset(
    {"group_id", "groups", "groups_names", "group_ids", "coordinator_keys", "key"}
)
_OPTIONAL: Final = frozenset(
    {"group_instance_id", "instance_id", "rack_id", "server_assignor", "subscribed_topic_regex", "cursor"}
)


class Named(NamedTuple):
    """What a request is about. `topic_id`: 16 bytes."""

    topic: str
    topic_id: bytes
    group: str
    transactional_id: str


def encode(api: ApiKey, version: int, correlation_id: int, named: Named) -> bytes:
    """Return a request with its length prefix."""
    if api is ApiKey.PRODUCE:
        by_id = version >= TOPIC_ID_VERSION_MIN
        topics = [(None if by_id else named.topic, named.topic_id if by_id else None, [(0, batch_of(b"v"))])]
        return b"".join(produce.encode_request(version, correlation_id, "c", -1, 10_000, topics))
    if api is ApiKey.FETCH:
        by_id = version >= TOPIC_ID_VERSION_MIN
        partition = fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)
        wanted = [(None if by_id else named.topic, named.topic_id if by_id else None, [partition])]
        return fetch.encode_request(
            version, correlation_id, "c", wanted, max_wait_ms=0, min_bytes=0, max_bytes=1 << 20
        )
    if api is ApiKey.WRITE_SHARE_GROUP_STATE:
        asked = StateRequestEntry(
            ShareKey(named.group, named.topic_id, 0), write_token=WriteToken(1, 1), update=begun()
        )
        frame = state_messages.encode_request(api, RequestSender(1, 0), [asked], "c")
        return frame[:8] + correlation_id.to_bytes(4, "big") + frame[12:]
    return messages.encode_request(api, version, correlation_id, "c", request_fields(api, version, named))


def decode(api: ApiKey, version: int, frame: bytes) -> Any:
    """Return the answer in a frame."""
    if api is ApiKey.PRODUCE:
        return produce.decode_response(version, frame)
    if api is ApiKey.FETCH:
        return fetch.decode_response(version, frame)
    return messages.decode_response_frame(api, version, frame)[1]


def request_fields(api: ApiKey, version: int, named: Named) -> dict[str, Any]:
    """Return the fields of a request: each array has one item, and each name is one of `named`."""
    fields = _struct(messages._schema(api, version, messages.REQUEST), named)
    change = _CHANGES.get(api)
    if change is not None:
        change(fields, version, named)
    return fields


def names_topics_by_id(api: ApiKey, version: int) -> bool:
    """Whether a request names its topics by id only: an unknown id has its own error, as in Kafka."""

    def names(entity: Any) -> Iterator[str]:
        for field in schema_fields(entity):
            yield field.name
            if field.entity is not None:
                yield from names(field.entity)

    found = set(names(messages._schema(api, version, messages.REQUEST)))
    own = {"name"} if api < MANSIO_APIS_FROM else set()  # there it is the name of a schedule
    return "topic_id" in found and not found & {"topic", "topic_name", "subscribed_topic_names", *own}


def error_codes(answer: Any) -> set[int]:
    """Return all error codes in an answer, except 0."""
    return {code for code in _codes(answer) if code}


def _codes(value: Any) -> Iterator[int]:
    if isinstance(value, Struct):
        fields = vars(value)
    elif hasattr(value, "_asdict"):
        fields = value._asdict()
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _codes(each)
        return
    else:
        return
    for name, found in fields.items():
        if name.endswith("error_code"):
            yield found
        else:
            yield from _codes(found)


def _struct(entity: Any, named: Named) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in schema_fields(entity):
        if field.tag is not None and field.entity is None:
            continue
        if field.entity is not None:
            inner = _struct(field.entity, named)
            found[field.name] = [inner] if field.is_array else inner
        else:
            value = _value(field, named)
            found[field.name] = [value] if field.is_array else value
    return found


def _value(field: Field, named: Named) -> Any:
    name, kind = field.name, field.kafka_type
    if kind == "string":
        if name in _OPTIONAL:
            return None
        if name in _TOPIC_FIELDS or name in ("name", "subject"):
            return named.topic
        if name in _GROUP_FIELDS:
            return named.group
        if name.endswith("transactional_id") or name == "transactional_ids":
            return named.transactional_id
        return ""
    if kind == "uuid":
        return named.topic_id
    if kind in ("bytes", "records"):
        return batch_of(b"v") if name == "records" else b"x"
    if kind == "bool":
        return False
    if kind.startswith("float"):
        return 0.0
    return {
        "timeout_ms": 10_000,
        "max_bytes": 1 << 20,
        "partition_max_bytes": 1 << 20,
        "replica_id": -1,
        "generation_id": -1,
        "generation_id_or_member_epoch": -1,
        "acks": -1,
        "num_partitions": 1,
        "replication_factor": 1,
        "count": 2,
        "session_timeout_ms": 1_000,
        "rebalance_timeout_ms": 500,
        "transaction_timeout_ms": 60_000,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
        "timestamp": -1,
        "records_max": 1,
        "max_records": 1,
        "response_partition_limit": 100,
        "member_epoch": 0,
    }.get(name, 0)


def _create_topics(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["topics"][0] |= {"assignments": [], "configs": []}


def _delete_topics(fields: dict[str, Any], version: int, named: Named) -> None:
    if version >= 6:
        fields["topics"] = [{"name": named.topic, "topic_id": None}]


def _metadata(fields: dict[str, Any], version: int, named: Named) -> None:
    if version >= 10:
        fields["topics"] = [{"name": named.topic, "topic_id": None}]


def _set(**changed: Any) -> Callable[[dict[str, Any], int, Named], None]:
    def change(fields: dict[str, Any], _: int, __: Named) -> None:
        fields |= {name: value for name, value in changed.items() if name in fields}

    return change


def _acl(fields: dict[str, Any], version: int, named: Named) -> None:
    created = {
        "resource_type": 2,
        "resource_name": named.topic,
        "principal": "User:eve",
        "host": WILDCARD,
        "operation": 3,
        "permission_type": 3,
    }
    if version >= 1:
        created["resource_pattern_type"] = 3
    fields["creations"] = [created]


def _acl_filters(fields: dict[str, Any], _: int, named: Named) -> None:
    asked = {
        "resource_type_filter": 2,
        "resource_name_filter": named.topic,
        "pattern_type_filter": 3,
        "principal_filter": "User:nobody",
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    if "filters" in fields:
        fields["filters"] = [asked]
    else:
        fields |= asked


def _configs(fields: dict[str, Any], _: int, named: Named) -> None:
    for each in fields["resources"]:
        each |= {"resource_type": 2, "resource_name": named.topic}
        if "configuration_keys" in each:
            each["configuration_keys"] = None
        else:
            each["configs"] = [{**each["configs"][0], "name": "retention.ms", "value": "86400000"}]


def _offset_fetch(fields: dict[str, Any], version: int, _: Named) -> None:
    if version >= 9:
        fields["groups"][0] |= {"member_id": None, "member_epoch": -1}


def _leave_group(fields: dict[str, Any], version: int, _: Named) -> None:
    if version >= 3:
        fields["members"][0]["member_id"] = "m"


def _protocol(fields: dict[str, Any], _: int, __: Named) -> None:
    fields |= {"protocol_type": "consumer"}
    fields["protocols"][0] |= {"name": "range"}


def _quotas(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["entries"] = [
        {
            "entity": [{"entity_type": "client-id", "entity_name": "c"}],
            "ops": [{"key": "producer_byte_rate", "value": 1e9, "remove": False}],
        }
    ]


def _quota_filter(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["components"] = [{"entity_type": "client-id", "match_type": 0, "match": "c"}]


def _scram(fields: dict[str, Any], _: int, __: Named) -> None:
    fields |= {
        "deletions": [],
        "upsertions": [
            {
                "name": "eve",
                "mechanism": 1,
                "iterations": 4096,
                "salt": b"s" * 16,
                "salted_password": b"p" * 32,
            }
        ],
    }


def _scram_names(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["users"] = [{"name": "alice"}]


def _share_session(fields: dict[str, Any], _: int, named: Named) -> None:
    fields |= {"member_id": "AAAAAAAAAAAAAAAAAAAAAA", "max_wait_ms": 0, "forgotten_topics_data": []}
    for topic in fields["topics"]:
        for partition in topic["partitions"]:
            partition["acknowledgement_batches"] = []


def _acknowledge(fields: dict[str, Any], _: int, __: Named) -> None:
    fields |= {"member_id": "AAAAAAAAAAAAAAAAAAAAAA", "share_session_epoch": 1}
    for topic in fields["topics"]:
        for partition in topic["partitions"]:
            partition["acknowledgement_batches"] = [
                {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}
            ]


def _elections(fields: dict[str, Any], _: int, named: Named) -> None:
    fields["topic_partitions"] = [{"topic": named.topic, "partitions": [0]}]


def _features(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["feature_updates"][0] |= {"feature": "metadata.version", "max_version_level": 1}


def _heartbeat(fields: dict[str, Any], version: int, _: Named) -> None:
    fields["topic_partitions"] = [] if version >= 0 else None
    if version >= 1:
        fields["member_id"] = "AAAAAAAAAAAAAAAAAAAAAA"


def _share_heartbeat(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["member_id"] = "AAAAAAAAAAAAAAAAAAAAAA"


def _markers(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["markers"][0] |= {"producer_id": 1, "coordinator_epoch": -1}


def _redrive(fields: dict[str, Any], _: int, __: Named) -> None:
    fields |= {"redrive_id": "r", "offsets": [], "most": 1}


def _acknowledge_records(fields: dict[str, Any], _: int, __: Named) -> None:
    fields["member_id"] = "ab" * 16
    batch = {"first_offset": 0, "last_offset": 0, "types": b"\1", "delay_ms": -1, "reason": ""}
    fields["topics"][0]["partitions"][0]["batches"] = [{**batch, "delivery_count": 1}]


def _batch(fields: dict[str, Any], _: int, named: Named) -> None:
    """The batch of the query whose transactional ids begin with that of `named`."""
    transactional_id = task_transactional_id(query_of(named), 0, 0)
    transaction = {"transactional_id": transactional_id, "producer_id": 1, "producer_epoch": 0}
    fields |= {"query_id": query_of(named), "batch_id": 1, "transactions": [transaction], "abandoned": []}
    fields["committed"] = True


def encode_empty(api: ApiKey, version: int, correlation_id: int, named: Named) -> bytes | None:
    """Return the same request with empty lists; None if it has none."""
    if api in (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.WRITE_SHARE_GROUP_STATE):
        return None  # they have encoders of their own
    fields = request_fields(api, version, named)
    lists = [name for name, value in fields.items() if isinstance(value, list)]
    if not lists:
        return None
    return messages.encode_request(api, version, correlation_id, "c", fields | {name: [] for name in lists})


def query_of(named: Named) -> str:
    """Return the query id of the request that ends a batch."""
    return f"q-{named.transactional_id}"


def _delayed(fields: dict[str, Any], _: int, __: Named) -> None:
    for query in fields.get("queries", ()):
        query |= {"ids": [], "due_to_ms": 1 << 40, "key": None}


def _schedule(fields: dict[str, Any], _: int, __: Named) -> None:
    fields |= {
        "name": "s",
        "cron": "0 0 1 1 *",
        "every_ms": 0,
        "timezone": "UTC",
        "catch_up": 0,
        "key": None,
        "value": b"v",
        "headers": [],
    }


_CHANGES: Final[Mapping[ApiKey, Callable[[dict[str, Any], int, Named], None]]] = {
    ApiKey.METADATA: _metadata,
    ApiKey.DESCRIBE_SCHEMAS: _set(operation="versions", arguments=b"{}"),
    ApiKey.ALTER_SCHEMAS: _set(operation="register", arguments=b'{"schema":"\\"int\\""}'),
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.JOIN_GROUP: _protocol,
    ApiKey.LEAVE_GROUP: _leave_group,
    ApiKey.LIST_GROUPS: _set(states_filter=[], types_filter=[]),
    ApiKey.API_VERSIONS: _set(client_software_name="c", client_software_version="1"),
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.WRITE_TXN_MARKERS: _markers,
    ApiKey.INIT_PRODUCER_ID: _set(producer_id=-1, producer_epoch=-1),
    ApiKey.DESCRIBE_ACLS: _acl_filters,
    ApiKey.CREATE_ACLS: _acl,
    ApiKey.DELETE_ACLS: _acl_filters,
    ApiKey.DESCRIBE_CONFIGS: _configs,
    ApiKey.ALTER_CONFIGS: _configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _configs,
    ApiKey.CREATE_PARTITIONS: lambda fields, _, __: fields["topics"][0].update(assignments=None),
    ApiKey.ELECT_LEADERS: _elections,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: _quota_filter,
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: _scram_names,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _scram,
    ApiKey.UPDATE_FEATURES: _features,
    ApiKey.DESCRIBE_CLUSTER: _set(endpoint_type=1),
    ApiKey.LIST_TRANSACTIONS: _set(
        state_filters=[], producer_id_filters=[], duration_filter=-1, transactional_id_pattern=None
    ),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _heartbeat,
    ApiKey.LIST_CONFIG_RESOURCES: _set(resource_types=[]),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _set(cursor=None),
    ApiKey.SHARE_GROUP_HEARTBEAT: _share_heartbeat,
    ApiKey.SHARE_FETCH: _share_session,
    ApiKey.SHARE_ACKNOWLEDGE: _acknowledge,
    ApiKey.ACKNOWLEDGE_RECORDS: _acknowledge_records,
    ApiKey.REDRIVE_RECORDS: _redrive,
    ApiKey.LEASE_RANGES: _set(member_id="ab" * 16, records_max=1, lease_ms=1_000, wait_ms=0),
    ApiKey.ALTER_RANGE_LEASES: _set(member_id="ab" * 16, lease_ms=1_000, operation=0),
    ApiKey.COMMIT_BATCH: _batch,
    ApiKey.LIST_DELAYED_RECORDS: _delayed,
    ApiKey.ALTER_SCHEDULES: _schedule,
    ApiKey.CREATE_SQS_ACCESS_KEY: _set(user="carol"),
    ApiKey.DESCRIBE_SQS_ACCESS_KEYS: _set(user="carol"),
    ApiKey.CREATE_API_KEY: _set(user="carol", description="", valid_ms=-1),
    ApiKey.DESCRIBE_API_KEYS: _set(user="carol"),
    ApiKey.SET_PASSWORD: _set(user="carol", password=b"another password"),
    ApiKey.FORWARD_REQUEST: _set(request=b"\0" * 20),
}
