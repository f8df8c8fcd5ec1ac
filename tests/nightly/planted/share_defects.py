"""The rules of share groups, each broken in one line: what the tests of their cores have to find."""

from __future__ import annotations

from nightly.planted.planted import Defect

CASES = "tests/unit/state/test_share_partition_cases.py"
DEAD_LETTERS = "tests/unit/state/test_dead_letter_model.py"
SHARE_ROOM = (CASES, "tests/unit/state/test_share_partition_model.py")
DEAD_LETTER_ROOM = (DEAD_LETTERS,)
SESSION_ROOM = ("tests/unit/state/test_share_session_model.py",)
MEMBERS_ROOM = ("tests/unit/state/test_share_group_model.py",)


def found_by(name: str) -> tuple[str, ...]:
    return (f"{CASES}::{name}",)


SHARE_DEFECTS = (
    Defect(
        "lease keyed by the record only",
        "state/share_partition/acknowledgement_check.py",
        "return span.holder == member",
        "return True",
        found_by("test_late_ack_counts_no_more_once_another_has_the_lease"),
    ),
    Defect(
        "late ack of an earlier delivery",
        "state/share_partition/acknowledgement_check.py",
        "if run.said.delivery_count not in (-1, span.deliveries):",
        "if run.said.delivery_count < -1:",
        found_by("test_late_ack_of_an_earlier_delivery_does_not_settle_the_later_one"),
    ),
    Defect(
        "expiry off by one",
        "state/share_partition/in_flight.py",
        "if span.deadline_ms <= now_ms and span.unsettled == SETTLED:",
        "if span.deadline_ms < now_ms and span.unsettled == SETTLED:",
        found_by("test_lease_ends_at_its_deadline_and_not_before"),
    ),
    Defect(
        "delivery count lost at a restart",
        "state/share_partition/restore.py",
        "span.state, span.deliveries, span.forgiven = change.state, change.deliveries, change.forgiven",
        "span.state, span.deliveries, span.forgiven = change.state, 0, 0",
        found_by("test_counts_and_leases_are_found_again_after_a_restart"),
    ),
    Defect(
        "archived before the copy is there",
        "state/share_partition/delivery_outcome.py",
        "self._window.put(span, ARCHIVING, self.token, holder=consumer, ticket=ticket)",
        "self._window.put(span, ARCHIVED, self.token, holder=consumer)",
        found_by("test_rejected_record_is_archived_only_when_its_copy_is_there"),
    ),
    Defect(
        "ranges of different counts merged",
        "state/share_partition/batch_map.py",
        "and self.deliveries == other.deliveries",
        "and True",
        found_by("test_neighbours_of_other_members_and_other_counts_are_never_one_range"),
    ),
    Defect(
        "ranges of different members merged",
        "state/share_partition/batch_map.py",
        "and self.holder == other.holder",
        "and True",
        found_by("test_neighbours_of_other_members_and_other_counts_are_never_one_range"),
    ),
    Defect(
        "redelivery told before it is durable",
        "state/share_partition/machine.py",
        "again = any(each.deliveries > 1 for each in told)",
        "again = False",
        found_by("test_delivery_after_the_first_is_known_after_any_loss"),
    ),
    Defect(
        "horizon used before it is stored",
        "state/share_partition/lease_bound.py",
        "self._asked = (token, ahead)",
        "self._asked, self.offset = (token, ahead), ahead",
        found_by("test_nothing_is_leased_at_or_above_a_horizon_that_is_not_stored"),
    ),
    Defect(
        "nothing withheld after a loss",
        "state/share_partition/restore.py",
        "if not state.certain:",
        "if state.horizon < 0:",
        found_by("test_what_may_have_been_leased_before_a_loss_is_withheld_for_as_long_as_a_lease_lasts"),
    ),
    Defect(
        "start moved over what is not stored",
        "state/share_partition/batch_map.py",
        "if span.state not in TERMINAL or span.unsettled != SETTLED:",
        "if span.state not in TERMINAL:",
        found_by("test_start_moves_only_over_what_is_stored"),
    ),
    Defect(
        "groups share what is under way",
        "state/share_partition/in_flight.py",
        "self._under_way: dict[int, list[tuple[int, int]]] = {}",
        "self._under_way = changes_of.__dict__",
        found_by("test_two_groups_have_the_same_records_side_by_side"),
    ),
    Defect(
        "sequence of a dead letter not remembered",
        "state/share_partition/dead_letter_queue.py",
        "sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, sequence))",
        "sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, first))",
        (f"{DEAD_LETTERS}::test_sequence_goes_round_in_the_middle_of_a_batch",),
    ),
)

