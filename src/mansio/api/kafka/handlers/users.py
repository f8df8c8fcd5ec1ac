"""DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554), and SetPassword.

Behavior: each user of a request is changed or rejected on its own. A description has mechanisms and iterations, no keys
and no salts. A request that contains a password or its equivalent is rejected unless the connection is encrypted or
comes from the broker's machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.users import CredentialDeletion, CredentialUpsertion
from mansio.errors import ClusterAuthorizationFailed, UnacceptableCredential

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.users import DescribedUser
    from mansio.wire.codec.messages import Struct


async def describe_user_scram_credentials(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return the users of the request, or all without a list or with an empty one.

    A refusal has the error, and its code once more for each user of the request, without the name, as in Kafka."""
    names = [user.name for user in request.users or ()]
    try:
        described = service.users.describe(names, caller=context.caller)
    except ClusterAuthorizationFailed as error:
        refusal = {"error_code": error.kafka_code}
        results = [{**refusal, "user": "", "credential_infos": []} for _ in names]
        return {**refusal, "error_message": error.message, "results": results}
    return {"results": [_described(user) for user in described]}


def _described(user: DescribedUser) -> dict[str, Any]:
    if user.error is not None:
        return {
            "user": user.name,
            "error_code": user.error.kafka_code,
            "error_message": user.error.message,
            "credential_infos": [],
        }
    infos = [
        {"mechanism": mechanism.kafka_type, "iterations": iterations}
        for mechanism, iterations in user.iterations.items()
    ]
    return {"user": user.name, "credential_infos": infos}


async def alter_user_scram_credentials(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Create, replace and delete credentials. Each user succeeds or fails by itself. When answered, a change is durable
    and effective on this broker; other brokers follow."""
    upsertions = [
        CredentialUpsertion(each.name, each.mechanism, each.iterations, each.salt, each.salted_password)
        for each in request.upsertions
    ]
    deletions = [CredentialDeletion(each.name, each.mechanism) for each in request.deletions]
    errors = await service.users.alter_each(
        upsertions, deletions, is_confidential=context.is_confidential, caller=context.caller
    )
    results = []
    for name, error in errors.items():
        result: dict[str, Any] = {"user": name}
        if error is not None:
            result |= {"error_code": error.kafka_code, "error_message": error.message}
        results.append(result)
    return {"results": results}


async def set_password(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Change the password of a user."""
    await service.users.set_password(
        request.user,
        _decoded(request.password),
        previous_valid_ms=request.previous_valid_ms,
        is_confidential=context.is_confidential,
        caller=context.caller,
    )
    return {}


def _decoded(password: bytes) -> str:
    """Return the text of a password. Raises `UnacceptableCredential`; Python's error would keep the bytes."""
    try:
        return password.decode()
    except UnicodeDecodeError:
        pass
    raise UnacceptableCredential("a password is UTF-8")
