"""Config service: describe and change the settings of topics, groups and this broker.

Settings of topics and groups can be changed; those of the broker are read at start and read-only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from mansio.config.config_entries import ConfigEntry, broker_entries
from mansio.errors import InvalidRequest
from mansio.metadata.topic_plan import check_topic_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
    from mansio.broker.services.topics import TopicService
    from mansio.config.config_def import Change
    from mansio.config.settings import Settings


class ConfigResource(IntEnum):
    """Kinds of resources that have settings, with Kafka's numbers."""

    TOPIC = 2
    BROKER = 4
    GROUP = 32


class ConfigService:
    """All methods run on the broker's event loop. `kind` may be any number; an unknown one raises `InvalidRequest`."""

    __slots__ = ("_groups", "_settings", "_topics")

    def __init__(self, settings: Settings, *, topics: TopicService, groups: GroupConfigManager) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups

    def describe(self, kind: int, name: str) -> list[ConfigEntry]:
        """Every setting of a resource with its source. Broker "" stands for the dynamic defaults of all brokers, of
        which there are none. Raises `InvalidRequest`, `InvalidTopic`, `UnknownTopicOrPartition`."""
        if kind == ConfigResource.TOPIC:
            check_topic_name(name)
            return self._topics.describe(self._topics.find(name))
        if kind == ConfigResource.GROUP:
            return self._groups.describe(name)
        if kind != ConfigResource.BROKER:
            raise InvalidRequest(
                f"resource type {kind}: only topics (2), brokers (4) and groups (32) have settings here"
            )
        if name == "":
            return []
        if name != str(self._settings.node_id):
            raise InvalidRequest(
                f"broker {name!r} was requested, but this is broker {self._settings.node_id}"
            )
        return broker_entries(self._settings)

    def resources(self, kinds: Iterable[int]) -> list[tuple[str, int]]:
        """(name, kind) of the resources of these kinds; unknown kinds have none."""
        found: list[tuple[str, int]] = []
        for kind in kinds:
            if kind == ConfigResource.TOPIC:
                found += [(name, kind) for name in sorted(self._topics.state.topics)]
            elif kind == ConfigResource.BROKER:
                brokers = {self._settings.node_id, *self._topics.state.brokers}
                found += [(str(node_id), kind) for node_id in sorted(brokers)]
            elif kind == ConfigResource.GROUP:
                found += [(group_id, kind) for group_id in self._groups.groups()]
        return found

    async def alter(
        self, kind: int, name: str, changes: Sequence[Change], *, replace: bool, validate_only: bool
    ) -> None:
        """Change settings of a topic or group; with `replace` the others are reset to their defaults. Raises as
        `TopicService.alter_configs`, and `InvalidRequest` for other kinds."""
        if kind == ConfigResource.BROKER:
            raise InvalidRequest(
                "the broker's settings are read at start: set them in its file or environment"
            )
        if kind == ConfigResource.TOPIC:
            check_topic_name(name)
            await self._topics.alter_configs(name, changes, replace=replace, validate_only=validate_only)
        elif kind == ConfigResource.GROUP:
            await self._groups.alter(name, changes, replace=replace, validate_only=validate_only)
        else:
            raise InvalidRequest(f"resource type {kind}: only topics (2) and groups (32) can be changed here")
