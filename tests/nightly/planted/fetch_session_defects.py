"""Defects of one line in fetch sessions that the tests of sessions have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

SESSIONS = "tests/unit/broker/test_fetch_sessions.py"
MODEL = "tests/unit/state/test_fetch_session_model.py"
HISTORIES = "tests/unit/broker/test_fetch_session_histories.py"
COSTS = "tests/unit/broker/test_fetch_session_costs.py"
STATE = "state/fetch_session.py"
FETCHER = "broker/replication/replica_fetcher.py"


def found_by(*names: str) -> tuple[str, ...]:
    return tuple(f"{SESSIONS}::{name}" for name in names)


FETCH_SESSION_DEFECTS = (
    Defect(
        "an idle follower is taken for one that lags",
        STATE,
        "self._follower.repeat_fetch(self._session.requested_ms)",
        "pass",
        found_by("test_an_idle_follower_is_not_taken_for_one_that_lags"),
    ),
    Defect(
        "a replica that left the set is not asked again",
        STATE,
        "self.watched.add_mark(self.mark)",
        "pass",
        found_by("test_a_follower_that_left_the_set_while_nothing_was_appended_comes_back"),
    ),
    Defect(
        "a mark is lost while a request waits",
        "state/replica.py",
        "durable_end == self.durable_end",
        "True",
        (MODEL,),
    ),
    Defect(
        "a later commit is not news",
        "broker/partition/partition.py",
        "elif self.waits.marks:",
        "elif False:",
        found_by("test_a_follower_learns_of_a_commit_that_comes_after_its_last_request"),
    ),
    Defect(
        "a repeated request is accepted",
        STATE,
        "if epoch != session.epoch:",
        "if False:",
        (f"{MODEL}::test_a_session_is_found_by_its_owner_with_the_next_epoch_only",),
    ),
    Defect(
        "a session of another broker is used",
        STATE,
        "if session is None or session.owner != owner:",
        "if session is None:",
        (f"{MODEL}::test_a_session_is_found_by_its_owner_with_the_next_epoch_only",),
    ),
    Defect(
        "a partition that was given up stays in the session",
        STATE,
        "if self._positions.pop(key, None) is not None:",
        "if self._positions.pop(key, None) is not None and self.is_full:",
        (MODEL,),
    ),
    Defect(
        "a hung follower of an idle partition stays in the in-sync set",
        "broker/replication/isr_manager.py",
        "and replica.high_watermark == replica.confirmed_end == partition.log.end_offset",
        "and replica.high_watermark == partition.log.end_offset",
        (f"{HISTORIES}::test_a_hung_follower_of_an_idle_partition_leaves_the_in_sync_set_of_a_new_leader",),
    ),
    Defect(
        "a fetcher without partitions leaves its session behind",
        FETCHER,
        "fetcher.end()",
        "fetcher.stop()",
        (f"{HISTORIES}::test_a_leader_that_leads_nothing_any_more_has_no_sessions",),
    ),
    Defect(
        "a failed log stays in the session",
        FETCHER,
        "self._give_up(one)",
        "pass",
        found_by("test_a_log_that_fails_while_its_partition_is_idle_leaves_the_session"),
    ),
    Defect(
        "a session of no use is not ended",
        FETCHER,
        "if not self.partitions and (last := session.last_step()) is not None:",
        "if False and (last := session.last_step()) is not None:",
        found_by("test_a_follower_that_has_caught_up_ends_the_session_of_its_second_fetcher"),
    ),
    Defect(
        "all partitions are read for each request",
        STATE,
        "if follower is not None and follower.has_position(",
        "if False and follower.has_position(",
        (f"{COSTS}::test_a_fetch_costs_what_has_changed",),
    ),
)
