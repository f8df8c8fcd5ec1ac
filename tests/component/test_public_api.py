"""Every public name and method of the client, called by a program that imports only public modules."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tools import public_api

import mansio
import mansio.blocking
from mansio import errors
from support.client_fixtures import QUICK_GROUPS, QUICK_MEMBER, run
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

CLIENT_MODULES = ("mansio", "mansio.blocking", "mansio.errors")
HOUR = timedelta(hours=1)

Called = set[str]


def public_functions(module_name: str) -> Iterator[tuple[Any, str, str]]:
    """Owner, attribute and full name of every public function, method and property; inherited ones with their class."""
    for name, value in public_api.public_objects(module_name).items():
        if inspect.isfunction(value):
            yield sys.modules[module_name], name, f"{module_name}.{name}"
        elif inspect.isclass(value) and not public_api.is_error(value):
            for member in public_api.members(value):
                if member.kind in {"method", "property"}:
                    owner = next(one for one in value.__mro__ if member.name in vars(one))
                    yield owner, member.name, f"{owner.__module__}.{owner.__name__}.{member.name}"


@pytest.fixture(scope="module")
def called() -> Iterator[Called]:
    """The names of the public functions that this module has called so far."""
    found: Called = set()
    with pytest.MonkeyPatch.context() as patch:
        wrapped = set()
        for module_name in CLIENT_MODULES:
            for owner, attribute, name in public_functions(module_name):
                if name not in wrapped:
                    wrapped.add(name)
                    patch.setattr(owner, attribute, recording(vars(owner)[attribute], name, found))
        yield found


def recording(original: Any, name: str, found: Called) -> Any:
    function: Any = original.fget if isinstance(original, property) else original

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals is globals():  # not the client's own calls
            found.add(name)
        return function(*args, **kwargs)

    return property(call) if isinstance(original, property) else call


@pytest.fixture(scope="module")
def broker(called: Called, tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    secrets_key = tmp_path_factory.mktemp("secrets") / "secrets.key"
    secrets_key.write_text("5a" * 32)
    secrets_key.chmod(0o600)
    broker = mansio.Broker(
        tmp_path_factory.mktemp("public"), secrets_key_file=str(secrets_key), **QUICK_GROUPS
    )
    broker.start()
    yield broker
    broker.close()


class Program:
    """The same program for both clients: each call is awaited if it needs to be."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.topic, self.group = f"{prefix}-orders", f"{prefix}-group"
        self.partition = mansio.TopicPartition(self.topic, 0)

    async def run(self) -> None:
        await self.publish()
        await self.describe()
        await self.consume()
        await self.change_offsets_and_groups()
        await self.receive()
        await self.change_quotas_and_settings()
        await self.change_pending_records()
        await self.trace_records()
        await self.register_schemas()
        await self.manage_schedules()
        await self.look_at_transactions()
        await self.transact()
        await self.delete()

    async def publish(self) -> None:
        client = self.client
        await done(client.admin.create_topic(self.topic, partitions=1))
        await done(client.admin.create_partitions(self.topic, 2))
        headers: mansio.HeadersLike = {"kind": "first"}
        at: mansio.RecordMetadata = await done(
            client.publish(self.topic, "one", key="ada", headers=headers, partition=0)
        )
        assert at == mansio.RecordMetadata(self.topic, 0, 0, at.timestamp_ms)
        records: list[mansio.Publishable] = [b"two", mansio.OutgoingRecord(b"three", key=b"ada")]
        assert len(await done(client.publish_many(self.topic, records))) == 2
        await done(client.flush())
        options = mansio.ProducerOptions(codec="lz4", backoff=mansio.Backoff(first_ms=10, jitter=0))
        assert options.is_idempotent
        assert options.backoff.delay_ms(1) == options.backoff.delay_seconds(1) * 1000 == 10
        producer = await done(client.producer(options))
        delivery = await done(producer.send(self.topic, b"four", partition=0))
        if isinstance(delivery, mansio.Delivery):
            assert await delivery
        else:
            assert isinstance(delivery, mansio.blocking.Delivery)
        assert delivery.result().topic == self.topic
        assert delivery.done()
        await done(producer.publish(self.topic, b"five", partition=1))
        await done(producer.publish_many(self.topic, [b"six"]))
        await done(producer.flush())
        assert isinstance(producer, mansio.Producer | mansio.blocking.Producer)
        assert producer.buffered_bytes == 0
        assert not producer.is_closed
        await done(producer.close())

    async def describe(self) -> None:
        admin = self.client.admin
        cluster: mansio.ClusterDescription = await done(admin.describe_cluster())
        assert [type(node) for node in cluster.brokers] == [mansio.Node]
        assert self.topic in await done(admin.list_topics())
        topic: mansio.TopicDescription = await done(admin.describe_topic(self.topic))
        assert topic in await done(admin.describe_topics())
        assert {type(partition) for partition in topic.partitions} == {mansio.PartitionMetadata}
        status: mansio.ClusterStatus = await done(admin.cluster.status())
        assert {type(one) for one in status.brokers} == {mansio.BrokerStatus}
        await done(admin.cluster.host_labels())
        features: mansio.ClusterFeatures = await done(admin.cluster.features())
        assert [type(one) for one in features.brokers] == [mansio.BrokerFeatures]
        await done(admin.cluster.raise_feature_level(features.level, dry_run=True))
        health: list[mansio.BrokerHealth] = await done(admin.cluster.health())
        assert [(one.is_session_held, one.session_lost_at, one.error) for one in health] == [
            (True, None, None)
        ]
        assert {type(problem) for one in health for problem in one.warnings} <= {mansio.HealthProblem}
        partitions: list[mansio.PartitionStatus] = await done(admin.cluster.partitions([self.topic]))
        assert not any(
            one.is_offline or one.is_under_replicated or one.is_under_min_isr for one in partitions
        )
        hot: mansio.HotPartitions = await done(admin.cluster.hot_partitions())
        assert (hot.partitions, [type(one) for one in hot.brokers]) == ((), [mansio.BrokerLoad])
        move = mansio.LeaderMove(1, 2, 0.9, 0.6)
        remedy = mansio.Remedy(mansio.RemedyKind.MOVE_LEADER, "full", move=move)
        one_key = mansio.HotKey(b"key", 0.5, 0.6)
        rates = (300.0, 50.0, 400.0, 4, 600.0)
        hot_one = mansio.HotPartition(
            self.topic, 0, 1, *rates, (1, 2), (1,), is_compacted=False, key_access="shown", keys=(one_key,),
            remedies=(remedy,),
        )  # fmt: skip
        assert hot_one.factor == 6.0
        assert move.gain == pytest.approx(1 / 3)
        kind: mansio.ElectionType = "preferred"
        results: list[mansio.ElectionResult] = await done(admin.cluster.elect_leaders(kind, [self.partition]))
        assert results[0].outcome == "not needed"
        replicas = {(one.topic, one.partition): one.replicas for one in partitions}
        moved: list[mansio.ReassignmentResult] = await done(admin.cluster.alter_reassignments(replicas))
        assert {one.error for one in moved} == {None}
        moving: list[mansio.Reassignment] = await done(admin.cluster.list_reassignments())
        assert [*moving, mansio.Reassignment(self.topic, 0, (1, 2), (1,), (2,))][0].target == (1,)
        with pytest.raises(errors.InvalidRequest):
            await done(admin.cluster.unregister(9))  # a single node is no cluster
        dirs: list[mansio.LogDir] = await done(admin.cluster.log_dirs())
        assert dirs[0].replica_bytes[self.partition] > 0
        ends: dict[Any, mansio.ListedOffset] = await done(admin.list_offsets([self.partition]))
        assert ends[self.partition].offset > 0

    async def consume(self) -> None:
        client = self.client
        start: mansio.StartAt = "earliest"
        message: mansio.Message
        async for message in items(client.consume(self.topic, from_=start, max_records=1)):
            assert message.timestamp > datetime.now(UTC) - HOUR
            headers: mansio.Headers = message.headers
            assert message.header("kind") == dict(headers).get("kind")
            assert message.record_id is None
        assigned: list[mansio.TopicPartition] = []
        callback: mansio.RebalanceCallback = assigned.extend
        unreadable: list[mansio.errors.UnreadableRecords] = []
        on_unreadable: mansio.UnreadableCallback = unreadable.append
        consumer = await done(
            client.consume(
                [self.topic],
                group=self.group,
                on_assigned=callback,
                on_unreadable=on_unreadable,
                to_end=True,
                **QUICK_MEMBER,
            )
        )
        assert isinstance(consumer, mansio.Consumer | mansio.blocking.Consumer)
        await done(consumer.start())
        assert await done(consumer.poll(timeout_ms=scaled(10) * 1000))
        assert self.partition in assigned
        assert await done(consumer.assignment()) == set(assigned)
        await done(consumer.pause(self.partition))
        await done(consumer.resume(self.partition))
        await done(consumer.seek(self.partition, 0))
        assert (await done(consumer.positions()))[self.partition] == 0
        assert self.partition in await done(consumer.lag())
        await done(consumer.commit({self.partition: 1}))
        assert not consumer.is_closed
        await self.look_at_group()
        async for batch in items(consumer.batches()):
            assert batch
        assert consumer.is_finished
        assert not unreadable
        await done(consumer.close())
        assert consumer.is_closed

    async def look_at_group(self) -> None:
        admin = self.client.admin
        group: mansio.GroupDescription = await done(admin.describe_group(self.group))
        assert {type(member) for member in group.members} == {mansio.GroupMember}
        listings: mansio.GroupListings = await done(admin.list_groups())
        assert listings.is_complete
        assert {type(listing) for listing in listings} == {mansio.GroupListing}
        offsets: dict[Any, mansio.CommittedOffset] = await done(admin.group_offsets(self.group))
        assert offsets[self.partition].offset == 1
        lags: dict[Any, mansio.PartitionLag] = await done(admin.group_lag(self.group))
        assert lags[self.partition].lag
        explained: mansio.GroupExplanation = await done(admin.explain_group(self.group, sample=0))
        assert explained.lag
        assert {type(finding) for finding in explained.findings} <= {mansio.GroupFinding}

    async def change_offsets_and_groups(self) -> None:
        admin = self.client.admin
        reset = await done(admin.reset_offsets(self.group, [self.topic], to="earliest"))
        assert reset[self.partition] == 0
        await done(admin.delete_offsets(self.group, [self.topic]))
        await done(admin.delete_group(self.group))

    async def receive(self) -> None:
        client, group = self.client, f"{self.group}-shared"
        shares = client.admin.shares
        settings = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "20"}
        await done(client.admin.alter_group_config(group, settings))
        receiver = await done(client.receive(self.topic, group=group))
        await done(receiver.start())
        messages: list[Any] = []
        while len(messages) < 4:
            messages += await done(receiver.poll(max_records=4 - len(messages)))
        first, second, third, fourth = messages
        assert isinstance(first, mansio.Leased | mansio.blocking.Leased)
        assert first.lease_until > datetime.now(UTC)
        members: mansio.ShareGroupDescription = await done(shares.describe(group))
        assert [type(member) for member in members.members] == [mansio.ShareMember]
        assert members.members[0].member_id == receiver.member_id
        partition = mansio.TopicPartition(self.topic, first.partition)
        leases: dict[Any, mansio.ShareLeases] = await done(shares.leases(group, [partition], ranges_max=9))
        assert {type(one) for one in leases[partition].holders} == {mansio.LeaseHolder}
        assert {type(one) for one in leases[partition].ranges} == {mansio.LeasedRange}
        assert receiver.held_count >= 4
        assert first.delivery_count == 1
        await done(first.extend())
        await done(first.ack())
        assert first.is_acknowledged
        assert not first.is_lost
        await done(receiver.ack([second]))
        await done(third.retry(after=0))
        await done(fourth.reject("poison"))
        poisoned = mansio.TopicPartition(self.topic, fourth.partition)
        result: mansio.RedriveResult | None = None
        while result is None or not result.redriven:
            result = await done(shares.redrive(group, poisoned, redrive_id="again"))
        async for batch in items(receiver.batches(max_records=1)):
            await done(receiver.ack(batch))
            break
        following = await done(receiver.receive_next(timeout_ms=1))
        assert following is None or following.delivery_count >= 1
        await done(receiver.stop())
        await done(receiver.close())
        assert receiver.is_closed
        offsets: dict[Any, mansio.ShareOffset] = await done(shares.offsets(group))
        await done(shares.alter_offsets(group, dict.fromkeys(offsets, 0)))
        await self.run_handler(group)
        await done(shares.delete_offsets(group, [self.topic]))

    async def run_handler(self, group: str) -> None:
        receiver = await done(self.client.receive(self.topic, group=group))
        handled = []

        def handle(message: Any) -> None:
            handled.append(message.value)
            loop.call_soon_threadsafe(receiver.stop)

        loop = asyncio.get_running_loop()
        mode: mansio.HandlerMode = "parallel"
        if isinstance(receiver, mansio.Receiver):
            handler: mansio.Handler = handle
            await receiver.run(handler, mode=mode)
        else:
            blocking_handler: mansio.blocking.Handler = handle
            assert isinstance(receiver, mansio.blocking.Receiver)
            await asyncio.to_thread(lambda: receiver.run(blocking_handler, mode=mode))
        assert handled

    async def change_quotas_and_settings(self) -> None:
        admin = self.client.admin
        default: mansio.DefaultEntity = mansio.DEFAULT_ENTITY
        await done(admin.quotas.set(client_id=default, values={"producer_byte_rate": 1e9}))
        quotas: list[mansio.Quota] = await done(admin.quotas.list())
        assert quotas[0].client_id is default
        await done(admin.quotas.delete(client_id=default))
        await done(admin.users.create("carol", "secret", mechanisms=["SCRAM-SHA-256"]))
        await done(admin.users.set_password("carol", "changed", previous_valid=HOUR))
        users: list[mansio.User] = await done(admin.users.list())
        assert users == [mansio.User("carol", {"SCRAM-SHA-256": 4_096})]
        key: mansio.SqsAccessKey = await done(admin.users.create_sqs_key("carol"))
        assert [each.key_id for each in await done(admin.users.list_sqs_keys("carol"))] == [key.key_id]
        await done(admin.users.delete_sqs_key(key.key_id))
        created: mansio.NewApiKey = await done(admin.users.create_api_key("carol", description="nightly"))
        keys: Sequence[mansio.UserApiKey] = await done(admin.users.list_api_keys())
        assert [*keys] == [created.api_key]
        await done(admin.users.delete_api_key(created.api_key.key_id))
        provider: mansio.TokenProvider = "token".upper
        assert provider()
        await done(admin.users.delete("carol"))
        read = mansio.Operation.READ, mansio.ResourceType.TOPIC, self.topic
        acl = mansio.Acl(
            read[1],
            mansio.PatternType.LITERAL,
            self.topic,
            "User:carol",
            "*",
            read[0],
            mansio.Permission.ALLOW,
        )
        selected = mansio.AclFilter(principal="User:carol")
        assert selected.matches(acl)
        for refused in (
            lambda: admin.acls.create([acl]),
            lambda: admin.acls.list(selected),
            lambda: admin.acls.delete([selected]),
        ):
            with pytest.raises(mansio.errors.SecurityDisabled):  # the broker has no authorizer
                await done(refused())
        decisions: Sequence[mansio.AclDecision] = await done(admin.acls.check([read], user="carol"))
        assert decisions == [mansio.AclDecision(is_allowed=True, is_open=True)]
        assert decisions[0].reason.startswith("no authorizer")
        await self.ask_for_tokens()
        await done(admin.alter_topic_config(self.topic, {"retention.ms": "60000000"}))
        config: dict[str, mansio.ConfigEntry] = await done(admin.describe_config(self.topic))
        assert config["retention.ms"].value == "60000000"
        await done(admin.alter_broker_config(None, {"log.retention.ms": "70000000"}))
        await done(admin.alter_broker_config(None, {"log.retention.ms": None}))

    async def ask_for_tokens(self) -> None:
        """Clients without authentication have no delegation tokens."""
        tokens = self.client.admin.tokens
        made: list[mansio.DelegationToken] = []
        with pytest.raises(errors.DelegationTokenRequestNotAllowed):
            made.append(await done(tokens.create(renewers=["bob"], max_lifetime=HOUR)))
        with pytest.raises(errors.DelegationTokenRequestNotAllowed):
            await done(tokens.renew(b"hmac", period=HOUR))
        with pytest.raises(errors.DelegationTokenRequestNotAllowed):
            await done(tokens.expire(b"hmac"))
        with pytest.raises(errors.DelegationTokenRequestNotAllowed):
            made.extend(await done(tokens.list()))
        assert not made
        now = datetime.now(UTC)
        token = mansio.DelegationToken("id", "alice", "alice", (), now, now, now, b"hmac")
        assert token.password == "aG1hYw=="

    async def change_pending_records(self) -> None:
        admin, topic = self.client.admin, f"{self.topic}-delayed"
        await done(admin.create_topic(topic, partitions=1, config={"mansio.delay.enable": "true"}))
        delays = admin.delays
        assert isinstance(delays, mansio.DelayAdmin | mansio.blocking.DelayAdmin)
        stored = [await done(self.client.publish(topic, b"%d" % n, delay=3600)) for n in range(3)]
        ids = [mansio.RecordId(one.partition, one.offset) for one in stored]
        page: mansio.PendingPage = await done(delays.list(topic, limit=2))
        assert [one.record_id for one in page.records] == ids[:2]
        found: dict[mansio.RecordId, mansio.PendingRecord] = await done(delays.describe(topic, ids[2:]))
        assert found[ids[2]].value == b"2"
        changed: mansio.ChangedRecords = await done(delays.cancel(topic, ids[:1]))
        assert changed.changed == (ids[0],)
        await done(delays.reschedule(topic, ids[1:2], delay=7200))
        await done(delays.deliver_now(topic, ids[2:]))
        counts: dict[int, mansio.PendingCounts] = await done(delays.counts(topic))
        assert counts[0].count == 1
        await done(admin.delete_topic(topic))

    async def register_schemas(self) -> None:
        schemas, subject, text = self.client.admin.schemas, f"{self.topic}-value", '"string"'
        assert isinstance(schemas, mansio.SchemaAdmin | mansio.blocking.SchemaAdmin)
        found: mansio.RegisteredVersion = await done(schemas.register(subject, text))
        assert (found.subject, found.version, found.text) == (subject, 1, text)
        assert await done(schemas.look_up(subject, text)) == found
        checked: mansio.CompatibilityResult = await done(schemas.check(subject, '"bytes"'))
        assert checked == mansio.CompatibilityResult(True)
        assert await done(schemas.subjects(subject)) == [subject]
        assert await done(schemas.versions(subject)) == [1]
        assert await done(schemas.version(subject)) == found
        by_id: mansio.SchemaById = await done(schemas.by_id(found.schema_id))
        assert by_id == await done(schemas.by_guid(found.guid))
        assert (subject, 1) in await done(schemas.uses(found.schema_id))
        if isinstance(schemas, mansio.SchemaAdmin):
            assert (await schemas.source.latest(subject)).schema_id == found.schema_id
        reference = mansio.SchemaReference("other", subject, 1)
        with pytest.raises(errors.SchemaRegistryRefusal):
            await done(schemas.register(f"{subject}-2", '"missing"', references=[reference]))
        await done(schemas.set_compatibility("FULL", subject))
        assert await done(schemas.compatibility(subject)) == "FULL"
        assert await done(schemas.request("mode", None, {})) == {"mode": "READWRITE"}
        for permanent in (False, True):
            assert await done(schemas.delete(subject, permanent=permanent)) == [1]

    async def trace_records(self) -> None:
        admin, topic = self.client.admin, f"{self.topic}-traced"
        await done(admin.create_topic(topic, partitions=1))
        stored = await done(self.client.publish(topic, b"v"))
        traces = admin.traces
        assert isinstance(traces, mansio.TraceAdmin | mansio.blocking.TraceAdmin)
        found: mansio.RecordTrace = await done(traces.record(topic, stored.partition, stored.offset))
        event: mansio.TraceEvent = found.events[0]
        assert event.kind == "published"
        with pytest.raises(errors.ResourceNotFound):
            await done(traces.last_failed("nobody"))
        await self.find_records(topic)
        await done(admin.delete_topic(topic))

    async def find_records(self, topic: str) -> None:
        traces = self.client.admin.traces
        producer = self.client.producer(mansio.ProducerOptions(record_ids=True))
        stored: mansio.RecordMetadata = await done(producer.publish(topic, b"v", key=b"k"))
        await done(producer.close())
        assert stored.record_id is not None
        seen: list[mansio.SearchProgress] = []
        for wanted in ({"key": b"k"}, {"record_id": stored.record_id}):
            found: list[mansio.FoundRecord] = await listed(
                traces.find(topic, **wanted, partition=0, limit=5, on_progress=seen.append)
            )
            assert [each.offset for each in found] == [stored.offset]
            assert found[0].timestamp.timestamp() * 1000 == stored.timestamp_ms
        skipped: tuple[mansio.SkippedRange, ...] = seen[-1].skipped
        assert not skipped
        with_progress = await listed(
            traces.search(topic, key="k", since=datetime.now(UTC), timeout_ms=60_000)
        )
        assert [type(each) for each in with_progress] == [mansio.SearchProgress]

    async def manage_schedules(self) -> None:
        admin, topic = self.client.admin, f"{self.topic}-scheduled"
        await done(admin.create_topic(topic, partitions=1, config={"mansio.delay.enable": "true"}))
        schedules = admin.schedules
        assert isinstance(schedules, mansio.ScheduleAdmin | mansio.blocking.ScheduleAdmin)
        catch_up: mansio.CatchUp = "last"
        created: mansio.Schedule = await done(
            schedules.create(
                topic, "report", b"v", cron="0 9 * * mon-fri", timezone="Europe/Berlin", catch_up=catch_up
            )
        )
        assert created.next_due == created.next_times[0]
        await done(schedules.pause(topic, "report"))
        assert (await done(schedules.describe(topic, "report"))).is_paused
        await done(schedules.resume(topic, "report"))
        assert [one.name for one in await done(schedules.list(topic))] == ["report"]
        await done(schedules.delete(topic, "report"))
        await done(admin.delete_topic(topic))

    async def look_at_transactions(self) -> None:
        transactions = self.client.admin.transactions
        assert isinstance(transactions, mansio.TransactionAdmin | mansio.blocking.TransactionAdmin)
        listed: mansio.TransactionListings = await done(transactions.list())
        ids: list[mansio.TransactionListing] = [*listed]
        assert listed.is_complete
        assert all(each.state == "CompleteCommit" for each in ids)
        hanging: tuple[mansio.HangingTransaction, ...] = await done(transactions.find_hanging([self.topic]))
        assert hanging == ()
        found = await done(transactions.describe_producers([self.partition]))
        producers: tuple[mansio.PartitionProducer, ...] = found[self.partition]
        assert all(each.transaction_start_offset is None for each in producers)
        with pytest.raises(errors.InvalidTxnState):
            await done(transactions.abort(self.partition, 0))
        with pytest.raises(errors.TransactionalIdNotFound):
            await done(transactions.describe("nobody"))
        with pytest.raises(errors.TransactionalIdNotFound):
            await done(transactions.terminate("nobody"))
        assert mansio.TransactionDescription("a", 1, "Ongoing", 1, 0, 60_000, 1, (self.partition,)).is_open

    async def transact(self) -> None:
        client, target, group = self.client, f"{self.topic}-copies", f"{self.group}-transactions"
        await done(client.admin.create_topic(target, partitions=1))
        consumer = await done(client.consume(self.topic, group=group, auto_commit=False, to_end=True))
        messages = await done(consumer.poll())
        async with entered(client.transaction(f"{group}-1")) as transaction:
            assert isinstance(transaction, mansio.Transaction | mansio.blocking.Transaction)
            delivery = await done(transaction.publish(target, b"1"))
            await done(transaction.publish_many(target, [b"2", b"3"]))
            await done(transaction.send_offsets(consumer))
        assert delivery.result().offset == 0
        await done(consumer.seek_to_committed())
        await done(consumer.close())

        def copy(messages: list[mansio.Message]) -> list[Any]:
            return [(target, message.value) for message in messages]

        handler: mansio.ProcessHandler | mansio.blocking.ProcessHandler = copy
        rest = await done(client.consume(self.topic, group=group, auto_commit=False, to_end=True))
        count = await done(client.process(rest, handler, transactional_id=f"{group}-1"))
        assert len(messages) + count == 6
        await done(rest.close())

    async def delete(self) -> None:
        admin = self.client.admin
        assert await done(admin.delete_records([self.partition], before=1)) == {self.partition: 1}
        await done(admin.delete_topic(self.topic))
        with pytest.raises(mansio.MansioError) as raised:
            await done(admin.describe_topic(self.topic))
        assert isinstance(raised.value, errors.UnknownTopicOrPartition)


