"""Requests about the trace to other brokers, and their encoding."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.trace.trace_index import FailedRecord
from mansio.broker.trace.trace_reader import LocalTrace
from mansio.errors import error_for_code
from mansio.state.trace.coverage import Coverage, Gap, TracedRow
from mansio.state.trace.timeline import RecordFacts
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.internal_records.trace_records import TraceRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from mansio.ports import Peers
    from mansio.wire.codec.messages import Struct

CLIENT_ID: Final = "mansio-trace"
TIMEOUT_MS: Final = 60_000.0
"""Time after which a broker that does not answer is left out. The first look-up reads the whole trace."""

_NO_RECORD: Final = {"topic_id": None, "partition_index": -1, "offset": -1, "accepted_offset": -1}


class TracePeers:
    """Asks other brokers. All methods run on the broker's event loop."""

    def __init__(self, peers: Peers, *, node_id: int, broker_epoch: Callable[[], int]) -> None:
        self._peers = peers
        self._node_id = node_id
        self._broker_epoch = broker_epoch

    async def read(
        self,
        node_id: int,
        topic_id: UUID,
        index: int,
        offset: int,
        *,
        accepted_offset: int,
        needs_facts: bool,
    ) -> LocalTrace:
        """Return what a broker knows of a record: see `TraceReader.read`, of which this raises the errors, too."""
        fields = {
            "topic_id": topic_id.bytes,
            "partition_index": index,
            "offset": offset,
            "accepted_offset": accepted_offset,
            "needs_facts": needs_facts,
        }
        return _decoded(await self._send(node_id, fields))

    async def last_failed(self, node_id: int, group: str) -> FailedRecord | None:
        """Return what `TraceReader.last_failed` returns on a broker."""
        response = await self._send(node_id, {**_NO_RECORD, "needs_facts": False, "failed_group": group})
        failed = response.failed
        if failed is None:
            return None
        return FailedRecord(failed.topic_id, failed.partition_index, failed.offset, failed.time_ms)

    async def _send(self, node_id: int, fields: Mapping[str, Any]) -> Struct:
        sender = {"node_id": self._node_id, "broker_epoch": self._broker_epoch()}
        request = messages.encode_request(ApiKey.READ_TRACE, 0, 0, CLIENT_ID, {**sender, **fields})
        frame = await self._peers.send(node_id, request, timeout_ms=TIMEOUT_MS)
        _, response = messages.decode_response_frame(ApiKey.READ_TRACE, 0, frame)
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        return response


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
        "topic_id": failed.topic_id,
        "partition_index": failed.partition,
        "offset": failed.offset,
        "time_ms": failed.time_ms,
    }


def _decoded_facts(fields: Struct) -> RecordFacts:
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
        one.is_live = each.is_live
        one.gaps = [Gap(gap.begin_ms, gap.end_ms, gap.dropped) for gap in each.gaps]
        coverage.append(one)
    facts: Struct | None = response.facts
    return LocalTrace(
        None if facts is None else _decoded_facts(facts),
        rows,
        coverage,
        tuple(response.missing),
        response.broker_id,
        response.incarnation,
        response.written_ms,
    )
