"""Metrics of a running broker, by component.

Each function reads one component's counters; `METRIC_FUNCTIONS` lists them. In a cluster each broker reports the share
partitions that it leads, so that sums over all brokers are those of the cluster.

Invariant: names include their unit; label values come from tables of this program, never from clients; no function
reads single records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.api.http import metrics_cluster, metrics_transactions
from mansio.api.http.broker_stats import Distribution, Measurement
from mansio.broker.features.deduplication.deduplicator import Deduplicator
from mansio.broker.features.delays.delay_feature import DelayFeature
from mansio.broker.features.holds.retention_hold_feature import RetentionHoldFeature
from mansio.broker.services.health import Problem
from mansio.errors import BY_KAFKA_CODE
from mansio.host.item_turns import Work
from mansio.logs import COUNTS
from mansio.net.tls.handshake_failures import FailureReason
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.broker.services.statistics import Histogram


ERROR_NAMES: Final = {code: kind.__name__ for code, kind in BY_KAFKA_CODE.items()}


def _records(broker: RunningBroker) -> Iterator[Measurement]:
    produce, fetch = broker.services.produce, broker.services.fetch
    counts = produce.counters
    yield _counter("appended_batches", "Record batches appended to a log.", counts.appended_batches)
    yield _counter("appended_bytes", "Bytes of record batches appended to a log.", counts.appended_bytes)
    yield _counter("rejected_batches", "Record batches rejected with an error.", counts.rejected_batches)
    batch_processor = broker.services.partitions.batch_processor
    yield _counter(
        "recompressed_batches",
        "Record batches stored with another codec than they were sent with (compression.type).",
        batch_processor.recompressed_batch_count,
    )
    yield _gauge(
        "recompression_queue_bytes",
        "Bytes of batches that wait to be recompressed, decompressed.",
        batch_processor.queued_bytes,
    )
    yield _counter("fetches", "Fetch requests answered.", fetch.counters.fetches)
    yield _counter("fetched_bytes", "Bytes of records sent to consumers.", fetch.counters.fetched_bytes)
    yield _gauge("pending_produce_requests", "Produce requests waiting for a commit.", len(produce.pending))
    yield _gauge("parked_fetch_requests", "Fetch requests waiting for data.", len(fetch.parked))


def _requests(broker: RunningBroker) -> Iterator[Measurement]:
    for key, requests in broker.server.counters.requests.items():
        yield _counter("requests", "Kafka requests received.", requests, api=_api(key))
    for (key, code), times in tuple(broker.services.statistics.errors.items()):
        yield _counter(
            "request_errors",
            "Requests, or items of one, answered with an error.",
            times,
            api=_api(key),
            error=ERROR_NAMES.get(code, "Other"),
            code=str(code),
        )


def _slices(broker: RunningBroker) -> Iterator[Measurement]:
    scheduler, holds = broker.services.scheduler, broker.services.statistics.holds
    longest_s = {work.value: scheduler.slices.longest_s.get(work, 0.0) for work in Work}
    longest_s.update(holds.longest_s)
    for work, seconds in longest_s.items():
        yield _gauge(
            "event_loop_slice_max_seconds",
            "Longest time since the start for which work of a kind ran without letting other work run.",
            seconds,
            work=work,
        )


def _connections(broker: RunningBroker) -> Iterator[Measurement]:
    server = broker.server
    counts = server.counters
    yield _gauge("connections", "Open Kafka connections.", server.connection_count)
    yield _gauge("connections_limit", "Limit of Kafka connections.", broker.server.limits.max_connections)
    yield _counter("connections_accepted", "Kafka connections accepted.", counts.connections_accepted)
    for reason, times in tuple(counts.rejected_by_reason.items()):
        yield _counter("connections_rejected", "Kafka connections rejected.", times, reason=reason)
    for reason, times in tuple(counts.closed_by_reason.items()):
        yield _counter("connections_closed", "Kafka connections closed by this broker.", times, reason=reason)
    authenticator = broker.services.authenticator
    meaning = "Connections on which another broker has authenticated."
    yield _counter("broker_handshakes", meaning, authenticator.authenticated_count)
    for reason, times in authenticator.failure_counts.items():
        meaning = "Failed attempts to authenticate as a broker of the cluster."
        yield _counter("broker_handshakes_failed", meaning, times, reason=reason)
    meaning = "Requests that only brokers may send, refused because their sender is not the broker they name."
    yield _counter("inter_broker_requests_refused", meaning, authenticator.refused_request_count)
    yield from _authentications(broker)
    yield from _tls_handshakes(broker)
    yield _gauge("in_flight_bytes", "Memory of requests being received.", server.memory.held_bytes)
    yield _gauge(
        "in_flight_limit_bytes",
        "Limit of the memory of requests being received.",
        broker.services.settings.queued_max_request_bytes,
    )


def _authentications(broker: RunningBroker) -> Iterator[Measurement]:
    server, services = broker.server, broker.services
    meaning = "Times that a client has authenticated as a user; of HTTP and gRPC, each request."
    log_ins = services.log_ins
    yield _counter("authentications", meaning, server.counters.authentications + log_ins.accepted)
    for reason, failures in server.counters.authentication_failures.items():
        meaning = "Failed attempts of clients to authenticate, and sessions that ended."
        times = failures + log_ins.failures.get(reason, 0)
        yield _counter("authentications_failed", meaning, times, reason=reason)
    meaning = "Open Kafka connections whose clients have to authenticate first."
    yield _gauge("unauthenticated_connections", meaning, server.authentication.waiting_count)
    meaning = "Passwords of clients that were checked, without those that are remembered."
    yield _counter("password_checks", meaning, services.passwords.run_count)
    yield _gauge(
        "waiting_password_checks", "Passwords that wait to be checked.", services.passwords.waiting_count
    )
    yield _gauge("users", "Users of the cluster.", services.users.user_count)
    yield _gauge("acls", "Access control lists of the cluster.", services.acls.acl_count)
    yield _counter("audit_lines", "Lines of the audit.", services.audit.line_count)
    meaning = "Events and lines of the audit that were lost: too many at once, or a destination that failed."
    yield _counter("audit_lost", meaning, services.audit.lost_count)
    meaning = "Listeners that other machines reach and that do not authenticate their clients."
    yield _gauge("unprotected_listeners", meaning, len(services.settings.unprotected_listeners))


def _tls_handshakes(broker: RunningBroker) -> Iterator[Measurement]:
    acceptors = broker.server.acceptors
    meaning = "TLS handshakes of Kafka connections that were complete."
    yield _counter("tls_handshakes", meaning, sum(each.completed for each in acceptors))
    meaning = "Kafka connections whose TLS handshake failed."
    for reason in FailureReason:
        times = sum(each.failed[reason] for each in acceptors)
        yield _counter("tls_handshakes_failed", meaning, times, reason=reason)
    certificates = broker.certificates
    if certificates is not None:
        left_s = certificates.server_context.expires_s - broker.services.clock.wall_ms() / 1000
        meaning = "Time until the certificate of the listeners expires; negative afterwards."
        yield _gauge("tls_certificate_expiry_seconds", meaning, left_s)
    meaning = "Connections of all listeners that wait for their TLS handshake, but for gRPC."
    yield _gauge("waiting_tls_handshakes", meaning, broker.server.waiting_handshake_count)


def _groups(broker: RunningBroker) -> Iterator[Measurement]:
    states: dict[str, int] = {}
    members = 0
    for entry in tuple(broker.services.group_coordinator.store.entries.values()):
        states[str(entry.group.state)] = states.get(str(entry.group.state), 0) + 1
        members += entry.member_count
    for state, groups in states.items():
        yield _gauge("groups", "Consumer groups.", groups, state=state)
    yield _gauge("group_members", "Members of all consumer groups.", members)


def _age(broker: RunningBroker) -> Iterator[Measurement]:
    counts = broker.services.retention.counts
    yield _counter("retention_checks", "Retention checks of all partitions.", counts.checks)
    yield _counter("retention_failures", "Partitions whose retention check failed.", counts.failures)
    yield _counter("expired_segments", "Segments deleted by retention.", counts.segments)
    yield _counter("expired_records", "Offsets deleted by retention.", counts.records)
    yield _counter("expired_bytes", "Bytes of segments deleted by retention.", counts.size_bytes)


def _holds(broker: RunningBroker) -> Iterator[Measurement]:
    holds = broker.services.partitions.feature(RetentionHoldFeature).holds
    yield _gauge("retention_holds", "Retention holds: partitions, once per pipeline.", len(holds))
    yield _gauge(
        "holds_behind_log_start",
        "Retention holds whose pipeline is behind the log start.",
        sum(1 for _ in holds.released_holds()),
    )
    for reason, times in holds.released_counts.items():
        yield _counter(
            "released_holds",
            "Retention holds released by a limit or a full disk, by reason.",
            times,
            reason=reason,
        )


def _compaction(broker: RunningBroker) -> Iterator[Measurement]:
    counts = broker.services.log_cleaner.counts
    yield _counter("compaction_runs", "Successful compactions of one log.", counts.runs)
    yield _counter("compaction_failures", "Failed compactions.", counts.failed)
    yield _counter("compaction_read_bytes", "Bytes read by compaction.", counts.bytes_read)
    yield _counter("compaction_written_bytes", "Bytes written by compaction.", counts.bytes_written)
    yield _counter("compacted_records", "Records removed by compaction.", counts.records_dropped)
    yield _gauge(
        "compaction_max_dirty_ratio",
        "Largest fraction of a log that is not compacted yet.",
        broker.services.log_cleaner.dirty_ratio_max,
    )
    yield _gauge(
        "uncleanable_partitions",
        "Partitions that are no longer compacted because compaction failed.",
        len(broker.services.log_cleaner.uncleanable),
    )
    yield _counter("compaction_seconds", "Time spent on compaction, without pauses.", counts.work_seconds)


def _verification(broker: RunningBroker) -> Iterator[Measurement]:
    counts = broker.services.log_scrubber.counts
    yield _counter(
        "scrub_rounds", "Completed rounds of the scrubber over all closed segments.", counts.rounds
    )
    yield _counter("scrubbed_bytes", "Bytes read by the scrubber.", counts.read_bytes)
    yield _counter("scrub_damaged_ranges", "Damaged ranges found by the scrubber.", counts.damaged_ranges)
    yield _counter(
        "scrub_unreadable_segments", "Segments that the scrubber could not read.", counts.unreadable_segments
    )
    yield _counter(
        "verified_bytes",
        "Bytes verified before their first delivery, off the event loop.",
        broker.services.partitions.verifier.checked_bytes,
    )


def _hot_partitions(broker: RunningBroker) -> Iterator[Measurement]:
    hot = broker.services.hot_partitions
    yield _gauge(
        "hot_partitions",
        "Partitions that this broker leads and that take in far more than the others of their topics.",
        hot.count,
    )
    yield _counter(
        "hot_partition_sampled_batches",
        "Batches of hot partitions of which keys were read.",
        hot.sampled_batch_count,
    )


def _quotas(broker: RunningBroker) -> Iterator[Measurement]:
    meaning = "New connections closed because their address exceeds connection_creation_rate."
    yield _counter("connections_throttled", meaning, broker.server.throttled_connection_count)
    counts = broker.services.quotas.counters
    for api, answers, paused_ms in (
        ("produce", counts.produce_throttled, counts.produce_throttled_ms),
        ("fetch", counts.fetch_throttled, counts.fetch_throttled_ms),
        ("controller_mutation", counts.mutation_throttled, counts.mutation_throttled_ms),
    ):
        yield _counter("throttled_requests", "Throttled requests.", answers, api=api)
        yield _counter("throttle_seconds", "Sum of throttle times.", paused_ms / 1000, api=api)


def _log_lines(_broker: RunningBroker) -> Iterator[Measurement]:
    for level, lines in COUNTS.lines.items():
        yield _counter("log_lines", "Log lines written.", lines, level=level)
    yield _counter(
        "log_lines_suppressed",
        "Log lines suppressed by rate limiting.",
        COUNTS.held_back,
    )


def _storage(broker: RunningBroker) -> Iterator[Measurement]:
    yield _counter(
        "corrupt_batches",
        "Damaged batches found while reading; a damaged value is detected by the client.",
        broker.services.partitions.storage_health.corrupt_batches,
    )
    yield _counter(
        "unreadable_batches",
        "Intact batches whose content readers could not read and stepped over; a client has stored them so.",
        broker.services.partitions.storage_health.unreadable_batches,
    )
    truncations, truncated_bytes = (
        broker.services.partitions.storage_health.truncations,
        broker.services.partitions.storage_health.truncated_bytes,
    )
    yield _counter(
        "log_truncations", "Logs truncated at start because their end was incomplete.", truncations
    )
    yield _counter("log_truncated_bytes", "Bytes truncated at start.", truncated_bytes)


def distributions(broker: RunningBroker) -> Iterator[Distribution]:
    """Return the latency histograms of the broker."""
    statistics = broker.services.statistics
    yield _distribution(
        "produce_acknowledge_seconds",
        "Time from the append of a batch with acks=all to its acknowledgement; one batch in 16 is sampled.",
        statistics.acknowledge_latency,
    )
    for waited, histogram in (("false", statistics.fetch_latency), ("true", statistics.parked_fetch_latency)):
        yield _distribution(
            "fetch_seconds",
            "Time from a fetch request to its response, by whether it waited for data; one in 16 is sampled.",
            histogram,
            waited=waited,
        )
    yield _distribution(
        "fsync_duration_seconds",
        "Duration of one fsync, shared by all batches that waited when it began.",
        statistics.flush_latency,
    )


def _api(key: int) -> str:
    return ApiKey(key).name.lower()


def _counter(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "counter", meaning, tuple(labels.items()), value)


def _gauge(name: str, meaning: str, value: float, **labels: str) -> Measurement:
    return Measurement(name, "gauge", meaning, tuple(labels.items()), value)


def _distribution(name: str, meaning: str, histogram: Histogram, **labels: str) -> Distribution:
    return Distribution(
        name, meaning, tuple(labels.items()), histogram.bounds, tuple(histogram.counts), histogram.total_s
    )


def _share_groups(broker: RunningBroker) -> Iterator[Measurement]:
    """Return metrics of share groups: leased records and dead letters."""
    share_partitions = [
        share_partition
        for share_partition in broker.services.share_partition_manager.share_partitions()
        if share_partition.is_ready
    ]
    yield _gauge(
        "share_partitions", "Share partitions in use on this broker, one per group.", len(share_partitions)
    )
    leased = sum(share_partition.state_machine.leased_count for share_partition in share_partitions)
    yield _gauge("share_leased_records", "Records leased by members of share groups.", leased)
    yield from _share_priorities(share_partitions)
    limited = [
        each.state_machine.limited_keys() for each in share_partitions if each.state_machine.has_key_limits
    ]
    for limit, keys in (
        ("leases", sum(each.at_lease_limit for each in limited)),
        ("rate", sum(each.at_rate_limit for each in limited)),
    ):
        yield _gauge(
            "share_limited_keys", "Group keys whose records wait for a limit by key.", keys, limit=limit
        )
    scans = [each.fair_scan for each in share_partitions if each.fair_scan is not None]
    isolated = sum(scan.index.isolated_count for scan in scans)
    yield _gauge("share_isolated_keys", "Group keys with a backlog that fair groups have isolated.", isolated)
    yield _gauge(
        "share_sessions",
        "Members of share groups that fetch from this broker.",
        len(broker.services.share_partition_manager.sessions),
    )
    yield _gauge(
        "share_parked_fetches",
        "Fetches of share groups waiting for records.",
        len(broker.services.share_partition_manager.parked),
    )
    manager = broker.services.dead_letters
    counts = manager.counts
    yield _gauge(
        "dead_letters_pending",
        "Dead-lettered records not yet written to the dead-letter topic.",
        manager.waiting_record_count,
    )
    yield _counter("dead_letters_written", "Records written to a dead-letter topic.", counts.written_count)
    yield _counter(
        "dead_letter_values_omitted",
        "Dead letters written without their value because it was too large for the topic.",
        counts.omitted_count,
    )
    yield _counter(
        "dead_letter_failures",
        "Failed writes of dead letters; they are retried.",
        counts.failure_count,
    )


def _share_priorities(share_partitions: Sequence[SharePartitionLeader]) -> Iterator[Measurement]:
    """Return metrics of the records of each priority, if a topic in use has priorities."""
    leased: dict[str, int] = {}
    lag: dict[str, int] = {}
    for each in share_partitions:
        names = {} if each.index is None else each.index.names
        for name in names.values():
            leased.setdefault(name, 0)
            lag.setdefault(name, 0)
        if (own := names.get(each.key.number)) is not None:
            counts = each.state_machine.counts(each.now_ms())
            leased[own] += counts.leased
            lag[own] += counts.lag
    for name in leased:
        yield _gauge(
            "share_priority_leased_records",
            "Records of each priority leased by members of share groups.",
            leased[name],
            priority=name,
        )
        yield _gauge(
            "share_priority_lag_records",
            "Records of each priority that the share groups in use have not processed.",
            lag[name],
            priority=name,
        )


def dead_letter_warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return a warning for each share partition whose dead letters could not be written at the last attempt."""
    failing = broker.services.dead_letters.failing_share_partitions()
    if failing:
        records = sum(waiting for _, waiting, _ in failing)
        key, _, reason = failing[0]
        more = f" and {len(failing) - 1} more partitions" if len(failing) > 1 else ""
        yield Problem(
            "dead_letters_pending",
            f"{records:,} dead letters wait: group {key.group!r}, partition {key.partition}{more}: {reason}",
        )


