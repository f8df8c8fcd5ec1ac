"""Metadata store: interface of a small, strongly consistent key-value store with revisions, as in etcd.

Defines the protocol of a store, the keys, and the encoding of values. A single node uses SQLite (`sqlite.store`), a
cluster etcd (`etcd.store`). No other module depends on which.

Invariants of a store:
* Every transaction that changes something increases the revision by one, and all its changes have that revision.
* A transaction is atomic, and `succeeded` means that it is on stable storage.
* A watch returns every change under its prefix exactly once, in order of revisions, or ends with `Compacted`.

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
"""Written with the first cluster of a store and never again, so there is exactly one first cluster."""
AMBIGUOUS_ATTEMPTS_MAX: Final = 5


class Compacted(MansioError):
    """The requested changes are no longer stored; list again and watch from there."""


class LeaseExpired(Unavailable):
    """The lease has expired or never existed; its keys are deleted."""


class Ambiguous(Unavailable):
    """The response to a transaction was lost: its outcome is unknown."""


class Entry(NamedTuple):
    """The current value of a key, with the revisions of its creation and last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


class Listing(NamedTuple):
    """All entries under a prefix, sorted by key, at one revision. Continue with a watch from `revision + 1`."""

    revision: int
    entries: list[Entry]


class Compare(NamedTuple):
    """A condition on a key: fields that are not None must be equal. 0 means that the key does not exist."""

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None


class Put(NamedTuple):
    """Write a key. With a `lease` it is deleted when the lease ends."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Delete a key, if it exists."""

    key: str


class TransactionResult(NamedTuple):
    """Result of a transaction. `revision`: of the store after it, also if a condition was not satisfied."""

    succeeded: bool
    revision: int


class Event(NamedTuple):
    """One change of one key. `value` is None if it was deleted (then `create_revision` is 0)."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


class StoreCounts(NamedTuple):
    """Calls to a store since it was opened, by outcome. `failed`: failed attempts by type; a call that was retried
    successfully is counted in both."""

    answered: int
    ambiguous: int
    """Transactions whose response was lost."""
    failed: Mapping[str, int]


class MetadataStore(Protocol):
    """A metadata store. Errors: `StorageError` (disk), `Unavailable` (retry), `Ambiguous` (read to find the
    outcome)."""

    @property
    def operations_max(self) -> int:
        """Maximum number of conditions, or operations, of one transaction."""

    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        """Perform all operations if all conditions are satisfied. No two operations may have the same key."""

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        """Changes from `from_revision` on, past and future, until the store closes.

        Batches are bounded, and a slow reader applies backpressure. All events of one revision are in one batch. Raises
        `Compacted` when the watch can no longer be complete.
        """

    async def close(self) -> None: ...


class Leases(Protocol):
    """Leases of a store that several brokers share; they expire without renewals. A single node has none.

    Ids are not 0. Errors: `Unavailable`, and `LeaseExpired` for a lease that does not exist any more.
    """

    async def grant(self, ttl_s: float) -> int:
        """Grant a lease that expires `ttl_s` seconds after its last renewal. Returns its id."""

    async def keep_alive_once(self, lease: int) -> float:
        """Renew a lease. Returns the remaining seconds. Raises `LeaseExpired`."""

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. No effect if it has ended."""


DEFAULT_BROKER: Final = "default"
"""In keys of dynamic settings: all brokers."""


class Keys:
    """The keys of one cluster. Partitions are keyed by topic id: a topic that is created again has other keys."""

    __slots__ = (
        "broker_configs",
        "brokers",
        "controller",
        "format",
        "group_configs",
        "partitions",
        "prefix",
        "producer_ids",
        "quotas",
        "secret",
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
        self.secret = f"{self.prefix}secret"
        """{secret}, in hexadecimal digits: what the brokers of the cluster authenticate with. In a cluster only."""
        self.broker_configs = f"{self.prefix}brokerconfigs/"
        self.tick = f"{self.prefix}tick"

    def topic(self, name: str) -> str:
        return f"{self.topics}{name}"

    def partition(self, topic_id: UUID, index: int) -> str:
        return f"{self.partitions}{topic_id}/{index}"

    def group_config(self, group_id: str) -> str:
        """{configs: {name: value}}, the overrides of a group."""
        return f"{self.group_configs}{quote(group_id, safe='')}"

    def broker_config(self, name: str) -> str:
        """{configs: {name: value}}, the dynamic settings of a broker; empty name: the defaults of all brokers."""
        return f"{self.broker_configs}{name or DEFAULT_BROKER}"

    def session(self, node_id: int) -> str:
        """{host, port, rack, run}, with a lease. Its create revision is the broker's epoch."""
        return f"{self.brokers}{node_id}/session"

    def registration(self, node_id: int) -> str:
        """{state: fenced, active or draining}; stays when the session ends."""
        return f"{self.brokers}{node_id}/reg"


def encode(document: Mapping[str, Any], writer: str) -> bytes:
    """Encode a value: JSON with schema version and writer. `writer` is unique for each transaction."""
    return json.dumps(
        {"schema": SCHEMA_VERSION, "writer": writer, **document}, separators=(",", ":")
    ).encode()


def decode(key: str, value: bytes) -> dict[str, Any]:
    """Decode a value. Raises `StorageError` if it is damaged or of a newer Mansio."""
    try:
        document = json.loads(value)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"metadata {key} is damaged") from error
    if schema != SCHEMA_VERSION:
        raise StorageError(f"metadata {key} has schema {schema}; this version supports {SCHEMA_VERSION}")
    return dict(document)


def new_uuid(random: Random) -> UUID:
    """A random UUID (version 4), for a topic or a cluster."""
    return UUID(bytes=random.bytes(16), version=4)


def new_writer_id(random: Random) -> str:
    """A token that is unique for each transaction."""
    return random.bytes(12).hex()


async def transact_resolving_ambiguity(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete], writer: str
) -> TransactionResult:
    """Call `store.transact`; after a lost response, read which writer wrote last.

    The conditions must make a second run harmless: at least one of them must fail after the first run, on a key that
    the transaction puts. The second run may fail because the first one was applied late, so the key is read again.
    Raises `ConcurrentChange` if another writer has changed that key meanwhile, because then the outcome cannot be
    determined: read the metadata and decide again. Raises `Ambiguous` if the responses remain lost.
    """
    marked = {put.key for put in operations if isinstance(put, Put)}
    checked = next(compare for compare in compares if compare.key in marked)
    done: TransactionResult | None = None
    for attempt in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            done = await store.transact(compares, operations)
        except Ambiguous as error:
            lost = error
        else:
            if done.succeeded or attempt == 0:
                return done
        entry = await store.get(checked.key)
        if entry is not None and decode(entry.key, entry.value).get("writer") == writer:
            return TransactionResult(True, entry.mod_revision)
        if not _is_satisfied(checked, entry):
            raise ConcurrentChange(f"{checked.key} was changed concurrently while the response was lost")
        if done is not None:
            return done
    raise lost


async def transact_with_retries(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete]
) -> TransactionResult:
    """Call `store.transact`, and retry it after a lost response: for idempotent transactions. A result without success
    does not mean that no earlier attempt succeeded."""
    for _ in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            return await store.transact(compares, operations)
        except Ambiguous:
            continue
    raise Unavailable("the metadata store does not respond")


def _is_satisfied(compare: Compare, entry: Entry | None) -> bool:
    created, modified = (entry.create_revision, entry.mod_revision) if entry else (0, 0)
    return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)
