"""The groups of a cluster: each broker lists those it coordinates, so all brokers are asked.

A broker coordinates the groups of the partitions of `__consumer_offsets` that it leads. While one of them has no
leader, or the leader does not know yet that it was elected, no broker lists its groups, and none reports an error. So
each broker is also asked, before and after it lists its groups, which of the partitions it leads.

Invariants:
* The groups of a partition are complete if its leader listed them, and led it in the same epoch before and after.
* A broker that does not answer does not delay the answers of others. Until the deadline all brokers are asked again
while the listing is incomplete, because groups have moved; a listing that stays incomplete reports what is missing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import MansioError
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection

ANSWER_MS_MAX: Final = 1000.0
"""So long one broker may take, trying again included, before the cluster is looked at anew."""

PAUSE_S: Final = 0.2

OFFSETS_TOPIC: Final = "__consumer_offsets"


@dataclass(frozen=True, slots=True)
class GroupListing:
    """One group, as a list of groups shows it. `group_type` is "" where the broker does not tell."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = ""


class GroupListings(list[GroupListing]):
    """Groups by id.

    `unreachable`: brokers that did not answer in time, whose groups are missing. `missing_partitions`: partitions of
    `__consumer_offsets` that no broker that answered coordinates; groups that live in them are missing.
    """

    def __init__(
        self,
        groups: Iterable[GroupListing] = (),
        unreachable: Iterable[int] = (),
        missing_partitions: Iterable[int] = (),
    ) -> None:
        super().__init__(groups)
        self.unreachable = tuple(unreachable)
        self.missing_partitions = tuple(missing_partitions)

    @property
    def is_complete(self) -> bool:
        """Whether every broker answered, and every partition of `__consumer_offsets` has a coordinator."""
        return not self.unreachable and not self.missing_partitions


class _BrokerAnswer(NamedTuple):
    """`partitions`: those of `__consumer_offsets` that the broker knows; `listed`: those whose groups it listed."""

    groups: list[GroupListing]
    partitions: frozenset[int]
    listed: frozenset[int]


async def list_groups(cluster: Cluster, timeout_ms: float | None = None) -> GroupListings:
    """As `Admin.list_groups`."""
    now = asyncio.get_running_loop().time
    deadline = now() + (cluster.retry_timeout_ms if timeout_ms is None else timeout_ms) / 1000
    while True:
        left_ms = max(1.0, (deadline - now()) * 1000)
        await cluster.retry(lambda: cluster.refresh(()), timeout_ms=left_ms)
        nodes = sorted(cluster.nodes)
        asked = (_groups_of(cluster, node_id, min(ANSWER_MS_MAX, left_ms)) for node_id in nodes)
        outcomes = dict(zip(nodes, await asyncio.gather(*asked), strict=True))
        silent = {
            node_id: outcome for node_id, outcome in outcomes.items() if isinstance(outcome, MansioError)
        }
        is_last = now() + PAUSE_S >= deadline
        for error in silent.values():
            if not error.retriable or (is_last and len(silent) == len(nodes)):
                raise error
        answers = [outcome for outcome in outcomes.values() if not isinstance(outcome, MansioError)]
        listing = _combined(answers, silent)
        if listing.is_complete or is_last:
            return listing
        await asyncio.sleep(PAUSE_S)


def _combined(answers: Sequence[_BrokerAnswer], unreachable: Iterable[int]) -> GroupListings:
    found = {group.group_id: group for answer in answers for group in answer.groups}
    partitions = frozenset[int]().union(*(answer.partitions for answer in answers))
    listed = frozenset[int]().union(*(answer.listed for answer in answers))
    groups = [found[group_id] for group_id in sorted(found)]
    return GroupListings(groups, unreachable, sorted(partitions - listed))


async def _groups_of(cluster: Cluster, node_id: int, wait_ms: float) -> _BrokerAnswer | MansioError:
    """The answer of one broker, or why there is none."""

    async def attempt() -> _BrokerAnswer:
        connection = await cluster.connection(node_id)
        before = await _leader_epochs(connection, node_id)
        answer = await connection.request(ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
        raise_for(answer.error_code)
        after = await _leader_epochs(connection, node_id)
        listed = {index for index, epoch in after.items() if epoch is not None and epoch == before.get(index)}
        return _BrokerAnswer(_groups(answer), frozenset(after), frozenset(listed))

    try:
        return await cluster.retry(attempt, timeout_ms=wait_ms)
    except MansioError as error:
        return error


async def _leader_epochs(connection: Connection, node_id: int) -> dict[int, int | None]:
    """The partitions of `__consumer_offsets` as one broker knows them: the leader epoch of those that it leads itself,
    None for the others. Empty while there is no such topic, or where the client may not see it."""
    fields = {"topics": [{"name": OFFSETS_TOPIC}], "allow_auto_topic_creation": False}
    answer = await connection.request(ApiKey.METADATA, fields)
    return {
        partition.partition_index: partition.leader_epoch if partition.leader_id == node_id else None
        for topic in answer.topics
        if not topic.error_code
        for partition in topic.partitions
    }


def _groups(answer: Any) -> list[GroupListing]:
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in answer.groups
    ]
