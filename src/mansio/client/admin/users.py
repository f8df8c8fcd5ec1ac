"""Users, their passwords (KIP-554) and their API keys; available as `client.admin.users`.

A user has a credential for each mechanism of SCRAM: SCRAM-SHA-256, SCRAM-SHA-512, or both. With PLAIN, its password is
that of SCRAM-SHA-256 if it has one. A broker accepts passwords, and what is computed of them, on an encrypted
connection or from its own machine only.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import DuplicateResource, InvalidRequest, ResourceNotFound
from mansio.net.retry import raise_for_code
from mansio.state.authentication.credentials import (
    ITERATIONS_MIN,
    SALT_BYTES,
    ScramMechanism,
    encode_password,
    salt_password,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.mansio_apis import NO_END_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.net.cluster import Cluster

ALL_MECHANISMS: Final = tuple(mechanism.value for mechanism in ScramMechanism)

_NAMES: Final = {mechanism.kafka_type: mechanism.value for mechanism in ScramMechanism}


@dataclass(frozen=True, slots=True)
class User:
    """A user. `iterations`: rounds of the hash function by mechanism."""

    name: str
    iterations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SqsAccessKey:
    """An access key of SQS. `secret`: the secret access key where the key was just created, else None.
    `secrets_key_id`: of the key of the broker with which the secret is stored."""

    key_id: str
    user: str
    created: datetime | None = None
    secrets_key_id: str = ""
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class UserApiKey:
    """An API key of a user. `expires`: None if it does not end."""

    key_id: str
    user: str
    created: datetime
    expires: datetime | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A new API key. `key`: the key itself, which is not stored."""

    api_key: UserApiKey
    key: str = field(repr=False)


