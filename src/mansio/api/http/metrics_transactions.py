"""Metrics and warnings of transactions: those that this broker coordinates, and those open in partitions that it leads.

Invariant: transactional ids come from clients; they are in warnings, at most `NAMED_MAX` at a time, and never labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.http.broker_stats import Measurement
from mansio.broker.services.health import Problem
from mansio.wire.internal_records.transaction_records import HELD_TIMEOUT_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.broker_stats import RunningBroker

NAMED_MAX: Final = 5
"""Maximum number of transactions, and of partitions, that are named in warnings; the others are counted."""

ID_CHARACTERS_MAX: Final = 100
"""Length to which a transactional id is truncated in a warning."""


def measurements(broker: RunningBroker) -> Iterator[Measurement]:
    """Return metrics of the transactions that this broker coordinates."""
    found = broker.services.transactions.statistics()
    yield _gauge(
        "transactional_ids", "Transactional ids that this broker coordinates.", found.transactional_ids
    )
    yield _gauge(
        "open_transactions", "Transactions of them that have begun and have not ended everywhere.", found.open
    )
    yield _gauge(
        "oldest_open_transaction_seconds",
        "Age of the oldest of these transactions.",
        found.oldest_open_ms / 1000,
    )
    yield _gauge(
        "transaction_markers_waiting",
        "Partitions that have still to get the marker of a transaction that this broker has decided.",
        found.markers_waiting,
    )
    meaning = "Transactions that this broker has decided, since the start."
    yield _counter("transactions_ended", meaning, found.committed, outcome="committed")
    yield _counter("transactions_ended", meaning, found.aborted - found.timed_out, outcome="aborted")
    yield _counter("transactions_ended", meaning, found.timed_out, outcome="timed_out")
    meaning = (
        "Requests of transactional producers that this broker has refused as coordinator, since the start."
    )
    yield _counter("transaction_requests_refused", meaning, found.fenced, reason="fenced")
    yield _counter("transaction_requests_refused", meaning, found.concurrent, reason="concurrent")


def warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return warnings of transactions that are open for longer than `transaction_open_warning_ms`."""
    open_ms_min = broker.services.settings.transaction_open_warning_ms
    if not open_ms_min:
        return
    found = broker.services.transactions.open_longer_than(open_ms_min)
    for number, (transaction, open_ms) in enumerate(found[:NAMED_MAX]):
        left_out = len(found) - NAMED_MAX if number == NAMED_MAX - 1 else 0
        more = f"; and {left_out:,} other transactions" if left_out > 0 else ""
        partitions = ", ".join(f"{topic}-{index}" for topic, index in transaction.partitions[:NAMED_MAX])
        ended_by = (
            "waits for the decision to commit or abort it"
            if transaction.timeout_ms == HELD_TIMEOUT_MS
            else f"timeout {transaction.timeout_ms / 1000:,.0f} s"
        )
        yield Problem(
            "transaction_open",
            f"transactional id {transaction.transactional_id[:ID_CHARACTERS_MAX]!r} is in state {transaction.state} for"
            f" {open_ms / 1000:,.0f} s ({ended_by}): {partitions}{more}",
        )
    yield from _unknown_to_coordinators(broker, open_ms_min)


def _unknown_to_coordinators(broker: RunningBroker, open_ms_min: int) -> Iterator[Problem]:
    """Return warnings of partitions with a transaction that is open for longer than a coordinator allows, unless this
    broker coordinates it: then it waits for the decision of another system."""
    services = broker.services
    bound_ms = max(open_ms_min, services.settings.transaction_max_timeout_ms)
    latest_ms = services.clock.wall_ms() - bound_ms
    coordinated = services.transactions.open_partitions()
    named = left_out = 0
    for partition in tuple(services.partitions):
        producers = partition.producers
        if producers is None or not partition.is_leader or not producers.transactions.open:
            continue
        for producer_id, offset in tuple(producers.transactions.open.items()):
            producer = producers.table.get(producer_id)
            if producer is None or producer.last_seen_ms > latest_ms:
                continue
            if (partition.topic, partition.index) in coordinated.get(producer_id, ()):
                continue
            if named == NAMED_MAX:
                left_out += 1
                break
            named += 1
            yield Problem(
                "transaction_may_hang",
                f"{partition.name}: the transaction of producer {producer_id} is open since offset {offset}, without a"
                f" batch for more than {bound_ms / 1000:,.0f} s; see `mansio txn find-hanging`",
                partition.topic,
                partition.index,
            )
            break
    if left_out:
        yield Problem("transaction_may_hang", f"and {left_out:,} other partitions")


def _counter(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "counter", meaning, tuple(labels.items()), value)


def _gauge(name: str, meaning: str, value: float) -> Measurement:
    return Measurement(name, "gauge", meaning, (), value)
