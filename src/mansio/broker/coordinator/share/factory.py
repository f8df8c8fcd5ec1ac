"""What share partitions need of their broker: its partitions, the settings of groups, and where their state is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
from mansio.config.share_group_config import (
    BY_DURATION,
    EARLIEST,
    OFFSET_RESET,
    duration_ms,
    in_force,
    share_settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.broker.coordinator.share.dependencies import DeadLetterSink
    from mansio.broker.coordinator.share.share_persister import SharePersister
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.ports import Clock
    from mansio.state.share_partition.types import ShareSettings

    Overrides = Callable[[str], Mapping[str, str]]


def share_partitions(
    settings: Settings,
    host_ports: HostPorts,
    partitions: PartitionSet,
    overrides: Overrides,
    persister: SharePersister,
    dead_letters: DeadLetterSink | None = None,
) -> SharePartitionManager:
    """Those of one broker. `overrides`: the settings a group has of its own."""

    def in_force_for(group: str, partition: Partition) -> ShareSettings:
        takes_dead_letters = partition.settings.takes_dead_letters
        return share_settings(overrides(group), takes_dead_letters=takes_dead_letters)

    return SharePartitionManager(
        find=partitions.find,
        persister=persister,
        settings=in_force_for,
        first_offset=lambda group, partition: first_offset(overrides(group), partition, host_ports.clock),
        clock=host_ports.clock,
        scheduler=host_ports.scheduler,
        random=host_ports.random,
        sessions_max=settings.group_share_max_share_sessions,
        dead_letters=dead_letters,
    )


def first_offset(configs: Mapping[str, str], partition: Partition, clock: Clock) -> int:
    """Where a group begins in a partition it never read (`share.auto.offset.reset`)."""
    reset: str = in_force(OFFSET_RESET, configs)
    if reset == EARLIEST:
        return partition.start_offset
    end = partition.high_watermark
    if reset.startswith(BY_DURATION):
        since_ms = clock.wall_ms() - duration_ms(reset.removeprefix(BY_DURATION))
        found = partition.offset_at_timestamp(max(since_ms, 0), end)
        return end if found is None else found[0]
    return end
