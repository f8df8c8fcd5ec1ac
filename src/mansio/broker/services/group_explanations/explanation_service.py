"""Explanation service: what keeps a group from going on, found by its coordinator.

The coordinator knows members and positions. It asks each other broker once, for the partitions that this one leads and
for what it has refused to clients; all of them look at what changes during the same sample. `state.blockage` finds the
causes.

Invariants:
* One request to each broker with a session, however many partitions it leads. A broker that does not answer in time is
  named in the answer.
* The answer names no topic that the caller may not DESCRIBE, no key of a topic that it may not READ, and no
  transactional id that it may not DESCRIBE.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.broker.routing.routes import available_leader
from mansio.broker.services.group_explanations.fact_collector import PARTITIONS_MAX, SAMPLE_MS_MAX
from mansio.broker.services.group_explanations.group_facts import (
    DEAD_STATE,
    members_of,
    places_of,
    rebalance_left_ms,
    type_of,
)
from mansio.errors import GroupIdNotFound, InvalidRequest, Unavailable
from mansio.host.gather_results import gather_results
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.blockage.broker_facts import AskedPartition
from mansio.state.blockage.case import Case
from mansio.state.blockage.facts import NO_LEADER, UNKNOWN, GroupFacts, PartitionFacts, Place
from mansio.state.blockage.findings import conclude
from mansio.state.blockage.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mansio.broker.coordinator.group.fact_requests import FactRequests
    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.group.group_store import GroupEntry
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.group_explanations.fact_collector import FactCollector
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import Topic
    from mansio.ports import Clock, Scheduler
    from mansio.state.blockage.broker_facts import BrokerFacts, PartitionReport
    from mansio.state.blockage.findings import Explanation, Finding


EXPLANATIONS_MAX: Final = 32
"""Maximum number of explanations in progress. More are refused: a forwarded request and those that it leads to have the
same class, so brokers that explain as many groups as have places could wait for each other in a circle."""


class ExplanationService:
    """Explains groups that this broker coordinates. All methods run on its event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        groups: GroupCoordinator,
        collector: FactCollector,
        state: MetadataImage,
        others: FactRequests | None,
        authorization: Authorization,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        """`others`: None on a single node."""
        self._node_id = node_id
        self._groups = groups
        self._collector = collector
        self._state = state
        self._others = others
        self._authorization = authorization
        self._clock = clock
        self._scheduler = scheduler
        self._running = 0
        """Number of explanations that are in progress."""

    async def explain(self, group: str, *, sample_ms: int, caller: Caller) -> Explanation:
        """Return what keeps a group from going on, which needs DESCRIBE for it. `sample_ms`: for how long to look at
        what changes, 0 to look once.

        A group that does not exist is explained if a client was refused to read in it; otherwise raises
        `GroupIdNotFound`. Raises `GroupAuthorizationFailed`, `InvalidGroupId`, `InvalidRequest`, `Unavailable` (too
        many explanations at once), and the errors of the coordinator."""
        self._authorization.check(caller, Operation.DESCRIBE, ResourceType.GROUP, group)
        check_group_id(group)
        if not 0 <= sample_ms <= SAMPLE_MS_MAX:
            raise InvalidRequest(f"a sample of {sample_ms} ms; 0 to {SAMPLE_MS_MAX}")
        if self._running >= EXPLANATIONS_MAX:
            raise Unavailable(f"{EXPLANATIONS_MAX} groups are being explained here; try again")
        self._running += 1
        try:
            facts = await self._facts(group, sample_ms)
        finally:
            self._running -= 1
        if facts.state == DEAD_STATE and not any(each.resource_type == "group" for each in facts.refusals):
            raise GroupIdNotFound(f"there is no group {group!r}")
        hidden: frozenset[str] = frozenset()
        if self._authorization.is_enforced_for(caller):
            facts, hidden = self._redacted(facts, caller)
        case, turns = Case(facts, hidden), ItemTurns(self._scheduler)
        findings: list[Finding] = []
        for rule in RULES:
            findings += rule(case)
            await turns.next(1 + len(facts.partitions))
        return conclude(facts, findings, hidden_topics=hidden)

    def _allowed(
        self, caller: Caller, operation: Operation, kind: ResourceType, names: Collection[str]
    ) -> set[str]:
        return set(self._authorization.allowed_names(caller, operation, kind, names))

    def _redacted(self, facts: GroupFacts, caller: Caller) -> tuple[GroupFacts, frozenset[str]]:
        """Return facts without what the caller may not see; see `redacted`."""
        topics = {each.place.topic for each in facts.partitions}
        ids = {each.transactional_id for each in facts.transactions}
        return redacted(
            facts,
            shown=self._allowed(caller, Operation.DESCRIBE, ResourceType.TOPIC, topics),
            readable=self._allowed(caller, Operation.READ, ResourceType.TOPIC, topics),
            transactional_ids=self._allowed(caller, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, ids),
        )

    # ------------------------------------------------------------------ facts

    async def _facts(self, group: str, sample_ms: int) -> GroupFacts:
        store, name_of = self._groups.store, self._groups.topic_resolver.name_of
        entry = store.find(group)
        kind = type_of(entry)
        members = () if entry is None else members_of(entry, name_of, store.monotonic_ms())
        places = [] if entry is None else places_of(entry, members, name_of)[:PARTITIONS_MAX]
        places = [each for each in places if self._topic(each) is not None]
        before = {} if entry is None else _positions(entry, places)
        leaders = {each: self._leader(each) for each in places}
        asked = [AskedPartition(each, before.get(each, UNKNOWN)) for each in places]
        found: dict[int, BrokerFacts] = {}
        works = [
            self._ask(node_id, group, asked, leaders, found, is_share=kind == "share", sample_ms=sample_ms)
            for node_id in self._brokers()
        ]
        await gather_results(self._scheduler, works, name="explain group")
        entry = store.find(group)  # it may have been loaded again meanwhile
        now_ms, wall_ms = store.monotonic_ms(), self._clock.wall_ms()
        after: Mapping[Place, int] = {}
        if entry is not None:
            members = members_of(entry, name_of, now_ms)
            after = _positions(entry, places)
        reports = {each.place: each for one in found.values() for each in one.partitions}
        return GroupFacts(
            group=group,
            group_type=kind,
            state=DEAD_STATE if entry is None else str(entry.group.state),
            members=members,
            partitions=tuple(
                self._partition(each, leaders[each], reports.get(each), entry, before, after, wall_ms)
                for each in places
            ),
            transactions=tuple(each for one in found.values() for each in one.transactions),
            throttles=tuple(each for one in found.values() for each in one.throttles),
            refusals=tuple(each for one in found.values() for each in one.refusals),
            settled_ms=UNKNOWN
            if entry is None or entry.state_timestamp_ms < 0
            else max(wall_ms - entry.state_timestamp_ms, 0),
            rebalances=0 if entry is None else max(entry.generation - entry.committed_generation, 0),
            rebalance_ms=UNKNOWN if entry is None else rebalance_left_ms(entry, now_ms),
            sample_ms=sample_ms,
            silent_brokers=tuple(sorted(set(self._brokers()) - found.keys())),
        )

    def _brokers(self) -> list[int]:
        """Node ids of the brokers with a session."""
        return [self._node_id] if self._others is None else sorted({self._node_id, *self._state.brokers})

    def _topic(self, place: Place) -> Topic | None:
        topic = self._state.topics.get(place.topic)
        return topic if topic is not None and place.partition < len(topic.partitions) else None

    def _leader(self, place: Place) -> int:
        """Return the node id of the leader of a partition, `NO_LEADER` without one."""
        topic = self._topic(place)
        if self._others is None or topic is None:
            return self._node_id
        leader = available_leader(self._state, topic.partitions[place.partition])
        return NO_LEADER if leader is None else leader.node_id

    async def _ask(
        self,
        node_id: int,
        group: str,
        asked: Sequence[AskedPartition],
        leaders: Mapping[Place, int],
        found: dict[int, BrokerFacts],
        *,
        is_share: bool,
        sample_ms: int,
    ) -> None:
        """Add the facts of one broker to `found`. Raises the errors of the request."""
        led = [each for each in asked if leaders[each.place] == node_id]
        if node_id == self._node_id:
            places = [each.place for each in asked]
            found[node_id] = await self._collector.collect(
                group, led, places, is_share=is_share, sample_ms=sample_ms
            )
            return
        assert self._others is not None, "a single node asks no other broker"
        found[node_id] = await self._others.ask(
            node_id,
            group,
            asked,
            frozenset(each.place for each in led),
            is_share=is_share,
            sample_ms=sample_ms,
        )

    def _partition(
        self,
        place: Place,
        leader: int,
        report: PartitionReport | None,
        entry: GroupEntry | None,
        before: Mapping[Place, int],
        after: Mapping[Place, int],
        wall_ms: int,
    ) -> PartitionFacts:
        topic = self._topic(place)
        missing: tuple[int, ...] = ()
        if leader == NO_LEADER and topic is not None:
            state = topic.partitions[place.partition]
            missing = tuple(each for each in state.isr or state.replicas if each not in self._state.brokers)
        error = "no answer in time" if report is None else report.error
        committed = None if entry is None else entry.offsets.get(place.topic, {}).get(place.partition)
        return PartitionFacts(
            place=place,
            leader=leader,
            missing_brokers=missing,
            error="" if leader == NO_LEADER else error,
            position=before.get(place, UNKNOWN),
            committed_ms=UNKNOWN if committed is None else max(wall_ms - committed.commit_ms, 0),
            progress=max(after.get(place, 0) - before[place], 0) if place in before else 0,
            log=None if report is None else report.log,
            share=None if report is None else report.share,
        )


