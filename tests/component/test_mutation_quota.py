"""`controller_mutation_rate` (KIP-599) over real sockets: partitions that a client creates and deletes per second."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from component.test_caller_identity import create_over_grpc, create_over_http, create_over_sqs
from mansio.client.admin.quotas import DEFAULT_ENTITY
from mansio.errors import InvalidRequest
from mansio.testing.broker import TestBroker
from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.raw_peer import CLIENT_ID, RawPeer
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import mansio

THROTTLING_QUOTA_EXCEEDED = 89
RATE = "controller_mutation_rate"
PARTITIONS = 101
"""Of one creation: with a rate of 1 and a burst of 0.1 s, a debt of 100 s."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(quota_burst_ms=100, auto_create_topics_enable=True, num_partitions=PARTITIONS) as started:
        yield started


@pytest.fixture
def client(broker: TestBroker) -> Iterator[mansio.blocking.Client]:
    """An administrator without quotas; no other test's quota is in force."""
    client = broker.client(client_id="administrator")
    for quota in client.admin.quotas.list():
        client.admin.quotas.delete(user=quota.user, client_id=quota.client_id)
    yield client
    client.close()


@pytest.fixture
def name() -> str:
    return f"topic{next(_numbers)}"


def peer_of(broker: TestBroker) -> RawPeer:
    return RawPeer(int(broker.bootstrap_servers.rpartition(":")[2]))


def create(
    broker: TestBroker, version: int, *names: str, partitions: int = PARTITIONS, validate_only: bool = False
) -> Any:
    """The response to one request of a client with a connection of its own, which no earlier response throttles."""
    topics = [
        {"name": each, "num_partitions": partitions, "replication_factor": 1, "configs": []} for each in names
    ]
    fields = {"topics": topics, "timeout_ms": 10_000, "validate_only": validate_only}
    with peer_of(broker) as peer:
        return peer.call(ApiKey.CREATE_TOPICS, version, fields)


def delete(broker: TestBroker, version: int, name: str) -> Any:
    fields = {"topics": [{"name": name, "topic_id": None}], "topic_names": [name], "timeout_ms": 10_000}
    with peer_of(broker) as peer:
        return peer.call(ApiKey.DELETE_TOPICS, version, fields)


def grow(broker: TestBroker, version: int, name: str, count: int) -> Any:
    topics = [{"name": name, "count": count, "assignments": None}]
    fields = {"topics": topics, "timeout_ms": 10_000, "validate_only": False}
    with peer_of(broker) as peer:
        return peer.call(ApiKey.CREATE_PARTITIONS, version, fields)


def codes(response: Any, items: str) -> list[int]:
    return [each.error_code for each in getattr(response, items)]


