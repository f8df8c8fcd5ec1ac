"""Defects of one line in share groups that the tests of their state machines have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

CASES = "tests/unit/state/test_share_partition_cases.py"
DEAD_LETTERS = "tests/unit/state/test_dead_letter_model.py"
MODEL = "tests/unit/state/test_share_partition_model.py"
SHARE_ROOM = (CASES, MODEL)
DEAD_LETTER_ROOM = (DEAD_LETTERS,)
SESSION_ROOM = ("tests/unit/state/test_share_session_model.py",)
MEMBERS_ROOM = ("tests/unit/state/test_share_group_model.py",)


def found_by(name: str) -> tuple[str, ...]:
    return (f"{CASES}::{name}",)


SHARE_DEFECTS = (
    Defect(
        "lease keyed by the record only",
        "state/share_partition/machine.py",
        "is_held = batch.holder == member if batch.state == ACQUIRED else is_withheld",
        "is_held = True",
        found_by("test_late_ack_counts_no_more_once_another_has_the_lease"),
    ),
    Defect(
        "late ack of an earlier delivery",
        "state/share_partition/machine.py",
        "if run.request_batch.delivery_count not in (-1, batch.deliveries):",
        "if run.request_batch.delivery_count < -1:",
        found_by("test_late_acknowledgement_of_an_earlier_delivery_does_not_end_the_later_one"),
    ),
    Defect(
        "release of what was never handed out counts as a delivery",
        "state/share_partition/machine.py",
        "self._retry_or_dead_letter(batch, 0, member, step, uncounted=uncounted + 1)",
        "self._retry_or_dead_letter(batch, 0, member, step, uncounted=uncounted)",
        found_by("test_the_release_of_records_that_were_not_handed_out_counts_no_delivery"),
    ),
    Defect(
        "expiry off by one",
        "state/share_partition/in_flight.py",
        "if batch.deadline_ms <= now_ms and batch.pending_token == NOT_PENDING:",
        "if batch.deadline_ms < now_ms and batch.pending_token == NOT_PENDING:",
        found_by("test_lease_ends_at_its_deadline_and_not_before"),
    ),
    Defect(
        "delivery count lost at a restart",
        "state/share_partition/in_flight.py",
        "self.deliveries = stored.deliveries",
        "self.deliveries = 0",
        found_by("test_counts_and_leases_are_found_again_after_a_restart"),
    ),
    Defect(
        "archived before the copy is there",
        "state/share_partition/machine.py",
        "reservation, state = new_reservation(cause, reason, consumer, step.wall_ms), ARCHIVING",
        "pass",
        found_by("test_rejected_record_is_archived_only_when_its_copy_is_there"),
    ),
    Defect(
        "ranges of different counts merged",
        "state/share_partition/in_flight.py",
        "and self.deliveries == other.deliveries",
        "and True",
        found_by("test_neighbours_of_other_members_and_other_counts_are_never_one_range"),
    ),
    Defect(
        "ranges of different members merged",
        "state/share_partition/in_flight.py",
        "and self.holder == other.holder",
        "and True",
        found_by("test_neighbours_of_other_members_and_other_counts_are_never_one_range"),
    ),
    Defect(
        "redelivery told before it is durable",
        "state/share_partition/machine.py",
        "durable = is_range or lease_ms > lock_ms or any(each.deliveries > 1 for each in acquired)",
        "durable = is_range or lease_ms > lock_ms",
        found_by("test_delivery_after_the_first_is_known_after_any_loss"),
    ),
    Defect(
        "horizon used before it is stored",
        "state/share_partition/machine.py",
        "self._requested = (token, bound)",
        "self._requested, self.offset = (token, bound), bound",
        found_by("test_nothing_is_leased_at_or_above_a_lease_bound_that_is_not_stored"),
    ),
    Defect(
        "nothing withheld after a loss",
        "state/share_partition/snapshot.py",
        "if not state.is_complete:",
        "if state.lease_bound < 0:",
        found_by("test_what_may_have_been_leased_before_a_loss_is_withheld_for_as_long_as_a_lease_lasts"),
    ),
    Defect(
        "start moved over what is not stored",
        "state/share_partition/in_flight.py",
        "if batch.state not in TERMINAL or batch.pending_token != NOT_PENDING:",
        "if batch.state not in TERMINAL:",
        found_by("test_start_moves_only_over_what_is_stored"),
    ),
    Defect(
        "groups share what is under way",
        "state/share_partition/in_flight.py",
        "self._pending_ranges: dict[int, list[tuple[int, int]]] = {}",
        "self._pending_ranges = state_batches.__dict__",
        found_by("test_two_groups_have_the_same_records_side_by_side"),
    ),
    Defect(
        "sequence of a dead letter not remembered",
        "state/share_partition/dead_letters.py",
        "sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, sequence))",
        "sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, first))",
        (f"{DEAD_LETTERS}::test_sequence_goes_round_in_the_middle_of_a_batch",),
    ),
    Defect(
        "range lease told before it is durable",
        "state/share_partition/machine.py",
        "durable = is_range or lease_ms > lock_ms or any(each.deliveries > 1 for each in acquired)",
        "durable = lease_ms > lock_ms or any(each.deliveries > 1 for each in acquired)",
        (MODEL,),
    ),
    Defect(
        "range leases of an older run are accepted",
        "state/share_partition/machine.py",
        "if batch.deliveries == known or (may_differ and batch.deliveries > known):",
        "if batch.deliveries >= known:",
        (MODEL,),
    ),
    Defect(
        "claim of a range lease forgives a delivery",
        "state/share_partition/machine.py",
        "deliveries=batch.deliveries + is_claim,",
        "deliveries=batch.deliveries,",
        (MODEL,),
    ),
    Defect(
        "range leases take record locks",
        "state/share_partition/machine.py",
        "return settings.record_locks_max - in_flight.leased_count + in_flight.range_count",
        "return settings.record_locks_max - in_flight.leased_count",
        (MODEL,),
    ),
    Defect(
        "range lease has two records of a key",
        "state/share_partition/key_index.py",
        "if key is None or (one_per_key and is_ordered):",
        "if key is None:",
        (MODEL,),
    ),
    Defect(
        "range lease is another lease after a restart",
        "state/share_partition/in_flight.py",
        "self.holder, self.lease_ms, self.is_range = stored.holder, stored.lease_ms, stored.is_range",
        "self.holder, self.lease_ms = stored.holder, stored.lease_ms",
        (MODEL,),
    ),
)

MORE_SHARE_DEFECTS = (
    *(
        Defect(name, file, line, planted, SHARE_ROOM)
        for name, file, line, planted in (
            (
                "ranges merged with what is under way",
                "state/share_partition/in_flight.py",
                "and self.pending_token == other.pending_token",
                "and True",
            ),
            (
                "stored start moved over what another update has",
                "state/share_partition/in_flight.py",
                "if batch.state not in TERMINAL or batch.pending_token not in (NOT_PENDING, token):",
                "if batch.state not in TERMINAL:",
            ),
            (
                "what is under way settled again",
                "state/share_partition/machine.py",
                "if batch.pending_token != NOT_PENDING or not is_held:",
                "if not is_held:",
            ),
            (
                "withheld only near the start",
                "state/share_partition/snapshot.py",
                "_withhold(in_flight, min(state.lease_bound, log_end), now_ms + max(state.withheld_ms, 0), own)",
                "_withhold(in_flight, min(state.lease_bound, log_end - 3), now_ms + max(state.withheld_ms, 0), own)",
            ),
            (
                "what is withheld left out of a snapshot",
                "state/share_partition/snapshot.py",
                "found += _withheld_as_backoff(in_flight, change, now_ms, wall_ms)",
                "pass",
            ),
            (
                "horizon not synced",
                "state/share_partition/machine.py",
                "bound, durable = self._lease_bound.request(token, in_flight.ranges, self.settings), True",
                "bound = self._lease_bound.request(token, in_flight.ranges, self.settings)",
            ),
            (
                "forgiven added twice",
                "state/share_partition/machine.py",
                "batch, 0, member, step, uncounted=batch.uncounted_deliveries + uncounted",
                "batch, 0, member, step, uncounted=batch.uncounted_deliveries + 2 * uncounted",
            ),
            (
                "forgiven deliveries count as tries",
                "state/share_partition/machine.py",
                "attempts = batch.deliveries - uncounted",
                "attempts = batch.deliveries",
            ),
            (
                "count goes back when it is offered again",
                "state/share_partition/machine.py",
                "in_flight.change_state(batch, AVAILABLE, token, uncounted_deliveries=batch.deliveries)",
                "in_flight.change_state(batch, AVAILABLE, token, deliveries=0, uncounted_deliveries=0)",
            ),
            (
                "redrive id not remembered",
                "state/share_partition/dead_letters.py",
                "return self._redrives.get(redrive_id, [])",
                "return []",
            ),
            (
                "acknowledged record comes back by a redrive",
                "state/share_partition/machine.py",
                "batches.append(InFlightBatch(begin, each.first - 1, ACKNOWLEDGED))",
                "batches.append(InFlightBatch(begin, each.first - 1, AVAILABLE))",
            ),
            (
                "parked record handed out",
                "state/share_partition/in_flight.py",
                "return self.state == AVAILABLE and self.deadline_ms == NEVER_MS and self.pending_token == NOT_PENDING",
                "return self.state == AVAILABLE and self.pending_token == NOT_PENDING",
            ),
            (
                "rest lost at a restart",
                "state/share_partition/machine.py",
                "due_ms=step.wall_ms + backoff_ms if backoff_ms else -1,",
                "due_ms=-1,",
            ),
            (
                "order lets others pass",
                "state/share_partition/acquisition.py",
                "elif batch.state != ACQUIRED or batch.holder != member:",
                "elif batch.state < 0:",
            ),
            (
                "more leased than locks",
                "state/share_partition/acquisition.py",
                "space = min(records_max, free_locks)",
                "space = records_max",
            ),
            (
                "ticket not moved when its range is cut",
                "state/share_partition/in_flight.py",
                "shift_reservation(self.reservation, offset - self.first),",
                "self.reservation,",
            ),
            (
                "lease below the log's start kept",
                "state/share_partition/in_flight.py",
                "if batch.pending_token == NOT_PENDING and batch.state in (AVAILABLE, ACQUIRED, WITHHELD)",
                "if batch.pending_token == NOT_PENDING and batch.state in (AVAILABLE, WITHHELD)",
            ),
            (
                "dead letter lost with the log's start",
                "state/share_partition/in_flight.py",
                "waiting = next((batch.first for batch in ranges if batch.state == ARCHIVING), log_start)",
                "waiting = log_start",
            ),
        )
    ),
    *(
        Defect(name, "state/share_partition/dead_letters.py", line, planted, DEAD_LETTER_ROOM)
        for name, line, planted in (
            (
                "next dead letters placed before the last are known",
                "return self.phase is Phase.OPEN and bool(self._unreserved)",
                "return self.phase in (Phase.OPEN, Phase.READY) and bool(self._unreserved)",
            ),
            (
                "dead letters in an old epoch to a target that forgot",
                "epoch = producer.epoch + 1 if producer_id < 0 else 0",
                "epoch = producer.epoch",
            ),
            (
                "dead letter not looked for after a day",
                "return self.is_repeat and wall_ms - self.oldest_ms > REPEAT_RECOGNITION_MS",
                "return self.is_repeat and wall_ms < self.oldest_ms",
            ),
        )
    ),
    Defect(
        "producer of dead letters not stored",
        "state/share_partition/machine.py",
        "return self._update(token, changed, durable=True, producer=producer)",
        "return self._update(token, changed, durable=True)",
        DEAD_LETTER_ROOM,
    ),
    Defect(
        "old share session epoch taken",
        "state/share_group/share_sessions.py",
        "if epoch != session.epoch:",
        "if epoch > session.epoch:",
        SESSION_ROOM,
    ),
    *(
        Defect(name, "state/share_group/group.py", line, planted, MEMBERS_ROOM)
        for name, line, planted in (
            (
                "share group does not see a topic grow",
                "if members_unchanged and metadata_hash == self.metadata_hash:",
                "if members_unchanged:",
            ),
            (
                "share partition with state not named",
                "self._add_assigned_partitions(targets.values(), topics)",
                "pass",
            ),
            (
                "old member epoch of a share group taken",
                "if request.member_epoch not in (current.epoch, current.previous_epoch):",
                "if request.member_epoch > current.epoch:",
            ),
        )
    ),
)
