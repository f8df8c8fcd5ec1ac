"""Trace context in headers of records: what anybody may have written there."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from mansio.telemetry.trace_context import creation_context, creation_contexts, headers_of

VALID = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203332-00"

names = st.sampled_from(["traceparent", "tracestate", "a"])
contents = st.one_of(
    st.none(), st.binary(max_size=40), st.sampled_from([VALID, OTHER, VALID[:-1], b"a=1", b"=,"])
)
headers = st.lists(st.tuples(names, contents), max_size=5).map(tuple)


class Record(NamedTuple):
    headers: tuple[tuple[str, bytes | None], ...]
    topic: str = "orders"
    partition: int = 0
    offset: int = 0
    value: bytes | None = b""


def test_written_context_is_read_again() -> None:
    context = SpanContext(
        7, 9, is_remote=True, trace_flags=TraceFlags(1), trace_state=TraceState([("vendor", "x")])
    )
    written = headers_of(NonRecordingSpan(context))
    assert [name for name, _ in written] == ["traceparent", "tracestate"]
    assert creation_context(written) == context


@pytest.mark.parametrize("flags", [0, 2])
def test_context_that_is_not_sampled_is_not_written(flags: int) -> None:
    context = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(flags))
    assert headers_of(NonRecordingSpan(context)) == ()


@given(st.lists(headers, max_size=6))
def test_any_headers_are_read_or_ignored(given_headers: list[tuple[tuple[str, bytes | None], ...]]) -> None:
    found = creation_contexts([Record(each) for each in given_headers], 3)
    assert len(found) <= 3
    assert all(context.is_valid for context in found)


def test_each_context_is_linked_once() -> None:
    records = [Record((("traceparent", value),)) for value in [VALID, VALID, OTHER, VALID, b"none", OTHER]]
    found = creation_contexts(records, 10)
    assert [context.span_id for context in found] == [0xB7AD6B7169203331, 0xB7AD6B7169203332]


def test_oversized_headers_are_ignored_without_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert creation_context((("traceparent", VALID + bytes(1_000_000)),)) is None
    found = creation_context((("traceparent", VALID), ("tracestate", b"a=" + b"b" * 1_000_000)))
    assert found is not None
    assert not found.trace_state
    assert not caplog.records
