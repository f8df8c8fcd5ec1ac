"""The groups of a cluster: each broker knows those it coordinates, so all of them are asked.

Always true: a broker that does not answer costs the others' answers nothing. While there is time it is asked again, and
whenever the brokers are others than before all of them are, because groups have moved; a listing that is not whole says
whom it lacks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import MansioError
from mansio.link.retry import raise_for
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.link.cluster import Cluster

ANSWER_MS_MAX: Final = 1000.0
"""So long one broker may take, trying again included, before the cluster is looked at anew."""

PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class GroupListing:
    """One group, as a list of groups shows it. `group_type` is "" where the broker does not tell."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = ""


class GroupListings(list[GroupListing]):
    """Groups by id. `unreachable`: brokers that did not answer in time, whose groups are not among them."""

    def __init__(self, groups: Iterable[GroupListing] = (), unreachable: Iterable[int] = ()) -> None:
        super().__init__(groups)
        self.unreachable = tuple(unreachable)


async def list_groups(cluster: Cluster, timeout_ms: float | None = None) -> GroupListings:
    """As `Admin.list_groups`."""
    now = asyncio.get_running_loop().time
    deadline = now() + (cluster.retry_timeout_ms if timeout_ms is None else timeout_ms) / 1000
    while True:
        left_ms = max(1.0, (deadline - now()) * 1000)
        await cluster.retry(lambda: cluster.refresh(()), timeout_ms=left_ms)
        nodes = sorted(cluster.nodes)
        asked = (_groups_of(cluster, node_id, min(ANSWER_MS_MAX, left_ms)) for node_id in nodes)
        answers = dict(zip(nodes, await asyncio.gather(*asked), strict=True))
        silent = {node_id: error for node_id, error in answers.items() if isinstance(error, MansioError)}
        is_last = now() + PAUSE_S >= deadline
        for error in silent.values():
            if not error.retriable or (is_last and len(silent) == len(nodes)):
                raise error
        if not silent or is_last:
            found = {group.group_id: group for answer in answers.values() for group in _groups(answer)}
            return GroupListings([found[group_id] for group_id in sorted(found)], silent)
        await asyncio.sleep(PAUSE_S)


async def _groups_of(cluster: Cluster, node_id: int, wait_ms: float) -> Any:
    """The answer of one broker, or why there is none."""
    try:
        return await cluster.request(
            ApiKey.LIST_GROUPS,
            {"states_filter": [], "types_filter": []},
            node_id=node_id,
            check=lambda answer: raise_for(answer.error_code),
            timeout_ms=wait_ms,
        )
    except MansioError as error:
        return error


def _groups(answer: Any) -> list[GroupListing]:
    if isinstance(answer, MansioError):
        return []
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in answer.groups
    ]
