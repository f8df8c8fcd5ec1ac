"""Publishing through any broker of a cluster: records of partitions that this one does not lead are sent to the leader.

Invariants:
* A record is sent at most once further, and only if it was certainly not appended here.
* The leader asks again whether the caller may write to the topic: its answer counts.
* A record whose result did not arrive in time, or was lost on the way, has an error that says that it is unknown.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from mansio.api.routing.routed_clients import ROUTED_TIMEOUT_MS
from mansio.broker.services.publish_records import PublishedRecord, ranges_of
from mansio.errors import ConnectionLost, InvalidRecord, MansioError, NotLeaderOrFollower
from mansio.host.clock import UNIX_EPOCH
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.publish_records import PublishResult, RecordToPublish
    from mansio.client import Client

THROTTLE_MS_MAX: Final = 30_000
"""Maximum delay of a result because the client exceeds its quota."""

ANSWER_MS: Final = 200
"""Time before the deadline of a caller at which a throttled result is sent at the latest."""


async def publish_records(
    services: BrokerServices,
    clients: RoutedClients,
    topic: str,
    records: Sequence[RecordToPublish],
    *,
    caller: Caller,
) -> PublishResult:
    """Append records, here or on the brokers that lead their partitions. Results and errors are those of
    `PublishService.publish_records`. A client over its quota gets them after the throttle time."""
    result = await services.publish.publish_records(
        topic, records, timeout_ms=ROUTED_TIMEOUT_MS, caller=caller
    )
    if services.cluster is not None:
        result = await _forward_refused(services, clients, topic, records, result, caller)
    if result.throttle_ms:  # what Kafka's clients do by themselves
        throttle_ms = min(result.throttle_ms, THROTTLE_MS_MAX)
        # A caller has to learn before its deadline that its records are stored.
        left_ms = caller.timeout_ms(2 * THROTTLE_MS_MAX, services.clock.monotonic())
        await services.scheduler.sleep(max(min(throttle_ms, left_ms * 0.9 - ANSWER_MS), 0))
    return result


async def _forward_refused(
    services: BrokerServices,
    clients: RoutedClients,
    topic: str,
    records: Sequence[RecordToPublish],
    result: PublishResult,
    caller: Caller,
) -> PublishResult:
    """Send the records of partitions that this broker does not lead to their leaders."""
    positions = [
        position
        for first, count, one in result.ranges
        if isinstance(one.error, NotLeaderOrFollower) and one.is_refused and one.partition >= 0
        for position in range(first, first + count)
    ]
    if not positions:
        return result
    found = result.records
    with clients.publisher(caller) as client:
        sends = {
            asyncio.ensure_future(
                _send(client, topic, records[position], found[position].partition)
            ): position
            for position in positions
        }
        timeout_s = caller.timeout_ms(ROUTED_TIMEOUT_MS, services.clock.monotonic()) / 1000
        done, late = await asyncio.wait(sends, timeout=timeout_s)
    for send in done:
        found[sends[send]] = send.result()
    for send in late:
        send.cancel()
        unknown = ConnectionLost(
            "the leader did not answer in time: it is not known whether the record is stored"
        )
        found[sends[send]] = PublishedRecord(found[sends[send]].partition, error=unknown)
    return replace(result, ranges=ranges_of(found))


async def _send(client: Client, topic: str, record: RecordToPublish, partition: int) -> PublishedRecord:
    """Send a record to the leader of its partition."""
    try:
        stored = await client.publish(
            topic,
            record.value,
            key=record.key,
            headers=list(record.headers),
            partition=partition,
            timestamp_ms=record.timestamp_ms,
            delay=None if record.delay_ms is None else timedelta(milliseconds=record.delay_ms),
            at=None
            if record.deliver_at_ms is None
            else UNIX_EPOCH + timedelta(milliseconds=record.deliver_at_ms),
            dedup_id=record.dedup_id,
            priority=record.priority,
        )
    except MansioError as error:
        return PublishedRecord(partition, error=without_traceback(error))
    except (ValueError, OverflowError) as error:
        return PublishedRecord(partition, error=InvalidRecord(str(error)))
    return PublishedRecord(stored.partition, stored.offset, stored.timestamp_ms)
