"""Life cycle of this broker in the cluster: registration, loss of the session, draining and shutdown.

Writes the session and registration keys of the broker, in this order: wait until no session exists under this node id
(a session is never taken over: two processes with the same node id must not both act as that broker); leave the in-sync
sets of partitions whose log is lost; only then write the session, with a lease, and the registration. A session that
ended is followed by one with a new epoch: nothing continues in the old one. After the metadata image has failed
there is no further session.

Invariant: `session` is None or the last one that this process registered; `Session.is_valid` decides whether the broker
may act with it. Another component keeps the lease alive (`kept` is the session to keep) and reports its end (`lost`).

All methods are to be called on the broker's loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import ConcurrentChange, ConfigError, MansioError, Unavailable
from mansio.logs import fields
from mansio.metadata import metadata_store, transactions
from mansio.metadata.controller.controller_plan import (
    ClusterView,
    PartitionChange,
    transferable_leaderships,
    without_replica,
)
from mansio.metadata.image import create_cluster_secret
from mansio.metadata.metadata_store import Compare, Put, new_writer_id
from mansio.metadata.model import ACTIVE, DRAINING
from mansio.metadata.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import Leases, MetadataStore
    from mansio.metadata.model import BrokerChange
    from mansio.ports import Clock, Random, Scheduler

logger = logging.getLogger(__name__)

RETRY_MS: Final = 250
WARNING_INTERVAL_S: Final = 10.0


class _OtherSession(NamedTuple):
    """Another session under this node id, and the time at which it was first seen."""

    run: str
    host: str
    port: int
    since: float


class BrokerLifecycle:
    """Call `register`, keep the lease of `kept` alive; at the end `transfer_leaderships`, then `leave`."""

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
        host: str,
        port: int,
        rack: str | None,
        lost_logs: Callable[[], Iterable[tuple[UUID, int]]] = tuple,
    ) -> None:
        """`host` and `port` are advertised to clients and other brokers. `lost_logs`: the partitions (topic id, index)
        whose local log may lack records that this broker acknowledged; called before each registration."""
        self._store = store
        self._leases = leases
        self._state = state
        self._scheduler = scheduler
        self._clock = clock
        self._random = random
        self._node_id = node_id
        self._ttl_s = ttl_s
        self._address = {"host": host, "port": port, "rack": rack, "run": new_writer_id(random)}
        self._lost_logs = lost_logs
        self._callbacks: list[Callable[[Session | None], None]] = []
        self._leaving = False
        self._warned_at = float("-inf")
        self._other: _OtherSession | None = None
        self.sessions_lost = 0
        """Number of sessions that ended unintentionally."""
        self.session: Session | None = None
        self.kept: Session | None = None
        state.on_broker_change(self._broker_changed)

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

    async def register(self, other_s_max: float | None = None) -> Session:
        """Return when this broker is registered and its image contains that. Retries while the store is unavailable and
        while another session exists under this node id; logs a warning every ten seconds.

        `other_s_max`: raise `ConfigError` when the same other session has existed for this time while the store was
        available: another process keeps it alive. None: wait without a limit."""
        while True:
            if self._state.failure is not None:
                raise self._state.failure
            self._refuse_other(other_s_max)
            try:
                session = await self._register()
            except Unavailable as error:
                self._other = None
                if self.session is not None:  # registered, but the image has failed
                    raise
                self._warn("not registered yet", reason=error.message)
                session = None
            if session is not None:
                return session
            if self._leaving:
                raise Unavailable("the broker is stopping")
            await self._scheduler.sleep(RETRY_MS)

    async def _register(self) -> Session | None:
        key = self._state.keys.session(self._node_id)
        if (entry := await self._store.get(key)) is not None:
            other = metadata_store.decode(key, entry.value)
            if self._other is None or self._other.run != other["run"]:
                self._other = _OtherSession(
                    other["run"], other["host"], other["port"], self._clock.monotonic()
                )
            self._warn("another session under this node id", host=other["host"], port=other["port"])
            return None
        self._other = None
        if self._state.cluster_secret is None:
            await create_cluster_secret(self._store, self._state.keys, self._random)
        await self._leave_isrs()  # after this the image contains the secret
        sent_at = self._clock.monotonic()
        session = Session(await self._leases.grant(self._ttl_s), self._ttl_s, sent_at)
        self.kept = session
        try:
            epoch = await self._put_session(session)
        except MansioError:
            await self._revoke(session)
            raise
        if epoch == 0 or session.ended or self._leaving:
            await self._revoke(session)
            return None
        session.epoch = epoch
        self.session = session
        logger.info("broker_registered", extra=fields(node=self._node_id, epoch=epoch, ttl_s=self._ttl_s))
        for callback in self._callbacks:
            callback(session)
        await self._state.wait_for_revision(epoch, self._scheduler)
        return session

    def _refuse_other(self, s_max: float | None) -> None:
        other = self._other
        if s_max is not None and other is not None and self._clock.monotonic() - other.since >= s_max:
            raise ConfigError(
                f"node_id: broker {self._node_id} is already running at {other.host}:{other.port}; each broker of a "
                f"cluster needs its own node_id"
            )

    async def _put_session(self, session: Session) -> int:
        """The epoch, or 0 if another process registered first."""
        keys, writer = self._state.keys, new_writer_id(self._random)
        registration = keys.registration(self._node_id)
        found = await self._store.get(registration)
        key = keys.session(self._node_id)
        compares = [
            Compare(key, create_revision=0),
            Compare(registration, mod_revision=0 if found is None else found.mod_revision),
        ]
        puts = [
            Put(key, metadata_store.encode(self._address, writer), session.lease),
            Put(registration, metadata_store.encode({"state": ACTIVE}, writer)),
        ]
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, puts, writer)
        return done.revision if done.succeeded else 0

    async def _leave_isrs(self) -> None:
        """While this node has no session no leader can add it to an in-sync set again."""
        listing = await self._store.list(self._state.keys.format)
        await self._state.wait_for_revision(listing.revision, self._scheduler)
        left = [change for lost in self._lost_logs() if (change := self._isr_removal(*lost, 0)) is not None]
        for batch in transactions.batches(left, self._store.operations_max, transactions.BATCH_CHANGES_MAX):
            done = await transactions.commit(self._store, self._state.keys, batch, None, self._random)
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

    async def give_up(self, partitions: Iterable[tuple[UUID, int]]) -> int:
        """Leave leadership and in-sync set of partitions (topic id, index) whose log failed at run time, where another
        replica is in sync; the controller elects one of those. Returns the number of partitions. Raises `Unavailable`.
        """
        session = self.session
        if session is None:
            return 0
        found = [self._isr_removal(topic_id, index, session.epoch) for topic_id, index in partitions]
        left = [one for one in found if one is not None and one.after.isr]
        guard = Compare(self._state.keys.session(self._node_id), create_revision=session.epoch)
        for batch in transactions.batches(left, self._store.operations_max, transactions.BATCH_CHANGES_MAX):
            done = await transactions.commit(self._store, self._state.keys, batch, guard, self._random)
            if not done.succeeded:
                raise ConcurrentChange("partitions with a failed log were changed concurrently")
        if left:
            logger.warning("partitions_resigned_log_failed", extra=fields(partitions=len(left)))
        return len(left)

    # ------------------------------------------------------------------ loss of the session

    def lost(self, session: Session) -> None:
        """Handle the end of the lease of a session, as reported by the store. No effect if it is not the current
        one."""
        session.end()
        if session is not self.session:
            return
        self.session = self.kept = None
        self.sessions_lost += 1
        logger.warning("session_lost", extra=fields(node=self._node_id, epoch=session.epoch))
        for callback in self._callbacks:
            callback(None)
        if not self._leaving:
            self._scheduler.spawn(self._register_again(), name="register again")

    async def _register_again(self) -> None:
        """Retry whatever the error is: a broker that was a member of the cluster tries until it is stopped."""
        while not self._leaving:
            try:
                await self.register()
            except Unavailable:  # the broker is stopping, or is registered and its image has failed
                return
            except MansioError as error:
                self._warn("not registered yet", reason=error.message)
                await self._scheduler.sleep(RETRY_MS)
            else:
                return

    def _broker_changed(self, change: BrokerChange) -> None:
        session = self.session
        if session is None or change.node_id != self._node_id or change.before is None:
            return
        if change.after is None and change.before.epoch == session.epoch:
            self.lost(session)

    # ------------------------------------------------------------------ draining and shutdown

    async def transfer_leaderships(self, within_ms: float) -> int:
        """Start to drain and wait until other brokers lead all partitions that they can lead, at most `within_ms` (plus
        one transaction). The broker continues to serve requests. Returns the number of partitions that others could
        lead and do not yet lead; 0 on success."""
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
                await self._scheduler.sleep(min(remaining_s * 1000, RETRY_MS / 10))
        except MansioError as error:
            logger.warning("leadership_transfer_failed", extra=fields(reason=error.message))
        return self._transferable()

    async def announce_shutdown(self) -> None:
        """Start to drain without waiting: a broker that announced its end is not expected back after its session. If
        the announcement fails, the controller waits for the time of a lease."""
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
        put = Put(key, metadata_store.encode({"state": DRAINING}, writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        if not done.succeeded:
            raise ConcurrentChange("the registration was changed concurrently")

    def _transferable(self) -> int:
        """Number of partitions that others could lead; before the image contains the drain, also those they cannot."""
        state = self._state
        registration = state.registrations.get(self._node_id)
        if registration is None or registration.state != DRAINING:
            return max(
                1,
                sum(
                    one.leader == self._node_id for topic in state.topics.values() for one in topic.partitions
                ),
            )
        view = ClusterView(state.brokers, state.registrations, state.topics, state.unfinished)
        return transferable_leaderships(view, self._node_id)

    async def leave(self) -> None:
        """End the session; nothing may be acknowledged after this. If the store is unavailable, the session ends
        with its lease."""
        self._leaving = True
        session = self.session
        self.session = None
        if session is not None:
            session.end()
            for callback in self._callbacks:
                callback(None)
            await self._revoke(session)

    async def _revoke(self, session: Session) -> None:
        session.end()
        if self.kept is session:
            self.kept = None
        try:
            await self._leases.revoke(session.lease)
        except Unavailable as error:
            logger.warning("session_lease_not_revoked", extra=fields(reason=error.message))

    def _warn(self, event: str, **known: Any) -> None:
        now = self._clock.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            logger.warning(event, extra=fields(node=self._node_id, **known))
