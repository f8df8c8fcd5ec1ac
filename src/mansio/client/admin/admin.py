"""Admin client: topics, settings, groups, offsets, cluster.

Each method sends one logical request; retriable errors are retried, others raised as typed errors. Results are frozen
dataclasses of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mansio.client.admin.cluster import ClusterAdmin
from mansio.client.admin.groups import GroupDescription, GroupListings, describe_group, list_groups
from mansio.client.admin.quotas import QuotaAdmin
from mansio.client.admin.shares import ShareAdmin
from mansio.client.consumer.offset_resolution import resolve_start_offsets
from mansio.client.types import TopicPartition, milliseconds
from mansio.errors import InvalidRequest, OffsetOutOfRange
from mansio.net.offsets import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    CommittedOffset,
    ListedOffset,
    commit_offsets,
    delete_records,
    fetch_offsets,
    list_offsets,
)
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from mansio.net.cluster import Cluster
    from mansio.net.metadata import Node, PartitionMetadata, TopicMetadata

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4
GROUP_RESOURCE = 32
SET = 0
DELETE = 1
BROKER_DEFAULT = -1
ALL_RECORDS = -1
SOURCES = {
    1: "topic",
    2: "broker",
    3: "broker default",
    4: "broker file",
    5: "default",
    6: "broker logger",
    8: "group",
}


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Brokers of a cluster. `controller_id`: a broker that accepts changes (-1: unknown). In a cluster every broker
    does, and the one that answered names itself; `client.admin.cluster.status` returns the active controller."""

    cluster_id: str | None
    controller_id: int
    brokers: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """One topic. `topic_id` is 16 bytes."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionMetadata, ...]
    is_internal: bool


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting and the source of its value. `value` is None if it is sensitive."""

    name: str
    value: str | None
    source: str
    is_default: bool
    is_read_only: bool = False
    is_sensitive: bool = False
    documentation: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """Lag of a group in one partition, in offsets. `committed` and `lag` are None without a committed offset."""

    committed: int | None
    start_offset: int
    end_offset: int
    lag: int | None


