"""Import of the metadata of a single node into the store of a cluster, whose only replicas are then on that node.

The steps, of which each may be interrupted and is repeated by the next call:

1. claim the cluster store, so that no other cluster is created in it meanwhile;
2. put all entries under the keys of the cluster, in pieces. Without its `format` key the cluster does not exist;
3. mark the single node's store, durably: its broker does not start alone any more;
4. write the `format` key in one transaction, on the condition that it does not exist. The import is valid.

Ids stay the same. Each partition gets the next leader epoch, so that nothing that the single node promised in its last
one is taken for a promise of the cluster.

Invariants:
* Never are both stores valid: the mark comes before `format`.
* The entries of a marked store do not change, so a repeated import writes the same ones.
* The token of the mark is that of `format`: the cluster store has the result of this import and no other one.
* A marked store is imported only into the store that has the claim with its token. Any other one is refused. (The id of
  an etcd cluster would not identify it: etcd derives the id from addresses and a name.)
* No transaction exceeds `operations_max` operations or `PIECE_BYTES_MAX`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConfigError, StorageError, Unavailable
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.feature_level import CURRENT_LEVEL
from mansio.metadata.image import feature_level_put
from mansio.metadata.metadata_store import (
    FIRST_CLUSTER_KEY,
    KEY_ROOT,
    Compare,
    Delete,
    Keys,
    Put,
    new_writer_id,
    transact_resolving_ambiguity,
    transact_with_retries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.metadata.metadata_store import Entry, MetadataStore
    from mansio.ports import Random

logger = logging.getLogger(__name__)

MOVED_KEY: Final = f"{KEY_ROOT}moved"
"""Key of {cluster_id, token} in the store of a single node whose metadata was moved to a cluster."""
PIECE_BYTES_MAX: Final = 1 << 20
"""Maximum size of the keys and values of a transaction; etcd accepts 1.5 MiB."""


class MovedMark(NamedTuple):
    """Mark of a single node's store: the cluster to which its metadata was moved, and the token of the import."""

    cluster_id: str
    token: str


async def read_mark(store: MetadataStore) -> MovedMark | None:
    """Return the mark of a single node's store; None if its metadata was not moved. Raises `StorageError`."""
    entry = await store.get(MOVED_KEY)
    if entry is None:
        return None
    document = metadata_store.decode(MOVED_KEY, entry.value)
    return MovedMark(document["cluster_id"], document["token"])


async def import_single_node(
    source: MetadataStore, target: MetadataStore, node_id: int, random: Random
) -> str:
    """Import the metadata in `source`, the store of the single node `node_id`, into `target`; returns the cluster id.

    Continues an import that was interrupted, and has no effect if it was completed. Raises `ConfigError` if `target`
    has a cluster that is not the result of this import, the import of `source` began in another store and may be valid
    there, or `source` belongs to another node, `Unavailable`, and
    `StorageError`.
    """
    cluster_id, entries = await _read_source(source)
    keys = Keys(cluster_id)
    mark = await read_mark(source)
    token = new_writer_id(random) if mark is None else mark.token
    level = feature_level_put(keys, CURRENT_LEVEL, writer_of_step(token, "feature level"))
    puts = [level, *plan_entries(keys, entries, node_id)]
    if await _is_complete(target, keys, mark):
        return cluster_id
    claim = await _claim(target, cluster_id, token, is_marked=mark is not None)
    await _put_all(target, keys, puts, claim)
    if mark is None:
        await _mark(source, MovedMark(cluster_id, token))
    await _make_valid(target, keys, token, claim)
    logger.info("single_node_imported", extra=fields(cluster=cluster_id, node=node_id, keys=len(puts)))
    return cluster_id


async def check_single_node(source: MetadataStore, node_id: int) -> None:
    """Raise `ConfigError` if `source` is not the store of the single node `node_id`; nothing is written."""
    cluster_id, entries = await _read_source(source)
    plan_entries(Keys(cluster_id), entries, node_id)


async def _read_source(source: MetadataStore) -> tuple[str, list[Entry]]:
    listing = await source.list(KEY_ROOT)
    found = metadata_store.cluster_ids(listing)
    if len(found) != 1:
        raise ConfigError(f"data_dir: its metadata has {len(found)} clusters instead of one")
    prefix = Keys(found[0]).prefix
    return found[0], [entry for entry in listing.entries if entry.key.startswith(prefix)]


def plan_entries(keys: Keys, entries: Sequence[Entry], node_id: int) -> list[Put]:
    """Return the entries of a cluster whose only broker with replicas is `node_id`, without its `format`. Raises
    `ConfigError` if a replica is on another node."""
    planned = []
    for entry in entries:
        if entry.key in (keys.format, keys.progress):
            continue
        value = entry.value
        if entry.key.startswith(keys.partitions):
            value = _next_epoch(entry, node_id)
        planned.append(Put(entry.key, value))
    return planned


