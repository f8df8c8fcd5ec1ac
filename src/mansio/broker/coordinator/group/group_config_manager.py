"""Group configs: settings of single groups, stored in the metadata store and effective on every broker.

A change made on any broker is written to the store and reaches all brokers through `MetadataImage`. `GroupCoordinator`
is notified of each change and reads the settings of a group by `overrides`.

Invariant: when `alter` returns, the change is durable and effective on this broker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.config import group_config
from mansio.config.broker_config import BrokerConfigSources
from mansio.config.config_entries import group_entries
from mansio.config.share_group_config import DEAD_LETTER_OWNER, DEAD_LETTER_TOPIC
from mansio.errors import ConcurrentChange, PolicyViolation, TopicAuthorizationFailed
from mansio.logs import fields
from mansio.metadata.image import write_overrides
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.config.config_def import Change
    from mansio.config.config_entries import ConfigEntry
    from mansio.config.settings import Settings
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Random, Scheduler

logger = logging.getLogger(__name__)

CONFIGURED_GROUPS_MAX: Final = 10_000
"""Maximum number of groups with settings of their own."""


class GroupConfigManager:
    """Reads and alters the settings of groups. Callers call all methods on the broker's event loop."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        settings: Settings,
    ) -> None:
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._config_sources = BrokerConfigSources(settings)
        self._settings = settings

    def use_settings(self, config_sources: BrokerConfigSources, effective: Settings) -> None:
        """Use new settings of the broker: the `effective` values, and the `config_sources` in which they are set."""
        self._config_sources = config_sources
        self._settings = effective

    def groups(self) -> list[str]:
        """Return the ids of the groups with settings of their own, sorted."""
        return sorted(self._state.group_configs)

    def overrides(self, group_id: str) -> Mapping[str, str]:
        """Return the settings of a group that override the broker's defaults, by name."""
        entry = self._state.group_configs.get(group_id)
        return {} if entry is None else entry.configs

    def effective(self, group_id: str) -> Mapping[str, str]:
        """Return the settings of a group for which it or the broker has a value, by name."""
        defaults = {name: str(value) for name, value in self._defaults().items()}
        return {**defaults, **self.overrides(group_id)}

    async def refresh(self, group_id: str) -> None:
        """Wait until `effective` contains each change of the group's settings that was stored before this call.

        Reads the key from the metadata store, which is linearizable. Raises `Unavailable`, `StorageError`."""
        key = self._state.keys.group_config(group_id)
        entry = await self._store.get(key)
        if entry is not None:
            await self._state.wait_for_revision(entry.mod_revision, self._scheduler)
        elif group_id in self._state.group_configs:  # the key was deleted, in an unknown revision until now
            listing = await self._store.list(f"{key}/")
            await self._state.wait_for_revision(listing.revision, self._scheduler)

    def describe(self, group_id: str) -> list[ConfigEntry]:
        """Return every setting of a group with its source; the group need not exist. Raises `InvalidGroupId`."""
        check_group_id(group_id)
        return group_entries(self.overrides(group_id), self._config_sources)

    async def alter(
        self,
        group_id: str,
        changes: Sequence[Change],
        *,
        replace: bool = False,
        validate_only: bool = False,
        owner_for: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Change some settings of a group (KIP-339). With `replace` all others are reset to the defaults; with
        `validate_only` nothing is written. `owner_for`: returns what is stored as the owner of a dead-letter topic that
        the changes name, or raises `TopicAuthorizationFailed` if the caller may not write to it.

        Raises `TopicAuthorizationFailed`, `InvalidGroupId`, `InvalidConfig`, `InvalidRequest`, `PolicyViolation` (too
        many groups), `ConcurrentChange`, `StorageError`.
        """
        check_group_id(group_id)
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            entry = self._state.group_configs.get(group_id)
            before = {} if entry is None else dict(entry.configs)
            configs = group_config.GROUP_CONFIG.apply_changes({} if replace else before, changes)
            _set_owner(configs, before, changes, owner_for)
            group_config.check_combination(configs, self._defaults())
            if entry is None and configs and len(self._state.group_configs) >= CONFIGURED_GROUPS_MAX:
                raise PolicyViolation(
                    f"the maximum of {CONFIGURED_GROUPS_MAX} groups with settings is reached"
                )
            if validate_only or configs == before:
                return
            if await self._write(group_id, 0 if entry is None else entry.mod_revision, configs):
                shown = ",".join(f"{name}={value}" for name, value in sorted(configs.items())) or "none"
                logger.info("group_settings_changed", extra=fields(group=group_id, settings=shown))
                return
        raise ConcurrentChange(f"the settings of group {group_id} were changed concurrently")

    def _defaults(self) -> dict[str, int]:
        return {
            row.name: int(getattr(self._settings, row.broker_setting))
            for row in group_config.SETTINGS.values()
            if row.broker_setting
        }

    async def _write(self, group_id: str, revision: int, configs: Mapping[str, str]) -> bool:
        return await write_overrides(
            self._store,
            self._state,
            self._state.keys.group_config(group_id),
            revision,
            configs,
            scheduler=self._scheduler,
            random=self._random,
        )


def _set_owner(
    configs: dict[str, str],
    before: Mapping[str, str],
    changes: Sequence[Change],
    owner_for: Callable[[str], str],
) -> None:
    """Set the owner of the dead-letter topic in new settings. Who sets the name that the group has already, without the
    right to write to the topic, changes nothing."""
    configs.pop(DEAD_LETTER_OWNER, None)
    topic, owner = configs.get(DEAD_LETTER_TOPIC, ""), before.get(DEAD_LETTER_OWNER, "")
    if not topic:
        return
    is_known = topic == before.get(DEAD_LETTER_TOPIC)
    if not is_known or any(change.name == DEAD_LETTER_TOPIC for change in changes):
        try:
            owner = owner_for(topic)
        except TopicAuthorizationFailed:
            if not is_known:
                raise
    if owner:
        configs[DEAD_LETTER_OWNER] = owner
