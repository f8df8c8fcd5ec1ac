"""Metrics and health of a broker in a cluster.

Each broker reports what it leads and its own session, so that sums over all brokers are those of the cluster. Two
metrics are each broker's view of the whole cluster (`offline_partitions`, `brokers`): use the maximum, not the sum.

Invariant: labels are broker ids, of which a cluster has few, and constants of this program; a single node reports
nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.http.broker_stats import FollowerSample, LeaderSample, Measurement
from mansio.broker.services.health import Problem
from mansio.metadata import reassignment
from mansio.metadata.model import BROKER_FENCED, NO_LEADER
from mansio.metadata.session import RENEW_FRACTION
from mansio.state.replica import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.broker.partition.partition import Partition
    from mansio.metadata.model import PartitionState
    from mansio.metadata.session import Session

RENEWALS_MISSED_MAX: Final = 3
"""Number of consecutive renewals without a response after which a warning is reported."""

PARTITIONS_LISTED_MAX: Final = 3
"""Maximum number of partitions that a warning names; the others are only counted."""


def measurements(broker: RunningBroker) -> Iterator[Measurement]:
    """Return the metrics of the cluster that need no iteration over the open partitions."""
    cluster = broker.services.cluster
    if cluster is None:
        return
    state, now = broker.services.topics.state, broker.services.clock.monotonic()
    yield _gauge("brokers", "Brokers with a session, as seen by this broker.", len(state.brokers))
    yield _gauge(
        "fenced_brokers",
        "Registered brokers without a session, as seen by this broker.",
        sum(one.state == BROKER_FENCED for one in state.registrations.values()),
    )
    yield _gauge(
        "offline_partitions",
        "Partitions of the cluster without a leader, as seen by this broker.",
        sum(one.leader == NO_LEADER for topic in state.topics.values() for one in topic.partitions),
    )
    yield _gauge("controller_active", "1 on the active controller.", cluster.controller.is_active)
    for cause, times in cluster.controller.elections.items():
        meaning = "Leader elections by this broker as controller, by cause."
        yield _counter("leader_elections", meaning, times, cause=cause)
    isr_manager = cluster.isr_manager
    yield _counter("isr_shrinks", "Shrinks of in-sync sets of partitions led here.", isr_manager.shrink_count)
    meaning = "Expansions of in-sync sets of partitions led here."
    yield _counter("isr_expansions", meaning, isr_manager.expansion_count)
    yield _gauge(
        "quarantined_replicas",
        "Replicas on this broker whose last fetch failed.",
        sum(1 for _ in cluster.fetcher_manager.failed_replicas()),
    )
    sessions = broker.services.fetch.sessions
    yield _gauge("incremental_fetch_sessions", "Fetch sessions of followers on this broker.", len(sessions))
    meaning = "Partitions in the fetch sessions of followers on this broker."
    yield _gauge("incremental_fetch_partitions_cached", meaning, sum(map(len, sessions)))
    meaning = "Fetch sessions that ended because a newer one needed the room."
    yield _counter("incremental_fetch_session_evictions", meaning, sessions.eviction_count)
    yield _gauge(
        "session_held", "1 while this broker's session has certainly not expired.", cluster.is_session_valid()
    )
    yield _gauge(
        "session_renewal_age_seconds",
        "Time since the last successful renewal of this broker's session; 0 without a session.",
        _renewed_ago_s(cluster.session(), now),
    )
    yield _counter(
        "sessions_lost", "Sessions that ended while the broker was running.", cluster.sessions_lost()
    )
    for outcome, times in cluster.hand_over.counts.items():
        meaning = (
            "Brokers that refused connects after all connections to them had ended, by what this broker did."
        )
        yield _counter("hand_overs", meaning, times, outcome=outcome)
    repairs = cluster.repair_counts()
    yield _counter("repaired_ranges", "Damaged ranges replaced by those of another replica.", repairs.ranges)
    yield _counter(
        "repaired_bytes", "Bytes that were read from other replicas for repairs.", repairs.replaced_bytes
    )
    yield _counter(
        "repair_failures", "Repairs of a partition that failed; they are retried.", repairs.failures
    )
    yield from _etcd(broker)


def _etcd(broker: RunningBroker) -> Iterator[Measurement]:
    cluster = broker.services.cluster
    if cluster is not None and cluster.store_counts is not None:
        counts = cluster.store_counts()
        yield _counter("etcd_calls", "Calls to etcd with a response.", counts.answered_count)
        for outcome, times in counts.failure_counts.items():
            meaning = "Failed calls to etcd, by outcome."
            yield _counter("etcd_errors", meaning, times, outcome=outcome)
        meaning = "etcd transactions whose response was lost; each is resolved by reading."
        yield _counter("etcd_ambiguous_transactions", meaning, counts.ambiguous_count)
    if (member := broker.etcd_member) is not None:
        yield _gauge("etcd_member_running", "1 while this broker's etcd member runs.", member.is_running)
        meaning = "Restarts of this broker's etcd member."
        yield _counter("etcd_member_restarts", meaning, member.restarts)


def leader_sample(partition: Partition, state: PartitionState | None = None) -> LeaderSample | None:
    """Return the state of replication of a partition; None if this broker is not its leader. `state`: that of the
    metadata, None if the partition does not exist there."""
    replica = partition.leader_progress
    if replica is None:
        return None
    end, now_ms = partition.end_offset, partition.now_ms()
    followers = tuple(
        FollowerSample(node, UNKNOWN, (now_ms - copy.caught_up_ms) / 1000)
        if copy.durable_end == UNKNOWN
        else FollowerSample(
            node,
            max(0, end - copy.durable_end),
            max(0.0, now_ms - copy.caught_up_ms) / 1000 if copy.durable_end < end else 0.0,
        )
        for node, copy in replica.followers().items()
    )
    adding = () if state is None else state.adding
    missing = replica.followers().keys() - replica.in_sync - {*adding}
    is_reassigned = state is not None and reassignment.is_reassigned(state)
    return LeaderSample(bool(missing), replica.is_under_min_isr, followers, is_reassigned)


def problems(broker: RunningBroker) -> Iterator[Problem]:
    """Return the problems of the cluster session because of which `/health/ready` reports this broker as not ready."""
    cluster = broker.services.cluster
    if cluster is None or not broker.is_ready() or cluster.is_session_valid():
        return
    if broker.services.topics.state.failure is not None:
        detail = "this broker released its session because it no longer receives metadata; restart it"
    elif cluster.session() is None:
        detail = "this broker has no session: it leads nothing, and is trying to register"
    else:
        ago_s = _renewed_ago_s(cluster.session(), broker.services.clock.monotonic())
        detail = (
            f"etcd has not renewed the session for {ago_s:.1f} s: "
            f"another broker may lead the partitions, so nothing is acknowledged"
        )
    yield Problem("session_not_held", detail)


def warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return the problems of the cluster that an operator should know although this broker works."""
    cluster = broker.services.cluster
    if cluster is None:
        return
    session = cluster.session()
    if session is not None and cluster.is_session_valid():
        ago_s = _renewed_ago_s(session, broker.services.clock.monotonic())
        if ago_s > RENEWALS_MISSED_MAX * RENEW_FRACTION * session.ttl_s:
            yield Problem("etcd_unresponsive", f"etcd has not renewed the session for {ago_s:.1f} s")
    if (member := broker.etcd_member) is not None and not member.is_running:
        yield Problem("etcd_member_down", "this broker's etcd member is not running; it is being restarted")
    yield from _replicas(broker)


