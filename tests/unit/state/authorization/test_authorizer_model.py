"""The authorizer decides as a scan over all ACLs does that follows Kafka's rules word by word."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRequest
from mansio.state.authorization.acls import (
    ANY,
    CLUSTER_NAME,
    MATCH,
    OPERATIONS,
    WILDCARD,
    WILDCARD_PRINCIPAL,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    checked_acl,
    checked_filter,
)
from mansio.state.authorization.authorizer import (
    ALL_OPERATIONS,
    GROUPS_MAX,
    Authorizer,
    Requester,
    bit_of,
    new_requester,
)

NAMES = ["a", "ab", "abc", "b"]
HOSTS = ["10.0.0.1", "10.0.0.2"]
SUPER_USERS = {"User:root", "Group:ops"}
SUBJECTS = [
    new_requester("alice", HOSTS[0]),
    new_requester("alice", HOSTS[1], ["dev"]),
    new_requester("bob", HOSTS[0], ["dev", "qa"]),
    new_requester("root", HOSTS[0]),
    new_requester("bob", HOSTS[1], ["ops"]),
]
RESOURCE_TYPES = [ResourceType.TOPIC, ResourceType.GROUP]
ASKED = [*NAMES, "abcd", "z"]
MANY = [f"name{number}" for number in range(50)]
"""With others, so that they are chosen by the patterns of the requester."""
ASKED_OPERATIONS = [
    Operation.READ,
    Operation.WRITE,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
    Operation.CREATE,
]

VALID: dict[str, Any] = {
    "resource_type": 2,
    "pattern_type": 3,
    "name": "orders",
    "principal": "User:alice",
    "host": "*",
    "operation": 3,
    "permission": 3,
}

acls = st.builds(
    Acl,
    st.sampled_from([ResourceType.TOPIC, ResourceType.TOPIC, ResourceType.GROUP]),
    st.sampled_from(list(PatternType)),
    st.sampled_from([*NAMES, WILDCARD]),
    st.sampled_from(["User:alice", "User:alice", "User:bob", "User:*", "Group:dev", "Group:*"]),
    st.sampled_from([HOSTS[0], WILDCARD]),
    st.sampled_from(
        [Operation.ALL, Operation.READ, Operation.READ, Operation.DESCRIBE, Operation.ALTER_CONFIGS]
    ),
    st.sampled_from([Permission.DENY, Permission.ALLOW, Permission.ALLOW]),
)
acl_sets = st.sets(acls, max_size=4) | st.sets(acls, min_size=8, max_size=25)


IMPLYING = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


def scan(
    known: set[Acl],
    requester: Requester,
    operation: Operation,
    resource_type: ResourceType,
    name: str,
    *,
    allow_everyone: bool,
) -> bool:
    """The rules of Kafka's documentation and of StandardAuthorizer, without an index."""
    if SUPER_USERS & set(requester.principals):
        return True
    of_resource = [
        acl
        for acl in known
        if acl.resource_type is resource_type
        and (
            acl.name in (name, WILDCARD)
            if acl.pattern_type is PatternType.LITERAL
            else name.startswith(acl.name)
        )
    ]
    if not of_resource:
        return allow_everyone
    of_requester = [
        acl
        for acl in of_resource
        if acl.principal in requester.principals and acl.host in (requester.host, WILDCARD)
    ]
    if any(
        acl.permission is Permission.DENY and acl.operation in (operation, Operation.ALL)
        for acl in of_requester
    ):
        return False
    allowing = {operation, Operation.ALL} | IMPLYING.get(operation, set())
    return any(acl.permission is Permission.ALLOW and acl.operation in allowing for acl in of_requester)


def authorizer_of(known: set[Acl], *, allow_everyone: bool = False) -> Authorizer:
    made = Authorizer(SUPER_USERS, allow_everyone_if_no_acl_found=allow_everyone)
    for acl in known:
        made.add(acl)
    return made


QUERIES = [
    (requester, operation, resource_type)
    for requester in SUBJECTS
    for operation in ASKED_OPERATIONS
    for resource_type in RESOURCE_TYPES
]


@settings(max_examples=60)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3).map(bool), acls), min_size=5, max_size=30),
    removed_again=st.lists(st.integers(0, 29), max_size=5),
    allow_everyone=st.booleans(),
)
@example(changes=[], removed_again=[], allow_everyone=True)
@example(  # one of two prefixes of the same length goes
    changes=[
        (
            True,
            Acl(
                ResourceType.TOPIC,
                PatternType.PREFIXED,
                prefix,
                "User:bob",
                "*",
                Operation.READ,
                Permission.ALLOW,
            ),
        )
        for prefix in ("a", "b")
    ],
    removed_again=[0],
    allow_everyone=False,
)
def test_decides_after_any_changes_as_a_scan_over_the_acls_that_are_left(
    changes: list[tuple[bool, Acl]], removed_again: list[int], allow_everyone: bool
) -> None:
    authorizer = authorizer_of(set(), allow_everyone=allow_everyone)
    known: set[Acl] = set()
    changes += [(False, changes[index][1]) for index in removed_again if index < len(changes)]
    for is_added, acl in changes:
        before, revision = set(known), authorizer.revision
        (known.add if is_added else known.discard)(acl)
        (authorizer.add if is_added else authorizer.remove)(acl)
        assert (authorizer.revision > revision) == (known != before)
        assert (acl in authorizer) == (acl in known)
    assert authorizer.acl_count == len(known)
    assert sorted(authorizer.acls_of(None)) == sorted(known)

    for requester, operation, resource_type in QUERIES:
        expected = [
            name
            for name in ASKED
            if scan(known, requester, operation, resource_type, name, allow_everyone=allow_everyone)
        ]
        allowed = [name for name in ASKED if authorizer.allows(requester, operation, resource_type, name)]
        assert allowed == expected
        assert authorizer.allowed_names(requester, operation, resource_type, ASKED) == expected
        among = authorizer.allowed_names(requester, operation, resource_type, [*ASKED, *MANY])
        assert among[: len(expected)] == expected
        others = scan(known, requester, operation, resource_type, MANY[0], allow_everyone=allow_everyone)
        assert among[len(expected) :] == (MANY if others else [])


@settings(max_examples=60)
@given(known=acl_sets, allow_everyone=st.booleans())
def test_any_resource_is_allowed_if_and_only_if_there_is_such_a_name(
    known: set[Acl], allow_everyone: bool
) -> None:
    authorizer = authorizer_of(known, allow_everyone=allow_everyone)
    prefixes = [*NAMES, WILDCARD]
    possible = [*NAMES, *(f"{prefix}~" for prefix in prefixes), "~"]  # `~`: names that only prefixes match
    for requester, operation, resource_type in QUERIES:
        expected = any(
            scan(known, requester, operation, resource_type, name, allow_everyone=allow_everyone)
            for name in possible
        )
        assert authorizer.allows_any(requester, operation, resource_type) == expected


@settings(max_examples=60)
@given(known=acl_sets, denial=acls)
def test_adding_a_denial_never_allows(known: set[Acl], denial: Acl) -> None:
    authorizer = authorizer_of(known)
    asked = [(requester, resource_type, name) for requester, _, resource_type in QUERIES for name in ASKED]
    before = [authorizer.operations_of(*each) for each in asked]
    authorizer.add(denial._replace(permission=Permission.DENY))
    after = [authorizer.operations_of(*each) for each in asked]
    assert not any(now & ~then for then, now in zip(before, after, strict=True))


@settings(max_examples=60)
@given(known=acl_sets)
def test_the_deciding_acl_explains_the_decision(known: set[Acl]) -> None:
    authorizer = authorizer_of(known)
    for requester, operation, resource_type in QUERIES:
        for name in ASKED:
            decision = authorizer.decide(requester, operation, resource_type, name)
            assert decision.is_allowed == authorizer.allows(requester, operation, resource_type, name)
            assert decision.is_super_user == bool(SUPER_USERS & set(requester.principals))
            if decision.acl is None:
                assert not decision.is_allowed or decision.is_super_user
                continue
            assert decision.acl in known
            assert (decision.acl.permission is Permission.ALLOW) == decision.is_allowed
            alone = authorizer_of({decision.acl})
            assert alone.allows(requester, operation, resource_type, name) == decision.is_allowed


@given(known=acl_sets)
def test_reported_operations_are_those_of_the_type_that_are_allowed(known: set[Acl]) -> None:
    authorizer = authorizer_of(known)
    for requester in SUBJECTS:
        for resource_type in ResourceType:
            assert authorizer.authorized_operations(requester, resource_type, "ab") == sum(
                bit_of(operation)
                for operation in OPERATIONS[resource_type]
                if authorizer.allows(requester, operation, resource_type, "ab")
            )


def test_many_prefixes_are_found_as_few_are() -> None:
    prefixes = [f"team{number}." for number in range(200)]
    authorizer = Authorizer()
    for prefix in prefixes:
        authorizer.add(
            Acl(
                ResourceType.TOPIC,
                PatternType.PREFIXED,
                prefix,
                "User:bob",
                "*",
                Operation.READ,
                Permission.ALLOW,
            )
        )
    bob = new_requester("bob", "10.0.0.1")
    asked = ["team1.orders", "team199.x", "team200.x", "team1", "other"]
    kept = authorizer.allowed_names(bob, Operation.DESCRIBE, ResourceType.TOPIC, asked)
    assert kept == ["team1.orders", "team199.x"]


