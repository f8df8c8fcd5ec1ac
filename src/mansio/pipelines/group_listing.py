"""Groups of a cluster, as the coordinators on all brokers list them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.net.cluster import Cluster
    from mansio.wire.codec.messages import Struct


async def list_group_ids(cluster: Cluster, wants: Callable[[Struct], bool]) -> list[str]:
    """Return the ids, sorted, of the groups for which `wants` holds. It gets a group of a ListGroups response."""
    await cluster.retry(lambda: cluster.refresh_metadata(()))
    ids: set[str] = set()
    for node_id in list(cluster.nodes):
        answer: Any = await cluster.request(
            ApiKey.LIST_GROUPS,
            {"states_filter": [], "types_filter": []},
            node_id=node_id,
            check=lambda answer: raise_for_code(answer.error_code),
        )
        ids.update(group.group_id for group in answer.groups if wants(group))
    return sorted(ids)
