"""Staged incidents: groups that something keeps from going on, on a broker whose clock the stage may advance.

Each function stages one with real clients and returns what `mansio why` has to answer. What has to stay as it is (a
member, a lease, an open transaction) is kept until the stage is closed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.raw_peer import RawPeer
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.testing import TestBroker

HOURS_MS: Final = 12 * 3_600_000
NO_REST: Final = {"mansio.retry.backoff.ms": "0", "share.auto.offset.reset": "earliest"}
LONG_REST: Final = {
    "mansio.retry.backoff.ms": "3600000",
    "mansio.retry.backoff.max.ms": "3600000",
    "mansio.retry.jitter": "0",
    "share.auto.offset.reset": "earliest",
}
SETTINGS: Final[dict[str, Any]] = {
    "num_partitions": 1,
    "quota_burst_ms": 100,
    "group_initial_rebalance_delay_ms": 0,
    "group_consumer_heartbeat_interval_ms": 300,
    "group_share_heartbeat_interval_ms": 300,
    "group_min_session_timeout_ms": 1_000,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What the first finding has to say. `command`: how the command begins; `about`: fields of the finding."""

    cause: str
    command: str
    impact: str = "blocks"
    about: dict[str, Any] = field(default_factory=dict)


class Stage:
    """A broker, and a topic and a group of the same name for one incident."""

    def __init__(self, broker: TestBroker, name: str, *, partitions: int = 1, **config: str) -> None:
        self.broker, self.name = broker, name
        self.shell = Shell(broker.bootstrap_servers)
        self.client = broker.client()
        self.ends = ExitStack()
        self.client.admin.create_topic(
            name,
            partitions=partitions,
            config={key.replace("_", "."): value for key, value in config.items()},
        )

    @property
    def port(self) -> int:
        return int(self.broker.bootstrap_servers.rpartition(":")[2])

    def set(self, settings: dict[str, str]) -> None:
        self.client.admin.alter_group_config(self.name, settings)

    def publish(self, count: int, *, key: bytes | None = None, partition: int = 0, size: int = 10) -> None:
        for number in range(count):
            value = b"%d" % number
            self.client.publish(self.name, value.ljust(size), key=key, partition=partition)

    def receiver(self, **more: Any) -> Any:
        options: dict[str, Any] = {"prefetch": 0, "auto_extend": False, "lease_ms": HOURS_MS, **more}
        return self.ends.enter_context(self.client.receive(self.name, group=self.name, **options))

    def take(self, receiver: Any, count: int) -> list[Any]:
        """So many messages of a receiver, which stay leased."""
        found: list[Any] = []

        def take() -> bool:
            found.extend(receiver.poll(timeout_ms=200, max_records=count - len(found)))
            return len(found) >= count

        wait_until(take, what=f"{count} messages")
        return found

    def consumer(self, client: mansio.blocking.Client | None = None, **more: Any) -> Any:
        options: dict[str, Any] = {"group": self.name, "auto_commit": False, **more}
        return self.ends.enter_context((client or self.client).consume(self.name, **options))

    def read(self, consumer: Any, count: int) -> list[Any]:
        found: list[Any] = []

        def read() -> bool:
            found.extend(consumer.poll(timeout_ms=200))
            return len(found) >= count

        wait_until(read, what=f"{count} records")
        return found

    def commit(self, offset: int = 0) -> None:
        """Let the group, which has no members, have committed an offset of each partition."""
        self.client.admin.reset_offsets(self.name, [self.name], to=offset)


def consumer_group_without_members(stage: Stage) -> Expected:
    stage.publish(7)
    stage.commit()
    return Expected("no-member", f"mansio consume {stage.name} --group {stage.name}", about={"records": 7})


def share_group_without_members(stage: Stage) -> Expected:
    stage.set(NO_REST)
    stage.publish(7)
    with stage.client.receive(stage.name, group=stage.name, prefetch=0) as receiver:
        for message in stage.take(receiver, 2):
            message.ack()
    return Expected(
        "no-member", f"mansio consume {stage.name} --share-group {stage.name}", about={"records": 5}
    )


def topic_without_members(stage: Stage) -> Expected:
    """The group has a member, which reads another topic."""
    other = f"{stage.name}-other"
    stage.client.admin.create_topic(other, partitions=1)
    stage.publish(7)
    stage.commit()
    consumer = stage.ends.enter_context(stage.client.consume(other, group=stage.name))
    wait_until(lambda: bool(consumer.poll(timeout_ms=100) or consumer.assignment()), what="an assignment")
    return Expected("no-member", f"mansio consume {stage.name}", about={"topic": stage.name, "records": 7})


