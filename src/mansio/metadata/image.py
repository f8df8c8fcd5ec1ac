"""In-memory image of the cluster metadata: brokers, topics, partitions, configurations.

`MetadataImage` is the only copy of metadata in a broker; its values are those of `model`. Only a watch of the metadata
store changes it: a component that changes metadata writes to the store and awaits `wait_for_revision(revision)`.

If a value cannot be decoded (damaged, or written by a newer Mansio), the image fails, because without that value it
would be wrong. It applies no later events; `failure` is the error, and the callbacks of `on_failure` are called.

Invariants:
* A topic is in `topics` only while it is live; a topic that is being created or deleted is in `unfinished_topics`, with
  the partitions that it had when its key was written.
* A broker is in `brokers` only while it has a session. A single node has no session and no controller.
* Brokers that start at the same time on an empty store create only one cluster.
* The feature level never becomes lower than the one that was read.
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from mansio.config.topic_names import unified_name
from mansio.errors import ConcurrentChange, ConfigError, MansioError, StorageError, Unavailable
from mansio.metadata import metadata_store
from mansio.metadata.acls import decode_acl
from mansio.metadata.api_keys import NO_API_KEYS, decode_api_keys, user_of_api_keys
from mansio.metadata.delegation_tokens import decode_token
from mansio.metadata.feature_level import CURRENT_LEVEL, newer_content
from mansio.metadata.metadata_store import (
    Compare,
    Delete,
    Event,
    Keys,
    Put,
    RevisionCompacted,
    new_uuid,
    new_writer_id,
)
from mansio.metadata.model import (
    BROKER_ACTIVE,
    TOPIC_LIVE,
    BrokerChange,
    BrokerState,
    ConfigOverrides,
    ControllerState,
    InterBrokerListener,
    PartitionState,
    QuotaEntry,
    Registration,
    Topic,
    TopicChange,
    decode_partition,
    decode_registration,
    decode_session,
    decode_topic,
    default_host,
    host_of,
    missing_partition,
)
from mansio.metadata.sqs_access_keys import decode_sqs_access_key
from mansio.metadata.users import KNOWN_MECHANISMS, decode_credential, decode_server_secret, user_of_key
from mansio.ports import complete, complete_with_error
from mansio.state.broker_handshake import SECRET_BYTES, ClusterSecret
from mansio.tracebacks import copied, result_of, without_traceback
from mansio.wire.features import FIRST_LEVEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from mansio.metadata.api_keys import StoredApiKeys
    from mansio.metadata.metadata_store import Listing, MetadataStore, TransactionResult
    from mansio.metadata.sqs_access_keys import SqsAccessKey
    from mansio.ports import Promise, Random, Scheduler, Timer
    from mansio.state.authentication.api_keys import StoredApiKey
    from mansio.state.authentication.credentials import ScramCredential
    from mansio.state.authentication.delegation_tokens import DelegationToken
    from mansio.state.authorization.acls import Acl

PROGRESS_WRITE_MS: Final = 250
"""Time after which a broker that waits for a revision writes a key, so that the watch reports a newer revision."""
WATCH_RETRY_MS: Final = 250
EVENTS_PER_TURN: Final = 512
"""Number of events in a batch of the watch after which other work runs: the next batch may be there already."""
CREATE_ATTEMPTS_MAX: Final = 5

_Touched: TypeAlias = "dict[str, set[int] | None]"
"""Affected topics by name: the indexes of the affected partitions, or None if the key of the topic is affected."""


class _TopicDocument(NamedTuple):
    """The decoded value of one topic's key, without its partitions."""

    document: dict[str, Any]
    mod_revision: int


