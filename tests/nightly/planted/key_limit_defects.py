"""Defects of one line in the limits by key of share groups. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = ("tests/unit/state/test_share_partition_model.py",)
LIMITS = "tests/component/test_limits_by_key.py"

KEY_LIMIT_DEFECTS = (
    Defect(
        "release that is not stored frees a place",
        "state/share_partition/in_flight.py",
        "if self.pending_token != NOT_PENDING or self.state in (ACQUIRED, WITHHELD):",
        "if self.state in (ACQUIRED, WITHHELD):",
        MODEL,
    ),
    Defect(
        "bucket full after a load",
        "state/share_partition/key_limits.py",
        "heappush(self._full_at, (full_ms, key))",
        "full_ms = self._empty_ms",
        MODEL,
    ),
    Defect(
        "one delivery too many at once",
        "state/share_partition/key_limits.py",
        "return full_ms - (self._burst - 1) * self._interval_ms",
        "return full_ms - self._burst * self._interval_ms",
        MODEL,
    ),
    Defect(
        "repeated delivery takes no token",
        "state/share_partition/machine.py",
        "key_index.take_tokens(chosen, now_ms)",
        "key_index.take_tokens([each for each in chosen if each[0] >= in_flight.ranges.end], now_ms)",
        MODEL,
    ),
    Defect(
        "one more leased than the limit",
        "state/share_partition/key_limits.py",
        "places = self._leases_max - self._leased.get(key, 0) if self._leases_max else UNLIMITED",
        "places = self._leases_max - self._leased.get(key, 0) + 1 if self._leases_max else UNLIMITED",
        MODEL,
    ),
    Defect(
        "end of a lease offers no record of its key",
        "state/share_partition/key_limits.py",
        "if left == self._leases_max - 1:",
        "if left == self._leases_max + 1:",
        MODEL,
    ),
    Defect(
        "no timer for a key that waits for its rate",
        "state/share_partition/machine.py",
        "return deadline_ms if due_ms is None else min(deadline_ms, due_ms)",
        "return deadline_ms",
        MODEL,
    ),
    Defect(
        "records offered before all leases are known",
        "state/share_partition/machine.py",
        "needed_until,",
        "0,",
        ("tests/unit/state/test_share_partition_cases.py",),
    ),
    Defect(
        "lowered limit not used",
        "state/share_partition/key_limits.py",
        "self._leases_max = leases_max",
        "self._leases_max = max(leases_max, self._leases_max)",
        MODEL,
    ),
    Defect(
        "each priority has a limit of its own",
        "broker/coordinator/share/partition_leader.py",
        "limits=self._key_limits,",
        "limits=None,",
        (f"{LIMITS}::test_one_limit_holds_for_all_priorities_together",),
    ),
    Defect(
        "idle share partition with a rate is dropped",
        "broker/coordinator/share/share_partition_manager.py",
        "waits_for_rate = machine.settings.key_rate > 0 and counts.lag > 0",
        "waits_for_rate = False",
        (f"{LIMITS}::test_a_key_gets_a_delivery_as_soon_as_its_rate_allows_it",),
    ),
)