def _replicas(broker: RunningBroker) -> Iterator[Problem]:
    node_id = broker.services.settings.node_id
    not_in_sync, under_min = [], []
    for topic in tuple(broker.services.topics.state.topics.values()):
        for index, one in enumerate(topic.partitions):
            if node_id in one.replicas and node_id not in (*one.isr, *one.adding):
                not_in_sync.append(f"{topic.name}-{index}")
            elif one.leader == node_id and len(one.isr) < min(
                broker.services.topics.settings_of(topic).min_insync_replicas, len(one.replicas)
            ):
                under_min.append(f"{topic.name}-{index}")
    if not_in_sync:
        yield Problem(
            "replicas_not_in_sync",
            f"replicas on this broker that are not in sync: {_join_names(not_in_sync)}",
        )
    if under_min:
        yield Problem(
            "under_min_isr",
            f"led here, and acks=all is rejected because too few replicas are in sync: {_join_names(under_min)}",
        )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - PARTITIONS_LISTED_MAX} more" if len(names) > PARTITIONS_LISTED_MAX else ""
    return ", ".join(names[:PARTITIONS_LISTED_MAX]) + more


def _renewed_ago_s(session: Session | None, now: float) -> float:
    return 0.0 if session is None else max(0.0, now - session.renewed_at)


def _counter(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "counter", meaning, tuple(labels.items()), value)


def _gauge(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "gauge", meaning, tuple(labels.items()), value)
