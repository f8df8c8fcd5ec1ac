"""What this broker knows of the cluster: brokers, topics, partitions. A view of the metadata store, kept by a
watch.

Owns `MetadataImage`, the only in-memory copy of metadata in a broker; what it holds are values of `model`. It is
changed by the store's events and, until it fails, by nothing else: whoever changes metadata writes to the store and
awaits `reached(revision)`.

A value that cannot be read (damaged, or of a newer Mansio) is the end of the view: to leave it out would be to guess
what it said. Nothing is seen from then on; `failure` says why, and `on_failure` tells whoever acts on the view.

Always true: a topic is in `topics` only while it is live: one that is being created or deleted is in `unfinished`. A
broker is in `brokers` only while it has a session. A single node has no session and no controller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from mansio.errors import ConfigError, MansioError, StorageError, Unavailable
from mansio.metadata import metadata_store
from mansio.metadata.cluster_id import find_or_create_cluster
from mansio.metadata.metadata_store import Compacted, Event, Keys, Put
from mansio.metadata.model import (
    ACTIVE,
    LIVE,
    BrokerChange,
    BrokerState,
    ControllerState,
    GroupConfigEntry,
    PartitionState,
    QuotaEntry,
    Registration,
    Topic,
    TopicChange,
    partition_of,
    topic_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from mansio.metadata.metadata_store import Listing, MetadataStore
    from mansio.ports import Promise, Random, Scheduler, Timer

PROGRESS_WRITE_MS: Final = 250
"""A wait for the view that takes longer is brought to its end by a write of our own."""
WATCH_RETRY_MS: Final = 250


class _Draft(NamedTuple):
    """The key of one topic as it stands in the store."""

    document: dict[str, Any]
    mod_revision: int


@dataclass(slots=True)
class MetadataImage:
    """Build it with `load`, keep it current with `start`."""

    cluster_id: str
    keys: Keys
    revision: int = 0
    brokers: dict[int, BrokerState] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    topics_by_id: dict[UUID, Topic] = field(default_factory=dict)
    unfinished: dict[str, Topic] = field(default_factory=dict)
    quotas: dict[str, QuotaEntry] = field(default_factory=dict)
    group_configs: dict[str, GroupConfigEntry] = field(default_factory=dict)
    registrations: dict[int, Registration] = field(default_factory=dict)
    controller: ControllerState | None = None
    partition_count: int = 0
    failure: Exception | None = None
    _drafts: dict[str, _Draft] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # of topics, by uuid
    _partitions: dict[str, dict[int, PartitionState]] = field(default_factory=dict)
    _callbacks: list[Callable[[TopicChange], None]] = field(default_factory=list)
    _quota_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _quotas_moved: bool = False
    _group_config_callbacks: list[Callable[[str], None]] = field(default_factory=list)
    _group_configs_moved: dict[str, None] = field(default_factory=dict)
    _broker_callbacks: list[Callable[[BrokerChange], None]] = field(default_factory=list)
    _progress_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _failure_callbacks: list[Callable[[Exception], None]] = field(default_factory=list)
    _broker_changes: list[BrokerChange] = field(default_factory=list)
    _waits: list[tuple[int, Promise[None]]] = field(default_factory=list)
    _watch_task: Timer | None = None
    _store: MetadataStore | None = None
    _shared: bool = False

    @classmethod
    async def load(cls, store: MetadataStore, cluster_id: str, random: Random) -> MetadataImage:
        """The cluster kept in `store`, made if there is none.

        `cluster_id` empty: the one there, or a new one. Raises `ConfigError` when another is there.
        """
        found = await find_or_create_cluster(store, cluster_id, random)
        state = cls(found, Keys(found))
        state._relist(await store.list(state.keys.prefix))
        return state

    def start(self, store: MetadataStore, scheduler: Scheduler, *, shared: bool = False) -> None:
        """Follow the store from now on.

        `shared`: other clusters may write to it too, and it may be away for a while. Then it is followed on from where
        it was left; and because revisions grow by what those others write, which no event here tells, a wait that takes
        long is brought to its end by a write of our own.
        """
        self._store, self._shared, self.failure = store, shared, None
        self._watch_task = scheduler.spawn(self._watch(store, scheduler), name="follow metadata")

    def stop(self) -> None:
        """Follow no more; waits end with `Unavailable`."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            self._watch_task = self._store = None
        self._end_waits(Unavailable("the broker is stopping"))

    def on_change(self, callback: Callable[[TopicChange], None]) -> None:
        """Call `callback` after each change of a live topic, on the loop, once the view shows it."""
        self._callbacks.append(callback)

    def on_quota_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after `quotas` has changed, on the loop."""
        self._quota_callbacks.append(callback)

    def on_group_config_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the group's id after its settings in `group_configs` have changed, on the loop."""
        self._group_config_callbacks.append(callback)

    def on_broker_change(self, callback: Callable[[BrokerChange], None]) -> None:
        """Call `callback` after each change of a session or registration, on the loop, once the view shows it (and
        possibly more). Called before those of `on_change` for the same events."""
        self._broker_callbacks.append(callback)

    def on_progress(self, callback: Callable[[], None]) -> None:
        """Call `callback` once after each batch of events, whatever they were, after all other callbacks."""
        self._progress_callbacks.append(callback)

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback` once, on the loop, when changes cannot be followed any more; not when the view is stopped or
        the store closed."""
        self._failure_callbacks.append(callback)

    def exclude_broker(self, node_id: int) -> None:
        """Of a view that failed: that broker gave its session back, and nobody who asks here is to be sent there."""
        self.brokers.pop(node_id, None)

    def epoch_of(self, node_id: int) -> int:
        """The epoch of a broker's session; 0 where it has none."""
        broker = self.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    def may_lead(self, node_id: int) -> bool:
        """Whether a broker is there and neither draining nor fenced."""
        registration = self.registrations.get(node_id)
        return node_id in self.brokers and registration is not None and registration.state == ACTIVE

    async def reached(self, revision: int, scheduler: Scheduler) -> None:
        """Wait until the view shows everything up to `revision`. Raises what ended the watch, if it ended."""
        if self.revision >= revision:
            return
        if self.failure is not None:
            raise self.failure
        promise: Promise[None] = scheduler.promise()
        self._waits.append((revision, promise))
        timer = (
            scheduler.call_later(PROGRESS_WRITE_MS, self._schedule_progress_write, scheduler)
            if self._shared
            else None
        )
        try:
            await promise
        finally:
            if timer is not None:
                timer.cancel()

    def _schedule_progress_write(self, scheduler: Scheduler) -> None:
        if self._waits and self._store is not None:
            scheduler.spawn(self._write_progress(self._store, scheduler), name="nudge metadata")

    async def _write_progress(self, store: MetadataStore, scheduler: Scheduler) -> None:
        try:
            await store.transact([], [Put(self.keys.tick, metadata_store.encode({}, ""))])
        except Unavailable:  # it may have happened; if not, try again
            scheduler.call_later(PROGRESS_WRITE_MS, self._schedule_progress_write, scheduler)

    # Following

    async def _watch(self, store: MetadataStore, scheduler: Scheduler) -> None:
        try:
            while True:
                try:
                    await self._watch_until_closed(store)
                    break
                except (Unavailable, ConfigError):  # a store that lets nobody in may do so again
                    if not self._shared:
                        raise
                    await _after(WATCH_RETRY_MS, scheduler)
            self._end_waits(Unavailable("the metadata store was closed"))
        except Exception as error:
            known = (
                error
                if isinstance(error, MansioError)
                else StorageError(f"metadata not understood: {error!r}")
            )
            self._end_waits(known)
            for tell in self._failure_callbacks:
                tell(known)
            if known is not error or not self._failure_callbacks:  # who was told says what there is to say
                raise

    async def _watch_until_closed(self, store: MetadataStore) -> None:
        """Until the store closes."""
        while True:
            try:
                async for events in store.watch(self.keys.prefix, self.revision + 1):
                    self._apply(events)
                return
            except Compacted:
                self._relist(await store.list(self.keys.prefix))

    def _end_waits(self, error: Exception) -> None:
        self.failure = error
        waits, self._waits = self._waits, []
        for _, promise in waits:
            if not promise.done():
                promise.set_exception(error)

    def _apply(self, events: Iterable[Event]) -> None:
        touched: dict[str, None] = {}
        for event in events:
            self._apply_event(event, touched)
            self.revision = event.mod_revision
        self._publish(touched)

    def _relist(self, listing: Listing) -> None:
        kept = {entry.key for entry in listing.entries}
        touched: dict[str, None] = {}
        for key in [key for key in self._known_keys() if key not in kept]:
            self._apply_event(Event(key, None, 0, listing.revision), touched)
        for entry in listing.entries:
            self._apply_event(
                Event(entry.key, entry.value, entry.create_revision, entry.mod_revision), touched
            )
        self.revision = listing.revision
        self._publish(touched)

    def _known_keys(self) -> list[str]:
        topics = [self.keys.topic(name) for name in self._drafts]
        partitions = [
            f"{self.keys.partitions}{topic_id}/{index}"
            for topic_id, known in self._partitions.items()
            for index in known
        ]
        sessions = map(self.keys.session, self.brokers)
        registrations = map(self.keys.registration, self.registrations)
        controller = [] if self.controller is None else [self.keys.controller]
        groups = map(self.keys.group_config, self.group_configs)
        return [*topics, *partitions, *sessions, *registrations, *controller, *self.quotas, *groups]

    def _apply_event(self, event: Event, touched: dict[str, None]) -> None:
        """Note one change; the names of topics to look at again go to `touched`."""
        keys = self.keys
        document = None if event.value is None else metadata_store.decode(event.key, event.value)
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
                known[int(index)] = partition_of(document, event.mod_revision)
            elif known.pop(int(index), None) is not None and not known:
                del self._partitions[topic_id]
            if topic_id in self._names:
                touched[self._names[topic_id]] = None
        elif event.key.startswith(keys.brokers):
            self._apply_broker_event(event, document)
        elif event.key == keys.controller:
            self.controller = (
                None if document is None else ControllerState(document["broker"], event.create_revision)
            )
        elif event.key.startswith(keys.quotas):
            self._quotas_moved = True
            self.quotas.pop(event.key, None)
            if document is not None:
                self.quotas[event.key] = QuotaEntry(document, event.mod_revision)
        elif event.key.startswith(keys.group_configs):
            group_id = unquote(event.key.removeprefix(keys.group_configs))
            self._group_configs_moved[group_id] = None
            self.group_configs.pop(group_id, None)
            if document is not None:
                self.group_configs[group_id] = GroupConfigEntry(document["configs"], event.mod_revision)

    def _apply_broker_event(self, event: Event, document: dict[str, Any] | None) -> None:
        node, _, kind = event.key.removeprefix(self.keys.brokers).partition("/")
        node_id = int(node)
        before = self.brokers.get(node_id)
        after = before
        if kind == "session":
            after = None
            if document is not None:
                host, port, rack = document["host"], document["port"], document["rack"]
                after = BrokerState(node_id, host, port, rack, event.create_revision)
            if after is None:
                self.brokers.pop(node_id, None)
            else:
                self.brokers[node_id] = after
        elif kind == "reg":
            self.registrations.pop(node_id, None)
            if document is not None:
                self.registrations[node_id] = Registration(document["state"], event.mod_revision)
        if before is not None and after is not None and before.epoch != after.epoch:
            self._broker_changes += [
                BrokerChange(node_id, before, None),
                BrokerChange(node_id, None, after),
            ]
        else:
            self._broker_changes.append(BrokerChange(node_id, before, after))

    def _publish(self, touched: Iterable[str]) -> None:
        changes = [change for name in touched for change in self._rebuild_topic(name)]
        broker_changes, self._broker_changes = self._broker_changes, []
        for broker_change in broker_changes:
            for tell in self._broker_callbacks:
                tell(broker_change)
        for change in changes:
            for callback in self._callbacks:
                callback(change)
        if self._quotas_moved:
            self._quotas_moved = False
            for look_again in self._quota_callbacks:
                look_again()
        moved, self._group_configs_moved = self._group_configs_moved, {}
        for group_id in moved:
            for tell_of_group in self._group_config_callbacks:
                tell_of_group(group_id)
        for look in self._progress_callbacks:
            look()
        due = [promise for revision, promise in self._waits if revision <= self.revision]
        self._waits = [wait for wait in self._waits if wait[0] > self.revision]
        for promise in due:
            if not promise.done():
                promise.set_result(None)

    def _rebuild_topic(self, name: str) -> list[TopicChange]:
        """Put a topic's new object in the view. One that was deleted and made again has changed twice."""
        before = self.topics.pop(name, None)
        self.unfinished.pop(name, None)
        if before is not None:
            del self.topics_by_id[before.topic_id]
            self.partition_count -= len(before.partitions)
        draft = self._drafts.get(name)
        after = None
        if draft is not None:
            known = self._partitions.get(draft.document["uuid"], {})
            after = topic_of(name, draft.document, known, draft.mod_revision)
        if after is not None and after.state != LIVE:
            self.unfinished[name] = after
            after = None
        if after is not None:
            self.topics[name] = self.topics_by_id[after.topic_id] = after
            self.partition_count += len(after.partitions)
        if before is not None and after is not None and before.topic_id != after.topic_id:
            return [TopicChange(before, None), TopicChange(None, after)]
        return [TopicChange(before, after)] if before is not None or after is not None else []


async def _after(delay_ms: float, scheduler: Scheduler) -> None:
    promise: Promise[None] = scheduler.promise()

    def over() -> None:
        if not promise.done():
            promise.set_result(None)

    timer = scheduler.call_later(delay_ms, over)
    try:
        await promise
    finally:
        timer.cancel()
