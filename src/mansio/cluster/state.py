"""What this broker knows of the cluster: brokers, topics, partitions. A view of the metadata store, kept by a
watch.

Owns `ClusterState`, the only in-memory copy of metadata in a broker, and its immutable parts (`Topic`,
`PartitionState`, `BrokerState`). It is changed by the store's events and by nothing else: whoever changes
metadata writes to the store and awaits `reached(revision)`.

Always true: a `Topic` object never changes; a change of anything about a topic or its partitions makes a new
one, so that whatever was derived from it (an encoded answer, say) can be kept with the object itself. A topic
is in `topics` only while it is live: one that is being created or deleted is in `unfinished`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.cluster import metadata
from mansio.cluster.metadata import Compacted, Compare, Event, Keys, Put
from mansio.errors import ConfigError, StorageError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mansio.cluster.metadata import Listing, MetadataStore
    from mansio.ports import Promise, Random, Scheduler, Timer

CREATING: Final = "creating"
LIVE: Final = "live"
DELETING: Final = "deleting"
NO_LEADER: Final = -1


class BrokerState(NamedTuple):
    """A broker that is there. `rack` is None where none is told."""

    node_id: int
    host: str
    port: int
    rack: str | None


class PartitionState(NamedTuple):
    """Who keeps a partition, who leads it (-1: nobody), who is in sync."""

    replicas: tuple[int, ...]
    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    partition_epoch: int = 0
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Topic:
    """One topic. Identity is equality: see the module. `mod_revision` is that of the topic's own key."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionState, ...]
    replication_factor: int
    configs: Mapping[str, str]
    internal: bool
    state: str
    mod_revision: int


class QuotaEntry(NamedTuple):
    """One key under `quotas/`: whom for, and rates by name; `broker.quotas` reads it."""

    document: Mapping[str, Any]
    mod_revision: int


@dataclass(frozen=True, slots=True)
class TopicChange:
    """What happened to a topic: `before` is None when it became live, `after` when it stopped being."""

    before: Topic | None
    after: Topic | None


class _Draft(NamedTuple):
    """The key of one topic as it stands in the store."""

    document: dict[str, Any]
    mod_revision: int


