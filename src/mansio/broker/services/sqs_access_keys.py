"""Access keys of the SQS endpoint: each belongs to a user, and requests that are signed with it are those of the user.

The secret of a key is encrypted with a secrets key, which is in a file of the broker and not in the metadata store. A
broker without that file creates no access keys, and cannot check signatures.

Invariants:
* A key is created only while its user exists; with a user its keys are deleted (`UserService`).
* The secret is returned once, when it is created. No error, log line or description contains it.
"""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    ConcurrentChange,
    PolicyViolation,
    ResourceNotFound,
    SecurityDisabled,
    Unavailable,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Compare, Delete, Put, new_writer_id
from mansio.metadata.owned_credentials import creation_guard, creation_mark
from mansio.metadata.sqs_access_keys import SqsAccessKey, encryption_context, sqs_access_key_document
from mansio.state.authentication.secrets_keys import NONCE_BYTES
from mansio.state.authorization.acls import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.authentication.secrets_keys import SecretsKeys

logger = logging.getLogger(__name__)

KEYS_PER_USER_MAX: Final = 10
"""Maximum number of access keys of one user."""

ID_PREFIX: Final = "MQAK"
_ID_BYTES: Final = 10
_SECRET_BYTES: Final = 30
_NO_KEYS: Final = "secrets_key_file is not set on this broker"


class NewSqsAccessKey(NamedTuple):
    """A new access key. `repr` hides the secret."""

    key_id: str
    secret: str

    def __repr__(self) -> str:
        return f"NewSqsAccessKey({self.key_id!r}, hidden)"


class SqsSecret(NamedTuple):
    """The secret of an access key and the user that it belongs to. `repr` hides the secret."""

    user: str
    secret: str

    def __repr__(self) -> str:
        return f"SqsSecret({self.user!r}, hidden)"


