"""Broker runtime: metadata, logs, coordinators and maintenance of one broker, without sockets.

It composes all parts of a broker that use only `mansio.ports`, and no socket, thread or process directly. `Broker` runs
it on a real host and adds the listener; the simulator runs it on a simulated host.

Invariant: a part is closed after the parts that use it, because each step of `open` pushes a close function on the
caller's exit stack.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio import logs
from mansio.broker.coordinator.checkpoint import CheckpointStorage
from mansio.broker.coordinator.group.fact_requests import FactRequests
from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator
from mansio.broker.coordinator.group.settings import group_settings
from mansio.broker.coordinator.group.share_groups import ShareStateOperations
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.coordinator.registry.schema_checks import SchemaChecks
from mansio.broker.coordinator.registry.schema_coordinator import SchemaCoordinator
from mansio.broker.coordinator.registry.schema_uses import SchemaUses
from mansio.broker.coordinator.share.dead_letter_manager import create_dead_letter_manager
from mansio.broker.coordinator.share.dead_letter_resumption import DeadLetterResumption
from mansio.broker.coordinator.share.lease_forwarder import LeaseForwarder
from mansio.broker.coordinator.share.share_coordinator import BootIdFile, ShareCoordinator
from mansio.broker.coordinator.share.share_partition_manager import create_share_partition_manager
from mansio.broker.coordinator.share.state_client import RemoteStateClients
from mansio.broker.coordinator.share.state_store import ShareStateSettings
from mansio.broker.coordinator.transaction.batch_committer import BatchCommitter
from mansio.broker.coordinator.transaction.marker_sender import MarkerSender
from mansio.broker.coordinator.transaction.routed_ender import RoutedEnder
from mansio.broker.coordinator.transaction.settings import transaction_settings
from mansio.broker.coordinator.transaction.transaction_coordinator import TransactionCoordinator
from mansio.broker.coordinator.transaction.verifier import RoutedVerifier
from mansio.broker.features.delays.delay_service import DelayService
from mansio.broker.features.delays.schedule_service import ScheduleService
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.broker.features.holds.retention_hold_feature import RetentionHoldFeature
from mansio.broker.features.holds.retention_holds import HoldDiskLimit, UnsupportedHolds
from mansio.broker.features.known_features import create_features
from mansio.broker.hot_partitions.key_sampler import ROUND_MS, KeySampler
from mansio.broker.hot_partitions.monitor import HotPartitionMonitor
from mansio.broker.hot_partitions.rate_exchange import RateExchange
from mansio.broker.maintenance.log_cleaner import LogCleaner
from mansio.broker.maintenance.log_scrubber import LogScrubber
from mansio.broker.maintenance.orphaned_directories import OrphanedDirectories
from mansio.broker.maintenance.retention import RetentionManager
from mansio.broker.partition.partition_set import PartitionSet
from mansio.broker.routing.routes import ClusterCoordinatorLookup, MetadataPartitionLeaders
from mansio.broker.services.acls import AclService, follow_acls
from mansio.broker.services.api_keys import ApiKeyService
from mansio.broker.services.audit.audit_destinations import AuditFile, AuditTopic
from mansio.broker.services.audit.audit_queue import AuditQueue
from mansio.broker.services.audit.audit_service import AuditService
from mansio.broker.services.authorization import Authorization, owner_may_write
from mansio.broker.services.broker_authenticator import BrokerAuthenticator
from mansio.broker.services.broker_configs import BrokerConfigManager
from mansio.broker.services.broker_services import BrokerServices
from mansio.broker.services.cluster import ClusterDescriptionService
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
from mansio.broker.services.recent_refusals import RecentRefusals
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
from mansio.broker.services.topic_admin import TopicAdminService
from mansio.broker.services.trace_service import TraceService
from mansio.broker.services.transactions.marker_service import TransactionMarkerService
from mansio.broker.services.transactions.transaction_service import TransactionService
from mansio.broker.services.users import UserService
from mansio.broker.topics.topics import PARTITIONS_UNLIMITED, NewTopic, TopicService
from mansio.broker.trace.trace_peers import TracePeers
from mansio.broker.trace.trace_reader import TraceReader
from mansio.broker.trace.trace_writer import TraceWriter
from mansio.config.share_group_config import RECORD_LOCK_DURATION, effective_value
from mansio.config.topic_names import AUDIT_TOPIC, OFFSETS_TOPIC
from mansio.errors import MansioError, StorageError, TopicAlreadyExists
from mansio.logs import fields
from mansio.metadata.producer_ids import ProducerIdAllocator
from mansio.ports import RequestClass
from mansio.state.authorization.authorizer import Authorizer
from mansio.state.share_partition.state_records import SHARE_STATE_TOPIC
from mansio.state.trace.trace_buffer import TraceBuffer
from mansio.storage.active_files import ACTIVE_FILES_MAX
from mansio.storage.file_cache import OPEN_FILES_MAX, FileCache
from mansio.storage.group_commit import GroupCommit
from mansio.wire.internal_records.schema_records import SCHEMAS_TOPIC
from mansio.wire.internal_records.transaction_records import TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from mansio.broker.partition.partition import Partition
    from mansio.broker.services.token_checks import TokenChecker
    from mansio.config.broker_config import BrokerConfigSources
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import Topic, TopicChange
    from mansio.node.cluster_member import ClusterMember
    from mansio.state.authentication.secrets_keys import SecretsKeys
    from mansio.state.share_partition.types import ShareKey

logger = logging.getLogger(__name__)

FLUSH_POLL_INTERVAL_MS = 1
SINGLE_NODE_SHARE_STATE_PARTITIONS_MAX = 4
"""Maximum number of partitions of `__share_group_state` on a single node; more would only be more files to flush."""


class FileLimits(NamedTuple):
    """Bounds of a broker's files: open ones of active and of closed segments, and partitions."""

    active_files: int = ACTIVE_FILES_MAX
    cached_files: int = OPEN_FILES_MAX
    partitions: int = PARTITIONS_UNLIMITED


