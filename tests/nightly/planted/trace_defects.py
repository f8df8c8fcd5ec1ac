"""Defects of one line in the trace of records. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = ("tests/unit/state/trace/test_timeline_model.py",)
BLOCKS = ("tests/unit/wire/test_trace_records.py",)
TRACES = ("tests/component/test_traces.py",)

TRACE_DEFECTS = (
    Defect(
        "row of the attempt before",
        "state/trace/trace_buffer.py",
        "min(attempt, _UINT16_MAX),",
        "max(min(attempt, _UINT16_MAX) - 1, 0),",
        MODEL,
    ),
    Defect(
        "holder of the lease before",
        "state/trace/timeline.py",
        "key = (row.group, row.attempt)",
        "key = (row.group, row.attempt - 1 if row.kind == rows.EXPIRED else row.attempt)",
        MODEL,
    ),
    Defect(
        "rows of a run that was not written",
        "state/trace/trace_buffer.py",
        "events, self._events = self._events, []",
        "events = self._events",
        MODEL,
    ),
    Defect(
        "missing block is not a gap",
        "state/trace/coverage.py",
        "elif sequence > self._next_sequence:",
        "elif sequence > self._next_sequence + 1:",
        MODEL,
    ),
    Defect(
        "dropped rows are not a gap",
        "state/trace/coverage.py",
        "if header.dropped:",
        "if header.dropped > 99:",
        MODEL,
    ),
    Defect(
        "killed process has ended in an orderly way",
        "state/trace/timeline.py",
        "elif not leadership.has_ended and not (is_current and process.is_live):",
        "elif not leadership.has_ended and is_current and not process.is_live:",
        MODEL,
    ),
    Defect(
        "leader epochs without rows are not missed",
        "state/trace/timeline.py",
        "if following.epoch > leadership.epoch + 1:",
        "if following.epoch > leadership.epoch + 9:",
        MODEL,
    ),
    Defect(
        "time without a trace is not a gap",
        "state/trace/timeline.py",
        "leadership.is_off = row.cause == rows.TURNED_OFF",
        "leadership.is_off = False",
        MODEL,
    ),
    Defect(
        "release of a member that left is an expiry",
        "state/trace/share_rows.py",
        "BY_MEMBER_END: (rows.RELEASED, rows.MEMBER_LEFT),",
        "BY_MEMBER_END: (rows.EXPIRED, 0),",
        MODEL,
    ),
    Defect(
        "search in the index passes the partition",
        "wire/internal_records/trace_records.py",
        "if (found[0], found[1]) < wanted:",
        "if (found[0], found[1]) <= wanted:",
        BLOCKS,
    ),
    Defect(
        "row of a change whose write has failed",
        "broker/coordinator/share/partition_leader.py",
        "trace.report_unknown(group, changes, wall_ms)",
        "trace.report_updates(group, write.updates, wall_ms)",
        ("tests/unit/broker/test_share_partition_trace.py",),
    ),
    Defect(
        "stop does not end the leaderships",
        "broker/trace/trace_writer.py",
        "partition.trace.end(now_ms)",
        "pass",
        TRACES,
    ),
)
