"""Defects of one line in the commit of batches. See `defects.py`."""

from __future__ import annotations

from nightly.planted.planted import Defect

COMMITS = "tests/unit/broker/test_batch_commits.py"
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
        "return [each for each in dict.fromkeys(transactions) if each not in decided]",
        "return []",
        (f"{COMMITS}::test_a_repeated_batch_aborts_the_transactions_of_its_second_attempt",),
    ),
    Defect(
        "decision about a batch not carried out after a restart",
        "broker/coordinator/transaction/transaction_store.py",
        "self.on_decisions_loaded(self.decisions.of_partition(index))",
        "pass",
        (f"{COMMITS}::test_a_loaded_decision_is_carried_out_without_a_request",),
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
)
