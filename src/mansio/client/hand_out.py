"""What a consumer has in hand: a batch of messages, how far the application is with it, the positions that follow.

Always true: a position is never beyond what was handed out; what the application is *done with*, for sure, is all that
comes before the message it has, or before the batch it took.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .decode import MessageBatch
    from .fetcher import Fetcher
    from .types import Message, TopicPartition


class HandOut:
    """The part of a consumer that hands messages out; made for `Consumer` to build upon."""

    def __init__(self, fetcher: Fetcher, records_max: int | None) -> None:
        self._fetcher = fetcher
        self._records_max = records_max
        self._asked: asyncio.Event = asyncio.Event()
        """Set while the application waits for the next message."""
        self._messages: list[Message] = []
        self._index = 0
        self._batch: MessageBatch | None = None
        """What is being handed out: `_messages[_index]` is next; `_messages` are the batch's, unless cut short."""
        self._taken_from: int | None = None
        """Where the messages begin that were taken as a batch; None when they are taken one at a time."""
        self._count_handed_out: Callable[[], int] | None = None
        self._handed_out = 0

    def count_handed_out(self, count: Callable[[], int]) -> None:
        """Ask `count()` how many messages of a batch that was taken the application has seen."""
        self._count_handed_out = count

    def _put_in_hand(self, batch: MessageBatch) -> bool:
        if not batch.state.is_active or batch.state.is_ending:
            return False
        messages = batch.messages
        if not messages:
            batch.state.consumed = batch.next_offset
            return False
        limit = self._records_max
        if limit is not None and self._handed_out + len(messages) > limit:
            messages = messages[: limit - self._handed_out]
        self._handed_out += len(messages)
        self._batch, self._messages, self._index, self._taken_from = batch, messages, 0, None
        self._asked.clear()
        return True

    def _finish_in_hand(self) -> None:
        """Everything handed out is done with."""
        batch = self._batch
        if batch is not None:
            batch.state.consumed = self._position_in_hand(batch, self._index)
        if batch is not None and self._index == len(self._messages):
            self._batch, self._messages, self._index = None, [], 0

    def _position_in_hand(self, batch: MessageBatch, index: int) -> int:
        """The next offset when the first `index` messages in hand are done with."""
        if index == len(batch.messages):
            return batch.next_offset
        return batch.messages[index - 1].offset + 1 if index else batch.state.consumed

    def positions(self) -> dict[TopicPartition, int]:
        """For each partition the offset after the last message that was handed out."""
        return self._positions(in_hand=True)

    def _positions(self, *, in_hand: bool) -> dict[TopicPartition, int]:
        found = {partition: state.consumed for partition, state in self._fetcher.states.items()}
        batch = self._batch
        if batch is not None and batch.state.is_active:
            index = self._seen_in_hand() if in_hand else self._done_in_hand()
            found[batch.state.partition] = self._position_in_hand(batch, index)
        return found

    def _seen_in_hand(self) -> int:
        """How many messages of those in hand the application has seen."""
        if self._taken_from is None or self._count_handed_out is None:
            return self._index
        return self._taken_from + self._count_handed_out()

    def _done_in_hand(self) -> int:
        """How many of them it is done with, for sure."""
        if self._taken_from is not None and self._count_handed_out is None:
            return self._taken_from
        return max(self._seen_in_hand() - 1, self._taken_from or 0)

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

    def _drop(self, partitions: set[TopicPartition]) -> None:
        """Forget what was not handed out yet."""
        if self._batch is not None and self._batch.state.partition in partitions:
            self._batch, self._messages, self._index = None, [], 0
