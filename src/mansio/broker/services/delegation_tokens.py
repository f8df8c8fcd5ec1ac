"""Delegation token service (KIP-48): creates, renews, expires and describes delegation tokens, in the metadata store.

The secret of a token is an HMAC of its id with a key that is derived from a secrets key (`secrets_key_file`), so the
store does not contain it. What log-ins are verified with is stored, as for users.

Invariants:
* Whoever has authenticated with a key or a token manages no tokens, nor does anybody without authentication, or on a
  connection that others could read.
* With a user its tokens are deleted (`UserService`), and a token is created only while its owner's user is unchanged.
  A token of a user that does not exist any more logs nobody in.
* A request that names a token by its HMAC knows its secret, so the errors about it may tell that it exists.
* No error, log line or stored value contains an HMAC.

Model: DelegationTokenControlManager of Kafka.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.routing.caller import ANONYMOUS_USER
from mansio.config.item_limit import too_many_items
from mansio.errors import (
    ClusterAuthorizationFailed,
    ConcurrentChange,
    DelegationTokenAuthDisabled,
    DelegationTokenExpired,
    DelegationTokenNotFound,
    DelegationTokenOwnerMismatch,
    DelegationTokenRequestNotAllowed,
    InvalidPrincipalType,
    InvalidRequest,
    MansioError,
    PolicyViolation,
    ThrottlingQuotaExceeded,
)
from mansio.host.item_turns import ItemTurns
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.delegation_tokens import token_document
from mansio.metadata.metadata_store import (
    CONFLICT_ATTEMPTS_MAX,
    Compare,
    Delete,
    Put,
    new_uuid,
    new_writer_id,
)
from mansio.metadata.owned_credentials import creation_guard, creation_mark
from mansio.state.authentication.credentials import (
    SALT_BYTES,
    USER_BYTES_MAX,
    ScramCredential,
    ScramMechanism,
)
from mansio.state.authentication.delegation_tokens import (
    PURPOSE,
    DelegationToken,
    token_credentials,
    token_digest,
    token_hmac,
)
from mansio.state.authorization.acls import Operation, ResourceType
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.broker.services.authorization import Authorization
    from mansio.config.settings import Settings
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Background, Clock, Random, Scheduler, Timer
    from mansio.state.authentication.secrets_keys import SecretsKeys

logger = logging.getLogger(__name__)

TOKENS_MAX: Final = 10_000
"""Maximum number of tokens of a cluster."""

TOKENS_PER_OWNER_MAX: Final = 100
"""Maximum number of tokens of one owner."""

RENEWERS_MAX: Final = 16
COMPUTATIONS_MAX: Final = 16
"""Maximum number of tokens whose credentials are computed at a time, each of which takes some milliseconds."""

DELETIONS_MAX: Final = 100
"""Maximum number of expired tokens that are deleted in one check; the next one deletes more."""

USER_TYPE: Final = "User"


class Principal(NamedTuple):
    """A principal as requests name it."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class TokenWithSecret(NamedTuple):
    """A token and its HMAC, which is empty if this broker does not have the secrets key. `repr` hides it."""

    token: DelegationToken
    hmac: bytes

    def __repr__(self) -> str:
        return f"TokenWithSecret({self.token.token_id!r}, hidden)"


