"""Blocking proxies of `receiver.Receiver` and of its messages.

Handlers passed to `run` are called on threads of a pool, one record per thread at a time. Public names have the same
meaning as in the asyncio classes. Several threads may use the same message or receiver.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from mansio.client.share import leased, receiver
from mansio.client.share.handler_runner import DEFAULT_DRAIN_MS
from mansio.client.types import Message
from mansio.net.blocking import BlockingProxy, blocking, blocking_function

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from types import TracebackType

    from mansio.client.share.handler_runner import HandlerMode
    from mansio.net.blocking import LoopThread


class Leased(Message):
    """A record leased to this member; blocking variant of `mansio.client.share.leased.Leased`."""

    _thread: LoopThread
    _original: leased.Leased

    @classmethod
    def _wrap(cls, thread: LoopThread, original: leased.Leased) -> Self:
        """Return the blocking proxy of a message."""
        proxy = tuple.__new__(cls, original)
        proxy._thread, proxy._original = thread, original
        return proxy

    ack = blocking(leased.Leased.ack)
    retry = blocking(leased.Leased.retry)
    reject = blocking(leased.Leased.reject)
    extend = blocking(leased.Leased.extend)

    @property
    def delivery_count(self) -> int:
        """Delivery count of the record in this group, from 1."""
        return self._original.delivery_count

    @property
    def lease_until(self) -> datetime:
        """Time at which the lease ends if it is not renewed, by the local clock, in UTC."""
        return self._original.lease_until

    @property
    def is_acknowledged(self) -> bool:
        """Whether the broker has confirmed an `ack`, `retry` or `reject`."""
        return self._original.is_acknowledged

    @property
    def is_lost(self) -> bool:
        """Whether the client knows that the lease ended without acknowledgement."""
        return self._original.is_lost


Handler = Callable[[Leased], object]
"""Function that `Receiver.run` calls with each record, on a thread of a pool."""


class Receiver(BlockingProxy[receiver.Receiver]):
    """Receives leased messages; created by `Client.receive`. Iterate over it, or call `poll` or `run`; close it by
    `with` or `close()`."""

    def __init__(self, thread: LoopThread, original: receiver.Receiver) -> None:
        super().__init__(thread, original)
        self._polled: list[Leased] = []

    start = blocking(receiver.Receiver.start)
    close = blocking(receiver.Receiver.close)
    stop = blocking_function(receiver.Receiver.stop)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or `run` has ended."""
        return self._original.is_closed

    @property
    def member_id(self) -> str:
        """Id of this member in the group, as shown by `admin.shares`."""
        return self._original.member_id

    @property
    def held_count(self) -> int:
        """Number of records leased by this member and not acknowledged yet."""
        return self._original.held_count

    def __iter__(self) -> Iterator[Leased]:
        return self

    def __next__(self) -> Leased:
        while True:
            while self._polled:
                message = self._polled.pop()
                if not message.is_lost:
                    return message
            self._polled = self.poll()[::-1]
            if not self._polled:
                raise StopIteration

    def poll(self, timeout_ms: float | None = None, *, max_records: int | None = None) -> list[Leased]:
        """Return available messages; see `mansio.client.share.receiver.Receiver.poll`."""
        found = self._thread.run(self._original.poll(timeout_ms, max_records=max_records))
        return [Leased._wrap(self._thread, message) for message in found]

    def receive_next(self, done: Leased | None = None, timeout_ms: float | None = None) -> Leased | None:
        """Accept `done` and return the next message; see `mansio.client.share.receiver.Receiver.receive_next`."""
        original = None if done is None else done._original
        found = self._thread.run(self._original.receive_next(original, timeout_ms))
        return None if found is None else Leased._wrap(self._thread, found)

    def batches(self, max_records: int | None = None) -> Iterator[list[Leased]]:
        """Yield lists of available messages until `stop()`; see `mansio.client.share.receiver.Receiver.batches`."""
        while found := self.poll(max_records=max_records):
            yield found

    def ack(self, messages: Sequence[Leased]) -> None:
        """Accept many messages; see `mansio.client.share.receiver.Receiver.ack`."""
        self._thread.run(self._original.ack([message._original for message in messages]))

    def run(
        self,
        handler: Handler,
        *,
        mode: HandlerMode = "parallel",
        concurrency: int = 10,
        drain_ms: float = DEFAULT_DRAIN_MS,
    ) -> None:
        """Call `handler(message)` for every record, on `concurrency` threads, until `stop()`; see
        `mansio.client.share.receiver.Receiver.run`. After `stop()` the call waits at most `drain_ms` for running
        handlers; the records of handlers that run longer are released."""
        with_threads = ThreadPoolExecutor(concurrency, thread_name_prefix="mansio-handler")

        async def call(message: leased.Leased) -> None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(with_threads, handler, Leased._wrap(self._thread, message))

        async def call_in_context(message: leased.Leased) -> None:
            proxy, context = Leased._wrap(self._thread, message), contextvars.copy_context()
            await asyncio.get_running_loop().run_in_executor(with_threads, context.run, handler, proxy)

        if self._original._telemetry is not None:
            call = call_in_context  # the span of the handler is the current one on its thread
        try:
            self._thread.run(self._original.run(call, mode=mode, concurrency=concurrency, drain_ms=drain_ms))
        finally:
            with_threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        self._thread.run(self._original.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
