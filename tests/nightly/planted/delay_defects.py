"""Defects of delayed records that simulated histories must find; see `simulated_defects`."""

from __future__ import annotations

from typing import Final

from sim.delays import FIRST_SEED

MANAGER: Final = "broker/partition/delay_manager.py"
VIEW: Final = "broker/partition/delayed_records.py"
DELIVERY: Final = "broker/partition/delayed_delivery.py"

DEFECTS: Final = (
    (
        "what is stored is found by its offset, whatever the partition",
        MANAGER,
        "self._cached: dict[int, _StoredRecords] = {}",
        'self._cached: dict[int, _StoredRecords] = globals().setdefault("_all_cached", {})',
    ),
    (
        "a delivery is valid without its second batch",
        VIEW,
        "self._expected = (base_offset + 1, control.crc, control.ids)",
        "pending.remove_delivered(control.ids)",
    ),
    (
        "ids begin again after a restart",
        MANAGER,
        "record = PendingRecord(due_ms, base_offset + index, base_offset, begin, bounds[index + 1] - begin)",
        "record = PendingRecord(due_ms, len(view.pending) + index, base_offset, begin, bounds[index + 1] - begin)",
    ),
    (
        "a cancellation while records are delivered is lost",
        MANAGER,
        "self.view.pending.remove(record_id)",
        "(self.view.pending.next_due_ms or 0) > self.partition.clock.wall_ms()"
        " and self.view.pending.remove(record_id)",
    ),
    (
        "records that are delivered late are delivered twice",
        MANAGER,
        "self.uncommitted_end = partition.append_unchanged((control, batch))",
        "self.uncommitted_end = partition.append_unchanged((control, batch));"
        " due[0].due_ms < now_ms - 2_000 and pending.replace(due[0])",
    ),
    (
        "followers keep what was delivered",
        VIEW,
        "self.pending.remove_delivered(expected[2])",
        "len(expected[2]) > 1 or self.pending.remove_delivered(expected[2])",
    ),
    (
        "a view keeps what was truncated",
        VIEW,
        "self._waiting_snapshot = self.retained_until = self._staged = self._expected = None",
        "return",
    ),
    (
        "a snapshot is taken between the two batches of a delivery",
        VIEW,
        "if self._expected is None and not self._is_reading:",
        "if not self._is_reading:",
    ),
    (
        "a snapshot has what is not committed",
        VIEW,
        "if self._waiting_snapshot is not None and self._waiting_snapshot[0] <= high_watermark:",
        "if self._waiting_snapshot is not None:",
    ),
    (
        "records are delivered a second early",
        MANAGER,
        "due = self.view.pending.take_due(now_ms, records_max, bytes_max)",
        "due = self.view.pending.take_due(now_ms + 1000, records_max, bytes_max)",
    ),
    (
        "a move is not in the log",
        MANAGER,
        "end_offset = self._append_control(encode_moved(known, [due_ms] * len(known)), apply)",
        "apply(0); end_offset = self.partition.end_offset",
    ),
    (
        "copies before retention lose a due time",
        MANAGER,
        "control = encode_copied([record.id for record in copied], [record.due_ms for record in copied], batch)",
        "control = encode_copied([record.id for record in copied], [copied[0].due_ms for _ in copied], batch)",
    ),
    (
        "retention does not wait for copies",
        VIEW,
        "floor = self.retained_until[1]",
        "pass",
    ),
    (
        "a leader forgets records whose delivery failed",
        MANAGER,
        "pending.replace(record)",
        "pass",
    ),
    (
        "a follower that leads again goes on from its own clock",
        DELIVERY,
        "self._on_clock_set_back(now_ms)",
        "pass",
    ),
)
"""Name, file, line, planted."""
__all__ = ["DEFECTS", "FIRST_SEED"]