@dataclass(slots=True)
class MetadataImage:
    """In-memory image of the cluster metadata at `revision`. `load` creates it, `start` keeps it current.

    `failure` is the error that ended the watch, or None. `partition_count` is the number of partitions of live topics.
    """

    cluster_id: str
    keys: Keys
    inter_broker: InterBrokerListener = field(default_factory=InterBrokerListener)
    """The listener through which this broker reaches the others."""
    revision: int = 0
    brokers: dict[int, BrokerState] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    topics_by_id: dict[UUID, Topic] = field(default_factory=dict)
    unfinished_topics: dict[str, Topic] = field(default_factory=dict)
    quotas: dict[str, QuotaEntry] = field(default_factory=dict)
    group_configs: dict[str, ConfigOverrides] = field(default_factory=dict)
    broker_configs: dict[str, ConfigOverrides] = field(default_factory=dict)
    """Dynamic settings by node id in decimal digits; the empty name has those of all brokers."""
    registrations: dict[int, Registration] = field(default_factory=dict)
    ended_sessions: dict[int, int] = field(default_factory=dict)
    """Node ids of brokers whose session was ended early, and which may not know it before their lease ends; with the
    revision at which the session was ended."""
    controller: ControllerState | None = None
    feature_level: int = CURRENT_LEVEL
    """Feature level of the cluster (`metadata.feature_level`); a single node has that of this version."""
    feature_revision: int = 0
    """Revision of its key; 0 if there is none."""
    cluster_secret: ClusterSecret | None = field(default=None, repr=False)
    """Created by the first broker of a cluster; a single node has none."""
    users: dict[str, dict[str, ScramCredential]] = field(default_factory=dict, repr=False)
    """Credentials by user and name of the mechanism; a user without credentials does not exist."""
    api_keys: dict[str, StoredApiKeys] = field(default_factory=dict, repr=False)
    """API keys by user."""
    _api_keys_by_id: dict[str, StoredApiKey] = field(default_factory=dict, repr=False)
    acls: dict[str, Acl] = field(default_factory=dict)
    """Access control lists by key."""
    sqs_access_keys: dict[str, SqsAccessKey] = field(default_factory=dict, repr=False)
    """Access keys of SQS by id."""
    tokens: dict[str, DelegationToken] = field(default_factory=dict, repr=False)
    """Delegation tokens by id."""
    server_secret: bytes | None = field(default=None, repr=False)
    """Secret of authentication; None until a listener has authenticated clients."""
    partition_count: int = 0
    failure: Exception | None = None
    _topic_documents: dict[str, _TopicDocument] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # topic names by uuid
    _spellings: dict[str, set[str]] = field(default_factory=dict)
    """Topic names, live or unfinished, by their name with `_` for each `.`; names without both are left out."""
    _partitions: dict[str, dict[int, PartitionState]] = field(default_factory=dict)
    _callbacks: list[Callable[[TopicChange], None]] = field(default_factory=list)
    _quota_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _quotas_changed: bool = False
    _group_config_callbacks: list[Callable[[str], None]] = field(default_factory=list)
    _group_configs_changed: dict[str, None] = field(default_factory=dict)
    _user_callbacks: list[Callable[[str], None]] = field(default_factory=list)
    _users_changed: dict[str, None] = field(default_factory=dict)
    _acl_callbacks: list[Callable[[Acl, bool], None]] = field(default_factory=list)
    _broker_config_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _broker_configs_changed: bool = False
    _broker_callbacks: list[Callable[[BrokerChange], None]] = field(default_factory=list)
    _progress_callbacks: list[Callable[[], None]] = field(default_factory=list)
    _failure_callbacks: list[Callable[[Exception], None]] = field(default_factory=list)
    _broker_changes: list[BrokerChange] = field(default_factory=list)
    _waits: list[tuple[int, Promise[None]]] = field(default_factory=list)
    _watch_task: Timer | None = None
    _store: MetadataStore | None = None
    _shared: bool = False

    @classmethod
    async def load(
        cls,
        store: MetadataStore,
        cluster_id: str,
        random: Random,
        inter_broker: InterBrokerListener | None = None,
        *,
        has_feature_level: bool = False,
    ) -> MetadataImage:
        """Load the image of the cluster in `store`, or create the cluster.

        An empty `cluster_id` means the existing cluster, or a new one with a random id. Raises `ConfigError` if the
        store contains another cluster. `inter_broker`: the listener through which this broker reaches the others.
        `has_feature_level`: older versions may use the same store, as in a cluster. A new cluster gets the feature
        level of this version, and so does one in which documents exist that need it.
        """
        found = await find_or_create_cluster(store, cluster_id, random, has_feature_level=has_feature_level)
        state = cls(found, Keys(found), inter_broker or InterBrokerListener())
        if has_feature_level:
            state.feature_level = FIRST_LEVEL
        listing = await store.list(state.keys.prefix)
        state._apply_listing(listing)
        if state.feature_level < CURRENT_LEVEL and _needs_feature_level(listing):
            with contextlib.suppress(ConcurrentChange):  # another broker has written it
                await write_feature_level(store, state.keys, CURRENT_LEVEL, 0, [], random)
            state._apply_listing(await store.list(state.keys.prefix))
        return state

    def start(self, store: MetadataStore, scheduler: Scheduler, *, shared: bool = False) -> None:
        """Start to apply the changes of the store to the image.

        `shared`: other clusters may write to the store, and the store may be unavailable for a while; then the watch
        resumes at the last revision. The writes of other clusters increase the revision without an event for this
        cluster. So a broker that waits for a revision longer than `PROGRESS_WRITE_MS` writes a key of its own cluster.
        """
        self._store, self._shared, self.failure = store, shared, None
        self._watch_task = scheduler.spawn(self._watch(store, scheduler), name="watch metadata")

    def stop(self) -> None:
        """Stop applying changes; calls of `wait_for_revision` raise `Unavailable`."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            self._watch_task = self._store = None
        self._fail_waits(Unavailable("the broker is stopping"))

    def on_change(self, callback: Callable[[TopicChange], None]) -> None:
        """Call `callback` on the event loop for each change of a live topic, after the image contains the change."""
        self._callbacks.append(callback)

    def on_quota_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after `quotas` has changed."""
        self._quota_callbacks.append(callback)

    def on_group_config_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback` on the event loop with the id of each group whose settings have changed."""
        self._group_config_callbacks.append(callback)

    def on_broker_config_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after `broker_configs` has changed."""
        self._broker_config_callbacks.append(callback)

    @property
    def api_key_count(self) -> int:
        """Number of API keys of all users."""
        return len(self._api_keys_by_id)

    def api_keys_of(self, user: str) -> StoredApiKeys:
        """Return the API keys of a user."""
        return self.api_keys.get(user, NO_API_KEYS)

    def find_api_key(self, key_id: str) -> StoredApiKey | None:
        """Return the API key with this id, if there is one and its user exists."""
        found = self._api_keys_by_id.get(key_id)
        return found if found is not None and found.user in self.users else None

    def on_user_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback` on the event loop with the name of each user whose credentials, API keys, access keys or
        tokens have changed."""
        self._user_callbacks.append(callback)

    def on_acl_change(self, callback: Callable[[Acl, bool], None]) -> None:
        """Call `callback` on the event loop with each access control list that is added (True) or removed (False), at
        once: no other callback of the same batch of events is called before."""
        self._acl_callbacks.append(callback)

    def on_broker_change(self, callback: Callable[[BrokerChange], None]) -> None:
        """Call `callback` on the event loop for each change of a session or registration, after the image contains it.

        The image may contain later changes, too. The callbacks of `on_change` for the same events are called later.
        """
        self._broker_callbacks.append(callback)

    def on_progress(self, callback: Callable[[], None]) -> None:
        """Call `callback` once after each batch of events, after all other callbacks."""
        self._progress_callbacks.append(callback)

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Call `callback` once, on the event loop, if the image fails; not if it is stopped or the store is closed."""
        self._failure_callbacks.append(callback)

    def owned_keys(self, user: str) -> list[str]:
        """Return the keys in the store that belong to a user and are deleted with it: that of its API keys, also if it
        does not exist, then those of its access keys of SQS and of its delegation tokens."""
        keys = [each.key_id for each in self.sqs_access_keys.values() if each.user == user]
        tokens = [each.token_id for each in self.tokens.values() if each.user == user]
        return [
            self.keys.user_api_keys(user),
            *map(self.keys.sqs_access_key, keys),
            *map(self.keys.token, tokens),
        ]

    def owns_anything(self, user: str) -> bool:
        """Whether any key in the store belongs to a user, apart from that of its API keys."""
        return len(self.owned_keys(user)) > 1

    def exclude_broker(self, node_id: int) -> None:
        """Remove a broker from `brokers`. This broker calls it with its own id after its image has failed, so that its
        responses to clients do not contain it."""
        self.brokers.pop(node_id, None)

    def epoch_of(self, node_id: int) -> int:
        """Return the epoch of a broker's session; 0 without a session."""
        broker = self.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    def host_of(self, node_id: int) -> str:
        """Return the label of the host of a broker."""
        return host_of(node_id, self.brokers, self.registrations)

    def host_labels(self) -> dict[int, str]:
        """Return the labels of the hosts of all brokers that are not hosts of their own, by node id."""
        known = sorted({*self.registrations, *self.brokers})
        return {
            node_id: label for node_id in known if (label := self.host_of(node_id)) != default_host(node_id)
        }

    def may_lead(self, node_id: int) -> bool:
        """Whether a broker may lead partitions: it has a session, and its registration is active."""
        registration = self.registrations.get(node_id)
        return node_id in self.brokers and registration is not None and registration.state == BROKER_ACTIVE

    def count_replicas(self, node_id: int) -> int:
        """Return the number of replicas that a broker has of partitions of live and unfinished topics."""
        topics = (*self.topics.values(), *self.unfinished_topics.values())
        return sum(node_id in partition.replicas for topic in topics for partition in topic.partitions)

    def colliding_topics(self, name: str) -> list[Topic]:
        """Return the topics, live or unfinished, whose names differ from `name` in `.` and `_` only, sorted."""
        others = sorted(self._spellings.get(unified_name(name), set()) - {name})
        return [self.topics.get(other) or self.unfinished_topics[other] for other in others]

    async def wait_for_revision(self, revision: int, scheduler: Scheduler) -> None:
        """Wait until the image contains all changes up to `revision`. Raises the error that ended the watch."""
        if self.revision >= revision:
            return
        if self.failure is not None:
            raise copied(self.failure)
        promise: Promise[None] = scheduler.promise()
        self._waits.append((revision, promise))
        timer = (
            scheduler.call_later(PROGRESS_WRITE_MS, self._schedule_progress_write, scheduler)
            if self._shared
            else None
        )
        try:
            await result_of(promise)
        finally:
            if timer is not None:
                timer.cancel()

    async def catch_up(self, scheduler: Scheduler) -> None:
        """Wait until the image contains all changes that any broker had made before the call. It costs a write, because
        a read need not reach the newest revision. Raises `Unavailable`, and the errors of `wait_for_revision`."""
        if self._store is None:
            raise Unavailable("the metadata is not followed")
        written = await metadata_store.transact_with_retries(self._store, [], [self._progress()])
        await self.wait_for_revision(written.revision, scheduler)

    def _progress(self) -> Put:
        return Put(self.keys.progress, metadata_store.encode({}, ""))

    def _schedule_progress_write(self, scheduler: Scheduler) -> None:
        if self._waits and self._store is not None:
            scheduler.spawn(self._write_progress(self._store, scheduler), name="write metadata progress")

    async def _write_progress(self, store: MetadataStore, scheduler: Scheduler) -> None:
        try:
            await store.transact([], [self._progress()])
        except Unavailable:  # the outcome is unknown: retry
            scheduler.call_later(PROGRESS_WRITE_MS, self._schedule_progress_write, scheduler)

    # ------------------------------------------------------------------ watch

    async def _watch(self, store: MetadataStore, scheduler: Scheduler) -> None:
        try:
            while True:
                try:
                    await self._watch_until_closed(store, scheduler)
                    break
                except (Unavailable, ConfigError):  # access to the store may be restored
                    if not self._shared:
                        raise
                    await scheduler.sleep(WATCH_RETRY_MS)
            self._fail_waits(Unavailable("the metadata store was closed"))
        except Exception as error:
            known = (
                without_traceback(error)
                if isinstance(error, MansioError)
                else StorageError(f"metadata cannot be decoded: {error!r}")
            )
            self._fail_waits(known)
            for failed in self._failure_callbacks:
                failed(known)
            if known is not error or not self._failure_callbacks:  # callbacks log the failure
                raise

    async def _watch_until_closed(self, store: MetadataStore, scheduler: Scheduler) -> None:
        """Apply the events of the store until it is closed; list all keys again after `RevisionCompacted`."""
        while True:
            try:
                async for events in store.watch(self.keys.prefix, self.revision + 1):
                    self._apply(events)
                    if len(events) >= EVENTS_PER_TURN:  # more may be there already
                        await scheduler.sleep(0)
                return
            except RevisionCompacted:
                self._apply_listing(await store.list(self.keys.prefix))

    def _fail_waits(self, error: Exception) -> None:
        self.failure = copied(error)
        waits, self._waits = self._waits, []
        for _, promise in waits:
            complete_with_error(promise, copied(error))

    def _apply(self, events: Iterable[Event]) -> None:
        touched: _Touched = {}
        for event in events:
            self._apply_event(event, touched)
            self.revision = event.mod_revision
        self._call_callbacks(touched)

    def _apply_listing(self, listing: Listing) -> None:
        kept = {entry.key for entry in listing.entries}
        touched: _Touched = {}
        for key in [key for key in self._known_keys() if key not in kept]:
            self._apply_event(Event(key, None, 0, listing.revision), touched)
        for entry in listing.entries:
            self._apply_event(
                Event(entry.key, entry.value, entry.create_revision, entry.mod_revision), touched
            )
        self.revision = listing.revision
        self._call_callbacks(touched)

    def _known_keys(self) -> list[str]:
        topics = [self.keys.topic(name) for name in self._topic_documents]
        partitions = [
            f"{self.keys.partitions}{topic_id}/{index}"
            for topic_id, known in self._partitions.items()
            for index in known
        ]
        sessions = map(self.keys.session, self.brokers)
        registrations = map(self.keys.registration, self.registrations)
        ended_sessions = map(self.keys.ended_session, self.ended_sessions)
        controller = [] if self.controller is None else [self.keys.controller]
        groups = map(self.keys.group_config, self.group_configs)
        brokers = map(self.keys.broker_config, self.broker_configs)
        secret = [] if self.cluster_secret is None else [self.keys.secret]
        server_secret = [] if self.server_secret is None else [self.keys.server_secret]
        credentials = [
            self.keys.credential(user, mechanism) for user, known in self.users.items() for mechanism in known
        ]
        api_keys = map(self.keys.user_api_keys, self.api_keys)
        return [
            *topics,
            *api_keys,
            *partitions,
            *sessions,
            *registrations,
            *ended_sessions,
            *controller,
            *secret,
            *self.quotas,
            *groups,
            *brokers,
            *server_secret,
            *credentials,
            *self.acls,
            *map(self.keys.sqs_access_key, self.sqs_access_keys),
            *map(self.keys.token, self.tokens),
        ]

    def _apply_event(self, event: Event, touched: _Touched) -> None:
        """Apply one event and add the affected topics to `touched`."""
        keys = self.keys
        document = None if event.value is None else metadata_store.decode(event.key, event.value)
        if event.key.startswith(keys.topics):
            name = event.key.removeprefix(keys.topics)
            touched[name] = None
            if (draft := self._topic_documents.pop(name, None)) is not None:
                self._names.pop(draft.document["uuid"], None)
            if document is not None:
                self._topic_documents[name] = _TopicDocument(document, event.mod_revision)
                self._names[document["uuid"]] = name
            self._index_spelling(name, exists=document is not None)
        elif event.key.startswith(keys.partitions):
            topic_id, _, index = event.key.removeprefix(keys.partitions).partition("/")
            known = self._partitions.setdefault(topic_id, {})
            if document is not None:
                known[int(index)] = decode_partition(document, event.mod_revision)
            elif known.pop(int(index), None) is not None and not known:
                del self._partitions[topic_id]
            if topic_id in self._names:
                indexes = touched.setdefault(self._names[topic_id], set())
                if indexes is not None:
                    indexes.add(int(index))
        elif event.key.startswith(keys.brokers):
            self._apply_broker_event(event, document)
        elif event.key == keys.controller:
            self.controller = (
                None if document is None else ControllerState(document["broker"], event.create_revision)
            )
        elif event.key == keys.feature_level:
            if document is not None:
                self.feature_level, self.feature_revision = int(document["level"]), event.mod_revision
        elif event.key == keys.secret:
            self.cluster_secret = None if document is None else _decode_secret(event.key, document)
        elif event.key.startswith(keys.quotas):
            self._quotas_changed = True
            self.quotas.pop(event.key, None)
            if document is not None:
                self.quotas[event.key] = QuotaEntry(document, event.mod_revision)
        elif event.key.startswith(keys.group_configs):
            group_id = unquote(event.key.removeprefix(keys.group_configs))
            self._group_configs_changed[group_id] = None
            self.group_configs.pop(group_id, None)
            if document is not None:
                self.group_configs[group_id] = ConfigOverrides(document["configs"], event.mod_revision)
        elif event.key.startswith(keys.users):
            self._apply_credential_event(event, document)
        elif event.key.startswith(keys.api_keys):
            self._apply_api_keys_event(event, document)
        elif event.key.startswith(keys.acls):
            self._apply_acl_event(event, document)
        elif event.key.startswith(keys.sqs_access_keys):
            self._apply_sqs_access_key_event(event, document)
        elif event.key.startswith(keys.tokens):
            self._apply_token_event(event, document)
        elif event.key == keys.server_secret:
            self.server_secret = None if document is None else decode_server_secret(event.key, document)
        elif event.key.startswith(keys.broker_configs):
            name = event.key.removeprefix(keys.broker_configs)
            name = "" if name == metadata_store.DEFAULT_BROKER else name
            self._broker_configs_changed = True
            self.broker_configs.pop(name, None)
            if document is not None:
                self.broker_configs[name] = ConfigOverrides(document["configs"], event.mod_revision)

    def _index_spelling(self, name: str, *, exists: bool) -> None:
        unified = unified_name(name)
        if "_" not in unified:
            return
        if exists:
            self._spellings.setdefault(unified, set()).add(name)
        elif (known := self._spellings.get(unified)) is not None:
            known.discard(name)
            if not known:
                del self._spellings[unified]

    def _apply_credential_event(self, event: Event, document: dict[str, Any] | None) -> None:
        user, mechanism = user_of_key(self.keys, event.key)
        if mechanism not in KNOWN_MECHANISMS:  # of a later version, in the middle of an upgrade
            return
        self._users_changed[user] = None
        known = self.users.setdefault(user, {})
        if document is not None:
            known[mechanism] = decode_credential(event.key, mechanism, document, event.mod_revision)
        else:
            known.pop(mechanism, None)
        if not known:
            del self.users[user]

    def _apply_api_keys_event(self, event: Event, document: dict[str, Any] | None) -> None:
        user = user_of_api_keys(self.keys, event.key)
        self._users_changed[user] = None
        for key_id in self.api_keys.pop(user, NO_API_KEYS).keys:
            self._api_keys_by_id.pop(key_id, None)
        if document is not None:
            self.api_keys[user] = decode_api_keys(event.key, user, document, event.mod_revision)
            self._api_keys_by_id.update(self.api_keys[user].keys)

    def _apply_acl_event(self, event: Event, document: dict[str, Any] | None) -> None:
        before = self.acls.pop(event.key, None)
        after = None if document is None else decode_acl(event.key, document)
        if after is not None:
            self.acls[event.key] = after
        for acl, exists in ((before, False), (after, True)):
            if acl is not None and before != after:
                for on_acl_change in self._acl_callbacks:
                    on_acl_change(acl, exists)

    def _apply_sqs_access_key_event(self, event: Event, document: dict[str, Any] | None) -> None:
        key_id = event.key.removeprefix(self.keys.sqs_access_keys)
        before = self.sqs_access_keys.pop(key_id, None)
        if before is not None:
            self._users_changed[before.user] = None
        if document is not None:
            after = decode_sqs_access_key(event.key, key_id, document, event.mod_revision)
            self.sqs_access_keys[key_id] = after
            self._users_changed[after.user] = None

    def _apply_token_event(self, event: Event, document: dict[str, Any] | None) -> None:
        token_id = event.key.removeprefix(self.keys.tokens)
        before = self.tokens.pop(token_id, None)
        after = None if document is None else decode_token(event.key, token_id, document, event.mod_revision)
        if after is not None:
            self.tokens[token_id] = after
        self._users_changed.update((each.user, None) for each in (before, after) if each is not None)

    def _apply_broker_event(self, event: Event, document: dict[str, Any] | None) -> None:
        node, _, kind = event.key.removeprefix(self.keys.brokers).partition("/")
        node_id = int(node)
        before = self.brokers.get(node_id)
        after = before
        if kind == "session":
            after = None
            if document is not None:
                after = decode_session(node_id, document, event.create_revision, self.inter_broker)
            if after is None:
                self.brokers.pop(node_id, None)
            else:
                self.brokers[node_id] = after
        elif kind == "reg":
            self.registrations.pop(node_id, None)
            if document is not None:
                self.registrations[node_id] = decode_registration(document, event.mod_revision)
        elif kind == "ended":
            self.ended_sessions.pop(node_id, None)
            if document is not None:
                self.ended_sessions[node_id] = event.mod_revision
        if before is not None and after is not None and before.epoch != after.epoch:
            self._broker_changes += [
                BrokerChange(node_id, before, None),
                BrokerChange(node_id, None, after),
            ]
        else:
            self._broker_changes.append(BrokerChange(node_id, before, after))

    def _call_callbacks(self, touched: _Touched) -> None:
        changes: list[TopicChange] = []
        for name, indexes in touched.items():
            if indexes is None:
                changes += self._rebuild_topic(name)
            elif (before := self.topics.get(name)) is not None:
                changes.append(self._replace_partitions(before, indexes))
        broker_changes, self._broker_changes = self._broker_changes, []
        for broker_change in broker_changes:
            for on_broker_change in self._broker_callbacks:
                on_broker_change(broker_change)
        for change in changes:
            for callback in self._callbacks:
                callback(change)
        if self._quotas_changed:
            self._quotas_changed = False
            for on_quota_change in self._quota_callbacks:
                on_quota_change()
        if self._broker_configs_changed:
            self._broker_configs_changed = False
            for on_broker_config_change in self._broker_config_callbacks:
                on_broker_config_change()
        changed_groups, self._group_configs_changed = self._group_configs_changed, {}
        for group_id in changed_groups:
            for on_group_config_change in self._group_config_callbacks:
                on_group_config_change(group_id)
        changed_users, self._users_changed = self._users_changed, {}
        for user in changed_users:
            for on_user_change in self._user_callbacks:
                on_user_change(user)
        for on_progress in self._progress_callbacks:
            on_progress()
        due = [promise for revision, promise in self._waits if revision <= self.revision]
        self._waits = [wait for wait in self._waits if wait[0] > self.revision]
        for promise in due:
            complete(promise, None)

    def _replace_partitions(self, before: Topic, indexes: Iterable[int]) -> TopicChange:
        """Replace the `Topic` object of a live topic of which only partitions have changed. Its key changes when it
        gets more partitions: those that are there already are left out."""
        known = self._partitions.get(self._topic_documents[before.name].document["uuid"], {})
        changed = sorted(index for index in indexes if index < len(before.partitions))
        partitions = list(before.partitions)
        for index in changed:
            if (state := known.get(index)) is None:
                raise missing_partition(before.name, index)
            partitions[index] = state
        after = replace(before, partitions=tuple(partitions))
        self.topics[before.name] = self.topics_by_id[after.topic_id] = after
        return TopicChange(before, after, changed)

    def _rebuild_topic(self, name: str) -> list[TopicChange]:
        """Replace the `Topic` object of a topic. A topic that was deleted and created again causes two changes."""
        before = self.topics.pop(name, None)
        self.unfinished_topics.pop(name, None)
        if before is not None:
            del self.topics_by_id[before.topic_id]
            self.partition_count -= len(before.partitions)
        draft = self._topic_documents.get(name)
        after = None
        if draft is not None:
            known = self._partitions.get(draft.document["uuid"], {})
            after = decode_topic(name, draft.document, known, draft.mod_revision)
        if after is not None and after.state != TOPIC_LIVE:
            self.unfinished_topics[name] = after
            after = None
        if after is not None:
            self.topics[name] = self.topics_by_id[after.topic_id] = after
            self.partition_count += len(after.partitions)
        if before is not None and after is not None and before.topic_id != after.topic_id:
            return [TopicChange(before, None), TopicChange(None, after)]
        return [TopicChange(before, after)] if before is not None or after is not None else []