def member_without_heartbeats(stage: Stage) -> Expected:
    """A process is paused, as by SIGSTOP or a debugger: here a member that never sends a second heartbeat."""
    stage.publish(7)
    stage.commit()
    peer = stage.ends.enter_context(RawPeer(stage.port))
    member_id = f"paused-{stage.name}"
    request = {
        "group_id": stage.name,
        "member_id": member_id,
        "member_epoch": 0,
        "rebalance_timeout_ms": 60_000,
        "subscribed_topic_names": [stage.name],
        "topic_partitions": [],
    }
    stage.set({"consumer.session.timeout.ms": "45000"})
    wait_until(lambda: peer.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request).error_code == 0)
    stage.broker.clock.advance(seconds=30, sessions=True)
    return Expected("stopped-member", f"mansio group describe {stage.name}", about={"member_id": member_id})


def share_member_that_stopped_polling(stage: Stage) -> Expected:
    """It sends heartbeats and asks for no records."""
    stage.set(NO_REST)
    stage.publish(7)
    with stage.client.receive(stage.name, group=stage.name, prefetch=0) as receiver:
        for message in stage.take(receiver, 1):
            message.ack()
    member_id = _share_heartbeats(stage)
    stage.broker.clock.advance(seconds=20)
    return Expected("stopped-member", f"mansio group describe {stage.name}", about={"member_id": member_id})


def _share_heartbeats(stage: Stage) -> str:
    """Keep a member in the share group that only sends heartbeats; return its id."""
    peer, member_id = stage.ends.enter_context(RawPeer(stage.port)), f"idle-{stage.name}"
    is_over, epoch = threading.Event(), 0

    def beat() -> None:
        nonlocal epoch
        names = [stage.name] if epoch == 0 else None
        request = {
            "group_id": stage.name,
            "member_id": member_id,
            "member_epoch": epoch,
            "subscribed_topic_names": names,
        }
        epoch = peer.call(ApiKey.SHARE_GROUP_HEARTBEAT, 1, request).member_epoch

    beat()

    def go_on() -> None:
        while not is_over.wait(1):
            beat()

    thread = threading.Thread(target=go_on)
    thread.start()
    stage.ends.callback(thread.join)
    stage.ends.callback(is_over.set)
    return member_id


def consumer_that_stopped_polling(stage: Stage) -> Expected:
    """It sends heartbeats in the background, while its handler hangs."""
    stage.publish(7)
    stage.commit()
    consumer = stage.consumer()
    stage.read(consumer, 1)
    stage.broker.clock.advance(seconds=40)
    return Expected("stopped-member", f"mansio group describe {stage.name}", about={"topic": stage.name})


def poison_record_in_a_share_group(stage: Stage) -> Expected:
    stage.set({**LONG_REST, "mansio.retry.backoff.ms": "10", "mansio.retry.backoff.multiplier": "1"})
    stage.publish(1)
    receiver = stage.receiver()
    for _ in range(3):
        (message,) = stage.take(receiver, 1)
        message.retry()
    stage.take(receiver, 1)
    return Expected(
        "poison-record",
        f"mansio consume {stage.name} --partition 0 --from-offset 0 --max 1",
        about={"offset": 0, "partition": 0},
    )


def poison_record_in_a_consumer_group(stage: Stage) -> Expected:
    """The process fails at each start before it commits."""
    stage.publish(7)
    stage.commit(2)
    for _ in range(3):
        with stage.client.consume(stage.name, group=stage.name, auto_commit=False) as consumer:
            stage.read(consumer, 1)
    stage.read(stage.consumer(), 1)
    return Expected(
        "poison-record",
        f"mansio consume {stage.name} --partition 0 --from-offset 2 --max 1",
        about={"offset": 2, "is_certain": False},
    )


def key_in_flight(stage: Stage) -> Expected:
    stage.set({**NO_REST, "mansio.share.order": "key"})
    stage.publish(9, key=b"ann")
    stage.take(stage.receiver(), 1)
    stage.receiver()
    stage.broker.clock.advance(seconds=3)
    return Expected(
        "key-in-flight", f"mansio consume {stage.name}", about={"key": "ann", "offset": 0, "records": 8}
    )


def partition_in_flight(stage: Stage) -> Expected:
    """In order by partition another member waits for the one that holds the first record."""
    stage.set({**NO_REST, "mansio.share.order": "partition"})
    stage.publish(9)
    stage.take(stage.receiver(), 1)
    stage.broker.clock.advance(seconds=3)
    return Expected("key-in-flight", f"mansio consume {stage.name}", about={"offset": 0, "records": 8})


