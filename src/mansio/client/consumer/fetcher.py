"""Record batches from the brokers, a bounded distance ahead of the reader.

Owns what is fetched: for every partition the next offset to ask for, and the raw batches that came and were not
read yet. One request per broker is under way, with all partitions that have room; it waits at the broker until there
is something (long polling), on a lane of its own.

Always true: chunks of one partition come out in offset order without a gap; a partition that was removed gives
nothing more, even if an answer with its batches is still under way; what waits in memory is at most
`prefetch_bytes_max` and one answer more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mansio.client.consumer.fetch_request import FetchLimits, FetchRequest
from mansio.client.consumer.partition_state import CompletedFetch, PartitionState
from mansio.client.leader_cache import LeaderCache
from mansio.client.tasks import Tasks, client_failed
from mansio.errors import MansioError, OffsetOutOfRange, UnknownTopicOrPartition
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.offsets import EARLIEST, LATEST, READ_COMMITTED, list_offsets
from mansio.net.retry import DEFAULT_BACKOFF, Backoff, error_for
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

__all__ = ["CompletedFetch", "FetchOptions", "Fetcher", "PartitionState"]

UNREAD_PAUSE_SECONDS = 0.1
_CHANNEL_NUMBERS = itertools.count()
UNKNOWN_ANSWERS_MIN = 3
"""How many times in a row metadata has to say that a partition is unknown before that is believed."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How much to read ahead (bytes) and how long a broker may wait for more to come."""

    wait_ms_max: int = 500
    bytes_min: int = 1
    request_bytes_max: int = 16 << 20
    partition_bytes_max: int = 1 << 20
    prefetch_bytes_max: int = 32 << 20
    isolation_level: int = READ_COMMITTED
    on_out_of_range: str = "earliest"
    unknown_ms_max: float | None = 30_000
    """How long a partition may be unknown to the cluster before that is an error; None: for ever."""
    backoff: Backoff = DEFAULT_BACKOFF


