"""The group settings that keeping an order needs, and how often a record is to be tried (resource type 32, KIP-848).

Always true: the order of a group that has begun to read is never changed here, because records may be in other hands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.client.admin.shares import ShareAdmin
from mansio.errors import GroupIdNotFound, InvalidConfig, UnsupportedVersion
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from mansio.net.cluster import Cluster

ORDER: Final = "mansio.share.order"
IN_ORDER: Final = "partition"
TRIES: Final = "share.delivery.count.limit"
BACKOFF: Final = "mansio.retry.backoff.ms"
MULTIPLIER: Final = "mansio.retry.backoff.multiplier"
BACKOFF_MAX: Final = "mansio.retry.backoff.max.ms"

_GROUP_RESOURCE: Final = 32
_SET: Final = 0


class RetryPolicy(NamedTuple):
    """How often a record is tried in place, and the rests between, in seconds."""

    most: int = 5
    backoff_s: float = 1.0
    multiplier: float = 2.0
    backoff_s_max: float = 60.0

    def delay_s(self, failures: int) -> float:
        """After so many failures, from 1."""
        return float(min(self.backoff_s * self.multiplier ** min(failures - 1, 30), self.backoff_s_max))


async def keep_order(cluster: Cluster, group: str) -> None:
    """See that no member gets a record while a lower one of its partition is in other hands. `InvalidConfig`,
    `UnsupportedVersion`."""
    found = await _settings(cluster, group)
    if ORDER not in found:
        raise UnsupportedVersion(
            f"keeping an order needs the group setting {ORDER}, which this broker does not have"
        )
    if found[ORDER] == IN_ORDER:
        return
    if not await _is_new(cluster, group):
        raise InvalidConfig(
            f"group {group} is in use with {ORDER}={found[ORDER]}: set it to {IN_ORDER} before keeping an order"
        )
    change = {"name": ORDER, "config_operation": _SET, "value": IN_ORDER}
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configs": [change]}
    fields = {"resources": [resource], "validate_only": False}
    await cluster.request_controller(ApiKey.INCREMENTAL_ALTER_CONFIGS, fields, check=_check("responses"))


async def retry_policy(cluster: Cluster, group: str) -> RetryPolicy:
    """What is in force for the group."""
    found = await _settings(cluster, group)
    usual = RetryPolicy()
    return RetryPolicy(
        int(found.get(TRIES, usual.most)),
        float(found.get(BACKOFF, usual.backoff_s * 1000)) / 1000,
        float(found.get(MULTIPLIER, usual.multiplier)),
        float(found.get(BACKOFF_MAX, usual.backoff_s_max * 1000)) / 1000,
    )


async def _settings(cluster: Cluster, group: str) -> dict[str, str]:
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configuration_keys": None}
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    answer = await cluster.request(ApiKey.DESCRIBE_CONFIGS, fields, check=_check("results"))
    return {entry.name: entry.value for entry in answer.results[0].configs if entry.value is not None}


async def _is_new(cluster: Cluster, group: str) -> bool:
    """Has nobody joined it, and nobody read anything?"""
    admin = ShareAdmin(cluster)
    try:
        if (await admin.describe(group)).members:
            return False
        return not await admin.offsets(group)
    except GroupIdNotFound:
        return True


def _check(field_name: str) -> Any:
    def check(answer: Any) -> None:
        for item in getattr(answer, field_name):
            raise_for(item.error_code, item.error_message)

    return check
