"""Whether a client or a job is traced: its option, the environment, and whether the program has set a provider.

It is decided once, when the client is made: one that is not traced has no telemetry object, which costs a call one test
of an attribute, and nothing of OpenTelemetry is imported for it. Like the instrumentations of databases that are built
into their drivers (PyMongo, redis-py), and because a context makes each record larger, tracing is off unless it is
asked for.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError
from mansio.host.extras import require_extra

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from mansio.telemetry.client_telemetry import ClientTelemetry

logger = logging.getLogger(__name__)

TRACING_VARIABLE: Final = "MANSIO_TRACING"
_FLAGS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def client_telemetry(
    tracing: bool | None, *, client_id: str, server: tuple[str, int]
) -> ClientTelemetry | None:
    """Return the telemetry of a client; None if it is not traced.

    `tracing`: None for what the environment variable MANSIO_TRACING says, else off. `server`: see `ClientTelemetry`.
    Raises `MissingExtra` if OpenTelemetry's API is not installed, `ConfigError` for an invalid variable."""
    providers = find_providers(tracing)
    if providers is None:
        return None
    from mansio.telemetry.client_telemetry import ClientTelemetry

    return ClientTelemetry(*providers, client_id=client_id, server=server)


def find_providers(tracing: bool | None) -> tuple[TracerProvider, MeterProvider] | None:
    """Return the providers of the program. None if tracing is off, or, with a warning, if no provider is set yet.
    Raises the errors of `client_telemetry`."""
    if not (tracing_by_environment() if tracing is None else tracing):
        return None
    require_extra("otel")
    from opentelemetry import metrics, trace

    tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
    if _is_of_api(tracer_provider) and _is_of_api(meter_provider):
        logger.warning(
            "tracing has no effect: set a provider of OpenTelemetry before the client is made, "
            "or start the program with opentelemetry-instrument"
        )
        return None
    return tracer_provider, meter_provider


def tracing_by_environment() -> bool:
    """Whether the environment variable MANSIO_TRACING asks for tracing. Raises `ConfigError`."""
    text = os.environ.get(TRACING_VARIABLE, "")
    found = _FLAGS.get(text.strip().lower())
    if found is None:
        raise ConfigError(f"{TRACING_VARIABLE}: not true or false: {text!r}")
    return found


def _is_of_api(provider: object) -> bool:
    """Whether a provider is one of OpenTelemetry's API, which records nothing: a program that has set none has it."""
    return type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
