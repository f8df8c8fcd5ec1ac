"""Cluster administration: brokers, partitions, leader elections and reassignments; available as `client.admin.cluster`.

Sends DescribeCluster (KIP-700), DescribeTopicPartitions (KIP-966), ElectLeaders (KIP-460), DescribeLogDirs (KIP-113,
KIP-827), AlterPartitionReassignments and ListPartitionReassignments (KIP-455), UnregisterBroker (KIP-631),
UpdateFeatures (KIP-584), and DescribeHealth and DescribeHotPartitions of Mansio; caches no results.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from mansio.client.admin.hot_partitions import HotPartitions, Placement, ask_broker, combine, group_lags
from mansio.client.types import TopicPartition
from mansio.config.config_def import ResourceType
from mansio.config.topic_config import COMPACT
from mansio.errors import (
    ClusterAuthorizationFailed,
    MansioError,
    RequestTimedOut,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from mansio.net.cluster import check_top_level_error
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.state.hot_partitions.remedies import COOL_DOWN_S, FULL_SHARE
from mansio.tracebacks import copied, without_traceback
from mansio.version import __version__
from mansio.wire.api_versions import ApiKey
from mansio.wire.features import FIRST_LEVEL, UPGRADE, VERSION_FEATURE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster

PARTITIONS_PER_PAGE: Final = 2000
TOPICS_PER_REQUEST: Final = 200
REASSIGNMENTS_PER_REQUEST: Final = 500
ELECTIONS_PER_REQUEST: Final = 500
"""Each is a transaction, and they are executed one after the other."""
ELECTION_NOT_NEEDED: Final = 84
MIN_IN_SYNC_REPLICAS_CONFIG: Final = "min.insync.replicas"
CLEANUP_POLICY_CONFIG: Final = "cleanup.policy"
ELECTION_TYPES: Final = {"preferred": 0, "unclean": 1}

ElectionType = Literal["preferred", "unclean"]
"""Type of a leader election."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """Address and state of one broker. `is_fenced` is true if the broker is registered but has no session; it then
    leads no partition."""

    node_id: int
    host: str
    port: int
    rack: str | None
    is_controller: bool
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Brokers and active controller of the cluster. `controller_id` is -1 while there is no controller."""

    cluster_id: str
    controller_id: int
    brokers: tuple[BrokerStatus, ...]


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """A problem or warning of a broker. `reason`: a name of the page Running Mansio; `detail`: text for operators;
    `topic` and `partition`: None unless it concerns one partition."""

    reason: str
    detail: str
    topic: str | None
    partition: int | None


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """Health of one broker: `problems` because of which it is not ready, and `warnings`.

    `is_session_held`: whether its session has certainly not expired; without it a broker acknowledges nothing with
    acks=all. `session_lost_at`: since when it is not held; None if it is held or the time is unknown. `error`: why the
    broker did not answer, None if it did; the other fields then say nothing. `broker_epoch`: the epoch of its session,
    which is another one after each start; None without a session, on a single node, and of an older broker.
    """

    node_id: int
    is_session_held: bool = True
    session_lost_at: datetime | None = None
    problems: tuple[HealthProblem, ...] = ()
    warnings: tuple[HealthProblem, ...] = ()
    error: MansioError | None = None
    broker_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class BrokerFeatures:
    """Feature levels that one broker supports, `lowest` to `highest`, and `level`, that of the cluster as it knows it.
    `error`: why it did not answer, None if it did; the levels then say nothing."""

    node_id: int
    level: int = FIRST_LEVEL
    lowest: int = FIRST_LEVEL
    highest: int = FIRST_LEVEL
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class ClusterFeatures:
    """Feature level of the cluster, and what each live broker supports, sorted by node id."""

    level: int
    brokers: tuple[BrokerFeatures, ...]


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """Leader and replicas (node ids) of one partition.

    `leader` is -1 while the partition has no leader. `min_in_sync_replicas` is the topic's `min.insync.replicas`; None
    if the topic's settings are not known.
    """

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]
    offline_replicas: tuple[int, ...]
    min_in_sync_replicas: int | None
    is_internal: bool

    @property
    def is_offline(self) -> bool:
        """Whether the partition has no leader, and so can be neither written nor read."""
        return self.leader < 0

    @property
    def is_under_replicated(self) -> bool:
        """Whether at least one replica is not in sync."""
        return len(self.in_sync_replicas) < len(self.replicas)

    @property
    def is_under_min_isr(self) -> bool:
        """Whether fewer replicas are in sync than `min.insync.replicas`, so that produce requests with acks=all
        fail."""
        return (
            self.min_in_sync_replicas is not None and len(self.in_sync_replicas) < self.min_in_sync_replicas
        )


