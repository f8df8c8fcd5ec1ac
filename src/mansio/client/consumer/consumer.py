"""Consumer: an async iterator of messages, alone or as a member of a consumer group.

`fetcher` fetches ahead, `batch_decoder` decodes, and `group_member` implements the group membership. The consumer keeps
the current batch and the positions, and decides which offsets may be committed.

Terms: a message is *delivered* when it was returned to the application, and *processed* when the application asked for
the next message or left the consumer without an exception.

Invariants:
* Messages of a partition are delivered in offset order, each once per assignment.
* `commit()` commits the offsets of all delivered messages. Automatic commits (at an interval, at a revocation, on
  close) commit only those of processed messages, so after a crash messages may be delivered again but none is skipped.
* A position is never beyond the last delivered message.
* With auto commit (the default in a group), a consumer whose iteration reaches its end has committed and left the
  group. Without auto commit it stays a member until it is closed.
* A batch that cannot be read is reported and ends nothing: the next request for messages continues behind it. Until
  then its offsets are not processed, so that a restarted member reports it again.
* A revocation waits at most `revoke_timeout_ms` until the application has processed the current message.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX, MessageBatch, decode_fetch
from mansio.client.consumer.fetcher import Fetcher, FetchOptions, PartitionState
from mansio.client.group.classic_member import GroupOptions
from mansio.client.group.group_member import GroupMembership
from mansio.client.offset_resolution import (
    check_start_position,
    resolve_start_offsets,
    resolve_stop_offsets,
)
from mansio.client.producer.transaction_requests import GroupMemberIdentity
from mansio.client.tasks import log_client_failure
from mansio.client.types import Message, TopicPartition
from mansio.errors import (
    ConnectionLost,
    IllegalGeneration,
    InvalidRequest,
    MansioError,
    UnknownTopicOrPartition,
    UnreadableRecords,
)
from mansio.net.offsets import commit_offsets, fetch_offsets
from mansio.tracebacks import copied
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from datetime import datetime
    from types import TracebackType

    from mansio.client.types import StartAt
    from mansio.net.cluster import Cluster
    from mansio.telemetry.client_telemetry import ClientTelemetry
    from mansio.wire.batch.unreadable import UnreadableOffsets


logger = logging.getLogger(__name__)

LARGE_FETCH_BYTES = 16 << 10
"""A fetch up to this size is decoded without yielding to the event loop first, if the reader had to wait for it."""


RebalanceCallback = Callable[[list[TopicPartition]], Awaitable[object] | object]
"""Callback that receives the assigned, revoked or lost partitions. Its result is awaited if it is an awaitable."""

UnreadableCallback = Callable[[UnreadableRecords], Awaitable[object] | object]
"""Callback that receives the offsets that cannot be read. Its result is awaited if it is an awaitable."""

DECODING_S_MAX = 0.005
"""Time for which batches without messages are decoded before other work of the event loop proceeds."""


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of a consumer, described at `Client.consume`. Raises `ValueError` for invalid values and combinations,
    `InvalidRequest` for a negative offset."""

    group: str | None = None
    from_: StartAt | Mapping[TopicPartition, int] = "earliest"
    to_time: datetime | int | None = None
    to_end: bool = False
    max_records: int | None = None
    auto_commit: bool | None = None
    """None enables auto commit if there is a group."""
    auto_commit_interval_ms: float = 5_000
    revoke_timeout_ms: float = 3_000
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    on_out_of_range: Literal["earliest", "latest", "error"] = "earliest"
    rack: str = ""
    on_unreadable: Literal["error", "skip"] | UnreadableCallback = "error"
    on_assigned: RebalanceCallback | None = None
    on_revoked: RebalanceCallback | None = None
    on_lost: RebalanceCallback | None = None
    fetch_wait_ms_max: int = 500
    prefetch_bytes_max: int = 32 << 20
    partition_bytes_max: int = 1 << 20
    batch_bytes_max: int = BATCH_BYTES_MAX
    """A batch that is larger than this when decompressed is unreadable."""
    unknown_topic_ms_max: float = 30_000
    """How long a topic may be unknown to the cluster before a consumer without group membership raises an error."""
    group_options: GroupOptions = field(default_factory=GroupOptions)

    def __post_init__(self) -> None:
        if self.auto_commit and self.group is None:
            raise ValueError("auto_commit needs a group")
        if self.max_records is not None and self.max_records < 0:
            raise ValueError("max_records must not be negative")
        if self.on_unreadable not in ("error", "skip") and not callable(self.on_unreadable):
            raise ValueError("on_unreadable must be error, skip or a function")
        check_start_position(self.from_)

    @property
    def commits_automatically(self) -> bool:
        """Whether processed messages are committed automatically."""
        return self.group is not None if self.auto_commit is None else self.auto_commit

    def fetch_options(self, *, is_member: bool = False) -> FetchOptions:
        """Options of the fetcher. With `is_member`, a topic may be unknown without limit, because the group's
        assignment handles deleted topics."""
        committed = self.isolation == "read_committed"
        return FetchOptions(
            wait_ms_max=self.fetch_wait_ms_max,
            partition_bytes_max=self.partition_bytes_max,
            prefetch_bytes_max=self.prefetch_bytes_max,
            isolation_level=READ_COMMITTED if committed else READ_UNCOMMITTED,
            on_out_of_range=self.on_out_of_range,
            rack=self.rack,
            unknown_topic_ms_max=None if is_member else self.unknown_topic_ms_max,
        )