@pytest.mark.parametrize(
    ("written", "socket"),
    [
        ("192.0.2.1", "::ffff:192.0.2.1"),
        ("::FFFF:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:0:0:0:0:1", "2001:db8::1"),  # as Java writes it
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_a_denial_holds_for_its_host_however_the_address_is_written(written: str, socket: str) -> None:
    denial = checked_acl(**{**VALID, "host": written, "permission": Permission.DENY})
    authorizer = authorizer_of({checked_acl(**VALID), denial})
    asked = (Operation.READ, ResourceType.TOPIC, "orders")
    assert not authorizer.allows(new_requester("alice", socket), *asked)
    assert authorizer.allows(new_requester("alice", "192.0.2.9"), *asked)
    for host in (written, socket):
        selected = checked_filter(AclFilter(host=host))
        assert [*filter(selected.matches, authorizer.acls_of(None))] == [denial]


def test_all_users_are_no_super_user() -> None:
    authorizer = Authorizer([WILDCARD_PRINCIPAL])
    bob = new_requester("bob", "10.0.0.1")
    assert not authorizer.is_super_user(bob)
    assert not authorizer.allows(bob, Operation.READ, ResourceType.TOPIC, "orders")


def test_groups_beyond_the_limit_are_no_principals() -> None:
    requester = new_requester("bob", "10.0.0.1", [f"g{number}" for number in range(1_000)])
    assert len(requester.principals) == GROUPS_MAX + 2
    assert requester.principals[:2] == ("User:bob", "Group:g0")


def test_the_group_of_a_super_user_may_do_everything() -> None:
    authorizer = Authorizer(SUPER_USERS)
    operator = new_requester("carol", "10.0.0.1", ["ops"])
    assert authorizer.operations_of(operator, ResourceType.CLUSTER, "kafka-cluster") == ALL_OPERATIONS
    assert authorizer.allows_any(operator, Operation.WRITE, ResourceType.TOPIC)


@pytest.mark.parametrize(
    ("super_users", "allow_everyone", "named", "expected"),
    [
        ([], False, {}, False),
        (["User:root"], False, {}, True),
        ([WILDCARD_PRINCIPAL], False, {}, False),
        ([], True, {}, True),
        ([], False, {"operation": Operation.ALTER}, True),
        ([], False, {"operation": Operation.ALL, "principal": "Group:ops"}, True),
        ([], False, {"operation": Operation.DESCRIBE}, False),
        ([], False, {"operation": Operation.ALL, "permission": Permission.DENY}, False),
        ([], False, {"operation": Operation.ALL, "resource_type": ResourceType.TOPIC}, False),
    ],
)
def test_acls_can_be_changed_if_a_client_may_alter_the_cluster(
    super_users: list[str], allow_everyone: bool, named: dict[str, Any], expected: bool
) -> None:
    authorizer = Authorizer(super_users, allow_everyone_if_no_acl_found=allow_everyone)
    if named:
        of_cluster = {**VALID, "resource_type": ResourceType.CLUSTER, "name": CLUSTER_NAME}
        authorizer.add(checked_acl(**{**of_cluster, **named}))
    assert authorizer.is_administrable() is expected


# Filters


def naive_match(selected: AclFilter, acl: Acl) -> bool:
    """ResourcePatternFilter and AccessControlEntryFilter of Kafka's clients."""
    for field in ("resource_type", "operation", "permission"):
        if getattr(selected, field) not in (ANY, getattr(acl, field)):
            return False
    for field in ("principal", "host"):
        if getattr(selected, field) not in (None, getattr(acl, field)):
            return False
    if selected.pattern_type not in (ANY, MATCH) and selected.pattern_type != acl.pattern_type:
        return False
    if selected.name is None:
        return True
    if selected.pattern_type == MATCH:
        if acl.pattern_type is PatternType.LITERAL:
            return acl.name in (selected.name, WILDCARD)
        return selected.name.startswith(acl.name)
    return selected.name == acl.name


filters = st.builds(
    AclFilter,
    st.sampled_from([ANY, ResourceType.TOPIC, ResourceType.GROUP]),
    st.sampled_from([ANY, MATCH, *PatternType]),
    st.sampled_from([None, *NAMES, WILDCARD]),
    st.sampled_from([None, "User:alice", "User:*"]),
    st.sampled_from([None, *HOSTS, WILDCARD]),
    st.sampled_from([ANY, Operation.READ, Operation.ALL]),
    st.sampled_from([ANY, *Permission]),
)


@settings(max_examples=200)
@given(known=st.sets(acls, min_size=10, max_size=30), selected=filters)
def test_filters_select_as_those_of_kafkas_clients(known: set[Acl], selected: AclFilter) -> None:
    assert checked_filter(selected) == selected
    found = filter(selected.matches, authorizer_of(known).acls_of(selected.principal))
    assert sorted(found) == sorted(acl for acl in known if naive_match(selected, acl))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resource_type", 0),
        ("resource_type", ANY),
        ("resource_type", 8),
        ("pattern_type", ANY),
        ("pattern_type", MATCH),
        ("operation", 0),
        ("operation", ANY),
        ("operation", 99),
        ("permission", ANY),
        ("name", ""),
        ("name", "n" * 1001),
        ("principal", "alice"),
        ("principal", "User:"),
        ("principal", ":alice"),
        ("host", ""),
    ],
)
def test_refuses_an_acl_that_kafka_refuses(field: str, value: object) -> None:
    checked_acl(**VALID)
    with pytest.raises(InvalidRequest):
        checked_acl(**{**VALID, field: value})


def test_the_cluster_has_one_name() -> None:
    cluster = {**VALID, "resource_type": ResourceType.CLUSTER}
    assert checked_acl(**{**cluster, "name": "kafka-cluster"}).resource_type is ResourceType.CLUSTER
    with pytest.raises(InvalidRequest, match="kafka-cluster"):
        checked_acl(**{**cluster, "name": "*"})


@pytest.mark.parametrize(
    "selected",
    [AclFilter(resource_type=0), AclFilter(pattern_type=5), AclFilter(operation=77), AclFilter(name="")],
)
def test_refuses_a_filter_with_unknown_numbers(selected: AclFilter) -> None:
    with pytest.raises(InvalidRequest):
        checked_filter(selected)
