"""Topics over HTTP: list, create, describe, alter, delete."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, Field

from mansio.api.asgi.problems import InvalidField
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.errors import TopicAuthorizationFailed
from mansio.tracebacks import copied
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.client.admin.admin import ConfigEntry, TopicDescription

PARTITIONS_MAX: Final = 100_000
PAGE_MAX: Final = 1_000
CONFIGS_MAX: Final = 200
Text = Annotated[str, Field(max_length=10_000)]
Configs = Annotated[dict[str, Text | None], Field(max_length=CONFIGS_MAX)]


Limit = Annotated[int, Field(ge=1, le=PAGE_MAX)]
Cursor = Annotated[str, Field(max_length=1000)]
CURSOR_HELP: Final = "`next_cursor` of the page before."


class TopicParameters(Body):
    limit: Limit = 100
    cursor: Cursor | None = Field(None, description=CURSOR_HELP)
    include_internal: bool = False


class NewTopic(Body):
    name: Annotated[str, Field(min_length=1, max_length=249)]
    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_MAX)] | None = None
    replication_factor: Annotated[int, Field(ge=1, le=100)] | None = None
    config: Annotated[dict[str, Text], Field(max_length=CONFIGS_MAX)] = Field(default_factory=dict)


class TopicChanges(Body):
    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_MAX)] | None = Field(None, description="New number.")
    config: Configs = Field(default_factory=dict, description="null: the default again.")


class TopicSummary(Result):
    name: str
    partitions: Annotated[int, BeforeValidator(len)]
    is_internal: bool


class TopicPage(Result):
    topics: list[TopicSummary]
    next_cursor: str | None


class PartitionState(Result):
    partition: int
    leader: int
    replicas: list[int]
    in_sync_replicas: list[int]
    start_offset: int | None
    end_offset: int | None


class TopicState(Result):
    """`config`: the settings that differ from their defaults. What the caller may not see is null: `config` without
    DESCRIBE_CONFIGS for the topic, and after a change everything but the name without DESCRIBE."""

    name: str
    id: str | None
    is_internal: bool | None
    partitions: list[PartitionState] | None
    config: dict[str, str | None] | None


def encode_cursor(name: str) -> str:
    """Return the cursor behind a name."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_cursor(cursor: str | None) -> str:
    """Return the name in a cursor, "" without one. Raises `InvalidField`."""
    if cursor is None:
        return ""
    try:
        return base64.b64decode(cursor, b"-_", validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise InvalidField("cursor", "this is not a cursor of this list") from error


async def list_topics(call: Call) -> TopicPage:
    query: TopicParameters = call.query
    after = decode_cursor(query.cursor)
    topics = await call.client.admin.describe_topics(include_internal=query.include_internal)
    found = sorted((each for each in topics if each.name > after), key=lambda each: each.name)
    page = found[: query.limit]
    next_cursor = encode_cursor(page[-1].name) if len(found) > len(page) else None
    return TopicPage.model_validate({"topics": page, "next_cursor": next_cursor})


async def create(call: Call) -> TopicState:
    body: NewTopic = call.body
    await call.client.admin.create_topic(
        body.name,
        partitions=-1 if body.partitions is None else body.partitions,
        replication_factor=-1 if body.replication_factor is None else body.replication_factor,
        config=body.config,
    )
    return await _describe_changed(call, body.name)


async def describe(call: Call) -> TopicState:
    return await _describe(call, check_topic_name(call.topic))


async def _describe(call: Call, name: str) -> TopicState:
    admin = call.client.admin
    found: TopicDescription = await admin.describe_topic(name)
    partitions = [TopicPartition(name, each.index) for each in found.partitions]
    config, starts, ends = await asyncio.gather(
        admin.describe_config(name),
        admin.list_offsets(partitions, "earliest"),
        admin.list_offsets(partitions, "latest"),
        return_exceptions=True,
    )
    if isinstance(config, BaseException) and not isinstance(config, TopicAuthorizationFailed):
        raise copied(config)
    return TopicState(
        name=name,
        id=found.topic_id.hex(),
        is_internal=found.is_internal,
        partitions=[
            PartitionState(
                partition=each.index,
                leader=each.leader,
                replicas=list(each.replicas),
                in_sync_replicas=list(each.in_sync_replicas),
                start_offset=_offset(starts, partition),
                end_offset=_offset(ends, partition),
            )
            for partition, each in zip(partitions, found.partitions, strict=True)
        ],
        config=None if isinstance(config, TopicAuthorizationFailed) else changed_settings(config),
    )


async def _describe_changed(call: Call, name: str) -> TopicState:
    """Return the state of a topic after a change, as far as the caller may see it."""
    try:
        return await _describe(call, name)
    except TopicAuthorizationFailed:
        return TopicState(name=name, id=None, is_internal=None, partitions=None, config=None)


def changed_settings(entries: Mapping[str, ConfigEntry]) -> dict[str, str | None]:
    """Return the settings that differ from their defaults."""
    return {entry.name: entry.value for entry in entries.values() if not entry.is_default}


def _offset(listed: Any, partition: Any) -> int | None:
    """Return an offset; None if the partition has no leader."""
    return None if isinstance(listed, BaseException) or partition not in listed else listed[partition].offset


async def alter(call: Call) -> TopicState:
    body: TopicChanges = call.body
    admin, name = call.client.admin, check_topic_name(call.topic)
    if body.config:
        await admin.alter_topic_config(name, body.config)
    if body.partitions is not None:
        await admin.create_partitions(name, body.partitions)
    return await _describe_changed(call, name)


async def delete(call: Call) -> None:
    await call.client.admin.delete_topic(check_topic_name(call.topic))


OPERATIONS: Final = (
    Operation(
        "GET", "/topics", "List topics", list_topics, query=TopicParameters, result=TopicPage, tag="topics"
    ),
    Operation(
        "POST",
        "/topics",
        "Create a topic",
        create,
        body=NewTopic,
        result=TopicState,
        status=201,
        tag="topics",
    ),
    Operation("GET", "/topics/{topic}", "Describe a topic", describe, result=TopicState, tag="topics"),
    Operation(
        "PATCH",
        "/topics/{topic}",
        "Change settings, or add partitions",
        alter,
        body=TopicChanges,
        result=TopicState,
        tag="topics",
    ),
    Operation(
        "DELETE", "/topics/{topic}", "Delete a topic with its records", delete, status=204, tag="topics"
    ),
)
