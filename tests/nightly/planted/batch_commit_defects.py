"""Defects of one line in the commit of batches. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

COMMITS = "tests/unit/broker/test_batch_commits.py"
DECISIONS = "tests/unit/state/transactions/test_batch_decision.py"
SINK = "tests/system/spark/test_sink_transactions.py"

BATCH_COMMIT_DEFECTS = (
    Defect(
        "batch committed without a transaction that has ended",
        "broker/coordinator/transaction/batch_committer.py",
        "await self._hold_all(batch_id, transactions)",
        "pass",
        (f"{COMMITS}::test_a_batch_with_a_transaction_that_ended_commits_none",),
    ),
    Defect(
        "second attempt of a committed batch left open",
        "state/transactions/batch_decision.py",
        "return [each for each in dict.fromkeys(transactions) if each not in named]",
        "return []",
        (f"{COMMITS}::test_a_repeated_batch_aborts_the_transactions_of_its_second_attempt",),
    ),
    Defect(
        "decision about a batch not carried out after a restart",
        "broker/coordinator/transaction/transaction_store.py",
        "self._on_decisions_loaded(self.decisions.of_partition(index))",
        "pass",
        (f"{COMMITS}::test_a_loaded_decision_is_carried_out_without_a_request",),
    ),
    Defect(
        "transactions aborted before the query names them",
        "broker/coordinator/transaction/batch_committer.py",
        "await self._append(query_id, epoch, decision)",
        "work = [self._ender.end(each, is_commit=False) for each in aborting]"
        "; await gather_results(self._scheduler, work, name='abort')",
        (
            f"{COMMITS}::test_an_abort_that_arrives_after_a_change_of_the_leader_does_not_split_a_batch",
            f"{COMMITS}::test_no_abort_is_sent_before_it_is_stored",
        ),
    ),
    Defect(
        "abandoned transactions not named in the decision",
        "state/transactions/batch_decision.py",
        "return decision._replace(aborting=tuple(newcomers(decision, abandoned)))",
        "return decision",
        (f"{COMMITS}::test_abandoned_transactions_are_aborted_with_the_commit",),
    ),
    Defect(
        "stored aborts not loaded",
        "wire/internal_records/batch_decision_records.py",
        "if ABORTING_TAG in tagged:",
        "if False:",
        (f"{COMMITS}::test_an_abort_that_arrives_after_a_change_of_the_leader_does_not_split_a_batch",),
    ),
    Defect(
        "aborts removed although a transaction is not ended",
        "broker/coordinator/transaction/batch_committer.py",
        "failure = failure or error",
        "pass",
        (f"{COMMITS}::test_an_abort_stays_stored_until_each_transaction_is_ended",),
    ),
    Defect(
        "batch with a transaction that is being aborted waits instead of being refused",
        "state/transactions/batch_decision.py",
        "if known.aborting and not set(known.aborting).isdisjoint(transactions):",
        "if False:",
        (f"{COMMITS}::test_an_abort_stays_stored_until_each_transaction_is_ended",),
    ),
    Defect(
        "decision of an earlier leadership stored",
        "broker/coordinator/transaction/batch_committer.py",
        "if self._leader_epoch(query_id) != epoch:",
        "if False:",
        (f"{COMMITS}::test_a_request_that_outlasts_its_leadership_decides_nothing",),
    ),
    Defect(
        "query forgotten while its transactions are being aborted",
        "state/transactions/batch_decision.py",
        "return known.is_settled and now_ms - known.updated_ms >= expiration_ms",
        "return known.is_finished and now_ms - known.updated_ms >= expiration_ms",
        (
            f"{DECISIONS}::test_a_query_does_not_expire_before_its_aborts_are_ended_and_soon_without_a_decision",
        ),
    ),
    Defect(
        "size of a batch not checked",
        "broker/coordinator/transaction/batch_committer.py",
        "if len(transactions) > TRANSACTIONS_MAX:",
        "if False:",
        (f"{COMMITS}::test_a_batch_that_no_decision_can_name_is_refused_before_anything_is_done",),
    ),
    Defect(
        "decision larger than the log cleaner decodes",
        "broker/coordinator/transaction/batch_committer.py",
        "IDS_BYTES_MAX: Final = 8 << 20",
        "IDS_BYTES_MAX: Final = 64 << 20",
        (
            f"{COMMITS}::test_the_largest_decision_can_be_loaded_and_compacted_and_its_request_fits_into_a_frame",
        ),
    ),
    Defect(
        "late decision not reported",
        "broker/coordinator/transaction/batch_committer.py",
        "self._check_age(entry, decision, replaced)",
        "pass",
        (f"{COMMITS}::test_a_decision_that_was_carried_out_too_late_is_reported",),
    ),
    Defect(
        "held transaction times out after a restart",
        "broker/coordinator/transaction/transaction_store.py",
        "held_ms=value.held_ms,",
        "held_ms=-1,",
        (f"{COMMITS}::test_the_time_of_a_held_transaction_goes_on_after_a_restart",),
    ),
    Defect(
        "prepared slot of a task taken over",
        "spark/sink/sink_transaction.py",
        "if found is not None:",
        "if found is not None or True:",
        (f"{SINK}::test_a_batch_that_is_repeated_before_its_commit_is_there_once",),
    ),
    Defect(
        "transactions of repeated attempts left open",
        "spark/sink/writers.py",
        "commit_batch(client, query_id, batch_id, transactions, others)",
        "commit_batch(client, query_id, batch_id, transactions)",
        (f"{SINK}::test_both_attempts_of_a_task_write_and_one_counts",),
    ),
    Defect(
        "decision whose commit was late is not carried out",
        "broker/coordinator/transaction/batch_committer.py",
        "if entry is not None and not entry.decision.is_settled:",
        "if False:",
        (f"{COMMITS}::test_a_decision_whose_commit_was_late_is_carried_out_without_another_request",),
    ),
    Defect(
        "transaction of a cancelled task left open",
        "spark/sink/writers.py",
        "if now_s - quiet_s >= ABORT_QUIET_S or now_s >= end_s:",
        "if now_s >= quiet_s:",
        (f"{SINK}::test_a_cancelled_task_that_goes_on_after_the_abort_leaves_nothing",),
    ),
)
