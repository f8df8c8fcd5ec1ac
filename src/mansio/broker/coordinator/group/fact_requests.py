"""Requests of a group's coordinator to other brokers for what they know about the group (CollectGroupFacts): facts as
fields of requests and responses, and back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import error_for_code
from mansio.state.blockage.broker_facts import AskedPartition, BrokerFacts, PartitionReport
from mansio.state.blockage.facts import (
    HeldFacts,
    HolderFacts,
    LogFacts,
    OpenTransactionFacts,
    Place,
    RefusalFacts,
    RetriedFacts,
    ShareFacts,
    ShareOrder,
    ThrottleFacts,
    TransactionFacts,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mansio.ports import Peers
    from mansio.wire.codec.messages import Struct

ANSWER_MS: Final = 3_000
"""Time that a broker has to answer, in addition to the sample."""

CLIENT_ID: Final = "mansio-why"
"""Client id of these requests."""


class FactRequests:
    """Asks other brokers. One object per broker of a cluster."""

    def __init__(self, node_id: int, broker_epoch: Callable[[], int], peers: Peers) -> None:
        """`broker_epoch`: returns the epoch of this broker's session."""
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._peers = peers

    async def ask(
        self,
        node_id: int,
        group: str,
        partitions: Sequence[AskedPartition],
        led: Collection[Place],
        *,
        is_share: bool,
        sample_ms: int,
    ) -> BrokerFacts:
        """Return what a broker knows about a group that has read `partitions`, of which it should lead `led`. Raises
        the errors of `Peers.send` and that of the answer."""
        fields = {
            "node_id": self._node_id,
            "broker_epoch": self._broker_epoch(),
            "group_id": group,
            "is_share": is_share,
            "sample_ms": sample_ms,
            "topics": asked_topics(partitions, led),
        }
        key = ApiKey.COLLECT_GROUP_FACTS
        request = messages.encode_request(key, 0, 0, CLIENT_ID, fields)
        frame = await self._peers.send(node_id, request, timeout_ms=sample_ms + ANSWER_MS)
        _, response = messages.decode_response_frame(key, 0, frame)
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        return read_response(response)


def asked_topics(partitions: Sequence[AskedPartition], led: Collection[Place]) -> list[dict[str, Any]]:
    """Return the partitions of a group as fields of a request. `led`: those that the receiver should lead."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for place, position in partitions:
        asked = {"partition_index": place.partition, "position": position, "is_led": place in led}
        topics.setdefault(place.topic, []).append(asked)
    return [{"name": name, "partitions": asked} for name, asked in topics.items()]


def read_asked_topics(topics: Sequence[Struct]) -> tuple[list[AskedPartition], list[Place]]:
    """Return the partitions that this broker should lead, and all of the group."""
    led, places = [], []
    for topic in topics:
        for each in topic.partitions:
            place = Place(topic.name, each.partition_index)
            places.append(place)
            if each.is_led:
                led.append(AskedPartition(place, each.position))
    return led, places


def response_fields(found: BrokerFacts) -> dict[str, Any]:
    """Return the fields of a response."""
    return {
        "partitions": [_partition_fields(each) for each in found.partitions],
        "transactions": [asdict(each) for each in found.transactions],
        "throttles": [asdict(each) for each in found.throttles],
        "refusals": [asdict(each) for each in found.refusals],
    }


def read_response(response: Struct) -> BrokerFacts:
    """Return the facts in a response."""
    return BrokerFacts(
        [_partition(each) for each in response.partitions],
        [TransactionFacts(**_values(each, TransactionFacts)) for each in response.transactions],
        [ThrottleFacts(**_values(each, ThrottleFacts)) for each in response.throttles],
        [RefusalFacts(**_values(each, RefusalFacts)) for each in response.refusals],
    )


def _values(struct: Struct, kind: type[Any], *others: str) -> dict[str, Any]:
    """Return the fields of a struct that a class of facts has, too, without `others`."""
    return {each.name: getattr(struct, each.name) for each in fields(kind) if each.name not in others}


def _partition_fields(report: PartitionReport) -> dict[str, Any]:
    return {
        "topic": report.place.topic,
        "partition_index": report.place.partition,
        "error": report.error,
        "log": None if report.log is None else _log_fields(report.log),
        "share": None if report.share is None else _share_fields(report.share),
    }


def _partition(struct: Struct) -> PartitionReport:
    return PartitionReport(
        Place(struct.topic, struct.partition_index),
        None if struct.log is None else _log(struct.log),
        None if struct.share is None else _share(struct.share),
        struct.error,
    )


def _log_fields(log: LogFacts) -> dict[str, Any]:
    found = asdict(log)
    transaction = found.pop("transaction")
    if transaction is not None:
        found["open_offset"] = transaction["first_offset"]
        found["open_producer_id"] = transaction["producer_id"]
        found["open_ms"] = transaction["open_ms"]
    return found


def _log(struct: Struct) -> LogFacts:
    transaction = None
    if struct.open_offset >= 0:
        transaction = OpenTransactionFacts(struct.open_offset, struct.open_producer_id, struct.open_ms)
    known = _values(struct, LogFacts, "transaction", "paused_schedules")
    return LogFacts(**known, transaction=transaction, paused_schedules=tuple(struct.paused_schedules))


def _share_fields(share: ShareFacts) -> dict[str, Any]:
    found = asdict(share)
    for name in ("retried", "held"):
        part = found.pop(name)
        if part is not None:
            found |= {f"{name}_{key}": value for key, value in part.items()}
    return found


def _share(struct: Struct) -> ShareFacts:
    known = _values(struct, ShareFacts, "order", "holders", "retried", "held")
    retried = held = None
    if struct.retried_offset >= 0:
        retried = RetriedFacts(struct.retried_offset, struct.retried_attempts, struct.retried_due_ms)
    if struct.held_offset >= 0:
        held = HeldFacts(
            struct.held_offset,
            struct.held_waiting,
            struct.held_total,
            struct.held_key,
            struct.held_is_complete,
        )
    return ShareFacts(
        **known,
        order=ShareOrder(struct.order),
        holders=tuple(HolderFacts(each.member_id, each.leased, each.oldest_ms) for each in struct.holders),
        retried=retried,
        held=held,
    )
