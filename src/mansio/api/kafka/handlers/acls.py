"""DescribeAcls, CreateAcls and DeleteAcls (KIP-140, KIP-290), and CheckAuthorization.

Behavior: each item of a request succeeds or fails on its own.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.large_requests import on_thread
from mansio.broker.services.acls import Query
from mansio.broker.services.authorization import EVERYTHING_IS_ALLOWED
from mansio.errors import InvalidRequest, MansioError
from mansio.host.item_turns import ItemTurns
from mansio.state.authorization.acls import AclFilter, checked_acl
from mansio.state.authorization.authorizer import GROUPS_MAX, new_requester
from mansio.tracebacks import without_traceback
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.authorization.acls import Acl
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

ENCODED_ACLS_MAX: Final = 500
"""Maximum number of ACLs of a response that the event loop encodes, in less than 10 ms."""


async def describe_acls(service: BrokerServices, request: Struct, context: RequestContext) -> Fields | bytes:
    """Return the ACLs that the filter selects, by pattern. A large response is encoded on a thread."""
    try:
        acls = await service.acls.describe(
            AclFilter(
                request.resource_type_filter,
                request.pattern_type_filter,
                request.resource_name_filter,
                request.principal_filter,
                request.host_filter,
                request.operation,
                request.permission_type,
            ),
            caller=context.caller,
        )
    except MansioError as error:
        return {**_error_fields(error), "resources": []}
    if len(acls) <= ENCODED_ACLS_MAX:
        return {"resources": _resources(acls)}
    return await on_thread(service, partial(_encoded, acls, context))


def _encoded(acls: Sequence[Acl], context: RequestContext) -> bytes:
    return messages.encode_response(
        context.api_key, context.api_version, context.correlation_id, {"resources": _resources(acls)}
    )


def _resources(acls: Iterable[Acl]) -> list[Fields]:
    return [
        {
            "resource_type": resource_type,
            "resource_name": name,
            "pattern_type": pattern_type,
            "acls": [
                {
                    "principal": acl.principal,
                    "host": acl.host,
                    "operation": acl.operation,
                    "permission_type": acl.permission,
                }
                for acl in of_pattern
            ],
        }
        for (resource_type, pattern_type, name), of_pattern in groupby(acls, key=lambda acl: acl[:3])
    ]


async def create_acls(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Add ACLs. When answered, they are durable and in force on this broker; other brokers follow."""
    made: list[Acl | MansioError] = []
    for each in request.creations:
        try:
            made.append(
                checked_acl(
                    resource_type=each.resource_type,
                    pattern_type=each.resource_pattern_type,
                    name=each.resource_name,
                    principal=each.principal,
                    host=each.host,
                    operation=each.operation,
                    permission=each.permission_type,
                )
            )
        except MansioError as error:
            made.append(without_traceback(error))
    errors = await service.acls.create_each(made, caller=context.caller)
    return {"results": [{} if error is None else _error_fields(error) for error in errors]}


async def delete_acls(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Delete the ACLs that each filter selects, and return them."""
    filters = [
        AclFilter(
            each.resource_type_filter,
            each.pattern_type_filter,
            each.resource_name_filter,
            each.principal_filter,
            each.host_filter,
            each.operation,
            each.permission_type,
        )
        for each in request.filters
    ]
    answers = await service.acls.delete_each(filters, caller=context.caller)
    turns, results = ItemTurns(service.scheduler), []
    for answer in answers:
        matching: list[Fields] = []
        error = _error_fields(answer) if isinstance(answer, MansioError) else {}
        for acl in () if isinstance(answer, MansioError) else answer:
            await turns.next()
            matching.append(_matching(acl))
        results.append({**error, "matching_acls": matching})
    return {"filter_results": results}


def _matching(acl: Acl) -> Fields:
    return {
        "resource_type": acl.resource_type,
        "resource_name": acl.name,
        "pattern_type": acl.pattern_type,
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation,
        "permission_type": acl.permission,
    }


async def check_authorization(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Return what a user may do, and the ACL that decides it."""
    requester = None
    if request.user is not None:
        if len(request.groups) > GROUPS_MAX:  # a DENY of one that is left out would be missing in the answer
            raise InvalidRequest(f"{len(request.groups)} groups; a session has at most {GROUPS_MAX}")
        requester = new_requester(request.user, request.host, request.groups)
    queries = [Query(each.operation, each.resource_type, each.resource_name) for each in request.queries]
    decisions = service.acls.check_each(queries, requester=requester, caller=context.caller)
    return {
        "decisions": [
            _error_fields(each)
            if isinstance(each, MansioError)
            else {
                "is_allowed": each.is_allowed,
                "is_super_user": each.is_super_user,
                "is_open": each is EVERYTHING_IS_ALLOWED,
                "has_acl": each.acl is not None,
                **({} if each.acl is None else _decided_by(each.acl)),
            }
            for each in decisions
        ]
    }


def _decided_by(acl: Acl) -> Fields:
    fields = _matching(acl)
    permission = fields.pop("permission_type")
    return {**fields, "permission": permission}


def _error_fields(error: MansioError) -> Fields:
    return {"error_code": error.kafka_code, "error_message": error.message}
