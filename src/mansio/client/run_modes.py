"""Calling a handler for every record: in parallel, in the order of partitions, or in the order of keys.

Records wait in *lanes*, of which one record is worked on at a time, lowest offset first: a lane is one record (mode
"parallel", and records without a key), a partition ("fifo"), or a key of a partition ("by_key"). So many workers as
were asked for take the lanes that have something, in turn.

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
from typing import TYPE_CHECKING, Any, Final, Literal

from mansio.errors import InvalidRequest, MansioError

from .leased_types import ACCEPT, HELD, REJECT, RELEASE, SETTLED, Leased, LeaseLost
from .share_order import Tries

if TYPE_CHECKING:
    from .lease_book import LeaseBook
    from .settles import Settler

logger = logging.getLogger(__name__)

Mode = Literal["parallel", "fifo", "by_key"]
MODES: Final = ("parallel", "fifo", "by_key")

Handler = Callable[[Leased], Awaitable[object] | object]
"""What `Receiver.run` calls with each record; what it returns is awaited if it can be."""

DRAIN_MS: Final = 30_000
REASON_CHARACTERS_MAX: Final = 500


class _Lane:
    """Records that are worked on one after the other. `failures` are those of the first one."""

    __slots__ = ("is_queued", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Leased] = []
        self.is_queued = False
        """Whether it waits for a worker, or has one."""


class Run:
    """One call of `Receiver.run`."""

    def __init__(
        self,
        handler: Handler,
        book: LeaseBook,
        settler: Settler,
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
        self._book = book
        self._settler = settler
        self._mode = mode
        self._concurrency = concurrency
        self._drain_s = drain_ms / 1000
        self._lanes: dict[Any, _Lane] = {}
        self._runnable: deque[tuple[Any, _Lane]] = deque()
        self._work = asyncio.Event()
        self._stopped = asyncio.Event()
        self.tries = Tries()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped.set()
        self._work.set()
        self._book.arrival.set()

    async def until_stopped(self, check: Callable[[], None]) -> None:
        """Work until `stop`, and until what runs then has ended. `check` raises what nothing here can heal."""
        self._book.lost_listeners.append(self._lost)
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
            self._book.lost_listeners.remove(self._lost)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error

    # -- lanes --------

    async def _feed(self, check: Callable[[], None]) -> None:
        """Put what comes into its lane."""
        while not self._stopped.is_set():
            self._book.arrival.clear()
            for message in self._book.pop_unbegun():
                key = self._lane_of(message)
                lane = self._lanes.setdefault(key, _Lane())
                insort(lane.waiting, message, key=_offset)
                self._offer(key, lane)
            check()
            await self._book.arrival.wait()

    def _lane_of(self, message: Leased) -> Any:
        if self._mode == "fifo":
            return message.topic, message.partition
        if self._mode == "by_key" and message.key is not None:
            return message.topic, message.partition, message.key
        return message.topic, message.partition, message.offset

    def _offer(self, key: Any, lane: _Lane) -> None:
        if lane.waiting and not lane.is_queued:
            lane.is_queued = True
            self._runnable.append((key, lane))
            self._work.set()
        elif not lane.waiting and not lane.is_queued:
            self._lanes.pop(key, None)

    def _lost(self, message: Leased) -> None:
        """The book says so. What comes after it in its lane is given back; it has to be the first again."""
        key = self._lane_of(message)
        lane = self._lanes.get(key)
        if lane is not None and self._mode != "parallel":
            self._give_back_after(lane, message.offset)

    def _give_back_after(self, lane: _Lane, offset: int) -> None:
        kept: list[Leased] = []
        given: list[Leased] = []
        for each in lane.waiting:
            (kept if each.offset <= offset else given).append(each)
        lane.waiting = kept
        for each in given:
            self._settler.give_back(each)

    # -- workers --------

    async def _worker(self) -> None:
        while not self._stopped.is_set():
            if not self._runnable:
                self._work.clear()
                await self._work.wait()
                continue
            key, lane = self._runnable.popleft()
            if lane.waiting:
                message = lane.waiting.pop(0)
                if await self._book.ready_to_begin(message):
                    await self._handle(message)
                    await self._book.known(message)
                    if self._mode != "parallel" and _is_given_back(message):
                        self._give_back_after(lane, message.offset)
            lane.is_queued = False
            self._offer(key, lane)

    async def _handle(self, message: Leased) -> None:
        """Until it is settled, or lost, or there is no time left."""
        failures = 0
        while message._state == HELD:
            try:
                outcome = self._handler(message)
                if inspect.isawaitable(outcome):
                    await outcome
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the handler's, and the record's fate
                failures += 1
                if message._state != HELD:
                    return
                _log_failure(message, error, failures)
                if self._mode == "parallel":
                    await self._settle(message, RELEASE)
                elif failures >= self.tries.most:
                    await self._settle(message, REJECT, _reason(error, failures))
                elif await self._stops_within(self.tries.rest_s(failures)):
                    return
            else:
                if message._state == HELD:
                    await self._settle(message, ACCEPT)

    async def _settle(self, message: Leased, kind: int, reason: str = "") -> None:
        """Say it, and wait until the broker has stored it."""
        try:
            await self._settler.settle(message, kind, reason=reason)
        except LeaseLost as error:
            logger.info("handled, and not settled: %s", error)
        except MansioError as error:
            logger.warning("handled, and not settled: %s", error)
            self._book.lose(message)  # it comes again when its lease is over

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


def _offset(message: Leased) -> int:
    return message.offset


def _is_given_back(message: Leased) -> bool:
    """Did the handler itself say that it is to come again?"""
    return message._state == SETTLED and message._settled_as == RELEASE


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
