"""Defects of one line in the order by key and the chosen leases of share groups. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = ("tests/unit/state/test_share_partition_model.py",)
ORDER = "tests/component/test_share_order_by_key.py"
LEASES = "tests/component/test_lease_durations.py"

KEY_ORDER_DEFECTS = (
    Defect(
        "later record passes a resting one of its key",
        "state/share_partition/in_flight.py",
        "return LEASED if self.deliveries == self.uncounted_deliveries else RESTING",
        "return LEASED if self.deliveries == self.uncounted_deliveries else DONE",
        (f"{ORDER}::test_no_later_record_passes_one_that_rests_or_is_dead_lettered[release]",),
    ),
    Defect(
        "record being dead-lettered does not hold its key",
        "state/share_partition/in_flight.py",
        "return RESTING if self.state == ARCHIVING else DONE",
        "return DONE",
        MODEL,
    ),
    Defect(
        "keys not known after a redrive",
        "state/share_partition/machine.py",
        "max(ranges.start, self._log_start),",
        "ranges.end,",
        MODEL,
    ),
    Defect(
        "leased record does not hold its key",
        "state/share_partition/key_index.py",
        "if offset in keys:",
        "if offset not in keys:",
        MODEL,
    ),
    Defect(
        "lease of another duration after a restart",
        "state/share_partition/in_flight.py",
        "self.holder, self.lease_ms, self.is_range = stored.holder, stored.lease_ms, stored.is_range",
        "self.holder, self.lease_ms = stored.holder, -1",
        MODEL,
    ),
    Defect(
        "release by a lease of 0 ms gets a backoff",
        "client/share/leased.py",
        "await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=0)",
        "await self._lease.ack_target.acknowledge(self, RELEASE, delay_ms=-1)",
        (f"{LEASES}::test_a_member_chooses_the_duration_at_receive_and_at_extend",),
    ),
)
