"""Traced publishing: the methods of a producer with a `send` span for each call.

The span begins before the first record is appended, because the headers of the records carry its context, and ends when
all records are acknowledged or have failed, also where no caller waits for that.

Invariants:
* The context is encoded once per call. All records of the call share the same headers.
* A record that has a context of its own keeps its headers as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.client.producer.accumulator import CompletionListener, Delivery
from mansio.telemetry.context_headers import has_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from mansio.client.producer.accumulator import Batch
    from mansio.client.types import Headers, OutgoingRecord, Publishable
    from mansio.telemetry.client_telemetry import ClientTelemetry, SendOperation

    Spans = list[tuple[Batch, int, int]]
    AppendMany = Callable[[str, Iterable[Publishable], Headers], Awaitable[Spans]]


class TracedSends:
    """Appends the records of a producer's calls, each in a `send` span. `append_many`: `Producer._append_many`."""

    def __init__(self, telemetry: ClientTelemetry, append_many: AppendMany) -> None:
        self._telemetry = telemetry
        self._append_many = append_many

    async def append_one(self, topic: str, record: OutgoingRecord) -> Delivery:
        """Append one record. Its headers are bytes. Raises the errors of `Producer.send`."""
        own = record.headers if has_context(record.headers) else ()
        operation = self._telemetry.start_send(topic, own_context=own)
        ((batch, index, _),) = await self._append(operation, topic, (record,), is_batch=False)
        return Delivery(batch, index)

    async def append_many(self, topic: str, records: Iterable[Publishable]) -> Spans:
        """Append records in order. Returns what `Producer._append_many` returns, and raises its errors."""
        return await self._append(self._telemetry.start_send(topic), topic, records, is_batch=True)

    async def _append(
        self, operation: SendOperation, topic: str, records: Iterable[Publishable], *, is_batch: bool
    ) -> Spans:
        try:
            spans = await self._append_many(topic, records, operation.context)
        except BaseException as error:
            operation.end(0 if is_batch else 1, error)
            raise
        _Sending(operation, spans, is_batch=is_batch)
        return spans


class _Sending:
    """Ends a `send` operation when the batches with its records are completed."""

    __slots__ = ("_incomplete_count", "_is_batch", "_operation", "_spans")

    def __init__(self, operation: SendOperation, spans: Spans, *, is_batch: bool) -> None:
        self._operation = operation
        self._spans = spans
        self._is_batch = is_batch
        self._incomplete_count = 1
        for batch in dict.fromkeys(batch for batch, _, _ in spans):
            self._await_completion(batch)
        self._count_down()

    def _await_completion(self, batch: Batch) -> None:
        if batch.halves is not None:
            for half in batch.halves:
                self._await_completion(half)
        elif not batch.is_completed:
            self._incomplete_count += 1
            batch.waiters.append(CompletionListener(batch, self._on_completed))

    def _on_completed(self, batch: Batch) -> None:
        if batch.halves is not None:  # it was split, not completed
            self._await_completion(batch)
        self._count_down()

    def _count_down(self) -> None:
        self._incomplete_count -= 1
        if not self._incomplete_count:
            self._end()

    def _end(self) -> None:
        operation, spans = self._operation, self._spans
        errors = (batch.first_error(begin, end) for batch, begin, end in spans)
        error = next((each for each in errors if each is not None), None)
        if self._is_batch:
            count = sum(end - begin for _, begin, end in spans)
            operation.set_count(count)
        else:
            ((batch, index, _),) = spans
            count = 1
            offset = -1 if error is not None else batch.outcome(index).offset
            operation.set_record(batch.queue.partition, offset, is_tombstone=batch.values[index] is None)
        operation.end(count, error)
