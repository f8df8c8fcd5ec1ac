"""Authorization: what a caller may do.

Without an authorizer everything is allowed. Services ask at the entry of a request, before any look-up, so that an
error tells nothing about what exists.

Each refusal is reported to the audit once: by `check`, `check_all`, `do_for_allowed` and `allowed_of_named` themselves.
A service that asks `allows` or `allowed_names`, and answers with an error, calls `report_refusal`. What a list leaves
out is no refusal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from uuid import UUID

from mansio.errors import (
    AuthorizationFailed,
    ClusterAuthorizationFailed,
    DelegationTokenAuthorizationFailed,
    GroupAuthorizationFailed,
    MansioError,
    SecurityDisabled,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.host.item_turns import ITEMS_PER_TURN
from mansio.metadata.topic_plan import INTERNAL_TOPICS
from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from mansio.state.authorization.authorizer import FEW_NAMES, OPERATIONS_OF_TYPE, Decision, new_requester
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.host.item_turns import ItemTurns
    from mansio.state.authorization.authorizer import Authorizer, Requester

    NameOf = Callable[[bytes], str | None]

REQUESTERS_KEPT_MAX: Final = 4_096

GRANTS_MAX: Final = 1_024
"""Maximum number of names of one kind in the grants of a caller. With more of them, decisions are made again."""

REPORTED_MAX: Final = 200
"""Number of refused resources of one request that are reported by name; the others are counted."""

_ERRORS: Final[Mapping[ResourceType, type[AuthorizationFailed]]] = {
    ResourceType.TOPIC: TopicAuthorizationFailed,
    ResourceType.GROUP: GroupAuthorizationFailed,
    ResourceType.CLUSTER: ClusterAuthorizationFailed,
    ResourceType.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
    ResourceType.USER: DelegationTokenAuthorizationFailed,
}

EVERYTHING_IS_ALLOWED: Final = Decision(is_allowed=True, acl=None)
"""The decision without an authorizer."""

T = TypeVar("T")
R = TypeVar("R")

_requester = lru_cache(REQUESTERS_KEPT_MAX)(new_requester)


class _NoRules:
    """Takes the place of the authorizer of a broker that has none: what is allowed never changes."""

    __slots__ = ()
    revision: Final = 0


class OnRefusal(Protocol):
    """Called when a caller is refused an operation on a resource."""

    def __call__(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        /,
        *,
        event_count: int = 1,
    ) -> None:
        """`event_count`: number of resources; `name` is `OTHER_RESOURCES` if they are not named."""


def _ignore(
    caller: Caller,
    operation: Operation,
    resource_type: ResourceType,
    name: str,
    /,
    *,
    event_count: int = 1,
) -> None:
    """Report nothing."""


class Authorization:
    """Asks the authorizer of a broker for the callers of its services."""

    __slots__ = ("_authorizer", "_report_refusal", "is_enabled", "rules")

    def __init__(self, authorizer: Authorizer | None, report_refusal: OnRefusal = _ignore) -> None:
        """Ask `authorizer`; None: everything is allowed. `report_refusal` is called for each refusal."""
        self._authorizer = authorizer
        self.is_enabled = authorizer is not None
        """Whether there is an authorizer."""
        self.rules: Authorizer | _NoRules = authorizer or _NoRules()
        """Has the `revision` as an attribute, for requests that must not call anything to compare it."""
        self._report_refusal = report_refusal

    @property
    def authorizer(self) -> Authorizer:
        """The authorizer. Raises `SecurityDisabled` without one."""
        if self._authorizer is None:
            raise SecurityDisabled
        return self._authorizer

    @property
    def revision(self) -> int:
        """Increases with each change of what is allowed. A decision holds while the revision is the same."""
        return self.rules.revision

    def grants(self, caller: Caller) -> Grants | None:
        """Return what keeps decisions about a caller; None if it may do everything."""
        if self._authorizer is None or caller.session.is_broker:
            return None
        return Grants(self, caller, self._authorizer)

    def is_enforced_for(self, caller: Caller) -> bool:
        """Whether a caller may do only what the authorizer allows."""
        return self._authorizer is not None and not caller.session.is_broker

    def allows(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Whether a caller may do an operation on a resource."""
        authorizer = self._authorizer
        return (
            authorizer is None
            or caller.session.is_broker
            or authorizer.allows(requester_of(caller), operation, resource_type, name)
        )

    def check(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> None:
        """Raise the `AuthorizationFailed` of the type of resource unless a caller may do an operation on it. The error
        is the same whether the resource exists or not."""
        if not self.allows(caller, operation, resource_type, name):
            raise self.refusal(caller, operation, resource_type, name)

    def check_topic_id(self, caller: Caller, operation: Operation, topic_id: bytes, name_of: NameOf) -> None:
        """Raise `TopicAuthorizationFailed` unless a caller may do an operation on the topic with an id. An id without a
        topic is not refused: another error tells it. `name_of`: returns the name of the topic with an id, or None. The
        error has the id only, because the caller may not know the name."""
        name = name_of(topic_id)
        if name is not None and not self.allows(caller, operation, ResourceType.TOPIC, name):
            raise self.refusal(caller, operation, ResourceType.TOPIC, name, known_as=_id_text(topic_id))

    def refusal(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        known_as: str | None = None,
    ) -> AuthorizationFailed:
        """Report that a caller is refused an operation on a resource, and return the error. `known_as`: what the caller
        has named instead of the name, which is not in the error then."""
        # Clients look at internal topics by themselves.
        if operation is not Operation.DESCRIBE or name not in INTERNAL_TOPICS:
            self._report_refusal(caller, operation, resource_type, name)
        kind = _ERRORS.get(resource_type, ClusterAuthorizationFailed)
        what = resource_type.name.replace("_", " ").lower()
        return kind(
            f"{caller.session.principal} is not allowed to {operation.name} the {what} {known_as or name}"
        )

    def check_cluster(self, caller: Caller, operation: Operation) -> None:
        """Raise `ClusterAuthorizationFailed` unless a caller may do an operation on the cluster."""
        self.check(caller, operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def check_may_issue_credentials(self, caller: Caller) -> None:
        """Raise `ClusterAuthorizationFailed` if a caller has authenticated with a key or a token, so that it may not
        create credentials and set passwords, whatever its rights (`ClientSession.may_issue_credentials`)."""
        if not caller.session.may_issue_credentials:
            self._report_refusal(caller, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
            raise ClusterAuthorizationFailed(
                "credentials are created and passwords set by clients with a password or a certificate only"
            )

    def check_all(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> None:
        """Raise the `AuthorizationFailed` of the type of resource unless a caller may do an operation on each resource.
        The error names none of them."""
        wanted = list(dict.fromkeys(names))
        if len(self.allowed_of_named(caller, operation, resource_type, wanted)) < len(wanted):
            kind = _ERRORS.get(resource_type, ClusterAuthorizationFailed)
            what = resource_type.name.replace("_", " ").lower()
            raise kind(
                f"{caller.session.principal} is not allowed to {operation.name} each {what} of this request"
            )

    async def do_for_allowed(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        items: Sequence[T],
        name_of: Callable[[T], str],
        work: Callable[[Sequence[T]], Awaitable[list[R | MansioError]]],
    ) -> list[R | MansioError]:
        """Call `work` with those items on whose resource a caller may do an operation, and return the results of all
        items in their order. `work` returns the result of each of its items, which may be an error; it is not called
        without items."""
        if self._authorizer is None or caller.session.is_broker:
            return await work(items)
        refused: list[MansioError | None] = []
        allowed = []
        for each in items:
            try:
                self.check(caller, operation, resource_type, name_of(each))
            except AuthorizationFailed as error:
                refused.append(without_traceback(error))
            else:
                refused.append(None)
                allowed.append(each)
        done = iter(await work(allowed) if allowed else ())
        return [next(done) if error is None else error for error in refused]

    def allowed_names(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> list[str]:
        """Return those resources on which a caller may do an operation, in their order."""
        if self._authorizer is None or caller.session.is_broker:
            return list(names)
        return self._authorizer.allowed_names(requester_of(caller), operation, resource_type, names)

    def allowed_of_named(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> list[str]:
        """Return the same as `allowed_names`, for resources that a request names: the others are refused."""
        if self._authorizer is None or caller.session.is_broker:
            return list(names)
        wanted = list(names)
        allowed = self.allowed_names(caller, operation, resource_type, wanted)
        if len(allowed) < len(wanted):
            known = set(allowed)
            refused = [name for name in wanted if name not in known]
            for name in refused[:REPORTED_MAX]:
                self._report_refusal(caller, operation, resource_type, name)
            if (others := len(refused) - REPORTED_MAX) > 0:
                self._report_refusal(caller, operation, resource_type, OTHER_RESOURCES, event_count=others)
        return allowed

    async def allowed_names_in_turns(
        self,
        caller: Caller,
        operation: Operation,
        resource_type: ResourceType,
        names: Sequence[str],
        turns: ItemTurns,
    ) -> list[str]:
        """Like `allowed_names`, for any number of resources: other work of the event loop runs in between."""
        authorizer = self._authorizer
        if authorizer is None or caller.session.is_broker or len(names) <= FEW_NAMES:
            return self.allowed_names(caller, operation, resource_type, names)
        select = authorizer.name_filter(requester_of(caller), operation, resource_type)
        found: list[str] = []
        for start in range(0, len(names), ITEMS_PER_TURN):
            await turns.next(ITEMS_PER_TURN)
            found += select(names[start : start + ITEMS_PER_TURN])
        return found

    def allows_any(self, caller: Caller, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether a caller may do an operation on any resource of a type (KIP-679)."""
        authorizer = self._authorizer
        return (
            authorizer is None
            or caller.session.is_broker
            or authorizer.allows_any(requester_of(caller), operation, resource_type)
        )

    def authorized_operations(self, caller: Caller, resource_type: ResourceType, name: str) -> int:
        """Return what a caller may do on a resource, as the set that Kafka's responses contain (KIP-430)."""
        authorizer = self._authorizer
        if authorizer is None or caller.session.is_broker:
            return OPERATIONS_OF_TYPE[resource_type]
        return authorizer.authorized_operations(requester_of(caller), resource_type, name)

    def authorized_operations_each(
        self, caller: Caller, resource_type: ResourceType, names: Iterable[str]
    ) -> Iterator[int]:
        """Like `authorized_operations`, for each of `names`; each is decided when its result is taken. Without an
        authorizer the results do not end."""
        authorizer = self._authorizer
        if authorizer is None or caller.session.is_broker:
            return repeat(OPERATIONS_OF_TYPE[resource_type])
        requester = requester_of(caller)
        return (authorizer.authorized_operations(requester, resource_type, name) for name in names)

    def owner_of(self, caller: Caller, topic: str) -> str:
        """Return who has named a topic to which records are written later, as it is stored with the name: host and
        principal; "" for a broker, and without an authorizer.

        Raises `TopicAuthorizationFailed` unless the caller may WRITE to the topic with the groups of its session, which
        may deny it, and without them, because `owner_may_write` does not know them."""
        session = caller.session
        if self._authorizer is None or session.is_broker:
            return ""
        self.check(caller, Operation.WRITE, ResourceType.TOPIC, topic)
        owner = f"{caller.address} {session.principal}"
        if not owner_may_write(self._authorizer, owner, topic):
            refused = self.refusal(caller, Operation.WRITE, ResourceType.TOPIC, topic)
            raise type(refused)(
                f"{refused.message} without its groups, which do not count for what is written later: the user itself"
                " needs the right"
            )
        return owner

    def decide(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Return what a requester may do and which ACL decides it, for people."""
        if self._authorizer is None:
            return EVERYTHING_IS_ALLOWED
        return self._authorizer.decide(requester, operation, resource_type, name)


class Grants:
    """Resources that one caller may use, as decided since the ACLs have changed last. Requests that name the same ones
    again find them here and ask nobody.

    The sets have the names of topics or, for callers that name topics so, their ids; the names of groups; and
    transactional ids. Who looks into one compares `revision` with that of `rules` first, and calls `renew` if they
    differ. What is not in a set is asked for by a method, which adds it if it is allowed. Refusals are not kept.
    """

    __slots__ = (
        "_authorization",
        "caller",
        "groups",
        "readable",
        "revision",
        "rules",
        "transactional_ids",
        "writable",
    )

    def __init__(self, authorization: Authorization, caller: Caller, rules: Authorizer) -> None:
        self._authorization = authorization
        self.caller = caller
        self.rules = rules
        self.revision = rules.revision
        self.readable: set[str | bytes] = set()
        """Topics whose records the caller may read."""
        self.writable: set[str | bytes] = set()
        """Topics to which the caller may write."""
        self.groups: set[str | bytes] = set()
        """Groups in which the caller may read."""
        self.transactional_ids: set[str | bytes] = set()
        """Transactional ids that the caller may use."""

    def renew(self) -> None:
        """Forget all decisions, because the ACLs have changed."""
        self.revision = self.rules.revision
        for names in (self.readable, self.writable, self.groups, self.transactional_ids):
            names.clear()

    def check_group(self, group_id: str, api: str) -> None:
        """Raise `GroupAuthorizationFailed` unless the caller may read in a group. `api`: see `topic_error`."""
        if not self._ask(self.groups, Operation.READ, ResourceType.GROUP, group_id):
            raise self._refusal(Operation.READ, ResourceType.GROUP, group_id, api)

    def check_transactional_id(self, transactional_id: str) -> None:
        """Raise `TransactionalIdAuthorizationFailed` unless the caller may use a transactional id."""
        kind = ResourceType.TRANSACTIONAL_ID
        if not self._ask(self.transactional_ids, Operation.WRITE, kind, transactional_id):
            raise self._refusal(Operation.WRITE, kind, transactional_id, "PRODUCE")

    def topic_error(
        self, operation: Operation, topic: str | None, topic_id: bytes | None, name_of: NameOf, api: str
    ) -> MansioError | None:
        """Return the error of a topic that the caller may not READ or WRITE, and report it. None if the caller may, or
        if no topic has the id, which another error tells it. The topic is given by name or by id, which is the key in
        the set then; `name_of` and the error: see `Authorization.check_topic_id`. `api`: what the caller asks for, for
        the audit."""
        known_as = None
        name = topic
        if name is None:
            if topic_id is None or (name := name_of(topic_id)) is None:
                return None
            known_as = _id_text(topic_id)
        kept = self.writable if operation is Operation.WRITE else self.readable
        if self._ask(kept, operation, ResourceType.TOPIC, name, topic_id if topic is None else None):
            return None
        return without_traceback(self._refusal(operation, ResourceType.TOPIC, name, api, known_as))

    def _refusal(
        self,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        api: str,
        known_as: str | None = None,
    ) -> AuthorizationFailed:
        caller = replace(self.caller, api=api)
        return self._authorization.refusal(caller, operation, resource_type, name, known_as=known_as)

    def _ask(
        self,
        kept: set[str | bytes],
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        key: str | bytes | None = None,
    ) -> bool:
        if self.revision != self.rules.revision:
            self.renew()
        if not self._authorization.allows(self.caller, operation, resource_type, name):
            return False
        if len(kept) >= GRANTS_MAX:
            kept.clear()
        kept.add(name if key is None else key)
        return True


def owner_may_write(authorizer: Authorizer | None, owner: str, topic: str) -> bool:
    """Whether the owner of something stored (`Authorization.owner_of`) may write to a topic now. Groups of the owner's
    session do not count. What was stored without an owner, before there was an authorizer, may."""
    if authorizer is None or not owner:
        return True
    host, _, principal = owner.partition(" ")
    requester = _requester(principal.removeprefix("User:"), host, ())
    return authorizer.allows(requester, Operation.WRITE, ResourceType.TOPIC, topic)


def _id_text(topic_id: bytes) -> str:
    return str(UUID(bytes=topic_id))


def requester_of(caller: Caller) -> Requester:
    """Return a caller as the authorizer knows it."""
    session = caller.session
    return _requester(session.user, caller.address, session.groups)
