"""Leases that outlive a connection: a record that a live member is processing is not delivered to another one."""

from __future__ import annotations

import mansio
from mansio.testing import TestBroker
from support.machine import scaled
from support.waiting import wait_until

GROUP = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
WAIT_MS = scaled(20) * 1000


def prepared(broker: TestBroker) -> mansio.blocking.Client:
    client = broker.client()
    client.admin.create_topic("work", partitions=1)
    client.admin.alter_group_config(
        "g", {**GROUP, "share.record.lock.duration.ms": "30000", "share.delivery.count.limit": "2"}
    )
    client.publish("work", b"1")
    return client


def lag(client: mansio.blocking.Client) -> int:
    one = mansio.TopicPartition("work", 0)
    found = client.admin.shares.leases("g", [one])[one]
    assert found is not None
    return found.lag


def test_a_record_in_work_stays_with_its_member_when_the_connections_end() -> None:
    with TestBroker() as broker, prepared(broker) as client:
        holder = client.receive("work", group="g", max_records=1, keeps_leases=True)
        other = client.receive("work", group="g")
        with holder, other:
            (held,) = holder.poll(timeout_ms=WAIT_MS)
            for number in range(3):
                broker.faults.drop_connections()
                client.publish("work", b"later %d" % number)
                (later,) = other.poll(timeout_ms=WAIT_MS, max_records=1)
                assert later.value == b"later %d" % number
                later.ack()
            held.ack()
            assert held.is_acknowledged
            wait_until(lambda: lag(client) == 0, 20, "all acknowledged")


LEASE_MS = min(int(scaled(3) * 1000), 15_000)
"""A member extends a lease when half of it has passed; a slow machine takes longer to connect again."""


def test_a_kept_lease_is_extended_over_the_next_connection() -> None:
    with TestBroker() as broker, prepared(broker) as client:
        holder = client.receive("work", group="g", max_records=1, keeps_leases=True, lease_ms=LEASE_MS)
        other = client.receive("work", group="g")
        with holder, other:
            (held,) = holder.poll(timeout_ms=WAIT_MS)
            before = held.lease_until
            broker.faults.drop_connections()
            wait_until(lambda: held.lease_until > before, 30, "a renewal")
            client.publish("work", b"later")
            (later,) = other.poll(timeout_ms=WAIT_MS, max_records=1)
            assert later.value == b"later"
            held.ack()


def test_the_records_of_a_member_that_does_not_come_back_are_delivered_after_their_leases() -> None:
    with TestBroker() as broker, prepared(broker) as client:
        lost = broker.client().receive("work", group="g", max_records=1, keeps_leases=True, auto_extend=False)
        (held,) = lost.poll(timeout_ms=WAIT_MS)
        lost.stop()
        broker.faults.drop_connections()
        with client.receive("work", group="g", keeps_leases=True) as other:
            assert other.poll(timeout_ms=300) == []
            broker.clock.advance(seconds=31)
            (again,) = other.poll(timeout_ms=WAIT_MS)
            assert (again.value, again.delivery_count) == (held.value, 2)
            again.ack()


def test_a_member_that_keeps_its_leases_releases_them_at_once_when_it_is_closed() -> None:
    with TestBroker() as broker, prepared(broker) as client:
        for _ in range(4):  # more often than the limit of the group: it does not count
            with client.receive("work", group="g", keeps_leases=True) as member:
                (held,) = member.poll(timeout_ms=WAIT_MS)
                assert held.value == b"1"
