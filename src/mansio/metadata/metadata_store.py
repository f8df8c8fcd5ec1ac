"""The metadata store: a small, strongly consistent key-value store with revisions, as etcd has it.

Owns the protocol every store implements, the keys, and the envelope of a value. One node keeps it in SQLite
(`sqlite_store`); a cluster in etcd. Nothing above this module knows which.

Always true of a store:
* every transaction that changes something raises the revision by one, and all its changes carry that
  revision;
* a transaction happens whole or not at all, and `succeeded` means it is on stable storage;
* a watch shows every change under its prefix exactly once, in the order of revisions, or ends with
  `Compacted`.

Model: https://etcd.io/docs/v3.5/learning/api/
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import quote
from uuid import UUID

from mansio.errors import ConcurrentChange, MansioError, StorageError, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from mansio.ports import Random

SCHEMA_VERSION: Final = 1
ROOT: Final = "/mansio/"
FIRST_CLUSTER: Final = f"{ROOT}first"
"""Written with the first cluster of a store, and never again: so there is one first."""
AMBIGUOUS_ATTEMPTS_MAX: Final = 5


class Compacted(MansioError):
    """The changes asked for are no longer kept; list again and watch from there."""


class LeaseExpired(Unavailable):
    """The lease has ended or never was; what was written with it is gone."""


class Ambiguous(Unavailable):
    """The answer to a transaction was lost: it may or may not have happened."""


class Entry(NamedTuple):
    """A key as it stands. Revisions are those of the key's creation and of its last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


class Listing(NamedTuple):
    """All entries under a prefix, sorted by key, at one revision. Watch on from `revision + 1`."""

    revision: int
    entries: list[Entry]


class Compare(NamedTuple):
    """A condition on a key: what is not None must be equal. 0 stands for: there is no such key."""

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None


class Put(NamedTuple):
    """Write a key. With a `lease` it goes when the lease ends; written without one, it stays."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Remove a key; nothing happens if it is not there."""

    key: str


class TransactionResult(NamedTuple):
    """What came of a transaction. `revision` is the store's after it, also when a condition did not hold."""

    succeeded: bool
    revision: int


class Event(NamedTuple):
    """One change of one key. `value` is None when it was removed (then `create_revision` is 0)."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


class StoreCounts(NamedTuple):
    """Calls to a store since it was opened, by how they ended. `failed`: attempts by the kind of failure; one that was
    made again and went well is in both."""

    answered: int
    ambiguous: int
    """Transactions whose answer was lost."""
    failed: Mapping[str, int]


class MetadataStore(Protocol):
    """See the module. Errors: `StorageError` (the disk), `Unavailable` (try again), `Ambiguous` (read it
    back).
    """

    @property
    def operations_max(self) -> int:
        """Conditions, or operations, that one transaction may hold."""

    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        """Carry out all operations if all conditions hold. No key may be named by two operations."""

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        """Changes from `from_revision` on: those that already happened, then those to come, until the store
        closes.

        Batches are bounded; a reader that is slow is not sent more than it can hold. All events of one
        revision come in one batch. Raises `Compacted` when it can no longer be complete.
        """

    async def close(self) -> None: ...


class Leases(Protocol):
    """What ends by itself when nobody keeps it alive; a store of several brokers has it, a single node's has not.

    Ids are not 0. Errors: `Unavailable`, and `LeaseExpired` where the lease is no more.
    """

    async def grant(self, ttl_s: float) -> int:
        """A new lease that ends `ttl_s` seconds after the store last heard of it; its id."""

    async def keep_alive_once(self, lease: int) -> float:
        """Let it live for its whole time again; the seconds it has left. Raises `LeaseExpired`."""

    async def revoke(self, lease: int) -> None:
        """End it now, and the keys written with it. Nothing happens if it has ended."""


class Keys:
    """The keys of one cluster. Partitions go by the topic's uuid: a topic made again never meets the old
    one's.
    """

    __slots__ = (
        "brokers",
        "controller",
        "format",
        "group_configs",
        "partitions",
        "prefix",
        "producer_ids",
        "quotas",
        "tick",
        "topics",
    )

    def __init__(self, cluster_id: str) -> None:
        self.prefix = f"{ROOT}{cluster_id}/"
        self.format = f"{self.prefix}format"
        self.topics = f"{self.prefix}topics/"
        self.partitions = f"{self.prefix}parts/"
        self.brokers = f"{self.prefix}brokers/"
        self.controller = f"{self.prefix}controller"
        self.producer_ids = f"{self.prefix}pids/next"
        self.quotas = f"{self.prefix}quotas/"
        self.group_configs = f"{self.prefix}groupconfigs/"
        self.tick = f"{self.prefix}tick"

    def topic(self, name: str) -> str:
        return f"{self.topics}{name}"

    def partition(self, topic_id: UUID, index: int) -> str:
        return f"{self.partitions}{topic_id}/{index}"

    def group_config(self, group_id: str) -> str:
        """{configs: {name: value}}, for a group that has settings of its own."""
        return f"{self.group_configs}{quote(group_id, safe='')}"

    def session(self, node_id: int) -> str:
        """{host, port, rack, run}, with a lease. Its create revision is the broker's epoch."""
        return f"{self.brokers}{node_id}/session"

    def registration(self, node_id: int) -> str:
        """{state: fenced, active or draining}; stays when the session ends."""
        return f"{self.brokers}{node_id}/reg"


