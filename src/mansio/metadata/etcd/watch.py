"""Watch of a prefix: all changes in order, each once, across connection failures.

A task reads the stream into a bounded queue. When the queue is full, the stream is closed, and opened again once the
reader has caught up, so that neither this process nor etcd buffers much for a slow reader.

Invariants:
* `position` is the revision after the last event that was queued, and every stream starts there, not at a revision that
  etcd reports as progress.
* Events of one revision stay together.
* The reader gets the next event, or `Compacted`, or the error that ended the watch; never a gap.

A stream requests one more revision than needed and drops it: before 3.4.33 and 3.5.15 an etcd that was compacted at
exactly the first requested revision omits deletions in it (etcd issue 18089).

etcd is asked for a progress notification every second, because a watch of keys that do not change is silent, as is a
dead one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from grpc import StatusCode

from mansio.errors import StorageError
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import EtcdDenied, Failure, Outcome, classify
from mansio.metadata.etcd.channel import CallFailed
from mansio.metadata.etcd.client import Attempts, StreamFailed
from mansio.metadata.etcd.messages import RANGE, WATCH, events, range_of_prefix
from mansio.metadata.metadata_store import Compacted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mansio.metadata.etcd.channel import Stream
    from mansio.metadata.etcd.client import EtcdClient, OpenStream
    from mansio.metadata.metadata_store import Event
    from mansio.ports import Random

EVENTS_MAX: Final = 4096
"""Size of the queue at which the stream is closed; a message of etcd is queued completely."""
BATCH_EVENTS_MAX: Final = 512
HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0


class Watch:
    """A watch for one reader of `batches`."""

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
        self._pump: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._ended = False

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Batches of events until `end`. Raises `Compacted`, `EtcdDenied`, `StorageError`."""
        try:
            while True:
                if self._queue:
                    batch = self._queue.popleft()
                    self._queued -= len(batch)
                    yield batch
                elif self._ended:
                    return
                elif self._failure is not None:
                    raise self._failure
                else:
                    if self._pump is None:
                        self._pump = asyncio.create_task(self._run(), name="etcd watch")
                        self._pump.add_done_callback(self._stopped)
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.wait([self._pump])

    def end(self) -> None:
        """Return no more batches after those that are queued."""
        self._ended = True
        self._changed.set()

    def _stopped(self, pump: asyncio.Task[None]) -> None:
        self._pump = None
        if not pump.cancelled():
            self._failure = pump.exception()
        self._changed.set()

    async def _run(self) -> None:
        """Read streams until the queue is full. Raises the errors for the reader."""
        attempts = Attempts(self._random, deadline_s=None)
        while self._queued < self._events_max:
            try:
                opened = await self._client.stream(WATCH)
            except StreamFailed as failed:
                await self._client.handle_failure(failed.endpoint, failed.failure, failed.token, attempts)
                continue
            heartbeat = asyncio.create_task(_heartbeat(opened.stream), name="etcd watch heartbeat")
            try:
                await self._follow(opened, attempts)
            except CallFailed as failed:
                await self._client.handle_failure(
                    opened.endpoint, _of_watch(failed.failure), opened.token, attempts
                )
            finally:
                heartbeat.cancel()
                opened.stream.close()
                await asyncio.wait([heartbeat])

    async def _follow(
        self, opened: OpenStream[rpc.WatchRequest, rpc.WatchResponse], attempts: Attempts
    ) -> None:
        """Queue the events of a stream. Returns when the queue is full; raises `CallFailed`, `Compacted`."""
        begin, end = range_of_prefix(self._prefix)
        create = rpc.WatchCreateRequest(
            key=begin, range_end=end, start_revision=max(1, self._position - 1), fragment=True
        )
        await opened.stream.write(rpc.WatchRequest(create_request=create))
        fragments: list[Event] = []
        while self._queued < self._events_max:
            response = await opened.stream.read(SILENCE_S)
            if response.compact_revision:
                raise Compacted(
                    f"changes up to revision {response.compact_revision} are not kept; asked for {self._position}"
                )
            if response.canceled:
                raise CallFailed(_cancelled(response.cancel_reason, opened.endpoint.url))
            if response.created:
                attempts.reset()
                self._client.answered(opened.endpoint)
                if response.header.revision < self._position - 1:
                    await self._check_revision_not_lost()
            fragments += events(response.events, self._position)
            fragments = self._enqueue_complete_revisions(fragments, more=response.fragment)

    async def _check_revision_not_lost(self) -> None:
        """A single member may lag behind, but etcd as a whole never goes back, unless it was restored from a backup:
        then it would assign the revisions that were already seen to other changes, and this watch would not return
        those."""
        begin, _ = range_of_prefix(self._prefix)  # any key that the user may read
        answer = await self._client.call(RANGE, rpc.RangeRequest(key=begin, keys_only=True))
        if answer.header.revision < self._position - 1:
            raise StorageError(
                f"etcd is at revision {answer.header.revision} and was at {self._position - 1} before:"
                " it was restored from an older copy"
            )

    def _enqueue_complete_revisions(self, fragments: list[Event], *, more: bool) -> list[Event]:
        """Queue complete revisions and return the rest: events of the last revision, if `more` fragments follow."""
        held = fragments[-1].mod_revision if more and fragments else None
        batch: list[Event] = []
        for event in fragments:
            if event.mod_revision == held:
                break
            if len(batch) >= BATCH_EVENTS_MAX and event.mod_revision != batch[-1].mod_revision:
                self._put(batch)
                batch = []
            batch.append(event)
        if batch:
            self._put(batch)
        return [event for event in fragments if event.mod_revision == held]

    def _put(self, batch: list[Event]) -> None:
        self._queue.append(batch)
        self._queued += len(batch)
        self._position = batch[-1].mod_revision + 1
        self._changed.set()


async def _heartbeat(stream: Stream[rpc.WatchRequest, rpc.WatchResponse]) -> None:
    """Request progress notifications. If that fails, reading fails, too, with the error."""
    with suppress(CallFailed):
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await stream.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))


def _cancelled(reason: str, url: str) -> Failure:
    """Failure of a watch that etcd ended, from the code and text in the reason."""
    return classify(StatusCode.UNAVAILABLE, reason.partition("desc = ")[2] or reason, url)


def _of_watch(failure: Failure) -> Failure:
    """etcd also returns "permission denied" to a watch whose token has expired: retry with a new one first."""
    if isinstance(failure.error, EtcdDenied) and failure.outcome is Outcome.REFUSED:
        return failure._replace(outcome=Outcome.STALE_TOKEN)
    return failure
