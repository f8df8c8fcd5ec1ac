"""Receiving, acknowledging, delays, schedules and dead letters: who has no right changes nothing and learns nothing,
and who names a target to which records are written later needs the right to write to it, then and later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pytest

from component.services.services_fixtures import run
from mansio.broker.features.delays import schedule_manager
from mansio.broker.features.delays.delay_service import BEGIN, DelayQuery
from mansio.broker.features.delays.schedule_service import ScheduleQuery
from mansio.broker.routing.caller import BROKER_CALLER, Caller, ClientSession
from mansio.broker.services.authorization import owner_may_write
from mansio.broker.services.configs import ConfigAlteration, ConfigQuery, ConfigResource
from mansio.broker.services.publish_records import RecordToPublish
from mansio.broker.services.share_groups.leases import Acknowledgement
from mansio.broker.services.share_groups.share import ReceiveOperation
from mansio.broker.topics.topics import NewTopic
from mansio.config.config_def import Change, ResourceType
from mansio.config.config_def import Operation as ConfigOperation
from mansio.config.share_group_config import DEAD_LETTER_OWNER, DEAD_LETTER_TOPIC
from mansio.errors import (
    GroupAuthorizationFailed,
    InvalidRecordState,
    MansioError,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.state.authorization.acls import Acl, Operation, Permission
from mansio.state.share_partition.types import ACCEPT, REJECT
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS, CatchUpMode, Schedule
from support.authorization import ADMIN, ALICE, GROUP, TOPIC, acl
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.state.authorization.authorizer import Authorizer

READ, WRITE, DESCRIBE = Operation.READ, Operation.WRITE, Operation.DESCRIBE
BOB: Final = Caller(ClientSession("bob"), address="10.0.0.2")
UNKNOWN_ID: Final = bytes(15) + b"1"
DEADLINE_S: Final = 30


def run_authorized(
    tmp_path: Path, work: Callable[[BrokerServices, Authorizer], Coroutine[Any, Any, None]]
) -> None:
    """Run `work` on the event loop of a broker with topics t and u, with delays, and the super user admin."""

    async def prepare_and_work(services: BrokerServices) -> None:
        for name in ("t", "u"):
            await set_config(services, ResourceType.TOPIC, name, "mansio.delay.enable", "true")
        await set_config(services, ResourceType.GROUP, "g", "share.auto.offset.reset", "earliest")
        await work(services, services.authorization.authorizer)

    async def prepare(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("u", 1))
        await prepare_and_work(services)

    run(tmp_path, prepare, authorizer="acl", super_users="User:admin")


async def set_config(
    services: BrokerServices, kind: ResourceType, name: str, key: str, value: str, caller: Caller = ADMIN
) -> None:
    changes = [Change(key, ConfigOperation.SET, value)]
    (error,) = await services.configs.alter(
        [ConfigAlteration(ConfigResource(kind, name), changes)], caller=caller
    )
    if error is not None:
        raise error


async def publish(services: BrokerServices, caller: Caller, *values: bytes, topic: str = "t") -> None:
    records = [RecordToPublish(value, partition=0) for value in values]
    result = await services.publish.publish_records(topic, records, timeout_ms=10_000, caller=caller)
    for each in result.records:
        if each.error is not None:
            raise each.error


async def receipts(services: BrokerServices, caller: Caller, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        result = await services.leases.receive(
            "g", ["t"], max_records=count, max_wait_ms=2_000, caller=caller
        )
        found += [services.leases.receipt_of(result, one) for one in result.records]
    return found


async def until(condition: Callable[[], Any]) -> None:
    end = asyncio.get_running_loop().time() + scaled(DEADLINE_S)
    while not condition():
        assert asyncio.get_running_loop().time() < end, "not in time"
        await asyncio.sleep(0.01)


async def refused(work: Awaitable[Any]) -> MansioError:
    with pytest.raises((TopicAuthorizationFailed, GroupAuthorizationFailed)) as caught:
        await work
    return caught.value


@pytest.mark.full
def test_publishing_needs_the_topic_whether_it_exists_or_not(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        authorizer.add(acl(TOPIC, "t", DESCRIBE))
        messages = {
            name: str(await refused(publish(services, ALICE, b"v", topic=name))) for name in ("t", "x")
        }
        assert messages["t"].replace("topic t", "topic x") == messages["x"]
        assert services.partitions.find("t", None, 0).end_offset == 0
        authorizer.add(acl(TOPIC, "t", WRITE))
        await publish(services, ALICE, b"v")
        assert services.partitions.find("t", None, 0).end_offset == 1

    run_authorized(tmp_path, work)


def test_the_receipt_of_another_user_gives_no_right(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        await publish(services, ADMIN, b"a", b"b")
        (first, second) = await receipts(services, ADMIN, 2)
        leases = services.leases

        async def acknowledge(receipt: str) -> MansioError | None:
            (error,) = await leases.acknowledge("g", [Acknowledgement(receipt, ACCEPT)], caller=ALICE)
            return error

        assert isinstance(await refused(acknowledge(first)), GroupAuthorizationFailed)
        authorizer.add(acl(GROUP, "g", READ))
        assert isinstance(await acknowledge(first), TopicAuthorizationFailed)
        authorizer.remove(acl(GROUP, "g", READ))
        authorizer.add(acl(TOPIC, "t", READ))
        assert isinstance(await refused(acknowledge(first)), GroupAuthorizationFailed)
        authorizer.add(acl(GROUP, "g", READ))
        assert await acknowledge(first) is None
        (again,) = await leases.acknowledge("g", [Acknowledgement(first, ACCEPT)], caller=ADMIN)
        assert isinstance(again, InvalidRecordState), "one acknowledgement was applied"
        (last,) = await leases.acknowledge("g", [Acknowledgement(second, ACCEPT)], caller=ADMIN)
        assert last is None

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_receiving_needs_the_group_and_each_topic_and_registers_nothing_before(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        leases: Any = services.leases
        calls = {
            "receive": lambda *topics: leases.receive(
                "g", topics, max_records=1, max_wait_ms=0, caller=ALICE
            ),
            "register": lambda *topics: leases.register("g", topics, caller=ALICE),
            "register here": lambda *topics: leases.register_here("g", topics, caller=ALICE),
            "receive here": lambda *topics: services.receive.receive_records(
                "g", topics, max_records=1, max_wait_ms=0, caller=ALICE
            ),
        }
        authorizer.add(acl(TOPIC, "t", READ))
        for call in calls.values():
            assert isinstance(await refused(call("t")), GroupAuthorizationFailed)
        authorizer.add(acl(GROUP, "g", READ))
        for call in calls.values():
            answers = {str(await refused(call("t", other))) for other in ("u", "absent")}
            assert len(answers) == 1
        assert services.group_service.list_groups(caller=ADMIN) == []
        await calls["receive"]("t")

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_a_receive_that_waits_ends_when_its_right_is_removed(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        rights = acl(GROUP, "g", READ), acl(TOPIC, "t", READ)
        for each, error in zip(rights, (GroupAuthorizationFailed, TopicAuthorizationFailed), strict=True):
            for right in rights:
                authorizer.add(right)
            waiting = asyncio.ensure_future(
                services.leases.receive("g", ["t"], max_records=1, max_wait_ms=60_000, caller=ALICE)
            )
            await until(lambda: services.share_partition_manager.parked)
            authorizer.remove(each)
            await publish(services, ADMIN, b"secret")
            if each is rights[0]:
                await refused(waiting)
            else:
                result = await waiting
                assert not result.records
                assert {type(one) for one in result.errors.values()} == {error}
        assert len(await receipts(services, ADMIN, 2)) == 2, "nothing was leased"

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_grants_from_before_a_change_lease_nothing(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        await publish(services, ADMIN, b"a")
        rights = acl(GROUP, "g", READ), acl(TOPIC, "t", READ)
        place = services.topics.find("t").topic_id.bytes, 0
        for removed in rights:
            for right in rights:
                authorizer.add(right)
            grants = services.authorization.grants(ALICE)
            assert grants is not None
            grants.check_group("g", "SHARE_FETCH")
            assert services.share_service.read_error(grants, place[0], "SHARE_FETCH") is None
            authorizer.remove(removed)
            receive = ReceiveOperation(
                services.share_service,
                "g",
                "member",
                user="alice",
                client_id=None,
                grants=grants,
                partitions=lambda: [place],
                is_connected=lambda: True,
                is_active=lambda: True,
                max_records=1,
                max_bytes=1 << 20,
                max_wait_ms=1_000,
                strict=True,
            )
            if removed is rights[0]:
                await refused(receive.run(()))
            else:
                found = await receive.run(())
                assert isinstance(found[place].error, TopicAuthorizationFailed)
        assert len(await receipts(services, ADMIN, 1)) == 1

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_leases_are_described_and_redriven_with_the_rights_for_group_and_topic(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        share, topic_id = services.share_service, services.topics.find("t").topic_id.bytes
        await publish(services, ADMIN, b"a")
        (receipt,) = await receipts(services, ADMIN, 1)

        def describe(partitions: Any) -> Any:
            return share.describe_leases("g", partitions, ranges_max=1, caller=ALICE)

        def redrive(of: bytes) -> Any:
            return share.redrive("g", of, 0, redrive_id="r", offsets=None, records_max=1, caller=ALICE)

        authorizer.add(acl(TOPIC, "t", DESCRIBE))
        assert isinstance(await refused(describe(None)), GroupAuthorizationFailed)
        assert isinstance(await refused(redrive(topic_id)), GroupAuthorizationFailed)
        authorizer.remove(acl(TOPIC, "t", DESCRIBE))
        authorizer.add(acl(GROUP, "g", READ))
        assert await describe(None) == []
        known, unknown = await describe([(topic_id, 0), (UNKNOWN_ID, 0)])
        assert isinstance(known.error, TopicAuthorizationFailed)
        assert isinstance(unknown.error, UnknownTopicId)
        authorizer.add(acl(TOPIC, "t", DESCRIBE))
        (known,) = await describe(None)
        assert known.counts is not None
        assert isinstance(await refused(redrive(topic_id)), TopicAuthorizationFailed)
        with pytest.raises(UnknownTopicId):
            await redrive(UNKNOWN_ID)
        authorizer.add(acl(TOPIC, "t", READ))
        result, _ = await redrive(topic_id)
        assert result.redriven == 0
        await services.leases.acknowledge("g", [Acknowledgement(receipt, ACCEPT)], caller=ADMIN)

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_delayed_records_are_listed_by_readers_and_changed_by_writers(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        delays, topic_id = services.delays, services.topics.find("t").topic_id.bytes
        record = RecordToPublish(b"secret", partition=0, delay_ms=3_600_000)
        await services.publish.publish_records("t", [record], timeout_ms=10_000, caller=ADMIN)

        async def listed(records_max: int, of: bytes = topic_id) -> Any:
            query = DelayQuery(of, 0, 0, 1 << 60, BEGIN, None, None, records_max, 100)
            return (await delays.list_pending([query], caller=ALICE))[0]

        def changes() -> list[Any]:
            common: Any = {"timeout_ms": 10_000, "caller": ALICE}
            return [
                delays.reschedule(topic_id, 0, [0], delay_ms=7_200_000, **common),
                delays.cancel(topic_id, 0, [0], **common),
            ]

        assert isinstance(await listed(1), TopicAuthorizationFailed)
        assert isinstance(await listed(1, UNKNOWN_ID), UnknownTopicId)
        authorizer.add(acl(TOPIC, "t", READ))
        assert (await listed(1)).records[0].value == b"secret"
        for change in changes():
            await refused(change)
        authorizer.remove(acl(TOPIC, "t", READ))
        authorizer.add(acl(TOPIC, "t", WRITE))
        assert isinstance(await listed(1), TopicAuthorizationFailed)
        assert (await listed(0)).count == 1  # WRITE implies DESCRIBE
        assert [await change for change in changes()] == [[0], [0]]

    run_authorized(tmp_path, work)


def schedule(name: str) -> Schedule:
    every = CatchUpMode.NONE
    return Schedule(UUID(int=7), name, "", 1_000, "", every, None, b"v", (), NOT_DUE_MS, NOT_DUE_MS)


@pytest.mark.row("A8")
@pytest.mark.full
def test_a_schedule_whose_owner_has_lost_its_right_waits_with_the_reason_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_manager, "SCHEDULE_RETRY_MS", 100)

    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        schedules, topic_id = services.schedules, services.topics.find("t").topic_id.bytes
        partition = services.partitions.find("t", None, 0)
        common: Any = {"timeout_ms": 10_000, "caller": ALICE}
        await refused(schedules.create(topic_id, 0, schedule("s"), **common))
        authorizer.add(acl(TOPIC, "t", WRITE))
        await schedules.create(topic_id, 0, schedule("s"), **common)
        await until(lambda: partition.end_offset > 2)
        authorizer.remove(acl(TOPIC, "t", WRITE))

        def failing() -> Any:
            sample = schedules.sample(partition)
            return [] if sample is None else sample.failing

        await until(failing)
        ((name, reason),) = failing()
        assert name == "s"
        assert reason.startswith("User:alice, who has created the schedule, is not allowed to WRITE")
        end = partition.end_offset
        for change in (schedules.pause, schedules.resume, schedules.delete):
            await refused(change(topic_id, 0, "s", **common))
        (answer,) = await schedules.list_schedules([ScheduleQuery(topic_id, 0)], times_max=1, caller=ALICE)
        assert isinstance(answer, TopicAuthorizationFailed)
        assert partition.end_offset == end, "nothing was published, and the schedule is unchanged"
        authorizer.add(acl(TOPIC, "t", WRITE))
        await until(lambda: partition.end_offset > end)
        assert not failing()

    run_authorized(tmp_path, work)


@pytest.mark.row("A8")
@pytest.mark.full
def test_dead_letters_wait_while_who_has_named_their_topic_may_not_write_to_it(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        await set_config(services, ResourceType.TOPIC, "u", "errors.deadletterqueue.group.enable", "true")
        await set_config(services, ResourceType.GROUP, "g", "mansio.deadletterqueue.enable", "true")
        authorizer.add(acl(GROUP, "g", Operation.ALTER_CONFIGS))

        async def name_target(topic: str, caller: Caller = ALICE) -> None:
            await set_config(services, ResourceType.GROUP, "g", DEAD_LETTER_TOPIC, topic, caller)

        for topic in ("u", "absent"):
            assert isinstance(await refused(name_target(topic)), TopicAuthorizationFailed)
        assert DEAD_LETTER_TOPIC not in services.group_configs.overrides("g")
        authorizer.add(acl(TOPIC, "u", WRITE))
        await name_target("u")
        assert services.group_configs.overrides("g")[DEAD_LETTER_OWNER] == "10.0.0.1 User:alice"

        dead_letters, target = services.dead_letters, services.partitions.find("u", None, 0)
        authorizer.remove(acl(TOPIC, "u", WRITE))
        await publish(services, ADMIN, b"poison")
        (receipt,) = await receipts(services, ADMIN, 1)
        await services.leases.acknowledge("g", [Acknowledgement(receipt, REJECT)], caller=ADMIN)
        await until(dead_letters.failing_share_partitions)
        ((_, waiting, reason),) = dead_letters.failing_share_partitions()
        assert (waiting, target.end_offset) == (1, 0)
        assert reason.startswith("User:alice, who has set errors.deadletterqueue.topic.name, is not allowed")
        # Who sets the known name without the right, or deletes what is no setting, does not become or free the owner.
        await name_target("u")
        changes = [Change(DEAD_LETTER_OWNER, ConfigOperation.DELETE, None)]
        group = ConfigResource(ResourceType.GROUP, "g")
        assert await services.configs.alter([ConfigAlteration(group, changes)], caller=ALICE) == [None]
        assert services.group_configs.overrides("g")[DEAD_LETTER_OWNER] == "10.0.0.1 User:alice"
        (described,) = services.configs.describe([ConfigQuery(group)], caller=ADMIN)
        assert DEAD_LETTER_OWNER not in {entry.name for entry in described.entries}
        authorizer.add(acl(TOPIC, "u", WRITE))
        dead_letters.handle_acl_change()
        await until(lambda: target.end_offset == 1)
        await until(lambda: not dead_letters.failing_share_partitions())

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_dead_letters_in_the_default_topic_need_no_right_and_another_owner_can_take_over(
    tmp_path: Path,
) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        await set_config(services, ResourceType.GROUP, "g", "mansio.deadletterqueue.enable", "true")
        await publish(services, ADMIN, b"poison")
        (receipt,) = await receipts(services, ADMIN, 1)
        await services.leases.acknowledge("g", [Acknowledgement(receipt, REJECT)], caller=ADMIN)
        await until(lambda: services.topics.state.topics.get("dlq.t"))
        await until(lambda: services.partitions.find("dlq.t", None, 0).end_offset == 1)
        authorizer.add(acl(GROUP, "g", Operation.ALTER_CONFIGS))
        authorizer.add(acl(TOPIC, "u", WRITE))
        for caller in (ALICE, ADMIN):
            await set_config(services, ResourceType.GROUP, "g", DEAD_LETTER_TOPIC, "u", caller)
            owner = services.group_configs.overrides("g")[DEAD_LETTER_OWNER]
            assert owner == f"10.0.0.1 {caller.session.principal}"

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_what_the_broker_does_for_itself_and_without_an_authorizer_has_no_owner(tmp_path: Path) -> None:
    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        authorization = services.authorization
        assert authorization.owner_of(BROKER_CALLER, "t") == ""
        assert owner_may_write(authorizer, "", "t")
        assert not owner_may_write(authorizer, f"{BOB.address} {BOB.session.principal}", "t")
        assert authorization.grants(BROKER_CALLER) is None
        with pytest.raises(UnknownTopicOrPartition):
            await services.leases.register_here("g", ["absent"], caller=BROKER_CALLER)

    run_authorized(tmp_path, work)


@pytest.mark.full
def test_who_may_write_through_a_group_only_is_refused_when_it_names_what_is_written_later(
    tmp_path: Path,
) -> None:
    def of_group(permission: Permission) -> Acl:
        return acl(TOPIC, "u", WRITE, permission)._replace(principal="Group:writers")

    async def work(services: BrokerServices, authorizer: Authorizer) -> None:
        member = Caller(ClientSession("alice", groups=("writers",)), address="10.0.0.1")
        authorizer.add(acl(GROUP, "g", Operation.ALTER_CONFIGS))
        authorizer.add(of_group(Permission.ALLOW))

        async def name_it() -> None:
            await set_config(services, ResourceType.GROUP, "g", DEAD_LETTER_TOPIC, "u", member)

        services.authorization.check(member, WRITE, TOPIC, "u")
        with pytest.raises(TopicAuthorizationFailed, match="without its groups"):
            await name_it()
        authorizer.add(acl(TOPIC, "u", WRITE))
        authorizer.add(of_group(Permission.DENY))
        with pytest.raises(TopicAuthorizationFailed):
            await name_it()
        assert DEAD_LETTER_OWNER not in services.group_configs.overrides("g")
        authorizer.remove(of_group(Permission.DENY))
        await name_it()
        assert services.group_configs.overrides("g")[DEAD_LETTER_OWNER] == "10.0.0.1 User:alice"

    run_authorized(tmp_path, work)
