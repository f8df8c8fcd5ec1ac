"""WriteTxnMarkers (API 27): a transaction coordinator ends transactions in the partitions that this broker leads.

Behavior: brokers of the same cluster write any marker, on a connection on which they have authenticated. Other clients
with the right may only abort a transaction that is open in the partition, with the epochs that DescribeProducers has
returned (KIP-664); everything else is refused with CLUSTER_AUTHORIZATION_FAILED.

Version notes
* 1: flexible. 2: the transaction version of the producer (KIP-1228). With transaction version 2 the epoch of a marker
  is that of the producer's next transaction, which a repeated marker must not end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.host.item_turns import ITEMS_PER_TURN, ItemTurns
from mansio.state.transactions.transaction import BUMPING_VERSION
from mansio.wire.batch.end_marker import EndMarker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.errors import MansioError
    from mansio.wire.codec.messages import Struct

VERSION_WITH_TRANSACTION_VERSION: Final = 2

UNKNOWN_SENDER_ID: Final = -1
"""Broker id in the log about a request, which does not name its sender."""


async def write_txn_markers(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Write the markers; each partition succeeds or fails on its own."""
    authenticator, peer = service.authenticator, context.peer
    is_broker = peer is not None and authenticator.is_current_session(peer)
    refusal = None
    if not is_broker and (peer is not None or any(each.transaction_result for each in request.markers)):
        refusal = authenticator.count_refused_request(peer, UNKNOWN_SENDER_ID, context.client_host)
    turns = ItemTurns(service.scheduler)
    asked = []
    for wanted in request.markers:
        marker, partitions = _decoded(wanted, context.api_version)
        asked.append((marker, partitions))
        await turns.next(1 + len(partitions))
    found: list[list[MansioError | None]]
    if refusal is not None:
        found = [[refusal] * len(partitions) for _, partitions in asked]
    elif is_broker:
        found = await service.transaction_markers.write_all(asked)
    else:
        found = [await _abort_open(service, *each, turns, context.caller) for each in asked]
    markers = []
    for wanted, results in zip(request.markers, found, strict=True):
        await turns.next()
        markers.append(await _encoded(wanted, results, turns))
    return {"markers": markers}


async def _abort_open(
    service: BrokerServices,
    marker: EndMarker,
    partitions: Sequence[tuple[str, int]],
    turns: ItemTurns,
    caller: Caller,
) -> list[MansioError | None]:
    """Abort the transaction of a producer in these partitions, which are independent of each other."""
    results: list[MansioError | None] = []
    for start in range(0, len(partitions), ITEMS_PER_TURN):
        piece = partitions[start : start + ITEMS_PER_TURN]
        results += await service.transaction_markers.abort_open(marker, piece, caller=caller)
        await turns.next(len(piece))
    return results


def _decoded(wanted: Struct, version: int) -> tuple[EndMarker, list[tuple[str, int]]]:
    marker = EndMarker(
        wanted.producer_id,
        wanted.producer_epoch,
        wanted.transaction_result,
        wanted.coordinator_epoch,
        bumps_epoch=version >= VERSION_WITH_TRANSACTION_VERSION
        and wanted.transaction_version >= BUMPING_VERSION,
    )
    return marker, [(topic.name, index) for topic in wanted.topics for index in topic.partition_indexes]


async def _encoded(wanted: Struct, found: Sequence[MansioError | None], turns: ItemTurns) -> dict[str, Any]:
    results = iter(found)
    topics = []
    for topic in wanted.topics:
        entries = []
        for index in topic.partition_indexes:
            error = next(results)
            code = 0 if error is None else error.kafka_code
            entries.append({"partition_index": index, "error_code": code})
        topics.append({"name": topic.name, "partitions": entries})
        await turns.next(1 + len(entries))
    return {"producer_id": wanted.producer_id, "topics": topics}