class UserAdmin:
    """Users of one cluster; available as `client.admin.users`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self) -> list[User]:
        """All users, sorted by name."""
        return [*await self._describe(None)]

    async def create(
        self,
        name: str,
        password: str,
        *,
        mechanisms: Sequence[str] = ALL_MECHANISMS,
        iterations: int = ITERATIONS_MIN,
    ) -> None:
        """Create a user. The password is not sent: a broker gets what it needs to verify it.

        `mechanisms`: some of SCRAM-SHA-256 and SCRAM-SHA-512; `iterations`: 4,096 to 16,384. Raises
        `DuplicateResource` if the user exists, `UnacceptableCredential`, `PolicyViolation`, `InvalidRequest`.
        """
        chosen = [_mechanism(mechanism) for mechanism in dict.fromkeys(mechanisms)]
        if not chosen:
            raise InvalidRequest("a user needs a mechanism")
        encoded = encode_password(password)
        try:
            await self._describe([name])
        except ResourceNotFound:
            pass
        else:
            raise DuplicateResource(f"there is a user {name!r} already")

        def salted() -> list[dict[str, Any]]:
            upsertions = []
            for mechanism in chosen:
                salt = secrets.token_bytes(SALT_BYTES)
                upsertions.append(
                    {
                        "name": name,
                        "mechanism": mechanism.kafka_type,
                        "iterations": iterations,
                        "salt": salt,
                        "salted_password": salt_password(mechanism, encoded, salt, max(iterations, 1)),
                    }
                )
            return upsertions

        await self._alter({"deletions": [], "upsertions": await asyncio.to_thread(salted)})

    async def delete(self, name: str) -> None:
        """Delete a user; its sessions end within a second. Raises `ResourceNotFound`."""
        numbers = {name: number for number, name in _NAMES.items()}
        (user,) = await self._describe([name])
        deletions = [{"name": name, "mechanism": numbers[mechanism]} for mechanism in user.iterations]
        await self._alter({"deletions": deletions, "upsertions": []})

    async def set_password(
        self, name: str, password: str, *, previous_valid: timedelta = timedelta(0)
    ) -> None:
        """Change the password of a user for all its mechanisms. The present password stays valid for `previous_valid`,
        and so do sessions that began with it; without it, they end within a second. The password is sent to the
        broker.

        Raises `ResourceNotFound`, `UnacceptableCredential`, `PolicyViolation`, `InvalidRequest`, and
        `UnsupportedVersion` if the broker is not Mansio's.
        """
        fields = {
            "user": name,
            "password": encode_password(password),
            "previous_valid_ms": previous_valid // timedelta(milliseconds=1),
        }
        await self._cluster.request(ApiKey.SET_PASSWORD, fields, check=_check_error)

    async def create_sqs_key(self, user: str) -> SqsAccessKey:
        """Create an access key of a user for the SQS endpoint. Nothing returns its secret again. If the answer is lost,
        a key may exist whose secret is not known: delete it.

        Raises `ResourceNotFound`, `SecurityDisabled` if the brokers have no `secrets_key_file`, `PolicyViolation`,
        `ClusterAuthorizationFailed`, and `UnsupportedVersion` if the broker is not Mansio's.
        """
        response = await self._cluster.request(
            ApiKey.CREATE_SQS_ACCESS_KEY, {"user": user}, check=_check_error
        )
        return SqsAccessKey(response.key_id, user, secret=response.secret)

    async def list_sqs_keys(self, user: str | None = None) -> Sequence[SqsAccessKey]:
        """Access keys of a user, or of all users, sorted by user and time, without secrets. Raises
        `ClusterAuthorizationFailed`, `UnsupportedVersion`."""
        response = await self._cluster.request(
            ApiKey.DESCRIBE_SQS_ACCESS_KEYS, {"user": user}, check=_check_error
        )
        return [
            SqsAccessKey(
                each.key_id,
                each.user,
                datetime.fromtimestamp(each.created_ms / 1000, UTC),
                each.secrets_key_id,
            )
            for each in response.access_keys
        ]

    async def delete_sqs_key(self, key_id: str) -> None:
        """Delete an access key: within a second, requests that are signed with it are refused. Raises
        `ResourceNotFound`, `ClusterAuthorizationFailed`, `UnsupportedVersion`."""
        await self._cluster.request(ApiKey.DELETE_SQS_ACCESS_KEY, {"key_id": key_id}, check=_check_error)

    async def create_api_key(
        self, user: str, *, description: str = "", valid_for: timedelta | None = None
    ) -> NewApiKey:
        """Create an API key of a user: programs log in with it instead of the password. It ends after `valid_for`, and
        with the user.

        Raises `ResourceNotFound`, `PolicyViolation` for too many keys, or if others could read the connection,
        `InvalidRequest`, and `UnsupportedVersion` if the broker is not Mansio's.
        """
        valid_ms = NO_END_MS if valid_for is None else max(valid_for // timedelta(milliseconds=1), 0)
        response = await self._cluster.request(
            ApiKey.CREATE_API_KEY,
            {"user": user, "description": description, "valid_ms": valid_ms},
            check=_check_error,
        )
        return NewApiKey(_api_key(response.api_key), bytes(response.key).decode())

    async def list_api_keys(self, user: str | None = None) -> Sequence[UserApiKey]:
        """The API keys of a user, or of all users, without the keys themselves."""
        response = await self._cluster.request(
            ApiKey.DESCRIBE_API_KEYS,
            {"user": user},
            check=_check_error,
        )
        return [_api_key(each) for each in response.api_keys]

    async def delete_api_key(self, key_id: str) -> None:
        """Delete an API key; its sessions end within a second. Raises `ResourceNotFound`."""
        await self._cluster.request(
            ApiKey.DELETE_API_KEY,
            {"key_id": key_id},
            check=_check_error,
        )

    async def _describe(self, names: Sequence[str] | None) -> Sequence[User]:
        def check(response: Any) -> None:
            raise_for_code(response.error_code, response.error_message)
            for result in response.results:
                raise_for_code(result.error_code, result.error_message)

        response = await self._cluster.request(
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
            {"users": None if names is None else [{"name": name} for name in names]},
            check=check,
        )
        return [
            User(
                result.user,
                {
                    _NAMES[info.mechanism]: info.iterations
                    for info in result.credential_infos
                    if info.mechanism in _NAMES
                },
            )
            for result in response.results
        ]

    async def _alter(self, fields: Mapping[str, Any]) -> None:
        def check(response: Any) -> None:
            for result in response.results:
                raise_for_code(result.error_code, result.error_message)

        await self._cluster.request_controller(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, fields, check=check)


def _check_error(response: Any) -> None:
    raise_for_code(response.error_code, response.error_message)


def _api_key(described: Any) -> UserApiKey:
    def time_of(time_ms: int) -> datetime:
        return datetime.fromtimestamp(time_ms / 1000, UTC)

    expires = None if described.expires_ms == NO_END_MS else time_of(described.expires_ms)
    return UserApiKey(
        described.key_id, described.user, time_of(described.created_ms), expires, described.description
    )


def _mechanism(name: str) -> ScramMechanism:
    try:
        return ScramMechanism(name)
    except ValueError:
        raise InvalidRequest(f"{name!r} is not a mechanism; there are {', '.join(ALL_MECHANISMS)}") from None
