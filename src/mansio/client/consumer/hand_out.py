"""What a consumer has in hand: a batch of messages, how far the application is with it, the positions that follow.

Always true: a position is never beyond what was handed out; what the application is *done with*, for sure, is all that
comes before the message it has, or before the batch it took.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.client.consumer.batch_decoder import MessageBatch
    from mansio.client.consumer.fetcher import Fetcher
    from mansio.client.types import Message, TopicPartition


class MessageDelivery:
    """The part of a consumer that hands messages out; made for `Consumer` to build upon."""

    def __init__(self, fetcher: Fetcher, records_max: int | None) -> None:
        self._fetcher = fetcher
        self._records_max = records_max
        self._poll_event: asyncio.Event = asyncio.Event()
        """Set while the application waits for the next message."""
        self._messages: list[Message] = []
        self._index = 0
        self._batch: MessageBatch | None = None
        """What is being handed out: `_messages[_index]` is next; `_messages` are the batch's, unless cut short."""
        self._batch_start: int | None = None
        """Where the messages begin that were taken as a batch; None when they are taken one at a time."""
        self._delivered_counter: Callable[[], int] | None = None
        self._delivered = 0

    def set_delivered_counter(self, count: Callable[[], int]) -> None:
        """Ask `count()` how many messages of a batch that was taken the application has seen."""
        self._delivered_counter = count

    def _set_current_batch(self, batch: MessageBatch) -> bool:
        if not batch.state.is_active or batch.state.is_ending:
            return False
        messages = batch.messages
        if not messages:
            batch.state.consumed = batch.next_offset
            return False
        limit = self._records_max
        if limit is not None and self._delivered + len(messages) > limit:
            messages = messages[: limit - self._delivered]
        self._delivered += len(messages)
        self._batch, self._messages, self._index, self._batch_start = batch, messages, 0, None
        self._poll_event.clear()
        return True

    def _finish_current_batch(self) -> None:
        """Everything handed out is done with."""
        batch = self._batch
        if batch is not None:
            batch.state.consumed = self._position_in_batch(batch, self._index)
        if batch is not None and self._index == len(self._messages):
            self._batch, self._messages, self._index = None, [], 0

    def _position_in_batch(self, batch: MessageBatch, index: int) -> int:
        """The next offset when the first `index` messages in hand are done with."""
        if index == len(batch.messages):
            return batch.next_offset
        return batch.messages[index - 1].offset + 1 if index else batch.state.consumed

    def positions(self) -> dict[TopicPartition, int]:
        """For each partition the offset after the last message that was handed out."""
        return self._positions(include_current=True)

    def _positions(self, *, include_current: bool) -> dict[TopicPartition, int]:
        found = {partition: state.consumed for partition, state in self._fetcher.states.items()}
        batch = self._batch
        if batch is not None and batch.state.is_active:
            index = self._delivered_in_batch() if include_current else self._processed_in_batch()
            found[batch.state.partition] = self._position_in_batch(batch, index)
        return found

    def _delivered_in_batch(self) -> int:
        """How many messages of those in hand the application has seen."""
        if self._batch_start is None or self._delivered_counter is None:
            return self._index
        return self._batch_start + self._delivered_counter()

    def _processed_in_batch(self) -> int:
        """How many of them it is done with, for sure."""
        if self._batch_start is not None and self._delivered_counter is None:
            return self._batch_start
        return max(self._delivered_in_batch() - 1, self._batch_start or 0)

    def assignment(self) -> set[TopicPartition]:
        """The partitions that are being read now."""
        return set(self._fetcher.states)

    def lag(self) -> dict[TopicPartition, int | None]:
        """How many offsets behind the end each partition is, as of the last fetch; None before the first."""
        positions = self.positions()
        return {
            partition: max(0, state.high_watermark - positions[partition])
            if state.high_watermark >= 0
            else None
            for partition, state in self._fetcher.states.items()
        }

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing more of these (but what is in hand) until `resume`."""
        for partition in partitions:
            if partition in self._fetcher.states:
                self._fetcher.states[partition].is_paused = True

    def resume(self, *partitions: TopicPartition) -> None:
        """The reverse of `pause`."""
        for partition in partitions:
            if partition in self._fetcher.states:
                self._fetcher.states[partition].is_paused = False
        self._fetcher.wake()

    def _discard_buffered(self, partitions: set[TopicPartition]) -> None:
        """Forget what was not handed out yet."""
        if self._batch is not None and self._batch.state.partition in partitions:
            self._batch, self._messages, self._index = None, [], 0
