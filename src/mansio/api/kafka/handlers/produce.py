"""Produce (API 0).

Behavior
* Append record batches and respond as `acks` demands. acks=0: no response; the connection is closed if a batch is
  rejected, as in Kafka. acks=1: when the bytes are in the page cache. acks=all (-1): when they are flushed and the high
  watermark has passed them.
* Each partition's batch succeeds or fails on its own. A transactional id that the client may not use fails all.

Version notes
* 3: first with record batches v2. 7: first that may carry zstd (KIP-110). 8: names the rejected records (KIP-467).
  9: flexible. 10: current leader (KIP-951, not filled). 12: adds partitions to transactions (KIP-890). 13: topics
  by id.

Invariants: the frame's memory is not used after `produce` returns; every request with acks is answered once.
"""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import TYPE_CHECKING

from mansio.api.kafka.connections.connection_grants import new_grants
from mansio.broker.services.produce import BatchResult, PendingAppend, ProcessingRequired
from mansio.errors import AuthorizationFailed, InvalidRequiredAcks, MansioError
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce as wire
from mansio.wire.field_values import ACKS_ALL, ACKS_NONE
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.produce import PendingProduce, TopicResults
    from mansio.wire.apis.produce import ProduceTemplate
    from mansio.wire.headers import RequestHeader

API_KEY = int(ApiKey.PRODUCE)
ZSTD_VERSION_MIN = 7
"""Lowest version of Produce whose batches may be compressed with zstd (KIP-110)."""

ADDING_VERSION_MIN = 12
"""Lowest version of Produce whose clients do not add partitions to their transactions themselves (KIP-890)."""

CORRELATION_ID_STRUCT = Struct(">i")

TEMPLATE_INTERVAL_REQUESTS = 8
"""After requests that did not match the template of the connection, a new template is built only from one request in
this many, because the requests of some producers all differ."""

UNBOUNDED_MS = (1 << 31) - 1
"""Timeout of a wait that only `produce_wait_ms_max` bounds."""

NO_RESPONSE: tuple[bytes, ...] = ()
"""Response to a request with acks=0: none."""


def produce(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    frame: memoryview,
    *,
    was_tried: bool = False,
) -> Sequence[ResponsePart] | None:
    """Append the batches of a request. Return the response, or None if it is sent later. `was_tried`: see
    `ProduceService.begin_produce`."""
    version = header.api_version
    request = wire.decode_request(version, frame, header.body_position)
    acks = request.acks
    connection.client_id = header.client_id or ""
    rejection = _request_error(request)
    pending: PendingProduce | None = None
    grants = connection.grants
    if (grants is None or connection.peer is not None) and service.authorization.is_enabled:
        grants = new_grants(service, connection, header.client_id)
    if rejection is None and request.transactional_id is not None:
        try:
            pending = service.produce.begin_transactional(
                request.topics,
                request.transactional_id,
                grants=grants,
                acks=acks,
                adds=version >= ADDING_VERSION_MIN,
                allow_zstd=version >= ZSTD_VERSION_MIN,
                client=connection,
                was_tried=was_tried,
                publisher=connection,
            )
            results = pending.results
        except AuthorizationFailed as error:
            rejection = without_traceback(error)
    elif rejection is None:
        pending = service.produce.begin_produce(
            request.topics,
            grants=grants,
            acks=acks,
            allow_zstd=version >= ZSTD_VERSION_MIN,
            client=connection,
            was_tried=was_tried,
            is_broker=_is_broker(service, connection),
            publisher=connection,
        )
        results = pending.results
    if rejection is None:
        revision = service.authorization.rules.revision
        if connection.template_misses % TEMPLATE_INTERVAL_REQUESTS == 0 or (
            connection.template is not None and connection.template_revision != revision
        ):
            _renew_template(service, connection, header, frame, request, revision)
        connection.template_misses += 1
    else:
        results = [
            (name, topic_id, [BatchResult(index, rejection) for index, _ in entries])
            for name, topic_id, entries in request.topics
        ]
        service.produce.counters.rejected_batches += sum(len(entries) for _, _, entries in results)
    quotas = service.quotas.active
    throttle_ms = 0
    if quotas is not None and connection.peer is None:  # another broker has applied the quota of its client
        throttle_ms = quotas.record_produce(connection.session.user, header.client_id, len(frame))
        if throttle_ms:
            connection.pause_reading_ms(throttle_ms)
    if acks == ACKS_NONE:
        _raise_if_failed(service, results)
        if pending is not None and not pending.is_complete:
            _wait_processed(service, connection, pending)
            return None
        return NO_RESPONSE
    if pending is None or pending.is_complete:
        return (_encode(service, version, header.correlation_id, throttle_ms, results),)
    _queue_response(service, connection, pending)
    pending.wait(
        request.timeout_ms,
        partial(_respond, service, connection, version, header.correlation_id, throttle_ms),
    )
    return None


def _is_broker(service: BrokerServices, connection: Connection) -> bool:
    """Whether the session of a broker, which is still registered, sends a request for itself. A request that a broker
    has forwarded comes from a client."""
    peer = connection.peer
    return peer is not None and not connection.is_forwarded and service.authenticator.is_current_session(peer)


def _renew_template(
    service: BrokerServices,
    connection: Connection,
    header: RequestHeader,
    frame: memoryview,
    request: wire.ProduceRequest,
    revision: int,
) -> None:
    """Make a template of a request that is allowed at this revision of the ACLs. Connections of brokers have none:
    the session of a broker may end, and until then it may write to internal topics."""
    connection.template = None
    if connection.peer is not None:
        return
    if service.authorization.is_enabled:
        grants = connection.grants
        if grants is None or len(request.topics) != 1:
            return
        name, topic_id, _ = request.topics[0]
        if (topic_id if name is None else name) not in grants.writable:
            return
    template = connection.template = wire.build_template(header, frame, request)
    if template is not None:
        connection.template_revision = revision


