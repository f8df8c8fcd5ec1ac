"""Spans and metrics of the operations of one client.

A `send` span is the creation context of the records of one call, whose headers carry it. Spans of `poll`, of handlers
and of acknowledgements are linked to the creation contexts of their records.

Invariants:
* An operation has one span and one duration, and calls OpenTelemetry a bounded number of times, whatever the number of
  its records: at most `LINKS_MAX` contexts are linked.
* Headers of received records are read only for a span that is sampled, or that they may be the parent of.
* A span that an operation has started ends when the operation does, with its error if there is one.
"""

from __future__ import annotations

import inspect
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from mansio.telemetry import conventions
from mansio.telemetry.conventions import (
    ACKNOWLEDGE,
    CLIENT_ID,
    DESTINATION,
    ERROR_TYPE,
    GROUP,
    MESSAGE_COUNT,
    OFFSET,
    OPERATION_NAME,
    OPERATION_TYPE,
    PARTITION,
    PROCESS,
    RECEIVE,
    SEND,
    SERVER_ADDRESS,
    SERVER_PORT,
    SYSTEM,
    TOMBSTONE,
    chosen_names,
)
from mansio.telemetry.trace_context import creation_context, creation_contexts, headers_of
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from mansio.telemetry.conventions import Attributes
    from mansio.telemetry.trace_context import Headers, Record


INSTRUMENTATION: Final = "mansio"
LINKS_MAX: Final = 128
"""Largest number of links of a span: the limit of OpenTelemetry's SDK, too."""
KAFKA: Final = "kafka"
POLL: Final = "poll"
NANOSECONDS_PER_SECOND: Final = 1_000_000_000


