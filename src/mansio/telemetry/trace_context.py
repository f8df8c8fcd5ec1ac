"""Trace context in the headers of records: `traceparent` and `tracestate` of W3C Trace Context.

Invariants:
* A record that has either header keeps its headers as they are.
* Only the context of a sampled span is written: the headers take about 69 bytes of each record.
* Invalid headers are ignored, as the specification requires.

Source: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mansio.telemetry.context_headers import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.trace import Span, SpanContext

    Headers = tuple[tuple[str, bytes | None], ...]

HEADER_BYTES_MAX: Final = 512
"""Longest header that is read, as in OpenTelemetry: a longer `traceparent` or `tracestate` is ignored."""

_EMPTY: Final = Context()
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Record(Protocol):
    """A received record."""

    @property
    def topic(self) -> str:
        """Name of the topic."""

    @property
    def partition(self) -> int:
        """Number of the partition."""

    @property
    def offset(self) -> int:
        """Offset in the partition."""

    @property
    def value(self) -> bytes | None:
        """Value; None for a tombstone."""

    @property
    def headers(self) -> Headers:
        """Headers (name, value) in order."""


def headers_of(span: Span) -> Headers:
    """Return the headers with the context of a span; none if the span is not sampled."""
    if not span.get_span_context().trace_flags.sampled:
        return ()
    found: dict[str, str] = {}
    _PROPAGATOR.inject(found, set_span_in_context(span, _EMPTY))
    return tuple((name, text.encode()) for name, text in found.items())


def creation_context(headers: Headers) -> SpanContext | None:
    """Return the context in the headers of a record; None if they have none that is valid."""
    found = _read(headers)
    return None if found is None else _parse(*found)


def creation_contexts(records: Iterable[Record], count_max: int) -> list[SpanContext]:
    """Return the different contexts in the headers of records, at most `count_max`. The one that the records of a call
    of `publish_many` share is parsed once."""
    texts: dict[tuple[bytes, bytes], None] = {}
    last: Headers = ()
    for record in records:
        headers = record.headers
        if not headers or headers is last:  # consecutive records with equal headers have one object
            continue
        last = headers
        found = _read(headers)
        if found is not None:
            texts[found] = None
            if len(texts) == count_max:
                break
    return [context for each in texts if (context := _parse(*each)) is not None]


def _read(headers: Headers) -> tuple[bytes, bytes] | None:
    """Return the values of the two headers; None without a `traceparent` that can be valid."""
    parent = state = b""
    for name, value in headers:
        if name == TRACEPARENT:
            parent = value or b""
        elif name == TRACESTATE:
            state = value or b""
    if not 0 < len(parent) <= HEADER_BYTES_MAX:
        return None
    return parent, state if len(state) <= HEADER_BYTES_MAX else b""


def _parse(parent: bytes, state: bytes) -> SpanContext | None:
    carrier = {TRACEPARENT: parent.decode(errors="replace")}
    if state:
        carrier[TRACESTATE] = state.decode(errors="replace")
    context = get_current_span(_PROPAGATOR.extract(carrier, _EMPTY)).get_span_context()
    return context if context.is_valid else None
