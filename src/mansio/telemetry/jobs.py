"""Spans of a job of `mansio pipeline` on the driver: one for the job, and one below it for each micro-batch.

The job's span is the creation context of the records that its sinks write to topics: the tasks of Spark, which run in
other processes, get its `traceparent` as an option. A micro-batch is known to the driver when it has ended, so its span
is made then, with the times that Spark reports.

Only the environment variable MANSIO_TRACING asks for it, because a command has no program that sets providers:
`opentelemetry-instrument mansio pipeline run ...` does that. Without it nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from mansio.telemetry.context_headers import TRACEPARENT
from mansio.telemetry.switch import find_providers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import Span, Tracer

INSTRUMENTATION: Final = "mansio.pipelines"
NANOSECONDS_PER_SECOND: Final = 1_000_000_000


class JobTelemetry:
    """The span of the job that runs."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    def traceparent(self) -> str | None:
        """Return the context of the job for the records that it writes; None if the span is not sampled."""
        from mansio.telemetry.trace_context import headers_of

        value = dict(headers_of(self._span)).get(TRACEPARENT)
        return None if value is None else value.decode()

    def add_batch(self, pipeline: str, batch: int, records: int, begun_s: float, seconds: float) -> None:
        """Add the span of a micro-batch; see the function `add_batch`."""
        from opentelemetry import trace

        begun_ns = round(begun_s * NANOSECONDS_PER_SECOND)
        span = self._tracer.start_span(
            f"batch {pipeline}",
            context=trace.set_span_in_context(self._span),
            attributes={
                "mansio.pipeline.name": pipeline,
                "mansio.pipeline.batch.id": batch,
                "mansio.pipeline.batch.records": records,
            },
            start_time=begun_ns,
        )
        span.end(begun_ns + round(seconds * NANOSECONDS_PER_SECOND))


_CURRENT: ContextVar[JobTelemetry | None] = ContextVar("mansio job", default=None)


@contextmanager
def job_span(name: str) -> Iterator[None]:
    """Run a job, named after its command, in a span that is current meanwhile; in none if tracing is off.

    An error of the job, or an exit code other than 0, is an error of the span. Raises `MissingExtra`, `ConfigError`."""
    providers = find_providers(None)
    if providers is None:
        yield
        return
    from opentelemetry.trace import StatusCode, use_span

    from mansio.version import __version__

    tracer = providers[0].get_tracer(INSTRUMENTATION, __version__)
    span = tracer.start_span(name)
    token = _CURRENT.set(JobTelemetry(tracer, span))
    try:
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                if getattr(error, "exit_code", 1):  # of `typer.Exit`
                    span.set_attribute("error.type", type(error).__qualname__)
                    span.set_status(StatusCode.ERROR, str(error))
                raise
    finally:
        _CURRENT.reset(token)


def add_batch(pipeline: str, batch: int, records: int, *, begun_s: float, seconds: float) -> None:
    """Add the span of a micro-batch that has ended, if the job is traced. `begun_s`: Unix time in seconds."""
    job = _CURRENT.get()
    if job is not None:
        job.add_batch(pipeline, batch, records, begun_s, seconds)


def job_traceparent() -> str | None:
    """Return the context of the job that runs for the records that it writes; None if it is not traced or sampled."""
    job = _CURRENT.get()
    return None if job is None else job.traceparent()