async def write_overrides(
    store: MetadataStore,
    state: MetadataImage,
    key: str,
    revision: int,
    configs: Mapping[str, str],
    *,
    scheduler: Scheduler,
    random: Random,
) -> bool:
    """Replace the settings stored under `key`, or delete the key if `configs` is empty.

    Returns False, without effect, if the key has changed after `revision` (0: it did not exist). On return `state`
    contains the change. Raises `StorageError`.
    """
    guard = [Compare(key, mod_revision=revision)]
    if configs:
        writer = new_writer_id(random)
        put = Put(key, metadata_store.encode({"configs": configs}, writer))
        done = await metadata_store.transact_resolving_ambiguity(store, guard, [put], writer)
    else:
        done = await store.transact(guard, [Delete(key)])
    await state.wait_for_revision(done.revision, scheduler)
    return done.succeeded


async def create_cluster_secret(store: MetadataStore, keys: Keys, random: Random) -> None:
    """Store a new random cluster secret, unless the cluster has one. Raises `Unavailable`."""
    document = {"secret": random.bytes(SECRET_BYTES).hex()}
    put = Put(keys.secret, metadata_store.encode(document, new_writer_id(random)))
    await metadata_store.transact_with_retries(store, [Compare(keys.secret, create_revision=0)], [put])


