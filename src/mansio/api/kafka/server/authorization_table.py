"""Table of the administrative APIs: what a request of each has changed, for the audit.

The request router reports each change that succeeded, from the request and its response; a service does not. Names of
resources are those of ACLs, or say what they are: `broker 1`, `user alice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config.config_def import ResourceType as ConfigResourceType
from mansio.config.item_limit import ITEMS_MAX
from mansio.errors import InvalidRequest
from mansio.state.authorization.acl_words import acl_text, word_of
from mansio.state.authorization.acls import CLUSTER_NAME, ResourceType, checked_acl
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mansio.state.authorization.acls import Acl

CHANGES_MAX: Final[Mapping[int, int]] = {ApiKey.CREATE_ACLS: ITEMS_MAX, ApiKey.DELETE_ACLS: ITEMS_MAX}
"""Number of changes of one request that are reported by name; the others are counted. Of ACLs, it is that of all items
that a request may have."""

OTHER_CHANGES_MAX: Final = 200
"""The same for other APIs."""

_TOPIC: Final = word_of(ResourceType.TOPIC)
_GROUP: Final = word_of(ResourceType.GROUP)
_CLUSTER: Final = word_of(ResourceType.CLUSTER)
_USER: Final = word_of(ResourceType.USER)
_TOKEN: Final = word_of(ResourceType.DELEGATION_TOKEN)
_SUBJECT: Final = word_of(ResourceType.SUBJECT)
_ACL: Final = "acl"
_ACCESS_KEY: Final = "access-key"
_API_KEY: Final = "api-key"
_QUOTA: Final = "quota"
_CONFIG_WORDS: Final = {
    ConfigResourceType.TOPIC: _TOPIC,
    ConfigResourceType.BROKER: "broker",
    ConfigResourceType.GROUP: _GROUP,
}


class Change(NamedTuple):
    """A resource that was changed: its type and name."""

    resource_type: str
    name: str


def changes_of(api_key: int, request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what a request of an administrative API has changed; nothing for other APIs, for a request that only
    validates, and for a response with an error. The number is not bounded."""
    find = ADMINISTRATIVE.get(api_key)
    if find is None or response.get("error_code") or getattr(request, "validate_only", False):
        return
    yield from find(request, response)


