"""Records that share groups have handled in different ways, and their deliveries as the timelines have them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import mansio
from mansio.client.types import OutgoingRecord
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ENDS: Final = ("released", "expired", "acknowledged", "rejected", "attempts-used-up")


def handle(servers: str, topic: str, group: str, outcomes: list[str]) -> None:
    """Receive one record after the other, and end its delivery by the method of this name."""
    with (
        mansio.blocking.connect(servers) as client,
        client.receive(topic, group=group, max_records=1, prefetch=0) as receiver,
    ):
        for outcome in outcomes:
            (message,) = receiver.poll(timeout_ms=scaled(20) * 1000)
            getattr(message, outcome)()


def prepare(servers: str, topic: str, group: str) -> None:
    """Two partitions with six records: acknowledged, given back, rejected, and used up; a second group."""
    with mansio.blocking.connect(servers) as client:
        client.admin.create_topic(topic, partitions=2)
        settings = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
        for each in (group, f"{group}-2"):
            client.admin.alter_group_config(each, {**settings, "share.delivery.count.limit": "2"})
        client.publish_many(topic, [OutgoingRecord(b"%d" % one, partition=one % 2) for one in range(6)])
    handle(servers, topic, group, ["ack", "retry", "reject", "ack", "retry", "ack", "ack", "retry", "retry"])
    handle(servers, topic, f"{group}-2", ["ack", "ack"])

    def is_dead_lettered() -> bool:
        with mansio.blocking.connect(servers) as client:
            return f"dlq.{topic}" in {each.name for each in client.admin.describe_topics()}

    wait_until(is_dead_lettered, scaled(20))


RECORDS: Final = tuple((partition, offset) for partition in range(2) for offset in range(3))
"""Partitions and offsets of the records of `prepare`."""

COLUMNS: Final = (
    "partition", "offset", "group", "attempt", "member", "published_at", "delivered_at", "ended_at", "end", "wait_ms",
    "uncertainties", "certain",
)  # fmt: skip
"""Columns of the deliveries that timelines have."""


def of_timelines(
    servers: str, topic: str, records: Sequence[tuple[int, int]] = RECORDS
) -> list[tuple[Any, ...]]:
    """The deliveries of records (partition and offset), from the timelines that the broker reports, with `COLUMNS`."""
    found: list[tuple[Any, ...]] = []
    with mansio.blocking.connect(servers) as client:
        for partition, offset in records:
            trace = client.admin.traces.record(topic, partition, offset)
            published = trace.events[0].time
            for group in {each.group for each in trace.events if each.group}:
                events = [each for each in trace.events if each.group == group]
                for event in events:
                    if event.kind != "delivered":
                        continue
                    ends = [each for each in events if each.kind in ENDS and each.attempt == event.attempt]
                    end = ends[0] if ends else None
                    of = (partition, offset, group, event.attempt, event.who, published, event.time)
                    ended = (None, None) if end is None else (end.time, end.kind)
                    found.append((*of, *ended, event.wait_ms, trace.uncertainties, trace.certain))
    return sorted(found)


def as_timelines(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of deliveries in the form of `of_timelines`; times without a zone are in UTC."""
    return sorted(
        tuple(_plain({**row, "uncertainties": tuple(row["uncertainties"])}[name]) for name in COLUMNS)
        for row in rows
    )


def _plain(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value
