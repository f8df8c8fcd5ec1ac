"""What `mansio topic delete-records` does, partition by partition.

Always true: what one partition refuses does not keep the others from their turn; every partition that was asked for
has a row that says what came of it; a dry run goes by the same rules and shows the same rows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.errors import InvalidTopic, MansioError, PolicyViolation, UnknownTopicOrPartition
from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from mansio.client import Client
    from mansio.client.admin.admin import TopicDescription
    from mansio.client.types import TopicPartition

T = TypeVar("T")

AT_ONCE_MAX: Final = 16
"""Partitions that are asked about one by one at the same time."""

GROUPS_ASKED_MAX: Final = 1_000
"""Groups that are looked through for the pipeline that a refusal came from."""


async def delete_records(
    client: Client, topic: str, before: Any, indexes: Iterable[int], *, dry_run: bool
) -> list[dict[str, Any]]:
    """One row for each partition, in order; `error` says why nothing was deleted. `before` is as for
    `Admin.delete_records`; no `indexes`: all there are. Raises what is wrong with the topic as a whole."""
    from mansio.client.types import TopicPartition

    view = await client.admin.describe_topic(topic)
    await _check_allowed(client, view)
    known = {partition.index for partition in view.partitions}
    outcomes: dict[TopicPartition, int | MansioError] = {}
    for index in sorted(set(indexes) or known):
        outcomes[TopicPartition(topic, index)] = UnknownTopicOrPartition(
            f"topic {topic} has no partition {index}"
        )
    chosen = [one for one in outcomes if one.partition in known]

    async def starts_of(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        listed = await client.admin.list_offsets(partitions, "earliest")
        return {one: entry.offset for one, entry in listed.items()}

    async def delete(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return await client.admin.delete_records(partitions, before=before, dry_run=dry_run)

    starts = await for_each(chosen, starts_of)
    outcomes.update(starts)
    outcomes.update(await for_each([one for one in chosen if isinstance(starts[one], int)], delete))
    await _name_holding_pipelines(client, outcomes, dry_run=dry_run)
    return [_row(one, starts.get(one), outcome) for one, outcome in outcomes.items()]


async def _name_holding_pipelines(
    client: Client, outcomes: dict[TopicPartition, int | MansioError], *, dry_run: bool
) -> None:
    """The protocol has no words for why a deletion is refused: say which pipeline still needs the records. A dry run
    asks before; it does not know the limits of holds, so it may name one that no longer counts."""
    candidates = {
        one: outcome
        for one, outcome in outcomes.items()
        if isinstance(outcome, PolicyViolation) or (dry_run and isinstance(outcome, int))
    }
    if not candidates:
        return
    for group in (await client.admin.list_groups())[:GROUPS_ASKED_MAX]:
        pipeline = pipeline_of(group.group_id)
        if pipeline is None:
            continue
        for one, committed in (await client.admin.group_offsets(group.group_id)).items():
            outcome = candidates.get(one)
            if outcome is None or parse_hold_metadata(committed.metadata) is None:
                continue
            if isinstance(outcome, PolicyViolation) or outcome > committed.offset:
                outcomes[one] = PolicyViolation(
                    f"pipeline {pipeline} still needs the records from offset {committed.offset} on; "
                    f"`mansio pipeline release {pipeline}` gives them up"
                )


async def _check_allowed(client: Client, view: TopicDescription) -> None:
    """The broker's rules about whole topics, so that a dry run goes by them too."""
    if view.is_internal:
        raise InvalidTopic(f"{view.name} is the broker's own: its records are not deleted by hand")
    policy = (await client.admin.describe_config(view.name)).get("cleanup.policy")
    if policy is not None and "delete" not in (policy.value or ""):
        raise PolicyViolation(f"{view.name} has cleanup.policy=compact: its records leave by compaction only")


async def for_each(
    partitions: list[TopicPartition],
    request: Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, T]]],
) -> dict[TopicPartition, T | MansioError]:
    """What `request` answers for each partition, or the error it raises for it. It is asked about all of them at once,
    and when that fails about one at a time, to learn which; so asking twice must do no harm."""
    if not partitions:
        return {}
    try:
        return {**await request(partitions)}
    except MansioError as error:
        if len(partitions) == 1:
            return {partitions[0]: error}
    semaphore = asyncio.Semaphore(AT_ONCE_MAX)

    async def request_one(one: TopicPartition) -> T | MansioError:
        async with semaphore:
            try:
                return (await request([one]))[one]
            except MansioError as error:
                return error

    responses = await asyncio.gather(*map(request_one, partitions))
    return dict(zip(partitions, responses, strict=True))


def _row(one: TopicPartition, start: int | MansioError | None, outcome: int | MansioError) -> dict[str, Any]:
    old = start if isinstance(start, int) else None
    new = outcome if isinstance(outcome, int) else None
    return {
        "topic": one.topic,
        "partition": one.partition,
        "old_start": old,
        "new_start": new,
        "offsets": None if old is None or new is None else new - old,
        "error": outcome.message if isinstance(outcome, MansioError) else None,
    }
