"""WriteTxnMarkers (API 27): a transaction coordinator ends transactions in the partitions that this broker leads.

Behavior: only a broker of the same cluster may send the request, on a connection on which it has authenticated. A
single node, whose coordinator needs no request, refuses all of them.

Version notes
* 1: flexible. 2: the transaction version of the producer (KIP-1228), which changes nothing here: an epoch below that of
  the producer's last batch is refused in every version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.wire.batch.end_marker import EndMarker

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_router import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.errors import MansioError
    from mansio.wire.codec.messages import Struct

UNKNOWN_SENDER_ID: Final = -1
"""Broker id in the log about a request, which does not name its sender."""


async def write_txn_markers(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Write the markers; each partition succeeds or fails on its own."""
    authenticator, peer = service.authenticator, context.peer
    refusal = None
    if peer is None or not authenticator.is_current_session(peer):
        refusal = authenticator.count_refused_request(peer, UNKNOWN_SENDER_ID, context.client_host)
    return {"markers": [await _write(service, wanted, refusal) for wanted in request.markers]}


async def _write(service: BrokerServices, wanted: Struct, refusal: MansioError | None) -> dict[str, Any]:
    marker = EndMarker(
        wanted.producer_id, wanted.producer_epoch, wanted.transaction_result, wanted.coordinator_epoch
    )
    partitions = [(topic.name, index) for topic in wanted.topics for index in topic.partition_indexes]
    if refusal is None:
        results = iter(await service.transaction_markers.write(marker, partitions))
    else:
        results = iter([refusal] * len(partitions))
    topics = []
    for topic in wanted.topics:
        entries = []
        for index in topic.partition_indexes:
            error = next(results)
            code = 0 if error is None else error.kafka_code
            entries.append({"partition_index": index, "error_code": code})
        topics.append({"name": topic.name, "partitions": entries})
    return {"producer_id": wanted.producer_id, "topics": topics}
