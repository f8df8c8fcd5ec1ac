"""Description, listing and alteration of the settings of topics, groups and brokers.

All settings of topics and groups can be changed, and the dynamic settings of brokers. A group can have settings before
it exists, and keeps them when it is deleted.

Invariants:
* A result is returned for each resource; an error of one resource does not affect the others.
* The response to one describe request has about `ENTRIES_MAX` settings at most, because a short request can name many
  resources.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.config.config_def import ResourceType
from mansio.config.item_limit import too_many_items
from mansio.errors import InvalidRequest, MansioError
from mansio.metadata.topic_plan import check_topic_name
from mansio.state.authorization import acls
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.broker.coordinator.group.group_config_manager import GroupConfigManager
    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.broker.services.broker_configs import BrokerConfigManager
    from mansio.broker.topics.topics import TopicService
    from mansio.config.config_def import Change
    from mansio.config.config_entries import ConfigEntry
    from mansio.config.settings import Settings

ENTRIES_MAX: Final = 250_000
"""Settings after which a describe request gets errors for its remaining resources; as many as 10,000 topics have."""


@dataclass(frozen=True, slots=True)
class ConfigResource:
    """A resource with settings. `kind`: its `ResourceType`; any other number leads to an error for this resource."""

    kind: int
    name: str


@dataclass(frozen=True, slots=True)
class ConfigQuery:
    """Query for settings of one resource. `names`: names of the settings, empty for all."""

    resource: ConfigResource
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResourceConfigs:
    """Settings of one resource, or the error for which it cannot be described."""

    resource: ConfigResource
    entries: Sequence[ConfigEntry] = ()
    error: MansioError | None = None


@dataclass(frozen=True, slots=True)
class ConfigAlteration:
    """Changes of the settings of one resource."""

    resource: ConfigResource
    changes: Sequence[Change]


class ConfigService:
    """Describes, lists and alters settings of topics, groups and brokers. All methods run on the broker's event loop.

    To describe needs DESCRIBE_CONFIGS and to alter ALTER_CONFIGS: for the topic or the group, else for the cluster. The
    error of a resource for which the caller has no right is an `AuthorizationFailed`. Who names the dead-letter topic
    of a group needs WRITE for that topic, too, and becomes its owner.
    """

    __slots__ = ("_authorization", "_brokers", "_groups", "_settings", "_topics")

    def __init__(
        self,
        *,
        topics: TopicService,
        groups: GroupConfigManager,
        brokers: BrokerConfigManager,
        settings: Settings,
        authorization: Authorization,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._brokers = brokers
        self._settings = settings
        self._authorization = authorization

    def _check(self, caller: Caller, operation: Operation, resource: ConfigResource) -> None:
        if resource.kind == ResourceType.TOPIC:
            self._authorization.check(caller, operation, acls.ResourceType.TOPIC, resource.name)
        elif resource.kind == ResourceType.GROUP:
            self._authorization.check(caller, operation, acls.ResourceType.GROUP, resource.name)
        else:
            self._authorization.check_cluster(caller, operation)

    def describe(self, queries: Iterable[ConfigQuery], *, caller: Caller) -> Iterator[ResourceConfigs]:
        """Yield the settings of each resource with source and type, as they are when the result is taken; identical
        queries have one result. Errors in the results: `UnknownTopicOrPartition`, `InvalidTopic`, `InvalidGroupId`,
        `InvalidRequest`."""
        remaining = ENTRIES_MAX
        for query in dict.fromkeys(queries):
            try:
                if remaining <= 0:
                    raise InvalidRequest(
                        "too many settings for one answer: ask for fewer resources at a time"
                    )
                self._check(caller, Operation.DESCRIBE_CONFIGS, query.resource)
                entries = [
                    entry
                    for entry in self._entries(query.resource)
                    if not query.names or entry.name in query.names
                ]
            except MansioError as error:
                yield ResourceConfigs(query.resource, error=without_traceback(error))
            else:
                remaining -= len(entries)
                yield ResourceConfigs(query.resource, entries)

    def _entries(self, resource: ConfigResource) -> list[ConfigEntry]:
        kind, name = resource.kind, resource.name
        if kind == ResourceType.TOPIC:
            check_topic_name(name)
            return self._topics.describe(self._topics.find(name))
        if kind == ResourceType.GROUP:
            return self._groups.describe(name)
        if kind != ResourceType.BROKER:
            raise InvalidRequest(
                f"resource type {kind}: only topics (2), brokers (4) and groups (32) have settings here"
            )
        return self._brokers.describe(name)

    def list_resources(self, kinds: Iterable[int] = (), *, caller: Caller) -> list[ConfigResource]:
        """Return the resources that have settings (KIP-1142): those of the `ResourceType`s `kinds`, or of all if it is
        empty. Unknown types are ignored. Raises `ClusterAuthorizationFailed` without DESCRIBE_CONFIGS for the
        cluster."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE_CONFIGS)
        found: list[ConfigResource] = []
        state = self._topics.state
        for kind in dict.fromkeys(kinds or ResourceType):
            names: Iterable[str] = ()
            if kind == ResourceType.TOPIC:
                names = sorted(state.topics)
            elif kind == ResourceType.BROKER:
                names = [str(node_id) for node_id in sorted({self._settings.node_id, *state.brokers})]
            elif kind == ResourceType.GROUP:
                names = self._groups.groups()
            found += [ConfigResource(int(kind), name) for name in names]
        return found

    async def alter(
        self,
        alterations: Sequence[ConfigAlteration],
        *,
        replace: bool = False,
        validate_only: bool = False,
        caller: Caller,
    ) -> list[MansioError | None]:
        """Change settings of topics, groups and brokers (KIP-339). With `replace`, settings that an alteration does not
        name are reset to their defaults (KIP-133). The broker with the empty name stands for the defaults of all
        brokers.

        Returns the error of each resource, or None once its changes are durable and effective on this broker. Errors:
        `PolicyViolation` (too many resources), those of `TopicService.alter_configs`, `GroupConfigManager.alter` and
        `BrokerConfigManager.alter`, and `InvalidRequest` for a resource that occurs more than once or has another
        type."""
        if (refused := too_many_items(len(alterations))) is not None:
            return [refused] * len(alterations)
        count = Counter(each.resource for each in alterations)
        errors: list[MansioError | None] = []
        for each in alterations:
            try:
                self._check(caller, Operation.ALTER_CONFIGS, each.resource)
                if count[each.resource] > 1:
                    raise InvalidRequest(f"{each.resource.name!r} is in the request more than once")
                await self._alter(each, replace=replace, validate_only=validate_only, caller=caller)
            except MansioError as error:
                errors.append(without_traceback(error))
            else:
                errors.append(None)
        return errors

    async def _alter(
        self, alteration: ConfigAlteration, *, replace: bool, validate_only: bool, caller: Caller
    ) -> None:
        kind, name = alteration.resource.kind, alteration.resource.name
        changes = alteration.changes
        if kind == ResourceType.BROKER:
            await self._brokers.alter(name, changes, replace=replace, validate_only=validate_only)
        elif kind == ResourceType.TOPIC:
            check_topic_name(name)
            await self._topics.alter_configs(name, changes, replace=replace, validate_only=validate_only)
        elif kind == ResourceType.GROUP:
            await self._groups.alter(
                name,
                changes,
                replace=replace,
                validate_only=validate_only,
                owner_for=partial(self._authorization.owner_of, caller),
            )
        else:
            raise InvalidRequest(
                f"resource type {kind}: only topics (2), brokers (4) and groups (32) can be changed here"
            )
