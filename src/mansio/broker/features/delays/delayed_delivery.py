"""Delivery of delayed records when they are due, and firing of schedules, for all partitions that this broker leads.

One timer wakes for the earliest due time of all partitions. What is due is delivered in turns of about `TURN_S`, one
partition after the other, with pauses in between, so that a million records that are due at one moment delay other
requests little. The number of delayed records in a batch follows the duration of the last deliveries; firings end by
time.

Invariants:
* The timer is only a hint: whether a record is due is decided by the wall clock, so a clock that is set back delays
  records. A clock that was set, forward or back, is noticed after at most `TIMER_MS_MAX`.
* A partition whose deliveries are not committed gets at most `UNCOMMITTED_RECORDS_MAX` more.
* A partition that this broker does not lead, or whose log rejects appends, is tried again after `DELIVERY_RETRY_MS`.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError
from mansio.host.item_turns import TURN_S, ItemTurns, Work
from mansio.logs import fields

if TYPE_CHECKING:
    from mansio.broker.features.delays.delay_manager import DelayManager
    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Scheduler, Timer

logger = logging.getLogger(__name__)

BATCH_RECORDS_MIN: Final = 16
BATCH_RECORDS_MAX: Final = 1024
BATCH_BYTES_MAX: Final = 256 << 10

TIMER_MS_MAX: Final = 10_000
DELIVERY_RETRY_MS: Final = 1_000

OUTDATED_ENTRIES_MAX: Final = 64

UNCOMMITTED_RECORDS_MAX: Final = 20_000
"""Number of offsets that deliveries of a partition may be ahead of its high watermark."""


class DelayedDelivery:
    """Delivers the due records, and fires the due schedules, of a broker's partitions. All methods run on the broker's
    event loop."""

    def __init__(self, clock: Clock, scheduler: Scheduler) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._queue: list[tuple[int, int, DelayManager]] = []
        """Heap of (wall clock in ms, number, partition); entries that `_wake_ms` does not name are ignored."""
        self._number = 0
        self._managers: dict[Partition, DelayManager] = {}
        self._wake_ms: dict[DelayManager, int] = {}
        self._due: deque[DelayManager] = deque()
        self._timer: Timer | None = None
        self._timer_ms = 0
        self._latest_ms = 0
        """Latest time that the wall clock has shown; later than now if it was set back."""
        self._is_running = False
        self._is_closed = False
        self._turn = ItemTurns(scheduler, Work.DELAYED_DELIVERY, items_per_look=1)
        self._batch_records = 64
        self.delivered_count = 0
        """Number of delayed records and records of schedules delivered since the broker started."""

    def attach(self, manager: DelayManager) -> None:
        """Deliver the records of a partition from now on."""
        self._managers[manager.partition] = manager
        self.on_due_changed(manager.partition)

    def detach(self, manager: DelayManager) -> None:
        """Forget a partition that was closed."""
        self._managers.pop(manager.partition, None)
        self._wake_ms.pop(manager, None)
        self._rebuild_queue()

    def close(self) -> None:
        """Stop all deliveries, also of partitions that are attached later."""
        self._is_closed = True
        self._due.clear()
        self._queue.clear()
        self._wake_ms.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def next_wake_ms(self) -> int | None:
        """When the next partition is looked at, or earlier, ms since the Unix epoch; None if nothing is pending."""
        return self._queue[0][0] if self._queue else None

    def on_due_changed(self, partition: Partition) -> None:
        """Plan the next delivery of a partition whose earliest due time may be earlier than before, or whose view has
        become complete. Partitions that are not attached are ignored."""
        manager = self._managers.get(partition)
        if manager is not None and (due_ms := manager.view.next_wake_ms) is not None:
            self._wake_at(manager, due_ms)

    def _wake_at(self, manager: DelayManager, wall_ms: int) -> None:
        """Look at a partition at this time, or earlier."""
        known = self._wake_ms.get(manager)
        if self._is_closed or (known is not None and known <= wall_ms):
            return
        self._wake_ms[manager] = wall_ms
        self._number += 1
        heapq.heappush(self._queue, (wall_ms, self._number, manager))
        if len(self._queue) > 2 * len(self._wake_ms) + OUTDATED_ENTRIES_MAX:
            self._rebuild_queue()
        if self._timer is None or wall_ms < self._timer_ms:
            self._set_timer()

    def _retry(self, manager: DelayManager, wait_ms: int) -> None:
        """Look at a partition again after a time."""
        self._latest_ms = max(self._latest_ms, self._clock.wall_ms())
        self._wake_at(manager, self._clock.wall_ms() + wait_ms)

    def _on_clock_set_back(self, now_ms: int) -> None:
        """Look at every partition again that would wait for what was `DELIVERY_RETRY_MS` from a time that will not be
        soon."""
        for manager in self._due:
            manager.schedules.retry_soon()
        for manager, wall_ms in self._wake_ms.items():
            manager.schedules.retry_soon()
            self._wake_ms[manager] = min(wall_ms, now_ms + DELIVERY_RETRY_MS)
        self._rebuild_queue()

    def _rebuild_queue(self) -> None:
        """Drop the outdated entries. Each wake-up before a distant due time leaves one."""
        self._queue = [
            (wall_ms, number, manager) for number, (manager, wall_ms) in enumerate(self._wake_ms.items())
        ]
        self._number = len(self._queue)
        heapq.heapify(self._queue)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue:
            self._timer_ms = self._queue[0][0]
            delay_ms = min(max(self._timer_ms - self._clock.wall_ms(), 0), TIMER_MS_MAX)
            self._timer = self._scheduler.call_later(delay_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self._clock.wall_ms()
        if now_ms < self._latest_ms:
            self._on_clock_set_back(now_ms)
        self._latest_ms = now_ms
        while self._queue and self._queue[0][0] <= now_ms:
            wall_ms, _, manager = heapq.heappop(self._queue)
            if self._wake_ms.get(manager) == wall_ms:
                del self._wake_ms[manager]
                self._due.append(manager)
        self._set_timer()
        if self._due and not self._is_running:
            self._is_running = True
            self._run_turn()

    def _run_turn(self) -> None:
        """Deliver records of one partition after the other, and continue in a later turn of the event loop."""
        turn = self._turn
        turn.begin()
        while self._due:
            batch_records = self._batch_records
            delivered_count = self._try_to_deliver(self._due.popleft())
            if turn.is_over(max(1, delivered_count)) or delivered_count >= batch_records:
                break
        turn.end()
        self._is_running = bool(self._due)
        if self._is_running:
            self._scheduler.call_after_pause(self._run_turn)

    def _try_to_deliver(self, manager: DelayManager) -> int:
        """Deliver some records of a partition; return how many."""
        before = self.delivered_count
        try:
            self._deliver(manager)
        except Exception as error:  # noqa: BLE001  # a defect must not stop the deliveries of other partitions, either
            self._log_failure(manager, error)
            self._retry(manager, DELIVERY_RETRY_MS)
        return self.delivered_count - before

    def _deliver(self, manager: DelayManager) -> None:
        partition = manager.partition
        if partition.closed:
            return
        if not partition.is_leader or not manager.replay.is_complete or partition.log.failure is not None:
            self._retry(manager, DELIVERY_RETRY_MS)
            return
        if manager.uncommitted_end - partition.high_watermark > UNCOMMITTED_RECORDS_MAX and (
            not partition.when_committed(manager.uncommitted_end, partial(self._on_committed, manager))
        ):
            return
        began = self._scheduler.slices.now()
        count = manager.deliver_due(self._batch_records, BATCH_BYTES_MAX)
        self.delivered_count += count
        if count >= self._batch_records and not manager.has_fired:
            self._adapt_batch(self._scheduler.slices.now() - began)
        next_ms = manager.view.next_wake_ms
        if next_ms is None:
            return
        if next_ms <= self._clock.wall_ms():
            self._due.append(manager)
        else:
            self._wake_at(manager, next_ms)

    def _adapt_batch(self, took_s: float) -> None:
        """Change the number of records in a batch, so that one of them makes a turn."""
        if took_s > TURN_S:
            self._batch_records = max(BATCH_RECORDS_MIN, self._batch_records * 3 // 4)
        elif took_s < TURN_S / 2:
            self._batch_records = min(BATCH_RECORDS_MAX, self._batch_records * 5 // 4)

    def _on_committed(self, manager: DelayManager, error: MansioError | None) -> None:
        self._retry(manager, 0 if error is None else DELIVERY_RETRY_MS)

    def _log_failure(self, manager: DelayManager, error: Exception) -> None:
        partition = manager.partition
        logger.warning(
            "delivery_failed",
            extra=fields(topic=partition.topic, partition=partition.index, reason=error),
            exc_info=None if isinstance(error, MansioError) else error,
        )
