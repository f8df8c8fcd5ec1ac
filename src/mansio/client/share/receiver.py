"""Receiver: member of a share group, which receives records on leases and acknowledges each of them (KIP-932).

    async with client.receive("orders", group="billing") as receiver:
        async for message in receiver:
            try:
                ...
                await message.ack()
            except Busy:
                await message.retry(after=30)

or, with workers, retries and ordering by the receiver: `await receiver.run(handle, mode="by_key", concurrency=8)`.

A `Receiver` joins the group, delivers messages and releases them when it is closed. `in_flight_records` keeps the
leased records, `share_fetcher` fetches records, `ack_sender` sends acknowledgements, `share_member` sends heartbeats.

Invariants:
* A message is delivered to the application once per lease, and not after the client's estimate of the lease's end.
* Closing sends pending acknowledgements and releases all other records at once, which does not count as an attempt.
* Every wait for a broker has a time limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from mansio.client.share.ack_sender import AckSender
from mansio.client.share.handler_runner import (
    DEFAULT_DRAIN_MS,
    HandlerRunner,
    ensure_order,
    fetch_retry_policy,
    has_group_order,
)
from mansio.client.share.in_flight_records import InFlightRecords
from mansio.client.share.leased import ACCEPT
from mansio.client.share.share_fetcher import ShareFetcher
from mansio.client.share.share_member import ShareMember
from mansio.client.tasks import BackgroundTasks
from mansio.errors import InvalidRequest, MansioError
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
    from types import TracebackType

    from mansio.client.share.handler_runner import Handler, HandlerMode
    from mansio.client.share.leased import Leased, ReceiveOptions
    from mansio.net.cluster import Cluster
    from mansio.telemetry.client_telemetry import ClientTelemetry

logger = logging.getLogger(__name__)


class Receiver:
    """Receives leased messages; created by `Client.receive`. Iterate over it, or call `poll` or `run`; close it by
    `async with` or `close()`."""

    def __init__(
        self,
        cluster: Cluster,
        topics: str | Iterable[str],
        options: ReceiveOptions,
        *,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        if not self._topics:
            raise InvalidRequest("receive needs topics")
        self._cluster = cluster
        self._options = options
        self._telemetry = telemetry
        self._next: Callable[[int | None, float], Awaitable[list[Leased]]] = (
            self._take if telemetry is None else partial(self._take_traced, telemetry)
        )
        """Takes the next messages, with a span if the client is traced."""
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks(self._loop, self._on_internal_error)
        self._in_flight_records = InFlightRecords(options, self._on_capacity, self._on_order_needed)
        self._member = ShareMember(cluster, options.group, self._topics, self._on_assigned)
        self._ack_sender = AckSender(
            cluster,
            options,
            self._member.member_id,
            self._in_flight_records,
            self._tasks,
            self._schedule_dispatch,
            leader_of=lambda partition, now: self._fetcher.leader_of(partition, now),
            on_pending=lambda: self._fetcher.send_acknowledgements(),
            can_renew_in_session=lambda node: self._fetcher.can_renew_in_session(node),
            telemetry=telemetry,
        )
        self._fetcher = ShareFetcher(
            cluster,
            options,
            self._member.member_id,
            self._in_flight_records,
            self._ack_sender,
            self._tasks,
            self._on_error,
        )
        self._starting = asyncio.Lock()
        self._membership: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure: MansioError | None = None
        self._is_fatal = False
        self._is_stopped = False
        self._run: HandlerRunner | None = None
        self._is_finding_order = False

    async def __aenter__(self) -> Self:
        """Check that the topics exist; raises `UnknownTopicOrPartition` otherwise. The first `poll` or `run` joins the
        group."""
        for topic in self._topics:
            await self._cluster.topic(topic)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- delivery --------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Leased:
        found = await self._next(1, math.inf)
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def poll(self, timeout_ms: float | None = None, *, max_records: int | None = None) -> list[Leased]:
        """Return available messages, at most `max_records` (None: all). If none is available, wait for the first one.

        Returns an empty list after `timeout_ms` or when the receiver is stopped. Raises errors of the group, errors of
        records that cannot be decoded (which are released), and `InvalidRequest` if `max_records` is below 1.
        """
        until_s = math.inf if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        return await self._next(max_records, until_s)

    async def batches(self, max_records: int | None = None) -> AsyncIterator[list[Leased]]:
        """Yield lists of available messages, at most `max_records` (None: all) each, until `stop()`. To receive with
        the fewest requests, acknowledge each list with one call of `ack`."""
        while found := await self._next(max_records, math.inf):
            yield found

    async def receive_next(
        self, done: Leased | None = None, timeout_ms: float | None = None
    ) -> Leased | None:
        """Accept `done`, the message that was received before, and return the next message. With `prefetch=0` one
        request does both, and is answered when the acknowledgement and the new lease are stored.

        Returns None after `timeout_ms` without a message, or when the receiver is stopped. The acknowledgement is sent
        in any case; `done.is_acknowledged` shows whether it was confirmed in this time. Raises `LeaseLost` if the
        broker refuses the acknowledgement, or if the answer is lost: then it is unknown whether the acknowledgement
        was stored. If it was not, the record is delivered again. A message that was received together with an error,
        or after a cancellation, is returned by the next call. Raises the errors of `poll`, too.
        """
        until_s = math.inf if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        if done is not None and not await self._accept(done, until_s):
            return None
        found = await self._next(1, until_s)
        return found[0] if found else None

    async def _accept(self, message: Leased, until_s: float) -> bool:
        """Accept a message with a request for another one. Returns whether the result is known in time."""
        self._check_not_running()
        accepted = self._ack_sender.accept_with_next_fetch(message)
        count = 0 if self._is_stopped else 1
        self._fetcher.ask(count, until_s)
        self._fetcher.schedule_dispatch()
        try:
            if until_s == math.inf:
                await accepted
            else:
                async with asyncio.timeout_at(until_s):
                    await accepted
        except TimeoutError:
            return False
        finally:
            self._fetcher.stop_asking(count, until_s)
        return True

    async def ack(self, messages: Sequence[Leased]) -> None:
        """Accept many messages and return when all results are known. If an acknowledgement failed, raises the first
        error, usually `LeaseLost`; `is_acknowledged` of each message shows which ones succeeded."""
        await self._ack_sender.acknowledge_all(messages, ACCEPT)

    async def _take_traced(
        self, telemetry: ClientTelemetry, most: int | None, until_s: float
    ) -> list[Leased]:
        """`_take` with a `poll` span, if it finds messages or fails."""
        begun_ns, group = time.time_ns(), self._options.group
        topic = self._topics[0] if len(self._topics) == 1 else None
        try:
            found = await self._take(most, until_s)
        except MansioError as error:
            telemetry.on_receive_failed(error, begun_ns, topic=topic, group=group)
            raise
        if found:
            telemetry.on_received(found, begun_ns, topic=topic, group=group)
        return found

    async def _take(self, most: int | None, until_s: float) -> list[Leased]:
        self._check_not_running()
        if most is not None and most < 1:
            raise InvalidRequest(f"max_records is {most}: it must be at least 1")
        if (
            self._membership is not None
            and not self._is_stopped
            and (found := self._in_flight_records.pop(most))
        ):
            return found
        asked_count = most or self._options.max_records
        self._fetcher.ask(asked_count, until_s)
        try:
            async with asyncio.timeout_at(None if until_s == math.inf else until_s):
                await self.start()
                while not self._is_stopped:
                    if found := self._in_flight_records.pop(most):
                        return found
                    self._raise_failure()
                    await self._wait_for_record()
        except TimeoutError:
            pass
        finally:
            self._fetcher.stop_asking(asked_count, until_s)
        return []

    def _check_not_running(self) -> None:
        if self._run is not None:
            raise InvalidRequest("the receiver is running a handler")

    async def _wait_for_record(self) -> None:
        self._in_flight_records.record_available.clear()
        await self._in_flight_records.record_available.wait()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            if not self._is_fatal:
                self._failure = None
            raise copied(failure)

    def _raise_if_fatal(self) -> None:
        if self._is_fatal:
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
        """Id of this member in the group, as shown by `admin.shares`."""
        return self._member.member_id

    @property
    def held_count(self) -> int:
        """Number of records leased by this member and not acknowledged yet."""
        return self._in_flight_records.held_count

    # -- handler --------

    async def run(
        self,
        handler: Handler,
        *,
        mode: HandlerMode = "parallel",
        concurrency: int = 10,
        drain_ms: float = DEFAULT_DRAIN_MS,
    ) -> None:
        """Call `handler(message)` for every record, `concurrency` at a time, until `stop()`; then close the receiver.

        If the handler returns an awaitable, it is awaited. A message that the handler did not acknowledge itself is
        accepted when the handler returns. Several messages are acknowledged together; only records that must be handled
        in order after a message wait for its acknowledgement. If the handler raises, the mode decides:
        * "parallel": the record is released and delivered again after the group's backoff, to any member.
        * "fifo": records of a partition are handled one at a time, in order. "by_key": records of a partition with the
          same key are handled one at a time, in order; records without a key have no order. In both modes the handler
          is called again with a failed record after the group's backoff, without releasing the record. After
          `share.delivery.count.limit` attempts the record is rejected with the error as the reason. No member handles
          a later record of the partition, or key, before. "fifo" needs the group setting
          `mansio.share.order=partition`, with which only one member at a time holds records of a partition, "by_key"
          `mansio.share.order=key` (or `partition`), with which that holds for each key; `run` sets it for a new group.
          Raises `InvalidConfig` if the group is in use without the setting, `UnsupportedVersion` if the broker does
          not support it. If the handler releases a record itself (`retry`), later records of the partition, or key,
          are released, too.

        After `stop()` no handler is started. Running handlers may continue for `drain_ms`. Messages whose handler ends
        in that time are acknowledged; the other handlers are cancelled and their records released at once, which does
        not count as an attempt.

        Raises errors of the group. If the broker repeatedly refuses acknowledgements for another reason than a lost
        lease, raises the last of these errors. Errors of the handler are logged.
        """
        if self._run is not None or self._membership is not None:
            raise InvalidRequest("the receiver is in use")
        if self._telemetry is not None:
            handler = self._telemetry.traced_handler(handler, group=self._options.group)
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
            self._in_flight_records.set_order(has_order=mode != "parallel")
            if mode != "parallel":
                await ensure_order(self._cluster, self._options.group, mode)
                run.retry_policy = await fetch_retry_policy(self._cluster, self._options.group)
            self._fetcher.set_concurrency(concurrency)
            await self.start()
            await run.run_until_stopped(self._raise_if_fatal)
        finally:
            await self.close()

    def stop(self) -> None:
        """Stop delivering messages. `run` returns when running handlers have ended; `poll` and iterations return at
        once. May be called from a signal handler of the event loop."""
        self._is_stopped = True
        self._fetcher.pause()
        self._in_flight_records.stop()
        if self._run is not None:
            self._run.stop()

    # -- starting and ending --------

    async def start(self) -> None:
        """Join the group and start fetching. `poll`, `run` and iteration call this method when necessary."""
        async with self._starting:
            if self._membership is not None or self._is_stopped:
                return
            for topic in self._topics:
                await self._cluster.topic(topic)
            self._membership = self._loop.create_task(self._run_member())

    async def close(self) -> None:
        """Send pending acknowledgements, release all other leased records and leave the group. May be called twice."""
        if self._closing is None:
            self.stop()
            self._closing = self._loop.create_task(self._close_once())
        await asyncio.shield(self._closing)

    async def _close_once(self) -> None:
        if self._membership is not None:
            self._membership.cancel()
            await asyncio.gather(self._membership, return_exceptions=True)
        try:
            async with asyncio.timeout(self._options.close_ms_max / 1000):
                await self._ack_sender.idle.wait()
                await self._fetcher.end_sessions()
        except TimeoutError:
            logger.warning("share group %s: closed with unsent acknowledgements", self._options.group)
        finally:
            await self._fetcher.close()
            await self._tasks.close()
            await self._ack_sender.close()
            self._in_flight_records.close()
            await self._member.leave(timeout_ms=min(2_000, self._options.close_ms_max))

    async def _run_member(self) -> None:
        try:
            await self._member.run()
        except MansioError as error:
            self._is_fatal = True
            self._failure = without_traceback(error)
            self._in_flight_records.record_available.set()

    def _on_assigned(self, partitions: dict[Any, bytes]) -> None:
        self._fetcher.assign(partitions)

    def _on_error(self, error: MansioError) -> None:
        if not self._is_fatal:
            self._failure = self._failure or without_traceback(error)
        self._in_flight_records.record_available.set()

    def _on_internal_error(self, error: Exception) -> None:
        self._fetcher.on_unexpected_error(error)

    def _schedule_dispatch(self) -> None:
        self._fetcher.schedule_dispatch()

    def _on_capacity(self) -> None:
        self._fetcher.on_capacity()

    def _on_order_needed(self) -> None:
        if not self._is_stopped and not self._is_finding_order:  # after `stop` nothing is delivered
            self._is_finding_order = True
            self._tasks.spawn(self._find_order())

    async def _find_order(self) -> None:
        try:
            has_order = await has_group_order(self._cluster, self._options.group)
        except MansioError as error:
            logger.info("share group %s: its order is unknown, assuming one: %s", self._options.group, error)
            has_order = True
        self._in_flight_records.set_order(has_order=has_order)
