"""Read-process-write loop that processes each message exactly once (KIP-98, KIP-447).

Each transaction has the records that the handler made of some messages, and the offsets of these messages.

Invariants:
* Offsets are committed only in a transaction, with the records made of the messages before them.
* Before the consumer asks for committed offsets, the coordinator has ended what an earlier run or attempt left open.
* After a transaction that did not certainly commit, no message is read before the consumer is at the committed offsets.
* Records made of messages of a partition that the group has given to another member are not committed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mansio.client.types import Message, OutgoingRecord, Publishable, TopicPartition
from mansio.errors import (
    FencedMemberEpoch,
    IllegalGeneration,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTxnState,
    MansioError,
    OutOfOrderSequence,
    ProducerFenced,
    StaleMemberEpoch,
    TransactionAbortable,
    TransactionAborted,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
    Unavailable,
    UnknownMember,
    UnknownProducerId,
    UnreadableRecords,
)
from mansio.net.retry import DEFAULT_BACKOFF

if TYPE_CHECKING:
    from mansio.client.consumer.consumer import Consumer
    from mansio.client.transactions.transaction import Transaction

logger = logging.getLogger(__name__)

Outputs = (
    Iterable[Publishable | tuple[str, Publishable]] | AsyncIterable[Publishable | tuple[str, Publishable]]
)
ProcessHandler = Callable[[list[Message]], Outputs | Awaitable[Outputs | None] | None]
"""Function that `Client.process` calls with messages; it returns or yields the records to publish."""

REPEATABLE: Final = (
    FencedMemberEpoch,
    IllegalGeneration,
    InvalidProducerIdMapping,
    InvalidTxnState,
    OutOfOrderSequence,
    StaleMemberEpoch,
    TransactionAbortable,
    TransactionAborted,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
    Unavailable,
    UnknownMember,
    UnknownProducerId,
)
"""Errors after which the messages are processed again."""


class _HandlerFailed(Exception):
    """Carries the error of the handler through the transaction's block."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Processor:
    """Runs the loop of `Client.process`, which describes the arguments."""

    def __init__(
        self,
        consumer: Consumer,
        handler: ProcessHandler,
        begin: Callable[[], Transaction],
        *,
        to: str | None,
        records_max: int,
        wait_ms_max: float,
    ) -> None:
        """`begin` makes a transaction. Raises `InvalidRequest`."""
        consumer._check_processable()
        if records_max < 1 or wait_ms_max < 0:
            raise InvalidRequest("records_max must be at least 1, wait_ms_max must not be negative")
        self._consumer = consumer
        self._handler = handler
        self._begin = begin
        self._to = to
        self._records_max = records_max
        self._wait_s_max = wait_ms_max / 1000
        self._loop = asyncio.get_running_loop()

    async def run(self) -> int:
        """Process messages until the consumer reaches its end or is closed. Returns their number."""
        processed = failures = 0
        await self._consumer.start()
        await self._rewind()  # an earlier run may have been cancelled or killed
        while True:
            messages = await self._consumer.poll()
            if not messages:
                return processed
            try:
                processed += await self._process(messages)
                failures = 0
            except _HandlerFailed as failed:
                raise failed.error from None
            except REPEATABLE as error:
                if isinstance(error.__cause__, ProducerFenced):
                    raise
                failures += 1
                logger.info("a transaction was not committed, its messages are processed again: %s", error)
                await asyncio.sleep(DEFAULT_BACKOFF.delay_seconds(failures))
                await self._rewind()

    async def _process(self, messages: list[Message]) -> int:
        """Process messages, and those that follow soon, in one transaction. Returns their number."""
        consumer = self._consumer
        consumer._hold_revocations()
        try:
            messages = await self._take_more(messages)
            async with self._begin() as transaction:
                await self._publish(messages, transaction)
                await transaction.send_offsets(consumer)
        finally:
            consumer._release_revocations()
        return len(messages)

    async def _take_more(self, messages: list[Message]) -> list[Message]:
        consumer, end_s = self._consumer, self._loop.time() + self._wait_s_max
        taken = list(messages)
        while len(taken) < self._records_max and not consumer._is_revoking:
            left_s = end_s - self._loop.time()
            if left_s <= 0:
                break
            try:
                more = await consumer.poll(left_s * 1000)
            except UnreadableRecords as error:
                # The messages before them are processed first; the next poll raises the error again.
                with suppress(InvalidRequest):  # the partition was revoked
                    await consumer.seek(TopicPartition(error.topic, error.partition), error.first_offset)
                break
            if not more:
                break
            taken += more
        return taken

    async def _publish(self, messages: list[Message], transaction: Transaction) -> None:
        """Call the handler and publish its records. Raises `_HandlerFailed` for an error of the handler."""
        try:
            outputs = self._handler(messages)
            if inspect.isawaitable(outputs):
                outputs = await outputs
        except Exception as error:
            raise _HandlerFailed(error) from error
        if outputs is None:
            return
        try:
            if isinstance(outputs, AsyncIterable):
                outputs = [output async for output in outputs]
            found = list(outputs)
        except Exception as error:
            raise _HandlerFailed(error) from error
        by_topic: dict[str, list[Publishable]] = {}
        for output in found:
            if isinstance(output, tuple) and not isinstance(output, OutgoingRecord):
                topic, record = output
            elif self._to is None:
                raise _HandlerFailed(
                    InvalidRequest(
                        "the handler returned a record without a topic: give `to`, or return pairs"
                    )
                )
            else:
                topic, record = self._to, output
            by_topic.setdefault(topic, []).append(record)
        for topic, records in by_topic.items():
            await transaction.publish_many(topic, records)

    async def _rewind(self) -> None:
        """Move the consumer to the committed offsets; retries until that succeeds or the consumer is closed.

        The offsets of a transaction that is still open are waited for. The initialization of the producer aborts it,
        for example one of a killed process; otherwise its timeout would have to pass."""
        failures = 0
        while not self._consumer.is_closed:
            try:
                async with self._begin():
                    pass
                await self._consumer.seek_to_committed()
            except MansioError as error:
                if not (error.retriable or isinstance(error, TransactionTimedOut)):
                    raise
                failures += 1
                logger.info("the committed offsets are not known yet: %s", error)
                await asyncio.sleep(DEFAULT_BACKOFF.delay_seconds(failures))
            else:
                return
