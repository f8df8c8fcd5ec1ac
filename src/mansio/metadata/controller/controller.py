"""Controller: executes the decisions of `controller_plan` while this broker is the elected controller.

Every broker runs a `Controller`, and at most one is active. A broker becomes controller by a transaction whose
conditions are its own session and a missing controller key; the key has the lease of the session. Every write of the
controller requires the create revision of that key, so the store rejects late writes of a replaced controller.

Each round decides on the current metadata. If a transaction does not succeed, the metadata have changed, and the next
round decides again. After a conflict batches get smaller, so that a partition that changes all the time does not
prevent many others from getting a leader. A round decides about the partitions that have changed, or about all if
something about the brokers has changed (`DuePartitions`).

Any broker also executes the elections and begins the reassignments that administrators request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    BrokerIdNotRegistered,
    ConcurrentChange,
    FeatureUpdateFailed,
    InvalidRequest,
    MansioError,
    Unavailable,
    UnknownTopicOrPartition,
)
from mansio.host.gather_results import gather_results
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.metadata import metadata_store, reassignment
from mansio.metadata.cluster_view import ClusterView
from mansio.metadata.controller.due_partitions import DuePartitions
from mansio.metadata.controller.failure_detector import FailureDetector
from mansio.metadata.controller_plan import PlanBuilder, preferred_election, unclean_election
from mansio.metadata.feature_level import check_update
from mansio.metadata.image import write_feature_level
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Compare, Delete, Put, new_writer_id
from mansio.metadata.model import (
    BROKER_FENCED,
    NO_LEADER,
    TOPIC_DELETING,
    ControllerState,
    registration_document,
    topic_document,
)
from mansio.metadata.transactions import BATCH_CHANGES_MAX, commit_changes, split_into_transactions
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from mansio.metadata.cluster_view import PartitionChange
    from mansio.metadata.controller_plan import FenceBroker, Plan
    from mansio.metadata.feature_level import FeatureUpdate
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import PartitionState, Topic, TopicChange
    from mansio.metadata.reassignment import FactorChange, Reassignment
    from mansio.metadata.session import Session
    from mansio.ports import Clock, Promise, Random, Scheduler, Timer

logger = logging.getLogger(__name__)

BALANCE_INTERVAL_MS: Final = 60_000
BALANCE_STEP_MS: Final = 1000
FINISH_INTERVAL_MS: Final = 250
"""Interval at which reassignments are finished, so that one transaction finishes many."""
TRANSACTIONS_IN_FLIGHT_MAX: Final = 8
"""Number of transactions with changes of partitions that are sent to the store at a time."""
RETRY_INTERVAL_MS: Final = 200
ROUND_INTERVAL_MS_MAX: Final = 1000
ELECTION_CAUSES: Final = {
    "leader failed": "leader_failed",
    "leader is stopping": "leader_stopping",
    "preferred leader": "preferred",
    "no in-sync replica is available": "no_in_sync_replica",
    "unclean election": "unclean",
    "reassignment begins": "reassignment",
    "reassignment is finished": "reassignment",
    "reassignment is cancelled": "reassignment",
}
"""Label of the elections metric by `PartitionChange.reason`, for the reasons for which a leader changes."""


class Controller:
    """Controller of one broker. `start` is called once; `stop` may be called at any time."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
        node_id: int,
        session: Callable[[], Session | None],
        ttl_s: float,
        balance_interval_ms: int = BALANCE_INTERVAL_MS,
    ) -> None:
        """`session` returns the current session of this broker. `ttl_s` is the duration of a lease in seconds.

        `balance_interval_ms` is the interval at which leaderships return to preferred leaders.
        """
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._clock = clock
        self._random = random
        self._node_id = node_id
        self._session = session
        self._balance_interval_s = balance_interval_ms / 1000
        self._balance_at = float("inf")
        self._failure_detector = FailureDetector(ttl_s)
        self._term: ControllerState | None = None
        self._due = DuePartitions()
        self._decided_on: tuple[object, ...] = ()
        """What is known about the brokers, as of the last round."""
        self._to_finish = DuePartitions()
        """Partitions whose reassignment may have to be finished."""
        self._finish_at = float("-inf")
        self._to_balance: list[PartitionChange] = []
        """Leaderships that are to return to the preferred leaders, found by the last balance."""
        self._batch_size = BATCH_CHANGES_MAX
        self._stale = True
        self._waiting: Promise[None] | None = None
        self._running: Timer | None = None
        self.elections = dict.fromkeys(ELECTION_CAUSES.values(), 0)
        """Number of leader changes that this broker executed, by cause, including requested elections."""
        self.examined = 0
        """Number of partitions at which this broker looked for decisions, as controller."""
        state.on_change(self._handle_topic_change)
        state.on_progress(self._wake)

    @property
    def is_active(self) -> bool:
        """Whether this broker is the controller according to its own metadata."""
        return self._term is not None

    def start(self) -> None:
        """Start to run rounds, until `stop` is called."""
        self._update_failure_detector(self._clock.monotonic())
        self._running = self._scheduler.spawn(self._run(), name="controller")

    def stop(self) -> None:
        """Stop running rounds. The controller key is deleted when the session ends."""
        if self._running is not None:
            self._running.cancel()
            self._running = None

    # ------------------------------------------------------------------ rounds

    async def _run(self) -> None:
        while True:
            self._stale = False
            try:
                wait_s = await self._run_round()
            except Unavailable as error:
                logger.info("controller_waiting", extra=fields(reason=error.message))
                wait_s = RETRY_INTERVAL_MS / 1000
                self._stale = False
                self._due.add_all()
            except Exception as error:  # a controller that cannot decide must not block the others
                logger.exception("controller_failed", extra=fields(reason=repr(error)))
                self._due.add_all()
                await self._resign()
                wait_s = ROUND_INTERVAL_MS_MAX / 1000
                self._stale = False
            await self._pause(wait_s)

    def _update_failure_detector(self, now: float) -> None:
        self._failure_detector.update(self._state.brokers, self._state.registrations, now)

    def _handle_topic_change(self, change: TopicChange) -> None:
        if self._term is not None:
            self._due.add_changed(change)

    def _wake(self) -> None:
        self._update_failure_detector(self._clock.monotonic())
        self._stale = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _pause(self, wait_s: float) -> None:
        """Wait for a change of the metadata image, at most `wait_s` seconds."""
        if self._stale:
            return
        self._waiting = self._scheduler.promise()
        timer = self._scheduler.call_later(wait_s * 1000, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    async def _run_round(self) -> float:
        """Run one round. Returns the seconds until the next round if the metadata do not change before."""
        now = self._clock.monotonic()
        session = self._session()
        if session is None or not session.is_valid(now):
            self._term = None
            return ROUND_INTERVAL_MS_MAX / 1000
        if self._state.controller is None and self._state.may_lead(self._node_id):
            await self._claim_controller(session)
        self._update_term(session, now)
        if self._term is None:
            return ROUND_INTERVAL_MS_MAX / 1000
        view = self._view(now)
        due = await self._plan_due(view, now)
        if due:
            self._due.add_decided(due.changes, self._state.topics_by_id)
            self._add_factors(due)
            await self._execute_plan(due, self._term)
            return RETRY_INTERVAL_MS / 1000
        if now >= self._balance_at and not view.expected_back:
            await self._balance(view, self._term, now)
        wait_s = ROUND_INTERVAL_MS_MAX / 1000
        if (next_at := self._failure_detector.next_change_at(now)) is not None:
            wait_s = min(wait_s, next_at - now)
        if self._to_finish:
            wait_s = min(wait_s, self._finish_at - now)
        return max(0.0, wait_s)

    async def _plan_due(self, view: ClusterView, now: float) -> Plan:
        """Make the decisions that are due since the last round."""
        decided_on = (view.brokers, view.registrations, view.expected_back)
        if decided_on != self._decided_on:
            self._due.add_all()
            self._decided_on = decided_on
        if may_finish := now >= self._finish_at:
            self._due.add_from(self._to_finish)
        builder = PlanBuilder(view, wanted=self._due.take(), may_finish=may_finish)
        await self._build(builder)
        for topic, index in builder.postponed:
            self._to_finish.add(topic, (index,))
        if builder.finishes:
            self._finish_at = now + FINISH_INTERVAL_MS / 1000
        return builder.plan()

    async def _build(self, builder: PlanBuilder) -> None:
        """Make decisions; other work runs in between."""
        turns = ItemTurns(self._scheduler, Work.CONTROLLER_PLAN)
        for _ in builder.steps():
            self.examined += 1
            if turns.is_over():
                await turns.pause()
        turns.end()

    def _view(self, now: float) -> ClusterView:
        state = self._state
        expected_back = self._failure_detector.expected_back(now)
        # Copies: `expected_back` does not change during a plan either.
        brokers, registrations = dict(state.brokers), dict(state.registrations)
        return ClusterView(brokers, registrations, state.topics, state.unfinished_topics, expected_back)

    async def _claim_controller(self, session: Session) -> None:
        keys, writer = self._state.keys, new_writer_id(self._random)
        compares = [
            Compare(keys.controller, create_revision=0),
            Compare(keys.session(self._node_id), create_revision=session.epoch),
        ]
        value = metadata_store.encode({"broker": self._node_id}, writer)
        put = Put(keys.controller, value, session.lease)
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)

    def _update_term(self, session: Session, now: float) -> None:
        """Update `_term` from the controller key. The key belongs to this session if it contains this broker's node id
        and was created after the session."""
        found = self._state.controller
        ours = found is not None and found.node_id == self._node_id and found.epoch > session.epoch
        if not ours:
            self._term = None
        elif self._term != found:
            self._term = found
            self._failure_detector.record_election(now)
            self._balance_at = now + self._balance_interval_s
            self._batch_size = BATCH_CHANGES_MAX
            self._due.add_all()
            self._to_balance.clear()
            logger.info("controller_elected", extra=fields(node=self._node_id))

    async def _resign(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            with contextlib.suppress(Unavailable):
                await self._store.transact([self._term_guard(term)], [Delete(self._state.keys.controller)])

    # ------------------------------------------------------------------ execution

    async def _execute_plan(self, due: Plan, term: ControllerState) -> None:
        """Execute a plan; if there are elections, only these, and the next round decides again about the rest: then
        leaders have removed most replicas of a dead broker from the in-sync sets themselves."""
        elections = [change for change in due.changes if _changes_leader(change)]
        conflicts = await self._commit_changes(elections, term)
        if not elections or conflicts:
            others = [change for change in due.changes if not _changes_leader(change)]
            conflicts += await self._commit_changes(others, term)
        self._adjust_batch_size(conflicts)
        if elections and not conflicts:
            return
        for fence in due.fences:
            await self._fence_broker(fence, term)
        for factor in due.factors:
            await self._store_factor(factor, term)
        for deletion in due.deletions:
            await self._complete_deletion(deletion.topic, term)

    async def _commit_changes(self, changes: Sequence[PartitionChange], term: ControllerState) -> int:
        """Commit changes; return the number of conflicts."""
        if not changes:
            return 0
        done_changes, conflicts = await self._commit_batches(
            changes, self._term_guard(term), self._batch_size
        )
        self._count_elections(done_changes)
        return conflicts

    def _adjust_batch_size(self, conflicts: int) -> None:
        self._batch_size = max(1, self._batch_size // 2) if conflicts else BATCH_CHANGES_MAX

    def _add_factors(self, plan: Plan) -> None:
        """Have the next round decide again about the replication factors of a plan, which may not store them."""
        for factor in plan.factors:
            self._due.add(factor.topic.name, range(len(factor.topic.partitions)))

    async def _commit_batches(
        self, changes: Sequence[PartitionChange], guard: Compare, size: int
    ) -> tuple[list[PartitionChange], int]:
        """Commit changes in transactions of at most `size`, several at a time: each waits for the store, and for the
        event loop of a broker that may be busy. Return those that were committed, and the number of conflicts."""
        revision, conflicts = 0, 0
        done_changes: list[PartitionChange] = []

        async def commit(batch: Sequence[PartitionChange]) -> None:
            nonlocal revision, conflicts
            done = await commit_changes(self._store, self._state.keys, batch, guard, self._random)
            revision = max(revision, done.revision)
            if done.succeeded:
                done_changes.extend(batch)
            else:
                conflicts += 1

        batches = [*split_into_transactions(changes, self._store.operations_max, size)]
        for first in range(0, len(batches), TRANSACTIONS_IN_FLIGHT_MAX):
            work = [commit(batch) for batch in batches[first : first + TRANSACTIONS_IN_FLIGHT_MAX]]
            for error in await gather_results(self._scheduler, work, name="change partitions"):
                if isinstance(error, ConcurrentChange):
                    conflicts += 1
                elif error is not None:
                    raise copied(error)
        if done_changes:
            _log_changes(done_changes, conflicts)
        await self._state.wait_for_revision(revision, self._scheduler)
        return done_changes, conflicts

    def _count_elections(self, changes: Sequence[PartitionChange]) -> None:
        for change in changes:
            if _changes_leader(change) and (cause := ELECTION_CAUSES.get(change.reason)) is not None:
                self.elections[cause] += 1

    async def _balance(self, view: ClusterView, term: ControllerState, now: float) -> None:
        """Return leaderships to preferred leaders, at most one batch per call: each move interrupts producers."""
        wanted = DuePartitions()
        if self._to_balance:
            wanted.add_decided(self._to_balance[:BATCH_CHANGES_MAX], self._state.topics_by_id)
            del self._to_balance[:BATCH_CHANGES_MAX]
        else:
            wanted.add_all()
        builder = PlanBuilder(view, wanted=wanted.take(), balance=True)
        await self._build(builder)
        plan = builder.plan()
        self._add_factors(plan)
        moves = plan.changes
        self._adjust_batch_size(await self._commit_changes(moves[:BATCH_CHANGES_MAX], term))
        self._to_balance += moves[BATCH_CHANGES_MAX:]
        self._balance_at = now + (BALANCE_STEP_MS / 1000 if self._to_balance else self._balance_interval_s)

    async def _fence_broker(self, fence: FenceBroker, term: ControllerState) -> None:
        keys, writer = self._state.keys, new_writer_id(self._random)
        key = keys.registration(fence.node_id)
        compares = [
            self._term_guard(term),
            Compare(keys.session(fence.node_id), create_revision=0),
            Compare(key, mod_revision=fence.mod_revision),
        ]
        known = self._state.registrations.get(fence.node_id)
        label = "" if known is None else known.host_label
        document = registration_document(BROKER_FENCED, fence.levels, label)
        put = Put(key, metadata_store.encode(document, writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        if done.succeeded:
            logger.warning("broker_fenced", extra=fields(broker=fence.node_id))

    async def _store_factor(self, change: FactorChange, term: ControllerState) -> None:
        key, writer = self._state.keys.topic(change.topic.name), new_writer_id(self._random)
        document = topic_document(
            dataclasses.replace(change.topic, replication_factor=change.replication_factor)
        )
        compares = [self._term_guard(term), Compare(key, mod_revision=change.topic.mod_revision)]
        put = Put(key, metadata_store.encode(document, writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        if done.succeeded:
            known = fields(topic=change.topic.name, replication_factor=change.replication_factor)
            logger.info("replication_factor_changed", extra=known)

    async def _complete_deletion(self, topic: Topic, term: ControllerState) -> None:
        """Delete all keys of a topic whose creator failed. First the topic's key is changed, so that the store rejects
        late writes of the creator."""
        keys = self._state.keys
        key = keys.topic(topic.name)
        guard = self._term_guard(term)
        revision = await self._claim_deletion(topic, guard)
        if revision == 0:
            return
        compares = [guard, Compare(key, mod_revision=revision)]
        listing = await self._store.list(f"{keys.partitions}{topic.topic_id}/")
        size = self._store.operations_max - len(compares)
        for start in range(0, len(listing.entries), size):
            deletes = [Delete(entry.key) for entry in listing.entries[start : start + size]]
            await metadata_store.transact_with_retries(self._store, compares, deletes)
        done = await metadata_store.transact_with_retries(self._store, compares, [Delete(key)])
        await self._state.wait_for_revision(done.revision, self._scheduler)

    async def _claim_deletion(self, topic: Topic, guard: Compare) -> int:
        """Mark the topic as being deleted by the controller.

        Returns the revision of the topic's key, or 0 if the key was changed concurrently.
        """
        if topic.created_by is None and topic.state == TOPIC_DELETING:
            return topic.mod_revision
        key, writer = self._state.keys.topic(topic.name), new_writer_id(self._random)
        document = topic_document(dataclasses.replace(topic, state=TOPIC_DELETING, created_by=None))
        compares = [guard, Compare(key, mod_revision=topic.mod_revision)]
        put = Put(key, metadata_store.encode(document, writer))
        taken = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        await self._state.wait_for_revision(taken.revision, self._scheduler)
        if not taken.succeeded:
            return 0
        logger.warning("unfinished_topic_deleted", extra=fields(topic=topic.name, state=topic.state))
        return taken.revision

    def _term_guard(self, term: ControllerState) -> Compare:
        return Compare(self._state.keys.controller, create_revision=term.epoch)

    # ------------------------------------------------------------------ requests of administrators

    async def elect_preferred(self, name: str, index: int) -> PartitionState:
        """Elect the preferred leader of partition `index` of the topic `name`; returns the new state.

        Raises `UnknownTopicOrPartition`, `Unavailable`, `ConcurrentChange`.
        """
        return await self._elect(name, index, None)

    async def elect_unclean(self, name: str, index: int, node_id: int) -> PartitionState:
        """Elect the broker `node_id`, which is not in sync, as leader: records that only other replicas have are lost.

        Raises `InvalidRequest` if an in-sync replica can lead or the broker is not a replica,
        `UnknownTopicOrPartition`, `Unavailable`, `ConcurrentChange`.
        """
        return await self._elect(name, index, node_id)

    async def _elect(self, name: str, index: int, unclean_leader: int | None) -> PartitionState:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            session = self._session()
            if session is None or not session.is_valid(self._clock.monotonic()):
                raise Unavailable("this broker has no session")
            topic = self._state.topics.get(name)
            if topic is None or not 0 <= index < len(topic.partitions):
                raise UnknownTopicOrPartition(f"there is no partition {name}-{index}")
            view = self._view(self._clock.monotonic())
            change = (
                preferred_election(view, topic, index)
                if unclean_leader is None
                else unclean_election(view, topic, index, unclean_leader)
            )
            if change is None:
                return topic.partitions[index]
            guard = Compare(self._state.keys.session(self._node_id), create_revision=session.epoch)
            done = await commit_changes(self._store, self._state.keys, [change], guard, self._random)
            await self._state.wait_for_revision(done.revision, self._scheduler)
            if done.succeeded:
                self._count_elections([change])
                level = logging.INFO if unclean_leader is None else logging.WARNING
                known = fields(topic=name, partition=index, leader=change.after.leader, reason=change.reason)
                logger.log(level, "leader_elected_on_request", extra=known)
                return change.after
        raise ConcurrentChange(f"{name}-{index} was changed concurrently")

    async def reassign(
        self, wanted: Sequence[Reassignment], *, may_change_factor: bool
    ) -> list[MansioError | None]:
        """Begin, replace or cancel reassignments; return an error or None for each. Each partition is changed on its
        own, many in one transaction.

        The errors are those of `reassignment.begin` and `reassignment.cancel`, `UnknownTopicOrPartition`,
        `Unavailable` and `ConcurrentChange`. Raises `Unavailable` if this broker has no session."""
        results: dict[int, MansioError | None] = {}
        for attempt in range(CONFLICT_ATTEMPTS_MAX):
            session = self._session()
            if session is None or not session.is_valid(self._clock.monotonic()):
                raise Unavailable("this broker has no session")
            view = self._view(self._clock.monotonic())
            changes: dict[tuple[UUID, int], PartitionChange] = {}
            numbers: dict[tuple[UUID, int], int] = {}
            for number, each in enumerate(wanted):
                if number in results:
                    continue
                try:
                    change = _reassignment_change(view, each, may_change_factor=may_change_factor)
                except MansioError as error:
                    results[number] = without_traceback(error)
                    continue
                if change is None:
                    results[number] = None
                    continue
                place = (change.topic_id, change.partition)
                if place in changes:
                    results[numbers[place]] = None  # of several for one partition the last one counts
                changes[place], numbers[place] = change, number
            guard = Compare(self._state.keys.session(self._node_id), create_revision=session.epoch)
            size = max(1, BATCH_CHANGES_MAX >> attempt)
            for change in (await self._commit_batches([*changes.values()], guard, size))[0]:
                results[numbers[change.topic_id, change.partition]] = None
            if len(results) == len(wanted):
                break
        return [
            results.get(number, ConcurrentChange(f"{each.topic}-{each.partition} was changed concurrently"))
            for number, each in enumerate(wanted)
        ]

    async def unregister(self, node_id: int) -> None:
        """Delete the registration of a broker that has left the cluster for good.

        Raises `BrokerIdNotRegistered`, `InvalidRequest` if it has a session or replicas, `Unavailable`, and
        `ConcurrentChange` if it registers meanwhile."""
        session, keys = self._session(), self._state.keys
        if session is None or not session.is_valid(self._clock.monotonic()):
            raise Unavailable("this broker has no session")
        await self._state.catch_up(self._scheduler)
        registration = self._state.registrations.get(node_id)
        if registration is None:
            raise BrokerIdNotRegistered(f"there is no broker {node_id}")
        if node_id in self._state.brokers:
            raise InvalidRequest(
                f"broker {node_id} is running, or its session has not ended yet: stop it first"
            )
        if replicas := self._state.count_replicas(node_id):
            count = f"{replicas} replica{'s' if replicas > 1 else ''}"
            raise InvalidRequest(
                f"broker {node_id} has {count}: move them to other brokers first (mansio cluster drain {node_id})"
            )
        compares = [
            Compare(keys.session(self._node_id), create_revision=session.epoch),
            Compare(keys.session(node_id), create_revision=0),
            Compare(keys.registration(node_id), mod_revision=registration.mod_revision),
        ]
        deletes = [Delete(keys.registration(node_id))]
        done = await metadata_store.transact_with_retries(self._store, compares, deletes)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        if not done.succeeded:
            raise ConcurrentChange(f"the registration of broker {node_id} was changed concurrently")
        logger.info("broker_unregistered", extra=fields(broker=node_id))

    async def update_features(self, updates: Sequence[FeatureUpdate], *, validate_only: bool) -> None:
        """Raise the feature level of the cluster; all updates are executed, or none.

        The transaction requires the registrations on which the decision is based. A broker of an older version that
        registers with a new node id meanwhile cannot read the level, and ends its session. Raises
        `InvalidUpdateVersion`, `Unavailable`, and `FeatureUpdateFailed` if brokers keep registering."""
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            session, state = self._session(), self._state
            if session is None or not session.is_valid(self._clock.monotonic()):
                raise Unavailable("this broker has no session")
            await state.catch_up(self._scheduler)
            brokers = {node_id: each.levels for node_id, each in state.registrations.items()}
            level = state.feature_level
            for name, wanted, update_type in updates:
                if check_update(name, wanted, update_type, current=state.feature_level, brokers=brokers):
                    level = wanted
            if validate_only or level == state.feature_level:
                return
            # Those without a session first: the others run, and support the level.
            known = sorted(state.registrations.items(), key=lambda item: item[0] in state.brokers)
            guards = [
                Compare(state.keys.session(self._node_id), create_revision=session.epoch),
                *(
                    Compare(state.keys.registration(node_id), mod_revision=each.mod_revision)
                    for node_id, each in known
                ),
            ][: self._store.operations_max - 1]
            try:
                done = await write_feature_level(
                    self._store, state.keys, level, state.feature_revision, guards, self._random
                )
            except ConcurrentChange:
                continue
            await state.wait_for_revision(done.revision, self._scheduler)
            if done.succeeded:
                logger.info("feature_level_raised", extra=fields(level=level))
                return
        raise FeatureUpdateFailed


def _reassignment_change(
    view: ClusterView, wanted: Reassignment, *, may_change_factor: bool
) -> PartitionChange | None:
    topic = view.topics.get(wanted.topic)
    if topic is None or not 0 <= wanted.partition < len(topic.partitions):
        raise UnknownTopicOrPartition(f"there is no partition {wanted.topic}-{wanted.partition}")
    if wanted.replicas is None:
        return reassignment.cancel(view, topic, wanted.partition)
    return reassignment.begin(
        view, topic, wanted.partition, wanted.replicas, may_change_factor=may_change_factor
    )


def _changes_leader(change: PartitionChange) -> bool:
    """Whether another broker leads, or the same one in another session."""
    before, after = change.before, change.after
    return (before.leader, before.leader_broker_epoch) != (after.leader, after.leader_broker_epoch)


def _log_changes(changes: Sequence[PartitionChange], conflicts: int) -> None:
    leader_changes = [change for change in changes if _changes_leader(change)]
    without_leader = sum(1 for change in leader_changes if change.after.leader == NO_LEADER)
    known = fields(
        leaders_changed=len(leader_changes),
        left_without_leader=without_leader,
        removed_from_in_sync=sum(1 for change in changes if len(change.after.isr) < len(change.before.isr)),
        conflicts=conflicts,
        reason=",".join(sorted({change.reason for change in changes})),
    )
    logger.log(logging.WARNING if without_leader else logging.INFO, "partitions_changed", extra=known)
