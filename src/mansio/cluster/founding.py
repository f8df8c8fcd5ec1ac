"""The cluster of a metadata store: the one that is kept there is found, or made if there is none.

Always true: brokers that start together on an empty store make one cluster, not one each.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from mansio.cluster import metadata
from mansio.cluster.metadata import Compare, Keys, Put, new_uuid, new_writer
from mansio.errors import ConcurrentChange, ConfigError, Unavailable

if TYPE_CHECKING:
    from mansio.cluster.metadata import MetadataStore
    from mansio.ports import Random

MAKE_ATTEMPTS_MAX: Final = 5


async def find_or_make_cluster(store: MetadataStore, wanted: str, random: Random) -> str:
    """The id of the cluster that is kept here from now on: `wanted`, or, if that is empty, the one there or a new one.
    Raises `ConfigError` when another is there."""
    for _ in range(MAKE_ATTEMPTS_MAX):
        listing = await store.list(metadata.ROOT)
        found = [entry.key.split("/")[2] for entry in listing.entries if entry.key.endswith("/format")]
        if wanted in found:
            return wanted
        if found and not wanted and len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"cluster_id: {wanted!r} is not the cluster kept here, {', '.join(found)}")
        cluster_id, writer = wanted or new_cluster_id(random), new_writer(random)
        keys = (metadata.FIRST_CLUSTER, Keys(cluster_id).format)
        value = metadata.encode({"cluster_id": cluster_id, "incarnation": 0}, writer)
        compares = [Compare(key, create_revision=0) for key in keys]
        puts = [Put(key, value) for key in keys]
        try:
            done = await metadata.transact_surely(store, compares, puts, writer)
        except ConcurrentChange:
            continue  # another made it while our answer was lost: it is found now
        if done.succeeded:
            return cluster_id
    raise Unavailable("the cluster is being made by others")


def new_cluster_id(random: Random) -> str:
    """A uuid as Kafka writes it: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(new_uuid(random).bytes).rstrip(b"=").decode()
