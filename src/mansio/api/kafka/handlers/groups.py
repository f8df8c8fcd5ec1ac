"""Group membership and administration over the Kafka protocol.

Translates only: requests into calls on `service.groups`, its answers and errors into response fields.

Version notes: FindCoordinator 4+ takes several keys (KIP-699). JoinGroup 0 has no rebalance timeout (it is
the session timeout), 4+ makes a new member come back with its id (KIP-394), 9+ may skip the assignment
(KIP-814). LeaveGroup 3+ takes several members (KIP-345); below, the one member's error is the answer's.
DescribeGroups 6+ says GROUP_ID_NOT_FOUND where older versions show a group in state Dead (KIP-1043).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.broker.coordinator.group.error_mapping import check_group_id
from mansio.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidRequest,
    MansioError,
    TransactionsNotOffered,
)
from mansio.state.classic_group.types import Join, Protocol, Sync

if TYPE_CHECKING:
    from mansio.api.kafka.server.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct

Fields = dict[str, Any]

KEY_GROUP: Final = 0
KEY_TRANSACTION: Final = 1
KEY_SHARE: Final = 2
MEMBER_ID_REQUIRED: Final = 79
NO_NODE: Final = {"node_id": -1, "host": "", "port": -1}


async def find_coordinator(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    """A single node coordinates every group; in a cluster the leader of the partition does that it lives in."""
    keys = [request.key] if context.api_version < 4 else request.coordinator_keys
    found = [
        {"key": key, **await _coordinator(service, request.key_type, key or "", context)} for key in keys
    ]
    if context.api_version < 4:
        return {name: value for name, value in found[0].items() if name != "key"}
    return {"coordinators": found}


async def _coordinator(service: BrokerServices, key_type: int, key: str, context: RequestContext) -> Fields:
    try:
        if key_type == KEY_TRANSACTION:
            raise TransactionsNotOffered
        if key_type == KEY_SHARE:
            node_id, host, port = await _share_coordinator(service, key, context)
        elif key_type == KEY_GROUP:
            check_group_id(key)
            node_id, host, port = await _group_coordinator(service, key, context)
        else:
            raise InvalidRequest(f"there is no coordinator of type {key_type}")
    except MansioError as error:
        return {**NO_NODE, "error_code": error.kafka_code, "error_message": error.message}
    return {"node_id": node_id, "host": host, "port": port, "error_code": 0}


async def _group_coordinator(
    service: BrokerServices, group_id: str, context: RequestContext
) -> tuple[int, str, int]:
    """Who coordinates a group, and where clients reach that broker."""
    own, groups = service.settings.node_id, service.groups
    if groups.lookup is None:
        return own, *context.listener
    await groups.ready()
    broker = groups.lookup.leader(groups.store.index_of(group_id))
    if broker is None:
        raise CoordinatorNotAvailable(f"nobody leads the partition that group {group_id!r} lives in")
    if broker.node_id == own:
        return own, *context.listener
    return broker.node_id, broker.host, broker.port


async def _share_coordinator(
    service: BrokerServices, key: str, context: RequestContext
) -> tuple[int, str, int]:
    """Who keeps the state of a share partition, named as `group:topic id:partition`."""
    if service.share_state is None:
        raise CoordinatorNotAvailable("this broker keeps no state of share groups")
    broker = await service.share_state.find_state_leader(key)
    if broker is None or broker.node_id == service.settings.node_id:
        return service.settings.node_id, *context.listener
    return broker.node_id, broker.host, broker.port


async def join_group(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    version = context.api_version
    rebalance_timeout_ms = request.rebalance_timeout_ms if version >= 1 else -1
    join = Join(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=context.client_id or "",
        client_host=f"/{context.client_host}",  # as Kafka has it, and its tools print it
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
        protocol_type=request.protocol_type,
        protocols=tuple(Protocol(each.name, bytes(each.metadata)) for each in request.protocols),
        must_know_member_id=version >= 4,
        can_skip_assignment=version >= 9,
    )
    no_protocol = None if version >= 7 else ""
    try:
        answer = await service.groups.join(request.group_id, join)
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
    sync = Sync(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        generation=request.generation_id,
        assignments={each.member_id: bytes(each.assignment) for each in request.assignments},
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
    )
    try:
        answer = await service.groups.sync(request.group_id, sync)
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "assignment": answer.assignment,
    }


async def heartbeat(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    try:
        service.groups.heartbeat(
            request.group_id, request.member_id, request.group_instance_id, request.generation_id
        )
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {"error_code": 0}


async def leave_group(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    if context.api_version < 3:
        return {"error_code": _leave(service, request.group_id, request.member_id, None)}
    try:
        check_group_id(request.group_id)
        service.groups.store.find(request.group_id)  # whoever is not the coordinator says so for all of them
    except MansioError as error:
        return {"error_code": error.kafka_code}
    return {
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.group_instance_id,
                "error_code": _leave(service, request.group_id, each.member_id, each.group_instance_id),
            }
            for each in request.members
        ]
    }


def _leave(service: BrokerServices, group_id: str, member_id: str, instance_id: str | None) -> int:
    try:
        service.groups.leave(group_id, member_id, instance_id)
    except MansioError as error:
        return error.kafka_code
    return 0


async def describe_groups(service: BrokerServices, request: Struct, context: RequestContext) -> Fields:
    asked = dict.fromkeys(request.groups)  # a name is short, and what is answered of a large group is not
    return {"groups": [_describe(service, each, context.api_version) for each in asked]}


def _describe(service: BrokerServices, group_id: str, version: int) -> Fields:
    try:
        check_group_id(group_id)
        found = service.groups.inspection.describe(group_id)
        if found.state == "Dead" and version >= 6:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
    except MansioError as error:
        failed = {"error_code": error.kafka_code, "error_message": error.message}
        return {"group_id": group_id, "group_state": "Dead", **failed}
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
    try:
        led = service.groups.led_partitions(service.settings.node_id)
        groups = service.groups.inspection.list_groups(request.states_filter, request.types_filter, led=led)
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
    results = []
    for group_id in request.groups_names:
        error_code = 0
        try:
            await service.groups.delete(group_id)
        except MansioError as error:
            error_code = error.kafka_code
        results.append({"group_id": group_id, "error_code": error_code})
    return {"results": results}
