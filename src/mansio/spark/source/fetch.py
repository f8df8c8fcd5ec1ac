"""Fetch requests of one task: the record batches of an offset range of one partition, with read-ahead.

The next request is sent before the current response is returned to the caller, so decoding overlaps with the network.
In memory are the current response and, in the socket's receive buffer, the next one.

Invariants:
* The returned batches are complete, in offset order, and contain all records of the range. The first batch may begin
  before the range, the last one may end after it.
* Transient errors are retried for the cluster's retry timeout. An offset that no longer exists raises `DataLoss`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import (
    DAMAGED_BATCH,
    MansioError,
    OffsetOutOfRange,
    Unavailable,
    UnknownTopicOrPartition,
    UnreadableRecords,
)
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import STALE_METADATA_ERRORS, list_offsets
from mansio.net.retry import client_error_for_code, topic_error_for_code
from mansio.spark.source import data_loss
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.field_values import EARLIEST_TIMESTAMP, READ_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.net.metadata import TopicMetadata
    from mansio.spark.sync_client import SyncClient
    from mansio.wire.topic_partition import TopicPartition

FETCH_CHANNEL: Final = "fetch spark"
"""Name of the connections that only Fetch requests use: a response of several megabytes would delay other requests."""
FETCH_WAIT_MS_MAX: Final = 500
DEFAULT_FETCH_BYTES: Final = 4 << 20
REQUEST_BYTES_MIN: Final = 64 << 10
FETCH_VERSION_WITH_TOPIC_NAMES_MAX: Final = 12
TRUNCATION_CONFIRMATION_S: Final = 3.0
"""Time for which a log must end below the range before its missing records are reported as lost."""


class FetchedBatches(NamedTuple):
    """The complete record batches of one response, and (producer id, first offset) of aborted transactions in them."""

    records: memoryview
    aborted: Sequence[tuple[int, int]] = ()


class _FetchResult(NamedTuple):
    """The batches of one response, the offset of the next request, and the mean size of an offset in bytes."""

    fetched: FetchedBatches
    next_offset: int
    bytes_per_offset: float


def fetch_range(
    sync_client: SyncClient,
    partition: TopicPartition,
    start: int,
    end: int,
    *,
    fetch_bytes: int = DEFAULT_FETCH_BYTES,
    isolation: int = READ_COMMITTED,
    topic_id: bytes = NO_TOPIC_ID,
) -> Iterator[FetchedBatches]:
    """Fetch the batches with the records of [start, end), in responses of about `fetch_bytes`.

    `topic_id`: required id of the topic; all zero: any. Raises `DataLoss` if records of the range no longer exist,
    `TopicRecreated` if the topic has another id, `UnreadableRecords` if the broker sends invalid record batches, and
    the connection's errors if the cluster cannot be reached.
    """
    fetcher = _RangeFetcher(sync_client, partition, end, isolation, topic_id)
    offset, size = start, fetch_bytes
    prefetch = None
    try:
        while offset < end:
            result = (
                fetcher.fetch_at(offset, size)
                if prefetch is None
                else fetcher.finish_prefetch(prefetch, offset, size)
            )
            prefetch = None
            offset = result.next_offset
            if offset < end:
                size = _request_bytes(fetch_bytes, (end - offset) * result.bytes_per_offset)
                prefetch = sync_client.begin(fetcher.send_fetch(offset, size))
            if result.fetched.records:
                yield result.fetched
    finally:
        if prefetch is not None:
            sync_client.cancel(prefetch)


def _request_bytes(fetch_bytes: int, expected: float) -> int:
    """Size of the next request: the `expected` size of the remaining range plus 25 percent, at most `fetch_bytes`."""
    return min(fetch_bytes, max(REQUEST_BYTES_MIN, int(expected * 1.25)))


class _RangeFetcher:
    """Sends the Fetch requests of one range, and converts their errors."""

    def __init__(
        self,
        sync_client: SyncClient,
        partition: TopicPartition,
        end: int,
        isolation: int,
        topic_id: bytes,
    ) -> None:
        self._client = sync_client
        self._cluster = sync_client.cluster
        self._partition = partition
        self._end = end
        self._isolation = isolation
        self._topic_id = topic_id
        self._log_end_offset = -1
        """Log end offset of the last response without records, -1 for none; first seen at `_log_end_seen_at_s`."""
        self._log_end_seen_at_s = 0.0

    def fetch_at(self, offset: int, size: int) -> _FetchResult:
        """Fetch from `offset`, with retries, until the broker returns batches or a permanent error."""
        try:
            return self._client.run(
                self._cluster.retry(
                    lambda: self.send_fetch(offset, size), not_retried=(UnknownTopicOrPartition,)
                )
            )
        except OffsetOutOfRange:
            raise self._client.run(self._out_of_range_error(offset)) from None
        except UnknownTopicOrPartition:
            raise data_loss.partition_missing_error(self._partition) from None

    def finish_prefetch(self, prefetch: Any, offset: int, size: int) -> _FetchResult:
        """Return the result of a request that was sent ahead. If it failed, the request is sent again, with retries."""
        try:
            result: _FetchResult = self._client.wait(prefetch)
        except MansioError:
            return self.fetch_at(offset, size)
        return result

    async def send_fetch(self, offset: int, size: int) -> _FetchResult:
        """Send one Fetch request and return its result. Raises the error in the response."""
        topic, index = self._partition
        cluster = self._cluster
        view = await cluster.topic(topic)
        if self._is_recreated(view) or index >= len(view.partitions):  # or the cached metadata is stale
            cluster.mark_stale((topic,))
            view = await cluster.topic(topic)
            if self._is_recreated(view):
                raise data_loss.topic_recreated_error(topic)
        if index >= len(view.partitions):
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {index}")
        try:
            connection = await cluster.connection(await cluster.leader(topic, index), FETCH_CHANNEL)
            highest = FETCH_VERSION_WITH_TOPIC_NAMES_MAX if view.topic_id == NO_TOPIC_ID else None
            version = connection.version_for(ApiKey.FETCH, highest=highest)
            correlation_id = connection.next_correlation_id()
            framed = fetch.encode_request(
                version,
                correlation_id,
                connection.options.client_id,
                [(topic, view.topic_id, [fetch.FetchPartition(index, -1, offset, -1, -1, size)])],
                max_wait_ms=FETCH_WAIT_MS_MAX,
                min_bytes=1,
                max_bytes=size,
                isolation_level=self._isolation,
            )
            frame = await connection.exchange((framed,), correlation_id)
            return self._parse_response(offset, fetch.decode_response(version, frame))
        except STALE_METADATA_ERRORS as error:
            cluster.mark_stale((topic,))
            raise Unavailable(error.message) from error

    def _parse_response(self, offset: int, response: fetch.FetchResponse) -> _FetchResult:
        if response.error_code:
            raise client_error_for_code(response.error_code)
        parts = [
            part
            for _, _, parts in response.topics
            for part in parts
            if part.index == self._partition.partition
        ]
        if len(parts) != 1:
            raise Unavailable(f"the broker's response lacks {self._name}")
        part = parts[0]
        if part.error_code:
            error = topic_error_for_code(part.error_code, self._partition.topic, "READ")
            raise self._read_error(offset, error)
        records = memoryview(part.records or b"")
        stop, next_offset = self._complete_batches(offset, records)
        if next_offset == offset:
            raise self._empty_response_error(offset, part, len(records))
        result = FetchedBatches(records[:stop], part.aborted_transactions or ())
        return _FetchResult(result, next_offset, stop / (next_offset - offset))

    def _complete_batches(self, offset: int, records: memoryview) -> tuple[int, int]:
        """(end of the complete batches of the range in `records`, next offset after these batches)."""
        stop, next_offset = 0, offset
        try:
            for position, header in iterate_batches(records):
                if header.base_offset >= self._end:
                    return stop, self._end
                stop, next_offset = position + header.size, max(next_offset, header.last_offset + 1)
                if next_offset >= self._end:
                    break
        except DAMAGED_BATCH as error:
            if next_offset > offset:
                return stop, next_offset
            raise self._read_error(offset, error) from error
        return stop, next_offset

    def _read_error(self, offset: int, error: MansioError) -> MansioError:
        if isinstance(error, DAMAGED_BATCH):
            return UnreadableRecords(
                f"{self._name} cannot be read at offset {offset}: {error.message}. Run `mansio data check` on the"
                " broker's data, or start after this offset with startingOffsets"
            )
        return copied(error)

    def _empty_response_error(self, offset: int, part: fetch.FetchedPartition, size: int) -> MansioError:
        readable = part.last_stable_offset if self._isolation == READ_COMMITTED else part.high_watermark
        if size:
            return UnreadableRecords(
                f"{self._name} has a batch at offset {offset} of which the broker sends {size} bytes and no end:"
                " raise fetchBytes"
            )
        if 0 <= readable < self._end and readable <= offset and self._is_log_end_stable(offset):
            return data_loss.log_truncated_error(self._partition, self._end, readable)
        return Unavailable(f"the broker sent nothing of {self._name} at offset {offset}")

    def _is_log_end_stable(self, offset: int) -> bool:
        """Whether the log has ended at this offset for `TRUNCATION_CONFIRMATION_S`. A new leader may briefly report a
        lower high watermark than its predecessor.
        """
        if self._log_end_offset != offset:
            self._log_end_offset, self._log_end_seen_at_s = offset, time.monotonic()
        self._cluster.mark_stale((self._partition.topic,))
        return time.monotonic() >= self._log_end_seen_at_s + TRUNCATION_CONFIRMATION_S

    async def _out_of_range_error(self, offset: int) -> MansioError:
        """Return the error for an offset that is below or above the log."""
        listed = await list_offsets(self._cluster, {self._partition: EARLIEST_TIMESTAMP})
        earliest = listed[self._partition].offset
        if earliest > offset:
            return data_loss.offset_deleted_error(self._partition, offset, earliest)
        latest = await list_offsets(self._cluster, {self._partition: -1})
        return data_loss.log_truncated_error(self._partition, offset, latest[self._partition].offset)

    def _is_recreated(self, view: TopicMetadata) -> bool:
        return NO_TOPIC_ID not in (self._topic_id, view.topic_id) and view.topic_id != self._topic_id

    @property
    def _name(self) -> str:
        return f"partition {self._partition.partition} of topic {self._partition.topic}"