class ClientTelemetry:
    """Makes the spans and records the metrics of one client."""

    def __init__(
        self,
        tracer_provider: TracerProvider,
        meter_provider: MeterProvider,
        *,
        client_id: str,
        server: tuple[str, int],
    ) -> None:
        """`server`: address and port of a broker by which the cluster is addressed."""
        self._tracer = tracer_provider.get_tracer(INSTRUMENTATION, __version__)
        self._names = chosen_names()
        self._common: Attributes = {SYSTEM: KAFKA, SERVER_ADDRESS: server[0], SERVER_PORT: server[1]}
        self._client_id = client_id
        meter = meter_provider.get_meter(INSTRUMENTATION, __version__)
        self._operation_duration = meter.create_histogram(
            conventions.OPERATION_DURATION,
            unit="s",
            description="Duration of an operation of a producer or consumer.",
            explicit_bucket_boundaries_advisory=conventions.DURATION_BOUNDS_S,
        )
        self._process_duration = meter.create_histogram(
            conventions.PROCESS_DURATION,
            unit="s",
            description="Duration of processing a message.",
            explicit_bucket_boundaries_advisory=conventions.DURATION_BOUNDS_S,
        )
        self._sent = meter.create_counter(
            conventions.SENT_MESSAGES, unit="{message}", description="Messages that a producer tried to send."
        )
        self._consumed = meter.create_counter(
            conventions.CONSUMED_MESSAGES,
            unit="{message}",
            description="Messages delivered to the application.",
        )

    # -- producers --------

    def start_send(self, topic: str, *, own_context: Headers = ()) -> SendOperation:
        """Start publishing records of one call. `own_context`: headers of a single record that has a creation context
        already: then the span is not the creation context, but linked to it."""
        operation = Operation(self, SEND, SEND, topic)
        span = self._tracer.start_span(
            operation.span_name,
            kind=SpanKind.CLIENT if own_context else SpanKind.PRODUCER,
            attributes=self._span_attributes(operation),
        )
        operation.span = span
        if own_context and span.is_recording() and (context := creation_context(own_context)) is not None:
            span.add_link(context)
        return SendOperation(operation, () if own_context else headers_of(span))

    # -- consumers --------

    def on_received(
        self,
        records: Sequence[Record],
        begun_ns: int,
        *,
        topic: str | None,
        group: str | None,
        partition: int | None = None,
    ) -> None:
        """Record a call that began at `begun_ns` (`time.time_ns`) and returned records. `topic`: None for several."""
        operation = self._start_received(begun_ns, topic, group)
        operation.set_attribute(MESSAGE_COUNT, len(records))
        if partition is not None:
            operation.set_attribute(PARTITION, str(partition))
        operation.link(records)
        self.count_consumed(operation, len(records))
        operation.end()

    def on_receive_failed(
        self, error: BaseException, begun_ns: int, *, topic: str | None, group: str | None
    ) -> None:
        """Record a call that raised an error instead of returning records."""
        self._start_received(begun_ns, topic, group).end(error)

    def _start_received(self, begun_ns: int, topic: str | None, group: str | None) -> Operation:
        operation = Operation(self, POLL, RECEIVE, topic, group=group, begun_ns=begun_ns)
        operation.span = self._tracer.start_span(
            operation.span_name,
            kind=SpanKind.CLIENT,
            attributes=self._span_attributes(operation),
            start_time=begun_ns,
        )
        return operation

    # -- acknowledgements --------

    def start_acknowledging(
        self, name: str, records: Sequence[Record], *, group: str, is_batch: bool
    ) -> Operation:
        """Start acknowledging records. `name`: of the outcome, as `ack`."""
        topics = {record.topic for record in records}
        topic = records[0].topic if len(topics) == 1 else None
        operation = Operation(self, name, ACKNOWLEDGE, topic, group=group)
        attributes = self._span_attributes(operation)
        if is_batch:
            attributes[MESSAGE_COUNT] = len(records)
        operation.span = self._tracer.start_span(
            operation.span_name, kind=SpanKind.CLIENT, attributes=attributes
        )
        if not is_batch:
            operation.set_record(records[0].partition, records[0].offset)
        operation.link(records)
        return operation

    # -- handlers --------

    def traced_handler(
        self, handler: Callable[[Any], Awaitable[object] | object], *, group: str
    ) -> Callable[[Any], Awaitable[None]]:
        """Return a handler that runs `handler` in a `process` span, which is current meanwhile."""

        async def call(record: Record) -> None:
            with self._processing(record, group):
                outcome = handler(record)
                if outcome is not None and inspect.isawaitable(outcome):
                    await outcome

        return call

    @contextmanager
    def _processing(self, record: Record, group: str) -> Iterator[None]:
        operation = Operation(self, PROCESS, PROCESS, record.topic, group=group)
        created = creation_context(record.headers) if record.headers else None
        parent = None
        if created is not None:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(created))
        attributes = self._span_attributes(operation)
        attributes |= self._names.apply({PARTITION: str(record.partition), OFFSET: record.offset})
        if record.value is None:
            attributes[TOMBSTONE] = True
        operation.span = span = self._tracer.start_span(
            operation.span_name,
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=None if created is None else [trace.Link(created)],
        )
        self.count_consumed(operation, 1)
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            span.record_exception(error)
            operation.end(error)
            raise
        operation.end()

    # -- called by operations --------

    def _span_attributes(self, operation: Operation) -> Attributes:
        attributes: Attributes = {
            **self._common,
            OPERATION_NAME: operation.name,
            OPERATION_TYPE: operation.kind,
            CLIENT_ID: self._client_id,
        }
        if operation.topic is not None:
            attributes[DESTINATION] = operation.topic
        if operation.group is not None:
            attributes[GROUP] = operation.group
        return self._names.apply(attributes)

    def named(self, attributes: Attributes) -> Attributes:
        """Return attributes of a span under the names that OTEL_SEMCONV_STABILITY_OPT_IN chooses."""
        return self._names.apply(attributes)

    def count_sent(self, operation: Operation, count: int, error: BaseException | None) -> None:
        """Count records of a `send` operation, which failed with `error` unless that is None."""
        self._sent.add(count, self._metric_attributes(operation, error))

    def count_consumed(self, operation: Operation, count: int) -> None:
        """Count records that were delivered to the application."""
        self._consumed.add(count, self._metric_attributes(operation, None))

    def record_duration(self, operation: Operation, error: BaseException | None) -> None:
        """Record the duration of an operation that ends now."""
        histogram = self._process_duration if operation.kind == PROCESS else self._operation_duration
        seconds = (time.time_ns() - operation.begun_ns) / NANOSECONDS_PER_SECOND
        histogram.record(max(seconds, 0.0), self._metric_attributes(operation, error))

    def _metric_attributes(self, operation: Operation, error: BaseException | None) -> Attributes:
        attributes: Attributes = {**self._common, OPERATION_NAME: operation.name}
        if operation.kind != PROCESS:
            attributes[OPERATION_TYPE] = operation.kind
        if operation.topic is not None:
            attributes[DESTINATION] = operation.topic
        if operation.group is not None:
            attributes[GROUP] = operation.group
        if error is not None:
            attributes[ERROR_TYPE] = type(error).__qualname__
        return attributes


