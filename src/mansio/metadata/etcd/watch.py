"""Watch of a prefix: returns all changes in order, each exactly once, across connection failures.

A task reads the stream into a bounded queue. When the queue is full, the task closes the stream; it opens a new one
when the reader has emptied the queue. So neither this process nor etcd buffers many events for a slow reader.

Invariants:
* `_position` is the revision after the last event that was queued. Every stream starts there, not at a revision that
  etcd reports as progress.
* All events of one revision are in one batch.
* The reader gets every event in order, until `RevisionCompacted` or the error that ended the watch is raised.

A stream starts one revision before `_position`, and the events of that revision are dropped: before 3.4.33 and 3.5.15
an etcd that was compacted at exactly the start revision omits deletions of that revision (etcd issue 18089).

The watch requests a progress notification every second. Otherwise a watch of keys that do not change could not be
distinguished from one whose connection is broken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from grpc import StatusCode

from mansio.errors import StorageError
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import CallOutcome, EtcdDenied, Failure, classify
from mansio.metadata.etcd.channel import CallFailed
from mansio.metadata.etcd.client import Attempts, StreamFailed
from mansio.metadata.etcd.messages import RANGE, WATCH, decode_events, prefix_range
from mansio.metadata.metadata_store import RevisionCompacted
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mansio.metadata.etcd.channel import Stream
    from mansio.metadata.etcd.client import EtcdClient, OpenStream
    from mansio.metadata.metadata_store import Event
    from mansio.ports import Random

EVENTS_MAX: Final = 4096
"""Number of queued events from which on the stream is closed; each message of etcd is queued completely."""
BATCH_EVENTS_MAX: Final = 512
HEARTBEAT_INTERVAL_S: Final = 1.0
"""Interval of the requests for progress notifications."""
SILENCE_S_MAX: Final = 3.0
"""Time without a message after which a stream counts as broken."""


class Watch:
    """Watch of the keys with a prefix, for one reader, which iterates over `batches`."""

    def __init__(
        self,
        client: EtcdClient,
        random: Random,
        prefix: str,
        from_revision: int,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self._client = client
        self._random = random
        self._prefix = prefix
        self._position = max(1, from_revision)
        self._events_max = events_max
        self._queue: deque[list[Event]] = deque()
        self._queued = 0
        self._changed = asyncio.Event()
        self._reader_task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._is_stopped = False

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Yield batches of events until `stop` is called. Raises `RevisionCompacted`, `EtcdDenied`, `StorageError`."""
        try:
            while True:
                if self._queue:
                    batch = self._queue.popleft()
                    self._queued -= len(batch)
                    yield batch
                elif self._is_stopped:
                    return
                elif self._failure is not None:
                    raise copied(self._failure)
                else:
                    if self._reader_task is None:
                        self._reader_task = asyncio.create_task(self._run(), name="etcd watch")
                        self._reader_task.add_done_callback(self._on_reader_ended)
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            if self._reader_task is not None:
                self._reader_task.cancel()
                await asyncio.wait([self._reader_task])

    def stop(self) -> None:
        """End `batches` after the batches that are queued."""
        self._is_stopped = True
        self._changed.set()

    def _on_reader_ended(self, pump: asyncio.Task[None]) -> None:
        self._reader_task = None
        if not pump.cancelled():
            self._failure = pump.exception()
        self._changed.set()

    async def _run(self) -> None:
        """Read one stream after the other into the queue, until the queue is full. Raises the errors for the reader."""
        attempts = Attempts(self._random, deadline_s=None)
        while self._queued < self._events_max:
            try:
                opened = await self._client.stream(WATCH)
            except StreamFailed as failed:
                await self._client.handle_failure(failed.endpoint, failed.failure, failed.token, attempts)
                continue
            heartbeat = asyncio.create_task(_heartbeat(opened.stream), name="etcd watch heartbeat")
            try:
                await self._read_stream(opened, attempts)
            except CallFailed as failed:
                await self._client.handle_failure(
                    opened.endpoint, _watch_failure(failed.failure), opened.token, attempts
                )
            finally:
                heartbeat.cancel()
                opened.stream.close()
                await asyncio.wait([heartbeat])

    async def _read_stream(
        self, opened: OpenStream[rpc.WatchRequest, rpc.WatchResponse], attempts: Attempts
    ) -> None:
        """Read the events of one stream into the queue until the queue is full.

        Raises `CallFailed`, `RevisionCompacted`.
        """
        begin, end = prefix_range(self._prefix)
        create = rpc.WatchCreateRequest(
            key=begin, range_end=end, start_revision=max(1, self._position - 1), fragment=True
        )
        await opened.stream.write(rpc.WatchRequest(create_request=create))
        fragments: list[Event] = []
        while self._queued < self._events_max:
            response = await opened.stream.read(SILENCE_S_MAX)
            if response.compact_revision:
                raise RevisionCompacted(
                    f"changes up to revision {response.compact_revision} are not kept; asked for {self._position}"
                )
            if response.canceled:
                raise CallFailed(_cancellation_failure(response.cancel_reason, opened.endpoint.url))
            if response.created:
                attempts.reset()
                self._client.record_success(opened.endpoint)
                if response.header.revision < self._position - 1:
                    await self._check_revision_not_lost()
            fragments += decode_events(response.events, self._position)
            fragments = self._enqueue_complete_revisions(fragments, more=response.fragment)

    async def _check_revision_not_lost(self) -> None:
        """Raise `StorageError` if etcd's revision is lower than that of events which the watch has already returned.

        A single member may lag behind, but the revision of the cluster decreases only if etcd was restored from a
        backup. Then it assigns the same revisions to other changes, which this watch would miss.
        """
        begin, _ = prefix_range(self._prefix)  # any key that the user may read
        answer = await self._client.call(RANGE, rpc.RangeRequest(key=begin, keys_only=True))
        if answer.header.revision < self._position - 1:
            raise StorageError(
                f"etcd is at revision {answer.header.revision} and was at {self._position - 1} before:"
                " it was restored from an older backup"
            )

    def _enqueue_complete_revisions(self, fragments: list[Event], *, more: bool) -> list[Event]:
        """Queue the events of complete revisions and return the others: those of the last revision if `more` follow."""
        held = fragments[-1].mod_revision if more and fragments else None
        batch: list[Event] = []
        for event in fragments:
            if event.mod_revision == held:
                break
            if len(batch) >= BATCH_EVENTS_MAX and event.mod_revision != batch[-1].mod_revision:
                self._enqueue(batch)
                batch = []
            batch.append(event)
        if batch:
            self._enqueue(batch)
        return [event for event in fragments if event.mod_revision == held]

    def _enqueue(self, batch: list[Event]) -> None:
        self._queue.append(batch)
        self._queued += len(batch)
        self._position = batch[-1].mod_revision + 1
        self._changed.set()


async def _heartbeat(stream: Stream[rpc.WatchRequest, rpc.WatchResponse]) -> None:
    """Request a progress notification at each interval. If a request fails, the reads of the stream raise the error."""
    with suppress(CallFailed):
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            await stream.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))


def _cancellation_failure(reason: str, url: str) -> Failure:
    """Classify a watch that etcd has cancelled, by the text of the reason."""
    return classify(StatusCode.UNAVAILABLE, reason.partition("desc = ")[2] or reason, url)


def _watch_failure(failure: Failure) -> Failure:
    """Convert "permission denied" into `STALE_TOKEN`, because a watch gets that error also if its token has expired."""
    if isinstance(failure.error, EtcdDenied) and failure.outcome is CallOutcome.REFUSED:
        return failure._replace(outcome=CallOutcome.STALE_TOKEN)
    return failure
