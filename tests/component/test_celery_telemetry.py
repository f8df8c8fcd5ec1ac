"""Trace context of tasks, from publisher to worker, with and without the instrumentation of Celery."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import celery
import pytest
from celery import signals
from celery.contrib.testing.worker import start_worker
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.trace import SpanKind

from mansio.testing import TestBroker
from support.celery_shop import close_app
from support.machine import scaled
from support.spans import Spans, id_of, linked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def logging_of_this_process() -> Iterator[None]:
    """A worker in this process leaves logging as it is: Celery configures it only if nothing else does."""

    def configure(**_: object) -> None:
        pass

    signals.setup_logging.connect(configure)
    try:
        yield
    finally:
        signals.setup_logging.disconnect(configure)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "messaging")
    return Spans()


@contextmanager
def shop(broker: TestBroker, place: Path) -> Iterator[tuple[Any, list[Any]]]:
    """A task with its worker in this process, and the context that each run of it finds in its request."""
    app = celery.Celery("shop", broker=f"mansio://{broker.bootstrap_servers}", backend=f"file://{place}")
    app.conf.broker_transport_options = {"tracing": True}
    found: list[Any] = []

    @app.task(name="add", bind=True, shared=False)
    def add(task: Any, one: int, other: int) -> int:
        found.append(getattr(task.request, "traceparent", None))
        return one + other

    try:
        with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=scaled(20)):
            yield add, found
    finally:
        close_app(app)


def test_task_finds_the_context_of_its_publisher(broker: TestBroker, spans: Spans, tmp_path: Path) -> None:
    with shop(broker, tmp_path) as (add, found):
        with spans.tracer.start_as_current_span("request") as request:
            assert add.delay(1, 2).get(timeout=scaled(30)) == 3
        sent = spans.one("send celery")
    assert sent.kind is SpanKind.PRODUCER
    assert sent.parent is not None
    assert sent.parent.span_id == id_of(request)
    assert [int(context.split("-")[2], 16) for context in found] == [id_of(sent)]
    assert {span.name for span in spans.all()} == {"request", "send celery"}  # the worker's part is Celery's


def test_with_the_instrumentation_of_celery_a_task_has_one_producer_and_one_consumer(
    broker: TestBroker, spans: Spans, tmp_path: Path
) -> None:
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument()
    try:
        with shop(broker, tmp_path) as (add, found):
            assert add.delay(1, 2).get(timeout=scaled(30)) == 3
            published, sent, ran = (
                spans.one("apply_async/add"),
                spans.one("send celery"),
                spans.one("run/add"),
            )
    finally:
        instrumentor.uninstrument()
    assert published.kind is SpanKind.PRODUCER
    assert ran.kind is SpanKind.CONSUMER
    assert ran.parent is not None
    assert ran.parent.span_id == id_of(published)
    assert sent.kind is SpanKind.CLIENT
    assert sent.parent is not None
    assert sent.parent.span_id == id_of(published)
    assert linked(sent) == [id_of(published)]
    assert [int(context.split("-")[2], 16) for context in found] == [id_of(published)]
    assert len(spans.all()) == 3
