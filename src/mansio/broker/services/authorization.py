"""Authorization: what a caller may do.

Without an authorizer everything is allowed. Services ask at the entry of a request, before any look-up, so that an
error tells nothing about what exists.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.errors import (
    AuthorizationFailed,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    MansioError,
    SecurityDisabled,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.host.item_turns import ITEMS_PER_TURN
from mansio.state.authorization.acls import CLUSTER_NAME, ResourceType
from mansio.state.authorization.authorizer import FEW_NAMES, OPERATIONS_OF_TYPE, new_requester
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.host.item_turns import ItemTurns
    from mansio.state.authorization.acls import Operation
    from mansio.state.authorization.authorizer import Authorizer, Decision, Requester

REQUESTERS_KEPT_MAX: Final = 4_096

_ERRORS: Final[Mapping[ResourceType, type[AuthorizationFailed]]] = {
    ResourceType.TOPIC: TopicAuthorizationFailed,
    ResourceType.GROUP: GroupAuthorizationFailed,
    ResourceType.CLUSTER: ClusterAuthorizationFailed,
    ResourceType.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}

T = TypeVar("T")
R = TypeVar("R")

_requester = lru_cache(REQUESTERS_KEPT_MAX)(new_requester)


class Authorization:
    """Asks the authorizer of a broker for the callers of its services."""

    __slots__ = ("_authorizer",)

    def __init__(self, authorizer: Authorizer | None) -> None:
        """Ask `authorizer`; None: everything is allowed."""
        self._authorizer = authorizer

    @property
    def authorizer(self) -> Authorizer:
        """The authorizer. Raises `SecurityDisabled` without one."""
        if self._authorizer is None:
            raise SecurityDisabled
        return self._authorizer

    @property
    def revision(self) -> int:
        """Increases with each change of what is allowed. A decision holds while the revision is the same."""
        return 0 if self._authorizer is None else self._authorizer.revision

    def is_enforced_for(self, caller: Caller) -> bool:
        """Whether a caller may do only what the authorizer allows."""
        return self._authorizer is not None and not caller.session.is_broker

    def allows(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Whether a caller may do an operation on a resource."""
        authorizer = self._authorizer
        return (
            authorizer is None
            or caller.session.is_broker
            or authorizer.allows(_requester_of(caller), operation, resource_type, name)
        )

    def check(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> None:
        """Raise the `AuthorizationFailed` of the type of resource unless a caller may do an operation on it. The error
        is the same whether the resource exists or not."""
        if not self.allows(caller, operation, resource_type, name):
            raise self.refusal(caller, operation, resource_type, name)

    def refusal(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str
    ) -> AuthorizationFailed:
        """Return the error for a caller who may not do an operation on a resource."""
        kind = _ERRORS.get(resource_type, ClusterAuthorizationFailed)
        what = resource_type.name.replace("_", " ").lower()
        return kind(f"{caller.session.principal} is not allowed to {operation.name} the {what} {name}")

    def check_cluster(self, caller: Caller, operation: Operation) -> None:
        """Raise `ClusterAuthorizationFailed` unless a caller may do an operation on the cluster."""
        self.check(caller, operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def check_all(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> None:
        """Raise the `AuthorizationFailed` of the type of resource unless a caller may do an operation on each resource.
        The error names none of them."""
        wanted = list(dict.fromkeys(names))
        if len(self.allowed_names(caller, operation, resource_type, wanted)) < len(wanted):
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
        return self._authorizer.allowed_names(_requester_of(caller), operation, resource_type, names)

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
        select = authorizer.name_filter(_requester_of(caller), operation, resource_type)
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
            or authorizer.allows_any(_requester_of(caller), operation, resource_type)
        )

    def authorized_operations(self, caller: Caller, resource_type: ResourceType, name: str) -> int:
        """Return what a caller may do on a resource, as the set that Kafka's responses contain (KIP-430)."""
        authorizer = self._authorizer
        if authorizer is None or caller.session.is_broker:
            return OPERATIONS_OF_TYPE[resource_type]
        return authorizer.authorized_operations(_requester_of(caller), resource_type, name)

    def authorized_operations_each(
        self, caller: Caller, resource_type: ResourceType, names: Iterable[str]
    ) -> Iterator[int]:
        """Like `authorized_operations`, for each of `names`; each is decided when its result is taken. Without an
        authorizer the results do not end."""
        authorizer = self._authorizer
        if authorizer is None or caller.session.is_broker:
            return repeat(OPERATIONS_OF_TYPE[resource_type])
        requester = _requester_of(caller)
        return (authorizer.authorized_operations(requester, resource_type, name) for name in names)

    def decide(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Return what a requester may do and which ACL decides it, for people. Raises `SecurityDisabled`."""
        return self.authorizer.decide(requester, operation, resource_type, name)


def _requester_of(caller: Caller) -> Requester:
    session = caller.session
    return _requester(session.user, caller.address, session.groups)
