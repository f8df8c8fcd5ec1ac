"""Trace service: what has happened to a record of any partition of the cluster.

The leader of the partition tells the facts about the record; each broker tells the rows in the partitions of the trace
that it leads. A broker that cannot be asked makes the timeline uncertain; it does not fail it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.errors import LeaderNotAvailable, ResourceNotFound, UnknownTopicOrPartition
from mansio.host.gather_results import gather_results
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.trace.timeline import NOT_ASKED, RecordFacts, Timeline, build_timeline
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.topics.topics import TopicService
    from mansio.broker.trace.trace_index import FailedRecord
    from mansio.broker.trace.trace_peers import TracePeers
    from mansio.broker.trace.trace_reader import LocalTrace, TraceReader
    from mansio.metadata.model import Topic
    from mansio.ports import Clock, Scheduler
    from mansio.state.trace.coverage import Coverage, TracedRow

HIDDEN_GROUP: Final = "(no right to describe group {})"


class TraceService:
    """Traces records. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_node_id",
        "_peers",
        "_scheduler",
        "_topics",
        "reader",
    )

    def __init__(
        self,
        reader: TraceReader,
        *,
        node_id: int,
        topics: TopicService,
        peers: TracePeers | None,
        clock: Clock,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        """`peers`: None on a single node."""
        self.reader = reader
        self._node_id = node_id
        self._topics = topics
        self._peers = peers
        self._clock = clock
        self._scheduler = scheduler
        self._authorization = authorization

    async def trace(self, name: str, index: int, offset: int, *, caller: Caller) -> Timeline:
        """Return the timeline of the record at an offset. The caller needs READ for the topic, and DESCRIBE for the
        groups whose names it gets.

        Raises `TopicAuthorizationFailed`, `UnknownTopicOrPartition`, `LeaderNotAvailable`, and the errors of the
        request to the leader."""
        self._authorization.check(caller, Operation.READ, ResourceType.TOPIC, name)
        topic = self._topics.find(name)
        if not 0 <= index < len(topic.partitions):
            raise UnknownTopicOrPartition(f"topic {name!r} has no partition {index}")
        leader = topic.partitions[index].leader
        if self._peers is None:
            leader = self._node_id
        if leader < 0:
            raise LeaderNotAvailable(f"no leader for {name}-{index}")
        own = await self._ask(leader, topic, index, offset, None)
        facts = own.facts or RecordFacts()
        answers, missing = await self._ask_all(own, leader, topic, index, offset, facts)
        if not _has_all(answers):  # a broker has written its last rows to another one that was asked before
            answers, missing = await self._ask_all(None, leader, topic, index, offset, facts)
            if not _has_all(answers):
                missing.append("the last blocks of a broker cannot be read yet")
        missing += [text for answer in answers for text in answer.missing]
        return build_timeline(
            offset,
            self._visible(caller, [row for answer in answers for row in answer.rows]),
            _coverage(answers),
            facts,
            self._clock.wall_ms(),
            missing,
        )

    async def last_failed(self, group: str, *, caller: Caller) -> tuple[str, int, int]:
        """Return topic, partition and offset of the record that a share group has rejected, or used up the attempts of,
        last, in a topic that the caller may READ. It needs DESCRIBE for the group.

        Raises `GroupAuthorizationFailed`, and `ResourceNotFound` if the trace has no such record, or its topic is
        deleted."""
        self._authorization.check(caller, Operation.DESCRIBE, ResourceType.GROUP, group)
        found: list[FailedRecord] = []

        async def ask(node_id: int) -> None:
            if node_id == self._node_id or self._peers is None:
                failed = await self.reader.last_failed(group)
            else:
                failed = await self._peers.last_failed(node_id, group)
            if failed is not None:
                found.append(failed)

        brokers = sorted(self._brokers())
        errors = await gather_results(
            self._scheduler, [ask(each) for each in brokers], name="last failed record"
        )
        for failed in sorted(found, key=attrgetter("time_ms"), reverse=True):
            topic = self._topics.state.topics_by_id.get(UUID(bytes=failed.topic_id))
            if topic is not None and self._authorization.allows(
                caller, Operation.READ, ResourceType.TOPIC, topic.name
            ):
                return topic.name, failed.partition, failed.offset
        for error in errors:
            if error is not None:
                raise copied(error)
        raise ResourceNotFound(f"the trace has no record that group {group!r} has rejected or given up")

    async def _ask_all(
        self, own: LocalTrace | None, leader: int, topic: Topic, index: int, offset: int, facts: RecordFacts
    ) -> tuple[list[LocalTrace], list[str]]:
        """Ask all brokers that are not asked yet: `own` is the answer of the leader. Return the answers, and which
        brokers do not answer."""
        asked = sorted(self._brokers() - (set() if own is None else {leader}))
        answers = [] if own is None else [own]
        missing: list[str] = []

        async def ask(node_id: int) -> None:
            answers.append(await self._ask(node_id, topic, index, offset, facts.accepted_offset))

        errors = await gather_results(
            self._scheduler, [ask(each) for each in asked], name="trace of a record"
        )
        for node_id, error in zip(asked, errors, strict=True):
            if error is not None:
                missing.append(f"{NOT_ASKED.format(node_id)}: {error.message}")
        return answers, missing

    def _brokers(self) -> set[int]:
        """Return the brokers to ask: all that have a session. Those that lead no partition of the trace tell whether
        they have written everything."""
        return {self._node_id} if self._peers is None else set(self._topics.state.brokers)

    def _visible(self, caller: Caller, rows: Iterable[TracedRow]) -> list[TracedRow]:
        """Return the rows, those of groups that the caller may not describe with numbers instead of names."""
        hidden: dict[str, str] = {}
        allowed = {""}
        found = []
        for each in rows:
            group = each.row.group
            if group not in allowed and group not in hidden:
                if self._authorization.allows(caller, Operation.DESCRIBE, ResourceType.GROUP, group):
                    allowed.add(group)
                else:
                    hidden[group] = HIDDEN_GROUP.format(len(hidden) + 1)
            row = each.row._replace(group=hidden[group], who="") if group in hidden else each.row
            found.append(each._replace(row=row))
        return found

    async def _ask(
        self, node_id: int, topic: Topic, index: int, offset: int, accepted_offset: int | None
    ) -> LocalTrace:
        """Return what a broker knows; of the leader of the partition, for which `accepted_offset` is None, with the
        facts."""
        needs_facts = accepted_offset is None
        accepted = -1 if accepted_offset is None else accepted_offset
        if node_id == self._node_id or self._peers is None:
            return await self.reader.read(
                topic.topic_id, index, offset, accepted_offset=accepted, needs_facts=needs_facts
            )
        return await self._peers.read(
            node_id, topic.topic_id, index, offset, accepted_offset=accepted, needs_facts=needs_facts
        )


def _has_all(answers: Sequence[LocalTrace]) -> bool:
    """Whether the answers have all that the brokers have written before they answered."""
    known = {
        (each.broker_id, each.incarnation): each.end_ms for answer in answers for each in answer.coverage
    }
    return all(
        known.get((answer.broker_id, answer.incarnation), -1) >= answer.written_ms for answer in answers
    )


def _coverage(answers: Sequence[LocalTrace]) -> list[Coverage]:
    """Return what is known of all processes; those that have answered run."""
    live = {(answer.broker_id, answer.incarnation) for answer in answers}
    found = [each for answer in answers for each in answer.coverage]
    for each in found:
        each.is_live = (each.broker_id, each.incarnation) in live
    return found
