"""CreateDelegationToken, RenewDelegationToken, ExpireDelegationToken and DescribeDelegationToken (KIP-48, KIP-373).

Version notes:
* CreateDelegationToken 3: the request may name another owner, and the response the requester.
* DescribeDelegationToken 3: tokens have a requester.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.services.delegation_tokens import Principal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.delegation_tokens import TokenWithSecret
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]


async def create_delegation_token(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Create a token of the client, or of another owner."""
    owner = None
    if request.owner_principal_name:
        owner = Principal(request.owner_principal_type or "", request.owner_principal_name)
    created = await service.delegation_tokens.create(
        owner=owner,
        renewers=_principals(request.renewers),
        max_lifetime_ms=request.max_lifetime_ms,
        is_confidential=context.is_confidential,
        caller=context.caller,
    )
    return _fields_of(created)


async def renew_delegation_token(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Let a token expire later."""
    expires_ms = await service.delegation_tokens.renew(
        request.hmac,
        request.renew_period_ms,
        is_confidential=context.is_confidential,
        caller=context.caller,
    )
    return {"expiry_timestamp": expires_ms}


async def expire_delegation_token(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Let a token expire at another time, or delete it."""
    expires_ms = await service.delegation_tokens.expire(
        request.hmac,
        request.expiry_time_period_ms,
        is_confidential=context.is_confidential,
        caller=context.caller,
    )
    return {"expiry_timestamp": expires_ms}


async def describe_delegation_token(
    service: BrokerServices, request: Struct, context: RequestContext
) -> Fields:
    """Return the tokens that the client may see."""
    owners = None if request.owners is None else _principals(request.owners)
    found = await service.delegation_tokens.describe(
        owners, is_confidential=context.is_confidential, caller=context.caller
    )
    return {
        "tokens": [
            {
                **_fields_of(each),
                "renewers": [_principal_fields(renewer) for renewer in each.token.renewers],
            }
            for each in found
        ]
    }


def _principals(named: Iterable[Struct]) -> list[Principal]:
    return [Principal(each.principal_type, each.principal_name) for each in named]


def _fields_of(described: TokenWithSecret) -> Fields:
    token = described.token
    return {
        **_principal_fields(token.owner),
        **{f"token_requester_{name}": value for name, value in _principal_fields(token.requester).items()},
        "issue_timestamp": token.issued_ms,
        "expiry_timestamp": token.expires_ms,
        "max_timestamp": token.max_ms,
        "token_id": token.token_id,
        "hmac": described.hmac,
    }


def _principal_fields(principal: str) -> Fields:
    kind, _, name = principal.partition(":")
    return {"principal_type": kind, "principal_name": name}
