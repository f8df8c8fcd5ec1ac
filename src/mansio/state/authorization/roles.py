"""Roles: shorthand for the ACLs that a program of a usual kind needs, and no more.

A role is not stored. `mansio acl add --role` adds the ACLs that `acls_of_role` returns, each of which can be listed and
removed like any other one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from mansio.config.topic_names import AUDIT_TOPIC
from mansio.errors import InvalidRequest
from mansio.state.authorization.acl_words import word_of
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    checked_acl,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.state.authorization.acls import Acl


class Role(StrEnum):
    """Kind of a program, or of a person."""

    READER = "reader"
    """Reads records, with a consumer or a consumer group."""
    WRITER = "writer"
    """Writes records; with a transactional id, in transactions."""
    WORKER = "worker"
    """Processes the records of a share group. Its dead letters need no right of the worker."""
    OPERATOR = "operator"
    """Administers cluster, topics and groups, and reads the audit. May neither read nor write other records, but can
    change ACLs, as `ALTER` on the cluster includes."""


_READ: Final = (Operation.READ,)
_READ_TOPIC: Final = (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
_WRITE_TOPIC: Final = (Operation.WRITE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
"""With the settings of the topic, at which clients look before they publish delayed records."""
_WRITE_DESCRIBE: Final = (Operation.WRITE, Operation.DESCRIBE)

_OPERATIONS: Final[Mapping[Role, Mapping[ResourceType, tuple[Operation, ...]]]] = {
    Role.READER: {
        ResourceType.TOPIC: _READ_TOPIC,
        ResourceType.GROUP: _READ,
        ResourceType.SUBJECT: _READ,
    },
    Role.WRITER: {
        ResourceType.TOPIC: _WRITE_TOPIC,
        ResourceType.TRANSACTIONAL_ID: _WRITE_DESCRIBE,
        ResourceType.SUBJECT: (Operation.READ, Operation.WRITE),
    },
    Role.WORKER: {
        ResourceType.TOPIC: _READ_TOPIC,
        ResourceType.GROUP: _READ,
        ResourceType.SUBJECT: _READ,
    },
    Role.OPERATOR: {
        ResourceType.CLUSTER: (
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER,
            Operation.ALTER_CONFIGS,
            Operation.CREATE,
        ),
        ResourceType.TOPIC: (
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER,
            Operation.ALTER_CONFIGS,
        ),
        ResourceType.GROUP: (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS),
        ResourceType.TRANSACTIONAL_ID: (Operation.DESCRIBE,),
        ResourceType.SUBJECT: (Operation.READ, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS),
    },
}
_REQUIRED: Final[Mapping[Role, tuple[ResourceType, ...]]] = {
    Role.READER: (ResourceType.TOPIC,),
    Role.WRITER: (ResourceType.TOPIC,),
    Role.WORKER: (ResourceType.TOPIC, ResourceType.GROUP),
    Role.OPERATOR: (),
}


def acls_of_role(
    role: Role,
    principal: str,
    names: Mapping[ResourceType, Sequence[str]],
    *,
    pattern_type: PatternType = PatternType.LITERAL,
    host: str = WILDCARD,
) -> list[Acl]:
    """Return the ACLs of a role for a principal. `names`: the names of resources by type, with patterns of
    `pattern_type`. An operator has all resources of the types that are not named. Raises `InvalidRequest` if the role
    needs a type that has no name, or has nothing to do with a type."""
    operations = _OPERATIONS[role]
    given = {kind: wanted for kind, wanted in names.items() if wanted}
    for kind in _REQUIRED[role]:
        if kind not in given:
            raise InvalidRequest(f"the role {role} needs a {word_of(kind)}")
    for kind in given:
        if kind not in operations or kind is ResourceType.CLUSTER:
            raise InvalidRequest(f"the role {role} has nothing to do with a {word_of(kind)}")

    def made(
        kind: ResourceType,
        kind_names: Iterable[str],
        kind_operations: Iterable[Operation],
        pattern: PatternType,
    ) -> Iterator[Acl]:
        for name in dict.fromkeys(kind_names):
            for operation in kind_operations:
                yield checked_acl(
                    resource_type=kind,
                    pattern_type=pattern,
                    name=name,
                    principal=principal,
                    host=host,
                    operation=operation,
                    permission=Permission.ALLOW,
                )

    acls: list[Acl] = []
    for kind, kind_operations in operations.items():
        if kind in given:
            acls += made(kind, given[kind], kind_operations, pattern_type)
        elif role is Role.OPERATOR:
            name = CLUSTER_NAME if kind is ResourceType.CLUSTER else WILDCARD
            acls += made(kind, (name,), kind_operations, PatternType.LITERAL)
    if role is Role.OPERATOR:
        acls += made(ResourceType.TOPIC, (AUDIT_TOPIC,), _READ, PatternType.LITERAL)
    return acls