@dataclass(frozen=True, slots=True)
class _Listener:
    """The consumer as the `RebalanceListener` of its group membership."""

    on_partitions_assigned: Callable[[set[TopicPartition]], Coroutine[Any, Any, None]]
    on_partitions_revoked: Callable[[set[TopicPartition]], Coroutine[Any, Any, None]]
    on_partitions_lost: Callable[[set[TopicPartition]], Coroutine[Any, Any, None]]
    seconds_since_poll: Callable[[], float]
    wait_for_poll: Callable[[], Coroutine[Any, Any, None]]


class Consumer:
    """Async iterator of messages, created by `Client.consume`. Iterate it, or call `poll` or `batches`; close it with
    `async with` or `close()`."""

    def __init__(
        self,
        cluster: Cluster,
        sources: Iterable[str | TopicPartition],
        options: ConsumerOptions,
        *,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        sources = list(sources)
        patterns = [source for source in sources if isinstance(source, str) and source.startswith("^")]
        self._topic_regex = "|".join(patterns) or None
        self._topics = [source for source in sources if isinstance(source, str) and source not in patterns]
        self._assigned_partitions = [source for source in sources if isinstance(source, TopicPartition)]
        subscribes = bool(self._topics or patterns)
        if not sources or (subscribes and self._assigned_partitions):
            raise InvalidRequest("consume needs either topics or partitions")
        if patterns and options.group is None:
            raise InvalidRequest("a topic pattern needs a group, whose coordinator evaluates it")
        self._cluster = cluster
        self._options = options
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        is_member = options.group is not None and subscribes
        self._fetcher = Fetcher(cluster, options.fetch_options(is_member=is_member))
        self._poll_event: asyncio.Event = asyncio.Event()
        """Set while the application waits for the next message."""
        self._messages: list[Message] = []
        self._index = 0
        self._batch: MessageBatch | None = None
        """Current batch. `_messages` are the messages of the batch or a prefix of them; `_messages[_index]` is
        delivered next."""
        self._batch_start: int | None = None
        """Index of the first message that was delivered as part of a list; None if the messages of the batch are
        delivered one at a time."""
        self._delivered_counter: Callable[[], int] | None = None
        self._delivered = 0
        self._membership: GroupMembership | None = (
            GroupMembership(
                cluster,
                options.group,
                self._topics,
                self._listener(),
                options.group_options,
                topic_regex=self._topic_regex,
            )
            if options.group is not None and subscribes
            else None
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._is_started = False
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._decoding_state: PartitionState | None = None
        self._decoding: Iterator[MessageBatch] = iter(())
        self._inline_bytes_max: int | None = None
        self._in_thread: asyncio.Future[MessageBatch | None] | None = None
        """The next part of a large batch, which a thread decodes. A `poll` that is cancelled leaves it to the next."""
        self._polled_index = 0
        self._polled_at = self._loop.time()
        self._committed: dict[TopicPartition, int] = {}
        self._start_offsets: dict[TopicPartition, int] = {}
        """Offset at which each assigned partition was first read: its committed offset, if it had one."""
        self._must_seek: str | None = None
        """Why positions cannot be committed in a transaction before `seek_to_committed`; None: they can."""
        self._released = asyncio.Event()
        self._released.set()
        """Not set while a transaction holds up revocations."""
        self._was_assigned = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(include_current=error is None)

    # -- reading --------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        index = self._index
        if index == len(self._messages):
            if not await self._load():
                raise StopAsyncIteration
            index = 0
        self._index = index + 1
        return self._messages[index]

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Iterate over lists of messages, one per stored batch and several for a large one; cheaper per message than
        iterating over messages."""
        while batch := await self._take_batch():
            yield batch

    async def poll(self, timeout_ms: float | None = None) -> list[Message]:
        """The next batch of messages; empty if none arrives within `timeout_ms` or the requested end is reached."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._take_batch()
            except TimeoutError:
                if self._in_thread is None:
                    return []
            # What has arrived in time is returned, even if it takes more time to decode it.
            await asyncio.wait([self._in_thread])
            timeout_s = 0

    async def _poll_with_state(self, timeout_ms: float | None) -> tuple[list[Message], PartitionState | None]:
        """The result of `poll`, and the state of the messages' partition. Used by the blocking consumer, which iterates
        over the messages itself."""
        messages = await self.poll(timeout_ms)
        return messages, None if self._batch is None else self._batch.state

    async def _take_batch(self) -> list[Message]:
        if self._index == len(self._messages) and not await self._load():
            return []
        taken = self._messages[self._index :]
        self._batch_start = self._index
        self._index = len(self._messages)
        return taken

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed: by `close`, or with `auto_commit` by itself at the requested end."""
        return self._is_closed

    @property
    def is_finished(self) -> bool:
        """Whether the requested end (`to_time`, `to_end`, `max_records`) was reached."""
        if self._options.max_records is not None and self._delivered >= self._options.max_records:
            return True
        states = self._fetcher.states.values()
        is_bounded = self._options.to_time is not None or self._options.to_end
        return is_bounded and self._was_assigned and all(state.is_finished for state in states)

    async def _load_batch(self) -> bool:
        """Make the next batch the current batch, waiting for it if necessary. False at the requested end or if
        closed."""
        self._finish_current_batch()
        self._polled_at = self._loop.time()
        self._poll_event.set()
        waited = False
        if not self._is_started:
            await self.start()
        while True:
            if self._is_closed:
                return False
            if self.is_finished:
                await self._fetcher.stop()
                if self._options.commits_automatically:
                    # So that other members need not wait for this member's session timeout.
                    await self._close(include_current=True)
                return False
            batch = self._next_decoded() if self._in_thread is None else await self._decoded_in_thread()
            if batch is not None:
                if batch.is_large:
                    self._in_thread = self._loop.run_in_executor(None, next, self._decoding, None)
                    self._in_thread.add_done_callback(_mark_retrieved)
                    continue
                if self._set_current_batch(batch):
                    return True
                if batch.unreadable is not None and batch.state.is_active and not batch.state.is_revoking:
                    await self._report(batch, batch.unreadable)
                if self._loop.time() - self._polled_at > DECODING_S_MAX:
                    await asyncio.sleep(0)
                    self._polled_at = self._loop.time()
                continue
            completed = self._fetcher.pop()
            if completed is None:
                await self._fetcher.wait_for_change()
                self._polled_at = self._loop.time()
                waited = True
                continue
            self._decoding = decode_fetch(
                completed,
                self._options.isolation == "read_committed",
                self._options.batch_bytes_max,
                self._inline_bytes_max,
            )
            self._decoding_state = completed.state
            if not waited or len(completed.batches) > LARGE_FETCH_BYTES:
                await asyncio.sleep(0)  # lets heartbeats and fetches proceed while a reader is busy

    def _load(self) -> Coroutine[Any, Any, bool]:
        """`_load_batch`, with a span if the client is traced."""
        return self._load_batch() if self._telemetry is None else self._load_traced(self._telemetry)

    async def _load_traced(self, telemetry: ClientTelemetry) -> bool:
        """`_load_batch` with a `poll` span, if it finds messages or fails."""
        begun_ns, group = time.time_ns(), self._options.group
        try:
            is_loaded = await self._load_batch()
        except MansioError as error:
            topic = self._topics[0] if len(self._topics) == 1 else None
            telemetry.on_receive_failed(error, begun_ns, topic=topic, group=group)
            raise
        if is_loaded:
            first = self._messages[0]
            telemetry.on_received(
                self._messages, begun_ns, topic=first.topic, group=group, partition=first.partition
            )
        return is_loaded

    def _next_decoded(self) -> MessageBatch | None:
        """Decode the next batch of the current fetch; None if there is none. A batch that cannot be decoded raises its
        error and is fetched again, never skipped."""
        try:
            return next(self._decoding, None)
        except MansioError:
            self._stop_decoding()
            raise

    async def _decoded_in_thread(self) -> MessageBatch | None:
        """The result of `_next_decoded`, of a batch that is being decoded on a thread."""
        assert self._in_thread is not None
        try:
            batch = await asyncio.shield(self._in_thread)
        except MansioError:
            self._in_thread = None
            self._stop_decoding()
            raise
        self._in_thread = None
        self._polled_at = self._loop.time()
        return batch

    def _stop_decoding(self) -> None:
        self._decoding = iter(())
        if self._decoding_state is not None:
            self._fetcher.rewind(self._decoding_state)

    def _decode_on_threads(self, inline_bytes_max: int) -> None:
        """Decode batches of more than `inline_bytes_max` decompressed bytes on threads. Used by brokers, whose event
        loop serves other clients."""
        self._inline_bytes_max = inline_bytes_max

    async def _report(self, batch: MessageBatch, unreadable: UnreadableOffsets) -> None:
        """Report records that cannot be read as `on_unreadable` requires. Raises `UnreadableRecords`."""
        error = UnreadableRecords.at(
            *batch.state.partition, unreadable.first, unreadable.last, unreadable.reason
        )
        report = self._options.on_unreadable
        if report == "error":
            self._batch, self._messages, self._index, self._batch_start = batch, [], 0, None
            self._poll_event.clear()
            raise copied(error)
        if report == "skip":
            logger.warning("%s; skipped", error.message)
        else:
            outcome = report(error)
            if inspect.isawaitable(outcome):
                await outcome
        batch.state.consumed_offset = batch.next_offset

    # -- current batch --------

    def _set_delivered_counter(self, count: Callable[[], int] | None) -> None:
        """Set the function that returns how many messages of the last `poll` the application has received; None: all.
        Used by the blocking consumer."""
        self._delivered_counter = count

    def _set_current_batch(self, batch: MessageBatch) -> bool:
        if not batch.state.is_active or batch.state.is_revoking:
            return False
        messages = batch.messages
        if batch.unreadable is not None:
            return False
        if not messages:
            batch.state.consumed_offset = batch.next_offset
            return False
        limit = self._options.max_records
        if limit is not None and self._delivered + len(messages) > limit:
            messages = messages[: limit - self._delivered]
        self._delivered += len(messages)
        self._batch, self._messages, self._index, self._batch_start = batch, messages, 0, None
        self._poll_event.clear()
        return True

    def _finish_current_batch(self) -> None:
        """Mark all delivered messages as processed."""
        batch = self._batch
        if batch is not None:
            batch.state.consumed_offset = self._position_in_batch(batch, self._index)
        if batch is not None and self._index == len(self._messages):
            self._batch, self._messages, self._index = None, [], 0

    def _position_in_batch(self, batch: MessageBatch, index: int) -> int:
        """The position after the first `index` messages of the current batch."""
        if index == len(batch.messages):
            return batch.next_offset
        return batch.messages[index - 1].offset + 1 if index else batch.state.consumed_offset

    def _delivered_in_batch(self) -> int:
        """Number of messages of the current batch that were delivered."""
        if self._batch_start is None or self._delivered_counter is None:
            return self._index
        return self._batch_start + self._delivered_counter()

    def _processed_in_batch(self) -> int:
        """Number of messages of the current batch that the application has processed, as far as is known."""
        if self._batch_start is not None and self._delivered_counter is None:
            return self._batch_start
        return max(self._delivered_in_batch() - 1, self._batch_start or 0)

    def _discard_buffered(self, partitions: set[TopicPartition]) -> None:
        """Discard the current batch if it belongs to one of the partitions."""
        if self._batch is not None and self._batch.state.partition in partitions:
            self._batch, self._messages, self._index = None, [], 0

    # -- positions --------

    def positions(self) -> dict[TopicPartition, int]:
        """The offset after the last delivered message of each assigned partition."""
        return self._positions(include_current=True)

    def _positions(self, *, include_current: bool) -> dict[TopicPartition, int]:
        found = {partition: state.consumed_offset for partition, state in self._fetcher.states.items()}
        batch = self._batch
        if batch is not None and batch.state.is_active:
            index = self._delivered_in_batch() if include_current else self._processed_in_batch()
            if batch.unreadable is None or include_current:
                found[batch.state.partition] = self._position_in_batch(batch, index)
        return found

    def assignment(self) -> set[TopicPartition]:
        """The assigned partitions."""
        return set(self._fetcher.states)

    def lag(self) -> dict[TopicPartition, int | None]:
        """Lag of each assigned partition in offsets, at the time of its last fetch; None before the first fetch."""
        positions = self.positions()
        return {
            partition: max(0, state.high_watermark - positions[partition])
            if state.high_watermark >= 0
            else None
            for partition, state in self._fetcher.states.items()
        }

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop delivering messages of the partitions until `resume`. Messages of the current batch are still
        delivered."""
        for partition in partitions:
            if partition in self._fetcher.states:
                self._fetcher.states[partition].is_paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        """Continue to deliver messages of paused partitions."""
        for partition in partitions:
            if partition in self._fetcher.states:
                self._fetcher.states[partition].is_paused = False
        self._fetcher.wake()

    async def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit `offsets` (None: the positions after all delivered messages).

        Raises `RebalanceInProgress`, `IllegalGeneration`, `StaleMemberEpoch` or `UnknownMember` if the group rebalanced
        without this consumer. Messages since the last commit may then be delivered again to another member. Raises
        `InvalidRequest` without a group.
        """
        if self._options.group is None:
            raise InvalidRequest("only a consumer with a group can commit")
        await self._commit(self.positions() if offsets is None else dict(offsets))

    async def seek(self, partition: TopicPartition, to: StartAt) -> None:
        """Continue to read an assigned partition at the position `to`. Raises `InvalidRequest` if the partition is not
        assigned."""
        state = self._fetcher.states.get(partition)
        if state is None:
            raise InvalidRequest(f"{partition} is not assigned")
        isolation_level = self._options.fetch_options().isolation_level
        found = await resolve_start_offsets(self._cluster, [partition], to, isolation_level=isolation_level)
        self._discard_buffered({partition})
        if partition in self._fetcher.states:
            self._fetcher.remove([partition])
            self._fetcher.add([PartitionState(partition, found[partition], state.stop_offset)])

    async def seek_to_committed(self) -> None:
        """Continue to read the assigned partitions at the committed offsets of the group, for example after a
        transaction was aborted; a partition without committed offset continues where its reading began. Waits for
        transactions of other members that have committed offsets of these partitions. Raises `InvalidRequest` without a
        group."""
        group = self._options.group
        if group is None:
            raise InvalidRequest("only a consumer with a group has committed offsets")
        states = dict(self._fetcher.states)
        stored = await fetch_offsets(self._cluster, group, states, require_stable=True) if states else {}
        positions = self.positions()
        for partition, state in states.items():
            if self._fetcher.states.get(partition) is not state:
                continue  # revoked in the meantime, and perhaps assigned again, at its committed offset
            committed = stored.get(partition)
            offset = self._start_offsets[partition] if committed is None else committed.offset
            if committed is not None:
                self._committed[partition] = offset
            if positions[partition] != offset:
                self._discard_buffered({partition})
                if state.is_revoking:
                    state.consumed_offset = (
                        offset  # it is not read any more; no later transaction may pass the offset
                    )
                    continue
                self._fetcher.remove([partition])
                seeked = PartitionState(partition, offset, state.stop_offset)
                seeked.is_paused = state.is_paused
                self._fetcher.add([seeked])
        self._must_seek = None
        if not self._is_closed:
            self._fetcher.restart()  # it is stopped at the requested end

    # -- called by transactions --------

    def _offsets_of_transaction(
        self, offsets: Mapping[TopicPartition, int] | None
    ) -> tuple[dict[TopicPartition, int], GroupMemberIdentity]:
        """Return the offsets to commit in a transaction, and the member that commits them (None: see `commit`).

        Raises `InvalidRequest`, also if the consumer commits automatically, and `IllegalGeneration` if messages were
        delivered whose partition was revoked since: other members read them, too."""
        group = self._options.group
        if group is None:
            raise InvalidRequest("only a consumer with a group has offsets to commit in a transaction")
        if self._options.commits_automatically:
            raise InvalidRequest(
                "a consumer whose offsets are committed in transactions must not commit them itself: "
                "create it with auto_commit=False"
            )
        if self._must_seek is not None:
            raise IllegalGeneration(self._must_seek)
        positions = self.positions() if offsets is None else dict(offsets)
        missing = positions.keys() - self._fetcher.states.keys()
        if missing:
            raise IllegalGeneration(f"{min(missing)} is not assigned to this consumer")
        changed = {p: offset for p, offset in positions.items() if self._committed.get(p) != offset}
        if self._membership is None:
            return changed, GroupMemberIdentity(group)
        generation, member_id = self._membership.identity
        return changed, GroupMemberIdentity(
            group, generation, member_id, self._options.group_options.instance_id
        )

    async def _refresh_generation(self, generation: int) -> bool:
        """Ask for the current generation or member epoch after `generation` was refused. Returns whether there is a
        new one, so that offsets of partitions that are still assigned can be committed with it."""
        return self._membership is not None and await self._membership.refresh(generation)

    def _on_offsets_in_transaction(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that a transaction has these offsets. Whether it commits is reported to `_on_transaction_end`."""
        self._committed.update(offsets)

    def _on_transaction_end(self, partitions: set[TopicPartition], *, is_commit: bool) -> None:
        """Note the end of a transaction with offsets of these partitions."""
        if not is_commit:
            for partition in partitions:
                self._committed.pop(partition, None)
            self._must_seek = (
                "the transaction with the last offsets was aborted; call seek_to_committed() first"
            )

    def _check_processable(self) -> None:
        """Raise `InvalidRequest` if `Client.process` cannot process each message exactly once with this consumer."""
        options = self._options
        if self._membership is None:
            raise InvalidRequest("process needs a consumer that is a member of a group")
        if options.commits_automatically:
            raise InvalidRequest("process commits the offsets: create the consumer with auto_commit=False")
        if options.isolation != "read_committed":
            raise InvalidRequest("process needs a consumer with isolation='read_committed'")
        if options.max_records is not None:
            raise InvalidRequest("process reads messages again after an abort: max_records is not possible")

    def _hold_revocations(self) -> None:
        """Let revocations wait until `_release_revocations`, for at most `revoke_timeout_ms`."""
        self._released.clear()

    def _release_revocations(self) -> None:
        self._released.set()

    @property
    def _is_revoking(self) -> bool:
        """Whether an assigned partition is being revoked."""
        return any(state.is_revoking for state in self._fetcher.states.values())

    # -- commits --------

    async def _commit(
        self, positions: dict[TopicPartition, int], *, retry_timeout_ms: float = 10_000
    ) -> None:
        group = self._options.group
        changed = {p: offset for p, offset in positions.items() if self._committed.get(p) != offset}
        if group is None or not changed:
            return
        if self._membership is None:
            await commit_offsets(self._cluster, group, changed, retry_timeout_ms=retry_timeout_ms)
        else:
            await self._membership.commit(changed, retry_timeout_ms=retry_timeout_ms)
        self._committed.update(changed)

    # -- starting and ending --------

    async def start(self) -> None:
        """Join the group, or without a group look up partitions and offsets. The first iteration or poll calls `start`.

        Raises `UnknownTopicOrPartition` for a topic or partition that does not exist.
        """
        async with self._starting:
            if self._is_started:
                return
            if self._is_closed:
                raise ConnectionLost("the consumer is closed")
            for topic in self._topics:
                await self._cluster.topic(topic)
            for partition in self._assigned_partitions:
                await self._check_exists(partition)
            if self._membership is not None:
                self._run(self._run_membership(self._membership))
            else:
                await self._on_partitions_assigned(
                    set(self._assigned_partitions) or await self._all_partitions()
                )
                if self._topics:
                    self._run(self._watch_partition_counts())
            if self._options.commits_automatically:
                self._run(self._auto_commit_loop())
            self._is_started = True

    async def close(self) -> None:
        """Commit the offsets of processed messages if auto commit is enabled, leave the group and stop fetching. Has no
        effect if the consumer is closed."""
        await self._close(include_current=False)

    async def _close(self, *, include_current: bool) -> None:
        if self._closing is None:
            self._is_closed = True
            self._closing = self._loop.create_task(self._end(include_current=include_current))
        # A `poll` that times out must not interrupt closing.
        await asyncio.shield(self._closing)

    async def _end(self, *, include_current: bool) -> None:
        self._fetcher.wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._options.commits_automatically:
                await self._commit(self._positions(include_current=include_current), retry_timeout_ms=3_000)
        except MansioError as error:
            logger.warning("group %s: the last commit failed: %s", self._options.group, error)
        finally:
            if self._delivered_counter is not None:
                delivered = self._delivered_counter()
                self._delivered_counter = lambda: (
                    delivered
                )  # a closed consumer does not refer to its blocking proxy
            await self._fetcher.close()
            if self._membership is not None:
                await self._membership.leave()

    async def _check_exists(self, partition: TopicPartition) -> None:
        view = await self._cluster.topic(partition.topic)
        if partition.partition >= len(view.partitions):
            self._cluster.mark_stale((partition.topic,))  # the topic may have new partitions
            view = await self._cluster.topic(partition.topic)
        if not 0 <= partition.partition < len(view.partitions):
            raise UnknownTopicOrPartition(f"topic {partition.topic} has no partition {partition.partition}")

    def _run(self, work: Any) -> None:
        self._tasks.append(self._loop.create_task(work))

    async def _run_membership(self, part: GroupMembership) -> None:
        try:
            await part.run()
        except MansioError as error:
            self._fetcher.report_error(error)
        except Exception as error:  # noqa: BLE001  # for example of a callback; raised by the next poll
            self._fetcher.report_error(log_client_failure(error))

    async def _auto_commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._options.auto_commit_interval_ms / 1000)
            try:
                await self._commit(self._positions(include_current=False))
            except MansioError as error:
                logger.info("group %s: auto commit failed: %s", self._options.group, error)

    async def _watch_partition_counts(self) -> None:
        """Start to read partitions that are added to the topics, from their start offset. Runs only without a group."""
        while True:
            await asyncio.sleep(self._options.group_options.metadata_interval_ms / 1000)
            try:
                await self._cluster.refresh_metadata(self._topics)
                added = await self._all_partitions() - self._fetcher.states.keys()
                starts = await resolve_start_offsets(self._cluster, added, "earliest")
            except MansioError as error:
                logger.info("cannot look for new partitions: %s", error)
                continue
            if not (self._options.to_end or self._options.to_time is not None):
                self._fetcher.add(PartitionState(partition, starts[partition]) for partition in sorted(added))

    async def _all_partitions(self) -> set[TopicPartition]:
        found = set()
        for topic in self._topics:
            view = await self._cluster.topic(topic)
            found |= {TopicPartition(topic, partition.index) for partition in view.partitions}
        return found

    # -- called by the group membership --------

    def _listener(self) -> _Listener:
        return _Listener(
            self._on_partitions_assigned,
            self._on_partitions_revoked,
            self._on_partitions_lost,
            self._seconds_since_poll,
            self._wait_for_poll,
        )

    async def _on_partitions_assigned(self, partitions: set[TopicPartition]) -> None:
        """Start to read partitions at their committed offsets, or at the position `from_` where there is none."""
        committed = {}
        if self._options.group is not None and partitions:
            stored = await fetch_offsets(self._cluster, self._options.group, partitions, require_stable=True)
            committed = {partition: entry.offset for partition, entry in stored.items()}
        uncommitted = partitions - committed.keys()
        isolation_level = self._options.fetch_options().isolation_level
        offsets = {
            **committed,
            **await resolve_start_offsets(
                self._cluster, uncommitted, self._options.from_, isolation_level=isolation_level
            ),
        }
        stops = await resolve_stop_offsets(
            self._cluster,
            partitions,
            to_time=self._options.to_time,
            to_end=self._options.to_end,
            isolation_level=isolation_level,
        )
        self._committed.update(committed)
        self._start_offsets.update(offsets)
        if partitions:
            await _call_listener(self._options.on_assigned, partitions)
        self._was_assigned = True
        self._fetcher.add(PartitionState(p, offsets[p], stops.get(p)) for p in sorted(partitions))

    async def _on_partitions_revoked(self, partitions: set[TopicPartition]) -> None:
        """Wait until the application has processed the current message, commit if auto commit is enabled, and stop
        reading partitions that the group assigns to another member."""
        self._fetcher.stop_delivery(partitions)  # messages delivered from now on would not be in the commit
        await self._wait_for_processing(partitions)
        if self._options.commits_automatically:
            positions = self._positions(include_current=False)
            try:
                await self._commit(
                    {p: positions[p] for p in partitions if p in positions}, retry_timeout_ms=3_000
                )
            except MansioError as error:
                logger.warning("group %s: commit before a rebalance failed: %s", self._options.group, error)
        await _call_listener(self._options.on_revoked, partitions)
        self._forget(partitions)

    async def _on_partitions_lost(self, partitions: set[TopicPartition]) -> None:
        """Stop reading partitions that another member may already own, without a commit."""
        self._forget(partitions)
        await _call_listener(self._options.on_lost or self._options.on_revoked, partitions)

    def _forget(self, partitions: set[TopicPartition]) -> None:
        """Stop reading partitions that do not belong to this consumer any more."""
        positions = self.positions()
        for partition in sorted(partitions & positions.keys()):
            known = self._committed.get(partition, self._start_offsets.get(partition))
            if positions[partition] != known:
                reason = f"messages of {partition}, which was revoked, are not committed"
                self._must_seek = f"{reason}; call seek_to_committed() first"
        self._discard_buffered(partitions)
        self._fetcher.remove(partitions)
        for partition in partitions:
            self._committed.pop(partition, None)
            self._start_offsets.pop(partition, None)

    def _seconds_since_poll(self) -> float:
        """Seconds since the application last asked for a message."""
        delivered = self._delivered_in_batch()
        if self._batch is None or delivered != self._polled_index:
            self._polled_index, self._polled_at = delivered, self._loop.time()
        return self._loop.time() - self._polled_at

    async def _wait_for_poll(self) -> None:
        """Wait until the application asks for the next message."""
        await self._poll_event.wait()

    async def _wait_for_processing(self, partitions: set[TopicPartition]) -> None:
        """Stop delivering messages of the partitions, and wait at most `revoke_timeout_ms` until the application has
        processed its current message."""
        batch = self._batch
        if not self._released.is_set():
            await self._wait_for(self._released)
            batch = self._batch
        if batch is None or batch.state.partition not in partitions:
            return
        # A copy, because positions are computed from the batch's own list.
        self._messages = self._messages[: self._index]
        await self._wait_for(self._poll_event)

    async def _wait_for(self, processed: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._options.revoke_timeout_ms / 1000):
                await processed.wait()
        except TimeoutError:
            logger.info("group %s: the current message was not processed in time", self._options.group)


async def _call_listener(callback: RebalanceCallback | None, partitions: set[TopicPartition]) -> None:
    if callback is not None:
        outcome = callback(sorted(partitions))
        if inspect.isawaitable(outcome):
            await outcome


def _mark_retrieved(decoding: asyncio.Future[MessageBatch | None]) -> None:
    """Note that the error of a batch is known, also if the read that waited for it has been cancelled."""
    if not decoding.cancelled():
        decoding.exception()