def _positions(entry: GroupEntry, places: Sequence[Place]) -> dict[Place, int]:
    """Return the committed offsets of a group."""
    find = partial(_committed, entry)
    return {each: offset for each in places if (offset := find(each)) is not None}


def _committed(entry: GroupEntry, place: Place) -> int | None:
    committed = entry.offsets.get(place.topic, {}).get(place.partition)
    return None if committed is None else committed.offset


def redacted(
    facts: GroupFacts,
    *,
    shown: Collection[str],
    readable: Collection[str],
    transactional_ids: Collection[str],
) -> tuple[GroupFacts, frozenset[str]]:
    """Return facts with other names for all topics but `shown`, so that no text that is made of them can contain the
    true ones; and these names. Keys are left out unless the topic is `readable`, and so are all transactional ids but
    `transactional_ids`."""
    topics = {each.place.topic for each in facts.partitions}
    topics |= {place.topic for member in facts.members for place in member.places}
    names = {name: f"(topic {number})" for number, name in enumerate(sorted(topics - set(shown)), 1)}

    def place_of(place: Place) -> Place:
        return Place(names.get(place.topic, place.topic), place.partition)

    return replace(
        facts,
        members=tuple(replace(each, places=tuple(map(place_of, each.places))) for each in facts.members),
        partitions=tuple(
            replace(each if each.place.topic in readable else _without_key(each), place=place_of(each.place))
            for each in facts.partitions
        ),
        transactions=tuple(each for each in facts.transactions if each.transactional_id in transactional_ids),
        refusals=tuple(
            each for each in facts.refusals if each.resource_type == "group" or each.name in shown
        ),
    ), frozenset(names.values())


def _without_key(part: PartitionFacts) -> PartitionFacts:
    share = part.share
    if share is None or share.held is None or share.held.key is None:
        return part
    return replace(part, share=replace(share, held=replace(share.held, key=None)))
