"""User service: users and their credentials for SCRAM, in the metadata store (KIP-554).

A user exists as long as it has a credential. A change is durable, and known to this broker, before the request is
answered; other brokers learn it from their watch of the metadata store.

`directory` is what log-ins are verified with. It needs the server secret of the cluster, which `open_directory` makes
before a listener authenticates its first client.

Invariants:
* A user is changed by one transaction, all mechanisms or none, and only if no one else has changed it meanwhile.
* With a user, what belongs to it is deleted: API keys, access keys of SQS and delegation tokens. That may take more
  than one transaction; the first deletes the user, without which nothing of it is accepted. A new user of the same name
  has none of them.
* No error and no log line contains a password, a salted password or a key.

Model: ScramControlManager of Kafka.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.config.item_limit import too_many_items
from mansio.errors import (
    AuthorizationFailed,
    ConcurrentChange,
    DuplicateResource,
    InvalidRequest,
    MansioError,
    PolicyViolation,
    ResourceNotFound,
    UnacceptableCredential,
    UnsupportedSaslMechanism,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Delete, Put, new_writer_id
from mansio.metadata.owned_credentials import owned_guard, user_guard
from mansio.metadata.users import create_server_secret, credential_document
from mansio.ports import complete_from
from mansio.state.authentication.credentials import (
    ITERATIONS_MIN,
    SALT_BYTES,
    CredentialDirectory,
    ScramCredential,
    ScramMechanism,
    encode_password,
)
from mansio.state.authentication.user_names import find_name_fault
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import result_of, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Background, Clock, Promise, Random, Scheduler
    from mansio.state.authentication.delegation_tokens import DelegationToken

logger = logging.getLogger(__name__)

USERS_MAX: Final = 10_000
"""Maximum number of users of a cluster."""

PREVIOUS_VALID_MS_MAX: Final = 365 * 24 * 60 * 60 * 1000
"""Maximum time for which a previous password stays valid."""

_MECHANISMS: Final = {mechanism.kafka_type: mechanism for mechanism in ScramMechanism}


@dataclass(frozen=True, slots=True)
class CredentialUpsertion:
    """A new credential, or a replacement. `mechanism` is Kafka's number. The client has salted the password."""

    user: str
    mechanism: int
    iterations: int
    salt: bytes = field(repr=False)
    salted_password: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CredentialDeletion:
    """Deletion of a credential. `mechanism` is Kafka's number."""

    user: str
    mechanism: int


@dataclass(frozen=True, slots=True)
class DescribedUser:
    """What clients may know of a user: the iterations of its credentials, by mechanism. `error`: why the user cannot be
    described, None if it can."""

    name: str
    iterations: Mapping[ScramMechanism, int]
    error: MansioError | None = None


