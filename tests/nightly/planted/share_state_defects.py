"""Defects of one line in the store of share state that its tests have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

STORE = "tests/unit/broker/test_share_state.py"
CLUSTER = "tests/unit/broker/test_share_state_cluster.py"
RECORDS = "tests/unit/state/test_share_state_records_properties.py"
TURNS = "tests/unit/broker/test_share_write_combiner.py"

STATE_ROOM = (STORE, CLUSTER, RECORDS)

SHARE_STATE_DEFECTS = (
    Defect(
        "share states pruned above the oldest snapshot",
        "broker/coordinator/share/state_store.py",
        "self.topic.prune(index, below)",
        "self.topic.prune(index, self.topic.end_offset_of(index))",
        (f"{STORE}::test_nothing_above_the_oldest_snapshot_that_counts_is_pruned",),
    ),
    Defect(
        "share state update of an old snapshot folded",
        "broker/coordinator/share/state_store.py",
        "if stored.snapshot_epoch == self.snapshot_epoch:",
        "if stored.snapshot_epoch <= self.snapshot_epoch:",
        (f"{STORE}::test_an_update_of_an_older_snapshot_changes_nothing",),
    ),
    Defect(
        "share state epoch not checked",
        "broker/coordinator/share/state_store.py",
        "if state_epoch != share.state_epoch:",
        "if state_epoch > share.state_epoch:",
        (f"{STORE}::test_an_older_state_epoch_is_fenced_and_a_new_state_is_empty",),
    ),
    Defect(
        "leader epoch of a share state's writer not checked",
        "broker/coordinator/share/state_store.py",
        "if share.leader_epoch > leader_epoch:",
        "if share.leader_epoch < 0:",
        (f"{STORE}::test_an_older_leader_neither_reads_nor_writes",),
    ),
    Defect(
        "moved share state not noticed",
        "broker/coordinator/share/state_store.py",
        "if write_token.session != share.session:",
        "if write_token.session < 0:",
        (f"{CLUSTER}::test_a_write_after_the_state_moved_is_refused_and_what_may_be_leased_is_withheld",),
    ),
    Defect(
        "whole share state written beside another update",
        "broker/coordinator/share/write_combiner.py",
        "if self._snapshot_in_flight or (write.is_snapshot and self._in_flight_count):",
        "if self._snapshot_in_flight:",
        (f"{TURNS}::test_a_whole_state_is_written_alone_after_what_came_before_and_before_what_comes_after",),
    ),
    Defect(
        "share update that was stored with others forgets what they say",
        "broker/coordinator/share/write_combiner.py",
        "found.updates += updates",
        "pass",
        (f"{TURNS}::test_what_comes_while_something_durable_is_under_way_is_stored_as_one_after_it",),
    ),
)

MORE_SHARE_STATE_DEFECTS = tuple(
    Defect(name, path, old, new, STATE_ROOM)
    for name, path, old, new in (
        (
            "late write of a share state taken",
            "broker/coordinator/share/state_store.py",
            "if write_token.write_number <= share.last_write_numbers[durable]:",
            "if write_token.write_number < 0:",
        ),
        (
            "deleted share state comes back",
            "broker/coordinator/share/state_store.py",
            "if write_token.session <= self._deleted.get(index, 0):",
            "if write_token.session < 0:",
        ),
        (
            "repeated initialize empties a share state",
            "broker/coordinator/share/state_store.py",
            "if known is not None and state_epoch == known.state_epoch:",
            "if known is not None and state_epoch < known.state_epoch:",
        ),
        (
            "reading of the leader before taken for one of now",
            "broker/coordinator/share/state_store.py",
            "return self.topic.leader_epoch_of(index) << _SESSION_BITS | self._sessions",
            "return self._sessions",
        ),
        (
            "uncertain share state certain too early",
            "broker/coordinator/share/state_store.py",
            "share.has_all_leases = self._withheld_ms(share) == 0",
            "share.has_all_leases = True",
        ),
        (
            "uncertain share state certain after the next start",
            "broker/coordinator/share/share_coordinator.py",
            "self._timers.append(self._scheduler.call_later(self.store.lock_ms_max(), self._write_boot_id))",
            "self._timers.append(self._scheduler.call_later(0, self._write_boot_id))",
        ),
        (
            "cut log of share states believed",
            "broker/coordinator/share/share_coordinator.py",
            "return self._is_log_complete and index not in self._truncated_partitions",
            "return self._is_log_complete",
        ),
        (
            "write with an unknown outcome forgotten",
            "broker/coordinator/share/state_client.py",
            "self.session = 0",
            "pass",
        ),
        (
            "share state made over one that is there",
            "broker/coordinator/share/state_client.py",
            "if state is not None and read_session is not None and read_session.state_was_missing:",
            "if state is not None and read_session is not None and read_session.last_write_number < 0:",
        ),
        (
            "ticket's sequence lost where a range is cut",
            "state/share_partition/snapshot.py",
            "return reservation._replace(sequence=(reservation.sequence + offset - change.first) & SEQUENCE_MAX)",
            "return reservation",
        ),
        (
            "fold leaves what is below the start",
            "state/share_partition/snapshot.py",
            "self._prune()",
            "pass",
        ),
        (
            "lease horizon goes back",
            "state/share_partition/snapshot.py",
            "self.lease_bound = max(self.lease_bound, each.lease_bound)",
            "self.lease_bound = each.lease_bound",
        ),
    )
)
