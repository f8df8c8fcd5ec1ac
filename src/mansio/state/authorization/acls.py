"""Access control lists (ACLs), as Kafka defines them (KIP-11, KIP-290).

An ACL allows or denies one principal one operation on the resources that a pattern matches, from one host or from all.
A LITERAL pattern matches the resource with its name, or each resource of its type if the name is `*`. A PREFIXED
pattern matches the names that begin with it.

The numbers are those of Kafka's protocol.
"""

from __future__ import annotations

from enum import IntEnum
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

CLUSTER_NAME: Final = "kafka-cluster"
"""Name of the only resource of type `CLUSTER`."""

WILDCARD: Final = "*"
"""As the name of a LITERAL pattern: all resources of the type; as a host: all hosts."""

WILDCARD_PRINCIPAL: Final = "User:*"
"""The principal of ACLs for all users."""

ACL_TEXT_CHARACTERS_MAX: Final = 1_000
"""Maximum length of the name, principal and host of an ACL."""


class ResourceType(IntEnum):
    """Type of a resource."""

    TOPIC = 2
    """A topic."""
    GROUP = 3
    """A group of any type."""
    CLUSTER = 4
    """The cluster; its name is `kafka-cluster`."""
    TRANSACTIONAL_ID = 5
    """A transactional id."""
    DELEGATION_TOKEN = 6
    """A delegation token, by its id."""
    USER = 7
    """A user, by the principal."""
    SUBJECT = 100
    """A subject of the schema registry. Kafka has no such type; its clients show it as unknown."""


class PatternType(IntEnum):
    """How the name of an ACL matches the names of resources."""

    LITERAL = 3
    """The resource with the name, or all of the type if the name is `*`."""
    PREFIXED = 4
    """The resources whose names begin with it."""


class Operation(IntEnum):
    """What is done to a resource. `ALL` is in ACLs only."""

    ALL = 2
    """Every operation."""
    READ = 3
    """Fetch records; join a group and commit its offsets."""
    WRITE = 4
    """Produce records; use a transactional id."""
    CREATE = 5
    """Create."""
    DELETE = 6
    """Delete; of topics, also records."""
    ALTER = 7
    """Change, other than settings."""
    DESCRIBE = 8
    """Look at it."""
    CLUSTER_ACTION = 9
    """What brokers do among themselves."""
    DESCRIBE_CONFIGS = 10
    """Look at settings."""
    ALTER_CONFIGS = 11
    """Change settings."""
    IDEMPOTENT_WRITE = 12
    """Produce with a producer id (KIP-679)."""
    CREATE_TOKENS = 13
    """Create delegation tokens for a user."""
    DESCRIBE_TOKENS = 14
    """Look at the delegation tokens of a user."""
    TWO_PHASE_COMMIT = 15
    """Prepare transactions (KIP-939)."""


class Permission(IntEnum):
    """Whether an ACL denies or allows."""

    DENY = 2
    """It is denied, whatever other ACLs allow."""
    ALLOW = 3
    """It is allowed."""


ANY: Final = 1
"""In a filter of ACLs: any type of resource, pattern, operation or permission."""

MATCH: Final = 2
"""As the type of pattern in a filter: each pattern that matches the resource with the name of the filter."""

_TOPIC_OPERATIONS: Final = (
    Operation.READ,
    Operation.WRITE,
    Operation.CREATE,
    Operation.DELETE,
    Operation.ALTER,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
    Operation.ALTER_CONFIGS,
)
_GROUP_OPERATIONS: Final = (
    Operation.READ,
    Operation.DELETE,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
    Operation.ALTER_CONFIGS,
)
_CLUSTER_OPERATIONS: Final = (
    Operation.CREATE,
    Operation.ALTER,
    Operation.DESCRIBE,
    Operation.CLUSTER_ACTION,
    Operation.DESCRIBE_CONFIGS,
    Operation.ALTER_CONFIGS,
    Operation.IDEMPOTENT_WRITE,
)
OPERATIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    ResourceType.TOPIC: _TOPIC_OPERATIONS,
    ResourceType.GROUP: _GROUP_OPERATIONS,
    ResourceType.CLUSTER: _CLUSTER_OPERATIONS,
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE, Operation.TWO_PHASE_COMMIT),
    ResourceType.DELEGATION_TOKEN: (Operation.DESCRIBE,),
    ResourceType.USER: (Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS),
    ResourceType.SUBJECT: (
        Operation.READ,
        Operation.WRITE,
        Operation.DELETE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
}
"""The operations that exist for each type of resource; those that KIP-430 reports for topics, groups and the
cluster."""


