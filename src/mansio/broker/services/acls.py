"""ACL service: the access control lists of the cluster, in the metadata store.

A change is durable, and in force on this broker, before the request is answered; other brokers learn it from their
watch of the metadata store. Without an authorizer, requests about ACLs are refused.

Invariant: the authorizer has the ACLs of the metadata image, and a change reaches it before any other part of the
broker learns of the same revision.

Model: AclControlManager of Kafka.
"""

from __future__ import annotations

import logging
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.services.authorization import requester_of
from mansio.config.item_limit import ITEMS_MAX, too_many_items
from mansio.errors import InvalidRequest, MansioError, PolicyViolation
from mansio.host.item_turns import ITEMS_PER_TURN, ItemTurns
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.acls import acl_document, acl_key
from mansio.metadata.metadata_store import Delete, Put, new_writer_id
from mansio.state.authorization.acls import AclFilter, Operation, ResourceType, checked_filter
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Random, Scheduler
    from mansio.state.authorization.acls import Acl
    from mansio.state.authorization.authorizer import Authorizer, Decision, Requester

logger = logging.getLogger(__name__)

NO_ADMINISTRATOR: Final = "no_administrator"
"""Log event, and reason of a warning, if `AclService.lacks_administrator`."""

NO_ADMINISTRATOR_DETAIL: Final = (
    "super_users is empty and no ACL allows ALTER on the cluster: no client can change ACLs; set super_users"
)

ACLS_MAX: Final = 20_000
"""Maximum number of ACLs of a cluster."""


def follow_acls(state: MetadataImage, authorizer: Authorizer) -> None:
    """Give the ACLs of the metadata, and each later change of them, to an authorizer."""
    for acl in state.acls.values():
        authorizer.add(acl)
    state.on_acl_change(lambda acl, exists: authorizer.add(acl) if exists else authorizer.remove(acl))


class Query(NamedTuple):
    """An operation on a resource, as a request names it."""

    operation: int
    resource_type: int
    name: str

    def checked(self) -> tuple[Operation, ResourceType]:
        """Return operation and type. Raises `InvalidRequest` unless both are known and the name is not empty."""
        if self.operation not in tuple(Operation) or self.operation == Operation.ALL:
            raise InvalidRequest(f"nobody does the operation {self.operation}")
        if self.resource_type not in tuple(ResourceType):
            raise InvalidRequest(f"there is no type of resource {self.resource_type}")
        if not self.name:
            raise InvalidRequest("the name of the resource is empty")
        return Operation(self.operation), ResourceType(self.resource_type)


