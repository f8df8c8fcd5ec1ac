"""A loop on virtual time and a partition in memory: what the coordinator tests run on.

The coordinator knows nothing but ports, so no test of it sleeps or opens a file. `VirtualScheduler.run` drives a
coroutine and lets time jump to the next timer only when nothing else is left to do.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.ports import SliceTimes
from mansio.wire.batch.record_batch import read_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator

    from mansio.errors import MansioError, StorageError

logger = logging.getLogger(__name__)


class Promise:
    def __init__(self, scheduler: VirtualScheduler) -> None:
        self._scheduler = scheduler
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._outcome is not None

    def set_result(self, result: Any) -> None:
        self._complete((result, None))

    def set_exception(self, exception: BaseException) -> None:
        self._complete((None, exception))

    def _complete(self, outcome: tuple[Any, BaseException | None]) -> None:
        assert self._outcome is None, "a promise is settled once"
        self._outcome = outcome
        for callback in self._callbacks:
            self._scheduler.call_soon(callback, self)

    def result(self) -> Any:
        assert self._outcome is not None
        if self._outcome[1] is not None:
            raise self._outcome[1]
        return self._outcome[0]

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self.done():
            self._scheduler.call_soon(callback, self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            yield self
        return self.result()


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualScheduler:
    """Scheduler, clock and background worker in one; time is `now_ms` since the start."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.slices = SliceTimes(lambda: self.now_ms / 1000)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._ready.append((callback, args))

    call_from_thread = call_after_pause = call_soon

    def call_later(self, delay_ms: float, callback: Callable[..., object], *args: Any) -> Timer:
        timer = Timer()
        heapq.heappush(self._timers, (self.now_ms + delay_ms, next(self._numbers), timer, callback, args))
        return timer

    def promise(self) -> Promise:
        return Promise(self)

    async def sleep(self, delay_ms: float) -> None:
        promise = self.promise()
        if delay_ms > 0:
            self.call_later(delay_ms, promise.set_result, None)
        else:
            self.call_soon(promise.set_result, None)
        await promise

    def spawn(self, work: Awaitable[Any], *, name: str) -> Timer:
        task = Promise(self)
        steps = work.__await__()

        def step(_: Any = None) -> None:
            try:
                waits_for = next(steps)
            except StopIteration as end:
                task.set_result(end.value)
            except Exception as error:  # noqa: BLE001 - the task's outcome, as on a real loop
                task.set_exception(error)
            else:
                waits_for.add_done_callback(step)

        self.call_soon(step)
        task.cancel = lambda: None  # type: ignore[attr-defined]  # nothing here is ever cancelled
        return task  # type: ignore[return-value]  # a promise that can be cancelled

    def turn(self) -> bool:
        """Run what is ready, but no timer; whether there was anything."""
        ran = bool(self._ready)
        while self._ready:
            callback, args = self._ready.popleft()
            callback(*args)
        return ran

    def run(self, work: Awaitable[Any], *, limit_ms: float = 10**9) -> Any:
        """The result of `work`; time passes as needed."""
        task: Any = self.spawn(work, name="test")
        end_ms = self.now_ms + limit_ms
        while not task.done():
            if not self.turn():
                assert self._timers, "it waits for something that will never happen"
                assert self._timers[0][0] <= end_ms, "it takes too long"
                self._fire()
        return task.result()

    def start(self, work: Awaitable[Any]) -> Any:
        """Begin `work` and run it until it waits; the promise of its result."""
        task = self.spawn(work, name="test")
        self.turn()
        return task

    def pass_time(self, ms: float) -> None:
        end_ms = self.now_ms + ms
        self.turn()
        while self._timers and self._timers[0][0] <= end_ms:
            self._fire()
            self.turn()
        self.now_ms = end_ms

    def _fire(self) -> None:
        due_ms, _, timer, callback, args = heapq.heappop(self._timers)
        if not timer.cancelled:
            self.now_ms = max(self.now_ms, due_ms)
            callback(*args)

    # Clock and Background

    def monotonic(self) -> float:
        return self.now_ms / 1000

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now_ms)

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to `done`, as the port says
            self.call_soon(done, None, error)
        else:
            self.call_soon(done, result, None)

    def close(self) -> None: ...


class AppendResult(NamedTuple):
    base_offset: int
    end_offset: int


class MemoryPartition:
    """Has what `internal_topic.CoordinatorPartition` asks for. With `holds` on, nothing becomes durable until
    `sync`. `urgent_appends`: the number of appends that requested a flush."""

    def __init__(self, scheduler: VirtualScheduler, batches: list[bytes] | None = None) -> None:
        self.scheduler = scheduler
        self.stored = list(batches or [])
        self.start_offset = 0
        self.end_offset = sum(read_header(each).record_count for each in self.stored)
        self.high_watermark = self.end_offset
        self.holds = False
        self.refuses: StorageError | None = None
        self.waits: list[tuple[int, Promise]] = []
        self.batches_read = self.urgent_appends = 0
        self.damaged: list[int] = []
        self.is_leadership_uncertain = False

    @property
    def log(self) -> MemoryPartition:
        return self

    def append(
        self, batch: bytes, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> AppendResult:
        del is_intact
        assert internal
        if self.refuses is not None:
            raise self.refuses
        base_offset = self.end_offset
        self.stored.append(base_offset.to_bytes(8, "big") + batch[8:])
        self.end_offset += read_header(batch).record_count
        if urgent:
            self.urgent_appends += 1
            self.request_flush()
        return AppendResult(base_offset, self.end_offset)

    def request_flush(self) -> None:
        if not self.holds:
            self.scheduler.call_soon(self.sync)

    def commit_promise(self, end_offset: int) -> Promise:
        promise = self.scheduler.promise()
        self.waits.append((end_offset, promise))
        if self.high_watermark >= end_offset:
            self.sync(self.high_watermark)
        return promise

    def report_commit(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> None:
        self.commit_promise(end_offset).add_done_callback(lambda promise: callback(promise.exception()))

    def sync(self, end_offset: int | None = None) -> None:
        self.high_watermark = self.end_offset if end_offset is None else end_offset
        for end, promise in self.waits:
            if end <= self.high_watermark and not promise.done():
                promise.set_result(None)

    def fail(self, error: StorageError) -> None:
        self.refuses = error
        for _, promise in self.waits:
            if not promise.done():
                promise.set_exception(error)

    def report_damage(self, offset: int, error: MansioError) -> None:
        self.damaged.append(offset)

    def trim(self, start_offset: int) -> None:
        self.start_offset = start_offset

    def batches(self, from_offset: int) -> Iterator[bytes]:
        for batch in self.stored:
            if read_header(batch).last_offset >= from_offset:
                self.batches_read += 1
                yield batch

    def after_power_loss(self, scheduler: VirtualScheduler) -> MemoryPartition:
        """What a new start finds."""
        kept = [each for each in self.stored if read_header(each).last_offset < self.high_watermark]
        return MemoryPartition(scheduler, kept)
