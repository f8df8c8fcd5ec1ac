"""Writes what a broker's partitions report to the internal topic `__mansio_trace`, as one block a second.

Nothing waits for the trace, and it refuses nothing. A broker appends to one partition of the topic, which it leads if
possible, whatever the number of partitions that report.

Invariants:
* Blocks are appended in the order of their numbers, one after the other.
* Rows that find the queue full are dropped, and a block that is refused for good is; the next block counts them. After
  an unknown outcome a block is written again with the same number, so readers may find it twice.
* A broker that ends in an orderly way has written all that its partitions have reported, up to `CLOSE_MS`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.backoff import grown_delay
from mansio.broker.topics.leader_appends import LeaderAppends, LedPartition
from mansio.config.topic_names import TRACE_TOPIC
from mansio.errors import FeatureNotFinalized, MansioError, MessageTooLarge, Unavailable
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.ports import complete, result_within
from mansio.state.trace.trace_buffer import NameTable, PartitionTrace, SealedRows, TraceBuffer
from mansio.tracebacks import without_traceback
from mansio.wire.batch.record_batch import build_value_only_batch
from mansio.wire.internal_records.trace_records import (
    NO_VALUE,
    ROW,
    VERSION,
    BlockHeader,
    encode_block,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Clock, Peers, Promise, Scheduler, Timer

logger = logging.getLogger(__name__)

TRACE_CLIENT_ID: Final = "mansio-trace"
INTERVAL_MS: Final = 1_000.0
QUEUE_ROWS_MAX: Final = 100_000
"""Number of rows that wait to be written; more are dropped."""

RETRY_MS_MIN: Final = 200.0
RETRY_MS_MAX: Final = 2_000.0
LOGGED_FAILURE: Final = 5
CLOSE_MS: Final = 2_000.0
REFUSALS_MAX: Final = 10
"""Number of refusals after which a block is given up. A broker that does not know this one's session yet refuses,
too."""

FLUSH_INTERVAL_MS: Final = 100.0
"""Time between two blocks that look-ups ask for."""

OPEN_MS: Final = 5_000.0
"""Time that the start of the broker waits until it has written what it leads."""

POSITIONS_MAX: Final = 10_000
"""Maximum number of committed positions in a second; of further ones none is reported."""


def _ignore() -> None:
    pass


def _failures_max(error: Exception) -> float:
    """Return after how many failures a block is dropped, so that no block is retried without a limit."""
    if isinstance(error, Unavailable):
        return math.inf
    is_final = isinstance(error, FeatureNotFinalized | MessageTooLarge) or not isinstance(error, MansioError)
    return 1 if is_final else REFUSALS_MAX


class _Pending(NamedTuple):
    rows: SealedRows
    sequence: int
    begin_ms: int
    end_ms: int


class _Position:
    """The positions that a group has committed in a partition in this second."""

    __slots__ = ("before", "offset")

    def __init__(self, before: int) -> None:
        self.before = before
        self.offset = before


class TraceWriter:
    """The trace of one broker. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        clock: Clock,
        create: Callable[[str, int], Awaitable[object]],
        broker_count: Callable[[], int],
        peers: Peers | None,
        buffer: TraceBuffer,
    ) -> None:
        """`create`: creates an internal topic with a number of partitions, unless it exists; `broker_count`: number of
        brokers of the cluster; `peers`: None on a single node; `buffer`: to which the partitions report."""
        self.node_id = node_id
        self._topics = topics
        self._partitions = partitions
        self._scheduler = scheduler
        self._clock = clock
        self._create = create
        self._broker_count = broker_count
        self._appends = LeaderAppends(
            node_id=node_id,
            topics=topics,
            partitions=partitions,
            scheduler=scheduler,
            client_id=TRACE_CLIENT_ID,
            peers=peers,
        )
        self.buffer = buffer
        buffer.listen(self._begin_interval, self._on_control, self._on_full)
        self.incarnation = self._sealed_ms = clock.wall_ms()
        """When this process began to report."""
        self._sequence = 0
        self._queue: deque[_Pending] = deque()
        self._queued_rows = 0
        self._target: LedPartition | None = None
        self._positions: dict[tuple[str, str, int], _Position] = {}
        self._position_traces: dict[tuple[bytes, int], PartitionTrace] = {}
        self._timer: Timer | None = None
        self._is_seal_due = False
        self._flushed_ms = -FLUSH_INTERVAL_MS
        self._is_open = False
        self._is_closing = self._has_closed = False
        self._logged_refusal = ""
        self._works = False
        self._waiting: list[tuple[int, Promise[None]]] = []
        """Waits until all blocks below a number are written or dropped."""
        self.written_ms = -1
        """Time up to which everything is written."""
        self._on_block: Callable[[], None] = _ignore
        self.block_count = self.row_count = self.dropped_count = 0
        """Numbers of blocks and rows that were written, and of rows that were dropped."""

    def listen(self, on_block: Callable[[], None]) -> None:
        """Call `on_block` after each block."""
        self._on_block = on_block

    async def open(self) -> None:
        """Begin to write: the partitions of the topic can be appended to. If there is a trace, write which partitions
        this broker leads by now: on a single node, the leader epoch does not tell a later process that there was this
        one."""
        self._is_open = True
        if TRACE_TOPIC in self._topics.state.topics and self.buffer.row_count:
            await self.flush(OPEN_MS)
        elif self.buffer.has_events:
            self._begin_interval()

    def report_position(self, group: str, topic: str, partition: int, before: int, offset: int) -> None:
        """Report that a group has committed an offset. `before`: its committed offset before, -1 for none."""
        key = (group, topic, partition)
        position = self._positions.get(key)
        if position is None:
            if len(self._positions) >= POSITIONS_MAX:
                return
            if not self._positions:
                self._begin_interval()
            position = self._positions[key] = _Position(before)
        position.offset = offset

    # ------------------------------------------------------------------ sealing

    def _begin_interval(self) -> None:
        if self._is_open and self._timer is None:
            self._timer = self._scheduler.call_later(INTERVAL_MS, self._seal)

    def _on_control(self) -> None:
        """Begin an interval, unless there is no trace yet: what is reported about partitions waits for a record."""
        if TRACE_TOPIC in self._topics.state.topics:
            self._begin_interval()

    def _on_full(self) -> None:
        if self._is_open and not self._is_seal_due:
            self._is_seal_due = True
            self._scheduler.call_soon(self._seal)

    def _seal(self) -> None:
        """Queue what was reported as a block."""
        self._is_seal_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._add_positions()
        if not (self.buffer.row_count or self.buffer.dropped):
            return
        rows = self.buffer.seal()
        if self._queued_rows + rows.row_count > QUEUE_ROWS_MAX:
            self._drop(rows)
            return
        self._queued_rows += rows.row_count
        begin_ms, self._sealed_ms = self._sealed_ms, max(self._clock.wall_ms(), self._sealed_ms)
        self._queue.append(_Pending(rows, self._sequence, begin_ms, self._sealed_ms))
        self._sequence += 1
        if not self._works:
            self._works = True
            self._scheduler.spawn(self._work(), name="trace of records")

    def _drop(self, rows: SealedRows) -> None:
        self.buffer.drop(rows.row_count + rows.dropped)

    def _add_positions(self) -> None:
        positions, self._positions = self._positions, {}
        now_ms = self._clock.wall_ms()
        for (group, name, index), position in positions.items():
            topic = self._topics.state.topics.get(name)
            if topic is None or not self._topics.settings_of(topic).is_traced:
                continue
            key = (topic.topic_id.bytes, index)
            trace = self._position_traces.get(key)
            if trace is None:
                if len(self._position_traces) >= POSITIONS_MAX:
                    self._position_traces.clear()
                trace = self._position_traces[key] = PartitionTrace(self.buffer, *key, NO_VALUE)
            trace.report_position(group, position.before, position.offset, now_ms)

    # ------------------------------------------------------------------ writing

    async def _work(self) -> None:
        failures = 0
        try:
            while self._queue:
                if failures:
                    delay_ms = grown_delay(failures, RETRY_MS_MIN, RETRY_MS_MAX)
                    await self._scheduler.sleep(min(delay_ms, RETRY_MS_MIN) if self._is_closing else delay_ms)
                pending = self._queue[0]
                try:
                    await self._append(pending)
                except Exception as error:  # noqa: BLE001 - a block that cannot be written must not hold up the others
                    failures += 1
                    if failures < _failures_max(error):
                        if failures == LOGGED_FAILURE:  # the first ones are normal while the topic is created
                            logger.warning("trace_not_written", extra=fields(reason=without_traceback(error)))
                        if self._has_closed:
                            break
                        continue
                    self._log_refusal(error)
                    self._drop(pending.rows)
                else:
                    self.block_count += 1
                    self.written_ms = pending.end_ms
                    self.row_count += pending.rows.row_count
                    self.dropped_count += pending.rows.dropped
                    self._on_block()
                failures = 0
                self._queue.popleft()
                self._queued_rows -= pending.rows.row_count
                self._end_waits(pending.sequence + 1)
        finally:
            self._works = False

    def _end_waits(self, end: int) -> None:
        """End the waits for the blocks below a number."""
        for each in tuple(self._waiting):
            if each[0] <= end:
                self._waiting.remove(each)
                complete(each[1], None)

    def _log_refusal(self, error: Exception) -> None:
        """Log why a block is dropped, once for the same reason."""
        if (reason := str(error)) != self._logged_refusal:
            self._logged_refusal = reason
            logger.warning("trace_dropped", extra=fields(reason=without_traceback(error)))

    async def _append(self, pending: _Pending) -> None:
        names = NameTable()
        turns = ItemTurns(self._scheduler, Work.TRACE)
        packed = []
        for each in pending.rows.pack(names, pending.begin_ms, pending.end_ms):
            packed.append(each)
            await turns.next(1 + len(each.rows) // ROW.size // 4)
        header = BlockHeader(
            VERSION,
            0,
            self.node_id,
            self.incarnation,
            pending.sequence,
            pending.begin_ms,
            pending.end_ms,
            pending.rows.dropped,
            0,
            0,
            0,
            0,
        )
        batch = build_value_only_batch([pending.end_ms], [encode_block(header, packed, names.names())])
        turns.end()
        await self._appends.append(await self._find_target(), batch)

    async def _find_target(self) -> LedPartition:
        """Return the partition of the trace to which this broker appends as long as it exists: one that it leads, or
        that of its place among the brokers."""
        topic = self._topics.state.topics.get(TRACE_TOPIC)
        if topic is None:
            await self._create(TRACE_TOPIC, max(self._broker_count(), 1))
            topic = self._topics.find(TRACE_TOPIC)
        topic_id = topic.topic_id.bytes
        if self._target is None or self._target.topic_id != topic_id:
            leaders = [each.leader for each in topic.partitions]
            index = leaders.index(self.node_id) if self.node_id in leaders else self.node_id % len(leaders)
            self._target = LedPartition(topic.name, topic_id, index)
        return self._target

    async def append_index(self, partition: Partition, value: bytes) -> None:
        """Append an index record to a partition of the trace that this broker leads. Raises the errors of
        `LeaderAppends.append`."""
        partition.ensure_leader()
        batch = build_value_only_batch([self._clock.wall_ms()], [value])
        target = LedPartition(partition.topic, partition.topic_id.bytes, partition.index)
        await self._appends.append(target, batch)

    # ------------------------------------------------------------------ reading and end

    async def flush(self, timeout_ms: float) -> bool:
        """Write what was reported so far. Returns False if that takes longer than the timeout, or fails."""
        if not self._has_anything_to_write:
            return True
        if not self._is_closing and (wait_ms := self._flushed_ms + FLUSH_INTERVAL_MS - self._now_ms()) > 0:
            await self._scheduler.sleep(wait_ms)  # many look-ups share a block
        self._flushed_ms = self._now_ms()
        self._seal()
        if not self._queue:
            return True
        promise: Promise[None] = self._scheduler.promise()
        self._waiting.append((self._sequence, promise))
        try:
            await result_within(self._scheduler, promise, timeout_ms, "the trace is not written in time")
        except MansioError:
            return False
        return True

    @property
    def _has_anything_to_write(self) -> bool:
        return bool(self._queue or self._positions or self.buffer.row_count or self.buffer.dropped)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    async def close(self) -> None:
        """Report the end of what this broker leads, and write all within `CLOSE_MS`."""
        if not self._is_open or self._is_closing:
            return
        self._is_closing = True
        now_ms = self._clock.wall_ms()
        for partition in self._partitions:
            if partition.trace is not None:
                partition.trace.end(now_ms)
                partition.trace = None
        if not self.buffer.has_events and not self._sequence:
            return
        if not await self.flush(CLOSE_MS):
            logger.warning("trace_lost", extra=fields(blocks=len(self._queue)))
        self._is_open = False
        self._has_closed = True
