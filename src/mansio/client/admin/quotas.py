"""Client quotas: produce and fetch rates in bytes per second (KIP-546); available as `client.admin.quotas`.

An entity is a client id, a user, or a client id of a user. `DEFAULT` instead of a name applies to every entity without
a quota of its own, to each separately. None: the entity has no such component.
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

USER: Final = "user"
CLIENT_ID: Final = "client-id"


class Default(Enum):
    """The type of `DEFAULT`."""

    DEFAULT = "default"


DEFAULT: Final = Default.DEFAULT
"""All entities without a quota of their own."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The quotas of one entity: by Kafka's name (`producer_byte_rate`, `consumer_byte_rate`), in bytes/s."""

    user: str | Default | None
    client_id: str | Default | None
    values: Mapping[str, float]


class QuotaAdmin:
    """The quotas of one cluster."""

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
        user: str | Default | None = None,
        client_id: str | Default | None = None,
        values: Mapping[str, float | None],
        validate_only: bool = False,
    ) -> None:
        """Set quotas of an entity in bytes/s; None removes a quota, quotas not named stay. Raises `InvalidRequest`."""
        entity = [
            {"entity_type": kind, "entity_name": None if name is DEFAULT else name}
            for kind, name in ((USER, user), (CLIENT_ID, client_id))
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
        self, *, user: str | Default | None = None, client_id: str | Default | None = None
    ) -> None:
        """Remove all quotas of an entity. Raises `InvalidRequest` if it has none."""
        for quota in await self.list():
            if (quota.user, quota.client_id) == (user, client_id):
                await self.set(user=user, client_id=client_id, values=dict.fromkeys(quota.values))
                return
        raise InvalidRequest("there are no quotas for this entity")


def _quota(entry: Any) -> Quota:
    names = {
        part.entity_type: DEFAULT if part.entity_name is None else part.entity_name for part in entry.entity
    }
    return Quota(names.get(USER), names.get(CLIENT_ID), {one.key: one.value for one in entry.values})