class DelegationTokenService:
    """Delegation tokens of one cluster. All methods run on the broker's event loop."""

    __slots__ = (
        "_authorization",
        "_clock",
        "_computing_count",
        "_count_mutation",
        "_is_running",
        "_password_thread",
        "_random",
        "_scheduler",
        "_secrets_keys",
        "_settings",
        "_state",
        "_store",
        "_timer",
    )

    def __init__(
        self,
        secrets_keys: SecretsKeys | None,
        *,
        store: MetadataStore,
        state: MetadataImage,
        settings: Settings,
        scheduler: Scheduler,
        random: Random,
        clock: Clock,
        password_thread: Background,
        authorization: Authorization,
        count_mutation: Callable[[Caller], None] = lambda _: None,
    ) -> None:
        """`secrets_keys`: None if this broker has none. `password_thread`: computes what log-ins are verified with.
        `count_mutation`: counts a change in the quota of the caller (`QuotaService.count_mutation`)."""
        self._secrets_keys = secrets_keys
        self._store = store
        self._state = state
        self._settings = settings
        self._scheduler = scheduler
        self._random = random
        self._clock = clock
        self._password_thread = password_thread
        self._authorization = authorization
        self._count_mutation = count_mutation
        self._computing_count = 0
        """Number of tokens whose credentials are being computed."""
        self._is_running = False
        """Whether expired tokens are deleted."""
        self._timer: Timer | None = None
        """Of the next check for expired tokens; None while there are no tokens."""
        state.on_user_change(lambda _: self._schedule_check())

    def start(self) -> None:
        """Start to delete expired tokens."""
        self._is_running = True
        self._schedule_check()

    def stop(self) -> None:
        """Delete expired tokens no longer."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Requests

    async def create(
        self,
        *,
        owner: Principal | None,
        renewers: Sequence[Principal],
        max_lifetime_ms: int,
        is_confidential: bool,
        caller: Caller,
    ) -> TokenWithSecret:
        """Create a token. `owner`: None for the caller; `max_lifetime_ms`: that of the settings if it is longer, or not
        positive. `is_confidential`: whether nobody else can read the connection.

        Raises `DelegationTokenRequestNotAllowed`, `DelegationTokenAuthorizationFailed` unless the owner is the caller,
        or the caller may CREATE_TOKENS of the owner, `InvalidPrincipalType`, `DelegationTokenAuthDisabled`,
        `InvalidRequest`, `PolicyViolation`, `ThrottlingQuotaExceeded`, `ConcurrentChange`, `StorageError`.
        """
        self._check_caller(caller, is_confidential=is_confidential)
        requester = caller.session.principal
        principal = requester if owner is None else str(owner)
        if principal != requester:
            self._authorization.check(caller, Operation.CREATE_TOKENS, ResourceType.USER, principal)
        for each in (*renewers, *(() if owner is None else (owner,))):
            if each.kind != USER_TYPE:
                raise InvalidPrincipalType(
                    "the owner and the renewers of a delegation token are of the type User"
                )
            if not 1 <= len(each.name.encode()) <= USER_BYTES_MAX:
                raise InvalidRequest(f"the name of a user has 1 to {USER_BYTES_MAX} bytes")
        if len(renewers) > RENEWERS_MAX:
            raise PolicyViolation(f"a delegation token has at most {RENEWERS_MAX} renewers")
        keys = self._keys()
        self._check_owner(principal, caller)
        self._count_mutation(caller)
        token_id = base64.urlsafe_b64encode(new_uuid(self._random).bytes).rstrip(b"=").decode()
        secret = token_hmac(keys.derive(PURPOSE, keys.present_id), token_id)
        credentials = await self._credentials(secret)
        now_ms = self._clock.wall_ms()
        lifetime_ms = self._settings.delegation_token_max_lifetime_ms
        if max_lifetime_ms > 0:
            lifetime_ms = min(lifetime_ms, max_lifetime_ms)
        max_ms = now_ms + lifetime_ms
        token = DelegationToken(
            token_id,
            principal,
            requester,
            tuple(dict.fromkeys(map(str, renewers))),
            now_ms,
            min(max_ms, now_ms + self._settings.delegation_token_expiry_time_ms),
            max_ms,
            token_digest(secret),
            keys.present_id,
            credentials,
        )
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            self._check_owner(principal, caller)
            token = replace(token, is_of_stored_user=token.user in self._state.users)
            if await self._write(token, is_new=True):
                self._log("delegation_token_created", token, caller)
                return TokenWithSecret(token, secret)
        raise ConcurrentChange("the owner is being changed concurrently")

    async def _credentials(self, secret: bytes) -> dict[str, ScramCredential]:
        """Return the credentials of a token with this HMAC. Raises `ThrottlingQuotaExceeded` while too many are
        computed: passwords are checked on the same thread."""
        if self._computing_count >= COMPUTATIONS_MAX:
            raise ThrottlingQuotaExceeded("too many delegation tokens are being created now")
        salts = {mechanism: self._random.bytes(SALT_BYTES) for mechanism in ScramMechanism}
        self._computing_count += 1
        try:
            return await run_in_thread(
                self._scheduler, self._password_thread, partial(token_credentials, secret, salts)
            )
        finally:
            self._computing_count -= 1

    async def renew(self, token_hmac: bytes, period_ms: int, *, is_confidential: bool, caller: Caller) -> int:
        """Let a token expire after `period_ms` from now, or after that of the settings if it is negative; not after its
        maximum lifetime. Return the Unix time at which it expires.

        Raises `DelegationTokenRequestNotAllowed`, `DelegationTokenAuthDisabled`, `DelegationTokenNotFound`,
        `DelegationTokenOwnerMismatch`, `DelegationTokenExpired`, `ThrottlingQuotaExceeded`, `ConcurrentChange`,
        `StorageError`.
        """
        if period_ms < 0:
            period_ms = self._settings.delegation_token_expiry_time_ms
        token = await self._change(
            token_hmac, partial(_ends, period_ms), is_confidential=is_confidential, caller=caller
        )
        self._log("delegation_token_renewed", token, caller)
        return token.expires_ms

    async def expire(
        self, token_hmac: bytes, period_ms: int, *, is_confidential: bool, caller: Caller
    ) -> int:
        """Let a token expire after `period_ms` from now; if that is negative, delete it. Return the Unix time at which
        it expires. Raises the errors of `renew`."""
        if period_ms >= 0:
            token = await self._change(
                token_hmac, partial(_ends, period_ms), is_confidential=is_confidential, caller=caller
            )
            self._log("delegation_token_expires", token, caller)
            return token.expires_ms
        token = self._changeable(token_hmac, is_confidential=is_confidential, caller=caller)
        delete = Delete(self._state.keys.token(token.token_id))
        done = await metadata_store.transact_with_retries(self._store, [], [delete])
        await self._state.wait_for_revision(done.revision, self._scheduler)
        self._log("delegation_token_deleted", token, caller)
        return self._clock.wall_ms()

    async def describe(
        self, owners: Sequence[Principal] | None, *, is_confidential: bool, caller: Caller
    ) -> list[TokenWithSecret]:
        """Return the tokens that the caller may see: of which it is owner, requester or renewer, those that it may
        DESCRIBE, and those of users of which it may DESCRIBE_TOKENS. `owners`: only tokens that one of them may change;
        None: all.

        Raises `DelegationTokenRequestNotAllowed`, `DelegationTokenAuthDisabled`, `PolicyViolation` for too many owners.
        """
        self._check_caller(caller, is_confidential=is_confidential)
        keys = self._keys()
        error = None if owners is None else too_many_items(len(owners))
        if error is not None:
            raise copied(error)
        turns = ItemTurns(self._scheduler)
        wanted = None if owners is None else frozenset(map(str, owners))
        found = []
        for token in sorted(self._state.tokens.values(), key=lambda token: (token.issued_ms, token.token_id)):
            await turns.next()
            if wanted is not None and not token.may_be_changed_by_any(wanted):
                continue
            if self._may_see(caller, token):
                is_known = keys.has(token.secrets_key_id)
                key = keys.derive(PURPOSE, token.secrets_key_id) if is_known else b""
                found.append(TokenWithSecret(token, token_hmac(key, token.token_id) if is_known else b""))
        return found

    # Checks

    def _check_caller(self, caller: Caller, *, is_confidential: bool) -> None:
        if caller.session.user == ANONYMOUS_USER:
            raise DelegationTokenRequestNotAllowed("clients without authentication have no delegation tokens")
        try:
            self._authorization.check_may_issue_credentials(caller)
        except ClusterAuthorizationFailed as error:
            raise DelegationTokenRequestNotAllowed(error.message) from None
        if not is_confidential:
            raise DelegationTokenRequestNotAllowed(
                "the secret of a token is sent on an encrypted connection, or to the broker's machine"
            )

    def _may_see(self, caller: Caller, token: DelegationToken) -> bool:
        allows = self._authorization.allows
        return (
            token.may_be_changed_by(caller.session.principal)
            or allows(caller, Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id)
            or allows(caller, Operation.DESCRIBE_TOKENS, ResourceType.USER, token.owner)
        )

    def _keys(self) -> SecretsKeys:
        if self._secrets_keys is None:
            raise DelegationTokenAuthDisabled("secrets_key_file is not set on this broker")
        return self._secrets_keys

    def _check_owner(self, principal: str, caller: Caller) -> None:
        """Check that an owner may get another token. A user of a certificate has no credentials, and needs none."""
        name = principal.partition(":")[2]
        if (
            name == caller.session.user
            and caller.session.credential_revision
            and name not in self._state.users
        ):
            raise DelegationTokenRequestNotAllowed("the user was deleted")
        owned = sum(token.owner == principal for token in self._state.tokens.values())
        if owned >= TOKENS_PER_OWNER_MAX or len(self._state.tokens) >= TOKENS_MAX:
            raise PolicyViolation(
                f"an owner has at most {TOKENS_PER_OWNER_MAX} delegation tokens, and a cluster {TOKENS_MAX}"
            )

    def _changeable(self, token_hmac: bytes, *, is_confidential: bool, caller: Caller) -> DelegationToken:
        self._check_caller(caller, is_confidential=is_confidential)
        self._keys()
        digest = token_digest(token_hmac)
        token = next((each for each in self._state.tokens.values() if each.digest == digest), None)
        if token is None:
            raise DelegationTokenNotFound("there is no such delegation token")
        if not token.may_be_changed_by(caller.session.principal):
            raise DelegationTokenOwnerMismatch(
                f"{caller.session.principal} is neither the owner of the token nor one of its renewers"
            )
        if token.is_expired(self._clock.wall_ms()):
            raise DelegationTokenExpired("the delegation token has expired")
        self._count_mutation(caller)
        return token

    async def _change(
        self,
        token_hmac: bytes,
        change: Callable[[DelegationToken, int], DelegationToken],
        *,
        is_confidential: bool,
        caller: Caller,
    ) -> DelegationToken:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            token = self._changeable(token_hmac, is_confidential=is_confidential, caller=caller)
            changed = change(token, self._clock.wall_ms())
            if await self._write(changed):
                return changed
        raise ConcurrentChange("this delegation token is being changed concurrently")

    async def _write(self, token: DelegationToken, *, is_new: bool = False) -> bool:
        """Write a token if the stored one has its revision, and, if it is new, unless its owner, or what that owns, is
        changed meanwhile. Return whether it was written."""
        name = self._state.keys.token(token.token_id)
        writer = new_writer_id(self._random)
        guard = [Compare(name, mod_revision=token.revision)]
        puts = [Put(name, metadata_store.encode(token_document(token), writer))]
        if is_new:
            guard += creation_guard(self._state, token.user)
            puts.append(creation_mark(self._state, token.user, writer))
        done = await metadata_store.transact_resolving_ambiguity(self._store, guard, puts, writer)
        await self._state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded

    # Expired tokens

    def _schedule_check(self) -> None:
        if self._is_running and self._timer is None and self._state.tokens:
            self._timer = self._scheduler.call_later(
                self._settings.delegation_token_expiry_check_interval_ms, self._begin_check
            )

    def _begin_check(self) -> None:
        self._timer = self._scheduler.spawn(self._check_expired(), name="delete expired delegation tokens")

    async def _check_expired(self) -> None:
        try:
            await self._delete_expired()
        except MansioError as error:  # the next check tries again
            logger.warning("delegation_tokens_not_deleted", extra=fields(reason=error.message))
        finally:
            self._timer = None
            self._schedule_check()

    async def _delete_expired(self) -> None:
        """Delete expired tokens, unless they are renewed meanwhile, those of deleted users, and the marks of owners
        that have nothing any more. In a cluster the controller does."""
        controller = self._state.controller
        if controller is not None and controller.node_id != self._settings.node_id:
            return
        now_ms = self._clock.wall_ms()
        users = self._state.users
        expired = [
            token
            for token in self._state.tokens.values()
            if token.is_expired(now_ms) or (token.is_of_stored_user and token.user not in users)
        ]
        for token in expired[:DELETIONS_MAX]:
            name = self._state.keys.token(token.token_id)
            guard = [Compare(name, mod_revision=token.revision)]
            done = await self._store.transact(guard, [Delete(name)])
            if done.succeeded:
                await self._state.wait_for_revision(done.revision, self._scheduler)
                logger.info("delegation_token_expired", extra=fields(token=token.token_id, owner=token.owner))
        unused = [
            (self._state.keys.user_api_keys(name), stored.revision)
            for name, stored in self._state.api_keys.items()
            if not stored.keys and name not in users and not self._state.owns_anything(name)
        ]
        for key, revision in unused[:DELETIONS_MAX]:
            await self._store.transact([Compare(key, mod_revision=revision)], [Delete(key)])

    def _log(self, event: str, token: DelegationToken, caller: Caller) -> None:
        logger.info(
            event,
            extra=fields(
                token=token.token_id,
                owner=token.owner,
                expires_ms=token.expires_ms,
                by=caller.session.principal,
            ),
        )


def _ends(period_ms: int, token: DelegationToken, now_ms: int) -> DelegationToken:
    return replace(token, expires_ms=min(token.max_ms, now_ms + period_ms))