NO_LIMITS: Final = FileLimits()


class BrokerRuntime:
    """Runtime of one broker. `open` is called once, on the event loop; its exit stack closes the runtime."""

    def __init__(
        self,
        settings: Settings,
        host_ports: HostPorts,
        store: MetadataStore,
        state: MetadataImage,
        cluster_member: ClusterMember | None = None,
        before_newer_format: Callable[[], object] = lambda: None,
        limits: FileLimits = NO_LIMITS,
        secrets_keys: SecretsKeys | None = None,
        tokens: TokenChecker | None = None,
    ) -> None:
        """`state` was loaded from `store` and is not started yet. `cluster_member` is None on a single node.
        `before_newer_format`: see `Log`. `secrets_keys`: None if the broker has none; `tokens`: None if tokens are not
        accepted."""
        self.broker_configs = BrokerConfigManager(
            store=store,
            state=state,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            settings=settings,
        )
        settings = self.broker_configs.effective
        self.settings = settings
        authorizer = _authorizer(settings, state)
        may_write = partial(owner_may_write, authorizer)
        self.host_ports = host_ports
        self.store = store
        self.state = state
        self.cluster_member = cluster_member
        self._secrets_keys = secrets_keys
        self._files = FileCache(
            host_ports.disk, files_max=limits.cached_files, active_files_max=limits.active_files
        )
        self.statistics = Statistics(host_ports.clock)
        self._truncated_share_state_partitions: Sequence[int] = ()
        self.group_commit = GroupCommit(
            host_ports.disk,
            host_ports.sync_thread,
            settings.data_dir,
            scheduler=host_ports.scheduler,
            log_flush_interval_ms=settings.log_flush_interval_ms,
            log_flush_offset_checkpoint_interval_ms=settings.log_flush_offset_checkpoint_interval_ms,
            clock=host_ports.clock,
            observe_sync_s=self.statistics.flush_latency.observe,
        )
        trace_buffer = TraceBuffer()
        self.partitions = PartitionSet(
            settings=settings,
            disk=host_ports.disk,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            group_commit=self.group_commit,
            files=self._files,
            sync_thread=host_ports.sync_thread,
            file_thread=host_ports.file_thread,
            verification_thread=host_ports.verification_thread,
            batch_thread=host_ports.batch_thread,
            features=create_features(
                FeaturePorts(
                    host_ports.disk,
                    host_ports.file_thread,
                    host_ports.scheduler,
                    host_ports.clock,
                    may_write,
                    schema_ids=SchemaUses(
                        lambda: self.schemas,
                        clock=host_ports.clock,
                        peers=None
                        if cluster_member is None
                        else cluster_member.peers(RequestClass.COORDINATION),
                    ),
                )
            ),
            before_newer_format=before_newer_format,
            trace_buffer=trace_buffer,
        )
        self.orphaned_directories = OrphanedDirectories(
            host_ports.disk,
            host_ports.file_thread,
            host_ports.scheduler,
            settings.data_dir,
            settings.node_id,
        )
        self.log_cleaner = LogCleaner(
            self.partitions,
            disk=host_ports.disk,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            background=host_ports.compaction_thread,
            interval_ms=settings.log_cleaner_backoff_ms,
            map_bytes_max=settings.log_cleaner_dedupe_buffer_size,
            bytes_per_second=settings.log_cleaner_io_max_bytes_per_second,
            tombstone_floor=self._tombstone_floor,
        )
        self.log_scrubber = LogScrubber(
            self.partitions,
            disk=host_ports.disk,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            background=host_ports.verification_thread,
            interval_ms=settings.log_scrub_interval_ms,
            bytes_per_second=settings.log_scrub_io_max_bytes_per_second,
            verify_again_ms=settings.verify_again_ms,
        )
        self.topics = TopicService(
            store=store,
            state=state,
            settings=settings,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            open_partitions=self.partitions.open_partitions,
            close_partitions=self._close_partitions_of,
            partitions_max=limits.partitions,
            broker_epoch=None if cluster_member is None else cluster_member.broker_epoch,
            has_schema_registry=self._has_schema_registry,
        )
        self.trace_writer = TraceWriter(
            node_id=settings.node_id,
            topics=self.topics,
            partitions=self.partitions,
            scheduler=host_ports.scheduler,
            clock=host_ports.clock,
            create=self._create_internal_topic,
            broker_count=lambda: len(state.brokers),
            peers=None if cluster_member is None else cluster_member.peers(RequestClass.LEASES),
            buffer=trace_buffer,
        )
        self._audit_file: AuditFile | None = None
        self.audit = self._build_audit(authorizer)
        self.refusals = RecentRefusals(host_ports.clock, self.audit.report_refusal)
        self.authorization = Authorization(authorizer, self.refusals.report)
        self.producer_ids = ProducerIdAllocator(store, state.keys, host_ports.random, host_ports.scheduler)
        self.retention = RetentionManager(
            self.partitions,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            check_interval_ms=settings.log_retention_check_interval_ms,
        )
        self.hot_partitions = self._build_hot_partitions()
        group_configs = self.group_configs = GroupConfigManager(
            store=store,
            state=state,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            settings=settings,
        )
        self.groups = self._build_group_coordinator(group_configs.overrides)
        self.share_state = self._build_share_coordinator(group_configs.effective)
        self.markers = TransactionMarkerService(
            self.partitions,
            authorization=self.authorization,
            before_offsets_marker=self.groups.offsets.expect_marker,
            on_offsets_marker=self.groups.offsets.apply_marker,
        )
        self.transactions = self._build_transaction_coordinator()
        self.batch_commits = self._build_batch_committer()
        self.schema_checks = SchemaChecks(host_ports.schema_worker)
        self.schemas = self._build_schema_coordinator()
        self.dead_letters = create_dead_letter_manager(
            settings,
            host_ports,
            topics=self.topics,
            partitions=self.partitions,
            producer_ids=self.producer_ids,
            overrides=group_configs.overrides,
            may_write=may_write,
            peers=None if cluster_member is None else cluster_member.peers(RequestClass.LEASES),
        )
        self.shares = create_share_partition_manager(
            settings,
            host_ports,
            self.partitions,
            group_configs,
            self.share_state.persister,
            self.dead_letters,
            state,
        )
        self._register_share_callbacks()
        # Holds need the committed offsets. In a cluster another broker may have them, so holds are not supported there.
        self.partitions.feature(RetentionHoldFeature).holds.set_loaded_check(
            lambda: cluster_member is not None or self.groups.runtime.is_loaded
        )
        self.service = self._build_services(group_configs, tokens)
        self.broker_configs.on_change(self._use_settings)

    def _use_settings(self, config_sources: BrokerConfigSources, settings: Settings) -> None:
        """Apply changed dynamic settings of the broker to all parts."""
        self.settings = settings
        self.topics.use_settings(config_sources, settings)
        self.group_configs.use_settings(config_sources, settings)
        self.shares.handle_default_settings_change()
        self.partitions.apply_broker_settings(settings)
        self.log_cleaner.interval_ms = settings.log_cleaner_backoff_ms
        self.log_cleaner.bytes_per_second = settings.log_cleaner_io_max_bytes_per_second
        self.log_scrubber.set_bytes_per_second(settings.log_scrub_io_max_bytes_per_second)
        if self.cluster_member is not None:
            self.cluster_member.throttle_replication(settings.replica_throttle_bytes_per_second)
        logs.set_level(settings.log_level)

    def _build_hot_partitions(self) -> HotPartitionMonitor:
        settings, host_ports, cluster_member = self.settings, self.host_ports, self.cluster_member
        return HotPartitionMonitor(
            self.partitions,
            settings=settings,
            state=self.state,
            exchange=RateExchange(
                self.state,
                node_id=settings.node_id,
                broker_epoch=(lambda: 0) if cluster_member is None else cluster_member.broker_epoch,
                peers=None if cluster_member is None else cluster_member.peers(RequestClass.COORDINATION),
                scheduler=host_ports.scheduler,
            ),
            sampler=KeySampler(
                clock=host_ports.clock,
                random=host_ports.random,
                scheduler=host_ports.scheduler,
                batch_thread=host_ports.batch_thread,
                round_ms=min(ROUND_MS, settings.hot_partition_window_ms),
            ),
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            processor_s=host_ports.processor_s,
        )

    def _build_group_coordinator(self, overrides: Callable[[str], Mapping[str, str]]) -> GroupCoordinator:
        settings, host_ports, state, cluster_member = (
            self.settings,
            self.host_ports,
            self.state,
            self.cluster_member,
        )
        holds = self.partitions.feature(RetentionHoldFeature).holds
        topic_resolver = TopicResolver(state.topics)
        state.on_change(topic_resolver.update)
        groups = GroupCoordinator(
            settings=group_settings(settings),
            clock=host_ports.session_clock or host_ports.clock,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            create_topic=partial(
                self._create_internal_topic, OFFSETS_TOPIC, settings.offsets_topic_num_partitions
            ),
            lookup=None if cluster_member is None else ClusterCoordinatorLookup(state),
            end_offset=self._high_watermark,
            checkpoints=CheckpointStorage(
                host_ports.disk, host_ports.file_thread, f"{settings.data_dir}/views"
            ),
            on_offset=(holds if cluster_member is None else UnsupportedHolds()).record_commit,
            topic_resolver=topic_resolver,
            overrides=overrides,
            hides_topics=self.authorization.is_enabled,
            share_state=ShareStateOperations(
                delete=lambda key: self.shares.delete(key),
                wait_until_dead_lettered=lambda key: self.shares.wait_until_dead_lettered(key),
                initialize=lambda *start: self.shares.persister.initialize(*start),
            ),
        )
        groups.store.on_commit = self.trace_writer.report_position
        state.on_group_config_change(groups.apply_settings)
        return groups

    def _build_share_coordinator(self, overrides: Callable[[str], Mapping[str, str]]) -> ShareCoordinator:
        settings, host_ports, cluster_member = self.settings, self.host_ports, self.cluster_member
        partitions = settings.share_coordinator_state_topic_num_partitions
        boot_id_file, remote_client = None, None
        on_archiving: Callable[[Sequence[ShareKey]], None] = _ignore_archiving
        if cluster_member is None:
            partitions = min(partitions, SINGLE_NODE_SHARE_STATE_PARTITIONS_MAX)
            boot_id_file = BootIdFile(
                host_ports.disk,
                host_ports.file_thread,
                host_ports.scheduler,
                settings.data_dir,
                host_ports.boot_id,
            )
        else:
            remote_client = RemoteStateClients(
                cluster_member.peers(RequestClass.COORDINATION),
                node_id=settings.node_id,
                broker_epoch=cluster_member.broker_epoch,
                scheduler=host_ports.scheduler,
            ).client
            on_archiving = DeadLetterResumption(
                node_id=settings.node_id,
                state=self.state,
                peers=cluster_member.peers(RequestClass.CLIENT_REQUESTS),
                scheduler=host_ports.scheduler,
                load_partition=lambda key: self.shares.find_one(key),
            ).resume
        return ShareCoordinator(
            settings=ShareStateSettings(
                updates_per_snapshot=settings.share_coordinator_snapshot_update_records_per_snapshot,
                snapshot_age_ms_max=settings.share_coordinator_state_topic_prune_interval_ms,
            ),
            prune_interval_ms=settings.share_coordinator_state_topic_prune_interval_ms,
            node_id=settings.node_id,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            create_topic=partial(self._create_internal_topic, SHARE_STATE_TOPIC, partitions),
            lock_ms=lambda group: int(effective_value(RECORD_LOCK_DURATION, overrides(group))),
            boot_id_file=boot_id_file,
            lookup=None
            if cluster_member is None
            else ClusterCoordinatorLookup(self.state, SHARE_STATE_TOPIC),
            remote_client=remote_client,
            on_archiving=on_archiving,
        )

    def _build_transaction_coordinator(self) -> TransactionCoordinator:
        settings, host_ports, cluster_member = self.settings, self.host_ports, self.cluster_member
        single_node_id = settings.node_id if cluster_member is None else None
        return TransactionCoordinator(
            settings=transaction_settings(settings),
            node_id=settings.node_id,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            new_producer_id=self.producer_ids.new_producer_id,
            remove_expired_decisions=lambda: self.batch_commits.remove_expired(),
            resume_decisions=lambda entries: self.batch_commits.resume(entries),
            create_topic=partial(
                self._create_internal_topic,
                TRANSACTION_STATE_TOPIC,
                settings.transaction_state_log_num_partitions,
            ),
            markers=MarkerSender(
                node_id=settings.node_id,
                scheduler=host_ports.scheduler,
                leaders=MetadataPartitionLeaders(self.state, single_node_id),
                local=self.markers,
                peers=None if cluster_member is None else cluster_member.peers(RequestClass.COORDINATION),
            ),
            lookup=None
            if cluster_member is None
            else ClusterCoordinatorLookup(self.state, TRANSACTION_STATE_TOPIC),
        )

    def _build_schema_coordinator(self) -> SchemaCoordinator:
        return SchemaCoordinator(
            node_id=self.settings.node_id,
            clock=self.host_ports.clock,
            scheduler=self.host_ports.scheduler,
            create_topic=partial(self._create_internal_topic, SCHEMAS_TOPIC, 1),
            is_own_topic=self._has_schema_registry,
            checks=self.schema_checks,
            lookup=None
            if self.cluster_member is None
            else ClusterCoordinatorLookup(self.state, SCHEMAS_TOPIC),
        )

    def _has_schema_registry(self) -> bool:
        """Whether the topic of the schema registry is the broker's own, if it exists."""
        topic = self.state.topics.get(SCHEMAS_TOPIC)
        return topic is None or topic.internal

    def _build_batch_committer(self) -> BatchCommitter:
        cluster_member, node_id = self.cluster_member, self.settings.node_id
        return BatchCommitter(
            store=self.transactions.store,
            ender=RoutedEnder(
                self.transactions,
                node_id=node_id,
                lookup=self.transactions.lookup,
                peers=None if cluster_member is None else cluster_member.peers(RequestClass.COORDINATION),
            ),
            settings=transaction_settings(self.settings),
            clock=self.host_ports.clock,
            scheduler=self.host_ports.scheduler,
        )

    def _register_share_callbacks(self) -> None:
        """Register share partitions and dead letters for changes of group settings and topics."""
        state = self.state
        state.on_group_config_change(self.shares.handle_settings_change)
        state.on_group_config_change(self.dead_letters.handle_settings_change)
        state.on_change(self.dead_letters.handle_topic_change)
        state.on_acl_change(lambda _acl, _exists: self.dead_letters.handle_acl_change())

    def _build_services(
        self, group_configs: GroupConfigManager, tokens: TokenChecker | None
    ) -> BrokerServices:
        settings, host_ports, cluster_member = self.settings, self.host_ports, self.cluster_member
        authorization = self.authorization
        quotas = QuotaService(
            store=self.store,
            state=self.state,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            clock=host_ports.clock,
            burst_ms=settings.quota_burst_ms,
            authorization=authorization,
        )
        cluster = None if cluster_member is None else cluster_member.services()
        authenticator = BrokerAuthenticator(
            settings.node_id, None if cluster_member is None else self.state, host_ports.random
        )
        verifier = RoutedVerifier(
            self.transactions,
            node_id=settings.node_id,
            scheduler=host_ports.scheduler,
            lookup=self.transactions.lookup,
            peers=None if cluster_member is None else cluster_member.peers(RequestClass.COORDINATION),
        )
        produce = ProduceService(
            self.partitions,
            verifier=verifier,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            statistics=self.statistics,
            wait_ms_max=settings.produce_wait_ms_max,
        )
        fetch = FetchService(
            self.partitions,
            produce=produce,
            quotas=quotas,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            response_bytes_max=settings.fetch_max_bytes,
            wait_ms_max=settings.fetch_wait_ms_max,
            authenticator=authenticator,
            files=self._files,
            follower_reads=None if cluster_member is None else cluster_member.follower_reads(),
        )
        share_service = ShareService(
            share_partition_manager=self.shares,
            dead_letters=self.dead_letters,
            quotas=quotas,
            authorization=authorization,
            topic_name=self.partitions.name_of,
            settings=settings,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
        )
        receive = ReceiveService(
            share_service=share_service,
            share_partition_manager=self.shares,
            topics=self.topics,
            partitions=self.partitions,
            quotas=quotas,
            counters=fetch.counters,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            authorization=authorization,
        )
        groups = GroupService(
            self.groups, node_id=settings.node_id, verifier=verifier, authorization=authorization
        )
        leases = LeaseService(
            receive=receive,
            share_service=share_service,
            group_coordinator=self.groups,
            groups=groups,
            topics=self.topics,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            authorization=authorization,
            forwarder=None
            if cluster_member is None
            else LeaseForwarder(
                node_id=settings.node_id,
                broker_epoch=cluster_member.broker_epoch,
                state=self.state,
                peers=cluster_member.peers(RequestClass.CLIENT_REQUESTS),
                data_peers=cluster_member.peers(RequestClass.LEASES),
                scheduler=host_ports.scheduler,
            ),
        )
        users = UserService(
            store=self.store,
            state=self.state,
            scheduler=host_ports.scheduler,
            random=host_ports.random,
            clock=host_ports.clock,
            password_thread=host_ports.password_thread,
            authorization=authorization,
        )
        transactions = TransactionService(
            self.transactions, self.groups, host_ports.clock, self.batch_commits, authorization
        )
        group_facts = FactCollector(
            partitions=self.partitions,
            shares=self.shares,
            dead_letters=self.dead_letters,
            transactions=transactions,
            quotas=quotas,
            authorization=authorization,
            refusals=self.refusals,
            is_hot=self.hot_partitions.is_hot,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
        )
        passwords = PasswordChecker(host_ports.password_thread, host_ports.clock, host_ports.random)
        return BrokerServices(
            request_thread=host_ports.request_thread,
            settings=settings,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            statistics=self.statistics,
            partitions=self.partitions,
            produce=produce,
            fetch=fetch,
            publish=PublishService(
                topics=self.topics,
                partitions=self.partitions,
                produce=produce,
                quotas=quotas,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                random=host_ports.random,
                bytes_max=settings.socket_request_max_bytes,
                authorization=authorization,
            ),
            records=RecordService(
                self.partitions,
                authorization=authorization,
                scheduler=host_ports.scheduler,
                wait_ms_max=settings.produce_wait_ms_max,
            ),
            delays=DelayService(
                self.partitions,
                authorization=authorization,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                wait_ms_max=settings.produce_wait_ms_max,
            ),
            schedules=ScheduleService(
                self.partitions,
                authorization=authorization,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                wait_ms_max=settings.produce_wait_ms_max,
            ),
            producer_ids=self.producer_ids,
            topics=self.topics,
            topic_admin=TopicAdminService(
                self.topics,
                quotas=quotas,
                scheduler=host_ports.scheduler,
                authorization=authorization,
                report_creation=self.audit.report_creation,
            ),
            log_dirs=LogDirService(
                self.partitions,
                topics=self.topics,
                scheduler=host_ports.scheduler,
                authorization=authorization,
            ),
            quotas=quotas,
            authorization=authorization,
            acls=AclService(
                authorization,
                store=self.store,
                state=self.state,
                scheduler=host_ports.scheduler,
                random=host_ports.random,
            ),
            audit=self.audit,
            users=users,
            api_keys=ApiKeyService(
                store=self.store,
                state=self.state,
                scheduler=host_ports.scheduler,
                random=host_ports.random,
                clock=host_ports.clock,
                authorization=authorization,
                count_mutation=quotas.count_mutation,
            ),
            sqs_access_keys=SqsAccessKeyService(
                self._secrets_keys,
                store=self.store,
                state=self.state,
                scheduler=host_ports.scheduler,
                random=host_ports.random,
                clock=host_ports.clock,
                authorization=authorization,
                count_mutation=quotas.count_mutation,
            ),
            delegation_tokens=DelegationTokenService(
                self._secrets_keys,
                store=self.store,
                state=self.state,
                settings=settings,
                scheduler=host_ports.scheduler,
                random=host_ports.random,
                clock=host_ports.clock,
                password_thread=host_ports.password_thread,
                authorization=authorization,
                count_mutation=quotas.count_mutation,
            ),
            passwords=passwords,
            tokens=tokens,
            log_ins=LogInService(
                users,
                passwords,
                tokens,
                host_ports.clock,
                host_ports.scheduler,
                lambda: cluster is None or cluster.is_session_valid(),
                settings.authorization_stale_max_ms,
            ),
            configs=ConfigService(
                topics=self.topics,
                groups=group_configs,
                brokers=self.broker_configs,
                settings=settings,
                authorization=authorization,
            ),
            group_coordinator=self.groups,
            group_service=groups,
            health=HealthService(
                host_ports.clock,
                cluster,
                authorization=authorization,
                host_labels=self.state.host_labels,
            ),
            hot_partitions=HotPartitionService(
                self.hot_partitions, partitions=self.partitions, authorization=authorization
            ),
            group_configs=group_configs,
            group_facts=group_facts,
            explanations=ExplanationService(
                node_id=settings.node_id,
                groups=self.groups,
                collector=group_facts,
                state=self.state,
                others=None
                if cluster_member is None
                else FactRequests(
                    settings.node_id,
                    cluster_member.broker_epoch,
                    cluster_member.peers(RequestClass.CLIENT_REQUESTS),
                ),
                authorization=authorization,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
            ),
            share_service=share_service,
            share_offsets=ShareOffsetService(
                authorization=authorization,
                group_coordinator=self.groups,
                share_coordinator=self.share_state,
                share_partition_manager=self.shares,
                topics=self.topics,
                partitions=self.partitions,
                scheduler=host_ports.scheduler,
            ),
            receive=receive,
            leases=leases,
            range_leases=RangeLeaseService(
                share_service=share_service,
                share_partition_manager=self.shares,
                leases=leases,
                topic_name=self.partitions.name_of,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                authorization=authorization,
            ),
            share_partition_manager=self.shares,
            share_coordinator=self.share_state,
            dead_letters=self.dead_letters,
            retention=self.retention,
            log_cleaner=self.log_cleaner,
            log_scrubber=self.log_scrubber,
            cluster_description=ClusterDescriptionService(
                topics=self.topics, settings=settings, cluster=cluster, authorization=authorization
            ),
            elections=ElectionService(
                topics=self.topics,
                cluster=cluster,
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                authorization=authorization,
            ),
            reassignments=ReassignmentService(
                topics=self.topics,
                cluster=cluster,
                scheduler=host_ports.scheduler,
                authorization=authorization,
            ),
            schemas=SchemaRegistryService(
                self.schemas, checks=self.schema_checks, authorization=authorization
            ),
            record_search=RecordSearchService(
                self.partitions,
                worker=host_ports.file_worker,
                clock=host_ports.clock,
                authorization=authorization,
            ),
            traces=TraceService(
                TraceReader(
                    topics=self.topics,
                    partitions=self.partitions,
                    writer=self.trace_writer,
                    scheduler=host_ports.scheduler,
                    batch_thread=host_ports.batch_thread,
                ),
                node_id=settings.node_id,
                topics=self.topics,
                peers=None
                if cluster_member is None
                else TracePeers(
                    cluster_member.peers(RequestClass.CLIENT_REQUESTS),
                    node_id=settings.node_id,
                    broker_epoch=cluster_member.broker_epoch,
                ),
                clock=host_ports.clock,
                scheduler=host_ports.scheduler,
                authorization=authorization,
            ),
            transaction_markers=self.markers,
            transactions=transactions,
            authenticator=authenticator,
            cluster=cluster,
        )

    def _build_audit(self, authorizer: Authorizer | None) -> AuditService:
        settings, host_ports, cluster_member = self.settings, self.host_ports, self.cluster_member
        queues: list[AuditQueue] = []
        if authorizer is not None:
            topic = AuditTopic(
                node_id=settings.node_id,
                topics=self.topics,
                partitions=self.partitions,
                scheduler=host_ports.scheduler,
                clock=host_ports.clock,
                create=self._create_internal_topic,
                peers=None if cluster_member is None else cluster_member.peers(RequestClass.LEASES),
            )
            queues.append(AuditQueue(AUDIT_TOPIC, topic.append, host_ports.scheduler))
            if settings.audit_log:
                file = self._audit_file = AuditFile(
                    settings.audit_log, host_ports.disk, host_ports.file_thread, host_ports.scheduler
                )
                queues.append(AuditQueue(settings.audit_log, file.append, host_ports.scheduler))
        return AuditService(
            authorizer,
            node_id=settings.node_id,
            clock=host_ports.clock,
            scheduler=host_ports.scheduler,
            queues=queues,
            writes_log=not settings.audit_log,
        )

    async def open(self, stack: AsyncExitStack, close_scheduler: Callable[[], Awaitable[object]]) -> None:
        """Check the audit file, recover every log and load the groups. When clients can connect, the caller calls
        `start_background_work`. Raises `ConfigError` if the audit file cannot be written.

        `stack` closes the runtime; `close_scheduler` cancels the tasks that are still running then.
        """
        settings, partitions, scheduler = self.settings, self.partitions, self.host_ports.scheduler
        stack.push_async_callback(self._close_partitions)
        if self._audit_file is not None:
            await self._audit_file.prepare()
        known = tuple(self.state.topics.values())
        if self.cluster_member is None:
            await partitions.open_existing_topics(known)
            self.state.on_change(partitions.apply_topic_change)
            partitions.report_unknown_directories()
        else:
            await partitions.open_existing_topics(known, await self.cluster_member.new_partition_check())
            await self.orphaned_directories.move_orphaned_directories(self.store, self.state)
        self.state.start(self.store, scheduler, shared=self.cluster_member is not None)
        stack.callback(self.state.stop)
        stack.push_async_callback(close_scheduler)
        stack.push_async_callback(self.log_cleaner.stop)
        stack.push_async_callback(self.log_scrubber.stop)
        if self.cluster_member is None:
            await self._lead_all_partitions()
            await self.groups.start(partitions.partitions_of(OFFSETS_TOPIC))
            await self.share_state.start(
                partitions.partitions_of(SHARE_STATE_TOPIC), self._truncated_share_state_partitions
            )
            await self.transactions.start(partitions.partitions_of(TRANSACTION_STATE_TOPIC))
            await self.schemas.start(partitions.partitions_of(SCHEMAS_TOPIC))
        else:
            self.cluster_member.attach_partitions(
                partitions,
                remove=self._close_partitions_of,
                remove_replica=self._remove_replica,
                on_role=self._handle_role_change,
                on_topics_created=self.orphaned_directories.record_revision,
            )
            scheduler.spawn(self._remove_orphaned_directories(), name="remove directories of deleted topics")
            self.cluster_member.replication.on_leader_elected(self.service.fetch.complete_follower_fetches)
            self.cluster_member.replication.on_session_end(self.service.fetch.sessions.end_all_of)
        await self.trace_writer.open()
        stack.push_async_callback(self.groups.close)
        stack.push_async_callback(self.share_state.close)
        stack.push_async_callback(self.transactions.close)
        stack.callback(self.batch_commits.close)
        stack.push_async_callback(self.schemas.close)
        stack.callback(self.shares.close)
        stack.callback(self.dead_letters.close)
        stack.callback(self.service.passwords.stop)
        self.state.on_change(self._delete_offsets_of_deleted_topic)
        stack.callback(self.service.delegation_tokens.stop)
        stack.callback(self.retention.stop)
        stack.callback(self.hot_partitions.stop)
        self._disk_limit = HoldDiskLimit(
            partitions.feature(RetentionHoldFeature).holds,
            scheduler=scheduler,
            background=self.host_ports.file_thread,
            free_bytes=partial(self.host_ports.disk.free_bytes, settings.data_dir),
            free_bytes_min=settings.retention_hold_disk_free_bytes_min,
            on_low=self.retention.check_now,
        )
        stack.callback(self._disk_limit.stop)

    def start_background_work(self) -> None:
        """Start retention, compaction, scrubbing, the search for hot partitions, and the checks of disk space and
        delegation tokens."""
        self._disk_limit.start()
        self.service.delegation_tokens.start()
        self.retention.start()
        self.hot_partitions.start()
        self.log_cleaner.start()
        self.log_scrubber.start()
        # Writing pending dead letters needs no group member.
        for key in self.share_state.store.archiving_share_partitions():
            with contextlib.suppress(MansioError):
                self.shares.find_one(key)

    async def end_trace(self) -> None:
        """Stop what changes the state of records by itself, and write the rest of the trace."""
        self.shares.close()
        self.dead_letters.close()
        await self.trace_writer.close()

    async def _remove_orphaned_directories(self) -> None:
        try:
            await self.orphaned_directories.remove_moved()
        except StorageError as error:  # the next start retries
            logger.error("orphaned_directories_not_removed", extra=fields(reason=error))

    async def _remove_replica(self, topic: Topic, index: int) -> None:
        """Close a partition of which this broker has no replica any more, and remove its data.

        It is stopped before anything is awaited: if the broker is assigned again meanwhile, the log that is about to be
        removed must not follow a leader."""
        stopped = self.partitions.stop_partition(topic, index)
        await self.log_cleaner.abort(topic.topic_id, index)
        if stopped is not None:
            await self.partitions.close_stopped(stopped)
        await self.orphaned_directories.remove_replica(topic, index)

    async def _lead_all_partitions(self) -> None:
        """Lead all partitions, on a single node; in a new leader epoch if recovery truncated the partition's log."""
        await self.topics.recover()
        truncated_partitions = self.partitions.truncated_partitions()
        self._truncated_share_state_partitions = [
            each.index for each in truncated_partitions if each.topic == SHARE_STATE_TOPIC
        ]
        await self.topics.begin_leader_epochs(
            [(partition.topic, partition.index) for partition in truncated_partitions]
        )
        for partition in truncated_partitions:
            partition.log.record_new_epoch()

    def _handle_role_change(self, partition: Partition) -> None:
        """Notify coordinators and share groups, in a cluster, that this broker's role for a partition has changed."""
        if partition.topic == OFFSETS_TOPIC:
            self.groups.handle_role_change(partition)
        elif partition.topic == SHARE_STATE_TOPIC:
            self.share_state.handle_role_change(partition)
        elif partition.topic == TRANSACTION_STATE_TOPIC:
            self.transactions.handle_role_change(partition)
        elif partition.topic == SCHEMAS_TOPIC:
            self.schemas.handle_role_change(partition)
        self.shares.handle_role_change(partition)

    async def _create_internal_topic(self, topic: str, partitions: int) -> Sequence[Partition | StorageError]:
        """Create an internal topic, unless it exists; returns its partitions.

        In a cluster the result is empty: `_handle_role_change` is called for each partition that this broker leads.
        """
        with contextlib.suppress(TopicAlreadyExists):
            new = NewTopic(topic, partitions, self.settings.replication_factor)
            await self.topics.create(new, internal=True)
        return self.partitions.partitions_of(topic) if self.cluster_member is None else ()

    def _delete_offsets_of_deleted_topic(self, change: TopicChange) -> None:
        """Delete the committed offsets of a deleted topic, which would be invalid for a new topic with its name."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            work = self.groups.offsets.delete_offsets_of_topic(before.name)
            self.host_ports.scheduler.spawn(work, name=f"forget offsets of {before.name}")
            self.groups.delete_state_of_missing_topics()

    def _high_watermark(self, topic: str, index: int) -> int | None:
        partition = self.partitions.get(topic, index)
        return None if partition is None else partition.high_watermark

    def _tombstone_floor(self, partition: Partition) -> int | None:
        if partition.topic != OFFSETS_TOPIC:
            return None
        return self.groups.runtime.replay_start_offset(partition.index)

    async def _close_partitions_of(self, topic: Topic) -> None:
        await self.log_cleaner.abort(topic.topic_id)
        await self.partitions.close_partitions(topic)

    async def _close_partitions(self) -> None:
        """Flush all logs, then close them. If the disk does not respond within `shutdown_drain_ms`, close without."""
        wait_ms, clock = self.settings.shutdown_drain_ms, self.host_ports.clock
        for partition in self.partitions:
            self.group_commit.request_flush(partition.log, urgent=True)
        end = clock.monotonic() + wait_ms / 1000
        while not self.group_commit.is_idle:
            if clock.monotonic() >= end:
                known = fields(waited_ms=wait_ms)
                logger.error("final_sync_timed_out", extra=known)
                self.partitions.close(save=False)
                return
            await self.host_ports.scheduler.sleep(FLUSH_POLL_INTERVAL_MS)
        self.partitions.close(save=True)
        self.group_commit.close()


def _authorizer(settings: Settings, state: MetadataImage) -> Authorizer | None:
    if settings.authorizer != "acl":
        return None
    authorizer = Authorizer(
        settings.super_user_principals,
        allow_everyone_if_no_acl_found=settings.allow_everyone_if_no_acl_found,
    )
    follow_acls(state, authorizer)
    return authorizer


def _ignore_archiving(keys: Sequence[ShareKey]) -> None:
    del keys
