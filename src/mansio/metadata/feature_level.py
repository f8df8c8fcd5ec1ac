"""Feature level of a cluster (KIP-584): what its brokers may write into the metadata store while some of them may still
run an older version.

Each release with documents that older ones would misread has a level, and reads the levels of earlier releases. The
level of a cluster is stored under the key `featurelevel`, with the level as schema version: a broker that does not
support it cannot decode the key, and ends its session. A cluster without the key has `FIRST_LEVEL`. A new cluster gets
the level of the version that creates it; the level of an older one is raised by an administrator
(UpdateFeatures, `mansio cluster finalize`), never lowered.

Below a level nothing is written that needs it (`check_operations`), so that brokers of the older version can be started
again. A single node has the level of its version; `data_dir_format` protects its directory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import topic_config
from mansio.config.share_group_config import (
    DELIVERY_COUNT_LIMIT,
    KEY_BURST,
    KEY_HEADER,
    KEY_LEASES_MAX,
    KEY_RATE,
    SHARE_FAIR,
    SHARE_ORDER,
)
from mansio.config.topic_names import AUDIT_TOPIC, TRACE_TOPIC
from mansio.errors import FeatureNotFinalized, InvalidUpdateVersion
from mansio.metadata.metadata_store import KEY_ROOT, SCHEMA_VERSION_MAX, Put
from mansio.wire.features import FIRST_LEVEL, FIXED_FEATURES, UPGRADE, VERSION_FEATURE
from mansio.wire.internal_records.schema_records import SCHEMAS_TOPIC
from mansio.wire.internal_records.transaction_records import TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.metadata.metadata_store import Delete

CURRENT_LEVEL: Final = SCHEMA_VERSION_MAX
"""Level of this version, 0.2: users, access control lists, API keys, tokens, transactions, moves of partitions, and the
settings of topics and groups that 0.1 does not know."""
RELEASES: Final = {1: "0.1", 2: "0.2"}
"""The first release with each level."""

_NEWER_KINDS: Final = {
    "acls": "access control lists",
    "apikeys": "API keys",
    "serversecret": "authentication of clients",
    "sqskeys": "access keys of SQS",
    "tokens": "delegation tokens",
    "users": "users",
}
"""Kinds of keys, the part behind the cluster id, that brokers of 0.1 ignore: they would serve everybody."""


class LevelRange(NamedTuple):
    """The feature levels that a broker supports, both inclusive."""

    lowest: int
    highest: int

    def supports(self, level: int) -> bool:
        """Whether `level` is one of them."""
        return self.lowest <= level <= self.highest

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


class FeatureUpdate(NamedTuple):
    """A requested update. `update_type`: `UPGRADE`, or a type of downgrade (KIP-778)."""

    feature: str
    level: int
    update_type: int = UPGRADE


FIRST_RELEASE: Final = LevelRange(FIRST_LEVEL, FIRST_LEVEL)
"""What a broker supports that registers without a range: 0.1 does."""
SUPPORTED: Final = LevelRange(FIRST_LEVEL, CURRENT_LEVEL)
"""What this version supports."""


def decode_levels(document: Mapping[str, Any]) -> LevelRange:
    """Return the levels in the value of the key of a registration."""
    found = document.get("levels")
    return FIRST_RELEASE if found is None else LevelRange(int(found[0]), int(found[1]))


def check_update(
    feature: str, wanted: int, update_type: int, *, current: int, brokers: Mapping[int, LevelRange]
) -> bool:
    """Check an update of a feature to the level `wanted`; return whether the cluster has to be changed for it.

    `current` is the cluster's level, `brokers` what each registered broker supports, also one that is offline: it could
    come back. Raises `InvalidUpdateVersion`.
    """
    prefix = f"feature {feature!r} cannot have version {wanted}: "
    if FIXED_FEATURES.get(feature) == wanted:
        return False
    if feature != VERSION_FEATURE:
        raise InvalidUpdateVersion(f"{prefix}only {VERSION_FEATURE} can be changed")
    if wanted > CURRENT_LEVEL or wanted < 1:
        raise InvalidUpdateVersion(f"{prefix}this broker supports {SUPPORTED}")
    if wanted < current:
        raise InvalidUpdateVersion(f"{prefix}it is {current}, and there is no way back")
    if wanted == current:
        return False
    if update_type != UPGRADE:
        raise InvalidUpdateVersion(f"{prefix}it is {current}, and the update has the type of a downgrade")
    older = {node_id: levels for node_id, levels in sorted(brokers.items()) if not levels.supports(wanted)}
    if older:
        found = ", ".join(f"broker {node_id} supports {levels}" for node_id, levels in older.items())
        raise InvalidUpdateVersion(f"{prefix}{found}; upgrade it, or unregister it if it is gone for good")
    return True


def check_operations(level: int, operations: Sequence[Put | Delete]) -> None:
    """Raise `FeatureNotFinalized` if a transaction writes what brokers of a cluster with this level may not know."""
    if level >= CURRENT_LEVEL:
        return
    for operation in operations:
        if (what := newer_content(operation)) is not None:
            raise not_finalized(what, level)


def not_finalized(what: str, level: int = FIRST_LEVEL) -> FeatureNotFinalized:
    """Return the error for something that needs the level of this version in a cluster with a lower one."""
    return FeatureNotFinalized(
        f"{what}: not possible before the upgrade of the cluster is finalized, which has feature level {level} of "
        f"{CURRENT_LEVEL}; upgrade all brokers, then run 'mansio cluster finalize'"
    )


def newer_content(operation: Put | Delete) -> str | None:
    """Return what a transaction writes that brokers of `FIRST_LEVEL` would ignore or misread; None if nothing."""
    if not isinstance(operation, Put):
        return None
    kind = _kind(operation)
    if kind in _NEWER_KINDS:
        return _NEWER_KINDS[kind]
    if kind == "parts":
        # A broker of 0.1 that is controller does not finish a move, and one that is no replica any more keeps its log.
        partition: dict[str, Any] = json.loads(operation.value)
        return "moves of partitions" if partition["adding"] or partition["removing"] else None
    if kind == "topics" and operation.key.endswith(f"/topics/{TRACE_TOPIC}"):
        return "trace of records"  # a leader of version 0.1 would let no broker write to it
    if kind == "topics" and operation.key.endswith(f"/topics/{SCHEMAS_TOPIC}"):
        # A leader of version 0.1 would answer no request; a topic that a client creates is another registry's.
        return "schema registry" if json.loads(operation.value)["internal"] else newer_setting(operation)
    return newer_setting(operation)


def newer_setting(operation: Put | Delete) -> str | None:
    """Return the setting of a topic, group or broker, or the internal topic, that version 0.1 does not know, if a
    transaction writes one."""
    if not isinstance(operation, Put):
        return None
    kind = _kind(operation)
    if kind not in ("topics", "groupconfigs", "brokerconfigs"):
        return None
    configs: dict[str, Any] = json.loads(operation.value)["configs"]
    if kind == "brokerconfigs" and (names := _NEW_BROKER_CONFIGS.intersection(configs)):
        return f"setting {min(names)}"
    if kind == "groupconfigs":
        return _newer_group_setting(configs)
    if operation.key.endswith(f"/topics/{TRANSACTION_STATE_TOPIC}"):
        return "transactions"
    if operation.key.endswith(f"/topics/{AUDIT_TOPIC}"):  # no internal topic for version 0.1
        return "audit"
    return newer_topic_setting(configs)


def newer_topic_setting(configs: Mapping[str, Any]) -> str | None:
    """Return a setting of a topic, or a default of topics, that version 0.1 does not know; None if there is none."""
    names = _NEW_TOPIC_CONFIGS.intersection(configs)
    return f"setting {min(names)}" if names else None


def _newer_group_setting(configs: Mapping[str, Any]) -> str | None:
    if names := _NEW_GROUP_CONFIGS.intersection(configs):
        return f"setting {min(names)}"
    if configs.get(SHARE_ORDER, "").lower() == "key":
        return f"setting {SHARE_ORDER}=key"
    deliveries = int(configs.get(DELIVERY_COUNT_LIMIT, _FIRST_DELIVERY_COUNTS[0]))
    return None if deliveries in _FIRST_DELIVERY_COUNTS else f"setting {DELIVERY_COUNT_LIMIT}={deliveries}"


def _kind(operation: Put) -> str:
    """Return the kind of a key: the part behind the cluster id, or an empty text."""
    _, _, rest = operation.key.removeprefix(KEY_ROOT).partition("/")  # /mansio/CLUSTER/KIND/NAME
    return rest.partition("/")[0]


_FIRST_TOPIC_CONFIGS: Final = frozenset({"mansio.hold.enable", "mansio.hold.bytes.max", "mansio.hold.ms.max"})
"""Mansio's own settings of topics that version 0.1 has."""

_NEW_TOPIC_CONFIGS: Final = (
    frozenset(name for name in topic_config.TOPIC_CONFIG.keys if name.startswith("mansio."))
    - _FIRST_TOPIC_CONFIGS
)
"""Settings of topics, also as defaults of brokers, that version 0.1 does not have."""

_NEW_BROKER_CONFIGS: Final = _NEW_TOPIC_CONFIGS | {
    "group.share.delivery.count.limit",
    "group.share.partition.max.record.locks",
    "group.share.record.lock.duration.ms",
}
"""Dynamic settings of brokers that version 0.1 does not have: its groups would get other leases and limits."""

_NEW_GROUP_CONFIGS: Final = frozenset({KEY_BURST, KEY_HEADER, KEY_LEASES_MAX, KEY_RATE, SHARE_FAIR})
"""Settings of groups that version 0.1 does not have."""

_FIRST_DELIVERY_COUNTS: Final = range(2, 11)
"""Delivery limits of groups that version 0.1 accepts."""
