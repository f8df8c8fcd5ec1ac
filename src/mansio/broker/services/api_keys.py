"""API key service: creates, lists and deletes the API keys of users, in the metadata store.

A key belongs to a user with a password, and is deleted with it. A change is durable, and known to this broker, before
the request is answered; other brokers learn it from their watch of the metadata store, and end the sessions of deleted
keys.

Who may ALTER the cluster may create and delete all keys. A user may create and delete its own ones. With a key or a
token no key is created: whoever finds one cannot make another one of it.

Invariant: no error and no log line contains a key.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.routing.caller import ANONYMOUS_USER
from mansio.errors import (
    ConcurrentChange,
    InvalidRequest,
    PolicyViolation,
    ResourceNotFound,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.api_keys import api_keys_document
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Compare, Put, new_writer_id
from mansio.metadata.owned_credentials import user_guard
from mansio.state.authentication.api_keys import RANDOM_BYTES, StoredApiKey, format_key, hash_key, id_of_key
from mansio.state.authorization.acls import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Clock, Random, Scheduler

logger = logging.getLogger(__name__)

KEYS_PER_USER_MAX: Final = 100
KEYS_MAX: Final = 10_000
"""Maximum number of keys of all users."""
DESCRIPTION_CHARACTERS_MAX: Final = 200
VALID_MS_MAX: Final = 100 * 365 * 24 * 60 * 60 * 1000


class NewApiKey(NamedTuple):
    """A new key. `text`: the key itself, which is not stored."""

    api_key: StoredApiKey
    text: str

    def __repr__(self) -> str:
        return f"NewApiKey({self.api_key!r}, hidden)"


class ApiKeyService:
    """API keys of users. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_count_mutation",
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
        authorization: Authorization,
        count_mutation: Callable[[Caller], None] = lambda _: None,
    ) -> None:
        """`count_mutation`: counts a change in the quota of the caller (`QuotaService.count_mutation`)."""
        self._store = store
        self._state = state
        self._scheduler = scheduler
        self._random = random
        self._clock = clock
        self._authorization = authorization
        self._count_mutation = count_mutation

    def list(self, user: str | None = None, *, caller: Caller) -> Sequence[StoredApiKey]:
        """Return the keys of a user, or of all users, the oldest ones of each first. Raises
        `ClusterAuthorizationFailed` unless the caller may DESCRIBE the cluster, or asks for its own ones."""
        self._check(caller, Operation.DESCRIBE, user)
        users = sorted(self._state.api_keys) if user is None else [user]
        return [
            key
            for name in users
            for key in sorted(self._state.api_keys_of(name).keys.values(), key=lambda key: key.created_ms)
        ]

    async def create(
        self, user: str, description: str, valid_ms: int | None, *, is_confidential: bool, caller: Caller
    ) -> NewApiKey:
        """Create a key for a user. `valid_ms`: time after which it ends, None: it does not. `is_confidential`: whether
        nobody else can read the connection.

        Raises `ClusterAuthorizationFailed`, `ResourceNotFound` without such a user, `PolicyViolation` for too many
        keys, `InvalidRequest`, `ThrottlingQuotaExceeded`, `ConcurrentChange`, `StorageError`.
        """
        self._check(caller, Operation.ALTER, user)
        self._authorization.check_may_issue_credentials(caller)
        if not is_confidential:
            raise PolicyViolation("a key is sent on an encrypted connection, or on the broker's machine")
        if len(description) > DESCRIPTION_CHARACTERS_MAX or not (description.isprintable()):
            raise InvalidRequest(f"a description has up to {DESCRIPTION_CHARACTERS_MAX} printable characters")
        if valid_ms is not None and not 1 <= valid_ms <= VALID_MS_MAX:
            raise InvalidRequest(f"a key is valid for 1 to {VALID_MS_MAX} ms")
        self._count_mutation(caller)
        text = format_key(self._random.bytes(RANDOM_BYTES))
        key_id = id_of_key(text)
        assert key_id is not None
        now_ms = self._clock.wall_ms()
        expires_ms = None if valid_ms is None else now_ms + valid_ms
        created = StoredApiKey(key_id, user, hash_key(text), now_ms, expires_ms, description)
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            credentials = self._state.users.get(user)
            if not credentials:
                raise ResourceNotFound(f"there is no user {user!r}")
            known = self._state.api_keys_of(user)
            if self._state.api_key_count >= KEYS_MAX:
                raise PolicyViolation(f"there are {KEYS_MAX} API keys, which is the limit")
            if len(known.keys) >= KEYS_PER_USER_MAX:
                raise PolicyViolation(f"the user has {KEYS_PER_USER_MAX} API keys, which is the limit")
            exists = user_guard(self._state.keys, user, credentials)
            if await self._write(user, {**known.keys, key_id: created}, exists):
                logger.info("api_key_created", extra=fields(user=user, key=key_id))
                return NewApiKey(created, text)
        raise ConcurrentChange("the keys of this user are being changed concurrently")

    async def delete(self, key_id: str, *, caller: Caller) -> None:
        """Delete a key; its sessions end.

        Raises `ClusterAuthorizationFailed`, also for a key that does not exist, `ResourceNotFound`,
        `ThrottlingQuotaExceeded`, `ConcurrentChange`, `StorageError`.
        """
        is_counted = False
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            found = self._state.find_api_key(key_id)
            self._check(caller, Operation.ALTER, None if found is None else found.user)
            if found is None:
                raise ResourceNotFound("there is no such API key")
            if not is_counted:
                self._count_mutation(caller)
                is_counted = True
            known = dict(self._state.api_keys_of(found.user).keys)
            del known[key_id]
            if await self._write(found.user, known, []):
                logger.info("api_key_deleted", extra=fields(user=found.user, key=key_id))
                return
        raise ConcurrentChange("the keys of this user are being changed concurrently")

    def _check(self, caller: Caller, operation: Operation, user: str | None) -> None:
        session = caller.session
        is_own = user is not None and session.user == user and user != ANONYMOUS_USER
        if not is_own or not (session.may_issue_credentials or operation is Operation.DESCRIBE):
            self._authorization.check_cluster(caller, operation)

    async def _write(self, user: str, keys: dict[str, StoredApiKey], guard: Sequence[Compare]) -> bool:
        """Replace the keys of a user if they are those that this broker knows, and the guard holds. Return False if
        not."""
        writer = new_writer_id(self._random)
        key = self._state.keys.user_api_keys(user)
        compares = [*guard, Compare(key, mod_revision=self._state.api_keys_of(user).revision)]
        put = Put(key, metadata_store.encode(api_keys_document(keys.values()), writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, [put], writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded
