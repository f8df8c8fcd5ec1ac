"""The requests of transactions in every version, and the verification by another broker."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.handlers.cluster import api_versions
from mansio.broker.coordinator.transaction.verifier import RoutedVerifier
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.cluster import FinalizedLevel
from mansio.broker.services.transactions.transaction_service import TransactionService
from mansio.errors import ClusterAuthorizationFailed, CoordinatorNotAvailable, RequestTimedOut
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from mansio.wire.query_transactional_ids import task_transactional_id
from support.listeners import served_listener
from unit.broker.transactions_fixtures import CoordinatorRoom

OK, FENCED_EPOCH, INVALID_STATE, FENCED, NOT_FOUND, ABORTABLE = 0, 47, 48, 90, 105, 120
UNKNOWN_TOPIC, UNAUTHORIZED, NOT_ATTEMPTED, BAD_REQUEST, NOT_OFFERED = 3, 31, 55, 42, 53

PEER: Any = SimpleNamespace(node_id=7, broker_epoch=1)

if TYPE_CHECKING:
    from mansio.state.authorization.authorizer import Authorizer


class Authenticator:
    def require_identity(self, peer: Any, node_id: int, broker_epoch: int, host: str) -> Any:
        if peer is None:
            raise ClusterAuthorizationFailed
        return peer


class Server:
    """Calls the handlers with decoded bytes; `room.markers` are the partitions."""

    def __init__(self, room: CoordinatorRoom | None = None, authorizer: Authorizer | None = None) -> None:
        self.room = room or CoordinatorRoom()
        self.room.markers.leaders["__consumer_offsets", 3] = 0
        groups: Any = SimpleNamespace(
            ensure_topic_exists=self.do_nothing, store=SimpleNamespace(partition_for=lambda _: 3)
        )
        transactions = TransactionService(
            self.room.coordinator, groups, self.room.scheduler, self.room.batches, Authorization(authorizer)
        )
        self.service: Any = SimpleNamespace(
            transactions=transactions,
            authenticator=Authenticator(),
            producer_ids=self.room,
            scheduler=self.room.scheduler,
            settings=SimpleNamespace(node_id=0),
        )

    async def do_nothing(self) -> None: ...

    async def answer(self, api_key: int, version: int, fields: dict[str, Any], peer: Any = None) -> Any:
        frame = messages.encode_request(api_key, version, 5, "c", fields)
        start = 15 + (1 if _is_flexible(api_key, version) else 0)
        request = messages.decode_request(api_key, version, frame[start:])
        module, _, function = str(SUPPORTED_APIS[ApiKey(api_key)].handler).partition(".")
        handler = getattr(importlib.import_module(f"mansio.api.kafka.handlers.{module}"), function)
        context = RequestContext(api_key, version, 5, "c", "host", served_listener(port=1, node_id=0), peer)
        found = await handler(self.service, request, context)
        encoded = messages.encode_response(api_key, version, 5, found)
        return messages.decode_response_frame(api_key, version, encoded[4:])[1]

    def ask(self, api_key: int, version: int, peer: Any = None, **fields: Any) -> Any:
        return self.room.run(self.answer(api_key, version, fields, peer))


def _is_flexible(api_key: int, version: int) -> bool:
    from mansio.wire.api_versions import is_flexible

    return is_flexible(api_key, version)


def versions(api_key: ApiKey) -> range:
    return range(SUPPORTED_APIS[api_key].min_version, SUPPORTED_APIS[api_key].max_version + 1)


@pytest.mark.parametrize("version", versions(ApiKey.INIT_PRODUCER_ID))
def test_a_producer_is_initialized_in_each_version(version: int) -> None:
    server = Server()
    found = server.ask(22, version, transactional_id="orders", transaction_timeout_ms=1000)
    assert (found.error_code, found.producer_epoch) == (OK, 0)
    assert server.ask(22, version, transactional_id=None, transaction_timeout_ms=0).error_code == OK
    server.room.begin()
    if version >= 3:
        zombie = server.ask(
            22,
            version,
            transactional_id="orders",
            transaction_timeout_ms=1000,
            producer_id=found.producer_id,
            producer_epoch=0,
        )
        assert zombie.error_code == (FENCED if version >= 4 else FENCED_EPOCH)


def added(
    server: Server, version: int, producer: tuple[int, int], *topics: str, **more: Any
) -> dict[str, int]:
    wanted = [{"name": topic, "partitions": [0]} for topic in topics]
    if version < 4:
        found = server.ask(
            24,
            version,
            v3_and_below_transactional_id="orders",
            v3_and_below_producer_id=producer[0],
            v3_and_below_producer_epoch=producer[1],
            v3_and_below_topics=wanted,
        ).results_by_topic_v3_and_below
    else:
        asked = {
            "transactional_id": "orders",
            "producer_id": producer[0],
            "producer_epoch": producer[1],
            "topics": wanted,
            **more,
        }
        response = server.ask(24, version, PEER, transactions=[asked])
        assert response.error_code == OK
        found = response.results_by_transaction[0].topic_results
    return {topic.name: topic.results_by_partition[0].partition_error_code for topic in found}


@pytest.mark.parametrize("version", versions(ApiKey.ADD_PARTITIONS_TO_TXN))
def test_partitions_are_added_in_each_version(version: int) -> None:
    server = Server()
    producer = server.room.begin()
    assert added(server, version, producer, "a", "z") == {"a": NOT_ATTEMPTED, "z": UNKNOWN_TOPIC}
    assert added(server, version, producer, "a", "b") == {"a": OK, "b": OK}
    assert server.room.state() == "Ongoing"
    server.room.begin()
    fenced = FENCED if version >= 2 else FENCED_EPOCH
    assert added(server, version, producer, "a") == {"a": fenced}


@pytest.mark.parametrize(("version", "code"), [(4, INVALID_STATE), (5, ABORTABLE)])
def test_a_verified_partition_is_not_added(version: int, code: int) -> None:
    server = Server()
    producer = server.room.begin()
    server.room.add(producer, ("a", 0))
    assert added(server, version, producer, "a", "b", verify_only=True) == {"a": OK, "b": code}


@pytest.mark.parametrize("version", [4, 5])
def test_only_brokers_send_batched_requests(version: int) -> None:
    assert Server().ask(24, version, transactions=[]).error_code == UNAUTHORIZED


@pytest.mark.parametrize("version", versions(ApiKey.ADD_OFFSETS_TO_TXN))
def test_the_partition_of_a_group_is_added_in_each_version(version: int) -> None:
    server = Server()
    producer_id, epoch = server.room.begin()
    named = {"transactional_id": "orders", "producer_id": producer_id, "group_id": "g"}
    assert server.ask(25, version, producer_epoch=epoch, **named).error_code == OK
    partitions = server.room.coordinator.store.entries["orders"].transaction.partitions
    assert partitions == {("__consumer_offsets", 3)}
    fenced = FENCED if version >= 2 else FENCED_EPOCH
    assert server.ask(25, version, producer_epoch=epoch + 1, **named).error_code == fenced


@pytest.mark.parametrize("version", versions(ApiKey.END_TXN))
def test_a_transaction_ends_in_each_version(version: int) -> None:
    server = Server()
    producer_id, epoch = server.room.begin()
    server.room.add((producer_id, epoch))
    named = {"transactional_id": "orders", "producer_id": producer_id, "committed": True}
    found = server.ask(26, version, producer_epoch=epoch, **named)
    assert found.error_code == OK
    if version >= 5:
        assert (found.producer_id, found.producer_epoch) == (producer_id, epoch + 1)
    server.room.run_for()
    assert server.room.state() == "CompleteCommit"
    fenced = FENCED if version >= 2 else FENCED_EPOCH
    assert server.ask(26, version, producer_epoch=epoch + 9, **named).error_code == fenced


def test_transactions_are_described_and_listed() -> None:
    server = Server()
    producer_id, epoch = server.room.begin("orders", timeout_ms=900)
    server.room.add((producer_id, epoch))
    server.room.begin("other")
    states = server.ask(65, 0, transactional_ids=["orders", "none", "orders"]).transaction_states
    assert [(each.transactional_id, each.error_code) for each in states] == [
        ("orders", OK),
        ("none", NOT_FOUND),
    ]
    found = states[0]
    assert (found.transaction_state, found.transaction_timeout_ms) == ("Ongoing", 900)
    assert [(each.topic, list(each.partitions)) for each in found.topics] == [("a", [0]), ("b", [0])]

    def listed(version: int = 0, **filters: Any) -> list[str]:
        response = server.ask(66, version, **{"state_filters": [], "producer_id_filters": [], **filters})
        return [each.transactional_id for each in response.transaction_states]

    assert listed() == ["orders", "other"]
    assert listed(state_filters=["Ongoing"]) == ["orders"]
    assert listed(producer_id_filters=[producer_id]) == ["orders"]
    server.room.run_for(500)
    assert listed(1, duration_filter=400) == ["orders"]
    assert listed(1, duration_filter=600) == []
    assert listed(2, duration_filter=-1, transactional_id_pattern="o.*r") == ["other"]
    unknown = server.ask(66, 0, state_filters=["Odd", "Empty"], producer_id_filters=[])
    assert list(unknown.unknown_state_filters) == ["Odd"]


@pytest.mark.parametrize("version", versions(ApiKey.FIND_COORDINATOR))
def test_the_coordinator_of_a_transactional_id_is_found(version: int) -> None:
    server = Server()
    if version == 0:
        return  # it has no key type
    key = {"key": "orders"} if version < 4 else {"coordinator_keys": ["orders"]}
    found = server.ask(10, version, key_type=1, **key)
    found = found if version < 4 else found.coordinators[0]
    assert (found.error_code, found.node_id, found.port) == (OK, 0, 1)


def test_the_transaction_version_is_announced() -> None:
    context: Any = None
    request: Any = None
    description = SimpleNamespace(feature_level=lambda: FinalizedLevel(2, 0))
    service: Any = SimpleNamespace(cluster_description=description)
    found = Server().room.run(api_versions(service, request, context))
    assert {"name": "transaction.version", "min_version_level": 2, "max_version_level": 2} in found[
        "finalized_features"
    ]


class Peers:
    """Requests to the coordinator, which is another broker."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_down = False
        self.requests = 0

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        self.requests += 1
        if self.is_down:
            raise RequestTimedOut
        client_id_bytes = int.from_bytes(request[12:14], "big")
        asked = messages.decode_request(24, 5, request[14 + client_id_bytes + 1 :])
        handler = importlib.import_module("mansio.api.kafka.handlers.transactions").add_partitions_to_txn
        context = RequestContext(24, 5, 5, "c", "host", served_listener(port=1, node_id=0), PEER)
        found = await handler(self.server.service, asked, context)
        return messages.encode_response(24, 5, 5, found)[4:]