@dataclass(slots=True)
class ClusterState:
    """Build it with `load`, keep it current with `start`."""

    cluster_id: str
    keys: Keys
    revision: int = 0
    brokers: dict[int, BrokerState] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    topics_by_id: dict[UUID, Topic] = field(default_factory=dict)
    unfinished: dict[str, Topic] = field(default_factory=dict)
    quotas: dict[str, QuotaEntry] = field(default_factory=dict)
    partition_count: int = 0
    failure: Exception | None = None
    _drafts: dict[str, _Draft] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # of topics, by uuid
    _partitions: dict[str, dict[int, PartitionState]] = field(default_factory=dict)
    _callbacks: list[Callable[[TopicChange], None]] = field(default_factory=list)
    _quota_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _quotas_moved: bool = False
    _waits: list[tuple[int, Promise[None]]] = field(default_factory=list)
    _following: Timer | None = None

    @classmethod
    async def load(cls, store: MetadataStore, cluster_id: str, random: Random) -> ClusterState:
        """The cluster kept in `store`, made if there is none.

        `cluster_id` empty: the one there, or a new one. Raises `ConfigError` when another is there.
        """
        found = await _find_or_make_cluster(store, cluster_id, random)
        state = cls(found, Keys(found))
        state._relist(await store.list(state.keys.prefix))
        return state

    def start(self, store: MetadataStore, scheduler: Scheduler) -> None:
        """Follow the store from now on."""
        self._following = scheduler.spawn(self._follow(store), name="follow metadata")

    def stop(self) -> None:
        """Follow no more; waits end with `Unavailable`."""
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self._end_waits(Unavailable("the broker is stopping"))

    def on_change(self, callback: Callable[[TopicChange], None]) -> None:
        """Call `callback` after each change of a live topic, on the loop, once the view shows it."""
        self._callbacks.append(callback)

    def on_quota_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after `quotas` has changed, on the loop."""
        self._quota_callbacks.append(callback)

    async def reached(self, revision: int, scheduler: Scheduler) -> None:
        """Wait until the view shows everything up to `revision`. Raises what ended the watch, if it ended."""
        if self.revision >= revision:
            return
        if self.failure is not None:
            raise self.failure
        promise: Promise[None] = scheduler.promise()
        self._waits.append((revision, promise))
        await promise

    @property
    def controller_id(self) -> int:
        """The broker clients send changes to: any can take them; the lowest one there is named. -1: none."""
        return min(self.brokers, default=-1)

    # Following

    async def _follow(self, store: MetadataStore) -> None:
        try:
            while True:
                try:
                    async for events in store.watch(self.keys.prefix, self.revision + 1):
                        self._apply(events)
                    break
                except Compacted:
                    self._relist(await store.list(self.keys.prefix))
            self._end_waits(Unavailable("the metadata store was closed"))
        except (StorageError, Unavailable) as error:
            self._end_waits(error)
            raise

    def _end_waits(self, error: Exception) -> None:
        self.failure = error
        waits, self._waits = self._waits, []
        for _, promise in waits:
            if not promise.done():
                promise.set_exception(error)

    def _apply(self, events: Iterable[Event]) -> None:
        touched: dict[str, None] = {}
        for event in events:
            self._take(event, touched)
            self.revision = event.mod_revision
        self._settle(touched)

    def _relist(self, listing: Listing) -> None:
        kept = {entry.key for entry in listing.entries}
        touched: dict[str, None] = {}
        for key in [key for key in self._known_keys() if key not in kept]:
            self._take(Event(key, None, 0, listing.revision), touched)
        for entry in listing.entries:
            self._take(Event(entry.key, entry.value, entry.create_revision, entry.mod_revision), touched)
        self.revision = listing.revision
        self._settle(touched)

    def _known_keys(self) -> list[str]:
        topics = [self.keys.topic(name) for name in self._drafts]
        partitions = [
            f"{self.keys.partitions}{topic_id}/{index}"
            for topic_id, known in self._partitions.items()
            for index in known
        ]
        return [*topics, *partitions, *map(self.keys.session, self.brokers), *self.quotas]

    def _take(self, event: Event, touched: dict[str, None]) -> None:
        """Note one change; the names of topics to look at again go to `touched`."""
        keys = self.keys
        document = None if event.value is None else metadata.decode(event.key, event.value)
        if event.key.startswith(keys.topics):
            name = event.key.removeprefix(keys.topics)
            touched[name] = None
            if (draft := self._drafts.pop(name, None)) is not None:
                self._names.pop(draft.document["uuid"], None)
            if document is not None:
                self._drafts[name] = _Draft(document, event.mod_revision)
                self._names[document["uuid"]] = name
        elif event.key.startswith(keys.partitions):
            topic_id, _, index = event.key.removeprefix(keys.partitions).partition("/")
            known = self._partitions.setdefault(topic_id, {})
            if document is not None:
                known[int(index)] = _partition(document)
            elif known.pop(int(index), None) is not None and not known:
                del self._partitions[topic_id]
            if topic_id in self._names:
                touched[self._names[topic_id]] = None
        elif event.key.startswith(keys.brokers) and event.key.endswith("/session"):
            self._take_session(event.key, document)
        elif event.key.startswith(keys.quotas):
            self._quotas_moved = True
            self.quotas.pop(event.key, None)
            if document is not None:
                self.quotas[event.key] = QuotaEntry(document, event.mod_revision)

    def _take_session(self, key: str, document: dict[str, Any] | None) -> None:
        node_id = int(key.removeprefix(self.keys.brokers).partition("/")[0])
        if document is None:
            self.brokers.pop(node_id, None)
        else:
            self.brokers[node_id] = BrokerState(node_id, document["host"], document["port"], document["rack"])

    def _settle(self, touched: Iterable[str]) -> None:
        changes = [change for name in touched for change in self._renew(name)]
        for change in changes:
            for callback in self._callbacks:
                callback(change)
        if self._quotas_moved:
            self._quotas_moved = False
            for look_again in self._quota_callbacks:
                look_again()
        due = [promise for revision, promise in self._waits if revision <= self.revision]
        self._waits = [wait for wait in self._waits if wait[0] > self.revision]
        for promise in due:
            if not promise.done():
                promise.set_result(None)

    def _renew(self, name: str) -> list[TopicChange]:
        """Put a topic's new object in the view. One that was deleted and made again has changed twice."""
        before = self.topics.pop(name, None)
        self.unfinished.pop(name, None)
        if before is not None:
            del self.topics_by_id[before.topic_id]
            self.partition_count -= len(before.partitions)
        draft = self._drafts.get(name)
        after = (
            None if draft is None else _topic(name, draft, self._partitions.get(draft.document["uuid"], {}))
        )
        if after is not None and after.state != LIVE:
            self.unfinished[name] = after
            after = None
        if after is not None:
            self.topics[name] = self.topics_by_id[after.topic_id] = after
            self.partition_count += len(after.partitions)
        if before is not None and after is not None and before.topic_id != after.topic_id:
            return [TopicChange(before, None), TopicChange(None, after)]
        return [TopicChange(before, after)] if before is not None or after is not None else []


