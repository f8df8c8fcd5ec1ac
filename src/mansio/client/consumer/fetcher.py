"""Fetcher: fetches record batches of the assigned partitions ahead of the consumer (Kafka's Fetcher).

The fetcher keeps the next fetch offset of every partition, and the fetched batches that are not decoded yet. At most
one Fetch request per broker is in flight, for all partitions that have buffer space; the broker holds the request until
data is available (long polling). Each fetcher uses its own connections (channel).

Invariants:
* Completed fetches of one partition are returned in offset order without a gap.
* No batch of a removed partition is returned, even if a response with its batches is still in flight.
* At most `prefetch_bytes_max` plus one response are buffered.
* `consumed_offset` of a partition is never greater than `fetch_offset`.
* A removed partition state never becomes active again.
* A response is decoded with the offsets, version and topic names of its own request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mansio.client.leader_cache import LeaderCache
from mansio.client.tasks import BackgroundTasks, log_client_failure
from mansio.errors import CorruptMessage, MansioError, OffsetOutOfRange, UnknownTopicOrPartition
from mansio.net.cluster import group_by_topic
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import list_offsets
from mansio.net.retry import DEFAULT_BACKOFF, client_error_for_code, topic_error_for_code
from mansio.tracebacks import copied, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection
    from mansio.ports import Backoff

logger = logging.getLogger(__name__)

TOPIC_NAME_VERSION_MAX = 12
"""Highest version of Fetch that identifies topics by name; later versions use topic ids."""
FULL_BUFFER_PAUSE_S = 0.1
"""Pause between fetches from a broker while the buffer of another of its partitions is full."""
_CHANNEL_NUMBERS = itertools.count()
UNKNOWN_PARTITION_FAILURES_MIN = 3
"""Number of consecutive failures after which an unknown partition may be treated as deleted."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Options of a fetcher: sizes in bytes, times in milliseconds."""

    wait_ms_max: int = 500
    bytes_min: int = 1
    request_bytes_max: int = 16 << 20
    partition_bytes_max: int = 1 << 20
    prefetch_bytes_max: int = 32 << 20
    isolation_level: int = READ_COMMITTED
    on_out_of_range: str = "earliest"
    rack: str = ""
    """Rack of the consumer; empty: it reads from leaders only (KIP-392)."""
    unknown_topic_ms_max: float | None = 30_000
    """How long a partition may be unknown to the cluster before the consumer gets an error; None: without limit."""
    backoff: Backoff = DEFAULT_BACKOFF


