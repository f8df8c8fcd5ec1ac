"""Authorization service: what a caller may do, and the access control lists that say so, in the metadata store.

Without an authorizer everything is allowed, and requests about ACLs are refused. A change of ACLs is durable, and in
force on this broker, before the request is answered; other brokers learn it from their watch of the metadata store.

Invariant: the authorizer has the ACLs of the metadata image, and a change reaches it before any other part of the
broker learns of the same revision.

Model: AclControlManager and StandardAuthorizer of Kafka.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from mansio.config.item_limit import ITEMS_MAX, too_many_items
from mansio.errors import (
    AuthorizationFailed,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    MansioError,
    PolicyViolation,
    SecurityDisabled,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.acls import acl_document, acl_key
from mansio.metadata.metadata_store import Delete, Put, new_writer_id
from mansio.state.authorization.acls import CLUSTER_NAME, AclFilter, Operation, ResourceType, check_filter
from mansio.state.authorization.authorizer import new_subject
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Random, Scheduler
    from mansio.state.authorization.acls import Acl
    from mansio.state.authorization.authorizer import Authorizer, Decision, Subject

logger = logging.getLogger(__name__)

ACLS_MAX: Final = 20_000
"""Maximum number of ACLs of a cluster."""

SUBJECTS_KEPT_MAX: Final = 4_096

_ERRORS: Final[Mapping[ResourceType, type[AuthorizationFailed]]] = {
    ResourceType.TOPIC: TopicAuthorizationFailed,
    ResourceType.GROUP: GroupAuthorizationFailed,
    ResourceType.CLUSTER: ClusterAuthorizationFailed,
    ResourceType.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}

_subject = lru_cache(SUBJECTS_KEPT_MAX)(new_subject)


class AuthorizationService:
    """Asks the authorizer, and describes and changes its ACLs. All methods run on the broker's event loop."""

    __slots__ = ("_authorizer", "_random", "_scheduler", "_state", "_store")

    def __init__(
        self,
        authorizer: Authorizer | None,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
    ) -> None:
        """Give the ACLs of the metadata to `authorizer`, which has none; None: everything is allowed."""
        self._authorizer = authorizer
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        if authorizer is not None:
            for acl in state.acls.values():
                authorizer.add(acl)
            state.on_acl_change(self._on_acl_change)

    def _on_acl_change(self, acl: Acl, exists: bool) -> None:
        assert self._authorizer is not None, "registered with an authorizer only"
        if exists:
            self._authorizer.add(acl)
        else:
            self._authorizer.remove(acl)

    # Decisions

    @property
    def revision(self) -> int:
        """Increases with each change of what is allowed. A decision holds while the revision is the same."""
        return 0 if self._authorizer is None else self._authorizer.revision

    def allows(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Whether a caller may do an operation on a resource."""
        authorizer = self._authorizer
        return authorizer is None or authorizer.allows(_subject_of(caller), operation, resource_type, name)

    def check(self, caller: Caller, operation: Operation, resource_type: ResourceType, name: str) -> None:
        """Raise the `AuthorizationFailed` of the type of resource unless a caller may do an operation on it. The error
        is the same whether the resource exists or not."""
        if not self.allows(caller, operation, resource_type, name):
            kind = _ERRORS.get(resource_type, AuthorizationFailed)
            what = resource_type.name.replace("_", " ").lower()
            raise kind(f"{caller.session.principal} is not allowed to {operation.name} the {what} {name}")

    def allowed_names(
        self, caller: Caller, operation: Operation, resource_type: ResourceType, names: Iterable[str]
    ) -> list[str]:
        """Return those resources on which a caller may do an operation, in their order."""
        if self._authorizer is None:
            return list(names)
        return self._authorizer.allowed_names(_subject_of(caller), operation, resource_type, names)

    def allows_any(self, caller: Caller, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether a caller may do an operation on any resource of a type (KIP-679)."""
        authorizer = self._authorizer
        return authorizer is None or authorizer.allows_any(_subject_of(caller), operation, resource_type)

    def decide(
        self, subject: Subject, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Return what a subject may do and which ACL decides it, for people. Raises `SecurityDisabled`."""
        return self._enabled().decide(subject, operation, resource_type, name)

    def _enabled(self) -> Authorizer:
        if self._authorizer is None:
            raise SecurityDisabled
        return self._authorizer

    # Administration

    @property
    def acl_count(self) -> int:
        """Number of ACLs of the cluster."""
        return len(self._state.acls)

    def describe(self, selected: AclFilter, *, caller: Caller) -> list[Acl]:
        """Return the ACLs that a filter selects. Raises `SecurityDisabled`, `ClusterAuthorizationFailed`,
        `InvalidRequest`."""
        authorizer = self._enabled()
        self.check(caller, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)
        return self._select(authorizer, selected)

    @staticmethod
    def _select(authorizer: Authorizer, selected: AclFilter) -> list[Acl]:
        check_filter(selected)
        return authorizer.acls(selected)

    async def create_each(self, acls: Sequence[Acl], *, caller: Caller) -> list[MansioError | None]:
        """Add ACLs; those that exist stay as they are. Return the error of each, or None.

        Errors: `SecurityDisabled`, `ClusterAuthorizationFailed`, `PolicyViolation` for too many ACLs, `Unavailable`,
        `StorageError`.
        """
        keys = self._state.keys
        try:
            self._enabled()
            self.check(caller, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
            if (refused := too_many_items(len(acls))) is not None:
                raise refused
            new = {
                key: acl
                for key, acl in ((acl_key(keys, acl), acl) for acl in acls)
                if key not in self._state.acls
            }
            if self.acl_count + len(new) > ACLS_MAX:
                raise PolicyViolation(f"there may be {ACLS_MAX} ACLs, and {self.acl_count} exist")
        except MansioError as error:
            return [without_traceback(error)] * len(acls)
        writer = new_writer_id(self._random)
        puts = [Put(key, metadata_store.encode(acl_document(acl), writer)) for key, acl in new.items()]
        errors = await self._write(puts)
        for key, acl in new.items():
            if key not in errors:
                logger.info("acl_created", extra=_log_fields(acl))
        return [errors.get(acl_key(keys, acl)) for acl in acls]

    async def delete_each(
        self, filters: Sequence[AclFilter], *, caller: Caller
    ) -> list[list[Acl] | MansioError]:
        """Delete the ACLs that each filter selects. Return them for each filter, or its error; ACLs may be deleted even
        then.

        Errors: `SecurityDisabled`, `ClusterAuthorizationFailed`, `InvalidRequest`, `PolicyViolation` for too many
        filters, `Unavailable`, `StorageError`.
        """
        try:
            authorizer = self._enabled()
            self.check(caller, Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
            if (refused := too_many_items(len(filters))) is not None:
                raise refused
        except MansioError as error:
            return [without_traceback(error)] * len(filters)
        selected: list[list[Acl] | MansioError] = []
        for each in filters:
            try:
                selected.append(self._select(authorizer, each))
            except MansioError as error:
                selected.append(without_traceback(error))
        deleted = dict.fromkeys(acl for acls in selected if isinstance(acls, list) for acl in acls)
        keys = {acl: acl_key(self._state.keys, acl) for acl in deleted}
        errors = await self._write([Delete(key) for key in keys.values()])
        for acl, key in keys.items():
            if key not in errors:
                logger.info("acl_deleted", extra=_log_fields(acl))
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


def _subject_of(caller: Caller) -> Subject:
    return _subject(caller.session.user, caller.address)


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
