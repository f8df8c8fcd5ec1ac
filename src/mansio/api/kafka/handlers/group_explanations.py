"""ExplainGroup (20126) and CollectGroupFacts (20127), APIs of Mansio about what keeps a group from going on. Their
fields are defined in `mansio.wire.apis.mansio_apis`.

Behavior: the coordinator of a group answers ExplainGroup, after it has asked each other broker once with
CollectGroupFacts. Only an authenticated broker of the cluster may send that; rights are asked for by the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.fact_requests import read_asked_topics, response_fields

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.blockage.findings import Finding
    from mansio.wire.codec.messages import Struct


async def explain_group(service: BrokerServices, request: Struct, context: RequestContext) -> dict[str, Any]:
    """Return what keeps a group from going on."""
    found = await service.explanations.explain(
        request.group_id, sample_ms=request.sample_ms, caller=context.caller
    )
    return {
        "group_type": found.group_type,
        "state": found.state,
        "status": found.status,
        "summary": found.summary,
        "lag": found.lag,
        "done": found.done,
        "sample_ms": found.sample_ms,
        "members": found.members,
        "findings": [_finding_fields(each) for each in found.findings],
        "more_findings": found.more_findings,
        "hidden_topics": found.hidden_topics,
        "silent_brokers": found.silent_brokers,
    }


def _finding_fields(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "impact": finding.impact,
        "is_certain": finding.is_certain,
        "text": finding.text,
        "advice": finding.advice,
        "command": finding.command,
        "records": finding.records,
        "topic": finding.topic,
        "partition": finding.partition,
        "offset": finding.offset,
        "member_id": finding.member_id,
        "client_id": finding.client_id,
        "principal": finding.principal,
        "key": finding.key,
        "transactional_id": finding.transactional_id,
        "producer_id": finding.producer_id,
        "schedule": finding.schedule,
        "evidence": [{"name": name, "value": value} for name, value in finding.evidence],
    }


async def collect_group_facts(
    service: BrokerServices, request: Struct, context: RequestContext
) -> dict[str, Any]:
    """Return what this broker knows of the partitions and clients of a group."""
    service.authenticator.require_identity(
        context.peer, request.node_id, request.broker_epoch, context.client_host
    )
    led, places = read_asked_topics(request.topics)
    found = await service.group_facts.collect(
        request.group_id, led, places, is_share=request.is_share, sample_ms=request.sample_ms
    )
    return response_fields(found)
