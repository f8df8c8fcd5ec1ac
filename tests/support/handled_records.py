"""Records that share groups have handled in different ways, and their deliveries as the timelines have them."""

from __future__ import annotations

from typing import Any, Final

import mansio
from mansio.client.types import OutgoingRecord
from support.machine import scaled
from support.waiting import wait_until

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


def of_timelines(servers: str, topic: str) -> list[tuple[Any, ...]]:
    """The deliveries of all records, from the timelines that the broker reports."""
    found: list[tuple[Any, ...]] = []
    with mansio.blocking.connect(servers) as client:
        for partition in range(2):
            for offset in range(3):
                trace = client.admin.traces.record(topic, partition, offset)
                published = trace.events[0].time
                for group in sorted({each.group for each in trace.events if each.group}):
                    events = [each for each in trace.events if each.group == group]
                    for event in events:
                        if event.kind == "delivered":
                            end = next(
                                (e for e in events if e.kind in ENDS and e.attempt == event.attempt), None
                            )
                            found.append(
                                (
                                    partition,
                                    offset,
                                    group,
                                    event.attempt,
                                    event.who,
                                    published,
                                    event.time,
                                    end and end.time,
                                    end and end.kind,
                                    event.wait_ms,
                                    trace.certain,
                                )
                            )
    return sorted(found)


COLUMNS: Final = (
    "partition", "offset", "group", "attempt", "member", "published_at", "delivered_at", "ended_at", "end", "wait_ms",
    "certain",
)  # fmt: skip