def encode(document: Mapping[str, Any], writer: str) -> bytes:
    """A value: JSON with the schema version and who wrote it. `writer` is unique to one transaction."""
    return json.dumps(
        {"schema": SCHEMA_VERSION, "writer": writer, **document}, separators=(",", ":")
    ).encode()


def decode(key: str, value: bytes) -> dict[str, Any]:
    """The document of a value. Raises `StorageError` when it is damaged or of a newer Mansio."""
    try:
        document = json.loads(value)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"metadata {key} is damaged") from error
    if schema != SCHEMA_VERSION:
        raise StorageError(f"metadata {key} has schema {schema}; this version knows {SCHEMA_VERSION}")
    return dict(document)


def new_uuid(random: Random) -> UUID:
    """A random uuid (version 4), for a topic or a cluster."""
    return UUID(bytes=random.bytes(16), version=4)


def new_writer_id(random: Random) -> str:
    """A token that no other transaction has."""
    return random.bytes(12).hex()


async def transact_resolving_ambiguity(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete], writer: str
) -> TransactionResult:
    """`store.transact`, with lost answers cleared up by reading back who wrote last.

    The compares must make a second run harmless: at least one must fail after the first has happened, on a
    key that the transaction puts. That second run may fail because the first came through late; so it is
    read back, too. Raises `ConcurrentChange` when that key was changed by another in the meantime, because
    then nobody can tell whether ours came before; read again and decide anew. Raises `Ambiguous` when the
    answers stay lost.
    """
    marked = {put.key for put in operations if isinstance(put, Put)}
    witness = next(compare for compare in compares if compare.key in marked)
    done: TransactionResult | None = None
    for attempt in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            done = await store.transact(compares, operations)
        except Ambiguous as error:
            lost = error
        else:
            if done.succeeded or attempt == 0:
                return done
        entry = await store.get(witness.key)
        if entry is not None and decode(entry.key, entry.value).get("writer") == writer:
            return TransactionResult(True, entry.mod_revision)
        if not _is_satisfied(witness, entry):
            raise ConcurrentChange(f"{witness.key} was changed by another while our answer was lost")
        if done is not None:
            return done
    raise lost


async def transact_with_retries(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete]
) -> TransactionResult:
    """`store.transact`, run again where an answer was lost: for one that does no harm when it happens twice. That it
    did not succeed says nothing, then, about what happened before."""
    for _ in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            return await store.transact(compares, operations)
        except Ambiguous:
            continue
    raise Unavailable("the metadata store does not answer")


def _is_satisfied(compare: Compare, entry: Entry | None) -> bool:
    created, modified = (entry.create_revision, entry.mod_revision) if entry else (0, 0)
    return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)
