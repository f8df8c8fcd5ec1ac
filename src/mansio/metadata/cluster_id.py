"""The cluster of a metadata store: the one that is kept there is found, or made if there is none.

Always true: brokers that start together on an empty store make one cluster, not one each.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from mansio.errors import ConcurrentChange, ConfigError, Unavailable
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import Compare, Keys, Put, new_uuid, new_writer_id

if TYPE_CHECKING:
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Random

CREATE_ATTEMPTS_MAX: Final = 5


async def find_or_create_cluster(store: MetadataStore, wanted: str, random: Random) -> str:
    """The id of the cluster that is kept here from now on: `wanted`, or, if that is empty, the one there or a new one.
    Raises `ConfigError` when another is there."""
    for _ in range(CREATE_ATTEMPTS_MAX):
        listing = await store.list(metadata_store.ROOT)
        found = [entry.key.split("/")[2] for entry in listing.entries if entry.key.endswith("/format")]
        if wanted in found:
            return wanted
        if found and not wanted and len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"cluster_id: {wanted!r} is not the cluster kept here, {', '.join(found)}")
        cluster_id, writer = wanted or new_cluster_id(random), new_writer_id(random)
        keys = (metadata_store.FIRST_CLUSTER, Keys(cluster_id).format)
        value = metadata_store.encode({"cluster_id": cluster_id, "incarnation": 0}, writer)
        compares = [Compare(key, create_revision=0) for key in keys]
        puts = [Put(key, value) for key in keys]
        try:
            done = await metadata_store.transact_resolving_ambiguity(store, compares, puts, writer)
        except ConcurrentChange:
            continue  # another made it while our answer was lost: it is found now
        if done.succeeded:
            return cluster_id
    raise Unavailable("the cluster is being made by others")


def new_cluster_id(random: Random) -> str:
    """A uuid as Kafka writes it: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(new_uuid(random).bytes).rstrip(b"=").decode()
