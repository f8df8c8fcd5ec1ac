"""Callers, resources and ACLs of tests of authorization."""

from __future__ import annotations

from typing import Final

from mansio.broker.routing.caller import BROKER_SESSION, Caller, ClientSession
from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission, ResourceType

ALICE: Final = Caller(ClientSession("alice"), address="10.0.0.1")
ADMIN: Final = Caller(ClientSession("admin"), address="10.0.0.1")
PEER: Final = Caller(BROKER_SESSION)
"""Another broker of the cluster."""

GROUP: Final = ResourceType.GROUP
TOPIC: Final = ResourceType.TOPIC
CLUSTER: Final = ResourceType.CLUSTER
TRANSACTIONAL_ID: Final = ResourceType.TRANSACTIONAL_ID


def acl(
    resource_type: ResourceType, name: str, operation: Operation, permission: Permission = Permission.ALLOW
) -> Acl:
    """Return an ACL of alice on one resource."""
    return Acl(resource_type, PatternType.LITERAL, name, "User:alice", WILDCARD, operation, permission)
