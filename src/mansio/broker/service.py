"""The one entry for every door.

The Kafka handlers, HTTP and whatever comes later translate their bytes into calls on what hangs here, and nothing
else: topics, records, groups. So every door has the same rules and the same errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.clustering import Clustering
    from mansio.broker.compactor import Compactor
    from mansio.broker.coordinators.group_settings import GroupConfigs
    from mansio.broker.coordinators.groups import GroupCoordinator
    from mansio.broker.etcd_member.member import EtcdMember
    from mansio.broker.partition import Partition
    from mansio.broker.partitions import PartitionSet
    from mansio.broker.quotas import Quotas
    from mansio.broker.records import RecordService
    from mansio.broker.retention import RetentionKeeper
    from mansio.broker.server import Server
    from mansio.broker.topics import TopicAdmin
    from mansio.cluster.controller import Controller
    from mansio.config import Settings
    from mansio.ports import Clock, Scheduler


class Service:
    """What one broker can do, by noun."""

    __slots__ = (
        "broker_epoch_of",
        "clock",
        "cluster",
        "compactor",
        "controller",
        "etcd_member",
        "group_configs",
        "groups",
        "partitions",
        "quotas",
        "ready",
        "records",
        "retention",
        "scheduler",
        "server",
        "settings",
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
        topics: TopicAdmin,
        groups: GroupCoordinator,
        quotas: Quotas,
        statistics: Statistics | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler
        self.partitions = partitions
        self.records = records
        self.topics = topics
        self.groups = groups
        self.quotas = quotas
        self.statistics = statistics or Statistics(clock)
        self.server: Server | None = None
        self.retention: RetentionKeeper | None = None
        self.compactor: Compactor | None = None
        self.group_configs: GroupConfigs | None = None
        self.broker_epoch_of: Callable[[int], int] | None = None
        """In a cluster: the epoch of the session that a broker has now, 0 for none."""
        self.controller: Controller | None = None
        """In a cluster: what carries out elections."""
        self.cluster: Clustering | None = None
        """In a cluster: this broker's session, replicas and controller."""
        self.etcd_member: EtcdMember | None = None
        """The member of etcd that this broker runs, if it does."""
        self.ready = False
        """True from the moment every port accepts until the broker begins to stop."""

    def partition(self, topic: str, index: int) -> Partition:
        """The partition, or raise `UnknownTopicOrPartition`."""
        return self.partitions.find(topic, None, index)
