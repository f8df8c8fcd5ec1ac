"""Consumer groups (KIP-848) in a cluster: members continue after the broker of their coordinator died."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from support.machine import scaled
from support.waiting import wait_until
from system.cluster.load import create_topic
from system.cluster.test_cluster_groups import (
    GOES_ON_S_MAX,
    PARTITIONS,
    Steady,
    committed,
    coordinator_of,
    one,
)
from system.crash.kill_load import QUIET
from system.interop.members import ConfluentMember
from system.interop.test_consumer_groups import NextMember

if TYPE_CHECKING:
    from support.cluster import Cluster

__all__ = ["one"]  # the fixture


def short_heartbeat_interval(bootstrap_servers: str, group: str) -> None:
    change = ConfigEntry("consumer.heartbeat.interval.ms", "300", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[change])
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    admin.incremental_alter_configs([resource])[resource].result(scaled(30))


@pytest.mark.row("C5", "G2")
def test_group_of_the_new_protocol_goes_on_after_its_coordinators_broker_is_killed(one: Cluster) -> None:
    """Two members and later a classic one share the group; all that was sent is received, no commit goes back."""
    topic, group = "work", "workers"
    create_topic(one, topic, PARTITIONS)
    short_heartbeat_interval(one.bootstrap_servers, group)
    members = [NextMember(one.bootstrap_servers, group, topic).join() for _ in range(2)]
    steady = Steady(one, topic)
    try:
        wait_until(lambda: all(len(member.received) > 50 for member in members), 30, "both have records")
        wait_until(lambda: min(committed(one, group, topic)) > 10, 30, "all partitions have commits")
        before = committed(one, group, topic)
        one.kill(coordinator_of(one, group))
        counts = [len(member.received) for member in members]
        wait_until(
            lambda: all(
                len(member.received) > count + 50 for member, count in zip(members, counts, strict=True)
            ),
            GOES_ON_S_MAX,
            "both go on",
        )
        wait_until(
            lambda: all(now > then for now, then in zip(committed(one, group, topic), before, strict=True)),
            GOES_ON_S_MAX,
            "commits go on",
        )
        members.append(ConfluentMember(one.bootstrap_servers, group, topic).join())
        wait_until(lambda: len(members[-1].received) > 50, GOES_ON_S_MAX, "a classic member reads with them")
        # A classic member gives everything up whenever it joins anew: the shares are compared once they settle.
        wait_until(
            lambda: (
                sorted(index for member in members for index in member.assignment) == list(range(PARTITIONS))
            ),
            GOES_ON_S_MAX,
            "each partition has one member",
        )
    finally:
        steady.stop()
    wanted = set(steady.sent)
    wait_until(
        lambda: wanted <= {value for member in members for value in member.values},
        GOES_ON_S_MAX,
        "everything that was sent is received",
    )
    for member in members:
        member.leave()
