"""Access control lists (KIP-140, KIP-290); available as `client.admin.acls`.

An ACL allows or denies one principal, such as `User:alice`, one operation on the resources that its pattern matches.
A broker without an authorizer refuses changes of ACLs with `SecurityDisabled`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.net.retry import raise_for_code
from mansio.state.authorization.acl_words import acl_text
from mansio.state.authorization.acls import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.net.cluster import Cluster

T = TypeVar("T")

ITEMS_MAX: Final = 1_000
"""Number of ACLs, filters or queries that one request has at most."""

ALL_ACLS: Final = AclFilter()
"""Filter that selects all ACLs."""


@dataclass(frozen=True, slots=True)
class AclDecision:
    """Whether an operation is allowed, and why. `acl`: the ACL that decides; without one the user is a super user, the
    broker has no authorizer (`is_open`), or no ACL applies."""

    is_allowed: bool
    acl: Acl | None = None
    is_super_user: bool = False
    is_open: bool = False

    @property
    def reason(self) -> str:
        """The reason in words."""
        if self.is_super_user:
            return "super user"
        if self.is_open:
            return "no authorizer: every operation is allowed"
        if self.acl is not None:
            return acl_text(self.acl)
        if self.is_allowed:
            return "no ACL matches the resource, and allow_everyone_if_no_acl_found is set"
        return "no ACL allows it"


class AclAdmin:
    """Access control lists of one cluster; available as `client.admin.acls`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self, selected: AclFilter = ALL_ACLS) -> list[Acl]:
        """The ACLs that a filter selects. Raises `SecurityDisabled`, `ClusterAuthorizationFailed`, `InvalidRequest`."""
        response = await self._cluster.request(
            ApiKey.DESCRIBE_ACLS,
            {
                "resource_type_filter": selected.resource_type,
                "resource_name_filter": selected.name,
                "pattern_type_filter": selected.pattern_type,
                "principal_filter": selected.principal,
                "host_filter": selected.host,
                "operation": selected.operation,
                "permission_type": selected.permission,
            },
            check=lambda response: raise_for_code(response.error_code, response.error_message),
        )
        return [
            Acl(
                ResourceType(resource.resource_type),
                PatternType(resource.pattern_type),
                resource.resource_name,
                each.principal,
                each.host,
                Operation(each.operation),
                Permission(each.permission_type),
            )
            for resource in response.resources
            for each in resource.acls
        ]

    async def create(self, acls: Iterable[Acl]) -> None:
        """Add ACLs; those that exist stay as they are. The broker that answers uses them already, the others do within
        a second. Raises the first error: `SecurityDisabled`, `ClusterAuthorizationFailed`, `InvalidRequest`,
        `PolicyViolation` for too many ACLs. Other ACLs may be added even then."""

        def check(response: Any) -> None:
            for result in response.results:
                raise_for_code(result.error_code, result.error_message)

        for part in _parts(acls):
            creations = [
                {
                    "resource_type": acl.resource_type,
                    "resource_name": acl.name,
                    "resource_pattern_type": acl.pattern_type,
                    "principal": acl.principal,
                    "host": acl.host,
                    "operation": acl.operation,
                    "permission_type": acl.permission,
                }
                for acl in part
            ]
            await self._cluster.request_controller(ApiKey.CREATE_ACLS, {"creations": creations}, check=check)

    async def delete(self, filters: Iterable[AclFilter]) -> Sequence[Acl]:
        """Delete the ACLs that any of the filters selects, and return them. Raises the first error, as `create`
        does."""

        def check(response: Any) -> None:
            for result in response.filter_results:
                raise_for_code(result.error_code, result.error_message)
                for each in result.matching_acls:
                    raise_for_code(each.error_code, each.error_message)

        deleted: dict[Acl, None] = {}
        for part in _parts(filters):
            wanted = [
                {
                    "resource_type_filter": each.resource_type,
                    "resource_name_filter": each.name,
                    "pattern_type_filter": each.pattern_type,
                    "principal_filter": each.principal,
                    "host_filter": each.host,
                    "operation": each.operation,
                    "permission_type": each.permission,
                }
                for each in part
            ]
            response = await self._cluster.request_controller(
                ApiKey.DELETE_ACLS, {"filters": wanted}, check=check
            )
            deleted |= dict.fromkeys(
                _acl(each, each.permission_type)
                for result in response.filter_results
                for each in result.matching_acls
            )
        return [*deleted]

    async def check(
        self,
        queries: Iterable[tuple[Operation, ResourceType, str]],
        *,
        user: str | None = None,
        groups: Sequence[str] = (),
        host: str = "",
    ) -> Sequence[AclDecision]:
        """What a user who is in `groups` and connects from `host` may do, in the order of the queries: operation, type
        and name of the resource. `user` None: the user of this client; every user may ask about itself.

        Raises `ClusterAuthorizationFailed`, `InvalidRequest`, and `UnsupportedVersion` if the broker is not Mansio's.
        """

        def check(response: Any) -> None:
            raise_for_code(response.error_code, response.error_message)
            for each in response.decisions:
                raise_for_code(each.error_code, each.error_message)

        decisions: list[AclDecision] = []
        for part in _parts(queries):
            fields: Mapping[str, Any] = {
                "user": user,
                "groups": [*groups],
                "host": host,
                "queries": [
                    {"operation": operation, "resource_type": kind, "resource_name": name}
                    for operation, kind, name in part
                ],
            }
            response = await self._cluster.request(ApiKey.CHECK_AUTHORIZATION, fields, check=check)
            decisions += [
                AclDecision(
                    each.is_allowed,
                    _acl(each, each.permission) if each.has_acl else None,
                    each.is_super_user,
                    each.is_open,
                )
                for each in response.decisions
            ]
        return decisions


def _parts(items: Iterable[T]) -> Iterator[Sequence[T]]:
    """Yield items in the parts that one request takes."""
    rest = list(items)
    for first in range(0, len(rest), ITEMS_MAX):
        yield rest[first : first + ITEMS_MAX]


def _acl(fields: Any, permission: int) -> Acl:
    return Acl(
        ResourceType(fields.resource_type),
        PatternType(fields.pattern_type),
        fields.resource_name,
        fields.principal,
        fields.host,
        Operation(fields.operation),
        Permission(permission),
    )