def _decode_secret(key: str, document: dict[str, Any]) -> ClusterSecret:
    """Decode the cluster secret. Raises `StorageError`; its message and causes do not contain the value."""
    try:
        return ClusterSecret(bytes.fromhex(document["secret"]))
    except (KeyError, TypeError, ValueError):
        pass
    raise StorageError(f"metadata {key} is damaged")


async def write_feature_level(
    store: MetadataStore, keys: Keys, level: int, revision: int, guards: Sequence[Compare], random: Random
) -> TransactionResult:
    """Store the feature level of a cluster, unless its key has changed after `revision` (0: it did not exist), or
    another condition is not satisfied. Raises `Unavailable`, `ConcurrentChange`."""
    writer = new_writer_id(random)
    compares = [Compare(keys.feature_level, mod_revision=revision), *guards]
    puts = [feature_level_put(keys, level, writer)]
    return await metadata_store.transact_resolving_ambiguity(store, compares, puts, writer)


def feature_level_put(keys: Keys, level: int, writer: str) -> Put:
    """Return what stores the feature level of a cluster."""
    return Put(keys.feature_level, metadata_store.encode({"level": level}, writer, schema=level))


def _needs_feature_level(listing: Listing) -> bool:
    """Return whether a cluster has documents that need the level of this version: a development version has written
    them without one."""
    return any(newer_content(Put(entry.key, entry.value)) is not None for entry in listing.entries)