def test_another_broker_is_asked_to_verify_and_to_add() -> None:
    server = Server()
    producer = server.room.begin()
    server.room.add(producer, ("a", 0))
    lookup: Any = SimpleNamespace(partition_count=lambda: 2, leader=lambda _: SimpleNamespace(node_id=7))
    peers = Peers(server)
    local: Any = None
    verifier = RoutedVerifier(local, node_id=1, scheduler=server.room.scheduler, lookup=lookup, peers=peers)

    def verify(*partitions: tuple[str, int], adds: bool = False) -> list[int]:
        found = server.room.run(verifier.verify("orders", *producer, partitions, adds=adds))
        return [0 if error is None else error.kafka_code for error in found]

    assert verify(("a", 0), ("b", 0)) == [OK, ABORTABLE]
    assert verify(("b", 0), adds=True) == [OK]
    assert verify(("a", 0), ("b", 0)) == [OK, OK]
    both = [
        server.room.scheduler.spawn(verifier.verify("orders", *producer, [("a", 0)], adds=False), name="v")
        for _ in range(3)
    ]
    server.room.run_for()
    assert [each.result() for each in both] == [[None]] * 3  # type: ignore[attr-defined]
    peers.is_down = True
    assert verify(("a", 0)) == [CoordinatorNotAvailable.kafka_code]


