"""Spans and metrics of OpenTelemetry, kept in memory.

A process sets the providers once. Only clients with `tracing` use them, so other tests in the process see nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from support.waiting import wait_until

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_EXPORTER = InMemorySpanExporter()
_READER = InMemoryMetricReader()


class Spans:
    """The spans that have ended, and the metrics, since a test began."""

    def __init__(self) -> None:
        if not isinstance(trace.get_tracer_provider(), TracerProvider):
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(_EXPORTER))
            trace.set_tracer_provider(provider)
            metrics.set_meter_provider(MeterProvider([_READER]))
        self.tracer = trace.get_tracer("test")
        self.clear()

    def clear(self) -> None:
        """Forget the spans that have ended."""
        _EXPORTER.clear()

    def all(self) -> list[ReadableSpan]:
        """The spans that have ended, in this order."""
        return list(_EXPORTER.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of a name."""
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of a name, which may be about to end on another thread."""
        wait_until(lambda: self.named(name), what=f"a span {name}")
        (found,) = self.named(name)
        return found

    def metric(self, name: str, **attributes: Any) -> Any:
        """The data point of a metric whose attributes (with `_` for `.`) have these values; None if there is none."""
        data = _READER.get_metrics_data()
        for resource in () if data is None else data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        found = {
                            key.replace(".", "_"): value for key, value in (point.attributes or {}).items()
                        }
                        if attributes.items() <= found.items():
                            return point
        return None


def linked(span: ReadableSpan) -> list[int]:
    """Ids of the spans that a span is linked to."""
    return [link.context.span_id for link in span.links]


def id_of(span: Any) -> int:
    """Id of a span."""
    context = span.get_span_context()
    assert context is not None
    return context.span_id
