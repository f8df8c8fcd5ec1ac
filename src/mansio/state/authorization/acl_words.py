"""ACLs in words: of commands, and for people."""

from __future__ import annotations

from shlex import quote

from mansio.state.authorization.acls import WILDCARD, Acl, PatternType, Permission, ResourceType


def word_of(kind: ResourceType) -> str:
    """Return the word for a type of resource in commands, as in `kafka-acls.sh`: `transactional-id`."""
    return kind.name.lower().replace("_", "-")


def adding_command(acl: Acl) -> str:
    """Return the command that adds an ACL."""
    words = ["mansio acl add", quote(acl.principal), "--operation", acl.operation.name]
    if acl.resource_type is ResourceType.CLUSTER:
        words.append("--cluster")
    else:
        words += [f"--{word_of(acl.resource_type)}", quote(acl.name)]
    if acl.pattern_type is PatternType.PREFIXED:
        words.append("--prefix")
    if acl.host != WILDCARD:
        words += ["--host", quote(acl.host)]
    if acl.permission is Permission.DENY:
        words.append("--deny")
    return " ".join(words)


def acl_text(acl: Acl) -> str:
    """Return an ACL in words: `ALLOW User:alice READ topic orders`."""
    words = [acl.permission.name, acl.principal, acl.operation.name]
    words.append(word_of(acl.resource_type))
    if acl.resource_type is not ResourceType.CLUSTER:
        words.append(f"{acl.name}{'...' if acl.pattern_type is PatternType.PREFIXED else ''}")
    if acl.host != WILDCARD:
        words.append(f"from {acl.host}")
    return " ".join(words)