def _queue_response(service: BrokerServices, connection: Connection, pending: PendingProduce) -> None:
    """Queue the response. While many batches wait to be processed, the next request of the client does not start
    before this response is complete, as in Kafka. Nor does it while a transaction is verified: its batches follow."""
    if pending.is_verified or (
        pending.is_processed and service.partitions.batch_processor.is_congested(connection)
    ):
        connection.queue_exclusive_response(pending)
    else:
        connection.queue_response(pending)


def _wait_processed(service: BrokerServices, connection: Connection, pending: PendingProduce) -> None:
    """Wait for the append of processed batches of a request with acks=0, so that the number of requests in progress
    is bounded and an error closes the connection."""
    _queue_response(service, connection, pending)
    pending.wait(UNBOUNDED_MS, partial(_end_without_response, service, connection))


def produce_by_template(
    service: BrokerServices,
    connection: Connection,
    template: ProduceTemplate,
    frame: memoryview,
    index: int,
    records: memoryview,
) -> Sequence[ResponsePart] | None:
    """Like `produce`, for a request that matches the request template of the connection: it has one batch, and most
    bytes of the response are prepared. `produce` handles a batch that has to wait for its append."""
    is_transactional = template.is_transactional
    if is_transactional and not service.produce.is_transaction_open(
        template.topic, template.topic_id, index, records
    ):
        return produce(service, connection, read_request_header(frame), frame)
    (correlation_id,) = CORRELATION_ID_STRUCT.unpack_from(frame, 4)
    acks = template.acks
    try:
        partition, appended = service.produce.append(
            template.topic,
            template.topic_id,
            index,
            records,
            acks=acks,
            allow_zstd=template.version >= ZSTD_VERSION_MIN,
            transactional=is_transactional,
            publisher=connection,
        )
    except MansioError as error:
        service.statistics.count_error(API_KEY, error.kafka_code)
        if acks == ACKS_NONE:
            raise
        return (_template_error(template, correlation_id, index, error),)
    except ProcessingRequired as required:
        return produce(service, connection, read_request_header(frame), frame, was_tried=required.was_tried)
    if acks == ACKS_NONE:
        return NO_RESPONSE
    base_offset, end_offset, append_time_ms, _ = appended
    response = wire.encode_template_response(
        template, correlation_id, index, base_offset, append_time_ms, partition.log.start_offset
    )
    if acks != ACKS_ALL or end_offset <= partition.replica.high_watermark:
        return (response,)
    pending = PendingAppend(
        service.produce,
        template.timeout_ms,
        _respond_by_template,
        (service, connection, template, correlation_id, index, response),
    )
    connection.queue_response(pending)
    partition.when_committed(end_offset, pending.complete)
    return None


def _end_without_response(service: BrokerServices, connection: Connection, pending: PendingProduce) -> None:
    try:
        _raise_if_failed(service, pending.results)
    except MansioError as error:
        connection.reject(error)
        return
    pending.respond(NO_RESPONSE)
    connection.on_response_complete(pending)


def _request_error(request: wire.ProduceRequest) -> MansioError | None:
    """Return the error for which the whole request is rejected; None if it is valid."""
    if not -1 <= request.acks <= 1:
        return InvalidRequiredAcks(f"acks={request.acks}: must be 0, 1 or -1 (all)")
    return None


def _raise_if_failed(service: BrokerServices, results: Sequence[TopicResults]) -> None:
    """Raise the last error of a request with acks=0, which has no response. The connection is then closed, so that the
    client refreshes its metadata."""
    last: MansioError | None = None
    for _, _, entries in results:
        for result in entries:
            if result.error is not None:
                service.statistics.count_error(API_KEY, result.error.kafka_code)
                last = result.error
    if last is not None:
        raise copied(last)


def _respond(
    service: BrokerServices,
    connection: Connection,
    version: int,
    correlation_id: int,
    throttle_ms: int,
    pending: PendingProduce,
) -> None:
    pending.respond((_encode(service, version, correlation_id, throttle_ms, pending.results),))
    connection.on_response_complete(pending)


def _respond_by_template(pending: PendingAppend, error: MansioError | None) -> None:
    service, connection, template, correlation_id, index, response = pending.context
    if error is not None:
        service.statistics.count_error(API_KEY, error.kafka_code)
        response = _template_error(template, correlation_id, index, error)
    pending.respond((response,))
    connection.on_response_complete(pending)


def _encode(
    service: BrokerServices,
    version: int,
    correlation_id: int,
    throttle_ms: int,
    results: Sequence[TopicResults],
) -> bytes:
    topics = []
    for name, topic_id, entries in results:
        encoded = []
        for index, error, base_offset, append_time_ms, log_start_offset in entries:
            if error is None:
                encoded.append(
                    wire.PartitionResult(index, 0, base_offset, append_time_ms, log_start_offset, None, ())
                )
            else:
                service.statistics.count_error(API_KEY, error.kafka_code)
                encoded.append(_error_result(index, error))
        topics.append((name, topic_id, encoded))
    return wire.encode_response(version, correlation_id, topics, throttle_ms)


def _template_error(template: ProduceTemplate, correlation_id: int, index: int, error: MansioError) -> bytes:
    results = [(template.topic, template.topic_id, [_error_result(index, error)])]
    return wire.encode_response(template.version, correlation_id, results)


def _error_result(index: int, error: MansioError) -> wire.PartitionResult:
    return wire.PartitionResult(index, error.kafka_code, -1, -1, -1, error.message, error.record_errors)
