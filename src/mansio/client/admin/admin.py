"""Admin client: topics, settings, groups and offsets.

Retriable errors are retried for the client's retry timeout; other errors are raised as classes of `mansio.errors`.
Results are frozen dataclasses of plain values.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mansio.client.admin.acls import AclAdmin
from mansio.client.admin.cluster import ClusterAdmin
from mansio.client.admin.delays import DelayAdmin
from mansio.client.admin.explanations import SAMPLE_SECONDS, GroupExplanation, explain_group
from mansio.client.admin.groups import GroupDescription, GroupListings, describe_group, list_groups
from mansio.client.admin.quotas import QuotaAdmin
from mansio.client.admin.schedules import ScheduleAdmin
from mansio.client.admin.schemas import SchemaAdmin
from mansio.client.admin.shares import ShareAdmin
from mansio.client.admin.tokens import TokenAdmin
from mansio.client.admin.traces import TraceAdmin
from mansio.client.admin.transactions import TransactionAdmin
from mansio.client.admin.users import UserAdmin
from mansio.client.offset_resolution import resolve_start_offsets
from mansio.client.types import TopicPartition, milliseconds
from mansio.config.config_def import Operation, ResourceType
from mansio.errors import InvalidRequest, OffsetOutOfRange, TopicAlreadyExists, TopicAuthorizationFailed
from mansio.net.offsets import (
    CommittedOffset,
    ListedOffset,
    commit_offsets,
    delete_records,
    fetch_offsets,
    list_offsets,
)
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, MAX_TIMESTAMP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from mansio.net.cluster import Cluster
    from mansio.net.metadata import Node, PartitionMetadata, TopicMetadata

# Numbers of Kafka's protocol.
BROKER_DEFAULT_COUNT = -1
"""Number of partitions or replicas in a request that selects the broker's default."""
ALL_RECORDS = -1
"""Offset in a DeleteRecords request that deletes all records below the high watermark."""
CONFIG_SOURCES = {
    1: "topic",
    2: "broker",
    3: "broker default",
    4: "broker file",
    5: "default",
    6: "broker logger",
    8: "group",
}
"""Name of each source of a setting, by its number in Kafka's protocol."""


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Id and live brokers of a cluster.

    `controller_id` is a broker that accepts changes (-1: unknown). Every broker of a Mansio cluster accepts changes,
    and the broker that answered returns its own id. `client.admin.cluster.status` returns the active controller.
    """

    cluster_id: str | None
    controller_id: int
    brokers: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """Name, id and partitions of one topic. `topic_id` is 16 bytes."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionMetadata, ...]
    is_internal: bool


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting, with its value and the source of the value. `value` is None if the setting is sensitive."""

    name: str
    value: str | None
    source: str
    is_default: bool
    is_read_only: bool = False
    is_sensitive: bool = False
    documentation: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """Lag of a group in one partition, in offsets. `committed_offset` and `lag` are None without a committed offset."""

    committed_offset: int | None
    start_offset: int
    end_offset: int
    lag: int | None


class Admin:
    """Administration client of one cluster; available as `client.admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.quotas: QuotaAdmin = QuotaAdmin(cluster)
        """Client quotas."""
        self.users: UserAdmin = UserAdmin(cluster)
        """Users that authenticate with a password."""
        self.acls: AclAdmin = AclAdmin(cluster)
        """Access control lists: what users may do."""
        self.tokens: TokenAdmin = TokenAdmin(cluster)
        """Delegation tokens."""
        self.cluster: ClusterAdmin = ClusterAdmin(cluster)
        """State of the cluster, and elections."""
        self.shares: ShareAdmin = ShareAdmin(cluster)
        """Share groups."""
        self.schemas: SchemaAdmin = SchemaAdmin(cluster)
        """The schema registry."""
        self.traces: TraceAdmin = TraceAdmin(cluster)
        """The history of records."""
        self.delays: DelayAdmin = DelayAdmin(cluster)
        """Delayed records that are pending."""
        self.schedules: ScheduleAdmin = ScheduleAdmin(cluster)
        """Recurring schedules."""
        self.transactions: TransactionAdmin = TransactionAdmin(cluster)
        """Transactions of producers with a transactional id."""

    # -- topics and cluster --------

    async def describe_cluster(self) -> ClusterDescription:
        """Id and live brokers of the cluster, requested from a broker and not taken from the cache."""
        await self._cluster.retry(lambda: self._cluster.refresh_metadata(()))
        brokers = tuple(sorted(self._cluster.nodes.values()))
        return ClusterDescription(self._cluster.cluster_id, self._cluster.controller_id, brokers)

    async def list_topics(self, *, include_internal: bool = False) -> list[str]:
        """Sorted names of all topics, without internal topics unless `include_internal`."""
        views = await self._cluster.topics()
        return [name for name, view in views.items() if include_internal or not view.is_internal]

    async def describe_topic(self, name: str) -> TopicDescription:
        """Id and partitions of a topic. Raises `UnknownTopicOrPartition`."""
        self._cluster.mark_stale((name,))
        return _topic_description(await self._cluster.topic(name, wait_ms=0, may_create=False))

    async def describe_topics(self, *, include_internal: bool = False) -> list[TopicDescription]:
        """Descriptions of all topics, sorted by name, without internal topics unless `include_internal`."""
        views = (await self._cluster.topics()).values()
        return [_topic_description(view) for view in views if include_internal or not view.is_internal]

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int = BROKER_DEFAULT_COUNT,
        replication_factor: int = BROKER_DEFAULT_COUNT,
        config: Mapping[str, str] | None = None,
        exist_ok: bool = False,
        validate_only: bool = False,
        timeout_ms: int = 30_000,
    ) -> None:
        """Create a topic, and wait until the brokers know it, unless the user may not describe it. With `exist_ok` a
        topic that exists is kept as it is, whatever its partitions and settings are. With `validate_only` the request
        is checked and nothing is created.

        Raises `TopicAlreadyExists`, `InvalidTopic` or `InvalidConfig`.
        """
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": replication_factor,
            "configs": [{"name": key, "value": value} for key, value in (config or {}).items()],
        }
        fields = {"topics": [topic], "timeout_ms": timeout_ms, "validate_only": validate_only}
        try:
            await self._cluster.request_controller(
                ApiKey.CREATE_TOPICS, fields, check=_check_item_errors("topics")
            )
        except TopicAlreadyExists:
            if not exist_ok:
                raise
        if not validate_only:
            self._cluster.mark_stale((name,))
            with contextlib.suppress(TopicAuthorizationFailed):
                await self._cluster.topic(name)

    async def delete_topic(self, name: str, *, timeout_ms: int = 30_000) -> None:
        """Delete a topic and its records. Raises `UnknownTopicOrPartition`."""
        fields = {
            "topics": [{"name": name, "topic_id": None}],
            "topic_names": [name],
            "timeout_ms": timeout_ms,
        }
        await self._cluster.request_controller(
            ApiKey.DELETE_TOPICS, fields, check=_check_item_errors("responses"), retry_unknown_topic=False
        )
        self._cluster.mark_stale((name,))

    async def create_partitions(
        self, name: str, total_count: int, *, validate_only: bool = False, timeout_ms: int = 30_000
    ) -> None:
        """Increase the number of partitions of a topic to `total_count`.

        Producers then assign many keys to other partitions than before. With `validate_only` the request is checked and
        nothing is changed.
        """
        fields = {
            "topics": [{"name": name, "count": total_count, "assignments": None}],
            "timeout_ms": timeout_ms,
            "validate_only": validate_only,
        }
        await self._cluster.request_controller(
            ApiKey.CREATE_PARTITIONS, fields, check=_check_item_errors("results"), retry_unknown_topic=False
        )
        self._cluster.mark_stale((name,))

    async def delete_records(
        self,
        topics: Iterable[str | TopicPartition],
        *,
        before: Literal["end"] | int | datetime,
        dry_run: bool = False,
        timeout_ms: int = 30_000,
    ) -> dict[TopicPartition, int]:
        """Delete the records of topics or partitions before an offset or a time, or all records ("end").

        Returns the new log start offset of each partition. When the method returns, the records are permanently deleted
        and no reader receives them. With `dry_run` nothing is deleted. Raises `OffsetOutOfRange` for an offset above
        the high watermark, `PolicyViolation` for a topic with `cleanup.policy=compact` or for records that a retention
        hold of a pipeline protects, `InvalidTopic` for an internal topic, and `InvalidRequest` for a negative offset.
        """
        partitions = await self._partitions(topics)
        if not partitions:
            return {}
        if before == "end" and not dry_run:
            return await delete_records(
                self._cluster, dict.fromkeys(partitions, ALL_RECORDS), timeout_ms=timeout_ms
            )
        before_offsets = await resolve_start_offsets(
            self._cluster, partitions, "latest" if before == "end" else before
        )
        if not dry_run:
            return await delete_records(self._cluster, before_offsets, timeout_ms=timeout_ms)
        starts = await list_offsets(self._cluster, dict.fromkeys(partitions, EARLIEST_TIMESTAMP))
        ends = await list_offsets(self._cluster, dict.fromkeys(partitions, LATEST_TIMESTAMP))
        for partition, offset in before_offsets.items():
            if offset > ends[partition].offset:
                raise OffsetOutOfRange(
                    f"{partition.topic}-{partition.partition} ends at {ends[partition].offset}"
                )
        return {
            partition: max(offset, starts[partition].offset) for partition, offset in before_offsets.items()
        }

    # -- settings --------

    async def describe_config(
        self,
        name: str | int,
        *,
        kind: Literal["topic", "broker", "group"] = "topic",
        include_documentation: bool = False,
    ) -> dict[str, ConfigEntry]:
        """All settings of the topic, broker or group `name`, by the name of the setting.

        A broker is named by its node id; the name "" selects the dynamic settings that apply to all brokers. A group
        need not exist.
        """
        resource = {
            "resource_type": _resource_type(kind),
            "resource_name": str(name),
            "configuration_keys": None,
        }
        fields = {
            "resources": [resource],
            "include_synonyms": False,
            "include_documentation": include_documentation,
        }
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS,
            fields,
            node_id=int(name) if kind == "broker" and name != "" else None,
            check=_check_item_errors("results"),
            retry_unknown_topic=False,
        )
        return {
            entry.name: ConfigEntry(
                entry.name,
                entry.value,
                CONFIG_SOURCES.get(entry.config_source, "unknown"),
                entry.config_source == 5,
                entry.read_only,
                entry.is_sensitive,
                entry.documentation,
            )
            for entry in response.results[0].configs
        }

    async def alter_topic_config(
        self, name: str, changes: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change settings of a topic atomically. The value None resets a setting to its default. Raises
        `InvalidConfig`."""
        await self._alter_config(ResourceType.TOPIC, name, changes, validate_only=validate_only)

    async def alter_broker_config(
        self, node_id: int | None, changes: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change dynamic settings of broker `node_id`, or those of all brokers (None), atomically.

        The value None removes a setting. Raises `InvalidConfig`, also for a setting that is not dynamic.
        """
        name = "" if node_id is None else str(node_id)
        await self._alter_config(ResourceType.BROKER, name, changes, validate_only=validate_only)

    async def alter_group_config(
        self, group: str, changes: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change settings of a group atomically. The value None resets a setting to the broker's default. The group
        need not exist yet. Raises `InvalidConfig`."""
        await self._alter_config(ResourceType.GROUP, group, changes, validate_only=validate_only)

    async def _alter_config(
        self, kind: int, name: str, changes: Mapping[str, str | None], *, validate_only: bool
    ) -> None:
        configs = [
            {
                "name": key,
                "config_operation": Operation.DELETE if value is None else Operation.SET,
                "value": value,
            }
            for key, value in changes.items()
        ]
        resource = {"resource_type": kind, "resource_name": name, "configs": configs}
        fields = {"resources": [resource], "validate_only": validate_only}
        await self._cluster.request_controller(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            fields,
            check=_check_item_errors("responses"),
            retry_unknown_topic=False,
        )

    # -- offsets --------

    async def list_offsets(
        self,
        partitions: Iterable[TopicPartition],
        at: Literal["earliest", "latest", "max_timestamp"] | datetime | int = "latest",
    ) -> dict[TopicPartition, ListedOffset]:
        """The offset in each partition at a position (Kafka's ListOffsets).

        `at` is "earliest" (log start offset), "latest" (log end offset), "max_timestamp" (record with the greatest
        timestamp), or a time (milliseconds since the Unix epoch, or a datetime): the first record at or after it.
        """
        names = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP, "max_timestamp": MAX_TIMESTAMP}
        timestamp = names[at] if isinstance(at, str) else milliseconds(at)
        return await list_offsets(self._cluster, dict.fromkeys(partitions, timestamp))

    async def group_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Committed offsets of a group, by partition."""
        return await fetch_offsets(self._cluster, group)

    async def group_lag(self, group: str) -> dict[TopicPartition, PartitionLag]:
        """Lag of a group in each partition that has a committed offset of the group or is assigned to a member."""
        committed = await fetch_offsets(self._cluster, group)
        assigned = [p for member in (await self.describe_group(group)).members for p in member.partitions]
        partitions = sorted({*committed, *assigned})
        starts = await list_offsets(self._cluster, dict.fromkeys(partitions, EARLIEST_TIMESTAMP))
        ends = await list_offsets(self._cluster, dict.fromkeys(partitions, LATEST_TIMESTAMP))
        found = {}
        for partition in partitions:
            offset = committed[partition].offset if partition in committed else None
            end = ends[partition].offset
            lag = None if offset is None else max(0, end - offset)
            found[partition] = PartitionLag(offset, starts[partition].offset, end, lag)
        return found

    async def reset_offsets(
        self,
        group: str,
        topics: Iterable[str | TopicPartition],
        *,
        to: Literal["earliest", "latest"] | int | datetime | None = None,
        shift: int | None = None,
        dry_run: bool = False,
    ) -> dict[TopicPartition, int]:
        """Reset the committed offsets of a group without members in topics or partitions, and return the new offsets.

        The new offsets are those of the position `to`, or the committed offsets plus `shift`; they are limited to the
        range between log start and log end offset. With `dry_run` nothing is committed. Raises `UnknownMember` while
        the group has members.
        """
        if (to is None) == (shift is None):
            raise InvalidRequest("give either `to` or `shift`")
        partitions = await self._partitions(topics)
        if shift is None:
            offsets = await resolve_start_offsets(self._cluster, partitions, "earliest" if to is None else to)
        else:
            committed = await fetch_offsets(self._cluster, group, partitions)
            offsets = {partition: entry.offset + shift for partition, entry in committed.items()}
        starts = await list_offsets(self._cluster, dict.fromkeys(offsets, EARLIEST_TIMESTAMP))
        ends = await list_offsets(self._cluster, dict.fromkeys(offsets, LATEST_TIMESTAMP))
        new = {p: min(max(offset, starts[p].offset), ends[p].offset) for p, offset in offsets.items()}
        if not dry_run:
            await commit_offsets(self._cluster, group, new)
        return new

    async def delete_offsets(self, group: str, topics: Iterable[str | TopicPartition]) -> None:
        """Delete the committed offsets of a group in topics or partitions. Raises `GroupSubscribedToTopic` while a
        member is subscribed to one of the topics."""
        grouped: dict[str, list[int]] = {}
        for topic, partition in await self._partitions(topics):
            grouped.setdefault(topic, []).append(partition)
        wanted = [
            {"name": topic, "partitions": [{"partition_index": index} for index in indexes]}
            for topic, indexes in grouped.items()
        ]

        def check(response: Any) -> None:
            raise_for_code(response.error_code)
            for topic in response.topics:
                for entry in topic.partitions:
                    raise_for_code(entry.error_code)

        await self._cluster.request_coordinator(
            group, ApiKey.OFFSET_DELETE, {"group_id": group, "topics": wanted}, check=check
        )

    async def _partitions(self, topics: Iterable[str | TopicPartition]) -> list[TopicPartition]:
        found: list[TopicPartition] = []
        for given in topics:
            if isinstance(given, TopicPartition):
                found.append(given)
            else:
                view = await self._cluster.topic(given)
                found += [TopicPartition(given, partition.index) for partition in view.partitions]
        return found

    # -- groups --------

    async def list_groups(self, *, timeout_ms: float | None = None) -> GroupListings:
        """The groups of all brokers, sorted by id.

        The requests are repeated for `timeout_ms` (default: the retry timeout of the client) while a broker does not
        respond or is still loading, or a partition of `__consumer_offsets` has no leader. Then the groups that were
        found are returned; `unreachable`, `missing_partitions` and `is_complete` of the result tell whether groups are
        missing. Raises an error if no broker responds.
        """
        return await list_groups(self._cluster, timeout_ms)

    async def describe_group(self, group: str) -> GroupDescription:
        """State and members of a classic group or consumer group. The state is "Dead" if the group does not exist."""
        return await describe_group(self._cluster, group)

    async def explain_group(self, group: str, *, sample: float = SAMPLE_SECONDS) -> GroupExplanation:
        """What keeps a group of any type from going on, with the command that helps.

        `sample` is the time in seconds, 0 to 10, for which the brokers look at what changes; with 0 they look once, and
        causes that show only over time are not found. A group that does not exist is explained if a client was refused
        to read in it; otherwise `GroupIdNotFound` is raised. Needs DESCRIBE for the group; topics without DESCRIBE are
        counted only.
        """
        return await explain_group(self._cluster, group, sample)

    async def delete_group(self, group: str) -> None:
        """Delete a group without members. Raises `NonEmptyGroup` or `GroupIdNotFound`."""
        await self._cluster.request_coordinator(
            group, ApiKey.DELETE_GROUPS, {"groups_names": [group]}, check=_check_item_errors("results")
        )


def _check_item_errors(field_name: str) -> Any:
    """Function, used as `check` of `Cluster.request`, that raises the top-level error of a response or the first error
    in its list `field_name`."""

    def check(response: Any) -> None:
        raise_for_code(getattr(response, "error_code", 0))
        for item in getattr(response, field_name):
            raise_for_code(item.error_code, getattr(item, "error_message", None))

    return check


def _resource_type(kind: str) -> int:
    return {"topic": ResourceType.TOPIC, "broker": ResourceType.BROKER, "group": ResourceType.GROUP}[kind]


def _topic_description(view: TopicMetadata) -> TopicDescription:
    return TopicDescription(view.name, view.topic_id, view.partitions, view.is_internal)
