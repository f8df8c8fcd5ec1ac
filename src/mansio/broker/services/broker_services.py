"""The services of one broker. All protocols call the same services, so that they have the same rules and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
    from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
    from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
    from mansio.broker.coordinator.share.share_coordinator import ShareCoordinator
    from mansio.broker.coordinator.share.share_partition_manager import SharePartitionManager
    from mansio.broker.features.delays.delay_service import DelayService
    from mansio.broker.features.delays.schedule_service import ScheduleService
    from mansio.broker.maintenance.log_cleaner import LogCleaner
    from mansio.broker.maintenance.log_scrubber import LogScrubber
    from mansio.broker.maintenance.retention import RetentionManager
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.acls import AclService
    from mansio.broker.services.api_keys import ApiKeyService
    from mansio.broker.services.audit.audit_service import AuditService
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.broker_authenticator import BrokerAuthenticator
    from mansio.broker.services.cluster import ClusterDescriptionService, ClusterServices
    from mansio.broker.services.configs import ConfigService
    from mansio.broker.services.delegation_tokens import DelegationTokenService
    from mansio.broker.services.elections import ElectionService
    from mansio.broker.services.fetch import FetchService
    from mansio.broker.services.group_explanations.explanation_service import ExplanationService
    from mansio.broker.services.group_explanations.fact_collector import FactCollector
    from mansio.broker.services.groups import GroupService
    from mansio.broker.services.health import HealthService
    from mansio.broker.services.hot_partitions import HotPartitionService
    from mansio.broker.services.log_dirs import LogDirService
    from mansio.broker.services.log_ins import LogInService
    from mansio.broker.services.password_checks import PasswordChecker
    from mansio.broker.services.produce import ProduceService
    from mansio.broker.services.publish_records import PublishService
    from mansio.broker.services.quotas import QuotaService
    from mansio.broker.services.reassignments import ReassignmentService
    from mansio.broker.services.record_search import RecordSearchService
    from mansio.broker.services.records import RecordService
    from mansio.broker.services.schema_registry import SchemaRegistryService
    from mansio.broker.services.share_groups.leases import LeaseService
    from mansio.broker.services.share_groups.range_leases import RangeLeaseService
    from mansio.broker.services.share_groups.receive_records import ReceiveService
    from mansio.broker.services.share_groups.share import ShareService
    from mansio.broker.services.share_groups.share_offsets import ShareOffsetService
    from mansio.broker.services.sqs_access_keys import SqsAccessKeyService
    from mansio.broker.services.statistics import Statistics
    from mansio.broker.services.token_checks import TokenChecker
    from mansio.broker.services.topic_admin import TopicAdminService
    from mansio.broker.services.trace_service import TraceService
    from mansio.broker.services.transactions.marker_service import TransactionMarkerService
    from mansio.broker.services.transactions.transaction_service import TransactionService
    from mansio.broker.services.users import UserService
    from mansio.broker.topics.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.metadata.producer_ids import ProducerIdAllocator
    from mansio.ports import Background, Clock, Scheduler


@dataclass(frozen=True, slots=True)
class BrokerServices:
    """The services and managers of one broker that protocol handlers call. One instance per broker, created at its
    start."""

    settings: Settings
    clock: Clock
    scheduler: Scheduler
    request_thread: Background
    """Decodes large requests and encodes their responses; other threads may be busy for seconds."""
    statistics: Statistics
    partitions: PartitionSet
    produce: ProduceService
    publish: PublishService
    fetch: FetchService
    records: RecordService
    delays: DelayService
    schedules: ScheduleService
    producer_ids: ProducerIdAllocator
    topics: TopicService
    topic_admin: TopicAdminService
    log_dirs: LogDirService
    quotas: QuotaService
    authorization: Authorization
    acls: AclService
    audit: AuditService
    users: UserService
    sqs_access_keys: SqsAccessKeyService
    delegation_tokens: DelegationTokenService
    api_keys: ApiKeyService
    passwords: PasswordChecker
    tokens: TokenChecker | None
    """None if tokens are not accepted."""
    log_ins: LogInService
    configs: ConfigService
    group_coordinator: GroupCoordinator
    group_service: GroupService
    group_configs: GroupConfigManager
    group_facts: FactCollector
    explanations: ExplanationService
    share_service: ShareService
    share_offsets: ShareOffsetService
    receive: ReceiveService
    leases: LeaseService
    range_leases: RangeLeaseService
    share_partition_manager: SharePartitionManager
    share_coordinator: ShareCoordinator
    dead_letters: DeadLetterManager
    retention: RetentionManager
    log_cleaner: LogCleaner
    log_scrubber: LogScrubber
    cluster_description: ClusterDescriptionService
    elections: ElectionService
    reassignments: ReassignmentService
    traces: TraceService
    record_search: RecordSearchService
    transactions: TransactionService
    transaction_markers: TransactionMarkerService
    authenticator: BrokerAuthenticator
    health: HealthService
    hot_partitions: HotPartitionService
    schemas: SchemaRegistryService
    cluster: ClusterServices | None = None
    """None on a single node."""
