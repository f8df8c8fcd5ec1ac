"""What a broker of a cluster tells of it: numbers for `/metrics`, and what `/health/ready` says against it.

Each broker tells of what it leads and of its own session, so sums over all brokers are those of the cluster. Two are
each broker's view of the whole (`offline_partitions`, `brokers`): take the largest, not the sum.

Always true: labels are broker numbers, of which a cluster has few, and words of this program; nothing is told by a
single broker, which has no part in any of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.http.broker_stats import FollowerSample, LeaderSample, Measurement, Problem
from mansio.metadata.model import FENCED, NO_LEADER
from mansio.metadata.session import RENEW_FRACTION
from mansio.state.replica import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.broker.partition.partition import Partition
    from mansio.metadata.session import Session

RENEWALS_MISSED_MAX: Final = 3
"""So many renewals in a row that were not answered, and somebody should look at etcd."""

PARTITIONS_LISTED_MAX: Final = 3


def measurements(broker: RunningBroker) -> Iterator[Measurement]:
    """All that takes no look at each open partition."""
    cluster = broker.services.cluster
    if cluster is None:
        return
    state, now = broker.services.topics.state, broker.services.clock.monotonic()
    yield _gauge("brokers", "Brokers that have a session, as this one sees it.", len(state.brokers))
    yield _gauge(
        "fenced_brokers",
        "Brokers that are registered and have no session, as this one sees it.",
        sum(one.state == FENCED for one in state.registrations.values()),
    )
    yield _gauge(
        "offline_partitions",
        "Partitions of the whole cluster without a leader, as this broker sees it.",
        sum(one.leader == NO_LEADER for topic in state.topics.values() for one in topic.partitions),
    )
    yield _gauge("controller_active", "1 on the broker that decides who leads.", cluster.controller.is_active)
    for cause, times in cluster.controller.elections.items():
        meaning = "Changes of a partition's leader that this broker decided, by cause."
        yield _counter("leader_elections", meaning, times, cause=cause)
    isr_manager = cluster.isr_manager
    yield _counter(
        "isr_shrinks", "In-sync sets that lost a member, of what is led here.", isr_manager.shrinks
    )
    meaning = "In-sync sets that gained a member, of what is led here."
    yield _counter("isr_expansions", meaning, isr_manager.expansions)
    yield _gauge(
        "quarantined_replicas",
        "Replicas here that could not be copied when last tried.",
        sum(1 for _ in cluster.fetcher_manager.troubles()),
    )
    yield _gauge(
        "session_held", "1 while this broker is sure to have its session.", cluster.is_session_valid()
    )
    yield _gauge(
        "session_renewal_age_seconds",
        "Time since the last renewal of this broker's session that etcd answered; 0 without a session.",
        _renewed_ago_s(cluster.session(), now),
    )
    yield _counter("sessions_lost", "Sessions that ended although the broker ran.", cluster.sessions_lost())
    yield from _etcd(broker)


def _etcd(broker: RunningBroker) -> Iterator[Measurement]:
    cluster = broker.services.cluster
    if cluster is not None and cluster.store_counts is not None:
        counts = cluster.store_counts()
        yield _counter("etcd_calls", "Calls to etcd that were answered.", counts.answered)
        for outcome, times in counts.failed.items():
            meaning = "Attempts to call etcd that failed, by what is known of them."
            yield _counter("etcd_errors", meaning, times, outcome=outcome)
        meaning = "Transactions of etcd whose answer was lost; each is read back."
        yield _counter("etcd_ambiguous_transactions", meaning, counts.ambiguous)
    if (member := broker.etcd_member) is not None:
        yield _gauge("etcd_member_running", "1 while this broker's own member of etcd runs.", member.running)
        meaning = "Times this broker's own member of etcd ended and was started again."
        yield _counter("etcd_member_restarts", meaning, member.restarts)


def led(partition: Partition) -> LeaderSample | None:
    """What this broker knows of a partition as its leader; None where it is not."""
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
    return LeaderSample(len(replica.in_sync) < 1 + len(followers), replica.is_under_min_isr, followers)


def problems(broker: RunningBroker) -> Iterator[Problem]:
    """What keeps this broker from its work."""
    cluster = broker.services.cluster
    if cluster is None or not broker.is_ready() or cluster.is_session_valid():
        return
    if broker.services.topics.state.failure is not None:
        told = (
            "this broker gave its session back, because it does not see the metadata any more: start it again"
        )
    elif cluster.session() is None:
        told = "this broker has no session: it leads nothing, and tries to get one"
    else:
        ago_s = _renewed_ago_s(cluster.session(), broker.services.clock.monotonic())
        told = (
            f"etcd has not renewed the session for {ago_s:.1f} s: "
            f"another broker may lead the partitions, so nothing is acknowledged"
        )
    yield Problem("session_not_held", told)


def warnings(broker: RunningBroker) -> Iterator[Problem]:
    """What somebody should look at."""
    cluster = broker.services.cluster
    if cluster is None:
        return
    session = cluster.session()
    if session is not None and cluster.is_session_valid():
        ago_s = _renewed_ago_s(session, broker.services.clock.monotonic())
        if ago_s > RENEWALS_MISSED_MAX * RENEW_FRACTION * session.ttl_s:
            yield Problem("etcd_unresponsive", f"etcd has not renewed the session for {ago_s:.1f} s")
    if (member := broker.etcd_member) is not None and not member.running:
        yield Problem(
            "etcd_member_down", "this broker's own member of etcd does not run; it is started again"
        )
    yield from _replicas(broker)


def _replicas(broker: RunningBroker) -> Iterator[Problem]:
    node_id = broker.services.settings.node_id
    behind, alone = [], []
    for topic in tuple(broker.services.topics.state.topics.values()):
        for index, one in enumerate(topic.partitions):
            if node_id in one.replicas and node_id not in one.isr:
                behind.append(f"{topic.name}-{index}")
            elif one.leader == node_id and len(one.isr) < min(
                broker.services.topics.settings_of(topic).min_insync_replicas, len(one.replicas)
            ):
                alone.append(f"{topic.name}-{index}")
    if behind:
        yield Problem(
            "replicas_not_in_sync", f"replicas of this broker that are not in sync: {_named(behind)}"
        )
    if alone:
        yield Problem(
            "under_min_isr",
            f"led here, and acks=all is refused because too few replicas are in sync: {_named(alone)}",
        )


def _named(places: list[str]) -> str:
    more = f" and {len(places) - PARTITIONS_LISTED_MAX} more" if len(places) > PARTITIONS_LISTED_MAX else ""
    return ", ".join(places[:PARTITIONS_LISTED_MAX]) + more


def _renewed_ago_s(session: Session | None, now: float) -> float:
    return 0.0 if session is None else max(0.0, now - session.renewed_at)


def _counter(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "counter", meaning, tuple(labels.items()), value)


def _gauge(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "gauge", meaning, tuple(labels.items()), value)
