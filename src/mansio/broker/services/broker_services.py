"""The one entry for every door.

The Kafka handlers, HTTP and whatever comes later translate their bytes into calls on what hangs here, and nothing
else: topics, records, groups. So every door has the same rules and the same errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.services.groups import GroupService
from mansio.broker.services.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.api.kafka.server.listener import Server
    from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.share_coordinator import ShareCoordinator
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.maintenance.log_cleaner import LogCleaner
    from mansio.broker.maintenance.retention import RetentionManager
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.services.records import RecordService
    from mansio.broker.services.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.metadata.controller.controller import Controller
    from mansio.node.cluster_member import ClusterMember
    from mansio.node.etcd_member.member import EtcdMember
    from mansio.ports import Clock, Scheduler


class BrokerServices:
    """What one broker can do, by noun."""

    __slots__ = (
        "broker_epoch_of",
        "clock",
        "cluster",
        "controller",
        "dead_letters",
        "etcd_member",
        "group_configs",
        "group_service",
        "groups",
        "log_cleaner",
        "partitions",
        "quotas",
        "ready",
        "records",
        "retention",
        "scheduler",
        "server",
        "settings",
        "share_state",
        "shares",
        "statistics",
        "topics",
    )

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        scheduler: Scheduler,
        partitions: PartitionSet,
        records: RecordService,
        topics: TopicService,
        groups: GroupCoordinator,
        quotas: QuotaService,
        shares: SharePartitionManager,
        statistics: Statistics | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler
        self.partitions = partitions
        self.records = records
        self.topics = topics
        self.groups = groups
        self.group_service = GroupService(groups, node_id=settings.node_id)
        self.quotas = quotas
        self.shares = shares
        self.statistics = statistics or Statistics(clock)
        self.server: Server | None = None
        self.retention: RetentionManager | None = None
        self.log_cleaner: LogCleaner | None = None
        self.group_configs: GroupConfigManager | None = None
        self.dead_letters: DeadLetterManager | None = None
        self.share_state: ShareCoordinator | None = None
        """Where the state of share groups is kept, here or on other brokers."""
        self.broker_epoch_of: Callable[[int], int] | None = None
        """In a cluster: the epoch of the session that a broker has now, 0 for none."""
        self.controller: Controller | None = None
        """In a cluster: what carries out elections."""
        self.cluster: ClusterMember | None = None
        """In a cluster: this broker's session, replicas and controller."""
        self.etcd_member: EtcdMember | None = None
        """The member of etcd that this broker runs, if it does."""
        self.ready = False
        """True from the moment every port accepts until the broker begins to stop."""

    def partition(self, topic: str, index: int) -> Partition:
        """The partition, or raise `UnknownTopicOrPartition`."""
        return self.partitions.find(topic, None, index)
