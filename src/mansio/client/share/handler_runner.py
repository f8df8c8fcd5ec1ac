"""Calling a handler for every record: in parallel, in the order of partitions, or in the order of keys.

Records wait in *lanes*, of which one record is worked on at a time, lowest offset first: a lane is a partition
("fifo"), or a key of a partition ("by_key"); records without a key, and all in mode "parallel", have none. So many
workers as were asked for take the lanes that have something, and the records without one, in turn. What was handled
well is acknowledged together, in the loop's next turn, and nobody waits for that but its lanes.

Always true: the next record of a lane begins when the one before is known to be settled, and the broker has said so. A
record whose lease is lost takes along those of its lane that come after it: they are given back unbegun, because it
comes again, maybe elsewhere, and must come first. What is unbegun when it stops is left to be released.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from mansio.client.share.delivery_order import RetryPolicy
from mansio.client.share.leased import ACCEPT, ACKNOWLEDGED, HELD, REJECT, RELEASE, Leased, LeaseLost
from mansio.errors import InvalidRequest, MansioError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.share.ack_sender import AckSender
    from mansio.client.share.in_flight_records import InFlightRecords

logger = logging.getLogger(__name__)

Mode = Literal["parallel", "fifo", "by_key"]
MODES: Final = ("parallel", "fifo", "by_key")

Handler = Callable[[Leased], Awaitable[object] | object]
"""What `Receiver.run` calls with each record; what it returns is awaited if it can be."""

DRAIN_MS: Final = 30_000
TURN_S: Final = 0.002
"""After so long in one turn of the loop, workers let others go on, and what they did is acknowledged."""

REASON_CHARACTERS_MAX: Final = 500
REFUSALS_MAX: Final = 20
"""Refused so often in a row, for another reason than that a lease is over, nothing will ever be settled: all would be
handled again and again."""


class _KeyQueue:
    """Records that are worked on one after the other. `failures` are those of the first one."""

    __slots__ = ("is_queued", "key", "waiting")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.waiting: list[Leased] = []
        self.is_queued = False
        """Whether it waits for a worker, has one, or waits for the broker's word on its last record."""


class _HandledListener:
    """Hears what became of records that were handled well; `key_queues` go on then."""

    __slots__ = ("_key_queues", "_run")

    def __init__(self, run: HandlerRunner, key_queues: dict[int, _KeyQueue]) -> None:
        self._run = run
        self._key_queues = key_queues

    def completed(self, messages: Sequence[Leased], error: MansioError | None) -> None:
        """See `leased_types.AckListener`."""
        if error is not None:
            self._run.not_settled(messages, error)
        else:
            self._run.refusals = 0
        if self._key_queues:
            for message in messages:
                if (key_queue := self._key_queues.get(id(message))) is not None:
                    self._run.resume(key_queue)


