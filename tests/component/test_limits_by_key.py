"""Limits by key of a share group: leased records of a group key at once, and deliveries of it per second."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import mansio
from component.sqs.sqs_fixtures import delete, queue_of, receive, sqs_client
from mansio.errors import InvalidConfig, NotCoordinator
from mansio.testing import TestBroker
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.client.admin.shares import ShareLeases

LEASES_MAX = "mansio.share.key.leases.max"
RATE = "mansio.share.key.rate"
BURST = "mansio.share.key.rate.burst"
HEADER = "mansio.share.key.header"
ORDER = "mansio.share.order"
HOURS_MS = 12 * 3_600_000
WITHHELD_S = 31
"""After a restart, records that may have been leased are withheld so long."""

NO_REST = {"mansio.retry.backoff.ms": "0"}


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(num_partitions=1) as started:
        yield started


class Work:
    """A topic of the same name as its group, whose records have what comes before a colon as their key."""

    def __init__(
        self, broker: TestBroker, name: str, config: dict[str, str] | None = None, **settings: Any
    ) -> None:
        self.name = name
        self.client = broker.client()
        self.client.admin.create_topic(name, partitions=1, config=config or {})
        self.set({"share.auto.offset.reset": "earliest", **settings.pop("more", {})})
        self.receivers: list[Any] = []

    def set(self, settings: dict[str, str]) -> None:
        self.client.admin.alter_group_config(self.name, settings)

    def publish(self, *values: str, **more: Any) -> None:
        for value in values:
            self.client.publish(self.name, value, key=value.partition(":")[0], partition=0, **more)

    def receiver(self, **more: Any) -> Any:
        options = {"group": self.name, "prefetch": 0, "auto_extend": False, "lease_ms": HOURS_MS}
        receiver = self.client.receive(self.name, **{**options, **more})
        self.receivers.append(receiver.__enter__())
        return receiver

    def leases(self) -> ShareLeases:
        """The description of the only partition; its state is loaded."""
        partition = mansio.TopicPartition(self.name, 0)
        found = self.client.admin.shares.leases(self.name, [partition])[partition]
        assert found is not None
        return found

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def work(broker: TestBroker, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Work] = []

    def make(config: dict[str, str] | None = None, **settings: str) -> Work:
        names = {"leases_max": LEASES_MAX, "rate": RATE, "burst": BURST, "header": HEADER, "order": ORDER}
        more = {names[name]: value for name, value in settings.items()}
        name = "".join(each if each.isalnum() else "-" for each in request.node.name)[:200]
        made.append(Work(broker, name, config, more={**NO_REST, **more}))
        return made[0]

    yield make
    for each in made:
        each.close()


def taken(receiver: Any, count: int) -> list[Any]:
    """So many messages."""
    found: list[Any] = []

    def take() -> bool:
        found.extend(receiver.poll(timeout_ms=200, max_records=count - len(found)))
        return len(found) >= count

    wait_until(take, what=f"{count} messages")
    return found


def values(messages: list[Any]) -> list[str]:
    return [message.value.decode() for message in messages]


def nothing_more(receiver: Any) -> bool:
    return receiver.poll(timeout_ms=150) == []


@pytest.mark.row("D9")
def test_no_more_records_of_a_key_are_leased_at_once_than_its_limit(work: Any) -> None:
    queue = work(leases_max="2")
    queue.publish("a:1", "a:2", "a:3", "b:1", "a:4")
    one, other = queue.receiver(), queue.receiver()
    held = taken(one, 3)
    assert values(held) == ["a:1", "a:2", "b:1"]
    assert nothing_more(other)  # one limit for all members
    held[1].retry(after=0)
    assert values(taken(other, 1)) == ["a:2"]  # lowest offset first, also of one that is given back
    held[0].ack()
    assert values(taken(other, 1)) == ["a:3"]
    assert nothing_more(one)


@pytest.mark.row("D9")
def test_a_key_gets_a_delivery_as_soon_as_its_rate_allows_it(broker: TestBroker, work: Any) -> None:
    """One in a thousand seconds, and two after a pause; the bucket is empty when the state is loaded. A request that
    waits is answered when the time has come."""
    queue = work(rate="0.001", burst="2")
    queue.publish("a:1", "a:2", "a:3", "a:4", "b:1")
    receiver = queue.receiver()
    assert nothing_more(receiver)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend(receiver.poll(timeout_ms=scaled(30) * 1000)))
    waiting.start()
    wait_until(lambda: is_waited_for(broker, queue.name), what="a request waits")
    broker.clock.advance(1_000)
    waiting.join(scaled(20))
    assert values(got) == ["a:1", "b:1"]
    assert nothing_more(receiver)
    broker.clock.advance(10_000)
    assert values(taken(receiver, 2)) == ["a:2", "a:3"]  # the burst
    got[0].retry(after=0)
    assert nothing_more(receiver)  # deliveries that are repeated count
    broker.clock.advance(1_000)
    assert values(taken(receiver, 1)) == ["a:1"]
    broker.clock.advance(10_000)
    broker.restart()
    assert queue.leases().withheld
    after = queue.receiver()
    broker.clock.advance(WITHHELD_S)
    assert nothing_more(after)  # the burst is not there again
    broker.clock.advance(1_000)
    assert taken(after, 1)


def is_waited_for(broker: TestBroker, group: str) -> bool:
    manager = broker._running().service.share_partition_manager
    return any(each.key.group == group and each.has_waiters_or_writes for each in manager.share_partitions())


@pytest.mark.full
@pytest.mark.row("D9")
def test_a_backoff_of_one_record_does_not_hold_others_of_its_key_without_order(work: Any) -> None:
    queue = work(leases_max="1")
    queue.publish("a:1", "a:2", "b:1")
    receiver = queue.receiver()
    held = taken(receiver, 2)
    assert values(held) == ["a:1", "b:1"]
    held[0].retry(after=3_600)
    assert values(taken(receiver, 1)) == ["a:2"]


@pytest.mark.full
@pytest.mark.row("D9", "D8")
def test_order_by_key_and_a_limit_hold_together(work: Any) -> None:
    queue = work(leases_max="1", order="key")
    queue.publish("a:1", "a:2", "b:1", "a:3")
    receiver = queue.receiver()
    first = taken(receiver, 2)
    assert values(first) == ["a:1", "b:1"]  # order alone would give all of a
    first[0].retry(after=3_600)
    assert nothing_more(receiver)  # it holds the later ones
    with pytest.raises(
        InvalidConfig, match=r"leases\.max cannot be used with mansio\.share\.order=partition"
    ):
        queue.set({ORDER: "partition"})


@pytest.mark.full
@pytest.mark.row("D9")
def test_the_group_key_is_in_the_header_that_the_setting_names(work: Any) -> None:
    queue = work(leases_max="1", header="tenant")
    for value, tenant in (("1", "x"), ("2", "x"), ("3", "y"), ("4", None), ("5", None)):
        headers = [] if tenant is None else [("tenant", tenant.encode())]
        queue.publish(f"k:{value}", headers=headers)
    receiver = queue.receiver()
    assert values(taken(receiver, 4)) == ["k:1", "k:3", "k:4", "k:5"]
    queue.set({HEADER: "other"})  # no record has it: no limit
    assert values(taken(receiver, 1)) == ["k:2"]


@pytest.mark.full
@pytest.mark.row("D9")
def test_settings_change_while_records_are_leased(work: Any) -> None:
    queue = work()
    queue.publish(*(f"a:{number}" for number in range(8)))
    receiver = queue.receiver()
    held = taken(receiver, 3)
    queue.set({LEASES_MAX: "2"})
    assert nothing_more(receiver)  # three are leased: none until there is one
    held[0].ack()
    assert nothing_more(receiver)
    held[1].ack()
    held += taken(receiver, 1)
    assert nothing_more(receiver)
    queue.set({LEASES_MAX: "3"})
    held += taken(receiver, 1)
    assert nothing_more(receiver)
    queue.set({LEASES_MAX: "0"})
    held += taken(receiver, 2)
    queue.set({LEASES_MAX: "6"})
    held += taken(receiver, 1)
    assert [message.offset for message in held] == list(range(8))
    for message in held[2:]:
        message.ack()
    queue.publish("a:8")
    assert values(taken(receiver, 1)) == ["a:8"]


@pytest.mark.full
@pytest.mark.row("D9", "D7")
def test_one_limit_holds_for_all_priorities_together(work: Any) -> None:
    queue = work({"mansio.priority.enable": "true"}, leases_max="2")
    queue.publish("a:low", "b:low", priority="low")
    queue.publish("a:normal")
    queue.publish("a:high", priority="high")
    one, other = queue.receiver(), queue.receiver()
    held = taken(one, 3)
    assert values(held) == ["a:high", "a:normal", "b:low"]
    assert nothing_more(other)
    held[0].ack()
    assert values(taken(other, 1)) == ["a:low"]


@pytest.mark.full
@pytest.mark.row("D9", "D7")
@pytest.mark.parametrize("config", [{}, {"mansio.priority.enable": "true"}])
def test_a_key_at_its_limit_hides_no_later_record_of_others(work: Any, config: dict[str, str]) -> None:
    """Its records are more than a request asks for, so those of others are found only if more keys are read."""
    queue = work(config, leases_max="1")
    queue.publish(*(f"a:{number}" for number in range(5)), "b:1", "c:1")
    assert values(taken(queue.receiver(max_records=1), 1)) == ["a:0"]
    other = queue.receiver(max_records=1)
    for value in ("b:1", "c:1"):
        found = taken(other, 1)
        assert values(found) == [value]
        found[0].ack()


@pytest.mark.full
@pytest.mark.row("D9", "D7")
def test_a_lease_that_ends_while_its_share_partition_is_loaded_again_makes_a_place(
    broker: TestBroker, work: Any
) -> None:
    """The place is in the share partition of another priority, whose leader has not ended."""
    queue = work({"mansio.priority.enable": "true"}, leases_max="1")
    queue.publish("a:high", priority="high")
    queue.publish("a:normal")
    one, other = queue.receiver(), queue.receiver()
    held = taken(one, 1)
    assert nothing_more(other)

    async def end_leader_of_the_lease() -> None:
        for leader in broker._running().service.share_partition_manager.share_partitions():
            if leader.key.group == queue.name and leader.state_machine.leased_count:
                leader.end(NotCoordinator("the state moved to another broker"))

    broker._run_on_loop(end_leader_of_the_lease())
    held[0].ack()
    assert values(taken(other, 1)) == ["a:normal"]


@pytest.mark.full
@pytest.mark.row("D9", "D1")
def test_leases_of_before_a_restart_count(broker: TestBroker, work: Any) -> None:
    queue = work(leases_max="2")
    queue.publish("a:1", "a:2", "a:3", "b:1")
    held = taken(queue.receiver(keeps_leases=True), 3)
    broker.restart()
    assert queue.leases().withheld
    after = queue.receiver()
    broker.clock.advance(WITHHELD_S)
    assert nothing_more(after)
    held[0].ack()
    assert values(taken(after, 1)) == ["a:3"]


@pytest.mark.full
@pytest.mark.row("D9", "A4")
def test_message_groups_of_a_standard_queue_are_limited(broker: TestBroker) -> None:
    """MessageGroupId of a standard queue is the key of the record, so a limit of the queue's group holds for it."""
    sqs = sqs_client(broker.sqs_url)
    url = queue_of(sqs, "tenants")
    with broker.client() as client:
        client.admin.alter_group_config("sqs.tenants", {LEASES_MAX: "1"})
    for body in ("a1", "a2", "b1", "none"):
        group = {} if body == "none" else {"MessageGroupId": body[0]}
        sqs.send_message(QueueUrl=url, MessageBody=body, **group)
    first = receive(sqs, url)
    assert sorted(each["Body"] for each in first) == ["a1", "b1", "none"]
    groups = {each["Body"]: each["Attributes"].get("MessageGroupId") for each in first}
    assert groups == {"a1": "a", "b1": "b", "none": None}
    assert receive(sqs, url, WaitTimeSeconds=0) == []
    delete(sqs, url, first)
    assert [each["Body"] for each in receive(sqs, url)] == ["a2"]


