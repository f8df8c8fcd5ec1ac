"""Bodies of results have the members of their models, in this order, whatever else the values of the client have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pydantic_core import to_json

from mansio.api.http.v1 import cluster, delays, groups, transactions
from mansio.client.admin.cluster import BrokerStatus, ClusterStatus
from mansio.client.admin.groups import GroupListing, GroupMember
from mansio.client.admin.schedules import Schedule
from mansio.client.admin.shares import LeasedRange, ShareMember
from mansio.client.admin.transactions import (
    HangingTransaction,
    PartitionProducer,
    TransactionDescription,
    TransactionListing,
)
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from mansio.api.http.v1.operation import Result

PARTITIONS = (TopicPartition("t", 1), TopicPartition("t", 2))
DAY = datetime(2026, 1, 31, 9, 30, 0, 1500, tzinfo=UTC)
SCHEDULE = {
    "topic": "t",
    "partition": 3,
    "name": "n",
    "id": UUID(int=1),
    "timezone": "UTC",
    "catch_up": "last",
    "key": b"\xff",
    "value": b"v",
    "value_size": 1,
    "headers": (),
    "created": DAY,
    "is_paused": False,
    "firings": 7,
}
SCHEDULED = b'"timezone":"UTC","catch_up":"last","is_paused":false,"created":"2026-01-31T09:30:00.001Z"'

CASES: list[tuple[type[Result], Any, bytes]] = [
    (
        cluster.Cluster,
        ClusterStatus(
            "c",
            -1,
            (BrokerStatus(1, "a", 9092, None, True, False), BrokerStatus(2, "b", 1, "r", False, True)),
        ),
        b'{"cluster_id":"c","controller_id":-1,"brokers":[{"node_id":1,"host":"a","port":9092,"rack":null,'
        b'"is_controller":true,"is_fenced":false},{"node_id":2,"host":"b","port":1,"rack":"r",'
        b'"is_controller":false,"is_fenced":true}]}',
    ),
    (
        groups.GroupPage,
        {
            "groups": [GroupListing("g", "consumer", "Stable", "classic")],
            "is_complete": False,
            "next_cursor": "Zw==",
        },
        b'{"groups":[{"group":"g","type":"classic","state":"Stable","protocol_type":"consumer"}],'
        b'"is_complete":false,"next_cursor":"Zw=="}',
    ),
    (
        groups.GroupState,
        {
            "group": "g",
            "type": "share",
            "state": "Stable",
            "members": (
                ShareMember("m", "c", "/h", ("t",), PARTITIONS),
                GroupMember("n", "i", "d", "/i", (), 5, topics=("t",)),
            ),
        },
        b'{"group":"g","type":"share","state":"Stable","members":[{"member_id":"m","client_id":"c",'
        b'"client_host":"/h","partitions":[["t",1],["t",2]]},{"member_id":"n","client_id":"d",'
        b'"client_host":"/i","partitions":[]}]}',
    ),
    (
        groups.LeasedRange,
        LeasedRange(1, 2, "m", 3, 4, 5),
        b'{"first_offset":1,"last_offset":2,"member_id":"m","delivery_count":3,"age_ms":4,"lease_ms":5}',
    ),
    (
        transactions.TransactionPage,
        {
            "transactions": [TransactionListing("x", 1 << 62, "Ongoing", 2)],
            "is_complete": True,
            "next_cursor": None,
        },
        b'{"transactions":[{"transactional_id":"x","producer_id":4611686018427387904,"state":"Ongoing",'
        b'"coordinator_id":2}],"is_complete":true,"next_cursor":null}',
    ),
    (
        transactions.TransactionState,
        TransactionDescription("x", 1, "Empty", 2, 3, 4, None, PARTITIONS),
        b'{"transactional_id":"x","coordinator_id":1,"state":"Empty","producer_id":2,"producer_epoch":3,'
        b'"timeout_ms":4,"started_ms":null,"partitions":[{"topic":"t","partition":1},'
        b'{"topic":"t","partition":2}]}',
    ),
    (
        transactions.Producers,
        {"producers": [PartitionProducer(1, 2, None, 3, None, 4)]},
        b'{"producers":[{"producer_id":1,"producer_epoch":2,"last_sequence":null,"last_timestamp_ms":3,'
        b'"coordinator_epoch":null,"transaction_start_offset":4}]}',
    ),
    (
        transactions.HangingTransactions,
        {"transactions": [HangingTransaction("t", 1, 2, 3, None, 4, 5, 6, None)]},
        b'{"transactions":[{"topic":"t","partition":1,"producer_id":2,"producer_epoch":3,'
        b'"coordinator_epoch":null,"start_offset":4,"last_timestamp_ms":5,"open_ms":6,'
        b'"transactional_id":null}]}',
    ),
    (
        delays.Schedule,
        Schedule(**SCHEDULE, cron="* * * * *", every=None, next_times=(), error="no leader"),  # type: ignore[arg-type]
        b'{"name":"n","topic":"t","partition":3,"cron":"* * * * *","every_ms":null,%b,"next_times":[],'
        b'"firings":7,"error":"no leader"}' % SCHEDULED,
    ),
    (
        delays.Schedules,
        {
            "schedules": [
                Schedule(**SCHEDULE, cron=None, every=timedelta(seconds=90), next_times=(DAY, DAY))  # type: ignore[arg-type]
            ]
        },
        b'{"schedules":[{"name":"n","topic":"t","partition":3,"cron":null,"every_ms":90000,%b,"next_times":'
        b'["2026-01-31T09:30:00.001Z","2026-01-31T09:30:00.001Z"],"firings":7,"error":null}]}' % SCHEDULED,
    ),
]


@pytest.mark.parametrize(("model", "value", "body"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_body_has_exactly_the_members_of_its_model(model: type[Result], value: Any, body: bytes) -> None:
    assert to_json(model.model_validate(value), by_alias=True) == body