class UserService:
    """Describes and changes users. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_directory",
        "_password_thread",
        "_random",
        "_scheduler",
        "_state",
        "_store",
    )

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        clock: Clock,
        password_thread: Background,
        authorization: Authorization,
    ) -> None:
        """`password_thread`: computes the keys of passwords, which takes milliseconds for each."""
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._clock = clock
        self._password_thread = password_thread
        self._authorization = authorization
        self._directory: CredentialDirectory | None = None

    # Authentication

    async def open_directory(self) -> None:
        """Make `directory` available; create the server secret if the cluster has none. Raises `Unavailable`,
        `StorageError`."""
        if self._state.server_secret is None:
            revision = await create_server_secret(self._store, self._state.keys, self._random)
            await self._state.wait_for_revision(revision, self._scheduler)
        secret = self._state.server_secret
        assert secret is not None, "the image has the revision in which it was stored"
        self._directory = CredentialDirectory(
            self._find, secret, find_token=self._find_token, find_api_key=self._state.find_api_key
        )

    @property
    def directory(self) -> CredentialDirectory:
        """The credentials with which log-ins are verified. Available after `open_directory`."""
        assert self._directory is not None, "no listener authenticates"
        return self._directory

    def on_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback` on the event loop with the name of each user whose credentials, access keys or tokens have
        changed."""
        self._state.on_user_change(callback)

    def has_key(self, user: str, key_id: str) -> bool:
        """Whether a user exists and has this API key or access key of SQS."""
        key = self._state.find_api_key(key_id) or self._state.sqs_access_keys.get(key_id)
        return key is not None and key.user == user and user in self._state.users

    def _find(self, user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        known = self._state.users.get(user)
        return None if known is None else known.get(mechanism.value)

    def _find_token(self, token_id: str) -> DelegationToken | None:
        token = self._state.tokens.get(token_id)
        if token is None or (token.is_of_stored_user and token.user not in self._state.users):
            return None
        return token

    # Administration

    @property
    def user_count(self) -> int:
        """Number of users of the cluster."""
        return len(self._state.users)

    def describe(self, names: Sequence[str] = (), *, caller: Caller) -> list[DescribedUser]:
        """Return these users, or all in the order of their names. Raises `ClusterAuthorizationFailed` unless the caller
        may DESCRIBE the cluster. Errors: `ResourceNotFound`, `DuplicateResource`."""
        self._authorization.check_cluster(caller, Operation.DESCRIBE)
        if not names:
            return [self._describe(name) for name in sorted(self._state.users)]
        count = Counter(names)
        described = []
        for name in count:
            error: MansioError | None = None
            if count[name] > 1:
                error = DuplicateResource(f"the request names the user {name!r} more than once")
            elif name not in self._state.users:
                error = ResourceNotFound(f"there is no user {name!r}")
            described.append(self._describe(name) if error is None else DescribedUser(name, {}, error))
        return described

    def _describe(self, name: str) -> DescribedUser:
        known = self._state.users[name]
        return DescribedUser(
            name, {one: known[one.value].iterations for one in ScramMechanism if one.value in known}
        )

    async def alter_each(
        self,
        upsertions: Sequence[CredentialUpsertion],
        deletions: Sequence[CredentialDeletion],
        *,
        is_confidential: bool,
        caller: Caller,
    ) -> dict[str, MansioError | None]:
        """Change the credentials of several users. Return the error of each user, or None; a user with an error is not
        changed. `is_confidential`: whether nobody else can read the connection.

        Errors: `ClusterAuthorizationFailed` unless the caller may ALTER the cluster, and for an upsertion by a caller
        with a key or a token, `UnacceptableCredential`, `UnsupportedSaslMechanism`, `ResourceNotFound` for a deletion,
        `DuplicateResource` for a credential that is in the request more than once, `PolicyViolation` for too many
        items, too many users, and an upsertion that others could read, `ConcurrentChange`, `StorageError`.
        """
        changes: list[CredentialUpsertion | CredentialDeletion] = [*deletions, *upsertions]
        names = dict.fromkeys(each.user for each in changes)
        refused: MansioError | None = too_many_items(len(changes))
        try:
            self._authorization.check_cluster(caller, Operation.ALTER)
            if upsertions:
                self._authorization.check_may_issue_credentials(caller)
        except AuthorizationFailed as error:
            refused = without_traceback(error)
        if refused is None and upsertions and not is_confidential:
            refused = PolicyViolation(
                "a salted password is as good as a password: it is accepted on an encrypted connection, "
                "or from the broker's machine"
            )
        if refused is not None:
            return dict.fromkeys(names, refused)
        count = Counter((each.user, each.mechanism) for each in changes)
        repeated = {user for (user, _), times in count.items() if times > 1}
        errors: dict[str, MansioError | None] = {}
        by_user: dict[str, tuple[list[CredentialUpsertion], list[CredentialDeletion]]] = {
            name: ([], []) for name in names
        }
        for upsertion in upsertions:
            by_user[upsertion.user][0].append(upsertion)
        for deletion in deletions:
            by_user[deletion.user][1].append(deletion)
        for name, (added, removed) in by_user.items():
            try:
                if name in repeated:
                    raise DuplicateResource("a credential of this user is in the request more than once")
                await self._alter(name, added, removed)
            except MansioError as error:
                errors[name] = without_traceback(error)
            else:
                errors[name] = None
        return errors

    async def _alter(
        self, name: str, added: Sequence[CredentialUpsertion], removed: Sequence[CredentialDeletion]
    ) -> None:
        if not name:
            raise UnacceptableCredential("the name of a user is empty")
        changes: dict[str, ScramCredential | None] = {}
        for upsertion in added:
            mechanism = _mechanism(upsertion.mechanism)
            changes[mechanism.value] = ScramCredential.from_salted_password(
                mechanism, upsertion.salted_password, upsertion.salt, upsertion.iterations
            )
        deleted = [_mechanism(deletion.mechanism).value for deletion in removed]
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            known = self._state.users.get(name, {})
            if added and not known:
                check_new_name(name)
                if self.user_count >= USERS_MAX:
                    raise PolicyViolation(f"there are {USERS_MAX} users, which is the limit")
            for missing in (mechanism for mechanism in deleted if mechanism not in known):
                raise ResourceNotFound(f"the user has no credential for {missing}")
            if await self._write(name, known, {**changes, **dict.fromkeys(deleted)}):
                return
        raise ConcurrentChange("this user is being changed concurrently")

    async def create(self, name: str, password: str) -> None:
        """Create a user with a credential for each mechanism.

        Raises `UnacceptableCredential`, `DuplicateResource` if there is such a user, `StorageError`.
        """
        check_new_name(name)
        encode_password(password)
        salts = {mechanism: self._random.bytes(SALT_BYTES) for mechanism in ScramMechanism}
        credentials = await self._compute(partial(_new_credentials, password, salts))
        if not await self._write(name, {}, credentials):
            raise DuplicateResource(f"there is a user {name!r} already")

    async def set_password(
        self, name: str, password: str, *, previous_valid_ms: int = 0, is_confidential: bool, caller: Caller
    ) -> None:
        """Change the password of a user for all mechanisms that the user has, with their salts and iterations. For
        `previous_valid_ms` the present password stays valid, too; an earlier one does not. To repeat a call, because
        its answer was lost, changes nothing. `is_confidential`: whether
        nobody else can read the connection.

        Raises `ClusterAuthorizationFailed` unless the caller may ALTER the cluster, and for one with a key or a token,
        `ResourceNotFound`, `UnacceptableCredential`, `InvalidRequest`, `PolicyViolation`, `ConcurrentChange`,
        `StorageError`.
        """
        self._authorization.check_cluster(caller, Operation.ALTER)
        self._authorization.check_may_issue_credentials(caller)
        if not is_confidential:
            raise PolicyViolation(
                "a password is accepted on an encrypted connection, or from the broker's machine"
            )
        if not 0 <= previous_valid_ms <= PREVIOUS_VALID_MS_MAX:
            raise InvalidRequest(f"a previous password stays valid for 0 to {PREVIOUS_VALID_MS_MAX} ms")
        encode_password(password)
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            known = dict(self._state.users.get(name, {}))
            if not known:
                raise ResourceNotFound(f"there is no user {name!r}")
            until_ms = self._clock.wall_ms() + previous_valid_ms if previous_valid_ms else None
            computed = await self._compute(partial(_with_password, known, password, until_ms))
            changes = {key: each for key, each in computed.items() if each is not known[key]}
            if not changes or await self._write(name, known, changes):
                return
        raise ConcurrentChange("this user is being changed concurrently")

    async def _compute(
        self, work: Callable[[], Mapping[str, ScramCredential]]
    ) -> Mapping[str, ScramCredential]:
        promise: Promise[Mapping[str, ScramCredential]] = self._scheduler.promise()
        self._password_thread.submit(work, partial(complete_from, promise))
        return await result_of(promise)

    async def _write(
        self,
        name: str,
        known: Mapping[str, ScramCredential],
        changes: Mapping[str, ScramCredential | None],
    ) -> bool:
        """Change credentials if those of the user are `known`. Return False if they are not."""
        writer = new_writer_id(self._random)
        guard = user_guard(self._state.keys, name, known)
        operations: list[Put | Delete] = []
        for mechanism, credential in changes.items():
            key = self._state.keys.credential(name, mechanism)
            if credential is None:
                operations.append(Delete(key))
            else:
                operations.append(Put(key, metadata_store.encode(credential_document(credential), writer)))
        is_deletion = all(each is None for each in {**known, **changes}.values())
        if is_deletion:
            owned = self._state.owned_keys(name)
            operations += map(Delete, owned[: self._store.operations_max - len(operations)])
        elif not known:
            room = self._store.operations_max - len(operations)
            if not await self._delete_owned(name, left_max=room):
                return False
            guard.append(owned_guard(self._state, name))  # fails if a client with a certificate gets a token
            operations += map(Delete, self._state.owned_keys(name))
        if any(isinstance(operation, Put) for operation in operations):
            done = await metadata_store.transact_resolving_ambiguity(self._store, guard, operations, writer)
        else:
            done = await self._store.transact(guard, operations)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        if done.succeeded:
            logger.info("user_changed", extra=fields(user=name, mechanisms=",".join(sorted(changes))))
            if is_deletion:
                await self._delete_rest(name)
        return done.succeeded

    async def _delete_rest(self, name: str) -> None:
        """Delete what still belongs to a user that was deleted. It is of no use to anyone: what a failure leaves is
        deleted before there is a user of this name again."""
        if not self._state.owns_anything(name):
            return
        try:
            await self._delete_owned(name)
        except MansioError as error:
            logger.warning("credentials_not_deleted", extra=fields(user=name, reason=error.message))

    async def _delete_owned(self, name: str, left_max: int = 0) -> bool:
        """Delete what belongs to a user that does not exist, but for `left_max` keys. Return False if it exists."""
        guard = user_guard(self._state.keys, name, {})
        deletes = list(map(Delete, self._state.owned_keys(name)[left_max:]))
        size = self._store.operations_max
        for start in range(0, len(deletes), size):
            done = await self._store.transact(guard, deletes[start : start + size])
            await self._state.wait_for_revision(done.revision, self._scheduler)
            if not done.succeeded:
                return False
        return True


def check_new_name(name: str) -> None:
    """Raise `UnacceptableCredential` unless a new user can have this name."""
    fault = find_name_fault(name)
    if fault:
        raise UnacceptableCredential(fault)


def _mechanism(kafka_type: int) -> ScramMechanism:
    mechanism = _MECHANISMS.get(kafka_type)
    if mechanism is None:
        raise UnsupportedSaslMechanism(f"there is no mechanism of SCRAM with the number {kafka_type}")
    return mechanism


def _new_credentials(password: str, salts: Mapping[ScramMechanism, bytes]) -> dict[str, ScramCredential]:
    return {
        mechanism.value: ScramCredential.from_password(mechanism, password, salt, ITERATIONS_MIN)
        for mechanism, salt in salts.items()
    }


def _with_password(
    known: Mapping[str, ScramCredential], password: str, previous_valid_until_ms: int | None
) -> dict[str, ScramCredential]:
    return {
        mechanism: credential.with_password(password, previous_valid_until_ms)
        for mechanism, credential in known.items()
    }