def all_locks_taken(stage: Stage) -> Expected:
    stage.set({**NO_REST, "share.partition.max.record.locks": "100"})
    stage.publish(120)
    stage.take(stage.receiver(), 100)
    return Expected(
        "locks-taken",
        f"mansio group alter {stage.name} share.partition.max.record.locks=200",
        about={"records": 20},
    )


def open_transaction_before_a_consumer(stage: Stage) -> Expected:
    stage.publish(3)
    _open_transaction(stage)
    consumer = stage.consumer(auto_commit=True, auto_commit_interval_ms=100)
    stage.read(consumer, 3)
    _await_commit(stage, consumer, 3)
    return Expected(
        "open-transaction",
        f"mansio txn terminate {stage.name}-txn",
        about={"transactional_id": f"{stage.name}-txn", "offset": 3},
    )


def open_transaction_before_a_share_group(stage: Stage) -> Expected:
    stage.set({**NO_REST, "share.isolation.level": "read_committed"})
    stage.publish(3)
    _open_transaction(stage)
    receiver = stage.receiver()
    for message in stage.take(receiver, 3):
        message.ack()
    receiver.poll(timeout_ms=100)
    return Expected("open-transaction", f"mansio txn terminate {stage.name}-txn", about={"offset": 3})


def _open_transaction(stage: Stage) -> None:
    client = stage.broker.client()
    transaction = client.transaction(f"{stage.name}-txn", timeout_ms=600_000)
    stage.ends.enter_context(transaction)
    transaction.publish(stage.name, b"not yet", partition=0).result()
    stage.client.publish(stage.name, b"behind it", partition=0)


def delayed_records_only(stage: Stage) -> Expected:
    stage.publish(1)
    for _ in range(4):
        stage.client.publish(stage.name, b"later", delay=3_600, partition=0)
    _read_all(stage)
    return Expected("delayed-only", f"mansio delayed list {stage.name}", "waits", {"records": 4})


def delayed_records_before_a_share_group(stage: Stage) -> Expected:
    """Behind what it has done the log has control batches only, which are no lag."""
    stage.set(NO_REST)
    stage.publish(1)
    receiver = stage.receiver()
    (message,) = stage.take(receiver, 1)
    message.ack()
    receiver.close()
    for _ in range(4):
        stage.client.publish(stage.name, b"later", delay=3_600, partition=0)
    return Expected("delayed-only", f"mansio delayed list {stage.name}", "waits", {"records": 4})


def paused_schedule(stage: Stage) -> Expected:
    stage.publish(1)
    name = f"{stage.name}-tick"
    stage.client.admin.schedules.create(stage.name, name, b"tick", every=60, partition=0)
    stage.client.admin.schedules.pause(stage.name, name)
    _read_all(stage)
    return Expected(
        "paused-schedule",
        f"mansio schedule resume {name} --topic {stage.name}",
        "waits",
        {"schedule": name},
    )


def _read_all(stage: Stage) -> None:
    consumer = stage.consumer(auto_commit=True, auto_commit_interval_ms=100)
    stage.read(consumer, 1)
    _await_commit(stage, consumer, 1)


def _await_commit(stage: Stage, consumer: Any, offset: int) -> None:
    """Wait until the consumer, which commits what it has processed when it asks for more, has committed an offset."""

    def is_committed() -> bool:
        consumer.poll(timeout_ms=100)
        return sum(each.offset for each in stage.client.admin.group_offsets(stage.name).values()) >= offset

    wait_until(is_committed, what="a commit")


def hot_partition(stage: Stage) -> Expected:
    stage.publish(5)
    records = [mansio.OutgoingRecord(b"%d" % number, partition=1) for number in range(2_000)]
    stage.client.publish_many(stage.name, records)
    stage.commit()
    consumer = stage.consumer(auto_commit=True, auto_commit_interval_ms=100, prefetch_bytes_max=1)
    stage.read(consumer, 1)
    return Expected(
        "hot-partition",
        "mansio cluster hot",
        "slows",
        {"partition": 1, "topic": stage.name},
    )


def quota(stage: Stage) -> Expected:
    client_id = f"{stage.name}-reader"
    stage.client.admin.quotas.set(client_id=client_id, values={"consumer_byte_rate": 1_000})
    stage.publish(40, size=5_000)
    stage.commit()
    consumer = stage.consumer(stage.broker.client(client_id=client_id), auto_commit=True)
    stage.read(consumer, 1)
    return Expected(
        "quota",
        f"mansio quota set --client {client_id} --consumer-byte-rate 2000",
        about={"client_id": client_id},
    )


