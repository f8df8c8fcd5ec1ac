"""Group membership and administration: FindCoordinator, JoinGroup, SyncGroup, Heartbeat, LeaveGroup, DescribeGroups,
ListGroups, DeleteGroups.

Version notes: FindCoordinator 4+ takes several keys (KIP-699). JoinGroup 0 has no rebalance timeout (the session
timeout is used), 4+ returns MEMBER_ID_REQUIRED to a new member (KIP-394), 9+ may skip the assignment (KIP-814).
LeaveGroup 3+ takes several members (KIP-345); in older versions the error of the member is the error of the
response. DescribeGroups 6+ returns GROUP_ID_NOT_FOUND where older versions return a group in state Dead (KIP-1043).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.api.kafka.handlers.group_responses import described_groups, error_code
from mansio.broker.services.groups import LeavingMember
from mansio.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidRequest,
    MansioError,
)
from mansio.host.item_turns import ItemTurns
from mansio.state.classic_group.types import Join, Protocol, Sync

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

KEY_TYPE_GROUP: Final = 0
KEY_TYPE_TRANSACTION: Final = 1
KEY_TYPE_SHARE: Final = 2
KEY_TYPE_SCHEMAS: Final = 100
"""Mansio's own: the broker that answers requests to the schema registry."""
MEMBER_ID_REQUIRED: Final = 79
"""Kafka's error code."""

NO_COORDINATOR_FIELDS: Final = {"node_id": -1, "host": "", "port": -1}
"""Fields of the coordinator in a response with an error."""


