"""What a broker tells of share groups: numbers for `/metrics`, and what somebody should look at.

Each broker tells of the share partitions that it leads, so sums over all brokers are those of the cluster.

Always true: no label but words of this program; nothing is counted here that takes a look at single records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.http.broker_stats import Measurement, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.broker_stats import RunningBroker


def measurements(broker: RunningBroker) -> Iterator[Measurement]:
    """Leases and dead letters."""
    share_partitions = [
        share_partition
        for share_partition in broker.services.shares.share_partitions()
        if share_partition.is_ready
    ]
    yield _gauge(
        "share_partitions", "Share partitions in use here, one for each group.", len(share_partitions)
    )
    leased = sum(share_partition.state_machine.leased for share_partition in share_partitions)
    yield _gauge("share_leased_records", "Records that members of share groups have leased.", leased)
    yield _gauge(
        "share_sessions",
        "Members of share groups that fetch from here.",
        len(broker.services.shares.sessions),
    )
    yield _gauge(
        "share_parked_fetches",
        "Fetches of share groups that wait for records.",
        len(broker.services.shares.parked),
    )
    manager = broker.services.dead_letters
    counts = manager.counts
    yield _gauge(
        "dead_letters_pending",
        "Records given up whose copy is not in the dead-letter topic yet.",
        manager.waiting,
    )
    yield _counter("dead_letters_written", "Records copied to a dead-letter topic.", counts.written)
    yield _counter(
        "dead_letter_values_omitted",
        "Dead letters without their value, because it was too large for the topic.",
        counts.omitted,
    )
    yield _counter(
        "dead_letter_failures",
        "Times a batch of dead letters could not be written; it is tried again.",
        counts.failures,
    )


def warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Dead letters that could not be written the last time it was tried."""
    failing = broker.services.dead_letters.failing()
    if failing:
        records = sum(waiting for _, waiting, _ in failing)
        key, _, reason = failing[0]
        more = f" and {len(failing) - 1} more partitions" if len(failing) > 1 else ""
        yield Problem(
            "dead_letters_pending",
            f"{records:,} dead letters wait: group {key.group!r}, partition {key.partition}{more}: {reason}",
        )


def _counter(name: str, meaning: str, value: float) -> Measurement:
    return Measurement(name, "counter", meaning, (), value)


def _gauge(name: str, meaning: str, value: float) -> Measurement:
    return Measurement(name, "gauge", meaning, (), value)
