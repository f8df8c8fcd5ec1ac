"""Defects of one line in recurring schedules that their tests have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

CRASH = (
    "tests/system/crash/test_crash_features.py::test_no_power_failure_breaks_a_feature[delays]",
    "tests/system/crash/test_crash_features.py::test_no_power_failure_breaks_a_feature_in_long_runs[delays]",
    "tests/system/crash/test_crash_delays.py",
)
OWNERS = ("tests/unit/broker/features/delays/test_schedule_owners.py",)
RECURRENCE = ("tests/unit/broker/features/delays/test_recurrence.py",)

MORE_SCHEDULE_DEFECTS = (
    Defect(
        "schedule fired by two owners: replicas do not apply firings",
        "broker/features/delays/delayed_records.py",
        "self.firing(control.firings, control.crc)(base_offset)",
        "pass",
        OWNERS,
    ),
    Defect(
        "schedule fired by two owners: firings that were truncated stay applied",
        "broker/log_view/replay.py",
        "self.snapshots.truncate(end_offset)",
        "return",
        OWNERS,
    ),
    Defect(
        "a firing counts without its record",
        "broker/features/delays/delayed_records.py",
        "self.firing(control.firings, control.crc)(base_offset)",
        "schedules.apply_firings(control.firings)",
        CRASH,
    ),
    Defect(
        "a leader applies a firing before its record is in the log",
        "broker/features/delays/schedule_manager.py",
        "known: Contents = {self._view: self._view.firing(firings, batch_crc)}",
        "known: Contents = {self._view: lambda _: self._view.schedules.apply_firings(firings)}",
        CRASH,
    ),
    Defect(
        "the number of a firing is not kept",
        "broker/features/delays/schedules.py",
        "schedule = entry.schedule._replace(firings=firing.number, next_due_ms=firing.next_due_ms)",
        "schedule = entry.schedule._replace(next_due_ms=firing.next_due_ms)",
        CRASH,
    ),
    Defect(
        "snapshots have no schedules",
        "broker/features/delays/delayed_records.py",
        "self.pending, self.schedules = state",
        "self.pending, _ = state",
        CRASH,
    ),
    Defect(
        "retention deletes schedules",
        "broker/features/delays/delayed_records.py",
        "locations = (self.pending.lowest_location(), self.schedules.lowest_location())",
        "locations = (self.pending.lowest_location(), None)",
        CRASH,
    ),
    Defect(
        "a schedule fires early",
        "broker/features/delays/schedule_manager.py",
        "queue = [(one.next_due_ms, one.name, one) for one in self._view.schedules.due(until_ms, steps_max)]",
        "queue = [(one.next_due_ms, one.name, one) for one in self._view.schedules.due(until_ms + 300, steps_max)]",
        CRASH,
    ),
    Defect(
        "a late firing moves the next one",
        "broker/features/delays/recurrence.py",
        "return Step(due_ms, recurrence.next_after(due_ms))",
        "return Step(due_ms, recurrence.next_after(now_ms))",
        RECURRENCE,
    ),
    Defect(
        "the second of two equal hours is due in the past",
        "broker/features/delays/recurrence.py",
        "if found_ms > moment_ms:",
        "if found_ms:",
        RECURRENCE,
    ),
)
