"""What access control lists allow, with the rules of Kafka's StandardAuthorizer (KIP-801).

A requester is the principals and the host of a session. Super users may do everything. For the others, the ACLs count
that match the resource, one of the principals (or all users) and the host (or all hosts):

* An operation is denied if one of them denies it or denies ALL, whatever the others allow.
* Else it is allowed if one of them allows it, allows ALL, or allows an operation that implies it: READ, WRITE, DELETE
  and ALTER imply DESCRIBE, and ALTER_CONFIGS implies DESCRIBE_CONFIGS. A denial implies nothing.
* Else it is denied, unless `allow_everyone_if_no_acl_found` is set and no ACL of any principal matches the resource.

Sets of operations are ints in which the bit `1 << operation` stands for an operation, as in the fields
`authorized_operations` of Kafka's protocol (KIP-430).

The ACLs are indexed by principal, type of resource and name, so the cost of a decision depends on the number of the
requester's principals and on how many lengths the prefixes in their ACLs have, and not on the number of ACLs. Nothing
is remembered of the resources asked for: a caller that keeps a decision keeps `revision` with it, and decides again
when that has changed.

Invariant: an ACL that denies never allows anything: adding one removes operations from `operations_of`, except that
with `allow_everyone_if_no_acl_found` any ACL ends the access of everyone.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    WILDCARD,
    WILDCARD_PRINCIPAL,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    canonical_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

GROUPS_MAX: Final = 64
"""Maximum number of groups of a session that are principals."""

_IMPLIED_BY_ALLOW: Final = {
    Operation.READ: Operation.DESCRIBE,
    Operation.WRITE: Operation.DESCRIBE,
    Operation.DELETE: Operation.DESCRIBE,
    Operation.ALTER: Operation.DESCRIBE,
    Operation.ALTER_CONFIGS: Operation.DESCRIBE_CONFIGS,
}
FEW_NAMES: Final = 32
"""Number of resources up to which deciding for each is faster than gathering all ACLs of the requester."""

_FEW_PREFIXES: Final = 32
"""Number of prefixes up to which comparing a name with each is faster than looking up its beginnings."""


def bit_of(operation: Operation) -> int:
    """Return the set of operations that contains one."""
    return 1 << operation


ALL_OPERATIONS: Final = sum(bit_of(operation) for operation in Operation if operation is not Operation.ALL)
"""The set of all operations."""

OPERATIONS_OF_TYPE: Final = {
    resource_type: sum(map(bit_of, operations)) for resource_type, operations in OPERATIONS.items()
}
"""The set of the operations that exist for each type of resource."""


def _effect(acl: Acl) -> int:
    """Return the operations that an ACL allows or denies."""
    if acl.operation is Operation.ALL:
        return ALL_OPERATIONS
    effect = bit_of(acl.operation)
    if acl.permission is Permission.ALLOW and acl.operation in _IMPLIED_BY_ALLOW:
        effect |= bit_of(_IMPLIED_BY_ALLOW[acl.operation])
    return effect


class Requester(NamedTuple):
    """Who asks. `principals` includes the one that stands for all users."""

    principals: tuple[str, ...]
    host: str


def new_requester(user: str, host: str, groups: Iterable[str] = ()) -> Requester:
    """Return the requester of a user who is in `groups` and connects from `host`. Groups after the first `GROUPS_MAX`
    do not count."""
    named = [f"Group:{group}" for group in groups][:GROUPS_MAX]
    return Requester((f"User:{user}", *named, WILDCARD_PRINCIPAL), canonical_host(host))


class Decision(NamedTuple):
    """Whether an operation is allowed, and the ACL that decided; None if no ACL did: the requester is a super user, or
    no ACL applies."""

    is_allowed: bool
    acl: Acl | None
    is_super_user: bool = False


class _Rules:
    """The ACLs of one principal on one pattern from one host, and the operations that they allow and deny."""

    __slots__ = ("acls", "allowed", "denied")

    def __init__(self) -> None:
        self.acls: set[Acl] = set()
        self.allowed = 0
        self.denied = 0

    def add(self, acl: Acl) -> None:
        self.acls.add(acl)
        if acl.permission is Permission.ALLOW:
            self.allowed |= _effect(acl)
        else:
            self.denied |= _effect(acl)

    def remove(self, acl: Acl) -> None:
        kept = self.acls - {acl}
        self.acls, self.allowed, self.denied = set(), 0, 0
        for each in kept:
            self.add(each)


V = TypeVar("V")


class _Patterns(Generic[V]):
    """Values by pattern, found by the names that the patterns match."""

    __slots__ = ("_prefix_lengths", "literal", "prefixed")

    def __init__(self) -> None:
        self.literal: dict[str, V] = {}
        self.prefixed: dict[str, V] = {}
        self._prefix_lengths: Counter[int] = Counter()

    def of_type(self, pattern_type: PatternType) -> dict[str, V]:
        """Return the values of LITERAL or PREFIXED patterns by their names; to be changed by `put` and `delete`."""
        return self.literal if pattern_type is PatternType.LITERAL else self.prefixed

    def put(self, pattern_type: PatternType, name: str, value: V) -> None:
        values = self.of_type(pattern_type)
        if values is self.prefixed and name not in values:
            self._prefix_lengths[len(name)] += 1
        values[name] = value

    def delete(self, pattern_type: PatternType, name: str) -> None:
        values = self.of_type(pattern_type)
        del values[name]
        if values is self.prefixed:
            length = len(name)
            self._prefix_lengths[length] -= 1
            if not self._prefix_lengths[length]:
                del self._prefix_lengths[length]

    def matching(self, name: str) -> Iterator[V]:
        """Yield the value of each pattern that matches a resource."""
        if (value := self.literal.get(name)) is not None:
            yield value
        if name != WILDCARD and (value := self.literal.get(WILDCARD)) is not None:
            yield value
        for length in self._prefix_lengths:
            if length <= len(name) and (value := self.prefixed.get(name[:length])) is not None:
                yield value


class _Names:
    """Patterns: names, and prefixes of names."""

    __slots__ = ("has_prefix_of", "literal", "prefixes")

    def __init__(self, literal: set[str], prefixes: set[str]) -> None:
        self.literal = literal
        self.prefixes = prefixes
        few = tuple(prefixes)
        lengths = {len(prefix) for prefix in prefixes}
        self.has_prefix_of: Callable[[str], bool] = (
            (lambda name: name.startswith(few))
            if len(few) <= _FEW_PREFIXES
            else (lambda name: any(name[:length] in prefixes for length in lengths))
        )
        """Whether a name begins with one of the prefixes."""


class Authorizer:
    """The ACLs of a cluster. `revision` increases with each change of what they allow."""

    __slots__ = (
        "_acl_counts",
        "_allow_everyone",
        "_denial_counts",
        "_rules",
        "_super_users",
        "acl_count",
        "revision",
    )

    def __init__(
        self, super_users: Iterable[str] = (), *, allow_everyone_if_no_acl_found: bool = False
    ) -> None:
        """`super_users`: principals, for example `User:admin`. The one that stands for all users is not among them, as
        in Kafka."""
        self._super_users = frozenset(super_users) - {WILDCARD_PRINCIPAL}
        self._allow_everyone = allow_everyone_if_no_acl_found
        self._rules: dict[tuple[ResourceType, str], _Patterns[dict[str, _Rules]]] = {}
        """By type of resource and principal, pattern, and host."""
        self._acl_counts: dict[ResourceType, _Patterns[int]] = {each: _Patterns() for each in ResourceType}
        """Numbers of ACLs of all principals, by type of resource and pattern."""
        self._denial_counts: Counter[tuple[ResourceType, str]] = Counter()
        """Numbers of ACLs that deny, by type of resource and principal."""
        self.acl_count = 0
        self.revision = 0

    def __contains__(self, acl: Acl) -> bool:
        patterns = self._rules.get((acl.resource_type, acl.principal))
        if patterns is None:
            return False
        rules = patterns.of_type(acl.pattern_type).get(acl.name, {}).get(acl.host)
        return rules is not None and acl in rules.acls

    def add(self, acl: Acl) -> None:
        """Add an ACL; without effect if it is there already."""
        if acl in self:
            return
        pattern = acl.pattern_type, acl.name
        patterns = self._rules.setdefault((acl.resource_type, acl.principal), _Patterns())
        hosts = patterns.of_type(acl.pattern_type).get(acl.name)
        if hosts is None:
            patterns.put(*pattern, hosts := {})
        hosts.setdefault(acl.host, _Rules()).add(acl)
        counts = self._acl_counts[acl.resource_type]
        counts.put(*pattern, counts.of_type(acl.pattern_type).get(acl.name, 0) + 1)
        if acl.permission is Permission.DENY:
            self._denial_counts[acl.resource_type, acl.principal] += 1
        self.acl_count += 1
        self.revision += 1

    def remove(self, acl: Acl) -> None:
        """Remove an ACL; without effect if there is none."""
        if acl not in self:
            return
        pattern = acl.pattern_type, acl.name
        patterns = self._rules[acl.resource_type, acl.principal]
        hosts = patterns.of_type(acl.pattern_type)[acl.name]
        hosts[acl.host].remove(acl)
        if not hosts[acl.host].acls:
            del hosts[acl.host]
        if not hosts:
            patterns.delete(*pattern)
        if not (patterns.literal or patterns.prefixed):
            del self._rules[acl.resource_type, acl.principal]
        if acl.permission is Permission.DENY:
            self._denial_counts -= Counter([(acl.resource_type, acl.principal)])
        counts = self._acl_counts[acl.resource_type]
        rest = counts.of_type(acl.pattern_type)[acl.name] - 1
        if rest:
            counts.put(*pattern, rest)
        else:
            counts.delete(*pattern)
        self.acl_count -= 1
        self.revision += 1

    def acls_of(self, principal: str | None) -> Iterator[Acl]:
        """Yield the ACLs of a principal, None for those of all, in any order; to be used before the next change."""
        for key in self._rules if principal is None else [(each, principal) for each in ResourceType]:
            patterns = self._rules.get(key)
            if patterns is not None:
                for hosts in chain(patterns.literal.values(), patterns.prefixed.values()):
                    for rules in hosts.values():
                        yield from rules.acls

    def is_super_user(self, requester: Requester) -> bool:
        """Whether a requester may do everything."""
        return not self._super_users.isdisjoint(requester.principals)

    def is_administrable(self) -> bool:
        """Whether a client can change ACLs: there is a super user, an ACL that allows ALTER on the cluster, or
        `allow_everyone_if_no_acl_found`. Whether an ACL denies it again is not looked at."""
        if self._super_users or self._allow_everyone:
            return True
        return any(
            rules.allowed & bit_of(Operation.ALTER)
            for (resource_type, _), patterns in self._rules.items()
            if resource_type is ResourceType.CLUSTER
            for hosts in patterns.matching(CLUSTER_NAME)
            for rules in hosts.values()
        )

    def operations_of(self, requester: Requester, resource_type: ResourceType, name: str) -> int:
        """Return the set of operations that a requester may do on a resource."""
        if self.is_super_user(requester):
            return ALL_OPERATIONS
        allowed = denied = 0
        host = requester.host
        for principal in requester.principals:
            patterns = self._rules.get((resource_type, principal))
            if patterns is None:
                continue
            for hosts in patterns.matching(name):
                for rules in (hosts.get(host), hosts.get(WILDCARD)):
                    if rules is not None:
                        allowed |= rules.allowed
                        denied |= rules.denied
        if self._allow_everyone and not next(self._acl_counts[resource_type].matching(name), 0):
            return ALL_OPERATIONS
        return allowed & ~denied

    def allows(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        """Whether a requester may do an operation on a resource."""
        return bool(self.operations_of(requester, resource_type, name) & bit_of(operation))

    def authorized_operations(self, requester: Requester, resource_type: ResourceType, name: str) -> int:
        """Return what Kafka's responses report of a resource (KIP-430): those operations of its type that the requester
        may do."""
        return self.operations_of(requester, resource_type, name) & OPERATIONS_OF_TYPE[resource_type]

    def allowed_names(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> list[str]:
        """Return those resources on which a requester may do an operation, in their order."""
        names = list(names)
        if len(names) <= FEW_NAMES:
            bit = bit_of(operation)
            return [name for name in names if self.operations_of(requester, resource_type, name) & bit]
        return self.name_filter(requester, operation, resource_type)(names)

    def name_filter(
        self, requester: Requester, operation: Operation, resource_type: ResourceType
    ) -> Callable[[Iterable[str]], list[str]]:
        """Return a function that returns what `allowed_names` does. It gathers all ACLs of the requester once, for many
        names that are passed in several calls; later changes of ACLs need a new function."""
        if self.is_super_user(requester):
            return list
        bit = bit_of(operation)
        if self._allow_everyone:
            return lambda names: [
                name for name in names if self.operations_of(requester, resource_type, name) & bit
            ]
        allowed, denied = self._names(requester, resource_type, bit)
        if WILDCARD in denied.literal:
            return lambda _: []
        allows_all = WILDCARD in allowed.literal

        def select(names: Iterable[str]) -> list[str]:
            kept = (
                list(names)
                if allows_all
                else [name for name in names if name in allowed.literal or allowed.has_prefix_of(name)]
            )
            if denied.literal or denied.prefixes:
                kept = [
                    name for name in kept if name not in denied.literal and not denied.has_prefix_of(name)
                ]
            return kept

        return select

    def allows_any(self, requester: Requester, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether a requester may do an operation on any resource of a type, existing or not (`authorizeByResourceType`
        of KIP-679)."""
        if self.is_super_user(requester):
            return True
        bit = bit_of(operation)
        if not any(self._denial_counts[resource_type, principal] for principal in requester.principals):
            return self._has_allowing(requester, resource_type, bit) or (
                self._allow_everyone and WILDCARD not in self._acl_counts[resource_type].literal
            )
        allowed, denied = self._names(requester, resource_type, bit)
        if WILDCARD in denied.literal:
            return False
        if self._allow_everyone and WILDCARD not in self._acl_counts[resource_type].literal:
            return True  # no ACL matches some name
        if WILDCARD in allowed.literal:
            return True
        names = chain(allowed.prefixes, allowed.literal - denied.literal)
        return any(not denied.has_prefix_of(name) for name in names)

    def _has_allowing(self, requester: Requester, resource_type: ResourceType, bit: int) -> bool:
        """Whether an ACL of a requester allows an operation."""
        for principal in requester.principals:
            patterns = self._rules.get((resource_type, principal))
            if patterns is None:
                continue
            for hosts in chain(patterns.literal.values(), patterns.prefixed.values()):
                for host in (requester.host, WILDCARD):
                    if (rules := hosts.get(host)) is not None and rules.allowed & bit:
                        return True
        return False

    def _names(self, requester: Requester, resource_type: ResourceType, bit: int) -> tuple[_Names, _Names]:
        """Return the patterns for which ACLs of a requester allow, and deny, an operation."""
        allowed, denied = (set[str](), set[str]()), (set[str](), set[str]())
        own_hosts = requester.host, WILDCARD
        for principal in requester.principals:
            patterns = self._rules.get((resource_type, principal))
            if patterns is None:
                continue
            for index, values in enumerate((patterns.literal, patterns.prefixed)):
                allows, denies = allowed[index].add, denied[index].add
                for name, hosts in values.items():
                    for host, rules in hosts.items():  # most have one
                        if host in own_hosts:
                            if rules.allowed & bit:
                                allows(name)
                            if rules.denied & bit:
                                denies(name)
        return _Names(*allowed), _Names(*denied)

    def decide(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Return what `allows` returns, with the reason, for people; slower than `allows`."""
        if self.is_super_user(requester):
            return Decision(is_allowed=True, acl=None, is_super_user=True)
        is_allowed = self.allows(requester, operation, resource_type, name)
        wanted = Permission.ALLOW if is_allowed else Permission.DENY
        deciding = [
            acl
            for principal in requester.principals
            if (patterns := self._rules.get((resource_type, principal))) is not None
            for hosts in patterns.matching(name)
            for host in (requester.host, WILDCARD)
            if (rules := hosts.get(host)) is not None
            for acl in rules.acls
            if acl.permission is wanted and _effect(acl) & bit_of(operation)
        ]
        return Decision(is_allowed, min(deciding, default=None))
