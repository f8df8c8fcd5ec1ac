"""What keeps a group from going on, as its coordinator finds it (`client.admin.explain_group`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import CoordinatorNotAvailable
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from mansio.net.cluster import Cluster

SAMPLE_SECONDS: Final = 1.0
"""For how long the brokers look at what changes, unless the caller says another time."""

COORDINATOR_MS_MAX: Final = 5_000
"""Time, in addition to the sample, in which a coordinator has to be found and to answer."""

IMPACTS: Final = ("blocks", "slows", "waits")
"""Names of the impacts, by their number in the protocol."""


@dataclass(frozen=True, slots=True)
class GroupFinding:
    """One cause that keeps a group from going on.

    `cause` is its name ("no-member", "poison-record", ...: the guide Why a group waits has all), `text` says it in one
    line, `advice` what to do, and `command` is the command for that. `impact` is "blocks" (nothing that it concerns is
    processed before it ends), "slows" or "waits" (there is nothing to process yet). `is_certain` is false if numbers
    only suggest the cause. `records` is the number of records that wait for it; None if unknown.

    The fields from `topic` to `schedule` are what it is about; None where they do not apply. `key` is shown only to
    callers that may read the topic, `transactional_id` only to those that may describe it. `evidence` has the numbers
    behind the finding by name; those whose names end in `_ms` are durations in milliseconds.
    """

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
    key: bytes | None
    transactional_id: str | None
    producer_id: int | None
    schedule: str | None
    evidence: dict[str, int]


@dataclass(frozen=True, slots=True)
class GroupExplanation:
    """What keeps a group from going on.

    `status` is "blocked", "hindered" (it goes on, but not with all records or not at full speed), "progressing",
    "caught-up", "waiting" (everything is processed, and the first finding says what it waits for) or "unexplained" (it
    has a lag, does nothing, and no cause was found). `summary` says it in one line. `findings` are ordered, the first
    one is the answer; `more_findings` were left out. `lag` is the number of records that are not done, `rate` that of
    records done per second; None without a sample. `hidden_topics` is the number of topics of the group that the caller
    may not describe. `silent_brokers` did not answer, so that something may be missing.
    """

    group_id: str
    group_type: str
    state: str
    status: str
    summary: str
    lag: int
    rate: float | None
    members: int
    findings: tuple[GroupFinding, ...]
    more_findings: int
    hidden_topics: int
    silent_brokers: tuple[int, ...]


async def explain_group(cluster: Cluster, group: str, sample: float) -> GroupExplanation:
    """Ask the coordinator of a group. `sample`: see `Admin.explain_group`. That a group has no coordinator keeps it
    from going on, too: it is an answer of this client."""
    try:
        response = await cluster.request_coordinator(
            group,
            ApiKey.EXPLAIN_GROUP,
            {"group_id": group, "sample_ms": round(sample * 1000)},
            check=lambda each: raise_for_code(each.error_code, each.error_message),
            retry_timeout_ms=sample * 1000 + COORDINATOR_MS_MAX,
        )
    except CoordinatorNotAvailable as error:
        return _without_coordinator(group, error)
    return GroupExplanation(
        group,
        response.group_type,
        response.state,
        response.status,
        response.summary,
        response.lag,
        response.done * 1000 / response.sample_ms if response.sample_ms > 0 else None,
        response.members,
        tuple(map(_finding, response.findings)),
        response.more_findings,
        response.hidden_topics,
        tuple(response.silent_brokers),
    )


def _without_coordinator(group: str, error: CoordinatorNotAvailable) -> GroupExplanation:
    text = f"it has no coordinator: {error.message}"
    finding = GroupFinding(
        cause="no-leader",
        impact=IMPACTS[0],
        is_certain=True,
        text=text,
        advice="start the brokers that have the partition of __consumer_offsets in which the group is stored",
        command=f"mansio cluster partitions --topic {OFFSETS_TOPIC} --only offline",
        records=None,
        topic=OFFSETS_TOPIC,
        partition=None,
        offset=None,
        member_id=None,
        client_id=None,
        principal=None,
        key=None,
        transactional_id=None,
        producer_id=None,
        schedule=None,
        evidence={},
    )
    summary = f"group {group} is blocked: {text}"
    return GroupExplanation(group, "", "", "blocked", summary, 0, None, 0, (finding,), 0, 0, ())


def _finding(found: Any) -> GroupFinding:
    return GroupFinding(
        cause=found.cause,
        impact=IMPACTS[found.impact],
        is_certain=found.is_certain,
        text=found.text,
        advice=found.advice,
        command=found.command,
        records=_number(found.records),
        topic=found.topic or None,
        partition=_number(found.partition),
        offset=_number(found.offset),
        member_id=found.member_id or None,
        client_id=found.client_id or None,
        principal=found.principal or None,
        key=found.key,
        transactional_id=found.transactional_id or None,
        producer_id=_number(found.producer_id),
        schedule=found.schedule or None,
        evidence={each.name: each.value for each in found.evidence},
    )


def _number(value: int) -> int | None:
    return None if value < 0 else value
