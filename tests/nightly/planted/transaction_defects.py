"""Defects of one line in transactions, on the coordinator, in partitions and in the offsets of groups. See
`defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

COORDINATOR = "tests/unit/broker/test_transaction_coordinator.py"
PARTITION = "tests/unit/broker/test_partition_transactions.py"
READERS = f"{PARTITION}::test_readers_of_committed_records_see_exactly_those"
OFFSETS = "tests/unit/broker/test_transactional_offsets.py"
RECORDS = "tests/component/test_transactional_records.py"
MODEL = ("tests/unit/state/transactions/test_transaction_model.py",)
HISTORIES = (
    "tests/sim/test_features.py::test_no_history_of_a_feature_breaks_its_guarantees[transactions-smoke]",
    "tests/sim/test_features.py::test_no_history_of_a_feature_breaks_its_guarantees[transactions-more]",
)
KILLS = ("tests/system/interop/test_transactions.py::test_kills_leave_no_transaction_in_part_or_twice",)

STORED_KEPT = "tests/unit/broker/test_stored_kept_transactions.py"

MACHINE = "state/transactions/transaction.py"
STORE = "broker/coordinator/transaction/transaction_store.py"
STATE = "state/partition_transactions.py"
HOOK = "broker/partition/producer_hook.py"
SENDER = "broker/coordinator/transaction/marker_sender.py"
GROUPS = "broker/coordinator/group/group_store.py"
MANAGER = "broker/coordinator/group/offset_manager.py"
PRODUCE = "broker/services/produce.py"

TRANSACTION_DEFECTS = (
    Defect(
        "marker of a partition that refused it is lost",
        SENDER,
        "waiting.append(outcome.partition)",
        "pass",
        (f"{COORDINATOR}::test_markers_are_repeated_until_every_partition_has_one",),
    ),
    Defect(
        "marker of a partition without leader is lost",
        SENDER,
        "waiting.append((topic, index))",
        "pass",
        (f"{COORDINATOR}::test_a_partition_without_leader_is_waited_for_and_a_deleted_one_is_not",),
    ),
    Defect(
        "last stable offset ahead of an open transaction",
        STATE,
        "return ended if first is None else min(first, ended)",
        "return ended",
        (READERS,),
    ),
    Defect(
        "last stable offset passes a marker that is not committed",
        STATE,
        "while ended and ended[0][1] < high_watermark:",
        "while ended:",
        (f"{PARTITION}::test_a_transaction_is_undecided_until_all_replicas_have_its_marker",),
    ),
    Defect(
        "transaction begins at its last batch",
        STATE,
        "self.open.setdefault(producer_id, offset)",
        "self.open[producer_id] = offset",
        (READERS,),
    ),
    Defect(
        "end does not bump the epoch",
        MACHINE,
        "decided = decided._replace(producer_epoch=known.producer_epoch + 1)",
        "",
        (f"{COORDINATOR}::test_a_commit_writes_one_marker_to_each_partition_and_bumps_the_epoch",),
    ),
    Defect(
        "kept transaction of an earlier version belongs to the producer that began it",
        STORE,
        "return stored._replace(next_producer_id=NO_ID, producer_epoch=next_producer_epoch)",
        "return stored._replace(next_producer_id=NO_ID)",
        (f"{STORED_KEPT}::test_the_last_producer_that_has_kept_a_transaction_can_still_end_it",),
    ),
    Defect(
        "transaction that an earlier version has stored without a timeout stays open",
        STORE,
        "timeout_ms=self._timeout_ms_max if value.timeout_ms == HELD_TIMEOUT_MS else value.timeout_ms,",
        "timeout_ms=value.timeout_ms,",
        (f"{STORED_KEPT}::test_an_open_transaction_ends_by_its_timeout_or_without_one_by_the_highest",),
    ),
    Defect(
        "initialization does not bump the epoch",
        MACHINE,
        "return empty._replace(producer_epoch=known.producer_epoch + 1)",
        "return empty",
        (f"{COORDINATOR}::test_a_producer_bumps_its_epoch_and_may_repeat_that",),
    ),
    Defect(
        "index of aborted transactions lost with a snapshot without open ones",
        HOOK,
        "if transactions.is_empty:",
        "if not transactions.open:",
        (READERS,),
    ),
    Defect(
        "snapshot of transactions not read",
        HOOK,
        "self.table, self.transactions = state",
        "self.table, _ = state",
        (READERS,),
    ),
    Defect(
        "start of the log forgets aborted transactions above it",
        STATE,
        "self._replace_aborted(self._aborted[known * _FIELDS :])",
        "self._replace_aborted(self._aborted[:0])",
        (READERS,),
    ),
    Defect(
        "late end after the timeout accepted",
        MACHINE,
        "return _fence(known, now_ms, may_repeat=False)",
        "return _decide(known, is_commit=False, bumps=True, new_id=NO_ID, now_ms=now_ms)",
        (f"{COORDINATOR}::test_a_late_end_after_the_timeout_is_fenced",),
    ),
    Defect(
        "offsets visible before the commit",
        GROUPS,
        "by_producer[producer_id] = PendingOffset(decode_offset_value(value), offset)",
        "self._set_committed(entry, decoded.topic, decoded.partition, decode_offset_value(value), offset)",
        (f"{OFFSETS}::test_an_offset_is_visible_only_after_the_commit_marker",),
    ),
    Defect(
        "offsets of an aborted transaction become committed",
        GROUPS,
        "if is_commit and pending is not None and pending.committed is not None:",
        "if pending is not None and pending.committed is not None:",
        (f"{OFFSETS}::test_an_aborted_offset_is_never_visible_and_its_group_vanishes",),
    ),
    Defect(
        "batches not verified",
        PRODUCE,
        "if producers is None or not partition.is_leader or partition.internal or producers.is_open(header):",
        "if True:",
        (f"{RECORDS}::test_the_first_batch_of_a_transaction_is_verified_and_no_other",),
    ),
    Defect(
        "batches of prepared requests not verified",
        PRODUCE,
        "return producers is not None and producers.is_open(header)",
        "return True",
        (f"{RECORDS}::test_the_first_batch_of_a_transaction_is_verified_and_no_other",),
    ),
    Defect(
        "end during the verification not noticed",
        HOOK,
        "verification.is_valid = False",
        "pass",
        (f"{RECORDS}::test_a_transaction_that_ends_during_the_verification_is_not_opened_again",),
    ),
    Defect(
        "zombie not fenced by the coordinator",
        MACHINE,
        "if current_epoch != producer_epoch or _is_beyond_last_epoch(known):",
        "if current_epoch < producer_epoch or _is_beyond_last_epoch(known):",
        (f"{COORDINATOR}::test_a_new_producer_aborts_the_transaction_of_the_zombie_and_fences_it",),
    ),
    Defect(
        "marker of a zombie coordinator not fenced by the partition",
        HOOK,
        "self.table.check_marker(producer_id, epoch, marker.coordinator_epoch)",
        "pass",
        (f"{PARTITION}::test_a_marker_of_an_older_epoch_or_coordinator_is_fenced",),
    ),
    Defect(
        "repeated marker ends the next transaction",
        HOOK,
        "if marker.bumps_epoch and producer_id in self.transactions.open:",
        "if False:",
        (f"{PARTITION}::test_a_repeated_marker_does_not_end_the_next_transaction_of_its_producer",),
    ),
    Defect(
        "marker is answered before its commit",
        "broker/services/transactions/marker_service.py",
        "await one",
        "pass",
        (
            f"{PARTITION}::"
            "test_a_marker_is_answered_and_ends_the_transaction_of_offsets_only_after_its_commit",
        ),
    ),
    Defect(
        "open transactions of a partition lost at a restart",
        HOOK,
        "self._begin(header, offset)",
        "pass",
        (READERS,),
    ),
    Defect(
        "timeouts lost at a restart of the coordinator",
        "broker/coordinator/transaction/transaction_coordinator.py",
        "self._arm(min(ongoing))",
        "pass",
        (f"{COORDINATOR}::test_a_timeout_survives_a_restart",),
    ),
)
"""Each with a test of its own."""

MORE_TRANSACTION_DEFECTS = (
    Defect(
        "a marker is written to all partitions but one",
        "broker/coordinator/transaction/transaction_coordinator.py",
        "if not await self._markers.send(marker, sorted(decided.partitions), is_current) or not is_current():",
        "if not await self._markers.send(marker, sorted(decided.partitions)[1:], is_current) or not is_current():",
        HISTORIES,
    ),
    Defect(
        "last stable offset of histories ahead of open transactions",
        HOOK,
        "if not isolation_level or (first := self.transactions.first_undecided_offset) is None:",
        "if (first := None) is None:",
        HISTORIES,
    ),
    Defect(
        "readers do not learn of aborted transactions",
        "broker/services/fetch.py",
        "aborted = _aborted(partition, want.fetch_offset, records.next_offset)",
        "pass",
        HISTORIES,
    ),
    Defect(
        "readers do not learn of aborted transactions when brokers are killed",
        "broker/services/fetch.py",
        "aborted = _aborted(partition, want.fetch_offset, records.next_offset)",
        "pass",
        KILLS,
    ),
    Defect(
        "aborted transactions of histories lost with a snapshot",
        HOOK,
        "if transactions.is_empty:",
        "if not transactions.open:",
        HISTORIES,
    ),
    Defect(
        "offsets of histories visible before the commit",
        GROUPS,
        "by_producer[producer_id] = PendingOffset(decode_offset_value(value), offset)",
        "self._set_committed(entry, decoded.topic, decoded.partition, decode_offset_value(value), offset)",
        HISTORIES,
    ),
    Defect(
        "zombies of histories not fenced",
        MACHINE,
        "if current_epoch != producer_epoch or _is_beyond_last_epoch(known):",
        "if False:",
        HISTORIES,
    ),
    Defect(
        "open transactions of histories lost at a restart",
        HOOK,
        "self._begin(header, offset)",
        "pass",
        HISTORIES,
    ),
    Defect(
        "batches of histories not verified",
        PRODUCE,
        "if producers is None or not partition.is_leader or partition.internal or producers.is_open(header):",
        "if True:",
        HISTORIES,
    ),
    Defect(
        "decided transactions forgotten when their coordinator fails over",
        "broker/coordinator/transaction/transaction_coordinator.py",
        "for entry in entries:",
        "for entry in ():",
        HISTORIES,
    ),
    Defect(
        "repeated end may decide otherwise",
        MACHINE,
        "if known.is_commit != is_commit:",
        "if False:",
        MODEL,
    ),
    Defect(
        "unstable offsets are given",
        MANAGER,
        "if requires_stable and entry.pending_offsets:",
        "if False:",
        (OFFSETS,),
    ),
    Defect(
        "offsets follow a marker that is not committed",
        MANAGER,
        "verification.is_outdated = True",
        "pass",
        (OFFSETS,),
    ),
    Defect(
        "retention deletes what readers of committed records could not read",
        HOOK,
        "return self.transactions.first_undecided_offset",
        "return None",
        (RECORDS,),
    ),
)