class Admin:
    """Administration of one cluster; available as `client.admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.quotas = QuotaAdmin(cluster)
        self.cluster = ClusterAdmin(cluster)
        self.shares = ShareAdmin(cluster)

    # -- topics and cluster --------

    async def describe_cluster(self) -> ClusterDescription:
        """The live brokers, requested now."""
        await self._cluster.retry(lambda: self._cluster.refresh_metadata(()))
        brokers = tuple(sorted(self._cluster.nodes.values()))
        return ClusterDescription(self._cluster.cluster_id, self._cluster.controller_id, brokers)

    async def list_topics(self, *, internal: bool = False) -> list[str]:
        """The names of all topics, sorted."""
        views = await self._cluster.topics()
        return [name for name, view in views.items() if internal or not view.is_internal]

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic's partitions. Raises `UnknownTopicOrPartition`."""
        self._cluster.mark_stale((name,))
        return _topic_description(await self._cluster.topic(name, wait_ms=0))

    async def describe_topics(self, *, internal: bool = False) -> list[TopicDescription]:
        """All topics, by name."""
        views = (await self._cluster.topics()).values()
        return [_topic_description(view) for view in views if internal or not view.is_internal]

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int = BROKER_DEFAULT,
        replication_factor: int = BROKER_DEFAULT,
        config: Mapping[str, str] | None = None,
        validate_only: bool = False,
        timeout_ms: int = 30_000,
    ) -> None:
        """Create a topic; it can be used when this returns. `TopicAlreadyExists`, `InvalidTopic`, `InvalidConfig`."""
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": replication_factor,
            "configs": [{"name": key, "value": value} for key, value in (config or {}).items()],
        }
        fields = {"topics": [topic], "timeout_ms": timeout_ms, "validate_only": validate_only}
        await self._cluster.request_controller(ApiKey.CREATE_TOPICS, fields, check=_check_each("topics"))
        if not validate_only:
            self._cluster.mark_stale((name,))
            await self._cluster.topic(name)

    async def delete_topic(self, name: str, *, timeout_ms: int = 30_000) -> None:
        """Delete a topic and its records. Raises `UnknownTopicOrPartition`."""
        fields = {
            "topics": [{"name": name, "topic_id": None}],
            "topic_names": [name],
            "timeout_ms": timeout_ms,
        }
        await self._cluster.request_controller(
            ApiKey.DELETE_TOPICS, fields, check=_check_each("responses"), retry_unknown_topic=False
        )
        self._cluster.mark_stale((name,))

    async def create_partitions(
        self, name: str, total: int, *, validate_only: bool = False, timeout_ms: int = 30_000
    ) -> None:
        """Add partitions up to `total`. Records with keys are then assigned to other partitions than before."""
        fields = {
            "topics": [{"name": name, "count": total, "assignments": None}],
            "timeout_ms": timeout_ms,
            "validate_only": validate_only,
        }
        await self._cluster.request_controller(
            ApiKey.CREATE_PARTITIONS, fields, check=_check_each("results"), retry_unknown_topic=False
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
        """Delete all records before an offset or a time, or all records ("end"). Returns the new start offsets.

        The deletion is permanent and visible to every reader when this returns. With `dry_run` nothing is deleted.
        Raises `OffsetOutOfRange` beyond the end, `PolicyViolation` for a compacted topic without deletion,
        `InvalidTopic` for an internal topic.
        """
        partitions = await self._partitions(topics)
        if not partitions:
            return {}
        if before == "end" and not dry_run:
            return await delete_records(
                self._cluster, dict.fromkeys(partitions, ALL_RECORDS), timeout_ms=timeout_ms
            )
        wanted = await resolve_start_offsets(
            self._cluster, partitions, "latest" if before == "end" else before
        )
        if not dry_run:
            return await delete_records(self._cluster, wanted, timeout_ms=timeout_ms)
        starts = await list_offsets(self._cluster, dict.fromkeys(partitions, EARLIEST))
        ends = await list_offsets(self._cluster, dict.fromkeys(partitions, LATEST))
        for partition, offset in wanted.items():
            if offset > ends[partition].offset:
                raise OffsetOutOfRange(
                    f"{partition.topic}-{partition.partition} ends at {ends[partition].offset}"
                )
        return {partition: max(offset, starts[partition].offset) for partition, offset in wanted.items()}

    # -- settings --------

    async def describe_config(
        self,
        name: str | int,
        *,
        kind: Literal["topic", "broker", "group"] = "topic",
        documentation: bool = False,
    ) -> dict[str, ConfigEntry]:
        """All settings of a topic (by name), a broker (by node id; "" for the dynamic defaults of all brokers) or a
        group (by id; it need not exist)."""
        resource = {
            "resource_type": _resource_type(kind),
            "resource_name": str(name),
            "configuration_keys": None,
        }
        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": documentation}
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS,
            fields,
            node_id=int(name) if kind == "broker" and name != "" else None,
            check=_check_each("results"),
            retry_unknown_topic=False,
        )
        return {
            entry.name: ConfigEntry(
                entry.name,
                entry.value,
                SOURCES.get(entry.config_source, "unknown"),
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
        """Change settings of a topic atomically; None resets one to its default. Raises `InvalidConfig`."""
        await self._alter(TOPIC_RESOURCE, name, changes, validate_only=validate_only)

    async def alter_broker_config(
        self, broker: int | None, changes: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change settings of a running broker atomically; with `broker` None the defaults of all brokers. None as a
        value removes one. Raises `InvalidConfig`, also for a setting that is read at the start."""
        name = "" if broker is None else str(broker)
        await self._alter(BROKER_RESOURCE, name, changes, validate_only=validate_only)

    async def alter_group_config(
        self, group: str, changes: Mapping[str, str | None], *, validate_only: bool = False
    ) -> None:
        """Change settings of a group, which need not exist yet, atomically; None resets one to the broker's default.
        Raises `InvalidConfig`."""
        await self._alter(GROUP_RESOURCE, group, changes, validate_only=validate_only)

    async def _alter(
        self, kind: int, name: str, changes: Mapping[str, str | None], *, validate_only: bool
    ) -> None:
        configs = [
            {"name": key, "config_operation": DELETE if value is None else SET, "value": value}
            for key, value in changes.items()
        ]
        resource = {"resource_type": kind, "resource_name": name, "configs": configs}
        fields = {"resources": [resource], "validate_only": validate_only}
        await self._cluster.request_controller(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            fields,
            check=_check_each("responses"),
            retry_unknown_topic=False,
        )

    # -- offsets --------

    async def list_offsets(
        self,
        partitions: Iterable[TopicPartition],
        at: Literal["earliest", "latest", "max_timestamp"] | datetime | int = "latest",
    ) -> dict[TopicPartition, ListedOffset]:
        """Start or end offsets of partitions, or of the first record at or after a time (ms, or a datetime)."""
        words = {"earliest": EARLIEST, "latest": LATEST, "max_timestamp": MAX_TIMESTAMP}
        wanted = words[at] if isinstance(at, str) else milliseconds(at)
        return await list_offsets(self._cluster, dict.fromkeys(partitions, wanted))

    async def group_offsets(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Committed offsets of a group."""
        return await fetch_offsets(self._cluster, group)

    async def group_lag(self, group: str) -> dict[TopicPartition, PartitionLag]:
        """Lag of a group in the partitions it has committed or its members are assigned."""
        committed = await fetch_offsets(self._cluster, group)
        assigned = [p for member in (await self.describe_group(group)).members for p in member.partitions]
        partitions = sorted({*committed, *assigned})
        starts = await list_offsets(self._cluster, dict.fromkeys(partitions, EARLIEST))
        ends = await list_offsets(self._cluster, dict.fromkeys(partitions, LATEST))
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
        """Reset the offsets of a group without members: to a position (`to`), or by `shift` from the committed offsets.

        Offsets are kept within what the partition has. Returns the new ones. `UnknownMember` while the group has
        members.
        """
        if (to is None) == (shift is None):
            raise InvalidRequest("give either `to` or `shift`")
        partitions = await self._partitions(topics)
        if shift is None:
            wanted = await resolve_start_offsets(self._cluster, partitions, "earliest" if to is None else to)
        else:
            committed = await fetch_offsets(self._cluster, group, partitions)
            wanted = {partition: entry.offset + shift for partition, entry in committed.items()}
        starts = await list_offsets(self._cluster, dict.fromkeys(wanted, EARLIEST))
        ends = await list_offsets(self._cluster, dict.fromkeys(wanted, LATEST))
        new = {p: min(max(offset, starts[p].offset), ends[p].offset) for p, offset in wanted.items()}
        if not dry_run:
            await commit_offsets(self._cluster, group, new)
        return new

    async def delete_offsets(self, group: str, topics: Iterable[str | TopicPartition]) -> None:
        """Delete committed offsets of a group. Raises `GroupSubscribedToTopic` while a member is subscribed."""
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
        """The groups of all brokers, by id.

        While a broker does not respond, is still loading, or a partition of `__consumer_offsets` has no leader, brokers
        are asked again for `timeout_ms` (default: the retry timeout of the client). Then the groups found are returned;
        `unreachable`, `missing_partitions` and `is_complete` of the listing report missing ones. Raises an error if no
        broker responds.
        """
        return await list_groups(self._cluster, timeout_ms)

    async def describe_group(self, group: str) -> GroupDescription:
        """State and members of a group of either protocol; a group that does not exist is in state "Dead"."""
        return await describe_group(self._cluster, group)

    async def delete_group(self, group: str) -> None:
        """Delete a group without members. Raises `NonEmptyGroup`, `GroupIdNotFound`."""
        await self._cluster.request_coordinator(
            group, ApiKey.DELETE_GROUPS, {"groups_names": [group]}, check=_check_each("results")
        )


def _check_each(field_name: str) -> Any:
    """A check that raises the error of the only requested item, for responses with an error per item."""

    def check(response: Any) -> None:
        raise_for_code(getattr(response, "error_code", 0))
        for item in getattr(response, field_name):
            raise_for_code(item.error_code, getattr(item, "error_message", None))

    return check


def _resource_type(kind: str) -> int:
    return {"topic": TOPIC_RESOURCE, "broker": BROKER_RESOURCE, "group": GROUP_RESOURCE}[kind]


def _topic_description(view: TopicMetadata) -> TopicDescription:
    return TopicDescription(view.name, view.topic_id, view.partitions, view.is_internal)