class Fetcher:
    """Fetches for one consumer. All methods belong to the loop's thread."""

    def __init__(self, cluster: Cluster, options: FetchOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.states: dict[TopicPartition, PartitionState] = {}
        self._completed_fetches: deque[CompletedFetch] = deque()
        self._buffered_bytes = 0
        self._busy: set[int] = set()
        self._paused_until: dict[int, float] = {}
        self._tasks = Tasks(self._loop, self._on_internal_error)
        self._leader_cache = LeaderCache(cluster, self._tasks, self._wake, refreshes=False)
        self._woken = False
        self._earliest_timer = EarliestTimer(self._loop, self._wake)
        self._failure: MansioError | None = None
        self._arrival: asyncio.Event = asyncio.Event()
        self._is_closed = False
        self._channel = f"fetch {next(_CHANNEL_NUMBERS)}"
        """Connections of its own: a fetch waits at the broker, and would hold up those of other consumers."""

    # -- what the consumer says --------

    def add(self, states: Iterable[PartitionState]) -> None:
        """Begin to read partitions."""
        for state in states:
            self.states[state.partition] = state
        self._wake()
        self._arrival.set()

    def remove(self, partitions: Iterable[TopicPartition]) -> list[PartitionState]:
        """Stop reading partitions and forget what was read ahead of them."""
        removed = [state for p in partitions if (state := self.states.pop(p, None)) is not None]
        for state in removed:
            state.is_active = False
        self._discard_inactive()
        self._wake()
        self._arrival.set()
        return removed

    def rewind(self, state: PartitionState) -> None:
        """Read a partition again from the first offset that was not handed out."""
        if self.remove([state.partition]):
            self.add([PartitionState(state.partition, state.consumed, state.stop_offset)])

    def end(self, partitions: Iterable[TopicPartition]) -> None:
        """Give nothing more of partitions that are about to be removed; their states stay until then."""
        for partition in partitions:
            if partition in self.states:
                self.states[partition].is_ending = True
        self._discard_inactive()

    def _discard_inactive(self) -> None:
        kept = deque(
            chunk for chunk in self._completed_fetches if chunk.state.is_active and not chunk.state.is_ending
        )
        self._buffered_bytes = sum(len(chunk.batches) for chunk in kept)
        self._completed_fetches = kept

    def wake(self) -> None:
        """Something changed that the reader has to look at."""
        self._arrival.set()
        self._wake()

    def fail(self, error: MansioError) -> None:
        """Something went wrong for good: `pop` raises it once what was read is used up."""
        self._failure = self._failure or error
        self._arrival.set()

    def pop(self) -> CompletedFetch | None:
        """The next chunk, if one is there."""
        for _ in range(len(self._completed_fetches)):
            chunk = self._completed_fetches.popleft()
            if chunk.state.is_paused:
                self._completed_fetches.append(chunk)
                continue
            self._buffered_bytes -= len(chunk.batches)
            chunk.state.buffered_bytes -= len(chunk.batches)
            self._paused_until.clear()
            self._wake()
            return chunk
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return None

    async def changed(self) -> None:
        """Wait until a chunk came, an assignment changed or something failed."""
        self._arrival.clear()
        await self._arrival.wait()

    async def stop(self) -> None:
        """Fetch nothing more. Answers still under way are thrown away; what is known of the partitions stays."""
        self._is_closed = True
        self._earliest_timer.cancel()
        await self._tasks.end()
        await self._cluster.close_channel(self._channel)

    async def close(self) -> None:
        """Stop, and forget everything."""
        await self.stop()
        self.remove(list(self.states))

    # -- choosing what to fetch --------

    def _wake(self) -> None:
        if not self._woken and not self._is_closed:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start a request to every broker that has none under way and leads a partition with room."""
        self._woken = False
        if self._is_closed:
            return
        try:
            for request in self._choose():
                self._start(request)
        except Exception as error:  # noqa: BLE001  # it ends nothing but this round, and the reader is told
            self._on_internal_error(error)

    def _choose(self) -> list[FetchRequest]:
        now = self._loop.time()
        chosen: dict[int, list[PartitionState]] = {}
        full: set[int] = set()
        for state in self.states.values():
            if state.is_fetching or state.is_paused or state.is_ending or self._is_fully_fetched(state):
                continue
            if state.blocked_until > now:
                self._earliest_timer.set(state.blocked_until)
                continue
            node = self._leader_cache.find(*state.partition, now)
            if node is None:
                self._leader_cache.look_up(*state.partition, partial(self._failed, state))
                continue
            if node in self._busy:
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
            if node in full and (rest_until := self._paused_until.get(node, 0.0)) > now:
                self._earliest_timer.set(rest_until)
                continue
            requests.append(FetchRequest(node, states, may_wait=node not in full))
        return requests

    def _is_fully_fetched(self, state: PartitionState) -> bool:
        return state.stop_offset is not None and state.fetch_offset >= state.stop_offset

    # -- one request --------

    def _start(self, request: FetchRequest) -> None:
        """Ask. Where a connection is open that is done at once, and the answer dealt with where it is read."""
        self._busy.add(request.node)
        for state in request.states:
            state.is_fetching = True
        connection = self._cluster.open_connection(request.node, self._channel)
        if connection is None:
            self._tasks.spawn(self._connect_and_send(request))
        else:
            self._send(connection, request)

    async def _connect_and_send(self, request: FetchRequest) -> None:
        try:
            connection = await self._cluster.connection(request.node, self._channel)
        except MansioError as error:
            self._answered(request, b"", error)
        except BaseException:
            self._release(request)
            raise
        else:
            self._send(connection, request)

    def _send(self, connection: Connection, request: FetchRequest) -> None:
        options = self._options
        limits = FetchLimits(
            options.wait_ms_max if request.may_wait else 0,
            options.bytes_min,
            options.request_bytes_max,
            options.partition_bytes_max,
            options.isolation_level,
        )
        reply = self._tasks.reply(partial(self._answered, request))
        try:
            correlation_id = connection.next_correlation_id()
            framed = request.encode(self._cluster, connection, correlation_id, limits)
            timeout_ms = connection.options.request_timeout_ms + limits.wait_ms
            connection.begin((framed,), correlation_id, reply, timeout_ms=timeout_ms)
        except MansioError as error:
            reply.set_exception(error)
        except BaseException:
            reply.give_up()
            self._release(request)
            raise

    def _answered(self, request: FetchRequest, frame: bytes, error: MansioError | None) -> None:
        """What a broker said, or the error that came instead. Whoever waits for records goes on before the next
        request is made: both are in the loop's next turn, in this order."""
        try:
            if error is not None:
                raise error
            got = 0
            for state, offset, answer in request.read(frame):
                got += self._take(state, offset, answer)
            if not got and not request.may_wait:
                # Some partitions are full, the others empty: look again soon, but do not spin.
                self._paused_until[request.node] = self._loop.time() + UNREAD_PAUSE_SECONDS
        except MansioError as failure:
            for state in request.states:
                self._failed(state, failure)
        finally:
            self._release(request)

    def _release(self, request: FetchRequest) -> None:
        """A request is over, however it ended."""
        self._busy.discard(request.node)
        for state in request.states:
            state.is_fetching = False
        self._wake()

    def _take(self, state: PartitionState, offset: int, answer: Any) -> int:
        """One partition of an answer; returns how many bytes came."""
        if not state.is_active or state.is_ending or state.fetch_offset != offset:
            return 0
        if answer.error_code:
            self._failed(state, error_for(answer.error_code))
            return 0
        state.failures = 0
        state.unknown_since = None
        state.high_watermark = answer.high_watermark
        batches = answer.records
        if batches is None or not len(batches):
            return 0
        after = _offset_after(batches)
        if after is None:
            self.fail(MansioError(f"{state.partition}: a batch larger than the fetch limit"))
            return 0
        state.fetch_offset = max(after, offset)
        self._completed_fetches.append(
            CompletedFetch(state, offset, memoryview(batches), answer.aborted or ())
        )
        state.buffered_bytes += len(batches)
        self._buffered_bytes += len(batches)
        self._arrival.set()
        return len(batches)

    # -- failures --------

    def _failed(self, state: PartitionState, error: MansioError) -> None:
        if not state.is_active:
            return
        if isinstance(error, OffsetOutOfRange):
            self._out_of_range(state, error)
            return
        now = self._loop.time()
        if isinstance(error, UnknownTopicOrPartition):
            state.unknown_since = state.unknown_since or now
            if self._is_gone(state, now):
                self.fail(error)
        elif not error.retriable:
            self.fail(error)
        self._cluster.mark_stale((state.partition.topic,))
        state.failures += 1
        state.blocked_until = now + self._options.backoff.delay_seconds(state.failures)

    def _is_gone(self, state: PartitionState, now: float) -> bool:
        """Whether a partition has been unknown for so long, and so often, that it will not come back."""
        limit_ms = self._options.unknown_ms_max
        if limit_ms is None or state.unknown_since is None:
            return False
        return now - state.unknown_since > limit_ms / 1000 and state.failures + 1 >= UNKNOWN_ANSWERS_MIN

    def _on_internal_error(self, error: Exception) -> None:
        """Something happened here that nobody foresaw: the reader is told, and if it goes on, so does the fetching."""
        self.fail(client_failed(error))
        self._earliest_timer.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    def _out_of_range(self, state: PartitionState, error: OffsetOutOfRange) -> None:
        policy = self._options.on_out_of_range
        if policy == "error":
            topic, index = state.partition
            self.fail(
                OffsetOutOfRange(
                    f"offset {state.fetch_offset} of partition {index} of topic {topic}: {error.message}"
                )
            )
            state.blocked_until = float("inf")
            return
        state.blocked_until = float("inf")
        self._tasks.spawn(self._reset(state, EARLIEST if policy == "earliest" else LATEST))

    async def _reset(self, state: PartitionState, to: int) -> None:
        try:
            listed = await list_offsets(self._cluster, {state.partition: to})
            offset = listed[state.partition].offset
            logger.warning(
                "offset %d of partition %d of topic %s is gone; going on at %d",
                state.fetch_offset,
                state.partition.partition,
                state.partition.topic,
                offset,
            )
            state.fetch_offset = offset
            if not state.buffered_bytes:
                state.consumed = offset
            state.blocked_until = 0
        except MansioError as error:
            state.blocked_until = 0
            self._failed(state, error)
        finally:
            self._wake()


def _offset_after(batches: memoryview) -> int | None:
    """The offset after the last whole batch; None when there is not one whole batch."""
    last = None
    for _, header in iterate_batches(batches):
        last = header
    return None if last is None else last.last_offset + 1
