"""docs/reference/authorization.md, generated from `mansio.api.required_rights`: which rights each request needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.required_rights import GRPC, HTTP, KAFKA, SQS, Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.api.required_rights import Need, Row
    from mansio.wire.api_versions import ApiKey

_INTRODUCTION: Final = """\
# Rights that requests need

With `authorizer=acl` each request needs the rights in these tables, which are those of Kafka.
[Security](../how-to/security.md) explains how they are given. Generated from `src/mansio/api/required_rights.py` by
`make format`; a broker that serves a request without a row does not start.

The resource is the one that the request names. An ACL that allows READ, WRITE, DELETE or ALTER also allows DESCRIBE,
and one that allows ALTER_CONFIGS also allows DESCRIBE_CONFIGS. Without a right the answer is the same whether the
resource exists or not.

The refusal is `TOPIC_AUTHORIZATION_FAILED` (29), `GROUP_AUTHORIZATION_FAILED` (30), `CLUSTER_AUTHORIZATION_FAILED` (31)
or `TRANSACTIONAL_ID_AUTHORIZATION_FAILED` (53). It is for the whole request, for each item (topic, partition, group,
...), or the resource is left out of the answer.

## Kafka

| API | key | rights | refusal |
|---|---|---|---|
"""

_OTHERS: Final = """
## {protocol}

{text}

| {what} | acts as |
|---|---|
"""

_PLACES: Final[Mapping[Place, str]] = {
    Place.REQUEST: "{}, the whole request",
    Place.ITEM: "{}, each item",
    Place.OMITTED: "left out",
}


def render() -> str:
    """Return the document."""
    parts = [_INTRODUCTION]
    for key, row in sorted(KAFKA.items()):
        parts += (
            f"| {_title(key)} | {int(key)} | {_rights(row)} | {'<br>'.join(map(_refusal, row.needs))} |\n"
        )
    parts.append(
        _table(
            "HTTP",
            "An operation acts as these Kafka APIs and needs their rights. The refusal is 403.",
            "operation",
            ((f"`{method} {path}`", apis) for (method, path), apis in HTTP.items()),
        )
    )
    parts.append(
        _table(
            "gRPC",
            "A method acts as these Kafka APIs and needs their rights. The refusal is `PERMISSION_DENIED`.",
            "method",
            ((f"`{name}`", apis) for name, apis in GRPC.items()),
        )
    )
    parts.append(
        _table(
            "SQS",
            "An action acts as these Kafka APIs and needs their rights. The refusal is `AccessDenied`, or "
            "`QueueDoesNotExist` for a queue that the caller may not DESCRIBE.",
            "action",
            ((f"`{name}`", apis) for name, apis in SQS.items()),
        )
    )
    return "".join(parts)


def _title(key: ApiKey) -> str:
    return "".join(word.capitalize() for word in key.name.split("_"))


def _rights(row: Row) -> str:
    found = [_need(each) for each in row.needs]
    if row.brokers_only:
        found = ["a broker of the cluster"]
    if row.note:
        found.append(row.note)
    return "<br>".join(found)


def _need(need: Need) -> str:
    rights = " or ".join(map(str, need.rights))
    return f"{rights} ({need.when})" if need.when else rights


def _refusal(need: Need) -> str:
    return _PLACES[need.place].format(need.error_code)


def _table(protocol: str, text: str, what: str, rows: Iterable[tuple[str, tuple[ApiKey, ...]]]) -> str:
    lines = (f"| {name} | {', '.join(map(_title, apis)) or 'not supported'} |\n" for name, apis in rows)
    return _OTHERS.format(protocol=protocol, text=text, what=what) + "".join(lines)