@dataclass(frozen=True, slots=True)
class ElectionResult:
    """Result of the election of one partition. The outcome is "not needed" if the partition already has the leader that
    the election would choose; `error` is set if the outcome is "failed"."""

    topic: str
    partition: int
    outcome: Literal["elected", "not needed", "failed"]
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class Reassignment:
    """An ongoing move of a partition's replicas (node ids). `replicas` has all of them, those that leave at the end;
    `adding` are not all in sync yet, and `removing` leave when they are."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas after the move, the preferred leader first."""
        return tuple(node_id for node_id in self.replicas if node_id not in self.removing)


@dataclass(frozen=True, slots=True)
class ReassignmentResult:
    """Result of the request to move the replicas of one partition. `error`: None if the move has begun."""

    topic: str
    partition: int
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class LogDir:
    """The data directory of one broker.

    `replica_bytes`: size of the log of each replica. `total_bytes` and `usable_bytes`: size of the file system and what
    is free; None if it does not report them. `error`: why the broker did not answer, None if it did; the other fields
    then say nothing.
    """

    node_id: int
    replica_bytes: Mapping[TopicPartition, int]
    total_bytes: int | None = None
    usable_bytes: int | None = None
    error: MansioError | None = None


class ClusterAdmin:
    """Cluster state, leader elections and reassignments; available as `client.admin.cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def status(self) -> ClusterStatus:
        """The brokers, including fenced brokers if the cluster reports them, and the active controller."""
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CLUSTER,
            {
                "include_cluster_authorized_operations": False,
                "endpoint_type": 1,
                "include_fenced_brokers": True,
            },
            check=lambda response: raise_for_code(response.error_code, response.error_message),
        )
        brokers = tuple(
            BrokerStatus(
                broker.broker_id,
                broker.host,
                broker.port,
                broker.rack,
                broker.broker_id == response.controller_id,
                broker.is_fenced,
            )
            for broker in sorted(response.brokers, key=lambda broker: int(broker.broker_id))
        )
        return ClusterStatus(response.cluster_id, response.controller_id, brokers)

    async def host_labels(self) -> dict[int, str]:
        """The labels of the hosts of brokers, by node id, as their setting `broker_host_label` has them. Brokers that
        are missing are hosts of their own."""
        try:
            response = await self._cluster.request(
                ApiKey.DESCRIBE_HEALTH,
                {},
                check=lambda response: raise_for_code(response.error_code, response.error_message),
            )
        except UnsupportedVersion:  # an older broker, or another system
            return {}
        return {each.broker_id: each.label for each in response.host_labels}

    async def health(
        self, brokers: Iterable[int] | None = None, *, timeout_ms: float = 5_000
    ) -> list[BrokerHealth]:
        """The health of those of `brokers` (None: all) that the cluster reports as live, sorted by node id. Each broker
        is asked itself, for at most `timeout_ms`; one that does not answer, or has no health because it is older, has
        an `error`."""
        wanted = None if brokers is None else set(brokers)
        found = await self.status()
        live = [
            one.node_id
            for one in found.brokers
            if not one.is_fenced and (wanted is None or one.node_id in wanted)
        ]
        return list(await asyncio.gather(*(self._health(node_id, timeout_ms) for node_id in live)))

    async def _health(self, node_id: int, timeout_ms: float) -> BrokerHealth:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await self._cluster.connection(node_id)
                response = await connection.request(ApiKey.DESCRIBE_HEALTH, {})
            raise_for_code(response.error_code, response.error_message)
        except TimeoutError:
            return BrokerHealth(node_id, error=RequestTimedOut(f"no answer within {timeout_ms:.0f} ms"))
        except MansioError as error:
            return BrokerHealth(node_id, error=without_traceback(error))
        lost_ms = response.session_lost_ms
        return BrokerHealth(
            node_id,
            response.is_session_held,
            None if lost_ms < 0 else datetime.fromtimestamp(lost_ms / 1000, UTC),
            tuple(map(_health_problem, response.problems)),
            tuple(map(_health_problem, response.warnings)),
            broker_epoch=None if response.broker_epoch < 0 else response.broker_epoch,
        )

    async def features(self, *, timeout_ms: float = 5_000) -> ClusterFeatures:
        """The feature level of the cluster, and the levels that each broker supports which the cluster reports as live
        (KIP-584). Each broker is asked itself, for at most `timeout_ms`; one that does not answer has an `error`, and
        one that announces no feature level supports the first."""
        found = await self.status()
        live = [one.node_id for one in found.brokers if not one.is_fenced]
        brokers = await asyncio.gather(*(self._features(node_id, timeout_ms) for node_id in live))
        return ClusterFeatures(max((each.level for each in brokers), default=FIRST_LEVEL), tuple(brokers))

    async def _features(self, node_id: int, timeout_ms: float) -> BrokerFeatures:
        fields = {"client_software_name": "mansio", "client_software_version": __version__}
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await self._cluster.connection(node_id)
                response = await connection.request(ApiKey.API_VERSIONS, fields)
            raise_for_code(response.error_code)
        except TimeoutError:
            return BrokerFeatures(node_id, error=RequestTimedOut(f"no answer within {timeout_ms:.0f} ms"))
        except MansioError as error:
            return BrokerFeatures(node_id, error=without_traceback(error))
        finalized = getattr(response, "finalized_features", ())  # versions of the API before 3 have none
        levels = {one.name: one.max_version_level for one in finalized}
        supported = {
            one.name: (one.min_version, one.max_version)
            for one in getattr(response, "supported_features", ())
        }
        lowest, highest = supported.get(VERSION_FEATURE, (FIRST_LEVEL, FIRST_LEVEL))
        return BrokerFeatures(node_id, levels.get(VERSION_FEATURE, FIRST_LEVEL), lowest, highest)

    async def raise_feature_level(
        self, level: int, *, dry_run: bool = False, timeout_ms: int = 30_000
    ) -> None:
        """Raise the feature level of the cluster, after all brokers were upgraded (KIP-584): brokers of versions that
        do not support it cannot be started any more. With `dry_run` nothing is changed. No effect if the cluster has
        the level. Raises `InvalidUpdateVersion` if a registered broker does not support it, or it is lower."""
        update = {"feature": VERSION_FEATURE, "max_version_level": level, "upgrade_type": UPGRADE}
        await self._cluster.request_controller(
            ApiKey.UPDATE_FEATURES,
            {"timeout_ms": timeout_ms, "feature_updates": [update], "validate_only": dry_run},
            check=check_top_level_error,
        )

    async def partitions(
        self, topics: Iterable[str] | None = None, *, broker: int | None = None
    ) -> list[PartitionStatus]:
        """All partitions of `topics` (None: of all topics, including internal topics), as the broker `broker` knows
        them (None: any broker). Raises `UnknownTopicOrPartition`."""
        wanted = None if topics is None else sorted(set(topics))
        if wanted == []:
            return []
        found = [response async for response in self._pages(wanted, broker)]
        least = await self._topic_settings(
            sorted({response.name for response in found}), MIN_IN_SYNC_REPLICAS_CONFIG
        )
        return [
            PartitionStatus(
                response.name,
                partition.partition_index,
                partition.leader_id,
                partition.leader_epoch,
                tuple(partition.replica_nodes),
                tuple(partition.isr_nodes),
                tuple(partition.offline_replicas),
                int(least[response.name]) if response.name in least else None,
                response.is_internal,
            )
            for response in found
            for partition in sorted(response.partitions, key=lambda one: int(one.partition_index))
        ]

    async def hot_partitions(
        self,
        *,
        keys_max: int = 10,
        full_share: float = FULL_SHARE,
        cool_down_s: float = COOL_DOWN_S,
        timeout_ms: float = 5_000,
    ) -> HotPartitions:
        """The hot partitions, with at most `keys_max` (up to 20) keys of each whose topic the client may read, the
        loads of the brokers, and which remedies help. Nothing is changed.

        A broker that uses `full_share` of a processor core counts as full. For `cool_down_s` after its leader has
        changed, no move of a partition is a remedy. Each broker is asked itself, for at most `timeout_ms`. Raises
        `ClusterAuthorizationFailed` without DESCRIBE for the cluster."""
        found = await self.status()
        live = [one.node_id for one in found.brokers if not one.is_fenced]
        answers = await asyncio.gather(
            *(ask_broker(self._cluster, node_id, keys_max, timeout_ms) for node_id in live)
        )
        for one in answers:
            if isinstance(one.error, ClusterAuthorizationFailed):
                raise copied(one.error)
        hot = {
            TopicPartition(each.topic, each.partition_index)
            for one in answers
            if one.error is None
            for each in one.response.partitions
        }
        placements: dict[TopicPartition, Placement] = {}
        lags: dict[TopicPartition, tuple[tuple[str, int], ...]] = {}
        if hot:
            for topic in sorted({each.topic for each in hot}):
                placements |= await self._placements(topic)
            known = [each for each in sorted(hot) if each in placements]
            lags = await group_lags(self._cluster, known, timeout_ms=timeout_ms) if known else {}
        return combine(answers, placements, lags, full_share=full_share, cool_down_s=cool_down_s)

    async def _placements(self, topic: str) -> dict[TopicPartition, Placement]:
        """The partitions of a topic; none if it was deleted, or the client may not describe it."""
        try:
            partitions = await self.partitions([topic])
            policies = await self._topic_settings([topic], CLEANUP_POLICY_CONFIG)
        except MansioError:
            return {}
        is_compacted = COMPACT in policies.get(topic, COMPACT)  # if it is not known, it may be
        return {
            TopicPartition(topic, one.partition): Placement(
                one.leader, one.replicas, one.in_sync_replicas, is_compacted
            )
            for one in partitions
        }

    async def elect_leaders(
        self,
        election_type: ElectionType,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        timeout_ms: int = 30_000,
    ) -> list[ElectionResult]:
        """Elect a leader for each partition in `partitions` (None: for all partitions), and return the outcomes.

        With the type "preferred" the first replica becomes the leader if it is in sync; no record is lost. With the
        type "unclean" a live replica that is *not* in sync becomes the leader of a partition that has none;
        acknowledged records that this replica does not have are lost permanently.
        """
        results = []
        wanted = None if partitions is None else list(partitions)
        for begin in range(0, 1 if wanted is None else len(wanted), ELECTIONS_PER_REQUEST):
            grouped: dict[str, list[int]] = {}
            for topic, partition in () if wanted is None else wanted[begin : begin + ELECTIONS_PER_REQUEST]:
                grouped.setdefault(topic, []).append(partition)
            fields = {
                "election_type": ELECTION_TYPES[election_type],
                "topic_partitions": None
                if wanted is None
                else [{"topic": topic, "partitions": indexes} for topic, indexes in grouped.items()],
                "timeout_ms": timeout_ms,
            }
            response = await self._cluster.request_controller(
                ApiKey.ELECT_LEADERS,
                fields,
                check=lambda response: raise_for_code(getattr(response, "error_code", 0)),
            )
            results += [
                _result(each.topic, partition)
                for each in response.replica_election_results
                for partition in each.partition_result
            ]
        self._cluster.mark_stale({result.topic for result in results})
        return sorted(results, key=lambda result: (result.topic, result.partition))

    async def log_dirs(self, *, timeout_ms: float = 5_000) -> list[LogDir]:
        """The data directory of each broker that the cluster reports as live, sorted by node id. Each broker is asked
        itself, for at most `timeout_ms`; one that does not answer, or refuses to, has an `error`."""
        found = await self.status()
        live = [one.node_id for one in found.brokers if not one.is_fenced]
        return list(await asyncio.gather(*(self._log_dir(node_id, timeout_ms) for node_id in live)))

    async def _log_dir(self, node_id: int, timeout_ms: float) -> LogDir:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await self._cluster.connection(node_id)
                response = await connection.request(ApiKey.DESCRIBE_LOG_DIRS, {"topics": None})
            raise_for_code(response.error_code)
        except TimeoutError:
            return LogDir(node_id, {}, error=RequestTimedOut(f"no answer within {timeout_ms:.0f} ms"))
        except MansioError as error:
            return LogDir(node_id, {}, error=without_traceback(error))
        return _log_dir(node_id, response)

    async def alter_reassignments(
        self,
        replicas: Mapping[tuple[str, int], Sequence[int] | None],
        *,
        allow_replication_factor_change: bool = True,
        timeout_ms: int = 30_000,
    ) -> list[ReassignmentResult]:
        """Begin to move partitions, given as (topic, index), to other replicas (node ids), the preferred leader first;
        None ends an ongoing move and returns to the replicas before it (KIP-455).

        Returns a result for each partition, as soon as the move has begun; `list_reassignments` returns those that
        continue. A different number of replicas changes the replication factor, or is refused without
        `allow_replication_factor_change` (KIP-860). A partition that is moving already is moved to the new replicas
        instead.
        """
        results = []
        wanted = list(replicas.items())
        for begin in range(0, len(wanted), REASSIGNMENTS_PER_REQUEST):
            grouped: dict[str, list[dict[str, Any]]] = {}
            for (topic, partition), node_ids in wanted[begin : begin + REASSIGNMENTS_PER_REQUEST]:
                grouped.setdefault(topic, []).append(
                    {
                        "partition_index": partition,
                        "replicas": None if node_ids is None else list(node_ids),
                    }
                )
            response = await self._cluster.request_controller(
                ApiKey.ALTER_PARTITION_REASSIGNMENTS,
                {
                    "timeout_ms": timeout_ms,
                    "allow_replication_factor_change": allow_replication_factor_change,
                    "topics": [
                        {"name": topic, "partitions": partitions} for topic, partitions in grouped.items()
                    ],
                },
                check=check_top_level_error,
                retry_unknown_topic=False,
            )
            results += [
                _reassignment_result(topic.name, partition)
                for topic in response.responses
                for partition in topic.partitions
            ]
        self._cluster.mark_stale({result.topic for result in results})
        return sorted(results, key=lambda result: (result.topic, result.partition))

    async def unregister(self, node_id: int) -> None:
        """Have the cluster forget a broker that has left it for good: it is drained and stopped (KIP-631). It can
        register again.

        Raises `BrokerIdNotRegistered`, and `InvalidRequest` if the broker runs or has replicas."""
        await self._cluster.request_controller(
            ApiKey.UNREGISTER_BROKER, {"broker_id": node_id}, check=check_top_level_error
        )

    async def list_reassignments(self, *, timeout_ms: int = 30_000) -> list[Reassignment]:
        """The ongoing moves of partitions, sorted by topic and partition (KIP-455)."""
        response = await self._cluster.request_controller(
            ApiKey.LIST_PARTITION_REASSIGNMENTS,
            {"timeout_ms": timeout_ms, "topics": None},
            check=check_top_level_error,
        )
        found = [
            Reassignment(
                topic.name,
                partition.partition_index,
                tuple(partition.replicas),
                tuple(partition.adding_replicas),
                tuple(partition.removing_replicas),
            )
            for topic in response.topics
            for partition in topic.partitions
        ]
        return sorted(found, key=lambda one: (one.topic, one.partition))

    async def _pages(self, topics: Sequence[str] | None, broker: int | None) -> AsyncIterator[Any]:
        """Topics of all DescribeTopicPartitions pages. A topic whose partitions span several pages is yielded once per
        page."""
        cursor = None
        while True:
            page = await self._cluster.request(
                ApiKey.DESCRIBE_TOPIC_PARTITIONS,
                {
                    "topics": [{"name": name} for name in topics or ()],
                    "response_partition_limit": PARTITIONS_PER_PAGE,
                    "cursor": cursor,
                },
                node_id=broker,
            )
            for topic in page.topics:
                error = client_error_for_code(topic.error_code) if topic.error_code else None
                if isinstance(error, UnknownTopicOrPartition) and topics is None:
                    continue  # deleted in the meantime
                if error is not None:
                    raise_for_code(topic.error_code, f"topic {topic.name}: {error.message}")
                yield topic
            if page.next_cursor is None:
                return
            cursor = {
                "topic_name": page.next_cursor.topic_name,
                "partition_index": page.next_cursor.partition_index,
            }

    async def _topic_settings(self, topics: Sequence[str], setting: str) -> dict[str, str]:
        """The value of a setting by topic; topics whose settings the broker does not return are absent."""
        found = {}
        for begin in range(0, len(topics), TOPICS_PER_REQUEST):
            resources = [
                {
                    "resource_type": ResourceType.TOPIC,
                    "resource_name": name,
                    "configuration_keys": [setting],
                }
                for name in topics[begin : begin + TOPICS_PER_REQUEST]
            ]
            response = await self._cluster.request(
                ApiKey.DESCRIBE_CONFIGS,
                {"resources": resources, "include_synonyms": False, "include_documentation": False},
            )
            for result in response.results:
                for entry in result.configs or ():
                    if entry.name == setting and entry.value is not None:
                        found[result.resource_name] = entry.value
        return found


def _health_problem(response: Any) -> HealthProblem:
    partition = response.partition_index
    return HealthProblem(
        response.reason, response.detail, response.topic, None if partition < 0 else partition
    )


def _result(topic: str, response: Any) -> ElectionResult:
    code = response.error_code
    if code == ELECTION_NOT_NEEDED:
        return ElectionResult(topic, response.partition_id, "not needed")
    if code:
        return ElectionResult(
            topic, response.partition_id, "failed", client_error_for_code(code, response.error_message)
        )
    return ElectionResult(topic, response.partition_id, "elected")


def _reassignment_result(topic: str, response: Any) -> ReassignmentResult:
    code = response.error_code
    error = client_error_for_code(code, response.error_message) if code else None
    return ReassignmentResult(topic, response.partition_index, error)


def _log_dir(node_id: int, response: Any) -> LogDir:
    """Decode a DescribeLogDirs response. A directory that cannot be read has an error of its own."""
    sizes: dict[TopicPartition, int] = {}
    total_bytes = usable_bytes = None
    for result in response.results:
        if result.error_code:
            return LogDir(node_id, {}, error=client_error_for_code(result.error_code))
        for topic in result.topics:
            for partition in topic.partitions:
                sizes[TopicPartition(topic.name, partition.partition_index)] = partition.partition_size
        if result.total_bytes >= 0:
            total_bytes, usable_bytes = result.total_bytes, result.usable_bytes
    return LogDir(node_id, sizes, total_bytes, usable_bytes)