@pytest.mark.full
@pytest.mark.row("D9")
def test_keys_at_a_limit_are_described_and_counted(broker: TestBroker, work: Any) -> None:
    queue = work(leases_max="1")
    queue.publish("a:1", "a:2", "b:1", "c\x1b[0m:1", "c\x1b[0m:2")
    receiver = queue.receiver()
    held = taken(receiver, 3)
    assert nothing_more(receiver)
    found = queue.leases()
    assert (found.keys_at_lease_limit, found.keys_at_rate_limit) == (2, 0)
    assert found.limited_keys == (b"a", b"c\x1b[0m")
    url = f"{broker.http_url}/v1/groups/{queue.name}/leases?topic={queue.name}"
    (state,) = httpx.get(url, timeout=scaled(20)).json()["partitions"]
    assert state["state"]["limited_keys"] == ["a", "c\x1b[0m"]
    text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(20)).text
    assert 'mansio_share_limited_keys{limit="leases"} 2' in text
    queue.set({LEASES_MAX: "0", RATE: "0.01"})
    for message in held:
        message.retry(after=0)
    assert nothing_more(receiver)
    found = queue.leases()
    assert (found.keys_at_lease_limit, found.keys_at_rate_limit) == (0, 3)
    assert set(found.limited_keys) == {b"a", b"b", b"c\x1b[0m"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "value"), [(LEASES_MAX, "-1"), (RATE, "x"), (RATE, "0.0009"), (BURST, "0"), (HEADER, "a\nb")]
)
def test_wrong_settings_are_refused(work: Any, name: str, value: str) -> None:
    queue = work()
    with pytest.raises(InvalidConfig):
        queue.set({name: value})
