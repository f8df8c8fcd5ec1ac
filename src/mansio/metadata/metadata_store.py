"""Metadata store: interface of a small, strongly consistent key-value store with revisions, as in etcd.

Defines the protocol of a store, the keys, and the encoding of values. A single node uses SQLite (`sqlite.store`), a
cluster uses etcd (`etcd.store`).

Invariants of a store:
* Every transaction that changes something increases the revision by one, and all its changes have that revision.
* A transaction is atomic, and `succeeded` means that it is on stable storage.
* A watch returns every change under its prefix exactly once, in order of revisions, or ends with `RevisionCompacted`.

Model: https://etcd.io/docs/v3.5/learning/api/
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote
from uuid import UUID

from mansio.errors import ConcurrentChange, MansioError, StorageError, Unavailable
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from mansio.ports import Random

SCHEMA_VERSION: Final = 1
SCHEMA_VERSION_MAX: Final = 2
"""Schema version of the key with the feature level of a cluster, which older versions must refuse
(`metadata.feature_level`)."""
KEY_ROOT: Final = "/mansio/"
FIRST_CLUSTER_KEY: Final = f"{KEY_ROOT}first"
"""Key that the creation of the first cluster of a store writes; the creation fails if the key exists."""
CONFLICT_ATTEMPTS_MAX: Final = 5
"""Maximum number of attempts of a change while others change the same entry concurrently."""

AMBIGUOUS_ATTEMPTS_MAX: Final = 5


class RevisionCompacted(MansioError):
    """Raised when the requested changes are no longer stored; the caller lists the keys and starts a new watch."""


class LeaseExpired(Unavailable):
    """Raised when a lease has expired or never existed; its keys are deleted."""


class AmbiguousOutcome(Unavailable):
    """Raised when the response to a transaction was lost, so that its outcome is unknown."""


class Entry(NamedTuple):
    """The current value of a key, with the revisions of its creation and last change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


class Listing(NamedTuple):
    """All entries under a prefix, sorted by key, at one revision. A watch from `revision + 1` returns later changes."""

    revision: int
    entries: list[Entry]


class Compare(NamedTuple):
    """A condition on a key: its revisions must equal the fields that are not None; 0: the key must not exist."""

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None


class Put(NamedTuple):
    """Operation that writes a key. With the id of a `lease` the key is deleted when the lease ends; 0: no lease."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Operation that deletes a key, if it exists."""

    key: str


BeforeCommit: TypeAlias = "Callable[[Sequence[Put | Delete]], object]"
"""Called with the operations of a transaction before it is committed. Raises `OSError` or `MansioError` to prevent
that."""


class TransactionResult(NamedTuple):
    """Result of a transaction. `succeeded`: all conditions were satisfied, and its operations are durable.

    `revision` is the revision of the store after the transaction, whether it succeeded or not.
    """

    succeeded: bool
    revision: int


class Event(NamedTuple):
    """One change of one key. If the key was deleted, `value` is None and `create_revision` is 0."""

    key: str
    value: bytes | None
    create_revision: int
    mod_revision: int


class StoreCounts(NamedTuple):
    """Numbers of calls to a store since it was opened.

    `answered_count` counts calls with a response. `failure_counts` counts failed attempts by `CallOutcome` (in lower
    case); a call that succeeded after a retry is counted in both.
    """

    answered_count: int
    ambiguous_count: int
    """Number of transactions whose response was lost."""
    failure_counts: Mapping[str, int]


class MetadataStore(Protocol):
    """A metadata store.

    Methods raise `StorageError` if the disk fails, `Unavailable` if the caller may retry, and `AmbiguousOutcome` if the
    caller has to read the keys to find out whether a transaction was executed.
    """

    @property
    def operations_max(self) -> int:
        """Maximum number of conditions, or operations, of one transaction."""

    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        """Execute all operations if all conditions are satisfied. No two operations may have the same key."""

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        """Yield the changes under `prefix` from `from_revision` on, past and future ones, until the store closes.

        Batches are bounded, and a slow reader applies backpressure. All events of one revision are in one batch. Raises
        `RevisionCompacted` if a change is no longer stored.
        """

    async def close(self) -> None: ...


