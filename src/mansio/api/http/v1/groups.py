"""Groups over HTTP: list, describe, settings, offsets, delete, and dead letters of share groups."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from mansio.api.asgi.problems import InvalidField
from mansio.api.http.v1.arguments import checked
from mansio.api.http.v1.operation import Body, Call, Operation, Result, check_topic_name
from mansio.api.http.v1.times import parse_time
from mansio.api.http.v1.topics import (
    CURSOR_HELP,
    Configs,
    Cursor,
    Limit,
    changed_settings,
    decode_cursor,
    encode_cursor,
)
from mansio.api.routing.group_offsets import reset_group_offsets
from mansio.broker.coordinator.group.group_inspection import SHARE
from mansio.errors import GroupIdNotFound, UnknownTopicOrPartition
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.client.admin.shares import ShareLeases
    from mansio.net.redrive import RedriveResult

REDRIVEN_MAX: Final = 10_000
RANGES_MAX: Final = 1_000


class GroupParameters(Body):
    limit: Limit = 100
    cursor: Cursor | None = Field(None, description=CURSOR_HELP)


class GroupSummary(Result):
    group: str = Field(validation_alias="group_id")
    type: str = Field(validation_alias="group_type")
    state: str
    protocol_type: str


class GroupPage(Result):
    """`is_complete`: whether all brokers of the cluster answered."""

    groups: list[GroupSummary]
    is_complete: bool
    next_cursor: str | None


class Member(Result):
    member_id: str
    client_id: str
    client_host: str
    partitions: list[tuple[str, int]]


class GroupState(Result):
    group: str
    type: str
    state: str
    members: list[Member]


class WhyParameters(Body):
    sample: Annotated[float, Field(ge=0, le=10)] = Field(
        1.0, description="Time in seconds for which the brokers look at what changes; 0: only once."
    )


class Finding(Result):
    """One cause. `impact`: blocks, slows or waits; `command`: what helps. `evidence`: the numbers behind it."""

    cause: str
    impact: str
    is_certain: bool
    text: str
    advice: str
    command: str
    records: int | None
    topic: str | None
    partition: int | None
    offset: int | None
    member_id: str | None
    client_id: str | None
    principal: str | None
    key: str | None
    transactional_id: str | None
    producer_id: int | None
    schedule: str | None
    evidence: dict[str, int]


class Explanation(Result):
    """What keeps a group from going on: the first finding. `status`: blocked, hindered, progressing, caught-up, waiting
    or unexplained; `rate`: records done per second, null without a sample."""

    group: str = Field(validation_alias="group_id")
    group_type: str
    state: str
    status: str
    summary: str
    lag: int
    rate: float | None
    members: int
    findings: list[Finding]
    more_findings: int
    hidden_topics: int
    silent_brokers: list[int]


class GroupChanges(Body):
    config: Configs


class GroupConfig(Result):
    """The settings of a group that differ from their defaults."""

    config: dict[str, str | None]


class GroupOffset(Result):
    topic: str
    partition: int
    offset: int | None
    lag: int | None


class GroupOffsets(Result):
    offsets: list[GroupOffset]


class ResetOffsets(Body):
    """Give one of `to`, `offset`, `time` and `shift`."""

    topics: Annotated[list[str], Field(min_length=1, max_length=1000)]
    to: Literal["earliest", "latest"] | None = None
    offset: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    time: str | None = None
    shift: Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)] | None = None
    dry_run: bool = False


class LeaseParameters(Body):
    topic: Annotated[str, Field(min_length=1, max_length=249)]
    ranges: Annotated[int, Field(ge=0, le=RANGES_MAX)] = Field(0, description="Leased ranges to return.")


class LeasedRange(Result):
    first_offset: int
    last_offset: int
    member_id: str
    delivery_count: int
    age_ms: int
    lease_ms: int


class Redrive(Body):
    """`redrive_id`: a record is redriven once per id; repeat a request of unknown outcome with the same one."""

    topic: Annotated[str, Field(min_length=1, max_length=249)]
    partition: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="All, if there is none."
    )
    offsets: Annotated[list[tuple[int, int]], Field(max_length=RANGES_MAX)] | None = Field(
        None, description="Ranges of offsets, both ends included; all dead letters, if there are none."
    )
    redrive_id: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    max_records: Annotated[int, Field(ge=1, le=REDRIVEN_MAX)] = 500


class Redriven(Result):
    """`dead`: the dead letters that remain."""

    redrive_id: str
    redriven: int
    repeated: int
    deleted: int
    dead: int


async def list_groups(call: Call) -> GroupPage:
    query: GroupParameters = call.query
    after = decode_cursor(query.cursor)
    listed = await call.client.admin.list_groups()
    found = sorted((each for each in listed if each.group_id > after), key=lambda each: each.group_id)
    page = found[: query.limit]
    return GroupPage.model_validate(
        {
            "groups": page,
            "is_complete": listed.is_complete,
            "next_cursor": encode_cursor(page[-1].group_id) if len(found) > len(page) else None,
        }
    )


async def _type_of(call: Call, group: str) -> str:
    """Return the type of a group. Raises `GroupIdNotFound`."""
    for each in await call.client.admin.list_groups():
        if each.group_id == group:
            return each.group_type
    raise GroupIdNotFound(f"there is no group {group!r}")


async def describe(call: Call) -> GroupState:
    group = call.path("group")
    kind = await _type_of(call, group)
    found: Any
    if kind == SHARE:
        found = await call.client.admin.shares.describe(group)
    else:
        found = await call.client.admin.describe_group(group)
    return GroupState.model_validate(
        {"group": group, "type": kind, "state": found.state, "members": found.members}
    )


async def why(call: Call) -> Explanation:
    found = await call.client.admin.explain_group(call.path("group"), sample=call.query.sample)
    fields = asdict(found)
    for each in fields["findings"]:
        if each["key"] is not None:
            each["key"] = each["key"].decode(errors="backslashreplace")
    return Explanation.model_validate(fields)


async def get_config(call: Call) -> GroupConfig:
    with checked("group"):
        config = await call.client.admin.describe_config(call.path("group"), kind="group")
    return GroupConfig(config=changed_settings(config))


async def alter(call: Call) -> GroupConfig:
    await call.client.admin.alter_group_config(call.path("group"), call.body.config)
    return await get_config(call)


async def delete(call: Call) -> None:
    await call.client.admin.delete_group(call.path("group"))


async def get_offsets(call: Call) -> GroupOffsets:
    group = call.path("group")
    if await _type_of(call, group) == SHARE:
        shares = await call.client.admin.shares.offsets(group)
        rows = [(each, one.start_offset, one.lag) for each, one in shares.items()]
    else:
        lags = await call.client.admin.group_lag(group)
        rows = [(each, one.committed_offset, one.lag) for each, one in lags.items()]  # type: ignore[misc]
    return _group_offsets(rows)


async def reset_offsets(call: Call) -> GroupOffsets:
    body: ResetOffsets = call.body
    if sum(each is not None for each in (body.to, body.offset, body.time, body.shift)) != 1:
        raise InvalidField("/to", "give one of to, offset, time and shift")
    to: Any = body.to if body.offset is None else body.offset
    if body.time is not None:
        to = parse_time(body.time, "/time")
    with checked():
        found = await reset_group_offsets(
            call.client, call.path("group"), body.topics, to=to, shift=body.shift, dry_run=body.dry_run
        )
    return _group_offsets((each, offset, None) for each, offset in found.items())


def _group_offsets(rows: Iterable[tuple[TopicPartition, int | None, int | None]]) -> GroupOffsets:
    """Return offsets and lag by partition, in the order of the partitions."""
    return GroupOffsets(
        offsets=[
            GroupOffset(topic=each.topic, partition=each.partition, offset=offset, lag=lag)
            for each, offset, lag in sorted(rows, key=itemgetter(0))
        ]
    )


async def leases(call: Call) -> dict[str, Any]:
    query: LeaseParameters = call.query
    partitions = await _partitions(call, query.topic, None)
    found = await call.client.admin.shares.leases(call.path("group"), partitions, ranges_max=query.ranges)
    return {
        "partitions": [
            {"partition": each.partition, "state": None if one is None else _lease_state(one)}
            for each, one in sorted(found.items(), key=lambda pair: pair[0])
        ]
    }


def _lease_state(found: ShareLeases) -> dict[str, Any]:
    names = ("start_offset", "end_offset", "lag", "leased", "in_backoff", "withheld", "archiving", "dead")
    return {name: getattr(found, name) for name in names} | {
        "dead_letter_error": found.dead_letter_error,
        "ranges": [LeasedRange.model_validate(each) for each in found.ranges],
        "priorities": {each.priority: {"lag": each.lag, "leased": each.leased} for each in found.priorities},
        "keys_at_lease_limit": found.keys_at_lease_limit,
        "keys_at_rate_limit": found.keys_at_rate_limit,
        "limited_keys": [key.decode(errors="backslashreplace") for key in found.limited_keys],
        "isolated_key_count": found.isolated_key_count,
        "isolated_keys": [key.decode(errors="backslashreplace") for key in found.isolated_keys],
    }


async def _partitions(call: Call, topic: str, partition: int | None) -> list[TopicPartition]:
    """Return the given partition of a topic, or all. Raises `UnknownTopicOrPartition` at once, where the client would
    wait for the partition to be created."""
    found = await call.client.admin.describe_topic(check_topic_name(topic))
    partitions = [each.index for each in found.partitions if partition in (None, each.index)]
    if not partitions:
        raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}")
    return [TopicPartition(topic, each) for each in partitions]


async def redrive(call: Call) -> Redriven:
    body: Redrive = call.body
    if body.offsets is not None:
        for number, (first, last) in enumerate(body.offsets):
            if not 0 <= first <= last < 1 << 63:
                raise InvalidField(f"/offsets/{number}", "a range is [first, last]")
        if body.partition is None:
            raise InvalidField("/partition", "offsets need a partition")
    redrive_id = body.redrive_id or secrets.token_hex(8)
    results: list[RedriveResult] = []
    for partition in await _partitions(call, body.topic, body.partition):
        try:
            found = await call.client.admin.shares.redrive(
                call.path("group"),
                partition,
                redrive_id=redrive_id,
                offsets=body.offsets,
                records_max=body.max_records,
            )
        except GroupIdNotFound:
            if body.partition is not None:
                raise
            continue  # the group has read nothing of this partition
        results.append(found)
    return Redriven(
        redrive_id=redrive_id,
        redriven=sum(one.redriven for one in results),
        repeated=sum(one.repeated for one in results),
        deleted=sum(one.deleted for one in results),
        dead=sum(one.dead for one in results),
    )


OPERATIONS: Final = (
    Operation(
        "GET", "/groups", "List groups", list_groups, query=GroupParameters, result=GroupPage, tag="groups"
    ),
    Operation("GET", "/groups/{group}", "Describe a group", describe, result=GroupState, tag="groups"),
    Operation(
        "GET",
        "/groups/{group}/why",
        "What keeps a group from going on",
        why,
        query=WhyParameters,
        result=Explanation,
        tag="groups",
    ),
    Operation("DELETE", "/groups/{group}", "Delete an empty group", delete, status=204, tag="groups"),
    Operation(
        "GET", "/groups/{group}/config", "Settings of a group", get_config, result=GroupConfig, tag="groups"
    ),
    Operation(
        "PATCH",
        "/groups/{group}/config",
        "Change settings of a group",
        alter,
        body=GroupChanges,
        result=GroupConfig,
        tag="groups",
    ),
    Operation(
        "GET", "/groups/{group}/offsets", "Offsets and lag", get_offsets, result=GroupOffsets, tag="groups"
    ),
    Operation(
        "POST",
        "/groups/{group}/offsets/reset",
        "Reset the offsets of a group without members",
        reset_offsets,
        body=ResetOffsets,
        result=GroupOffsets,
        tag="groups",
    ),
    Operation(
        "GET",
        "/groups/{group}/leases",
        "Leases, lag and dead letters of a topic in a share group",
        leases,
        query=LeaseParameters,
        result=dict[str, Any],
        tag="share groups",
    ),
    Operation(
        "POST",
        "/groups/{group}/dead-letters/redrive",
        "Deliver dead letters again",
        redrive,
        body=Redrive,
        result=Redriven,
        tag="share groups",
    ),
)