class Acl(NamedTuple):
    """One access control list entry with the pattern of its resources. `principal` is `User:NAME` or another type and
    name, `host` an address as text."""

    resource_type: ResourceType
    pattern_type: PatternType
    name: str
    principal: str
    host: str
    operation: Operation
    permission: Permission


def checked_acl(
    *,
    resource_type: int,
    pattern_type: int,
    name: str,
    principal: str,
    host: str,
    operation: int,
    permission: int,
) -> Acl:
    """Return an ACL made of the fields of a request. Raises `InvalidRequest`, with the rules of Kafka."""
    for what, value, kind in (
        ("type of resource", resource_type, ResourceType),
        ("type of pattern", pattern_type, PatternType),
        ("operation", operation, Operation),
        ("permission", permission, Permission),
    ):
        if value not in tuple(kind):
            raise InvalidRequest(f"an ACL cannot have the {what} {value}")
    if not name:
        raise InvalidRequest("the name of the resource is empty")
    if resource_type == ResourceType.CLUSTER and name != CLUSTER_NAME:
        raise InvalidRequest(f"the only valid name of a resource of type CLUSTER is {CLUSTER_NAME}")
    kind_of_principal, colon, name_of_principal = principal.partition(":")
    if not (kind_of_principal and colon and name_of_principal):
        raise InvalidRequest("a principal is written TYPE:NAME, for example User:alice")
    if not host:
        raise InvalidRequest("the host is empty; * stands for all hosts")
    if max(map(len, (name, principal, host))) > ACL_TEXT_CHARACTERS_MAX:
        raise InvalidRequest(
            f"name, principal and host of an ACL have at most {ACL_TEXT_CHARACTERS_MAX} characters"
        )
    return Acl(
        ResourceType(resource_type),
        PatternType(pattern_type),
        name,
        principal,
        canonical_host(host),
        Operation(operation),
        Permission(permission),
    )


def canonical_host(host: str) -> str:
    """Return the one form in which an address is compared, as `ipaddress` prints it (RFC 5952); an IPv4 address is the
    same host if it is written as IPv6 (`::ffff:192.0.2.1`, RFC 4291). Text that is no address stays as it is.

    Java prints IPv6 addresses without abbreviation, so ACLs that were exported from Kafka have them in this form.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


class AclFilter(NamedTuple):
    """Selects ACLs. `ANY` and None match all values. With the type of pattern `MATCH`, the filter selects the ACLs that
    apply to the resource with its name; else the ACLs whose pattern has exactly that name."""

    resource_type: int = ANY
    pattern_type: int = ANY
    name: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: int = ANY
    permission: int = ANY

    def matches(self, acl: Acl) -> bool:
        """Whether the filter selects an ACL."""
        return (
            self.resource_type in (ANY, acl.resource_type)
            and self.operation in (ANY, acl.operation)
            and self.permission in (ANY, acl.permission)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self._matches_pattern(acl)
        )

    def _matches_pattern(self, acl: Acl) -> bool:
        if self.pattern_type not in (ANY, MATCH, acl.pattern_type):
            return False
        if self.name is None:
            return True
        if self.pattern_type != MATCH:
            return self.name == acl.name
        if acl.pattern_type == PatternType.PREFIXED:
            return self.name.startswith(acl.name)
        return acl.name in (self.name, WILDCARD)


def checked_filter(selected: AclFilter) -> AclFilter:
    """Return a filter with its host as ACLs have it. As in Kafka, raises `InvalidRequest` unless the numbers of the
    filter are known."""
    for what, value, known in (
        ("type of resource", selected.resource_type, (ANY, *ResourceType)),
        ("type of pattern", selected.pattern_type, (ANY, MATCH, *PatternType)),
        ("operation", selected.operation, (ANY, *Operation)),
        ("permission", selected.permission, (ANY, *Permission)),
    ):
        if value not in known:
            raise InvalidRequest(f"a filter of ACLs cannot have the {what} {value}")
    if selected.name == "":
        raise InvalidRequest("the name of the resource is empty")
    return selected if selected.host is None else selected._replace(host=canonical_host(selected.host))