class Operation:
    """One operation of a client: what its span and its metrics have in common. `begun_ns`: `time.time_ns`."""

    __slots__ = ("_telemetry", "begun_ns", "group", "kind", "name", "span", "topic")

    def __init__(
        self,
        telemetry: ClientTelemetry,
        name: str,
        kind: str,
        topic: str | None,
        *,
        group: str | None = None,
        begun_ns: int | None = None,
    ) -> None:
        self._telemetry: ClientTelemetry = telemetry
        self.name: str = name
        self.kind: str = kind
        self.topic: str | None = topic
        self.group: str | None = group
        self.begun_ns: int = time.time_ns() if begun_ns is None else begun_ns
        self.span: Span = trace.INVALID_SPAN

    @property
    def span_name(self) -> str:
        """Name of the span: the operation and, if there is one, the topic."""
        return self.name if self.topic is None else f"{self.name} {self.topic}"

    def set_attribute(self, name: str, value: str | int | bool) -> None:
        """Set an attribute of the span."""
        if self.span.is_recording():
            self.span.set_attributes(self._telemetry.named({name: value}))

    def set_record(self, partition: int, offset: int) -> None:
        """Set partition and offset (-1: unknown) of the only record."""
        if self.span.is_recording():
            attributes: Attributes = {PARTITION: str(partition)}
            if offset >= 0:
                attributes[OFFSET] = offset
            self.span.set_attributes(self._telemetry.named(attributes))

    def link(self, records: Collection[Record]) -> None:
        """Link the span to the creation contexts of records, if it is sampled."""
        span = self.span
        if span.is_recording():
            for context in creation_contexts(records, LINKS_MAX):
                span.add_link(context)

    def end(self, error: BaseException | None = None) -> None:
        """End the span, with an error if the operation has failed, and record the duration."""
        if error is not None and self.span.is_recording():
            self.span.set_attribute(ERROR_TYPE, type(error).__qualname__)
            self.span.set_status(StatusCode.ERROR, str(error))
        self.span.end()
        self._telemetry.record_duration(self, error)


class SendOperation:
    """Publishing of the records of one call. `context`: headers for each of them; none if the span is not sampled."""

    __slots__ = ("_operation", "context")

    def __init__(self, operation: Operation, context: Headers) -> None:
        self._operation: Operation = operation
        self.context: Headers = context

    def end(self, count: int, error: BaseException | None) -> None:
        """End with the number of records; `error`: the first one of a record, or of the call."""
        operation = self._operation
        operation._telemetry.count_sent(operation, count, error)
        operation.end(error)

    def set_count(self, count: int) -> None:
        """Set the number of records of a call that publishes many."""
        self._operation.set_attribute(MESSAGE_COUNT, count)

    def set_record(self, partition: int, offset: int, *, is_tombstone: bool) -> None:
        """Describe the only record of the call."""
        self._operation.set_record(partition, offset)
        if is_tombstone:
            self._operation.set_attribute(TOMBSTONE, value=True)