class SqsAccessKeyService:
    """Creates, describes, deletes and looks up access keys. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_count_mutation",
        "_decrypted",
        "_random",
        "_scheduler",
        "_secrets_keys",
        "_state",
        "_store",
    )

    def __init__(
        self,
        secrets_keys: SecretsKeys | None,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        clock: Clock,
        authorization: Authorization,
        count_mutation: Callable[[Caller], None] = lambda _: None,
    ) -> None:
        """`secrets_keys`: None if this broker has none. `count_mutation`: counts a change in the quota of the caller
        (`QuotaService.count_mutation`)."""
        self._secrets_keys = secrets_keys
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._clock = clock
        self._authorization = authorization
        self._count_mutation = count_mutation
        self._decrypted: dict[str, tuple[int, SqsSecret]] = {}
        """Secrets with the revision of their key, by id, of keys that exist and were used."""
        state.on_user_change(self._forget_deleted)

    def _forget_deleted(self, _user: str) -> None:
        for key_id in self._decrypted.keys() - self._state.sqs_access_keys.keys():
            del self._decrypted[key_id]

    def undecryptable_count(self) -> int:
        """Return the number of access keys whose secrets key this broker does not have."""
        known = self._secrets_keys
        return sum(
            known is None or not known.has(key.secret.key_id) for key in self._state.sqs_access_keys.values()
        )

    # Checks

    def find(self, key_id: str) -> SqsSecret | None:
        """Return the secret and the user of an access key; None if there is no such key, or its user does not exist.
        Raises `Unavailable` if this broker does not have the secrets key."""
        key = self._state.sqs_access_keys.get(key_id)
        if key is None or key.user not in self._state.users:
            return None
        known = self._decrypted.get(key_id)
        if known is not None and known[0] == key.revision:
            return known[1]
        if self._secrets_keys is None:
            raise Unavailable(f"this broker cannot check the access key: {_NO_KEYS}")
        try:
            secret = self._secrets_keys.decrypt(key.secret, encryption_context(key_id, key.user)).decode()
        except SecurityDisabled as error:
            raise Unavailable(f"this broker cannot check the access key: {error.message}") from None
        found = SqsSecret(key.user, secret)
        self._decrypted[key_id] = key.revision, found
        return found

    # Administration

    def describe(self, user: str | None, *, caller: Caller) -> Sequence[SqsAccessKey]:
        """Return the access keys of a user, or of all users (None), in the order of users and times. Raises
        `ClusterAuthorizationFailed` unless the caller is the user, or may DESCRIBE the cluster."""
        self._check(caller, user, Operation.DESCRIBE)
        found = [key for key in self._state.sqs_access_keys.values() if user in (None, key.user)]
        return sorted(found, key=lambda key: (key.user, key.created_ms, key.key_id))

    async def create(self, user: str, *, is_confidential: bool, caller: Caller) -> NewSqsAccessKey:
        """Create an access key of a user, and return it with its secret. `is_confidential`: whether no one else can
        read the connection.

        Raises `ClusterAuthorizationFailed` unless the caller is the user, or may ALTER the cluster, `PolicyViolation`
        for too many keys and a connection that others could read, `SecurityDisabled` without a secrets key,
        `ResourceNotFound` if there is no such user, `ThrottlingQuotaExceeded`, `ConcurrentChange`, `StorageError`.
        """
        self._check(caller, user, Operation.ALTER)
        if not is_confidential:
            raise PolicyViolation("a secret is sent on an encrypted connection, or to the broker's machine")
        if self._secrets_keys is None:
            raise SecurityDisabled(_NO_KEYS)
        self._count_mutation(caller)
        key_id = ID_PREFIX + base64.b32encode(self._random.bytes(_ID_BYTES)).decode()
        secret = base64.b64encode(self._random.bytes(_SECRET_BYTES)).decode()
        now_ms, nonce = self._clock.wall_ms(), self._random.bytes(NONCE_BYTES)
        encrypted = self._secrets_keys.encrypt(secret.encode(), encryption_context(key_id, user), nonce)
        key = SqsAccessKey(key_id, user, now_ms, encrypted)
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            if user not in self._state.users:
                raise ResourceNotFound(f"there is no user {user!r}")
            owned = sum(each.user == user for each in self._state.sqs_access_keys.values())
            if owned >= KEYS_PER_USER_MAX:
                raise PolicyViolation(f"a user has at most {KEYS_PER_USER_MAX} access keys; delete one")
            if await self._write_new(key):
                logger.info(
                    "sqs_access_key_created", extra=fields(user=user, key=key_id, by=caller.session.principal)
                )
                return NewSqsAccessKey(key_id, secret)
        raise ConcurrentChange("this user is being changed concurrently")

    async def _write_new(self, key: SqsAccessKey) -> bool:
        """Write a new key unless its user, or what the user owns, is changed meanwhile. Return False if it is."""
        writer = new_writer_id(self._random)
        name = self._state.keys.sqs_access_key(key.key_id)
        guard = [Compare(name, create_revision=0), *creation_guard(self._state, key.user)]
        puts = [
            Put(name, metadata_store.encode(sqs_access_key_document(key), writer)),
            creation_mark(self._state, key.user, writer),
        ]
        done = await metadata_store.transact_resolving_ambiguity(self._store, guard, puts, writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded

    async def delete(self, key_id: str, *, caller: Caller) -> None:
        """Delete an access key: requests that are signed with it are refused. Raises `ClusterAuthorizationFailed`
        unless the caller is its user, or may ALTER the cluster, `ResourceNotFound`, `ThrottlingQuotaExceeded`,
        `StorageError`."""
        key = self._state.sqs_access_keys.get(key_id)
        self._check(caller, None if key is None else key.user, Operation.ALTER)
        if key is None:
            raise ResourceNotFound(f"there is no access key {key_id!r}")
        self._count_mutation(caller)
        delete = Delete(self._state.keys.sqs_access_key(key_id))
        done = await metadata_store.transact_with_retries(self._store, [], [delete])
        await self._state.wait_for_revision(done.revision, self._scheduler)
        logger.info(
            "sqs_access_key_deleted", extra=fields(user=key.user, key=key_id, by=caller.session.principal)
        )

    def _check(self, caller: Caller, user: str | None, operation: Operation) -> None:
        """Check that a caller is a user, or may do an operation on the cluster."""
        self._authorization.check_may_issue_credentials(caller)
        if user is None or caller.session.user != user:
            self._authorization.check_cluster(caller, operation)