def _next_epoch(entry: Entry, node_id: int) -> bytes:
    document = metadata_store.decode(entry.key, entry.value)
    if document["replicas"] != [node_id]:
        raise ConfigError(
            f"node_id: the topics belong to broker {document['replicas'][0]}: start with --node-id "
            f"{document['replicas'][0]}"
        )
    writer = document.pop("writer")
    del document["schema"]
    changed = {
        "leader_epoch": document["leader_epoch"] + 1,
        "part_epoch": document["part_epoch"] + 1,
    }
    return metadata_store.encode({**document, **changed}, writer)


async def _is_complete(target: MetadataStore, keys: Keys, mark: MovedMark | None) -> bool:
    """Whether the target has the result of this import. Raises `ConfigError` if it has another cluster."""
    entry = await target.get(keys.format)
    if entry is not None and mark is not None:
        token = metadata_store.decode(entry.key, entry.value).get("import")
        if token == mark.token:
            return True
    if found := metadata_store.cluster_ids(await target.list(KEY_ROOT)):
        raise ConfigError(
            f"etcd_endpoints: this etcd has the cluster {found[0]} already: the metadata of a single node is imported "
            "into an etcd without a cluster only"
        )
    return False


async def _claim(target: MetadataStore, cluster_id: str, token: str, *, is_marked: bool) -> int:
    """Claim the target for this cluster; returns the revision of the claim. An earlier claim for the same cluster,
    whose import was given up before its end, is replaced. With the mark there must be the claim of this import."""
    entry = await target.get(FIRST_CLUSTER_KEY)
    if entry is not None:
        document = metadata_store.decode(FIRST_CLUSTER_KEY, entry.value)
        if document["cluster_id"] != cluster_id:
            raise ConfigError(
                f"etcd_endpoints: this etcd is claimed by the import of cluster {document['cluster_id']}: continue it, "
                f"or, if it was given up, delete the key {FIRST_CLUSTER_KEY} in etcd"
            )
        if document.get("import") == token:
            return entry.mod_revision
    if is_marked:
        raise ConfigError(
            f"etcd_endpoints: the metadata was moved to the cluster {cluster_id} in another etcd: start with that etcd"
        )
    writer = writer_of_step(token, "claim")
    value = metadata_store.encode({"cluster_id": cluster_id, "incarnation": 0, "import": token}, writer)
    guard = Compare(FIRST_CLUSTER_KEY, mod_revision=0 if entry is None else entry.mod_revision)
    done = await transact_resolving_ambiguity(target, [guard], [Put(FIRST_CLUSTER_KEY, value)], writer)
    if not done.succeeded:
        raise Unavailable("another cluster is being created in this etcd")
    return done.revision


async def _put_all(target: MetadataStore, keys: Keys, puts: Sequence[Put], claim: int) -> None:
    """Put all entries, and delete those of an earlier attempt that are not among them, while the claim is held."""
    wanted = {put.key for put in puts}
    listing = await target.list(keys.prefix)
    stale = [Delete(entry.key) for entry in listing.entries if entry.key not in wanted]
    for piece in pieces([*stale, *puts], target.operations_max):
        done = await transact_with_retries(target, [Compare(FIRST_CLUSTER_KEY, mod_revision=claim)], piece)
        if not done.succeeded:
            raise Unavailable("another cluster was created in this etcd during the import")


def pieces(
    operations: Sequence[Put | Delete], operations_max: int, bytes_max: int = PIECE_BYTES_MAX
) -> Iterator[list[Put | Delete]]:
    """Yield operations in pieces of at most `operations_max`, and of `bytes_max` unless one alone is larger."""
    piece: list[Put | Delete] = []
    size = 0
    for operation in operations:
        own = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        if piece and (len(piece) == operations_max or size + own > bytes_max):
            yield piece
            piece, size = [], 0
        piece.append(operation)
        size += own
    if piece:
        yield piece


async def _mark(source: MetadataStore, mark: MovedMark) -> None:
    value = metadata_store.encode(mark._asdict(), mark.token)
    done = await source.transact([Compare(MOVED_KEY, create_revision=0)], [Put(MOVED_KEY, value)])
    if not done.succeeded:
        raise StorageError("the metadata is being moved by another process")


async def _make_valid(target: MetadataStore, keys: Keys, token: str, claim: int) -> None:
    writer = writer_of_step(token, "format")
    document: dict[str, Any] = {"cluster_id": keys.cluster_id, "incarnation": 0, "import": token}
    compares = [Compare(keys.format, create_revision=0), Compare(FIRST_CLUSTER_KEY, mod_revision=claim)]
    put = Put(keys.format, metadata_store.encode(document, writer))
    done = await transact_resolving_ambiguity(target, compares, [put], writer)
    if not done.succeeded:
        raise Unavailable("another cluster was created in this etcd during the import")


def writer_of_step(token: str, step: str) -> str:
    """Return the writer token of a step of an import, which is the same in each attempt."""
    return f"{token}-{step}"
