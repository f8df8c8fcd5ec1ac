"""Roles expand to exactly the ACLs that the documentation names, and commands are those that add them."""

from __future__ import annotations

import shlex

import pytest

from mansio.errors import InvalidRequest
from mansio.state.authorization.acl_words import acl_text, adding_command
from mansio.state.authorization.acls import Acl, Operation, PatternType, Permission, ResourceType
from mansio.state.authorization.roles import Role, acls_of_role

TOPIC = {ResourceType.TOPIC: ["t", "u"]}
GROUP = {ResourceType.GROUP: ["g"]}
NAMES = {
    Role.READER: {**TOPIC, **GROUP, ResourceType.SUBJECT: ["s"]},
    Role.WRITER: {**TOPIC, ResourceType.TRANSACTIONAL_ID: ["x"], ResourceType.SUBJECT: ["s"]},
    Role.WORKER: {**TOPIC, **GROUP},
    Role.OPERATOR: {},
}
EXPECTED = {
    Role.READER: "READ topic t, DESCRIBE topic t, DESCRIBE_CONFIGS topic t, READ topic u, DESCRIBE topic u, "
    "DESCRIBE_CONFIGS topic u, READ group g, READ subject s",
    Role.WRITER: "WRITE topic t, DESCRIBE topic t, DESCRIBE_CONFIGS topic t, WRITE topic u, DESCRIBE topic u, "
    "DESCRIBE_CONFIGS topic u, WRITE transactional-id x, DESCRIBE transactional-id x, READ subject s, WRITE subject s",
    Role.WORKER: "READ topic t, DESCRIBE topic t, DESCRIBE_CONFIGS topic t, READ topic u, DESCRIBE topic u, "
    "DESCRIBE_CONFIGS topic u, READ group g",
    Role.OPERATOR: "DESCRIBE cluster, DESCRIBE_CONFIGS cluster, ALTER cluster, ALTER_CONFIGS cluster, CREATE cluster, "
    "DESCRIBE topic *, DESCRIBE_CONFIGS topic *, ALTER topic *, ALTER_CONFIGS topic *, "
    "DESCRIBE group *, DESCRIBE_CONFIGS group *, ALTER_CONFIGS group *, DESCRIBE transactional-id *, "
    "READ subject *, DESCRIBE_CONFIGS subject *, ALTER_CONFIGS subject *, READ topic __mansio_audit",
}


@pytest.mark.parametrize("role", Role)
def test_a_role_is_exactly_these_acls(role: Role) -> None:
    acls = acls_of_role(role, "User:alice", NAMES[role])
    assert [acl_text(acl) for acl in acls] == [
        f"ALLOW User:alice {each}" for each in EXPECTED[role].split(", ")
    ]
    prefixed = acls_of_role(
        role, "User:alice", NAMES[role], pattern_type=PatternType.PREFIXED, host="10.0.0.1"
    )
    assert {acl.host for acl in prefixed} == {"10.0.0.1"}
    patterns = {acl.pattern_type for acl in prefixed}
    assert patterns == {PatternType.LITERAL if role is Role.OPERATOR else PatternType.PREFIXED}


@pytest.mark.parametrize(
    ("role", "names", "complaint"),
    [
        (Role.READER, {}, "needs a topic"),
        (Role.READER, GROUP, "needs a topic"),
        (Role.WORKER, TOPIC, "needs a group"),
        (Role.WRITER, {**TOPIC, **GROUP}, "nothing to do with a group"),
        (
            Role.WORKER,
            {**TOPIC, **GROUP, ResourceType.CLUSTER: ["kafka-cluster"]},
            "nothing to do with a cluster",
        ),
        (Role.OPERATOR, {ResourceType.USER: ["User:a"]}, "nothing to do with a user"),
    ],
)
def test_a_role_without_what_it_needs_or_with_what_it_cannot_use_is_refused(
    role: Role, names: dict[ResourceType, list[str]], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        acls_of_role(role, "User:alice", names)


def test_the_command_of_an_acl_quotes_what_a_shell_would_change() -> None:
    acl = Acl(
        ResourceType.TOPIC,
        PatternType.PREFIXED,
        "a b'$(reboot)",
        "User:*",
        "10.0.0.1",
        Operation.READ,
        Permission.DENY,
    )
    command = adding_command(acl)
    assert shlex.split(command) == [
        *("mansio", "acl", "add", "User:*", "--operation", "READ", "--topic", "a b'$(reboot)"),
        *("--prefix", "--host", "10.0.0.1", "--deny"),
    ]
