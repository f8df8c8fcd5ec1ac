"""Dynamic settings of brokers (KIP-226): of one broker, or defaults of all brokers. They are kept in the metadata
store.

Clients can change them on any broker; the other brokers receive the change through `MetadataImage`. A broker uses the
stored values from its start.

Invariants:
* A change is durable and effective on this broker before the request is answered.
* A value that contradicts the static settings of another broker is not applied there; all other values are.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.config.broker_config import BROKER_CONFIG, BrokerConfigSources
from mansio.config.config_entries import broker_entries, default_broker_entries
from mansio.errors import ConcurrentChange, InvalidConfig, InvalidRequest
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

ALL_BROKERS: Final = ""
"""Resource name that stands for the defaults of all brokers."""


class BrokerConfigManager:
    """Reads and alters the dynamic settings of brokers. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        settings: Settings,
    ) -> None:
        """Create the service. `settings`: the static settings of this broker."""
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._node_id = settings.node_id
        self._callbacks: list[Callable[[BrokerConfigSources, Settings], None]] = []
        self._stored = self.config_sources = BrokerConfigSources(settings)
        """The effective values with their sources: static, default of all brokers, or of this broker."""
        self.effective = settings
        """The effective settings: static settings with the dynamic ones applied."""
        self._apply_overrides()
        state.on_broker_config_change(self._apply_overrides)

    def on_change(self, callback: Callable[[BrokerConfigSources, Settings], None]) -> None:
        """Call `callback` with the sources and the effective settings of this broker, now and after each change."""
        self._callbacks.append(callback)
        callback(self.config_sources, self.effective)

    def describe(self, name: str) -> list[ConfigEntry]:
        """Return all settings of this broker, or the dynamic defaults of all brokers if `name` is `ALL_BROKERS`. Raises
        `InvalidRequest` for the name of another broker."""
        if name == ALL_BROKERS:
            return default_broker_entries(self._overrides(ALL_BROKERS))
        if name != str(self._node_id):
            raise InvalidRequest(f"broker {name!r} was requested, but this is broker {self._node_id}")
        return broker_entries(self.config_sources)

    async def alter(
        self, name: str, changes: Sequence[Change], *, replace: bool = False, validate_only: bool = False
    ) -> None:
        """Change dynamic settings of a broker, or the defaults of all brokers (`ALL_BROKERS`). With `replace`, dynamic
        settings that `changes` does not name are removed.

        Raises `InvalidConfig` (the setting is unknown, cannot change while the broker runs, or its value is invalid or
        contradicts another setting), `InvalidRequest` (the broker does not exist), `ConcurrentChange`, `StorageError`.
        """
        self._check_name(name)
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            entry = self._state.broker_configs.get(name)
            before = {} if entry is None else dict(entry.configs)
            configs = BROKER_CONFIG.apply_changes({} if replace else before, changes)
            self._check_configs(name, configs)
            if validate_only or configs == before:
                return
            if await self._write(name, 0 if entry is None else entry.mod_revision, configs):
                shown = ",".join(f"{key}={value}" for key, value in sorted(configs.items())) or "none"
                logger.info("broker_settings_changed", extra=fields(broker=name or "all", settings=shown))
                self._warn_without_effect(name, before, configs)
                return
        raise ConcurrentChange(f"the settings of broker {name or 'defaults'} were changed concurrently")

    def _check_name(self, name: str) -> None:
        known = {self._node_id, *self._state.brokers, *self._state.registrations}
        if name != ALL_BROKERS and name not in map(str, known):
            raise InvalidRequest(f"there is no broker {name!r}")

    def _check_configs(self, name: str, configs: Mapping[str, str]) -> None:
        """Check whether the effective settings of this broker would be free of contradictions after the change. For
        another broker, only the dynamic settings are checked; it checks them against its static settings itself."""
        config_sources = self._stored
        if name == ALL_BROKERS:
            config_sources = config_sources._replace(default_values=configs)
        elif name == str(self._node_id):
            config_sources = config_sources._replace(own_values=configs)
        else:
            config_sources = config_sources._replace(
                own_values=configs, default_values=self._overrides(ALL_BROKERS)
            )
        _, known = self._stored.without_contradictions()
        _, refused = config_sources.without_contradictions()
        for key, reason in refused.items():
            if known.get(key) != reason:
                raise InvalidConfig(reason)

    def _overrides(self, name: str) -> Mapping[str, str]:
        entry = self._state.broker_configs.get(name)
        return {} if entry is None else entry.configs

    def _apply_overrides(self) -> None:
        stored = self._stored._replace(
            own_values=self._overrides(str(self._node_id)), default_values=self._overrides(ALL_BROKERS)
        )
        if stored == self._stored:
            return
        self._stored = stored
        config_sources, refused = stored.without_contradictions()
        for name, reason in refused.items():
            logger.error("broker_setting_not_applied", extra=fields(setting=name, reason=reason))
        self.effective = config_sources.effective_settings()
        self.config_sources = config_sources
        for callback in self._callbacks:
            callback(config_sources, self.effective)

    def _warn_without_effect(self, name: str, before: Mapping[str, str], configs: Mapping[str, str]) -> None:
        reasons = "; ".join(
            f"{key}: {BROKER_CONFIG.keys[key].no_effect}"
            for key, value in sorted(configs.items())
            if before.get(key) != value and key in BROKER_CONFIG.keys and BROKER_CONFIG.keys[key].no_effect
        )
        if reasons:
            logger.warning(
                "broker_settings_without_effect", extra=fields(broker=name or "all", settings=reasons)
            )

    async def _write(self, name: str, revision: int, configs: Mapping[str, str]) -> bool:
        return await write_overrides(
            self._store,
            self._state,
            self._state.keys.broker_config(name),
            revision,
            configs,
            scheduler=self._scheduler,
            random=self._random,
        )