def test_the_local_coordinator_is_asked_without_a_request() -> None:
    room = CoordinatorRoom()
    producer = room.begin()
    verifier = RoutedVerifier(room.coordinator, node_id=0, scheduler=room.scheduler)
    assert room.run(verifier.verify("orders", *producer, [("a", 0)], adds=True)) == [None]
    assert room.run(verifier.verify("orders", *producer, [("a", 0)], adds=False)) == [None]
    found = room.run(verifier.verify("orders", producer[0], 9, [("a", 0)], adds=False))
    assert [error.kafka_code for error in found] == [FENCED]


# -- PrepareTransaction and CommitBatch --------


def task_fields(name: str, producer: tuple[int, int]) -> dict[str, Any]:
    return {"transactional_id": name, "producer_id": producer[0], "producer_epoch": producer[1]}


TASK = task_transactional_id("q", 0, 0)


def test_a_transaction_is_prepared_and_its_batch_committed() -> None:
    server = Server()
    producer = server.room.begin(TASK)
    server.room.add(producer, name=TASK)
    named = task_fields(TASK, producer)
    for _ in range(2):
        assert server.ask(20_112, 0, **named).error_code == OK
    [described] = server.ask(65, 0, transactional_ids=[TASK]).transaction_states
    assert (described.transaction_state, described.transaction_timeout_ms) == ("Ongoing", 2**31 - 1)
    for _ in range(2):
        answer = server.ask(
            20_113, 0, query_id="q", batch_id=0, committed=True, transactions=[named], abandoned=[]
        )
        assert answer.error_code == OK
    server.room.run_for()
    assert server.room.state(TASK) == "CompleteCommit"
    [described] = server.ask(65, 0, transactional_ids=[TASK]).transaction_states
    assert described.transaction_timeout_ms == 60_000


def test_a_batch_is_aborted() -> None:
    server = Server()
    producer = server.room.begin(TASK)
    server.room.add(producer, name=TASK)
    named = task_fields(TASK, producer)
    answer = server.ask(
        20_113, 0, query_id="q", batch_id=0, committed=False, transactions=[], abandoned=[named]
    )
    assert answer.error_code == OK
    server.room.run_for()
    assert server.room.state(TASK) == "CompleteAbort"


def test_refused_preparations_and_commits_say_why() -> None:
    server = Server()
    producer = server.room.begin(TASK)
    named = task_fields(TASK, producer)
    answer = server.ask(20_112, 0, **named)
    assert (answer.error_code, answer.error_message) == (
        INVALID_STATE,
        "the transaction is in state Empty",
    )
    answer = server.ask(20_112, 0, **task_fields(TASK, (producer[0], 7)))
    assert answer.error_code == FENCED
    answer = server.ask(
        20_113, 0, query_id="q", batch_id=3, committed=True, transactions=[named], abandoned=[]
    )
    assert answer.error_code == INVALID_STATE
    assert "batch 3 is not committed" in answer.error_message
    answer = server.ask(20_113, 0, query_id="", batch_id=3, committed=True, transactions=[], abandoned=[])
    assert answer.error_code == BAD_REQUEST
