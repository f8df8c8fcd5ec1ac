"""Receiving: records on lease, each settled by itself, shared among all members of a group (KIP-932).

    async with client.receive("orders", group="billing") as receiver:
        async for message in receiver:
            try:
                ...
                await message.ack()
            except Busy:
                await message.retry(after=30)

or, with workers, tries and order kept by the receiver: `await receiver.run(handle, mode="by_key", concurrency=8)`.

Owns the course of a receiver: joining, handing out, the end. What is on lease is `lease_book`'s business, fetching
`lease_fetcher`'s, settling `settles`'s, the group `share_member`'s.

Always true: a message is handed out while its lease lasts, as far as is known here, and once for each delivery; closing
says what was settled, and releases the rest at once, which counts for no try; nothing here waits for ever for a broker.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self

from mansio.client.share.ack_sender import AckSender
from mansio.client.share.delivery_order import keep_order, retry_policy
from mansio.client.share.handler_runner import DRAIN_MS, HandlerRunner
from mansio.client.share.in_flight_records import InFlightRecords
from mansio.client.share.leased import ACCEPT
from mansio.client.share.share_fetcher import ShareFetcher
from mansio.client.share.share_member import ShareMember
from mansio.client.tasks import Tasks
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from types import TracebackType

    from mansio.client.share.handler_runner import Handler, Mode
    from mansio.client.share.leased import Leased, ReceiveOptions
    from mansio.net.cluster import Cluster

logger = logging.getLogger(__name__)


class Receiver:
    """Made by `Client.receive`. Iterate it, or use `poll` or `run`; close it by `async with` or `close()`."""

    def __init__(self, cluster: Cluster, topics: str | Iterable[str], options: ReceiveOptions) -> None:
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        if not self._topics:
            raise InvalidRequest("receive needs topics")
        self._cluster = cluster
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self._loop, self._on_internal_error)
        self._in_flight_records = InFlightRecords(options, self._on_capacity)
        self._member = ShareMember(cluster, options.group, self._topics, self._assigned)
        self._ack_sender = AckSender(
            cluster, options, self._member.member_id, self._in_flight_records, self._tasks, self._wake
        )
        self._fetcher = ShareFetcher(
            cluster,
            options,
            self._member.member_id,
            self._in_flight_records,
            self._ack_sender,
            self._tasks,
            self._failed,
        )
        self._starting = asyncio.Lock()
        self._membership: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure: MansioError | None = None
        self._is_over_for_good = False
        self._is_stopped = False
        self._run: HandlerRunner | None = None

    async def __aenter__(self) -> Self:
        """Raises `UnknownTopicOrPartition` for a topic that does not exist. The group is joined by the first `poll` or
        `run`."""
        for topic in self._topics:
            await self._cluster.topic(topic)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- handing out --------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Leased:
        found = await self._next(1, None)
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def poll(self, timeout_ms: float | None = None, *, max_records: int | None = None) -> list[Leased]:
        """What there is, at most `max_records` (None: all); waits for one record. Nothing when none came within the
        time, or when the receiver is stopped. Raises what is wrong with the group or with records that cannot be read
        (such are given back), and `InvalidRequest` for less than one record."""
        return await self._next(max_records, timeout_ms)

    async def batches(self, max_records: int | None = None) -> AsyncIterator[list[Leased]]:
        """What there is, at most `max_records` (None: all) at a time, until `stop()`. With `ack` of each batch this is
        the cheapest way to receive much."""
        while found := await self._next(max_records, None):
            yield found

    async def ack(self, messages: Sequence[Leased]) -> None:
        """Acknowledge many at once; returns when all is known. Raises the first error, `LeaseLost` most likely; the
        others are acknowledged all the same, `is_settled` says which."""
        await self._ack_sender.acknowledge_all(messages, ACCEPT)

    async def _next(self, most: int | None, timeout_ms: float | None) -> list[Leased]:
        if self._run is not None:
            raise InvalidRequest("the receiver is running a handler")
        if most is not None and most < 1:
            raise InvalidRequest(f"max_records is {most}: at least one record is asked for")
        if (
            self._membership is not None
            and not self._is_stopped
            and (found := self._in_flight_records.pop(most))
        ):
            return found
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await self.start()
                while not self._is_stopped:
                    if found := self._in_flight_records.pop(most):
                        return found
                    self._raise_failure()
                    await self._arrival()
        except TimeoutError:
            pass
        return []

    async def _arrival(self) -> None:
        self._in_flight_records.record_available.clear()
        await self._in_flight_records.record_available.wait()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            if not self._is_over_for_good:
                self._failure = None
            raise failure

    def _raise_for_good(self) -> None:
        if self._is_over_for_good:
            self._raise_failure()
        elif self._failure is not None:
            logger.warning("share group %s: %s", self._options.group, self._failure)
            self._failure = None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or `run` has ended."""
        return self._closing is not None

    @property
    def member_id(self) -> str:
        """This member's name in the group, as `admin.shares` shows it."""
        return self._member.member_id

    @property
    def held(self) -> int:
        """Records that are leased by this member and not settled."""
        return self._in_flight_records.held

    # -- a handler --------

    async def run(
        self,
        handler: Handler,
        *,
        mode: Mode = "parallel",
        concurrency: int = 10,
        drain_ms: float = DRAIN_MS,
    ) -> None:
        """Call `handler(message)` for every record, `concurrency` at a time, until `stop()`; then close.

        What the handler returns is awaited if it can be. A message that it has not settled itself is acknowledged when
        it returns, together with others, and nothing but what has to come after it waits for that. When it raises, by
        mode:
        * "parallel": the record is given back, and tried again after the group's backoff, by whichever member.
        * "fifo": one record of a partition at a time, in order; "by_key": one of a key in a partition at a time, in
          order (records without a key have none). The record is tried again in place, after the group's backoff; after
          `share.delivery.count.limit` tries it is rejected, with the error as the reason. Nothing of its partition, or
          key, passes it, here or at another member: that takes the group setting `mansio.share.order=partition`, with
          which a partition's records are in the hands of one member at a time, and which is set for a group that is
          new. `InvalidConfig` where the group is not new and has it not, `UnsupportedVersion` where the broker does not
          know it. A handler that gives a record back itself (`retry`) gives back those behind it, too.

        After `stop()` nothing is begun, and what runs may go on for `drain_ms`; what is done by then is acknowledged,
        the rest cancelled and given back at once, which counts for no try.

        Raises what is wrong with the group, and what the broker says to whatever is settled, again and again, if that
        is no passing trouble; the handler's own errors go to the log.
        """
        if self._run is not None or self._membership is not None:
            raise InvalidRequest("the receiver is in use")
        run = self._run = HandlerRunner(
            handler,
            self._in_flight_records,
            self._ack_sender,
            mode=mode,
            concurrency=concurrency,
            drain_ms=drain_ms,
        )
        if self._is_stopped:
            run.stop()
        try:
            if mode != "parallel":
                await keep_order(self._cluster, self._options.group)
                run.retry_policy = await retry_policy(self._cluster, self._options.group)
            await self.start()
            await run.until_stopped(self._raise_for_good)
        finally:
            await self.close()

    def stop(self) -> None:
        """Hand out and begin nothing more. `run` returns when what runs has ended, an iteration at once. May be called
        from a signal handler of the loop."""
        self._is_stopped = True
        self._fetcher.pause()
        self._in_flight_records.stop()
        if self._run is not None:
            self._run.stop()

    # -- starting and ending --------

    async def start(self) -> None:
        """Join the group and begin to fetch. `poll`, `run` and iterating do this too."""
        async with self._starting:
            if self._membership is not None or self._is_stopped:
                return
            for topic in self._topics:
                await self._cluster.topic(topic)
            self._membership = self._loop.create_task(self._be_member())

    async def close(self) -> None:
        """Say what was settled, release what is held, leave the group. Closing twice is harmless."""
        if self._closing is None:
            self.stop()
            self._closing = self._loop.create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        if self._membership is not None:
            self._membership.cancel()
            await asyncio.gather(self._membership, return_exceptions=True)
        try:
            async with asyncio.timeout(self._options.close_ms_max / 1000):
                await self._ack_sender.idle.wait()
                await self._fetcher.end_sessions()
        except TimeoutError:
            logger.warning("share group %s: not all was said before closing", self._options.group)
        finally:
            await self._fetcher.close()
            await self._tasks.end()
            await self._ack_sender.close()
            self._in_flight_records.close()
            await self._member.leave(timeout_ms=min(2_000, self._options.close_ms_max))

    async def _be_member(self) -> None:
        try:
            await self._member.run()
        except MansioError as error:
            self._is_over_for_good = True
            self._failure = error
            self._in_flight_records.record_available.set()

    def _assigned(self, partitions: dict[Any, bytes]) -> None:
        self._fetcher.assign(partitions)

    def _failed(self, error: MansioError) -> None:
        if not self._is_over_for_good:
            self._failure = self._failure or error
        self._in_flight_records.record_available.set()

    def _on_internal_error(self, error: Exception) -> None:
        self._fetcher.broke(error)

    def _wake(self) -> None:
        self._fetcher.wake()

    def _on_capacity(self) -> None:
        self._fetcher.on_capacity()
