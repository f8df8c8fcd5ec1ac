"""Broker-wide defaults of settings of share groups: static and dynamic, for groups without a value of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.errors import InvalidConfig
from mansio.testing import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from mansio.blocking import Client

WAIT_MS = scaled(20) * 1000
LOCK = "share.record.lock.duration.ms"
LIMIT = "share.delivery.count.limit"
LOCKS = "share.partition.max.record.locks"


def lease_ms(client: Client, group: str) -> int:
    """The duration of the lease of one more record, which is published now."""
    client.publish("t", b"1")
    one = mansio.TopicPartition("t", 0)
    with client.receive("t", group=group, max_records=1, auto_extend=False) as receiver:
        (message,) = receiver.poll(timeout_ms=WAIT_MS)
        found = client.admin.shares.leases(group, [one], ranges_max=1)[one]
        assert found is not None
        message_lease = found.ranges[0].lease_ms
        message.ack()
    return message_lease


def prepared(client: Client) -> None:
    client.admin.create_topic("t", partitions=1)
    client.admin.alter_group_config("own", {LOCK: "20000", "share.auto.offset.reset": "earliest"})
    client.admin.alter_group_config("plain", {"share.auto.offset.reset": "earliest"})


def test_static_defaults_apply_to_groups_without_their_own() -> None:
    with (
        TestBroker(group_share_record_lock_duration_ms=12_000, group_share_delivery_count_limit=3) as broker,
        broker.client() as client,
    ):
        prepared(client)
        assert (lease_ms(client, "plain"), lease_ms(client, "own")) == (12_000, 20_000)
        config = client.admin.describe_config("plain", kind="group")
        assert (config[LOCK].value, config[LOCK].source) == ("12000", "broker file")
        assert (config[LIMIT].value, config[LOCKS].value) == ("3", "2000")


@pytest.mark.parametrize("node_id", [None, 1])
def test_dynamic_defaults_apply_at_once_to_groups_that_are_in_use(node_id: int | None) -> None:
    with TestBroker() as broker, broker.client() as client:
        prepared(client)
        assert (lease_ms(client, "plain"), lease_ms(client, "own")) == (30_000, 20_000)
        client.admin.alter_broker_config(
            node_id, {"group.share.record.lock.duration.ms": "13000", "group.share.delivery.count.limit": "1"}
        )
        assert (lease_ms(client, "plain"), lease_ms(client, "own")) == (13_000, 20_000)
        config = client.admin.describe_config("plain", kind="group")
        assert (config[LOCK].value, config[LIMIT].value) == ("13000", "1")
        assert config[LOCK].source == ("broker" if node_id else "broker default")
        client.publish("t", b"poison")
        with client.receive("t", group="plain", max_records=1) as receiver:
            (message,) = receiver.poll(timeout_ms=WAIT_MS)
            message.retry()
        wait_until(lambda: "dlq.t" in client.admin.list_topics(), 20, "one delivery is the limit")
        client.admin.alter_broker_config(node_id, {"group.share.record.lock.duration.ms": None})
        assert lease_ms(client, "plain") == 30_000


def test_defaults_out_of_range_are_refused() -> None:
    with TestBroker() as broker, broker.client() as client:
        for name, value in (
            ("group.share.record.lock.duration.ms", "999"),
            ("group.share.record.lock.duration.ms", "60001"),
            ("group.share.delivery.count.limit", "0"),
            ("group.share.partition.max.record.locks", "99"),
        ):
            with pytest.raises(InvalidConfig):
                client.admin.alter_broker_config(None, {name: value})
