"""Client quotas: rates of produce and fetch, and of changes of topics (KIP-546), and of new connections of addresses
(KIP-612); available as `client.admin.quotas`.

A quota applies to an entity: a user, a client id, a client id of a user, or an address. As `user`, `client_id` or `ip`,
`DEFAULT_ENTITY` stands for every name that has no quota of its own; the quota then applies to each of them separately.
None means that the entity has no user, no client id or no address.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import InvalidRequest
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.net.cluster import Cluster

# Entity types of Kafka's protocol.
USER_ENTITY: Final = "user"
CLIENT_ID_ENTITY: Final = "client-id"
IP_ENTITY: Final = "ip"


class DefaultEntity(Enum):
    """The type of `DEFAULT_ENTITY`."""

    DEFAULT = "default"
    """All entities without a quota of their own."""


DEFAULT_ENTITY: Final = DefaultEntity.DEFAULT
"""Name, as `user` or `client_id`, that stands for all names without a quota of their own."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The quotas of one entity. `values` has rates by Kafka's names: `producer_byte_rate` and `consumer_byte_rate` in
    bytes per second, `controller_mutation_rate` in created and deleted partitions per second, and of an address
    `connection_creation_rate` in connections per second."""

    user: str | DefaultEntity | None
    client_id: str | DefaultEntity | None
    values: Mapping[str, float]
    ip: str | DefaultEntity | None = None


class QuotaAdmin:
    """Client quotas of one cluster; available as `client.admin.quotas`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self) -> list[Quota]:
        """All configured quotas."""
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CLIENT_QUOTAS,
            {"components": [], "strict": False},
            check=lambda response: raise_for_code(response.error_code, response.error_message),
        )
        return [_quota(entry) for entry in response.entries or ()]

    async def set(
        self,
        *,
        user: str | DefaultEntity | None = None,
        client_id: str | DefaultEntity | None = None,
        ip: str | DefaultEntity | None = None,
        values: Mapping[str, float | None],
        validate_only: bool = False,
    ) -> None:
        """Set quotas of an entity (see `Quota.values`). The value None removes a quota; quotas that are not in `values`
        are not changed. Raises `InvalidRequest`."""
        entity = [
            {"entity_type": kind, "entity_name": None if name is DEFAULT_ENTITY else name}
            for kind, name in ((USER_ENTITY, user), (CLIENT_ID_ENTITY, client_id), (IP_ENTITY, ip))
            if name is not None
        ]
        changes = [
            {"key": key, "value": 0.0 if value is None else float(value), "remove": value is None}
            for key, value in values.items()
        ]
        fields = {"entries": [{"entity": entity, "ops": changes}], "validate_only": validate_only}

        def check(response: Any) -> None:
            for entry in response.entries:
                raise_for_code(entry.error_code, entry.error_message)

        await self._cluster.request_controller(ApiKey.ALTER_CLIENT_QUOTAS, fields, check=check)

    async def delete(
        self,
        *,
        user: str | DefaultEntity | None = None,
        client_id: str | DefaultEntity | None = None,
        ip: str | DefaultEntity | None = None,
    ) -> None:
        """Remove all quotas of an entity. Raises `InvalidRequest` if the entity has no quota."""
        for quota in await self.list():
            if (quota.user, quota.client_id, quota.ip) == (user, client_id, ip):
                values = dict.fromkeys(quota.values)
                await self.set(user=user, client_id=client_id, ip=ip, values=values)
                return
        raise InvalidRequest("there are no quotas for this entity")


def _quota(entry: Any) -> Quota:
    names = {
        part.entity_type: DEFAULT_ENTITY if part.entity_name is None else part.entity_name
        for part in entry.entity
    }
    return Quota(
        names.get(USER_ENTITY),
        names.get(CLIENT_ID_ENTITY),
        {one.key: one.value for one in entry.values},
        names.get(IP_ENTITY),
    )
