"""Settings of the group coordinator; a comment names the Kafka setting with the same meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mansio.config.settings import Settings


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits and timeouts of the group coordinator.

    The initial rebalance delay is 200 ms (Kafka: 3 s): it saves rebalances only when many members of a new group start
    at about the same time, and every other group would wait three seconds at every start.
    """

    session_timeout_ms_min: int = 6_000  # group.min.session.timeout.ms
    session_timeout_ms_max: int = 30 * 60_000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 200  # group.initial.rebalance.delay.ms
    members_max: int = 1_000  # group.max.size
    groups_max: int = 100_000
    members_bytes_max: int = 256 << 20  # memory for the metadata of all members of classic groups
    member_bytes_max: int = 4 << 20  # memory for the metadata of one member of a classic group
    consumer_session_timeout_ms: int = 45_000  # group.consumer.session.timeout.ms
    consumer_heartbeat_interval_ms: int = 500  # group.consumer.heartbeat.interval.ms
    consumer_assignors: tuple[str, ...] = ("uniform", "range")  # group.consumer.assignors
    share_session_timeout_ms: int = 45_000  # group.share.session.timeout.ms
    share_heartbeat_interval_ms: int = 5_000  # group.share.heartbeat.interval.ms
    share_members_max: int = 200  # group.share.max.size
    offset_metadata_max_bytes: int = 4_096  # offset.metadata.max.bytes
    offsets_retention_ms: int = 7 * 24 * 60 * 60_000  # offsets.retention.minutes
    offsets_retention_check_interval_ms: int = 10 * 60_000  # offsets.retention.check.interval.ms
    stall_ms: int = 1_000  # a timer that fires this late shows that this process was stalled


def group_settings(settings: Settings) -> GroupSettings:
    """Return the group coordinator's settings, taken from the broker's settings."""
    return GroupSettings(
        session_timeout_ms_min=settings.group_min_session_timeout_ms,
        session_timeout_ms_max=settings.group_max_session_timeout_ms,
        initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        members_max=settings.group_max_size,
        offset_metadata_max_bytes=settings.offset_metadata_max_bytes,
        offsets_retention_ms=settings.offsets_retention_ms,
        consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
        consumer_heartbeat_interval_ms=settings.group_consumer_heartbeat_interval_ms,
        consumer_assignors=tuple(settings.group_consumer_assignors.split(",")),
        share_session_timeout_ms=settings.group_share_session_timeout_ms,
        share_heartbeat_interval_ms=settings.group_share_heartbeat_interval_ms,
        share_members_max=settings.group_share_max_size,
    )
