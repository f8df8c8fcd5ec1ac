"""The record batches of one stretch of one partition, as the broker sends them.

Owns the requests of one reading task. One request is always ahead: it goes out before the answer in hand is given to
the caller, whose decoding then costs no waiting. Memory is the answer in hand, and one more in the socket.

Always true: batches come out whole, in the order of offsets, and cover the stretch; the first may begin before it and
the last may reach beyond it. What fails in passing is asked again for the cluster's retry time; what is gone raises
`DataLoss` and names the offset.
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
from mansio.link.leaders import STALE_METADATA
from mansio.link.metadata import NO_TOPIC_ID
from mansio.link.offsets import EARLIEST, READ_COMMITTED, list_offsets
from mansio.link.retry import error_for
from mansio.wire import fetch
from mansio.wire.records import iterate_batches
from mansio.wire.versions import ApiKey

from . import losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.link.metadata import TopicView
    from mansio.wire.topic_partition import TopicPartition

    from .door import Door

LANE: Final = "fetch spark"
"""Connections of its own: an answer of megabytes would hold up other questions."""
WAIT_MS_MAX: Final = 500
FETCH_BYTES: Final = 4 << 20
SMALLEST_REQUEST_BYTES: Final = 64 << 10
HIGHEST_VERSION_WITH_NAMES: Final = 12
LOOK_AGAIN_S: Final = 3.0
"""For so long a log that ends too early is asked again, before its records are called lost."""


class Fetched(NamedTuple):
    """One answer: whole record batches, and the aborted transactions among them (producer id, first offset)."""

    records: memoryview
    aborted: Sequence[tuple[int, int]] = ()


class _Answer(NamedTuple):
    """`Fetched`, and where to go on."""

    fetched: Fetched
    next_offset: int
    bytes_per_offset: float


def fetch_range(
    door: Door,
    partition: TopicPartition,
    start: int,
    end: int,
    *,
    fetch_bytes: int = FETCH_BYTES,
    isolation: int = READ_COMMITTED,
    topic_id: bytes = NO_TOPIC_ID,
) -> Iterator[Fetched]:
    """The batches with the records of [start, end), in answers of about `fetch_bytes`.

    `topic_id`: the topic has to be this one (all zero: any of its name). Raises `DataLoss` when records of the stretch
    are no longer there, `TopicRecreated`, `UnreadableRecords` when what the broker sends is not record batches, and
    what the cluster raises when it cannot be reached.
    """
    asking = _Asking(door, partition, end, isolation, topic_id)
    offset, size = start, fetch_bytes
    ahead = None
    try:
        while offset < end:
            answer = asking.ask(offset, size) if ahead is None else asking.finish(ahead, offset, size)
            ahead = None
            offset = answer.next_offset
            if offset < end:
                size = _request_bytes(fetch_bytes, (end - offset) * answer.bytes_per_offset)
                ahead = door.begin(asking.attempt(offset, size))
            if answer.fetched.records:
                yield answer.fetched
    finally:
        if ahead is not None:
            door.give_up(ahead)


def _request_bytes(fetch_bytes: int, expected: float) -> int:
    """As much as the rest of the stretch takes by the look of the last answer, and a quarter more; not all there is."""
    return min(fetch_bytes, max(SMALLEST_REQUEST_BYTES, int(expected * 1.25)))


class _Asking:
    """The questions about one stretch."""

    def __init__(
        self,
        door: Door,
        partition: TopicPartition,
        end: int,
        isolation: int,
        topic_id: bytes,
    ) -> None:
        self._door = door
        self._cluster = door.cluster
        self._partition = partition
        self._end = end
        self._isolation = isolation
        self._topic_id = topic_id
        self._short_at = -1
        self._short_since = 0.0

    def ask(self, offset: int, size: int) -> _Answer:
        """Ask until there is an answer, or an error that stays."""
        try:
            return self._door.run(
                self._cluster.retry(lambda: self.attempt(offset, size), final=(UnknownTopicOrPartition,))
            )
        except OffsetOutOfRange:
            raise self._door.run(self._why_gone(offset)) from None
        except UnknownTopicOrPartition:
            raise losses.partition_gone(self._partition) from None

    def finish(self, ahead: Any, offset: int, size: int) -> _Answer:
        """The answer to a request that went ahead; whatever became of that, the question is asked again in earnest."""
        try:
            answer: _Answer = self._door.wait(ahead)
        except MansioError:
            return self.ask(offset, size)
        return answer

    async def attempt(self, offset: int, size: int) -> _Answer:
        """One request. Raises what stands in the answer."""
        topic, index = self._partition
        cluster = self._cluster
        view = await cluster.topic(topic)
        if self._is_other(view) or index >= len(view.partitions):  # or what is known here is old
            cluster.mark_stale((topic,))
            view = await cluster.topic(topic)
            if self._is_other(view):
                raise losses.recreated(topic)
        if index >= len(view.partitions):
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {index}")
        try:
            connection = await cluster.connection(await cluster.leader(topic, index), LANE)
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

    def _read(self, offset: int, response: fetch.FetchResponse) -> _Answer:
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
            raise self._refusal(offset, error_for(part.error_code))
        records = memoryview(part.records or b"")
        stop, next_offset = self._whole_batches(offset, records)
        if next_offset == offset:
            raise self._nothing(offset, part, len(records))
        answer = Fetched(records[:stop], part.aborted or ())
        return _Answer(answer, next_offset, stop / (next_offset - offset))

    def _whole_batches(self, offset: int, records: memoryview) -> tuple[int, int]:
        """(where the batches of the stretch end in an answer, the offset after them)."""
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
            raise self._refusal(offset, error) from error
        return stop, next_offset

    def _refusal(self, offset: int, error: MansioError) -> MansioError:
        if isinstance(error, (CorruptMessage, UnsupportedMessageFormat)):
            return UnreadableRecords(
                f"{self._name} cannot be read at offset {offset}: {error.message}. See what `mansio doctor` says of"
                " the broker's data, or begin behind it with startingOffsets"
            )
        return error

    def _nothing(self, offset: int, part: fetch.FetchedPartition, size: int) -> MansioError:
        readable = part.last_stable_offset if self._isolation == READ_COMMITTED else part.high_watermark
        if size:
            return UnreadableRecords(
                f"{self._name} has a batch at offset {offset} of which the broker sends {size} bytes and no end:"
                " raise fetchBytes"
            )
        if 0 <= readable < self._end and readable <= offset and self._has_stayed_short(offset):
            return losses.ends_earlier(self._partition, self._end, readable)
        return Unavailable(f"the broker sent nothing of {self._name} at offset {offset}")

    def _has_stayed_short(self, offset: int) -> bool:
        """Whether the log has ended at this offset for a while: a leader that has just taken over may not know yet how
        far its predecessor's records were committed."""
        if self._short_at != offset:
            self._short_at, self._short_since = offset, time.monotonic()
        self._cluster.mark_stale((self._partition.topic,))
        return time.monotonic() >= self._short_since + LOOK_AGAIN_S

    async def _why_gone(self, offset: int) -> MansioError:
        """What to say of an offset that is not in the log."""
        listed = await list_offsets(self._cluster, {self._partition: EARLIEST})
        earliest = listed[self._partition].offset
        if earliest > offset:
            return losses.begins_later(self._partition, offset, earliest)
        latest = await list_offsets(self._cluster, {self._partition: -1})
        return losses.ends_earlier(self._partition, offset, latest[self._partition].offset)

    def _is_other(self, view: TopicView) -> bool:
        return NO_TOPIC_ID not in (self._topic_id, view.topic_id) and view.topic_id != self._topic_id

    @property
    def _name(self) -> str:
        return f"partition {self._partition.partition} of topic {self._partition.topic}"