MORE_SHARE_DEFECTS = (
    *(
        Defect(name, file, line, planted, SHARE_ROOM)
        for name, file, line, planted in (
            (
                "ranges merged with what is under way",
                "state/share_partition/batch_map.py",
                "and self.unsettled == other.unsettled",
                "and True",
            ),
            (
                "stored start moved over what another update has",
                "state/share_partition/in_flight.py",
                "if span.state not in TERMINAL or span.unsettled not in (SETTLED, token):",
                "if span.state not in TERMINAL:",
            ),
            (
                "what is under way settled again",
                "state/share_partition/acknowledgement_check.py",
                "if span.unsettled != SETTLED or not _is_held(span, member, run.type):",
                "if not _is_held(span, member, run.type):",
            ),
            (
                "withheld only near the start",
                "state/share_partition/restore.py",
                "_withhold(window, min(state.horizon, log_end), now_ms + max(state.withheld_ms, 0))",
                "_withhold(window, min(state.horizon, log_end - 3), now_ms + max(state.withheld_ms, 0))",
            ),
            (
                "what is withheld left out of a snapshot",
                "state/share_partition/restore.py",
                "told += _parked(window, change, now_ms, wall_ms)",
                "pass",
            ),
            (
                "horizon not synced",
                "state/share_partition/machine.py",
                "ahead, durable = self._horizon.ask(token, window.ranges, self.settings), True",
                "ahead = self._horizon.ask(token, window.ranges, self.settings)",
            ),
            (
                "forgiven added twice",
                "state/share_partition/machine.py",
                "span.forgiven += forgive",
                "span.forgiven += 2 * forgive",
            ),
            (
                "forgiven deliveries count as tries",
                "state/share_partition/delivery_outcome.py",
                "tries = span.deliveries - span.forgiven",
                "tries = span.deliveries",
            ),
            (
                "count goes back when it is offered again",
                "state/share_partition/redrive.py",
                "window.put(span, AVAILABLE, token, forgiven=span.deliveries)",
                "window.put(span, AVAILABLE, token, deliveries=0, forgiven=0)",
            ),
            (
                "redrive id not remembered",
                "state/share_partition/dead_ranges.py",
                "return self._redrives.get(redrive_id, [])",
                "return []",
            ),
            (
                "acknowledged record comes back by a redrive",
                "state/share_partition/redrive.py",
                "spans.append(InFlightBatch(begin, each.first - 1, ACKNOWLEDGED))",
                "spans.append(InFlightBatch(begin, each.first - 1, AVAILABLE))",
            ),
            (
                "parked record handed out",
                "state/share_partition/batch_map.py",
                "return self.state == AVAILABLE and self.deadline_ms == NEVER_MS and self.unsettled == SETTLED",
                "return self.state == AVAILABLE and self.unsettled == SETTLED",
            ),
            (
                "rest lost at a restart",
                "state/share_partition/delivery_outcome.py",
                "due_ms=self._wall_ms + rest_ms if rest_ms else -1,",
                "due_ms=-1,",
            ),
            (
                "order lets others pass",
                "state/share_partition/acquire_policy.py",
                "elif span.state != ACQUIRED or span.holder != member:",
                "elif span.state < 0:",
            ),
            (
                "more leased than locks",
                "state/share_partition/acquisition.py",
                "room = min(most, locks)",
                "room = most",
            ),
            (
                "ticket not moved when its range is cut",
                "state/share_partition/batch_map.py",
                "shifted(self.ticket, offset - self.first),",
                "self.ticket,",
            ),
            (
                "lease below the log's start kept",
                "state/share_partition/log_start.py",
                "if span.unsettled == SETTLED and span.state in (AVAILABLE, ACQUIRED, WITHHELD)",
                "if span.unsettled == SETTLED and span.state in (AVAILABLE, WITHHELD)",
            ),
            (
                "dead letter lost with the log's start",
                "state/share_partition/log_start.py",
                "waiting = next((span.first for span in ranges if span.state == ARCHIVING), log_start)",
                "waiting = log_start",
            ),
        )
    ),
    *(
        Defect(name, "state/share_partition/dead_letter_queue.py", line, planted, DEAD_LETTER_ROOM)
        for name, line, planted in (
            (
                "next dead letters placed before the last are known",
                "return self.phase is Phase.OPEN and bool(self._open)",
                "return self.phase in (Phase.OPEN, Phase.READY) and bool(self._open)",
            ),
            (
                "dead letters in an old epoch to a target that forgot",
                "epoch = producer.epoch + 1 if producer_id < 0 else 0",
                "epoch = producer.epoch",
            ),
            (
                "dead letter not looked for after a day",
                "return self.repeated and wall_ms - self.oldest_ms > UNKNOWN_AFTER_MS",
                "return self.repeated and wall_ms < self.oldest_ms",
            ),
        )
    ),
    Defect(
        "producer of dead letters not stored",
        "state/share_partition/machine.py",
        "return self._update(token, spans, durable=True, producer=producer)",
        "return self._update(token, spans, durable=True)",
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
                "if same_members and seen == self.metadata_hash:",
                "if same_members:",
            ),
            (
                "share partition with state not named",
                "self._name_state(targets.values(), topics)",
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
