"""Quota of requests that create and delete partitions: which versions have the error, and the throttle time (KIP-599).

Not obvious: creation by a Metadata request is never refused, as in Kafka: no version of that API has the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.topics.mutation_quota import MutationQuota

STRICT_VERSION_MIN: Final = {ApiKey.CREATE_TOPICS: 6, ApiKey.DELETE_TOPICS: 5, ApiKey.CREATE_PARTITIONS: 3}
"""First version with THROTTLING_QUOTA_EXCEEDED; earlier ones are executed, and the client is throttled afterwards."""


def mutation_quota(service: BrokerServices, context: RequestContext) -> MutationQuota | None:
    """Return the quota of the request, or None: of a client without quota, or of a broker."""
    if context.peer is not None:
        return None
    version_min = STRICT_VERSION_MIN.get(ApiKey(context.api_key))
    return service.quotas.mutation_quota(
        context.session.user,
        context.client_id,
        is_strict=version_min is not None and context.api_version >= version_min,
    )


def throttle_mutations(service: BrokerServices, context: RequestContext, quota: MutationQuota | None) -> int:
    """Throttle the client of a request that has ended, if it exceeds the quota; return the throttle time in ms."""
    throttle_ms = service.quotas.record_mutations(quota)
    if throttle_ms:
        context.throttle(throttle_ms)
    return throttle_ms
