"""Defects of one line in replication that the tests of replicas have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

REPLICATION = "tests/unit/broker/test_replication.py"
MODEL = "tests/unit/state/test_replica_model.py"
LOG = "tests/unit/storage/test_follower_append.py"


def found_by(*names: str) -> tuple[str, ...]:
    return tuple(f"{REPLICATION}::{name}" for name in names)


REPLICATION_DEFECTS = (
    Defect(
        "a proposal is withdrawn that may still be committed",
        "broker/replication/isr_manager.py",
        "while not self._stopped and any(change.entry.is_current for change in changes):",
        "while not self._stopped and all(change.entry.is_current for change in changes):",
        found_by("test_a_proposal_stays_while_its_transaction_may_still_be_committed"),
    ),
    Defect(
        "a check in turns forgets a partition that is led again",
        "broker/replication/isr_manager.py",
        "if self._leader_partitions.get(partition) is entry:",
        "if True:",
        found_by("test_a_partition_that_is_led_in_a_new_epoch_during_a_check_is_still_checked"),
    ),
    Defect(
        "ack before the high watermark of all in sync",
        "state/replica.py",
        "if follower.durable_end < lowest:",
        "if False:",
        found_by("test_no_ack_before_every_in_sync_replica_has_it"),
    ),
    Defect(
        "ack before the shrinking is committed",
        "state/replica.py",
        "others = (self.in_sync | (self.pending_in_sync or frozenset())) - {self.leader}",
        "others = (self.pending_in_sync or self.in_sync) - {self.leader}",
        found_by("test_no_ack_before_the_shrinking_is_committed"),
    ),
    Defect(
        "growth counts only when committed",
        "state/replica.py",
        "others = (self.in_sync | (self.pending_in_sync or frozenset())) - {self.leader}",
        "others = self.in_sync - {self.leader}",
        found_by("test_a_replica_that_may_have_joined_is_waited_for"),
    ),
    Defect(
        "unknown ends do not hold a new leader back",
        "state/replica.py",
        "self.durable_end = UNKNOWN",
        "self.durable_end = 1 << 60",
        found_by("test_a_new_leader_acknowledges_nothing_before_all_in_sync_have_fetched_in_its_epoch"),
    ),
    Defect(
        "commits below min.insync.replicas",
        "state/replica.py",
        "if lowest <= self.high_watermark or self.is_under_min_isr:",
        "if lowest <= self.high_watermark:",
        found_by("test_the_last_replica_standing_takes_nothing_with_min_insync_replicas"),
    ),
    Defect(
        "session deadline ignored",
        "state/replica.py",
        "if self._is_session_valid is not None and not self._is_session_valid():",
        "if False:",
        found_by("test_nothing_is_acknowledged_after_the_session_deadline"),
    ),
    Defect(
        "an unsynced end of the leader counts",
        "broker/partition/partition.py",
        "durable_end=log.durable_end_offset,",
        "durable_end=log.end_offset,",
        found_by("test_a_leader_counts_only_what_it_has_synced_itself"),
    ),
    Defect(
        "a follower says that it has what it has not synced",
        "broker/partition/partition.py",
        "if end_offset <= log.durable_end_offset or log.failure is not None or self.closed:",
        "if setattr(log, 'durable_end_offset', end_offset) is None:",
        found_by("test_a_follower_that_has_it_but_has_not_synced_it_does_not_count"),
    ),
    Defect(
        "truncate to the high watermark",
        "broker/partition/partition.py",
        "replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)",
        "log.unfinished_job_count or log.truncate_to(known); "
        "replica = FollowerReplica(leader, leader_epoch, known, log.durable_end_offset)",
        found_by("test_a_follower_does_not_cut_its_log_at_its_high_watermark"),
    ),
    Defect(
        "leader epoch of a follower unchecked",
        "broker/partition/partition.py",
        "if requested_epoch < current:",
        "if False:",
        found_by("test_a_follower_with_another_epoch_is_not_counted"),
    ),
    Defect(
        "last fetched epoch unchecked",
        "broker/partition/partition.py",
        "if epoch != wanted.last_fetched_epoch or end < offset:",
        "if end < offset:",
        found_by("test_an_epoch_that_the_leader_never_had_is_cut_off"),
    ),
    Defect(
        "the same epoch led again after a restart",
        "broker/partition/partition.py",
        "if leader_epoch <= log.leader_epochs.latest_epoch:",
        "if False:",
        found_by("test_a_broker_does_not_lead_again_in_an_epoch_it_may_have_lost_records_of"),
    ),
    Defect(
        "a broker is added in whatever session",
        "broker/replication/isr_manager.py",
        "compares.append(Compare(self._keys.session(node), create_revision=epoch))",
        "pass",
        found_by("test_a_restarted_follower_is_not_added_for_what_it_had_before"),
    ),
    Defect(
        "a request of an earlier session counts",
        "broker/services/broker_authenticator.py",
        "return registry is not None and 0 < registry.epoch_of(identity.node_id) == identity.broker_epoch",
        "return registry is not None and 0 < registry.epoch_of(identity.node_id)",
        found_by("test_a_late_request_of_an_earlier_session_counts_for_nothing"),
    ),
)

MORE_REPLICATION_DEFECTS = (
    Defect(
        "the view is not the rule",
        "state/replica.py",
        "and follower.durable_end >= self.epoch_start_offset",
        "and True",
        (MODEL,),
    ),
    Defect(
        "nothing is synced at all",
        "storage/flush_state.py",
        "self.active_file.sync()",
        "pass",
        found_by("test_what_was_acknowledged_survives_the_power_loss_of_all_brokers"),
    ),
    Defect(
        "end of the last fetched epoch unchecked",
        "broker/partition/partition.py",
        "if epoch != wanted.last_fetched_epoch or end < offset:",
        "if epoch != wanted.last_fetched_epoch:",
        found_by("test_logs_that_part_within_an_epoch_are_cut_where_the_leaders_ends"),
    ),
    Defect(
        "cut where the leader's epoch ended, whatever the own one did",
        "broker/partition/partition.py",
        "end = min(leader_end, own_end)",
        "end = leader_end",
        found_by("test_an_epoch_that_the_leader_never_had_is_cut_off"),
    ),
    Defect(
        "an epoch without records stays in the way",
        "storage/log.py",
        "if leader_epoch < self.leader_epochs.latest_epoch and self.leader_epochs.truncate_to(end_before):",
        "if False:",
        found_by("test_a_leader_that_wrote_nothing_in_its_epoch_copies_older_records_afterwards"),
    ),
    Defect(
        "waits outlive their leader epoch",
        "broker/partition/partition_waits.py",
        "self.fail(error)",
        "self.wake_all()",
        found_by("test_a_wait_ends_with_the_leader_epoch_it_began_in"),
    ),
    Defect(
        "a dead broker is kept in the set",
        "broker/replication/isr_manager.py",
        "and (node in entry.ended_sessions or node in lagging or not self._broker_epoch_of(node))",
        "and node in lagging",
        found_by("test_a_member_whose_session_ended_is_not_waited_for"),
    ),
    Defect(
        "a change overwrites the controller's",
        "broker/replication/isr_manager.py",
        "compares.append(Compare(key, mod_revision=change.before.mod_revision))",
        "compares.append(Compare(key))",
        found_by("test_a_change_by_the_controller_is_not_overwritten"),
    ),
    Defect(
        "what was cut off is remembered of producers",
        "broker/partition/partition.py",
        "hook.on_truncate(log.end_offset)",
        "pass",
        found_by("test_producers_are_remembered_by_the_next_leader_and_forgotten_with_what_was_cut"),
    ),
    Defect(
        "an epoch begins behind the gap before it",
        "storage/log.py",
        "if self.leader_epochs.assign(leader_epoch, end_before):",
        "if self.leader_epochs.assign(leader_epoch, base_offset):",
        (f"{LOG}::test_gaps_of_a_compacted_leader_survive_a_restart",),
    ),
    Defect(
        "what is missing between two segments is taken for a gap",
        "storage/recovery/recovery.py",
        "if self.checkpoint is None and offset < segment.base_offset <= self.compaction.sparse_end_offset:",
        "if offset < segment.base_offset <= self.compaction.sparse_end_offset:",
        (f"{LOG}::test_batches_lost_in_a_power_failure_are_not_taken_for_a_gap_of_the_leader",),
    ),
    Defect(
        "a recovered epoch begins behind the gap before it",
        "storage/recovery/recovery.py",
        "if self.epochs.assign(header.leader_epoch, epoch_start):",
        "if self.epochs.assign(header.leader_epoch, offset):",
        (f"{LOG}::test_gaps_of_a_compacted_leader_survive_a_restart",),
    ),
    Defect(
        "gaps are not written down",
        "storage/log.py",
        "write_state(self._disk, self.directory, state)",
        "pass",
        (f"{LOG}::test_gaps_of_a_compacted_leader_survive_a_restart",),
    ),
    Defect(
        "a log that begins anew keeps its epochs",
        "storage/log.py",
        'write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", LeaderEpochCache().encode(), durable=True)',
        "pass",
        (f"{LOG}::test_reset_continues_at_another_offset",),
    ),
    Defect(
        "a log that begins anew loses its last durable segment first",
        "storage/log.py",
        "for step in (older, segments[at:]):",
        "for step in (segments[at:], older):",
        (LOG,),
    ),
)
