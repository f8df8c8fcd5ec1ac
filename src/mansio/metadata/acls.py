"""Access control lists in the metadata store.

Each ACL is a key of its own, whose name is made of all its fields, so that to add it again changes nothing, and changes
of different ACLs never conflict. The value repeats the fields.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from mansio.errors import StorageError
from mansio.state.authorization.acls import Acl, Operation, PatternType, Permission, ResourceType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.metadata.metadata_store import Keys


def acl_key(keys: Keys, acl: Acl) -> str:
    """Return the key of an ACL. It contains a hash, because names may be longer than keys of the store."""
    digest = hashlib.sha256(json.dumps(acl).encode()).hexdigest()
    return f"{keys.acls}{digest}"


def acl_document(acl: Acl) -> dict[str, Any]:
    """Return the value of the key of an ACL."""
    return {
        "resource": acl.resource_type.name,
        "pattern": acl.pattern_type.name,
        "name": acl.name,
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation.name,
        "permission": acl.permission.name,
    }


def decode_acl(key: str, document: Mapping[str, Any]) -> Acl:
    """Decode the value of the key of an ACL. Raises `StorageError`, also for a kind of ACL that this version does not
    know: to ignore it could allow what it denies."""
    try:
        return Acl(
            ResourceType[document["resource"]],
            PatternType[document["pattern"]],
            str(document["name"]),
            str(document["principal"]),
            str(document["host"]),
            Operation[document["operation"]],
            Permission[document["permission"]],
        )
    except (KeyError, TypeError):
        pass
    raise StorageError(f"metadata {key} is damaged, or a newer version has written it")