async def find_or_create_cluster(
    store: MetadataStore, wanted: str, random: Random, *, has_feature_level: bool = False
) -> str:
    """Find the cluster with the id `wanted` in the store, or create it; returns its id.

    If `wanted` is empty, the existing cluster is found, or one with a random id is created. Raises `ConfigError` if the
    store contains another cluster, `Unavailable`. `has_feature_level`: see `MetadataImage.load`.
    """
    for _ in range(CREATE_ATTEMPTS_MAX):
        found = metadata_store.cluster_ids(await store.list(metadata_store.KEY_ROOT))
        if wanted in found:
            return wanted
        if found and not wanted and len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"cluster_id: {wanted!r} is not the cluster in this store, {', '.join(found)}")
        cluster_id, writer = wanted or new_cluster_id(random), new_writer_id(random)
        keys = (metadata_store.FIRST_CLUSTER_KEY, Keys(cluster_id).format)
        value = metadata_store.encode({"cluster_id": cluster_id, "incarnation": 0}, writer)
        compares = [Compare(key, create_revision=0) for key in keys]
        puts = [Put(key, value) for key in keys]
        if has_feature_level:
            puts.append(feature_level_put(Keys(cluster_id), CURRENT_LEVEL, writer))
        try:
            done = await metadata_store.transact_resolving_ambiguity(store, compares, puts, writer)
        except ConcurrentChange:
            continue  # created by another broker while the response was lost: the next attempt finds it
        if done.succeeded:
            return cluster_id
    claim = await store.get(metadata_store.FIRST_CLUSTER_KEY)
    if claim is not None and "import" in (document := metadata_store.decode(claim.key, claim.value)):
        raise Unavailable(
            f"a single node is being imported as cluster {document['cluster_id']}: continue that import, or, if it was "
            f"given up, delete the key {claim.key} in etcd"
        )
    raise Unavailable("other brokers are creating the cluster")


def new_cluster_id(random: Random) -> str:
    """Return a random cluster id in Kafka's format: a UUID as 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(new_uuid(random).bytes).rstrip(b"=").decode()
