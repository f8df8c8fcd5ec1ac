"""A broker whose view of the ACLs is late lets no removed right through: the broker that is responsible asks again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.api.routing.publishing import publish_records
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.share_groups.leases import Acknowledgement
from mansio.errors import AuthorizationFailed, MansioError, TopicAuthorizationFailed
from mansio.state.authorization.acls import AclFilter, Operation
from mansio.state.share_partition.types import ACCEPT
from support.authorization import ADMIN, ALICE, GROUP, TOPIC, acl
from support.etcd import one_etcd
from support.sasl_broker import SaslBroker, sasl_broker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.state.authorization.acls import Acl

pytestmark = pytest.mark.full

PARTITIONS: Final = 4
RIGHTS: Final = (
    acl(TOPIC, "t", Operation.READ),
    acl(TOPIC, "t", Operation.WRITE),
    acl(GROUP, "g", Operation.READ),
)


class Pair:
    """Two brokers of one cluster. Clients ask `entry`; `leader` leads partition `index` of topic t."""

    def __init__(self, entry: SaslBroker, leader: SaslBroker) -> None:
        self.entry = entry
        self.leader = leader
        admin = entry.broker.clients.client(ADMIN).admin
        entry.run(admin.create_topic("t", partitions=PARTITIONS, replication_factor=1))
        entry.run(admin.alter_group_config("g", {"share.auto.offset.reset": "earliest"}))
        leader_id = leader.broker.settings.node_id
        partitions = leader.broker.service.topics.state.topics
        wait_until(lambda: "t" in partitions)
        led = [index for index, each in enumerate(partitions["t"].partitions) if each.leader == leader_id]
        self.index = led[0]

    def end(self) -> int:
        """The end of the partition's log."""
        return int(self.leader.broker.service.partitions.find("t", None, self.index).end_offset)

    def change(self, *rights: Acl, exists: bool) -> None:
        """Add or remove ACLs, and wait until the leader knows it."""
        acls = self.leader.broker.service.acls
        if exists:
            self.leader.run(acls.create_each(rights, caller=ADMIN))
        else:
            self.leader.run(acls.delete_each([AclFilter(*each) for each in rights], caller=ADMIN))
        authorizer = self.leader.broker.service.authorization.authorizer
        wait_until(lambda: all((each in authorizer) is exists for each in rights))

    def hold_back(self) -> list[Any]:
        """Let the entry broker learn of no further change of ACLs. Returns the callbacks for them."""
        callbacks = self.entry.broker.service.topics.state._acl_callbacks
        before = list(callbacks)
        self.entry.call(callbacks.clear)
        return before

    def publish(self, value: bytes) -> MansioError | None:
        """Publish a record to the leader's partition, through the entry broker."""
        broker = self.entry.broker
        record = RecordToPublish(value, partition=self.index)
        result = self.entry.run(publish_records(broker.service, broker.clients, "t", [record], caller=ALICE))
        return result.records[0].error

    def receive(self) -> list[str]:
        """Receive records through the entry broker; return their receipts."""
        leases = self.entry.broker.service.leases
        found = self.entry.run(
            leases.receive("g", ["t"], max_records=1, max_wait_ms=5_000, lease_ms=600_000, caller=ALICE)
        )
        return [leases.receipt_of(found, one) for one in found.records]

    def acknowledge(self, receipt: str) -> MansioError | None:
        leases = self.entry.broker.service.leases
        (error,) = self.entry.run(leases.acknowledge("g", [Acknowledgement(receipt, ACCEPT)], caller=ALICE))
        return error


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with one_etcd() as etcd, ExitStack() as stack:
        brokers = [
            stack.enter_context(
                sasl_broker(
                    tmp_path / f"broker-{node_id}",
                    node_id=node_id,
                    etcd_endpoints=etcd.url,
                    default_replication_factor=2,
                    authorizer="acl",
                    super_users="User:admin",
                )
            )
            for node_id in (1, 2)
        ]
        yield Pair(*brokers)


@pytest.mark.row("A8")
def test_an_entry_broker_with_old_acls_lets_no_removed_right_through(pair: Pair) -> None:
    pair.change(*RIGHTS, exists=True)
    entry = pair.entry.broker.service.authorization
    wait_until(lambda: entry.allows(ALICE, Operation.WRITE, TOPIC, "t"))
    assert [pair.publish(b"v%d" % number) for number in range(3)] == [None] * 3
    (first,), (second,) = pair.receive(), pair.receive()
    assert pair.acknowledge(first) is None
    callbacks = pair.hold_back()
    pair.change(*RIGHTS, exists=False)
    end = pair.end()
    assert entry.allows(ALICE, Operation.WRITE, TOPIC, "t"), "the entry broker knows nothing"
    assert isinstance(pair.publish(b"refused"), TopicAuthorizationFailed)
    assert isinstance(pair.acknowledge(second), AuthorizationFailed)
    with pytest.raises(AuthorizationFailed):
        pair.receive()
    assert pair.end() == end
    pair.change(*RIGHTS, exists=True)
    assert pair.publish(b"allowed") is None
    assert pair.end() == end + 1
    assert pair.acknowledge(second) is None
    pair.entry.call(pair.entry.broker.service.topics.state._acl_callbacks.extend, callbacks)