async def done(result: Any) -> Any:
    """The result of a call of either client."""
    return await result if inspect.iscoroutine(result) else result


async def listed(items: Any) -> list[Any]:
    """What an iterator of either client yields."""
    return [each async for each in items] if hasattr(items, "__aiter__") else list(items)


@asynccontextmanager
async def entered(block: Any) -> AsyncIterator[Any]:
    """The block of a `with` statement of either client."""
    if hasattr(block, "__aenter__"):
        async with block as inner:
            yield inner
    else:
        with block as inner:
            yield inner


async def items(iterable: Any) -> AsyncIterator[Any]:
    """The elements of what either client iterates."""
    if hasattr(iterable, "__aiter__"):
        async for item in iterable:
            yield item
    else:
        for item in iterable:
            yield item


def check_kinds(client: Any, *kinds: type) -> None:
    admin = client.admin
    parts = (client, admin, admin.quotas, admin.cluster, admin.shares, admin.tokens, admin.users, admin.acls)
    for value, kind in zip(parts, kinds, strict=True):
        assert isinstance(value, kind)


def test_every_public_function_and_method_is_called(called: Called, broker: mansio.Broker) -> None:
    async def with_asyncio() -> None:
        client = mansio.connect(broker.address)
        async with client:
            check_kinds(
                client,
                mansio.Client,
                mansio.Admin,
                mansio.QuotaAdmin,
                mansio.ClusterAdmin,
                mansio.ShareAdmin,
                mansio.TokenAdmin,
                mansio.UserAdmin,
                mansio.AclAdmin,
            )
            await Program(client, "asyncio").run()
        await client.close()

    run(with_asyncio)
    client = mansio.blocking.connect(broker.address)
    check_kinds(
        client,
        mansio.blocking.Client,
        mansio.blocking.Admin,
        mansio.blocking.QuotaAdmin,
        mansio.blocking.ClusterAdmin,
        mansio.blocking.ShareAdmin,
        mansio.blocking.TokenAdmin,
        mansio.blocking.UserAdmin,
        mansio.blocking.AclAdmin,
    )
    run(Program(client, "blocking").run)
    client.close()
    with pytest.raises(mansio.blocking.LoopUnavailable):
        client.flush()
    assert isinstance(errors.error_for_code(3), errors.UnknownTopicOrPartition)
    assert (mansio.LeaseLost, mansio.DelayNotOffered) == (errors.LeaseLost, errors.DelayNotOffered)
    assert mansio.__version__
    broker.close()
    expected = {name for module_name in CLIENT_MODULES for _, _, name in public_functions(module_name)}
    assert sorted(expected - called) == [], "public, and not called here"


def test_every_public_name_is_used_above() -> None:
    tree = ast.parse(Path(__file__).read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for module_name in ("mansio", "mansio.blocking"):
        names = public_api.public_names(module_name)
        missing = (
            {f"{module_name}.{name}" for name in names} - used - {"mansio.errors"}
        )  # imported by its name
        assert sorted(missing) == []


def test_every_error_is_raised_with_one_line() -> None:
    for kind in public_api.public_objects("mansio.errors").values():
        if public_api.is_error(kind):
            with pytest.raises(mansio.MansioError) as raised:
                raise kind
            assert raised.value.message == str(raised.value)
            assert "\n" not in raised.value.message
    assert errors.BY_KAFKA_CODE[3] is errors.UnknownTopicOrPartition
