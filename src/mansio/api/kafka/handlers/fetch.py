"""Fetch (API 1).

Behavior
* Return record batches as ranges of segment files, at once or when there is something to read (`FetchService`).
* A replica id of 0 or more is a broker's: the fetch is a follower's if that broker has authenticated on the connection,
  in the epoch of the request, and refused otherwise. Negative ids are clients', as in Kafka.

Version notes
* 4: first with record batches v2 and isolation level. 7: sessions (KIP-227) of followers; clients get none, and
  the session id 0 makes them send full requests. 9: fencing by leader epoch (KIP-320). 11: rack and preferred read
  replica (KIP-392). 12: flexible, diverging epochs (KIP-595). 13: topics by id (KIP-516). 15: a
  follower's broker epoch (KIP-903).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.kafka.connections.connection_grants import new_grants
from mansio.broker.services.fetch import FetchResult
from mansio.broker.services.statistics import SAMPLE_MASK
from mansio.errors import CorruptLog, CorruptMessage, MansioError
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch as wire
from mansio.wire.field_values import NO_FETCH_SESSION_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.pending_response import PendingResponse
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.fetch import TopicData
    from mansio.broker.services.statistics import Stopwatch
    from mansio.wire.headers import RequestHeader

API_KEY = int(ApiKey.FETCH)


def fetch(
    service: BrokerServices, connection: Connection, header: RequestHeader, frame: memoryview
) -> Sequence[ResponsePart] | None:
    """Read the partitions. Return the response if enough can be read or there is an error; otherwise park the request
    and return None."""
    fetches = service.fetch
    request = follower = None
    peer = connection.peer
    if peer is not None and header.api_version == wire.REPLICA_FETCH_VERSION:
        request = wire.decode_replica_request(frame, header.body_position)
    if request is None:
        request = wire.decode_request(header.api_version, frame, header.body_position)
    if request.replica_id >= 0:
        try:
            follower = service.authenticator.require_identity(
                peer, request.replica_id, request.replica_epoch, connection.client_host
            )
        except MansioError as error:
            return _encode(
                service,
                connection,
                header,
                FetchResult.for_rejected_request(request, without_traceback(error)),
            )
    sampled = follower is None and not fetches.counters.fetches & SAMPLE_MASK
    stopwatch = service.statistics.start_stopwatch(service.statistics.fetch_latency) if sampled else None
    user = connection.session.user
    grants = connection.grants
    if (grants is None or peer is not None) and follower is None and service.authorization.is_enabled:
        grants = new_grants(service, connection, header.client_id)
    result, is_final = fetches.begin_fetch(request, user, header.client_id, grants, follower)
    if is_final:
        if stopwatch is not None:
            stopwatch.stop()
        return _encode(service, connection, header, result)
    waited = service.statistics.start_stopwatch(service.statistics.parked_fetch_latency) if sampled else None
    response = connection.defer_response()
    reply = _Reply(service, connection, header._replace(body_position=0), response, waited)
    parked = fetches.park(request, user, header.client_id, grants, result, reply.send, follower)
    response.on_lost(parked.cancel)
    return None


class _Reply:
    """Response of a parked fetch: encodes the result and completes the pending response."""

    __slots__ = ("_connection", "_header", "_response", "_service", "_stopwatch")

    def __init__(
        self,
        service: BrokerServices,
        connection: Connection,
        header: RequestHeader,
        response: PendingResponse,
        stopwatch: Stopwatch | None,
    ) -> None:
        self._service = service
        self._connection = connection
        self._header = header
        self._response = response
        self._stopwatch = stopwatch

    def send(self, result: FetchResult) -> None:
        if self._stopwatch is not None:
            self._stopwatch.stop()
        if not self._response.is_abandoned:
            self._response.answer(_encode(self._service, self._connection, self._header, result))


def _encode(
    service: BrokerServices, connection: Connection, header: RequestHeader, result: FetchResult
) -> Sequence[ResponsePart]:
    if result.group_commit is not None:
        result.group_commit.sync_with_followers()
    error_code = 0
    if result.is_urgent:
        error_code = _count_errors(service, result)
    session_id = NO_FETCH_SESSION_ID if result.session is None else result.session.session_id
    if result.is_by_follower and header.api_version == wire.REPLICA_FETCH_VERSION:
        parts = wire.encode_replica_response(
            header.correlation_id, _topics(result.topics), error_code, session_id
        )
        if parts is not None:
            return parts
    throttle_ms = 0
    if not result.is_by_follower:
        quotas = service.quotas.active  # replication is not subject to clients' quotas
        if quotas is not None:
            user = connection.session.user
            if quotas.is_throttled(user, header.client_id):
                result = result.without_records()
            throttle_ms = quotas.record_fetch(user, header.client_id, result.size_bytes)
            if throttle_ms:
                connection.pause_reading_ms(throttle_ms)
        service.fetch.counters.count_fetch(result.size_bytes)
    return wire.encode_response(
        header.api_version,
        header.correlation_id,
        _topics(result.topics),
        throttle_ms,
        error_code,
        session_id,
    )


def _count_errors(service: BrokerServices, result: FetchResult) -> int:
    """Count the errors of a result, and return the error code of the whole response."""
    count_error = service.statistics.count_error
    if result.error is not None:
        count_error(API_KEY, result.error.kafka_code)
    for _, _, partitions in result.topics:
        for one in partitions:
            if one.error is not None:
                count_error(API_KEY, one.error.kafka_code)
    return 0 if result.error is None else result.error.kafka_code


def _topics(
    topics: Sequence[TopicData],
) -> list[tuple[str | None, bytes | None, list[wire.FetchedPartition]]]:
    return [
        (
            name,
            topic_id,
            [
                wire.FetchedPartition(
                    index,
                    0 if error is None else _error_code(error),
                    high_watermark,
                    last_stable_offset,
                    log_start_offset,
                    aborted,
                    preferred_replica,
                    size_bytes,
                    records,
                    diverging,
                )
                for (
                    index,
                    error,
                    high_watermark,
                    last_stable_offset,
                    log_start_offset,
                    size_bytes,
                    records,
                    diverging,
                    aborted,
                    preferred_replica,
                ) in partitions
            ],
        )
        for name, topic_id, partitions in topics
    ]


def _error_code(error: MansioError) -> int:
    """Return the Kafka error code for a client. Damage on the broker's disk is returned as CORRUPT_MESSAGE, which
    clients report to the application; they would retry a storage error forever."""
    return CorruptMessage.kafka_code if isinstance(error, CorruptLog) else error.kafka_code
