"""Listing of everything that the coordinators of an internal topic know, over all brokers.

A broker lists only what belongs to the partitions of the internal topic that it leads, so a listing is requested from
all brokers. While a partition has no leader, or its leader has not learned yet that it was elected, no broker lists the
items of that partition, and none returns an error. So a listing also requests the partitions that each broker leads,
before and after the broker's items.

Invariants of a listing:
* The items of a partition are listed if one broker led the partition, in one leader epoch, before and after it listed
  its items.
* A broker that does not respond does not delay the responses of others.
* While items are missing, because a partition moved or a broker did not respond, the requests to all brokers are
  repeated until the deadline. Then the listing reports the brokers and partitions whose items are missing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mansio.errors import MansioError
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

T = TypeVar("T")

BROKER_TIMEOUT_MS_MAX: Final = 1000.0
"""Time limit for the requests to one broker, including retries, before the metadata is refreshed."""

RETRY_INTERVAL_S: Final = 0.2
"""Pause before an incomplete listing is requested again."""


class CoordinatorListing(NamedTuple, Generic[T]):
    """Items of all brokers. Those of the brokers in `unreachable` and of `missing_partitions` are missing."""

    items: list[T]
    unreachable: tuple[int, ...]
    missing_partitions: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return not self.unreachable and not self.missing_partitions


class _BrokerListing(NamedTuple, Generic[T]):
    """Items that one broker listed. `partitions` are the partitions of the topic that the broker knows,
    `listed_partitions` those whose items it listed."""

    items: list[T]
    partitions: frozenset[int]
    listed_partitions: frozenset[int]


async def list_on_coordinators(
    cluster: Cluster,
    topic: str,
    read: Callable[[BrokerConnection, int], Awaitable[list[T]]],
    timeout_ms: float | None = None,
) -> CoordinatorListing[T]:
    """List the items of all coordinators of an internal topic. `read`: requests those of one broker, by its connection
    and node id. Repeats the requests for `timeout_ms` (default: the client's retry timeout) while items are missing.
    Raises an error that is not retriable, and one if no broker responds."""
    now = asyncio.get_running_loop().time
    deadline = now() + (cluster.retry_timeout_ms if timeout_ms is None else timeout_ms) / 1000
    best: CoordinatorListing[T] | None = None
    while True:
        try:
            listing = await _list_on_all_brokers(cluster, topic, read, max(1.0, (deadline - now()) * 1000))
        except MansioError as error:
            # The last attempt may have had too little time. Then the listing of an earlier one is returned.
            is_last = now() + RETRY_INTERVAL_S >= deadline
            if not error.retriable or (is_last and best is None):
                raise
        else:
            if best is None or len(listing.unreachable) <= len(best.unreachable):
                best = listing
            is_last = best.is_complete or now() + RETRY_INTERVAL_S >= deadline
        if is_last and best is not None:
            return best
        await asyncio.sleep(RETRY_INTERVAL_S)


async def _list_on_all_brokers(
    cluster: Cluster,
    topic: str,
    read: Callable[[BrokerConnection, int], Awaitable[list[T]]],
    timeout_ms: float,
) -> CoordinatorListing[T]:
    """List the items of each broker once. Raises an error that is not retriable, and one if no broker responds."""
    await cluster.retry(lambda: cluster.refresh_metadata(()), timeout_ms=timeout_ms)
    nodes = sorted(cluster.nodes)
    wait_ms = min(BROKER_TIMEOUT_MS_MAX, timeout_ms)
    requests = (_list_on_broker(cluster, topic, read, node_id, wait_ms) for node_id in nodes)
    outcomes = dict(zip(nodes, await asyncio.gather(*requests), strict=True))
    failed = {node_id: outcome for node_id, outcome in outcomes.items() if isinstance(outcome, MansioError)}
    for error in failed.values():
        if not error.retriable or len(failed) == len(nodes):
            raise copied(error)
    results = [outcome for outcome in outcomes.values() if not isinstance(outcome, MansioError)]
    return _combine(results, failed)


def _combine(results: Sequence[_BrokerListing[T]], unreachable: Iterable[int]) -> CoordinatorListing[T]:
    items = [item for result in results for item in result.items]
    partitions = frozenset[int]().union(*(result.partitions for result in results))
    listed = frozenset[int]().union(*(result.listed_partitions for result in results))
    return CoordinatorListing(items, tuple(unreachable), tuple(sorted(partitions - listed)))


async def _list_on_broker(
    cluster: Cluster,
    topic: str,
    read: Callable[[BrokerConnection, int], Awaitable[list[T]]],
    node_id: int,
    wait_ms: float,
) -> _BrokerListing[T] | MansioError:
    """List the items of one broker. Returns an error of the broker instead of raising it."""

    async def attempt() -> _BrokerListing[T]:
        connection = await cluster.connection(node_id)
        before = await _leader_epochs(connection, topic, node_id)
        items = await read(connection, node_id)
        after = await _leader_epochs(connection, topic, node_id)
        listed = {index for index, epoch in after.items() if epoch is not None and epoch == before.get(index)}
        return _BrokerListing(items, frozenset(after), frozenset(listed))

    try:
        return await cluster.retry(attempt, timeout_ms=wait_ms)
    except MansioError as error:
        return without_traceback(error)


async def _leader_epochs(connection: BrokerConnection, topic: str, node_id: int) -> dict[int, int | None]:
    """Leader epoch of each partition of the topic that a broker knows and leads; None for a partition that it does not
    lead. Empty if the topic does not exist or the client is not authorized."""
    fields = {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
    response = await connection.request(ApiKey.METADATA, fields)
    return {
        partition.partition_index: partition.leader_epoch if partition.leader_id == node_id else None
        for found in response.topics
        if not found.error_code
        for partition in found.partitions
    }