@pytest.mark.row("A8")
def test_changes_beyond_the_quota_are_refused_until_it_is_paid(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.create_topic(f"{name}-old", partitions=1)
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    first = create(broker, 7, name, f"{name}-2")
    assert codes(first, "topics") == [0, THROTTLING_QUOTA_EXCEEDED], "what the rest of the quota allows"
    assert RATE in first.topics[1].error_message
    assert 0 < first.throttle_time_ms <= 1000 * PARTITIONS
    for refused, items in (
        (create(broker, 6, f"{name}-3"), "topics"),
        (delete(broker, 5, f"{name}-old"), "responses"),
        (grow(broker, 3, f"{name}-old", 2), "results"),
    ):
        assert codes(refused, items) == [THROTTLING_QUOTA_EXCEEDED]
        assert refused.throttle_time_ms > 0
    assert {each for each in client.admin.list_topics() if each.startswith(name)} == {
        name,
        f"{name}-old",
    }
    broker.clock.advance(seconds=PARTITIONS)
    paid = delete(broker, 6, f"{name}-old")
    assert (codes(paid, "responses"), paid.throttle_time_ms) == ([0], 0)


def test_old_versions_of_requests_are_executed_and_then_throttled(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    created = create(broker, 5, name, f"{name}-2")
    grown = grow(broker, 2, name, PARTITIONS + 10)
    deleted = delete(broker, 4, name)
    assert (codes(created, "topics"), codes(grown, "results"), codes(deleted, "responses")) == (
        [0, 0],
        [0],
        [0],
    )
    times = [each.throttle_time_ms for each in (created, grown, deleted)]
    assert 100_000 * 2 - 10_000 < times[0] < times[1] < times[2], times


def test_a_topic_created_on_first_use_counts(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    fields = {"topics": [{"name": name, "topic_id": None}], "allow_auto_topic_creation": True}
    with peer_of(broker) as peer:
        found = peer.call(ApiKey.METADATA, 12, fields)
    assert (found.topics[0].error_code, len(found.topics[0].partitions)) == (0, PARTITIONS)
    assert found.throttle_time_ms > 0
    assert codes(create(broker, 7, f"{name}-2"), "topics") == [THROTTLING_QUOTA_EXCEEDED]


def test_validation_and_failed_changes_cost_nothing(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    for _ in range(3):
        assert codes(create(broker, 7, name, validate_only=True), "topics") == [0]
        assert codes(create(broker, 7, "not a name"), "topics") == [17]
    assert codes(create(broker, 7, name, partitions=1), "topics") == [0]


def test_credentials_count_in_the_quota(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    assert codes(create(broker, 7, name), "topics") == [0]
    with peer_of(broker) as peer:
        fields = {"user": "alice", "description": "", "valid_ms": -1}
        created = peer.call(ApiKey.CREATE_API_KEY, 0, fields)
    assert created.error_code == THROTTLING_QUOTA_EXCEEDED


def test_the_connection_of_a_client_over_its_quota_is_not_read_meanwhile(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id=CLIENT_ID, values={RATE: 1})
    topics = [{"name": name, "num_partitions": 2, "replication_factor": 1, "configs": []}]
    with peer_of(broker) as peer:
        begun = time.monotonic()
        created = peer.call(ApiKey.CREATE_TOPICS, 5, {"topics": topics, "timeout_ms": 10_000})
        assert 0 < created.throttle_time_ms <= 1900
        peer.call(ApiKey.API_VERSIONS, 0)
        # The broker counts from the creation, and clocks and timers are not more exact than 20 ms.
        assert time.monotonic() - begun > created.throttle_time_ms / 1000 - 0.02


@pytest.mark.parametrize(
    ("entity", "is_limited"),
    [
        ({"user": "ANONYMOUS"}, True),
        ({"user": DEFAULT_ENTITY}, True),
        ({"user": "ANONYMOUS", "client_id": CLIENT_ID}, True),
        ({"client_id": DEFAULT_ENTITY}, True),
        ({"user": "somebody else"}, False),
        ({"client_id": "another client"}, False),
    ],
)
def test_the_quota_applies_to_the_entity_for_which_it_is_set(
    broker: TestBroker, client: mansio.blocking.Client, name: str, entity: dict[str, Any], *, is_limited: bool
) -> None:
    client.admin.quotas.set(**entity, values={RATE: 0.01})
    assert codes(create(broker, 7, name, partitions=2), "topics") == [0]
    wanted = THROTTLING_QUOTA_EXCEEDED if is_limited else 0
    assert codes(create(broker, 7, f"{name}-2", partitions=2), "topics") == [wanted]


def test_the_most_specific_quota_applies(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(user=DEFAULT_ENTITY, values={RATE: 0.5})
    client.admin.quotas.set(user="ANONYMOUS", client_id=CLIENT_ID, values={RATE: 1e9})
    for number in range(3):
        assert codes(create(broker, 7, f"{name}-{number}", partitions=2), "topics") == [0]
    client.admin.quotas.set(user="ANONYMOUS", client_id=CLIENT_ID, values={RATE: None})
    assert codes(create(broker, 7, f"{name}-a", f"{name}-b"), "topics") == [0, THROTTLING_QUOTA_EXCEEDED]


@pytest.mark.parametrize("make", smoke_first(create_over_http, create_over_grpc, create_over_sqs))
def test_topics_created_over_other_protocols_have_the_same_limit(
    broker: TestBroker,
    client: mansio.blocking.Client,
    name: str,
    make: Callable[[TestBroker, str, str], None],
) -> None:
    me = f"client{name}"
    client.admin.quotas.set(client_id=me, values={RATE: 1})
    make(broker, f"{name}-1", me)
    counters = broker._running().service.quotas.counters
    before = counters.mutation_throttled
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make, broker, f"{name}-2", me)
        wait_until(lambda: counters.mutation_throttled > before)
        assert f"{name}-2" not in client.admin.list_topics()
        broker.clock.advance(seconds=PARTITIONS)
        waiting.result(scaled(30))


def test_a_client_tries_again_after_the_throttle_time(
    broker: TestBroker, client: mansio.blocking.Client, name: str
) -> None:
    client.admin.quotas.set(client_id="patient", values={RATE: 2})
    limited = broker.client(client_id="patient")
    limited.admin.create_topic(name, partitions=2)
    limited.admin.create_topic(f"{name}-2", partitions=2)
    limited.close()
    text = httpx.get(f"{broker.http_url}/metrics").text
    assert 'mansio_throttled_requests_total{api="controller_mutation"}' in text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
def test_a_rate_that_could_not_be_enforced_is_refused(client: mansio.blocking.Client, value: float) -> None:
    with pytest.raises(InvalidRequest, match="partitions per second"):
        client.admin.quotas.set(client_id="a", values={RATE: value})


def test_the_quota_of_changes_leaves_the_fast_path_of_produce(
    broker: TestBroker, client: mansio.blocking.Client
) -> None:
    client.admin.quotas.set(client_id=DEFAULT_ENTITY, values={RATE: 0.25})
    assert broker._running().service.quotas.active is None