class Leases(Protocol):
    """Leases of a metadata store, which expire unless they are renewed. A single node has no leases.

    A lease id is never 0. Methods raise `Unavailable`, and `LeaseExpired` for a lease that does not exist any more.
    """

    async def grant(self, ttl_s: float) -> int:
        """Grant a lease that expires `ttl_s` seconds after its last renewal. Returns its id."""

    async def keep_alive_once(self, lease: int) -> float:
        """Renew a lease. Returns its remaining time in seconds. Raises `LeaseExpired`, `Unavailable`."""

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. No effect if the lease has ended."""


DEFAULT_BROKER: Final = "default"
"""Name in the key of the dynamic settings that apply to all brokers, instead of a node id."""


class Keys:
    """The keys, and prefixes of keys, of one cluster in the metadata store. A prefix ends with "/".

    Keys of partitions contain the topic id, so a topic that is deleted and created again has other keys.
    """

    __slots__ = (
        "acls",
        "api_keys",
        "broker_configs",
        "brokers",
        "cluster_id",
        "controller",
        "feature_level",
        "format",
        "group_configs",
        "partitions",
        "prefix",
        "producer_ids",
        "progress",
        "quotas",
        "secret",
        "server_secret",
        "sqs_access_keys",
        "tokens",
        "topics",
        "users",
    )

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.prefix = f"{KEY_ROOT}{cluster_id}/"
        self.format = f"{self.prefix}format"
        self.feature_level = f"{self.prefix}featurelevel"
        """Key of {level}: the feature level of a cluster (`metadata.feature_level`). A single node has none."""
        self.topics = f"{self.prefix}topics/"
        self.partitions = f"{self.prefix}parts/"
        self.brokers = f"{self.prefix}brokers/"
        self.controller = f"{self.prefix}controller"
        self.producer_ids = f"{self.prefix}pids/next"
        self.quotas = f"{self.prefix}quotas/"
        self.group_configs = f"{self.prefix}groupconfigs/"
        self.secret = f"{self.prefix}secret"
        """Key of {secret}: the cluster secret in hexadecimal digits. A single node has none."""
        self.users = f"{self.prefix}users/"
        self.acls = f"{self.prefix}acls/"
        """Prefix of the keys of the access control lists (`metadata.acls`)."""
        self.api_keys = f"{self.prefix}apikeys/"
        """Prefix of the keys with the API keys of each user (`metadata.api_keys`)."""
        self.server_secret = f"{self.prefix}serversecret"
        """Key of {secret}: the server secret of authentication (`metadata.users`)."""
        self.sqs_access_keys = f"{self.prefix}sqskeys/"
        """Prefix of the keys of the access keys of SQS (`metadata.sqs_access_keys`)."""
        self.tokens = f"{self.prefix}tokens/"
        """Prefix of the keys of delegation tokens (`metadata.delegation_tokens`)."""
        self.broker_configs = f"{self.prefix}brokerconfigs/"
        self.progress = f"{self.prefix}tick"

    def ended_session(self, node_id: int) -> str:
        """Key of {epoch, writer}, which exists after a session was ended early, until the lease of that session ends
        (`metadata.hand_over`)."""
        return f"{self.brokers}{node_id}/ended"

    def topic(self, name: str) -> str:
        return f"{self.topics}{name}"

    def partition(self, topic_id: UUID, index: int) -> str:
        return f"{self.partitions}{topic_id}/{index}"

    def group_config(self, group_id: str) -> str:
        """Key of {configs: {name: value}}, the settings of a group."""
        return f"{self.group_configs}{quote(group_id, safe='')}"

    def broker_config(self, name: str) -> str:
        """Key of {configs: {name: value}}, the dynamic settings of a broker; empty name: those of all brokers."""
        return f"{self.broker_configs}{name or DEFAULT_BROKER}"

    def credential(self, user: str, mechanism: str) -> str:
        """Key of the credential of a user for a mechanism of SCRAM."""
        return f"{self.users}{quote(user, safe='')}/{mechanism}"

    def sqs_access_key(self, key_id: str) -> str:
        """Key of an access key of SQS."""
        return f"{self.sqs_access_keys}{key_id}"

    def token(self, token_id: str) -> str:
        """Key of a delegation token."""
        return f"{self.tokens}{token_id}"

    def user_api_keys(self, user: str) -> str:
        """Key of the API keys of a user."""
        return f"{self.api_keys}{quote(user, safe='')}"

    def session(self, node_id: int) -> str:
        """Key of {host, port, rack, run, lease, listeners, inter_broker_listener}, the session of a broker, which has a
        lease.

        The create revision of the key is the broker epoch.
        """
        return f"{self.brokers}{node_id}/session"

    def registration(self, node_id: int) -> str:
        """Key of {state: fenced, active or draining, levels: [lowest, highest]}, the registration of a broker, which
        outlives its session."""
        return f"{self.brokers}{node_id}/reg"


def cluster_ids(listing: Listing) -> list[str]:
    """Return the ids of the clusters of a store, from a listing of all its keys: of those that have a `format` key."""
    parts = [entry.key.removeprefix(KEY_ROOT).split("/") for entry in listing.entries]
    return [cluster_id for cluster_id, *rest in parts if rest == ["format"]]


def encode(document: Mapping[str, Any], writer: str, *, schema: int = SCHEMA_VERSION) -> bytes:
    """Encode a value as JSON with schema version and `writer`, a token that is unique for each transaction."""
    return json.dumps({"schema": schema, "writer": writer, **document}, separators=(",", ":")).encode()


def decode(key: str, value: bytes) -> dict[str, Any]:
    """Decode the value of `key`. Raises `StorageError` if it is damaged or was written by a newer Mansio."""
    try:
        document = json.loads(value)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        document = schema = None
    if document is None:  # not raised from the error of `json`, which keeps the value: it may be a secret
        raise StorageError(f"metadata {key} is damaged")
    if schema not in range(SCHEMA_VERSION, SCHEMA_VERSION_MAX + 1):
        raise StorageError(
            f"metadata {key} has schema {schema}; this version supports {SCHEMA_VERSION} to {SCHEMA_VERSION_MAX}"
        )
    return dict(document)


def new_uuid(random: Random) -> UUID:
    """Return a random UUID (version 4), for example the id of a topic or cluster."""
    return UUID(bytes=random.bytes(16), version=4)


def new_writer_id(random: Random) -> str:
    """Return a token that is unique for each transaction."""
    return random.bytes(12).hex()


async def transact_resolving_ambiguity(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete], writer: str
) -> TransactionResult:
    """Call `store.transact`; if its response is lost, read one of its keys to see whether `writer` wrote it, and retry.

    One of the conditions must concern a key that the transaction puts, and must fail once the transaction was executed,
    so that a second execution has no effect. Raises `ConcurrentChange` if another writer has changed that key
    meanwhile: then the outcome is unknown, and the caller reads the metadata and decides again. Raises
    `AmbiguousOutcome` if all responses are lost.
    """
    marked = {put.key for put in operations if isinstance(put, Put)}
    checked = next(compare for compare in compares if compare.key in marked)
    done: TransactionResult | None = None
    for attempt in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            done = await store.transact(compares, operations)
        except AmbiguousOutcome as error:
            lost = without_traceback(error)
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
    raise copied(lost)


async def transact_with_retries(
    store: MetadataStore, compares: Sequence[Compare], operations: Sequence[Put | Delete]
) -> TransactionResult:
    """Call `store.transact` for an idempotent transaction, and retry it after a lost response.

    If the result is not successful, an earlier attempt may nevertheless have succeeded. Raises `Unavailable`.
    """
    for _ in range(AMBIGUOUS_ATTEMPTS_MAX):
        try:
            return await store.transact(compares, operations)
        except AmbiguousOutcome:
            continue
    raise Unavailable("the metadata store does not respond")


def _is_satisfied(compare: Compare, entry: Entry | None) -> bool:
    created, modified = (entry.create_revision, entry.mod_revision) if entry else (0, 0)
    return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)
