"""Who has no right for a transactional id learns and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.errors import (
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    InvalidRequest,
    OperationNotAttempted,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.state.authorization.authorizer import Authorizer
from mansio.state.transactions.batch_decision import TaskTransaction
from mansio.wire.query_transactional_ids import task_transactional_id, transactional_id_prefix
from support.authorization import ALICE, GROUP, PEER, TOPIC, TRANSACTIONAL_ID, acl
from unit.broker.test_transaction_handlers import Server

ALICE_WRITES = ("User:alice", WILDCARD, Operation.WRITE, Permission.ALLOW)


class Room:
    """A transaction coordinator whose authorizer has these ACLs of alice."""

    def __init__(self, *acls: Acl) -> None:
        self.authorizer = Authorizer()
        for each in acls:
            self.authorizer.add(each)
        self.server = Server(authorizer=self.authorizer)
        self.service = self.server.service.transactions

    def run(self, work: Any) -> Any:
        return self.server.room.run(work)

    def begin(self, transactional_id: str = "x") -> tuple[int, int]:
        """Begin a transaction with the topics a and b."""
        producer = self.run(self.service.init_producer_id(transactional_id, 60_000, caller=PEER))
        self.run(self.service.add_partitions(transactional_id, *producer, [("a", 0), ("b", 0)], caller=PEER))
        return producer

    def state(self) -> str:
        return self.run(self.service.describe("x", caller=PEER)).state


METHODS: dict[str, Any] = {
    "find_coordinator": lambda service, _: service.find_coordinator("x", caller=ALICE),
    "init": lambda service, _: service.init_producer_id("x", 60_000, caller=ALICE),
    "add_partitions": lambda service, producer: service.add_partitions(
        "x", *producer, [("a", 0)], caller=ALICE
    ),
    "add_offsets": lambda service, producer: service.add_offsets("x", *producer, "g", caller=ALICE),
    "end": lambda service, producer: service.end(
        "x", *producer, is_commit=True, bumps_epoch=False, caller=ALICE
    ),
    "prepare": lambda service, producer: service.prepare("x", *producer, caller=ALICE),
    "describe": lambda service, _: service.describe("x", caller=ALICE),
    "commit_batch": lambda service, producer: service.commit_batch(
        "q", 1, [TaskTransaction("x", *producer)], is_commit=True, caller=ALICE
    ),
    "abandon": lambda service, producer: service.commit_batch(
        "q", 1, [], [TaskTransaction("x", *producer)], is_commit=False, caller=ALICE
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_without_the_right_for_the_id_nothing_is_changed(name: str) -> None:
    room = Room(
        acl(TRANSACTIONAL_ID, "y", Operation.ALL),
        acl(TOPIC, "a", Operation.ALL),
        acl(GROUP, "g", Operation.ALL),
    )
    if name not in ("find_coordinator", "describe"):
        room.authorizer.add(acl(TRANSACTIONAL_ID, "x", Operation.DESCRIBE))
    producer = room.begin()
    with pytest.raises(TransactionalIdAuthorizationFailed):
        room.run(METHODS[name](room.service, producer))
    assert room.state() == "Ongoing"
    unknown = Room()
    with pytest.raises(TransactionalIdAuthorizationFailed):
        unknown.run(METHODS[name](unknown.service, (1, 0)))


def of_queries(prefix: str) -> Acl:
    """WRITE for all transactional ids with a prefix."""
    return acl(TRANSACTIONAL_ID, prefix, Operation.WRITE)._replace(pattern_type=PatternType.PREFIXED)


def test_the_right_for_the_ids_of_its_tasks_is_enough_for_a_query() -> None:
    room = Room(of_queries("mansio-spark:"), acl(TOPIC, "a", Operation.WRITE))
    assert room.run(room.service.find_coordinator("q", caller=ALICE)) is None
    name = task_transactional_id("q", 0, 0)
    producer = room.run(room.service.init_producer_id(name, 60_000, caller=ALICE))
    assert room.run(room.service.add_partitions(name, *producer, [("a", 0)], caller=ALICE)) == [None]
    batch = [TaskTransaction(name, *producer)]
    room.run(room.service.commit_batch("q", 1, batch, is_commit=True, caller=ALICE))
    assert room.run(room.service.describe(name, caller=ALICE)).state != "Ongoing"


def test_the_decision_about_a_batch_needs_the_right_for_its_query() -> None:
    mine, other = task_transactional_id("mine", 0, 0), task_transactional_id("other", 0, 0)
    room = Room(Acl(TRANSACTIONAL_ID, PatternType.PREFIXED, transactional_id_prefix("mine"), *ALICE_WRITES))
    producer = room.begin(mine)
    room.run(room.service.prepare(mine, *producer, caller=PEER))
    named = [TaskTransaction(mine, *producer)]
    decisions = room.service._coordinator.store.decisions.entries

    def commit(query_id: str, batch_id: int, transactions: list[TaskTransaction], **more: Any) -> None:
        room.run(
            room.service.commit_batch(query_id, batch_id, transactions, is_commit=True, caller=ALICE, **more)
        )

    for transactions in ([], named):
        with pytest.raises(TransactionalIdAuthorizationFailed):
            commit("other", 10**12, transactions)
    with pytest.raises(TransactionalIdAuthorizationFailed):
        commit("mine", 1, [TaskTransaction(other, *producer)])
    with pytest.raises(InvalidRequest, match="names no transaction"):
        commit("mine", 1, [])
    room.authorizer.add(acl(TRANSACTIONAL_ID, "x", Operation.WRITE))
    for where in ({}, {"abandoned": [TaskTransaction("x", *producer)]}):
        with pytest.raises(InvalidRequest, match="is not a transactional id of the query"):
            commit("mine", 1, [] if where else [TaskTransaction("x", *producer)], **where)
    assert not decisions
    commit("mine", 1, named)
    assert set(decisions) == {"mine"}


def test_with_the_right_a_transaction_is_initialized_and_ended() -> None:
    room = Room(acl(TRANSACTIONAL_ID, "x", Operation.WRITE), acl(TOPIC, "a", Operation.WRITE))
    producer = room.run(room.service.init_producer_id("x", 60_000, caller=ALICE))
    assert room.run(room.service.add_partitions("x", *producer, [("a", 0)], caller=ALICE)) == [None]
    room.run(room.service.end("x", *producer, is_commit=True, bumps_epoch=False, caller=ALICE))
    assert room.state() != "Ongoing"


def test_a_partition_of_another_topic_refuses_all_partitions() -> None:
    room = Room(acl(TRANSACTIONAL_ID, "x", Operation.WRITE), acl(TOPIC, "a", Operation.WRITE))
    producer = room.run(room.service.init_producer_id("x", 60_000, caller=ALICE))
    errors = room.run(
        room.service.add_partitions("x", *producer, [("a", 0), ("b", 0), ("absent", 0)], caller=ALICE)
    )
    assert [type(error) for error in errors] == [
        OperationNotAttempted,
        TopicAuthorizationFailed,
        TopicAuthorizationFailed,
    ]
    assert room.state() == "Empty"


def test_offsets_of_a_group_need_the_group() -> None:
    room = Room(acl(TRANSACTIONAL_ID, "x", Operation.WRITE))
    producer = room.begin()
    with pytest.raises(GroupAuthorizationFailed):
        room.run(room.service.add_offsets("x", *producer, "g", caller=ALICE))
    room.authorizer.add(acl(GROUP, "g", Operation.READ))
    room.run(room.service.add_offsets("x", *producer, "g", caller=ALICE))


def test_an_idempotent_producer_needs_the_cluster_or_any_topic() -> None:
    room = Room(acl(TOPIC, "a", Operation.READ), acl(TRANSACTIONAL_ID, "x", Operation.WRITE))
    with pytest.raises(ClusterAuthorizationFailed):
        room.run(room.service.new_producer_id(caller=ALICE))
    room.authorizer.add(acl(TOPIC, "a", Operation.WRITE))
    assert room.run(room.service.new_producer_id(caller=ALICE)) >= 0
    cluster = Room(acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.IDEMPOTENT_WRITE))
    assert cluster.run(cluster.service.new_producer_id(caller=ALICE)) >= 0


def test_unseen_topics_are_left_out_of_a_description() -> None:
    room = Room(acl(TRANSACTIONAL_ID, "x", Operation.DESCRIBE), acl(TOPIC, "b", Operation.DESCRIBE))
    room.begin()
    assert room.run(room.service.describe("x", caller=ALICE)).partitions == (("b", 0),)
    assert room.run(room.service.describe("x", caller=PEER)).partitions == (("a", 0), ("b", 0))


def test_unseen_ids_are_left_out_of_a_list() -> None:
    room = Room(acl(TRANSACTIONAL_ID, "x", Operation.DESCRIBE))
    room.begin("x")
    room.begin("y")
    assert [each.transactional_id for each in room.service.list_transactions(caller=ALICE)] == ["x"]
    assert {each.transactional_id for each in room.service.list_transactions(caller=PEER)} == {"x", "y"}
