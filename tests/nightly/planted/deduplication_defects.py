"""Defects of one line in the deduplication window. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

MODEL = "tests/unit/broker/features/deduplication/test_deduplication_window.py"
REPLICAS = "tests/unit/broker/features/deduplication/test_deduplication_replicas.py"
CRASH = "tests/system/crash/test_crash_deduplication.py"
SOCKETS = "tests/component/test_deduplication.py"
FOLLOWER = f"{REPLICAS}::test_follower_that_becomes_leader_knows_every_id"
POWER = "tests/system/crash/test_crash_features.py::test_no_power_failure_breaks_a_feature[deduplication]"
RESTART = f"{SOCKETS}::TestDurability::test_no_repeat_is_stored_whenever_the_broker_restarts"

THREAD = "tests/unit/broker/features/deduplication/test_deduplication_with_thread.py"

DEDUPLICATION_DEFECTS = (
    Defect(
        "a batch is appended without records that were repeats before",
        "broker/features/deduplication/deduplicator.py",
        "if rebuilt is not None and rebuilt.kept != kept:",
        "if rebuilt is None and not identified:",
        (THREAD,),
    ),
    Defect(
        "deduplication window lost at fail-over",
        "broker/features/deduplication/deduplication_view.py",
        "content = decode_dedup_control(batch)",
        "content = None",
        (FOLLOWER,),
    ),
    Defect(
        "deduplication window lost at a restart from a snapshot",
        "broker/features/deduplication/window.py",
        "window._shards.append(_Shard.from_bytes(data[position:end], rows))",
        "window._shards.append(_Shard())",
        (RESTART, FOLLOWER),
    ),
    Defect(
        "id remembered of an append that failed",
        "broker/features/deduplication/deduplication_view.py",
        "if offset != base_offset or ids.crc != header.crc:",
        "if False:",
        (POWER,),
    ),
    Defect(
        "deduplication snapshot above the log's end kept",
        "broker/log_view/snapshots.py",
        "beyond = [name for name in names if int(name.removesuffix(suffix)) > end_offset]",
        "beyond: list[str] = []",
        (f"{REPLICAS}::test_snapshot_of_records_that_were_truncated_is_not_used",),
    ),
    Defect(
        "snapshot between the ids and their records",
        "broker/features/deduplication/deduplication_view.py",
        "return self._expected is None",
        "return True",
        (FOLLOWER, POWER),
    ),
    Defect(
        "ids not copied before their deletion",
        "broker/features/deduplication/deduplicator.py",
        "waiting += found",
        "waiting += []",
        (FOLLOWER, f"{SOCKETS}::TestDurability::test_ids_outlive_their_records"),
    ),
    Defect(
        "retention deletes ids",
        "broker/features/deduplication/window.py",
        "return next((mark.location for mark in self._marks if mark.last_ms > until_ms), None)",
        "return None",
        (MODEL, POWER),
    ),
    Defect(
        "a clock that is set back shortens the window",
        "broker/features/deduplication/window.py",
        "if now_ms < self.latest_ms:",
        "if False:",
        (MODEL, f"{CRASH}::test_a_clock_that_is_set_back_shortens_no_window"),
    ),
    Defect(
        "repeat counts as the first acceptance",
        "broker/features/deduplication/deduplicator.py",
        "if known is not None and known.accepted_ms > until_ms:",
        "if known is not None and known.accepted_ms > until_ms and not index:",
        (f"{SOCKETS}::TestBatches",),
    ),
    Defect(
        "sequence of repeats not stored",
        "broker/features/deduplication/deduplicator.py",
        "if identified.header.producer_id >= 0:",
        "if False:",
        (f"{SOCKETS}::TestBatches::test_the_sequence_of_an_idempotent_producer_advances_over_repeats",),
    ),
    Defect(
        "an id is forgotten at the limit",
        "broker/features/deduplication/deduplicator.py",
        "if new and not window.make_room(len(new), partition.settings.dedup_ids_max, until_ms):",
        "if new and not window.make_room(len(new), partition.settings.dedup_ids_max, now_ms):",
        (f"{SOCKETS}::TestRefusals::test_ids_beyond_the_limit_are_refused_until_others_expire",),
    ),
    Defect(
        "repeat acknowledged before its first record",
        "broker/features/deduplication/deduplicator.py",
        "known_end = max(known_end, known.offset + 1)",
        "known_end = 0",
        (f"{REPLICAS}::test_repeat_is_acknowledged_when_the_first_record_is_committed",),
    ),
)