class AclService:
    """Describes and changes ACLs. All methods run on the broker's event loop."""

    __slots__ = ("_authorization", "_random", "_scheduler", "_state", "_store")

    def __init__(
        self,
        authorization: Authorization,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
    ) -> None:
        self._authorization = authorization
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random

    @property
    def acl_count(self) -> int:
        """Number of ACLs of the cluster."""
        return len(self._state.acls)

    def lacks_administrator(self) -> bool:
        """Whether there is an authorizer, and no client can change ACLs (`Authorizer.is_administrable`)."""
        return self._authorization.is_enabled and not self._authorization.authorizer.is_administrable()

    async def describe(self, selected: AclFilter, *, caller: Caller) -> list[Acl]:
        """Return the ACLs that a filter selects, those of one moment. Raises `SecurityDisabled`,
        `ClusterAuthorizationFailed`, `InvalidRequest`."""
        self._check(caller, Operation.DESCRIBE)
        return await self._select(selected, ItemTurns(self._scheduler))

    def _check(self, caller: Caller, operation: Operation) -> None:
        _ = self._authorization.authorizer  # raises without one
        self._authorization.check_cluster(caller, operation)

    async def _select(self, selected: AclFilter, turns: ItemTurns) -> list[Acl]:
        """Return the ACLs that a filter selects, in a fixed order. They are those of the revision at the call, although
        other work of the event loop runs in between."""
        selected = checked_filter(selected)
        known: Sequence[Acl] = tuple(self._state.acls.values())
        if selected.principal is not None:
            own = self._authorization.authorizer.acls_of(selected.principal)
            few = tuple(islice(own, ITEMS_PER_TURN + 1))
            known = known if len(few) > ITEMS_PER_TURN else few
        runs = []
        for start in range(0, len(known), ITEMS_PER_TURN):
            part = known[start : start + ITEMS_PER_TURN]
            await turns.next(len(part))
            runs.append(sorted(filter(selected.matches, part)))
        if len(runs) <= 1:
            return runs[0] if runs else []
        found: list[Acl] = []
        merged = merge(*runs)
        while part := list(islice(merged, ITEMS_PER_TURN)):
            found += part
            await turns.next(len(part))
        return found

    def check_each(
        self, queries: Sequence[Query], *, requester: Requester | None, caller: Caller
    ) -> list[Decision | MansioError]:
        """Return what `requester` may do, with the ACL that decides it, for each query. None stands for the caller:
        about itself each caller may ask. Without an authorizer everything is allowed.

        Errors: `ClusterAuthorizationFailed`; `PolicyViolation` for too many queries; of one query, `InvalidRequest`.
        """
        if requester is not None:
            self._authorization.check_cluster(caller, Operation.DESCRIBE)
        if (refused := too_many_items(len(queries))) is not None:
            raise copied(refused)
        decisions: list[Decision | MansioError] = []
        for query in queries:
            try:
                operation, resource_type = query.checked()
            except InvalidRequest as error:
                decisions.append(without_traceback(error))
                continue
            decisions.append(
                self._authorization.decide(
                    requester_of(caller) if requester is None else requester,
                    operation,
                    resource_type,
                    query.name,
                )
            )
        return decisions

    async def create_each(
        self, items: Sequence[Acl | MansioError], *, caller: Caller
    ) -> list[MansioError | None]:
        """Add ACLs. Those that exist are written again: another broker may have deleted them, and this one not have
        learned it. Return the error of each item, or None. An item may be the error
        for which it is no ACL; a caller without the right does not learn it.

        Errors: `SecurityDisabled`, `ClusterAuthorizationFailed`, `PolicyViolation` for too many ACLs, `Unavailable`,
        `StorageError`.
        """
        keys = self._state.keys
        try:
            self._check(caller, Operation.ALTER)
            if (refused := too_many_items(len(items))) is not None:
                raise copied(refused)
            wanted = {acl_key(keys, item): item for item in items if not isinstance(item, MansioError)}
            new = {key: acl for key, acl in wanted.items() if key not in self._state.acls}
            if self.acl_count + len(new) > ACLS_MAX:
                raise PolicyViolation(f"there may be {ACLS_MAX} ACLs, and {self.acl_count} exist")
        except MansioError as error:
            return [without_traceback(error)] * len(items)
        writer = new_writer_id(self._random)
        puts = [Put(key, metadata_store.encode(acl_document(acl), writer)) for key, acl in wanted.items()]
        errors = await self._write(puts)
        for key, acl in new.items():
            if key not in errors:
                logger.info("acl_created", extra=_log_fields(acl))
        return [item if isinstance(item, MansioError) else errors.get(acl_key(keys, item)) for item in items]

    async def delete_each(
        self, filters: Sequence[AclFilter], *, caller: Caller
    ) -> list[list[Acl] | MansioError]:
        """Delete the ACLs that each filter selects. Return them for each filter, or its error; ACLs may be deleted even
        then. ACLs that another broker has added before the call are selected, too.

        Errors: `SecurityDisabled`, `ClusterAuthorizationFailed`, `InvalidRequest`, `PolicyViolation` for too many
        filters, or if they select more than `ACLS_MAX` ACLs together, `Unavailable`, `StorageError`.
        """
        try:
            self._check(caller, Operation.ALTER)
            if (refused := too_many_items(len(filters))) is not None:
                raise copied(refused)
            await self._state.catch_up(self._scheduler)
        except MansioError as error:
            return [without_traceback(error)] * len(filters)
        selected: list[list[Acl] | MansioError] = []
        selected_count = 0
        turns = ItemTurns(self._scheduler)
        for each in filters:
            await turns.next()
            try:
                found = await self._select(each, turns)
            except MansioError as error:
                selected.append(without_traceback(error))
                continue
            selected_count += len(found)
            if selected_count > ACLS_MAX:
                too_many = PolicyViolation(
                    f"the filters of one request may select {ACLS_MAX} ACLs together; nothing was deleted"
                )
                return [too_many] * len(filters)
            selected.append(found)
        keys: dict[Acl, str] = {}
        for acl in chain.from_iterable(acls for acls in selected if isinstance(acls, list)):
            await turns.next()
            keys[acl] = acl_key(self._state.keys, acl)
        errors = await self._write([Delete(key) for key in keys.values()])
        for acl, key in keys.items():
            await turns.next()
            if key not in errors:
                logger.info("acl_deleted", extra=_log_fields(acl))
        if not errors:
            return selected
        return [
            next((errors[keys[acl]] for acl in acls if keys[acl] in errors), acls)
            if isinstance(acls, list)
            else acls
            for acls in selected
        ]

    async def _write(self, operations: Sequence[Put | Delete]) -> dict[str, MansioError]:
        """Execute idempotent operations, many in each transaction. Return the errors by key."""
        errors: dict[str, MansioError] = {}
        size = min(self._store.operations_max, ITEMS_MAX)
        revision = 0
        for first in range(0, len(operations), size):
            batch = operations[first : first + size]
            try:
                revision = (await metadata_store.transact_with_retries(self._store, [], batch)).revision
                await self._state.wait_for_revision(revision, self._scheduler)
            except MansioError as error:
                errors |= dict.fromkeys((operation.key for operation in batch), without_traceback(error))
        return errors


def _log_fields(acl: Acl) -> dict[str, object]:
    return fields(
        resource=acl.resource_type.name,
        pattern=acl.pattern_type.name,
        name=acl.name,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation.name,
        permission=acl.permission.name,
    )