class PartitionState:
    """Fetch state of one assigned partition of a consumer."""

    __slots__ = (
        "blocked_until",
        "buffered_bytes",
        "consumed_offset",
        "failure_count",
        "fetch_offset",
        "high_watermark",
        "is_active",
        "is_fetching",
        "is_paused",
        "is_revoking",
        "partition",
        "read_replica",
        "read_replica_until",
        "stop_offset",
        "unknown_since",
    )

    def __init__(self, partition: TopicPartition, offset: int, stop_offset: int | None = None) -> None:
        self.partition = partition
        self.fetch_offset = offset
        self.consumed_offset = offset
        """Offset below which the application has processed all messages."""
        self.stop_offset = stop_offset
        """Offset at which the consumer stops, exclusive; None: it does not stop."""
        self.high_watermark = -1
        self.buffered_bytes = 0
        self.is_active = True
        self.is_revoking = False
        """Whether the partition is being revoked: no more messages are delivered, but the position is still
        committed."""
        self.is_fetching = False
        self.is_paused = False
        self.failure_count = 0
        self.blocked_until = 0.0
        self.unknown_since: float | None = None
        self.read_replica: int | None = None
        """Node id of the follower that the leader has named to read from; None: the leader is asked."""
        self.read_replica_until = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether all messages before the stop offset are processed."""
        return self.stop_offset is not None and self.consumed_offset >= self.stop_offset


class CompletedFetch(NamedTuple):
    """Fetched batches of one partition that are not decoded yet; the last batch may be incomplete."""

    state: PartitionState
    offset: int
    """Requested offset; the base offset of the first batch may be lower."""
    batches: memoryview
    aborted_transactions: Sequence[tuple[int, int]]
    """(producer id, first offset) of each aborted transaction."""


class FetchLimits(NamedTuple):
    """Limits of one Fetch request: sizes in bytes, and the time in milliseconds for which the broker may hold the
    request."""

    wait_ms: int
    bytes_min: int
    request_bytes: int
    partition_bytes: int
    isolation_level: int
    rack: str


class FetchRequest:
    """One Fetch request to one broker. Encodes the request and decodes the response."""

    __slots__ = ("_names", "_requested", "_version", "may_wait", "node_id", "states")

    def __init__(self, node_id: int, states: Sequence[PartitionState], *, may_wait: bool) -> None:
        self.node_id = node_id
        self.states = states
        self.may_wait = may_wait
        """Whether the broker may hold the request until data is available."""
        self._requested: dict[TopicPartition, tuple[PartitionState, int]] = {}
        self._names: dict[bytes, str] = {}
        self._version = 0

    def encode(
        self, cluster: Cluster, connection: BrokerConnection, correlation_id: int, limits: FetchLimits
    ) -> bytes:
        """Encode the request, with its length prefix, for the current fetch offset of each partition. Raises
        `UnsupportedVersion`."""
        self._requested = {state.partition: (state, state.fetch_offset) for state in self.states}
        topics = []
        for topic, indexes in group_by_topic(self._requested).items():
            view = cluster.cached_topic(topic)
            topic_id = NO_TOPIC_ID if view is None else view.topic_id
            self._names[topic_id] = topic
            wanted = [
                fetch.FetchPartition(
                    index,
                    -1,
                    self._requested[TopicPartition(topic, index)][1],
                    -1,
                    -1,
                    limits.partition_bytes,
                )
                for index in indexes
            ]
            topics.append((topic, topic_id, wanted))
        highest = TOPIC_NAME_VERSION_MAX if NO_TOPIC_ID in self._names else None
        self._version = connection.version_for(ApiKey.FETCH, highest=highest)
        return fetch.encode_request(
            self._version,
            correlation_id,
            connection.options.client_id,
            topics,
            max_wait_ms=limits.wait_ms,
            min_bytes=limits.bytes_min,
            max_bytes=limits.request_bytes,
            isolation_level=limits.isolation_level,
            rack_id=limits.rack,
        )

    def read(self, frame: bytes) -> Iterator[tuple[PartitionState, int, fetch.FetchedPartition]]:
        """Decode a response: (partition state, requested offset, result) of each partition. Raises the top-level error
        of the response, or `WireError`."""
        response = fetch.decode_response(self._version, frame)
        if response.error_code:
            raise client_error_for_code(response.error_code)
        for name, topic_id, partitions in response.topics:
            topic = name or self._names[bytes(topic_id or b"")]
            for result in partitions:
                yield *self._requested[TopicPartition(topic, result.index)], result


class Fetcher:
    """Fetches the assigned partitions of one consumer. All methods run on the event loop's thread."""

    def __init__(self, cluster: Cluster, options: FetchOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.states: dict[TopicPartition, PartitionState] = {}
        self._completed_fetches: deque[CompletedFetch] = deque()
        self._buffered_bytes = 0
        self._nodes_in_flight: set[int] = set()
        self._paused_until: dict[int, float] = {}
        self._tasks = BackgroundTasks(self._loop, self._on_internal_error)
        self._leader_cache = LeaderCache(
            cluster, self._tasks, self._schedule_dispatch, refreshes_old_metadata=False
        )
        self._is_dispatch_scheduled = False
        self._earliest_timer = EarliestTimer(self._loop, self._schedule_dispatch)
        self._failure: MansioError | None = None
        self._change_event: asyncio.Event = asyncio.Event()
        self._is_closed = False
        self._channel = f"fetch {next(_CHANNEL_NUMBERS)}"
        """Name of the fetcher's own channel. A broker answers the requests of a connection in order, so a fetch that it
        holds would delay other consumers on the same connection."""

    # -- called by the consumer --------

    def add(self, states: Iterable[PartitionState]) -> None:
        """Start to fetch partitions."""
        for state in states:
            self.states[state.partition] = state
        self._schedule_dispatch()
        self._change_event.set()

    def remove(self, partitions: Iterable[TopicPartition]) -> list[PartitionState]:
        """Stop fetching partitions, discard their completed fetches, and return their states."""
        removed = [state for p in partitions if (state := self.states.pop(p, None)) is not None]
        for state in removed:
            state.is_active = False
        self._discard_inactive()
        self._schedule_dispatch()
        self._change_event.set()
        return removed

    def rewind(self, state: PartitionState) -> None:
        """Fetch a partition again from its consumed offset."""
        if self.remove([state.partition]):
            self.add([PartitionState(state.partition, state.consumed_offset, state.stop_offset)])

    def stop_delivery(self, partitions: Iterable[TopicPartition]) -> None:
        """Discard the completed fetches of partitions that are being revoked and stop fetching them, but keep their
        states until `remove`."""
        for partition in partitions:
            if partition in self.states:
                self.states[partition].is_revoking = True
        self._discard_inactive()

    def _discard_inactive(self) -> None:
        kept = deque(
            completed
            for completed in self._completed_fetches
            if completed.state.is_active and not completed.state.is_revoking
        )
        self._buffered_bytes = sum(len(completed.batches) for completed in kept)
        self._completed_fetches = kept

    def wake(self) -> None:
        """Wake the waiting reader and send fetches, after the state of a partition changed."""
        self._change_event.set()
        self._schedule_dispatch()

    def report_error(self, error: MansioError) -> None:
        """Store an error that is not retried; `pop` raises the error when no completed fetch is left."""
        self._failure = self._failure or without_traceback(error)
        self._change_event.set()

    def pop(self) -> CompletedFetch | None:
        """Remove and return the next completed fetch of a partition that is not paused; None if there is none. Raises
        the error passed to `report_error`."""
        for _ in range(len(self._completed_fetches)):
            completed = self._completed_fetches.popleft()
            if completed.state.is_paused:
                self._completed_fetches.append(completed)
                continue
            self._buffered_bytes -= len(completed.batches)
            completed.state.buffered_bytes -= len(completed.batches)
            self._paused_until.clear()
            self._schedule_dispatch()
            return completed
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise copied(failure)
        return None

    async def wait_for_change(self) -> None:
        """Wait until a fetch completes, the assignment changes or an error is reported."""
        self._change_event.clear()
        await self._change_event.wait()

    async def stop(self) -> None:
        """Stop fetching and ignore responses in flight. The partition states are kept."""
        self._is_closed = True
        self._earliest_timer.cancel()
        await self._tasks.close()
        await self._cluster.close_channel(self._channel)

    def restart(self) -> None:
        """Fetch again after `stop`. Has no effect if the fetcher is not stopped."""
        if not self._is_closed:
            return
        self._is_closed = False
        self._nodes_in_flight.clear()
        for state in self.states.values():
            state.is_fetching = False
        self._schedule_dispatch()

    async def close(self) -> None:
        """Stop fetching and remove all partitions."""
        await self.stop()
        self.remove(list(self.states))

    # -- choosing what to fetch --------

    def _schedule_dispatch(self) -> None:
        if not self._is_dispatch_scheduled and not self._is_closed:
            self._is_dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send a request to every broker that has no request in flight and serves a partition with buffer space."""
        self._is_dispatch_scheduled = False
        if self._is_closed:
            return
        try:
            for request in self._select_requests():
                self._start_request(request)
        except Exception as error:  # noqa: BLE001  # raised by the next poll; fetching continues
            self._on_internal_error(error)

    def _select_requests(self) -> list[FetchRequest]:
        now = self._loop.time()
        chosen: dict[int, list[PartitionState]] = {}
        full: set[int] = set()
        for state in self.states.values():
            if state.is_fetching or state.is_paused or state.is_revoking or self._is_fully_fetched(state):
                continue
            if state.blocked_until > now:
                self._earliest_timer.set(state.blocked_until)
                continue
            node = state.read_replica
            if node is None or now >= state.read_replica_until:
                state.read_replica = None
                node = self._leader_cache.find(*state.partition, now)
            if node is None:
                self._leader_cache.look_up(*state.partition, partial(self._handle_error, state))
                continue
            if node in self._nodes_in_flight:
                continue
            if (
                state.buffered_bytes >= self._options.partition_bytes_max
                or self._buffered_bytes >= self._options.prefetch_bytes_max
            ):
                full.add(node)
                continue
            chosen.setdefault(node, []).append(state)
        requests = []
        for node, states in chosen.items():
            if node in full and (paused_until := self._paused_until.get(node, 0.0)) > now:
                self._earliest_timer.set(paused_until)
                continue
            requests.append(FetchRequest(node, states, may_wait=node not in full))
        return requests

    def _is_fully_fetched(self, state: PartitionState) -> bool:
        return state.stop_offset is not None and state.fetch_offset >= state.stop_offset

    # -- one request --------

    def _start_request(self, request: FetchRequest) -> None:
        """Send a request, immediately if a connection is open. The connection's read callback handles the response."""
        self._nodes_in_flight.add(request.node_id)
        for state in request.states:
            state.is_fetching = True
        connection = self._cluster.existing_connection(request.node_id, self._channel)
        if connection is None:
            self._tasks.spawn(self._connect_and_send(request))
        else:
            self._send(connection, request)

    async def _connect_and_send(self, request: FetchRequest) -> None:
        try:
            connection = await self._cluster.connection(request.node_id, self._channel)
        except MansioError as error:
            self._on_response(request, b"", error)
        except BaseException:
            self._release(request)
            raise
        else:
            self._send(connection, request)

    def _send(self, connection: BrokerConnection, request: FetchRequest) -> None:
        options = self._options
        limits = FetchLimits(
            options.wait_ms_max if request.may_wait else 0,
            options.bytes_min,
            options.request_bytes_max,
            options.partition_bytes_max,
            options.isolation_level,
            options.rack,
        )
        reply = self._tasks.create_reply(partial(self._on_response, request))
        try:
            correlation_id = connection.next_correlation_id()
            framed = request.encode(self._cluster, connection, correlation_id, limits)
            timeout_ms = connection.options.request_timeout_ms + limits.wait_ms
            connection.begin_exchange((framed,), correlation_id, reply, timeout_ms=timeout_ms)
        except MansioError as error:
            reply.set_exception(copied(error))
        except BaseException:
            reply.ignore()
            self._release(request)
            raise

    def _on_response(self, request: FetchRequest, frame: bytes, error: MansioError | None) -> None:
        """Handle a response, or the error that ended the request without a response.

        A waiting reader continues before the next request is sent: both are scheduled for the next loop iteration, in
        this order.
        """
        try:
            if error is not None:
                raise copied(error)
            received = 0
            is_shared = len(request.states) > 1
            for state, offset, result in request.read(frame):
                size = self._handle_result(state, offset, result)
                received += size
                if size and is_shared:
                    # A response may have reached a limit: the next request asks for the other partitions first.
                    self.states[state.partition] = self.states.pop(state.partition)
            if not received and not request.may_wait:
                # Some partitions are full, the others empty: retry soon, without a busy loop.
                self._paused_until[request.node_id] = self._loop.time() + FULL_BUFFER_PAUSE_S
        except MansioError as failure:
            for state in request.states:
                self._handle_error(state, failure)
        finally:
            self._release(request)

    def _release(self, request: FetchRequest) -> None:
        """Mark the broker and the partitions of an ended request as having no request in flight."""
        self._nodes_in_flight.discard(request.node_id)
        for state in request.states:
            state.is_fetching = False
        self._schedule_dispatch()

    def _handle_result(self, state: PartitionState, offset: int, result: fetch.FetchedPartition) -> int:
        """Handle the result of one partition. Returns the number of bytes received."""
        if not state.is_active or state.is_revoking or state.fetch_offset != offset:
            return 0
        if result.error_code:
            error = topic_error_for_code(result.error_code, state.partition.topic, "READ")
            self._handle_error(state, error)
            return 0
        if result.preferred_read_replica >= 0:
            state.read_replica = result.preferred_read_replica
            state.read_replica_until = self._loop.time() + self._cluster.metadata_age_ms_max / 1000
            return 0
        state.failure_count = 0
        state.unknown_since = None
        state.high_watermark = result.high_watermark
        batches = result.records
        if batches is None or not len(batches):
            return 0
        after = _next_offset(batches)
        if after is None:
            self.report_error(MansioError(f"{state.partition}: a batch is larger than the fetch limit"))
            return 0
        state.fetch_offset = max(after, offset)
        self._completed_fetches.append(
            CompletedFetch(state, offset, memoryview(batches), result.aborted_transactions or ())
        )
        state.buffered_bytes += len(batches)
        self._buffered_bytes += len(batches)
        self._change_event.set()
        return len(batches)

    # -- failures --------

    def _handle_error(self, state: PartitionState, error: MansioError) -> None:
        if not state.is_active:
            return
        now = self._loop.time()
        is_by_follower, state.read_replica = state.read_replica is not None, None
        if isinstance(error, OffsetOutOfRange) and not is_by_follower:
            self._handle_offset_out_of_range(state, error)
            return
        if isinstance(error, CorruptMessage):
            topic, index = state.partition
            error = CorruptMessage(
                f"{topic}-{index} at offset {state.fetch_offset}: stored records are damaged"
            )
        if isinstance(error, UnknownTopicOrPartition):
            state.unknown_since = state.unknown_since or now
            if self._is_deleted(state, now):
                self.report_error(error)
        elif not error.retriable and not is_by_follower:  # the leader decides
            self.report_error(error)
        self._cluster.mark_stale((state.partition.topic,))
        state.failure_count += 1
        state.blocked_until = now + self._options.backoff.delay_seconds(state.failure_count)

    def _is_deleted(self, state: PartitionState, now: float) -> bool:
        """Whether a partition is treated as deleted: it has been unknown for `unknown_topic_ms_max` and in at least
        `UNKNOWN_PARTITION_FAILURES_MIN` consecutive attempts."""
        limit_ms = self._options.unknown_topic_ms_max
        if limit_ms is None or state.unknown_since is None:
            return False
        return (
            now - state.unknown_since > limit_ms / 1000
            and state.failure_count + 1 >= UNKNOWN_PARTITION_FAILURES_MIN
        )

    def _on_internal_error(self, error: Exception) -> None:
        """Report an unexpected exception to the reader. If the reader polls again, fetching continues."""
        self.report_error(log_client_failure(error))
        self._earliest_timer.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    def _handle_offset_out_of_range(self, state: PartitionState, error: OffsetOutOfRange) -> None:
        policy = self._options.on_out_of_range
        if policy == "error":
            topic, index = state.partition
            self.report_error(
                OffsetOutOfRange(
                    f"offset {state.fetch_offset} of partition {index} of topic {topic}: {error.message}"
                )
            )
            state.blocked_until = float("inf")
            return
        state.blocked_until = float("inf")
        self._tasks.spawn(
            self._reset_fetch_offset(state, EARLIEST_TIMESTAMP if policy == "earliest" else LATEST_TIMESTAMP)
        )

    async def _reset_fetch_offset(self, state: PartitionState, timestamp: int) -> None:
        try:
            listed = await list_offsets(self._cluster, {state.partition: timestamp})
            offset = listed[state.partition].offset
            logger.warning(
                "offset %d of partition %d of topic %s is out of range; continuing at %d",
                state.fetch_offset,
                state.partition.partition,
                state.partition.topic,
                offset,
            )
            state.fetch_offset = offset
            if not state.buffered_bytes:
                state.consumed_offset = offset
            state.blocked_until = 0
        except MansioError as error:
            state.blocked_until = 0
            self._handle_error(state, error)
        finally:
            self._schedule_dispatch()


def _next_offset(batches: memoryview) -> int | None:
    """Return the offset after the last complete batch; None if no batch is complete."""
    last = None
    for _, header in iterate_batches(batches):
        last = header
    return None if last is None else last.last_offset + 1
