"""Authorization: what a caller may do.

Without an authorizer everything is allowed. Services ask at the entry of a request, before any look-up, so that an
error tells nothing about what exists.

Each refusal is reported to the audit once: by `check`, `check_all`, `do_for_allowed` and `allowed_of_named` themselves.
A service that asks `allows` or `allowed_names`, and answers with an error, calls `report_refusal`. What a list leaves
out is no refusal.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
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
from mansio.state.authorization.acls import CLUSTER_NAME, ResourceType
from mansio.state.authorization.authorizer import Decision, new_requester
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.state.authorization.acls import Operation
    from mansio.state.authorization.authorizer import Authorizer, Requester

    OnRefusal = Callable[[Caller, Operation, ResourceType, str], None]

REQUESTERS_KEPT_MAX: Final = 4_096

REPORTED_MAX: Final = 200
"""Number of refused resources of one request that are reported."""

_ERRORS: Final[Mapping[ResourceType, type[AuthorizationFailed]]] = {
    ResourceType.TOPIC: TopicAuthorizationFailed,
    ResourceType.GROUP: GroupAuthorizationFailed,
    ResourceType.CLUSTER: ClusterAuthorizationFailed,
    ResourceType.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}

EVERYTHING_IS_ALLOWED: Final = Decision(is_allowed=True, acl=None)
"""The decision without an authorizer."""

T = TypeVar("T")
R = TypeVar("R")

_requester = lru_cache(REQUESTERS_KEPT_MAX)(new_requester)


def _ignore(caller: Caller, operation: Operation, resource_type: ResourceType, name: str, /) -> None:
    """Report nothing."""


class Authorization:
    """Asks the authorizer of a broker for the callers of its services."""

    __slots__ = ("_authorizer", "report_refusal")

    def __init__(self, authorizer: Authorizer | None, report_refusal: OnRefusal = _ignore) -> None:
        """Ask `authorizer`; None: everything is allowed. `report_refusal` is called for each refusal."""
        self._authorizer = authorizer
        self.report_refusal = report_refusal

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
            self.report_refusal(caller, operation, resource_type, name)
            kind = _ERRORS.get(resource_type, ClusterAuthorizationFailed)
            what = resource_type.name.replace("_", " ").lower()
            raise kind(f"{caller.session.principal} is not allowed to {operation.name} the {what} {name}")

    def check_cluster(self, caller: Caller, operation: Operation) -> None:
        """Raise `ClusterAuthorizationFailed` unless a caller may do an operation on the cluster."""
        self.check(caller, operation, ResourceType.CLUSTER, CLUSTER_NAME)

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
            for name in islice((name for name in wanted if name not in known), REPORTED_MAX):
                self.report_refusal(caller, operation, resource_type, name)
        return allowed

    def allows_any(self, caller: Caller, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether a caller may do an operation on any resource of a type (KIP-679)."""
        authorizer = self._authorizer
        return (
            authorizer is None
            or caller.session.is_broker
            or authorizer.allows_any(requester_of(caller), operation, resource_type)
        )

    def decide(
        self, requester: Requester, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Return what a requester may do and which ACL decides it, for people."""
        if self._authorizer is None:
            return EVERYTHING_IS_ALLOWED
        return self._authorizer.decide(requester, operation, resource_type, name)


def requester_of(caller: Caller) -> Requester:
    """Return a caller as the authorizer knows it."""
    session = caller.session
    return _requester(session.user, caller.address, session.groups)
