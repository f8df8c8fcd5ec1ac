"""ACLs of the clients of a test broker with an authorizer, changed on its event loop without requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.authorization.acls import WILDCARD, Acl, Operation, PatternType, Permission, ResourceType
from support.machine import scaled

if TYPE_CHECKING:
    from mansio.state.authorization.authorizer import Authorizer
    from mansio.testing.broker import TestBroker

ANONYMOUS: Final = "User:ANONYMOUS"
DEADLINE_S: Final = 30


class RecordRights:
    """The rights of a user: by default that of clients that do not authenticate."""

    def __init__(self, broker: TestBroker, principal: str = ANONYMOUS) -> None:
        self._broker = broker
        self._principal = principal

    @property
    def authorizer(self) -> Authorizer:
        return self._broker._running().service.authorization.authorizer

    def _acl(self, resource_type: ResourceType, name: str, operation: Operation) -> Acl:
        pattern = PatternType.LITERAL
        return Acl(resource_type, pattern, name, self._principal, WILDCARD, operation, Permission.ALLOW)

    def allow(self, resource_type: ResourceType, name: str, *operations: Operation) -> None:
        """Add an ACL for each operation."""
        self._change([self._acl(resource_type, name, each) for each in operations], exists=True)

    def remove(self, resource_type: ResourceType, name: str, *operations: Operation) -> None:
        """Remove the ACL of each operation."""
        self._change([self._acl(resource_type, name, each) for each in operations], exists=False)

    def allow_everything(self) -> None:
        for each in ResourceType:
            self.allow(each, WILDCARD, Operation.ALL)

    def allow_nothing(self) -> None:
        for each in ResourceType:
            self.remove(each, WILDCARD, Operation.ALL)

    def _change(self, acls: list[Acl], *, exists: bool) -> None:
        authorizer = self.authorizer

        async def change() -> None:
            for acl in acls:
                if exists:
                    authorizer.add(acl)
                else:
                    authorizer.remove(acl)

        self._broker._call(change(), scaled(DEADLINE_S))
