"""Topics of the target: created with the partitions and settings of their sources, and kept up with them.

Copied are the settings that the source's topic has itself, not its broker's, except those of `NOT_COPIED`, and those
that the target's broker does not have. Other settings of the target's topic stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.config.config_def import Operation, ResourceType
from mansio.errors import InvalidRequest, UnknownTopicOrPartition
from mansio.net.retry import raise_for_code
from mansio.pipelines.mirroring.state_topic import STATE_TOPIC_PREFIX
from mansio.spark.sync_client import ensure_topic, find_topic
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.net.metadata import TopicMetadata
    from mansio.spark.sync_client import SyncClient

NOT_COPIED: Final = (
    "message.timestamp.",  # copies have the timestamps of their records
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
    "min.insync.replicas",
    "unclean.leader.election.enable",
    "remote.",
    "local.retention.",
    "mansio.dedup.",  # a deduplication window refuses transactions
    "mansio.delay.",
    "mansio.queue.attributes",
)
"""Prefixes of settings that depend on the cluster, or that a copy must not have."""
TIMESTAMP_TYPE_SETTING: Final = "message.timestamp.type"
BATCH_BYTES_SETTING: Final = "max.message.bytes"
MESSAGE_BYTES_ADDED: Final = 4_096
"""Added to the maximum batch size of the source, for the header of a copy."""
TOPIC_CONFIG_SOURCE: Final = 1
"""`config_source` of a setting that the topic has itself."""
TIMEOUT_MS: Final = 30_000


def ensure_copy(
    source: SyncClient, target: SyncClient, source_topic: str, target_topic: str
) -> tuple[TopicMetadata, TopicMetadata, int]:
    """Metadata of both topics, and the maximum size of a batch of the target's.

    Creates the topic on the target, adds partitions that it lacks, and sets the settings that differ. Raises
    `UnknownTopicOrPartition` if the source does not exist, `InvalidRequest` for an internal topic and if the target
    would not keep timestamps, and the brokers' errors."""
    try:
        view = find_topic(source, source_topic)
    except UnknownTopicOrPartition:
        raise UnknownTopicOrPartition(f"the source has no topic {source_topic}") from None
    if view.is_internal or source_topic.startswith(STATE_TOPIC_PREFIX):
        raise InvalidRequest(f"topic {source_topic} belongs to its cluster and cannot be mirrored")
    copy = ensure_topic(target, target_topic, len(view.partitions), {TIMESTAMP_TYPE_SETTING: "CreateTime"})
    if len(copy.partitions) < len(view.partitions):
        _create_partitions(target, target_topic, len(view.partitions))
        copy = find_topic(target, target_topic)
    wanted, found = _settings(source, source_topic), _settings(target, target_topic)
    changes = changed_settings(wanted, found)
    if changes:
        _alter(target, target_topic, changes)
    if found.get(TIMESTAMP_TYPE_SETTING, ("", False))[0] == "LogAppendTime":
        raise InvalidRequest(
            f"topic {target_topic} of the target stamps records with its own clock (message.timestamp.type): the copies"
            " would lose their timestamps"
        )
    return view, copy, int(changes.get(BATCH_BYTES_SETTING) or found[BATCH_BYTES_SETTING][0])


def batch_bytes_max(target: SyncClient, topic: str) -> int:
    """Maximum size of a batch in the topic."""
    return int(_settings(target, topic)[BATCH_BYTES_SETTING][0])


def changed_settings(
    source: Mapping[str, tuple[str, bool]], target: Mapping[str, tuple[str, bool]]
) -> dict[str, str]:
    """Return the settings to set on the target. Each setting: its value, and whether the topic has it itself."""
    wanted = {
        name: value
        for name, (value, is_own) in source.items()
        if is_own and name in target and not name.startswith(NOT_COPIED)
    }
    if BATCH_BYTES_SETTING in source and BATCH_BYTES_SETTING in target:
        size = int(source[BATCH_BYTES_SETTING][0]) + MESSAGE_BYTES_ADDED
        wanted[BATCH_BYTES_SETTING] = str(max(size, int(target[BATCH_BYTES_SETTING][0])))
    return {name: value for name, value in wanted.items() if target[name][0] != value}


def _settings(client: SyncClient, topic: str) -> dict[str, tuple[str, bool]]:
    resource = {"resource_type": ResourceType.TOPIC, "resource_name": topic, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    answer = client.run(
        client.cluster.request(
            ApiKey.DESCRIBE_CONFIGS, fields, check=_checked("results"), retry_unknown_topic=False
        )
    )
    return {
        entry.name: (entry.value, entry.config_source == TOPIC_CONFIG_SOURCE)
        for entry in answer.results[0].configs
        if entry.value is not None
    }


def _alter(client: SyncClient, topic: str, changes: Mapping[str, str]) -> None:
    configs = [
        {"name": name, "config_operation": Operation.SET, "value": value} for name, value in changes.items()
    ]
    resource = {"resource_type": ResourceType.TOPIC, "resource_name": topic, "configs": configs}
    client.run(
        client.cluster.request_controller(
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            {"resources": [resource], "validate_only": False},
            check=_checked("responses"),
            retry_unknown_topic=False,
        )
    )


def _create_partitions(client: SyncClient, topic: str, count: int) -> None:
    fields = {
        "topics": [{"name": topic, "count": count, "assignments": None}],
        "timeout_ms": TIMEOUT_MS,
        "validate_only": False,
    }
    client.run(
        client.cluster.request_controller(
            ApiKey.CREATE_PARTITIONS, fields, check=_checked("results"), retry_unknown_topic=False
        )
    )


def _checked(field_name: str) -> Any:
    """Return a check that raises the first error in the items of a response."""

    def check(response: Any) -> None:
        for item in getattr(response, field_name):
            raise_for_code(item.error_code, item.error_message)

    return check
