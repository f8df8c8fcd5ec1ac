"""Trace service: what has happened to a record of any partition of the cluster.

The leader of the partition tells the facts about the record; each broker tells the rows in the partitions of the trace
that it leads. A broker that cannot be asked makes the timeline uncertain; it does not fail it.
"""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.trace.trace_index import FailedRecord
from mansio.broker.trace.trace_reader import LocalTrace
from mansio.errors import LeaderNotAvailable, ResourceNotFound, UnknownTopicOrPartition, error_for_code
from mansio.host.gather_results import gather_results
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.state.trace.coverage import Coverage, Gap, TracedRow
from mansio.state.trace.timeline import RecordFacts, Timeline, build_timeline
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.internal_records.trace_records import TraceRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.topics.topics import TopicService
    from mansio.broker.trace.trace_reader import TraceReader
    from mansio.metadata.model import Topic
    from mansio.ports import Clock, Peers, Scheduler
    from mansio.wire.codec.messages import Struct

CLIENT_ID: Final = "mansio-trace"
TIMEOUT_MS: Final = 10_000.0
"""Time after which a broker that does not answer is left out."""

HIDDEN_GROUP: Final = "(no right to describe the group)"


class TraceService:
    """Traces records. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_broker_epoch",
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
        broker_epoch: Callable[[], int] | None,
        topics: TopicService,
        peers: Peers | None,
        clock: Clock,
        scheduler: Scheduler,
        authorization: Authorization,
    ) -> None:
        """`broker_epoch`, `peers`: None on a single node."""
        self.reader = reader
        self._node_id = node_id
        self._broker_epoch = broker_epoch
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
        last. The caller needs DESCRIBE for the group.

        Raises `GroupAuthorizationFailed`, and `ResourceNotFound` if the trace has no such record, or its topic is
        deleted."""
        self._authorization.check(caller, Operation.DESCRIBE, ResourceType.GROUP, group)
        found: list[FailedRecord] = []

        async def ask(node_id: int) -> None:
            if node_id == self._node_id:
                failed = await self.reader.last_failed(group)
            else:
                failed = _decoded_failed(await self._send(node_id, {"failed_group": group, "topic_id": None}))
            if failed is not None:
                found.append(failed)

        brokers = sorted(self._brokers())
        errors = await gather_results(
            self._scheduler, [ask(each) for each in brokers], name="last failed record"
        )
        for failed in sorted(found, key=attrgetter("time_ms"), reverse=True):
            topic = self._topics.state.topics_by_id.get(UUID(bytes=failed.topic_id))
            if topic is not None:
                return topic.name, failed.partition, failed.offset
        for error in errors:
            if error is not None:
                raise copied(error)
        raise ResourceNotFound(f"the trace has no record that group {group!r} has rejected or given up")

    async def _send(self, node_id: int, fields: Mapping[str, Any]) -> Struct:
        """Return the answer of another broker to ReadTrace. Raises its error."""
        assert self._peers is not None
        sender = {
            "node_id": self._node_id,
            "broker_epoch": -1 if self._broker_epoch is None else self._broker_epoch(),
        }
        none = {"partition_index": -1, "offset": -1, "accepted_offset": -1, "needs_facts": False}
        request = messages.encode_request(ApiKey.READ_TRACE, 0, 0, CLIENT_ID, {**sender, **none, **fields})
        frame = await self._peers.send(node_id, request, timeout_ms=TIMEOUT_MS)
        _, response = messages.decode_response_frame(ApiKey.READ_TRACE, 0, frame)
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        return response

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
                missing.append(f"broker {node_id} cannot be asked: {error.message}")
        return answers, missing

    def _brokers(self) -> set[int]:
        """Return the brokers to ask: all that have a session. Those that lead no partition of the trace tell whether
        they have written everything."""
        return {self._node_id} if self._peers is None else set(self._topics.state.brokers)

    def _visible(self, caller: Caller, rows: Iterable[TracedRow]) -> list[TracedRow]:
        """Return the rows, those of groups that the caller may not describe without names."""
        allowed: dict[str, bool] = {"": True}
        found = []
        for each in rows:
            group = each.row.group
            if group not in allowed:
                allowed[group] = self._authorization.allows(
                    caller, Operation.DESCRIBE, ResourceType.GROUP, group
                )
            if allowed[group]:
                found.append(each)
            else:
                found.append(each._replace(row=each.row._replace(group=HIDDEN_GROUP, who="")))
        return found

    async def _ask(
        self, node_id: int, topic: Topic, index: int, offset: int, accepted_offset: int | None
    ) -> LocalTrace:
        """Return what a broker knows; of the leader of the partition, for which `accepted_offset` is None, with the
        facts."""
        if node_id == self._node_id or self._peers is None:
            return await self.read(
                topic.topic_id,
                index,
                offset,
                accepted_offset=-1 if accepted_offset is None else accepted_offset,
                needs_facts=accepted_offset is None,
            )
        fields = {
            "topic_id": topic.topic_id,
            "partition_index": index,
            "offset": offset,
            "accepted_offset": -1 if accepted_offset is None else accepted_offset,
            "needs_facts": accepted_offset is None,
        }
        return _decoded(await self._send(node_id, fields))

    async def read(
        self, topic_id: Any, index: int, offset: int, *, accepted_offset: int, needs_facts: bool
    ) -> LocalTrace:
        """Return what this broker knows, for itself or for another broker. Raises the errors of `TraceReader.read`."""
        return await self.reader.read(
            topic_id, index, offset, accepted_offset=accepted_offset, needs_facts=needs_facts
        )