def _items(kind: str, results: str, name: str) -> Callable[[Any, Mapping[str, Any]], Iterator[Change]]:
    """Return a function for responses whose list `results` has an error and a name for each item."""

    def find(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
        for item in response.get(results) or ():
            if not item.get("error_code"):
                yield Change(kind, item.get(name) or "")

    return find


def _partitions(
    results: str, name: str, partitions: str
) -> Callable[[Any, Mapping[str, Any]], Iterator[Change]]:
    """Return a function for responses whose list `results` has topics with an error for each partition."""

    def find(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
        for topic in response.get(results) or ():
            if not topic.get("error_code") and any(
                not partition.get("error_code") for partition in topic.get(partitions) or ()
            ):
                yield Change(_TOPIC, topic[name])

    return find


_MARKED: Final = _partitions("topics", "name", "partitions")


def _named(kind: str, name: str) -> Callable[[Any, Mapping[str, Any]], Iterator[Change]]:
    """Return a function for requests that name one resource."""

    def find(request: Any, _response: Mapping[str, Any]) -> Iterator[Change]:
        yield Change(kind, getattr(request, name))

    return find


def _changed_configs(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    for item in response["responses"]:
        if not item.get("error_code"):
            kind = _CONFIG_WORDS.get(item["resource_type"], "resource")
            yield Change(kind, item["resource_name"] or "(all)")


def _changed_quotas(request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    for entry, result in zip(request.entries, response["entries"], strict=False):
        if not result.get("error_code"):
            parts = [f"{part.entity_type} {part.entity_name or '(default)'}" for part in entry.entity]
            yield Change(_QUOTA, ", ".join(parts))


def _created_acls(request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    for each, result in zip(request.creations, response["results"], strict=False):
        if not result.get("error_code"):
            made = _acl(
                each.resource_type,
                each.resource_pattern_type,
                each.resource_name,
                each.principal,
                each.host,
                each.operation,
                each.permission_type,
            )
            if made is not None:
                yield Change(_ACL, acl_text(made))


def _deleted_acls(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    for result in response["filter_results"]:
        if result.get("error_code"):
            continue
        for each in result["matching_acls"]:
            made = _acl(
                each["resource_type"],
                each["pattern_type"],
                each["resource_name"],
                each["principal"],
                each["host"],
                each["operation"],
                each["permission_type"],
            )
            if made is not None:
                yield Change(_ACL, acl_text(made))


def _acl(
    resource_type: int,
    pattern_type: int,
    name: str,
    principal: str,
    host: str,
    operation: int,
    permission: int,
) -> Acl | None:
    try:
        return checked_acl(
            resource_type=resource_type,
            pattern_type=pattern_type,
            name=name,
            principal=principal,
            host=host,
            operation=operation,
            permission=permission,
        )
    except InvalidRequest:
        return None


def _made(
    kind: str, name_of: Callable[[Mapping[str, Any]], str]
) -> Callable[[Any, Mapping[str, Any]], Iterator[Change]]:
    """Return a function for responses that name one resource."""

    def find(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
        yield Change(kind, name_of(response))

    return find


def _aborted_transactions(_request: Any, response: Mapping[str, Any]) -> Iterator[Change]:
    for marker in response["markers"]:
        yield from _MARKED(None, marker)


def _cluster(_request: Any, _response: Mapping[str, Any]) -> Iterator[Change]:
    yield Change(_CLUSTER, CLUSTER_NAME)


def _changed_subject(request: Any, _response: Mapping[str, Any]) -> Iterator[Change]:
    yield Change(_SUBJECT, request.subject or "(all)")


ADMINISTRATIVE: Final[Mapping[int, Callable[[Any, Mapping[str, Any]], Iterator[Change]]]] = {
    ApiKey.CREATE_TOPICS: _items(_TOPIC, "topics", "name"),
    ApiKey.DELETE_TOPICS: _items(_TOPIC, "responses", "name"),
    ApiKey.CREATE_PARTITIONS: _items(_TOPIC, "results", "name"),
    ApiKey.DELETE_RECORDS: _partitions("topics", "name", "partitions"),
    ApiKey.ALTER_CONFIGS: _changed_configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _changed_configs,
    ApiKey.DELETE_GROUPS: _items(_GROUP, "results", "group_id"),
    ApiKey.OFFSET_DELETE: _named(_GROUP, "group_id"),
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: _named(_GROUP, "group_id"),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: _named(_GROUP, "group_id"),
    ApiKey.REDRIVE_RECORDS: _named(_GROUP, "group_id"),
    ApiKey.ELECT_LEADERS: _partitions("replica_election_results", "topic", "partition_result"),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _partitions("responses", "name", "partitions"),
    ApiKey.ALTER_CLIENT_QUOTAS: _changed_quotas,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _items(_USER, "results", "user"),
    ApiKey.SET_PASSWORD: _named(_USER, "user"),
    ApiKey.CREATE_ACLS: _created_acls,
    ApiKey.DELETE_ACLS: _deleted_acls,
    ApiKey.UPDATE_FEATURES: _cluster,
    ApiKey.UNREGISTER_BROKER: _cluster,
    ApiKey.ALTER_REPLICA_LOG_DIRS: _partitions("results", "topic_name", "partitions"),
    ApiKey.WRITE_TXN_MARKERS: _aborted_transactions,
    ApiKey.ALTER_SCHEDULES: _named("schedule", "name"),
    ApiKey.ALTER_SCHEMAS: _changed_subject,
    ApiKey.CREATE_SQS_ACCESS_KEY: _made(_ACCESS_KEY, lambda response: response["key_id"]),
    ApiKey.DELETE_SQS_ACCESS_KEY: _named(_ACCESS_KEY, "key_id"),
    ApiKey.CREATE_API_KEY: _made(_API_KEY, lambda response: response["api_key"]["key_id"]),
    ApiKey.DELETE_API_KEY: _named(_API_KEY, "key_id"),
    ApiKey.CREATE_DELEGATION_TOKEN: _made(_TOKEN, lambda response: response["token_id"]),
    ApiKey.RENEW_DELEGATION_TOKEN: _made(_TOKEN, lambda _: ""),
    ApiKey.EXPIRE_DELEGATION_TOKEN: _made(_TOKEN, lambda _: ""),
}
"""The APIs whose successes are audited, with the function that finds what was changed: those that
`mansio.api.required_rights` says administer. The secret by which requests name a delegation token is left out."""
