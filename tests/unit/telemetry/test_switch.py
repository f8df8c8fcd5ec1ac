"""When a client is traced: what its option, the environment and the providers of the program decide."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from mansio.errors import ConfigError, MissingExtra
from mansio.telemetry import switch

if TYPE_CHECKING:
    from collections.abc import Callable

SERVER = ("127.0.0.1", 9092)
NO_TRACES, NO_METRICS = trace.NoOpTracerProvider(), metrics.NoOpMeterProvider()


def is_traced(tracing: bool | None) -> bool:
    return switch.client_telemetry(tracing, client_id="x", server=SERVER) is not None


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, object], None]:
    def replace(tracer_provider: object, meter_provider: object) -> None:
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracer_provider)
        monkeypatch.setattr(metrics, "get_meter_provider", lambda: meter_provider)

    return replace


@pytest.mark.parametrize(
    ("variable", "tracing", "expected"),
    [
        (None, None, False),
        (None, True, True),
        ("true", None, True),
        ("1", None, True),
        ("false", None, False),
        ("true", False, False),
        ("", None, False),
    ],
)
def test_option_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    provide: Callable[[object, object], None],
    variable: str | None,
    tracing: bool | None,
    expected: bool,
) -> None:
    provide(TracerProvider(), NO_METRICS)
    if variable is None:
        monkeypatch.delenv("MANSIO_TRACING", raising=False)
    else:
        monkeypatch.setenv("MANSIO_TRACING", variable)
    assert is_traced(tracing) is expected


def test_unclear_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANSIO_TRACING", "perhaps")
    with pytest.raises(ConfigError, match="MANSIO_TRACING: not true or false: 'perhaps'"):
        is_traced(None)


def test_without_a_provider_a_client_is_not_traced_and_a_warning_has_the_remedy(
    provide: Callable[[object, object], None], caplog: pytest.LogCaptureFixture
) -> None:
    for tracer_provider in (trace.ProxyTracerProvider(), NO_TRACES):
        provide(tracer_provider, NO_METRICS)
        assert not is_traced(True)
    assert "set a provider of OpenTelemetry before" in caplog.text
    provide(NO_TRACES, MeterProvider())
    assert is_traced(True)  # metrics alone


def test_without_the_extra_tracing_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert not is_traced(False)
    with pytest.raises(
        MissingExtra, match=r"opentelemetry-api is not installed: pip install 'mansio-mq\[otel\]'"
    ):
        is_traced(True)