def local_trace_fields(found: LocalTrace) -> dict[str, Any]:
    """Return the fields of the response to ReadTrace."""
    return {
        "facts": None if found.facts is None else asdict(found.facts),
        "rows": [
            {
                **each.row._asdict(),
                "broker_id": each.broker_id,
                "incarnation": each.incarnation,
                "leader_epoch": each.leader_epoch,
            }
            for each in found.rows
        ],
        "coverage": [
            {
                "broker_id": each.broker_id,
                "incarnation": each.incarnation,
                "begin_ms": each.begin_ms,
                "end_ms": each.end_ms,
                "is_closed": each.is_closed,
                "is_live": each.is_live,
                "gaps": [gap._asdict() for gap in each.gaps],
            }
            for each in found.coverage
        ],
        "missing": list(found.missing),
        "broker_id": found.broker_id,
        "incarnation": found.incarnation,
        "written_ms": found.written_ms,
    }


def failed_record_fields(failed: FailedRecord) -> dict[str, Any]:
    """Return the fields of a failed record in the response to ReadTrace."""
    return {
        "topic_id": UUID(bytes=failed.topic_id),
        "partition_index": failed.partition,
        "offset": failed.offset,
        "time_ms": failed.time_ms,
    }


def _decoded_failed(response: Struct) -> FailedRecord | None:
    failed = response.failed
    if failed is None:
        return None
    return FailedRecord(failed.topic_id.bytes, failed.partition_index, failed.offset, failed.time_ms)


def decoded_facts(fields: Struct) -> RecordFacts:
    """Return the facts in a response."""
    values: dict[str, Any] = {}
    for name in RecordFacts.__dataclass_fields__:
        value = getattr(fields, name)
        values[name] = tuple(value) if isinstance(value, list) else value
    return RecordFacts(**values)


def _decoded(response: Struct) -> LocalTrace:
    rows = [
        TracedRow(
            TraceRow(
                each.kind,
                each.cause,
                each.attempt,
                each.group,
                each.who,
                each.time_ms,
                each.first,
                each.size,
                each.extra,
            ),
            each.broker_id,
            each.incarnation,
            each.leader_epoch,
        )
        for each in response.rows
    ]
    coverage: list[Coverage] = []
    for each in response.coverage:
        one = Coverage(each.broker_id, each.incarnation)
        one.begin_ms, one.end_ms = each.begin_ms, each.end_ms
        one.is_closed, one.is_live = each.is_closed, each.is_live
        one.gaps = [Gap(gap.begin_ms, gap.end_ms, gap.dropped) for gap in each.gaps]
        coverage.append(one)
    facts: Struct | None = response.facts
    return LocalTrace(
        None if facts is None else decoded_facts(facts),
        rows,
        coverage,
        tuple(response.missing),
        response.broker_id,
        response.incarnation,
        response.written_ms,
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
