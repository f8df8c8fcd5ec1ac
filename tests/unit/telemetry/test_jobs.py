"""Spans of the jobs of `mansio pipeline`."""

from __future__ import annotations

import pytest
import typer
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, use_span
from typer.testing import CliRunner

from mansio.cli import pipeline
from mansio.telemetry.jobs import add_batch, job_span, job_traceparent
from support.spans import Spans, id_of


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.setenv("MANSIO_TRACING", "true")
    return Spans()


def test_batch_has_a_span_below_that_of_its_job(spans: Spans) -> None:
    with job_span("pipeline run"):
        context = job_traceparent()
        add_batch("count", 7, 100, begun_s=1_000_000.5, seconds=2.25)
    batch, job = spans.all()
    assert (batch.name, job.name) == ("batch count", "pipeline run")
    assert batch.parent is not None
    assert batch.parent.span_id == id_of(job)
    assert context is not None
    assert int(context.split("-")[2], 16) == id_of(job)
    assert (batch.start_time, batch.end_time) == (1_000_000_500_000_000, 1_000_002_750_000_000)
    assert dict(batch.attributes or {}) == {
        "mansio.pipeline.name": "count",
        "mansio.pipeline.batch.id": 7,
        "mansio.pipeline.batch.records": 100,
    }
    assert job_traceparent() is None
    add_batch("count", 8, 100, begun_s=0, seconds=0)
    assert len(spans.all()) == 2


def test_job_that_is_not_sampled_gives_its_records_no_context(spans: Spans) -> None:
    context = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(0))
    with use_span(NonRecordingSpan(context)), job_span("pipeline run"):
        assert job_traceparent() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, None), (typer.Exit(0), None), (typer.Exit(1), "Exit"), (ValueError("no"), "ValueError")],
)
def test_command_is_a_span_with_its_error(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, error: Exception | None, expected: str | None
) -> None:
    def command() -> None:
        if error is not None:
            raise error

    app = typer.Typer()
    app.callback()(pipeline.command_group)
    app.command("lag")(command)
    app.command("run")(command)
    CliRunner().invoke(app, ["lag"])
    (span,) = spans.all()
    assert span.name == "pipeline lag"
    assert dict(span.attributes or {}).get("error.type") == expected
    assert (span.status.status_code is StatusCode.ERROR) == (expected is not None)


def test_without_the_variable_a_command_has_no_span(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANSIO_TRACING")
    with job_span("pipeline lag"):
        assert job_traceparent() is None
        add_batch("count", 7, 100, begun_s=0, seconds=1)
    assert not spans.all()
