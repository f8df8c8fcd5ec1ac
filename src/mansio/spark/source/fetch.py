"""Record batches of one range of one partition, fetched with read-ahead.

Owns the Fetch requests of one task. One request is always outstanding: it is sent before the current response is passed
to the caller, so decoding overlaps with the network. Memory: the current response, and one more in the socket buffer.

Invariants:
* Batches are complete, in offset order, and cover the range; the first may begin before it and the last may end after
  it.
* Transient errors are retried for the cluster's retry timeout; a missing offset raises `DataLoss` with the offset.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import (
    CorruptMessage,
    MansioError,
    OffsetOutOfRange,
    Unavailable,
    UnknownTopicOrPartition,
    UnreadableRecords,
    UnsupportedMessageFormat,
)
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import EARLIEST, READ_COMMITTED, STALE_METADATA, list_offsets
from mansio.net.retry import error_for
from mansio.spark.source import data_loss
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.net.metadata import TopicView
    from mansio.spark.sync_client import SyncClient
    from mansio.wire.topic_partition import TopicPartition

CHANNEL: Final = "fetch spark"
"""Separate connections: a response of several megabytes would delay other requests."""
WAIT_MS_MAX: Final = 500
FETCH_BYTES: Final = 4 << 20
SMALLEST_REQUEST_BYTES: Final = 64 << 10
HIGHEST_VERSION_WITH_NAMES: Final = 12
SHORT_LOG_TIMEOUT_S: Final = 3.0
"""A log that ends too early is fetched again for this time before its records are reported as lost."""


class FetchedBatches(NamedTuple):
    """One response: complete record batches, and aborted transactions among them (producer id, first offset)."""

    records: memoryview
    aborted: Sequence[tuple[int, int]] = ()


class _FetchResult(NamedTuple):
    """`FetchedBatches` and the offset of the next request."""

    fetched: FetchedBatches
    next_offset: int
    bytes_per_offset: float


def fetch_range(
    sync_client: SyncClient,
    partition: TopicPartition,
    start: int,
    end: int,
    *,
    fetch_bytes: int = FETCH_BYTES,
    isolation: int = READ_COMMITTED,
    topic_id: bytes = NO_TOPIC_ID,
) -> Iterator[FetchedBatches]:
    """The batches with the records of [start, end), in responses of about `fetch_bytes`.

    `topic_id`: required id of the topic (all zero: any). Raises `DataLoss` if records of the range no longer exist,
    `TopicRecreated`, `UnreadableRecords` if the broker sends invalid record batches, and the cluster's errors if it
    cannot be reached.
    """
    fetcher = _RangeFetcher(sync_client, partition, end, isolation, topic_id)
    offset, size = start, fetch_bytes
    prefetch = None
    try:
        while offset < end:
            result = (
                fetcher.fetch_at(offset, size) if prefetch is None else fetcher.finish(prefetch, offset, size)
            )
            prefetch = None
            offset = result.next_offset
            if offset < end:
                size = _request_bytes(fetch_bytes, (end - offset) * result.bytes_per_offset)
                prefetch = sync_client.begin(fetcher.attempt(offset, size))
            if result.fetched.records:
                yield result.fetched
    finally:
        if prefetch is not None:
            sync_client.cancel(prefetch)


def _request_bytes(fetch_bytes: int, expected: float) -> int:
    """Estimated size of the remaining range, by the bytes per offset of the last response, plus 25 percent."""
    return min(fetch_bytes, max(SMALLEST_REQUEST_BYTES, int(expected * 1.25)))


class _RangeFetcher:
    """The Fetch requests of one range."""

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
        self._short_at = -1
        self._short_since = 0.0

    def fetch_at(self, offset: int, size: int) -> _FetchResult:
        """Fetch until there is a response or a permanent error."""
        try:
            return self._client.run(
                self._cluster.retry(lambda: self.attempt(offset, size), final=(UnknownTopicOrPartition,))
            )
        except OffsetOutOfRange:
            raise self._client.run(self._out_of_range_error(offset)) from None
        except UnknownTopicOrPartition:
            raise data_loss.partition_missing(self._partition) from None

    def finish(self, prefetch: Any, offset: int, size: int) -> _FetchResult:
        """The result of a prefetched request; if that failed, the request is sent again with retries."""
        try:
            result: _FetchResult = self._client.wait(prefetch)
        except MansioError:
            return self.fetch_at(offset, size)
        return result

    async def attempt(self, offset: int, size: int) -> _FetchResult:
        """One request. Raises the error of the response."""
        topic, index = self._partition
        cluster = self._cluster
        view = await cluster.topic(topic)
        if self._is_recreated(view) or index >= len(view.partitions):  # or the cached metadata is stale
            cluster.mark_stale((topic,))
            view = await cluster.topic(topic)
            if self._is_recreated(view):
                raise data_loss.topic_recreated(topic)
        if index >= len(view.partitions):
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {index}")
        try:
            connection = await cluster.connection(await cluster.leader(topic, index), CHANNEL)
            highest = HIGHEST_VERSION_WITH_NAMES if view.topic_id == NO_TOPIC_ID else None
            version = connection.version_for(ApiKey.FETCH, highest=highest)
            correlation_id = connection.next_correlation_id()
            framed = fetch.encode_request(
                version,
                correlation_id,
                connection.options.client_id,
                [(topic, view.topic_id, [fetch.FetchPartition(index, -1, offset, -1, -1, size)])],
                max_wait_ms=WAIT_MS_MAX,
                min_bytes=1,
                max_bytes=size,
                isolation_level=self._isolation,
            )
            frame = await connection.exchange((framed,), correlation_id)
            return self._read(offset, fetch.decode_response(version, frame))
        except STALE_METADATA as error:
            cluster.mark_stale((topic,))
            raise Unavailable(error.message) from error

    def _read(self, offset: int, response: fetch.FetchResponse) -> _FetchResult:
        if response.error_code:
            raise error_for(response.error_code)
        parts = [
            part
            for _, _, parts in response.topics
            for part in parts
            if part.index == self._partition.partition
        ]
        if len(parts) != 1:
            raise Unavailable(f"the broker left {self._name} out of its answer")
        part = parts[0]
        if part.error_code:
            raise self._read_error(offset, error_for(part.error_code))
        records = memoryview(part.records or b"")
        stop, next_offset = self._complete_batches(offset, records)
        if next_offset == offset:
            raise self._empty_response_error(offset, part, len(records))
        result = FetchedBatches(records[:stop], part.aborted_transactions or ())
        return _FetchResult(result, next_offset, stop / (next_offset - offset))

    def _complete_batches(self, offset: int, records: memoryview) -> tuple[int, int]:
        """(end of the batches of the range in a response, offset after them)."""
        stop, next_offset = 0, offset
        try:
            for position, header in iterate_batches(records):
                if header.base_offset >= self._end:
                    return stop, self._end
                stop, next_offset = position + header.size, max(next_offset, header.last_offset + 1)
                if next_offset >= self._end:
                    break
        except (CorruptMessage, UnsupportedMessageFormat) as error:
            if next_offset > offset:
                return stop, next_offset
            raise self._read_error(offset, error) from error
        return stop, next_offset

    def _read_error(self, offset: int, error: MansioError) -> MansioError:
        if isinstance(error, (CorruptMessage, UnsupportedMessageFormat)):
            return UnreadableRecords(
                f"{self._name} cannot be read at offset {offset}: {error.message}. Run `mansio data check` on the"
                " broker's data, or start after this offset with startingOffsets"
            )
        return error

    def _empty_response_error(self, offset: int, part: fetch.FetchedPartition, size: int) -> MansioError:
        readable = part.last_stable_offset if self._isolation == READ_COMMITTED else part.high_watermark
        if size:
            return UnreadableRecords(
                f"{self._name} has a batch at offset {offset} of which the broker sends {size} bytes and no end:"
                " raise fetchBytes"
            )
        if 0 <= readable < self._end and readable <= offset and self._is_log_end_stable(offset):
            return data_loss.log_truncated(self._partition, self._end, readable)
        return Unavailable(f"the broker sent nothing of {self._name} at offset {offset}")

    def _is_log_end_stable(self, offset: int) -> bool:
        """Whether the log has ended at this offset for a while. A new leader may not know its predecessor's high
        watermark yet.
        """
        if self._short_at != offset:
            self._short_at, self._short_since = offset, time.monotonic()
        self._cluster.mark_stale((self._partition.topic,))
        return time.monotonic() >= self._short_since + SHORT_LOG_TIMEOUT_S

    async def _out_of_range_error(self, offset: int) -> MansioError:
        """The error for an offset that is not in the log."""
        listed = await list_offsets(self._cluster, {self._partition: EARLIEST})
        earliest = listed[self._partition].offset
        if earliest > offset:
            return data_loss.log_start_passed(self._partition, offset, earliest)
        latest = await list_offsets(self._cluster, {self._partition: -1})
        return data_loss.log_truncated(self._partition, offset, latest[self._partition].offset)

    def _is_recreated(self, view: TopicView) -> bool:
        return NO_TOPIC_ID not in (self._topic_id, view.topic_id) and view.topic_id != self._topic_id

    @property
    def _name(self) -> str:
        return f"partition {self._partition.partition} of topic {self._partition.topic}"