class HandlerRunner:
    """One call of `Receiver.run`."""

    def __init__(
        self,
        handler: Handler,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        *,
        mode: Mode,
        concurrency: int,
        drain_ms: float,
    ) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        if concurrency < 1:
            raise InvalidRequest("concurrency is at least 1")
        self._handler = handler
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._mode = mode
        self._concurrency = concurrency
        self._drain_s = drain_ms / 1000
        self._key_queues: dict[Any, _KeyQueue] = {}
        self._runnable: deque[_KeyQueue | Leased] = deque()
        self._done: list[Leased] = []
        """Handled well, and to be acknowledged in the loop's next turn."""
        self._done_key_queues: dict[int, _KeyQueue] = {}
        """By the `id` of such a record."""
        self._first_done = 0.0
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._stopped = asyncio.Event()
        self.retry_policy = RetryPolicy()
        self.refusals = 0
        """In a row."""
        self._last_refusal: MansioError | None = None
        self._refused: MansioError | None = None

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped.set()
        self._work.set()
        self._in_flight_records.record_available.set()

    async def until_stopped(self, check: Callable[[], None]) -> None:
        """Work until `stop`, and until what runs then has ended. `check` raises what nothing here can heal."""
        self._in_flight_records.lost_listeners.append(self._lost)
        workers = [asyncio.ensure_future(self._worker()) for _ in range(self._concurrency)]
        feeding = asyncio.ensure_future(self._feed(check))
        try:
            await asyncio.wait([feeding, *workers], return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                await asyncio.wait(workers, timeout=self._drain_s)
        finally:
            self._stopped.set()
            for task in (feeding, *workers):
                task.cancel()
            ended = await asyncio.gather(feeding, *workers, return_exceptions=True)
            self._acknowledge()
            self._in_flight_records.lost_listeners.remove(self._lost)
        for error in (*ended, self._refused):
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error

    # -- lanes --------

    async def _feed(self, check: Callable[[], None]) -> None:
        """Put what comes into its lane."""
        while not self._stopped.is_set():
            self._in_flight_records.record_available.clear()
            for message in self._in_flight_records.pop_undelivered():
                key = self._key_of(message)
                if key is None:
                    self._runnable.append(message)
                    continue
                if (key_queue := self._key_queues.get(key)) is None:
                    key_queue = self._key_queues[key] = _KeyQueue(key)
                insort(key_queue.waiting, message, key=_OFFSET)
                self._offer(key_queue)
            if self._runnable:
                self._work.set()
            check()
            await self._in_flight_records.record_available.wait()

    def _key_of(self, message: Leased) -> Any:
        if self._mode == "fifo":
            return message.topic, message.partition
        if self._mode == "by_key" and message.key is not None:
            return message.topic, message.partition, message.key
        return None

    def _offer(self, key_queue: _KeyQueue) -> None:
        if key_queue.is_queued:
            return
        if key_queue.waiting:
            key_queue.is_queued = True
            self._runnable.append(key_queue)
            self._work.set()
        else:
            self._key_queues.pop(key_queue.key, None)

    def resume(self, key_queue: _KeyQueue) -> None:
        """What was worked on last is over."""
        key_queue.is_queued = False
        self._offer(key_queue)

    def _lost(self, message: Leased) -> None:
        """The book says so. What comes after it in its lane is given back; it has to be the first again."""
        key_queue = self._key_queues.get(self._key_of(message))
        if key_queue is not None:
            self._give_back_after(key_queue, message.offset)

    def _give_back_after(self, key_queue: _KeyQueue, offset: int) -> None:
        kept: list[Leased] = []
        given: list[Leased] = []
        for each in key_queue.waiting:
            (kept if each.offset <= offset else given).append(each)
        key_queue.waiting = kept
        for each in given:
            self._ack_sender.release(each)

    # -- workers --------

    async def _worker(self) -> None:
        while not self._stopped.is_set():
            if not self._runnable:
                self._work.clear()
                await self._work.wait()
                continue
            next_one = self._runnable.popleft()
            if not isinstance(next_one, _KeyQueue):
                await self._work_on(next_one, None)
            elif not next_one.waiting or not await self._work_on(next_one.waiting.pop(0), next_one):
                self.resume(next_one)
            if self._done and self._loop.time() - self._first_done > TURN_S:
                await asyncio.sleep(0)  # a handler that never waits would keep the loop from everything else

    async def _work_on(self, message: Leased, key_queue: _KeyQueue | None) -> bool:
        """True if the lane is to go on when the broker has acknowledged the record, False if it may now."""
        in_flight_records = self._in_flight_records
        if not (
            await in_flight_records.wait_deliverable(message)
            if message._is_suspect
            else in_flight_records.deliver(message)
        ):
            return False
        if await self._handle(message):
            in_flight_records.start_acknowledging((message,))
            if not self._done:
                self._loop.call_soon(self._acknowledge)
                self._first_done = self._loop.time()
            self._done.append(message)
            if key_queue is not None:
                self._done_key_queues[id(message)] = key_queue
            return True
        if key_queue is not None:
            await in_flight_records.known(message)
            if _is_given_back(message):
                self._give_back_after(key_queue, message.offset)
        return False

    async def _handle(self, message: Leased) -> bool:
        """Until it is settled, or lost, or there is no time left. True if it was handled well and is to be
        acknowledged."""
        failures = 0
        while message._state == HELD:
            try:
                outcome = self._handler(message)
                if outcome is not None and inspect.isawaitable(outcome):
                    await outcome
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the handler's, and the record's fate
                failures += 1
                if message._state != HELD:
                    return False
                _log_failure(message, error, failures)
                if self._mode == "parallel":
                    await self._settle(message, RELEASE)
                elif failures >= self.retry_policy.most:
                    await self._settle(message, REJECT, _reason(error, failures))
                elif await self._stops_within(self.retry_policy.delay_s(failures)):
                    return False
            else:
                return message._state == HELD
        return False

    def _acknowledge(self) -> None:
        """Say of what was handled well that it is done."""
        done, self._done = self._done, []
        key_queues, self._done_key_queues = self._done_key_queues, {}
        if done:
            done.sort(key=_PLACE)
            self._ack_sender.acknowledge_handled(done, ACCEPT, _HandledListener(self, key_queues))

    async def _settle(self, message: Leased, kind: int, reason: str = "") -> None:
        """Say it, and wait until the broker has stored it."""
        try:
            await self._ack_sender.acknowledge(message, kind, reason=reason)
        except MansioError as error:
            self.not_settled((message,), error)
        else:
            self.refusals = 0

    def not_settled(self, messages: Sequence[Leased], error: MansioError) -> None:
        """The broker would not, or nobody knows whether it has."""
        if isinstance(error, LeaseLost):
            logger.info("handled, and not settled: %s", error)
            return
        logger.warning("handled, and not settled: %s", error)
        for message in messages:
            self._in_flight_records.mark_lost(message)  # it comes again when its lease is over
        if error is self._last_refusal:
            return  # one request may have said it of many
        self._last_refusal = error
        self.refusals += 1
        if self.refusals >= REFUSALS_MAX and self._refused is None:
            self._refused = error
            self.stop()

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


_OFFSET: Final = itemgetter(2)
_PLACE: Final = itemgetter(0, 1, 2)


def _is_given_back(message: Leased) -> bool:
    """Did the handler itself say that it is to come again?"""
    return message._state == ACKNOWLEDGED and message._ack_type == RELEASE


def _log_failure(message: Leased, error: Exception, failures: int) -> None:
    logger.warning(
        "the handler failed for offset %d of %s-%d (delivery %d, try %d): %s: %s",
        message.offset,
        message.topic,
        message.partition,
        message.delivery_count,
        failures,
        type(error).__name__,
        error,
    )


def _reason(error: Exception, failures: int) -> str:
    return f"{type(error).__name__}: {error} (after {failures} tries)"[:REASON_CHARACTERS_MAX]
