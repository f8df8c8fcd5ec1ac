"""Broker lifecycle in a cluster: registration, loss of the session, draining and shutdown of this broker.

A broker registers in these steps. It waits until no session exists under its node id: a session is never taken over,
because two processes with the same node id must not both act as that broker. It leaves the in-sync sets of partitions
whose log is lost. Then it writes its session key, with a lease, and its registration key. After a session has ended the
broker registers a new one with a new epoch, unless the metadata image has failed.

Another broker may end the session early, and the metadata image may be late: so the broker also reads its session key
from time to time. Then it ends the lease, because the next leaders of its partitions wait for that
(`metadata.hand_over`).

Invariant: `session` is the session that this process has registered, or None; `Session.is_valid` decides whether the
broker may act with it. Another component renews the lease of `session_to_renew`, and calls `end_session` if it expired.

All methods are called on the event loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConcurrentChange, ConfigError, MansioError, Unavailable
from mansio.logs import fields
from mansio.metadata import metadata_store, transactions
from mansio.metadata.cluster_view import ClusterView, PartitionChange
from mansio.metadata.controller_plan import transferable_leaderships, without_replica
from mansio.metadata.feature_level import SUPPORTED
from mansio.metadata.image import create_cluster_secret
from mansio.metadata.metadata_store import Compare, Put, new_writer_id
from mansio.metadata.model import BROKER_ACTIVE, BROKER_DRAINING, registration_document, session_document
from mansio.metadata.session import Session
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from uuid import UUID

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import Leases, MetadataStore
    from mansio.metadata.model import BrokerChange, BrokerEndpoint
    from mansio.ports import Clock, Random, Scheduler

logger = logging.getLogger(__name__)

RETRY_INTERVAL_MS: Final = 250
WARNING_INTERVAL_S: Final = 10.0
CHECK_FRACTION: Final = 1 / 3
"""Interval at which a broker reads its session key, as a fraction of the time of a lease."""


class _OtherSession(NamedTuple):
    """A session of another process under this node id; `since` is the time at which it was first seen."""

    run: str
    host: str
    port: int
    since: float


class BrokerLifecycle:
    """Lifecycle of one broker. The owner calls `register` first; at the end `transfer_leaderships`, then `leave`.

    Meanwhile the owner renews the lease of `session_to_renew`.
    """

    def __init__(
        self,
        *,
        store: MetadataStore,
        leases: Leases,
        state: MetadataImage,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
        node_id: int,
        ttl_s: float,
        endpoints: Mapping[str, BrokerEndpoint],
        rack: str | None,
        host_label: str = "",
        lost_logs: Callable[[], Iterable[tuple[UUID, int]]] = tuple,
    ) -> None:
        """`endpoints` are advertised to clients and other brokers, by name of the listener; one is that of the image's
        inter-broker listener. `ttl_s` is the duration of a lease. `host_label`: empty if the broker is a host of its
        own.

        `lost_logs` is called before each registration. It returns the partitions (topic id, index) whose local log may
        lack records that this broker acknowledged.
        """
        self._store = store
        self._leases = leases
        self._state = state
        self._scheduler = scheduler
        self._clock = clock
        self._random = random
        self._node_id = node_id
        self._ttl_s = ttl_s
        self._document = {
            **session_document(endpoints, state.inter_broker.name, rack, host_label),
            "run": new_writer_id(random),
        }
        self._host_label = host_label
        self._lost_logs = lost_logs
        self._callbacks: list[Callable[[Session | None], None]] = []
        self._is_leaving = False
        self._warned_at = float("-inf")
        self._other_session: _OtherSession | None = None
        self.sessions_lost = 0
        """Number of sessions that ended unintentionally."""
        self.session: Session | None = None
        self.session_to_renew: Session | None = None
        state.on_broker_change(self._handle_broker_change)

    @property
    def epoch(self) -> int:
        """The broker epoch; 0 while there is no session."""
        return 0 if self.session is None else self.session.epoch

    def is_session_valid(self) -> bool:
        """Whether this broker may act with its session now: acknowledge, decide, change metadata."""
        return self.session is not None and self.session.is_valid(self._clock.monotonic())

    def on_session(self, callback: Callable[[Session | None], None]) -> None:
        """Call `callback` on the loop with each new session, and with None when the session has ended."""
        self._callbacks.append(callback)

    # ------------------------------------------------------------------ registration

    async def register(self, other_session_s_max: float | None = None) -> Session:
        """Register this broker; returns the session when the metadata image contains it.

        Retries while the store is unavailable and while another session exists under this node id, and logs a warning
        every ten seconds. `other_session_s_max`: raise `ConfigError` when the same other session has existed for this
        time while the store was available, because another process renews it. None: wait without a limit.
        """
        while True:
            if self._state.failure is not None:
                raise copied(self._state.failure)
            self._check_other_session(other_session_s_max)
            try:
                session = await self._register()
            except Unavailable as error:
                self._other_session = None
                if self.session is not None:  # registered, but the image has failed
                    raise
                self._warn("not registered yet", reason=error.message)
                session = None
            if session is not None:
                return session
            if self._is_leaving:
                raise Unavailable("the broker is stopping")
            await self._scheduler.sleep(RETRY_INTERVAL_MS)

    async def _register(self) -> Session | None:
        key = self._state.keys.session(self._node_id)
        if (entry := await self._store.get(key)) is not None:
            other = metadata_store.decode(key, entry.value)
            if self._other_session is None or self._other_session.run != other["run"]:
                self._other_session = _OtherSession(
                    other["run"], other["host"], other["port"], self._clock.monotonic()
                )
            self._warn("another session under this node id", host=other["host"], port=other["port"])
            return None
        self._other_session = None
        if self._state.cluster_secret is None:
            await create_cluster_secret(self._store, self._state.keys, self._random)
        await self._leave_isrs()  # after this the image contains the secret
        sent_at = self._clock.monotonic()
        session = Session(await self._leases.grant(self._ttl_s), self._ttl_s, sent_at)
        self.session_to_renew = session
        try:
            epoch = await self._put_session(session)
        except MansioError:
            await self._revoke_lease(session)
            raise
        if epoch == 0 or session.has_ended or self._is_leaving:
            await self._revoke_lease(session)
            return None
        session.epoch = epoch
        self.session = session
        logger.info("broker_registered", extra=fields(node=self._node_id, epoch=epoch, ttl_s=self._ttl_s))
        for callback in self._callbacks:
            callback(session)
        self._scheduler.spawn(self._check_key(session), name="check the session")
        await self._state.wait_for_revision(epoch, self._scheduler)
        return session

    async def _check_key(self, session: Session) -> None:
        """End a session whose key does not exist any more."""
        key = self._state.keys.session(self._node_id)
        while True:
            await self._scheduler.sleep(CHECK_FRACTION * self._ttl_s * 1000)
            if session is not self.session:
                return
            try:
                entry = await self._store.get(key)
            except MansioError:
                continue
            if entry is None or entry.create_revision != session.epoch:
                self.end_session(session)

    def _check_other_session(self, s_max: float | None) -> None:
        other = self._other_session
        if s_max is not None and other is not None and self._clock.monotonic() - other.since >= s_max:
            raise ConfigError(
                f"node_id: broker {self._node_id} is already running at {other.host}:{other.port}; each broker of a "
                f"cluster needs its own node_id"
            )

    async def _put_session(self, session: Session) -> int:
        """Write the session and registration keys; returns the broker epoch, or 0 if another process was first."""
        keys, writer = self._state.keys, new_writer_id(self._random)
        registration = keys.registration(self._node_id)
        found = await self._store.get(registration)
        key = keys.session(self._node_id)
        compares = [
            Compare(key, create_revision=0),
            Compare(registration, mod_revision=0 if found is None else found.mod_revision),
        ]
        puts = [
            Put(
                key,
                metadata_store.encode({**self._document, "lease": session.lease}, writer),
                session.lease,
            ),
            Put(registration, self._registration_value(BROKER_ACTIVE, writer)),
        ]
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, puts, writer)
        return done.revision if done.succeeded else 0

    def _registration_value(self, state: str, writer: str) -> bytes:
        return metadata_store.encode(registration_document(state, SUPPORTED, self._host_label), writer)

    async def _leave_isrs(self) -> None:
        """Leave the in-sync sets of partitions whose log is lost.

        As long as this broker has no session, no leader adds it to an in-sync set again.
        """
        listing = await self._store.list(self._state.keys.format)
        await self._state.wait_for_revision(listing.revision, self._scheduler)
        left = [change for lost in self._lost_logs() if (change := self._isr_removal(*lost, 0)) is not None]
        for batch in transactions.split_into_transactions(
            left, self._store.operations_max, transactions.BATCH_CHANGES_MAX
        ):
            done = await transactions.commit_changes(self._store, self._state.keys, batch, None, self._random)
            if not done.succeeded:
                raise ConcurrentChange("partitions with a lost log were changed concurrently")
        if left:
            logger.warning("isr_left_log_lost", extra=fields(partitions=len(left)))

    def _isr_removal(self, topic_id: UUID, index: int, epoch: int) -> PartitionChange | None:
        topic = self._state.topics_by_id.get(topic_id)
        if topic is None or index >= len(topic.partitions):
            return None
        before = topic.partitions[index]
        if self._node_id not in before.isr and self._node_id != before.leader:
            return None
        after = without_replica(before, self._node_id)
        return PartitionChange(topic_id, index, before, after, "log is lost", {self._node_id: epoch})

    async def resign(self, partitions: Iterable[tuple[UUID, int]]) -> int:
        """Give up leadership and in-sync membership of partitions (topic id, index) whose log failed at run time.

        Partitions without another in-sync replica are skipped; for the others the controller elects a new leader.
        Returns the number of partitions of which this broker is no longer a leader or in-sync replica. Raises
        `Unavailable`.
        """
        session = self.session
        if session is None:
            return 0
        found = [self._isr_removal(topic_id, index, session.epoch) for topic_id, index in partitions]
        left = [one for one in found if one is not None and one.after.isr]
        guard = Compare(self._state.keys.session(self._node_id), create_revision=session.epoch)
        for batch in transactions.split_into_transactions(
            left, self._store.operations_max, transactions.BATCH_CHANGES_MAX
        ):
            done = await transactions.commit_changes(
                self._store, self._state.keys, batch, guard, self._random
            )
            if not done.succeeded:
                raise ConcurrentChange("partitions with a failed log were changed concurrently")
        if left:
            logger.warning("partitions_resigned_log_failed", extra=fields(partitions=len(left)))
        return len(left)

    # ------------------------------------------------------------------ loss of the session

    def end_session(self, session: Session) -> None:
        """Handle the end of a session's lease, and register again. If it is not the current session, only mark it."""
        session.end()
        if session is not self.session:
            return
        self.session = self.session_to_renew = None
        self.sessions_lost += 1
        logger.warning("session_lost", extra=fields(node=self._node_id, epoch=session.epoch))
        for callback in self._callbacks:
            callback(None)
        if not self._is_leaving:
            self._scheduler.spawn(self._register_again(session), name="register again")

    async def _register_again(self, lost: Session) -> None:
        """Register again after a lost session. Retries after any error until the broker is stopped."""
        await self._revoke_lease(lost)
        while not self._is_leaving:
            try:
                await self.register()
            except Unavailable:  # the broker is stopping, or is registered and its image has failed
                return
            except MansioError as error:
                self._warn("not registered yet", reason=error.message)
                await self._scheduler.sleep(RETRY_INTERVAL_MS)
            else:
                return

    def _handle_broker_change(self, change: BrokerChange) -> None:
        session = self.session
        if session is None or change.node_id != self._node_id or change.before is None:
            return
        if change.after is None and change.before.epoch == session.epoch:
            self.end_session(session)

    # ------------------------------------------------------------------ draining and shutdown

    async def transfer_leaderships(self, within_ms: float) -> int:
        """Start to drain, and wait until other brokers lead all partitions that they can lead.

        Waits at most `within_ms`, plus the time of one transaction; the broker continues to serve requests. Returns the
        number of partitions that this broker still leads although another broker could; 0 on success.
        """
        session = self.session
        if session is None:
            return 0
        deadline = self._clock.monotonic() + within_ms / 1000
        try:
            await self._drain(session)
            while (left := self._transferable()) and session is self.session:
                if (remaining_s := deadline - self._clock.monotonic()) <= 0:
                    logger.warning("leadership_transfer_timed_out", extra=fields(partitions=left))
                    return left
                await self._scheduler.sleep(min(remaining_s * 1000, RETRY_INTERVAL_MS / 10))
        except MansioError as error:
            logger.warning("leadership_transfer_failed", extra=fields(reason=error.message))
        return self._transferable()

    async def announce_shutdown(self) -> None:
        """Start to drain without waiting, so that the controller elects new leaders as soon as the session ends.

        If the announcement fails, the controller waits for the time of a lease.
        """
        try:
            if self.session is not None:
                await self._drain(self.session)
        except MansioError as error:
            logger.warning("shutdown_not_announced", extra=fields(reason=error.message))

    async def _drain(self, session: Session) -> None:
        keys, writer = self._state.keys, new_writer_id(self._random)
        key = keys.registration(self._node_id)
        entry = await self._store.get(key)
        compares = [
            Compare(key, mod_revision=0 if entry is None else entry.mod_revision),
            Compare(keys.session(self._node_id), create_revision=session.epoch),
        ]
        put = Put(key, self._registration_value(BROKER_DRAINING, writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        if not done.succeeded:
            raise ConcurrentChange("the registration was changed concurrently")

    def _transferable(self) -> int:
        """Return the number of partitions that this broker leads although another broker could lead them.

        Until the image contains the draining state, it is the number of all partitions that it leads, at least 1.
        """
        state = self._state
        registration = state.registrations.get(self._node_id)
        if registration is None or registration.state != BROKER_DRAINING:
            return max(
                1,
                sum(
                    one.leader == self._node_id for topic in state.topics.values() for one in topic.partitions
                ),
            )
        view = ClusterView(state.brokers, state.registrations, state.topics, state.unfinished_topics)
        return transferable_leaderships(view, self._node_id)

    async def leave(self) -> None:
        """End the session; the broker must not acknowledge anything after this call.

        If the store is unavailable, the session ends when its lease expires.
        """
        self._is_leaving = True
        session = self.session
        self.session = None
        if session is not None:
            session.end()
            for callback in self._callbacks:
                callback(None)
            await self._revoke_lease(session)

    async def _revoke_lease(self, session: Session) -> None:
        session.end()
        if self.session_to_renew is session:
            self.session_to_renew = None
        try:
            await self._leases.revoke(session.lease)
        except Unavailable as error:
            logger.warning("session_lease_not_revoked", extra=fields(reason=error.message))

    def _warn(self, event: str, **known: Any) -> None:
        now = self._clock.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            logger.warning(event, extra=fields(node=self._node_id, **known))