async def find_coordinator(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Return the coordinator of each key: the leader of the partition of `__consumer_offsets` to which a group belongs,
    of `__transaction_state` for a transactional id, or the broker that stores the state of a share partition."""
    if context.api_version < 4:
        return await _coordinator(service, request.key_type, request.key or "", context)
    turns = ItemTurns(service.scheduler)
    found = []
    for key in request.coordinator_keys:
        await turns.next()
        found.append({"key": key, **await _coordinator(service, request.key_type, key or "", context)})
    return {"coordinators": found}


async def _coordinator(service: BrokerServices, key_type: int, key: str, context: RequestContext) -> Fields:
    try:
        if key_type == KEY_TYPE_TRANSACTION:
            broker = await service.transactions.find_coordinator(key, caller=context.caller)
        elif key_type == KEY_TYPE_SHARE:
            broker = await service.share_offsets.find_coordinator(key, caller=context.caller)
        elif key_type == KEY_TYPE_GROUP:
            broker = await service.group_service.find_coordinator(key, caller=context.caller)
        elif key_type == KEY_TYPE_SCHEMAS:
            broker = await service.schemas.find_coordinator()
        else:
            raise InvalidRequest(f"unknown coordinator type {key_type}")
    except MansioError as error:
        return {**NO_COORDINATOR_FIELDS, "error_code": error.kafka_code, "error_message": error.message}
    listener = (
        context.listener
    )  # clients reach this broker by the listener they used, and others by the same one
    found = listener.endpoint if broker is None else broker.endpoints.get(listener.name)
    if found is None:
        return {
            **NO_COORDINATOR_FIELDS,
            "error_code": CoordinatorNotAvailable.kafka_code,
            "error_message": f"the coordinator has no listener {listener.name}",
        }
    return {"node_id": found.node_id, "host": found.host, "port": found.port, "error_code": 0}


async def join_group(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Add a member to a classic group; answer at the end of the rebalance."""
    version = context.api_version
    rebalance_timeout_ms = request.rebalance_timeout_ms if version >= 1 else -1
    join = Join(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=context.client_id or "",
        client_host=f"/{context.client_host}",  # the format of Kafka, which its tools print
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
        protocol_type=request.protocol_type,
        protocols=tuple(Protocol(each.name, bytes(each.metadata)) for each in request.protocols),
        requires_member_id=version >= 4,
        can_skip_assignment=version >= 9,
    )
    no_protocol = None if version >= 7 else ""
    try:
        answer = await service.group_service.join(request.group_id, join, caller=context.caller)
    except MansioError as error:
        return {
            "error_code": error.kafka_code,
            "generation_id": -1,
            "protocol_name": no_protocol,
            "member_id": request.member_id,
        }
    if answer.must_rejoin:
        return {
            "error_code": MEMBER_ID_REQUIRED,
            "generation_id": -1,
            "protocol_name": no_protocol,
            "member_id": answer.member_id,
        }
    return {
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "leader": answer.leader,
        "skip_assignment": answer.skip_assignment,
        "member_id": answer.member_id,
        "members": [
            {"member_id": each.member_id, "group_instance_id": each.instance_id, "metadata": each.metadata}
            for each in answer.members
        ],
    }


async def sync_group(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Return the assignment of a member of a classic group; the leader of the group sends the assignments of all."""
    sync = Sync(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        generation=request.generation_id,
        assignments={each.member_id: bytes(each.assignment) for each in request.assignments},
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
    )
    try:
        answer = await service.group_service.sync(request.group_id, sync, caller=context.caller)
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "assignment": answer.assignment,
    }


async def heartbeat(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Extend the session of a member of a classic group."""
    try:
        service.group_service.heartbeat(
            request.group_id,
            request.member_id,
            request.group_instance_id,
            request.generation_id,
            caller=context.caller,
        )
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {"error_code": 0}


async def leave_group(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Remove members from a classic group."""
    if context.api_version < 3:
        members = [LeavingMember(request.member_id, None)]
    else:
        members = [LeavingMember(each.member_id, each.group_instance_id) for each in request.members]
    turns = ItemTurns(service.scheduler)
    codes = []
    try:
        for error in service.group_service.leave_each(request.group_id, members, caller=context.caller):
            codes.append(error_code(error))
            await turns.next()
    except MansioError as error:
        return {"error_code": error.kafka_code}
    if context.api_version < 3:
        return {"error_code": codes[0]}
    return {
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "error_code": code,
            }
            for member, code in zip(members, codes, strict=True)
        ]
    }


async def describe_groups(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Describe classic groups. Each group is described once, even if the request repeats its id: otherwise a short
    request could cause a very large response."""
    return await described_groups(
        service,
        request.groups,
        lambda group_id: _describe(service, group_id, context),
        has_operations=request.include_authorized_operations,
        caller=context.caller,
    )


def _describe(service: BrokerServices, group_id: str, context: RequestContext) -> Fields:
    try:
        found = service.group_service.describe(group_id, caller=context.caller)
        if found.state == "Dead" and context.api_version >= 6:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
    except MansioError as error:
        failed = {"error_code": error.kafka_code, "error_message": error.message}
        state = "Dead" if isinstance(error, GroupIdNotFound) else ""
        return {"group_id": group_id, "group_state": state, **failed}
    return {
        "group_id": group_id,
        "group_state": found.state,
        "protocol_type": found.protocol_type,
        "protocol_data": found.protocol,
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "client_id": each.client_id,
                "client_host": each.client_host,
                "member_metadata": each.metadata,
                "member_assignment": each.assignment,
            }
            for each in found.members
        ],
    }


async def list_groups(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """List the groups that this broker coordinates, filtered by state and type."""
    try:
        groups = service.group_service.list_groups(
            request.states_filter, request.types_filter, caller=context.caller
        )
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {
        "groups": [
            {
                "group_id": each.group_id,
                "protocol_type": each.protocol_type,
                "group_state": each.state,
                "group_type": each.group_type,
            }
            for each in groups
        ]
    }


async def delete_groups(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """Delete empty groups with their committed offsets."""
    errors = await service.group_service.delete(request.groups_names, caller=context.caller)
    return {
        "results": [
            {"group_id": group_id, "error_code": error_code(error)}
            for group_id, error in zip(request.groups_names, errors, strict=True)
        ]
    }