def slow_handler_of_a_share_group(stage: Stage) -> Expected:
    stage.set(NO_REST)
    stage.publish(9)
    stage.take(stage.receiver(lease_ms=None), 9)
    stage.broker.clock.advance(seconds=20)
    return Expected("slow-handler", f"mansio group describe {stage.name}", about={"records": 9})


def slow_handler_of_a_consumer_group(stage: Stage) -> Expected:
    """One of two members hangs, the other one is done."""
    stage.publish(9, partition=0)
    stage.publish(9, partition=1)
    stage.commit()
    first, second = stage.consumer(), stage.consumer(auto_commit=True, auto_commit_interval_ms=100)

    def is_shared() -> bool:
        first.poll(timeout_ms=100)
        second.poll(timeout_ms=100)
        return len(first.assignment()) == len(second.assignment()) == 1

    wait_until(is_shared, what="a partition for each")
    own = [each.partition for each in second.assignment()]

    def is_done() -> bool:
        second.poll(timeout_ms=100)
        offsets = stage.client.admin.group_offsets(stage.name)
        return any(each.offset == 9 and one.partition in own for one, each in offsets.items())

    wait_until(is_done, what="a commit of the other member")
    stage.broker.clock.advance(seconds=20)
    return Expected(
        "slow-handler",
        f"mansio group describe {stage.name}",
        "slows",
        {"records": 9, "partition": 1 - own[0]},
    )


def limit_by_key(stage: Stage) -> Expected:
    stage.set({**NO_REST, "mansio.share.key.leases.max": "1"})
    stage.publish(9, key=b"ann")
    stage.take(stage.receiver(), 1)
    return Expected("key-limit", f"mansio group describe {stage.name}", about={"topic": stage.name})


def all_in_backoff(stage: Stage) -> Expected:
    stage.set(LONG_REST)
    stage.publish(3)
    receiver = stage.receiver()
    for message in stage.take(receiver, 3):
        message.retry()
    receiver.poll(timeout_ms=100)
    return Expected("backoff", f"mansio group describe {stage.name}", "slows", {"records": 3})


def rebalance_that_waits(stage: Stage) -> Expected:
    """A member of the classic protocol hangs while another one joins."""
    stage.publish(7)
    stage.commit()
    hanging = stage.ends.enter_context(RawPeer(stage.port))
    member_id = _join_classic(stage, hanging)
    joining = stage.ends.enter_context(RawPeer(stage.port))
    joining.send(_join_frame(stage, ""))
    return Expected("rebalance", f"mansio group describe {stage.name}", about={"member_id": member_id})


def _join_frame(stage: Stage, member_id: str) -> bytes:
    return messages.encode_request(ApiKey.JOIN_GROUP, 3, 1, "raw", _join_fields(stage, member_id))


def _join_fields(stage: Stage, member_id: str) -> dict[str, Any]:
    return {
        "group_id": stage.name,
        "session_timeout_ms": 45_000,
        "rebalance_timeout_ms": 300_000,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\0\0\0\0\0"}],
    }


def _join_classic(stage: Stage, peer: RawPeer) -> str:
    joined = peer.call(ApiKey.JOIN_GROUP, 3, _join_fields(stage, ""))
    assert joined.error_code == 0
    sync = {"group_id": stage.name, "generation_id": joined.generation_id, "member_id": joined.member_id}
    synced = peer.call(ApiKey.SYNC_GROUP, 3, {**sync, "assignments": []})
    assert synced.error_code == 0
    return str(joined.member_id)


INCIDENTS: Final[tuple[tuple[Callable[[Stage], Expected], dict[str, Any]], ...]] = (
    (consumer_group_without_members, {}),
    (poison_record_in_a_share_group, {}),
    (key_in_flight, {}),
    (share_group_without_members, {}),
    (topic_without_members, {}),
    (member_without_heartbeats, {}),
    (share_member_that_stopped_polling, {}),
    (consumer_that_stopped_polling, {}),
    (poison_record_in_a_consumer_group, {}),
    (partition_in_flight, {}),
    (all_locks_taken, {}),
    (open_transaction_before_a_consumer, {}),
    (open_transaction_before_a_share_group, {}),
    (delayed_records_only, {"mansio.delay.enable": "true"}),
    (delayed_records_before_a_share_group, {"mansio.delay.enable": "true"}),
    (paused_schedule, {"mansio.delay.enable": "true"}),
    (hot_partition, {"partitions": 2}),
    (quota, {}),
    (slow_handler_of_a_share_group, {}),
    (slow_handler_of_a_consumer_group, {"partitions": 2}),
    (limit_by_key, {}),
    (all_in_backoff, {}),
    (rebalance_that_waits, {}),
)
"""Incidents, and the number of partitions and settings of their topics. `make test` stages the first three."""

SMOKE: Final = 3
