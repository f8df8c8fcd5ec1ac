"""The list of requests that only brokers send agrees with the table of APIs, and each has a forged request in the
tests."""

from __future__ import annotations

from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from support.forged_requests import FORGERIES, INTER_BROKER


def test_every_request_of_brokers_is_forged_by_a_test() -> None:
    """A new one has to be added to `FORGERIES`, which the tests over sockets send."""
    assert set(FORGERIES) == set(INTER_BROKER)
    assert {api.key for api in SUPPORTED_APIS.values() if api.brokers_only} < set(INTER_BROKER)
    assert {ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH} < set(INTER_BROKER)


def test_every_request_of_brokers_is_marked_in_the_compatibility_document() -> None:
    assert all("CLUSTER_AUTHORIZATION_FAILED" in SUPPORTED_APIS[key].note for key in INTER_BROKER)
