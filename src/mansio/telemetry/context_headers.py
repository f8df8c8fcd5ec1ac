"""Headers of records with a trace context, without OpenTelemetry: their names, and how they are added to a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
CONTEXT_HEADERS: Final = (TRACEPARENT, TRACESTATE)
"""Names of the headers; a record with one of them keeps its headers as they are."""


def has_context(headers: Iterable[tuple[str, object]]) -> bool:
    """Whether one of the headers belongs to a trace context."""
    return any(name in CONTEXT_HEADERS for name, _ in headers)
