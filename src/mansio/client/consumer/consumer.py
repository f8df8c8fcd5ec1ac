"""The consumer: an async iterator of messages, alone or as a member of a group.

Owns the course of a reading and what may be committed. What is in hand is `hand_out`'s business, reading ahead
`fetcher`'s, the group `membership`'s.

Always true:
* Messages of a partition come in offset order, each once per assignment.
* `commit()` covers every message handed out. What is committed without being asked (auto commit, giving a partition
  back) covers only what is *done with*: the application asked for the next message, or left the consumer without an
  exception. So a crash repeats messages, and never skips one.
* With auto commit (the default in a group) an iteration that comes to its end has committed and left the group;
  without it the consumer stays a member until it is closed.
* Before a partition goes to another member, the message in hand may be finished, for at most `revoke_timeout_ms`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any, Self

from mansio.client.consumer.batch_decoder import MessageBatch, decode_fetch
from mansio.client.consumer.fetcher import Fetcher
from mansio.client.consumer.hand_out import MessageDelivery
from mansio.client.consumer.offset_resolution import resolve_start_offsets, resolve_stop_offsets
from mansio.client.consumer.partition_state import PartitionState
from mansio.client.group.group_member import GroupMembership
from mansio.client.tasks import client_failed
from mansio.client.types import Message, TopicPartition
from mansio.errors import ConnectionLost, InvalidRequest, MansioError, UnknownTopicOrPartition
from mansio.net.offsets import commit_offsets, fetch_offsets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from types import TracebackType

    from mansio.client.consumer.consumer_options import ConsumerOptions, RebalanceCallback
    from mansio.client.types import StartAt
    from mansio.net.cluster import Cluster


logger = logging.getLogger(__name__)

LARGE_FETCH_BYTES = 16 << 10
"""What a reader that waits is given before the next request is made; with more, it is busy for longer than that."""


class Consumer(MessageDelivery):
    """Made by `Client.consume`. Iterate it, or use `poll`/`batches`; close it by `async with` or `close()`."""

    def __init__(
        self, cluster: Cluster, sources: Iterable[str | TopicPartition], options: ConsumerOptions
    ) -> None:
        given = list(sources)
        patterns = [source for source in given if isinstance(source, str) and source.startswith("^")]
        self._pattern = "|".join(patterns) or None
        self._topics = [source for source in given if isinstance(source, str) and source not in patterns]
        self._chosen = [source for source in given if isinstance(source, TopicPartition)]
        subscribes = bool(self._topics or patterns)
        if not given or (subscribes and self._chosen):
            raise InvalidRequest("consume needs topics or partitions, and not both")
        if patterns and options.group is None:
            raise InvalidRequest("an expression of topics needs a group, whose broker knows what it matches")
        self._cluster = cluster
        self._options = options
        self._loop = asyncio.get_running_loop()
        is_member = options.group is not None and subscribes
        super().__init__(Fetcher(cluster, options.fetching(is_member=is_member)), options.max_records)
        self._membership: GroupMembership | None = (
            GroupMembership(
                cluster, options.group, self._topics, self, options.membership, pattern=self._pattern
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
        self._seen_index = 0
        self._polled_at = self._loop.time()
        self._committed: dict[TopicPartition, int] = {}
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
        """The messages in the batches they were stored in: less work per message than one at a time."""
        while batch := await self._take_batch():
            yield batch

    async def poll(self, timeout_ms: float | None = None) -> list[Message]:
        """The next batch of messages; none when nothing came within the time, or when the reading is over."""
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                return await self._take_batch()
        except TimeoutError:
            return []

    async def take(self, timeout_ms: float | None) -> tuple[list[Message], PartitionState | None]:
        """`poll`, with the partition the messages are of: for the blocking twin, which hands them out itself."""
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
        """Whether `close` was called, or an end was reached that closes it (see `Client.consume`, `auto_commit`)."""
        return self._is_closed

    @property
    def is_finished(self) -> bool:
        """Whether the reading has come to the end that was asked for (`to_time`, `to_end`, `max_records`)."""
        if self._options.max_records is not None and self._delivered >= self._options.max_records:
            return True
        states = self._fetcher.states.values()
        is_bounded = self._options.to_time is not None or self._options.to_end
        return is_bounded and self._was_assigned and all(state.is_finished for state in states)

    async def _load(self) -> bool:
        """Make the next batch the one in hand. False at the end."""
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
                    await self._close(
                        include_current=True
                    )  # the next member need not wait for this one's session
                return False
            batch = self._next_decoded()
            if batch is not None:
                if self._set_current_batch(batch):
                    return True
                continue
            chunk = self._fetcher.pop()
            if chunk is None:
                await self._fetcher.changed()
                self._polled_at = self._loop.time()
                waited = True
                continue
            self._decoding = decode_fetch(
                chunk, self._options.isolation == "read_committed", self._options.batch_bytes_max
            )
            self._decoding_state = chunk.state
            if not waited or len(chunk.batches) > LARGE_FETCH_BYTES:
                await asyncio.sleep(0)  # heartbeats and fetches go on while a reader is busy

    def _next_decoded(self) -> MessageBatch | None:
        """The next batch of the chunk at hand. One that cannot be read is fetched again, and never passed over."""
        try:
            return next(self._decoding, None)
        except MansioError:
            self._decoding = iter(())
            if self._decoding_state is not None:
                self._fetcher.rewind(self._decoding_state)
            raise

    # -- positions --------

    async def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Store the group's offsets: those given, or everything handed out so far.

        Raises `RebalanceInProgress`, `IllegalGeneration`, `StaleMemberEpoch` or `UnknownMember` when the group went on
        without this consumer: the messages since the last commit may then be handed out again, to whoever has them now.
        """
        if self._options.group is None:
            raise InvalidRequest("only a consumer with a group can commit")
        await self._commit(self.positions() if offsets is None else dict(offsets))

    async def seek(self, partition: TopicPartition, to: StartAt) -> None:
        """Go on reading a partition from somewhere else."""
        state = self._fetcher.states.get(partition)
        if state is None:
            raise InvalidRequest(f"{partition} is not being read")
        found = await resolve_start_offsets(self._cluster, [partition], to)
        self._discard_buffered({partition})
        if partition in self._fetcher.states:
            self._fetcher.remove([partition])
            self._fetcher.add([PartitionState(partition, found[partition], state.stop_offset)])

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
        """Begin: join the group, or find the partitions and offsets. Iterating does this too.

        Raises `UnknownTopicOrPartition` for a topic or a chosen partition that does not exist.
        """
        async with self._starting:
            if self._is_started:
                return
            if self._is_closed:
                raise ConnectionLost("the consumer is closed")
            for topic in self._topics:
                await self._cluster.topic(topic)
            for partition in self._chosen:
                await self._check_exists(partition)
            if self._membership is not None:
                self._run(self._run_membership(self._membership))
            else:
                await self.assign(set(self._chosen) or await self._all_partitions())
                if self._topics:
                    self._run(self._watch_partition_counts())
            if self._options.commits_automatically:
                self._run(self._auto_commit_loop())
            self._is_started = True

    async def close(self) -> None:
        """Commit what is done with if `auto_commit` is on, leave the group, stop. Closing twice is harmless."""
        await self._close(include_current=False)

    async def _close(self, *, include_current: bool) -> None:
        if self._closing is None:
            self._is_closed = True
            self._closing = self._loop.create_task(self._end(include_current=include_current))
        # A `poll` whose time is over must not leave it half closed.
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
            await self._fetcher.close()
            if self._membership is not None:
                await self._membership.leave()

    async def _check_exists(self, partition: TopicPartition) -> None:
        view = await self._cluster.topic(partition.topic)
        if partition.partition >= len(view.partitions):
            self._cluster.mark_stale((partition.topic,))  # it may have grown
            view = await self._cluster.topic(partition.topic)
        if not 0 <= partition.partition < len(view.partitions):
            raise UnknownTopicOrPartition(f"topic {partition.topic} has no partition {partition.partition}")

    def _run(self, work: Any) -> None:
        self._tasks.append(self._loop.create_task(work))

    async def _run_membership(self, part: GroupMembership) -> None:
        try:
            await part.run()
        except MansioError as error:
            self._fetcher.fail(error)
        except Exception as error:  # noqa: BLE001  # of a callback, for one: whoever reads is told
            self._fetcher.fail(client_failed(error))

    async def _auto_commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._options.auto_commit_interval_ms / 1000)
            try:
                await self._commit(self._positions(include_current=False))
            except MansioError as error:
                logger.info("group %s: auto commit failed: %s", self._options.group, error)

    async def _watch_partition_counts(self) -> None:
        """Without a group: read partitions that are added later from their beginning."""
        while True:
            await asyncio.sleep(self._options.membership.metadata_interval_ms / 1000)
            try:
                await self._cluster.refresh(self._topics)
                added = await self._all_partitions() - self._fetcher.states.keys()
                starts = await resolve_start_offsets(self._cluster, added, "earliest")
            except MansioError as error:
                logger.info("looking for new partitions: %s", error)
                continue
            if not (self._options.to_end or self._options.to_time is not None):
                self._fetcher.add(PartitionState(partition, starts[partition]) for partition in sorted(added))

    async def _all_partitions(self) -> set[TopicPartition]:
        found = set()
        for topic in self._topics:
            view = await self._cluster.topic(topic)
            found |= {TopicPartition(topic, partition.index) for partition in view.partitions}
        return found

    # -- what the membership asks of its owner --------

    async def assign(self, partitions: set[TopicPartition]) -> None:
        """Begin to read partitions, where the group stopped or where `from_` says."""
        committed = {}
        if self._options.group is not None and partitions:
            stored = await fetch_offsets(self._cluster, self._options.group, partitions)
            committed = {partition: entry.offset for partition, entry in stored.items()}
        rest = partitions - committed.keys()
        offsets = {**committed, **await resolve_start_offsets(self._cluster, rest, self._options.from_)}
        stops = await resolve_stop_offsets(
            self._cluster,
            partitions,
            to_time=self._options.to_time,
            to_end=self._options.to_end,
            isolation_level=self._options.fetching().isolation_level,
        )
        self._committed.update(committed)
        if partitions:
            await _call(self._options.on_assigned, partitions)
        self._was_assigned = True
        self._fetcher.add(PartitionState(p, offsets[p], stops.get(p)) for p in sorted(partitions))

    async def revoke(self, partitions: set[TopicPartition]) -> None:
        """Finish with partitions before another member gets them."""
        self._fetcher.end(partitions)  # what were handed out from now on would not be in the commit
        await self._wait_for_processing(partitions)
        if self._options.commits_automatically:
            positions = self._positions(include_current=False)
            try:
                await self._commit(
                    {p: positions[p] for p in partitions if p in positions}, retry_timeout_ms=3_000
                )
            except MansioError as error:
                logger.warning("group %s: commit before a rebalance failed: %s", self._options.group, error)
        await _call(self._options.on_revoked, partitions)
        self._discard_buffered(partitions)
        self._fetcher.remove(partitions)
        for partition in partitions:
            self._committed.pop(partition, None)

    async def lose(self, partitions: set[TopicPartition]) -> None:
        """Stop with partitions that another member may have already."""
        self._discard_buffered(partitions)
        self._fetcher.remove(partitions)
        for partition in partitions:
            self._committed.pop(partition, None)
        await _call(self._options.on_lost or self._options.on_revoked, partitions)

    def seconds_since_poll(self) -> float:
        """How long ago the application asked for a message."""
        seen = self._delivered_in_batch()
        if self._batch is None or seen != self._seen_index:
            self._seen_index, self._polled_at = seen, self._loop.time()
        return self._loop.time() - self._polled_at

    async def wait_for_poll(self) -> None:
        """Wait until it asks for one."""
        await self._poll_event.wait()

    async def _wait_for_processing(self, partitions: set[TopicPartition]) -> None:
        """Hand out no more of these, and give the application time to finish with the message it has."""
        batch = self._batch
        if batch is None or batch.state.partition not in partitions:
            return
        # A copy: positions are counted in the batch's own list.
        self._messages = self._messages[: self._index]
        try:
            async with asyncio.timeout(self._options.revoke_timeout_ms / 1000):
                await self._poll_event.wait()
        except TimeoutError:
            logger.info("group %s: a message in hand was not finished in time", self._options.group)


async def _call(callback: RebalanceCallback | None, partitions: set[TopicPartition]) -> None:
    if callback is not None:
        outcome = callback(sorted(partitions))
        if inspect.isawaitable(outcome):
            await outcome
