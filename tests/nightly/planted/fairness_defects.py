"""Defects of one line in the fairness by key of share groups. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

INDEX = "state/share_partition/fairness/fair_index.py"
ORDER = "state/share_partition/fairness/fair_order.py"
SCAN = "broker/coordinator/share/fair_scan.py"
LEADER = "broker/coordinator/share/partition_leader.py"
SCANNED = "tests/unit/broker/test_fair_scan.py"
PROPERTIES = "tests/unit/state/test_fair_order_properties.py"
QUEUES = "tests/unit/broker/test_fair_share_partition.py"
MODEL = "tests/unit/state/test_fair_index_model.py"

FAIRNESS_DEFECTS = (
    Defect(
        "an isolation takes effect before it is stored",
        SCAN,
        "leader.store([update], on_stored)",
        "on_stored(None); leader.store([update], lambda _: None)",
        (f"{SCANNED}::test_nothing_behind_an_isolation_is_offered_before_it_is_stored",),
    ),
    Defect(
        "keys are read while an isolation is stored",
        SCAN,
        "if index.end >= end or self._is_storing:",
        "if index.end >= end:",
        (f"{SCANNED}::test_nothing_behind_an_isolation_is_offered_before_it_is_stored",),
    ),
    Defect(
        "leases of backlog queues do not decide about numbers",
        SCAN,
        "ends = [decided_end_of(each, log_end) for each in (state, *queues.values())]",
        "ends = [decided_end_of(state, log_end)]",
        (f"{SCANNED}::test_all_states_decide_which_numbers_follow_from_the_isolations",),
    ),
    Defect(
        "a backlog queue that was never stored begins behind its records",
        SCAN,
        "firsts = [each.first for each in isolations if each.first < each.end]",
        "firsts = []",
        (f"{SCANNED}::test_all_states_decide_which_numbers_follow_from_the_isolations",),
    ),
    Defect(
        "an isolation begins before its backlog queue",
        SCAN,
        "ends += [each.first if each.end == OPEN_END else each.end for each in state.isolations]",
        "ends += [each.end for each in state.isolations if each.end != OPEN_END]",
        (f"{SCANNED}::test_all_states_decide_which_numbers_follow_from_the_isolations",),
    ),
    Defect(
        "numbers of records that are not delivered are dropped",
        INDEX,
        "end = min(self._undelivered.get(number, 0) for number in self.numbers)",
        "end = max(self._undelivered.get(number, 0) for number in self.numbers)",
        (f"{SCANNED}::test_numbers_are_kept_down_to_the_lowest_record_that_is_not_delivered",),
    ),
    Defect(
        "records of a backlog queue that are not done are in another share partition",
        INDEX,
        "self._pinned = {number: ranges for number, ranges in found.items() if ranges}",
        "self._pinned = {}",
        (f"{SCANNED}::test_numbers_are_kept_down_to_the_lowest_record_that_is_not_delivered",),
    ),
    Defect(
        "isolations are dropped before their records are delivered",
        INDEX,
        "delivered = {number: min(ends.get(number, 0), base_end) for number in newest}",
        "delivered = {number: base_end for number in newest}",
        (f"{MODEL}::test_an_isolation_is_kept_as_far_as_its_records_are_not_delivered",),
    ),
    Defect(
        "a backlog queue with dead letters is removed",
        "state/share_partition/machine.py",
        "return not is_done or self._dead.offset_count > 0",
        "return not is_done",
        (f"{SCANNED}::test_records_of_a_backlog_queue_are_known_whatever_can_be_read_now",),
    ),
    Defect(
        "records of a backlog queue stop the reading of keys",
        INDEX,
        "self._note_waiting(base_end, records, added)",
        "self._note_waiting(end, records, added)",
        (f"{SCANNED}::test_many_records_of_a_batch_that_ends_in_a_backlog_queue_do_not_stop_the_reading",),
    ),
    Defect(
        "an isolation ends at its last record",
        INDEX,
        "name: key.last + 1",
        "name: key.last",
        (f"{SCANNED}::test_an_index_that_is_read_again_has_the_same_numbers",),
    ),
    Defect(
        "a backlog queue whose records cannot be read yet is removed",
        "state/share_partition/machine.py",
        "is_done = self._own is not None and self._own.first_at_or_above(start) is None",
        "is_done = self._lag() == 0",
        (f"{SCANNED}::test_records_of_a_backlog_queue_are_known_whatever_can_be_read_now",),
    ),
    Defect(
        "an isolation ends while its records wait",
        INDEX,
        "if key.is_open and key.last < self._delivered.get(key.isolations[-1].number, 0)",
        "if key.is_open",
        (f"{SCANNED}::test_a_backlog_queue_is_in_use_until_its_records_are_done",),
    ),
    Defect(
        "an isolation begins where numbers are decided",
        INDEX,
        "and offset >= decided",
        "and True",
        (f"{SCANNED}::test_what_was_decided_without_an_isolation_stays_so",),
    ),
    Defect(
        "a share partition has credit for its idle time",
        ORDER,
        "return max(self._times.get(number, 0.0), self._now)",
        "return self._times.get(number, 0.0)",
        (f"{PROPERTIES}::test_a_share_partition_that_was_idle_has_no_credit",),
    ),
    Defect(
        "the share partition with the lowest number is served first",
        ORDER,
        "number = min(waiting, key=lambda each: (times[each], each))",
        "number = min(waiting)",
        (f"{QUEUES}::test_no_record_waits_for_more_than_its_share_of_the_others",),
    ),
    Defect(
        "a long lease counts as a whole",
        ORDER,
        "each_ms = min(max(held_ms / records, _LEASE_MS_MIN), mean * _LEASE_MEANS_MAX)",
        "each_ms = max(held_ms / records, _LEASE_MS_MIN)",
        (f"{PROPERTIES}::test_a_new_record_waits_for_one_turn_of_each_other_also_after_a_long_lease",),
    ),
    Defect(
        "a backlog queue takes all locks",
        ORDER,
        "return free if number == BASE else max((free - leased[number] + 1) // 2, 0)",
        "return free",
        (f"{PROPERTIES}::test_a_backlog_queue_never_has_more_than_half_of_the_locks",),
    ),
    Defect(
        "the weights of share partitions are not used",
        ORDER,
        "return self._mean_of(number) / self._weight_of(number)",
        "return self._mean_of(number)",
        (f"{PROPERTIES}::test_deliveries_of_backlogs_divide_by_weight_within_one_turn",),
    ),
    Defect(
        "dead letters before fairness began are not redriven",
        INDEX,
        "yield from [low] if number == BASE else intersection(self._pinned.get(number, ()), [low])",
        "yield from intersection(self._pinned.get(number, ()), [low])",
        (f"{SCANNED}::test_numbers_are_kept_down_to_the_lowest_record_that_is_not_delivered",),
    ),
    Defect(
        "the states of backlog queues stay when the group is set back",
        "broker/coordinator/share/state_store.py",
        "tuple(sorted({each.number for each in share.folded.isolations})),",
        "(),",
        (
            "tests/unit/broker/test_share_state.py::test_the_summary_names_backlog_queues_that_may_have_a_state",
        ),
    ),
    Defect(
        "a state is created again by a repeated request",
        "broker/coordinator/share/state_store.py",
        "share.last_write_numbers[update.durable] = write_token.write_number",
        "pass",
        (
            "tests/unit/broker/test_share_state.py"
            "::test_a_state_that_was_created_is_not_created_again_by_a_repeated_request",
        ),
    ),
    Defect(
        "a backlog queue goes on with its state from before the group was set back",
        SCAN,
        "if new := [each for each in isolations if each.number not in known]:",
        "if new := []:",
        (f"{QUEUES}::test_a_state_of_a_backlog_queue_from_before_the_group_was_set_back_is_not_used",),
    ),
    Defect(
        "settings that change while a state is loaded are not used",
        LEADER,
        "elif dependencies.settings(self.key.group, partition) != settings:",
        "elif False:",
        (f"{QUEUES}::test_settings_that_change_while_a_state_is_loaded_are_used",),
    ),
    Defect(
        "an acknowledgement for a backlog queue that ended is a defect",
        "broker/coordinator/share/share_partitions.py",
        "if not parts.keys() <= self._by_number.keys():",
        "if False:",
        (f"{QUEUES}::test_a_late_acknowledgement_of_a_record_of_a_backlog_queue_that_ended_is_refused",),
    ),
)