def _topic(name: str, draft: _Draft, known: Mapping[int, PartitionState]) -> Topic:
    document = draft.document
    count = document["partitions"]
    missing = [index for index in range(count) if index not in known]
    if missing and document["state"] == LIVE:
        raise StorageError(f"metadata of topic {name}: partition {missing[0]} is missing")
    return Topic(
        name=name,
        topic_id=UUID(document["uuid"]),
        partitions=tuple(known[index] for index in range(count) if index in known),
        replication_factor=document["replication_factor"],
        configs=document["configs"],
        internal=document["internal"],
        state=document["state"],
        mod_revision=draft.mod_revision,
    )


def topic_document(topic: Topic) -> dict[str, Any]:
    """The value of the key `topics/<name>`."""
    return {
        "uuid": str(topic.topic_id),
        "partitions": len(topic.partitions),
        "replication_factor": topic.replication_factor,
        "configs": dict(topic.configs),
        "internal": topic.internal,
        "state": topic.state,
    }


def partition_document(partition: PartitionState) -> dict[str, Any]:
    """The value of the key `parts/<topic-uuid>/<p>`."""
    return {
        "replicas": partition.replicas,
        "adding": partition.adding,
        "removing": partition.removing,
        "leader": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "isr": partition.isr,
        "part_epoch": partition.partition_epoch,
    }


def _partition(document: Mapping[str, Any]) -> PartitionState:
    return PartitionState(
        replicas=tuple(document["replicas"]),
        leader=document["leader"],
        leader_epoch=document["leader_epoch"],
        isr=tuple(document["isr"]),
        partition_epoch=document["part_epoch"],
        adding=tuple(document["adding"]),
        removing=tuple(document["removing"]),
    )


async def _find_or_make_cluster(store: MetadataStore, wanted: str, random: Random) -> str:
    listing = await store.list(metadata.ROOT)
    found = [entry.key.split("/")[2] for entry in listing.entries if entry.key.endswith("/format")]
    if wanted in found:
        return wanted
    if found and not wanted and len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"cluster_id: {wanted!r} is not the cluster kept here, {', '.join(found)}")
    cluster_id = wanted or new_cluster_id(random)
    key = Keys(cluster_id).format
    value = metadata.encode({"cluster_id": cluster_id, "incarnation": 0}, new_writer(random))
    await store.transact([Compare(key, create_revision=0)], [Put(key, value)])
    return cluster_id


def new_uuid(random: Random) -> UUID:
    """A random uuid (version 4)."""
    return UUID(bytes=random.bytes(16), version=4)


def new_cluster_id(random: Random) -> str:
    """A uuid as Kafka writes it: 22 characters of URL-safe base64."""
    import base64

    return base64.urlsafe_b64encode(new_uuid(random).bytes).rstrip(b"=").decode()


def new_writer(random: Random) -> str:
    """A token that no other transaction has."""
    return random.bytes(12).hex()