PENDING_WARNING_FRACTION: Final = 0.8
"""Fraction of a partition's limits on pending records, or on deduplication ids, from which a warning is reported."""


def _delays(broker: RunningBroker) -> Iterator[Measurement]:
    yield _counter(
        "delayed_records_delivered",
        "Delayed records, and records of schedules, delivered since the start.",
        broker.services.partitions.feature(DelayFeature).delivery.delivered_count,
    )


def delay_warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return a warning for each partition whose pending records use most of its limits, beyond which the broker refuses
    delayed records."""
    for partition in tuple(broker.services.partitions):
        found = broker.services.delays.sample(partition)
        if found is not None and found.fraction >= PENDING_WARNING_FRACTION:
            yield Problem(
                "delayed_records_near_limit",
                f"{partition.name}: {found.count:,} delayed records ({found.size_bytes:,} bytes) are pending, "
                f"{found.fraction:.0%} of mansio.delay.pending.records.max or .bytes.max",
                partition.topic,
                partition.index,
            )


def _deduplication(broker: RunningBroker) -> Iterator[Measurement]:
    partitions = broker.services.partitions
    found = [one for each in tuple(partitions) if (one := each.find_feature(Deduplicator)) is not None]
    yield _gauge(
        "deduplication_ids",
        "Deduplication ids that are remembered, in partitions of which this broker has a replica.",
        sum(one.view.window.count for one in found),
    )
    yield _counter(
        "deduplication_repeats",
        "Records that were not stored because they were repeats, since the start.",
        sum(one.repeat_count for one in found),
    )


def _traces(broker: RunningBroker) -> Iterator[Measurement]:
    writer = broker.services.traces.reader.writer
    meaning = "Blocks of the trace of records that this broker has written: about one a second while something happens."
    yield _counter("trace_blocks", meaning, writer.block_count)
    yield _counter("trace_rows", "Rows in these blocks.", writer.row_count)
    meaning = "Rows that were not written, because the trace could not be written in time. Timelines tell their time."
    yield _counter("trace_dropped_rows", meaning, writer.dropped_count)


def deduplication_warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return a warning for each partition with so many deduplication ids that the broker will soon refuse others."""
    partitions = broker.services.partitions
    for partition in tuple(partitions):
        deduplicator = partition.find_feature(Deduplicator)
        if deduplicator is None or not partition.is_leader:
            continue
        count, ids_max = deduplicator.count_ids(), partition.settings.dedup_ids_max
        if count >= PENDING_WARNING_FRACTION * ids_max:
            yield Problem(
                "deduplication_ids_near_limit",
                f"{partition.name}: {count:,} deduplication ids are remembered, {count / ids_max:.0%} of"
                " mansio.dedup.ids.max",
                partition.topic,
                partition.index,
            )


def schedule_warnings(broker: RunningBroker) -> Iterator[Problem]:
    """Return a warning for each partition with schedules that cannot fire."""
    for partition in tuple(broker.services.partitions):
        found = broker.services.schedules.sample(partition)
        if found is not None and found.failing:
            name, reason = found.failing[0]
            more = f" (and {len(found.failing) - 1} more)" if len(found.failing) > 1 else ""
            yield Problem(
                "schedule_cannot_fire",
                f"{partition.name}: schedule {name!r}{more}: {reason}",
                partition.topic,
                partition.index,
            )


METRIC_FUNCTIONS: Final[tuple[Callable[[RunningBroker], Iterator[Measurement]], ...]] = (
    _records,
    _storage,
    _requests,
    _slices,
    _connections,
    _groups,
    _age,
    _holds,
    _compaction,
    _verification,
    _hot_partitions,
    _quotas,
    _log_lines,
    _traces,
    _delays,
    _deduplication,
    metrics_transactions.measurements,
    metrics_cluster.measurements,
    _share_groups,
)
